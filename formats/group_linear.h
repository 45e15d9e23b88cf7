// int8..int12 and the signed linear8: groups of 64 share an fp32 unit u = absmax / B, B = 2^(bits-1) - 1;
// code = round(x / u) in two's complement, packed `bits` to a value; back: code * u. LPMM (Li et al., ICLR
// 2023 submission) with its noise mended: it is added before the floor and not before a clamp, so the element
// at absmax is unbiased too. Read with dither, the random number that rounding added is subtracted again
// (subtractive dither): the error is then uniform, bounded by half a step and independent of the value.
#pragma once

#include "formats/codec.h"

namespace scruple {
inline namespace SCRUPLE_UNIT {

template <int Bits>
struct GroupLinear {
  static constexpr const char* doc = "scaled integers, groups of 64";
  static constexpr int group = 64, bits = Bits;
  static constexpr i32 top = (1 << (Bits - 1)) - 1;
  using Scale = float;
  static constexpr unsigned roundings = 1u << kNearest | 1u << kStochastic | (Bits == 8 ? 1u << kDither : 0u);
  static constexpr Layout layout(int) { return {Bits, 32, group}; }
  static constexpr Bound bound(int) { return {0, 0.5 / top + 0x1p-22, 0x1p-126}; }

  template <class F>
  static SCRUPLE_HD F scale(F absmax) {
    return group_unit(absmax, top);
  }
  template <class F>
  static SCRUPLE_HD F gain(F, F unit) {
    return group_gain(unit);
  }
  static SCRUPLE_HD float unit(Scale unit) { return unit; }
  static SCRUPLE_HD u32 encode(float x, float gain, u32 coin) {
    return round_scaled<Bits - 1>(x, gain, coin) & ((1u << Bits) - 1u);
  }
  // As encode and decode, for the vectors of engine/lanes.h: the code in the uppermost byte, or the lower bits
  // of the upper half.
  static constexpr int kAbove = Bits <= 8 ? 24 : 16;
  template <class F, class U>
  static SCRUPLE_HD U encode_lanes(F x, F gain, U coin) {
    return round_scaled<Bits - 1>(x, gain, coin) << kAbove;
  }
  template <class F, class U>
  static SCRUPLE_HD F decode_lanes(U code, F unit) {
    return number_of<32 - Bits>(code << (32 - Bits - kAbove)) * unit;
  }
  static SCRUPLE_HD float number(u32 code) {
    return static_cast<float>(static_cast<i32>(code << (32 - Bits)) >> (32 - Bits));
  }
  static SCRUPLE_HD float decode(u32 code, float unit) { return number(code) * unit; }
  static SCRUPLE_HD float decode_dither(u32 code, float unit, u32 coin) {
    return (number(code) + (0.5f - coin_fraction(coin))) * unit;
  }
};

}  // namespace SCRUPLE_UNIT
}  // namespace scruple
