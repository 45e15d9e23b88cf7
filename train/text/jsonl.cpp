#include "train/text/jsonl.h"

#include <algorithm>
#include <array>
#include <nlohmann/json.hpp>
#include <utility>

#include "io/file.h"
#include "io/json.h"
#include "train/text/utf8.h"

namespace scruple::train {
namespace {

using Json = nlohmann::json;

constexpr std::array<const char*, 3> kFields = {"text", "prompt", "completion"};
constexpr const char* kForms = "{\"text\": ...} or {\"prompt\": ..., \"completion\": ...}";
constexpr std::size_t kNamed = 5;  // unknown members that a message names

// What nlohmann's parser meets on its way through one line. Only the three texts are kept.
class Events : public Json::json_sax_t {
 public:
  Events(std::string_view line, std::string place) : line_(line), place_(std::move(place)) {}

  JsonDocument document() {
    auto& [text, prompt, completion] = texts_;
    if (text && (prompt || completion))
      refuse("it has \"text\" and \"", prompt ? "prompt" : "completion", "\"; one of them must go");
    if (text) return {{}, std::move(*text)};
    if (prompt && completion) return {std::move(prompt), std::move(*completion)};
    if (prompt || completion)
      refuse("it has a \"", prompt ? "prompt" : "completion", "\" and no \"",
             prompt ? "completion" : "prompt", "\"");
    refuse("it has ", others_.empty() ? "no members" : others_, "; a line must be ", kForms);
  }

  bool null() override { return value("null"); }
  bool boolean(bool) override { return value("true or false"); }
  bool number_integer(number_integer_t) override { return value("a number"); }
  bool number_unsigned(number_unsigned_t) override { return value("a number"); }
  bool number_float(number_float_t, const string_t&) override { return value("a number"); }
  bool binary(binary_t&) override { return value("binary"); }
  bool string(string_t& text) override {
    if (field_ < kFields.size())
      texts_[field_] = std::move(text);
    else
      value("text");
    return true;
  }
  bool start_array(std::size_t) override { return value("a list") && ++depth_ > 0; }
  bool start_object(std::size_t) override {
    if (depth_ > 0) value("an object");
    return ++depth_ > 0;
  }
  bool end_array() override { return --depth_ >= 0; }
  bool end_object() override { return --depth_ >= 0; }
  bool key(string_t& name) override {
    if (depth_ != 1) return true;
    field_ = 0;
    while (field_ < kFields.size() && name != kFields[field_]) ++field_;
    if (field_ == kFields.size())
      note(name);
    else if (texts_[field_])
      refuse("\"", name, "\" stands twice");
    return true;
  }
  bool parse_error(std::size_t at, const std::string&, const Json::exception&) override {
    // nlohmann's own words repeat what was read, however long it is.
    const char there = at > 0 && at <= line_.size() ? line_[at - 1] : '\0';
    refuse("it is no JSON at byte ", at, at > line_.size() ? ", its end" : "",
           there > ' ' && there < 127 ? std::string(", '") + there + "'" : "", "; a line must be ", kForms);
  }

 private:
  template <class... Parts>
  [[noreturn]] void refuse(const Parts&... parts) const {
    io::fail(place_, ": ", parts...);
  }
  bool value(const char* kind) {
    if (depth_ == 0) refuse("it is ", kind, "; a line must be ", kForms);
    if (field_ < kFields.size()) refuse("\"", kFields[field_], "\" is ", kind, "; it must be text");
    return true;
  }
  void note(const std::string& name) {
    if (++unknown_ > kNamed + 1) return;
    others_ += (unknown_ == 1 ? "" : ", ") + (unknown_ > kNamed ? "..." : io::shown(name));
  }

  std::string_view line_;
  std::string place_, others_;
  std::array<std::optional<std::string>, 3> texts_;
  std::size_t field_ =
      kFields.size();  // whose value comes next or is being read; at the end: another member's
  std::size_t unknown_ = 0;
  std::int64_t depth_ = 0;
};

}  // namespace

JsonLines::JsonLines(std::string_view content, std::string name) : content_(content), name_(std::move(name)) {
  constexpr std::string_view kMark = "\xEF\xBB\xBF";  // a byte order mark
  if (content_.starts_with(kMark)) at_ = kMark.size();
}

std::string JsonLines::place() const { return name_ + ", line " + std::to_string(number_); }

bool JsonLines::next() {
  while (at_ < content_.size()) {
    const std::size_t end = std::min(content_.find('\n', at_), content_.size());
    line_ = content_.substr(at_, end - at_);
    at_ = std::min(end + 1, content_.size());
    ++number_;
    if (line_.find_first_not_of(" \t\r") != line_.npos) return true;
  }
  return false;
}

JsonDocument JsonLines::document() {
  std::int64_t replaced = 0;
  const std::string valid = valid_utf8(line_, replaced);
  replaced_ += replaced;
  Events events(valid, place());
  Json::sax_parse(valid, &events);
  return events.document();
}

}  // namespace scruple::train
