// Attention in plain fp32 arithmetic, for what tensor cores do not take: fp32, and head widths they have no
// kernel for. A block has 16 x 16 threads; each computes R x R scores of a tile of 16 R queries and 16 R
// keys, and R rows of the result.
#pragma once

#include <cmath>

#include "train/cuda/attention_rows.cuh"

namespace scruple::train::cuda {

inline constexpr int kPlainThreads = 256;

// Shared memory of rows as fp32: padded with zeros to whole float4, an odd number of them, so that
// neighbouring rows lie in different banks.
__host__ __device__ inline int plain_stride(int width) { return ((width + 3) / 4 | 1) * 4; }

// R rows of up to 256 / R values, 4 at a time: thread x of a row has values 4 x + 64 j and the three that
// follow.
template <int R>
struct PlainRows {
  static constexpr int kSteps = R == 1 ? 4 : 2;
  float4 value[R][kSteps];
  __device__ PlainRows() {
    for (int r = 0; r < R; ++r)
      for (int j = 0; j < kSteps; ++j) value[r][j] = {0, 0, 0, 0};
  }
};

// A thread's place, and how many values there are in a row of shared memory.
template <int R>
struct Plain {
  static constexpr int kTile = 16 * R;
  int width, stride;
  int x = static_cast<int>(threadIdx.x) % 16, y = static_cast<int>(threadIdx.x) / 16;
  __device__ explicit Plain(int head_width) : width(head_width), stride(plain_stride(head_width)) {}

  // A tile of rows; zeros beyond the length and beyond the width.
  template <class T>
  __device__ void load(float* to, Rows<const T> from, int first, int length) const {
    for (int row = y; row < kTile; row += 16)
      for (int d = x; d < stride; d += 16)
        to[row * stride + d] = first + row < length && d < width ? to_float(from.row(first + row)[d]) : 0.0f;
  }
  // c[i][j] = row y + 16 i of `left` times row x + 16 j of `right`.
  __device__ void multiply_rows(float (&c)[R][R], const float* left, const float* right) const {
    for (int i = 0; i < R; ++i)
      for (int j = 0; j < R; ++j) c[i][j] = 0;
    for (int d = 0; d < width; d += 4) {
      float4 a[R], b[R];
      for (int i = 0; i < R; ++i) a[i] = *reinterpret_cast<const float4*>(left + (y + 16 * i) * stride + d);
      for (int j = 0; j < R; ++j) b[j] = *reinterpret_cast<const float4*>(right + (x + 16 * j) * stride + d);
      for (int i = 0; i < R; ++i)
        for (int j = 0; j < R; ++j)
          c[i][j] += a[i].x * b[j].x + a[i].y * b[j].y + a[i].z * b[j].z + a[i].w * b[j].w;
    }
  }
  // c[row] += the sum over i of weights[row][i] times row i of `other`, or of weights[i][row].
  template <bool kTransposed>
  __device__ void add_weighted(PlainRows<R>& c, const float* weights, const float* other) const {
    for (int i = 0; i < kTile; ++i)
#pragma unroll
      for (int j = 0; j < PlainRows<R>::kSteps; ++j) {
        const int d = 4 * x + 64 * j;
        if (d >= width) continue;
        const float4 v = *reinterpret_cast<const float4*>(other + i * stride + d);
        for (int r = 0; r < R; ++r) {
          const int row = y + 16 * r;
          const float w = kTransposed ? weights[i * (kTile + 1) + row] : weights[row * (kTile + 1) + i];
          float4& to = c.value[r][j];
          to.x += w * v.x, to.y += w * v.y, to.z += w * v.z, to.w += w * v.w;
        }
      }
  }
  template <class T>
  __device__ void store(const PlainRows<R>& c, const float (&factors)[R], Rows<T> to, int first,
                        int length) const {
    for (int r = 0; r < R; ++r) {
      const int row = first + y + 16 * r;
      if (row >= length) continue;
      for (int j = 0; j < PlainRows<R>::kSteps; ++j) {
        const float values[4] = {c.value[r][j].x, c.value[r][j].y, c.value[r][j].z, c.value[r][j].w};
        for (int v = 0; v < 4; ++v) {
          const int d = 4 * x + 64 * j + v;
          if (d < width) to.row(row)[d] = from_float<T>(values[v] * factors[r]);
        }
      }
    }
  }
  static __host__ __device__ int tile_values(int width) { return kTile * plain_stride(width); }
  static constexpr int kWeights =
      kTile * (kTile + 1);  // of a tile of them; rows are an odd number of values wide
};

// Over the 16 threads of a row.
__device__ inline float plain_sum(float x) {
  for (int other = 8; other; other /= 2) x += __shfl_xor_sync(~0u, x, other);
  return x;
}
__device__ inline float plain_maximum(float x) {
  for (int other = 8; other; other /= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, other));
  return x;
}

