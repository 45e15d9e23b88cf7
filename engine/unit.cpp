// The leaf loops of the CPU engine, compiled once per instruction set with SCRUPLE_UNIT naming it. Plain
// loops over the formulas in formats/ and optim/, written so that compilers vectorise them; nothing here may
// call a library template, or the linker could hand one unit's instructions to another.
#include "engine/unit.h"

#include <type_traits>

#include "engine/fused.h"
#include "engine/strings.h"
#include "formats/rows.h"
#include "optim/optim.def"

namespace scruple {
inline namespace SCRUPLE_UNIT {
namespace {

// Keeps a vectorised loop of known length a loop: unrolled whole, a group of 64 spills its registers.
#if defined(__clang__)
#define SCRUPLE_KEEP_LOOP _Pragma("clang loop unroll(disable)")
#else
#define SCRUPLE_KEEP_LOOP _Pragma("GCC unroll 1")
#endif

#if defined(__AVX512BW__)
constexpr int kVectorBytes = 64;
#elif defined(__AVX2__)
constexpr int kVectorBytes = 32;
#else
constexpr int kVectorBytes = 16;
#endif

// Extra bits of weights come in any width from 1 to 16; those of 8 and 16 fill bytes and are no strings.
using UnpackFn = void (*)(const u8*, int, u16*);
using PackFn = void (*)(const u16*, int, u8*);
#define SCRUPLE_BITS(f)                                                                            \
  {                                                                                                \
    nullptr, f<1, u16>, f<2, u16>, f<3, u16>, f<4, u16>, f<5, u16>, f<6, u16>, f<7, u16>, nullptr, \
        f<9, u16>, f<10, u16>, f<11, u16>, f<12, u16>, f<13, u16>, f<14, u16>, f<15, u16>          \
  }
constexpr UnpackFn kUnpack[] = SCRUPLE_BITS(unpack);
constexpr PackFn kPack[] = SCRUPLE_BITS(pack);
#undef SCRUPLE_BITS

// ---- Codecs over a tile ----

template <class C>
struct Tile;

template <>
struct Tile<Fp32> {
  template <Rounding>
  static void decode(Planes p, i64 first, int n, int, float* __restrict out, Coins) {
    const auto* codes = at<float>(p.codes, first);
    for (int i = 0; i < n; ++i) out[i] = codes[i];
  }
  template <Rounding>
  static void encode(const float* __restrict in, Planes p, i64 first, int n, int, Coins) {
    auto* codes = at<float>(p.codes, first);
    for (int i = 0; i < n; ++i) codes[i] = in[i];
  }
};

template <class Half>
struct Tile<Rounded<Half>> {
  template <Rounding>
  static void decode(Planes p, i64 first, int n, int, float* __restrict out, Coins) {
    const auto* codes = at<u16>(p.codes, first);
    for (int i = 0; i < n; ++i) out[i] = Half::decode(codes[i]);
  }
  template <Rounding R>
  static void encode(const float* __restrict in, Planes p, i64 first, int n, int, Coins coins) {
    auto* codes = at<u16>(p.codes, first);
    for (int i = 0; i < n; ++i) codes[i] = Rounded<Half>::template encode<R>(in[i], coins[i]);
  }
};

template <class Half>
struct Tile<Master<Half>> {
  template <Rounding>
  static void decode(Planes p, i64 first, int n, int, float* __restrict out, Coins) {
    const auto* master = at<float>(p.aux, first);
    for (int i = 0; i < n; ++i) out[i] = master[i];
  }
  template <Rounding>
  static void encode(const float* __restrict in, Planes p, i64 first, int n, int, Coins) {
    auto* codes = at<u16>(p.codes, first);
    auto* master = at<float>(p.aux, first);
    for (int i = 0; i < n; ++i) {
      master[i] = in[i];
      codes[i] = Half::nearest(in[i]);
    }
  }
};

template <class Half>
struct Tile<Split<Half>> {
  template <Rounding R, class Extra>
  static SCRUPLE_HD void join_all(const Loose<u16>* __restrict visible, const Loose<Extra>* __restrict extra,
                                  int n, int k, float* __restrict out) {
    u16 least = 0xffffu;  // a zero needs the slower join; zeros are rare, so then everything is read again
    for (int i = 0; i < n; ++i) {
      const u16 magnitude = static_cast<u16>(visible[i] << 1);
      least = magnitude < least ? magnitude : least;
      out[i] = Half::value(join<R, false>(visible[i], extra[i], k));
    }
    if (least == 0)
      for (int i = 0; i < n; ++i) out[i] = Half::value(join<R>(visible[i], extra[i], k));
  }
  template <Rounding R, class Extra>
  static SCRUPLE_HD void split_all(const float* __restrict in, int n, int k, Coins coins,
                                   Loose<u16>* __restrict visible, Loose<Extra>* __restrict extra) {
    for (int i = 0; i < n; ++i, coins = coins.from(1)) {
      const Halves h = split<R>(Half::position(in[i]), k, coins.first);
      visible[i] = static_cast<u16>(h.visible);
      extra[i] = static_cast<Extra>(h.extra);
    }
  }
  // Whole bytes are read and written in place; other widths through an unpacked copy.
  template <Rounding R>
  static void decode(Planes p, i64 first, int n, int k, float* out, Coins) {
    const auto* visible = at<u16>(p.codes, first);
    if (k == 8) return join_all<R, u8>(visible, at<u8>(p.aux, first), n, 8, out);
    if (k == 16) return join_all<R, u16>(visible, at<u16>(p.aux, first), n, 16, out);
    u16 extra[kTile];
    kUnpack[k](at_bit(p.aux, first * k), n, extra);
    join_all<R, u16>(visible, extra, n, k, out);
  }
  template <Rounding R>
  static void encode(const float* in, Planes p, i64 first, int n, int k, Coins coins) {
    auto* visible = at<u16>(p.codes, first);
    if (k == 8) return split_all<R, u8>(in, n, 8, coins, visible, at<u8>(p.aux, first));
    if (k == 16) return split_all<R, u16>(in, n, 16, coins, visible, at<u16>(p.aux, first));
    u16 extra[kTile];
    split_all<R, u16>(in, n, k, coins, visible, extra);
    kPack[k](extra, n, at_bit(p.aux, first * k));
  }
};

// The group formats. A partial last group is padded with zeros, which cannot change its maximum.
template <class C>
struct Tile {
  static constexpr int G = C::group;
  static_assert(kTile % G == 0 && kAlign % G == 0 && G % 16 == 0);
  using Code = std::conditional_t<C::bits <= 8, u8, u16>;
  using Scale = typename C::Scale;

  template <Rounding R>
  static SCRUPLE_HD void decode_group(const Code* __restrict codes, float unit, Coins coins,
                                      float* __restrict out) {
    SCRUPLE_KEEP_LOOP
    for (int i = 0; i < G; ++i) {
      if constexpr (R == kDither)
        out[i] = C::decode_dither(codes[i], unit, coins[i]);
      else
        out[i] = C::decode(codes[i], unit);
    }
  }
  // Compares float patterns as integers: exact in any order, and a NaN is the largest. Several maxima side by
  // side first, because one alone would be a chain of dependent comparisons.
  static SCRUPLE_HD float absmax_of(const float* __restrict in) {
    constexpr int kLanes = kVectorBytes / 4 > 8 ? kVectorBytes / 4 : 8;
    i32 lanes[kLanes];
    for (int j = 0; j < kLanes; ++j) {
      i32 largest = 0;
      for (int i = 0; i < G; i += kLanes) {
        const i32 bits = static_cast<i32>(magnitude_bits(in[i + j]));
        largest = bits > largest ? bits : largest;
      }
      lanes[j] = largest;
    }
    i32 largest = 0;
    SCRUPLE_KEEP_LOOP
    for (int j = 0; j < kLanes; ++j) largest = lanes[j] > largest ? lanes[j] : largest;
    return float_of(static_cast<u32>(largest));
  }
  // The coins of the first kRun elements, computed once per tile. Every later run has the same plus a
  // constant.
  static constexpr int kRun = G < kVectorBytes ? G : kVectorBytes;
  struct Run {
    u32 at[kRun];
    explicit Run(Coins coins) {
      for (int j = 0; j < kRun; ++j) at[j] = coins[j];
    }
  };
  static SCRUPLE_HD void encode_group(const float* __restrict in, float absmax, float gain, u32 shift,
                                      u32 step, const Run& __restrict coins, Code* __restrict codes) {
    // A group that is not finite has a NaN for its scale and codes of zero. Moments were made finite before.
    if (!kMomentCodec<C> && magnitude_bits(absmax) >= 0x7f800000u) {
      for (int i = 0; i < G; ++i) codes[i] = 0;
      return;
    }
    SCRUPLE_KEEP_LOOP
    for (int i = 0; i < G; i += kRun, shift += kRun * step)
      for (int j = 0; j < kRun; ++j)
        codes[i + j] = static_cast<Code>(C::encode(in[i + j], gain, shift + coins.at[j]));
  }

  template <Rounding R>
  static void decode(Planes p, i64 first, int n, int, float* out, Coins coins) {
    const auto* scales = at<Scale>(p.aux, first / G);
    Code unpacked[C::bits == 8 ? 1 : kTile];
    const Code* codes;
    if constexpr (C::bits == 8) {
      codes = p.codes + first;
    } else {
      unpack<C::bits>(at_bit(p.codes, first * C::bits), n, unpacked);
      codes = unpacked;
    }
    int i = 0;
    for (; i + G <= n; i += G) decode_group<R>(codes + i, C::unit(scales[i / G]), coins.from(i), out + i);
    if (i == n) return;
    Code last[G] = {};
    float values[G];
    for (int j = 0; j < n - i; ++j) last[j] = codes[i + j];
    decode_group<R>(last, C::unit(scales[i / G]), coins.from(i), values);
    for (int j = 0; j < n - i; ++j) out[i + j] = values[j];
  }

  // Moments of which one is not finite, which is then stored as 0. Rare, and not inlined: its 4 KiB buffer
  // would be on the stack of every encode.
  static __attribute__((noinline)) void encode_finite(const float* in, Planes p, i64 first, int n,
                                                      Coins coins) {
    float finite[kTile];
    for (int i = 0; i < n; ++i) finite[i] = finite_or_zero(in[i]);
    encode_by_coins(finite, p, first, n, 0, coins);
  }

  // All scales of the tile first, so that their divisions overlap. Nearest and stochastic are the same loop:
  // nearest is the same coin, one half, for every element.
  static void encode_by_coins(const float* in, Planes p, i64 first, int n, int, Coins coins) {
    constexpr int kGroups = kTile / G;
    const int whole = n / G, groups = (n + G - 1) / G;
    float padded[G] = {};
    for (int j = whole * G; j < n; ++j) padded[j - whole * G] = in[j];

    float absmax[kGroups] = {}, gain[kGroups] = {};
    for (int i = 0; i < whole; ++i) absmax[i] = absmax_of(in + i * G);
    if (whole < groups) absmax[whole] = absmax_of(padded);
    if constexpr (kMomentCodec<C>) {
      u32 largest = 0;
      for (const float most : absmax) largest = larger(largest, bits_of(most));
      if (largest >= 0x7f800000u) return encode_finite(in, p, first, n, coins);
    }
    auto* scales = at<Scale>(p.aux, first / G);
    for (int i = 0; i < groups; ++i) {
      const Scale scale = C::scale(absmax[i]);
      scales[i] = scale;
      gain[i] = C::gain(absmax[i], scale);
    }

    const Run run(coins);
    Code unpacked[C::bits == 8 ? 1 : kTile];
    Code* codes;
    if constexpr (C::bits == 8)
      codes = p.codes + first;
    else
      codes = unpacked;
    for (int i = 0; i < whole; ++i)
      encode_group(in + i * G, absmax[i], gain[i], static_cast<u32>(i * G) * coins.step, coins.step, run,
                   codes + i * G);
    if (whole < groups) {
      Code last[G];
      encode_group(padded, absmax[whole], gain[whole], static_cast<u32>(whole * G) * coins.step, coins.step,
                   run, last);
      for (int j = whole * G; j < n; ++j) codes[j] = last[j - whole * G];
    }
    if constexpr (C::bits != 8) pack<C::bits>(unpacked, n, at_bit(p.codes, first * C::bits));
  }
};

template <class C, Rounding R>
constexpr void add_rounding(CodecFns& fns) {
  if constexpr ((C::roundings >> R & 1u) != 0) {
    if constexpr (requires { Tile<C>::encode_by_coins; }) {
      fns.decode[R] = Tile<C>::template decode < R == kDither ? kDither : kNearest > ;
      fns.encode[R] = Tile<C>::encode_by_coins;
    } else {
      fns.decode[R] = Tile<C>::template decode<R>;
      fns.encode[R] = Tile<C>::template encode<R>;
    }
  }
}

template <class C>
constexpr CodecFns codec_fns() {
  CodecFns fns{};
  add_rounding<C, kNearest>(fns);
  add_rounding<C, kTruncate>(fns);
  add_rounding<C, kStochastic>(fns);
  add_rounding<C, kDither>(fns);
  add_rounding<C, kWide>(fns);
  return fns;
}

// ---- Optimizers over a tile ----

template <class Rule, unsigned Active, bool Scaled>
void update_loop(float* w_at, float* const* slots_at, const float* g_at, int n, const void* step,
                 float multiplier, float spread) {
  constexpr int kSlots = sizeof(Rule::slots) / sizeof(Slot);
  const typename Rule::Step k = *static_cast<const typename Rule::Step*>(step);
  auto* __restrict w = reinterpret_cast<Loose<float>*>(w_at);
  const auto* __restrict g = reinterpret_cast<const Loose<float>*>(g_at);
  auto* __restrict s0 = reinterpret_cast<Loose<float>*>(slots_at[0]);
  auto* __restrict s1 = reinterpret_cast<Loose<float>*>(slots_at[1]);
  auto* __restrict s2 = reinterpret_cast<Loose<float>*>(slots_at[2]);
  const IeeeMath math{spread};
  i32 largest = 0;
  for (int i = 0; i < n; ++i) {
    Elem<kSlots> e{};
    e.w = w[i];
    if constexpr (Active & 1) e.s[0] = s0[i];
    if constexpr (Active & 2) e.s[1] = s1[i];
    if constexpr (Active & 4) e.s[2] = s2[i];
    e = Rule::template update<Active>(e, Scaled ? g[i] * multiplier : g[i], k, math);
    const i32 magnitude = static_cast<i32>(magnitude_bits(e.w));
    largest = magnitude > largest ? magnitude : largest;
    w[i] = e.w;
    if constexpr (Active & 1) s0[i] = e.s[0];
    if constexpr (Active & 2) s1[i] = e.s[1];
    if constexpr (Active & 4) s2[i] = e.s[2];
  }
  if (largest <= 0x7f800000) return;
  // A NaN anywhere shows in the weight (optim/optimizer.h), so only then are there any to make canonical.
  for (int i = 0; i < n; ++i) {
    w[i] = canonical(w[i]);
    if constexpr (Active & 1) s0[i] = canonical(s0[i]);
    if constexpr (Active & 2) s1[i] = canonical(s1[i]);
    if constexpr (Active & 4) s2[i] = canonical(s2[i]);
  }
}

template <class Rule, unsigned Active>
void update_tile(float* w, float* const* slots, const float* g, int n, const void* step, float multiplier,
                 float spread) {
  if (multiplier == 1.0f)  // the same bits, one operation less
    update_loop<Rule, Active, false>(w, slots, g, n, step, multiplier, spread);
  else
    update_loop<Rule, Active, true>(w, slots, g, n, step, multiplier, spread);
}

template <class Rule, unsigned Active>
constexpr void add_update(UpdateFn* fns) {
  if constexpr (can_be_active<Rule>(Active)) fns[Active] = update_tile<Rule, Active>;
  if constexpr (Active + 1 < 1u << kMaxSlots) add_update<Rule, Active + 1>(fns);
}

// ---- Fused steps ----

#if SCRUPLE_LANES
template <class Span>
concept IsWritten = requires {
  typename Span::Raw;
};

// The format of a slot in a recipe, if the slot is in use.
template <class Rule, unsigned Active, int Recipe, int S>
struct SlotSpan {
  using type =
      std::conditional_t<Rule::slots[S].sign == Sign::nonneg,
                         SpanOf<typename FormatRow<kRecipeRows[Recipe].nonneg>::Nonneg, 0, kNearest>,
                         SpanOf<typename FormatRow<kRecipeRows[Recipe].moment>::Signed, 0, kNearest>>;
};
template <class Rule, unsigned Active, int Recipe, int S>
requires((Active >> S & 1u) == 0) struct SlotSpan<Rule, Active, Recipe, S> {
  using type = NoSpan;
};

// Slots in use are the first ones: what else there is needs fp32 in every recipe.
template <int Recipe, class Rule, unsigned Active>
constexpr void add_fused(FusedFn* fns) {
  if constexpr (can_be_active<Rule>(Active) && Active < 4) {
    constexpr RecipeRow r = kRecipeRows[Recipe];
    using W = FormatRow<r.weight>;
    using G = FormatRow<r.gradient>;
    using Weight = SpanOf<typename W::Signed, W::k, r.weight_rounding>;
    using Gradient = SpanOf<typename G::Signed, G::k, kNearest>;
    using Slot0 = typename SlotSpan<Rule, Active, Recipe, 0>::type;
    using Slot1 = typename SlotSpan<Rule, Active, Recipe, 1>::type;
    // Where the tiles are as fast (bench/results): flash8 beside a rule that divides by nothing, and scaled
    // integers on AVX2.
    using Moment = typename FormatRow<r.moment>::Signed;
    constexpr bool kPlain = std::is_same_v<Rule, Sgd> || std::is_same_v<Rule, Sgdw>;
    constexpr bool kSlow = (std::is_same_v<Moment, Flash8> && kPlain && Active == 1) ||
                           (std::is_same_v<Moment, Linear8> && kLanes == 8);
    if constexpr (IsWritten<Weight> && IsWritten<Gradient> && IsWritten<Slot0> && IsWritten<Slot1> && !kSlow)
      fns[Active] = fused_loop<Rule, Active, Weight, Gradient, Slot0, Slot1>;
  }
  if constexpr (Active + 1 < 1u << kMaxSlots) add_fused<Recipe, Rule, Active + 1>(fns);
}
template <int Recipe = 0>
constexpr void add_fused(Unit& unit) {
#define SCRUPLE_OPTIMIZER(number, Rule) add_fused<Recipe, Rule, 0>(unit.fused[Recipe][number]);
#include "optim/optim.def"
#undef SCRUPLE_OPTIMIZER
  if constexpr (Recipe + 1 < kRecipeCount) add_fused<Recipe + 1>(unit);
}
#endif

// ---- Norms, folds ----

// Squares of floats are exact in double and their sum cannot overflow, so the sum is finite if and only if
// every x is.
double sum_squares(const float* x, int n) {
  constexpr int kLanes = 256, kRows = kSegment / kLanes;
  float padded[kSegment];
  if (n < kSegment) {
    for (int i = 0; i < kSegment; ++i) padded[i] = i < n ? x[i] : 0.0f;
    x = padded;
  }
  double lanes[kLanes];
  for (int lane = 0; lane < kLanes; lane += 16) {
    double sum[16] = {};
    for (int row = 0; row < kRows; ++row)
      for (int j = 0; j < 16; ++j) {
        const double value = x[row * kLanes + lane + j];
        sum[j] += value * value;
      }
    for (int j = 0; j < 16; ++j) lanes[lane + j] = sum[j];
  }
  for (int left = kLanes / 2; left > 0; left /= 2)
    for (int i = 0; i < left; ++i) lanes[i] = lanes[2 * i] + lanes[2 * i + 1];
  return lanes[0];
}

void add_scaled(float* __restrict total, const float* __restrict x, float multiplier, int n) {
  for (int i = 0; i < n; ++i) total[i] = canonical(fma(x[i], multiplier, total[i]));
}

constexpr Unit make_unit() {
  Unit unit{};
#define SCRUPLE_FORMAT(number, name, roles, k, Signed, Nonneg) \
  unit.codecs[number][0] = codec_fns<Signed>();                \
  unit.codecs[number][1] = codec_fns<Nonneg>();
#include "formats/formats.def"
#undef SCRUPLE_FORMAT
#define SCRUPLE_OPTIMIZER(number, Rule) add_update<Rule, 0>(unit.update[number]);
#include "optim/optim.def"
#undef SCRUPLE_OPTIMIZER
#if SCRUPLE_LANES
  add_fused(unit);
#endif
  unit.sum_squares = sum_squares;
  unit.add_scaled = add_scaled;
  return unit;
}

}  // namespace

extern const Unit kUnit;
constinit const Unit kUnit = make_unit();  // no code of this unit runs at load

}  // namespace SCRUPLE_UNIT
}  // namespace scruple
