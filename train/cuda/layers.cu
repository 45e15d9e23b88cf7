// Layers on a GPU: each function chooses its kernel by type, width and alignment. All of them are bound by memory, so each
// value is read once where it can be, 16 bytes at a time.
#include "train/cuda/functions.cuh"
#include "train/cuda/heads.cuh"
#include "train/cuda/lanes.cuh"
#include "train/cuda/layers.h"
#include "train/cuda/norms.cuh"

namespace scruple::train::cuda {
namespace {

// ---- One value after the other ----

constexpr int kThreads = 256;
constexpr int kUnroll = 4;  // accesses of a thread at once

unsigned blocks_for(Index work, Index per_block) {
  return static_cast<unsigned>(std::max<Index>(1, ceil_div(work, per_block)));
}

// job.write(i, job.read(i)) for `count` values. A thread reads all it will before it writes: the two may be one place.
template <int V, class Job>
__global__ void __launch_bounds__(kThreads) each_value(Job job, Index count) {
  const Index whole = count / V;
  const Index first = static_cast<Index>(blockIdx.x) * kThreads * kUnroll + threadIdx.x;
  typename Job::template In<V> in[kUnroll];
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
    const Index i = first + u * kThreads;
    if (i < whole) in[u] = job.template read<V>(i * V);
  }
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
    const Index i = first + u * kThreads;
    if (i < whole) job.template write<V>(i * V, in[u]);
  }
  if constexpr (V > 1) {  // what is left over
    const Index i = whole * V + threadIdx.x;
    if (blockIdx.x == 0 && i < count) job.template write<1>(i, job.template read<1>(i));
  }
}

template <int V, class Job>
void start_each_value(const Job& job, Index count, cudaStream_t stream) {
  each_value<V><<<blocks_for(count / V, kThreads * kUnroll), kThreads, 0, stream>>>(job, count);
}

// The same for rows of `width`, where reading and writing want to know row and column.
template <int V, class Job>
__global__ void __launch_bounds__(kThreads) each_of_rows(Job job, Index rows, Index width) {
  const Index row = static_cast<Index>(blockIdx.x) * blockDim.y + threadIdx.y;
  if (row >= rows) return;
  const Index step = static_cast<Index>(blockDim.x) * V;
  for (Index column = static_cast<Index>(threadIdx.x) * V; column < width; column += 2 * step) {
    const bool two = column + step < width;
    typename Job::template In<V> a, b;
    a = job.template read<V>(row, column);
    if (two) b = job.template read<V>(row, column + step);
    job.template write<V>(row, column, a);
    if (two) job.template write<V>(row, column + step, b);
  }
}

// Threads across a row: as many as leave few idle in the last turn.
unsigned threads_across(Index vectors) {
  unsigned across = kThreads;
  while (across > kWarp && ceil_div(vectors, across) * across > vectors + vectors / 8) across /= 2;
  while (across > 1 && across / 2 >= vectors) across /= 2;
  return across;
}

template <int V, class Job>
void start_each_of_rows(const Job& job, Index rows, Index width, cudaStream_t stream) {
  const unsigned across = threads_across(ceil_div(width, V));
  const dim3 block(across, kThreads / across);
  each_of_rows<V><<<blocks_for(rows, block.y), block, 0, stream>>>(job, rows, width);
}

struct Convert {
  Values from, to;
  template <int N>
  using In = Floats<N>;
  template <int N>
  __device__ __forceinline__ In<N> read(Index i) const {
    return cuda::read<N>(from, i);
  }
  template <int N>
  __device__ __forceinline__ void write(Index i, const In<N>& x) const {
    cuda::write<N>(to, i, x);
  }
};

template <class T>
struct Embed {
  const std::int32_t *tokens, *positions;
  Index width;
  Values token_table, position_table;
  T* x;
  template <int N>
  using In = Floats<N>;
  template <int N>
  __device__ __forceinline__ In<N> read(Index row, Index column) const {
    Floats<N> sum = cuda::read<N>(token_table, tokens[row] * width + column);
    if (position_table.data == nullptr) return sum;
    const Floats<N> position = cuda::read<N>(position_table, positions[row] * width + column);
#pragma unroll
    for (int j = 0; j < N; ++j) sum[j] += position[j];
    return sum;
  }
  template <int N>
  __device__ __forceinline__ void write(Index row, Index column, const In<N>& sum) const {
    store(x + row * width + column, encode<T>(sum));
  }
};