template <class T, int R>
__global__ void __launch_bounds__(kPlainThreads)
    plain_forward_kernel(Sizes sizes, const T* qkv, T* y, float* log_sums) {
  const Plain<R> plain(sizes.width);
  constexpr int kTile = Plain<R>::kTile;
  float* queries = reinterpret_cast<float*>(shared_memory());
  float* others = queries + plain.tile_values(sizes.width);  // keys, then values
  float* weights = others + plain.tile_values(sizes.width);

  const int tiles = sizes.tiles(kTile);
  const Work work = work_of_block(tiles, sizes.sequences * sizes.heads);
  const int sequence = work.pair / sizes.heads, head = work.pair % sizes.heads;
  const int first = (tiles - 1 - work.tile) * kTile;
  const float scale = 1 / sqrtf(static_cast<float>(sizes.width));
  plain.load(queries, sizes.queries(qkv, sequence, head), first, sizes.length);
  PlainRows<R> output;
  float maximum[R], sum[R];
  for (int r = 0; r < R; ++r) maximum[r] = kNoScore, sum[r] = 0;
  for (int tile = sizes.start(sequence, first) / kTile; tile * kTile <= first; ++tile) {
    __syncthreads();
    plain.load(others, sizes.keys(qkv, sequence, head / sizes.group()), tile * kTile, sizes.length);
    __syncthreads();
    float scores[R][R];
    plain.multiply_rows(scores, queries, others);
    for (int i = 0; i < R; ++i) {
      const int row = first + plain.y + 16 * i, start = sizes.start(sequence, row);
      float highest = maximum[i];
      for (int j = 0; j < R; ++j) {
        const int key = tile * kTile + plain.x + 16 * j;
        scores[i][j] = key > row || key < start ? -INFINITY : scores[i][j] * scale;
        highest = fmaxf(highest, scores[i][j]);
      }
      highest = plain_maximum(highest);
      const float before = expf(maximum[i] - highest);
      maximum[i] = highest;
      float total = 0;
      for (int j = 0; j < R; ++j) {
        const float weight = expf(scores[i][j] - highest);
        weights[(plain.y + 16 * i) * (kTile + 1) + plain.x + 16 * j] = weight;
        total += weight;
      }
      sum[i] = sum[i] * before + plain_sum(total);
      for (float4& v : output.value[i]) v.x *= before, v.y *= before, v.z *= before, v.w *= before;
    }
    __syncthreads();
    plain.load(others, sizes.values(qkv, sequence, head / sizes.group()), tile * kTile, sizes.length);
    __syncthreads();
    plain.template add_weighted<false>(output, weights, others);
  }
  float inverse[R];
  for (int r = 0; r < R; ++r) {
    inverse[r] = 1 / sum[r];
    const int row = first + plain.y + 16 * r;
    if (row < sizes.length && plain.x == 0)
      log_sums[static_cast<std::int64_t>(work.pair) * sizes.length + row] = maximum[r] + logf(sum[r]);
  }
  plain.store(output, inverse, sizes.outputs(y, sequence, head), first, sizes.length);
}

