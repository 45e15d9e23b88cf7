// Functions of one float that compilers vectorise, and sums with a fixed order: plain arithmetic, no
// library calls.
#pragma once

#include "formats/codec.h"
#include "train/model/description.h"

// Before a function of rows: it is compiled for AVX2 and AVX-512 too, and the loader takes what the processor has. The bits
// are the same: nothing is contracted, and sums have an order. Sanitizers begin after the loader has chosen.
#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__) && \
    !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
#define SCRUPLE_WIDE __attribute__((target_clones("default", "avx2", "avx512f")))
#else
#define SCRUPLE_WIDE
#endif

namespace scruple::train {

// e^x for x in [-87, 88], to 2 units in the last place; beyond, the value at the end. A NaN stays one.
// x = n ln 2 + r with |r| <= ln 2 / 2; e^r is its Taylor polynomial, whose next term is below 2^-27.
SCRUPLE_HD float exp_of(float x) {
  const float low = x < -87.0f ? -87.0f : x;
  const float bounded = low > 88.0f ? 88.0f : low;
  const float shifted = bounded * 0x1.715476p0f + 0x1.8p23f;  // the integer n shows in the low bits
  const float n = shifted - 0x1.8p23f;
  const float r =
      (bounded - n * 0x1.63p-1f) - n * -0x1.bd0106p-13f;  // ln 2 in two parts: n * 0x1.63p-1 is exact
  float p = 1.0f / 5040;
  p = p * r + 1.0f / 720;
  p = p * r + 1.0f / 120;
  p = p * r + 1.0f / 24;
  p = p * r + 1.0f / 6;
  p = p * r + 0.5f;
  p = p * r + 1.0f;
  p = p * r + 1.0f;
  return p * float_of((bits_of(shifted) << 23) + 0x3f800000u);
}

// The tanh form of GELU (Hendrycks & Gimpel, 1606.08415, section 2), as GPT-2 has it:
// x (1 + tanh u) / 2 with u = sqrt(2 / pi) (x + 0.044715 x^3), which is x / (1 + e^(-2u)).
SCRUPLE_HD float gelu_gate(float x) {
  const float u = kGeluSlope * x * (1.0f + kGeluCubic * x * x);
  return 1.0f / (1.0f + exp_of(-2.0f * u));
}
SCRUPLE_HD float gelu(float x) { return x * gelu_gate(x); }
SCRUPLE_HD float gelu_slope(float x) {
  const float gate = gelu_gate(x), du = kGeluSlope * (1.0f + 3.0f * kGeluCubic * x * x);
  return gate + x * gate * (1.0f - gate) * 2.0f * du;
}

// SiLU (Hendrycks & Gimpel, 1606.08415): x / (1 + e^-x)
SCRUPLE_HD float logistic(float x) { return 1.0f / (1.0f + exp_of(-x)); }
SCRUPLE_HD float silu(float x) { return x * logistic(x); }
SCRUPLE_HD float silu_slope(float x) {
  const float gate = logistic(x);
  return gate + x * gate * (1.0f - gate);
}

// term(0) + ... + term(n - 1) in 16 lanes, folded in halves. Compilers may not reorder a plain sum, nor
// vectorise it.
template <class Term>
SCRUPLE_HD float sum_of(i64 n, Term term) {
  constexpr int kLanes = 16;
  float lane[kLanes] = {};
  i64 i = 0;
  for (; i + kLanes <= n; i += kLanes)
    for (int j = 0; j < kLanes; ++j) lane[j] += term(i + j);
  for (int j = 0; i + j < n; ++j) lane[j] += term(i + j);
  for (int half = kLanes / 2; half > 0; half /= 2)
    for (int j = 0; j < half; ++j) lane[j] += lane[j + half];
  return lane[0];
}

// The largest of n >= 1 values; what a NaN does is left to whoever uses the result beside the values.
SCRUPLE_HD float largest_of(const float* values, i64 n) {
  constexpr int kLanes = 16;
  float lane[kLanes];
  for (int j = 0; j < kLanes; ++j) lane[j] = values[0];
  i64 i = 0;
  for (; i + kLanes <= n; i += kLanes)
    for (int j = 0; j < kLanes; ++j) lane[j] = values[i + j] > lane[j] ? values[i + j] : lane[j];
  for (int j = 0; i + j < n; ++j) lane[j] = values[i + j] > lane[j] ? values[i + j] : lane[j];
  for (int j = 1; j < kLanes; ++j) lane[0] = lane[j] > lane[0] ? lane[j] : lane[0];
  return lane[0];
}

}  // namespace scruple::train
