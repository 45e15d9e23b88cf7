// What the kernels of layers are written with: values of any type as floats, 16 bytes at a time where they can be, sums
// over threads in a fixed order, and the choice of a kernel by type and alignment.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <initializer_list>

#include "train/cuda/device.h"
#include "train/cuda/layers.h"

namespace scruple::train::cuda {

using Index = std::int64_t;
using Bf16 = __nv_bfloat16;
using Fp16 = __half;

inline constexpr unsigned kWholeWarp = 0xffffffffu;
inline constexpr int kWarp = 32;

// Values to an access of 16 bytes.
template <class T>
inline constexpr int kVector = 16 / static_cast<int>(sizeof(T));

// N values as they lie in memory: in registers they take no more room than there.
template <class T, int N>
struct Raw {
  static constexpr int kBytes = N * static_cast<int>(sizeof(T));
  unsigned word[(kBytes + 3) / 4];
};

template <class T, int N>
__device__ __forceinline__ Raw<T, N> nothing() {
  Raw<T, N> raw;
#pragma unroll
  for (unsigned& word : raw.word) word = 0;
  return raw;
}

// `from` lies at a multiple of 16 bytes, or of their size where N values are fewer.
template <int N, class T>
__device__ __forceinline__ Raw<T, N> load(const T* from) {
  Raw<T, N> raw;
  constexpr int kBytes = Raw<T, N>::kBytes;
  if constexpr (kBytes % 16 == 0) {
#pragma unroll
    for (int i = 0; i < kBytes / 16; ++i) {
      const uint4 four = reinterpret_cast<const uint4*>(from)[i];
      raw.word[4 * i] = four.x, raw.word[4 * i + 1] = four.y;
      raw.word[4 * i + 2] = four.z, raw.word[4 * i + 3] = four.w;
    }
  } else if constexpr (kBytes == 8) {
    const uint2 two = *reinterpret_cast<const uint2*>(from);
    raw.word[0] = two.x, raw.word[1] = two.y;
  } else if constexpr (kBytes == 4) {
    raw.word[0] = *reinterpret_cast<const unsigned*>(from);
  } else {
    static_assert(kBytes == 2);
    raw.word[0] = *reinterpret_cast<const unsigned short*>(from);
  }
  return raw;
}

// By name, because under a condition the compiler takes plain stores of 16 bytes apart. To memory of the device alone.
__device__ __forceinline__ void store_together(uint4* to, unsigned a, unsigned b, unsigned c, unsigned d) {
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(a), "r"(b), "r"(c), "r"(d)
               : "memory");
}

template <class T, int N>
__device__ __forceinline__ void store(T* to, const Raw<T, N>& raw) {
  constexpr int kBytes = Raw<T, N>::kBytes;
  const unsigned* word = raw.word;
  if constexpr (kBytes % 16 == 0) {
#pragma unroll
    for (int i = 0; i < kBytes / 16; ++i)
      store_together(reinterpret_cast<uint4*>(to) + i, word[4 * i], word[4 * i + 1], word[4 * i + 2],
                     word[4 * i + 3]);
  } else if constexpr (kBytes == 8) {
    *reinterpret_cast<uint2*>(to) = make_uint2(word[0], word[1]);
  } else if constexpr (kBytes == 4) {
    *reinterpret_cast<unsigned*>(to) = word[0];
  } else {
    *reinterpret_cast<unsigned short*>(to) = static_cast<unsigned short>(word[0]);
  }
}

template <int N>
struct Floats {
  float at[N];
  __device__ __forceinline__ float& operator[](int i) { return at[i]; }
  __device__ __forceinline__ const float& operator[](int i) const { return at[i]; }
};

template <int N>
__device__ __forceinline__ Floats<N> all_of(float value) {
  Floats<N> x;
#pragma unroll
  for (int i = 0; i < N; ++i) x[i] = value;
  return x;
}

template <int N>
__device__ __forceinline__ Floats<N> decode(const Raw<float, N>& raw) {
  Floats<N> x;
#pragma unroll
  for (int i = 0; i < N; ++i) x[i] = __uint_as_float(raw.word[i]);
  return x;
}
template <int N>
__device__ __forceinline__ Floats<N> decode(const Raw<Bf16, N>& raw) {
  Floats<N> x;
#pragma unroll
  for (int i = 0; i < N; ++i)
    x[i] = __uint_as_float(i % 2 == 0 ? raw.word[i / 2] << 16 : raw.word[i / 2] & 0xffff0000u);
  return x;
}
template <int N>
__device__ __forceinline__ Floats<N> decode(const Raw<Fp16, N>& raw) {
  Floats<N> x;
#pragma unroll
  for (int i = 0; i < N; ++i)
    x[i] = __half2float(
        __ushort_as_half(static_cast<unsigned short>(i % 2 == 0 ? raw.word[i / 2] : raw.word[i / 2] >> 16)));
  return x;
}

