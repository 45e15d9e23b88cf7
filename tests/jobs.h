// Formats by recipe, for tests of the trainer; and single passes of a job, without the trainer's loop around them.
#pragma once

#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "train/run/trainer.h"

namespace scruple::train {

// The gradient's format and rounding may be replaced.
inline Describe describe_by(const std::string& recipe, const std::string& gradient = "",
                            int rounding = SCRUPLE_NEAREST) {
  return [=](const Optimizer& optimizer, std::int64_t size) {
    scruple_tensor row = {};
    row.optimizer = optimizer.raw();
    row.size = size;
    check(scruple_tensor_use(&row, recipe.c_str()));
    if (!gradient.empty())
      row.arrays[SCRUPLE_GRADIENT] = {format_named(gradient.c_str()), nullptr, nullptr, rounding, 0};
    return row;
  };
}

// A job's network, the weights that it reads and the sink that takes its gradients. Every parameter has the job's
// optimizer, and the weights begin with job.initial.
struct Passes {
  explicit Passes(const Job& job)
      : backend(job.backend(job.threads)),
        optimizer(job.optimizer()),
        state(*backend, parameters_of(job.shape), optimizer, optimizer, job.describe, ledger),
        sink(backend->engine(), state.table(), job.gradients),
        network(backend->network(job, state.visible(), job.gradients.policy, ledger)) {
    state.start(job.initial, ledger);
  }
  // One micro-batch.
  void train(const Batch& batch) {
    network->train(state.visible(), batch, sink, 1);
    sink.end();
  }
  double loss(const Batch& batch) { return network->loss(state.visible(), batch); }

  Ledger ledger;
  const std::unique_ptr<Backend> backend;
  const Optimizer optimizer;
  State state;
  Sink sink;
  const std::unique_ptr<Network> network;
};

// What one batch gives: its loss in training and in validation, and its gradients. They are SGD's momentum after its first
// step, in the format that job.describe gives it.
struct Computed {
  double loss, validated;
  std::vector<std::vector<float>> gradients;  // in the order of parameters_of(shape)
};
inline Computed computed_by(Job job, const Batch& batch) {
  job.optimizer = [] { return Optimizer("sgd", {{"momentum", 0.5}, {"lr", 0.0}}); };
  Passes passes(job);
  Computed computed = {0, passes.loss(batch), {}};
  passes.train(batch);
  const std::vector<double> losses = passes.network->losses();
  if (losses.size() != 1) throw std::logic_error("a micro-batch has one loss");
  computed.loss = losses[0];
  for (const scruple_tensor& row : passes.state.table()) {
    std::vector<float>& values = computed.gradients.emplace_back(static_cast<std::size_t>(row.size));
    check(scruple_decode(passes.backend->engine().raw(), &row, SCRUPLE_SLOT, values.data()));
  }
  return computed;
}

}  // namespace scruple::train
