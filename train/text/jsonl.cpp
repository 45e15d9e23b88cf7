#include "train/text/jsonl.h"

#include <algorithm>
#include <array>
#include <limits>
#include <nlohmann/json.hpp>
#include <utility>
#include <vector>

#include "io/file.h"
#include "io/json.h"
#include "train/text/utf8.h"

namespace scruple::train {
namespace {

using Json = nlohmann::json;

constexpr std::array<const char*, 3> kFields = {"text", "prompt", "completion"};
// Those that are kept as trees; "conversations" is what others call messages.
constexpr std::array<const char*, 3> kTrees = {"messages", "conversations", "tools"};
constexpr const char* kForms =
    "{\"text\": ...}, {\"prompt\": ..., \"completion\": ...} or {\"messages\": [...]}";
constexpr std::size_t kNamed = 5;  // unknown members that a message names

// The value of one member, from its events.
class Tree {
 public:
  bool is_done() const { return done_; }
  bool is_open() const { return !open_.empty(); }
  const jinja::Value& value() const { return value_; }
  std::size_t depth() const { return open_.size(); }

  void begin(bool is_list) { open_.push_back({is_list, {}, {}, ""}); }
  void key(std::string name) { open_.back().key = std::move(name); }
  void end() {
    Level level = std::move(open_.back());
    open_.pop_back();
    put(level.is_list ? jinja::Value::list(std::move(level.items))
                      : jinja::Value::dict(std::move(level.members.members)));
  }
  void put(jinja::Value value) {
    if (open_.empty()) {
      value_ = std::move(value);
      done_ = true;
    } else if (open_.back().is_list) {
      open_.back().items.push_back(std::move(value));
    } else {
      open_.back().members.set(open_.back().key, std::move(value));
    }
  }

 private:
  struct Level {
    bool is_list;
    std::vector<jinja::Value> items;
    jinja::Space members;
    std::string key;
  };
  std::vector<Level> open_;
  jinja::Value value_;
  bool done_ = false;
};

// What nlohmann's parser meets on its way through one line. Only the texts and the messages are kept.
class Events : public Json::json_sax_t {
 public:
  Events(std::string_view line, std::string place) : line_(line), place_(std::move(place)) {}

  JsonDocument document() {
    auto& [text, prompt, completion] = texts_;
    const auto& [messages, conversations, tools] = trees_;
    if (messages.is_done() || conversations.is_done()) {
      // A prompt alone is a copy of the first message, as in UltraChat.
      if (text || completion || (messages.is_done() && conversations.is_done()))
        refuse("it has \"", messages.is_done() ? "messages" : "conversations", "\" and \"",
               text         ? "text"
               : completion ? "completion"
                            : "conversations",
               "\"; one of them must go");
      const jinja::Value& said = messages.is_done() ? messages.value() : conversations.value();
      return {{}, {}, conversation_of(said, tools.value(), place_)};
    }
    if (text && (prompt || completion))
      refuse("it has \"text\" and \"", prompt ? "prompt" : "completion", "\"; one of them must go");
    if (text) return {{}, std::move(*text), {}};
    if (prompt && completion) return {std::move(prompt), std::move(*completion), {}};
    if (prompt || completion)
      refuse("it has a \"", prompt ? "prompt" : "completion", "\" and no \"",
             prompt ? "completion" : "prompt", "\"");
    refuse("it has ", others_.empty() ? "no members" : others_, "; a line must be ", kForms);
  }