template <class T>
struct Gelu {
  const T* x;
  T* y;
  template <int N>
  using In = Raw<T, N>;
  template <int N>
  __device__ __forceinline__ In<N> read(Index i) const {
    return load<N>(x + i);
  }
  template <int N>
  __device__ __forceinline__ void write(Index i, const In<N>& in) const {
    Floats<N> v = decode(in);
#pragma unroll
    for (int j = 0; j < N; ++j) v[j] = gelu_of<T>(v[j]);
    store(y + i, encode<T>(v));
  }
};

template <class T>
struct GeluBack {
  const T *dy, *x;
  T* dx;
  template <int N>
  struct In {
    Raw<T, N> dy, x;
  };
  template <int N>
  __device__ __forceinline__ In<N> read(Index i) const {
    return {load<N>(dy + i), load<N>(x + i)};
  }
  template <int N>
  __device__ __forceinline__ void write(Index i, const In<N>& in) const {
    Floats<N> d = decode(in.dy);
    const Floats<N> v = decode(in.x);
#pragma unroll
    for (int j = 0; j < N; ++j) d[j] *= gelu_slope_of<T>(v[j]);
    store(dx + i, encode<T>(d));
  }
};

template <class T>
struct Gate {
  const T* x;
  Index inner;
  T* y;
  template <int N>
  struct In {
    Raw<T, N> gate, value;
  };
  template <int N>
  __device__ __forceinline__ In<N> read(Index row, Index column) const {
    const T* at = x + row * 2 * inner + column;
    return {load<N>(at), load<N>(at + inner)};
  }
  template <int N>
  __device__ __forceinline__ void write(Index row, Index column, const In<N>& in) const {
    const Floats<N> gate = decode(in.gate);
    Floats<N> v = decode(in.value);
#pragma unroll
    for (int j = 0; j < N; ++j) v[j] = gated_of<T>(gate[j], v[j]);
    store(y + row * inner + column, encode<T>(v));
  }
};

template <class T>
struct GateBack {
  const T *dy, *x;
  Index inner;
  T* dx;
  template <int N>
  struct In {
    Raw<T, N> dy, gate, value;
  };
  template <int N>
  __device__ __forceinline__ In<N> read(Index row, Index column) const {
    const T* at = x + row * 2 * inner + column;
    return {load<N>(dy + row * inner + column), load<N>(at), load<N>(at + inner)};
  }
  template <int N>
  __device__ __forceinline__ void write(Index row, Index column, const In<N>& in) const {
    const Floats<N> d = decode(in.dy);
    Floats<N> gate = decode(in.gate), value = decode(in.value);
#pragma unroll
    for (int j = 0; j < N; ++j) {
      const Gated back = gated_back<T>(d[j], gate[j], value[j]);
      gate[j] = back.gate, value[j] = back.value;
    }
    T* at = dx + row * 2 * inner + column;
    store(at, encode<T>(gate)), store(at + inner, encode<T>(value));
  }
};

// splitmix64 (Steele, Lea, Flood, OOPSLA 2014) of each word and its place; a sum is the same in any order.
__global__ void digest_words(const std::uint16_t* values, std::int64_t count, std::int64_t words,
                             std::int64_t stride, unsigned long long* digest) {
  unsigned long long hash = 0, nonzero = 0;
  for (std::int64_t i = blockIdx.x * std::int64_t{blockDim.x} + threadIdx.x; i < count;
       i += std::int64_t{gridDim.x} * blockDim.x) {
    const std::uint16_t word = values[i / words * stride + i % words];
    unsigned long long x = (static_cast<unsigned long long>(i) << 16 | word) + 0x9e3779b97f4a7c15;
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9;
    x = (x ^ x >> 27) * 0x94d049bb133111eb;
    hash += x ^ x >> 31;
    nonzero += word != 0;
  }
  for (int lanes = 16; lanes > 0; lanes /= 2) {
    hash += __shfl_down_sync(~0u, hash, lanes);
    nonzero += __shfl_down_sync(~0u, nonzero, lanes);
  }
  if (threadIdx.x % 32 != 0) return;
  atomicAdd(&digest[0], hash);
  atomicAdd(&digest[1], nonzero);
}

__global__ void multiply_one(const float* a, const float* b, float* out) { *out = *a * *b; }

}  // namespace

