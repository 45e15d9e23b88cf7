// Between gradients and optimizer: clipping by the global norm (torch.nn.utils.clip_grad_norm_) or by a
// tensor's own history (AdaGC), and unscaling. Then the counters that change when a step ends.
#pragma once

#include "engine/scaler.h"
#include "formats/codec.h"
#include "include/scruple/scruple.h"

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

// What a sum of squared gradients says: their norm, whether one of them was not finite, and the factor that
// clips them. The square of a float is exact in double and no sum of them overflows, so the sum is finite if
// and only if every gradient is.
struct Measured {
  double norm;
  float found_inf, clip;
};
SCRUPLE_HD Measured measured(double sum_squares, float loss_scale, double max_norm) {
  const double norm = __builtin_sqrt(sum_squares) / static_cast<double>(loss_scale);
  return {norm == norm ? norm : __builtin_nan(""), is_finite(sum_squares) ? 0.0f : 1.0f,
          clip_factor(norm, max_norm)};
}

// AdaGC (Wang et al., "AdaGC: Enhancing LLM Pretraining Stability via Adaptive Gradient Clipping",
// 2502.11034):
//   h = min(1, lambda gamma / |g|);  gamma = beta gamma + (1 - beta) |h g|,  beta = 0.98
// per tensor. gamma = 0 means no history: the first norm becomes gamma. (The paper warms up under a global
// limit instead.) A norm that is not finite does not change gamma.
struct AdaGc {
  float clip;
  double gamma;
};
SCRUPLE_HD AdaGc adagc(double norm, float clip, double lambda, double gamma) {
  constexpr double kBeta = 0.98;
  if (!is_finite(norm)) return {clip, gamma};
  const double factor = lambda * gamma / norm;
  if (gamma > 0 && factor < static_cast<double>(clip)) clip = static_cast<float>(factor);
  const double clipped = norm * static_cast<double>(clip);
  return {clip, gamma > 0 ? kBeta * gamma + (1 - kBeta) * clipped : clipped};
}

// The end of a measurement on every engine: writes what was asked for.
SCRUPLE_HD void write_measured(double sum_squares, const scruple_measure_options& out) {
  if (value_or(out.skip, 0.0f) != 0) sum_squares = __builtin_nan("");
  Measured result = measured(sum_squares, value_or(out.loss_scale, 1.0f), out.max_norm);
  if (out.gamma != nullptr) {
    const AdaGc adapted = adagc(result.norm, result.clip, out.adagc, *out.gamma);
    result.clip = adapted.clip;
    *out.gamma = adapted.gamma;
  }
  if (out.sum != nullptr) *out.sum = sum_squares;
  if (out.norm != nullptr) *out.norm = result.norm;
  if (out.found_inf != nullptr) *out.found_inf = result.found_inf;
  if (out.clip != nullptr) *out.clip = result.clip;
}

// What the end of a step writes. A step is skipped where *found_inf is not 0. All pointers lead to the
// engine's memory; any may be null.
struct Advance {
  const float* found_inf;
  scruple_scaler* scaler;  // grows after enough steps, shrinks after a skipped one
  i64* steps;              // one more after a step that was taken
  i64* skipped = nullptr;  // one more after a step that was skipped
  float* any = nullptr;    // becomes 1 after a skipped step, and stays as it is after any other
  float* reset = nullptr;  // becomes 0, last of all; may be found_inf
};
SCRUPLE_HD void advance_by(const Advance& a) {
  const bool skip = a.found_inf != nullptr && *a.found_inf != 0;
  if (a.scaler != nullptr) *a.scaler = updated(*a.scaler, skip);
  if (a.steps != nullptr && !skip) ++*a.steps;
  if (a.skipped != nullptr && skip) ++*a.skipped;
  if (a.any != nullptr && skip) *a.any = 1.0f;
  if (a.reset != nullptr) *a.reset = 0.0f;
}

SCRUPLE_HD float gradient_multiplier(float multiplier, float clip, float loss_scale) {
  return multiplier * clip / loss_scale;
}

}  // namespace SCRUPLE_UNIT
}  // namespace scruple
