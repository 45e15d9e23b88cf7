// Planes as the CPU's loops see them: values at any address, and strings of K bits.
#pragma once

#include <type_traits>

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
// Value i stands at bit i K of a little-endian string; 32 values are moved at a time. What a value has above K
// bits is dropped.

// What a value stands in while it is in no string.
template <int K>
using ValueOf = std::conditional_t<(K < 8), u8, u16>;

constexpr u64 repeated(u64 bits, int every) {
  u64 all = 0;
  for (int at = 0; at < 64; at += every) all |= bits << at;
  return all;
}

// Values of K bits next to each other, and each in `Width` bits of its own, 64 in all. Half of them go or come
// together, then half of these.
template <int K, int Width>
SCRUPLE_HD u64 spread(u64 x) {
#if SCRUPLE_LANES == 16  // one instruction, and slow only where AVX-512 is not
  return _pdep_u64(x, repeated((u64{1} << K) - 1u, Width));
#else
  SCRUPLE_UNROLL
  for (int n = 32 / Width; n > 0; n /= 2) {
    const u64 kept = repeated((u64{1} << n * K) - 1u, 2 * n * Width);
    x = (x & kept) | (x & kept << n * K) << n * (Width - K);
  }
  return x;
#endif
}
template <int K, int Width>
SCRUPLE_HD u64 gather(u64 x) {
#if SCRUPLE_LANES == 16
  return _pext_u64(x, repeated((u64{1} << K) - 1u, Width));
#else
  SCRUPLE_UNROLL
  for (int n = 1; n < 64 / Width; n *= 2) {
    const u64 kept = repeated((u64{1} << n * K) - 1u, 2 * n * Width);
    x = (x & kept) | (x >> n * (Width - K) & kept << n * K);
  }
  return x;
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

// Values of 9, 10 and 12 bits, which begin and end within two bytes: 8 of them, each in 16 bits.
template <int K>
inline constexpr bool in_two_bytes = K == 9 || K == 10 || K == 12;
struct Shifts {
  std::int16_t of[8] = {};
};
template <int K>
constexpr Shifts shifts(int sign) {
  Shifts shifts;
  for (int i = 0; i < 8; ++i) shifts.of[i] = static_cast<std::int16_t>(sign * (i * K % 8));
  return shifts;
}
template <int K>
constexpr Places places_in_pairs(int start) {
  Places places;
  for (int i = 0; i < 16; ++i) places.of[i] = static_cast<u8>(start + i / 2 * K / 8 + i % 2);
  return places;
}
// The bytes that are the lower, or the upper ones, of a pair.
template <int K>
constexpr Places places_of_pairs(int upper) {
  Places places;
  for (u8& place : places.of) place = 99;
  for (int i = 0; i < 8; ++i) places.of[i * K / 8 + upper] = static_cast<u8>(2 * i + upper);
  return places;
}
template <int K, int J = 0>
SCRUPLE_HD void unpack32_pairs(const u8* from, u16* to) {
  constexpr int kFrom = J * K < 4 * K - 16 ? J * K : 4 * K - 16;  // where 16 bytes can still be read
  static constexpr Places kPlaces = places_in_pairs<K>(J * K - kFrom);
  static constexpr Shifts kDown = shifts<K>(-1);
  const uint8x16_t pairs = vqtbl1q_u8(vld1q_u8(from + kFrom), vld1q_u8(kPlaces.of));
  const uint16x8_t values = vshlq_u16(vreinterpretq_u16_u8(pairs), vld1q_s16(kDown.of));
  vst1q_u16(to + 8 * J, vandq_u16(values, vdupq_n_u16((1u << K) - 1u)));
  if constexpr (J < 3) unpack32_pairs<K, J + 1>(from, to);
}
template <int K>
SCRUPLE_HD void pack32_pairs(const u16* from, u8* to) {
  static constexpr Places kLower = places_of_pairs<K>(0), kUpper = places_of_pairs<K>(1);
  static constexpr Shifts kUp = shifts<K>(1);
  SCRUPLE_UNROLL
  for (int j = 0; j < 4; ++j) {
    const uint16x8_t values = vandq_u16(vld1q_u16(from + 8 * j), vdupq_n_u16((1u << K) - 1u));
    const uint8x16_t pairs = vreinterpretq_u8_u16(vshlq_u16(values, vld1q_s16(kUp.of)));
    const uint8x16_t bytes =
        vorrq_u8(vqtbl1q_u8(pairs, vld1q_u8(kLower.of)), vqtbl1q_u8(pairs, vld1q_u8(kUpper.of)));
    if (j < 3) {
      vst1q_u8(to + j * K, bytes);  // the next covers what is too much
    } else {
      vst1_u8(to + j * K, vget_low_u8(bytes));
      vst1_u8(to + 4 * K - 8, vget_low_u8(vextq_u8(bytes, bytes, K - 8)));
    }
  }
}
#endif

template <int K, class T>
void unpack32(const u8* from, T* to) {
#if SCRUPLE_LANES == 4
  if constexpr (K >= 4 && K < 8 && sizeof(T) == 1) return unpack32_lanes<K>(from, to);
  if constexpr (in_two_bytes<K> && sizeof(T) == 2) return unpack32_pairs<K>(from, to);
#endif
  constexpr int kWidth = 8 * sizeof(ValueOf<K>), kBits = 64 / kWidth * K, kWords = kWidth / 2;
  u64 words[kWords];
  for (int j = 0; j < kWords; ++j) {
    constexpr int kLast = K > 2 ? 4 * K - 8 : 0;  // where 8 bytes can still be read
    const int from_byte = j * kBits / 8 < kLast ? j * kBits / 8 : kLast;
    u64 string = 0;
    __builtin_memcpy(&string, from + from_byte, K > 2 ? 8 : 4 * K);
    words[j] = spread<K, kWidth>(string >> (j * kBits - 8 * from_byte));
  }
  ValueOf<K> values[32];
  __builtin_memcpy(values, words, sizeof values);
  for (int i = 0; i < 32; ++i) to[i] = static_cast<T>(values[i]);
}

template <int K, class T>
void pack32(const T* from, u8* to) {
#if SCRUPLE_LANES == 4
  if constexpr (K >= 4 && K < 8 && sizeof(T) == 1) return pack32_lanes<K>(from, to);
  if constexpr (in_two_bytes<K> && sizeof(T) == 2) return pack32_pairs<K>(from, to);
#endif
  constexpr int kWidth = 8 * sizeof(ValueOf<K>), kWords = kWidth / 2;
  ValueOf<K> values[32];
  for (int i = 0; i < 32; ++i) values[i] = static_cast<ValueOf<K>>(from[i]);
  u64 words[kWords];
  __builtin_memcpy(words, values, sizeof words);
  for (u64& word : words) word = gather<K, kWidth>(word);
  if constexpr (K < 4) {
    for (int j = 0; j < 4; ++j) __builtin_memcpy(to + j * K, &words[j], K);
  } else if constexpr (K < 8) {
    // 8 bytes at a time, of which the next covers the last; the last ends where the string does.
    words[3] = words[3] << 8 * (8 - K) | words[2] >> 8 * (2 * K - 8);
    for (int j = 0; j < 4; ++j) __builtin_memcpy(to + (j < 3 ? j * K : 4 * K - 8), &words[j], 8);
  } else {  // two words have K bytes
    for (int j = 0; j < 4; ++j) {
      const u64 low = words[2 * j] | words[2 * j + 1] << 4 * K, high = words[2 * j + 1] >> (64 - 4 * K);
      __builtin_memcpy(to + j * K, &low, 8);
      __builtin_memcpy(to + j * K + 8, &high, K - 8);
    }
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
