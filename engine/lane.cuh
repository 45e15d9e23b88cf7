// How one thread reads and writes its N consecutive elements of an array (N = 8 or 16): the CUDA counterpart
// of the tile loops in engine/unit.cpp, over the same formulas of formats/. N values fill whole bytes in
// every format. Threads beyond the end of a tensor take part with zeros, because groups are reduced by
// shuffles.
#pragma once

#include <type_traits>

#include "engine/cuda_table.h"
#include "formats/rows.h"
#include "optim/all.h"

namespace scruple {
inline namespace SCRUPLE_UNIT {

// A thread's elements in their tensor.
struct Place {
  i64 first;
  int n;  // 0 .. N

  __device__ i64 over(int divisor) const {
    return static_cast<i64>(static_cast<u64>(first) / static_cast<u64>(divisor));
  }
};

// ---- Bytes ----
// A thread's part of a plane: Bytes of them, in elements of a Unit. All are there and the plane is aligned:
// they move up to 16 at a time. Otherwise by elements, or by bytes. Whole: it is known that they are.
// What does not fill words: load_packed, below.

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

// Global memory is read and written once: the cache is left to others.
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

// The planes of an array, to be moved byte by byte: little code, for what is rare (engine/cuda_any.cu).
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

// Bytes of which a thread's part need not fill words, though a warp's does: whole tiles move the words that
// they lie in. What load_packed brings of a whole tile holds them as they lie, after `skipped` bytes of the
// first word, until place_packed moves them to the front, which waits for them.

// Of a word, before the bytes of this thread. A warp begins at a word: its first element is a multiple of 32
// N, and planes are aligned.
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
// Where they end in one word more than there is room for, that is the first of the next thread. The last of a
// warp has no such word: a warp's bytes fill words. All threads of it take part.
template <int Bytes>
__device__ void place_packed(Words<Bytes>& packed, int bytes) {
  const u32 next = Bytes % 4 == 3 ? __shfl_down_sync(0xffffffffu, packed.w[0], 1) : 0u;
#pragma unroll
  for (int b = 0; b < Bytes; b += 4)
    packed.w[b / 4] =
        __funnelshift_r(packed.w[b / 4], b + 4 < Bytes ? packed.w[b / 4 + 1] : next, 8 * skipped(bytes));
}
// Writes the words that end among the thread's bytes; the first may begin with bytes of the thread before.
template <int Bytes, bool Whole>
__device__ void store_packed(const auto& to, int bytes, int valid, const Words<Bytes>& from) {
  if constexpr (!Whole) {
    scruple::store<Bytes, u8, false>(to, valid, from);
  } else if (bytes == 1) {  // here and below a word has bytes of more threads than two
    keep(to, static_cast<u8>(from.w[0]));
  } else if (bytes == 2) {
    keep(to, static_cast<u16>(from.w[0]));
  } else {
    constexpr int kWords = (Bytes + 3) / 4;
    // The last 4 bytes lie in these. (Asked for by equality, they would be looked up in local memory.)
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

// Value i of a little-endian string of Bits-bit values; i is known when the loop is unrolled.
template <int Bits, int Bytes>
__device__ u32 get(const Words<Bytes>& words, int i) {
  const int bit = i * Bits, word = bit / 32, shift = bit % 32;
  u32 value = words.w[word] >> shift;
  if (shift + Bits > 32) value |= words.w[word + 1] << (32 - shift);
  return Bits == 32 ? value : value & ((1u << (Bits % 32)) - 1u);
}
// Writes value i: the Bits bits of `value` that begin at its bit `From`. put<16, 16> writes the upper half of
// a float, which is its bf16 code. A word is filled from its first value to its last: of bytes and halves the
// first waits in the word as it came, and the second call moves both to their places by one instruction,
// which also drops the bits outside the window. Narrower values must have none.
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

// ---- Codecs over a thread's elements ----
// Raw is what load brings: all loads of a tile are on their way before the first is used, and `place` follows
// in whole tiles. A step of fixed formats decodes it value by value, where one is needed: 16 values of four
// arrays are more than there are registers for.

template <class Raw>
__device__ void place(Raw&, int /*k*/) {}  // where nothing is packed

template <class C, int N>
struct Lane;

template <int N>
struct Lane<Fp32, N> {
  using Raw = Words<4 * N>;
  template <bool Whole>
  static __device__ Raw load(const auto& a, int, Place at) {
    return scruple::load<4 * N, u32, Whole>(a.codes + 4 * at.first, 4 * at.n);
  }
  template <Rounding>
  static __device__ float value(const Raw& raw, int, Coins, int i) {
    return float_of(raw.w[i]);
  }
  template <Rounding, bool Whole>
  static __device__ void encode(const float (&in)[N], const auto& a, int, Place at, Coins) {
    Raw raw;
#pragma unroll
    for (int i = 0; i < N; ++i) raw.w[i] = bits_of(in[i]);
    scruple::store<4 * N, u32, Whole>(a.codes + 4 * at.first, 4 * at.n, raw);
  }
};

template <class Half, int N>
struct Lane<Rounded<Half>, N> {
  using Raw = Words<2 * N>;
  template <bool Whole>
  static __device__ Raw load(const auto& a, int, Place at) {
    return scruple::load<2 * N, u16, Whole>(a.codes + 2 * at.first, 2 * at.n);
  }
  template <Rounding>
  static __device__ float value(const Raw& raw, int, Coins, int i) {
    return Half::decode(static_cast<u16>(get<16>(raw, i)));
  }
  template <Rounding R, bool Whole>
  static __device__ void encode(const float (&in)[N], const auto& a, int, Place at, Coins coins) {
    Raw raw{};
#pragma unroll
    for (int i = 0; i < N; ++i) put<16, 0>(raw, i, Rounded<Half>::template encode<R>(in[i], coins[i]));
    scruple::store<2 * N, u16, Whole>(a.codes + 2 * at.first, 2 * at.n, raw);
  }
};

template <class Half, int N>
struct Lane<Master<Half>, N> {
  using Raw = Words<4 * N>;
  template <bool Whole>
  static __device__ Raw load(const auto& a, int, Place at) {
    return scruple::load<4 * N, u32, Whole>(a.aux + 4 * at.first, 4 * at.n);
  }
  template <Rounding>
  static __device__ float value(const Raw& raw, int, Coins, int i) {
    return float_of(raw.w[i]);
  }
  template <Rounding, bool Whole>
  static __device__ void encode(const float (&in)[N], const auto& a, int, Place at, Coins) {
    Raw master;
    Words<2 * N> visible{};
#pragma unroll
    for (int i = 0; i < N; ++i) {
      master.w[i] = bits_of(in[i]);
      put<16, 0>(visible, i, Half::nearest(in[i]));
    }
    scruple::store<4 * N, u32, Whole>(a.aux + 4 * at.first, 4 * at.n, master);
    scruple::store<2 * N, u16, Whole>(a.codes + 2 * at.first, 2 * at.n, visible);
  }
};

// Of bf16 and of fp16 the same: they are loaded by the same code.
template <int N>
struct SplitRaw {
  static constexpr int kMost = 2 * N - 1;  // bytes of extra bits; 16 of them fill as many words
  Words<2 * N> visible;
  Words<kMost> extra;
};
template <int N>
__device__ void place(SplitRaw<N>& raw, int k) {
  if (k != 16 && k != 8 && k != 4) place_packed(raw.extra, k);
}
template <class Half, int N>
struct Lane<Split<Half>, N> {
  using Raw = SplitRaw<N>;
  static constexpr int kMost = Raw::kMost;
  template <bool Whole>
  static __device__ Raw load(const auto& a, int k, Place at) {
    Raw raw{scruple::load<2 * N, u16, Whole>(a.codes + 2 * at.first, 2 * at.n), {}};
    const auto take = [&](const auto& words) {
      static_assert(sizeof words <= sizeof raw.extra);
      __builtin_memcpy(&raw.extra, &words, sizeof words);
    };
    if (k == 16)
      take(scruple::load<2 * N, u16, Whole>(a.aux + 2 * at.first, 2 * at.n));
    else if (k == 8)
      take(scruple::load<N, u8, Whole>(a.aux + at.first, at.n));
    else if (k == 4)
      take(scruple::load<N / 2, u8, Whole>(a.aux + at.over(2), bytes_for<4>(at.n)));
    else if constexpr (N == 8)
      take(load_packed<kMost, Whole>(a.aux + at.over(8) * k, k, (at.n * k + 7) / 8));
    return raw;
  }
  static __device__ u32 extra_of(const Raw& raw, int k, int i) {
    const auto& extra = raw.extra;
    if (k == 16) return get<16>(extra, i);
    if (k == 8) return get<8>(extra, i);
    if (k == 4) return get<4>(extra, i);
    // k bytes, four values in each half of them.
    const u64 low = extra.w[0] | static_cast<u64>(extra.w[1]) << 32;
    const u64 high = extra.w[2] | static_cast<u64>(extra.w[3]) << 32;
    const u64 four = i < 4 ? low : low >> 4 * k | high << (64 - 4 * k);
    return static_cast<u32>(four >> i % 4 * k) & ((1u << k) - 1u);
  }
  template <Rounding R>
  static __device__ float value(const Raw& raw, int k, Coins, int i) {
    return joined<R, true>(raw, k, i);
  }
  // Hasty: a zero beside extra bits that point below it comes out as NaN (split.h would read it as zero).
  template <Rounding R, bool Careful>
  static __device__ float joined(const Raw& raw, int k, int i) {
    return Half::template value<Careful>(join<R, Careful>(get<16>(raw.visible, i), extra_of(raw, k, i), k),
                                         k);
  }
  template <Rounding R, bool Whole>
  static __device__ void encode(const float (&in)[N], const auto& a, int k, Place at, Coins coins) {
    Words<2 * N> visible{}, halves{};
    Words<N> bytes{};
    Words<N / 2> nibbles{};
    [[maybe_unused]] u64 fours[2] = {};  // four values each, of other widths
#pragma unroll
    for (int i = 0; i < N; ++i) {
      // Weights of whole tiles are finite: others take the careful path (run_carefully in engine/cuda_step.cu
      // and cuda_any.cu).
      const Halves h = split_in_place<R>(Half::template position<Whole>(in[i]), k, coins[i]);
      put<16, 16>(visible, i, h.visible);
      if (k == 8)
        put<8, 8>(bytes, i, h.extra);
      else if (k == 16)
        put<16, 0>(halves, i, h.extra);
      else if (k == 4)
        put<4, 0>(nibbles, i, (h.extra & 0xffffu) >> 12);
      else if constexpr (N == 8)
        fours[i / 4] |= static_cast<u64>((h.extra & 0xffffu) >> (16 - k)) << (i % 4 * k);
    }
    scruple::store<2 * N, u16, Whole>(a.codes + 2 * at.first, 2 * at.n, visible);
    if (k == 8) {
      scruple::store<N, u8, Whole>(a.aux + at.first, at.n, bytes);
    } else if (k == 16) {
      scruple::store<2 * N, u16, Whole>(a.aux + 2 * at.first, 2 * at.n, halves);
    } else if (k == 4) {
      scruple::store<N / 2, u8, Whole>(a.aux + at.over(2), bytes_for<4>(at.n), nibbles);
    } else if constexpr (N == 8) {  // k bytes
      const u64 low = fours[0] | fours[1] << (4 * k), high = fours[1] >> (64 - 4 * k);
      const Words<kMost> string{{static_cast<u32>(low), static_cast<u32>(low >> 32), static_cast<u32>(high),
                                 static_cast<u32>(high >> 32)}};
      store_packed<kMost, Whole>(a.aux + at.over(8) * k, k, (at.n * k + 7) / 8, string);
    }
  }
};

// The group formats: N codes of a thread, G / N threads to a scale.
template <int Bytes>
struct GroupRaw {
  static constexpr bool kFillsWords = Bytes % 4 == 0;
  Words<Bytes> codes;
  u32 scale;
};
template <int Bytes>
__device__ void place(GroupRaw<Bytes>& raw, int) {
  if constexpr (!GroupRaw<Bytes>::kFillsWords) place_packed(raw.codes, Bytes);
}
template <class C, int N>
struct Lane {
  static constexpr int G = C::group, kBits = C::bits, kBytes = kBits * N / 8;
  static constexpr int kThreads = G / N;
  static_assert(G % N == 0 && kThreads <= 32 && (kThreads & (kThreads - 1)) == 0);
  using Scale = typename C::Scale;
  static constexpr int kScaleBytes = static_cast<int>(sizeof(Scale));
  using ScaleBits = std::conditional_t<kScaleBytes == 4, u32, u16>;
  using Raw = GroupRaw<kBytes>;

  template <bool Whole>
  static __device__ Raw load(const auto& a, int, Place at) {
    Raw raw;
    if constexpr (Raw::kFillsWords)
      raw.codes = scruple::load<kBytes, u8, Whole>(a.codes + at.over(8) * kBits, bytes_for<kBits>(at.n));
    else
      raw.codes = load_packed<kBytes, Whole>(a.codes + at.over(8) * kBits, kBytes, bytes_for<kBits>(at.n));
    const auto scale = scruple::load<kScaleBytes, ScaleBits, Whole>(a.aux + at.over(G) * kScaleBytes,
                                                                    Whole || at.n > 0 ? kScaleBytes : 0);
    raw.scale = scale.w[0];
    return raw;
  }
  static __device__ u32 code(const Raw& raw, int i) { return get<kBits>(raw.codes, i); }
  static __device__ float unit(const Raw& raw) {
    return C::unit(__builtin_bit_cast(Scale, static_cast<ScaleBits>(raw.scale)));
  }
  template <Rounding R>
  static __device__ float value(const Raw& raw, int, Coins coins, int i) {
    if constexpr (R == kDither)
      return C::decode_dither(code(raw, i), unit(raw), coins[i]);
    else
      return C::decode(code(raw, i), unit(raw));
  }
  template <Rounding R, bool Whole>
  static __device__ void encode(const float (&in)[N], const auto& a, int, Place at, Coins coins) {
    // Moments of whole tiles are finite, as weights are (above).
    constexpr bool kMakeFinite = kMomentCodec<C> && !Whole;
    float x[N];
    u32 largest = 0;
#pragma unroll
    for (int i = 0; i < N; ++i) {
      x[i] = kMakeFinite ? finite_or_zero(in[i]) : in[i];
      largest = max(largest, magnitude_bits(x[i]));
    }
#pragma unroll
    for (int other = 1; other < kThreads; other *= 2)
      largest = max(largest, __shfl_xor_sync(0xffffffffu, largest, other));
    const float absmax = float_of(largest);
    const Scale scale = C::scale(absmax);
    const float gain = C::gain(absmax, scale);
    Words<kBytes> codes{};
    if (kMakeFinite || largest < 0x7f800000u) {  // else not finite: the scale says so, and codes are zero
#pragma unroll
      for (int i = 0; i < N; ++i) {
        if constexpr (requires { C::encode_upper(x[i], gain, kHalf); })
          put<kBits, 32 - kBits>(codes, i, C::encode_upper(x[i], gain, coins[i]));
        else
          put<kBits, 0>(codes, i, C::encode(x[i], gain, coins[i]));
      }
    }
    // A last byte that is shared with nothing: codes beyond the end are not written as whole bytes.
    if (!Whole && kBits % 8 != 0 && at.n < N) clear_from(codes, at.n);
    if constexpr (Raw::kFillsWords)
      scruple::store<kBytes, u8, Whole>(a.codes + at.over(8) * kBits, bytes_for<kBits>(at.n), codes);
    else
      store_packed<kBytes, Whole>(a.codes + at.over(8) * kBits, kBytes, bytes_for<kBits>(at.n), codes);
    if ((Whole || at.n > 0) && static_cast<u64>(at.first) % G == 0) {
      Words<kScaleBytes> word{{__builtin_bit_cast(ScaleBits, scale)}};
      scruple::store<kScaleBytes, ScaleBits, Whole>(a.aux + at.over(G) * kScaleBytes, kScaleBytes, word);
    }
  }
  // Padding bits of the last byte are zero, as on the CPU.
  static __device__ void clear_from(Words<kBytes>& codes, int n) {
#pragma unroll
    for (int i = 0; i < N; ++i) {
      if (i < n) continue;
      const int bit = i * kBits, word = bit / 32, shift = bit % 32;
      constexpr u32 kMask = (1u << kBits) - 1u;
      codes.w[word] &= ~(kMask << shift);
      if (shift + kBits > 32) codes.w[word + 1] &= ~(kMask >> (32 - shift));
    }
  }
};

// In whole tiles what needs care comes out as NaN, which shows in the weight.
template <class C, Rounding R, bool Whole, int N>
__device__ void decode_lane(typename Lane<C, N>::Raw raw, int k, Coins coins, float (&out)[N]) {
  using L = Lane<C, N>;
  if constexpr (Whole) place(raw, k);
#pragma unroll
  for (int i = 0; i < N; ++i) {
    if constexpr (Whole && requires { L::template joined<R, false>(raw, k, i); })
      out[i] = L::template joined<R, false>(raw, k, i);
    else
      out[i] = L::template value<R>(raw, k, coins, i);
  }
}

// ---- Arrays ----

// decode(code, 1) of all codes, where that is most of decoding; each thread of a block fills one in, and
// __syncthreads() must follow.
template <class C>
__device__ float (&levels())[256] {
  __shared__ float table[256];
  return table;
}
template <class C>
__device__ void fill_levels() {
  static_assert(kBlock == 256);
  levels<C>()[threadIdx.x] = C::decode(threadIdx.x, 1.0f);
}

// An array whose format and rounding are fixed when the kernel is compiled. The general kernel reads both
// from the table.
template <class C, int K, Rounding R, int N>
struct FixedFormat {
  // Extra bits of other widths are strings of 8 values.
  static_assert(N == 8 || K == 4 || C::layout(K).aux_bits % 8 == 0);
  static constexpr int k = K;
  using Codec = C;
  using Raw = typename Lane<C, N>::Raw;
  template <bool Whole>
  static __device__ Raw load(const DeviceArray& a, Place at) {
    return Lane<C, N>::template load<Whole>(a, K, at);
  }
  // Not Careful: what needs care comes out as NaN, which shows in the weight.
  template <bool Careful>
  static __device__ float value(const Raw& raw, int i) {
    static_assert(R != kDither);
    constexpr bool kHasty = !Careful && requires { Lane<C, N>::template joined<R, false>(raw, K, i); };
    if constexpr (kHasty)
      return Lane<C, N>::template joined<R, false>(raw, K, i);
    else if constexpr (requires { C::scales_levels; })
      return levels<C>()[Lane<C, N>::code(raw, i)] * Lane<C, N>::unit(raw);
    else
      return Lane<C, N>::template value<R>(raw, K, Coins{}, i);
  }
  template <bool Whole>
  static __device__ void encode(const float (&in)[N], const DeviceArray& a, Place at, Coins coins) {
    Lane<C, N>::template encode<R, Whole>(in, a, K, at, coins);
  }
};

// The roundings that a codec reads, or writes, in different ways. Group formats are written by their coins
// alone, and only dither is read with them; a wide weight is read as a nearest one.
template <class C, bool Reading>
constexpr unsigned distinct_roundings() {
  constexpr bool kHalves = (C::roundings >> kWide & 1u) != 0;
  if constexpr (requires { C::group; })
    return (Reading ? C::roundings & 1u << kDither : 0u) | 1u << kNearest;
  else if constexpr (Reading)
    return kHalves ? C::roundings & ~(1u << kWide) : C::roundings & 1u << kNearest;
  else
    return std::is_same_v<C, Fp32> ? 1u << kNearest : C::roundings;
}

// visit.template operator()<C, R>() for the rounding of an array that has codec C.
template <bool Reading, class C>
__device__ __forceinline__ void with_rounding(const DeviceArray& a, const auto& visit) {
  constexpr unsigned kDistinct = distinct_roundings<C, Reading>();
  const auto has = [](Rounding r) { return (kDistinct >> r & 1u) != 0; };
  if constexpr (has(kTruncate))
    if (a.rounding == kTruncate) return visit.template operator()<C, kTruncate>();
  if constexpr (has(kStochastic))
    if (a.rounding == kStochastic) return visit.template operator()<C, kStochastic>();
  if constexpr (has(kDither))
    if (a.rounding == kDither) return visit.template operator()<C, kDither>();
  if constexpr (has(kWide))
    if (a.rounding == kWide) return visit.template operator()<C, kWide>();
  if constexpr (C::roundings != 0) visit.template operator()<C, kNearest>();
}

// Gradients come in few formats, and in any of them to every kernel: reading them is inlined, behind a branch
// that a whole tile takes together.
__device__ void with_gradient(const DeviceArray& a, const auto& visit) {
  switch (a.format) {
#define SCRUPLE_FORMAT(number, name, roles, k, Signed, Nonneg)               \
  case number:                                                               \
    if constexpr (serves(roles, 'g')) with_rounding<true, Signed>(a, visit); \
    return;
#include "formats/formats.def"
#undef SCRUPLE_FORMAT
    default: return;
  }
}

template <bool Whole, int N>
__device__ void read_gradient(const DeviceArray& a, Place at, Coins coins, float (&out)[N]) {
  with_gradient(a, [&]<class C, Rounding R>() {
    decode_lane<C, R, Whole, N>(Lane<C, N>::template load<Whole>(a, 0, at), 0, coins, out);
  });
}

// ---- Optimizers over a thread's elements ----

// Root and division without their branches for special cases, and what tells whether one of them was needed.
// Right wherever `tame` says so: x at least 2^-101 (as corrected_root wants it), a zero or at least 2^-64,
// the divisor at most 2^60. What leaves the range upwards comes out as NaN, which shows in the weight.
struct FastMath {
  float spread = 1;
  u32 least_x = ~0u, least_a = ~0u, most_divisor = 0;
  bool used = false;

  __device__ float over_root(float a, float x, float scale, float eps) {
    used = true;
    least_x = min(least_x, bits_of(x));
    least_a = min(least_a, 2u * bits_of(a) - 1u);  // zeros are largest
    const float divisor = fma(corrected_root(x), scale * spread, eps);
    most_divisor = max(most_divisor, bits_of(divisor));
    const float reciprocal = tame_reciprocal(divisor), q = a * reciprocal;
    return fma(-fma(divisor, q, -a), reciprocal, q);  // this way round a zero keeps its sign
  }
  __device__ bool tame() const {
    return least_x >= bits_of(0x1p-101f) && least_a >= 2u * bits_of(0x1p-64f) - 1u &&
           most_divisor <= bits_of(0x1p60f);
  }
};

template <int N>
struct Elements {
  float w[N], s0[N], s1[N], s2[N];
};

// An infinite moment shows in the weight, by a root that FastMath makes NaN if not by itself; or the rule says
// that it does not.
template <class Rule>
constexpr bool hides_infinity() {
  if constexpr (requires { Rule::hides_infinity; }) return true;
  return false;
}

// fetch(i, e) gives element i before the update. Elements from n on are set to zero, which cannot change a
// group's maximum. True if a weight is not finite, and with FastMath if a moment is not.
template <class Rule, unsigned Active, int N>
__device__ bool update_lane(const auto& fetch, const float (&g)[N], const Constants& constants, int n,
                            auto& math, Elements<N>& out) {
  const auto k = *reinterpret_cast<const typename Rule::Step*>(constants.step.bytes);
  float zero = 0;  // or NaN, where something is not finite
#pragma unroll
  for (int i = 0; i < N; ++i) {
    Elem<sizeof(Rule::slots) / sizeof(Slot)> e{};
    fetch(i, e);
    e = Rule::template update<Active>(e, g[i] * constants.multiplier, k, math);
    if (i >= n) e = {};
    zero = fma(e.w, 0.0f, zero);
    if constexpr (hides_infinity<Rule>()) zero = fma(e.s[0], 0.0f, zero);
    out.w[i] = e.w;
    if constexpr (Active & 1) out.s0[i] = e.s[0];
    if constexpr (Active & 2) out.s1[i] = e.s[1];
    if constexpr (Active & 4) out.s2[i] = e.s[2];
  }
  return zero != 0;
}

// A NaN anywhere shows in the weight (optim/optimizer.h), so only then are there any to make canonical. Asked
// for in another way than above, lest the compiler keep all those answers.
template <unsigned Active, int N>
__device__ void make_canonical(Elements<N>& all) {
  const auto clean = [](float& x) { x = magnitude_bits(x) > 0x7f800000u ? float_of(kNaNBits) : x; };
#pragma unroll
  for (int i = 0; i < N; ++i) {
    clean(all.w[i]);
    if constexpr (Active & 1) clean(all.s0[i]);
    if constexpr (Active & 2) clean(all.s1[i]);
    if constexpr (Active & 4) clean(all.s2[i]);
  }
}

// ---- The table ----

// The tiles of a block, next to each other: it meets few rows.
struct BlockTiles {
  i64 first, end;
  __device__ explicit BlockTiles(const DeviceTable& table)
      : first(blockIdx.x * table.each), end(min(first + table.each, table.tiles)) {}
};

// Row and tile of it that a block works on.
struct Cursor {
  int row = 0;
  i64 tile = 0;  // within the row

  // Each thread of a warp asks about one row, so that a thousand tensors take two rounds. (A block could do
  // it in one, but its barrier costs AdamW a fifth of its speed.)
  __device__ void seek(const DeviceTable& table, i64 wanted) {
    int low = row, high = table.count;  // begins[low] <= wanted < begins[high]
    if (wanted < table.begins[low + 1]) high = low + 1;
    while (high - low > 1) {
      const int stride = (high - low + 31) / 32;
      const int mine = low + static_cast<int>(threadIdx.x % 32) * stride;
      const u32 not_above = __ballot_sync(0xffffffffu, mine < high && table.begins[mine] <= wanted);
      low += (__popc(not_above) - 1) * stride;
      high = min(high, low + stride);
    }
    row = low;
    tile = wanted - table.begins[low];
  }
};

// The row that a warp works on, with its constants, in shared memory: near, and out of reach of the step's
// stores.
struct Held {
  int index;
  i64 begin, end;  // tiles of the row
  DeviceRow row;
  Constants constants;

  __device__ void open() {
    if (threadIdx.x % 32 == 0) index = 0, end = 0;
    __syncwarp();
  }
  // `all` may be null: no constants.
  __device__ void seek(const DeviceTable& table, i64 tile, const Constants* all) {
    if (tile < end) return;
    Cursor cursor{index};
    cursor.seek(table, tile);
    const DeviceRow& found = table.rows[cursor.row];
    __syncwarp();  // all have done with the row before
    if (threadIdx.x % 32 == 0) {
      index = cursor.row;
      begin = table.begins[cursor.row];
      end = table.begins[cursor.row + 1];
    }
    copy(found, row);
    if (all != nullptr) copy(all[found.constants], constants);
    __syncwarp();
  }

 private:
  template <class T>
  static __device__ void copy(const T& from, T& to) {
    static_assert(sizeof(T) % 8 == 0 && alignof(T) >= 8);
    for (unsigned i = threadIdx.x % 32; i < sizeof(T) / 8; i += 32)
      reinterpret_cast<u64*>(&to)[i] = reinterpret_cast<const u64*>(&from)[i];
  }
};

template <int N>
__device__ Place place_of(i64 first, i64 size) {
  const i64 left = size - first;
  return {first, left >= N ? N : left > 0 ? static_cast<int>(left) : 0};
}

}  // namespace SCRUPLE_UNIT
}  // namespace scruple
