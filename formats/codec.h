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

enum Rounding : int {
  kNearest = 0,
  kTruncate = 1,
  kStochastic = 2,
  kDither = 3,  // stochastic, and the reader subtracts the coin again
  kWide = 4,    // a split weight: the wide value stochastic, the visible half the nearest of it
  kRoundings = 5
};
constexpr bool draws_coins(int rounding) { return rounding >= kStochastic; }

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

// What formulas are written with. Those that take F and U, a number and its bits, run on float and u32 or on
// the vectors of engine/lanes.h, which has the same functions.
SCRUPLE_HD u32 bits_of(float x) { return __builtin_bit_cast(u32, x); }
SCRUPLE_HD float float_of(u32 b) { return __builtin_bit_cast(float, b); }
SCRUPLE_HD u32 magnitude_bits(float x) { return bits_of(x) & 0x7fffffffu; }
SCRUPLE_HD float magnitude(float x) { return __builtin_fabsf(x); }
SCRUPLE_HD float with_sign_of(float sign, float x) { return __builtin_copysignf(x, sign); }

SCRUPLE_HD float fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
SCRUPLE_HD float root(float x) { return __builtin_sqrtf(x); }
SCRUPLE_HD u32 larger(u32 a, u32 b) { return a > b ? a : b; }
SCRUPLE_HD u32 smaller(u32 a, u32 b) { return a < b ? a : b; }
SCRUPLE_HD u32 shifted_down_signed(u32 a, int n) { return static_cast<u32>(static_cast<i32>(a) >> n); }
SCRUPLE_HD float select(bool condition, float yes, float no) { return condition ? yes : no; }

// Processors disagree about the bits of a NaN; every stored NaN is this one.
inline constexpr u32 kNaNBits = 0x7fc00000u;
SCRUPLE_HD float canonical(float x) { return x == x ? x : float_of(kNaNBits); }
SCRUPLE_HD float finite_or_zero(float x) { return magnitude_bits(x) < 0x7f800000u ? x : 0.0f; }

// A gradient that a format cannot hold becomes infinite, so that loss scaling sees the overflow.
inline constexpr float kNoOverflow = __builtin_inff();
SCRUPLE_HD float overflowed(float x, float limit) {
  return magnitude(x) >= limit ? with_sign_of(x, kNoOverflow) : x;
}

// All roundings are one formula: add coin / 2^32 of a step, and drop the rest. Nearest: the coin is always
// one half, so ties go up. Stochastic: the coin is uniform, so a value a third of the way to the next step
// goes up in a third of all cases.
inline constexpr u32 kHalf = 0x80000000u;
// The upper 23 bits of a coin as a float from 0 to 1.
SCRUPLE_HD float coin_fraction(u32 coin) { return float_of(0x3f800000u + (coin >> 9)) - 1.0f; }

// The coins of a run of elements: coin i is first + i step, so each costs one addition. engine/coins.h says
// how `first` and `step` are drawn, and why the coins are fair. As they are here, every coin is one half:
// nearest rounding.
struct Coins {
  u32 first = kHalf, step = 0;

  SCRUPLE_HD u32 operator[](int i) const { return first + static_cast<u32>(i) * step; }
  SCRUPLE_HD Coins from(i64 element) const { return {first + static_cast<u32>(element) * step, step}; }
};

// floor(x + coin), for |x| < 2^22.
SCRUPLE_HD i32 round_by(float x, u32 coin) {
#if defined( \
    __CUDA_ARCH__)  // conversions are slow there: added to 1.5 * 2^23 and rounded down, the integer shows
  return static_cast<i32>(bits_of(__fadd_rd(x + coin_fraction(coin), 0x1.8p23f)) - 0x4b400000u);
#else
  return static_cast<i32>(__builtin_floorf(x + coin_fraction(coin)));
#endif
}

