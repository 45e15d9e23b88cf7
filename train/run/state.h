// A model's weights and moments, each array in its own format, in a backend's memory, counted in the ledger by
// kind. To the model they are visible weights; to the optimizer, table rows.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "include/scruple/scruple.hpp"
#include "train/pass/backend.h"

namespace scruple::train {

// The formats of a tensor of this size under this optimizer: a row without memory.
using Describe = std::function<scruple_tensor(const Optimizer& optimizer, std::int64_t size)>;

// Writes `count` values of a parameter, from `first` on.
using Fill = std::function<void(int parameter, std::int64_t first, std::int64_t count, float* values)>;
// What Parameter says of initial values, drawn from the seed by `threads` threads (0: one for each core), the same
// whatever their number. `parameters` must outlive it.
Fill random_values(const std::vector<Parameter>& parameters, std::uint64_t seed, int threads);

// The format that a model computes with: bf16 where a weight is kept as bf16+8, otherwise the weight's own.
std::string visible_format(const std::string& format);
std::string visible_format(const scruple_array& weight);

// The share of weights that a step left as they were, though they have momentum.
struct Unmoved {
  double share = 0;    // of all that were looked at
  double most = 0;     // of one tensor
  std::string tensor;  // which
};

class State {
 public:
  // The optimizers, each that of a parameter's number, and the backend must outlive this.
  using OptimizerOf = std::function<const Optimizer&(std::size_t parameter)>;
  // `offloads`: moments and extra bits of all but small tensors lie in host memory, from which the engine steps them.
  State(Backend& backend, const std::vector<Parameter>& parameters, const OptimizerOf& optimizer_of,
        const Describe& describe, Ledger& ledger, bool offloads = false);

  // The weights that `fill` gives, a million at a time, and moments of 0.
  void start(const Fill& fill, Ledger& ledger);
  void set(int parameter, const float* values);
  // The fp32 values that the optimizer sees: the visible ones and their extra bits.
  std::vector<float> master(int parameter) const;
  // What unmoved_since() asks for: of each weight in fewer than 32 bits the first 65,536 values, or codes of a format
  // with scales: a group's scale moves by itself, and the values of all its codes with it.
  std::vector<std::vector<float>> heads() const;
  // Between two steps; nothing where no weight of `before` has momentum.
  std::optional<Unmoved> unmoved_since(const std::vector<std::vector<float>>& before) const;
  // The weights as the model reads them: without what completes them.
  const std::vector<scruple_tensor>& visible() const { return visible_; }

  const std::vector<Parameter>& parameters() const { return parameters_; }
  const std::vector<scruple_tensor>& table() const { return table_; }
  void set_step(int parameter, std::int64_t step) { table_[static_cast<std::size_t>(parameter)].step = step; }
  std::int64_t size() const;

 private:
  Backend& backend_;
  std::vector<Parameter> parameters_;
  std::vector<scruple_tensor> table_;
  std::vector<scruple_tensor> visible_;
  std::vector<Block> planes_;
};

}  // namespace scruple::train