void convert(Values from, Values to, std::int64_t count, cudaStream_t stream) {
  if (count == 0) return;
  const Convert job{from, to};
  if (fits(from, 8) && fits(to, 8))
    start_each_value<8>(job, count, stream);
  else
    start_each_value<1>(job, count, stream);
  launched("converting values");
}

void add_digest(const void* values, std::int64_t rows, std::int64_t words, std::int64_t stride,
                unsigned long long* digest, cudaStream_t stream) {
  if (rows * words == 0) return;
  digest_words<<<1024, 256, 0, stream>>>(static_cast<const std::uint16_t*>(values), rows * words, words,
                                         stride, digest);
  launched("a digest");
}

void multiply(const float* a, const float* b, float* out, cudaStream_t stream) {
  multiply_one<<<1, 1, 0, stream>>>(a, b, out);
  launched("multiplying");
}

void embed(Precision precision, const std::int32_t* tokens, const std::int32_t* positions, std::int64_t rows,
           std::int64_t width, Values token_table, Values position_table, void* x, cudaStream_t stream) {
  if (rows == 0 || width == 0) return;
  const bool vectors = in_vectors(precision, width, {x}, {token_table, position_table});
  with_lanes(precision, vectors, [&]<class T, int V>(Lanes<T, V>) {
    const Embed<T> job{tokens, positions, width, token_table, position_table, static_cast<T*>(x)};
    start_each_of_rows<V>(job, rows, width, stream);
  });
  launched("reading embeddings");
}

void activate(Precision precision, Mlp mlp, const void* expanded, std::int64_t rows, std::int64_t inner,
              void* activated, cudaStream_t stream) {
  if (rows == 0 || inner == 0) return;
  const bool gated = mlp == Mlp::swiglu;
  const bool vectors = in_vectors(precision, gated ? inner : 0, {expanded, activated});
  with_lanes(precision, vectors, [&]<class T, int V>(Lanes<T, V>) {
    const T* x = static_cast<const T*>(expanded);
    T* y = static_cast<T*>(activated);
    if (gated)
      start_each_of_rows<V>(Gate<T>{x, inner, y}, rows, inner, stream);
    else
      start_each_value<V>(Gelu<T>{x, y}, rows * inner, stream);
  });
  launched("activating");
}

void activate_backward(Precision precision, Mlp mlp, const void* dactivated, const void* expanded,
                       std::int64_t rows, std::int64_t inner, void* dexpanded, cudaStream_t stream) {
  if (rows == 0 || inner == 0) return;
  const bool gated = mlp == Mlp::swiglu;
  const bool vectors = in_vectors(precision, gated ? inner : 0, {dactivated, expanded, dexpanded});
  with_lanes(precision, vectors, [&]<class T, int V>(Lanes<T, V>) {
    const T *dy = static_cast<const T*>(dactivated), *x = static_cast<const T*>(expanded);
    T* dx = static_cast<T*>(dexpanded);
    if (gated)
      start_each_of_rows<V>(GateBack<T>{dy, x, inner, dx}, rows, inner, stream);
    else
      start_each_value<V>(GeluBack<T>{dy, x, dx}, rows * inner, stream);
  });
  launched("the gradient of activations");
}

// ---- The gradient of tables ----

