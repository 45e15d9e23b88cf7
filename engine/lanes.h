// Vectors of floats and of 32-bit words as number types: the formulas of formats/ and optim/ that are written
// over any number type run on them, kLanes elements at a time. Each operation is one or two instructions, and
// IEEE's. Where SCRUPLE_LANES is 0 there are no vectors here, and the tiles do all the work.
#pragma once

#include "formats/codec.h"

#if defined(SCRUPLE_PLAIN)
#define SCRUPLE_LANES 0
#elif defined(__AVX512BW__)
#define SCRUPLE_LANES 16
#elif defined(__AVX2__) && defined(__FMA__)
#define SCRUPLE_LANES 8
#elif defined(__aarch64__)
#define SCRUPLE_LANES 4
#else
#define SCRUPLE_LANES 0
#endif

#if SCRUPLE_LANES == 4
#include <arm_neon.h>
#elif SCRUPLE_LANES
#if !defined(__clang__)  // GCC 12 takes the undefined vectors of its own header for a mistake
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif
#include <immintrin.h>
#if !defined(__clang__)
#pragma GCC diagnostic pop
#endif
#endif

#if defined(__clang__)
#define SCRUPLE_UNROLL _Pragma("clang loop unroll(full)")
#else
#define SCRUPLE_UNROLL _Pragma("GCC unroll 16")
#endif

