// Attention of 16-bit values on tensor cores (FlashAttention-2: Dao, 2307.08691). A warp owns rows: its
// scores are the accumulators of one product and, rounded to 16 bits, the left side of the next, so they
// never leave its registers. Backward computes the scores twice, once for the keys' gradients and once for
// the queries': 7 products instead of 5, but no block adds to what another one writes.
#pragma once

#include "train/cuda/attention_tiles.cuh"

namespace scruple::train::cuda {

// Queries that a warp owns, for what they see.
template <int M>
struct OwnQueries {
  const Sizes& sizes;
  int sequence, first;
  int last_start;  // the first key that the last of them sees

  __device__ OwnQueries(const Sizes& all, int of_sequence, int first_row)
      : sizes(all), sequence(of_sequence), first(first_row), last_start(all.start(of_sequence, last())) {}
  __device__ int last() const { return first + 16 * M - 1; }  // maybe beyond the length
  __device__ int row(int m, int v) const { return first + m * 16 + product_row(lane_of_thread(), v); }
  // The chunks of which one of them sees a key.
  __device__ Range seen(int chunk) const {
    return {sizes.start(sequence, first) / chunk, last() / chunk + 1};
  }
  __device__ bool see_all(int first_key, int keys) const {
    return first_key + keys <= first + 1 && first_key >= last_start;
  }
  template <int N>
  __device__ void hide(float (&scores)[M][N][4], int first_key) const {
#pragma unroll
    for (int m = 0; m < M; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int query = row(m, 2 * half), start = sizes.start(sequence, query);
#pragma unroll
        for (int n = 0; n < N; ++n)
#pragma unroll
          for (int v = 2 * half; v < 2 * half + 2; ++v) {
            const int key = first_key + n * 8 + product_column(lane_of_thread(), v);
            if (key > query || key < start) scores[m][n][v] = -INFINITY;
          }
      }
  }
};

// The softmax so far of a warp's own queries (2307.08691, section 3.1). Scores become weights, relative to
// the maximum so far; what was summed relative to an earlier one is scaled to it.
template <int M>
struct Softmax {
  float maximum[M][2], sum[M][2];  // the sum of a lane's own columns

  __device__ Softmax() {
#pragma unroll
    for (int m = 0; m < M; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) maximum[m][half] = kNoScore, sum[m][half] = 0;
  }
  // `factor`: scores times it are exponents of 2.
  template <int N, int W>
  __device__ void add(float (&scores)[M][N][4], float (&output)[M][W][4], float factor) {
    float scales[M][2];
#pragma unroll
    for (int m = 0; m < M; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float highest = maximum[m][half];
#pragma unroll
        for (int n = 0; n < N; ++n)
          highest = fmaxf(highest, fmaxf(scores[m][n][2 * half], scores[m][n][2 * half + 1]));
        highest = maximum_of_row(highest);
        const float scale = power_of_2((maximum[m][half] - highest) * factor);
        maximum[m][half] = highest;
        float total = sum[m][half] * scale;
#pragma unroll
        for (int n = 0; n < N; ++n)
#pragma unroll
          for (int v = 2 * half; v < 2 * half + 2; ++v) {
            scores[m][n][v] = power_of_2(scores[m][n][v] * factor - highest * factor);
            total += scores[m][n][v];
          }
        sum[m][half] = total;
        scales[m][half] = scale;
      }
    if constexpr (W > 8) {  // wide rows are scaled only where a maximum of the warp has risen
      bool rises = false;
#pragma unroll
      for (int m = 0; m < M; ++m) rises = rises || scales[m][0] != 1 || scales[m][1] != 1;
      if (!__any_sync(~0u, rises)) return;
    }
#pragma unroll
    for (int m = 0; m < M; ++m)
#pragma unroll
      for (int n = 0; n < W; ++n)
#pragma unroll
        for (int v = 0; v < 4; ++v) output[m][n][v] *= scales[m][v / 2];
  }
};

// The keys and values that a block's queries see, tile by tile. Shared memory has two tiles: one is computed
// with while the next one is copied.
template <class T, int D, int kKeys>
struct PassingKeys {
  static constexpr int kTileBytes = kKeys * Tile<D>::kStride;
  const Sizes& sizes;
  const T* qkv;
  int sequence, kv_head;
  std::uint32_t stages_at;
  Range tiles;

