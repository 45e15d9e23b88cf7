// JSON, both ways. It is written from texts that are JSON already: one function for each kind of value.
//
// It comes from files that may be hostile: read in one pass, by the kind of value that must come next. No tree is
// built, so memory is spent only on what the caller keeps; depth is the caller's, never the file's. Problems
// are thrown as std::runtime_error with the file, the place and what was found.
#pragma once

#include <cstdint>
#include <functional>
#include <initializer_list>
#include <string>
#include <string_view>
#include <vector>

#include "io/file.h"

namespace scruple::io {

// Of every JSON that is read as a tree, which is copied, written and destroyed level by level. Files of models have
// fewer than ten.
inline constexpr int kMaxJsonDepth = 32;

// `text` in quotes, with what JSON escapes. Throws where it is not valid UTF-8.
std::string json_text(std::string_view text);
// The shortest text that reads back as the same double. Throws where it is not finite: JSON has no word for it.
std::string written(double value);

std::string json_numbers(const std::vector<std::int64_t>& values);  // an array

// What `write` makes of each element of a list.
template <class List, class Write>
std::string joined(const List& list, std::string_view between, const Write& write) {
  std::string text;
  for (const auto& element : list) {
    if (!text.empty()) text += between;
    text += write(element);
  }
  return text;
}

struct JsonMember {
  std::string_view key;
  std::string value;  // JSON
};
// The members of an object, without the braces around them.
std::string json_members(const std::vector<JsonMember>& members, std::string_view between = ",");
std::string json_object(const std::vector<JsonMember>& members, std::string_view between = ",");
template <class List, class Write>
std::string json_array(const List& list, const Write& write, std::string_view between = ",") {
  return "[" + joined(list, between, write) + "]";
}

// For messages: names come from files that may be hostile, so neither their length nor their bytes are
// trusted.
std::string shown(std::string_view name);

class JsonReader {
 public:
  // `path` names the file in messages. Both must outlive this.
  JsonReader(std::string_view text, const std::string& path) : text_(text), path_(path) {}

  struct Field {
    const char* name;
    std::function<void()> read;  // takes the value
    bool optional = false;
  };

  // An object of these fields, each at most once, in any order; `what` names it in messages.
  void fields(const char* what, std::initializer_list<Field> wanted);
  // An object of any keys; `member` takes the value. Whether a key may stand twice is its affair.
  void members(const char* what, const std::function<void(std::string key)>& member);
  void elements(const char* what, const std::function<void()>& element);
  std::string string(const char* what);
  std::uint64_t unsigned_integer(const char* what, std::uint64_t most);
  double number(const char* what);  // finite
  bool null();                      // takes a null, where one comes next
  void end();                       // nothing but white space is left

  template <class... Parts>
  [[noreturn]] void refuse(const Parts&... parts) const {
    fail(path_, ": ", parts..., " (at byte ", at_, ")");
  }

 private:
  char next();  // skips white space; '\0' at the end
  bool take(char wanted);
  void expect(char wanted, const char* what, const char* kind);
  std::string_view number_text(const char* what);
  std::string found();  // what comes next, for messages
  unsigned escaped_unit();
  void escape(std::string& out);

  std::string_view text_;
  const std::string& path_;
  std::size_t at_ = 0;
};

}  // namespace scruple::io
