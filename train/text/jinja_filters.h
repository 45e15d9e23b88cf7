// Filters, tests and methods of chat templates, by their names. What is not known here is refused by name.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "train/text/jinja_value.h"

namespace scruple::train::jinja {

struct Run;  // jinja_run.h
void spend(Run& run, std::int64_t work);
std::int64_t size_of(const Value& value);  // as work, without what is inside its items

struct Arguments {
  Run& run;
  std::vector<Value> values;
  std::vector<Member> named;

  std::size_t size() const { return values.size() + named.size(); }
  // The one at `place` or called `name`; null where it is not given.
  const Value* find(std::size_t place, std::string_view name) const;
  std::int64_t integer(std::size_t place, std::string_view name, std::int64_t otherwise) const;
};

// Their work is spent.
Value filter(const std::string& name, const Value& value, const Arguments& arguments);
bool test(const std::string& name, const Value& value, const Arguments& arguments);
Value method(const std::string& name, const Value& value, const Arguments& arguments);
Value member_of(const Value& value, const std::string& name);  // value.name, and nothing where there is none
std::vector<Value> items_of(const Value& value);               // what a loop goes through

}  // namespace scruple::train::jinja
