// fp32: IEEE single precision as it is, except that every NaN is stored as the same quiet NaN.
#pragma once

#include "formats/codec.h"

namespace scruple {
inline namespace SCRUPLE_UNIT {

struct Fp32 {
  static constexpr const char* doc = "IEEE single precision";
  static constexpr unsigned roundings = 1u << kNearest | 1u << kTruncate | 1u << kStochastic;
  static constexpr Layout layout(int) { return {32, 0, 1}; }
  static constexpr Bound bound(int) { return {0, 0, 0}; }
};

}  // namespace SCRUPLE_UNIT
}  // namespace scruple
