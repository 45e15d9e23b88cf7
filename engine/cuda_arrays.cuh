// Arrays of a kernel: one whose format is known when the kernel is compiled, and gradients, whose format is
// read from the table.
#pragma once

#include "engine/cuda_codecs.cuh"

namespace scruple {
inline namespace SCRUPLE_UNIT {

// decode(code, 1) of all 256 codes, for codecs where that is most of the work. Each thread of a block fills
// in one; __syncthreads() must follow.
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

// An array whose format and rounding are known when the kernel is compiled. (The general kernel reads both
// from the table.)
template <class C, int K, Rounding R, int N>
struct FixedFormat {
  // A thread of 16 elements can hold extra bits of 4, 8 and 16 alone.
  static_assert(N == 8 || K == 4 || C::layout(K).aux_bits % 8 == 0);
  static constexpr int k = K;
  using Codec = C;
  using Raw = typename Lane<C, N>::Raw;
  template <bool Whole>
  static __device__ Raw load(const DeviceArray& a, Slice at) {
    return Lane<C, N>::template load<Whole>(a, K, at);
  }
  // Not Careful: a split value that needs care comes out as NaN, which reaches the weight.
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
  static __device__ void encode(const float (&in)[N], const DeviceArray& a, Slice at, Coins coins) {
    Lane<C, N>::template encode<R, Whole>(in, a, K, at, coins);
  }
};

// The roundings for which a codec needs code of its own to read or to write, as bits. Group formats write
// every rounding by the same code, with other coins; only dither needs the coins to read. Wide weights read
// as nearest.
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

// Calls visit for the codec and the rounding of a gradient. Gradients have few formats, and any kernel may
// meet any of them. So their code is inlined behind a branch, which all threads of a tile take together.
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
__device__ void read_gradient(const DeviceArray& a, Slice at, Coins coins, float (&out)[N]) {
  with_gradient(a, [&]<class C, Rounding R>() {
    decode_lane<C, R, Whole, N>(Lane<C, N>::template load<Whole>(a, 0, at), 0, coins, out);
  });
}

}  // namespace SCRUPLE_UNIT
}  // namespace scruple
