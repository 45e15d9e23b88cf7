// The step on CUDA: one kernel for each optimizer in each recipe. Compiled once per optimizer, with
// SCRUPLE_RULE naming it. Formats that no recipe names go to engine/cuda_any.cu.
#include <vector>

#include "engine/lane.cuh"
#include "engine/registry.h"
#include "optim/all.h"

namespace scruple {
inline namespace SCRUPLE_UNIT {
namespace {

// An array that this optimizer or these hyperparameters do not have.
struct Absent {};

template <class Rule, unsigned Active, int Slot, class Moment, class Nonneg>
constexpr auto array_of_slot() {
  if constexpr ((Active >> Slot & 1u) == 0)
    return Absent{};
  else if constexpr (Rule::slots[Slot].sign == Sign::nonneg)
    return Nonneg{};
  else
    return Moment{};
}

template <class Array, bool Whole>
__device__ auto load_array(const DeviceArray& a, Place at) {
  if constexpr (std::is_same_v<Array, Absent>)
    return Absent{};
  else
    return Array::template load<Whole>(a, at);
}
template <class Array, bool Whole>
__device__ void encode_array(const auto& in, const DeviceArray& a, Place at, const Draws& draws) {
  if constexpr (!std::is_same_v<Array, Absent>) Array::template encode<Whole>(in, a, at, draws);
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

// Whole: every element of the tile is there and every plane aligned.
template <class Rule, unsigned Active, int N, class Weight, class Moment, class Nonneg, bool Whole>
__device__ void step_tile(const DeviceRow& row, const Constants& constants, Place at) {
  using S0 = decltype(array_of_slot<Rule, Active, 0, Moment, Nonneg>());
  using S1 = decltype(array_of_slot<Rule, Active, 1, Moment, Nonneg>());
  using S2 = decltype(array_of_slot<Rule, Active, 2, Moment, Nonneg>());
  const DeviceArray(&a)[SCRUPLE_ARRAYS] = row.arrays;
  const auto draws = [&](int array) {
    Draws drawn = draws_of(row, constants, array);
    drawn.key.folds = write_of(row, constants, array);
    return drawn;
  };
  Elements<N> e{};
  // Reads, decodes and updates; nothing is written, so it can be done again.
  const auto advance = [&](auto& math) {
    const auto weight = Weight::template load<Whole>(a[SCRUPLE_WEIGHT], at);
    const auto slot0 = load_array<S0, Whole>(a[SCRUPLE_SLOT], at);
    const auto slot1 = load_array<S1, Whole>(a[SCRUPLE_SLOT + 1], at);
    const auto slot2 = load_array<S2, Whole>(a[SCRUPLE_SLOT + 2], at);
    float g[N] = {};
    read_gradient<Whole, N>(a[SCRUPLE_GRADIENT], at, draws(SCRUPLE_GRADIENT), g);
    const auto fetch = [&](int i, auto& before) {
      before.w = Weight::value(weight, i);
      if constexpr (Active & 1) before.s[0] = S0::value(slot0, i);
      if constexpr (Active & 2) before.s[1] = S1::value(slot1, i);
      if constexpr (Active & 4) before.s[2] = S2::value(slot2, i);
    };
    return update_lane<Rule, Active, N>(fetch, g, constants, Whole ? N : at.n, math, e);
  };
  bool bad = false;
  FastMath fast;
  if constexpr (Whole) bad = advance(fast);
  if (!Whole || (fast.used && (bad || !fast.tame()))) {
    IeeeMath exact;
    bad = advance(exact);
  }
  if (bad) make_canonical<Active, N>(e);

  if (constants.keep_weight == 0)
    Weight::template encode<Whole>(e.w, a[SCRUPLE_WEIGHT], at, draws(SCRUPLE_WEIGHT));
  encode_array<S0, Whole>(e.s0, a[SCRUPLE_SLOT], at, draws(SCRUPLE_SLOT));
  encode_array<S1, Whole>(e.s1, a[SCRUPLE_SLOT + 1], at, draws(SCRUPLE_SLOT + 1));
  encode_array<S2, Whole>(e.s2, a[SCRUPLE_SLOT + 2], at, draws(SCRUPLE_SLOT + 2));
}

// Three blocks at a time on a multiprocessor: more registers hide less of the memory's latency than threads.
template <class Rule, unsigned Active, int N, class Weight, class Moment, class Nonneg>
__global__ void __launch_bounds__(kBlock, 3) step(DeviceTable table, const Constants* constants) {
  fill_array_levels<Weight, Moment, Nonneg>();
  Cursor cursor;
  for (i64 tile = blockIdx.x; tile < table.tiles; tile += gridDim.x) {
    cursor.seek(table, tile);
    const DeviceRow& row = table.rows[cursor.row];
    const Constants& c = constants[row.constants];
    if (c.skip != 0) return;
    const i64 first = cursor.tile * N * kBlock, mine = first + static_cast<i64>(threadIdx.x) * N;
    if (row.aligned != 0 && first + N * kBlock <= row.size)
      step_tile<Rule, Active, N, Weight, Moment, Nonneg, true>(row, c, {mine, N});
    else
      step_tile<Rule, Active, N, Weight, Moment, Nonneg, false>(row, c, place_of<N>(mine, row.size));
  }
}

// ---- Which kernels there are ----

template <int Index>
struct FormatRow;
constexpr int kFirstFormat = __COUNTER__ + 1;
#define SCRUPLE_FORMAT(name, roles, K, S, N)     \
  template <>                                    \
  struct FormatRow<__COUNTER__ - kFirstFormat> { \
    using Signed = S;                            \
    using Nonneg = N;                            \
    static constexpr int k = K;                  \
  };
#include "formats/formats.def"
#undef SCRUPLE_FORMAT

constexpr bool same(const char* a, const char* b) {
  for (; *a != 0 && *a == *b; ++a, ++b) {
  }
  return *a == *b;
}

// Row of formats.def, or -1.
constexpr int format_index(const char* wanted) {
  int index = 0;
#define SCRUPLE_FORMAT(name, ...)       \
  if (same(name, wanted)) return index; \
  ++index;
#include "formats/formats.def"
#undef SCRUPLE_FORMAT
  return -1;
}

template <class C, int K>
constexpr bool has_words() {
  constexpr Layout layout = C::layout(K);
  return layout.code_bits == 32 || (layout.aux_bits == 32 && layout.group == 1);
}

template <class Rule, unsigned Active>
constexpr bool has_slot(Sign sign) {
  for (unsigned s = 0; s < sizeof(Rule::slots) / sizeof(Slot); ++s)
    if ((Active >> s & 1u) != 0 && Rule::slots[s].sign == sign) return true;
  return false;
}

template <class Rule, unsigned Active, int WeightFormat, int MomentFormat, int NonnegFormat,
          Rounding WeightRounding, Rounding MomentRounding>
void add_recipe(std::vector<StepKernel>& list) {
  constexpr bool kSigned = has_slot<Rule, Active>(Sign::any), kNonneg = has_slot<Rule, Active>(Sign::nonneg);
  if constexpr ((!kSigned || MomentFormat >= 0) && (!kNonneg || NonnegFormat >= 0)) {
    using W = FormatRow<WeightFormat>;
    using M = FormatRow<kSigned ? MomentFormat : WeightFormat>;
    using N = FormatRow<kNonneg ? NonnegFormat : WeightFormat>;
    // 16 elements of 16 bits or fewer fill the registers as 8 of 32 bits do.
    constexpr int kWidth = has_words<typename W::Signed, W::k>() ||
                                   (kSigned && has_words<typename M::Signed, M::k>()) ||
                                   (kNonneg && has_words<typename N::Nonneg, N::k>())
                               ? 8
                               : 16;
    using Weight = Known<typename W::Signed, W::k, WeightRounding, kWidth>;
    using Moment =
        std::conditional_t<kSigned, Known<typename M::Signed, M::k, MomentRounding, kWidth>, Absent>;
    using Nonneg =
        std::conditional_t<kNonneg, Known<typename N::Nonneg, N::k, MomentRounding, kWidth>, Absent>;
    list.push_back({Active, WeightFormat, MomentFormat, NonnegFormat, WeightRounding, MomentRounding, kWidth,
                    reinterpret_cast<const void*>(&step<Rule, Active, kWidth, Weight, Moment, Nonneg>)});
  }
}

// A recipe with its own roundings, with weights rounded stochastically, and with moments so too.
template <class Rule, unsigned Active, int Weight, int Moment, int Nonneg, Rounding WeightRounding,
          Rounding MomentRounding>
void add_roundings(std::vector<StepKernel>& list) {
  using W = FormatRow<Weight>;
  using M = FormatRow<Moment>;
  constexpr bool kWeights = WeightRounding != kStochastic &&
                            (W::Signed::roundings >> kStochastic & 1u) != 0 &&
                            W::Signed::layout(W::k).code_bits != 32;
  constexpr bool kMoments =
      Active != 0 && MomentRounding != kStochastic && !has_words<typename M::Signed, M::k>();
  add_recipe<Rule, Active, Weight, Moment, Nonneg, WeightRounding, MomentRounding>(list);
  if constexpr (kWeights) add_recipe<Rule, Active, Weight, Moment, Nonneg, kStochastic, MomentRounding>(list);
  if constexpr (kWeights && kMoments)
    add_recipe<Rule, Active, Weight, Moment, Nonneg, kStochastic, kStochastic>(list);
}

// The moments of a 24-bit recipe beside weights in fp32, as PyTorch's parameters often are.
template <class Rule, unsigned Active, int Weight, int Moment, int Nonneg, Rounding MomentRounding>
void add_wide_weights(std::vector<StepKernel>& list) {
  if constexpr (Weight == format_index("bf16+8"))
    add_recipe<Rule, Active, format_index("fp32"), Moment, Nonneg, kNearest, MomentRounding>(list);
}

template <class Rule, unsigned Active>
void add_active(std::vector<StepKernel>& list) {
  if constexpr (can_be_active<Rule>(Active)) {
#define SCRUPLE_RECIPE(name, weight, moment, nonneg, gradient, weight_rounding, moment_rounding, ...) \
  add_roundings<Rule, Active, format_index(weight), format_index(moment), format_index(nonneg),       \
                weight_rounding, moment_rounding>(list);                                              \
  add_wide_weights<Rule, Active, format_index(weight), format_index(moment), format_index(nonneg),    \
                   moment_rounding>(list);
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
