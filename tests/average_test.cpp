// The moving average of a run's weights: what it is, that small steps are not lost in its few bits, and that it goes on to
// the bit.
#include "train/run/average.h"

#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <vector>

#include "tests/jobs.h"
#include "train/run/checkpoint.h"

namespace scruple::train {
namespace {

constexpr GptShape kShape = {1, 32, 2, 16, 256};

Job job_with(const std::string& weights, double ema) {
  Job job = job_of(gpt2(kShape), 2, "scruple", 3e-3);
  job.describe = [weights](const Optimizer& optimizer, std::int64_t size) {
    scruple_tensor row = describe_by("scruple", "fp32")(optimizer, size);
    row.arrays[SCRUPLE_WEIGHT] = {format_named(weights.c_str()), nullptr, nullptr, SCRUPLE_NEAREST, 0};
    return row;
  };
  job.ema = ema;
  return job;
}

std::vector<float> decoded(Engine& engine, const scruple_tensor& row) {
  std::vector<float> values(static_cast<std::size_t>(row.size));
  check(scruple_decode(engine.raw(), &row, SCRUPLE_WEIGHT, values.data()));
  return values;
}

std::vector<std::vector<float>> averages(Training& training) {
  std::vector<std::vector<float>> all;
  for (const scruple_tensor& row : training.average()->table())
    all.push_back(decoded(training.engine(), row));
  return all;
}

TEST(Averages, FollowTheWeightsThatTheModelReads) {
  for (const char* format : {"fp32", "bf16", "fp16", "bf16+8", "fp16+4", "int8", "int10", "int12"}) {
    SCOPED_TRACE(format);
    Training training(job_with(format, 0.9));
    std::vector<std::vector<double>> wanted(training.state().parameters().size());
    for (std::int64_t step = 1; step <= 60; ++step) {
      training.step();
      const double decay = Average::decay_at(0.9, step);
      for (std::size_t p = 0; p < wanted.size(); ++p) {
        const std::vector<float> now = decoded(training.engine(), training.state().visible()[p]);
        wanted[p].resize(now.size());
        for (std::size_t i = 0; i < now.size(); ++i)
          wanted[p][i] = decay * wanted[p][i] + (1 - decay) * static_cast<double>(now[i]);
      }
    }
    const std::vector<std::vector<float>> found = averages(training);
    double error = 0, squares = 0;
    for (std::size_t p = 0; p < wanted.size(); ++p)
      for (std::size_t i = 0; i < wanted[p].size(); ++i) {
        error += std::pow(static_cast<double>(found[p][i]) - wanted[p][i], 2);
        squares += std::pow(wanted[p][i], 2);
      }
    EXPECT_LT(std::sqrt(error / squares), 5e-5);
  }
}

// After one step they are the weights, to the last bit that they have.
TEST(Averages, TakeLargeTensorsInPieces) {
  Job job = job_with("int10", 0.9);
  job.shape = gpt2({1, 64, 2, 16, 8200});
  Training training(job);
  training.step();
  const std::vector<float> found = decoded(training.engine(), training.average()->table()[0]);
  const std::vector<float> wanted = decoded(training.engine(), training.state().visible()[0]);
  ASSERT_GT(found.size(), 2u << 18);
  for (std::size_t i = 0; i < found.size(); ++i)
    ASSERT_NEAR(found[i], wanted[i], 7e-5 * std::abs(wanted[i])) << i;
}

TEST(Averages, TheFirstWeightsDoNotStay) {
  EXPECT_EQ(Average::decay_at(0.999, 1), 0);
  EXPECT_DOUBLE_EQ(Average::decay_at(0.999, 11), 0.5);
  EXPECT_DOUBLE_EQ(Average::decay_at(0.5, 100), 0.5);
  EXPECT_EQ(Average::decay_at(0.9999, 1'000'000), 0.9999);
  Training training(job_with("bf16", 0.999));
  training.step();
  const std::vector<std::vector<float>> found = averages(training);
  for (std::size_t p = 0; p < found.size(); ++p)
    EXPECT_EQ(found[p], decoded(training.engine(), training.state().visible()[p]));
}

// A step is 1e-5 or 1e-6 of the weight, and half of the last bit 8e-6 to 1.5e-5: to nearest it would hardly move. Weights of
// 1e-3 to 1e3 turn twice.
TEST(Averages, AreUnbiasedOverThousandsOfTinySteps) {
  const Job job = job_with("fp32", 0);
  Ledger ledger;
  const std::unique_ptr<Backend> backend = cpu_backend(2);
  const Optimizer optimizer = job.optimizer();
  State state(
      *backend, parameters_of(gpt2({1, 16, 1, 4, 256})), [&](auto) -> const Optimizer& { return optimizer; },
      job.describe, ledger);
  const auto weight_at = [](std::int64_t i) {
    return std::pow(10.0, static_cast<double>(i % 7 - 3)) * (1 + static_cast<double>(i % 97) / 97);
  };
  const auto set = [&](double factor) {
    state.start(
        [&](int, std::int64_t first, std::int64_t count, float* values) {
          for (std::int64_t i = 0; i < count; ++i)
            values[i] = static_cast<float>(factor * weight_at(first + i));
        },
        ledger);
  };
  for (const double decay : {0.999, 0.9999}) {
    Average average(*backend, state, decay, 1, ledger);
    set(1);
    average.take(1);
    double exact = 1;  // of each weight as it began
    std::int64_t step = 1'000'000;
    for (const double factor : {1.01, 0.99}) {
      set(factor);
      for (int i = 0; i < 2500; ++i, ++step) {
        average.take(step);
        exact = decay * exact + (1 - decay) * factor;
      }
      double sum = 0, squares = 0, count = 0;
      for (const scruple_tensor& row : average.table()) {
        const std::vector<float> values = decoded(backend->engine(), row);
        for (std::size_t i = 0; i < values.size(); ++i, ++count) {
          const double error =
              static_cast<double>(values[i]) / weight_at(static_cast<std::int64_t>(i)) - exact;
          sum += error, squares += error * error;
        }
      }
      const double deviation = std::sqrt(squares / count);
      EXPECT_GT(count, 5000);
      EXPECT_LT(deviation, 0.05 * 0.01) << decay << " to " << factor;
      EXPECT_LT(std::abs(sum / count), 5 * deviation / std::sqrt(count)) << decay << " to " << factor;
    }
  }
}

std::vector<char> bytes_of(Training& training) {
  std::vector<char> all;
  for (const scruple_tensor& row : training.average()->table()) {
    const scruple_array& weight = row.arrays[SCRUPLE_WEIGHT];
    const PlaneBytes bytes = plane_bytes(weight.format, row.size);
    for (const auto& [plane, count] : {std::pair{weight.codes, bytes.codes}, {weight.aux, bytes.aux}})
      all.insert(all.end(), static_cast<const char*>(plane), static_cast<const char*>(plane) + count);
  }
  return all;
}

TEST(Averages, GoOnToTheBit) {
  const std::string folder = ::testing::TempDir() + "average_run";
  std::filesystem::remove_all(folder);
  for (const scruple_policy policy : {SCRUPLE_STORED, SCRUPLE_RELEASED}) {
    std::filesystem::remove_all(folder);
    Job job = job_with("bf16+8", 0.8);
    job.gradients.policy = policy;
    Training whole(job);
    whole.take(3);
    save(whole, "scruple", {}, folder, 0);
    whole.take(4);
    const io::Checkpoint checkpoint(io::find_checkpoint(folder));
    EXPECT_EQ(trained_of(checkpoint.manifest()).size(), averages_of(checkpoint.manifest()).size());
    Training second(job, &checkpoint);
    second.take(4);
    EXPECT_TRUE(second.planes() == whole.planes());
    EXPECT_TRUE(bytes_of(second) == bytes_of(whole));
    job.ema = 0;
    EXPECT_THROW(Training(job, &checkpoint), std::runtime_error);
  }
}

TEST(Averages, ChangeNothingAndDependOnNoThreads) {
  Job job = job_with("bf16+8", 0);
  Training plain(job);
  plain.take(5);
  std::vector<char> one;
  for (const int threads : {1, 2, 3}) {
    job.ema = 0.9;
    job.threads = threads;
    Training training(job);
    training.take(5);
    EXPECT_TRUE(training.planes() == plain.planes()) << threads;
    if (one.empty()) one = bytes_of(training);
    EXPECT_TRUE(bytes_of(training) == one) << threads;
  }
}

TEST(Averages, AreCountedBeforehand) {
  for (const char* format : {"bf16", "int10"}) {
    const Job job = job_with(format, 0.9);
    Training training(job);
    training.take(1);
    EXPECT_EQ(memory_of(job).peak("ema"), 3 * training.state().size());
    EXPECT_EQ(training.counted.peak("ema"), 3 * training.state().size());
    EXPECT_EQ(memory_of(job).peak(), training.counted.peak());
  }
}

}  // namespace
}  // namespace scruple::train
