// Vectors of floats and of 32-bit words as number types: the formulas of formats/ and optim/ that are written
// over any number type run on them, kLanes elements at a time. Each operation is one or two instructions, and
// IEEE's. Where SCRUPLE_LANES is 0 there are no vectors here, and the tiles do all the work.
//
// Each instruction set has a file that defines:
//   fma, root;  larger, smaller, smaller_signed
//   number_of(Words), signed words as floats;  floor_of(Floats), as signed words
//   reaches(Words, least), whether one of them is `least` or more
//   largest_of_each(array of Words), the largest word of entry i in lane i
//   Halves16 and Bytes16, 16 codes as they are stored, with load_halves and load_bytes
//   upper_halves, upper_bytes(codes, part): vector `part` of them, each code in the uppermost bits of its word
//   upper_halves_and_signed_bytes(halves, bytes, part): the same, plus the signed byte next below the half
//   store_upper_halves, store_upper_bytes, store_second_bytes(kParts vectors): the way back; the second byte is
//   the upper one of the lower half
#pragma once

#include "engine/lanes_avx2.h"
#include "engine/lanes_avx512.h"
#include "engine/lanes_base.h"
#include "engine/lanes_neon.h"

#if SCRUPLE_LANES
namespace scruple {
inline namespace SCRUPLE_UNIT {

SCRUPLE_HD Floats tame_root(Floats x) { return root(x); }
SCRUPLE_HD Floats tame_reciprocal(Floats x) { return 1.0f / x; }
SCRUPLE_HD Floats tame_quotient(Floats a, Floats b) { return a / b; }
// Signed words as floats, over 2^Bits. NEON, which has one instruction for both, has a closer overload.
template <int Bits>
SCRUPLE_HD Floats number_of(Words a) {
  return number_of(a) * (1.0f / static_cast<float>(1u << Bits));
}
SCRUPLE_HD Floats coin_fraction(Words coin) { return float_of((coin >> 9) + 0x3f800000u) - 1.0f; }
SCRUPLE_HD Words round_by(Floats x, Words coin) { return floor_of(x + coin_fraction(coin)); }

}  // namespace SCRUPLE_UNIT
}  // namespace scruple
#endif
