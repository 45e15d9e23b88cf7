// Steps that are skipped because their loss or norm is far above the others'.
#include "train/run/outliers.h"

#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <random>
#include <tuple>
#include <vector>

#include "tests/jobs.h"
#include "train/run/checkpoint.h"
#include "train/run/run.h"

namespace scruple::train {
namespace {

TEST(RunningMean, KnowsMeanAndDeviation) {
  std::mt19937 random(1);
  std::normal_distribution<double> normal(5, 2);
  RunningMean running;
  for (int i = 0; i < 19; ++i) {
    running.add(normal(random));
    EXPECT_EQ(running.above(1e9), 0) << "too few";
  }
  for (int i = 0; i < 5000; ++i) running.add(normal(random));
  EXPECT_NEAR(running.above(5), 0, 0.5);
  EXPECT_NEAR(running.above(5 + 2 * 6), 6, 1.5);
  EXPECT_LT(running.above(-100), 0) << "below is no outlier";
}

TEST(RunningMean, TheLatestCountMost) {
  RunningMean running;
  for (int i = 0; i < 200; ++i) running.add(i % 2);
  for (int i = 0; i < 400; ++i) running.add(10 + i % 2);
  EXPECT_LT(std::abs(running.above(10.5)), 0.5);
}

constexpr GptShape kShape = {1, 32, 2, 16, 256};

// What the model has learnt nothing of. Its norm is far above those before; its loss once losses have fallen.
const Windows& noise() {
  static const std::vector<std::uint8_t> bytes = [] {
    std::mt19937 random(7);
    std::vector<std::uint8_t> all(4096);
    for (std::uint8_t& byte : all) byte = static_cast<std::uint8_t>(128 + random() % 128);
    return all;
  }();
  static const Windows windows(bytes, kShape.context);
  return windows;
}

Job job_with(scruple_policy policy, double limit) {
  Job job = job_of(gpt2(kShape), 16, "scruple", 1e-3);
  job.gradients.policy = policy;
  job.gradients.max_norm = policy == SCRUPLE_RELEASED ? 0 : 1;
  job.skip_outliers = limit;
  return job;
}

TEST(Outliers, AreNotTaken) {
  for (const scruple_policy policy : {SCRUPLE_STORED, SCRUPLE_RELEASED, SCRUPLE_COMPRESSED})
    for (const int parts : {1, 2}) {
      const bool released = policy == SCRUPLE_RELEASED;
      if (released && parts > 1) continue;  // refused
      const int learnt = released ? 150 : 40;
      Job job = job_with(policy, 5);
      job.gradients.micro_batches = parts;
      Training training(job);
      for (const Outcome& outcome : training.take(learnt)) EXPECT_FALSE(outcome.skipped);
      const std::vector<char> before = training.planes();
      const Outcome outcome = training.step(noise());
      EXPECT_TRUE(outcome.outlier);
      EXPECT_TRUE(outcome.skipped);
      EXPECT_EQ(outcome.tensors, released ? std::ssize(training.state().parameters()) : 0);
      EXPECT_EQ(std::isfinite(outcome.norm), !released);
      EXPECT_TRUE(training.planes() == before);
      EXPECT_FALSE(training.step().outlier);
      EXPECT_FALSE(training.planes() == before);
      // Without the option it is a step as any other.
      job.skip_outliers = 0;
      Training plain(job);
      plain.take(learnt);
      EXPECT_TRUE(plain.planes() == before);
      const Outcome taken = plain.step(noise());
      EXPECT_FALSE(taken.skipped);
      EXPECT_EQ(taken.loss, outcome.loss);
      if (!released) {
        EXPECT_EQ(taken.norm, outcome.norm);
      }
    }
}

// What judge_step() makes of a step: whether it is an outlier, and whether the sink skips it.
struct Judged {
  bool outlier, skipped;
};
Judged judge(Guard& guard, double loss, double norm) {
  double squares = norm * norm;
  judge_loss(guard, loss);
  judge_step(guard, squares, 1);
  return {guard.outlier, !is_finite(squares)};
}

TEST(Guards, ASkippedStepDoesNotMoveTheMean) {
  Guard guard;
  guard.limit = 6;
  for (int i = 0; i < 30; ++i) judge(guard, 2 + 0.01 * (i % 3), 1 + 0.01 * (i % 5));
  const auto expect = [&](double loss, double norm, bool outlier, bool skipped) {
    const RunningMean losses = guard.losses, norms = guard.norms;
    const Judged judged = judge(guard, loss, norm);
    EXPECT_EQ(judged.outlier, outlier) << loss << ", " << norm;
    EXPECT_EQ(judged.skipped, skipped) << loss << ", " << norm;
    const bool taken = !skipped && is_finite(loss);
    EXPECT_EQ(guard.losses.count, losses.count + (taken ? 1 : 0));
    EXPECT_EQ(guard.norms.count, norms.count + (taken ? 1 : 0));
    EXPECT_EQ(guard.loss, 0) << "the next step begins anew";
    guard.losses = losses, guard.norms = norms;
  };
  expect(2.02, 1.04, false, false);
  expect(3, 1, true, true);
  expect(2, 3, true, true);
  expect(0, 0, false, false);
  expect(std::nan(""), INFINITY, false, true);  // no outlier: it is skipped anyway
  expect(std::nan(""), 1, false, false);
}

TEST(Guards, ReleasedAreJudgedByTheLossAlone) {
  Guard guard;
  guard.released = true;
  guard.limit = 6;
  for (int i = 0; i < 30; ++i) judge_loss(guard, 2 + 0.01 * (i % 3));
  for (const auto& [loss, outlier, skip] : {std::tuple(2.01, false, false),
                                            {3.0, true, true},
                                            {std::nan(""), false, true},
                                            {INFINITY, false, true}}) {
    const std::int64_t count = guard.losses.count;
    judge_loss(guard, loss);
    EXPECT_EQ(guard.outlier, outlier) << loss;
    EXPECT_EQ(guard.skip != 0, skip) << loss;
    EXPECT_EQ(guard.losses.count, count + (skip ? 0 : 1));
  }
  guard.limit = 0;
  judge_loss(guard, 1e9);
  EXPECT_EQ(guard.skip, 0) << "nobody asked";
}

TEST(Outliers, GoOnToTheBit) {
  const std::string folder = ::testing::TempDir() + "outliers_run";
  for (const scruple_policy policy : {SCRUPLE_STORED, SCRUPLE_RELEASED}) {
    std::filesystem::remove_all(folder);
    const Job job = job_with(policy, 5);
    Training whole(job);
    whole.take(policy == SCRUPLE_RELEASED ? 150 : 50);
    save(whole, "scruple", {}, folder, 0);
    const io::Checkpoint checkpoint(io::find_checkpoint(folder));
    Training second(job, &checkpoint);
    EXPECT_EQ(second.outliers()->state(), whole.outliers()->state());
    for (Training* training : {&whole, &second}) {
      training->take(3);
      EXPECT_TRUE(training->step(noise()).outlier);
      training->take(3);
    }
    EXPECT_TRUE(second.planes() == whole.planes());
    EXPECT_EQ(second.outliers()->state(), whole.outliers()->state());
  }
  EXPECT_THROW(Outliers("3 words"), std::runtime_error);
}

TEST(Outliers, TenInARowEndTheRunAndSaveIt) {
  Training training(job_with(SCRUPLE_STORED, 8));
  Span span;
  span.steps = 100;
  span.validates = false;
  std::int64_t saved = 0;
  std::vector<char> before;
  const Record record = run(
      training, training.windows, training.windows, span,
      [&](const Record& seen) {
        if (seen.steps.size() != 30) return;
        for (int p = 0; p < 2; ++p) {  // a model that has forgotten everything
          std::vector<float> values = training.state().master(p);
          for (float& value : values) value *= -30;
          training.state().set(p, values.data());
        }
        before = training.planes();
      },
      [&](const Record& seen) { return saved = static_cast<std::int64_t>(seen.steps.size()), true; });
  EXPECT_EQ(record.steps.size(), 40u);
  EXPECT_EQ(record.outliers(), 10);
  EXPECT_EQ(outliers_lost(record), 10);
  EXPECT_EQ(record.skipped(), 10);
  EXPECT_FALSE(record.stopped);
  EXPECT_EQ(saved, 40) << "the weights are from before";
  EXPECT_TRUE(training.planes() == before);
}

TEST(Outliers, OfReleasedMicroBatchesNobodyKnowsTheLossInTime) {
  Job job = job_with(SCRUPLE_RELEASED, 8);
  job.gradients.micro_batches = 2;
  EXPECT_THROW(Training{job}, std::invalid_argument);
}

}  // namespace
}  // namespace scruple::train
