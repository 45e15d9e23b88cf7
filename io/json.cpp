#include "io/json.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <utility>
#include <vector>

#include "io/utf8.h"

namespace scruple::io {
namespace {

bool is_digit(char c) { return c >= '0' && c <= '9'; }

void append_utf8(std::string& out, unsigned code) {
  const auto put = [&](unsigned byte) { out.push_back(static_cast<char>(byte)); };
  if (code < 0x80) {
    put(code);
  } else if (code < 0x800) {
    put(0xc0 | code >> 6), put(0x80 | (code & 0x3f));
  } else if (code < 0x10000) {
    put(0xe0 | code >> 12), put(0x80 | (code >> 6 & 0x3f)), put(0x80 | (code & 0x3f));
  } else {
    put(0xf0 | code >> 18), put(0x80 | (code >> 12 & 0x3f)), put(0x80 | (code >> 6 & 0x3f)),
        put(0x80 | (code & 0x3f));
  }
}

}  // namespace

std::string shown(std::string_view name) {
  constexpr std::size_t kShown = 80;
  std::size_t end = std::min(name.size(), kShown);
  while (end > 0 && end < name.size() && (name[end] & 0xc0) == 0x80) --end;  // no character is cut
  std::string text = "\"" + std::string(name.substr(0, end));
  for (char& c : text)
    if (static_cast<unsigned char>(c) < ' ' || c == '\x7f') c = '?';
  return text + (name.size() > kShown ? "...\"" : "\"");
}

std::string json_text(std::string_view text) {
  std::string out = "\"";
  for (std::string_view rest = text; !rest.empty();) {
    const auto [length, valid] = first_utf8(rest);
    if (!valid)
      fail("the name or text ", shown(text), " is not valid UTF-8; a file of this format cannot hold it");
    const char c = rest.front();
    if (c == '"' || c == '\\') {
      out += '\\', out += c;
    } else if (static_cast<unsigned char>(c) < ' ') {
      constexpr const char* kDigits = "0123456789abcdef";
      out += "\\u00", out += kDigits[c >> 4], out += kDigits[c & 0xf];
    } else {
      out += rest.substr(0, length);
    }
    rest.remove_prefix(length);
  }
  return out + "\"";
}

std::string written(double value) {
  if (!std::isfinite(value)) fail("a number to be written is not finite; JSON cannot hold it");
  char text[32];
  const auto [end, problem] = std::to_chars(text, text + sizeof text, value);
  return {text, end};
}

std::string json_numbers(const std::vector<std::int64_t>& values) {
  return json_array(values, [](std::int64_t value) { return std::to_string(value); });
}

std::string json_members(const std::vector<JsonMember>& members, std::string_view between) {
  return joined(members, between,
                [](const JsonMember& member) { return json_text(member.key) + ":" + member.value; });
}

std::string json_object(const std::vector<JsonMember>& members, std::string_view between) {
  return "{" + json_members(members, between) + "}";
}

// ---- Reading ----

char JsonReader::next() {
  while (at_ < text_.size() &&
         (text_[at_] == ' ' || text_[at_] == '\t' || text_[at_] == '\n' || text_[at_] == '\r'))
    ++at_;
  return at_ < text_.size() ? text_[at_] : '\0';
}

bool JsonReader::take(char wanted) {
  if (next() != wanted || at_ == text_.size()) return false;
  ++at_;
  return true;
}

std::string JsonReader::found() {
  switch (const char c = next()) {
    case '{': return "an object";
    case '[': return "an array";
    case '"': return "a string";
    case 't':
    case 'f': return "a boolean";
    case 'n': return "null";
    case '\0': return at_ == text_.size() ? "the end of the file" : "a zero byte";
    default: return c == '-' || is_digit(c) ? "a number" : "the character " + shown({&c, 1});
  }
}

void JsonReader::expect(char wanted, const char* what, const char* kind) {
  if (!take(wanted)) refuse(what, " must be ", kind, ", and ", found(), " was found");
}

void JsonReader::members(const char* what, const std::function<void(std::string)>& member) {
  expect('{', what, "an object");
  if (take('}')) return;
  do {
    std::string key = string("a key");
    if (!take(':')) refuse("a ':' must follow the key ", shown(key), ", and ", found(), " was found");
    member(std::move(key));
  } while (take(','));
  if (!take('}')) refuse("',' or '}' must come next in ", what, ", and ", found(), " was found");
}

void JsonReader::fields(const char* what, std::initializer_list<Field> wanted) {
  std::vector<bool> seen(wanted.size());
  members(what, [&](const std::string& key) {
    std::size_t i = 0;
    while (i < wanted.size() && key != wanted.begin()[i].name) ++i;
    if (i == wanted.size()) refuse(what, " has a field ", shown(key), ", which has no place there");
    if (seen[i]) refuse(what, ": ", shown(key), " stands twice");
    seen[i] = true;
    wanted.begin()[i].read();
  });
  for (std::size_t i = 0; i < wanted.size(); ++i)
    if (!seen[i] && !wanted.begin()[i].optional) refuse(what, " has no ", shown(wanted.begin()[i].name));
}

void JsonReader::elements(const char* what, const std::function<void()>& element) {
  expect('[', what, "an array");
  if (take(']')) return;
  do {
    element();
  } while (take(','));
  if (!take(']')) refuse("',' or ']' must come next in ", what, ", and ", found(), " was found");
}

// Four digits of a \u escape.
unsigned JsonReader::escaped_unit() {
  unsigned unit = 0;
  const std::string_view digits = text_.substr(at_, 4);
  const auto [end, problem] = std::from_chars(digits.data(), digits.data() + digits.size(), unit, 16);
  if (problem != std::errc() || end != digits.data() + 4) refuse("\\u must be followed by four hex digits");
  at_ += 4;
  return unit;
}

void JsonReader::escape(std::string& out) {
  constexpr std::string_view kLetters = "\"\\/bfnrt", kMeanings = "\"\\/\b\f\n\r\t";
  const char letter = at_ < text_.size() ? text_[at_] : '\0';
  if (const std::size_t known = kLetters.find(letter); known != kLetters.npos) {
    out += kMeanings[known];
    ++at_;
    return;
  }
  if (letter != 'u') refuse("a string has an escape that JSON does not know");
  ++at_;
  unsigned code = escaped_unit();
  if (code >= 0xd800 && code <= 0xdbff && text_.substr(at_, 2) == "\\u") {
    at_ += 2;
    const unsigned low = escaped_unit();
    if (low < 0xdc00 || low > 0xdfff) refuse("a string has half a surrogate pair");
    code = 0x10000 + ((code - 0xd800) << 10) + (low - 0xdc00);
  } else if (code >= 0xd800 && code <= 0xdfff) {
    refuse("a string has half a surrogate pair");
  }
  append_utf8(out, code);
}

std::string JsonReader::string(const char* what) {
  expect('"', what, "a string");
  std::string out;
  for (;;) {
    // Up to the next quote or escape at once: what a string takes is its own length.
    std::size_t stop = at_;
    while (stop < text_.size() && text_[stop] != '"' && text_[stop] != '\\') {
      const auto [length, valid] = first_utf8(text_.substr(stop, 4));
      if (!valid || static_cast<unsigned char>(text_[stop]) < ' ') {
        at_ = stop;
        refuse(what, " has a byte that is not valid in a JSON string");
      }
      stop += length;
    }
    out.append(text_, at_, stop - at_);
    at_ = stop;
    if (at_ == text_.size()) refuse(what, " is a string without an end");
    if (text_[at_++] == '"') return out;
    escape(out);
  }
}

// By JSON's own grammar: no plus, no leading zeros, digits on both sides of a point.
std::string_view JsonReader::number_text(const char* what) {
  const char first = next();
  if (first != '-' && !is_digit(first)) refuse(what, " must be a number, and ", found(), " was found");
  std::size_t end = at_ + (first == '-' ? 1 : 0);
  const auto digits = [&] {
    const std::size_t begin = end;
    while (end < text_.size() && is_digit(text_[end])) ++end;
    if (end == begin) refuse(what, " is not a number that JSON knows");
  };
  const std::size_t whole = end;
  digits();
  if (text_[whole] == '0' && end > whole + 1) refuse(what, " is a number that begins with 0");
  if (end < text_.size() && text_[end] == '.') ++end, digits();
  if (end < text_.size() && (text_[end] == 'e' || text_[end] == 'E')) {
    ++end;
    if (end < text_.size() && (text_[end] == '+' || text_[end] == '-')) ++end;
    digits();
  }
  const std::string_view number = text_.substr(at_, end - at_);
  at_ = end;
  return number;
}

std::uint64_t JsonReader::unsigned_integer(const char* what, std::uint64_t most) {
  const std::string_view text = number_text(what);
  std::uint64_t value = 0;
  const auto [end, problem] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (problem != std::errc() || end != text.data() + text.size() || value > most)
    refuse(what, " is ", text.substr(0, 40), "; it must be a whole number from 0 to ", most);
  return value;
}

double JsonReader::number(const char* what) {
  const std::string_view text = number_text(what);
  double value = 0;
  const auto [end, problem] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (problem != std::errc() || end != text.data() + text.size())
    refuse(what, " is ", text.substr(0, 40), ", which no double can hold");
  return value;
}

bool JsonReader::null() {
  if (next() != 'n' || text_.substr(at_, 4) != "null") return false;
  at_ += 4;
  return true;
}

void JsonReader::end() {
  next();
  if (at_ != text_.size()) refuse("the JSON text has ended, and ", found(), " follows");
}

}  // namespace scruple::io
