// Kernels of queries and keys head by head: RMS norm (Zhang & Sennrich, 1910.07467) and rotation by position (Su et al.,
// 2104.09864). The two values of a pair, i and i + head_width / 2, are always in one thread, so that all of it can be done
// in place.
#pragma once

#include "train/cuda/lanes.cuh"

namespace scruple::train::cuda {

inline constexpr int kHeadThreads = 256;
inline constexpr int kHeadRows = 8;  // rows that a block works on at a time

__host__ __device__ __forceinline__ Index qkv_width(const RopeShape& shape) {
  return static_cast<Index>(shape.heads + 2 * shape.kv_heads) * shape.head_width;
}
__host__ __device__ __forceinline__ bool has_norms(const RopeShape& shape) {
  return shape.query_norm.data != nullptr || shape.key_norm.data != nullptr;
}

__device__ __forceinline__ Values norm_of(const RopeShape& shape, int head) {
  const bool query = head < shape.heads;  // member by member: a choice of structs would go through memory
  return {query ? shape.query_norm.data : shape.key_norm.data,
          query ? shape.query_norm.type : shape.key_norm.type};
}

// N pairs: left with left + head_width / 2.
template <int N>
struct Pairs {
  Floats<N> left, right;
};

// Roped by the angles of their position; back where sign is -1.
template <int N>
__device__ __forceinline__ void rope_pairs(Pairs<N>& x, const float* rotation, Index position, int pairs,
                                           int pair, float sign) {
  const float* cosines = rotation + position * 2 * pairs + pair;
  const Floats<N> c = decode(load<N>(cosines)), s = decode(load<N>(cosines + pairs));
#pragma unroll
  for (int j = 0; j < N; ++j) {
    const float a = x.left[j], b = x.right[j], t = sign * s[j];
    x.left[j] = a * c[j] - b * t;
    x.right[j] = b * c[j] + a * t;
  }
}

template <int N>
__device__ __forceinline__ float squares_of(const Pairs<N>& x) {
  float sum = 0;
#pragma unroll
  for (int j = 0; j < N; ++j) sum += x.left[j] * x.left[j] + x.right[j] * x.right[j];
  return sum;
}

__device__ __forceinline__ float head_rstd(float squares, const RopeShape& shape) {
  return 1.0f / sqrtf(squares / static_cast<float>(shape.head_width) + shape.epsilon);
}

template <class T, int N>
__device__ __forceinline__ Pairs<N> decoded(const Raw<T, N>& left, const Raw<T, N>& right) {
  return {decode(left), decode(right)};
}

// The heads of kHeadRows rows at a time, `lanes` threads to each, of which some may have nothing. Every thread of a warp
// goes through the same turns.
template <class Work>
__device__ __forceinline__ void each_head(Index first_row, Index rows, int heads, int lanes, Work work) {
  const int group = threadIdx.x / lanes, groups = kHeadThreads / lanes, items = kHeadRows * heads;
  for (int begin = 0; begin < items; begin += groups) {
    const int item = begin + group, down = item / heads;
    work(first_row + down, item - down * heads, item < items && first_row + down < rows);
  }
}

// `done` heads of each row: queries, keys, and values where they are to be copied. A thread has V pairs.
template <class T, int V>
__global__ void __launch_bounds__(kHeadThreads)
    rope_vectors(RopeShape shape, const T* from, T* to, int done, int lanes) {
  const int pairs = shape.head_width / 2, pair = static_cast<int>(threadIdx.x) % lanes * V;
  const bool norms = has_norms(shape);
  const auto one = [&](Index row, int head, bool there) {
    there = there && pair < pairs;
    const Index at = row * qkv_width(shape) + static_cast<Index>(head) * shape.head_width + pair;
    const auto left = there ? load<V>(from + at) : nothing<T, V>();
    const auto right = there ? load<V>(from + at + pairs) : nothing<T, V>();
    Pairs<V> x = decoded(left, right);
    const float rstd = norms ? head_rstd(sum_of_lanes(squares_of(x), lanes), shape) : 1.0f;
    if (!there) return;
    if (head >= shape.heads + shape.kv_heads) {
      store(to + at, left), store(to + at + pairs, right);
      return;
    }
    const Values norm = norm_of(shape, head);
    if (norm.data != nullptr) {
      const Floats<V> a = read<V>(norm, pair), b = read<V>(norm, pair + pairs);
#pragma unroll
      for (int j = 0; j < V; ++j) x.left[j] *= rstd * a[j], x.right[j] *= rstd * b[j];
    }
    if (shape.rotation != nullptr) rope_pairs(x, shape.rotation, shape.positions[row], pairs, pair, 1);
    store(to + at, encode<T>(x.left)), store(to + at + pairs, encode<T>(x.right));
  };
  each_head(static_cast<Index>(blockIdx.x) * kHeadRows, shape.rows, done, lanes, one);
}

// Heads of any width, a warp to each, one value at a time. Where the width is odd the middle one has no partner (and
// nothing is roped).
template <class T>
struct OneHead {
  T* data;
  int width, half;  // half: of the left values

