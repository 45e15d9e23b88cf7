// How one thread moves its bytes of a plane between memory and registers, and finds values in them.
#pragma once

#include <type_traits>

#include "engine/cuda_table.h"

namespace scruple {
inline namespace SCRUPLE_UNIT {

// ---- Parts that fill words ----
// load and store move a thread's `Bytes` bytes of a plane, of which `valid` exist. The plane holds elements
// of type Unit. `Whole` says that all bytes exist and the plane is aligned: they move up to 16 at a time.
// Otherwise both are looked at, and they move by 16, by elements or by single bytes.

template <int Bytes>
struct Words {
  u32 w[(Bytes + 3) / 4];
};

template <int Bytes>
using Widest = std::conditional_t<
    Bytes % 16 == 0, uint4,
    std::conditional_t<Bytes % 8 == 0, uint2,
                       std::conditional_t<Bytes % 4 == 0, u32, std::conditional_t<Bytes % 2 == 0, u16, u8>>>>;

template <class T>
__device__ bool is_aligned(const void* at) {
  return reinterpret_cast<std::uintptr_t>(at) % sizeof(T) == 0;
}

// Planes are read and written once per step, so these accesses are marked as streaming: the cache is left to
// others.
template <class T>
__device__ T fetch(const u8* from) {
  return __ldcs(reinterpret_cast<const T*>(from));
}
template <class T>
__device__ void keep(u8* to, T value) {
  __stcs(reinterpret_cast<T*>(to), value);
}
template <int Bytes, class Access>
__device__ void load_as(const u8* from, int valid, Words<Bytes>& to) {
  constexpr int kSize = static_cast<int>(sizeof(Access));
#pragma unroll
  for (int b = 0; b < Bytes; b += kSize) {
    if (b >= valid) continue;
    const Access value = fetch<Access>(from + b);
    if constexpr (kSize == 16)
      to.w[b / 4] = value.x, to.w[b / 4 + 1] = value.y, to.w[b / 4 + 2] = value.z, to.w[b / 4 + 3] = value.w;
    else if constexpr (kSize == 8)
      to.w[b / 4] = value.x, to.w[b / 4 + 1] = value.y;
    else
      to.w[b / 4] |= static_cast<u32>(value) << (8 * (b % 4));
  }
}

template <int Bytes, class Access>
__device__ void store_as(u8* to, int valid, const Words<Bytes>& from) {
  constexpr int kSize = static_cast<int>(sizeof(Access));
#pragma unroll
  for (int b = 0; b < Bytes; b += kSize) {
    if (b >= valid) continue;
    if constexpr (kSize == 16)
      keep(to + b, make_uint4(from.w[b / 4], from.w[b / 4 + 1], from.w[b / 4 + 2], from.w[b / 4 + 3]));
    else if constexpr (kSize == 8)
      keep(to + b, make_uint2(from.w[b / 4], from.w[b / 4 + 1]));
    else
      keep(to + b, static_cast<Access>(from.w[b / 4] >> (8 * (b % 4))));
  }
}

template <int Bytes, class Unit, bool Whole>
__device__ Words<Bytes> load(const u8* from, int valid) {
  Words<Bytes> to{};
  if constexpr (Whole)
    load_as<Bytes, Widest<Bytes>>(from, Bytes, to);
  else if (valid == Bytes && is_aligned<Widest<Bytes>>(from))
    load_as<Bytes, Widest<Bytes>>(from, Bytes, to);
  else if (is_aligned<Unit>(from))
    load_as<Bytes, Unit>(from, valid, to);
  else
    load_as<Bytes, u8>(from, valid, to);
  return to;
}

template <int Bytes, class Unit, bool Whole>
__device__ void store(u8* to, int valid, const Words<Bytes>& from) {
  if constexpr (Whole)
    store_as<Bytes, Widest<Bytes>>(to, Bytes, from);
  else if (valid == Bytes && is_aligned<Widest<Bytes>>(to))
    store_as<Bytes, Widest<Bytes>>(to, Bytes, from);
  else if (is_aligned<Unit>(to))
    store_as<Bytes, Unit>(to, valid, from);
  else
    store_as<Bytes, u8>(to, valid, from);
}

// The planes of an array, moved byte by byte. Slow but little code, for what is rare (engine/cuda_any.cu).
struct Bytes1 {
  u8* at;
  __device__ Bytes1 operator+(i64 bytes) const { return {at + bytes}; }
};
struct Bytewise {
  Bytes1 codes, aux;
  __device__ explicit Bytewise(const DeviceArray& a) : codes{a.codes}, aux{a.aux} {}
};
template <int Bytes, class Unit, bool Whole>
__device__ Words<Bytes> load(Bytes1 from, int valid) {
  Words<Bytes> to{};
#pragma unroll 1
  for (int b = 0; b < valid; ++b) to.w[b / 4] |= static_cast<u32>(from.at[b]) << (8 * (b % 4));
  return to;
}
template <int Bytes, class Unit, bool Whole>
__device__ void store(Bytes1 to, int valid, const Words<Bytes>& from) {
#pragma unroll 1
  for (int b = 0; b < valid; ++b) to.at[b] = static_cast<u8>(from.w[b / 4] >> (8 * (b % 4)));
}

// ---- Parts that do not fill words ----
// A thread's part of such a plane (codes of 5 bits, say) begins and ends inside a word; a warp's part fills
// words. In whole tiles load_packed reads every word that the part touches, and align_packed shifts the part
// to the front of the first. The shift waits for the data, so it is a call of its own: all loads of a tile
// are issued first.

// Bytes of the first word that belong to the threads before this one. A warp's part begins at a word: its
// first element is a multiple of 32 N, and planes are aligned.
__device__ inline int skipped(int bytes) { return static_cast<int>(threadIdx.x) * bytes & 3; }

template <int Bytes, bool Whole>
__device__ Words<Bytes> load_packed(const auto& from, int bytes, int valid) {
  if constexpr (Whole) {
    Words<Bytes> to{};
    const int skip = skipped(bytes);
#pragma unroll
    for (int b = 0; b < Bytes; b += 4)
      if (b < skip + bytes) to.w[b / 4] = fetch<u32>(from - skip + b);
    return to;
  } else {
    return scruple::load<Bytes, u8, false>(from, valid);
  }
}
// A part of 4 n + 3 bytes may reach into one word more than Words<Bytes> holds. That word is the next
// thread's first, so it comes by a shuffle, in which the whole warp takes part. The last thread of a warp
// needs none.
template <int Bytes>
__device__ void align_packed(Words<Bytes>& packed, int bytes) {
  const u32 next = Bytes % 4 == 3 ? __shfl_down_sync(0xffffffffu, packed.w[0], 1) : 0u;
#pragma unroll
  for (int b = 0; b < Bytes; b += 4)
    packed.w[b / 4] =
        __funnelshift_r(packed.w[b / 4], b + 4 < Bytes ? packed.w[b / 4 + 1] : next, 8 * skipped(bytes));
}
// Each word is written by the thread that has its last byte, with the bytes before from its neighbour.
template <int Bytes, bool Whole>
__device__ void store_packed(const auto& to, int bytes, int valid, const Words<Bytes>& from) {
  if constexpr (!Whole) {
    scruple::store<Bytes, u8, false>(to, valid, from);
  } else if (bytes == 1) {  // written as they are: a word would have bytes of four threads
    keep(to, static_cast<u8>(from.w[0]));
  } else if (bytes == 2) {
    keep(to, static_cast<u16>(from.w[0]));
  } else {
    constexpr int kWords = (Bytes + 3) / 4;
    // The two words that hold the last 4 bytes. (With `bytes / 4 == j` nvcc looks them up in local memory.)
    u32 end[2] = {0, from.w[0]};
#pragma unroll
    for (int j = 1; j < kWords; ++j)
      if (bytes >= 4 * j) end[0] = from.w[j - 1], end[1] = from.w[j];
    const u32 before = __shfl_up_sync(0xffffffffu, __funnelshift_r(end[0], end[1], 8 * (bytes & 3)), 1);
    const int skip = skipped(bytes);
#pragma unroll
    for (int j = 0; j < kWords; ++j)
      if (4 * j + 4 <= skip + bytes)
        keep(to - skip + 4 * j, __funnelshift_l(j > 0 ? from.w[j - 1] : before, from.w[j], 8 * skip));
  }
}

// ---- Values in words ----

// Value i of a little-endian string of Bits-bit values; i is a constant once the loop is unrolled.
template <int Bits, int Bytes>
__device__ u32 get(const Words<Bytes>& words, int i) {
  const int bit = i * Bits, word = bit / 32, shift = bit % 32;
  u32 value = words.w[word] >> shift;
  if (shift + Bits > 32) value |= words.w[word + 1] << (32 - shift);
  return Bits == 32 ? value : value & ((1u << (Bits % 32)) - 1u);
}
// Writes value i: bits From to From + Bits - 1 of `value`. (put<16, 16> writes the upper half of a float, its
// bf16 code.) Values must come in order. A byte or a half costs one byte permutation: the first of a word is
// stored with its other bits, which the next call drops. Values of other widths must have no other bits set.
template <int Bits, int From, int Bytes>
__device__ void put(Words<Bytes>& words, int i, u32 value) {
  const int bit = i * Bits, word = bit / 32, shift = bit % 32;
  u32& w = words.w[word];
  constexpr u32 kByte = From / 8;
  if constexpr (Bits == 8 && From % 8 == 0) {
    w = shift == 0    ? value
        : shift == 8  ? __byte_perm(w, value, kByte | (4 + kByte) << 4)
        : shift == 16 ? __byte_perm(w, value, 0x10 | (4 + kByte) << 8)
                      : __byte_perm(w, value, 0x210 | (4 + kByte) << 12);
  } else if constexpr (Bits == 16 && From % 8 == 0) {
    w = shift == 0 ? value : __byte_perm(w, value, 0x5410 + 0x1111 * kByte);
  } else {
    static_assert(From == 0);  // and the other bits of `value` are zero
    w += value << shift;
    if (shift + Bits > 32) words.w[word + 1] += value >> (32 - shift);
  }
}

// Bytes of a string of Bits-bit values.
template <int Bits>
__device__ int bytes_for(int n) {
  return (n * Bits + 7) / 8;
}

}  // namespace SCRUPLE_UNIT
}  // namespace scruple
