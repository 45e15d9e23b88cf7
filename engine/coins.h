// Coins for stochastic rounding, from a counter. One Philox draw per (seed, step, tensor id, array, write)
// places a lattice over the whole tensor; element e of it gets
//   coin(e) = first + e step  (mod 2^32, as e counts too),  step = the golden ratio + a small random tilt.
// `first` is uniform and drawn anew at every step: each element's coin is uniform and independent from step
// to step, so a single rounding is as unbiased as with a random number of its own. Within a step neighbours
// stand as far apart as can be (Kronecker's sequence; its discrepancy is least for the golden ratio), so that
// the errors of a run of elements cancel rather than add up by chance. The tilt, up to 2^-8, leaves
// neighbours as they are and makes elements hundreds apart (a matrix's column) independent over steps, pair
// by pair: the mean square of the error of any sum of them is what a coin for each would give. Without it
// elements a Fibonacci number apart would have nearly the same coin at every step. Nothing depends on
// threads, chunks, shards or the order of calls: `offset` gives a shard its place.
#pragma once

#include "engine/philox.h"
#include "formats/codec.h"

namespace scruple {

// Which write to which array it is.
struct CoinKey {
  u64 seed;
  u32 step;
  u32 id;     // of the tensor
  u32 array;  // SCRUPLE_WEIGHT ...
  u32 write;  // within the step: for an accumulator the number of folds, else 0
};

inline namespace SCRUPLE_UNIT {

SCRUPLE_HD Coins draw_coins(const CoinKey& key) {
  const PhiloxBlock drawn = philox({{key.write, key.array, key.step, key.id}},
                                   {{static_cast<u32>(key.seed), static_cast<u32>(key.seed >> 32)}});
  constexpr u32 kGolden = 0x9e3779b1u, kTilt = 1u << 24;
  return {drawn.x[0], kGolden - kTilt + (drawn.x[1] >> 7)};
}

}  // namespace SCRUPLE_UNIT
}  // namespace scruple
