// Random bits from a counter: Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3",
// SC'11).
#pragma once

#include "formats/codec.h"

namespace scruple {
inline namespace SCRUPLE_UNIT {

struct PhiloxBlock {
  u32 x[4];
};

inline constexpr int kPhiloxRounds = 10;

struct PhiloxKey {
  u32 x[2];
  SCRUPLE_HD PhiloxKey next() const { return {{x[0] + 0x9e3779b9u, x[1] + 0xbb67ae85u}}; }
};

SCRUPLE_HD PhiloxBlock philox_round(PhiloxBlock c, PhiloxKey k) {
  const u64 a = static_cast<u64>(0xd2511f53u) * c.x[0], b = static_cast<u64>(0xcd9e8d57u) * c.x[2];
  return {{static_cast<u32>(b >> 32) ^ c.x[1] ^ k.x[0], static_cast<u32>(b),
           static_cast<u32>(a >> 32) ^ c.x[3] ^ k.x[1], static_cast<u32>(a)}};
}

SCRUPLE_HD PhiloxBlock philox(PhiloxBlock c, PhiloxKey k) {
  for (int round = 0; round < kPhiloxRounds; ++round, k = k.next()) c = philox_round(c, k);
  return c;
}

}  // namespace SCRUPLE_UNIT
}  // namespace scruple