namespace {

constexpr int kOccurrenceWarps = 16, kReaderBatch = 8;
constexpr int kFewOccurrences = 32;  // that one warp sums by itself
constexpr int kMostTargets = kWarp;  // to a block: a lane looks up each

// The sum of V columns over the occurrences [begin, end): this warp takes every warps-th batch of them. The rows of the next
// batch are looked up while this one's values are on their way.
template <class T, int V>
__device__ __forceinline__ Floats<V> sum_of_occurrences(const T* g, Index width, const std::int32_t* order,
                                                        int begin, int end, int warp, int warps, bool there) {
  Floats<V> sum = all_of<V>(0);
  int rows[kReaderBatch];
  const auto look_up = [&](int at) {
#pragma unroll
    for (int u = 0; u < kReaderBatch; ++u) rows[u] = at + u < end ? order[at + u] : -1;
  };
  int at = begin + warp * kReaderBatch;
  look_up(at);
  for (; at < end; at += warps * kReaderBatch) {
    Raw<T, V> values[kReaderBatch];
#pragma unroll
    for (int u = 0; u < kReaderBatch; ++u)
      values[u] = there && rows[u] >= 0 ? load<V>(g + rows[u] * width) : nothing<T, V>();
    look_up(at + warps * kReaderBatch);
#pragma unroll
    for (int u = 0; u < kReaderBatch; ++u) {
      const Floats<V> v = decode(values[u]);
#pragma unroll
      for (int j = 0; j < V; ++j) sum[j] += v[j];
    }
  }
  return sum;
}

struct TableGradient {
  Index width;
  Occurrences occurrences;
  Index first;
  Values table;
  int slabs;     // of one warp's vectors to a row
  Index blocks;  // to a slab
};

// Adds the gradients of a token table. A block takes every `blocks`-th target, because frequent tokens often
// have neighbouring numbers and would otherwise fall to one block. Targets with many occurrences first, all
// warps together; then one warp for each of the others.
template <class T, int V>
__global__ void __launch_bounds__(kOccurrenceWarps* kWarp, 2) add_occurrences(TableGradient job, const T* g) {
  constexpr int kColumns = kWarp * V;
  __shared__ float parts[kOccurrenceWarps][kColumns];
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const Index block = blockIdx.x / job.slabs, slab = blockIdx.x % job.slabs * kColumns;
  const Index column = slab + static_cast<Index>(lane) * V;
  const bool there = column < job.width;
  const Index mine = block + lane * job.blocks;  // of the targets
  const bool exists = mine < job.occurrences.count;
  const int target = exists ? job.occurrences.target[mine] : 0;
  const int begin = exists ? job.occurrences.begin[mine] : 0,
            end = exists ? job.occurrences.begin[mine + 1] : 0;

  unsigned many = __ballot_sync(kWholeWarp, end - begin > kFewOccurrences);  // the same in every warp
  for (; many != 0; many &= many - 1) {
    const int i = __ffs(static_cast<int>(many)) - 1;
    const int from = __shfl_sync(kWholeWarp, begin, i), to = __shfl_sync(kWholeWarp, end, i);
    const Index row = __shfl_sync(kWholeWarp, target, i) - job.first;
    const Floats<V> sum = sum_of_occurrences<T, V>(g + column, job.width, job.occurrences.order, from, to,
                                                   warp, kOccurrenceWarps, there);
#pragma unroll
    for (int j = 0; j < V; ++j) parts[warp][j * kWarp + lane] = sum[j];  // no two lanes in one bank
    __syncthreads();
    for (int c = threadIdx.x; c < kColumns; c += kOccurrenceWarps * kWarp) {
      const Index at = row * job.width + slab + c;
      if (slab + c >= job.width) break;
      Floats<1> total = read<1>(job.table, at);
      float added = 0;
      for (int w = 0; w < kOccurrenceWarps; ++w) added += parts[w][c % V * kWarp + c / V];
      total[0] += added;
      write<1>(job.table, at, total);
    }
    __syncthreads();
  }
  for (int i = warp; i < kMostTargets; i += kOccurrenceWarps) {
    const int from = __shfl_sync(kWholeWarp, begin, i), to = __shfl_sync(kWholeWarp, end, i);
    const Index row = __shfl_sync(kWholeWarp, target, i) - job.first;
    if (from == to || to - from > kFewOccurrences) continue;
    const Floats<V> sum =
        sum_of_occurrences<T, V>(g + column, job.width, job.occurrences.order, from, to, 0, 1, there);
    if (!there) continue;
    const Index at = row * job.width + column;
    Floats<V> total = read<V>(job.table, at);
#pragma unroll
    for (int j = 0; j < V; ++j) total[j] += sum[j];
    write<V>(job.table, at, total);
  }
}

}  // namespace

void embedding_gradient(Precision precision, const void* g, std::int64_t width, Occurrences occurrences,
                        std::int64_t first, Values table, cudaStream_t stream) {
  if (occurrences.count == 0 || width == 0) return;
  const Index targets = std::clamp<Index>(occurrences.count / 512, 1, kMostTargets);  // to a block
  const bool vectors = in_vectors(precision, width, {g}, {table});
  with_lanes(precision, vectors, [&]<class T, int V>(Lanes<T, V>) {
    const Index slabs = ceil_div(width, kWarp * V), blocks = ceil_div(occurrences.count, targets);
    const TableGradient job{width, occurrences, first, table, static_cast<int>(slabs), blocks};
    add_occurrences<T, V><<<static_cast<unsigned>(slabs * blocks), kOccurrenceWarps * kWarp, 0, stream>>>(
        job, static_cast<const T*>(g));
  });
  launched("the gradient of a table");
}

// ---- Norms ----

