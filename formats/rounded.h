// bf16 and fp16 alone, as a format of weights, moments or gradients: nearest (ties to even), truncated or
// stochastic.
#pragma once

#include "formats/bf16.h"
#include "formats/fp16.h"

namespace scruple {
inline namespace SCRUPLE_UNIT {

template <class Half>
struct Rounded {
  static constexpr const char* doc = Half::doc;
  static constexpr unsigned roundings = 1u << kNearest | 1u << kTruncate | 1u << kStochastic;
  static constexpr Layout layout(int) { return {16, 0, 1}; }
  static constexpr Bound bound(int) { return {Half::relative, 0, Half::absolute}; }

  template <Rounding R>
  static SCRUPLE_HD u16 encode(float x, u32 coin) {
    if constexpr (R == kNearest) return Half::nearest(x);
    return static_cast<u16>((Half::position(x) + (R == kStochastic ? coin >> 16 : 0u)) >> 16);
  }
  static SCRUPLE_HD float decode(u16 code) { return Half::decode(code); }
};

}  // namespace SCRUPLE_UNIT
}  // namespace scruple
