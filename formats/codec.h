// What every format is written with: bit access, rounding by a coin, the layout and error bound that each
// codec states. A codec is pure arithmetic on one value or one group; it knows neither optimizers nor
// engines.
#pragma once

#include <cstdint>

#if defined(__CUDACC__)
#define SCRUPLE_HD __host__ __device__ __forceinline__
#else
#define SCRUPLE_HD inline __attribute__((always_inline))
#endif

// Each instruction-set unit compiles these headers again under its own name, so that the linker cannot mix
// them.
#ifndef SCRUPLE_UNIT
#define SCRUPLE_UNIT common
#endif

namespace scruple {

using u8 = std::uint8_t;
using u16 = std::uint16_t;
using u32 = std::uint32_t;
using u64 = std::uint64_t;
using i32 = std::int32_t;
using i64 = std::int64_t;

enum Rounding : int { kNearest = 0, kTruncate = 1, kStochastic = 2, kDither = 3, kRoundings = 4 };

// The two planes of an array of n values: n codes, and one aux (a scale, or extra bits) per group.
struct Layout {
  int code_bits;
  int aux_bits;
  int group;
};

// With nearest rounding: |decode(encode(x)) - x| <= relative |x| + group max|group| + absolute.
struct Bound {
  double relative, group, absolute;
};

inline namespace SCRUPLE_UNIT {

SCRUPLE_HD u32 bits_of(float x) { return __builtin_bit_cast(u32, x); }
SCRUPLE_HD float float_of(u32 b) { return __builtin_bit_cast(float, b); }
SCRUPLE_HD u32 magnitude_bits(float x) { return bits_of(x) & 0x7fffffffu; }
SCRUPLE_HD float magnitude(float x) { return __builtin_fabsf(x); }
SCRUPLE_HD float with_sign_of(float sign, float x) { return __builtin_copysignf(x, sign); }

SCRUPLE_HD float fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }

// Processors disagree about the bits of a NaN; every stored NaN is this one.
inline constexpr u32 kNaNBits = 0x7fc00000u;
SCRUPLE_HD float canonical(float x) { return x == x ? x : float_of(kNaNBits); }

// Rounding as one formula: add `coin` / 2^17 of a step, drop the rest. Nearest is the coin that always shows
// one half (ties go up); a stochastic coin is 2 r + 1 for 16 random bits r, centred so that exact values stay
// exact.
inline constexpr u32 kHalf = 0x10000u;
SCRUPLE_HD u32 coin_of(u16 random) { return 2u * random + 1u; }
SCRUPLE_HD float coin_fraction(u32 coin) { return static_cast<float>(coin) * 0x1p-17f; }

// floor(x + coin), for |x| < 2^22.
SCRUPLE_HD i32 round_by(float x, u32 coin) {
  return static_cast<i32>(__builtin_floorf(x + coin_fraction(coin)));
}

// Comparisons are written so that a NaN takes the bound: no code is ever made from a NaN.
SCRUPLE_HD float clamp(float x, float low, float high) {
  x = x < high ? x : high;
  return x > low ? x : low;
}

// The unit of a group: its largest magnitude over the top level, by a division: a rounded 1 / top would make
// the maximum drift a little with every step. Zero for a group of zeros, NaN if anything in the group is not
// finite (the engine then writes codes of zero), and never subnormal, so that its reciprocal is finite.
SCRUPLE_HD float group_unit(float absmax, float top) {
  const float unit = absmax / top;
  const float floored = unit > 0x1p-126f ? unit : 0x1p-126f;
  const float finite = absmax > 0 ? floored : 0.0f;
  return magnitude_bits(absmax) < 0x7f800000u ? finite : float_of(kNaNBits);
}
SCRUPLE_HD float reciprocal_or_zero(float unit) { return unit > 0 ? 1.0f / unit : 0.0f; }

}  // namespace SCRUPLE_UNIT
}  // namespace scruple
