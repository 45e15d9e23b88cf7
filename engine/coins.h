// Coins for stochastic rounding: a random 32-bit number per element, from a counter and never from threads.
//
// One Philox draw per (seed, step, tensor id, array, write) serves the whole tensor. Element e gets
//   coin(e) = first + e step  (mod 2^32),  step = the golden ratio + a small random tilt.
// - `first` is uniform and new at every step. So each rounding is unbiased, and independent from step to
//   step.
// - The golden ratio spreads the coins of neighbours evenly (Kronecker's sequence, of least discrepancy).
//   Their errors cancel instead of adding up by chance.
// - The tilt (up to 2^-8) hardly moves neighbours. It makes elements hundreds apart, such as a matrix's
//   column, pairwise independent over steps: the mean squared error of any sum is that of independent coins.
//   Without it elements a Fibonacci number apart would have almost the same coin at every step.
// `offset` says where a shard begins, so shards get the coins of the whole tensor.
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