  __device__ PassingKeys(const Sizes& all, const T* packed, int of_sequence, int head, int first, int rows,
                         std::uint32_t at)
      : sizes(all),
        qkv(packed),
        sequence(of_sequence),
        kv_head(head / all.group()),
        stages_at(at),
        tiles{all.start(of_sequence, first) / kKeys, (min(first + rows, all.length) + kKeys - 1) / kKeys} {}
  // Where a tile's keys lie; its values follow.
  __device__ std::uint32_t at(int tile) const { return stages_at + tile % 2 * 2 * kTileBytes; }
  __device__ void load(int tile) const {
    const int here = not_known(sequence);
    load_tile<D, kKeys>(at(tile), sizes.keys(qkv, here, kv_head), tile * kKeys, sizes.length);
    load_tile<D, kKeys>(at(tile) + kTileBytes, sizes.values(qkv, here, kv_head), tile * kKeys, sizes.length);
  }
  __device__ void arrive(int tile) const {
    if (tile > tiles.begin) {  // this tile has come, and nobody reads the one before any more
      copies_wait();
      __syncthreads();
    }
    if (tile + 1 < tiles.end) load(tile + 1);
  }
};

template <int D>
constexpr int forward_bytes() {
  return (kForward<D>.own() + 4 * kForward<D>.tile) * Tile<D>::kStride;
}
template <class T, int D>
__global__ void __launch_bounds__(kThreads, 2)
    forward_kernel(Sizes sizes, const T* qkv, T* y, float* log_sums) {
  constexpr Tiling kTiling = kForward<D>;
  constexpr int M = kTiling.fragments, kKeys = kTiling.tile;
  static_assert(kTiling.chunk == kKeys);
  const std::uint32_t queries_at = shared_address();

  const int tiles = sizes.tiles(kTiling.own());
  const Work work = work_of_block(tiles, sizes.sequences * sizes.heads);
  const int sequence = work.pair / sizes.heads, head = work.pair % sizes.heads;
  const int first = (tiles - 1 - work.tile) * kTiling.own();
  const int first_of_warp = first + warp_of_thread() * 16 * M;
  const PassingKeys<T, D, kKeys> passing(sizes, qkv, sequence, head, first, kTiling.own(),
                                         queries_at + kTiling.own() * Tile<D>::kStride);
  load_tile<D, kTiling.own()>(queries_at, sizes.queries(qkv, sequence, head), first, sizes.length);
  passing.load(passing.tiles.begin);
  copies_wait();
  __syncthreads();

  const std::uint32_t own_at = queries_at + warp_of_thread() * 16 * M * Tile<D>::kStride;
  const Own<D, M, kTiling.kept> own(own_at);
  const OwnQueries<M> seeing(sizes, sequence, first_of_warp);
  const float scale = 1 / sqrtf(D), factor = scale * kLog2E;
  float output[M][D / 8][4];
  clear(output);
  Softmax<M> softmax;
  const auto arrive = [&](int tile) { passing.arrive(tile); };
  walk<1>(passing.tiles, seeing.seen(kKeys), arrive, [&](int tile) {
    float scores[M][kKeys / 8][4];
    multiply_rows<T>(scores, own, passing.at(tile));
    if (!seeing.see_all(tile * kKeys, kKeys)) seeing.hide(scores, tile * kKeys);
    softmax.add(scores, output, factor);
    add_weighted<T, D>(output, scores, passing.at(tile) + passing.kTileBytes);
  });

  float inverse[M][2];
#pragma unroll
  for (int m = 0; m < M; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float sum = sum_of_row(softmax.sum[m][half]);
      inverse[m][half] = 1 / sum;
      const int row = seeing.row(m, 2 * half);
      if (row < sizes.length && lane_of_thread() % 4 == 0)
        log_sums[static_cast<std::int64_t>(work.pair) * sizes.length + row] =
            softmax.maximum[m][half] * scale + logf(sum);
    }
  store_rows<T, D>(output, inverse, own_at, sizes.outputs(y, sequence, head), first_of_warp, sizes.length);
}

// The attention weight of a score. The kernels below compute its gradient (2307.08691, algorithm 2, line 14),
// but for the factor of 1 / sqrt(D).
__device__ inline float weight_of(float score, float factor, float log_sum) {
  return power_of_2(score * factor - log_sum);
}

template <int D>
constexpr int query_gradient_bytes() {
  return (2 * kQueryGradient<D>.own() + 4 * kQueryGradient<D>.tile) * Tile<D>::kStride;
}
template <class T, int D>
__global__ void __launch_bounds__(kThreads, 2)
    query_gradient_kernel(Sizes sizes, const T* qkv, const T* dy, const float2* statistics, T* dqkv) {
  constexpr Tiling kTiling = kQueryGradient<D>;
  constexpr int M = kTiling.fragments, kKeys = kTiling.tile, kChunk = kTiling.chunk;
  constexpr int kOwnBytes = kTiling.own() * Tile<D>::kStride;
  const std::uint32_t queries_at = shared_address();

  const int tiles = sizes.tiles(kTiling.own());
  const Work work = work_of_block(tiles, sizes.sequences * sizes.heads);
  const int sequence = work.pair / sizes.heads, head = work.pair % sizes.heads;
  const int first = (tiles - 1 - work.tile) * kTiling.own();
  const int first_of_warp = first + warp_of_thread() * 16 * M;
  const PassingKeys<T, D, kKeys> passing(sizes, qkv, sequence, head, first, kTiling.own(),
                                         queries_at + 2 * kOwnBytes);
  load_tile<D, kTiling.own()>(queries_at, sizes.queries(qkv, sequence, head), first, sizes.length);
  load_tile<D, kTiling.own()>(queries_at + kOwnBytes, sizes.outputs(dy, sequence, head), first, sizes.length);
  passing.load(passing.tiles.begin);
  copies_wait();
  __syncthreads();

  const std::uint32_t own_at = queries_at + warp_of_thread() * 16 * M * Tile<D>::kStride;
  const Own<D, M, kTiling.kept> own(own_at), own_gradients(own_at + kOwnBytes);
  const OwnQueries<M> seeing(sizes, sequence, first_of_warp);
  float2 statistic[M][2];
#pragma unroll
  for (int m = 0; m < M; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half)
      statistic[m][half] = statistics_of(statistics, sizes, sequence, head)[seeing.row(m, 2 * half)];
  const float scale = 1 / sqrtf(D), factor = scale * kLog2E;
  float gradient[M][D / 8][4];
  clear(gradient);
  const auto arrive = [&](int tile) { passing.arrive(tile); };
  constexpr int kEach = kKeys / kChunk;
  const Range chunks{passing.tiles.begin * kEach, passing.tiles.end * kEach};
  walk<kEach>(chunks, seeing.seen(kChunk), arrive, [&](int chunk) {
    const std::uint32_t keys_at = passing.at(chunk / kEach) + chunk % kEach * kChunk * Tile<D>::kStride;
    float scores[M][kChunk / 8][4], returned[M][kChunk / 8][4];
    multiply_rows<T>(scores, own, keys_at);
    if (!seeing.see_all(chunk * kChunk, kChunk)) seeing.hide(scores, chunk * kChunk);
#pragma unroll
    for (int m = 0; m < M; ++m)
#pragma unroll
      for (int n = 0; n < kChunk / 8; ++n)
#pragma unroll
        for (int v = 0; v < 4; ++v)
          scores[m][n][v] = weight_of(scores[m][n][v], factor, statistic[m][v / 2].x);
    multiply_rows<T>(returned, own_gradients, keys_at + passing.kTileBytes);
#pragma unroll
    for (int m = 0; m < M; ++m)
#pragma unroll
      for (int n = 0; n < kChunk / 8; ++n)
#pragma unroll
        for (int v = 0; v < 4; ++v) scores[m][n][v] *= returned[m][n][v] - statistic[m][v / 2].y;
    add_weighted<T, D>(gradient, scores, keys_at);
  });
  store_rows<T, D>(gradient, Factors<M>(scale).of, own_at, sizes.queries(dqkv, sequence, head), first_of_warp,
                   sizes.length);
}

// Documents: the first chunk, from `begin` on, whose query number `member` belongs to a later document than
// the key; the number of chunks where there is none. By binary search.
__device__ inline int end_of_seeing(const Sizes& sizes, int sequence, int begin, int chunk, int member,
                                    int key) {
  int end = sizes.tiles(chunk);
  if (!sizes.positions) return end;
  while (begin < end) {  // before `begin` they see it, from `end` on they do not
    const int middle = begin + (end - begin) / 2;
    if (sizes.start(sequence, middle * chunk + member) <= key)
      begin = middle + 1;
    else
      end = middle;
  }
  return end;
}

// Scores whose rows are keys and whose columns are queries.
template <int M, int N>
__device__ void hide_keys(float (&scores)[M][N][4], const Sizes& sizes, int sequence, int first_key,
                          int first_query) {
  const int lane = lane_of_thread();
#pragma unroll
  for (int n = 0; n < N; ++n)
#pragma unroll
    for (int column = 0; column < 2; ++column) {
      const int query = first_query + n * 8 + product_column(lane, column);
      const int start = sizes.start(sequence, query);
#pragma unroll
      for (int m = 0; m < M; ++m)
#pragma unroll
        for (int v = column; v < 4; v += 2) {
          const int key = first_key + m * 16 + product_row(lane, v);
          if (key > query || key < start) scores[m][n][v] = -INFINITY;
        }
    }
}

// Grouped queries: how many of the query heads that share a head of keys one block takes. All of a large
// group in one block leave the GPU unbalanced: 28 heads over 4, of 4 x 1,024 tokens, are 256 blocks, and the
// first has 16 times the work of the last. Backward with two heads to a block instead of all (ms, H200,
// 2026-11-18):
//   28 heads over 4   0.460 -> 0.404
//   12 over 2         0.412 -> 0.373
//   32 over 4         0.524 -> 0.459  (heads 64 wide)
//   32 over 8         0.417 -> 0.456  (so groups of 4 stay whole)
__host__ __device__ inline int heads_of_block(const Sizes& sizes) {
  return sizes.group() > 4 ? 2 : sizes.group();
}
// Blocks over one tile of keys. Where there are several, each writes its sums in fp32, and these are added up.
__host__ __device__ inline int key_parts(const Sizes& sizes) {
  return (sizes.group() + heads_of_block(sizes) - 1) / heads_of_block(sizes);
}
// [part, sequence, kv_head, key or value, row, D] in fp32.
__host__ __device__ inline std::int64_t key_sums(const Sizes& sizes) {
  return 2LL * sizes.sequences * sizes.kv_heads * sizes.length * sizes.width;
}

// A warp's own rows as they are.
template <int D, int M>
__device__ void store_sums(const float (&c)[M][D / 8][4], float* to, int first, int length) {
  const int lane = lane_of_thread();
#pragma unroll
  for (int m = 0; m < M; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = first + m * 16 + product_row(lane, 2 * half);
      if (row >= length) continue;
      float* const at = to + static_cast<std::int64_t>(row) * D + product_column(lane, 0);
#pragma unroll
      for (int n = 0; n < D / 8; ++n)
        *reinterpret_cast<float2*>(at + n * 8) = {c[m][n][2 * half], c[m][n][2 * half + 1]};
    }
}

// Adds the parts up, four values at a time.
template <class T>
__global__ void __launch_bounds__(256) add_key_parts(Sizes sizes, const float* sums, T* dqkv) {
  const std::int64_t all = key_sums(sizes), i = (blockIdx.x * std::int64_t{256} + threadIdx.x) * 4;
  if (i >= all) return;
  float4 sum = *reinterpret_cast<const float4*>(sums + i);
  for (int part = 1; part < key_parts(sizes); ++part) {
    const float4 more = *reinterpret_cast<const float4*>(sums + part * all + i);
    sum.x += more.x, sum.y += more.y, sum.z += more.z, sum.w += more.w;
  }
  const std::int64_t row = i / sizes.width, of_head = row / sizes.length;
  const bool is_value = of_head % 2 != 0;
  const int pair = static_cast<int>(of_head / 2), kv_head = pair % sizes.kv_heads;
  const int slot = sizes.heads + (is_value ? sizes.kv_heads : 0) + kv_head;
  const float scale = is_value ? 1 : 1 / sqrtf(sizes.width);
  T* const to = sizes.packed(dqkv, pair / sizes.kv_heads, slot).row(static_cast<int>(row % sizes.length));
  *reinterpret_cast<uint2*>(to + i % sizes.width) = {pack<T>(sum.x * scale, sum.y * scale),
                                                     pack<T>(sum.z * scale, sum.w * scale)};
}

// Scores become softmax's weights; a query's scores are a column. `pairs_at`: {log sum, delta} of a lane's two columns.
template <int M, int N>
__device__ __forceinline__ void softmax_of_columns(float (&scores)[M][N][4], float factor,
                                                   std::uint32_t pairs_at) {
#pragma unroll
  for (int n = 0; n < N; ++n) {
    const uint4 pair = load_shared(pairs_at + n * 64);
#pragma unroll
    for (int m = 0; m < M; ++m)
#pragma unroll
      for (int v = 0; v < 4; ++v)
        scores[m][n][v] = weight_of(scores[m][n][v], factor, __uint_as_float(v % 2 ? pair.z : pair.x));
  }
}

// Weights become gradients of the scores, from those of the weights.
template <int M, int N>
__device__ __forceinline__ void score_gradients_of_columns(float (&weights)[M][N][4],
                                                           const float (&gradients)[M][N][4],
                                                           std::uint32_t pairs_at) {
#pragma unroll
  for (int n = 0; n < N; ++n) {
    const uint4 pair = load_shared(pairs_at + n * 64);  // again, rather than kept in registers
#pragma unroll
    for (int m = 0; m < M; ++m)
#pragma unroll
      for (int v = 0; v < 4; ++v)
        weights[m][n][v] *= gradients[m][n][v] - __uint_as_float(v % 2 ? pair.w : pair.y);
  }
}

// The keys of a block, and the query heads that it takes of their group.
struct KeyWork {
  __device__ KeyWork(const Sizes& sizes, int own) {
    parts = key_parts(sizes);
    const Work work = work_of_block(sizes.tiles(own), sizes.sequences * sizes.kv_heads * parts);
    part = work.pair % parts, pair = work.pair / parts;
    sequence = pair / sizes.kv_heads, kv_head = pair % sizes.kv_heads;
    first = work.tile * own;
    first_head = kv_head * sizes.group() + part * heads_of_block(sizes);
    end_of_heads = min(first_head + heads_of_block(sizes), (kv_head + 1) * sizes.group());
  }
  int parts, part, pair, sequence, kv_head, first, first_head, end_of_heads;
};

// As the gradient; or, of a part of a group, as sums.
template <class T, int D, int M>
__device__ __forceinline__ void store_key_gradients(const float (&keys)[M][D / 8][4],
                                                    const float (&values)[M][D / 8][4], float scale,
                                                    const Sizes& sizes, const KeyWork& work, int first,
                                                    std::uint32_t own_at, float* sums, T* dqkv) {
  if (work.parts > 1) {
    sums += work.part * key_sums(sizes) + work.pair * 2LL * sizes.length * D;
    store_sums<D>(keys, sums, first, sizes.length);
    store_sums<D>(values, sums + static_cast<std::int64_t>(sizes.length) * D, first, sizes.length);
    return;
  }
  store_rows<T, D>(keys, Factors<M>(scale).of, own_at, sizes.keys(dqkv, work.sequence, work.kv_head), first,
                   sizes.length);
  store_rows<T, D>(values, Factors<M>(1).of, own_at, sizes.values(dqkv, work.sequence, work.kv_head), first,
                   sizes.length);
}

template <int D>
constexpr int key_gradient_bytes() {
  return (2 * kKeyGradient<D>.own() + 4 * kKeyGradient<D>.tile) * Tile<D>::kStride +
         2 * kKeyGradient<D>.tile * static_cast<int>(sizeof(float2));
}
template <class T, int D>
__global__ void __launch_bounds__(kThreads, 2)
    key_gradient_kernel(Sizes sizes, const T* qkv, const T* dy, const float2* statistics, T* dqkv,
                        float* sums) {
  constexpr Tiling kTiling = kKeyGradient<D>;
  constexpr int M = kTiling.fragments, kQueries = kTiling.tile, kChunk = kTiling.chunk;
  constexpr int kOwnBytes = kTiling.own() * Tile<D>::kStride, kTileBytes = kQueries * Tile<D>::kStride;
  constexpr int kStatisticBytes = kQueries * static_cast<int>(sizeof(float2));
  const std::uint32_t keys_at = shared_address(), stages_at = keys_at + 2 * kOwnBytes;
  const std::uint32_t statistics_at = stages_at + 4 * kTileBytes;

  const KeyWork work(sizes, kTiling.own());
  const int sequence = work.sequence, first = work.first, begin = first / kQueries;
  const int first_of_warp = first + warp_of_thread() * 16 * M, last_of_warp = first_of_warp + 16 * M - 1;
  const int last_key = min(first + kTiling.own(), sizes.length) - 1;
  const int end = end_of_seeing(sizes, sequence, begin, kQueries, 0, last_key);
  const auto load_stage = [&](int stage, int head, int tile) {
    const std::uint32_t to = stages_at + stage * 2 * kTileBytes;
    const int here = not_known(sequence);
    load_tile<D, kQueries>(to, sizes.queries(qkv, here, head), tile * kQueries, sizes.length);
    load_tile<D, kQueries>(to + kTileBytes, sizes.outputs(dy, here, head), tile * kQueries, sizes.length);
    const int piece = static_cast<int>(threadIdx.x);
    if (piece < kStatisticBytes / 16)
      copy_later(statistics_at + stage * kStatisticBytes + piece * 16,
                 statistics_of(statistics, sizes, here, head) + tile * kQueries + piece * 2, true);
  };
  load_tile<D, kTiling.own()>(keys_at, sizes.keys(qkv, sequence, work.kv_head), first, sizes.length);
  load_tile<D, kTiling.own()>(keys_at + kOwnBytes, sizes.values(qkv, sequence, work.kv_head), first,
                              sizes.length);
  load_stage(0, work.first_head, begin);
  copies_wait();
  __syncthreads();

  const std::uint32_t own_at = keys_at + warp_of_thread() * 16 * M * Tile<D>::kStride;
  const Own<D, M, kTiling.kept> own_keys(own_at), own_values(own_at + kOwnBytes);
  const float scale = 1 / sqrtf(D), factor = scale * kLog2E;
  float key_gradient[M][D / 8][4], value_gradient[M][D / 8][4];
  clear(key_gradient);
  clear(value_gradient);
  constexpr int kEach = kQueries / kChunk;
  // Chunks of queries that see one of the warp's keys, and the end of those whose documents hide none.
  const Range own{first_of_warp / kChunk,
                  end_of_seeing(sizes, sequence, first_of_warp / kChunk, kChunk, 0, last_of_warp)};
  const int end_of_all = end_of_seeing(sizes, sequence, own.begin, kChunk, kChunk - 1, first_of_warp);
  int stage = 1;  // of the tile that the block is at; the first one comes into stage 0
#pragma unroll 1
  for (int head = work.first_head; head < work.end_of_heads; ++head) {
    const auto arrive = [&](int tile) {
      if (head > work.first_head || tile > begin) {
        copies_wait();  // this tile has come, and nobody reads the one before any more
        __syncthreads();
      }
      const bool more = tile + 1 < end;  // of this head
      const int next_head = more ? head : head + 1;
      if (next_head < work.end_of_heads) load_stage(stage, next_head, more ? tile + 1 : begin);
      stage ^= 1;
    };
    walk<kEach>({begin * kEach, end * kEach}, own, arrive, [&](int chunk) {
      const int in_tile = chunk % kEach * kChunk;
      const std::uint32_t queries_at = stages_at + stage * 2 * kTileBytes + in_tile * Tile<D>::kStride;
      const std::uint32_t gradients_at = queries_at + kTileBytes;
      float weights[M][kChunk / 8][4], returned[M][kChunk / 8][4];
      multiply_rows<T>(weights, own_keys, queries_at);
      multiply_rows<T>(returned, own_values, gradients_at);  // before what waits for the first product
      if (chunk * kChunk < last_of_warp || chunk >= end_of_all)
        hide_keys(weights, sizes, sequence, first_of_warp, chunk * kChunk);
      const std::uint32_t pairs_at =
          statistics_at + stage * kStatisticBytes +
          (in_tile + product_column(lane_of_thread(), 0)) * static_cast<int>(sizeof(float2));
      softmax_of_columns(weights, factor, pairs_at);
      add_weighted<T, D>(value_gradient, weights, gradients_at);
      score_gradients_of_columns(weights, returned, pairs_at);
      add_weighted<T, D>(key_gradient, weights, queries_at);
    });
  }
  store_key_gradients<T, D>(key_gradient, value_gradient, scale, sizes, work, first_of_warp, own_at, sums,
                            dqkv);
}

template <class T, int D>
struct TensorAttention {
  // Of sums, behind the statistics.
  static std::int64_t workspace_bytes(const Sizes& sizes) {
    const int parts = key_parts(sizes);
    return parts > 1 ? parts * key_sums(sizes) * static_cast<std::int64_t>(sizeof(float)) : 0;
  }
  static void forward(const Sizes& sizes, const T* qkv, T* y, float* log_sums, cudaStream_t stream) {
    launch(forward_kernel<T, D>, blocks(sizes, kForward<D>, sizes.heads), kThreads, forward_bytes<D>(),
           stream, "attention", sizes, qkv, y, log_sums);
  }
  static void backward(const Sizes& sizes, const T* qkv, const T* y, const float* log_sums, const T* dy,
                       T* dqkv, float2* statistics, cudaStream_t stream) {
    launch_delta<T, D == 64 ? 8 : 16, true>(sizes, y, dy, log_sums, statistics, stream);
    const int parts = key_parts(sizes);
    float* const sums =
        reinterpret_cast<float*>(statistics + sizes.sequences * sizes.heads * padded(sizes.length));
    launch(key_gradient_kernel<T, D>, blocks(sizes, kKeyGradient<D>, sizes.kv_heads * parts), kThreads,
           key_gradient_bytes<D>(), stream, "attention: gradients of keys and values", sizes, qkv, dy,
           statistics, dqkv, sums);
    if (parts > 1)
      launch(add_key_parts<T>, (key_sums(sizes) / 4 + 255) / 256, 256, 0, stream,
             "attention: gradients of keys and values", sizes, sums, dqkv);
    launch(query_gradient_kernel<T, D>, blocks(sizes, kQueryGradient<D>, sizes.heads), kThreads,
           query_gradient_bytes<D>(), stream, "attention: gradients of queries", sizes, qkv, dy, statistics,
           dqkv);
  }

 private:
  static std::int64_t blocks(const Sizes& sizes, const Tiling& tiling, int heads) {
    return static_cast<std::int64_t>(sizes.tiles(tiling.own())) * sizes.sequences * heads;
  }
};

}  // namespace scruple::train::cuda
