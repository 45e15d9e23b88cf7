// Everything on CUDA that is no optimizer step: uploading the table, preparing the constants of a step,
// norms, folds and loss scaling.
#include "engine/clip.h"
#include "engine/cuda_arrays.cuh"
#include "engine/cuda_tiles.cuh"
#include "optim/optim.def"

namespace scruple {
inline namespace SCRUPLE_UNIT {
namespace {

__global__ void upload(const Upload __grid_constant__ data) {
  const auto* from = reinterpret_cast<const uint4*>(data.data);
  auto* to = reinterpret_cast<uint4*>(data.to);
  for (i64 i = threadIdx.x; i < data.bytes / 16; i += blockDim.x) to[i] = from[i];
}

template <class Rule>
__device__ void prepare_rule(const ConstantsSource& from, i64 t, bool first, StepConstants& to) {
  auto hyper = *reinterpret_cast<const typename Rule::Hyper*>(from.hyper.bytes);
  if (from.lr != nullptr) hyper.lr = *from.lr;
  typename Rule::Step step = Rule::prepare(hyper, t);
  if constexpr (requires { Rule::continued(step); })
    if (!first) step = Rule::continued(step);
  *reinterpret_cast<typename Rule::Step*>(to.bytes) = step;
}

__global__ void prepare(const PrepareInput __grid_constant__ in) {
  const int i = static_cast<int>(threadIdx.x);
  if (i >= in.count) return;
  const ConstantsSource& from = in.sources[i];
  Constants& to = in.to[i];
  for (unsigned word = 0; word < sizeof(Constants) / sizeof(u64); ++word)  // all of it: kernels copy words
    reinterpret_cast<u64*>(&to)[word] = 0;
  const i64 t = from.t + value_or(in.steps, i64{0});
  to.t = static_cast<u32>(t);
  to.rule = from.rule;
  to.seed = from.seed;
  to.keep_weight = in.keep_weight;
  to.skip = value_or(in.found_inf, 0.0f) != 0 ? 1u : 0u;
  // In the order that the CPU takes: the sign of `maximize` comes last and is exact.
  to.multiplier =
      gradient_multiplier(from.multiplier, value_or(in.clip, 1.0f), value_or(in.loss_scale, 1.0f));
  switch (from.rule) {
#define SCRUPLE_OPTIMIZER(number, Rule) \
  case number:                          \
    return prepare_rule<Rule>(from, t, in.part == 0, to.step);
#include "optim/optim.def"
#undef SCRUPLE_OPTIMIZER
    default: return;
  }
}

// The coins of every array of every row.
__global__ void draw(DeviceRow* rows, int count, const Constants* constants) {
  constexpr int kEach = SCRUPLE_ARRAYS + 1;
  const int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (i >= count * kEach) return;
  DeviceRow& row = rows[i / kEach];
  const Constants& c = constants[row.constants];
  const int which = i % kEach, array = which == kNextFold ? +SCRUPLE_GRADIENT : which;
  const u32 write = array != SCRUPLE_GRADIENT ? 0 : which == kNextFold ? row.folds + 1 : row.folds;
  row.coins[which] = draws_coins(row.arrays[array].rounding)
                         ? draw_coins({c.seed, c.t, row.id, static_cast<u32>(array), write}).from(row.offset)
                         : Coins{};
}

// ---- Norms ----

// A warp sums a segment, in the order of the CPU's tree (engine/unit.h). Thread t has lanes 8 t to 8 t + 7 of
// every row, so rows add up in its registers. The tree then pairs its registers, and after that the threads.
template <class C, Rounding R, bool Whole>
__device__ double segment_sum(const DeviceRow& row, i64 first) {
  constexpr int N = 8, kRow = 32 * N, kRows = kSegment / kRow;
  const DeviceArray& a = row.arrays[SCRUPLE_GRADIENT];
  const auto slice = [&](int r) {
    return slice_of<N>(first + r * kRow + static_cast<i64>(threadIdx.x % 32) * N, row.size);
  };
  const auto load = [&](int r) { return Lane<C, N>::template load<Whole>(a, 0, slice(r)); };
  double sums[N] = {};
  const auto add = [&](int r, const typename Lane<C, N>::Raw& raw) {
    float x[N];
    decode_lane<C, R, Whole, N>(raw, 0, row.coins[SCRUPLE_GRADIENT].from(slice(r).first), x);
#pragma unroll
    for (int i = 0; i < N; ++i) {
      if (!Whole && i >= slice(r).n) continue;
      const double value = x[i];
      sums[i] = __builtin_fma(value, value, sums[i]);  // the square is exact: the same as two operations
    }
  };
  if constexpr (Whole && R != kDither) {  // all rows are on their way before the first is used
    typename Lane<C, N>::Raw raw[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) raw[r] = load(r);
#pragma unroll
    for (int r = 0; r < kRows; ++r) add(r, raw[r]);
  } else {
#pragma unroll 1
    for (int r = 0; r < kRows; ++r) add(r, load(r));
  }
#pragma unroll
  for (int left = N / 2; left > 0; left /= 2)
#pragma unroll
    for (int i = 0; i < left; ++i) sums[i] = sums[2 * i] + sums[2 * i + 1];
  double sum = sums[0];
#pragma unroll
  for (int other = 1; other < 32; other *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, other);
  return sum;
}

// A block sums a chunk. Its warps sum the segments in any order; these sums are added in the segments' order.
__global__ void __launch_bounds__(kBlock, 2) sum_squares(DeviceTable table, double* sums) {
  constexpr int kSegments = kChunk / kSegment;
  __shared__ double segments[kSegments];
  Cursor cursor;
  const BlockTiles chunks(table);
  for (i64 chunk = chunks.first; chunk < chunks.end; ++chunk) {
    cursor.seek(table, chunk);
    const DeviceRow& row = table.rows[cursor.row];
    with_gradient(row.arrays[SCRUPLE_GRADIENT], [&]<class C, Rounding R>() {
      for (int s = static_cast<int>(threadIdx.x / 32); s < kSegments; s += kBlock / 32) {
        const i64 first = cursor.tile * kChunk + s * kSegment;
        if (first >= row.size) break;
        const double sum = row.aligned != 0 && first + kSegment <= row.size
                               ? segment_sum<C, R, true>(row, first)
                               : segment_sum<C, R, false>(row, first);
        if (threadIdx.x % 32 == 0) segments[s] = sum;
      }
    });
    __syncthreads();
    if (threadIdx.x == 0) {
      double sum = 0;
      for (int s = 0; s < kSegments && cursor.tile * kChunk + s * kSegment < row.size; ++s)
        sum += segments[s];
      sums[chunk] = sum;
    }
    __syncthreads();
  }
}

// Adds the sums of chunks. One thread adds them, so that the order is fixed; the others fetch them.
__global__ void __launch_bounds__(kBlock) finish_norm(const NormOutput __grid_constant__ out) {
  constexpr int kBatch = 8 * kBlock;
  __shared__ alignas(16) double batch[kBatch];
  double sum = value_or(out.options.sum_before, 0.0);
  for (i64 first = 0; first < out.chunks; first += kBatch) {
    const int n = static_cast<int>(min(static_cast<i64>(kBatch), out.chunks - first));
    for (int i = static_cast<int>(threadIdx.x); i < kBatch; i += kBlock)
      batch[i] = i < n ? out.sums[first + i] : 0.0;
    __syncthreads();
    if (threadIdx.x == 0) {
      const auto* pairs = reinterpret_cast<const double2*>(batch);
#pragma unroll 16
      for (int i = 0; i < kBatch / 2; ++i)
        sum = sum + pairs[i].x + pairs[i].y;  // zeros at the end change nothing
    }
    __syncthreads();
  }
  if (threadIdx.x != 0) return;
  if (out.sum != nullptr) *out.sum = sum;
  write_measured(sum, out.options);
}

// ---- Folds: a kernel for each format of accumulators ----

template <class C, int N, bool Whole>
__device__ void fold_tile(const DeviceRow& row, float multiplier, Slice at) {
  const DeviceArray &total = row.arrays[SCRUPLE_GRADIENT], &arriving = row.arrays[0];
  const Coins before = row.coins[SCRUPLE_GRADIENT].from(at.first),
              after = row.coins[kNextFold].from(at.first);
  // Both loads are issued before either array is decoded.
  typename Lane<C, N>::Raw held{};
  if (row.folds > 0) held = Lane<C, N>::template load<Whole>(total, 0, at);
  float sum[N];
  with_gradient(arriving, [&]<class G, Rounding Read>() {
    if (Read == kDither || (std::is_same_v<G, Fp32> && N != kWideFoldLane)) return;  // never comes
    auto x = Lane<G, N>::template load<Whole>(arriving, 0, at);
    if constexpr (Whole) align_front(x, 0);
#pragma unroll
    for (int i = 0; i < N; ++i) sum[i] = -0.0f;  // added to -0, every x stays x
    if (row.folds > 0)
      with_rounding<true, C>(total,
                             [&]<class, Rounding R>() { decode_lane<C, R, Whole, N>(held, 0, before, sum); });
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const float arrived = Lane<G, N>::template value<Read>(x, 0, Coins{}, i);
      sum[i] = Whole || i < at.n ? fma(arrived, multiplier, sum[i]) : 0.0f;
      if constexpr (!requires { C::group; }) sum[i] = canonical(sum[i]);  // a group's NaN is its scale
    }
  });
  with_rounding<false, C>(
      total, [&]<class, Rounding R>() { Lane<C, N>::template encode<R, Whole>(sum, total, 0, at, after); });
}

// The slow path, for ends of tensors and odd addresses. Inlined, it would raise the registers of the fast
// path.
template <class C, int N>
__device__ __noinline__ void fold_carefully(const DeviceRow& row, float multiplier, Slice at) {
  fold_tile<C, N, false>(row, multiplier, at);
}

template <class C, int N>
__global__ void __launch_bounds__(kBlock, 4) fold(DeviceTable table, float multiplier) {
  __shared__ Held of_warps[kBlock / 32];
  Held& held = of_warps[threadIdx.x / 32];
  const DeviceRow& row = held.row;
  held.open();
  const BlockTiles tiles(table);
  for (i64 tile = tiles.first; tile < tiles.end; ++tile) {
    held.seek(table, tile, nullptr);
    const i64 first = (tile - held.begin) * N * kBlock;
    const Slice at = slice_of<N>(first + static_cast<i64>(threadIdx.x) * N, row.size);
    if (row.aligned != 0 && first + N * kBlock <= row.size)
      fold_tile<C, N, true>(row, multiplier, at);
    else
      fold_carefully<C, N>(row, multiplier, at);
  }
}

template <class C, int N>
FoldKernel fold_kernel(int format) {
  return {format, N, reinterpret_cast<const void*>(&fold<C, N>)};
}

__global__ void advance(const Advance __grid_constant__ what) { advance_by(what); }

}  // namespace
}  // namespace SCRUPLE_UNIT