namespace scruple {
inline namespace SCRUPLE_UNIT {

#if SCRUPLE_LANES
inline constexpr int kLanes = SCRUPLE_LANES;
// Codes are read and written 16 elements at a time: kParts vectors.
inline constexpr int kBlock = 16, kParts = kBlock / kLanes;

struct Words {
  typedef u32 Native __attribute__((vector_size(4 * kLanes)));
  Native v;

  Words() = default;
  SCRUPLE_HD Words(Native native) : v(native) {}
  SCRUPLE_HD Words(u32 x) : v(Native{} + x) {}

  friend SCRUPLE_HD Words operator+(Words a, Words b) { return a.v + b.v; }
  friend SCRUPLE_HD Words operator-(Words a, Words b) { return a.v - b.v; }
  friend SCRUPLE_HD Words operator*(Words a, Words b) { return a.v * b.v; }
  friend SCRUPLE_HD Words operator&(Words a, Words b) { return a.v & b.v; }
  friend SCRUPLE_HD Words operator|(Words a, Words b) { return a.v | b.v; }
  friend SCRUPLE_HD Words operator^(Words a, Words b) { return a.v ^ b.v; }
  friend SCRUPLE_HD Words operator~(Words a) { return ~a.v; }
  friend SCRUPLE_HD Words operator<<(Words a, int n) { return a.v << n; }
  friend SCRUPLE_HD Words operator>>(Words a, int n) { return a.v >> n; }
  // All bits set where it holds.
  friend SCRUPLE_HD Words operator<(Words a, Words b) { return reinterpret_cast<Native>(a.v < b.v); }
  friend SCRUPLE_HD Words operator>=(Words a, Words b) { return reinterpret_cast<Native>(a.v >= b.v); }
};

struct Floats {
  typedef float Native __attribute__((vector_size(4 * kLanes)));
  Native v;

  Floats() = default;
  SCRUPLE_HD Floats(Native native) : v(native) {}
  SCRUPLE_HD Floats(float x) : v(reinterpret_cast<Native>(Words(bits_of(x)).v)) {}

  friend SCRUPLE_HD Floats operator+(Floats a, Floats b) { return a.v + b.v; }
  friend SCRUPLE_HD Floats operator-(Floats a, Floats b) { return a.v - b.v; }
  friend SCRUPLE_HD Floats operator*(Floats a, Floats b) { return a.v * b.v; }
  friend SCRUPLE_HD Floats operator/(Floats a, Floats b) { return a.v / b.v; }
  friend SCRUPLE_HD Floats operator-(Floats a) { return -a.v; }
  friend SCRUPLE_HD Words operator>(Floats a, Floats b) { return reinterpret_cast<Words::Native>(a.v > b.v); }
};

SCRUPLE_HD Words bits_of(Floats x) { return reinterpret_cast<Words::Native>(x.v); }
SCRUPLE_HD Floats float_of(Words x) { return reinterpret_cast<Floats::Native>(x.v); }
SCRUPLE_HD Words magnitude_bits(Floats x) { return bits_of(x) & 0x7fffffffu; }
SCRUPLE_HD Floats magnitude(Floats x) { return float_of(magnitude_bits(x)); }
SCRUPLE_HD Words select(Words condition, Words yes, Words no) {
  return (condition & yes) | (no & ~condition);
}
SCRUPLE_HD Floats select(Words condition, Floats yes, Floats no) {
  return float_of(select(condition, bits_of(yes), bits_of(no)));
}
SCRUPLE_HD Floats with_sign_of(Floats sign, Floats x) {
  return float_of(select(Words(0x80000000u), bits_of(sign), bits_of(x)));
}

SCRUPLE_HD Floats tame_reciprocal(Floats x) { return 1.0f / x; }
SCRUPLE_HD Floats tame_quotient(Floats a, Floats b) { return a / b; }
SCRUPLE_HD Floats coin_fraction(Words coin) { return float_of((coin >> 9) + 0x3f800000u) - 1.0f; }

// 0, 1, 2 ...
SCRUPLE_HD Words lane_numbers() {
  Words::Native v{};
  for (int i = 0; i < kLanes; ++i) v[i] = static_cast<u32>(i);
  return v;
}

SCRUPLE_HD Floats load_floats(const float* from) {
  Floats::Native v;
  __builtin_memcpy(&v, from, sizeof v);
  return v;
}
SCRUPLE_HD void store(Floats x, float* to) { __builtin_memcpy(to, &x.v, sizeof x.v); }

// ---- What each instruction set calls by a name of its own ----
// Halves and bytes come and go in the uppermost bits of their words.

#if SCRUPLE_LANES == 4  // NEON

SCRUPLE_HD Floats fma(Floats a, Floats b, Floats c) {
  return Floats::Native(vfmaq_f32(float32x4_t(c.v), float32x4_t(a.v), float32x4_t(b.v)));
}
SCRUPLE_HD Floats root(Floats x) { return Floats::Native(vsqrtq_f32(float32x4_t(x.v))); }
SCRUPLE_HD Words larger(Words a, Words b) {
  return Words::Native(vmaxq_u32(uint32x4_t(a.v), uint32x4_t(b.v)));
}
SCRUPLE_HD Words smaller(Words a, Words b) {
  return Words::Native(vminq_u32(uint32x4_t(a.v), uint32x4_t(b.v)));
}
SCRUPLE_HD Words smaller_signed(Words a, Words b) {
  return Words::Native(vreinterpretq_u32_s32(vminq_s32(int32x4_t(a.v), int32x4_t(b.v))));
}
SCRUPLE_HD Words larger_signed(Words a, Words b) {
  return Words::Native(vreinterpretq_u32_s32(vmaxq_s32(int32x4_t(a.v), int32x4_t(b.v))));
}
// Signed words as floats; the floor of floats as signed words.
SCRUPLE_HD Floats number_of(Words a) { return Floats::Native(vcvtq_f32_s32(int32x4_t(a.v))); }
SCRUPLE_HD Words floor_of(Floats x) {
  return Words::Native(vreinterpretq_u32_s32(vcvtmq_s32_f32(float32x4_t(x.v))));
}
// Whether a word is `least` or more.
SCRUPLE_HD bool reaches(Words a, u32 least) { return vmaxvq_u32(uint32x4_t(a.v)) >= least; }
// The largest of each in a lane of its own.
template <int N>
SCRUPLE_HD Words largest_of_each(const Words (&a)[N]) {
  static_assert(N == 1 || N == 2 || N == 4);
  const auto at = [&](int i) { return uint32x4_t(a[i < N ? i : N - 1].v); };
  return Words::Native(vpmaxq_u32(vpmaxq_u32(at(0), at(1)), vpmaxq_u32(at(2), at(3))));
}

struct Halves16 {
  uint16x8_t low, high;
};
SCRUPLE_HD Halves16 load_halves(const u8* from) {
  return {vreinterpretq_u16_u8(vld1q_u8(from)), vreinterpretq_u16_u8(vld1q_u8(from + 16))};
}
SCRUPLE_HD Words upper_halves(Halves16 x, int part) {
  const uint16x8_t zero = vdupq_n_u16(0), from = part < 2 ? x.low : x.high;
  return Words::Native(
      vreinterpretq_u32_u16(part % 2 == 0 ? vzip1q_u16(zero, from) : vzip2q_u16(zero, from)));
}
using Bytes16 = uint8x16_t;
SCRUPLE_HD Bytes16 load_bytes(const u8* from) { return vld1q_u8(from); }
// Halves in the upper bits, plus signed bytes below them.
SCRUPLE_HD Words upper_halves_and_signed_bytes(Halves16 x, Bytes16 y, int part) {
  const uint8x16_t zero = vdupq_n_u8(0);
  const int16x8_t below = vreinterpretq_s16_u8(part < 2 ? vzip1q_u8(zero, y) : vzip2q_u8(zero, y));
  const int32x4_t upper = int32x4_t(upper_halves(x, part).v);
  return Words::Native(part % 2 == 0 ? vaddw_s16(upper, vget_low_s16(below)) : vaddw_high_s16(upper, below));
}
// a b + *c. Multiplication adds onto its addend's register here, and a copy of a constant through the load pipes is
// free where one through the vector pipes is not.
SCRUPLE_HD Floats fma_onto(const volatile Floats::Native& c, Floats a, Floats b) {
  return fma(a, b, Floats(c));
}
inline const volatile Floats::Native kOnes = {1, 1, 1, 1};
SCRUPLE_HD Words upper_bytes(Bytes16 x, int part) {
  static constexpr u8 kPlaces[4][16] = {{99, 99, 99, 0, 99, 99, 99, 1, 99, 99, 99, 2, 99, 99, 99, 3},
                                        {99, 99, 99, 4, 99, 99, 99, 5, 99, 99, 99, 6, 99, 99, 99, 7},
                                        {99, 99, 99, 8, 99, 99, 99, 9, 99, 99, 99, 10, 99, 99, 99, 11},
                                        {99, 99, 99, 12, 99, 99, 99, 13, 99, 99, 99, 14, 99, 99, 99, 15}};
  return Words::Native(vreinterpretq_u32_u8(vqtbl1q_u8(x, vld1q_u8(kPlaces[part]))));
}
SCRUPLE_HD uint16x8_t upper_halves_of(Words a, Words b) {
  return vuzp2q_u16(vreinterpretq_u16_u32(uint32x4_t(a.v)), vreinterpretq_u16_u32(uint32x4_t(b.v)));
}
SCRUPLE_HD uint16x8_t lower_halves_of(Words a, Words b) {
  return vuzp1q_u16(vreinterpretq_u16_u32(uint32x4_t(a.v)), vreinterpretq_u16_u32(uint32x4_t(b.v)));
}
SCRUPLE_HD uint8x16_t upper_bytes_of(uint16x8_t a, uint16x8_t b) {
  return vuzp2q_u8(vreinterpretq_u8_u16(a), vreinterpretq_u8_u16(b));
}
SCRUPLE_HD void store_upper_halves(const Words (&x)[kParts], u8* to) {
  vst1q_u8(to, vreinterpretq_u8_u16(upper_halves_of(x[0], x[1])));
  vst1q_u8(to + 16, vreinterpretq_u8_u16(upper_halves_of(x[2], x[3])));
}
SCRUPLE_HD void store_upper_bytes(const Words (&x)[kParts], u8* to) {
  vst1q_u8(to, upper_bytes_of(upper_halves_of(x[0], x[1]), upper_halves_of(x[2], x[3])));
}
// The upper byte of the lower half.
SCRUPLE_HD void store_second_bytes(const Words (&x)[kParts], u8* to) {
  vst1q_u8(to, upper_bytes_of(lower_halves_of(x[0], x[1]), lower_halves_of(x[2], x[3])));
}

#elif SCRUPLE_LANES == 16  // AVX-512

SCRUPLE_HD Floats fma(Floats a, Floats b, Floats c) {
  return Floats::Native(_mm512_fmadd_ps(__m512(a.v), __m512(b.v), __m512(c.v)));
}
SCRUPLE_HD Floats root(Floats x) { return Floats::Native(_mm512_sqrt_ps(__m512(x.v))); }
SCRUPLE_HD Words larger(Words a, Words b) {
  return Words::Native(_mm512_max_epu32(__m512i(a.v), __m512i(b.v)));
}
SCRUPLE_HD Words smaller(Words a, Words b) {
  return Words::Native(_mm512_min_epu32(__m512i(a.v), __m512i(b.v)));
}
SCRUPLE_HD Words smaller_signed(Words a, Words b) {
  return Words::Native(_mm512_min_epi32(__m512i(a.v), __m512i(b.v)));
}
SCRUPLE_HD Words larger_signed(Words a, Words b) {
  return Words::Native(_mm512_max_epi32(__m512i(a.v), __m512i(b.v)));
}
SCRUPLE_HD Floats number_of(Words a) { return Floats::Native(_mm512_cvtepi32_ps(__m512i(a.v))); }
SCRUPLE_HD Words floor_of(Floats x) {
  return Words::Native(_mm512_cvttps_epi32(_mm512_floor_ps(__m512(x.v))));
}
SCRUPLE_HD bool reaches(Words a, u32 least) {
  return _mm512_cmpge_epu32_mask(__m512i(a.v), __m512i(Words(least).v)) != 0;
}
template <int N>
SCRUPLE_HD Words largest_of_each(const Words (&a)[N]) {
  static_assert(N == 1 || N == 2 || N == 4);
  const auto at = [&](int i) { return a[i % N]; };
  const auto halves = [](Words x, Words y) {  // of 8 words for each
    return larger(Words::Native(_mm512_shuffle_i64x2(__m512i(x.v), __m512i(y.v), 0x44)),
                  Words::Native(_mm512_shuffle_i64x2(__m512i(x.v), __m512i(y.v), 0xee)));
  };
  const __m512i x = __m512i(halves(at(0), at(1)).v), y = __m512i(halves(at(2), at(3)).v);
  Words of_four = larger(Words::Native(_mm512_shuffle_i64x2(x, y, 0x88)),
                         Words::Native(_mm512_shuffle_i64x2(x, y, 0xdd)));
  of_four = larger(of_four, Words::Native(_mm512_shuffle_epi32(__m512i(of_four.v), _MM_PERM_BADC)));
  of_four = larger(of_four, Words::Native(_mm512_shuffle_epi32(__m512i(of_four.v), _MM_PERM_CDAB)));
  return Words::Native(_mm512_permutexvar_epi32(__m512i((lane_numbers() * 4u).v), __m512i(of_four.v)));
}

// Halves and bytes find their places by permutations: shifts have one port of two, and narrowing takes two
// steps.
using Halves16 = __m256i;
SCRUPLE_HD Halves16 load_halves(const u8* from) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
}
SCRUPLE_HD Words upper_halves(Halves16 x, int) {
  const Words from = lane_numbers() << 16;
  return Words::Native(
      _mm512_maskz_permutexvar_epi16(0xaaaaaaaau, __m512i(from.v), _mm512_castsi256_si512(x)));
}
using Bytes16 = __m128i;
SCRUPLE_HD Bytes16 load_bytes(const u8* from) {
  return _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
}
SCRUPLE_HD Words upper_bytes(Bytes16 x, int) {
  const Words from = (lane_numbers() << 24) + 0x808080u;  // 0x80: a zero
  return Words::Native(_mm512_shuffle_epi8(_mm512_broadcast_i32x4(x), __m512i(from.v)));
}
SCRUPLE_HD Words upper_halves_and_signed_bytes(Halves16 x, Bytes16 y, int) {
  return upper_halves(x, 0) + (Words::Native(_mm512_cvtepi8_epi32(y)) << 8);
}
SCRUPLE_HD void store_upper_halves(const Words (&x)[kParts], u8* to) {
  const Words from = lane_numbers() * 0x40004u + 0x30001u;  // the odd halves
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to),
                      _mm512_castsi512_si256(_mm512_permutexvar_epi16(__m512i(from.v), __m512i(x[0].v))));
}
// Byte `which` of each word: those of 128 bits side by side, then these.
SCRUPLE_HD void store_bytes(Words x, u32 which, u8* to) {
  const Words from = 0x0c080400u + which * 0x1010101u, groups = lane_numbers() * 4u;
  const __m512i bytes = _mm512_shuffle_epi8(__m512i(x.v), __m512i(from.v));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to),
                   _mm512_castsi512_si128(_mm512_permutexvar_epi32(__m512i(groups.v), bytes)));
}
SCRUPLE_HD void store_upper_bytes(const Words (&x)[kParts], u8* to) { store_bytes(x[0], 3, to); }
SCRUPLE_HD void store_second_bytes(const Words (&x)[kParts], u8* to) { store_bytes(x[0], 1, to); }

