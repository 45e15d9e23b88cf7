// Planes as the CPU's loops see them: values at any address, and strings of K bits.
#pragma once

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
  constexpr u64 kOne = (1u << K) - 1u, kTwo = (u64{1} << 2 * K) - 1u, kFour = (u64{1} << 4 * K) - 1u;
  x = (x & kFour) | (x & kFour << 4 * K) << (32 - 4 * K);
  x = (x & kTwo * 0x100000001u) | (x & (kTwo << 2 * K) * 0x100000001u) << (16 - 2 * K);
  return (x & kOne * 0x1000100010001u) | (x & (kOne << K) * 0x1000100010001u) << (8 - K);
}
template <int K>
SCRUPLE_HD u64 gather8(u64 x) {
  constexpr u64 kOne = (1u << K) - 1u, kTwo = (u64{1} << 2 * K) - 1u, kFour = (u64{1} << 4 * K) - 1u;
  x = (x & kOne * 0x1000100010001u) | (x >> (8 - K) & (kOne << K) * 0x1000100010001u);
  x = (x & kTwo * 0x100000001u) | (x >> (16 - 2 * K) & (kTwo << 2 * K) * 0x100000001u);
  return (x & kFour) | (x >> (32 - 4 * K) & kFour << 4 * K);
}

template <int K, class T>
void unpack32(const u8* from, T* to) {
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
