// Jobs for tests of the trainer, with formats by recipe, and runs of them; and single passes, without the trainer's loop
// around them.
#pragma once

#include <gtest/gtest.h>

#include <limits>
#include <map>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "train/run/trainer.h"
#include "train/text/corpus.h"

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

// SGD where a recipe has no second moments.
inline Job job_of(const Description& shape, std::int64_t batch, const std::string& recipe, double lr) {
  Job job;
  const bool sgd = recipe == "lpmm";
  job.shape = shape;
  job.batch = batch;
  job.threads = 2;
  job.optimizer = [sgd] {
    return sgd ? Optimizer("sgd", {{"momentum", 0.9}}) : Optimizer("adamw", {{"weight_decay", 0.1}});
  };
  job.describe = describe_by(recipe);
  job.schedule = {Annealing::constant, sgd ? 0.1 : lr, 0, 1000};
  return job;
}

// The grammar's lines: enough for a few hundred steps.
inline const Windows& text(std::int64_t context) {
  static const Corpus corpus = Grammar(1).sample(200'000, 1);
  static std::map<std::int64_t, Windows> windows;
  return windows.try_emplace(context, corpus.bytes, context, corpus.line_starts).first->second;
}

// A trainer on that text, and what it holds.
struct HasLedger {
  Ledger counted;
};
struct Training : HasLedger, Trainer {
  explicit Training(const Job& job, const io::Checkpoint* from = nullptr,
                    std::int64_t limit = Ledger::kNoLimit, std::int64_t host_limit = Ledger::kNoLimit)
      : HasLedger{Ledger(limit, host_limit)}, Trainer(job, counted, from), windows(text(job.shape.context)) {}
  using Trainer::step, Trainer::validate;
  Outcome step() { return step(windows); }
  std::vector<Outcome> take(int steps) {
    std::vector<Outcome> outcomes;
    for (int i = 0; i < steps; ++i) outcomes.push_back(step());
    return outcomes;
  }
  double validate(std::int64_t count) { return validate(windows, count); }
  // Every byte of weights, extra bits, moments and scales.
  std::vector<char> planes() {
    std::vector<char> all;
    const auto copy = [&](const void* plane, std::int64_t bytes) {
      const std::size_t at = all.size();
      all.resize(at + static_cast<std::size_t>(bytes));
      check(scruple_copy(engine().raw(), all.data() + at, plane, bytes));
      engine().synchronize();
    };
    for (const scruple_tensor& row : state().table())
      for (const scruple_array& array : std::span(row.arrays, SCRUPLE_GRADIENT)) {
        if (array.codes == nullptr) continue;
        std::int64_t codes = 0, aux = 0;
        check(scruple_format_bytes(array.format, row.size, &codes, &aux));
        copy(array.codes, codes);
        if (aux > 0) copy(array.aux, aux);
      }
    return all;
  }

  const Windows& windows;
};

struct Taken {
  std::vector<double> losses;
  std::vector<char> planes;
};
inline Taken take(const Job& job, int steps) {
  Training training(job);
  Taken taken;
  for (const Outcome& outcome : training.take(steps)) taken.losses.push_back(outcome.loss);
  taken.planes = training.planes();
  return taken;
}
inline void expect_same(const Taken& got, const Taken& want, const std::string& what) {
  EXPECT_TRUE(got.planes == want.planes) << what;  // too many to be printed
  EXPECT_EQ(got.losses, want.losses) << what;
}

// A job's network, the weights that it reads and the sink that takes its gradients. Every parameter has the job's
// optimizer, and the weights begin with job.initial.
struct Passes {
  explicit Passes(const Job& job)
      : backend(job.backend(job.threads)),
        optimizer(job.optimizer()),
        state(
            *backend, parameters_of(job.shape), [this](auto) -> const Optimizer& { return optimizer; },
            job.describe, ledger),
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
