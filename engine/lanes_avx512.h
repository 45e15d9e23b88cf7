// The vectors of engine/lanes.h on AVX-512.
#pragma once

#include "engine/lanes_base.h"

#if SCRUPLE_LANES == 16
#if !defined(__clang__)  // GCC 12 warns of the undefined vectors in its own header
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif
#include <immintrin.h>
#if !defined(__clang__)
#pragma GCC diagnostic pop
#endif

namespace scruple {
inline namespace SCRUPLE_UNIT {

SCRUPLE_HD Floats fma(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
SCRUPLE_HD Floats root(Floats x) { return _mm512_sqrt_ps(x); }
SCRUPLE_HD Words larger(Words a, Words b) { return _mm512_max_epu32(a, b); }
SCRUPLE_HD Words smaller(Words a, Words b) { return _mm512_min_epu32(a, b); }
SCRUPLE_HD Words smaller_signed(Words a, Words b) { return _mm512_min_epi32(a, b); }
SCRUPLE_HD Floats number_of(Words a) { return _mm512_cvtepi32_ps(a); }
SCRUPLE_HD Words floor_of(Floats x) { return _mm512_cvttps_epi32(_mm512_floor_ps(x)); }
SCRUPLE_HD bool reaches(Words a, u32 least) { return _mm512_cmpge_epu32_mask(a, Words(least)) != 0; }
template <int N>
SCRUPLE_HD Words largest_of_each(const Words (&a)[N]) {
  static_assert(N == 1 || N == 2 || N == 4);
  const auto at = [&](int i) { return a[i % N]; };
  const auto halves = [](Words x, Words y) {  // 8 words of each
    return larger(_mm512_shuffle_i64x2(x, y, 0x44), _mm512_shuffle_i64x2(x, y, 0xee));
  };
  const Words x = halves(at(0), at(1)), y = halves(at(2), at(3));
  Words of_four = larger(_mm512_shuffle_i64x2(x, y, 0x88), _mm512_shuffle_i64x2(x, y, 0xdd));
  of_four = larger(of_four, _mm512_shuffle_epi32(of_four, _MM_PERM_BADC));
  of_four = larger(of_four, _mm512_shuffle_epi32(of_four, _MM_PERM_CDAB));
  return _mm512_permutexvar_epi32(lane_numbers() * 4u, of_four);
}

// Halves and bytes are moved by permutations: shifts have one port of two, and narrowing takes two steps.
using Halves16 = __m256i;
SCRUPLE_HD Halves16 load_halves(const u8* from) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
}
SCRUPLE_HD Words upper_halves(Halves16 x, int) {
  return _mm512_maskz_permutexvar_epi16(0xaaaaaaaau, lane_numbers() << 16, _mm512_castsi256_si512(x));
}
using Bytes16 = __m128i;
SCRUPLE_HD Bytes16 load_bytes(const u8* from) {
  return _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
}
SCRUPLE_HD Words upper_bytes(Bytes16 x, int) {
  const Words from = (lane_numbers() << 24) + 0x808080u;  // 0x80: a zero
  return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(x), from);
}
SCRUPLE_HD Words upper_halves_and_signed_bytes(Halves16 x, Bytes16 y, int) {
  return upper_halves(x, 0) + (Words(_mm512_cvtepi8_epi32(y)) << 8);
}
SCRUPLE_HD void store_upper_halves(const Words (&x)[kParts], u8* to) {
  const Words odd = lane_numbers() * 0x40004u + 0x30001u;  // numbers of the odd halves
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to),
                      _mm512_castsi512_si256(_mm512_permutexvar_epi16(odd, x[0])));
}
// Byte `which` of each word: gathered within each 128 bits, and then these.
SCRUPLE_HD void store_bytes(Words x, u32 which, u8* to) {
  const Words bytes = _mm512_shuffle_epi8(x, Words(0x0c080400u + which * 0x1010101u));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to),
                   _mm512_castsi512_si128(_mm512_permutexvar_epi32(lane_numbers() * 4u, bytes)));
}
SCRUPLE_HD void store_upper_bytes(const Words (&x)[kParts], u8* to) { store_bytes(x[0], 3, to); }
SCRUPLE_HD void store_second_bytes(const Words (&x)[kParts], u8* to) { store_bytes(x[0], 1, to); }

}  // namespace SCRUPLE_UNIT
}  // namespace scruple
#endif
