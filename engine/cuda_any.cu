// The general CUDA kernels: the step for mixtures that no recipe names, and any array to and from plain values.
// Formats and optimizer are read from the table at run time. The step is that of engine/cuda_step.cu, but
// codecs and rule stand behind branches that a whole warp takes together: one kernel instead of one per
// mixture.
#include <type_traits>

#include "engine/cuda_arrays.cuh"
#include "engine/cuda_tiles.cuh"
#include "engine/cuda_update.cuh"

namespace scruple {
inline namespace SCRUPLE_UNIT {
namespace {

constexpr int N = kBlockTile / kBlock;

// ---- Which code serves an array ----

// Extra bits that fill bytes, or half of one, get code of their own; other widths share one that reads K from
// the table. (Formats of groups do not read K.)
constexpr int kAnyWidth = -1;
constexpr int fixed_width(int k) { return k % 8 == 0 || k == 4 ? k : kAnyWidth; }

// Extra bits of an array that code for K serves.
template <int K>
__device__ int width_of(const DeviceArray& a) {
  if constexpr (K != kAnyWidth) return K;
  const int k = a.k;
  __builtin_assume(k != 4 && k != 8 && k != 16);  // nvcc would ask for each value
  return k;
}

// What serves a format's values of either sign, or those that have none.
template <int Format, bool Nonneg>
using CodecOf = std::conditional_t<Nonneg && !std::is_same_v<typename FormatRow<Format>::Nonneg, None>,
                                   typename FormatRow<Format>::Nonneg, typename FormatRow<Format>::Signed>;

// Formats share code where they can. Loading depends on the layout alone; decoding and encoding depend on the
// codec and the width of the extra bits.
enum Act { kLoads, kDecodes, kEncodes };
struct Code {
  int what, width, group;
  bool operator==(const Code&) const = default;
};
template <class C>
constexpr int codec_number() {
#define SCRUPLE_FORMAT(number, name, roles, k, Signed, Nonneg) \
  if (std::is_same_v<C, Signed>) return 2 * number;            \
  if (std::is_same_v<C, Nonneg>) return 2 * number + 1;
#include "formats/formats.def"
#undef SCRUPLE_FORMAT
}
template <Act act, class C, int K>
constexpr Code code_of() {
  constexpr Layout kLayout = C::layout(K);
  if (act == kLoads) return {kLayout.code_bits, fixed_width(kLayout.aux_bits), kLayout.group};
  return {codec_number<C>(), fixed_width(K), 0};
}

// A numbered piece of code that loads, decodes or encodes an array, for one rounding where that matters. The
// table holds the numbers, and kernels find the code by binary search. (A `switch` over the numbers would
// make `any` 1.8 % longer: 688,384 bytes instead of 676,096, as many registers; nvcc 13.0, sm_90.)
struct Way {
  Code code;
  int number, rounding;
  int format;  // the first that it serves, and for which sign
  bool nonneg;
  u32 roles;  // of all that it serves: a bit for each letter
};
struct Ways {
  Way list[3 * kFormatCount]{};  // room enough, or it would not compile
  int count = 0;
};
struct AllWays : Ways {
  u8 of[kFormatCount][2][kRoundings]{};

  constexpr int find(const Code& code, int rounding) const {
    int i = 0;
    while (i < count && !(list[i].code == code && list[i].rounding == rounding)) ++i;
    return i;
  }
  template <Act act, int Format, bool Nonneg>
  constexpr void add() {
    using C = CodecOf<Format, Nonneg>;
    if constexpr (!std::is_same_v<C, None>) {
      constexpr Code kCode = code_of<act, C, FormatRow<Format>::k>();
      constexpr unsigned kDistinct =
          act == kLoads ? 1u << kNearest : distinct_roundings<C, act == kDecodes>();
      for (int wanted = 0; wanted < kRoundings; ++wanted) {
        const int rounding = (kDistinct >> wanted & 1u) != 0 ? wanted : +kNearest;
        const int way = find(kCode, rounding);
        if (way == count) list[count++] = {kCode, way, rounding, Format, Nonneg, 0};
        // Gradients alone are read with dither.
        const u32 roles = rounding == kDither ? role_bits("ga") : ~0u;
        list[way].roles |= role_bits(FormatRow<Format>::roles) & roles;
        of[Format][Nonneg][wanted] = static_cast<u8>(way);
      }
    }
  }
};
template <Act act>
constexpr AllWays all_ways() {
  AllWays ways;
#define SCRUPLE_FORMAT(number, ...) \
  ways.add<act, number, false>();   \
  ways.add<act, number, true>();
#include "formats/formats.def"
#undef SCRUPLE_FORMAT
  return ways;
}
// Those of formats that serve one of the roles.
template <Act act, char... Roles>
constexpr Ways some_ways() {
  constexpr char kRoles[] = {Roles..., 0};
  const AllWays all = all_ways<act>();
  Ways some;
  for (int i = 0; i < all.count; ++i)
    if ((all.list[i].roles & role_bits(kRoles)) != 0) some.list[some.count++] = all.list[i];
  return some;
}
template <Act act, char... Roles>
constexpr Ways kWays = some_ways<act, Roles...>();

// visit.template operator()<C, R, K>() for the codec, the rounding and the extra bits of a way. Those from
// Low to High are left.
template <int Low, int High, Act act, char... Roles>
__device__ __forceinline__ void with_way(u32 number, const auto& visit) {
  if constexpr (High - Low == 1) {
    constexpr Way kWay = kWays<act, Roles...>.list[Low];
    visit.template operator()<CodecOf<kWay.format, kWay.nonneg>, static_cast<Rounding>(kWay.rounding),
                              fixed_width(FormatRow<kWay.format>::k)>();
  } else {
    constexpr int kMiddle = (Low + High) / 2;
    constexpr u32 kFrom = kWays<act, Roles...>.list[kMiddle].number;
    if (number < kFrom)
      with_way<Low, kMiddle, act, Roles...>(number, visit);
    else
      with_way<kMiddle, High, act, Roles...>(number, visit);
  }
}
template <Act act, char... Roles>
__device__ __forceinline__ void with_way_of(const DeviceArray& a, const auto& visit) {
  with_way<0, kWays<act, Roles...>.count, act, Roles...>(a.ways[act], visit);
}

// ---- Arrays ----

// What load brings of an array whatever its format: a word for each value at most.
struct Bits {
  u32 w[N];
};
template <class Raw>
__device__ void pack(const Raw& raw, Bits& bits) {
  static_assert(sizeof raw <= sizeof bits);
  __builtin_memcpy(&bits, &raw, sizeof raw);
}
template <class Raw>
__device__ Raw unpacked(const Bits& bits) {
  Raw raw;
  __builtin_memcpy(&raw, &bits, sizeof raw);
  return raw;
}

// In whole tiles.
template <char... Roles>
__device__ __forceinline__ void load_any(const DeviceArray& a, Slice at, Bits& to) {
  with_way_of<kLoads, Roles...>(a, [&]<class C, Rounding, int K>() {
    pack(Lane<C, N>::template load<true>(a, width_of<K>(a), at), to);
  });
}
template <char... Roles>
__device__ __forceinline__ void decode_any(const DeviceArray& a, const Bits& bits, const auto& coins,
                                           float (&x)[N]) {
  with_way_of<kDecodes, Roles...>(a, [&]<class C, Rounding R, int K>() {
    decode_lane<C, R, true, N>(unpacked<typename Lane<C, N>::Raw>(bits), width_of<K>(a),
                               R == kDither ? coins() : Coins{}, x);
  });
}
template <char... Roles>
__device__ __forceinline__ void encode_any(const DeviceArray& a, const float (&x)[N], Slice at, Coins coins) {
  with_way_of<kEncodes, Roles...>(a, [&]<class C, Rounding R, int K>() {
    Lane<C, N>::template encode<R, true>(x, a, width_of<K>(a), at, coins);
  });
}

// Anywhere, and any format in any role, byte by byte; called, with values in local memory: one copy for all
// arrays.
__device__ __noinline__ void decode_anywhere(const DeviceArray& a, Slice at, Coins coins, float (&x)[N]) {
  with_way_of<kDecodes, 'w', 's', 'n', 'g', 'a'>(a, [&]<class C, Rounding R, int K>() {
    const int k = width_of<K>(a);
    decode_lane<C, R, false, N>(Lane<C, N>::template load<false>(Bytewise(a), k, at), k, coins, x);
  });
}
__device__ __noinline__ void encode_anywhere(const DeviceArray& a, Slice at, Coins coins,
                                             const float (&x)[N]) {
  with_way_of<kEncodes, 'w', 's', 'n', 'g', 'a'>(a, [&]<class C, Rounding R, int K>() {
    Lane<C, N>::template encode<R, false>(x, Bytewise(a), width_of<K>(a), at, coins);
  });
}

// ---- The step ----

// Updates in place the first n elements, and clears the others. True, where a weight is not finite or Math
// not sure of its bits.
template <class Rule, class Math, unsigned Active = 0>
__device__ __forceinline__ bool update_rule(const DeviceRow& row, const Constants& constants,
                                            const float (&g)[N], int n, Elements<N>& e) {
  if constexpr (can_be_active<Rule>(Active)) {
    if (row.active == Active) {
      const auto fetch = [&](int i, auto& before) {
        before.w = e.w[i];
        if constexpr (Active & 1) before.s[0] = e.s0[i];
        if constexpr (Active & 2) before.s[1] = e.s1[i];
        if constexpr (Active & 4) before.s[2] = e.s2[i];
      };
      Math math{row.spread};
      const bool odd = update_lane<Rule, Active, N>(fetch, g, constants, n, math, e);
      if constexpr (std::is_same_v<Math, FastMath>) return odd || (math.used && !math.tame());
      if (odd) make_canonical<Active, N>(e);
      return odd;
    }
  }
  if constexpr (Active + 1 < 1u << kMaxSlots)
    return update_rule<Rule, Math, Active + 1>(row, constants, g, n, e);
  else
    return false;
}
template <class Math>
__device__ __forceinline__ bool update_any(const DeviceRow& row, const Constants& constants,
                                           const float (&g)[N], int n, Elements<N>& e) {
  switch (constants.rule) {
#define SCRUPLE_OPTIMIZER(number, Rule) \
  case number:                          \
    return update_rule<Rule, Math>(row, constants, g, n, e);
#include "optim/optim.def"
#undef SCRUPLE_OPTIMIZER
    default: return false;
  }
}

// True if it left everything as it was, because one of its warp's threads met what needs care.
__device__ __forceinline__ bool run(const DeviceRow& row, const Constants& constants, Slice at) {
  const DeviceArray(&a)[SCRUPLE_ARRAYS] = row.arrays;
  const DeviceArray &weight = a[SCRUPLE_WEIGHT], &slot0 = a[SCRUPLE_SLOT], &slot1 = a[SCRUPLE_SLOT + 1],
                    &slot2 = a[SCRUPLE_SLOT + 2], &gradient = a[SCRUPLE_GRADIENT];
  const auto coins = [&](int array) { return row.coins[array].from(at.first); };
  const auto no_coins = [] { return Coins{}; };
  const bool has0 = (row.active & 1) != 0, has1 = (row.active & 2) != 0, has2 = (row.active & 4) != 0;
  Bits w, s0, s1, s2, from;
  load_any<'w'>(weight, at, w);
  if (has0) load_any<'s', 'n', 'x'>(slot0, at, s0);
  if (has1) load_any<'s', 'n', 'x'>(slot1, at, s1);
  if (has2) load_any<'s', 'n', 'x'>(slot2, at, s2);
  load_any<'g'>(gradient, at, from);
  Elements<N> e;
  float g[N];
  decode_any<'w'>(weight, w, no_coins, e.w);
  if (has0) decode_any<'s', 'n', 'x'>(slot0, s0, no_coins, e.s0);
  if (has1) decode_any<'s', 'n', 'x'>(slot1, s1, no_coins, e.s1);
  if (has2) decode_any<'s', 'n', 'x'>(slot2, s2, no_coins, e.s2);
  decode_any<'g'>(
      gradient, from, [&] { return coins(SCRUPLE_GRADIENT); }, g);
  if (__any_sync(0xffffffffu, update_any<FastMath>(row, constants, g, N, e))) return true;
  if (constants.keep_weight == 0) encode_any<'w'>(weight, e.w, at, coins(SCRUPLE_WEIGHT));
  if (has0) encode_any<'s', 'n', 'x'>(slot0, e.s0, at, coins(SCRUPLE_SLOT));
  if (has1) encode_any<'s', 'n', 'x'>(slot1, e.s1, at, coins(SCRUPLE_SLOT + 1));
  if (has2) encode_any<'s', 'n', 'x'>(slot2, e.s2, at, coins(SCRUPLE_SLOT + 2));
  return false;
}

// For the ends of tensors, odd addresses and rare values.
__device__ __noinline__ void run_carefully(const DeviceRow& row, const Constants& constants, Slice at) {
  Elements<N> e{};
  float g[N] = {};
  float(*const of[])[N] = {&e.w, &e.s0, &e.s1, &e.s2, &g};
  static_assert(SCRUPLE_WEIGHT == 0 && SCRUPLE_SLOT == 1 && SCRUPLE_GRADIENT == 4);
#pragma unroll 1
  for (int i = 0; i < SCRUPLE_ARRAYS; ++i)
    if (row.arrays[i].codes != nullptr)
      decode_anywhere(row.arrays[i], at, row.coins[i].from(at.first), *of[i]);
  update_any<IeeeMath>(row, constants, g, at.n, e);
#pragma unroll 1
  for (int i = constants.keep_weight != 0 ? 1 : 0; i < SCRUPLE_GRADIENT; ++i)
    if (row.arrays[i].codes != nullptr)
      encode_anywhere(row.arrays[i], at, row.coins[i].from(at.first), *of[i]);
}

__global__ void __launch_bounds__(kBlock, 3) any(DeviceTable table, const Constants* constants) {
  __shared__ Held of_warps[kBlock / 32];
  Held& held = of_warps[threadIdx.x / 32];
  const DeviceRow& row = held.row;
  const Constants& c = held.constants;
  held.open();
  const BlockTiles tiles(table);
  for (i64 tile = tiles.first; tile < tiles.end; ++tile) {
    held.seek(table, tile, constants);
    if (c.skip != 0) return;
    const i64 first = (tile - held.begin) * kBlockTile, mine = first + static_cast<i64>(threadIdx.x) * N;
    bool careful = row.aligned == 0 || first + kBlockTile > row.size;
    if (!careful) careful = run(row, c, {mine, N});
    if (careful) run_carefully(row, c, slice_of<N>(mine, row.size));
  }
}

// ---- One array to and from plain values ----

// True, where a value came out as NaN: it may be one that needs care.
__device__ __forceinline__ bool read_whole(const ArrayPart& from, Slice at, float (&x)[N]) {
  Bits bits;
  load_any<'w', 's', 'n', 'g', 'a'>(from.array, at, bits);
  decode_any<'w', 's', 'n', 'g', 'a'>(
      from.array, bits, [&] { return from.coins.from(at.first); }, x);
  bool odd = false;
#pragma unroll
  for (int i = 0; i < N; ++i) odd = odd || !(x[i] == x[i]);
  return odd;
}
__device__ __forceinline__ void read_anywhere(const ArrayPart& from, Slice at, float otherwise,
                                              float (&x)[N]) {
  float values[N] = {};
  if (from.array.codes != nullptr) decode_anywhere(from.array, at, from.coins.from(at.first), values);
#pragma unroll
  for (int i = 0; i < N; ++i) x[i] = i >= at.n ? 0.0f : from.array.codes != nullptr ? values[i] : otherwise;
}
template <class... C>
__device__ __forceinline__ void write_whole(const DeviceArray& to, Slice at, const float (&x)[N]) {
  const auto write = [&]<class One>(std::type_identity<One>) {
    if (to.format == codec_number<One>() / 2)
      Lane<One, N>::template encode<kNearest, true>(x, to, 0, at, Coins{});
  };
  (write(std::type_identity<C>()), ...);
}
__device__ __forceinline__ void write_anywhere(const ArrayPart& to, Slice at, const float (&x)[N]) {
  float values[N];
#pragma unroll
  for (int i = 0; i < N; ++i) values[i] = x[i];
  encode_anywhere(to.array, at, to.coins.from(at.first), values);
}

// A block takes a tile.
__global__ void __launch_bounds__(kBlock) array(const ArrayWork __grid_constant__ work) {
  const i64 tile = blockIdx.x * i64{kBlockTile};
  const Slice here = slice_of<N>(tile + static_cast<i64>(threadIdx.x) * N, work.size);
  const Slice from = {work.from.first + here.first, here.n}, to = {work.to.first + here.first, here.n};
  const bool whole = tile + kBlockTile <= work.size;
  float x[N];
  bool careful = !whole || !work.from.aligned;
  if (!careful) careful = __any_sync(0xffffffffu, read_whole(work.from, from, x));
  if (careful) read_anywhere(work.from, from, work.otherwise, x);
#pragma unroll
  for (int i = 0; i < N; ++i) x[i] = overflowed(canonical(x[i]), work.overflow);
  if (whole && work.to.aligned && work.to_plain)
    write_whole<Fp32, Rounded<Bf16>, Rounded<Fp16>>(work.to.array, to, x);
  else
    write_anywhere(work.to, to, x);
}

}  // namespace
}  // namespace SCRUPLE_UNIT

const void* any_kernel() { return reinterpret_cast<const void*>(&any); }
const void* array_kernel() { return reinterpret_cast<const void*>(&array); }
void set_any_ways(int format, bool nonneg, int rounding, u8 (&ways)[3]) {
  static constexpr AllWays kAll[] = {all_ways<kLoads>(), all_ways<kDecodes>(), all_ways<kEncodes>()};
  for (const Act act : {kLoads, kDecodes, kEncodes})
    ways[act] = kAll[act].of[format][nonneg ? 1 : 0][rounding];
}
}  // namespace scruple