// Rounds to the nearest, ties to even; what is too large becomes infinite, for loss scaling to see.
template <class T>
__device__ __forceinline__ unsigned two_codes(float low, float high);
template <>
__device__ __forceinline__ unsigned two_codes<Bf16>(float low, float high) {
  const __nv_bfloat162 two = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const unsigned*>(&two);
}
template <>
__device__ __forceinline__ unsigned two_codes<Fp16>(float low, float high) {
  const __half2 two = __floats2half2_rn(low, high);
  return *reinterpret_cast<const unsigned*>(&two);
}

template <class T, int N>
__device__ __forceinline__ Raw<T, N> encode(const Floats<N>& x) {
  Raw<T, N> raw;
  if constexpr (sizeof(T) == 4) {
#pragma unroll
    for (int i = 0; i < N; ++i) raw.word[i] = __float_as_uint(x[i]);
  } else {
#pragma unroll
    for (int i = 0; i < N; i += 2) raw.word[i / 2] = two_codes<T>(x[i], i + 1 < N ? x[i + 1] : 0.0f);
  }
  return raw;
}

// N of them from index i, whatever their type.
template <int N>
__device__ __forceinline__ Floats<N> read(const Values& values, Index i) {
  switch (values.type) {
    case Precision::bf16: return decode(load<N>(static_cast<const Bf16*>(values.data) + i));
    case Precision::fp16: return decode(load<N>(static_cast<const Fp16*>(values.data) + i));
    default: return decode(load<N>(static_cast<const float*>(values.data) + i));
  }
}
template <int N>
__device__ __forceinline__ Floats<N> read_or(const Values& values, Index i, float otherwise) {
  return values.data == nullptr ? all_of<N>(otherwise) : read<N>(values, i);
}
template <int N>
__device__ __forceinline__ void write(const Values& values, Index i, const Floats<N>& x) {
  switch (values.type) {
    case Precision::bf16: return store(static_cast<Bf16*>(values.data) + i, encode<Bf16>(x));
    case Precision::fp16: return store(static_cast<Fp16*>(values.data) + i, encode<Fp16>(x));
    default: return store(static_cast<float*>(values.data) + i, encode<float>(x));
  }
}

// ---- Sums over threads ----

// Of `lanes` neighbouring lanes, a power of two; every lane of the warp calls it, and every lane gets the sum.
__device__ __forceinline__ float sum_of_lanes(float x, int lanes) {
  for (int apart = lanes / 2; apart > 0; apart /= 2) x += __shfl_xor_sync(kWholeWarp, x, apart);
  return x;
}
__device__ __forceinline__ float sum_of_warp(float x) {
#pragma unroll
  for (int apart = kWarp / 2; apart > 0; apart /= 2) x += __shfl_xor_sync(kWholeWarp, x, apart);
  return x;
}

// Of the `kThreads` threads that share a row: a warp, or a whole block, of which all threads call it.
template <int kThreads>
__device__ __forceinline__ float2 sums_of_row(float a, float b) {
  a = sum_of_warp(a), b = sum_of_warp(b);
  if constexpr (kThreads > kWarp) {
    __shared__ float2 parts[kThreads / kWarp];
    __syncthreads();  // an earlier sum has been read
    if (threadIdx.x % kWarp == 0) parts[threadIdx.x / kWarp] = make_float2(a, b);
    __syncthreads();
    a = 0, b = 0;
#pragma unroll
    for (const float2& part : parts) a += part.x, b += part.y;
  }
  return make_float2(a, b);
}
template <int kThreads>
__device__ __forceinline__ float sum_of_row(float x) {
  return sums_of_row<kThreads>(x, 0).x;
}

// ---- Launching ----

inline Index ceil_div(Index a, Index b) { return (a + b - 1) / b; }

// Whether n values there can be read and written together.
inline bool fits(const void* data, Index value_bytes, Index n) {
  const auto bytes = static_cast<std::uintptr_t>(std::min<Index>(16, n * value_bytes));
  return reinterpret_cast<std::uintptr_t>(data) % bytes == 0;
}
inline bool fits(const Values& values, Index n) { return fits(values.data, bytes_of(values.type), n); }

// Rows of `width` of these activations, beside those values, go in vectors.
inline bool in_vectors(Precision precision, Index width, std::initializer_list<const void*> activations,
                       std::initializer_list<Values> values = {}) {
  const Index n = 16 / bytes_of(precision);
  bool fit = width % n == 0;
  for (const void* data : activations) fit = fit && fits(data, bytes_of(precision), n);
  for (const Values& some : values) fit = fit && fits(some, n);
  return fit;
}

// Calls call(Lanes<T, V>()): T for the precision, V values at a time.
template <class T, int V>
struct Lanes {};
template <class T, class Call>
void with_lanes_of(bool vectors, const Call& call) {
  if (vectors)
    call(Lanes<T, kVector<T>>());
  else
    call(Lanes<T, 1>());
}
template <class Call>
void with_lanes(Precision precision, bool vectors, const Call& call) {
  switch (precision) {
    case Precision::bf16: return with_lanes_of<Bf16>(vectors, call);
    case Precision::fp16: return with_lanes_of<Fp16>(vectors, call);
    default: return with_lanes_of<float>(vectors, call);
  }
}

inline void launched(const char* doing) { check(cudaGetLastError(), doing); }

}  // namespace scruple::train::cuda
