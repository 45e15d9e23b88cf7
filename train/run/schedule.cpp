#include "train/run/schedule.h"

#include <algorithm>
#include <cmath>
#include <numbers>

namespace scruple::train {
namespace {

// How much of a fall over `length` steps is done at its step `step`: 1 one step after the last.
double done(std::int64_t step, std::int64_t length) {
  return std::clamp(static_cast<double>(step) / static_cast<double>(length + 1), 0.0, 1.0);
}

}  // namespace

double Schedule::at(std::int64_t step) const {
  if (step <= warmup) return peak * static_cast<double>(step) / static_cast<double>(warmup);
  const double range = peak - least;
  switch (annealing) {
    case Annealing::cosine:
      return least + range * 0.5 * (1 + std::cos(std::numbers::pi * done(step - warmup, steps - warmup)));
    case Annealing::linear: return least + range * (1 - done(step - warmup, steps - warmup));
    case Annealing::wsd: return least + range * (1 - done(step - (steps - cooldown), cooldown));
    case Annealing::inverse_sqrt: {
      const auto rise = static_cast<double>(std::max<std::int64_t>(warmup, 1));
      return std::max(least, peak * std::sqrt(rise / static_cast<double>(step)));
    }
    case Annealing::constant: break;
  }
  return peak;
}

}  // namespace scruple::train
