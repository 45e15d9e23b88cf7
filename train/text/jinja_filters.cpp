// Filters, tests and methods of chat templates. Each is a row of a table; what has no row is refused by name.
#include "train/text/jinja_filters.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <limits>
#include <map>

#include "io/file.h"
#include "io/json.h"

namespace scruple::train::jinja {
namespace {

using io::fail;

const std::string& text_in(const Value& value, const char* of) {
  if (const std::string* text = value.text()) return *text;
  fail("'", of, "' is for text, and this is ", value.kind());
}

// null where none is given.
const std::string* text_at(const Arguments& given, std::size_t place, const char* name) {
  const Value* value = given.find(place, name);
  if (value == nullptr || value->is_none()) return nullptr;
  return &text_in(*value, name);
}
const std::string& needed_text(const Arguments& given, std::size_t place, const char* name) {
  if (const std::string* text = text_at(given, place, name)) return *text;
  fail("the argument '", name, "' is missing");
}

// upper, lower, capitalize or title. Other alphabets have rules that differ between libraries.
std::string in_case(const std::string& name, const std::string& text) {
  std::string out;
  bool in_word = false;
  for (const char c : text) {
    if (static_cast<unsigned char>(c) >= 0x80) fail("'", name, "' of letters beyond ASCII is not known here");
    const bool is_small = c >= 'a' && c <= 'z', is_large = c >= 'A' && c <= 'Z';
    const bool upper =
        name == "upper" || (name == "capitalize" && out.empty()) || (name == "title" && !in_word);
    out += static_cast<char>(is_small && upper ? c - 32 : is_large && !upper ? c + 32 : c);
    in_word = is_small || is_large;
  }
  return out;
}
// What sorts and compares without case.
Value folded(const Value& value) {
  return value.text() == nullptr ? value : Value(in_case("lower", *value.text()));
}

std::int64_t size_in(const Value& value, const char* of) {
  if (const std::string* text = value.text()) return length_of(*text);
  if (const List* list = value.list()) return static_cast<std::int64_t>(list->items.size());
  if (const Dict* dict = value.dict()) return static_cast<std::int64_t>(dict->members.size());
  if (value.is_undefined()) return 0;
  fail("'", of, "' of ", value.kind());
}

Value pairs_of(const Value& value) {
  if (value.is_undefined()) return Value::list({});
  if (value.dict() == nullptr) fail("'items' of ", value.kind());
  std::vector<Value> pairs;
  for (const auto& [key, member] : value.dict()->members)
    pairs.push_back(Value::list({Value(key), member}, /*is_tuple=*/true));
  return Value::list(std::move(pairs));
}

// "a.b" of an object, or an item of a list by its number.
Value attribute_of(Value value, const std::string& path) {
  for (std::size_t at = 0; at <= path.size();) {
    const std::size_t end = std::min(path.find('.', at), path.size());
    const std::string name = path.substr(at, end - at);
    const Value* found = value.dict() == nullptr ? nullptr : value.dict()->find(name);
    value = found != nullptr ? *found : Value(Undefined{name});
    at = end + 1;
  }
  return value;
}

// ---- Filters ----

using Filter = Value (*)(const Value&, const Arguments&);

Value trim(const Value& value, const Arguments& given) {
  const std::string text = text_of(value);
  return std::string(stripped(text, true, true, text_at(given, 0, "chars")));
}

Value tojson(const Value& value, const Arguments& given) {
  JsonStyle style;
  const auto flag = [&](std::size_t place, const char* name) {
    const Value* found = given.find(place, name);
    return found != nullptr && found->is_true();
  };
  style.ascii = flag(0, "ensure_ascii");
  const Value* indent = given.find(1, "indent");
  if (indent != nullptr && !indent->is_none())
    style.indent = static_cast<int>(std::clamp<std::int64_t>(indent->integer(), 0, 64));
  if (const Value* separators = given.find(2, "separators"); separators != nullptr && !separators->is_none())
    fail("'separators' of tojson is not known here");
  style.sorted = flag(3, "sort_keys");
  return json_of(value, style);
}

Value otherwise(const Value& value, const Arguments& given) {
  const Value* by = given.find(0, "default_value");
  const Value* also_empty = given.find(1, "boolean");
  const bool is_gone =
      value.is_undefined() || (also_empty != nullptr && also_empty->is_true() && !value.is_true());
  return !is_gone ? value : by != nullptr ? *by : Value("");
}

Value join(const Value& value, const Arguments& given) {
  const Value *by = given.find(0, "d"), *attribute = given.find(1, "attribute");
  const std::string between = by == nullptr ? "" : text_of(*by);
  std::string out;
  bool is_first = true;
  for (const Value& item : items_of(value)) {
    if (!std::exchange(is_first, false)) append(out, between);
    append(out, text_of(attribute == nullptr ? item : attribute_of(item, text_in(*attribute, "attribute"))));
  }
  return out;
}

Arguments rest_of(const Arguments& given, std::size_t from) {
  Arguments out{given.run, {}, {}};
  for (std::size_t i = from; i < given.values.size(); ++i) out.values.push_back(given.values[i]);
  return out;
}

Value mapped(const Value& value, const Arguments& given) {
  const Value* attribute = given.find(given.values.size(), "attribute");
  const Value* by_default = given.find(given.values.size(), "default");
  std::vector<Value> out;
  if (!value.is_true()) return Value::list({});
  for (const Value& item : items_of(value)) {
    if (attribute == nullptr) {
      out.push_back(filter(needed_text(given, 0, "filter"), item, rest_of(given, 1)));
      continue;
    }
    Value found = attribute_of(item, text_in(*attribute, "attribute"));
    out.push_back(found.is_undefined() && by_default != nullptr ? *by_default : std::move(found));
  }
  return Value::list(std::move(out));
}

// select, reject, selectattr and rejectattr: those items of which a test is so, or not.
Value chosen(const Value& value, const Arguments& given, bool by_attribute, bool wanted) {
  const std::size_t first = by_attribute ? 1 : 0;
  std::vector<Value> out;
  if (!value.is_true()) return Value::list({});
  for (const Value& item : items_of(value)) {
    const Value looked_at = by_attribute ? attribute_of(item, needed_text(given, 0, "attribute")) : item;
    const bool is_so = given.values.size() > first
                           ? test(text_in(given.values[first], "test"), looked_at, rest_of(given, first + 1))
                           : looked_at.is_true();
    if (is_so == wanted) out.push_back(item);
  }
  return Value::list(std::move(out));
}

// Items in the order of their keys, which come first.
Value in_order(std::vector<std::pair<Value, Value>> keyed, bool turns) {
  std::stable_sort(keyed.begin(), keyed.end(), [&](const auto& a, const auto& b) {
    return turns ? less(b.first, a.first) : less(a.first, b.first);
  });
  std::vector<Value> out;
  for (auto& [key, item] : keyed) out.push_back(std::move(item));
  return Value::list(std::move(out));
}

Value sorted(const Value& value, const Arguments& given) {
  const Value *reverse = given.find(0, "reverse"), *exact = given.find(1, "case_sensitive"),
              *attribute = given.find(2, "attribute");
  std::vector<std::pair<Value, Value>> keyed;
  for (const Value& item : items_of(value)) {
    const Value key = attribute == nullptr ? item : attribute_of(item, text_in(*attribute, "attribute"));
    keyed.emplace_back(exact != nullptr && exact->is_true() ? key : folded(key), item);
  }
  return in_order(std::move(keyed), reverse != nullptr && reverse->is_true());
}

Value sorted_pairs(const Value& value, const Arguments& given) {
  if (given.size() > 0) fail("'dictsort' with arguments is not known here");
  std::vector<std::pair<Value, Value>> keyed;
  for (const Value& pair : items_of(pairs_of(value))) keyed.emplace_back(folded(pair.list()->items[0]), pair);
  return in_order(std::move(keyed), false);
}

Value unique(const Value& value, const Arguments& given) {
  if (given.size() > 0) fail("'unique' with arguments is not known here");
  std::vector<Value> out;
  for (const Value& item : items_of(value)) {
    const Value key = folded(item);
    spend(given.run, static_cast<std::int64_t>(out.size()) * (1 + weight_of(key)));
    const auto same = [&](const Value& other) { return equal(key, folded(other)); };
    if (std::none_of(out.begin(), out.end(), same)) out.push_back(item);
    if (out.size() > 1000) fail("'unique' of more than 1000 values");
  }
  return Value::list(std::move(out));
}

Value indented(const Value& value, const Arguments& given) {
  const Value *width = given.find(0, "width"), *first = given.find(1, "first"),
              *blank = given.find(2, "blank");
  const std::string by =
      width == nullptr ? "    "
      : width->text() != nullptr
          ? *width->text()
          : std::string(static_cast<std::size_t>(std::clamp<std::int64_t>(width->integer(), 0, 64)), ' ');
  std::string out;
  bool is_first = true;
  const std::string newline = "\n";
  for (const Value& line : split(text_in(value, "indent"), &newline, -1)) {
    const bool indents = is_first ? first != nullptr && first->is_true()
                                  : !line.text()->empty() || (blank != nullptr && blank->is_true());
    append(out, (is_first ? "" : "\n") + (indents ? by : "") + *line.text());
    is_first = false;
  }
  return out;
}

Value whole_number(const Value& value, const Arguments& given) {
  if (given.size() > 0) fail("'int' with arguments is not known here");
  const std::string* text = value.text();
  if (value.is_number() && !std::holds_alternative<double>(value.data)) return value.integer();
  if (text == nullptr) fail("'int' of ", value.kind(), " is not known here");
  std::int64_t number = 0;
  const std::string_view digits = stripped(*text, true, true);
  const auto [end, problem] = std::from_chars(digits.data(), digits.data() + digits.size(), number);
  if (problem != std::errc() || end != digits.data() + digits.size() ||
      number == std::numeric_limits<std::int64_t>::min())
    fail("'int' of ", io::shown(*text), " is not known here");
  return number;
}

Value end_of(const Value& value, bool last) {
  std::vector<Value> items = items_of(value);
  if (items.empty()) return Undefined{last ? "the last of nothing" : "the first of nothing"};
  return last ? items.back() : items.front();
}

Value reversed(const Value& value, const Arguments&) {
  std::vector<Value> items = items_of(value);
  std::reverse(items.begin(), items.end());
  if (value.text() == nullptr) return Value::list(std::move(items));
  std::string out;
  for (const Value& item : items) out += *item.text();
  return out;
}

Value replaced_text(const Value& value, const Arguments& given) {
  return replaced(text_of(value), needed_text(given, 0, "old"), needed_text(given, 1, "new"),
                  given.integer(2, "count", -1));
}

const std::map<std::string, Filter, std::less<>>& filters() {
  static const std::map<std::string, Filter, std::less<>> rows = {
      {"trim", trim},
      {"tojson", tojson},
      {"default", otherwise},
      {"d", otherwise},
      {"join", join},
      {"map", mapped},
      {"sort", sorted},
      {"dictsort", sorted_pairs},
      {"unique", unique},
      {"indent", indented},
      {"int", whole_number},
      {"reverse", reversed},
      {"replace", replaced_text},
      {"length", [](const Value& value, const Arguments&) -> Value { return size_in(value, "length"); }},
      {"count", [](const Value& value, const Arguments&) -> Value { return size_in(value, "count"); }},
      {"items", [](const Value& value, const Arguments&) { return pairs_of(value); }},
      {"list", [](const Value& value, const Arguments&) { return Value::list(items_of(value)); }},
      {"string", [](const Value& value, const Arguments&) -> Value { return text_of(value); }},
      {"safe",
       [](const Value& value, const Arguments&) {
         Value out = text_of(value);
         out.is_safe = true;
         return out;
       }},
      {"upper", [](const Value& v, const Arguments&) -> Value { return in_case("upper", text_of(v)); }},
      {"lower", [](const Value& v, const Arguments&) -> Value { return in_case("lower", text_of(v)); }},
      {"capitalize",
       [](const Value& v, const Arguments&) -> Value { return in_case("capitalize", text_of(v)); }},
      {"first", [](const Value& value, const Arguments&) { return end_of(value, false); }},
      {"last", [](const Value& value, const Arguments&) { return end_of(value, true); }},
      {"select", [](const Value& v, const Arguments& given) { return chosen(v, given, false, true); }},
      {"reject", [](const Value& v, const Arguments& given) { return chosen(v, given, false, false); }},
      {"selectattr", [](const Value& v, const Arguments& given) { return chosen(v, given, true, true); }},
      {"rejectattr", [](const Value& v, const Arguments& given) { return chosen(v, given, true, false); }}};
  return rows;
}

// ---- Tests ----

using Test = bool (*)(const Value&, const Arguments&);

const Value& compared(const Arguments& given) {
  if (given.values.size() != 1) fail("a test of two values needs the other one");
  return given.values[0];
}

bool is_same(const Value& value, const Arguments& given) {
  const Value& other = compared(given);
  spend(given.run, std::min(weight_of(value), weight_of(other)));
  return equal(value, other);
}

bool is_in(const Value& value, const Arguments& given) {
  const Value& all = compared(given);
  spend(given.run, all.text() == nullptr ? std::min(weight_of(all), size_of(all) * (1 + weight_of(value)))
                                         : size_of(all) * (1 + weight_of(value)));
  if (const std::string* text = all.text()) return text->find(text_in(value, "in")) != text->npos;
  if (const Dict* dict = all.dict()) return value.text() != nullptr && dict->find(*value.text()) != nullptr;
  const std::vector<Value> items = items_of(all);
  return std::any_of(items.begin(), items.end(), [&](const Value& item) { return equal(item, value); });
}

const std::map<std::string, Test, std::less<>>& tests() {
  static const Test other = [](const Value& a, const Arguments& given) { return !is_same(a, given); };
  static const Test is_list = [](const Value& v, const Arguments&) {
    return v.list() != nullptr || v.text() != nullptr || v.dict() != nullptr || v.is_undefined();
  };
  static const std::map<std::string, Test, std::less<>> rows = {
      {"equalto", is_same},
      {"eq", is_same},
      {"==", is_same},
      {"ne", other},
      {"!=", other},
      {"in", is_in},
      {"iterable", is_list},
      {"sequence", is_list},
      {"defined", [](const Value& v, const Arguments&) { return !v.is_undefined(); }},
      {"undefined", [](const Value& v, const Arguments&) { return v.is_undefined(); }},
      {"none", [](const Value& v, const Arguments&) { return v.is_none(); }},
      {"string", [](const Value& v, const Arguments&) { return v.text() != nullptr; }},
      {"mapping", [](const Value& v, const Arguments&) { return v.dict() != nullptr; }},
      {"number", [](const Value& v, const Arguments&) { return v.is_number(); }},
      {"integer", [](const Value& v, const Arguments&) { return v.is_integer(); }},
      {"float", [](const Value& v, const Arguments&) { return std::holds_alternative<double>(v.data); }},
      {"boolean", [](const Value& v, const Arguments&) { return v.boolean() != nullptr; }},
      {"true", [](const Value& v, const Arguments&) { return v.boolean() != nullptr && *v.boolean(); }},
      {"false", [](const Value& v, const Arguments&) { return v.boolean() != nullptr && !*v.boolean(); }},
      {"odd", [](const Value& v, const Arguments&) { return v.integer() % 2 != 0; }},
      {"even", [](const Value& v, const Arguments&) { return v.integer() % 2 == 0; }},
      {"divisibleby", [](const Value& v, const Arguments& given) {
         const std::int64_t by = compared(given).integer();
         if (by <= 0) fail("'divisibleby' of ", by);
         return v.integer() % by == 0;
       }}};
  return rows;
}

// ---- Methods ----

bool begins_or_ends(const std::string& text, const Arguments& given, bool begins) {
  const Value* with = given.find(0, "with");
  if (with == nullptr || given.size() > 1) fail("one text is needed to look for");
  const std::vector<Value> all = with->list() != nullptr ? with->list()->items : std::vector<Value>{*with};
  return std::any_of(all.begin(), all.end(), [&](const Value& one) {
    const std::string& looked_for = text_in(one, begins ? "startswith" : "endswith");
    return begins ? text.starts_with(looked_for) : text.ends_with(looked_for);
  });
}

std::string formatted(const std::string& text, const Arguments& given) {
  std::string out;
  std::size_t place = 0;
  for (std::size_t at = 0; at < text.size(); ++at) {
    if (text[at] != '{' && text[at] != '}') {
      out += text[at];
      continue;
    }
    const bool is_double = at + 1 < text.size() && text[at + 1] == text[at];
    if (is_double) {
      out += text[at++];
      continue;
    }
    const std::size_t end = text.find('}', at);
    if (text[at] == '}' || end == text.npos) fail("format() of ", io::shown(text));
    const std::string name = text.substr(at + 1, end - at - 1);
    const Value* value = given.find(name.empty() ? place++ : given.values.size(), name);
    if (value == nullptr) fail("format() of {", io::shown(name), "} is not known here");
    append(out, text_of(*value));
    at = end;
  }
  return out;
}

Value of_text(const std::string& name, const std::string& text, const Arguments& given) {
  if (name == "strip" || name == "lstrip" || name == "rstrip")
    return std::string(stripped(text, name[0] != 'r', name[0] != 'l', text_at(given, 0, "chars")));
  if (name == "startswith" || name == "endswith") return begins_or_ends(text, given, name[0] == 's');
  if (name == "split")
    return Value::list(split(text, text_at(given, 0, "sep"), given.integer(1, "maxsplit", -1)));
  if (name == "rsplit")
    return Value::list(split_last(text, text_at(given, 0, "sep"), given.integer(1, "maxsplit", -1)));
  if (name == "replace") return replaced_text(text, given);
  if (name == "removeprefix" || name == "removesuffix") {
    const std::string& part = needed_text(given, 0, "part");
    if (name == "removeprefix") return text.starts_with(part) ? text.substr(part.size()) : text;
    return text.ends_with(part) ? text.substr(0, text.size() - part.size()) : text;
  }
  if (name == "upper" || name == "lower" || name == "title" || name == "capitalize")
    return in_case(name, text);
  if (name == "format") return formatted(text, given);
  if (name == "join")
    return join(given.values.empty() ? Value() : given.values[0], {given.run, {Value(text)}, {}});
  if (name == "count") {
    const std::string& part = needed_text(given, 0, "part");
    const std::vector<Value> parts = split(text, &part, -1);
    return static_cast<std::int64_t>(parts.size()) - 1;
  }
  if (name == "find") {
    const std::size_t found = text.find(needed_text(given, 0, "part"));
    return found == text.npos ? std::int64_t{-1} : length_of(std::string_view(text).substr(0, found));
  }
  fail("the method '", name, "' of a text is not known here");
}

constexpr std::string_view kDictMethods[] = {"get", "items", "keys", "values"};

Value of_dict(const std::string& name, const Value& value, const Arguments& given) {
  const Dict& dict = *value.dict();
  if (name == "items") return pairs_of(value);
  if (name == "get") {
    const Value *key = given.find(0, "key"), *by_default = given.find(1, "default");
    if (key == nullptr) fail("get() of no key");
    const Value* found = key->text() == nullptr ? nullptr : dict.find(*key->text());
    return found != nullptr ? *found : by_default != nullptr ? *by_default : Value(None{});
  }
  std::vector<Value> out;
  for (const auto& [key, member] : dict.members) out.push_back(name == "keys" ? Value(key) : member);
  if (name != "keys" && name != "values") fail("the method '", name, "' of an object is not known here");
  return Value::list(std::move(out));
}

}  // namespace

const Value* Arguments::find(std::size_t place, std::string_view name) const {
  if (place < values.size()) return &values[place];
  for (const auto& [known, value] : named)
    if (known == name) return &value;
  return nullptr;
}

std::int64_t Arguments::integer(std::size_t place, std::string_view name, std::int64_t otherwise) const {
  const Value* found = find(place, name);
  return found == nullptr ? otherwise : found->integer();
}

std::vector<Value> items_of(const Value& value) {
  if (const List* list = value.list()) return list->items;
  if (value.is_undefined()) return {};
  std::vector<Value> out;
  if (const Dict* dict = value.dict()) {
    for (const Member& member : dict->members) out.emplace_back(member.first);
  } else if (const std::string* text = value.text()) {
    for (const std::string_view character : characters_of(*text)) out.emplace_back(std::string(character));
  } else {
    fail(value.kind(), " where a list is needed");
  }
  return out;
}

Value member_of(const Value& value, const std::string& name) {
  if (value.is_undefined())
    fail(io::shown(std::get<Undefined>(value.data).name), " is not defined, and '.", name,
         "' of it is asked for");
  if (value.dict() != nullptr &&
      std::find(std::begin(kDictMethods), std::end(kDictMethods), name) != std::end(kDictMethods))
    fail("the method '", name, "' without a call is not known here");
  const Space* space = value.dict() != nullptr ? value.dict() : value.space();
  const Value* found = space == nullptr ? nullptr : space->find(name);
  return found != nullptr ? *found : Value(Undefined{name});
}

std::int64_t size_of(const Value& value) {
  if (const List* list = value.list()) return static_cast<std::int64_t>(list->items.size());
  if (const Dict* dict = value.dict()) return static_cast<std::int64_t>(dict->members.size());
  return weight_of(value);
}

// Arguments are put between items, or looked for at each place of a text.
static void spend(std::int64_t work, const Arguments& given) {
  std::int64_t times = 1 + static_cast<std::int64_t>(given.size()) / 16;
  for (const Value& value : given.values) times += weight_of(value);
  for (const auto& [name, value] : given.named) times += weight_of(value);
  spend(given.run, work);  // first by itself: neither is so large that their product is too large
  spend(given.run, work * times);
}

// The work of a filter: of those that look at a list alone, of those that take the characters of a text, of others.
static std::int64_t work_of(const std::string& name, const Value& value) {
  constexpr std::string_view kOfNothing[] = {"length", "count", "default", "d"};
  constexpr std::string_view kOfItems[] = {"first",   "last",   "list",   "items",      "map",
                                           "reverse", "select", "reject", "selectattr", "rejectattr"};
  constexpr std::string_view kOfCharacters[] = {"join", "sort", "unique"};
  const auto is_one_of = [&](const auto& names) {
    return std::find(std::begin(names), std::end(names), name) != std::end(names);
  };
  if (value.text() != nullptr)
    return is_one_of(kOfItems) || is_one_of(kOfCharacters) ? static_cast<std::int64_t>(value.text()->size())
                                                           : weight_of(value);
  return is_one_of(kOfNothing) ? 0 : is_one_of(kOfItems) ? size_of(value) : weight_of(value);
}

Value filter(const std::string& name, const Value& value, const Arguments& arguments) {
  if (value.is_safe && name != "safe" && name != "length")
    fail("'", name, "' behind 'safe' is not known here");
  const auto row = filters().find(name);
  if (row == filters().end()) fail("the filter '", name, "' is not known here");
  spend(work_of(name, value), arguments);
  Value out = row->second(value, arguments);
  spend(arguments.run, size_of(out));
  return out;
}

bool test(const std::string& name, const Value& value, const Arguments& arguments) {
  const auto row = tests().find(name);
  if (row == tests().end()) fail("the test 'is ", name, "' is not known here");
  return row->second(value, arguments);
}

Value method(const std::string& name, const Value& value, const Arguments& arguments) {
  if (value.is_safe) fail("the method '", name, "' behind 'safe' is not known here");
  spend(size_of(value), arguments);
  if (value.text() != nullptr || value.dict() != nullptr) {
    Value out =
        value.text() != nullptr ? of_text(name, *value.text(), arguments) : of_dict(name, value, arguments);
    spend(arguments.run, size_of(out));
    return out;
  }
  if (value.is_undefined())
    fail(io::shown(std::get<Undefined>(value.data).name), " is not defined, and ", name,
         "() of it is called");
  fail("the method '", name, "' of ", value.kind(), " is not known here");
}

}  // namespace scruple::train::jinja
