// The learning rate over a run.
#pragma once

#include <cstdint>

namespace scruple::train {

// wsd: warmup, stable, decay (Hu et al., 2404.06395): the peak, and then down over the last `cooldown` steps.
// inverse-sqrt: peak * sqrt(warmup / step) (Vaswani et al., 1706.03762, section 5.3).
enum class Annealing { cosine, linear, constant, wsd, inverse_sqrt };
inline constexpr const char* kAnnealings[] = {"cosine", "linear", "constant", "wsd",
                                              "inverse-sqrt"};  // their names

// A linear rise over `warmup` steps to `peak`, then down, or constant. What falls to an end falls to `least`, which comes
// one step after the last; the inverse square root has no end, and stays there.
struct Schedule {
  Annealing annealing = Annealing::cosine;
  double peak = 1e-3;
  std::int64_t warmup = 0, steps = 1000;
  double least = 0;
  std::int64_t cooldown = 0;           // wsd: steps
  double at(std::int64_t step) const;  // of step 1, 2...
};

}  // namespace scruple::train