// A tile of weights and of their gradients but for the factor of 1 / sqrt(width), [query][key].
template <int R>
struct PlainWeights {
  float *weights, *gradients;
  __device__ void compute(const Plain<R>& plain, const Sizes& sizes, int sequence, int first_query,
                          int first_key, const float* queries, const float* keys, const float* values,
                          const float* dy, const float2* statistics) const {
    float scores[R][R], returned[R][R];
    plain.multiply_rows(scores, queries, keys);
    plain.multiply_rows(returned, dy, values);
    const float factor = kLog2E / sqrtf(static_cast<float>(sizes.width));
    for (int i = 0; i < R; ++i) {
      const int query = first_query + plain.y + 16 * i, start = sizes.start(sequence, query);
      const float2 statistic = statistics[query];
      for (int j = 0; j < R; ++j) {
        const int key = first_key + plain.x + 16 * j,
                  at = (plain.y + 16 * i) * (Plain<R>::kTile + 1) + plain.x + 16 * j;
        const bool seen = key <= query && key >= start;
        const float weight = seen ? exp2f(scores[i][j] * factor - statistic.x) : 0;
        weights[at] = weight;
        gradients[at] = weight * (returned[i][j] - statistic.y);
      }
    }
  }
};

// Four tiles of rows in shared memory, then weights and their gradients.
template <int R>
struct PlainShared {
  float *queries, *dy, *keys, *values;
  PlainWeights<R> tile;
  __device__ explicit PlainShared(int width) {
    const int each = Plain<R>::tile_values(width);
    queries = reinterpret_cast<float*>(shared_memory());
    dy = queries + each, keys = dy + each, values = keys + each;
    tile.weights = values + each, tile.gradients = tile.weights + Plain<R>::kWeights;
  }
};

template <class T, int R>
__global__ void __launch_bounds__(kPlainThreads)
    plain_query_gradient_kernel(Sizes sizes, const T* qkv, const T* dy, const float2* statistics, T* dqkv) {
  const Plain<R> plain(sizes.width);
  const PlainShared<R> shared(sizes.width);
  constexpr int kTile = Plain<R>::kTile;
  const int tiles = sizes.tiles(kTile);
  const Work work = work_of_block(tiles, sizes.sequences * sizes.heads);
  const int sequence = work.pair / sizes.heads, head = work.pair % sizes.heads;
  const int first = (tiles - 1 - work.tile) * kTile;
  plain.load(shared.queries, sizes.queries(qkv, sequence, head), first, sizes.length);
  plain.load(shared.dy, sizes.outputs(dy, sequence, head), first, sizes.length);
  PlainRows<R> gradient;
  for (int tile = sizes.start(sequence, first) / kTile; tile * kTile <= first; ++tile) {
    __syncthreads();
    plain.load(shared.keys, sizes.keys(qkv, sequence, head / sizes.group()), tile * kTile, sizes.length);
    plain.load(shared.values, sizes.values(qkv, sequence, head / sizes.group()), tile * kTile, sizes.length);
    __syncthreads();
    shared.tile.compute(plain, sizes, sequence, first, tile * kTile, shared.queries, shared.keys,
                        shared.values, shared.dy, statistics_of(statistics, sizes, sequence, head));
    __syncthreads();
    plain.template add_weighted<false>(gradient, shared.tile.gradients, shared.keys);
  }
  float scales[R];
  for (float& scale : scales) scale = 1 / sqrtf(static_cast<float>(sizes.width));
  plain.store(gradient, scales, sizes.queries(dqkv, sequence, head), first, sizes.length);
}

