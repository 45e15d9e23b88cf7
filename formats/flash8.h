// flash8: FlashOptim's published 8-bit moments (2602.23349, section 3.2), to the code, so that its states can
// be read and written. Groups of 32, s = max(absmax, 1e-12), stored as fp16.
//   signed        x = m / s, y = 2x / (1 + |x|), code = floor(127 y + 1/2)
//                 back: y = code / 127, m = s y / (2 - |y|)
//   non-negative  of sqrt(v): code = floor(255 sqrt(v) / s + 1/2)
//                 back: v = (s code / 255)^2
// Its flaws come with it: coding divides by s before s is rounded, fp16 scales under 3e-8 are zero and over
// 65504 infinite, and small v decode to zero. companded8 mends them. Stochastic rounding, which FlashOptim
// does not have, is unbiased in y and in sqrt(v), not quite in m and v.
#pragma once

#include "formats/fp16.h"

namespace scruple {
inline namespace SCRUPLE_UNIT {

struct Flash8 {
  static constexpr const char* doc =
      "FlashOptim's 8-bit moments: softsign or square root, fp16 scale, groups of 32";
  static constexpr int group = 32, bits = 8;
  using Scale = u16;
  static constexpr unsigned roundings = 1u << kNearest | 1u << kStochastic;
  static constexpr Layout layout(int) { return {8, 16, group}; }
  // The steepest slope of the decoder is 2; a scale in fp16 adds 2^-11, and 2^-25 where it is subnormal.
  static constexpr Bound bound(int) { return {0x1p-11, 1.0 / 127 + 0x1p-20, 0x1p-25 + 1e-12}; }

  static SCRUPLE_HD float raised(float absmax) { return absmax < 1e-12f ? 1e-12f : absmax; }
  static SCRUPLE_HD Scale scale(float absmax) { return Fp16::ieee(raised(absmax)); }
  static SCRUPLE_HD float gain(float absmax, Scale) { return raised(absmax); }
  static SCRUPLE_HD float unit(Scale s) { return Fp16::decode(s); }
  static SCRUPLE_HD u32 encode(float m, float s, u32 coin) {
    const float x = quotient(m, s, 1.0f / s);
    const float y = tame_quotient(2.0f * x, 1.0f + magnitude(x));
    const i32 code = round_by(y * 127.0f, coin);
    return static_cast<u32>(code < 127 ? code : 127) & 0xffu;  // the sum of 127 and a coin may be rounded up
  }
  // As encode and decode, for the vectors of engine/lanes.h: the code in the uppermost byte.
  template <class F, class U>
  static SCRUPLE_HD U encode_lanes(F m, F s, U coin) {
    const F x = quotient(m, s, 1.0f / s);
    const F y = tame_quotient(2.0f * x, 1.0f + magnitude(x));
    return smaller_signed(round_by(y * 127.0f, coin), 127u) << 24;
  }
  template <class F, class U>
  static SCRUPLE_HD F decode_lanes(U code, F s) {
    const F y = quotient(number_of<24>(code), F(127.0f), F(1.0f / 127.0f));
    return tame_quotient(y, 2.0f - magnitude(y)) * s;
  }
  static constexpr bool scales_levels = true;  // decode(code, s) is decode(code, 1) * s
  static SCRUPLE_HD float decode(u32 code, float s) {
    const float y = quotient(static_cast<float>(static_cast<i32>(code << 24) >> 24), 127.0f, 1.0f / 127.0f);
    return tame_quotient(y, 2.0f - magnitude(y)) * s;
  }
};

struct Flash8Nonneg {
  static constexpr const char* doc = Flash8::doc;
  static constexpr int group = 32, bits = 8;
  using Scale = u16;
  static constexpr unsigned roundings = Flash8::roundings;
  static constexpr Layout layout(int) { return Flash8::layout(8); }
  // (r + d)^2 - r^2 <= d (2 r + d) for a root r <= s and an error d <= s / 510, plus the rounding of s:
  // relative, or, where its fp16 is subnormal, 2 r 2^-25 <= 2^-9 r^2 + 2^-41.
  static constexpr Bound bound(int) { return {0x1p-9, 2.05 / 510, 0x1p-41 + 0x1p-49}; }

  static SCRUPLE_HD Scale scale(float absmax) { return Flash8::scale(__builtin_sqrtf(absmax)); }
  static SCRUPLE_HD float gain(float absmax, Scale) { return Flash8::raised(__builtin_sqrtf(absmax)); }
  static SCRUPLE_HD float unit(Scale s) { return Fp16::decode(s); }
  static SCRUPLE_HD u32 encode(float v, float s, u32 coin) {
    const float root = tame_root(v > 0 ? v : 0.0f);
    const i32 code = round_by(quotient(root, s, 1.0f / s) * 255.0f, coin);
    return static_cast<u32>(code < 255 ? code : 255);  // the sum of 255 and a coin may be rounded up
  }
  template <class F, class U>
  static SCRUPLE_HD U encode_lanes(F v, F s, U coin) {
    const F root = tame_root(select(v > 0.0f, v, F(0.0f)));
    return smaller_signed(round_by(quotient(root, s, 1.0f / s) * 255.0f, coin), 255u) << 24;
  }
  template <class F, class U>
  static SCRUPLE_HD F decode_lanes(U code, F s) {
    const F root = quotient(number_of(code >> 24), F(255.0f), F(1.0f / 255.0f)) * s;
    return root * root;
  }
  static SCRUPLE_HD float decode(u32 code, float s) {
    const float root = quotient(static_cast<float>(code), 255.0f, 1.0f / 255.0f) * s;
    return root * root;
  }
};

}  // namespace SCRUPLE_UNIT
}  // namespace scruple
