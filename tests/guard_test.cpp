// Nothing that is not finite reaches a weight where gradients are released, on every device; and what a run does about it.
#include "train/pass/guard.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <functional>
#include <limits>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "tests/descriptions.h"
#include "tests/jobs.h"
#include "train/cpu/tiles.h"
#include "train/run/checkpoint.h"
#include "train/run/run.h"

namespace scruple::train {
namespace {

using Values = std::vector<float>;
constexpr float kInfinity = std::numeric_limits<float>::infinity();

struct Device {
  const char* name;
  OpenBackend open;
};

class Guarded : public ::testing::TestWithParam<Device> {
 protected:
  void SetUp() override {
    if (GetParam().open == cuda_backend && !has_cuda())
      GTEST_SKIP() << "this machine has no GPU that the trainer could run on";
  }
  static Job job_of(const Description& shape, double lr = 1e-3) {
    Job job = train::job_of(shape, 2, "fp32", lr);
    job.backend = GetParam().open;
    job.gradients.policy = SCRUPLE_RELEASED;
    return job;
  }
};
INSTANTIATE_TEST_SUITE_P(All, Guarded,
                         ::testing::Values(Device{"cpu", cpu_backend}, Device{"cuda", cuda_backend}),
                         [](const auto& device) { return device.param.name; });

int number_of(const Trainer& trainer, const std::string& name) {
  const std::vector<Parameter>& all = const_cast<Trainer&>(trainer).state().parameters();
  const auto found = std::find_if(all.begin(), all.end(), [&](const Parameter& p) { return p.name == name; });
  EXPECT_NE(found, all.end()) << name;
  return static_cast<int>(found - all.begin());
}

void change(Trainer& trainer, int parameter, const std::function<void(Values&)>& how) {
  Values values = trainer.state().master(parameter);
  how(values);
  trainer.state().set(parameter, values.data());
}

std::vector<Values> weights_of(Trainer& trainer) {
  std::vector<Values> all;
  for (int p = 0; p < static_cast<int>(trainer.state().parameters().size()); ++p)
    all.push_back(trainer.state().master(p));
  return all;
}

bool all_finite(const std::vector<Values>& weights) {
  return std::all_of(weights.begin(), weights.end(), [](const Values& values) {
    return std::all_of(values.begin(), values.end(), [](float x) { return std::isfinite(x); });
  });
}

TEST_P(Guarded, NothingMovesAfterALossThatIsNotFinite) {
  for (const SmallModel& family : small_models()) {
    SCOPED_TRACE(family.name);
    Training training(job_of(family.shape)), clean(job_of(family.shape));
    for (Training* each : {&training, &clean}) each->take(3);
    const Values before = training.state().master(0);
    change(training, 0, [&](Values& table) {  // 'e': in every window
      std::fill_n(table.begin() + 'e' * family.shape.width, family.shape.width, kInfinity);
    });
    const std::vector<char> planes = training.planes();
    for (int i = 0; i < 3; ++i) {  // the third is a graph that is launched again
      const Outcome outcome = training.step();
      EXPECT_FALSE(std::isfinite(outcome.loss));
      EXPECT_TRUE(outcome.skipped);
      EXPECT_FALSE(outcome.outlier);
      EXPECT_EQ(outcome.tensors, std::ssize(training.state().parameters()));
    }
    EXPECT_TRUE(training.planes() == planes);
    training.state().set(0, before.data());
    EXPECT_TRUE(training.planes() == clean.planes());
    const Outcome outcome = training.step();
    EXPECT_FALSE(outcome.skipped);
    EXPECT_EQ(outcome.tensors, 0);
    EXPECT_FALSE(training.planes() == clean.planes());
    EXPECT_TRUE(all_finite(weights_of(training)));
  }
}

// A target that the model holds to be impossible: its loss is infinite, and no gradient is.
TEST_P(Guarded, TheLossAloneIsEnough) {
  Description shape = gpt2({2, 32, 2, 24, 256});
  shape.tied = false;
  for (const scruple_policy policy : {SCRUPLE_STORED, SCRUPLE_RELEASED}) {
    Job job = job_of(shape);
    job.gradients.policy = policy;
    Training training(job);
    change(training, number_of(training, "lm_head.weight"),
           [](Values& values) { values['e' * 32 + 31] = -3e38f; });
    change(training, number_of(training, "transformer.ln_f.weight"), [](Values& values) { values[31] = 0; });
    change(training, number_of(training, "transformer.ln_f.bias"), [](Values& values) { values[31] = 10; });
    const std::vector<char> planes = training.planes();
    const Outcome outcome = training.step();
    EXPECT_FALSE(std::isfinite(outcome.loss));
    const bool released = policy == SCRUPLE_RELEASED;
    EXPECT_EQ(outcome.skipped, released);
    EXPECT_EQ(outcome.tensors, released ? std::ssize(training.state().parameters()) : 0);
    EXPECT_EQ(training.planes() == planes, released);
  }
}

// The MLP gives zeros, so the loss knows nothing of its weights. Its first gradient overflows in a single row, the last,
// which is in the last piece where there are several.
TEST_P(Guarded, ATensorWhoseGradientIsNotFiniteStaysAsItIsAndTheOthersMove) {
  for (const std::int64_t width : {32, 640}) {
    SCOPED_TRACE(width);
    Training training(job_of(gpt2({2, width, width > 256 ? 5 : 2, 24, 256})));
    const std::string layer = "transformer.h.1.";
    const int up = number_of(training, layer + "mlp.c_fc.weight");
    change(training, up, [](Values& values) { std::fill(values.begin(), values.end(), 0.0f); });
    change(training, number_of(training, layer + "mlp.c_proj.weight"), [](Values& values) {
      for (std::size_t i = 0; i < values.size(); ++i)
        values[i] = 1e20f * static_cast<float>(static_cast<int>(i * 7919 % 13) - 6);
    });
    change(training, number_of(training, layer + "ln_2.weight"),
           [](Values& values) { values.back() = 1e23f; });
    const std::vector<Values> before = weights_of(training);
    const Outcome outcome = training.step();
    EXPECT_TRUE(std::isfinite(outcome.loss));
    EXPECT_TRUE(outcome.skipped);
    EXPECT_EQ(outcome.tensors, 1);
    const std::vector<Values> after = weights_of(training);
    EXPECT_TRUE(all_finite(after));
    EXPECT_EQ(after[static_cast<std::size_t>(up)], before[static_cast<std::size_t>(up)]);
    std::size_t moved = 0;
    for (std::size_t p = 0; p < after.size(); ++p) moved += after[p] != before[p] ? 1 : 0;
    EXPECT_GE(moved, after.size() - 5) << "all but this one, and what the zeros leave without a gradient";
    EXPECT_EQ(training.position().steps[static_cast<std::size_t>(up)], 1);
    EXPECT_EQ(training.position().steps[0], 2);
  }
}

// Micro-batches that are folded into moments: those that were folded before stay there.
TEST_P(Guarded, MicroBatches) {
  Job job = job_of(llama());
  job.gradients.micro_batches = 2;
  job.gradients.accumulation = SCRUPLE_ACCUMULATE_ADAMA;
  Training training(job);
  training.take(2);
  const Values table = training.state().master(0);
  change(training, 0, [&](Values& values) { std::fill_n(values.begin() + 'e' * 64, 64, kInfinity); });
  const std::vector<char> planes = training.planes();
  EXPECT_TRUE(training.step().skipped);
  EXPECT_TRUE(training.planes() == planes);
  training.state().set(0, table.data());
  EXPECT_FALSE(training.step().skipped);
  EXPECT_TRUE(all_finite(weights_of(training)));
}

// A rate with which the first step leaves weights that no loss survives.
TEST_P(Guarded, ADivergedRunEndsWithWeightsThatAreFinite) {
  Training training(job_of(gpt2({2, 32, 2, 24, 256}), 1e30));
  Span span;
  span.steps = 100;
  span.validates = false;
  span.save_every = 1;
  std::vector<std::int64_t> saved;
  const auto save = [&](const Record& seen) {
    saved.push_back(std::ssize(seen.steps));
    return true;
  };
  const Record record = run(
      training, training.windows, training.windows, span, [](const Record&) {}, save);
  EXPECT_LT(record.steps.size(), 15u);
  EXPECT_EQ(losses_lost(record), 10);
  EXPECT_TRUE(record.steps.back().skipped);
  EXPECT_TRUE(all_finite(weights_of(training)));
  ASSERT_FALSE(saved.empty());
  EXPECT_EQ(saved.back(), std::ssize(record.steps) - 10) << "none while the loss is not finite";
}

// A static scale that a gradient overflows with is not found out by the loss.
TEST_P(Guarded, TenSkippedStepsEndARunAndSaveIt) {
  for (const bool dynamic : {false, true})
    for (const scruple_policy policy : {SCRUPLE_RELEASED, SCRUPLE_STORED}) {
      Job job = job_of(gpt2({2, 32, 2, 24, 256}));
      job.gradients.policy = policy;
      job.activations = Precision::fp16;
      job.scaler = scruple_scaler_dynamic();
      job.scaler.scale = 0x1p40f;
      if (!dynamic) check(scruple_scaler_static(0x1p40f, &job.scaler));
      Training training(job);
      const std::vector<char> planes = training.planes();
      Span span;
      span.steps = 40;
      span.validates = false;
      std::int64_t saved = 0;
      const auto save = [&](const Record& seen) { return saved = std::ssize(seen.steps), true; };
      const Record record = run(
          training, training.windows, training.windows, span, [](const Record&) {}, save);
      EXPECT_EQ(losses_lost(record), 0);
      EXPECT_EQ(record.steps.size(), dynamic ? 40u : 10u);
      EXPECT_EQ(saved, dynamic ? 0 : 10) << "the weights are from before";
      if (!dynamic && policy == SCRUPLE_STORED) {
        EXPECT_TRUE(training.planes() == planes);
      }
      if (!dynamic) {
        EXPECT_EQ(skipped_at_last(record), 10);
      }
      EXPECT_FALSE(record.stopped);
    }
}

TEST(Record, StepsSkippedAtLast) {
  Record record;
  const auto add = [&](float scale, bool skipped) { record.steps.push_back({1, 1, 1, scale, skipped}); };
  EXPECT_EQ(skipped_at_last(record), 0);
  add(1, true), add(1, false);
  EXPECT_EQ(skipped_at_last(record), 0);
  add(8, true), add(4, true), add(2, true);
  EXPECT_EQ(skipped_at_last(record), 1) << "a scale that shrinks finds its way";
  add(2, true), add(2, true);
  EXPECT_EQ(skipped_at_last(record), 3);
  record.resumed = 5;
  EXPECT_EQ(skipped_at_last(record), 2) << "of this session";
}

// ---- Tiles ----

// A gradient of several tiles is computed once where its bound is far from overflow, and else looked at before any of it
// is stepped with.
TEST(GuardedTiles, AreComputedOnceWhereTheyAreKnownToBeFinite) {
  const Parameter parameter = {"weight", {1024, 1024}, true, 0, 1};
  const Optimizer optimizer("sgd");
  std::vector<float> weight(1 << 20, 1.0f);
  scruple_tensor row = {};
  row.optimizer = optimizer.raw();
  row.size = parameter.size(), row.step = 1;
  check(scruple_tensor_use(&row, "fp32"));
  row.arrays[SCRUPLE_WEIGHT].codes = weight.data();
  std::vector<float> momentum(1 << 20);
  row.arrays[SCRUPLE_SLOT].codes = momentum.data();
  Engine engine("cpu", 1);
  Ledger ledger;
  for (const bool finite : {true, false})
    for (const double bound : {1e10, 1e37, double{kInfinity}, std::nan("")}) {
      const float skip = 0;
      scruple_sink_options options = SCRUPLE_SINK_OPTIONS_INIT;
      options.policy = SCRUPLE_RELEASED;
      options.skip = &skip;
      Sink sink(engine, std::span(&row, 1), options);
      Tiles tiles({parameter}, true, ledger);
      tiles.give_to(sink);
      std::fill(weight.begin(), weight.end(), 1.0f);
      int filled = 0;
      const FillRows fill = [&](std::int64_t first, std::int64_t rows, float* tile) {
        ++filled;
        std::fill_n(tile, rows * 1024, 1.0f);
        if (!finite && first + rows == 1024) tile[rows * 1024 - 1] = kInfinity;
      };
      tiles.take(0, fill, [&] { return bound; });
      sink.end();
      const bool trusts = bound == 1e10;
      EXPECT_EQ(filled, trusts ? 4 : 8) << bound;
      EXPECT_EQ(weight.front() == 1.0f, !finite && !trusts) << bound;
      EXPECT_EQ(weight.back() == 1.0f, !finite) << bound << ", which may be wrong: each tile is judged again";
      EXPECT_EQ(sink.read().skipped, finite ? 0 : 1);
    }
}

// ---- Preparing the next batch ----

// The CPU's network, and what was asked of it.
struct Asked {
  std::vector<std::string> calls;
  std::vector<std::vector<std::int32_t>> prepared, trained;
} asked;

class Listening final : public Network {
 public:
  Listening(std::unique_ptr<Network> network, std::int64_t rows)
      : network_(std::move(network)), rows_(rows) {}
  void prepare(const Batch& batch, float) override {
    asked.calls.emplace_back("prepare");
    asked.prepared.emplace_back(batch.tokens, batch.tokens + rows_);
  }
  void train(Visible weights, const Batch& batch, Sink& sink, float weight) override {
    asked.calls.emplace_back("train");
    asked.trained.emplace_back(batch.tokens, batch.tokens + rows_);
    network_->train(weights, batch, sink, weight);
  }
  std::vector<double> losses() override {
    asked.calls.emplace_back("losses");
    return network_->losses();
  }
  void watch(Guard* guard) override { network_->watch(guard); }
  void judge(double* sum_squares, const float* loss_scale) override {
    network_->judge(sum_squares, loss_scale);
  }
  double loss(Visible weights, const Batch& batch) override { return network_->loss(weights, batch); }