#else  // AVX2

SCRUPLE_HD Floats fma(Floats a, Floats b, Floats c) {
  return Floats::Native(_mm256_fmadd_ps(__m256(a.v), __m256(b.v), __m256(c.v)));
}
SCRUPLE_HD Floats root(Floats x) { return Floats::Native(_mm256_sqrt_ps(__m256(x.v))); }
SCRUPLE_HD Words larger(Words a, Words b) {
  return Words::Native(_mm256_max_epu32(__m256i(a.v), __m256i(b.v)));
}
SCRUPLE_HD Words smaller(Words a, Words b) {
  return Words::Native(_mm256_min_epu32(__m256i(a.v), __m256i(b.v)));
}
SCRUPLE_HD Words smaller_signed(Words a, Words b) {
  return Words::Native(_mm256_min_epi32(__m256i(a.v), __m256i(b.v)));
}
SCRUPLE_HD Words larger_signed(Words a, Words b) {
  return Words::Native(_mm256_max_epi32(__m256i(a.v), __m256i(b.v)));
}
SCRUPLE_HD Floats number_of(Words a) { return Floats::Native(_mm256_cvtepi32_ps(__m256i(a.v))); }
SCRUPLE_HD Words floor_of(Floats x) {
  return Words::Native(_mm256_cvttps_epi32(_mm256_floor_ps(__m256(x.v))));
}
SCRUPLE_HD bool reaches(Words a, u32 least) {
  return _mm256_movemask_ps(_mm256_castsi256_ps(__m256i((a >= least).v))) != 0;
}
template <int N>
SCRUPLE_HD Words largest_of_each(const Words (&a)[N]) {
  static_assert(N == 1 || N == 2 || N == 4);
  const auto at = [&](int i) { return __m256i(a[i % N].v); };
  const auto halves = [](__m256i x, __m256i y) {  // of 4 words for each
    return _mm256_max_epu32(_mm256_permute2x128_si256(x, y, 0x20), _mm256_permute2x128_si256(x, y, 0x31));
  };
  const __m256i x = halves(at(0), at(1)), y = halves(at(2), at(3));
  const __m256i of_two =
      _mm256_max_epu32(_mm256_unpacklo_epi64(x, y), _mm256_unpackhi_epi64(x, y));  // 0 2, 1 3
  const __m256i each = _mm256_max_epu32(of_two, _mm256_shuffle_epi32(of_two, 0xb1));
  return Words::Native(_mm256_permutevar8x32_epi32(each, _mm256_setr_epi32(0, 4, 2, 6, 0, 4, 2, 6)));
}

