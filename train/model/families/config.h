// A config.json of Hugging Face's, read key by key. It may be hostile: what is wrong is thrown as
// std::runtime_error with the file, the key, what stands there and what it must be.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace scruple::train {

class Config {
 public:
  // `place`: the file, for messages.
  Config(const std::string& text, const std::string& place);

  bool has(const char* key) const;  // and it is not null
  std::int64_t integer(const char* key) const;
  std::int64_t integer(const char* key, std::int64_t otherwise) const;
  double positive(const char* key) const;
  double positive(const char* key, double otherwise) const;
  bool flag(const char* key, bool otherwise) const;
  std::string string(const char* key, const std::string& otherwise) const;
  std::vector<std::string> strings(const char* key) const;  // none where the key is not there
  Config object(const char* key) const;                     // empty where the key is not there
  // For keys whose null says something: `missing` and `null` stand for it.
  std::int64_t integer(const char* key, std::int64_t missing, std::int64_t null) const;
  // What decides the arithmetic and has one value that the trainer computes with, also where it is missing.
  void expect(const char* key, const nlohmann::json& value) const;

  [[noreturn]] void refuse(const char* key, const std::string& wanted) const;
  const std::string& place() const { return place_; }  // the file, and the key of an object in it

 private:
  Config(std::string place, nlohmann::json root) : place_(std::move(place)), root_(std::move(root)) {}

  std::string place_;
  nlohmann::json root_;
};

}  // namespace scruple::train
