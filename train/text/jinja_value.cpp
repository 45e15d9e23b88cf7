#include "train/text/jinja_value.h"

#include <utf8proc.h>

#include <algorithm>
#include <charconv>
#include <cmath>

#include "io/file.h"
#include "train/text/utf8.h"

namespace scruple::train::jinja {
namespace {

using io::fail;

constexpr int kMostDepth = 64;  // of lists in lists

constexpr std::int64_t kMostWeight = std::int64_t{1} << 32;
constexpr std::size_t kMostText = std::size_t{1} << 27;  // bytes
constexpr std::size_t kMostParts = 1'000'000;

int depth_of(const Value& value) {
  if (value.space() != nullptr) fail("a namespace inside another value is not known here");
  if (const List* list = value.list()) return list->depth;
  if (const Dict* dict = value.dict()) return dict->depth;
  return 0;
}

int checked(int depth) {
  if (depth > kMostDepth) fail("lists in lists are deeper than ", kMostDepth);
  return depth;
}

// Those of Python's str.isspace.
bool is_space(char32_t c) {
  return (c >= 0x09 && c <= 0x0D) || (c >= 0x1C && c <= 0x20) || c == 0x85 || c == 0xA0 || c == 0x1680 ||
         (c >= 0x2000 && c <= 0x200A) || c == 0x2028 || c == 0x2029 || c == 0x202F || c == 0x205F ||
         c == 0x3000;
}

// Those that Python's repr() writes as they are.
bool is_printable(char32_t c) {
  const utf8proc_category_t kind = utf8proc_category(static_cast<utf8proc_int32_t>(c));
  return c == ' ' ||
         (kind != UTF8PROC_CATEGORY_CN && kind != UTF8PROC_CATEGORY_ZS && kind != UTF8PROC_CATEGORY_ZL &&
          kind != UTF8PROC_CATEGORY_ZP && kind != UTF8PROC_CATEGORY_CC && kind != UTF8PROC_CATEGORY_CF &&
          kind != UTF8PROC_CATEGORY_CS && kind != UTF8PROC_CATEGORY_CO);
}

std::string hex_digits(char32_t number, int digits) {
  std::string out(static_cast<std::size_t>(digits), '0');
  for (auto digit = out.rbegin(); digit != out.rend(); ++digit, number >>= 4)
    *digit = "0123456789abcdef"[number & 15u];
  return out;
}

// The fewest digits that read back as the same number, in Python's form.
std::string written(double value) {
  if (!std::isfinite(value)) return value > 0 ? "inf" : value < 0 ? "-inf" : "nan";
  char digits[400];
  const auto as = [&](std::chars_format format) {
    return std::string(digits, std::to_chars(digits, std::end(digits), value, format).ptr);
  };
  const std::string scientific = as(std::chars_format::scientific);
  const int exponent = std::stoi(scientific.substr(scientific.find('e') + 1));
  if (exponent < -4 || exponent >= 16) return scientific;
  const std::string text = as(std::chars_format::fixed);
  return text.find('.') == text.npos ? text + ".0" : text;
}

std::string quoted(std::string_view text) {
  const bool has_single = text.find('\'') != text.npos, has_double = text.find('"') != text.npos;
  const char quote = has_single && !has_double ? '"' : '\'';
  std::string out(1, quote);
  for (const std::string_view character : characters_of(text)) {
    const char32_t c = character_at(character);
    if (c == static_cast<unsigned char>(quote) || c == '\\')
      (out += '\\') += character;
    else if (c == '\n' || c == '\r' || c == '\t')
      out += c == '\n' ? "\\n" : c == '\r' ? "\\r" : "\\t";
    else if (is_printable(c))
      out += character;
    else
      out += c < 0x100     ? "\\x" + hex_digits(c, 2)
             : c < 0x10000 ? "\\u" + hex_digits(c, 4)
                           : "\\U" + hex_digits(c, 8);
  }
  return out += quote;
}

std::string repr_of(const Value& value) {
  if (const std::string* text = value.text()) return quoted(*text);
  if (value.is_undefined()) return "Undefined";
  std::string out;
  if (const List* list = value.list()) {
    for (const Value& item : list->items) out += (out.empty() ? "" : ", ") + repr_of(item);
    if (!list->is_tuple) return "[" + out + "]";
    return "(" + out + (list->items.size() == 1 ? ",)" : ")");
  }
  if (const Dict* dict = value.dict()) {
    for (const auto& [key, member] : dict->members)
      out += (out.empty() ? "" : ", ") + quoted(key) + ": " + repr_of(member);
    return "{" + out + "}";
  }
  return text_of(value);
}

std::string json_text(std::string_view text, bool ascii) {
  std::string out = "\"";
  for (const std::string_view character : characters_of(text)) {
    const char32_t c = character_at(character);
    constexpr std::string_view kEscaped = "\"\\\n\r\t\f\b", kBy = "\"\\nrtfb";
    if (const std::size_t found = c < 0x80 ? kEscaped.find(character[0]) : kEscaped.npos;
        found != kEscaped.npos)
      (out += '\\') += kBy[found];
    else if (c >= 0x20 && (c < 0x7F || !ascii))
      out += character;
    else if (c < 0x10000)
      out += "\\u" + hex_digits(c, 4);
    else
      out += "\\u" + hex_digits(0xD800 + ((c - 0x10000) >> 10), 4) + "\\u" +
             hex_digits(0xDC00 + ((c - 0x10000) & 0x3FFu), 4);
  }
  return out + "\"";
}

std::string json_of(const Value& value, const JsonStyle& style, int level) {
  const List* list = value.list();
  const Dict* dict = value.dict();
  if (const std::string* text = value.text()) return json_text(*text, style.ascii);
  if (value.is_none()) return "null";
  if (const bool* flag = value.boolean()) return *flag ? "true" : "false";
  if (value.is_number()) return text_of(value);
  if (list == nullptr && dict == nullptr) fail("there is no JSON of ", value.kind());
  const bool is_empty = list != nullptr ? list->items.empty() : dict->members.empty();
  if (is_empty) return list != nullptr ? "[]" : "{}";
  const auto line = [&](int depth) {
    return style.indent < 0 ? "" : "\n" + std::string(static_cast<std::size_t>(style.indent * depth), ' ');
  };
  const std::string between = (style.indent < 0 ? ", " : ",") + line(level + 1);
  std::string out;
  if (list != nullptr) {
    for (const Value& item : list->items)
      append(out, (out.empty() ? line(level + 1) : between) + json_of(item, style, level + 1));
    return "[" + out + line(level) + "]";
  }
  std::vector<const Member*> members;
  for (const Member& member : dict->members) members.push_back(&member);
  const auto by_key = [](const Member* a, const Member* b) { return a->first < b->first; };
  if (style.sorted) std::sort(members.begin(), members.end(), by_key);
  for (const Member* member : members)
    append(out, (out.empty() ? line(level + 1) : between) + json_text(member->first, style.ascii) + ": " +
                    json_of(member->second, style, level + 1));
  return "{" + out + line(level) + "}";
}

}  // namespace

Value Value::list(std::vector<Value> items, bool is_tuple) {
  int depth = 0;
  std::int64_t weight = 0;
  for (const Value& item : items) {
    depth = std::max(depth, depth_of(item));
    weight = std::min(weight + 1 + weight_of(item), kMostWeight);
  }
  Value value;
  value.data = std::make_shared<const List>(List{std::move(items), is_tuple, checked(depth + 1), weight});
  return value;
}

Value Value::dict(std::vector<Member> members) {
  int depth = 0;
  std::int64_t weight = 0;
  for (const auto& [key, item] : members) {
    depth = std::max(depth, depth_of(item));
    weight += 1 + static_cast<std::int64_t>(key.size()) / 16 + weight_of(item);
    weight = std::min(weight, kMostWeight);
  }
  Value value;
  value.data = std::make_shared<const Dict>(std::move(members), checked(depth + 1), weight);
  return value;
}

std::size_t Space::place_of(std::string_view key) const {
  if (!places_.empty()) {
    const auto found = places_.find(std::string(key));
    return found == places_.end() ? members.size() : found->second;
  }
  const auto found =
      std::find_if(members.begin(), members.end(), [&](const Member& one) { return one.first == key; });
  return static_cast<std::size_t>(found - members.begin());
}

const Value* Space::find(std::string_view key) const {
  const std::size_t place = place_of(key);
  return place == members.size() ? nullptr : &members[place].second;
}

void Space::set(const std::string& key, Value value) {
  depth_of(value);  // refuses a namespace
  const std::size_t place = place_of(key);
  if (place < members.size()) return void(members[place].second = std::move(value));
  members.emplace_back(key, std::move(value));
  index(place);
}

void Space::index(std::size_t from) {
  constexpr std::size_t kFew = 16;
  if (members.size() <= kFew) return;
  for (std::size_t at = places_.empty() ? 0 : from; at < members.size(); ++at)
    places_.emplace(members[at].first, at);
}

Dict::Dict(std::vector<Member> all, int how_deep, std::int64_t how_heavy)
    : depth(how_deep), weight(how_heavy) {
  members = std::move(all);
  index(0);
}

std::int64_t weight_of(const Value& value) {
  if (const std::string* text = value.text()) return static_cast<std::int64_t>(text->size()) / 16;
  if (const List* list = value.list()) return list->weight;
  if (const Dict* dict = value.dict()) return dict->weight;
  return 0;
}

std::int64_t Value::integer() const {
  if (const bool* flag = boolean()) return *flag ? 1 : 0;
  if (!is_integer()) fail("a whole number is needed, and this is ", kind());
  return std::get<std::int64_t>(data);
}

double Value::number() const {
  const double* real = std::get_if<double>(&data);
  return real != nullptr ? *real : static_cast<double>(integer());
}

bool Value::is_true() const {
  if (const std::string* t = text()) return !t->empty();
  if (const List* l = list()) return !l->items.empty();
  if (const Dict* d = dict()) return !d->members.empty();
  if (is_number()) return number() != 0;
  return !is_undefined() && !is_none();
}

const char* Value::kind() const {
  constexpr const char* kKinds[] = {"nothing (it is not defined)",
                                    "none",
                                    "true or false",
                                    "a whole number",
                                    "a number",
                                    "text",
                                    "a list",
                                    "an object",
                                    "a namespace",
                                    "a macro"};
  return kKinds[data.index()];
}

bool equal(const Value& a, const Value& b) {
  if (a.is_integer() && b.is_integer()) return a.integer() == b.integer();
  if (a.is_number() && b.is_number()) return a.number() == b.number();
  if (a.data.index() != b.data.index()) return false;
  if (const std::string* text = a.text()) return *text == *b.text();
  if (const List* list = a.list()) {
    const List& other = *b.list();
    return list->is_tuple == other.is_tuple &&
           std::equal(list->items.begin(), list->items.end(), other.items.begin(), other.items.end(), equal);
  }
  if (const Dict* dict = a.dict()) {
    const auto is_in_other = [&](const Member& member) {
      const Value* found = b.dict()->find(member.first);
      return found != nullptr && equal(member.second, *found);
    };
    return dict->members.size() == b.dict()->members.size() &&
           std::all_of(dict->members.begin(), dict->members.end(), is_in_other);
  }
  if (a.space() != nullptr) return a.space() == b.space();
  return a.macro() == b.macro();
}

bool less(const Value& a, const Value& b) {
  if (a.is_integer() && b.is_integer()) return a.integer() < b.integer();
  if (a.is_number() && b.is_number()) return a.number() < b.number();
  if (a.text() != nullptr && b.text() != nullptr) return *a.text() < *b.text();  // UTF-8 keeps the order
  fail("there is no order between ", a.kind(), " and ", b.kind());
}

std::string text_of(const Value& value) {
  if (const std::string* text = value.text()) return *text;
  if (value.is_undefined()) return "";
  if (value.is_none()) return "None";
  if (const bool* flag = value.boolean()) return *flag ? "True" : "False";
  if (value.is_integer()) return std::to_string(value.integer());
  if (value.is_number()) return written(value.number());
  if (value.list() != nullptr || value.dict() != nullptr) return repr_of(value);
  fail("there is no text of ", value.kind());
}

std::string json_of(const Value& value, const JsonStyle& style) { return json_of(value, style, 0); }

// ---- Texts ----

std::int64_t length_of(std::string_view text) {
  return std::count_if(text.begin(), text.end(), begins_character);
}

std::vector<std::string_view> characters_of(std::string_view text) {
  std::vector<std::string_view> out;
  for (std::size_t at = 0; at < text.size(); at += out.back().size())
    out.push_back(text.substr(at, character_length(text[at])));
  return out;
}

std::string_view stripped(std::string_view text, bool left, bool right, const std::string* of) {
  std::vector<std::string_view> all = characters_of(of == nullptr ? std::string_view() : *of);
  std::sort(all.begin(), all.end());
  const auto goes = [&](std::string_view character) {
    return of == nullptr ? is_space(character_at(character))
                         : std::binary_search(all.begin(), all.end(), character);
  };
  while (left && !text.empty() && goes(text.substr(0, character_length(text[0]))))
    text.remove_prefix(character_length(text[0]));
  while (right && !text.empty()) {
    std::size_t at = text.size() - 1;
    while (!begins_character(text[at])) --at;
    if (!goes(text.substr(at))) break;
    text = text.substr(0, at);
  }
  return text;
}

void append(std::string& out, std::string_view more) {
  if (out.size() + more.size() > kMostText) fail("a text of more than ", kMostText, " bytes");
  out += more;
}

std::string replaced(std::string_view text, std::string_view from, std::string_view to, std::int64_t most) {
  if (from.empty()) fail("replacing an empty text is not known here");
  std::string out;
  for (std::size_t found = 0; most != 0 && (found = text.find(from)) != text.npos; --most) {
    out += text.substr(0, found);
    append(out, to);
    text.remove_prefix(found + from.size());
  }
  return out += text;
}

static void add_part(std::vector<Value>& out, std::string_view part) {
  if (out.size() >= kMostParts) fail("a text is split into more than ", kMostParts, " parts");
  out.emplace_back(std::string(part));
}

std::vector<Value> split(std::string_view text, const std::string* by, std::int64_t most) {
  std::vector<Value> out;
  if (by != nullptr && by->empty()) fail("split() by an empty text");
  if (by != nullptr) {
    for (std::size_t found = 0; most != 0 && (found = text.find(*by)) != text.npos; --most) {
      add_part(out, text.substr(0, found));
      text.remove_prefix(found + by->size());
    }
    add_part(out, text);
    return out;
  }
  for (text = stripped(text, true, false); !text.empty(); text = stripped(text, true, false)) {
    std::size_t end = 0;
    while (end < text.size() && !is_space(character_at(text, end))) end += character_length(text[end]);
    if (most-- == 0) end = text.size();
    add_part(out, text.substr(0, end));
    text.remove_prefix(end);
  }
  return out;
}

std::vector<Value> split_last(std::string_view text, const std::string* by, std::int64_t most) {
  if (by == nullptr || by->empty()) fail("rsplit() by white space is not known here");
  std::vector<Value> out;
  for (std::size_t found = 0; most != 0 && (found = text.rfind(*by)) != text.npos; --most) {
    add_part(out, text.substr(found + by->size()));
    text = text.substr(0, found);
  }
  add_part(out, text);
  std::reverse(out.begin(), out.end());
  return out;
}

}  // namespace scruple::train::jinja
