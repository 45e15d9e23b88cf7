// companded8: our 8-bit moments. Groups of 64 share an fp32 unit = absmax / top. In units, a magnitude t is
// coded as the float 1 + t with 4 mantissa bits: even steps of 1/16 near zero that double with every power of
// two, the curve of telephony's mu-law (ITU-T G.711). Coding and decoding are one fma and a shift, with one
// division per group.
//   signed        sign and 7 bits: levels 0 .. 247. A value keeps 3 % down to 1/250 of its group's maximum
//                 and is coded in even steps of 1/4,000 of it below.
//   non-negative  8 bits of v itself: levels 1/16 .. 63487. v keeps 3 % over a range of 63,000 to 1 (250 to
//                 1 in its root) and never becomes zero: a step too small, never one that explodes.
// Adam divides each element by its own history, so it is the relative error of small elements that counts;
// codes of even steps (linear8) or of sqrt(v) (flash8) lose it. What else it mends in flash8: group maxima
// from 1e-30 to 1e30 work; an fp32 unit carries the decay of an EMA however slow; values are divided by the
// unit as stored; groups of zeros decode to zeros; a NaN or an infinity is stored as 0 and leaves its group
// alone. Rounded to nearest, an element stands still while its moment moves by less than half a code a step,
// which at beta2 = 0.999 is always: round moments stochastically.
#pragma once

#include "formats/codec.h"

