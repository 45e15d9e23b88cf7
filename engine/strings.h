// Planes as the CPU's loops see them: values at any address, and strings of K bits.
#pragma once

#include <type_traits>

#include "engine/lanes.h"
#include "engine/strings_neon.h"
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
// Value i stands at bit i K of a little-endian string; 32 values are moved at a time. What a value has above
// K bits is dropped.

// What a value stands in while it is in no string.
template <int K>
using ValueOf = std::conditional_t<(K < 8), u8, u16>;

constexpr u64 repeated(u64 bits, int every) {
  u64 all = 0;
  for (int at = 0; at < 64; at += every) all |= bits << at;
  return all;
}

// Values of K bits next to each other, from and to `Width` bits each, 64 in all.
#if SCRUPLE_LANES == 16  // one instruction of BMI2, slow only on processors without AVX-512
template <int K, int Width>
SCRUPLE_HD u64 spread(u64 x) {
  return _pdep_u64(x, repeated((u64{1} << K) - 1u, Width));
}
template <int K, int Width>
SCRUPLE_HD u64 gather(u64 x) {
  return _pext_u64(x, repeated((u64{1} << K) - 1u, Width));
}
#else  // half of them move together, then half of these
template <int K, int Width>
SCRUPLE_HD u64 spread(u64 x) {
  SCRUPLE_UNROLL
  for (int n = 32 / Width; n > 0; n /= 2) {
    const u64 kept = repeated((u64{1} << n * K) - 1u, 2 * n * Width);
    x = (x & kept) | (x & kept << n * K) << n * (Width - K);
  }
  return x;
}
template <int K, int Width>
SCRUPLE_HD u64 gather(u64 x) {
  SCRUPLE_UNROLL
  for (int n = 1; n < 64 / Width; n *= 2) {
    const u64 kept = repeated((u64{1} << n * K) - 1u, 2 * n * Width);
    x = (x & kept) | (x >> n * (Width - K) & kept << n * K);
  }
  return x;
}
#endif

// 32 values. NEON has overloads for some widths (engine/strings_neon.h).
template <int K, class T>
void unpack32(const u8* from, T* to) {
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