template <class T, int R>
__global__ void __launch_bounds__(kPlainThreads)
    plain_key_gradient_kernel(Sizes sizes, const T* qkv, const T* dy, const float2* statistics, T* dqkv) {
  const Plain<R> plain(sizes.width);
  const PlainShared<R> shared(sizes.width);
  constexpr int kTile = Plain<R>::kTile;
  const int tiles = sizes.tiles(kTile);
  const Work work = work_of_block(tiles, sizes.sequences * sizes.kv_heads);
  const int sequence = work.pair / sizes.kv_heads, kv_head = work.pair % sizes.kv_heads;
  const int first = work.tile * kTile, last = min(first + kTile, sizes.length) - 1;
  plain.load(shared.keys, sizes.keys(qkv, sequence, kv_head), first, sizes.length);
  plain.load(shared.values, sizes.values(qkv, sequence, kv_head), first, sizes.length);
  PlainRows<R> key_gradient, value_gradient;
  for (int member = 0; member < sizes.group(); ++member) {
    const int head = kv_head * sizes.group() + member;
    for (int tile = work.tile; tile < tiles && sizes.start(sequence, tile * kTile) <= last; ++tile) {
      __syncthreads();
      plain.load(shared.queries, sizes.queries(qkv, sequence, head), tile * kTile, sizes.length);
      plain.load(shared.dy, sizes.outputs(dy, sequence, head), tile * kTile, sizes.length);
      __syncthreads();
      shared.tile.compute(plain, sizes, sequence, tile * kTile, first, shared.queries, shared.keys,
                          shared.values, shared.dy, statistics_of(statistics, sizes, sequence, head));
      __syncthreads();
      plain.template add_weighted<true>(value_gradient, shared.tile.weights, shared.dy);
      plain.template add_weighted<true>(key_gradient, shared.tile.gradients, shared.queries);
    }
  }
  float scales[R], ones[R];
  for (int r = 0; r < R; ++r) scales[r] = 1 / sqrtf(static_cast<float>(sizes.width)), ones[r] = 1;
  plain.store(key_gradient, scales, sizes.keys(dqkv, sequence, kv_head), first, sizes.length);
  plain.store(value_gradient, ones, sizes.values(dqkv, sequence, kv_head), first, sizes.length);
}

// R: 2 for heads up to 128 wide, 1 up to 256; then shared memory stays below 99 KB.
template <class T, int R>
struct PlainAttention {
  static std::int64_t workspace_bytes(const Sizes&) { return 0; }
  static void forward(const Sizes& sizes, const T* qkv, T* y, float* log_sums, cudaStream_t stream) {
    launch(plain_forward_kernel<T, R>, blocks(sizes, sizes.heads), kPlainThreads, bytes(sizes, 2, 1), stream,
           "attention", sizes, qkv, y, log_sums);
  }
  static void backward(const Sizes& sizes, const T* qkv, const T* y, const float* log_sums, const T* dy,
                       T* dqkv, float2* statistics, cudaStream_t stream) {
    launch_delta<T, 16, false>(sizes, y, dy, log_sums, statistics, stream);
    launch(plain_key_gradient_kernel<T, R>, blocks(sizes, sizes.kv_heads), kPlainThreads, bytes(sizes, 4, 2),
           stream, "attention: gradients of keys and values", sizes, qkv, dy, statistics, dqkv);
    launch(plain_query_gradient_kernel<T, R>, blocks(sizes, sizes.heads), kPlainThreads, bytes(sizes, 4, 2),
           stream, "attention: gradients of queries", sizes, qkv, dy, statistics, dqkv);
  }

 private:
  static std::int64_t blocks(const Sizes& sizes, int heads) {
    return static_cast<std::int64_t>(sizes.tiles(Plain<R>::kTile)) * sizes.sequences * heads;
  }
  static int bytes(const Sizes& sizes, int tiles, int weights) {
    return static_cast<int>(sizeof(float)) *
           (tiles * Plain<R>::tile_values(sizes.width) + weights * Plain<R>::kWeights);
  }
};

}  // namespace scruple::train::cuda
