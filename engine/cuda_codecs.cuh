// How one thread reads and writes its N consecutive elements of an array (N = 8 or 16): the CUDA counterpart
// of the tile loops in engine/unit.cpp, over the same formulas of formats/. N values fill whole bytes in
// every format. Threads beyond the end of a tensor take part with zeros, because groups are reduced by
// shuffles.
#pragma once

#include <type_traits>

#include "engine/cuda_bytes.cuh"
#include "engine/cuda_tiles.cuh"
#include "formats/rows.h"

namespace scruple {
inline namespace SCRUPLE_UNIT {

// Lane<C, N> is the N elements of one thread in format C. `load` returns their bytes (Raw), `value` decodes
// one element. Two steps, because a tile issues the loads of all its arrays before it decodes anything, and
// because 16 decoded values of four arrays would not fit into the registers.

// To be called between load and value in whole tiles: shifts packed bytes to the front of their words.
template <class Raw>
__device__ void align_front(Raw&, int /*k*/) {}  // formats that fill words need nothing

template <class C, int N>
struct Lane;

template <int N>
struct Lane<Fp32, N> {
  using Raw = Words<4 * N>;
  template <bool Whole>
  static __device__ Raw load(const auto& a, int, Slice at) {
    return scruple::load<4 * N, u32, Whole>(a.codes + 4 * at.first, 4 * at.n);
  }
  template <Rounding>
  static __device__ float value(const Raw& raw, int, Coins, int i) {
    return float_of(raw.w[i]);
  }
  template <Rounding, bool Whole>
  static __device__ void encode(const float (&in)[N], const auto& a, int, Slice at, Coins) {
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
  static __device__ Raw load(const auto& a, int, Slice at) {
    return scruple::load<2 * N, u16, Whole>(a.codes + 2 * at.first, 2 * at.n);
  }
  template <Rounding>
  static __device__ float value(const Raw& raw, int, Coins, int i) {
    return Half::decode(static_cast<u16>(get<16>(raw, i)));
  }
  template <Rounding R, bool Whole>
  static __device__ void encode(const float (&in)[N], const auto& a, int, Slice at, Coins coins) {
    Raw raw{};
#pragma unroll
    for (int i = 0; i < N; ++i) put<16, 0>(raw, i, Rounded<Half>::template encode<R>(in[i], coins[i]));
    scruple::store<2 * N, u16, Whole>(a.codes + 2 * at.first, 2 * at.n, raw);
  }
};

template <class Half, int N>
struct Lane<Master<Half>, N> : Lane<Fp32, N> {  // read as fp32, from the other plane
  using typename Lane<Fp32, N>::Raw;
  template <bool Whole>
  static __device__ Raw load(const auto& a, int, Slice at) {
    return scruple::load<4 * N, u32, Whole>(a.aux + 4 * at.first, 4 * at.n);
  }
  template <Rounding, bool Whole>
  static __device__ void encode(const float (&in)[N], const auto& a, int, Slice at, Coins) {
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

// The same type for bf16 and fp16, so that one copy of the loading code serves both.
template <int N>
struct SplitRaw {
  static constexpr int kMost = 2 * N - 1;  // bytes of packed extra bits; in words there is room for 2 N
  Words<2 * N> visible;
  Words<kMost> extra;
};
template <int N>
__device__ void align_front(SplitRaw<N>& raw, int k) {
  if (k != 16 && k != 8 && k != 4) align_packed(raw.extra, k);
}
template <class Half, int N>
struct Lane<Split<Half>, N> {
  using Raw = SplitRaw<N>;
  static constexpr int kMost = Raw::kMost;
  template <bool Whole>
  static __device__ Raw load(const auto& a, int k, Slice at) {
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
    // Other widths: 8 values in k bytes, read as two strings of four values.
    const u64 low = extra.w[0] | static_cast<u64>(extra.w[1]) << 32;
    const u64 high = extra.w[2] | static_cast<u64>(extra.w[3]) << 32;
    const u64 four = i < 4 ? low : low >> 4 * k | high << (64 - 4 * k);
    return static_cast<u32>(four >> i % 4 * k) & ((1u << k) - 1u);
  }
  template <Rounding R>
  static __device__ float value(const Raw& raw, int k, Coins, int i) {
    return joined<R, true>(raw, k, i);
  }
  // Not Careful: a zero whose extra bits are negative comes out as NaN, where split.h would read zero.
  template <Rounding R, bool Careful>
  static __device__ float joined(const Raw& raw, int k, int i) {
    return Half::template value<Careful>(join<R, Careful>(get<16>(raw.visible, i), extra_of(raw, k, i), k),
                                         k);
  }
  template <Rounding R, bool Whole>
  static __device__ void encode(const float (&in)[N], const auto& a, int k, Slice at, Coins coins) {
    Words<2 * N> visible{}, halves{};
    Words<N> bytes{};
    Words<N / 2> nibbles{};
    [[maybe_unused]] u64 fours[2] = {};  // other widths: four values each
#pragma unroll
    for (int i = 0; i < N; ++i) {
      // In whole tiles weights are finite: a tile with others is run again by run_carefully
      // (engine/cuda_step.cu, engine/cuda_any.cu).
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
__device__ void align_front(GroupRaw<Bytes>& raw, int) {
  if constexpr (!GroupRaw<Bytes>::kFillsWords) align_packed(raw.codes, Bytes);
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
  static __device__ Raw load(const auto& a, int, Slice at) {
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
  static __device__ void encode(const float (&in)[N], const auto& a, int, Slice at, Coins coins) {
    // In whole tiles moments are finite, as weights are.
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
    // A group that is not finite has that in its scale, and codes of zero.
    if (kMakeFinite || largest < 0x7f800000u) {
#pragma unroll
      for (int i = 0; i < N; ++i) {
        if constexpr (requires { C::encode_upper(x[i], gain, kHalf); })
          put<kBits, 32 - kBits>(codes, i, C::encode_upper(x[i], gain, coins[i]));
        else
          put<kBits, 0>(codes, i, C::encode(x[i], gain, coins[i]));
      }
    }
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
  // Clears the codes from n on, so that padding bits in the last byte are zero, as on the CPU.
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

// In whole tiles a split value that needs care comes out as NaN. It reaches the weight, and the tile is run
// again.
template <class C, Rounding R, bool Whole, int N>
__device__ void decode_lane(typename Lane<C, N>::Raw raw, int k, Coins coins, float (&out)[N]) {
  using L = Lane<C, N>;
  if constexpr (Whole) align_front(raw, k);
#pragma unroll
  for (int i = 0; i < N; ++i) {
    if constexpr (Whole && requires { L::template joined<R, false>(raw, k, i); })
      out[i] = L::template joined<R, false>(raw, k, i);
    else
      out[i] = L::template value<R>(raw, k, coins, i);
  }
}

}  // namespace SCRUPLE_UNIT
}  // namespace scruple
