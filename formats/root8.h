// root8: 8-bit gradient accumulators. Groups of 64 share an fp32 unit = absmax / 127^2; the code is a sign
// and a magnitude k of 7 bits that stands for k^2 units (k as two's complement). Steps grow with the root of
// a value: in an even group it errs a little more than int8, whose steps are even, and an element of 1/1000
// of its group's maximum keeps its digits where int8 would drown it in the noise of the largest. Stochastic
// rounding is between two neighbours in value, and so exactly unbiased.
#pragma once

#include "formats/codec.h"

namespace scruple {
inline namespace SCRUPLE_UNIT {

struct Root8 {
  static constexpr const char* doc = "8-bit signed squares, groups of 64";
  static constexpr int group = 64, bits = 8;
  static constexpr float top = 16129.0f;
  using Scale = float;
  static constexpr unsigned roundings = 1u << kNearest | 1u << kStochastic;
  static constexpr Layout layout(int) { return {8, 32, group}; }
  // Half a gap is k + 1/2 units where |x| is k^2 of them or more: at most |x| / 32 + 8 units + 1/2.
  static constexpr Bound bound(int) { return {0x1p-5, 8.5 / top + 0x1p-21, 0x1p-119}; }

  static SCRUPLE_HD Scale scale(float absmax) { return group_unit(absmax, top); }
  static SCRUPLE_HD float gain(float, Scale unit) { return group_gain(unit); }
  static SCRUPLE_HD float unit(Scale unit) { return unit; }
  // k = floor(sqrt(y)); up where y stands above k^2 by more than the coin leaves of the gap 2 k + 1.
  static SCRUPLE_HD u32 encode(float x, float gain, u32 coin) {
    const float scaled = magnitude(x) * gain, y = scaled < top ? scaled : top;
    const float k = whole_root(y), above = fma(-k, k, y), gap = fma(2.0f, k, 1.0f);
    const float rounded = above + coin_fraction(coin) * gap >= gap ? k + 1.0f : k;
    return bits_of(with_sign_of(x, rounded) + 0x1.8p23f) & 0xffu;  // an integer's last bits, as they are
  }
  static SCRUPLE_HD float decode(u32 code, float unit) {
    const float k = static_cast<float>(static_cast<i32>(code << 24) >> 24);
    return k * magnitude(k) * unit;
  }
};

}  // namespace SCRUPLE_UNIT
}  // namespace scruple
