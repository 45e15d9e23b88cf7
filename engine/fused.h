// Fused steps: decode, update and encode in vector registers, for the mixtures of formats that recipes name.
// One loop reads and updates a span of 128 elements and keeps the largest magnitude of each group; then all
// of the span is written. A span with a NaN, an infinity, or a weight that somebody else has set to zero
// (formats/split.h) is left unwritten and goes to the tile loops of engine/unit.cpp, so nothing here handles
// special values. Included by engine/unit.cpp alone.
#pragma once

#include <type_traits>

#include "engine/block_codec.h"
#include "engine/block_codec_neon.h"
#include "engine/strings.h"
#include "engine/unit.h"
#include "formats/formats.def"
#include "optim/optim.def"

namespace scruple {
inline namespace SCRUPLE_UNIT {
#if SCRUPLE_LANES
namespace {

static_assert(kSpan % kBlock == 0);

// How many elements ahead cache lines are asked for; measured in bench/results/2026-11-16-cpu-fused.md.
inline constexpr i64 kAhead = 2048;
SCRUPLE_HD void prefetch_of(const u8* from, int bytes) {
  for (int i = 0; i < bytes; i += 64) __builtin_prefetch(from + i);
}

// How one array of a span is read, 16 elements at a time, and written, all 128 at once. Raw: the bytes of 16
// elements. Codes: where a whole span is unpacked first if its codes do not fill bytes.
template <class C, int K, Rounding R>
struct SpanOf;

// Without groups, and so without scales.
struct EachSpan {
  static constexpr int kGroups = 1;
  static constexpr bool kScaled = false;
  struct Codes {};
  static SCRUPLE_HD void open(Planes, i64, Codes&) {}
  static SCRUPLE_HD Floats scale(Floats, Planes, i64) { return 0.0f; }
};

template <int K, Rounding R>
struct SpanOf<Rounded<Bf16>, K, R> : EachSpan {
  using Raw = Halves16;
  static SCRUPLE_HD void prefetch(Planes p, i64 at) { prefetch_of(p.codes + 2 * at, 2 * kSpan); }
  static SCRUPLE_HD Raw load(Planes p, i64 at, Codes) { return load_halves(p.codes + 2 * at); }
  static SCRUPLE_HD Floats decode(const Raw& raw, int part) { return float_of(upper_halves(raw, part)); }
};

template <Rounding R>
struct SpanOf<Split<Bf16>, 8, R> : EachSpan {
  struct Raw {
    Halves16 visible;
    Bytes16 extra;
  };
  static SCRUPLE_HD void prefetch(Planes p, i64 at) {
    prefetch_of(p.codes + 2 * at, 2 * kSpan);
    prefetch_of(p.aux + at, kSpan);
  }
  static SCRUPLE_HD Raw load(Planes p, i64 at, Codes) {
    return {load_halves(p.codes + 2 * at), load_bytes(p.aux + at)};
  }
  // join() of formats/split.h, except that a zero whose extra bits point below it becomes a NaN.
  static SCRUPLE_HD Floats decode(const Raw& raw, int part) {
    return float_of(upper_halves_and_signed_bytes(raw.visible, raw.extra, part));
  }
  static SCRUPLE_HD void encode(const float* in, Floats, Planes p, i64 at, Coins coins) {
    CoinLanes coin(coins);
    for (int i = 0; i < kSpan; i += kBlock) {
      Words visible[kParts], extra[kParts];
      SCRUPLE_UNROLL
      for (int j = 0; j < kParts; ++j) {
        const auto h = split_in_place<R>(bits_of(load_floats(in + i + j * kLanes)), 8, coin.next());
        visible[j] = h.visible;
        extra[j] = h.extra;
      }
      store_upper_halves(visible, p.codes + 2 * (at + i));
      store_second_bytes(extra, p.aux + at + i);
    }
  }
};

// Whether a codec serves non-negative moments alone.
template <class C>
constexpr bool is_nonneg_codec() {
#define SCRUPLE_FORMAT(number, name, roles, k, Signed, Nonneg) \
  if (std::is_same_v<C, Signed>) return false;
#include "formats/formats.def"
#undef SCRUPLE_FORMAT
  return true;
}

// Group formats that have vector formulas. Codes that do not fill bytes are unpacked to 1 or 2 bytes each, a
// span at a time.
template <class C, int K, Rounding R>
requires requires(Floats x, Words coin) { C::encode_lanes(x, x, coin); }
struct SpanOf<C, K, R> {
  // The bits that count as magnitude. A non-negative moment has a sign bit only if it is a NaN: counted as
  // magnitude, it makes that NaN the largest value of its group.
  static constexpr u32 kMagnitude = is_nonneg_codec<C>() ? 0xffffffffu : 0x7fffffffu;
  static constexpr int kGroups = kSpan / C::group, kBytes = kSpan / 8 * C::bits;
  static constexpr bool kScaled = true;
  struct Codes {
    ValueOf<C::bits> of[C::bits == 8 ? 1 : kSpan];
    SCRUPLE_HD u8* bytes() { return reinterpret_cast<u8*>(of); }
    SCRUPLE_HD const u8* bytes() const { return reinterpret_cast<const u8*>(of); }
  };
  static SCRUPLE_HD void prefetch(Planes p, i64 at) { prefetch_of(p.codes + at / 8 * C::bits, kBytes); }
  static SCRUPLE_HD void open(Planes p, i64 at, Codes& codes) {
    if constexpr (C::bits != 8) unpack<C::bits>(p.codes + at / 8 * C::bits, kSpan, codes.of);
  }
  using Raw = typename BlockCodec<C>::Raw;
  static SCRUPLE_HD Raw load(Planes p, i64 at, const Codes& codes) {
    typename C::Scale scale;
    __builtin_memcpy(&scale, p.aux + at / C::group * static_cast<i64>(sizeof scale), sizeof scale);
    const u8* from = C::bits == 8 ? p.codes + at : codes.bytes() + at % kSpan * kCodeBytes<C>;
    return BlockCodec<C>::prepare(load_codes<C>(from), C::unit(scale));
  }
  static SCRUPLE_HD Floats decode(const Raw& raw, int part) { return BlockCodec<C>::decode(raw, part); }

  // Writes the scales to their plane and returns the gains, one group per lane.
  static SCRUPLE_HD Floats scale(Floats absmax, Planes p, i64 at) {
    u8* const to = p.aux + at / C::group * static_cast<i64>(sizeof(typename C::Scale));
    if constexpr (std::is_same_v<typename C::Scale, float>) {
      const Floats scale = C::scale(absmax);
      __builtin_memcpy(to, &scale, kGroups * sizeof(float));
      return C::gain(absmax, scale);
    } else {
      Floats gain = 0.0f;
      for (int g = 0; g < kGroups; ++g) {
        const typename C::Scale scale = C::scale(absmax.v[g]);
        __builtin_memcpy(to + g * static_cast<i64>(sizeof scale), &scale, sizeof scale);
        gain.v[g] = C::gain(absmax.v[g], scale);
      }
      return gain;
    }
  }
  static SCRUPLE_HD void encode(const float* in, Floats gain, Planes p, i64 at, Coins coins) {
    CoinLanes coin(coins);
    Codes codes;
    u8* to = C::bits == 8 ? p.codes + at : codes.bytes();
    for (int g = 0; g < kGroups; ++g, in += C::group, to += C::group * kCodeBytes<C>)
      for (int i = 0; i < C::group; i += kBlock)
        BlockCodec<C>::encode(in + i, gain.v[g], coin, to + i * kCodeBytes<C>);
    if constexpr (C::bits != 8) pack<C::bits>(codes.of, kSpan, p.codes + at / 8 * C::bits);
  }
};
// A slot that is not in use.
struct NoSpan : EachSpan {
  struct Raw {};
  static SCRUPLE_HD void prefetch(Planes, i64) {}
  static SCRUPLE_HD Raw load(Planes, i64, Codes) { return {}; }
  static SCRUPLE_HD Floats decode(Raw, int) { return 0.0f; }
  static SCRUPLE_HD void encode(const float*, Floats, Planes, i64, Coins) {}
};

template <class Rule, unsigned Active, class Weight, class Gradient, class Slot0, class Slot1>
i64 fused_loop(const FusedStep& work, i64 first, i64 last) {
  constexpr int kSlots = sizeof(Rule::slots) / sizeof(Slot);
  constexpr int kGroups[] = {Weight::kGroups, Slot0::kGroups, Slot1::kGroups};
  constexpr int kMost = kGroups[0] > kGroups[1] ? kGroups[0] : kGroups[1];
  constexpr int kRun = kSpan / (kMost > kGroups[2] ? kMost : kGroups[2]);
  const typename Rule::Step k = *static_cast<const typename Rule::Step*>(work.step);
  const IeeeMath math{work.spread};
  const Floats multiplier = work.multiplier;
  alignas(64) float w[kSpan], s0[kSpan], s1[kSpan];
  for (; first + kSpan <= last; first += kSpan) {
    Words most_w[Weight::kGroups], most0[Slot0::kGroups], most1[Slot1::kGroups];
    for (Words& most : most_w) most = 0u;
    for (Words& most : most0) most = 0u;
    for (Words& most : most1) most = 0u;
    const i64 ahead = first + kAhead;
    Gradient::prefetch(work.gradient.planes, ahead);
    Weight::prefetch(work.weight.planes, ahead);
    Slot0::prefetch(work.slots[0].planes, ahead);
    Slot1::prefetch(work.slots[1].planes, ahead);
    typename Gradient::Codes codes_g;
    typename Weight::Codes codes_w;
    typename Slot0::Codes codes0;
    typename Slot1::Codes codes1;
    Gradient::open(work.gradient.planes, first, codes_g);
    Weight::open(work.weight.planes, first, codes_w);
    Slot0::open(work.slots[0].planes, first, codes0);
    Slot1::open(work.slots[1].planes, first, codes1);
    Floats sum = 0.0f;                             // a NaN among the weights makes it one
    for (int run = 0; run < kSpan; run += kRun) {  // of elements that share their groups
      Words max_w = 0u, max0 = 0u, max1 = 0u;
      for (int i = run; i < run + kRun; i += kBlock) {
        const i64 at = first + i;
        const auto raw_g = Gradient::load(work.gradient.planes, at, codes_g);
        const auto raw_w = Weight::load(work.weight.planes, at, codes_w);
        const auto raw0 = Slot0::load(work.slots[0].planes, at, codes0);
        const auto raw1 = Slot1::load(work.slots[1].planes, at, codes1);
        SCRUPLE_UNROLL
        for (int j = 0; j < kParts; ++j) {
          Elem<kSlots, Floats> e{};
          e.w = Weight::decode(raw_w, j);
          if constexpr (Active & 1) e.s[0] = Slot0::decode(raw0, j);
          if constexpr (Active & 2) e.s[1] = Slot1::decode(raw1, j);
          e = Rule::template update<Active>(e, Gradient::decode(raw_g, j) * multiplier, k, math);
          sum = sum + e.w;
          if constexpr (Weight::kScaled) max_w = larger(max_w, bits_of(e.w) & Weight::kMagnitude);
          store(e.w, w + i + j * kLanes);
          if constexpr (Active & 1) {
            max0 = larger(max0, bits_of(e.s[0]) & Slot0::kMagnitude);
            store(e.s[0], s0 + i + j * kLanes);
          }
          if constexpr (Active & 2) {
            max1 = larger(max1, bits_of(e.s[1]) & Slot1::kMagnitude);
            store(e.s[1], s1 + i + j * kLanes);
          }
        }
      }
      Words& most_of_w = most_w[run * Weight::kGroups / kSpan];
      Words& most_of0 = most0[run * Slot0::kGroups / kSpan];
      Words& most_of1 = most1[run * Slot1::kGroups / kSpan];
      most_of_w = larger(most_of_w, max_w);
      most_of0 = larger(most_of0, max0);
      most_of1 = larger(most_of1, max1);
    }
    Words absmax_w = 0u, absmax0 = 0u, absmax1 = 0u;
    if constexpr (Weight::kScaled) absmax_w = largest_of_each(most_w);
    if constexpr (Slot0::kScaled) absmax0 = largest_of_each(most0);
    if constexpr (Slot1::kScaled) absmax1 = largest_of_each(most1);
    if (reaches(larger(larger(absmax_w, larger(absmax0, absmax1)), magnitude_bits(sum - sum)), 0x7f800000u))
      return first;
    const auto gain_w = Weight::scale(float_of(absmax_w), work.weight.planes, first);
    const auto gain0 = Slot0::scale(float_of(absmax0), work.slots[0].planes, first);
    const auto gain1 = Slot1::scale(float_of(absmax1), work.slots[1].planes, first);
    Weight::encode(w, gain_w, work.weight.planes, first, work.weight.coins.from(first));
    Slot0::encode(s0, gain0, work.slots[0].planes, first, work.slots[0].coins.from(first));
    Slot1::encode(s1, gain1, work.slots[1].planes, first, work.slots[1].coins.from(first));
  }
  return first;
}

}  // namespace
#endif
}  // namespace SCRUPLE_UNIT
}  // namespace scruple
