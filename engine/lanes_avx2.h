// The vectors of engine/lanes.h on AVX2 with FMA.
#pragma once

#include "engine/lanes_base.h"

#if SCRUPLE_LANES == 8
#include <immintrin.h>

namespace scruple {
inline namespace SCRUPLE_UNIT {

SCRUPLE_HD Floats fma(Floats a, Floats b, Floats c) { return _mm256_fmadd_ps(a, b, c); }
SCRUPLE_HD Floats root(Floats x) { return _mm256_sqrt_ps(x); }
SCRUPLE_HD Words larger(Words a, Words b) { return _mm256_max_epu32(a, b); }
SCRUPLE_HD Words smaller(Words a, Words b) { return _mm256_min_epu32(a, b); }
SCRUPLE_HD Words smaller_signed(Words a, Words b) { return _mm256_min_epi32(a, b); }
SCRUPLE_HD Floats number_of(Words a) { return _mm256_cvtepi32_ps(a); }
SCRUPLE_HD Words floor_of(Floats x) { return _mm256_cvttps_epi32(_mm256_floor_ps(x)); }
SCRUPLE_HD bool reaches(Words a, u32 least) { return _mm256_movemask_ps(a >= least) != 0; }
template <int N>
SCRUPLE_HD Words largest_of_each(const Words (&a)[N]) {
  static_assert(N == 1 || N == 2 || N == 4);
  const auto at = [&](int i) { return a[i % N]; };
  const auto halves = [](Words x, Words y) {  // 4 words of each
    return larger(_mm256_permute2x128_si256(x, y, 0x20), _mm256_permute2x128_si256(x, y, 0x31));
  };
  const Words x = halves(at(0), at(1)), y = halves(at(2), at(3));
  const Words of_two = larger(_mm256_unpacklo_epi64(x, y), _mm256_unpackhi_epi64(x, y));  // 0 2, 1 3
  const Words each = larger(of_two, _mm256_shuffle_epi32(of_two, 0xb1));
  return _mm256_permutevar8x32_epi32(each, _mm256_setr_epi32(0, 4, 2, 6, 0, 4, 2, 6));
}

SCRUPLE_HD __m128i load_128(const u8* from) {
  return _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
}
struct Halves16 {
  __m128i part[2];
};
SCRUPLE_HD Halves16 load_halves(const u8* from) { return {{load_128(from), load_128(from + 16)}}; }
SCRUPLE_HD Words upper_halves(const Halves16& x, int part) {
  return Words(_mm256_cvtepu16_epi32(x.part[part])) << 16;
}
using Bytes16 = __m128i;
SCRUPLE_HD Bytes16 load_bytes(const u8* from) { return load_128(from); }
SCRUPLE_HD Bytes16 part_of(Bytes16 x, int part) { return part == 0 ? x : _mm_srli_si128(x, 8); }
SCRUPLE_HD Words upper_bytes(Bytes16 x, int part) {
  return Words(_mm256_cvtepu8_epi32(part_of(x, part))) << 24;
}
SCRUPLE_HD Words upper_halves_and_signed_bytes(const Halves16& x, Bytes16 y, int part) {
  return upper_halves(x, part) + (Words(_mm256_cvtepi8_epi32(part_of(y, part))) << 8);
}
// Words below 2^16 as halves. Packing works within 128 bits, and the permutation restores the order.
SCRUPLE_HD __m256i pack_halves(Words a, Words b) {
  return _mm256_permute4x64_epi64(_mm256_packus_epi32(a, b), 0xd8);
}
SCRUPLE_HD void store_bytes(__m256i x, u8* to) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to),
                   _mm_packus_epi16(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1)));
}
SCRUPLE_HD void store_upper_halves(const Words (&x)[kParts], u8* to) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), pack_halves(x[0] >> 16, x[1] >> 16));
}
SCRUPLE_HD void store_upper_bytes(const Words (&x)[kParts], u8* to) {
  store_bytes(pack_halves(x[0] >> 24, x[1] >> 24), to);
}
SCRUPLE_HD void store_second_bytes(const Words (&x)[kParts], u8* to) {
  store_bytes(pack_halves((x[0] >> 8) & 0xffu, (x[1] >> 8) & 0xffu), to);
}

}  // namespace SCRUPLE_UNIT
}  // namespace scruple
#endif