int least_architecture() {
  int least = 1 << 30;
  for (const int architecture : {__CUDA_ARCH_LIST__}) least = architecture < least ? architecture : least;
  return least;
}

const GradientKernels& gradient_kernels() {
  static const GradientKernels kKernels = {
      reinterpret_cast<const void*>(&upload),      reinterpret_cast<const void*>(&prepare),
      reinterpret_cast<const void*>(&draw),        reinterpret_cast<const void*>(&sum_squares),
      reinterpret_cast<const void*>(&finish_norm), reinterpret_cast<const void*>(&advance)};
  return kKernels;
}

const std::vector<FoldKernel>& fold_kernels() {
  static const std::vector<FoldKernel> kKernels = [] {
    std::vector<FoldKernel> list;
#define SCRUPLE_FORMAT(number, name, roles, k, Signed, Nonneg)                                              \
  if constexpr (serves(roles, 'a')) {                                                                       \
    list.push_back(fold_kernel<Signed, kWideFoldLane>(number));                                             \
    if constexpr (Signed::layout(k).code_bits < 32) list.push_back(fold_kernel<Signed, kFoldLane>(number)); \
  }
#include "formats/formats.def"
#undef SCRUPLE_FORMAT
    return list;
  }();
  return kKernels;
}

}  // namespace scruple
