// The vectors of engine/lanes.h on NEON.
#pragma once

#include "engine/lanes_base.h"

#if SCRUPLE_LANES == 4
#include <arm_neon.h>

namespace scruple {
inline namespace SCRUPLE_UNIT {

SCRUPLE_HD Floats fma(Floats a, Floats b, Floats c) { return vfmaq_f32(c, a, b); }
SCRUPLE_HD Floats root(Floats x) { return vsqrtq_f32(x); }
SCRUPLE_HD Words larger(Words a, Words b) { return vmaxq_u32(a, b); }
SCRUPLE_HD Words smaller(Words a, Words b) { return vminq_u32(a, b); }
SCRUPLE_HD Words smaller_signed(Words a, Words b) { return vminq_s32(a, b); }
SCRUPLE_HD Floats number_of(Words a) { return vcvtq_f32_s32(a); }
template <int Bits>
requires(Bits > 0) SCRUPLE_HD Floats number_of(Words a) { return vcvtq_n_f32_s32(a, Bits); }
SCRUPLE_HD Words floor_of(Floats x) { return vcvtmq_s32_f32(x); }
SCRUPLE_HD bool reaches(Words a, u32 least) { return vmaxvq_u32(a) >= least; }
template <int N>
SCRUPLE_HD Words largest_of_each(const Words (&a)[N]) {
  static_assert(N == 1 || N == 2 || N == 4);
  const auto at = [&](int i) -> uint32x4_t { return a[i < N ? i : N - 1]; };
  return vpmaxq_u32(vpmaxq_u32(at(0), at(1)), vpmaxq_u32(at(2), at(3)));
}

struct Halves16 {
  uint16x8_t low, high;
};
SCRUPLE_HD Halves16 load_halves(const u8* from) {
  return {vreinterpretq_u16_u8(vld1q_u8(from)), vreinterpretq_u16_u8(vld1q_u8(from + 16))};
}
SCRUPLE_HD Words upper_halves(Halves16 x, int part) {
  const uint16x8_t zero = vdupq_n_u16(0), from = part < 2 ? x.low : x.high;
  return part % 2 == 0 ? vzip1q_u16(zero, from) : vzip2q_u16(zero, from);
}
using Bytes16 = uint8x16_t;
SCRUPLE_HD Bytes16 load_bytes(const u8* from) { return vld1q_u8(from); }
SCRUPLE_HD Words upper_bytes(Bytes16 x, int part) {
  // Byte i of the result is byte kFrom[part][i] of x; 99, which x does not have, gives zero.
  static constexpr u8 kFrom[4][16] = {{99, 99, 99, 0, 99, 99, 99, 1, 99, 99, 99, 2, 99, 99, 99, 3},
                                      {99, 99, 99, 4, 99, 99, 99, 5, 99, 99, 99, 6, 99, 99, 99, 7},
                                      {99, 99, 99, 8, 99, 99, 99, 9, 99, 99, 99, 10, 99, 99, 99, 11},
                                      {99, 99, 99, 12, 99, 99, 99, 13, 99, 99, 99, 14, 99, 99, 99, 15}};
  return vqtbl1q_u8(x, vld1q_u8(kFrom[part]));
}
SCRUPLE_HD Words upper_halves_and_signed_bytes(Halves16 x, Bytes16 y, int part) {
  const uint8x16_t zero = vdupq_n_u8(0);
  const int16x8_t below = vreinterpretq_s16_u8(part < 2 ? vzip1q_u8(zero, y) : vzip2q_u8(zero, y));
  const int32x4_t upper = upper_halves(x, part);
  return part % 2 == 0 ? vaddw_s16(upper, vget_low_s16(below)) : vaddw_high_s16(upper, below);
}

// The upper, or the lower, halves of 8 words; the upper bytes of 16 halves.
SCRUPLE_HD uint16x8_t upper_halves_of(Words a, Words b) { return vuzp2q_u16(a, b); }
SCRUPLE_HD uint16x8_t lower_halves_of(Words a, Words b) { return vuzp1q_u16(a, b); }
SCRUPLE_HD uint8x16_t upper_bytes_of(uint16x8_t a, uint16x8_t b) {
  return vuzp2q_u8(vreinterpretq_u8_u16(a), vreinterpretq_u8_u16(b));
}
SCRUPLE_HD void store_upper_halves(const Words (&x)[kParts], u8* to) {
  vst1q_u8(to, vreinterpretq_u8_u16(upper_halves_of(x[0], x[1])));
  vst1q_u8(to + 16, vreinterpretq_u8_u16(upper_halves_of(x[2], x[3])));
}
SCRUPLE_HD void store_upper_bytes(const Words (&x)[kParts], u8* to) {
  vst1q_u8(to, upper_bytes_of(upper_halves_of(x[0], x[1]), upper_halves_of(x[2], x[3])));
}
SCRUPLE_HD void store_second_bytes(const Words (&x)[kParts], u8* to) {
  vst1q_u8(to, upper_bytes_of(lower_halves_of(x[0], x[1]), lower_halves_of(x[2], x[3])));
}

}  // namespace SCRUPLE_UNIT
}  // namespace scruple
#endif
