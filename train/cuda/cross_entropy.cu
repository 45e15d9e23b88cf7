// The loss of logits, and its gradient in their place.
#include <cfloat>

#include "train/cuda/functions.cuh"
#include "train/cuda/lanes.cuh"
#include "train/cuda/layers.h"

namespace scruple::train::cuda {
namespace {

constexpr int kLossThreads = 256;

// The sum of e^(x - top) so far, where top is the largest x.
struct Running {
  float top, sum;
};

template <class T>
__device__ __forceinline__ Running joined(const Running& a, const Running& b) {
  const float top = fmaxf(a.top, b.top);
  return {top, a.sum * exponential<T>(a.top - top) + b.sum * exponential<T>(b.top - top)};
}

// All threads of a block call it, and all get the result.
template <class T>
__device__ __forceinline__ Running joined_of_block(Running own) {
  __shared__ Running parts[kLossThreads / kWarp];
#pragma unroll
  for (int apart = kWarp / 2; apart > 0; apart /= 2) {
    const Running other = {__shfl_xor_sync(kWholeWarp, own.top, apart),
                           __shfl_xor_sync(kWholeWarp, own.sum, apart)};
    own = joined<T>(own, other);
  }
  if (threadIdx.x % kWarp == 0) parts[threadIdx.x / kWarp] = own;
  __syncthreads();
  own = parts[0];
  for (unsigned w = 1; w < blockDim.x / kWarp; ++w) own = joined<T>(own, parts[w]);
  return own;
}

// Some logits to a thread at a time: kBatch vectors that lie blockDim.x apart.
template <class T, int V>
struct LogitRow {
  static constexpr int kBatch = V == 1 ? 8 : 16 / V;
  T* data;
  Index vocabulary, stride;

  __device__ __forceinline__ Index column(Index first, int u) const {
    return first + static_cast<Index>(u) * blockDim.x * V;
  }
  template <class Each>
  __device__ __forceinline__ void batches(Index end, const Each& each) const {
    for (Index c = static_cast<Index>(threadIdx.x) * V; c < end;
         c += static_cast<Index>(kBatch) * blockDim.x * V)
      each(c);
  }
  // Those of a batch; -infinity, whose exponential is 0, where there are none.
  __device__ __forceinline__ void read(Index first, Floats<V> (&x)[kBatch]) const {
    Raw<T, V> raw[kBatch];
#pragma unroll
    for (int u = 0; u < kBatch; ++u)
      raw[u] = column(first, u) < vocabulary ? load<V>(data + column(first, u)) : nothing<T, V>();
#pragma unroll
    for (int u = 0; u < kBatch; ++u) {
      x[u] = decode(raw[u]);
#pragma unroll
      for (int j = 0; j < V; ++j)
        if (column(first, u) + j >= vocabulary) x[u][j] = -INFINITY;
    }
  }
  __device__ __forceinline__ void fill_with_zeros() const {
    for (Index c = static_cast<Index>(threadIdx.x) * V; c < stride; c += static_cast<Index>(blockDim.x) * V)
      store(data + c, nothing<T, V>());
  }
  // Milakov & Gimelshein, 1805.02867, a batch at a time.
  __device__ __forceinline__ Running sum() const {
    Running own = {-FLT_MAX, 0};
    batches(vocabulary, [&](Index first) {
      Floats<V> x[kBatch];
      read(first, x);
      float top = own.top;
#pragma unroll
      for (int u = 0; u < kBatch; ++u)
#pragma unroll
        for (int j = 0; j < V; ++j) top = fmaxf(top, x[u][j]);
      float part = 0;
#pragma unroll
      for (int u = 0; u < kBatch; ++u)
#pragma unroll
        for (int j = 0; j < V; ++j) part += exponential<T>(x[u][j] - top);
      own = {top, own.sum * exponential<T>(own.top - top) + part};
    });
    return joined_of_block<T>(own);
  }
  __device__ __forceinline__ void become_gradients(const Running& all, Index target, float scale) const {
    const float each = scale / all.sum;
    batches(stride, [&](Index first) {
      Floats<V> x[kBatch];
      read(first, x);
#pragma unroll
      for (int u = 0; u < kBatch; ++u) {
        const Index c = column(first, u);
        if (c >= stride) break;
#pragma unroll
        for (int j = 0; j < V; ++j)
          x[u][j] = c + j < vocabulary
                        ? exponential<T>(x[u][j] - all.top) * each - (c + j == target ? scale : 0.0f)
                        : 0.0f;
        store(data + c, encode<T>(x[u]));
      }
    });
  }
};

template <class T, int V>
__global__ void __launch_bounds__(kLossThreads, 6)
    entropy_rows(T* logits, Index vocabulary, Index stride, const std::int32_t* targets, const float* scale,
                 float* losses) {
  const Index row = blockIdx.x, target = targets[row];
  const LogitRow<T, V> line{logits + row * stride, vocabulary, stride};
  if (target < 0) {  // not even a NaN counts
    if (threadIdx.x == 0) losses[row] = 0;
    if (scale != nullptr) line.fill_with_zeros();
    return;
  }
  const float at_target = decode(load<1>(line.data + target))[0];  // before anyone overwrites it
  const Running all = line.sum();
  if (threadIdx.x == 0) losses[row] = logf(all.sum) - (at_target - all.top);
  if (scale != nullptr) line.become_gradients(all, target, *scale);
}

constexpr int kLossSumThreads = 1024;

__global__ void __launch_bounds__(kLossSumThreads) add_losses(const float* losses, Index rows, double* sum) {
  __shared__ double parts[kLossSumThreads];
  double own = 0;
#pragma unroll 8
  for (Index row = threadIdx.x; row < rows; row += kLossSumThreads) own += static_cast<double>(losses[row]);
  parts[threadIdx.x] = own;
  __syncthreads();
  for (unsigned apart = kLossSumThreads / 2; apart > 0; apart /= 2) {
    if (threadIdx.x < apart) parts[threadIdx.x] += parts[threadIdx.x + apart];
    __syncthreads();
  }
  if (threadIdx.x == 0) *sum = parts[0];
}

}  // namespace

void cross_entropy(Precision precision, void* logits, std::int64_t rows, std::int64_t vocabulary,
                   std::int64_t stride, const std::int32_t* targets, const float* scale, float* losses,
                   cudaStream_t stream) {
  if (rows == 0) return;
  with_lanes(precision, in_vectors(precision, stride, {logits}), [&]<class T, int V>(Lanes<T, V>) {
    const Index threads = std::min<Index>(ceil_div(ceil_div(stride, V), kWarp) * kWarp, kLossThreads);
    entropy_rows<T, V><<<static_cast<unsigned>(rows), static_cast<unsigned>(threads), 0, stream>>>(
        static_cast<T*>(logits), vocabulary, stride, targets, scale, losses);
  });
  launched("the loss");
}

void sum_losses(const float* losses, std::int64_t rows, double* sum, cudaStream_t stream) {
  add_losses<<<1, kLossSumThreads, 0, stream>>>(losses, rows, sum);
  launched("adding losses");
}

}  // namespace scruple::train::cuda
