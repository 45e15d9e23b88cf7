// Kernels of the norms (Ba et al., 1607.06450; Zhang & Sennrich, 1910.07467). A row that fits stays in the registers of
// one warp or one block between its sums and its results.
#pragma once

#include "train/cuda/lanes.cuh"

namespace scruple::train::cuda {

// 0 for RMS norm, which keeps none.
__device__ __forceinline__ float mean_of(const float* mean, Index row) {
  return mean == nullptr ? 0.0f : mean[row];
}

struct NormForward {
  Norm norm;
  const void* x;
  Index rows, width;
  void* y;
  float *mean, *rstd;

  __device__ __forceinline__ float deviation(float squares) const {
    return 1.0f / sqrtf(squares / static_cast<float>(width) + norm.epsilon);
  }
  __device__ __forceinline__ void keep(Index row, float row_mean, float row_rstd) const {
    if (mean != nullptr) mean[row] = row_mean;
    rstd[row] = row_rstd;
  }
  // y of V columns.
  template <class T, int V>
  __device__ __forceinline__ void finish(Index row, Index column, Floats<V> v, float row_mean,
                                         float row_rstd) const {
    const Floats<V> weight = read_or<V>(norm.weight, column, 1), bias = read_or<V>(norm.bias, column, 0);
#pragma unroll
    for (int j = 0; j < V; ++j) v[j] = (v[j] - row_mean) * row_rstd * weight[j] + bias[j];
    store(static_cast<T*>(y) + row * width + column, encode<T>(v));
  }
};

inline constexpr int kRowWarps = 4;    // rows to a block where each has a warp
inline constexpr int kRowFloats = 32;  // of a row to a thread

// kThreads to a row, of at most 32 values each.
template <class T, int V, int kThreads>
__global__ void __launch_bounds__(kThreads == kWarp ? kRowWarps * kWarp : kThreads)
    normalise_rows(NormForward job) {
  constexpr int kParts = kRowFloats / V;
  const int thread = static_cast<int>(threadIdx.x) % kThreads;
  const Index row = kThreads == kWarp ? static_cast<Index>(blockIdx.x) * kRowWarps + threadIdx.x / kWarp
                                      : static_cast<Index>(blockIdx.x);
  if (row >= job.rows) return;  // a whole warp
  const T* x = static_cast<const T*>(job.x) + row * job.width;
  const auto column = [&](int k) { return (k * kThreads + thread) * V; };
  Raw<T, V> kept[kParts];
#pragma unroll
  for (int k = 0; k < kParts; ++k) kept[k] = column(k) < job.width ? load<V>(x + column(k)) : nothing<T, V>();

  float mean = 0;
  if (job.norm.kind == NormKind::layer) {
#pragma unroll
    for (int k = 0; k < kParts; ++k) {
      const Floats<V> v = decode(kept[k]);
#pragma unroll
      for (int j = 0; j < V; ++j) mean += v[j];
    }
    mean = sum_of_row<kThreads>(mean) / static_cast<float>(job.width);
  }
  float squares = 0;
#pragma unroll
  for (int k = 0; k < kParts; ++k) {
    if (column(k) >= job.width) continue;
    const Floats<V> v = decode(kept[k]);
#pragma unroll
    for (int j = 0; j < V; ++j) squares += (v[j] - mean) * (v[j] - mean);
  }
  const float rstd = job.deviation(sum_of_row<kThreads>(squares));
  if (thread == 0) job.keep(row, mean, rstd);
#pragma unroll
  for (int k = 0; k < kParts; ++k)
    if (column(k) < job.width) job.finish<T, V>(row, column(k), decode(kept[k]), mean, rstd);
}

inline constexpr int kWideThreads = 512;

// A block to a row of any width, which is read three times: twice from a cache.
template <class T, int V>
__global__ void __launch_bounds__(kWideThreads) normalise_wide(NormForward job) {
  const Index row = blockIdx.x;
  const T* x = static_cast<const T*>(job.x) + row * job.width;
  const Index first = static_cast<Index>(threadIdx.x) * V, step = static_cast<Index>(kWideThreads) * V;
  float mean = 0;
  if (job.norm.kind == NormKind::layer) {
    for (Index c = first; c < job.width; c += step) {
      const Floats<V> v = decode(load<V>(x + c));
#pragma unroll
      for (int j = 0; j < V; ++j) mean += v[j];
    }
    mean = sum_of_row<kWideThreads>(mean) / static_cast<float>(job.width);
  }
  float squares = 0;
  for (Index c = first; c < job.width; c += step) {
    const Floats<V> v = decode(load<V>(x + c));
#pragma unroll
    for (int j = 0; j < V; ++j) squares += (v[j] - mean) * (v[j] - mean);
  }
  const float rstd = job.deviation(sum_of_row<kWideThreads>(squares));
  if (threadIdx.x == 0) job.keep(row, mean, rstd);
  for (Index c = first; c < job.width; c += step)
    job.finish<T, V>(row, c, decode(load<V>(x + c)), mean, rstd);
}

// ---- Backward ----

// With h = (x - mean) rstd and a = dy weight, dx = rstd (a - mean(a) - h mean(a h)); RMS norm subtracts no mean, neither
// from x nor from a. The weight's gradient sums dy h, the bias's dy.
struct NormBackward {
  Norm norm;
  const void *dy, *x;
  const float *mean, *rstd;
  Index rows, width;
  bool adds;
  void* g;
  float* sums;

