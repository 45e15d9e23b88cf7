// Random numbers of the trainer, from a counter: (seed, stream, index), never from threads or the order of
// calls.
#pragma once

#include <cmath>
#include <cstdint>
#include <numbers>

#include "engine/philox.h"

namespace scruple::train {

// What numbers are for; parameters draw their initial values from streams of their own.
inline constexpr std::uint32_t kDataStream = 0, kSampleStream = 1, kOrderStream = 2, kMixStream = 3,
                               kInitialStream = 16;

inline std::uint64_t random_bits(std::uint64_t seed, std::uint32_t stream, std::uint64_t index) {
  const PhiloxBlock block =
      philox({{static_cast<u32>(index), static_cast<u32>(index >> 32), stream, 0x7261696eu}},
             {{static_cast<u32>(seed), static_cast<u32>(seed >> 32)}});
  return block.x[0] | static_cast<std::uint64_t>(block.x[1]) << 32;
}

// In [0, 1).
inline double random_uniform(std::uint64_t seed, std::uint32_t stream, std::uint64_t index) {
  return static_cast<double>(random_bits(seed, stream, index) >> 11) * 0x1p-53;
}

// Standard normal, by Box and Muller's transform.
inline double random_normal(std::uint64_t seed, std::uint32_t stream, std::uint64_t index) {
  const double radius = std::sqrt(-2 * std::log(1 - random_uniform(seed, stream, 2 * index)));
  return radius * std::cos(2 * std::numbers::pi * random_uniform(seed, stream, 2 * index + 1));
}

}  // namespace scruple::train
