// log4: 4-bit non-negative moments, logarithmic and without a zero: v = D 2^-code, code 0..15, D = the
// group's maximum in fp32, groups of 128, two codes to a byte, the first in the low nibble. Coding reads the
// exponent; rounding decides the mantissa. Values under D 2^-15, zeros included, take D 2^-15: a step too
// small, never one that explodes. A group of zeros decodes to zeros. The base is fixed at 1/2 where the
// papers fit it to a quantile: see docs/formats.md for the measurement.
#pragma once

#include "formats/codec.h"

namespace scruple {
inline namespace SCRUPLE_UNIT {

struct Log4 {
  static constexpr const char* doc = "4-bit powers of two below the group's maximum, no zero, groups of 128";
  static constexpr int group = 128, bits = 4;
  using Scale = float;
  static constexpr unsigned roundings = 1u << kNearest | 1u << kStochastic;
  static constexpr Layout layout(int) { return {4, 32, group}; }
  static constexpr Bound bound(int) { return {1.0 / 3 + 0x1p-20, 0x1p-15, 0x1p-111}; }

  static SCRUPLE_HD Scale scale(float absmax) {
    const float unit = group_unit(absmax, 1.0f);
    const float floored = unit > 0x1p-111f ? unit : 0x1p-111f;  // so that D 2^-15 is a normal number
    return unit > 0 ? floored : unit;
  }
  static SCRUPLE_HD float gain(float, Scale scale) { return scale > 0 ? 1.0f / scale : 0.0f; }
  static SCRUPLE_HD float unit(Scale scale) { return scale; }
  static SCRUPLE_HD u32 encode(float v, float gain, u32 coin) {
    const u32 rounded = (magnitude_bits(v * gain) + (coin << 6)) >> 23;
    const i32 code = 127 - static_cast<i32>(rounded);
    const u32 most = static_cast<u32>(code < 15 ? code : 15);
    return code > 0 ? most : 0u;
  }
  static SCRUPLE_HD float decode(u32 code, float scale) {
    return float_of((127u - (code & 15u)) << 23) * scale;
  }
};

}  // namespace SCRUPLE_UNIT
}  // namespace scruple