void norm_forward(Precision precision, const Norm& norm, const void* x, std::int64_t rows, std::int64_t width,
                  void* y, float* mean, float* rstd, cudaStream_t stream) {
  if (rows == 0 || width == 0) return;
  const NormForward job{norm, x, rows, width, y, mean, rstd};
  const auto all = static_cast<unsigned>(rows);
  const bool vectors = in_vectors(precision, width, {x, y}, {norm.weight, norm.bias});
  with_lanes(precision, vectors, [&]<class T, int V>(Lanes<T, V>) {
    if (width <= kRowFloats * kWarp)
      normalise_rows<T, V, kWarp><<<blocks_for(rows, kRowWarps), kRowWarps * kWarp, 0, stream>>>(job);
    else if (width <= kRowFloats * 128)
      normalise_rows<T, V, 128><<<all, 128, 0, stream>>>(job);
    else if (V > 1 && width <= kRowFloats * 512)  // single values would take too many registers
      normalise_rows<T, V == 1 ? kVector<T> : V, 512><<<all, 512, 0, stream>>>(job);
    else
      normalise_wide<T, V><<<all, kWideThreads, 0, stream>>>(job);
  });
  launched("normalising");
}

namespace {

// Blocks that sum rows, and so parts of sums: two to each of an H100's 132 multiprocessors. Of any GPU, lest another one
// add in another order.
constexpr Index kParts = 2 * 132;

template <class T, int V, bool kNormed>
void start_column_parts(const ColumnParts& job, cudaStream_t stream) {
  const Index tiles = ceil_div(job.width, kWarp * V);
  column_parts<T, V, kNormed>
      <<<static_cast<unsigned>(tiles * job.parts), kColumnWarps * kWarp, 0, stream>>>(job);
}

// A row of at most kFew x V values to each lane goes to a warp.
template <class T, int V, int kFew>
bool normalise_back_by_warps(const NormBackward& job, unsigned parts, cudaStream_t stream) {
  if (job.width > kFew * V * kWarp) return false;
  normalise_back<T, V, kWarp, kFew><<<parts, kBackWarps<V * kFew> * kWarp, 0, stream>>>(job);
  return true;
}
template <class T, int V, int kEach>
bool normalise_back_by_blocks(const NormBackward& job, unsigned parts, cudaStream_t stream) {
  if (job.width > kEach * V * 512) return false;
  if (job.width <= kEach * V * 256)
    normalise_back<T, V, 256, kEach><<<parts, 256, 0, stream>>>(job);
  else
    normalise_back<T, V, 512, kEach><<<parts, 512, 0, stream>>>(job);
  return true;
}
template <class T, int V>
void start_normalise_back(const NormBackward& job, Index parts, cudaStream_t stream) {
  const auto blocks = static_cast<unsigned>(parts);
  constexpr int kFew = V == 1 ? 8 : 2;
  if (normalise_back_by_warps<T, V, kFew>(job, blocks, stream)) return;
  if constexpr (V == 8)
    if (normalise_back_by_warps<T, V, 3>(job, blocks, stream)) return;  // 768 is common
  if constexpr (V > 1)
    if (normalise_back_by_warps<T, V, 4>(job, blocks, stream)) return;
  if (normalise_back_by_blocks<T, V, kBackParts<V>>(job, blocks, stream)) return;
  // The sums first: g may be dy.
  start_column_parts<T, V, true>(
      {job.dy, job.x, job.mean, job.rstd, job.rows, job.width, job.width, parts, job.sums}, stream);
  normalise_back_wide<T, V><<<static_cast<unsigned>(job.rows), kWideThreads, 0, stream>>>(job);
}

}  // namespace

std::int64_t norm_parts(std::int64_t rows) { return std::min(rows, kParts); }

void norm_backward(Precision precision, const Norm& norm, const void* dy, const void* x, const float* mean,
                   const float* rstd, std::int64_t rows, std::int64_t width, bool adds, void* g, float* sums,
                   cudaStream_t stream) {
  if (rows == 0 || width == 0) return;
  const NormBackward job{norm, dy, x, mean, rstd, rows, width, adds, g, sums};
  with_lanes(precision, in_vectors(precision, width, {dy, x, g}, {norm.weight}),
             [&]<class T, int V>(Lanes<T, V>) { start_normalise_back<T, V>(job, norm_parts(rows), stream); });
  launched("the gradient of a norm");
}

