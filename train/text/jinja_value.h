// Values of chat templates, with Python's meaning of equality, order, text and JSON: templates are written for it.
// Templates and messages may be hostile: values have a largest depth, and whoever makes large ones counts their cost.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <variant>
#include <vector>

namespace scruple::train::jinja {

struct List;
struct Dict;
struct Space;  // of namespace(): the one kind of value that changes
struct Macro;  // of the template (jinja.cpp)

struct Undefined {
  std::string name;  // of what is not there
};
struct None {};

class Value {
 public:
  using Text = std::shared_ptr<const std::string>;
  std::variant<Undefined, None, bool, std::int64_t, double, Text, std::shared_ptr<const List>,
               std::shared_ptr<const Dict>, std::shared_ptr<Space>, std::shared_ptr<const Macro>>
      data;
  bool is_safe = false;  // by the filter of that name, after which '+' would escape HTML

  Value() = default;
  Value(Undefined value) : data(std::move(value)) {}
  Value(None value) : data(value) {}
  Value(bool value) : data(value) {}
  Value(std::int64_t value) : data(value) {}
  Value(double value) : data(value) {}
  Value(std::string value) : data(std::make_shared<const std::string>(std::move(value))) {}
  Value(const char* value) : Value(std::string(value)) {}
  Value(std::shared_ptr<Space> value) : data(std::move(value)) {}
  Value(std::shared_ptr<const Macro> value) : data(std::move(value)) {}
  // Throws where it would be nested too deep, or would hold a namespace.
  static Value list(std::vector<Value> items, bool is_tuple = false);
  static Value dict(std::vector<std::pair<std::string, Value>> members);

  bool is_undefined() const { return std::holds_alternative<Undefined>(data); }
  bool is_none() const { return std::holds_alternative<None>(data); }
  const bool* boolean() const { return std::get_if<bool>(&data); }
  const std::string* text() const { return pointer<std::string>(); }
  const List* list() const { return pointer<List>(); }
  const Dict* dict() const { return pointer<Dict>(); }
  Space* space() const {
    const auto* found = std::get_if<std::shared_ptr<Space>>(&data);
    return found == nullptr ? nullptr : found->get();
  }
  const Macro* macro() const { return pointer<Macro>(); }
  bool is_integer() const { return std::holds_alternative<std::int64_t>(data); }
  bool is_number() const { return is_integer() || std::holds_alternative<double>(data) || boolean(); }
  std::int64_t integer() const;  // of a whole number, true and false too; throws where it is something else
  double number() const;

  bool is_true() const;
  const char* kind() const;  // in words: "text", "a list"

 private:
  template <class T>
  const T* pointer() const {
    const auto* found = std::get_if<std::shared_ptr<const T>>(&data);
    return found == nullptr ? nullptr : found->get();
  }
};

using Member = std::pair<std::string, Value>;

struct List {
  std::vector<Value> items;
  bool is_tuple = false;
  int depth = 1;
  std::int64_t weight = 0;
};
struct Space {
  std::vector<Member> members;  // in their order; each key once

  const Value* find(std::string_view key) const;
  void set(const std::string& key, Value value);  // throws for a namespace

 protected:
  void index(std::size_t from);

 private:
  std::size_t place_of(std::string_view key) const;      // the number of members where there is none
  std::unordered_map<std::string, std::size_t> places_;  // of many members
};
struct Dict : Space {
  Dict(std::vector<Member> all, int how_deep, std::int64_t how_heavy);
  int depth;
  std::int64_t weight;
};

// The work of looking at all of it: 16 bytes of text, or an item. One that stands at several places counts at each.
std::int64_t weight_of(const Value& value);

bool equal(const Value& a, const Value& b);
bool less(const Value& a, const Value& b);  // throws where Python has no order
std::string text_of(const Value& value);    // str()
struct JsonStyle {
  int indent = -1;  // none
  bool ascii = false, sorted = false;
};
std::string json_of(const Value& value, const JsonStyle& style = {});  // throws for what JSON has not

// ---- Texts, as Python sees them: lists of characters ----

std::int64_t length_of(std::string_view text);
std::vector<std::string_view> characters_of(std::string_view text);
// Without the characters at its ends that are in `of`, or, where that is null, white space.
std::string_view stripped(std::string_view text, bool left, bool right, const std::string* of = nullptr);
// Throws where it would be longer than any template's.
void append(std::string& out, std::string_view more);
std::string replaced(std::string_view text, std::string_view from, std::string_view to, std::int64_t most);
std::vector<Value> split(std::string_view text, const std::string* by, std::int64_t most);
std::vector<Value> split_last(std::string_view text, const std::string* by, std::int64_t most);

}  // namespace scruple::train::jinja
