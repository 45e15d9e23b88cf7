// An exponential moving average of a run's weights, beside them in 24 bits each.
#pragma once

#include <cstdint>
#include <vector>

#include "include/scruple/scruple.hpp"
#include "train/run/state.h"

namespace scruple::train {

// average = decay * average + (1 - decay) * weight, after each step. That is one step of SGD at rate 1 - decay from the
// average towards the weight, so every engine has it: gradient = average - weight, the weights as the model reads them.
// Rounded by fair coins: to nearest it would stand still as soon as a step is below half of its last bit.
class Average {
 public:
  // The state must outlive it. Throws where a weight's format cannot be read as a gradient (can_average).
  Average(Backend& backend, const State& state, double decay, std::uint64_t seed, Ledger& ledger);

  // After this step of the run, 1, 2... Nothing waits for the device.
  void take(std::int64_t step);
  // Below `decay` in the beginning, so that the first weights do not stay for long: 0 at step 1, then rising.
  static double decay_at(double decay, std::int64_t step);

  const Optimizer& optimizer() const { return optimizer_; }
  // A row per parameter: the average, without its gradient's memory where that is not the run's.
  const std::vector<scruple_tensor>& table() const { return table_; }

 private:
  Backend& backend_;
  double decay_;
  Optimizer optimizer_;
  std::vector<scruple_tensor> table_;
  std::vector<Block> planes_;
};

// Whether weights of this format can be averaged: 32 and 16 bits, and int8.
bool can_average(const scruple_format* weight);

}  // namespace scruple::train
