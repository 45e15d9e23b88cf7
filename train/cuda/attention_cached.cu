// Attention of new tokens to a key-value cache. Each warp takes every kWarps-th key with a softmax of its own, whose parts
// are joined at the end (Milakov & Gimelshein, 1805.02867): the order is fixed.
#include <cmath>
#include <cstddef>

#include "train/cuda/attention.h"
#include "train/cuda/lanes.cuh"

namespace scruple::train::cuda {
namespace {

constexpr int kWarps = 8, kMostWidth = 256, kPerLane = kMostWidth / kWarp;

template <class T>
__global__ void __launch_bounds__(kWarps* kWarp)
    attend_to_cache(const T* queries, Index query_stride, const T* keys, const T* values, Index stride,
                    Index past, int group, int width, float scale, T* y, Index y_stride) {
  __shared__ float tops[kWarps], sums[kWarps], parts[kWarps][kMostWidth];
  const int head = static_cast<int>(blockIdx.y), lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const Index row = blockIdx.x, seen = past + row + 1, column = head / group * width;
  const T* const q = queries + row * query_stride + head * width;
  float query[kPerLane], part[kPerLane] = {}, top = -INFINITY, sum = 0;
#pragma unroll
  for (int j = 0; j < kPerLane; ++j) {
    const int i = lane + j * kWarp;
    query[j] = i < width ? static_cast<float>(q[i]) * scale : 0.0f;
  }
  for (Index key = warp; key < seen; key += kWarps) {
    const T *const k = keys + key * stride + column, *const v = values + key * stride + column;
    float score = 0;
#pragma unroll
    for (int j = 0; j < kPerLane; ++j) {
      const int i = lane + j * kWarp;
      if (i < width) score += query[j] * static_cast<float>(k[i]);
    }
    for (int other = kWarp / 2; other > 0; other /= 2) score += __shfl_xor_sync(kWholeWarp, score, other);
    const float higher = fmaxf(top, score), before = expf(top - higher), now = expf(score - higher);
    top = higher, sum = sum * before + now;
#pragma unroll
    for (int j = 0; j < kPerLane; ++j) {
      const int i = lane + j * kWarp;
      if (i < width) part[j] = part[j] * before + now * static_cast<float>(v[i]);
    }
  }
#pragma unroll
  for (int j = 0; j < kPerLane; ++j) parts[warp][lane + j * kWarp] = part[j];
  if (lane == 0) tops[warp] = top, sums[warp] = sum;
  __syncthreads();
  float highest = tops[0];
  for (int w = 1; w < kWarps; ++w) highest = fmaxf(highest, tops[w]);
  for (int i = threadIdx.x; i < width; i += kWarps * kWarp) {
    float above = 0, below = 0;
    for (int w = 0; w < kWarps; ++w) {
      const float factor = expf(tops[w] - highest);  // 0 of a warp without keys
      above += parts[w][i] * factor, below += sums[w] * factor;
    }
    y[row * y_stride + head * width + i] = static_cast<T>(above / below);
  }
}

template <class T>
void run(const Attention& shape, const T* qkv, const Cache& cache, T* y, cudaStream_t stream) {
  const Index width = shape.head_width, query_width = shape.heads * width, key_width = shape.kv_heads * width;
  const Index stride = query_width + 2 * key_width;
  T *const keys = static_cast<T*>(cache.data), *const values = keys + cache.context * key_width;
  for (T* const to : {keys, values}) {
    const T* const from = qkv + query_width + (to == keys ? 0 : key_width);
    const auto bytes = [](Index count) { return static_cast<std::size_t>(count) * sizeof(T); };
    check(cudaMemcpy2DAsync(to + cache.length * key_width, bytes(key_width), from, bytes(stride),
                            bytes(key_width), static_cast<std::size_t>(shape.length),
                            cudaMemcpyDeviceToDevice, stream),
          "filling the key-value cache");
  }
  const dim3 blocks(static_cast<unsigned>(shape.length), static_cast<unsigned>(shape.heads));
  attend_to_cache<T><<<blocks, kWarps * kWarp, 0, stream>>>(
      qkv, stride, keys, values, key_width, cache.length, shape.heads / shape.kv_heads, shape.head_width,
      1.0f / std::sqrt(static_cast<float>(width)), y, query_width);
  check(cudaGetLastError(), "attention to the key-value cache");
}

}  // namespace

void attend_cached(const Attention& shape, const void* qkv, const Cache& cache, void* y,
                   cudaStream_t stream) {
  const auto as = [&]<class T>(T) {
    run(shape, static_cast<const T*>(qkv), cache, static_cast<T*>(y), stream);
  };
  switch (shape.precision) {
    case Precision::fp32: return as(float{});
    case Precision::bf16: return as(Bf16{});
    case Precision::fp16: return as(Fp16{});
  }
}

}  // namespace scruple::train::cuda
