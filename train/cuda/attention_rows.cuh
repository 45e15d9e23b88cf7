// What attention's kernels share: where rows lie, which of them a row sees, in which order blocks work.
#pragma once

#include <cstdint>

#include "train/cuda/attention_device.cuh"

namespace scruple::train::cuda {

inline constexpr float kLog2E = 1.4426950408889634f, kLn2 = 0.6931471805599453f;
// Stands for the maximum of no scores. Finite, so that its difference to itself is 0.
inline constexpr float kNoScore = -1e30f;

__device__ inline float to_float(float x) { return x; }
__device__ inline float to_float(__half x) { return __half2float(x); }
__device__ inline float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }
template <class T>
__device__ T from_float(float x) {
  if constexpr (std::is_same_v<T, float>)
    return x;
  else if constexpr (std::is_same_v<T, __half>)
    return __float2half_rn(x);
  else
    return __float2bfloat16_rn(x);
}

// Rows of one head in one sequence.
template <class T>
struct Rows {
  T* data;
  int stride;  // in bytes: an address is then one multiplication
  __device__ T* row(int i) const {
    using Byte = std::conditional_t<std::is_const_v<T>, const char, char>;
    return reinterpret_cast<T*>(reinterpret_cast<Byte*>(data) + static_cast<std::int64_t>(i) * stride);
  }
};

// What every kernel is told.
struct Sizes {
  int sequences, length, heads, kv_heads, width;
  const std::int32_t* positions;
  int stride = (heads + 2 * kv_heads) * width, output_stride = heads * width;  // of qkv's rows, and of y's

  __host__ __device__ int group() const { return heads / kv_heads; }
  // Tiles of so many rows in a sequence.
  __host__ __device__ int tiles(int rows) const { return (length + rows - 1) / rows; }
  // The first row that row i of a sequence sees; never decreases from row to row. Beyond the length: the last
  // row's.
  __device__ int start(int sequence, int i) const {
    if (!positions) return 0;
    const int row = min(i, length - 1);
    return max(row - positions[static_cast<std::int64_t>(sequence) * length + row], 0);
  }
  // Column `slot` of qkv: queries of head h in slot h, then the keys' heads, then the values'.
  template <class T>
  __device__ Rows<T> packed(T* qkv, int sequence, int slot) const {
    return {data_of(qkv, sequence, stride) + slot * width, stride * static_cast<int>(sizeof(T))};
  }
  template <class T>
  __device__ Rows<T> queries(T* qkv, int sequence, int head) const {
    return packed(qkv, sequence, head);
  }
  template <class T>
  __device__ Rows<T> keys(T* qkv, int sequence, int kv_head) const {
    return packed(qkv, sequence, heads + kv_head);
  }
  template <class T>
  __device__ Rows<T> values(T* qkv, int sequence, int kv_head) const {
    return packed(qkv, sequence, heads + kv_heads + kv_head);
  }
  // Of y and dy.
  template <class T>
  __device__ Rows<T> outputs(T* y, int sequence, int head) const {
    return {data_of(y, sequence, output_stride) + head * width, output_stride * static_cast<int>(sizeof(T))};
  }
  // Where a sequence begins.
  template <class T>
  __device__ T* data_of(T* rows, int sequence, int of_row) const {
    return rows + static_cast<std::int64_t>(sequence) * length * of_row;
  }
};

// Which tile of which (sequence, head) a block computes.
struct Work {
  int tile, pair;
};
// Tile 0 must be the heaviest: blocks with the most work start first, so that all end at about the same time.
// Pairs are taken 64 at a time, so that their rows stay in the L2 cache from tile to tile.
__device__ inline Work work_of_block(int tiles, int pairs) {
  constexpr std::int64_t kSection = 64;
  const int first = static_cast<int>(blockIdx.x / (kSection * tiles) * kSection);
  const int within = static_cast<int>(blockIdx.x % (kSection * tiles));
  const int wide = min(static_cast<int>(kSection), pairs - first);
  return {within / wide, first + within % wide};
}

// Two numbers per row of a head, which backward reads (Dao, 2307.08691, algorithm 2): log2 of the softmax's
// sum, and delta, the sum of dy y over the head. Rows beyond the length have an infinite sum, which makes
// their weights 0.
inline constexpr int kPadding = 128;  // rows are padded to a multiple of this
__host__ __device__ inline std::int64_t padded(std::int64_t length) {
  return (length + kPadding - 1) / kPadding * kPadding;
}
__device__ inline const float2* statistics_of(const float2* statistics, const Sizes& sizes, int sequence,
                                              int head) {
  return statistics + (static_cast<std::int64_t>(sequence) * sizes.heads + head) * padded(sizes.length);
}

// kLanes threads to a row of a head, each takes 16 bytes at a time (kWhole), or a value.
template <class T, int kLanes, bool kWhole>
__global__ void __launch_bounds__(256)
    delta_kernel(Sizes sizes, const T* y, const T* dy, const float* log_sums, float2* statistics) {
  constexpr int kValues = kWhole ? 16 / sizeof(T) : 1;
  const int lane = threadIdx.x % kLanes;
  const std::int64_t item = static_cast<std::int64_t>(blockIdx.x) * (256 / kLanes) + threadIdx.x / kLanes;
  const std::int64_t rows = padded(sizes.length);
  const int head = static_cast<int>(item % sizes.heads);
  const int i = static_cast<int>(item / sizes.heads % rows);
  const int sequence = static_cast<int>(item / sizes.heads / rows);
  const bool there = sequence < sizes.sequences && i < sizes.length;
  float sum = 0;
  if (there) {
    const T* a = sizes.outputs(y, sequence, head).row(i);
    const T* b = sizes.outputs(dy, sequence, head).row(i);
    for (int d = lane * kValues; d < sizes.width; d += kLanes * kValues) {
      struct alignas(sizeof(T) * kValues) Piece {
        T value[kValues];
      };
      const Piece left = *reinterpret_cast<const Piece*>(a + d);
      const Piece right = *reinterpret_cast<const Piece*>(b + d);
#pragma unroll
      for (int v = 0; v < kValues; ++v) sum += to_float(left.value[v]) * to_float(right.value[v]);
    }
  }
#pragma unroll
  for (int other = kLanes / 2; other; other /= 2) sum += __shfl_xor_sync(~0u, sum, other);
  if (lane != 0 || sequence >= sizes.sequences) return;
  const std::int64_t of_head = static_cast<std::int64_t>(sequence) * sizes.heads + head;
  const float log_sum = there ? log_sums[of_head * sizes.length + i] * kLog2E : INFINITY;
  statistics[of_head * rows + i] = {log_sum, sum};
}

template <class T, int kLanes, bool kWhole>
void launch_delta(const Sizes& sizes, const T* y, const T* dy, const float* log_sums, float2* statistics,
                  cudaStream_t stream) {
  const std::int64_t items = sizes.sequences * padded(sizes.length) * sizes.heads;
  launch(delta_kernel<T, kLanes, kWhole>, (items * kLanes + 255) / 256, 256, 0, stream,
         "attention: sums of dy y", sizes, y, dy, log_sums, statistics);
}

}  // namespace scruple::train::cuda
