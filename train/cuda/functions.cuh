// The functions of one value that the MLPs apply, on floats; the formulas are those of train/cpu/math.h. For values of 16
// bits the exponential is the device's own, whose error of a few 2^-22 is far below theirs; for fp32 the exact one.
#pragma once

#include <cmath>

#include "train/cpu/math.h"

namespace scruple::train::cuda {

// e^x.
template <class T>
__host__ __device__ __forceinline__ float exponential(float x) {
#ifdef __CUDA_ARCH__
  if constexpr (sizeof(T) < 4) return __expf(x);
#endif
  return expf(x);
}

// 1 / (1 + e^-x): 0 where e^-x is infinite.
template <class T>
__host__ __device__ __forceinline__ float logistic_of(float x) {
  const float below = 1.0f + exponential<T>(-x);
#ifdef __CUDA_ARCH__
  if constexpr (sizeof(T) < 4) return __fdividef(1.0f, below);
#endif
  return 1.0f / below;
}

// GELU in its tanh form is x / (1 + e^(-2u)) (Hendrycks & Gimpel, 1606.08415, section 2).
template <class T>
__host__ __device__ __forceinline__ float gelu_gate_of(float x) {
  return logistic_of<T>(2.0f * kGeluSlope * x * (1.0f + kGeluCubic * x * x));
}
template <class T>
__host__ __device__ __forceinline__ float gelu_of(float x) {
  return x * gelu_gate_of<T>(x);
}
template <class T>
__host__ __device__ __forceinline__ float gelu_slope_of(float x) {
  const float gate = gelu_gate_of<T>(x), du = kGeluSlope * (1.0f + 3.0f * kGeluCubic * x * x);
  return gate + x * gate * (1.0f - gate) * 2.0f * du;
}

// SwiGLU (Shazeer, 2002.05202): what the gate lets through, and the gradients of gate and value.
template <class T>
__host__ __device__ __forceinline__ float gated_of(float gate, float value) {
  return gate * logistic_of<T>(gate) * value;
}
struct Gated {
  float gate, value;
};
template <class T>
__host__ __device__ __forceinline__ Gated gated_back(float d, float gate, float value) {
  const float open = logistic_of<T>(gate), silu = gate * open;
  return {d * value * (open + silu * (1.0f - open)), d * silu};
}

}  // namespace scruple::train::cuda
