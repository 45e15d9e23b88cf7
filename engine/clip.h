// What becomes of gradients before an optimizer sees them: clipping by the global norm, as
// torch.nn.utils.clip_grad_norm_ does it, and unscaling.
#pragma once

#include "formats/codec.h"

namespace scruple {
inline namespace SCRUPLE_UNIT {

SCRUPLE_HD bool is_finite(double x) { return x - x == 0; }

SCRUPLE_HD float clip_factor(double norm, double max_norm) {
  const double factor = max_norm / (norm + 1e-6);
  return max_norm > 0 && factor < 1 && is_finite(norm) ? static_cast<float>(factor) : 1.0f;
}

template <class T>
SCRUPLE_HD T value_or(const T* at, T otherwise) {
  return at == nullptr ? otherwise : *at;
}

// Squares of floats are exact in double and their sum cannot overflow: it is finite if and only if every
// gradient is.
struct Measured {
  double norm;
  float found_inf, clip;
};
SCRUPLE_HD Measured measured(double sum_squares, float loss_scale, double max_norm) {
  const double norm = __builtin_sqrt(sum_squares) / static_cast<double>(loss_scale);
  return {norm == norm ? norm : __builtin_nan(""), is_finite(sum_squares) ? 0.0f : 1.0f,
          clip_factor(norm, max_norm)};
}

SCRUPLE_HD float gradient_multiplier(float multiplier, float clip, float loss_scale) {
  return multiplier * clip / loss_scale;
}

}  // namespace SCRUPLE_UNIT
}  // namespace scruple