  bool null() override { return keeps() ? put(jinja::None{}) : value("null"); }
  bool boolean(bool flag) override { return keeps() ? put(flag) : value("true or false"); }
  bool number_integer(number_integer_t number) override {
    if (!keeps()) return value("a number");
    if (number == std::numeric_limits<std::int64_t>::min()) refuse_number();
    return put(std::int64_t{number});
  }
  bool number_unsigned(number_unsigned_t number) override {
    if (!keeps()) return value("a number");
    if (number > static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max())) refuse_number();
    return put(static_cast<std::int64_t>(number));
  }
  bool number_float(number_float_t number, const string_t& digits) override {
    if (!keeps()) return value("a number");
    if (digits.find_first_of(".eE") == digits.npos) refuse_number();
    return put(double{number});
  }
  bool binary(binary_t&) override { return value("binary"); }
  bool string(string_t& text) override {
    if (keeps()) return put(std::move(text));
    if (field_ < kFields.size())
      texts_[field_] = std::move(text);
    else
      value("text");
    return true;
  }
  bool start_array(std::size_t) override {
    if (keeps()) return open(/*is_list=*/true);
    return value("a list") && ++depth_ > 0;
  }
  bool start_object(std::size_t) override {
    if (keeps()) return open(/*is_list=*/false);
    if (depth_ > 0) value("an object");
    return ++depth_ > 0;
  }
  bool end_array() override { return close(); }
  bool end_object() override { return close(); }
  bool key(string_t& name) override {
    if (tree_ < kTrees.size() && trees_[tree_].is_open()) return trees_[tree_].key(std::move(name)), true;
    if (depth_ != 1) return true;
    field_ = 0;
    while (field_ < kFields.size() && name != kFields[field_]) ++field_;
    tree_ = 0;
    while (tree_ < kTrees.size() && name != kTrees[tree_]) ++tree_;
    const bool is_known = field_ < kFields.size() || tree_ < kTrees.size();
    if (!is_known || name == "tools") note(name);
    if (!is_known) return true;
    if (field_ < kFields.size() ? texts_[field_].has_value() : trees_[tree_].is_done())
      refuse("\"", name, "\" stands twice");
    return true;
  }
  bool parse_error(std::size_t at, const std::string&, const Json::exception& error) override {
    // nlohmann's own words repeat what was read, however long it is.
    if (std::string_view(error.what()).find("invalid string: surrogate U+") != std::string_view::npos)
      refuse("it has half of a surrogate pair (\\uD800 to \\uDFFF) at byte ", at,
             ", which is no character; leave it out");
    const char there = at > 0 && at <= line_.size() ? line_[at - 1] : '\0';
    refuse("it is no JSON at byte ", at, at > line_.size() ? ", its end" : "",
           there > ' ' && there < 127 ? std::string(", '") + there + "'" : "", "; a line must be ", kForms);
  }

 private:
  template <class... Parts>
  [[noreturn]] void refuse(const Parts&... parts) const {
    io::fail(place_, ": ", parts...);
  }
  [[noreturn]] void refuse_number() const { refuse("it has a whole number of more than 64 bits"); }
  // Whether what comes belongs to a tree.
  bool keeps() const { return depth_ == 1 && tree_ < kTrees.size(); }
  bool put(jinja::Value value) {
    trees_[tree_].put(std::move(value));
    return true;
  }
  bool open(bool is_list) {
    if (trees_[tree_].depth() >= static_cast<std::size_t>(io::kMaxJsonDepth))
      refuse("\"", kTrees[tree_], "\" is nested deeper than ", io::kMaxJsonDepth);
    trees_[tree_].begin(is_list);
    return true;
  }
  bool close() {
    if (tree_ < kTrees.size() && trees_[tree_].is_open()) return trees_[tree_].end(), true;
    return --depth_ >= 0;
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
  std::array<Tree, 3> trees_;
  std::size_t tree_ = kTrees.size();  // in the same way
  std::size_t unknown_ = 0;
  std::int64_t depth_ = 0;
};

}  // namespace

JsonLines::JsonLines(std::string_view content, std::string name, std::int64_t number)
    : content_(content), name_(std::move(name)), number_(number) {
  constexpr std::string_view kMark = "\xEF\xBB\xBF";  // a byte order mark
  if (number == 0 && content_.starts_with(kMark)) at_ = kMark.size();
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