 private:
  const std::unique_ptr<Network> network_;
  const std::int64_t rows_;
};

class Listener final : public Backend {
 public:
  Engine& engine() override { return cpu_->engine(); }
  Memory& memory() override { return cpu_->memory(); }
  std::int64_t released_bytes(const std::vector<Parameter>& parameters,
                              Precision activations) const override {
    return cpu_->released_bytes(parameters, activations);
  }
  std::unique_ptr<Network> network(const Setup& setup, Visible weights, scruple_policy policy,
                                   Ledger& ledger) override {
    return std::make_unique<Listening>(cpu_->network(setup, weights, policy, ledger),
                                       setup.batch * setup.shape.context);
  }
  std::unique_ptr<Generator> generator(const Description&, Visible, Ledger&) override { return nullptr; }
  std::string device() const override { return "a listener"; }

 private:
  const std::unique_ptr<Backend> cpu_ = cpu_backend(2);
};

Job small_job(int parts = 1) {
  Job job = job_of(gpt2({1, 32, 2, 16, 256}), 2, "scruple", 1e-3);
  job.gradients.micro_batches = parts;
  return job;
}

TEST(NextBatch, IsPreparedBeforeTheStepIsWaitedFor) {
  for (const int parts : {1, 3}) {
    asked = {};
    Job job = small_job(parts);
    job.backend = [](int) -> std::unique_ptr<Backend> { return std::make_unique<Listener>(); };
    Training training(job);
    for (int i = 0; i < 4; ++i) training.step(training.windows, true);
    std::vector<std::string> want = {"prepare"};
    for (int i = 0; i < 4; ++i) {
      want.insert(want.end(), static_cast<std::size_t>(parts), "train");
      want.insert(want.end(), {"prepare", "losses"});
    }
    EXPECT_EQ(asked.calls, want);
    for (std::size_t i = 0; i < 4; ++i)
      EXPECT_EQ(asked.trained[i * static_cast<std::size_t>(parts)], asked.prepared[i]) << i;
    EXPECT_NE(asked.prepared[0], asked.prepared[1]);
  }
}

// Whatever comes between two steps, and wherever a run is taken up again: a batch that was prepared and not used is
// thrown away.
class Prepared : public ::testing::TestWithParam<Device> {
 protected:
  void SetUp() override {
    if (GetParam().open == cuda_backend && !has_cuda())
      GTEST_SKIP() << "this machine has no GPU that the trainer could run on";
  }
};
INSTANTIATE_TEST_SUITE_P(All, Prepared,
                         ::testing::Values(Device{"cpu", cpu_backend}, Device{"cuda", cuda_backend}),
                         [](const auto& device) { return device.param.name; });

TEST_P(Prepared, ResumesToTheBitAtAnyStep) {
  const std::string folder = ::testing::TempDir() + "prepared_" + GetParam().name;
  constexpr int kSteps = 6;
  for (const int parts : {1, 2}) {
    Job job = small_job(parts);
    job.backend = GetParam().open;
    const Taken whole = take(job, kSteps);  // nothing is prepared
    for (int stop = 0; stop <= kSteps; ++stop) {
      std::filesystem::remove_all(folder);
      Taken taken;
      {
        Training first(job);
        for (int i = 0; i < stop; ++i) taken.losses.push_back(first.step(first.windows, true).loss);
        if (stop % 2 == 1) first.validate(3);
        save(first, "scruple", {}, folder, 0);
      }
      const io::Checkpoint checkpoint(io::find_checkpoint(folder));
      Training second(job, &checkpoint);
      for (int i = stop; i < kSteps; ++i) taken.losses.push_back(second.step(second.windows, true).loss);
      taken.planes = second.planes();
      expect_same(taken, whole, std::to_string(stop) + " of " + std::to_string(kSteps));
    }
  }
}

TEST_P(Prepared, AValidationOrOtherDataInBetweenChangeNothing) {
  Job job = small_job();
  job.backend = GetParam().open;
  const std::vector<std::uint8_t> bytes(1000, 'x');
  const Windows other(bytes, job.shape.context);
  const auto run = [&](bool goes_on) {
    Training training(job);
    Taken taken;
    for (int i = 0; i < 8; ++i) {
      taken.losses.push_back(training.step(i == 4 ? other : training.windows, goes_on).loss);
      if (i % 3 == 1) taken.losses.push_back(training.validate(3));
    }
    taken.planes = training.planes();
    return taken;
  };
  expect_same(run(true), run(false), GetParam().name);
}

}  // namespace
}  // namespace scruple::train
