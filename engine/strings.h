// Planes as the CPU's loops see them: values at any address, and strings of K bits.
#pragma once

#include "engine/lanes.h"
#include "formats/codec.h"

namespace scruple {
inline namespace SCRUPLE_UNIT {
namespace {

// T at any address.
template <class T>
struct LooseOf {
  typedef T type __attribute__((aligned(1), may_alias));
};
template <class T>
using Loose = typename LooseOf<T>::type;

template <class T>
SCRUPLE_HD Loose<T>* at(u8* plane, i64 index) {
  return reinterpret_cast<Loose<T>*>(plane + index * static_cast<i64>(sizeof(T)));
}
SCRUPLE_HD u8* at_bit(u8* plane, i64 bit) { return plane + bit / 8; }

// ---- Strings of K bits ----
// Value i stands at bit i K of a little-endian string; 32 values are moved at a time.

// 8 values of K bits next to each other, and each in a byte of its own.
template <int K>
SCRUPLE_HD u64 spread8(u64 x) {
#if SCRUPLE_LANES == 16  // one instruction, and slow only where AVX-512 is not
  return _pdep_u64(x, ((u64{1} << K) - 1u) * 0x101010101010101u);
#else
  constexpr u64 kOne = (1u << K) - 1u, kTwo = (u64{1} << 2 * K) - 1u, kFour = (u64{1} << 4 * K) - 1u;
  x = (x & kFour) | (x & kFour << 4 * K) << (32 - 4 * K);
  x = (x & kTwo * 0x100000001u) | (x & (kTwo << 2 * K) * 0x100000001u) << (16 - 2 * K);
  return (x & kOne * 0x1000100010001u) | (x & (kOne << K) * 0x1000100010001u) << (8 - K);
#endif
}
template <int K>
SCRUPLE_HD u64 gather8(u64 x) {
#if SCRUPLE_LANES == 16
  return _pext_u64(x, ((u64{1} << K) - 1u) * 0x101010101010101u);
#else
  constexpr u64 kOne = (1u << K) - 1u, kTwo = (u64{1} << 2 * K) - 1u, kFour = (u64{1} << 4 * K) - 1u;
  x = (x & kOne * 0x1000100010001u) | (x >> (8 - K) & (kOne << K) * 0x1000100010001u);
  x = (x & kTwo * 0x100000001u) | (x >> (16 - 2 * K) & (kTwo << 2 * K) * 0x100000001u);
  return (x & kFour) | (x >> (32 - 4 * K) & kFour << 4 * K);
#endif
}

#if SCRUPLE_LANES == 4
// The same for 16 values, 8 in each half of a vector: every other value moves next to the one before it, or away from
// it, by a shift that leaves what the other holds.
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
// Where the K bytes of each half stand when they stand side by side from byte `start` on, and back.
struct Places {
  u8 of[16] = {};
};
template <int K>
constexpr Places places_apart(int start) {
  Places places;
  for (int i = 0; i < 16; ++i) places.of[i] = static_cast<u8>(i % 8 < K ? start + i / 8 * K + i % 8 : 99);
  return places;
}
template <int K>
constexpr Places places_together() {
  Places places;
  for (int i = 0; i < 16; ++i) places.of[i] = static_cast<u8>(i < 2 * K ? i / K * 8 + i % K : 99);
  return places;
}

template <int K>
SCRUPLE_HD void unpack32_lanes(const u8* from, u8* to) {
  static constexpr Places kFirst = places_apart<K>(0), kLast = places_apart<K>(16 - 2 * K);
  vst1q_u8(to, spread16<K>(vqtbl1q_u8(vld1q_u8(from), vld1q_u8(kFirst.of))));
  vst1q_u8(to + 16, spread16<K>(vqtbl1q_u8(vld1q_u8(from + 4 * K - 16), vld1q_u8(kLast.of))));
}
template <int K>
SCRUPLE_HD void pack32_lanes(const u8* from, u8* to) {
  static constexpr Places kTogether = places_together<K>();
  const uint8x16_t places = vld1q_u8(kTogether.of);
  const uint8x16_t last = vqtbl1q_u8(gather16<K>(vld1q_u8(from + 16)), places);
  vst1q_u8(to, vqtbl1q_u8(gather16<K>(vld1q_u8(from)), places));  // the last covers what is too much
  vst1_u8(to + 2 * K, vget_low_u8(last));
  vst1_u8(to + 4 * K - 8, vget_low_u8(vextq_u8(last, last, 2 * K - 8)));
}
#endif

template <int K, class T>
void unpack32(const u8* from, T* to) {
#if SCRUPLE_LANES == 4
  if constexpr (K >= 4 && K < 8 && sizeof(T) == 1) return unpack32_lanes<K>(from, to);
#endif
  if constexpr (K < 8) {
    u64 spread[4];
    for (int j = 0; j < 4; ++j) {
      constexpr int kLast = K > 2 ? 4 * K - 8 : 0;  // where 8 bytes can still be read
      const int from_byte = j * K < kLast ? j * K : kLast;
      u64 string = 0;
      __builtin_memcpy(&string, from + from_byte, K > 2 ? 8 : 4 * K);
      spread[j] = spread8<K>(string >> 8 * (j * K - from_byte));
    }
    const auto* bytes = reinterpret_cast<const Loose<u8>*>(spread);
    for (int i = 0; i < 32; ++i) to[i] = bytes[i];
    return;
  }
  u64 window = 0;
  int have = 0;
  for (int i = 0; i < 32; ++i) {
    for (; have < K; have += 8) window |= static_cast<u64>(*from++) << have;
    to[i] = static_cast<T>(window & ((1u << K) - 1u));
    window >>= K;
    have -= K;
  }
}

template <int K, class T>
void pack32(const T* from, u8* to) {
#if SCRUPLE_LANES == 4
  if constexpr (K >= 4 && K < 8 && sizeof(T) == 1) return pack32_lanes<K>(from, to);
#endif
  if constexpr (K < 8) {
    u64 spread[4];
    auto* bytes = reinterpret_cast<Loose<u8>*>(spread);
    for (int i = 0; i < 32; ++i) bytes[i] = static_cast<u8>(from[i]);
    u64 string[4];
    for (int j = 0; j < 4; ++j) string[j] = gather8<K>(spread[j]);
    if constexpr (K < 4) {
      for (int j = 0; j < 4; ++j) __builtin_memcpy(to + j * K, &string[j], K);
    } else {  // 8 bytes at a time, of which the next covers the last; the last ends where the string does
      string[3] = string[3] << 8 * (8 - K) | string[2] >> 8 * (2 * K - 8);
      for (int j = 0; j < 4; ++j) __builtin_memcpy(to + (j < 3 ? j * K : 4 * K - 8), &string[j], 8);
    }
    return;
  }
  u64 window = 0;
  int have = 0;
  for (int i = 0; i < 32; ++i) {
    window |= static_cast<u64>(from[i]) << have;
    for (have += K; have >= 8; have -= 8, window >>= 8) *to++ = static_cast<u8>(window);
  }
}

template <int K, class T>
void unpack(const u8* from, int n, T* to) {  // `to` has room for a multiple of 32 values
  int i = 0;
  for (; i + 32 <= n; i += 32) unpack32<K>(from + i / 8 * K, to + i);
  if (i == n) return;
  u8 last[64] = {};
  const int bytes = ((n - i) * K + 7) / 8;
  for (int j = 0; j < bytes; ++j) last[j] = from[i / 8 * K + j];
  unpack32<K>(last, to + i);
}

template <int K, class T>
void pack(const T* from, int n, u8* to) {
  int i = 0;
  for (; i + 32 <= n; i += 32) pack32<K>(from + i, to + i / 8 * K);
  if (i == n) return;
  T padded[32] = {};
  for (int j = 0; j < n - i; ++j) padded[j] = from[i + j];  // NOLINT(*uninitialized.Assign): all n are set
  u8 last[64] = {};
  pack32<K>(padded, last);
  const int bytes = ((n - i) * K + 7) / 8;
  for (int j = 0; j < bytes; ++j) to[i / 8 * K + j] = last[j];
}

}  // namespace
}  // namespace SCRUPLE_UNIT
}  // namespace scruple
