// The functions of one value that the MLPs apply, on floats; the formulas are those of train/cpu/math.h. For values of 16
// bits the exponential is the device's own, whose error of a few 2^-22 is far below theirs; for fp32 the exact one.
#pragma once

#include <cuda_runtime.h>

#include <cmath>

#include "train/model/description.h"

namespace scruple::train::cuda {

// e^x.
template <class T>
__host__ __device__ __forceinline__ float exponential(float x) {
#ifdef __CUDA_ARCH__
  if constexpr (sizeof(T) < 4) return __expf(x);
#endif
  return expf(x);
}

// open = 1 / (1 + e^-x) and shut = 1 - open. The subtraction itself would lose all bits of `shut` for a large
// x, and GELU's derivative multiplies `shut` by x^3.
struct Logistic {
  float open, shut;
};
template <class T>
__host__ __device__ __forceinline__ Logistic logistic_of(float x) {
  const float e = fminf(exponential<T>(-x), 1e37f);  // the device's own division gives 0 from 2^126
#ifdef __CUDA_ARCH__
  if constexpr (sizeof(T) < 4) {
    const float open = __fdividef(1.0f, 1.0f + e);
    return {open, e * open};
  }
#endif
  const float open = 1.0f / (1.0f + e);
  return {open, e * open};
}

// GELU in its tanh form is x / (1 + e^(-2u)) (Hendrycks & Gimpel, 1606.08415, section 2).
template <class T>
__host__ __device__ __forceinline__ Logistic gelu_gate_of(float x) {
  return logistic_of<T>(2.0f * kGeluSlope * x * (1.0f + kGeluCubic * x * x));
}
template <class T>
__host__ __device__ __forceinline__ float gelu_of(float x) {
  return x * gelu_gate_of<T>(x).open;
}
template <class T>
__host__ __device__ __forceinline__ float gelu_slope_of(float x) {
  const Logistic gate = gelu_gate_of<T>(x);
  const float du = kGeluSlope * (1.0f + 3.0f * kGeluCubic * x * x);
  return gate.open + x * gate.open * gate.shut * 2.0f * du;
}

// SwiGLU (Shazeer, 2002.05202): what the gate lets through, and the gradients of gate and value.
template <class T>
__host__ __device__ __forceinline__ float gated_of(float gate, float value) {
  return gate * logistic_of<T>(gate).open * value;
}
struct Gated {
  float gate, value;
};
template <class T>
__host__ __device__ __forceinline__ Gated gated_back(float d, float gate, float value) {
  const Logistic of = logistic_of<T>(gate);
  const float silu = gate * of.open;
  return {d * value * (of.open + silu * of.shut), d * silu};
}

}  // namespace scruple::train::cuda
