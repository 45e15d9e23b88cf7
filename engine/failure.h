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

}  // namespace scruple