  __device__ __forceinline__ OneHead(T* at, int head_width)
      : data(at), width(head_width), half((head_width + 1) / 2) {}
  __device__ __forceinline__ bool paired(int i) const { return i + half < width; }
  __device__ __forceinline__ Pairs<1> read(int i) const {
    return decoded(load<1>(data + i), paired(i) ? load<1>(data + i + half) : nothing<T, 1>());
  }
  __device__ __forceinline__ void write(int i, const Pairs<1>& x) const {
    store(data + i, encode<T>(x.left));
    if (paired(i)) store(data + i + half, encode<T>(x.right));
  }
  __device__ __forceinline__ Pairs<1> weight(const Values& norm, int i) const {
    return {cuda::read<1>(norm, i), paired(i) ? cuda::read<1>(norm, i + half) : all_of<1>(0)};
  }
};

template <class T>
__global__ void __launch_bounds__(kHeadThreads) rope_singles(RopeShape shape, T* from, T* to, int done) {
  const int lane = threadIdx.x % kWarp;
  const auto one = [&](Index row, int head, bool there) {
    if (!there) return;  // the whole warp
    const Index at = row * qkv_width(shape) + static_cast<Index>(head) * shape.head_width;
    const OneHead<T> in(from + at, shape.head_width), out(to + at, shape.head_width);
    const bool value = head >= shape.heads + shape.kv_heads;
    const Values norm = value ? Values{} : norm_of(shape, head);
    float rstd = 1;
    if (norm.data != nullptr) {
      float squares = 0;
      for (int i = lane; i < in.half; i += kWarp) squares += squares_of(in.read(i));
      rstd = head_rstd(sum_of_warp(squares), shape);
    }
    for (int i = lane; i < in.half; i += kWarp) {
      Pairs<1> x = in.read(i);
      if (norm.data != nullptr) {
        const Pairs<1> weight = in.weight(norm, i);
        x.left[0] *= rstd * weight.left[0], x.right[0] *= rstd * weight.right[0];
      }
      if (shape.rotation != nullptr && !value)
        rope_pairs(x, shape.rotation, shape.positions[row], in.half, i, 1);
      out.write(i, x);
    }
  };
  each_head(static_cast<Index>(blockIdx.x) * kHeadRows, shape.rows, done, kWarp, one);
}

// ---- Backward ----

// Heads of one kind: queries or keys.
struct HeadKind {
  int first, count;  // heads
  Values norm;
  float* sums;  // the block's own
};

__device__ __forceinline__ HeadKind queries_of(const RopeShape& shape, float* sums) {
  return {0, shape.heads, shape.query_norm, sums + static_cast<Index>(blockIdx.x) * 2 * shape.head_width};
}
__device__ __forceinline__ HeadKind keys_of(const RopeShape& shape, float* sums) {
  return {shape.heads, shape.kv_heads, shape.key_norm,
          sums + (static_cast<Index>(blockIdx.x) * 2 + 1) * shape.head_width};
}

// The backward pass of RMS norm, y = x rstd weight, where g is the gradient of y. With h = x rstd and a = g
// weight:
//   dweight = the sum of g h over rows,  dx = rstd (a - h mean(a h)).
// For N values at a time: add g h to dweight, turn g into a, sum a . x, turn a into dx.
template <int N>
__device__ __forceinline__ void add_products(Floats<N>& to, const Floats<N>& g, const Floats<N>& x,
                                             float rstd) {
#pragma unroll
  for (int j = 0; j < N; ++j) to[j] += g[j] * x[j] * rstd;
}
template <int N>
__device__ __forceinline__ void multiply(Floats<N>& g, const Floats<N>& weight) {
#pragma unroll
  for (int j = 0; j < N; ++j) g[j] *= weight[j];
}
template <int N>
__device__ __forceinline__ float dot(const Pairs<N>& a, const Pairs<N>& x) {
  float sum = 0;
#pragma unroll
  for (int j = 0; j < N; ++j) sum += a.left[j] * x.left[j] + a.right[j] * x.right[j];
  return sum;
}
template <int N>
__device__ __forceinline__ void finish(Floats<N>& a, const Floats<N>& x, float rstd, float mean_ax) {
#pragma unroll
  for (int j = 0; j < N; ++j) a[j] = rstd * (a[j] - x[j] * rstd * rstd * mean_ax);
}

template <class T, int V>
__device__ __forceinline__ void rope_backward_kind(const RopeShape& shape, const HeadKind& kind, const T* qkv,
                                                   T* dqkv, int lanes, float* shared) {
  const int pairs = shape.head_width / 2, pair = static_cast<int>(threadIdx.x) % lanes * V;
  const bool normed = kind.norm.data != nullptr;
  Pairs<V> sums = {all_of<V>(0), all_of<V>(0)};
  const auto one = [&](Index row, int head, bool there) {
    there = there && pair < pairs;
    const Index at = row * qkv_width(shape) + static_cast<Index>(kind.first + head) * shape.head_width + pair;
    T* d = dqkv + at;
    const auto left = there ? load<V>(d) : nothing<T, V>();
    const auto right = there ? load<V>(d + pairs) : nothing<T, V>();
    const auto x_left = there && normed ? load<V>(qkv + at) : nothing<T, V>();
    const auto x_right = there && normed ? load<V>(qkv + at + pairs) : nothing<T, V>();
    Pairs<V> g = decoded(left, right);
    if (there && shape.rotation != nullptr)
      rope_pairs(g, shape.rotation, shape.positions[row], pairs, pair, -1);
    if (normed) {
      const Pairs<V> x = decoded(x_left, x_right);
      const float rstd = head_rstd(sum_of_lanes(squares_of(x), lanes), shape);
      add_products(sums.left, g.left, x.left, rstd), add_products(sums.right, g.right, x.right, rstd);
      if (there)
        multiply(g.left, read<V>(kind.norm, pair)), multiply(g.right, read<V>(kind.norm, pair + pairs));
      const float mean_ax = sum_of_lanes(dot(g, x), lanes) / static_cast<float>(shape.head_width);
      finish(g.left, x.left, rstd, mean_ax), finish(g.right, x.right, rstd, mean_ax);
    }
    if (there) store(d, encode<T>(g.left)), store(d + pairs, encode<T>(g.right));
  };
  for (Index row = static_cast<Index>(blockIdx.x) * kHeadRows; row < shape.rows;
       row += static_cast<Index>(gridDim.x) * kHeadRows)
    each_head(row, shape.rows, kind.count, lanes, one);
  if (!normed) return;
  const int group = threadIdx.x / lanes, groups = kHeadThreads / lanes;
  if (pair < pairs) {
#pragma unroll
    for (int j = 0; j < V; ++j) {
      shared[group * shape.head_width + pair + j] = sums.left[j];
      shared[group * shape.head_width + pairs + pair + j] = sums.right[j];
    }
  }
  __syncthreads();
  for (int i = threadIdx.x; i < shape.head_width; i += kHeadThreads) {
    float sum = 0;
    for (int k = 0; k < groups; ++k) sum += shared[k * shape.head_width + i];
    kind.sums[i] = sum;
  }
  __syncthreads();
}

template <class T, int V>
__global__ void __launch_bounds__(kHeadThreads, 3)
    rope_backward_vectors(RopeShape shape, const T* qkv, T* dqkv, int lanes, float* sums) {
  __shared__ float shared[2 * V * kHeadThreads];  // groups x head_width at most
  rope_backward_kind<T, V>(shape, queries_of(shape, sums), qkv, dqkv, lanes, shared);
  rope_backward_kind<T, V>(shape, keys_of(shape, sums), qkv, dqkv, lanes, shared);
}

// The same for heads of any width, a warp to each. Its sums of columns are in shared memory, a row of it to each warp.
template <class T>
__device__ __forceinline__ void rope_backward_singles_kind(const RopeShape& shape, const HeadKind& kind,
                                                           T* qkv, T* dqkv, float* shared) {
  const int lane = threadIdx.x % kWarp, width = shape.head_width;
  const bool normed = kind.norm.data != nullptr;
  float* own = shared + static_cast<int>(threadIdx.x / kWarp) * width;
  if (normed)
    for (int i = lane; i < width; i += kWarp) own[i] = 0;
  __syncwarp();
  const auto one = [&](Index row, int head, bool there) {
    if (!there) return;  // the whole warp
    const Index at = row * qkv_width(shape) + static_cast<Index>(kind.first + head) * width;
    const OneHead<T> d(dqkv + at, width), x(qkv + at, width);
    const auto rotated_back = [&](int i) {
      Pairs<1> g = d.read(i);
      if (shape.rotation != nullptr) rope_pairs(g, shape.rotation, shape.positions[row], d.half, i, -1);
      return g;
    };
    float rstd = 1, mean_ax = 0;
    if (normed) {
      float squares = 0, ax = 0;
      for (int i = lane; i < d.half; i += kWarp) {
        Pairs<1> g = rotated_back(i);
        const Pairs<1> v = x.read(i), weight = x.weight(kind.norm, i);
        multiply(g.left, weight.left), multiply(g.right, weight.right);
        squares += squares_of(v), ax += dot(g, v);
      }
      rstd = head_rstd(sum_of_warp(squares), shape);
      mean_ax = sum_of_warp(ax) / static_cast<float>(width);
    }
    for (int i = lane; i < d.half; i += kWarp) {
      Pairs<1> g = rotated_back(i);
      if (normed) {
        const Pairs<1> v = x.read(i), weight = x.weight(kind.norm, i);
        own[i] += g.left[0] * v.left[0] * rstd;
        if (x.paired(i)) own[i + x.half] += g.right[0] * v.right[0] * rstd;
        multiply(g.left, weight.left), multiply(g.right, weight.right);
        finish(g.left, v.left, rstd, mean_ax), finish(g.right, v.right, rstd, mean_ax);
      }
      d.write(i, g);
    }
  };
  for (Index row = static_cast<Index>(blockIdx.x) * kHeadRows; row < shape.rows;
       row += static_cast<Index>(gridDim.x) * kHeadRows)
    each_head(row, shape.rows, kind.count, kWarp, one);
  if (!normed) return;
  __syncthreads();
  for (int i = threadIdx.x; i < width; i += kHeadThreads) {
    float sum = 0;
    for (int w = 0; w < kHeadThreads / kWarp; ++w) sum += shared[w * width + i];
    kind.sums[i] = sum;
  }
  __syncthreads();
}

template <class T>
__global__ void __launch_bounds__(kHeadThreads)
    rope_backward_singles(RopeShape shape, T* qkv, T* dqkv, float* sums) {
  extern __shared__ float shared[];
  rope_backward_singles_kind(shape, queries_of(shape, sums), qkv, dqkv, shared);
  rope_backward_singles_kind(shape, keys_of(shape, sums), qkv, dqkv, shared);
}

}  // namespace scruple::train::cuda
