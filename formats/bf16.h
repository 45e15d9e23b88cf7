// bf16: the upper half of an fp32; 8 exponent bits, 8 significant bits. Nearest rounds ties to even, as
// hardware does; the largest finite fp32 values round to infinity.
#pragma once

#include "formats/codec.h"

namespace scruple {
inline namespace SCRUPLE_UNIT {

struct Bf16 {
  static constexpr const char* doc = "upper half of fp32";
  static constexpr int fraction_bits = 16;  // of fp32 below the last bit of bf16
  static constexpr double relative = 0x1p-8, absolute = 0x1p-134;

  // A value's place on the line of bf16 numbers, in units of 2^-16 of the gap between two of them. For bf16
  // that is the fp32 pattern itself.
  template <bool Finite = false>
  static SCRUPLE_HD u32 position(float x) {
    return bits_of(x);
  }
  template <bool Careful = true>
  static SCRUPLE_HD float value(u32 position, int = 16) {
    return float_of(position);
  }

  static SCRUPLE_HD u16 nearest(float x) {
    const u32 b = bits_of(x);
    return static_cast<u16>((b + 0x7fffu + (b >> 16 & 1u)) >> 16);
  }
  static SCRUPLE_HD float decode(u16 code) { return float_of(static_cast<u32>(code) << 16); }
};

}  // namespace SCRUPLE_UNIT
}  // namespace scruple
