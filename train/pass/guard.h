// Whether a step is to be taken, decided where its gradients are: by the host on the CPU, by a kernel on a GPU, for which
// the host does not wait. The same lines decide on both.
#pragma once

#include <cstdint>

namespace scruple::train {

constexpr bool is_finite(double x) { return x - x == 0; }

// Mean and variance of what was seen, the latest 50 values before all (West, 1979, with weights that fall).
struct RunningMean {
  std::int64_t count = 0;
  double mean = 0, variance = 0;

  constexpr void add(double value) {
    constexpr double kLeast = 0.02;
    const double even = 1 / static_cast<double>(++count), share = even > kLeast ? even : kLeast;
    const double difference = value - mean;
    mean += share * difference;
    variance = (1 - share) * (variance + share * difference * difference);
  }
  // How many standard deviations it lies above the mean; 0 while fewer than 20 values were seen.
  constexpr double above(double value) const {
    constexpr std::int64_t kFewest = 20;
    if (count < kFewest) return 0;
    constexpr double kRounding = 1e-6;  // of values that are all the same
    const double deviation = __builtin_sqrt(variance), least = kRounding * (mean < 0 ? -mean : mean);
    return (value - mean) / (deviation > least ? deviation : least);
  }
};

// In the backend's memory. Of stored and compressed gradients loss and norm are judged before a step; of released ones
// the loss alone, before the backward pass.
struct Guard {
  bool released = false;
  double parts = 1;           // micro-batches to a step
  double limit = 0;           // more deviations above the running mean are an outlier; 0: nothing is
  RunningMean losses, norms;  // of steps that were taken
  double loss = 0;            // of this step's micro-batches so far
  double norm = 0;            // of the last step, where gradients are kept
  bool outlier = false;       // whether the last step was one
  float skip = 0;             // scruple_sink_options.skip

  // What is not finite is none: such a step is not taken anyway.
  constexpr bool is_outlier(const RunningMean& seen, double value) const {
    return limit > 0 && is_finite(value) && seen.above(value) > limit;
  }
};

// After the forward pass of a micro-batch with this mean loss, times its weight.
constexpr void judge_loss(Guard& guard, double loss) {
  if (!guard.released) {
    guard.loss += loss / guard.parts;
    return;
  }
  guard.outlier = guard.is_outlier(guard.losses, loss);
  guard.skip = guard.outlier || !is_finite(loss) ? 1.0f : 0.0f;
  if (guard.skip == 0) guard.losses.add(loss);
}

// Once the squares of all gradients, which are `loss_scale` times too large, are summed up: of an outlier the sum
// becomes infinite, and the sink skips the step as one that overflowed.
constexpr void judge_step(Guard& guard, double& sum_squares, float loss_scale) {
  const double loss = guard.loss;
  guard.loss = 0;
  guard.norm = __builtin_sqrt(sum_squares) / static_cast<double>(loss_scale);
  guard.outlier = guard.is_outlier(guard.losses, loss) || guard.is_outlier(guard.norms, guard.norm);
  if (guard.outlier)
    sum_squares = __builtin_inf();
  else if (is_finite(loss) && is_finite(guard.norm))
    guard.losses.add(loss), guard.norms.add(guard.norm);
}

}  // namespace scruple::train
