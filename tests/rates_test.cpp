// The learning rate of a step, and of a parameter by its name.
#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <set>

#include "tests/jobs.h"
#include "train/run/checkpoint.h"
#include "train/run/schedule.h"

namespace scruple::train {
namespace {

TEST(Rates, WarmUpThenDown) {
  const Schedule cosine = {Annealing::cosine, 2.0, 10, 109};
  EXPECT_DOUBLE_EQ(cosine.at(1), 0.2);
  EXPECT_DOUBLE_EQ(cosine.at(10), 2.0);
  EXPECT_DOUBLE_EQ(cosine.at(60), 1.0);
  EXPECT_GT(cosine.at(109), 0.0);
  EXPECT_DOUBLE_EQ(cosine.at(110), 0.0);
  const Schedule linear = {Annealing::linear, 2.0, 0, 99};
  EXPECT_DOUBLE_EQ(linear.at(25), 1.5);
  EXPECT_DOUBLE_EQ(linear.at(100), 0.0);
  const Schedule constant = {Annealing::constant, 2.0, 4, 100};
  EXPECT_DOUBLE_EQ(constant.at(1), 0.5);
  EXPECT_DOUBLE_EQ(constant.at(100), 2.0);
}

TEST(Rates, APlateauThenDown) {
  const Schedule wsd = {Annealing::wsd, 2.0, 10, 100, 0, 19};
  EXPECT_DOUBLE_EQ(wsd.at(5), 1.0);
  for (std::int64_t step = 10; step <= 81; ++step) EXPECT_EQ(wsd.at(step), 2.0) << step;
  EXPECT_DOUBLE_EQ(wsd.at(82), 1.9);
  EXPECT_DOUBLE_EQ(wsd.at(91), 1.0);
  EXPECT_NEAR(wsd.at(100), 0.1, 1e-15);
  EXPECT_DOUBLE_EQ(wsd.at(101), 0.0);
  const Schedule never = {Annealing::wsd, 2.0, 0, 100, 0, 0};
  EXPECT_EQ(never.at(100), 2.0);
  const Schedule always = {Annealing::wsd, 2.0, 0, 99, 0, 99}, linear = {Annealing::linear, 2.0, 0, 99};
  for (std::int64_t step = 1; step <= 100; ++step) EXPECT_EQ(always.at(step), linear.at(step)) << step;
}

TEST(Rates, TheInverseSquareRootBeginsAtThePeak) {
  const Schedule schedule = {Annealing::inverse_sqrt, 2.0, 100, 10000};
  EXPECT_DOUBLE_EQ(schedule.at(50), 1.0);
  EXPECT_DOUBLE_EQ(schedule.at(100), 2.0);
  EXPECT_DOUBLE_EQ(schedule.at(400), 1.0);
  EXPECT_DOUBLE_EQ(schedule.at(10000), 0.2);
  const Schedule without = {Annealing::inverse_sqrt, 2.0, 0, 100};
  EXPECT_DOUBLE_EQ(without.at(1), 2.0);
  EXPECT_DOUBLE_EQ(without.at(4), 1.0);
}

TEST(Rates, NoneFallsBelowTheLeast) {
  for (const Annealing annealing :
       {Annealing::cosine, Annealing::linear, Annealing::wsd, Annealing::inverse_sqrt}) {
    const Schedule schedule = {annealing, 2.0, 4, 100, 0.5, 50};
    double last = 2;
    for (std::int64_t step = 4; step <= 200; ++step) {
      const double rate = schedule.at(step);
      EXPECT_GE(rate, 0.5) << step;
      EXPECT_LE(rate, last) << step;
      last = rate;
    }
    EXPECT_EQ(last, 0.5);
    EXPECT_DOUBLE_EQ(schedule.at(2), 1.0) << "the warmup begins at 0";
  }
}

constexpr const char *kHead = "*.wte.weight", *kNorms = "*.ln_*.weight";

Job job_with(const std::vector<Override>& overrides) {
  Job job = job_of(gpt2({1, 32, 2, 16, 256}), 2, "fp32", 1e-3);
  job.optimizer = [] { return Optimizer("sgdw", {{"momentum", 0.9}, {"weight_decay", 0.1}}); };
  job.overrides = overrides;
  return job;
}

std::vector<std::vector<float>> moved(const Job& job, int steps) {
  Training training(job);
  const auto weights = [&] {
    std::vector<std::vector<float>> all;
    for (std::size_t p = 0; p < training.state().parameters().size(); ++p)
      all.push_back(training.state().master(static_cast<int>(p)));
    return all;
  };
  std::vector<std::vector<float>> before = weights();
  training.take(steps);
  const std::vector<std::vector<float>> after = weights();
  for (std::size_t p = 0; p < after.size(); ++p)
    for (std::size_t i = 0; i < after[p].size(); ++i) before[p][i] = after[p][i] - before[p][i];
  return before;
}

// One step of SGD is the rate times what does not depend on it.
TEST(Overrides, AParameterTakesItsShareOfTheRate) {
  const std::vector<Parameter> parameters = parameters_of(job_with({}).shape);
  const auto plain = moved(job_with({}), 1), half = moved(job_with({{kHead, 0.5, {}}}), 1),
             still = moved(job_with({{"*", 2.0, {}}, {kHead, 0.0, {}}}), 1);
  std::set<bool> seen;
  for (std::size_t p = 0; p < parameters.size(); ++p) {
    const bool is_head = fits(parameters[p], kHead);
    seen.insert(is_head);
    for (std::size_t i = 0; i < plain[p].size(); ++i) {
      ASSERT_NEAR(half[p][i], (is_head ? 0.5f : 1.0f) * plain[p][i], 2e-7f) << parameters[p].name;
      ASSERT_NEAR(still[p][i], (is_head ? 0.0f : 2.0f) * plain[p][i], 2e-7f) << parameters[p].name;
    }
  }
  EXPECT_EQ(seen.size(), 2u) << "a pattern of all or nothing shows little";
}

TEST(Overrides, AParameterHasItsOwnDecay) {
  const std::vector<Parameter> parameters = parameters_of(job_with({}).shape);
  const Groups groups(parameters, job_with({}).optimizer, {{kHead, {}, 0.0}, {kNorms, {}, 0.25}}, 7);
  for (std::size_t p = 0; p < parameters.size(); ++p) {
    const double wanted = fits(parameters[p], kNorms)  ? 0.25
                          : fits(parameters[p], kHead) ? 0.0
                          : parameters[p].decays       ? 0.1
                                                       : 0.0;
    EXPECT_EQ(groups.of(p).get("weight_decay"), wanted) << parameters[p].name;
    EXPECT_EQ(groups.of(p).seed(), 7u);
  }
  EXPECT_EQ(groups.size(), 3u) << "the head's is that of what does not decay";
}

// Those that follow others of the same number in a checkpoint of the plain run.
TEST(Overrides, WithoutThemThereAreTwoGroups) {
  const std::vector<Parameter> parameters = parameters_of(job_with({}).shape);
  const Groups groups(parameters, job_with({}).optimizer, {}, 1);
  ASSERT_EQ(groups.size(), 2u);
  for (std::size_t p = 0; p < parameters.size(); ++p)
    EXPECT_EQ(groups.group_of(p), parameters[p].decays ? 0u : 1u);
}

TEST(Overrides, ARunWithThemGoesOnToTheBit) {
  const std::string folder = ::testing::TempDir() + "overrides_run";
  std::filesystem::remove_all(folder);
  const Job job = job_with({{kHead, 0.5, 0.2}, {kNorms, 3.0, {}}});
  Training whole(job);
  whole.take(2);
  save(whole, "fp32", {}, folder, 0);
  whole.take(2);
  const io::Checkpoint checkpoint(io::find_checkpoint(folder));
  Training second(job, &checkpoint);
  second.take(2);
  EXPECT_TRUE(second.planes() == whole.planes());
  EXPECT_THROW(Training(job_with({}), &checkpoint), std::runtime_error);
  EXPECT_THROW(Training(job_with({{kHead, 0.5, 0.3}, {kNorms, 3.0, {}}}), &checkpoint), std::runtime_error);
}

}  // namespace
}  // namespace scruple::train
