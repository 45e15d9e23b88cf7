// log4 and log5: non-negative moments in 4 or 5 bits, logarithmic and without a zero. The levels stand below
// D, the group's maximum in fp32: at D, D/2, D/4 ... (log4, down to D 2^-15) or at D, 3/4 D, D/2, 3/8 D ...
// (log5, down to D 3 2^-17). Groups of 128; codes of 4 or 5 bits count levels downwards. Coding reads the
// exponent and the first bits of the mantissa; rounding decides those below. Values under the lowest level,
// zeros included, take it: a step too small, never one that explodes. A group of zeros decodes to zeros.
//
// An EMA that is rounded stochastically stays right on average, but it wanders: by about half the gap between
// two levels, in squares, whatever beta2 (each step moves v by c2 |g^2 - v| on average, a jump is a gap wide,
// and the pull back to the mean is c2). So 1 / sqrt(v) is too large on average, and Adam's steps with it.
// `spread` is by how much: the step divides by spread * sqrt(v), while the EMA carries v on as it is. The
// figures are measured (bench/format_error.cpp); bench/results/2026-11-15-following.md has the table.
#pragma once

#include "formats/codec.h"

namespace scruple {
inline namespace SCRUPLE_UNIT {

template <int Bits>
struct Log {
  static_assert(Bits == 4 || Bits == 5);
  static constexpr const char* doc =
      Bits == 4 ? "4-bit powers of two below the group's maximum, no zero, groups of 128"
                : "5-bit half powers of two below the group's maximum, no zero, groups of 128";
  static constexpr int group = 128, bits = Bits;
  static constexpr int shift = Bits == 4 ? 23 : 22;  // of fp32 below the last bit that codes see
  static constexpr u32 one = (127u << 23) >> shift;  // the level 1 = D
  static constexpr u32 lowest = (1u << Bits) - 1u;   // the code of the lowest level
  static constexpr float spread = Bits == 4 ? 1.16f : 1.075f;
  using Scale = float;
  static constexpr unsigned roundings = 1u << kNearest | 1u << kStochastic;
  static constexpr Layout layout(int) { return {Bits, 32, group}; }
  static constexpr float least =
      Bits == 4 ? 0x1p-111f : 0x1p-110f;  // of D: its lowest level is a normal number
  static constexpr Bound bound(int) {
    return {(Bits == 4 ? 1.0 / 3 : 0.2) + 0x1p-20, Bits == 4 ? 0x1p-15 : 0x1.8001p-16, least};
  }

  static SCRUPLE_HD Scale scale(float absmax) {
    const float unit = group_unit(absmax, 1.0f);
    const float floored = unit > least ? unit : least;
    return unit > 0 ? floored : unit;
  }
  static SCRUPLE_HD float gain(float, Scale scale) { return scale > 0 ? 1.0f / scale : 0.0f; }
  template <class F>  // a vector computes both
  static SCRUPLE_HD F scale(F absmax) {
    const F unit = group_unit(absmax, 1.0f);
    return select(unit > 0.0f, select(unit > least, unit, F(least)), unit);
  }
  template <class F>
  static SCRUPLE_HD F gain(F, F scale) {
    return select(scale > 0.0f, 1.0f / scale, F(0.0f));
  }
  static SCRUPLE_HD float unit(Scale scale) { return scale; }
  static SCRUPLE_HD u32 encode(float v, float gain, u32 coin) {
    const u32 level = (magnitude_bits(v * gain) + (coin >> (32 - shift))) >> shift;
    const i32 code = static_cast<i32>(one) - static_cast<i32>(level), most = static_cast<i32>(lowest);
    const i32 held = code < most ? code : most;
    return static_cast<u32>(held > 0 ? held : 0);  // D itself may land an ulp above
  }
  // As encode and decode, for the vectors of engine/lanes.h: the code in the uppermost byte.
  template <class F, class U>
  static SCRUPLE_HD U encode_lanes(F v, F gain, U coin) {
    const U level = (magnitude_bits(v * gain) + (coin >> (32 - shift))) >> shift;
    return (one - smaller(larger(level, one - lowest), one)) << 24;
  }
  template <class F, class U>
  static SCRUPLE_HD F decode_lanes(U code, F scale) {
    return float_of((one - (code >> 24 & lowest)) << shift) * scale;
  }
  static SCRUPLE_HD float decode(u32 code, float scale) {
    return float_of((one - (code & lowest)) << shift) * scale;
  }
};

}  // namespace SCRUPLE_UNIT
}  // namespace scruple
