// Any format with any optimizer on CUDA, both read from the table: the step for combinations that no recipe
// names, and every array to and from fp32. Slower than engine/cuda_step.cu (codecs are called, not inlined,
// and values pass through local memory), and one kernel instead of a product.
#include "engine/lane.cuh"

namespace scruple {
inline namespace SCRUPLE_UNIT {
namespace {

template <class C, Rounding R>
__device__ __noinline__ void decode_one(const DeviceArray& a, Place at, Coins coins, float (&out)[kLane]) {
  decode_lane<C, R, kLane>(Lane<C, kLane>::template load<false>(a, a.k, at), a.k, coins, out);
}

template <class C, Rounding R>
__device__ __noinline__ void encode_one(const float (&in)[kLane], const DeviceArray& a, Place at,
                                        Coins coins) {
  Lane<C, kLane>::template encode<R, false>(in, a, a.k, at, coins);
}

__device__ void with_codec(const DeviceArray& a, const auto& visit) {
  switch (a.format) {
#define SCRUPLE_FORMAT(number, name, roles, k, Signed, Nonneg) \
  case number:                                                 \
    if (a.nonneg != 0) return with_rounding<Nonneg>(a, visit); \
    return with_rounding<Signed>(a, visit);
#include "formats/formats.def"
#undef SCRUPLE_FORMAT
    default: return;
  }
}

__device__ void decode_any(const DeviceArray& a, Place at, Coins coins, float (&out)[kLane]) {
  with_codec(a, [&]<class C, Rounding R>() { decode_one<C, R>(a, at, coins, out); });
}
__device__ void encode_any(const float (&in)[kLane], const DeviceArray& a, Place at, Coins coins) {
  with_codec(a, [&]<class C, Rounding R>() { encode_one<C, R>(in, a, at, coins); });
}

// ---- The step ----

template <class Rule, unsigned Active>
__device__ __noinline__ void update_one(const DeviceRow& row, Elements<kLane>& e, const float (&g)[kLane],
                                        const Constants& constants, int n) {
  const auto fetch = [&](int i, auto& before) {
    before.w = e.w[i];
    if constexpr (Active & 1) before.s[0] = e.s0[i];
    if constexpr (Active & 2) before.s[1] = e.s1[i];
    if constexpr (Active & 4) before.s[2] = e.s2[i];
  };
  IeeeMath math{row.spread};
  if (update_lane<Rule, Active, kLane>(fetch, g, constants, n, math, e)) make_canonical<Active, kLane>(e);
}

template <class Rule, unsigned Active = 0>
__device__ void update_rule(const DeviceRow& row, Elements<kLane>& e, const float (&g)[kLane],
                            const Constants& constants, int n) {
  if constexpr (can_be_active<Rule>(Active))
    if (row.active == Active) return update_one<Rule, Active>(row, e, g, constants, n);
  if constexpr (Active + 1 < 1u << kMaxSlots) update_rule<Rule, Active + 1>(row, e, g, constants, n);
}

__device__ void update_any(const DeviceRow& row, Elements<kLane>& e, const float (&g)[kLane],
                           const Constants& constants, int n) {
  constexpr int kFirst = __COUNTER__ + 1;
  switch (constants.rule) {
#define SCRUPLE_OPTIMIZER(Rule) \
  case __COUNTER__ - kFirst:    \
    return update_rule<Rule>(row, e, g, constants, n);
#include "optim/optim.def"
#undef SCRUPLE_OPTIMIZER
    default: return;
  }
}

__global__ void __launch_bounds__(kBlock) step_any(DeviceTable table, const Constants* constants) {
  Cursor cursor;
  for (i64 tile = blockIdx.x; tile < table.tiles; tile += gridDim.x) {
    cursor.seek(table, tile);
    const DeviceRow& row = table.rows[cursor.row];
    const Constants& c = constants[row.constants];
    if (c.skip != 0) return;
    const Place at =
        place_of<kLane>(cursor.tile * kBlockTile + static_cast<i64>(threadIdx.x) * kLane, row.size);
    const auto coins = [&](int array) { return coins_of(row, array, at.first); };
    Elements<kLane> e{};
    float g[kLane] = {};
    float(*const slots[kMaxSlots])[kLane] = {&e.s0, &e.s1, &e.s2};
    const auto for_slots = [&](const auto& visit) {
      for (int s = 0; s < kMaxSlots; ++s)
        if ((row.active >> s & 1u) != 0) visit(SCRUPLE_SLOT + s, *slots[s]);
    };
    decode_any(row.arrays[SCRUPLE_GRADIENT], at, coins(SCRUPLE_GRADIENT), g);
    decode_any(row.arrays[SCRUPLE_WEIGHT], at, coins(SCRUPLE_WEIGHT), e.w);
    for_slots([&](int a, float(&x)[kLane]) { decode_any(row.arrays[a], at, coins(a), x); });
    update_any(row, e, g, c, at.n);
    if (c.keep_weight == 0) encode_any(e.w, row.arrays[SCRUPLE_WEIGHT], at, coins(SCRUPLE_WEIGHT));
    for_slots([&](int a, const float(&x)[kLane]) { encode_any(x, row.arrays[a], at, coins(a)); });
  }
}

// ---- One array to and from fp32: table.tiles tiles from element `first` on; values[0] is that element ----

// `values` null: `otherwise` everywhere.
__global__ void __launch_bounds__(kBlock)
    encode(DeviceTable table, int array, i64 first, const float* values, float otherwise) {
  const DeviceRow& row = table.rows[0];
  for (i64 tile = blockIdx.x; tile < table.tiles; tile += gridDim.x) {
    const i64 begin = tile * kBlockTile + static_cast<i64>(threadIdx.x) * kLane;
    const Place at = place_of<kLane>(first + begin, row.size);
    float x[kLane];
    Words<4 * kLane> raw{};
    if (values != nullptr)
      raw = load<4 * kLane, u32, false>(reinterpret_cast<const u8*>(values + begin), 4 * at.n);
#pragma unroll
    for (int i = 0; i < kLane; ++i)
      x[i] = i < at.n
                 ? overflowed(canonical(values != nullptr ? float_of(raw.w[i]) : otherwise), row.overflow)
                 : 0.0f;
    encode_any(x, row.arrays[array], at, coins_of(row, array, at.first));
  }
}

__global__ void __launch_bounds__(kBlock) decode(DeviceTable table, int array, i64 first, float* values) {
  const DeviceRow& row = table.rows[0];
  for (i64 tile = blockIdx.x; tile < table.tiles; tile += gridDim.x) {
    const i64 begin = tile * kBlockTile + static_cast<i64>(threadIdx.x) * kLane;
    const Place at = place_of<kLane>(first + begin, row.size);
    float x[kLane] = {};
    decode_any(row.arrays[array], at, coins_of(row, array, at.first), x);
    Words<4 * kLane> raw;
#pragma unroll
    for (int i = 0; i < kLane; ++i) raw.w[i] = bits_of(canonical(x[i]));
    store<4 * kLane, u32, false>(reinterpret_cast<u8*>(values + begin), 4 * at.n, raw);
  }
}

}  // namespace
}  // namespace SCRUPLE_UNIT

const AnyKernels& any_kernels() {
  static const AnyKernels kKernels = {reinterpret_cast<const void*>(&step_any),
                                      reinterpret_cast<const void*>(&encode),
                                      reinterpret_cast<const void*>(&decode)};
  return kKernels;
}

}  // namespace scruple
