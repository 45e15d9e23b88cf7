// Any format with any optimizer on CUDA, both read from the table: the step for combinations that no recipe
// names, and every array to and from fp32. One kernel instead of a product. The warps of a block share out the
// arrays of a tile: each brings its array's bytes, or a part of them, into shared memory and decodes them there,
// all threads update the values together, and the warp encodes its array and takes the bytes back. So a codec is
// looked for once in a tile, and all bytes are on their way before the first is decoded.
#include <cuda_pipeline.h>

#include <utility>

#include "engine/lane.cuh"

namespace scruple {
inline namespace SCRUPLE_UNIT {
namespace {

// A warp goes through its part of an array in runs of 16 elements to a thread.
constexpr int N = 16, kRun = 32 * N, kRuns = kBlockTile / kRun, kWarps = kBlock / 32;
static_assert(kWarps >= SCRUPLE_ARRAYS && kRuns == 4);

__device__ u32 lane() { return threadIdx.x % 32; }

// ---- A tile in shared memory ----

// Planes come and go 16 bytes at a time, or 4 where only scales are aligned so, and what is left byte by byte.
// The loops have few turns; unrolled they would only be longer.
template <class Access>
__device__ int bring_by(Staged to, const u8* from, int bytes) {
  constexpr int kSize = static_cast<int>(sizeof(Access));
#pragma unroll 1
  for (int b = static_cast<int>(lane()) * kSize; b + kSize <= bytes; b += 32 * kSize)
    __pipeline_memcpy_async(&(to + b).as<Access>(), from + b, kSize);
  return bytes / kSize * kSize;
}
__device__ void bring(Staged to, const u8* from, int bytes) {
  const int done = is_aligned<uint4>(from) ? bring_by<uint4>(to, from, bytes)
                   : is_aligned<u32>(from) ? bring_by<u32>(to, from, bytes)
                                           : 0;
#pragma unroll 1
  for (int b = done + static_cast<int>(lane()); b < bytes; b += 32) to[b] = from[b];
}
template <class Access>
__device__ int take_by(u8* to, Staged from, int bytes) {
  constexpr int kSize = static_cast<int>(sizeof(Access));
#pragma unroll 1
  for (int b = static_cast<int>(lane()) * kSize; b + kSize <= bytes; b += 32 * kSize)
    keep(to + b, (from + b).as<Access>());
  return bytes / kSize * kSize;
}
__device__ void take(u8* to, Staged from, int bytes) {
  const int done = is_aligned<uint4>(to) ? take_by<uint4>(to, from, bytes)
                   : is_aligned<u32>(to) ? take_by<u32>(to, from, bytes)
                                         : 0;
#pragma unroll 1
  for (int b = done + static_cast<int>(lane()); b < bytes; b += 32) to[b] = from[b];
}

// The values of an array, in quads. Threads next to each other take quads next to each other, so that none waits
// for another's bank: of a run's 128 quads the first 32 are the first of the threads', and so on.
struct Values {
  static constexpr u32 kQuads = kBlockTile / 4, kOfThread = N / 4;
  Staged begin;

  __device__ float4& quad(u32 q) const { return (begin + 16 * q).as<float4>(); }
  static __device__ u32 first_of(u32 q) {
    return q / (32 * kOfThread) * kRun + q % 32 * N + q / 32 % kOfThread * 4;
  }

  __device__ void put(u32 run, const float (&x)[N]) const {
#pragma unroll
    for (u32 i = 0; i < kOfThread; ++i)
      quad((kOfThread * run + i) * 32 + lane()) = {x[4 * i], x[4 * i + 1], x[4 * i + 2], x[4 * i + 3]};
  }
  __device__ void get(u32 run, float (&x)[N]) const {
#pragma unroll
    for (u32 i = 0; i < kOfThread; ++i) {
      const float4 four = quad((kOfThread * run + i) * 32 + lane());
      x[4 * i] = four.x, x[4 * i + 1] = four.y, x[4 * i + 2] = four.z, x[4 * i + 3] = four.w;
    }
  }
};

// What a warp serves: some runs of one array.
struct Part {
  int array;  // -1: none
  u32 run, runs;
  Values values;
  StagedArray planes;  // of the whole tile

  __device__ int first() const { return static_cast<int>(run * kRun); }
  __device__ int size() const { return static_cast<int>(runs * kRun); }
};

// Where the values of each array are, one array behind the other, each followed by its planes; and this warp's
// part.
struct Stage {
  Values values[SCRUPLE_ARRAYS];
  Part mine;

  // One or two arrays have four warps each, three or four two, five one. Warps whose numbers differ by four
  // run on one scheduler: they serve one array, where it has several warps, and so share its code.
  __device__ void lay_out(const DeviceRow& row) {
    u32 count = 0, at = 0, rank = 0;
    for (int a = 0; a < SCRUPLE_ARRAYS; ++a) count += row.arrays[a].code_bits != 0 ? 1 : 0;
    const u32 each = count > 4 ? 1 : count > 2 ? 2 : 4, kinds = kWarps / each, warp = threadIdx.x / 32;
    Part part{-1, warp / kinds * (kRuns / each), kRuns / each, {}, {}};
    for (int a = 0; a < SCRUPLE_ARRAYS; ++a) {
      const DeviceArray& array = row.arrays[a];
      if (lane() == 0) values[a] = {{at}};
      if (array.code_bits != 0 && rank++ == warp % kinds) {
        const u32 codes = at + kStagedValues;
        part.array = a, part.values = {{at}};
        part.planes = {{codes}, {codes + static_cast<u32>(staged_codes(array))}};
      }
      at += static_cast<u32>(staged_bytes(array));
    }
    if (lane() == 0) mine = part;
    __syncwarp();
  }
};

// The elements of a run that a thread has, where the tile has n.
__device__ StagedPlace place_in(u32 run, int n) {
  const u32 first = run * kRun + lane() * N;
  return {first, min(max(n - static_cast<int>(first), 0), N)};
}

// ---- Which code serves an array ----

// Extra bits that fill bytes, or half of one, get code of their own; other widths share one that reads K from
// the table.
constexpr int kAnyWidth = -1;
constexpr int fixed_width(int k) { return k % 8 == 0 || k == 4 ? k : kAnyWidth; }

template <class A, class B>
constexpr bool is_same_code =
    std::is_same_v<typename A::Signed, typename B::Signed>&&
        std::is_same_v<typename A::Nonneg, typename B::Nonneg>&& fixed_width(A::k) == fixed_width(B::k);

// For each format the first that has the same code.
struct FirstLike {
  u8 of[kFormatCount];
};
template <int Number, int... Others>
constexpr u8 first_like(std::integer_sequence<int, Others...>) {
  int first = Number;
  ((first = Others < first && is_same_code<FormatRow<Number>, FormatRow<Others>> ? Others : first), ...);
  return static_cast<u8>(first);
}
template <int... Numbers>
constexpr FirstLike all_first(std::integer_sequence<int, Numbers...> all) {
  return {{first_like<Numbers>(all)...}};
}
constexpr FirstLike kFirst = all_first(std::make_integer_sequence<int, kFormatCount>());

// The roundings that a codec reads, or writes, in different ways. Group formats are written by their coins
// alone, and only dither is read with them; a wide weight is read as a nearest one.
template <class C, bool Reading>
constexpr unsigned distinct_roundings() {
  constexpr bool kHalves = (C::roundings >> kWide & 1u) != 0;
  if constexpr (requires { C::group; })
    return (Reading ? C::roundings & 1u << kDither : 0u) | 1u << kNearest;
  else if constexpr (Reading)
    return kHalves ? C::roundings & ~(1u << kWide) : C::roundings & 1u << kNearest;
  else
    return std::is_same_v<C, Fp32> ? 1u << kNearest : C::roundings;
}

template <bool Reading, class C, int K>
__device__ __forceinline__ void with_codec_rounding(int rounding, const auto& visit) {
  constexpr unsigned kDistinct = distinct_roundings<C, Reading>();
  const auto has = [](Rounding r) { return (kDistinct >> r & 1u) != 0; };
  if constexpr (has(kTruncate))
    if (rounding == kTruncate) return visit.template operator()<C, kTruncate, K>();
  if constexpr (has(kStochastic))
    if (rounding == kStochastic) return visit.template operator()<C, kStochastic, K>();
  if constexpr (has(kDither))
    if (rounding == kDither) return visit.template operator()<C, kDither, K>();
  if constexpr (has(kWide))
    if (rounding == kWide) return visit.template operator()<C, kWide, K>();
  if constexpr (C::roundings != 0) visit.template operator()<C, kNearest, K>();
}

template <bool Reading>
__device__ __forceinline__ void with_codec(const DeviceArray& a, const auto& visit) {
  switch (a.code) {
#define SCRUPLE_FORMAT(number, name, roles, k, Signed, Nonneg)                                   \
  case number:                                                                                   \
    if constexpr (kFirst.of[number] == number) {                                                 \
      constexpr int kWidth = fixed_width(k);                                                     \
      if (a.nonneg != 0) return with_codec_rounding<Reading, Nonneg, kWidth>(a.rounding, visit); \
      with_codec_rounding<Reading, Signed, kWidth>(a.rounding, visit);                           \
    }                                                                                            \
    return;
#include "formats/formats.def"
#undef SCRUPLE_FORMAT
    default: return;
  }
}

// ---- A part of an array ----

__device__ __forceinline__ void decode_any(const DeviceArray& a, const Part part, Coins coins, int n) {
  with_codec<true>(a, [&]<class C, Rounding R, int K>() {
    const int k = K == kAnyWidth ? a.k : K;
#pragma unroll 1
    for (u32 run = part.run; run < part.run + part.runs; ++run) {
      const StagedPlace at = place_in(run, n);
      float x[N];
      decode_lane<C, R, N>(Lane<C, N>::template load<true>(part.planes, k, at), k, coins.from(at.first), x);
      part.values.put(run, x);
    }
  });
}
__device__ __forceinline__ void encode_any(const DeviceArray& a, const Part part, Coins coins, int n) {
  with_codec<false>(a, [&]<class C, Rounding R, int K>() {
    const int k = K == kAnyWidth ? a.k : K;
#pragma unroll 1
    for (u32 run = part.run; run < part.run + part.runs; ++run) {
      const StagedPlace at = place_in(run, n);
      float x[N];
      part.values.get(run, x);
      Lane<C, N>::template encode<R, false>(x, part.planes, k, at, coins.from(at.first));
    }
  });
}

// ---- The step ----

struct StepValues {
  Values w, g, s0, s1, s2;
};

// Updates four elements of each thread. Of the tile's elements n are there; in haste all are. False, and
// nothing is written, where Math is not sure of its bits.
template <class Rule, unsigned Active, class Math>
__device__ __forceinline__ bool update_quad(const DeviceRow& row, const Constants& constants,
                                            const StepValues& values, u32 q, int n) {
  const auto read = [&](const Values& from, float(&to)[4]) {
    const float4 x = from.quad(q);
    to[0] = x.x, to[1] = x.y, to[2] = x.z, to[3] = x.w;
  };
  Elements<4> before, after{};
  float g[4];
  read(values.g, g);
  read(values.w, before.w);
  if constexpr (Active & 1) read(values.s0, before.s0);
  if constexpr (Active & 2) read(values.s1, before.s1);
  if constexpr (Active & 4) read(values.s2, before.s2);
  const auto fetch = [&](int i, auto& e) {
    e.w = before.w[i];
    if constexpr (Active & 1) e.s[0] = before.s0[i];
    if constexpr (Active & 2) e.s[1] = before.s1[i];
    if constexpr (Active & 4) e.s[2] = before.s2[i];
  };
  Math math{row.spread};
  constexpr bool kHasty = std::is_same_v<Math, FastMath>;
  const int here = kHasty ? 4 : n - static_cast<int>(Values::first_of(q));
  const bool odd = update_lane<Rule, Active, 4>(fetch, g, constants, here, math, after);
  if constexpr (kHasty) {
    if (odd || (math.used && !math.tame())) return false;
  } else {
    if (odd) make_canonical<Active, 4>(after);
  }
  const auto write = [&](const Values& to, const float(&x)[4]) { to.quad(q) = {x[0], x[1], x[2], x[3]}; };
  write(values.w, after.w);
  if constexpr (Active & 1) write(values.s0, after.s0);
  if constexpr (Active & 2) write(values.s1, after.s1);
  if constexpr (Active & 4) write(values.s2, after.s2);
  return true;
}
// For the ends of tensors and rare values.
template <class Rule, unsigned Active>
__device__ __noinline__ void update_carefully(const DeviceRow& row, const Constants& constants,
                                              const StepValues values, u32 q, int n) {
  update_quad<Rule, Active, IeeeMath>(row, constants, values, q, n);
}

template <class Rule, unsigned Active = 0>
__device__ __forceinline__ void update_rule(const DeviceRow& row, const Constants& constants,
                                            const StepValues& values, int n) {
  if constexpr (can_be_active<Rule>(Active)) {
    if (row.active == Active) {
#pragma unroll 1
      for (u32 q = threadIdx.x; q < Values::kQuads; q += kBlock)
        if (n < kBlockTile || !update_quad<Rule, Active, FastMath>(row, constants, values, q, n))
          update_carefully<Rule, Active>(row, constants, values, q, n);
      return;
    }
  }
  if constexpr (Active + 1 < 1u << kMaxSlots) update_rule<Rule, Active + 1>(row, constants, values, n);
}

__device__ __forceinline__ void update_any(const DeviceRow& row, const Constants& constants,
                                           const StepValues& values, int n) {
  switch (constants.rule) {
#define SCRUPLE_OPTIMIZER(number, Rule) \
  case number:                          \
    return update_rule<Rule>(row, constants, values, n);
#include "optim/optim.def"
#undef SCRUPLE_OPTIMIZER
    default: return;
  }
}

// ---- One array to and from fp32: values[0] is the tile's first ----

__device__ void fetch_values(const Values& to, const float* values, float otherwise, float overflow, int n) {
  for (u32 q = threadIdx.x; q < Values::kQuads; q += kBlock) {
    const u32 first = Values::first_of(q);
    const int left = n - static_cast<int>(first);
    const auto value = [&](int i) {
      if (i >= left) return 0.0f;
      return overflowed(canonical(values != nullptr ? values[first + i] : otherwise), overflow);
    };
    to.quad(q) = {value(0), value(1), value(2), value(3)};
  }
}
__device__ void keep_values(const Values& from, float* values, int n) {
  for (u32 q = threadIdx.x; q < Values::kQuads; q += kBlock) {
    const u32 first = Values::first_of(q);
    const int left = n - static_cast<int>(first);
    const float4 x = from.quad(q);
    if (left > 0) values[first] = canonical(x.x);
    if (left > 1) values[first + 1] = canonical(x.y);
    if (left > 2) values[first + 2] = canonical(x.z);
    if (left > 3) values[first + 3] = canonical(x.w);
  }
}

// ---- The kernel ----

// Three blocks to a multiprocessor: four would leave too few registers, and lost a tenth.
__global__ void __launch_bounds__(kBlock, 3)
    any(DeviceTable table, const Constants* constants, const __grid_constant__ AnyWork work) {
  __shared__ alignas(16) u8 of_warps[kWarps][sizeof(Held)];  // bytes: nothing is initialised there
  __shared__ Stage stages[kWarps];
  Held& held = *reinterpret_cast<Held*>(of_warps[threadIdx.x / 32]);
  Stage& stage = stages[threadIdx.x / 32];
  const DeviceRow& row = held.row;
  const Constants& c = held.constants;
  held.open();
  const BlockTiles tiles(table);
  for (i64 tile = tiles.first; tile < tiles.end; ++tile) {
    if (held.seek(table, tile, constants)) {
      __syncthreads();  // the row before may lie otherwise, and a warp may still write it
      stage.lay_out(row);
    }
    if (c.skip != 0) return;
    const i64 in_work = (tile - held.begin) * kBlockTile, first = work.first + in_work;
    const int n = static_cast<int>(min(static_cast<i64>(kBlockTile), row.size - first));
    const Part mine = stage.mine;
    const DeviceArray& a = row.arrays[max(mine.array, 0)];
    const int here = mine.array < 0 ? 0 : min(n - mine.first(), mine.size());  // of my elements
    const auto for_planes = [&](const auto& move) {
      const i64 begin = first + mine.first();
      move(a.codes + (begin * a.code_bits >> 3), mine.planes.codes + codes_bytes(a, mine.first()),
           codes_bytes(a, here));
      if (a.aux_bits != 0)
        move(a.aux + ((begin >> a.group_log2) * a.aux_bits >> 3),
             mine.planes.aux + aux_bytes(a, mine.first()), aux_bytes(a, here));
    };
    const auto coins = [&] { return row.coins[mine.array].from(first); };

    if (work.what != AnyWork::encode && here > 0) {
      for_planes([](const u8* from, Staged to, int bytes) { bring(to, from, bytes); });
      __pipeline_commit();
      __pipeline_wait_prior(0);
      __syncwarp();
      decode_any(a, mine, coins(), n);
    }
    __syncthreads();
    const auto& values = stage.values;
    float* const of_tile = work.values == nullptr ? nullptr : work.values + in_work;
    if (work.what == AnyWork::step)
      update_any(row, c,
                 {values[SCRUPLE_WEIGHT], values[SCRUPLE_GRADIENT], values[SCRUPLE_SLOT],
                  values[SCRUPLE_SLOT + 1], values[SCRUPLE_SLOT + 2]},
                 n);
    else if (work.what == AnyWork::encode)
      fetch_values(values[work.array], of_tile, work.otherwise, row.overflow, n);
    else
      keep_values(values[work.array], of_tile, n);
    __syncthreads();
    const bool is_kept = work.what == AnyWork::decode ||
                         (work.what == AnyWork::step && mine.array == SCRUPLE_GRADIENT) ||
                         (mine.array == SCRUPLE_WEIGHT && c.keep_weight != 0);
    if (here <= 0 || is_kept) continue;
    encode_any(a, mine, coins(), n);
    __syncwarp();
    for_planes([](u8* to, Staged from, int bytes) { take(to, from, bytes); });
    __syncwarp();  // before the next tile's bytes arrive
  }
}

}  // namespace
}  // namespace SCRUPLE_UNIT

const void* any_kernel() { return reinterpret_cast<const void*>(&any); }
int any_code(int format) { return kFirst.of[format]; }

}  // namespace scruple