void sum_parts(const float* sums, std::int64_t parts, std::int64_t stride, std::int64_t width, Values out,
               cudaStream_t stream) {
  if (width == 0) return;
  add_parts<<<blocks_for(width, kWarp), kSumWarps * kWarp, 0, stream>>>(sums, parts, stride, width, out);
  launched("adding parts of a sum");
}

std::int64_t bias_parts(std::int64_t rows) { return std::min(ceil_div(rows, 4 * kColumnWarps), kParts); }

void bias_gradient(Precision precision, const void* dy, std::int64_t rows, std::int64_t stride,
                   std::int64_t width, float* sums, Values out, cudaStream_t stream) {
  if (width == 0) return;
  const Index parts = bias_parts(rows);
  const Index n = 16 / bytes_of(precision);
  const bool vectors = in_vectors(precision, width, {dy}) && stride % n == 0;
  if (rows > 0)
    with_lanes(precision, vectors, [&]<class T, int V>(Lanes<T, V>) {
      start_column_parts<T, V, false>({dy, nullptr, nullptr, nullptr, rows, stride, width, parts, sums},
                                      stream);
    });
  launched("the gradient of a bias");
  sum_parts(sums, parts, width, width, out, stream);
}

// ---- Heads ----

namespace {

// Threads to a head, each with a vector of left and one of right values; 0: they do not fit.
int lanes_of(Precision precision, const RopeShape& shape, const void* qkv, const void* to) {
  const Index n = 16 / bytes_of(precision), pairs = shape.head_width / 2;
  if (shape.head_width % 2 != 0 || pairs > n * kWarp) return 0;
  const Values rotation{const_cast<float*>(shape.rotation), Precision::fp32};
  if (!in_vectors(precision, pairs, {qkv, to}, {shape.query_norm, shape.key_norm, rotation})) return 0;
  int lanes = 1;
  while (lanes * n < pairs) lanes *= 2;
  return lanes;
}

}  // namespace

void rope(Precision precision, const RopeShape& shape, const void* qkv, void* to, cudaStream_t stream) {
  if (shape.rows == 0) return;
  const bool copies = to != qkv;
  if (!has_norms(shape) && shape.rotation == nullptr) {
    const auto bytes = static_cast<std::size_t>(shape.rows * qkv_width(shape) * bytes_of(precision));
    if (copies) check(cudaMemcpyAsync(to, qkv, bytes, cudaMemcpyDeviceToDevice, stream), "copying heads");
    return;
  }
  const int done = shape.heads + (copies ? 2 : 1) * shape.kv_heads;
  const int lanes = lanes_of(precision, shape, qkv, to);
  const unsigned blocks = blocks_for(shape.rows, kHeadRows);
  with_lanes(precision, lanes > 0, [&]<class T, int V>(Lanes<T, V>) {
    T* from = static_cast<T*>(const_cast<void*>(qkv));
    if constexpr (V > 1)
      rope_vectors<T, V><<<blocks, kHeadThreads, 0, stream>>>(shape, from, static_cast<T*>(to), done, lanes);
    else
      rope_singles<T><<<blocks, kHeadThreads, 0, stream>>>(shape, from, static_cast<T*>(to), done);
  });
  launched("rope");
}

std::int64_t rope_parts(const RopeShape& shape) {
  return std::min(ceil_div(shape.rows, kHeadRows), 2 * kParts);
}

void rope_backward(Precision precision, const RopeShape& shape, const void* qkv, void* dqkv, float* sums,
                   cudaStream_t stream) {
  if (shape.rows == 0 || (!has_norms(shape) && shape.rotation == nullptr)) return;
  const void* x = has_norms(shape) ? qkv : nullptr;  // nobody reads it otherwise
  const int lanes = lanes_of(precision, shape, x, dqkv);
  const auto parts = static_cast<unsigned>(rope_parts(shape));
  with_lanes(precision, lanes > 0, [&]<class T, int V>(Lanes<T, V>) {
    T *from = static_cast<T*>(const_cast<void*>(x)), *d = static_cast<T*>(dqkv);
    if constexpr (V > 1) {
      rope_backward_vectors<T, V><<<parts, kHeadThreads, 0, stream>>>(shape, from, d, lanes, sums);
    } else {
      const auto shared = has_norms(shape) ? sizeof(float) * kHeadThreads / kWarp * shape.head_width : 0;
      rope_backward_singles<T><<<parts, kHeadThreads, shared, stream>>>(shape, from, d, sums);
    }
  });
  launched("the gradient of queries and keys");
}

}  // namespace scruple::train::cuda
