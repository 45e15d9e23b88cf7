// Clipping by the global norm, as torch.nn.utils.clip_grad_norm_ does it.
#pragma once

#include <cmath>

namespace scruple {

inline float clip_factor(double norm, double max_norm) {
  const double factor = max_norm / (norm + 1e-6);
  return max_norm > 0 && factor < 1 && std::isfinite(norm) ? static_cast<float>(factor) : 1.0f;
}

}  // namespace scruple
