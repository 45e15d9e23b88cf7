// fp16: IEEE half precision; 5 exponent bits, 11 significant bits, subnormals down to 2^-24. As a weight a
// finite value beyond 65504 is stored as 65504: nobody trains on infinities. As a gradient it becomes
// infinity, as in IEEE, or loss scaling could not see that it overflowed.
#pragma once

#include "formats/codec.h"

namespace scruple {
inline namespace SCRUPLE_UNIT {

struct Fp16 {
  static constexpr const char* doc =
      "IEEE half precision; beyond 65504 weights saturate, gradients become infinite";
  static constexpr int fraction_bits = 13;
  static constexpr double relative = 0x1p-11, absolute = 0x1p-25;

  static constexpr u32 kMinNormal = 113u << 23;  // 2^-14 as fp32
  static constexpr u32 kMax = 0x477fe000u;       // 65504 as fp32
  static constexpr u32 kRebias = 112u << 23;     // between the two exponent biases
  static constexpr u32 kInfinity = 0x7c000000u;  // positions
  static constexpr u32 kNaN = 0x7e000000u;
  static constexpr u32 kFirstNormal = 0x04000000u;
  static constexpr float kOverflow = 65520.0f;  // the least that IEEE rounds to infinity

  // A value's place on the line of fp16 numbers, in units of 2^-16 of a gap, the sign in bit 31. Normal
  // values keep all 13 lower bits of fp32; below 2^-14 the line is linear and bits under 2^-40 are dropped.
  template <bool Finite = false>  // x is
  static SCRUPLE_HD u32 position(float x) {
    const u32 a = magnitude_bits(x), sign = bits_of(x) & 0x80000000u;
    const u32 saturated = a < kMax ? a : kMax;
    const u32 normal = (saturated - kRebias) << 3;
#if defined(__CUDA_ARCH__)  // conversions to integers are slow there; shifts by 32 and more give zero
    const u32 significand = (saturated << 3 & (kFirstNormal - 1u)) | kFirstNormal;
    u32 tiny;
    asm("shr.b32 %0, %1, %2;" : "=r"(tiny) : "r"(significand), "r"(113u - (saturated >> 23)));
#else
    const u32 tiny = static_cast<u32>(static_cast<i32>(float_of(a < kMinNormal ? a : 0u) * 0x1p40f));
#endif
    u32 p = a < kMinNormal ? tiny : normal;
    if constexpr (!Finite) {
      p = a == 0x7f800000u ? kInfinity : p;
      p = a > 0x7f800000u ? kNaN : p;
    }
    return p | sign;
  }
  // k: extra bits that the position was kept with. Not Careful: an infinity comes out as NaN.
  template <bool Careful = true>
  static SCRUPLE_HD float value(u32 position, [[maybe_unused]] int k = 16) {
    const u32 p = position & 0x7fffffffu, sign = position & 0x80000000u;
    const float tiny = static_cast<float>(static_cast<i32>(p)) * 0x1p-40f;
    u32 b = p < kFirstNormal ? bits_of(tiny) : (p >> 3) + kRebias;
#if defined(__CUDA_ARCH__)  // subnormals cost nothing there, and the three lowest bits are zero
    if (k <= 13) b = bits_of(float_of(p >> 3) * 0x1p112f);
#endif
    b = p >= kInfinity ? (Careful ? 0x7f800000u : kNaNBits) : b;
    if constexpr (Careful) b = p >= kInfinity + 0x10000u ? kNaNBits : b;
    return float_of(b | sign);
  }

  // IEEE conversion, ties to even, overflow to infinity.
  static SCRUPLE_HD u16 ieee(float x) {
    const u32 a = magnitude_bits(x), sign = bits_of(x) >> 16 & 0x8000u;
    const u32 normal = (a + 0xfffu + (a >> 13 & 1u) - kRebias) >> 13;
    const u32 tiny = bits_of(magnitude(x) + 0.5f) - 0x3f000000u;  // the addition rounds at 2^-24
    u32 h = a < kMinNormal ? tiny : normal;
    h = a >= 0x477ff000u ? 0x7c00u : h;
    return static_cast<u16>((a > 0x7f800000u ? 0x7e00u : h) | sign);
  }
  static SCRUPLE_HD u16 nearest(float x) {
    const u16 h = ieee(x);
    const bool overflowed = (h & 0x7fffu) == 0x7c00u && magnitude_bits(x) != 0x7f800000u;
    return static_cast<u16>(h - (overflowed ? 1u : 0u));
  }
  static SCRUPLE_HD float decode(u16 code) {
#if defined(__CUDA_ARCH__)
    float x;
    asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(code));
    return x;
#else
    return value(static_cast<u32>(code) << 16);
#endif
  }
};

}  // namespace SCRUPLE_UNIT
}  // namespace scruple