SCRUPLE_HD __m128i load_128(const u8* from) {
  return _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
}
struct Halves16 {
  __m128i part[2];
};
SCRUPLE_HD Halves16 load_halves(const u8* from) { return {{load_128(from), load_128(from + 16)}}; }
SCRUPLE_HD Words upper_halves(const Halves16& x, int part) {
  return Words::Native(_mm256_cvtepu16_epi32(x.part[part])) << 16;
}
using Bytes16 = __m128i;
SCRUPLE_HD Bytes16 load_bytes(const u8* from) { return load_128(from); }
SCRUPLE_HD Words upper_bytes(Bytes16 x, int part) {
  return Words::Native(_mm256_cvtepu8_epi32(part == 0 ? x : _mm_srli_si128(x, 8))) << 24;
}
SCRUPLE_HD Words upper_halves_and_signed_bytes(const Halves16& x, Bytes16 y, int part) {
  return upper_halves(x, part) +
         (Words::Native(_mm256_cvtepi8_epi32(part == 0 ? y : _mm_srli_si128(y, 8))) << 8);
}
// Each word below 2^16; packing goes by halves of 128 bits, and the permutation puts them in order.
SCRUPLE_HD __m256i pack_halves(Words a, Words b) {
  return _mm256_permute4x64_epi64(_mm256_packus_epi32(__m256i(a.v), __m256i(b.v)), 0xd8);
}
SCRUPLE_HD void store_halves(__m256i x, u8* to) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), x); }
SCRUPLE_HD void store_bytes(__m256i x, u8* to) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to),
                   _mm_packus_epi16(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1)));
}
SCRUPLE_HD void store_upper_halves(const Words (&x)[kParts], u8* to) {
  store_halves(pack_halves(x[0] >> 16, x[1] >> 16), to);
}
SCRUPLE_HD void store_upper_bytes(const Words (&x)[kParts], u8* to) {
  store_bytes(pack_halves(x[0] >> 24, x[1] >> 24), to);
}
SCRUPLE_HD void store_second_bytes(const Words (&x)[kParts], u8* to) {
  store_bytes(pack_halves((x[0] >> 8) & 0xffu, (x[1] >> 8) & 0xffu), to);
}

#endif

SCRUPLE_HD Floats tame_root(Floats x) { return root(x); }
// Signed words as floats, over 2^Bits.
template <int Bits>
SCRUPLE_HD Floats number_of(Words a) {
#if SCRUPLE_LANES == 4  // in one instruction
  return Floats::Native(vcvtq_n_f32_s32(int32x4_t(a.v), Bits));
#else
  return number_of(a) * (1.0f / static_cast<float>(1u << Bits));
#endif
}
SCRUPLE_HD Words round_by(Floats x, Words coin) { return floor_of(x + coin_fraction(coin)); }
SCRUPLE_HD Words round_scaled(Floats x, Floats gain, Words coin) {
  return floor_of(fma(x, gain, float_of((coin >> 9) + 0x3f800000u))) - 1u;
}

#endif

}  // namespace SCRUPLE_UNIT
}  // namespace scruple
