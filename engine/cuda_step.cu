// The step on CUDA: one kernel for each optimizer in each recipe. Compiled once per optimizer, with
// SCRUPLE_RULE naming it. Formats that no recipe names go to engine/cuda_any.cu.
#include <vector>

#include "engine/cuda_arrays.cuh"
#include "engine/cuda_tiles.cuh"
#include "engine/cuda_update.cuh"
#include "engine/registry.h"
#include "optim/optim.def"

namespace scruple {
inline namespace SCRUPLE_UNIT {
namespace {

// An array that this optimizer or these hyperparameters do not have.
struct Absent {
  template <bool Whole>
  static __device__ Absent load(const DeviceArray&, Slice) {
    return {};
  }
  template <bool Whole>
  static __device__ void encode(const auto&, const DeviceArray&, Slice, Coins) {}
};

template <class Rule, unsigned Active, int Slot, class Moment, class Nonneg>
constexpr auto array_of_slot() {
  if constexpr ((Active >> Slot & 1u) == 0)
    return Absent{};
  else if constexpr (Rule::slots[Slot].sign == Sign::nonneg)
    return Nonneg{};
  else
    return Moment{};
}

template <class Array>
constexpr bool has_levels = requires {
  Array::Codec::scales_levels;
};
template <class... Arrays>
__device__ void fill_array_levels() {
  if constexpr ((has_levels<Arrays> || ...)) {
    const auto fill = []<class Array>(const Array&) {
      if constexpr (has_levels<Array>) fill_levels<typename Array::Codec>();
    };
    (fill(Arrays{}), ...);
    __syncthreads();
  }
}

// One tile of one optimizer's arrays.
template <class Rule, unsigned Active, int N, class Weight, class Moment, class Nonneg>
struct StepTile {
  using S0 = decltype(array_of_slot<Rule, Active, 0, Moment, Nonneg>());
  using S1 = decltype(array_of_slot<Rule, Active, 1, Moment, Nonneg>());
  using S2 = decltype(array_of_slot<Rule, Active, 2, Moment, Nonneg>());

  // True if it left everything as it was, because one of its warp's threads met what needs care. Whole: every
  // element of the tile is there and every plane aligned.
  template <bool Whole, bool Careful, class Math>
  static __device__ bool run(const DeviceRow& row, const Constants& constants, Slice at) {
    const DeviceArray(&a)[SCRUPLE_ARRAYS] = row.arrays;
    auto weight = Weight::template load<Whole>(a[SCRUPLE_WEIGHT], at);
    auto slot0 = S0::template load<Whole>(a[SCRUPLE_SLOT], at);
    auto slot1 = S1::template load<Whole>(a[SCRUPLE_SLOT + 1], at);
    auto slot2 = S2::template load<Whole>(a[SCRUPLE_SLOT + 2], at);
    const auto coins = [&](int array) { return row.coins[array].from(at.first); };
    float g[N] = {};
    read_gradient<Whole, N>(a[SCRUPLE_GRADIENT], at, coins(SCRUPLE_GRADIENT), g);
    if constexpr (Whole)
      align_front(weight, Weight::k), align_front(slot0, 0), align_front(slot1, 0), align_front(slot2, 0);
    const auto fetch = [&](int i, auto& before) {
      before.w = Weight::template value<Careful>(weight, i);
      if constexpr (Active & 1) before.s[0] = S0::template value<Careful>(slot0, i);
      if constexpr (Active & 2) before.s[1] = S1::template value<Careful>(slot1, i);
      if constexpr (Active & 4) before.s[2] = S2::template value<Careful>(slot2, i);
    };
    Math math{row.spread};
    Elements<N> e{};
    const bool odd = update_lane<Rule, Active, N>(fetch, g, constants, Whole ? N : at.n, math, e);
    if constexpr (Careful) {
      if (odd) make_canonical<Active, N>(e);
    } else {
      if (__any_sync(0xffffffffu, odd || (math.used && !math.tame()))) return true;
    }
    // Addresses are read again: kept, they would fill registers (bench/results/2026-11-15-rounding.md).
    asm volatile("" ::: "memory");
    if (constants.keep_weight == 0)
      Weight::template encode<Whole>(e.w, a[SCRUPLE_WEIGHT], at, coins(SCRUPLE_WEIGHT));
    S0::template encode<Whole>(e.s0, a[SCRUPLE_SLOT], at, coins(SCRUPLE_SLOT));
    S1::template encode<Whole>(e.s1, a[SCRUPLE_SLOT + 1], at, coins(SCRUPLE_SLOT + 1));
    S2::template encode<Whole>(e.s2, a[SCRUPLE_SLOT + 2], at, coins(SCRUPLE_SLOT + 2));
    return false;
  }

  // The slow path, for ends of tensors, odd addresses and rare values. Inlined, it would raise the registers
  // of the fast path.
  static __device__ __noinline__ void run_carefully(const DeviceRow& row, const Constants& constants,
                                                    Slice at) {
    run<false, true, IeeeMath>(row, constants, at);
  }
};

// Blocks at a time on a multiprocessor: more hide more of the memory's latency, until registers spill.
// Measured for 2 to 5 of them in bench/results/2026-11-15-rounding.md.
constexpr int blocks_at_once(unsigned active) { return (active & (active - 1)) != 0 ? 3 : 4; }

template <class Rule, unsigned Active, int N, class Weight, class Moment, class Nonneg>
__global__ void __launch_bounds__(kBlock, blocks_at_once(Active))
    step(DeviceTable table, const Constants* constants) {
  fill_array_levels<Weight, Moment, Nonneg>();
  __shared__ Held of_warps[kBlock / 32];
  Held& held = of_warps[threadIdx.x / 32];
  const DeviceRow& row = held.row;
  const Constants& c = held.constants;
  held.open();
  const BlockTiles tiles(table);
  for (i64 tile = tiles.first; tile < tiles.end; ++tile) {
    held.seek(table, tile, constants);
    if (c.skip != 0) return;
    const i64 first = (tile - held.begin) * N * kBlock, mine = first + static_cast<i64>(threadIdx.x) * N;
    using Tile = StepTile<Rule, Active, N, Weight, Moment, Nonneg>;
    bool careful = row.aligned == 0 || first + N * kBlock > row.size;
    if (!careful) careful = Tile::template run<true, false, FastMath>(row, c, {mine, N});
    if (careful) Tile::run_carefully(row, c, slice_of<N>(mine, row.size));
  }
}

// ---- Which kernels there are ----

template <class C, int K>
constexpr bool has_words() {
  constexpr Layout layout = C::layout(K);
  return layout.code_bits == 32 || (layout.aux_bits == 32 && layout.group == 1);
}

// Whether the recipe's format for slots of this sign is needed.
template <class Rule, unsigned Active>
constexpr bool has_slot(Sign sign) {
  for (unsigned s = 0; s < sizeof(Rule::slots) / sizeof(Slot); ++s)
    if ((Active >> s & 1u) != 0 && Rule::slots[s].sign == sign) return true;
  return false;
}

template <class Rule, unsigned Active, int WeightFormat, int MomentFormat, int NonnegFormat,
          Rounding WeightRounding>
void add_kernel(std::vector<StepKernel>& list) {
  constexpr bool kSigned = has_slot<Rule, Active>(Sign::any), kNonneg = has_slot<Rule, Active>(Sign::nonneg);
  if constexpr ((!kSigned || MomentFormat != kNoFormat) && (!kNonneg || NonnegFormat != kNoFormat)) {
    using W = FormatRow<WeightFormat>;
    using M = FormatRow<kSigned ? MomentFormat : WeightFormat>;
    using N = FormatRow<kNonneg ? NonnegFormat : WeightFormat>;
    // 16 elements of 16 bits or fewer fill the registers as 8 of 32 bits do
    // (bench/results/2026-11-15-h200.md).
    constexpr int kWidth = has_words<typename W::Signed, W::k>() ||
                                   (kSigned && has_words<typename M::Signed, M::k>()) ||
                                   (kNonneg && has_words<typename N::Nonneg, N::k>())
                               ? 8
                               : 16;
    using Weight = FixedFormat<typename W::Signed, W::k, WeightRounding, kWidth>;
    using Moment =
        std::conditional_t<kSigned, FixedFormat<typename M::Signed, M::k, kNearest, kWidth>, Absent>;
    using Nonneg =
        std::conditional_t<kNonneg, FixedFormat<typename N::Nonneg, N::k, kNearest, kWidth>, Absent>;
    list.push_back({Active, WeightFormat, kSigned ? MomentFormat : kNoFormat,
                    kNonneg ? NonnegFormat : kNoFormat, WeightRounding, kWidth,
                    reinterpret_cast<const void*>(&step<Rule, Active, kWidth, Weight, Moment, Nonneg>)});
  }
}

template <class C>
constexpr bool can_round(Rounding rounding) {
  return (C::roundings >> rounding & 1u) != 0;
}

// The same weights with fp16 in place of bf16, or kNoFormat.
constexpr int fp16_twin(int format) {
  const char* const twins[][2] = {{"bf16+fp32", "fp16+fp32"}, {"bf16+16", "fp16+16"}, {"bf16+8", "fp16+8"}};
  for (const auto& twin : twins)
    if (format == format_index(twin[0])) return format_index(twin[1]);
  return kNoFormat;
}

// The kernels of a recipe:
// - the recipe as it stands;
// - with weights rounded stochastically, where they are split in two;
// - with fp16 in place of bf16;
// - where weights are bf16+8, with fp32 weights: PyTorch's parameters are often fp32.
// Other roundings need no kernel, because coins are data. All else runs on the general kernel
// (engine/cuda_any.cu), also AMSGrad and centered RMSprop, which keep moments in fp32.
template <class Rule, unsigned Active, int Weight, int Moment, int Nonneg, Rounding Usual>
void add_recipe(std::vector<StepKernel>& list) {
  add_kernel<Rule, Active, Weight, Moment, Nonneg, Usual>(list);
  if constexpr (can_round<typename FormatRow<Weight>::Signed>(kWide))
    add_kernel<Rule, Active, Weight, Moment, Nonneg, kStochastic>(list);
  if constexpr (fp16_twin(Weight) != kNoFormat)
    add_kernel<Rule, Active, fp16_twin(Weight), Moment, Nonneg, Usual>(list);
  if constexpr (Weight == format_index("bf16+8"))
    add_kernel<Rule, Active, format_index("fp32"), Moment, Nonneg, kNearest>(list);
}

template <class Rule, unsigned Active>
void add_active(std::vector<StepKernel>& list) {
  if constexpr (can_be_active<Rule>(Active) && exact_slots<Rule>(Active) == 0) {
#define SCRUPLE_RECIPE(name, weight, moment, nonneg, gradient, rounding, ...) \
  add_recipe<Rule, Active, format_index(weight), format_index(moment), format_index(nonneg), rounding>(list);
#include "formats/recipes.def"
#undef SCRUPLE_RECIPE
  }
  if constexpr (Active + 1 < 1u << kMaxSlots) add_active<Rule, Active + 1>(list);
}

}  // namespace
}  // namespace SCRUPLE_UNIT

#define SCRUPLE_NAME_OF(rule) step_kernels_##rule
#define SCRUPLE_NAME(rule) SCRUPLE_NAME_OF(rule)
std::vector<StepKernel> SCRUPLE_NAME(SCRUPLE_RULE)() {
  std::vector<StepKernel> list;
  add_active<SCRUPLE_RULE, 0>(list);
  return list;
}

}  // namespace scruple
