// 16 codes of a group format to vectors of floats and back, for the fused steps (engine/fused.h).
#pragma once

#include "engine/lanes.h"
#include "formats/formats.def"

#if SCRUPLE_LANES
namespace scruple {
inline namespace SCRUPLE_UNIT {
namespace {

// The coins of a run of elements, a vector of them at a time.
struct CoinLanes {
  Words at, stride;

  explicit SCRUPLE_HD CoinLanes(Coins coins)
      : at(lane_numbers() * coins.step + coins.first), stride(coins.step * kLanes) {}
  SCRUPLE_HD Words next() {
    const Words coin = at;
    at = at + stride;
    return coin;
  }
};

template <class C>
inline constexpr int kCodeBytes = C::bits <= 8 ? 1 : 2;
template <class C>
SCRUPLE_HD auto load_codes(const u8* from) {
  if constexpr (kCodeBytes<C> == 1)
    return load_bytes(from);
  else
    return load_halves(from);
}
SCRUPLE_HD Words upper_codes(Bytes16 codes, int part) { return upper_bytes(codes, part); }
SCRUPLE_HD Words upper_codes(const Halves16& codes, int part) { return upper_halves(codes, part); }
template <class C>
struct BlockCodec {
  struct Raw {
    decltype(load_codes<C>(nullptr)) codes;
    Floats unit;
  };
  static SCRUPLE_HD Raw prepare(const auto& codes, float unit) { return {codes, unit}; }
  static SCRUPLE_HD Floats decode(const Raw& raw, int part) {
    return C::decode_lanes(upper_codes(raw.codes, part), raw.unit);
  }
  static SCRUPLE_HD void encode(const float* in, float gain, CoinLanes& coin, u8* to) {
    Words code[kParts];
    SCRUPLE_UNROLL
    for (int j = 0; j < kParts; ++j)
      code[j] = C::encode_lanes(load_floats(in + j * kLanes), Floats(gain), coin.next());
    if constexpr (kCodeBytes<C> == 1)
      store_upper_bytes(code, to);
    else
      store_upper_halves(code, to);
  }
};

}  // namespace
}  // namespace SCRUPLE_UNIT
}  // namespace scruple
#endif
