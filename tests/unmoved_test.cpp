// The share of low-bit weights that a step leaves as they are: nearest loses what stochastic rounding keeps on average.
#include <gtest/gtest.h>

#include <algorithm>
#include <optional>

#include "tests/jobs.h"
#include "train/run/run.h"
#include "train/run/trainer.h"

namespace scruple::train {
namespace {

constexpr GptShape kWide = {1, 64, 2, 24, 256};

const Windows& text() { return train::text(kWide.context); }

// AdamW over weights in `format`, small tensors in fp32, as recipe lpmm has them.
Job job_in(const char* format, int rounding, double lr) {
  Job job = job_of(gpt2(kWide), 4, "scruple", lr);
  job.describe = [=](const Optimizer& optimizer, std::int64_t size) {
    scruple_tensor row = describe_by("scruple")(optimizer, size);
    scruple_array& weight = row.arrays[SCRUPLE_WEIGHT];
    if (size > 4096) weight.rounding = rounding, weight.format = format_named(format);
    if (size <= 4096) weight.rounding = SCRUPLE_NEAREST, weight.format = format_named("fp32");
    return row;
  };
  return job;
}

struct Watched {
  Record record;
  std::vector<std::vector<float>> before, after;
  double learned = 0;
};
Watched watched(const Job& job, std::int64_t steps) {
  Training training(job);
  Watched found = {{}, training.state().heads(), {}, 0};
  const Span span = {.steps = steps, .validate_every = std::max<std::int64_t>(steps / 4, 1)};
  found.record = run(training, text(), text(), span, [](const Record&) {});
  found.after = training.state().heads();
  found.learned = found.record.first_loss() - found.record.final_loss();
  return found;
}

// A code is 1e-4 wide here and a step of AdamW as long as its learning rate.
TEST(Unmoved, NearestLosesWhatStochasticKeepsOnAverage) {
  const double learned = watched(job_in("fp32", SCRUPLE_NEAREST, 1e-5), 200).learned;
  const Watched nearest = watched(job_in("int10", SCRUPLE_NEAREST, 1e-5), 200);
  const Watched stochastic = watched(job_in("int10", SCRUPLE_STOCHASTIC, 1e-5), 200);
  ASSERT_EQ(nearest.record.unmoved.size(), 4u);
  for (const auto& [step, found] : nearest.record.unmoved) {
    EXPECT_EQ(found.share, 1) << step;
    EXPECT_EQ(found.most, 1) << step;
  }
  for (const auto& [step, found] : stochastic.record.unmoved) {
    EXPECT_GT(found.share, 0.8) << step;
    EXPECT_LT(found.share, 1) << step;
    EXPECT_GE(found.most, found.share) << step;
  }
  EXPECT_EQ(nearest.before, nearest.after);
  EXPECT_NE(stochastic.before, stochastic.after);
  EXPECT_NEAR(stochastic.learned / learned, 1, 0.2);
  EXPECT_LT(nearest.learned / learned, 0.5);
}

TEST(Unmoved, LargeStepsMoveAll) {
  for (const int rounding : {SCRUPLE_NEAREST, SCRUPLE_STOCHASTIC}) {
    const Watched run = watched(job_in("int12", rounding, 3e-3), 4);
    EXPECT_EQ(run.record.unmoved.size(), 4u);
    for (const auto& [step, found] : run.record.unmoved) EXPECT_LT(found.share, 0.05) << step;
  }
}

// A look is of the step that ends with it, of no other, and 32 bits are not looked at.
TEST(Unmoved, IsOfOneStepBeforeAValidation) {
  Training training(job_in("bf16", SCRUPLE_NEAREST, 1e-4));
  EXPECT_FALSE(training.state().unmoved_since(training.state().heads())) << "nothing has momentum yet";
  const Span span = {.steps = 7, .validate_every = 3};
  std::vector<std::int64_t> steps;
  std::vector<std::vector<float>> last;
  const Record record = run(training, text(), text(), span, [&](const Record& seen) {
    std::vector<std::vector<float>> now = training.state().heads();
    if (!seen.unmoved.empty() && seen.unmoved.back().first == static_cast<std::int64_t>(seen.steps.size())) {
      const std::optional<Unmoved> again = training.state().unmoved_since(last);
      EXPECT_EQ(again->share, seen.unmoved.back().second.share);
      EXPECT_EQ(again->tensor, seen.unmoved.back().second.tensor);
      EXPECT_GT(again->share, 0);
      EXPECT_LT(again->share, 1);
    }
    last = std::move(now);
  });
  for (const auto& [step, found] : record.unmoved) steps.push_back(step);
  EXPECT_EQ(steps, (std::vector<std::int64_t>{3, 6, 7}));
  EXPECT_GT(record.mean_unmoved(), 0);
  for (const char* exact : {"fp32", "bf16+16", "bf16+fp32"})
    EXPECT_TRUE(watched(job_in(exact, SCRUPLE_NEAREST, 1e-4), 2).record.unmoved.empty()) << exact;
}

}  // namespace
}  // namespace scruple::train
