#include "train/model/families/config.h"

#include "io/file.h"
#include "train/json_object.h"

namespace scruple::train {

Config::Config(const std::string& text, const std::string& place)
    : place_(place), root_(json_object(place, text)) {}

void Config::refuse(const char* key, const std::string& wanted) const {
  const auto found = root_.find(key);
  const std::string is =
      found == root_.end()
          ? "missing"
          : found->dump(-1, ' ', false, nlohmann::json::error_handler_t::replace).substr(0, 80);
  io::fail(place_, ": ", key, " is ", is, "; ", wanted);
}

bool Config::has(const char* key) const {
  const auto found = root_.find(key);
  return found != root_.end() && !found->is_null();
}

std::int64_t Config::integer(const char* key) const {
  if (!has(key) || !root_[key].is_number_integer()) refuse(key, "it must be an integer");
  return root_[key].get<std::int64_t>();
}

std::int64_t Config::integer(const char* key, std::int64_t otherwise) const {
  return has(key) ? integer(key) : otherwise;
}

double Config::positive(const char* key) const {
  const double value = has(key) && root_[key].is_number() ? root_[key].get<double>() : 0;
  if (!(value > 0)) refuse(key, "it must be a number above 0");
  return value;
}

double Config::positive(const char* key, double otherwise) const {
  return has(key) ? positive(key) : otherwise;
}

bool Config::flag(const char* key, bool otherwise) const {
  if (!has(key)) return otherwise;
  if (!root_[key].is_boolean()) refuse(key, "it must be true or false");
  return root_[key].get<bool>();
}

std::string Config::string(const char* key, const std::string& otherwise) const {
  if (!has(key)) return otherwise;
  if (!root_[key].is_string()) refuse(key, "it must be a string");
  return root_[key].get<std::string>();
}

std::vector<std::string> Config::strings(const char* key) const {
  std::vector<std::string> list;
  if (!has(key)) return list;
  if (!root_[key].is_array()) refuse(key, "it must be an array of strings");
  for (const nlohmann::json& element : root_[key]) {
    if (!element.is_string()) refuse(key, "it must be an array of strings");
    list.push_back(element.get<std::string>());
  }
  return list;
}

Config Config::object(const char* key) const {
  if (!has(key)) return {place_ + ": " + key, nlohmann::json::object()};
  if (!root_[key].is_object()) refuse(key, "it must be an object");
  return {place_ + ": " + key, root_[key]};
}

std::int64_t Config::integer(const char* key, std::int64_t missing, std::int64_t null) const {
  return integer(key, root_.contains(key) ? null : missing);
}

void Config::expect(const char* key, const nlohmann::json& value) const {
  const auto found = root_.find(key);
  if (found != root_.end() && *found != value)
    refuse(key, "this trainer computes with " + value.dump() + " only");
}

}  // namespace scruple::train