// floor(x gain + coin) for |x gain| < 2^Bits, in fixed point: x gain is rounded to nearest, to a multiple of
// 2^(Bits-22), and the upper bits of the coin round that without bias. A code that was decoded lands on
// itself, since a rounded product and a rounded reciprocal err by less than half such a multiple together, and
// stays, whatever the coin. So does a step below half of it, 2^-23 of the group's maximum. (A sum of floats
// rounds up at the coin's top: codes at rest would drift upwards.)
template <int Bits, class F, class U>
SCRUPLE_HD U round_scaled(F x, F gain, U coin) {
  constexpr int fraction = 22 - Bits;
  constexpr float base = 1.5f * static_cast<float>(1u << (Bits + 1));  // floats there step by 2^-fraction
  return shifted_down_signed(bits_of(fma(x, gain, F(base))) - bits_of(F(base)) + (coin >> (32 - fraction)),
                             fraction);
}

// a / b, given 1 / b: correctly rounded where nothing underflows or overflows (Markstein, "Computation of
// elementary functions on the IBM RISC System/6000 processor", 1990). For many a and one b.
template <class F>
SCRUPLE_HD F quotient(F a, F b, F reciprocal) {
  const F q = a * reciprocal;
  return fma(fma(-b, q, a), reciprocal, q);
}

// 1 / x for x from 2^-126 to 2^125.
SCRUPLE_HD float tame_reciprocal(float x) {
#if defined(__CUDA_ARCH__)  // division without the branch for special cases
  float r;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  return fma(r, fma(-x, r, 1.0f), r);
#else
  return 1.0f / x;
#endif
}

// a / b for |b| from 1 to 2, where nothing can go wrong but a so small that its quotient's last bit does not
// matter.
SCRUPLE_HD float tame_quotient(float a, float b) {
#if defined(__CUDA_ARCH__)
  return quotient(a, b, tame_reciprocal(b));
#else
  return a / b;
#endif
}

#if defined(__CUDACC__)
// sqrt(x) without a branch: the hardware's guess s and one correction by x - s^2. For x of at least 2^-101
// that difference is exact, and the result is IEEE's (tests/fast_math_test.cu).
__device__ __forceinline__ float corrected_root(float x) {
  float r;
  asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  const float s = x * r;
  return fma(fma(-s, s, x), 0.5f * r, s);
}
#endif

// sqrt(x) for finite x >= 0.
SCRUPLE_HD float tame_root(float x) {
#if defined(__CUDA_ARCH__)
  const bool small = x < 0x1p-60f;
  const float root = corrected_root(small ? x * 0x1p80f : x);
  return x > 0 ? (small ? root * 0x1p-40f : root) : 0.0f;
#else
  return __builtin_sqrtf(x);
#endif
}

// The integer part of sqrt(x), for x from 0 to 2^22.
SCRUPLE_HD float whole_root(float x) {
#if defined(__CUDA_ARCH__)
  return __fadd_rd(corrected_root(fmaxf(x, 0x1p-60f)), 0x1.8p23f) - 0x1.8p23f;
#else
  return __builtin_floorf(__builtin_sqrtf(x));
#endif
}

// The unit of a group: its largest magnitude over the top level, correctly rounded. A product with a rounded
// 1 / top would let the maximum drift a little at every step.
// - Zero for a group of zeros.
// - NaN if anything in the group is not finite; the engine then writes codes of zero. (Moments are made
//   finite before.)
// - Never subnormal, so that its reciprocal is finite.
template <class F>
SCRUPLE_HD F group_unit(F absmax, float top) {
  const F unit = quotient(absmax, F(top), F(1.0f / top));
  const F floored = select(unit > 0x1p-126f, unit, F(0x1p-126f));
  const F finite = select(absmax > 0.0f, floored, F(0.0f));
  return select(magnitude_bits(absmax) < 0x7f800000u, finite, F(float_of(kNaNBits)));
}
// The reciprocal of a unit; zero for a group of zeros. Units are below 2^125 where `top` is 8 or more.
SCRUPLE_HD float group_gain(float unit) { return unit > 0 ? tame_reciprocal(unit) : 0.0f; }
template <class F>  // a vector computes both
SCRUPLE_HD F group_gain(F unit) {
  return select(unit > 0.0f, tame_reciprocal(unit), F(0.0f));
}

}  // namespace SCRUPLE_UNIT
}  // namespace scruple
