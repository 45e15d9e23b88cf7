// companded8: our 8-bit moments. Groups of 64 share an fp32 unit = absmax / top; a code is a small float with
// subnormals, so that coding and decoding are shifts and adds, with one division per group.
//   signed        sign, 2 exponent and 5 mantissa bits: levels 0 .. 7.875. Like FlashOptim's softsign it is four times
//                 finer near zero than at the maximum.
//   non-negative  4 exponent and 4 mantissa bits of v itself: levels 1/16 .. 31744. v keeps 3 % over a range of 2^19
//                 (700 to 1 in its root), where 8 bits of sqrt(v) keep it only near the maximum.
// What it mends in flash8: group maxima from 1e-30 to 1e30 work; an fp32 scale carries the decay of an EMA however slow;
// a value above zero never becomes zero (code 0 means exactly zero); values are divided by the unit as stored; groups of
// zeros decode to zeros; a group with a NaN or an infinity decodes to NaN.
#pragma once

#include "formats/codec.h"

namespace scruple {
inline namespace SCRUPLE_UNIT {

// A float of E exponent and M mantissa bits, without sign: levels m / 2^M below 1, then (1 + m / 2^M) 2^e.
template <int M>
struct SmallFloat {
  static constexpr int shift = 23 - M;

  // t >= 0. The fp32 pattern of t (or of 1 + t, below 1, where levels are even) already is the code, followed by the
  // bits that rounding decides.
  static SCRUPLE_HD u32 encode(float t, u32 coin) {
    const bool even = t < 1.0f;
    const u32 b = bits_of(even ? t + 1.0f : t) + (coin << (shift - 17));
    return (b >> shift) - (even ? 127u << M : 126u << M);
  }
  static SCRUPLE_HD float decode(u32 code) {
    const bool even = code < 1u << M;
    const float x = float_of((code << shift) + (even ? 127u << 23 : 126u << 23));
    return even ? x - 1.0f : x;
  }
};

struct Companded8 {
  static constexpr const char* doc = "8-bit floats (signed e2m5, non-negative e4m4 without a zero), groups of 64";
  static constexpr int group = 64, bits = 8;
  static constexpr float top = 7.875f;
  using Scale = float;
  using Code = SmallFloat<5>;
  static constexpr unsigned roundings = 1u << kNearest | 1u << kStochastic;
  static constexpr Layout layout(int) { return {8, 32, group}; }
  static constexpr Bound bound(int) { return {0x1p-6, 1.0 / 64 / top + 0x1p-22, 0x1p-126}; }

  static SCRUPLE_HD Scale scale(float absmax) { return group_unit(absmax, 1.0f / top); }
  static SCRUPLE_HD float gain(float, Scale unit) { return reciprocal_or_zero(unit); }
  static SCRUPLE_HD float unit(Scale unit) { return unit; }
  static SCRUPLE_HD u32 encode(float x, float gain, u32 coin) {
    const u32 code = Code::encode(magnitude(x * gain), coin);
    return (code < 127u ? code : 127u) | (bits_of(x) >> 24 & 0x80u);
  }
  static SCRUPLE_HD float decode(u32 code, float unit) {
    return float_of(bits_of(Code::decode(code & 0x7fu)) | (code & 0x80u) << 24) * unit;
  }
};

struct Companded8Nonneg {
  static constexpr const char* doc = Companded8::doc;
  static constexpr int group = 64, bits = 8;
  static constexpr float top = 31744.0f;
  using Scale = float;
  using Code = SmallFloat<4>;
  static constexpr unsigned roundings = Companded8::roundings;
  static constexpr Layout layout(int) { return Companded8::layout(8); }
  static constexpr Bound bound(int) { return {0x1p-5, 1.0 / 16 / top, 0x1p-126}; }

  static SCRUPLE_HD Scale scale(float absmax) { return group_unit(absmax, 1.0f / top); }
  static SCRUPLE_HD float gain(float, Scale unit) { return reciprocal_or_zero(unit); }
  static SCRUPLE_HD float unit(Scale unit) { return unit; }
  static SCRUPLE_HD u32 encode(float v, float gain, u32 coin) {
    const u32 code = Code::encode(magnitude(v * gain), coin);
    const u32 least = v > 0 ? 1u : 0u;
    const u32 most = code < 255u ? code : 255u;
    return most > least ? most : least;
  }
  static SCRUPLE_HD float decode(u32 code, float unit) { return Code::decode(code) * unit; }
};

}  // namespace SCRUPLE_UNIT
}  // namespace scruple
