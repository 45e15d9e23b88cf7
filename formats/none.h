// The codec of the roles that a format does not serve.
#pragma once

#include "formats/codec.h"

namespace scruple {
inline namespace SCRUPLE_UNIT {

struct None {
  static constexpr const char* doc = "";
  static constexpr unsigned roundings = 0;
  static constexpr Layout layout(int) { return {0, 0, 1}; }
  static constexpr Bound bound(int) { return {0, 0, 0}; }
};

}  // namespace SCRUPLE_UNIT
}  // namespace scruple