  // {mean(a), mean(a h)} from their sums.
  __device__ __forceinline__ float2 means(float2 of) const {
    const float n = static_cast<float>(width);
    return make_float2(norm.kind == NormKind::layer ? of.x / n : 0.0f, of.y / n);
  }
};

// Per-row statistics, broadcast over the columns.
struct NormRow {
  float mean, rstd;
  float2 means;
  __device__ __forceinline__ float h(float x) const { return (x - mean) * rstd; }
  __device__ __forceinline__ float dx(float x, float a) const {
    return rstd * (a - means.x - h(x) * means.y);
  }
};

// Adds the a and the a h of V columns.
template <int V>
__device__ __forceinline__ void add_to(float2& sums, const NormRow& row, const Floats<V>& x,
                                       const Floats<V>& dy, const Floats<V>& weight) {
#pragma unroll
  for (int j = 0; j < V; ++j) {
    const float a = dy[j] * weight[j];
    sums.x += a, sums.y += a * row.h(x[j]);
  }
}

// Warps in a block where each warp has a row. They add their column sums together at the end. Wide rows take
// fewer warps, so that each has enough registers.
template <int kFloats>
inline constexpr int kBackWarps = kFloats > 24 ? 6 : 8;
// Where a block has the row: the floats of it that a thread has, singly or in vectors.
template <int V>
inline constexpr int kBackParts = V == 1 ? 8 : 16 / V;

// The sums of each warp's columns, one warp after the other.
template <int V, int kParts>
__device__ __forceinline__ void sum_of_warps(const Floats<V> (&own)[kParts], Index width, float* shared,
                                             float* to) {
  constexpr int kWarps = kBackWarps<V * kParts>;
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  for (int turn = 0; turn < kWarps; ++turn) {
    if (warp == turn) {
#pragma unroll
      for (int k = 0; k < kParts; ++k)
#pragma unroll
        for (int j = 0; j < V; ++j) {
          float& sum = shared[(k * V + j) * kWarp + lane];  // no two lanes in one bank
          sum = turn == 0 ? own[k][j] : sum + own[k][j];
        }
    }
    __syncthreads();
  }
  for (int i = threadIdx.x; i < kParts * V * kWarp; i += kWarps * kWarp) {
    const int owner = i % kWarp, k = i / kWarp / V, j = i / kWarp % V;
    const int column = (k * kWarp + owner) * V + j;
    if (column < width) to[column] = shared[i];
  }
  __syncthreads();
}

// kThreads to a row, of kParts x V values each; every block takes rows until none is left and keeps its sums of columns in
// registers meanwhile.
template <class T, int V, int kThreads, int kParts>
__global__ void __launch_bounds__(kThreads == kWarp ? kBackWarps<V * kParts> * kWarp : kThreads,
                                  kThreads == 512 ? 1 : 2) normalise_back(NormBackward job) {
  constexpr int kRows = kThreads == kWarp ? kBackWarps<V * kParts> : 1;  // at a time
  const int thread = static_cast<int>(threadIdx.x) % kThreads;
  const auto column = [&](int k) { return (k * kThreads + thread) * V; };
  Floats<V> weight_sums[kParts], bias_sums[kParts];
#pragma unroll
  for (int k = 0; k < kParts; ++k) weight_sums[k] = all_of<V>(0), bias_sums[k] = all_of<V>(0);

  const Index first = static_cast<Index>(blockIdx.x) * kRows + threadIdx.x / kThreads;
  for (Index row = first; row < job.rows; row += static_cast<Index>(gridDim.x) * kRows) {
    const Index at = row * job.width;
    const T *x = static_cast<const T*>(job.x) + at, *dy = static_cast<const T*>(job.dy) + at;
    T* g = static_cast<T*>(job.g) + at;
    Raw<T, V> xs[kParts], dys[kParts], old[kParts];
#pragma unroll
    for (int k = 0; k < kParts; ++k) {
      const bool there = column(k) < job.width;
      xs[k] = there ? load<V>(x + column(k)) : nothing<T, V>();
      dys[k] = there ? load<V>(dy + column(k)) : nothing<T, V>();
      old[k] = there && job.adds ? load<V>(g + column(k)) : nothing<T, V>();
    }
    NormRow values{mean_of(job.mean, row), job.rstd[row], {}};
    float2 sums = make_float2(0, 0);
#pragma unroll
    for (int k = 0; k < kParts; ++k)
      if (column(k) < job.width)
        add_to(sums, values, decode(xs[k]), decode(dys[k]), read_or<V>(job.norm.weight, column(k), 1));
    values.means = job.means(sums_of_row<kThreads>(sums.x, sums.y));
#pragma unroll
    for (int k = 0; k < kParts; ++k) {
      if (column(k) >= job.width) continue;
      const Floats<V> weight = read_or<V>(job.norm.weight, column(k), 1);
      const Floats<V> v = decode(xs[k]), d = decode(dys[k]);
      Floats<V> out = decode(old[k]);
#pragma unroll
      for (int j = 0; j < V; ++j) {
        out[j] += values.dx(v[j], d[j] * weight[j]);
        weight_sums[k][j] += d[j] * values.h(v[j]);
        bias_sums[k][j] += d[j];
      }
      store(g + column(k), encode<T>(out));
    }
  }

  float* to = job.sums + static_cast<Index>(blockIdx.x) * 2 * job.width;
  if constexpr (kThreads == kWarp) {
    __shared__ float shared[kParts * V * kWarp];
    sum_of_warps(weight_sums, job.width, shared, to);
    sum_of_warps(bias_sums, job.width, shared, to + job.width);
  } else {
#pragma unroll
    for (int k = 0; k < kParts; ++k)
#pragma unroll
      for (int j = 0; j < V; ++j) {
        if (column(k) >= job.width) continue;
        to[column(k) + j] = weight_sums[k][j];
        to[job.width + column(k) + j] = bias_sums[k][j];
      }
  }
}

// A block to a row of any width, read twice; the sums of columns are left to column_parts.
template <class T, int V>
__global__ void __launch_bounds__(kWideThreads) normalise_back_wide(NormBackward job) {
  const Index row = blockIdx.x, at = row * job.width;
  const T *x = static_cast<const T*>(job.x) + at, *dy = static_cast<const T*>(job.dy) + at;
  T* g = static_cast<T*>(job.g) + at;
  const Index first = static_cast<Index>(threadIdx.x) * V, step = static_cast<Index>(kWideThreads) * V;
  NormRow values{mean_of(job.mean, row), job.rstd[row], {}};
  float2 sums = make_float2(0, 0);
  for (Index c = first; c < job.width; c += step)
    add_to(sums, values, decode(load<V>(x + c)), decode(load<V>(dy + c)), read_or<V>(job.norm.weight, c, 1));
  values.means = job.means(sums_of_row<kWideThreads>(sums.x, sums.y));
  for (Index c = first; c < job.width; c += step) {
    const Floats<V> weight = read_or<V>(job.norm.weight, c, 1);
    const Floats<V> v = decode(load<V>(x + c)), d = decode(load<V>(dy + c));
    Floats<V> out = job.adds ? decode(load<V>(g + c)) : all_of<V>(0);
#pragma unroll
    for (int j = 0; j < V; ++j) out[j] += values.dx(v[j], d[j] * weight[j]);
    store(g + c, encode<T>(out));
  }
}

// ---- Sums of columns ----

inline constexpr int kColumnWarps = 8, kColumnUnroll = 4;

// Sums over some rows of dy, and before them, where x is given, of dy h: to sums[part][1 or 2][width]. A block takes the
// columns of one warp's vectors and a run of rows; its warps take rows in turn.
struct ColumnParts {
  const void *dy, *x;
  const float *mean, *rstd;
  Index rows, stride, width, parts;
  float* sums;
};

template <class T, int V, bool kNormed>
__global__ void __launch_bounds__(kColumnWarps* kWarp) column_parts(ColumnParts job) {
  constexpr int kColumns = kWarp * V;
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const Index tile = blockIdx.x / job.parts, part = blockIdx.x % job.parts;
  const Index column = tile * kColumns + static_cast<Index>(lane) * V;
  const Index run = (job.rows + job.parts - 1) / job.parts;
  const Index begin = part * run, end = begin + run < job.rows ? begin + run : job.rows;
  Floats<V> dys = all_of<V>(0), dyhs = all_of<V>(0);
  if (column < job.width) {
    const T* dy = static_cast<const T*>(job.dy) + column;
    const T* x = static_cast<const T*>(job.x) + column;
    for (Index row = begin + warp; row < end; row += kColumnUnroll * kColumnWarps) {
      Raw<T, V> d[kColumnUnroll], v[kColumnUnroll];
#pragma unroll
      for (int u = 0; u < kColumnUnroll; ++u) {
        const Index r = row + u * kColumnWarps;
        d[u] = r < end ? load<V>(dy + r * job.stride) : nothing<T, V>();
        if constexpr (kNormed) v[u] = r < end ? load<V>(x + r * job.stride) : nothing<T, V>();
      }
#pragma unroll
      for (int u = 0; u < kColumnUnroll; ++u) {
        const Floats<V> g = decode(d[u]);
#pragma unroll
        for (int j = 0; j < V; ++j) dys[j] += g[j];
        if constexpr (kNormed) {
          const Index r = row + u * kColumnWarps;
          if (r >= end) continue;
          const NormRow values{mean_of(job.mean, r), job.rstd[r], {}};
          const Floats<V> xs = decode(v[u]);
#pragma unroll
          for (int j = 0; j < V; ++j) dyhs[j] += g[j] * values.h(xs[j]);
        }
      }
    }
  }
  __shared__ float shared[kColumnWarps][V][kWarp];
  const auto sum_to = [&](const Floats<V>& own, float* to) {
#pragma unroll
    for (int j = 0; j < V; ++j) shared[warp][j][lane] = own[j];
    __syncthreads();
    for (int i = threadIdx.x; i < kColumns; i += kColumnWarps * kWarp) {
      const Index c = tile * kColumns + i;
      float sum = 0;
      for (int w = 0; w < kColumnWarps; ++w) sum += shared[w][i % V][i / V];
      if (c < job.width) to[c] = sum;
    }
    __syncthreads();
  };
  float* to = job.sums + part * (kNormed ? 2 : 1) * job.width;
  if constexpr (kNormed) sum_to(dyhs, to);
  sum_to(dys, kNormed ? to + job.width : to);
}

// Each block sums 32 columns: a warp takes every 32nd part, the warps' sums follow in order.
inline constexpr int kSumWarps = 32;
__global__ void __launch_bounds__(kSumWarps* kWarp)
    add_parts(const float* sums, Index parts, Index stride, Index width, Values out) {
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const Index column = static_cast<Index>(blockIdx.x) * kWarp + lane;
  __shared__ float shared[kSumWarps][kWarp];
  float sum = 0;
  if (column < width) {
#pragma unroll 4
    for (Index part = warp; part < parts; part += kSumWarps) sum += sums[part * stride + column];
  }
  shared[warp][lane] = sum;
  __syncthreads();
  if (warp > 0 || column >= width) return;
  sum = 0;
  for (int w = 0; w < kSumWarps; ++w) sum += shared[w][lane];
  Floats<1> one;
  one[0] = sum;
  write<1>(out, column, one);
}

}  // namespace scruple::train::cuda
