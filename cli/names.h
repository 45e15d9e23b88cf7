// Lists of names for the values of an enum, in the order of the values: kPolicies, train::kLayouts.
#pragma once

#include <algorithm>
#include <cstddef>
#include <iterator>
#include <optional>
#include <string>
#include <vector>

#include "commands.h"
#include "text.h"

namespace scruple::cli {

template <std::size_t n>
using Names = const char* const[n];

// The value that has this name, if one has.
template <class Enum, std::size_t n>
std::optional<Enum> value_named(const Names<n>& names, const std::string& name) {
  const auto* const found = std::find(std::begin(names), std::end(names), name);
  if (found == std::end(names)) return {};
  return static_cast<Enum>(found - names);
}

template <std::size_t n>
Check one_of(const Names<n>& names) {
  return one_of(std::vector<std::string>(std::begin(names), std::end(names)));
}
template <std::size_t n>
std::string either(const Names<n>& names) {
  return either(std::vector<std::string>(std::begin(names), std::end(names)));
}

}  // namespace scruple::cli
