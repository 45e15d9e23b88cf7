// engine/strings.h on NEON: 32 values at a time by table lookups and shifts, for the widths that gain by it.
#pragma once

#include "engine/lanes.h"

#if SCRUPLE_LANES == 4
namespace scruple {
inline namespace SCRUPLE_UNIT {
namespace {

// Which byte each byte of a table lookup comes from; kNone gives zero.
inline constexpr int kNone = 99;
struct ByteIndices {
  u8 of[16];
};
constexpr ByteIndices byte_indices(auto from) {
  ByteIndices indices{};
  for (int i = 0; i < 16; ++i) indices.of[i] = static_cast<u8>(from(i));
  return indices;
}
SCRUPLE_HD uint8x16_t look_up(uint8x16_t bytes, const ByteIndices& indices) {
  return vqtbl1q_u8(bytes, vld1q_u8(indices.of));
}

// ---- Values of 4 to 7 bits: 16 of them are 2 K bytes ----

// 16 values, 8 in the K bytes at the front of each half of a vector: to one byte each, and back. A shift that
// keeps the other bits of its target moves every other group of values.
template <int K>
SCRUPLE_HD uint8x16_t spread16(uint8x16_t x) {
  const uint64x2_t eights = vreinterpretq_u64_u8(x);
  const uint32x4_t fours = vreinterpretq_u32_u64(vsliq_n_u64(eights, vshrq_n_u64(eights, 4 * K), 32));
  const uint16x8_t twos = vreinterpretq_u16_u32(vsliq_n_u32(fours, vshrq_n_u32(fours, 2 * K), 16));
  const uint8x16_t ones = vreinterpretq_u8_u16(vsliq_n_u16(twos, vshrq_n_u16(twos, K), 8));
  return vandq_u8(ones, vdupq_n_u8((1u << K) - 1u));
}
template <int K>
SCRUPLE_HD uint8x16_t gather16(uint8x16_t x) {
  const uint16x8_t ones = vreinterpretq_u16_u8(x);
  const uint32x4_t twos = vreinterpretq_u32_u16(vsliq_n_u16(ones, vshrq_n_u16(ones, 8), K));
  const uint64x2_t fours = vreinterpretq_u64_u32(vsliq_n_u32(twos, vshrq_n_u32(twos, 16), 2 * K));
  return vreinterpretq_u8_u64(vsliq_n_u64(fours, vshrq_n_u64(fours, 32), 4 * K));
}

// K bytes to the front of each half, from 2 K bytes side by side that begin at byte `start`.
template <int K>
constexpr ByteIndices indices_apart(int start) {
  return byte_indices([=](int i) { return i % 8 < K ? start + i / 8 * K + i % 8 : kNone; });
}
template <int K>
requires(K >= 4 && K < 8) void unpack32(const u8* from, u8* to) {
  static constexpr ByteIndices kFirst = indices_apart<K>(0), kLast = indices_apart<K>(16 - 2 * K);
  vst1q_u8(to, spread16<K>(look_up(vld1q_u8(from), kFirst)));
  vst1q_u8(to + 16, spread16<K>(look_up(vld1q_u8(from + 4 * K - 16), kLast)));
}
template <int K>
requires(K >= 4 && K < 8) void pack32(const u8* from, u8* to) {
  static constexpr ByteIndices kTogether =
      byte_indices([](int i) { return i < 2 * K ? i / K * 8 + i % K : kNone; });
  const uint8x16_t last = look_up(gather16<K>(vld1q_u8(from + 16)), kTogether);
  vst1q_u8(to,
           look_up(gather16<K>(vld1q_u8(from)), kTogether));  // the stores below overwrite what is too much
  vst1_u8(to + 2 * K, vget_low_u8(last));
  vst1_u8(to + 4 * K - 8, vget_low_u8(vextq_u8(last, last, 2 * K - 8)));
}

// ---- Values of 9, 10 and 12 bits: each lies within two bytes ----

template <int K>
inline constexpr bool in_two_bytes = K == 9 || K == 10 || K == 12;
struct Shifts {
  std::int16_t of[8];
};
// By how many bits each of 8 values is shifted within its two bytes.
template <int K>
constexpr Shifts shifts(int sign) {
  Shifts shifts{};
  for (int i = 0; i < 8; ++i) shifts.of[i] = static_cast<std::int16_t>(sign * (i * K % 8));
  return shifts;
}
template <int K, int J = 0>
requires(in_two_bytes<K>) SCRUPLE_HD void unpack32(const u8* from, u16* to) {
  constexpr int kFrom = J * K < 4 * K - 16 ? J * K : 4 * K - 16;  // where 16 bytes can still be read
  static constexpr ByteIndices kPairs =
      byte_indices([](int i) { return J * K - kFrom + i / 2 * K / 8 + i % 2; });
  static constexpr Shifts kDown = shifts<K>(-1);
  const uint8x16_t pairs = look_up(vld1q_u8(from + kFrom), kPairs);
  const uint16x8_t values = vshlq_u16(vreinterpretq_u16_u8(pairs), vld1q_s16(kDown.of));
  vst1q_u16(to + 8 * J, vandq_u16(values, vdupq_n_u16((1u << K) - 1u)));
  if constexpr (J < 3) unpack32<K, J + 1>(from, to);
}
// The lower, or the upper, byte of each pair, at the byte of the string that it belongs to.
template <int K>
constexpr ByteIndices indices_of_pairs(int upper) {
  ByteIndices indices = byte_indices([](int) { return kNone; });
  for (int i = 0; i < 8; ++i) indices.of[i * K / 8 + upper] = static_cast<u8>(2 * i + upper);
  return indices;
}
template <int K>
requires(in_two_bytes<K>) void pack32(const u16* from, u8* to) {
  static constexpr ByteIndices kLower = indices_of_pairs<K>(0), kUpper = indices_of_pairs<K>(1);
  static constexpr Shifts kUp = shifts<K>(1);
  SCRUPLE_UNROLL
  for (int j = 0; j < 4; ++j) {
    const uint16x8_t values = vandq_u16(vld1q_u16(from + 8 * j), vdupq_n_u16((1u << K) - 1u));
    const uint8x16_t pairs = vreinterpretq_u8_u16(vshlq_u16(values, vld1q_s16(kUp.of)));
    const uint8x16_t bytes = vorrq_u8(look_up(pairs, kLower), look_up(pairs, kUpper));
    if (j < 3) {
      vst1q_u8(to + j * K, bytes);  // the next store overwrites what is too much
    } else {
      vst1_u8(to + j * K, vget_low_u8(bytes));
      vst1_u8(to + 4 * K - 8, vget_low_u8(vextq_u8(bytes, bytes, K - 8)));
    }
  }
}

}  // namespace
}  // namespace SCRUPLE_UNIT
}  // namespace scruple
#endif
