// An exponential moving average of a run's weights, beside them in 24 bits each.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "include/scruple/scruple.hpp"
#include "train/run/state.h"

namespace scruple::train {

// average = decay * average + (1 - decay) * weight, after each step. That is one step of SGD at rate 1 - decay from the
// average towards the weight, so every engine has it: gradient = average - weight, the weights as the model reads them.
// Rounded by fair coins: to nearest it would stand still as soon as a step is below half of its last bit.
class Average {
 public:
  // The state must outlive it.
  Average(Backend& backend, const State& state, double decay, std::uint64_t seed, Ledger& ledger);

  // After this step of the run, 1, 2... Nothing waits for the device.
  void take(std::int64_t step);
  // Below `decay` in the beginning, so that the first weights do not stay for long: 0 at step 1, then rising.
  static double decay_at(double decay, std::int64_t step);

  const Optimizer& optimizer() const { return optimizer_; }
  // A row per parameter, without a gradient.
  const std::vector<scruple_tensor>& table() const { return table_; }

 private:
  Backend& backend_;
  double decay_;
  Optimizer optimizer_;
  std::vector<scruple_tensor> table_;
  std::vector<scruple_tensor> direct_;  // where a step reads the weight as it is
  // The others, which are decoded for it, a piece at a time: average, weight.
  std::vector<std::pair<scruple_tensor, scruple_tensor>> coded_;
  Block decoded_;
  std::vector<Block> planes_;
};

}  // namespace scruple::train
