// The optimizers' formulas over one thread's elements.
#pragma once

#include "engine/cuda_table.h"
#include "optim/optim.def"

namespace scruple {
inline namespace SCRUPLE_UNIT {

// a / (sqrt(x) scale + eps) without branches for special cases. The bits are IEEE's as long as x is at least
// 2^-101 (for corrected_root), a is zero or at least 2^-64, and the divisor is at most 2^60: `tame` says
// afterwards whether that held for every element. Above these ranges the result is NaN, which reaches the
// weight. tests/fast_math_test.cu compares it with IeeeMath.
struct FastMath {
  float spread = 1;
  u32 least_x = ~0u, least_a = ~0u, most_divisor = 0;
  bool used = false;

  __device__ float over_root(float a, float x, float scale, float eps) {
    used = true;
    least_x = min(least_x, bits_of(x));
    least_a = min(least_a, 2u * bits_of(a) - 1u);  // drops the sign, and makes zero the largest
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

// Whether a moment can be infinite while the weight is finite (Lion). In other rules an infinite moment
// reaches the weight, if only because FastMath makes its root NaN.
template <class Rule>
constexpr bool hides_infinity() {
  if constexpr (requires { Rule::hides_infinity; }) return true;
  return false;
}

// fetch(i, e) sets e to element i before the update. Elements from n on become zero, which cannot change a
// group's maximum. Returns true if a weight is not finite or, with FastMath, a moment.
template <class Rule, unsigned Active, int N>
__device__ bool update_lane(const auto& fetch, const float (&g)[N], const Constants& constants, int n,
                            auto& math, Elements<N>& out) {
  const auto k = *reinterpret_cast<const typename Rule::Step*>(constants.step.bytes);
  float zero = 0;  // becomes NaN where something is not finite
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

// Makes every NaN the canonical one. Needed only where update_lane returned true, since any NaN reaches the
// weight (optim/optimizer.h). Compares bits, not x != x as `canonical` does: nvcc would share that comparison
// with update_lane and keep N predicates alive.
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

}  // namespace SCRUPLE_UNIT
}  // namespace scruple
