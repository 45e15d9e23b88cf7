// How the core says no: a status and a sentence. Thrown below, caught in capi/ alone.
#pragma once

#include <sstream>
#include <stdexcept>
#include <string>

#include "include/scruple/scruple.h"

namespace scruple {

struct Failure : std::runtime_error {
  Failure(scruple_status why, const std::string& message) : std::runtime_error(message), status(why) {}
  scruple_status status;
};

// fail(SCRUPLE_INVALID, "size is ", size, "; ...")
template <class... Parts>
[[noreturn]] void fail(scruple_status status, const Parts&... parts) {
  std::ostringstream message;
  (message << ... << parts);
  throw Failure(status, message.str());
}

// The names of those entries of a list that are wanted, as a part of a sentence: "fp32, bf16".
std::string names_of(const auto& list, const auto& wanted) {
  std::string names;
  for (const auto& entry : list)
    if (wanted(entry)) names += (names.empty() ? "" : ", ") + std::string(entry.name);
  return names;
}
std::string names_of(const auto& list) {
  return names_of(list, [](const auto&) { return true; });
}

}  // namespace scruple