namespace scruple {
inline namespace SCRUPLE_UNIT {

// Bits 19 and up of the fp32 pattern of 1 + t, over those of 1, are the code; the bits below are what
// rounding decides. Codes and the patterns they stand for need the upper 16 bits alone, and saying so keeps
// the vectors narrow.
struct MuLaw {
  static constexpr u32 one = 127u << 23;

  // The reciprocal two ulps up: a value that stands on a level lands there or up to 7 ulps above, never
  // below. 16 bits of the coin leave 8 to the next code, so such a value stays, whatever the coin, and the
  // group's maximum with it.
  static SCRUPLE_HD float gain(float unit) {
    return unit > 0 ? float_of(bits_of(tame_reciprocal(unit)) + 2u) : 0.0f;
  }
  template <class F>  // a vector computes both
  static SCRUPLE_HD F gain(F unit) {
    return select(unit > 0.0f, float_of(bits_of(tame_reciprocal(unit)) + 2u), F(0.0f));
  }
  // The bits of 1 + t.
  template <class F>
  static SCRUPLE_HD auto one_plus(F magnitude, F gain) {
    return bits_of(fma(magnitude, gain, 1.0f));
  }
  // The coin's upper 16 bits, where they round a code.
  template <class U>
  static SCRUPLE_HD U below(U coin) {
    return coin >> 13 & 0x7fff8u;
  }
  // Where 1 + t stands, rounded by the coin: over the pattern of 1, the code from bit 19 on.
  static SCRUPLE_HD u32 place(float x, float gain, u32 coin) {
    return one_plus(magnitude(x), gain) + below(coin);
  }
  // place - one, the code in the uppermost byte. The coin's bits are none of -one's, so that one operation
  // masks and adds.
  template <class F, class U>
  static SCRUPLE_HD U upper_code(F magnitude, F gain, U coin) {
    return (one_plus(magnitude, gain) + (below(coin) | (0u - one))) << 5;
  }
  // The code in the upper 8 bits of 16.
  static SCRUPLE_HD u16 code(u32 place) {
    return static_cast<u16>(static_cast<u16>(upper(place) - (one >> 16)) << 5);
  }
  static SCRUPLE_HD u16 upper(u32 bits) { return static_cast<u16>(bits >> 16); }
  static SCRUPLE_HD float from_upper(u16 bits) { return float_of(static_cast<u32>(bits) << 16); }
};

struct Companded8 {
  static constexpr const char* doc =
      "8-bit mu-law floats; as a non-negative moment without a zero; groups of 64";
  static constexpr int group = 64, bits = 8;
  static constexpr float top = 247.0f;
  using Scale = float;
  static constexpr unsigned roundings = 1u << kNearest | 1u << kStochastic;
  static constexpr Layout layout(int) { return {8, 32, group}; }
  static constexpr Bound bound(int) { return {0x1p-5, 1.0 / 32 / top + 0x1p-21, 0x1p-126}; }

  template <class F>
  static SCRUPLE_HD F scale(F absmax) {
    return group_unit(absmax, top);
  }
  template <class F>
  static SCRUPLE_HD F gain(F, F unit) {
    return MuLaw::gain(unit);
  }
  static SCRUPLE_HD float unit(Scale unit) { return unit; }
  // The code in the uppermost byte. As encode below, which stays in 16 bits for the sake of the CPU's
  // vectors.
  template <class F, class U>
  static SCRUPLE_HD U encode_upper(F x, F gain, U coin) {
    return bits_of(with_sign_of(x, float_of(MuLaw::upper_code(magnitude(x), gain, coin))));
  }
  static SCRUPLE_HD u32 encode(float x, float gain, u32 coin) {
    const u16 sign = MuLaw::upper(bits_of(x));
    return static_cast<u16>(MuLaw::code(MuLaw::place(x, gain, coin)) | (sign & 0x8000u)) >> 8;
  }
  // As encode and decode, for the vectors of engine/lanes.h: the code in the uppermost byte.
  template <class F, class U>
  static SCRUPLE_HD U encode_lanes(F x, F gain, U coin) {
    return encode_upper(x, gain, coin);
  }
  template <class F, class U>
  static SCRUPLE_HD F decode_lanes(U code, F unit) {
    const F f = float_of(((code & 0x7f000000u) >> 5) + MuLaw::one);
    const F su = float_of((bits_of(unit) ^ 0x80000000u) ^ (code & 0x80000000u));
    return fma(-f, su, su);
  }
  // F su - su, su the unit with the code's sign: in 16 bits for the CPU's vectors, by products on a GPU.
  static SCRUPLE_HD float decode(u32 code, float unit) {
#if defined(__CUDA_ARCH__)
    const float su = float_of(bits_of(unit) ^ (code & 0x80u) << 24);
    return fma(float_of((code & 0x7fu) * 0x80000u + MuLaw::one), su, -su);
#else
    const float f = MuLaw::from_upper(static_cast<u16>(((code & 0x7fu) << 3) + (MuLaw::one >> 16)));
    const float su = float_of(bits_of(unit) | static_cast<u32>(static_cast<u16>((~code & 0x80u) << 8)) << 16);
    return fma(-f, su, su);
#endif
  }
};

struct Companded8Nonneg {
  static constexpr const char* doc = Companded8::doc;
  static constexpr int group = 64, bits = 8;
  static constexpr float top = 63487.0f;
  using Scale = float;
  static constexpr unsigned roundings = Companded8::roundings;
  static constexpr float spread = 1.01f;  // formats/log.h says why
  static constexpr Layout layout(int) { return Companded8::layout(8); }
  static constexpr Bound bound(int) { return {0x1p-5, 1.0 / 16 / top + 0x1p-21, 0x1p-126}; }

  template <class F>
  static SCRUPLE_HD F scale(F absmax) {
    return group_unit(absmax, top);
  }
  template <class F>
  static SCRUPLE_HD F gain(F, F unit) {
    return MuLaw::gain(unit);
  }
  static SCRUPLE_HD float unit(Scale unit) { return unit; }
  template <class F, class U>
  static SCRUPLE_HD U encode_upper(F v, F gain, U coin) {
    return encode_lanes(magnitude(v), gain, coin);
  }
  // Of values without a sign: fused loops leave others to the tiles.
  template <class F, class U>
  static SCRUPLE_HD U encode_lanes(F v, F gain, U coin) {
    return larger(MuLaw::upper_code(v, gain, coin), U(1u << 24));
  }
  template <class F, class U>
  static SCRUPLE_HD F decode_lanes(U code, F unit) {
    return fma(float_of((code >> 5) + MuLaw::one), unit, -unit);
  }
  static SCRUPLE_HD u32 encode(float v, float gain, u32 coin) {
    const u16 code = MuLaw::code(MuLaw::place(v, gain, coin)) >> 8;
    return code > 1u ? code : 1u;
  }
  static SCRUPLE_HD float decode(u32 code, float unit) {
    return fma(MuLaw::from_upper(static_cast<u16>((code << 3) + (MuLaw::one >> 16))), unit, -unit);
  }
};

}  // namespace SCRUPLE_UNIT
}  // namespace scruple
