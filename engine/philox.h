// Random bits from a counter: Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3",
// SC'11). Element e of an array gets 16 bits, number e % 8 of the block with counter (e / 8, folds, array,
// step, tensor id) under the key `seed`. Nothing depends on threads, chunks, shards or the order of calls.
#pragma once

#include "formats/codec.h"

namespace scruple {

struct RandomKey {
  u64 seed;
  u32 step;
  u32 id;
  u32 array;
  u32 folds;  // which write of this step it is, for accumulators; 0 elsewhere
};

inline namespace SCRUPLE_UNIT {

inline constexpr int kRandomsPerBlock = 8;

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

SCRUPLE_HD PhiloxKey philox_key(const RandomKey& key) {
  return {{static_cast<u32>(key.seed), static_cast<u32>(key.seed >> 32)}};
}

SCRUPLE_HD PhiloxBlock random_counter(const RandomKey& key, u64 block) {
  return {{static_cast<u32>(block),
           static_cast<u32>(block >> 32) | (key.folds & 0xfffu) << 16 | key.array << 28, key.step, key.id}};
}

}  // namespace SCRUPLE_UNIT
}  // namespace scruple
