// engine/block_codec.h on NEON, where bytes are cheaper than words: companded8 and log5, to the same bits,
// with as many steps as possible done to 16 bytes at once.
#pragma once

#include "engine/block_codec.h"

#if SCRUPLE_LANES == 4
namespace scruple {
inline namespace SCRUPLE_UNIT {
namespace {

// a b + *c. NEON multiplies onto the register of the addend, so an addend that is used again must be copied.
// A copy through the load pipes is free; one through the vector pipes is not.
SCRUPLE_HD Floats fma_onto(const volatile Floats::Native& c, Floats a, Floats b) {
  return fma(a, b, Floats(c));
}
inline const volatile Floats::Native kOnes = {1, 1, 1, 1};

SCRUPLE_HD Halves16 zipped(uint8x16_t lower, uint8x16_t upper) {
  return {vreinterpretq_u16_u8(vzip1q_u8(lower, upper)), vreinterpretq_u16_u8(vzip2q_u8(lower, upper))};
}

// companded8 in narrower steps, to the same bits: what a byte can do is done to 16 at once. (1 + t) in fp32
// is 0x3f80 + 8 code in its upper half, so its two bytes come from the code's.
struct MuLawBytes {
  // The upper halves of 16 floats; `sign` goes on top.
  static SCRUPLE_HD Halves16 halves(uint8x16_t code, uint8x16_t sign) {
    const uint8x16_t lower = veorq_u8(vshlq_n_u8(code, 3), vdupq_n_u8(0x80));
    const uint8x16_t upper = vorrq_u8(vaddq_u8(vrshrq_n_u8(code, 5), vdupq_n_u8(0x3f)), sign);
    return zipped(lower, upper);
  }
  // The codes of 1 + t, magnitudes given: bits 19 to 26.
  static SCRUPLE_HD uint8x16_t codes(const Floats (&magnitude)[4], Floats gain, CoinLanes& coin) {
    uint16x8_t upper[2];
    SCRUPLE_UNROLL
    for (int j = 0; j < 2; ++j) {
      const Words first = coin.next(), second = coin.next();
      const uint16x8_t coins = upper_halves_of(first, second);
      const uint32x4_t a = fma_onto(kOnes, magnitude[2 * j], gain);
      const uint32x4_t b = fma_onto(kOnes, magnitude[2 * j + 1], gain);
      upper[j] =
          vaddhn_high_u32(vaddhn_u32(a, vshll_n_u16(vget_low_u16(coins), 3)), b, vshll_high_n_u16(coins, 3));
    }
    return vaddq_u8(vshrn_high_n_u16(vshrn_n_u16(upper[0], 3), upper[1], 3), vdupq_n_u8(0x10));
  }
};

// The upper halves of 16 floats, from which values are decoded, and the group's unit.
struct HalvesCodec {
  struct Raw {
    Halves16 halves;
    Floats unit;
  };
};

template <>
struct BlockCodec<Companded8> : HalvesCodec {  // the halves are those of -(1 + t), with the sign
  static SCRUPLE_HD Raw prepare(Bytes16 codes, float unit) {
    const uint8x16_t top = vdupq_n_u8(0x80);
    return {MuLawBytes::halves(vbicq_u8(codes, top), vbicq_u8(top, codes)), unit};
  }
  static SCRUPLE_HD Floats decode(const Raw& raw, int part) {
    const Floats minus_f = float_of(upper_halves(raw.halves, part));
    return fma(-minus_f, raw.unit, with_sign_of(minus_f, raw.unit));
  }
  static SCRUPLE_HD void encode(const float* in, float gain, CoinLanes& coin, u8* to) {
    Floats x[4], magnitudes[4];
    SCRUPLE_UNROLL
    for (int j = 0; j < 4; ++j) {
      x[j] = load_floats(in + 4 * j);
      magnitudes[j] = magnitude(x[j]);
    }
    const uint8x16_t codes = MuLawBytes::codes(magnitudes, gain, coin);
    const uint8x16_t signs = upper_bytes_of(upper_halves_of(bits_of(x[0]), bits_of(x[1])),
                                            upper_halves_of(bits_of(x[2]), bits_of(x[3])));
    vst1q_u8(to, vbslq_u8(vdupq_n_u8(0x80), signs, codes));
  }
};

template <>
struct BlockCodec<Companded8Nonneg> : HalvesCodec {
  static SCRUPLE_HD Raw prepare(Bytes16 codes, float unit) {
    return {MuLawBytes::halves(codes, vdupq_n_u8(0)), unit};
  }
  static SCRUPLE_HD Floats decode(const Raw& raw, int part) {
    return fma(float_of(upper_halves(raw.halves, part)), raw.unit, -raw.unit);
  }
  // None of them has a sign: fused_loop would have seen it.
  static SCRUPLE_HD void encode(const float* in, float gain, CoinLanes& coin, u8* to) {
    Floats x[4];
    SCRUPLE_UNROLL
    for (int j = 0; j < 4; ++j) x[j] = load_floats(in + 4 * j);
    vst1q_u8(to, vmaxq_u8(MuLawBytes::codes(x, gain, coin), vdupq_n_u8(1)));
  }
};

// log5 likewise. A level, which is at most 1 = 254, is a byte: bits 22 to 29 of the float's pattern.
template <>
struct BlockCodec<Log<5>> : HalvesCodec {
  using L = Log<5>;
  static SCRUPLE_HD Raw prepare(Bytes16 codes, float unit) {
    const uint8x16_t level = vsubq_u8(vdupq_n_u8(L::one), codes);
    return {zipped(vshlq_n_u8(level, 6), vshrq_n_u8(level, 2)), unit};
  }
  static SCRUPLE_HD Floats decode(const Raw& raw, int part) {
    return float_of(upper_halves(raw.halves, part)) * raw.unit;
  }
  static SCRUPLE_HD void encode(const float* in, float gain, CoinLanes& coin, u8* to) {
    uint32x4_t sum[4];
    SCRUPLE_UNROLL
    for (int j = 0; j < 4; ++j) {
      const Words bits = bits_of(load_floats(in + 4 * j) * gain);
      sum[j] = vsraq_n_u32(bits, coin.next(), 32 - L::shift);
    }
    const auto level = [&](int j) { return upper_halves_of(sum[j], sum[j + 1]); };
    const uint8x16_t levels = vshrn_high_n_u16(vshrn_n_u16(level(0), L::shift - 16), level(2), L::shift - 16);
    vst1q_u8(to, vminq_u8(vqsubq_u8(vdupq_n_u8(L::one), levels), vdupq_n_u8(L::lowest)));
  }
};

}  // namespace
}  // namespace SCRUPLE_UNIT
}  // namespace scruple
#endif
