// bf16+K and fp16+K: a weight as a 16-bit visible half, which the model computes with, and K extra bits that
// only the optimizer reads. Together they hold the weight to 16 + K bits.
//
// Lewandowski and Kosson (2309.12381) keep the difference between the fp32 and the 16-bit weight; FlashOptim
// (2602.23349) bounds it by the ulp. Here both halves are one integer, the weight's position p on the line of
// 16-bit numbers in units of 2^-16 of a gap (Half::position), so that splitting needs no floating-point
// arithmetic, is right for subnormals, and with K = 16 returns every bit. p is first rounded to the bits that
// can be kept; then the split is exact:
//   nearest     visible = the nearest 16-bit number, ties away from zero; extra = the signed rest. Zero
//               extra bits mean that the wide value is the visible one.
//   truncate    visible = the next 16-bit number towards zero; extra = the rest.
//   stochastic  visible = one of the two neighbours, drawn so that its mean is the wide value; the lowest
//               extra bit records the direction, the other K - 1 hold the rest, themselves rounded
//               stochastically with the random bits that the direction does not use.
//   wide        as nearest, but p is rounded stochastically: steps however small add up, on average, and the
//               model still computes with the nearest 16-bit number. Read as nearest.
// Specials: NaN stays NaN and infinity infinity in both halves. In bf16+K the visible half of a finite value
// at or above 0x1.ffp127 is infinity; the wide value stays finite for K = 16, and for fewer bits rounds to
// infinity only within half a kept step of the largest float, as in IEEE. In fp16+K finite values saturate at
// 65504.
#pragma once

#include "formats/bf16.h"
#include "formats/fp16.h"

namespace scruple {
inline namespace SCRUPLE_UNIT {

template <class U>
struct HalvesOf {
  U visible;
  U extra;
};
using Halves = HalvesOf<u32>;

// Splits p without moving its bits: the visible half is in bits 16 to 31, the extra bits are in bits 16 - k
// to 15. The other bits of both results mean nothing.
template <Rounding R, class U>
SCRUPLE_HD HalvesOf<U> split_in_place(U p, int k, U coin) {
  if constexpr (R == kStochastic) {
    // The coin's upper bits round the wide value; those below decide the direction: up where the rest is
    // above them.
    const u32 dropped = (1u << (17 - k)) - 1u;
    const U wide = (p + (coin >> 15 >> k)) & ~dropped;
    const U visible = wide + ((~(coin >> (k - 1)) | dropped) & 0xffffu);
    return {visible, (wide & 0xffffu) | ((visible ^ wide) >> k & 1u << (16 - k))};
  }
  if constexpr (R == kTruncate) return {p, p};
  if constexpr (R == kWide) {
    const U wide = p + (coin >> 16 >> k);
    return {wide + 0x8000u, wide};
  }
  // Ties to even: with few bits dropped ties are common, and upwards they would make weights grow.
  const u32 dropped = (1u << (16 - k)) - 1u;
  const U wide = p + (dropped >> 1) + (p >> (16 - k) & dropped & 1u);
  return {wide + 0x8000u, wide};
}

template <Rounding R>
SCRUPLE_HD Halves split(u32 p, int k, u32 coin) {
  const Halves h = split_in_place<R>(p, k, coin);
  return {h.visible >> 16, (h.extra & 0xffffu) >> (16 - k)};
}

template <Rounding R, bool MayBeZero = true>
SCRUPLE_HD u32 join(u32 visible, u32 extra, int k) {
  if constexpr (R == kTruncate) return (visible << 16) + (extra << (16 - k));
  // Somebody else may set a visible weight to zero and leave its extra bits. Where they point below zero they
  // are ignored; split() never makes such a pair.
  const bool is_zero = MayBeZero && (visible & 0x7fffu) == 0;
  if constexpr (R == kStochastic) {
    const u32 up = is_zero ? 0u : extra & 1u;
    return ((visible - up) << 16) + (extra >> 1 << (17 - k));
  }
  const auto rest = static_cast<std::int16_t>(extra << (16 - k));
  const auto kept = static_cast<std::int16_t>(is_zero && rest < 0 ? 0 : rest);
  return (visible << 16) + static_cast<u32>(i32{kept});
}

template <class HalfType>
struct Split {
  using Half = HalfType;
  static constexpr const char* doc = "16-bit weight plus K extra bits that only the optimizer reads";
  static constexpr unsigned roundings = 1u << kNearest | 1u << kTruncate | 1u << kStochastic | 1u << kWide;
  static constexpr Layout layout(int k) { return {16, k, 1}; }
  static constexpr Bound bound(int k) {
    const double step = 1.0 / static_cast<double>(1u << k);
    return {k < Half::fraction_bits ? Half::relative * step : 0.0, 0,
            k < 16 || Half::fraction_bits < 16 ? 2 * Half::absolute * step : 0.0};
  }
};

}  // namespace SCRUPLE_UNIT
}  // namespace scruple
