// Chat templates: the part of the language Jinja that they use, with the settings of transformers (blocks' lines are
// trimmed, `tojson` as Python's json, `generation` marks what the model says). What is not known here is refused by name
// with the template's line; a template may be hostile: its nesting, its work and what it writes are limited.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "train/text/jinja_value.h"

namespace scruple::train::jinja {

enum class Kind {
  // expressions
  constant,
  name,
  list,
  tuple,
  dict,
  negation,
  minus,
  plus,
  arithmetic,
  join,
  all_of,
  any_of,
  compare,
  choice,
  attribute,
  item,
  slice,
  call,
  filter,
  test,
  // statements
  block,
  text,
  print,
  branch,
  loop,
  assign,
  capture,
  macro,
  generation,
  filtered,
  leave,
  go_on
};

// What each kind keeps where is said at its reader in jinja_parse.cpp.
struct Node {
  Kind kind;
  int line, depth = 1;
  std::string name;
  Value value;
  std::vector<std::unique_ptr<Node>> parts;  // some may be null
  std::vector<std::string> names;
};
using NodePtr = std::unique_ptr<Node>;

NodePtr parse(std::string_view source);  // throws with the line

struct Span {
  std::size_t begin, end;  // bytes
};

struct Rendering {
  std::string text;
  std::vector<Span> generated;                        // what stands in {% generation %}
  std::vector<std::pair<const Dict*, Span>> written;  // by the rounds of loops over objects, if anything was
};

class Template {
 public:
  explicit Template(std::string_view source);
  // Throws with the template's line. `names`: what the template can see.
  Rendering render(const std::vector<Member>& names) const;
  bool marks_generation() const { return marks_generation_; }

 private:
  std::shared_ptr<const Node> root_;
  bool marks_generation_;
};

// ---- For the interpreter alone (jinja_filters.cpp) ----

struct Arguments {
  std::vector<Value> values;
  std::vector<Member> named;

  std::size_t size() const { return values.size() + named.size(); }
  // The one at `place` or called `name`; null where it is not given.
  const Value* find(std::size_t place, std::string_view name) const;
  std::int64_t integer(std::size_t place, std::string_view name, std::int64_t otherwise) const;
};

Value filter(const std::string& name, const Value& value, const Arguments& arguments);
bool test(const std::string& name, const Value& value, const Arguments& arguments);
Value method(const std::string& name, const Value& value, const Arguments& arguments);
Value member_of(const Value& value, const std::string& name);  // value.name, and nothing where there is none
std::vector<Value> items_of(const Value& value);               // what a loop goes through

}  // namespace scruple::train::jinja
