// nf4: 4-bit signed moments on the quantiles of a normal distribution (Dettmers et al., 2305.14314, appendix
// E). Groups of 64 share an fp32 scale = absmax; two codes to a byte, the first in the low nibble.
#pragma once

#include "formats/codec.h"

namespace scruple {
inline namespace SCRUPLE_UNIT {

struct Nf4 {
  static constexpr const char* doc = "4-bit normal-float quantiles, groups of 64";
  static constexpr int group = 64, bits = 4;
  using Scale = float;
  static constexpr unsigned roundings = 1u << kNearest | 1u << kStochastic;
  static constexpr Layout layout(int) { return {4, 32, group}; }
  static constexpr Bound bound(int) {
    return {0, 0.5 * (1.0 - 0.6961928) + 0x1p-22, 0x1p-126};
  }  // half the widest gap

  static SCRUPLE_HD float level(u32 code) {
    static constexpr float kLevels[16] = {-1.0f,        -0.69619280f, -0.52507305f, -0.39491749f,
                                          -0.28444138f, -0.18477343f, -0.09105004f, 0.0f,
                                          0.07958030f,  0.16093020f,  0.24611230f,  0.33791524f,
                                          0.44070983f,  0.56261700f,  0.72295684f,  1.0f};
    return kLevels[code];
  }
  static SCRUPLE_HD Scale scale(float absmax) { return group_unit(absmax, 1.0f); }
  static SCRUPLE_HD float gain(float, Scale scale) { return scale > 0 ? 1.0f / scale : 0.0f; }
  static SCRUPLE_HD float unit(Scale scale) { return scale; }
  // Between two levels the threshold lies where the coin puts it: midway for nearest, the upper one at most.
  static SCRUPLE_HD float threshold(u32 i, float share) {
    return fma(share, level(i + 1) - level(i), level(i));
  }
  static SCRUPLE_HD u32 encode(float x, float gain, u32 coin) {
    const float y = x * gain, share = 1.0f - coin_fraction(coin & 0xffff0000u);
    u32 code = 0;
#if defined(__CUDA_ARCH__)  // the level below y by halving; vectors rather pass all thresholds
    for (u32 half = 8; half > 0; half /= 2) code += y >= level(code + half) ? half : 0u;
    const u32 below = code < 14u ? code : 14u;
    return below + (y >= threshold(below, share) ? 1u : 0u);
#else
    for (u32 i = 0; i < 15; ++i) code += y >= threshold(i, share) ? 1u : 0u;
    return code;
#endif
  }
  static SCRUPLE_HD float decode(u32 code, float scale) { return level(code & 15u) * scale; }
};

}  // namespace SCRUPLE_UNIT
}  // namespace scruple
