// A run on a GPU beside one on the CPU: averages, moves from one to the other, steps that are not taken, saves.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "tests/cuda_trainer.h"
#include "tests/descriptions.h"
#include "train/cuda/device.h"
#include "train/cuda/guard.h"
#include "train/run/average.h"
#include "train/run/checkpoint.h"
#include "train/run/saves.h"

namespace scruple::train {
namespace {

// Of the same weights, whether a step reads them or they are decoded for it, in more than one piece.
TEST_F(CudaTrainer, AveragesAreTheCpus) {
  const Description shape = gpt2({1, 64, 2, 16, 4200});
  for (const char* format : {"fp32", "bf16", "bf16+8", "int8", "int9", "int10", "int11", "int12"}) {
    const auto averaged = [&](OpenBackend open) {
      const std::unique_ptr<Backend> backend = open(0);
      const Optimizer optimizer("adamw");
      const auto describe = [&](const Optimizer& of, std::int64_t size) {
        scruple_tensor row = describe_by("scruple")(of, size);
        check(scruple_tensor_set_format(&row, "weights", format));
        return row;
      };
      Ledger ledger;
      State state(
          *backend, parameters_of(shape), [&](auto) -> const Optimizer& { return optimizer; }, describe,
          ledger);
      Average average(*backend, state, 0.9, 1, ledger);
      const Fill first = spread_values(shape);
      for (std::int64_t step = 1; step <= 5; ++step) {
        state.start(
            [&](int which, std::int64_t at, std::int64_t count, float* values) {
              first(which, at, count, values);
              for (float& value : std::span(values, static_cast<std::size_t>(count)))
                value *= static_cast<float>(step);
            },
            ledger);
        average.take(step);
      }
      return bytes_of(*backend, average.table());
    };
    EXPECT_TRUE(averaged(cuda_backend) == averaged(cpu_backend)) << format;
  }
}

// Saved on one device, taken up on the other, and back.
TEST_F(CudaTrainer, ARunMovesBetweenDevices) {
  for (const char* recipe : {"lpmm", "scruple"}) {
    const std::string folder = ::testing::TempDir() + "moves_" + recipe;
    const auto saved = [&](Training& training) {
      std::filesystem::remove_all(folder);
      save(training, recipe, {}, folder, 0);
      return std::make_unique<io::Checkpoint>(io::find_checkpoint(folder));
    };
    const Job on_gpu = job_of(llama(), cuda_backend, recipe, Precision::bf16),
              on_cpu = job_of(llama(), cpu_backend, recipe);
    Training first(on_gpu);
    first.take(3);
    const auto from_gpu = saved(first);
    Training second(on_cpu, from_gpu.get());
    EXPECT_TRUE(second.planes() == first.planes()) << recipe;
    const double here = first.step().loss;
    EXPECT_NEAR(second.step().loss, here, 0.02 * here) << recipe;
    const auto from_cpu = saved(second);
    Training third(on_gpu, from_cpu.get());
    EXPECT_TRUE(third.planes() == second.planes()) << recipe;
    EXPECT_EQ(third.steps_taken(), 4);
    EXPECT_TRUE(std::isfinite(third.step().loss)) << recipe;
    std::filesystem::remove_all(folder);
  }
}

// Saved with its moments on the device, gone on with them in host memory, and back.
TEST_F(CudaTrainer, ARunMovesItsMoments) {
  const std::string folder = ::testing::TempDir() + "moves_moments";
  const Job here = with_large_matrices(SCRUPLE_RELEASED);
  Job away = here;
  away.offloads_state = true;
  const Taken whole = take(here, 6);
  std::unique_ptr<io::Checkpoint> from;
  std::vector<char> planes;
  for (const Job& job : {here, away, here}) {
    Training training(job, from.get());
    training.take(2);
    std::filesystem::remove_all(folder);
    save(training, "scruple", {}, folder, 0);
    from = std::make_unique<io::Checkpoint>(io::find_checkpoint(folder));
    planes = training.planes();
  }
  EXPECT_TRUE(planes == whole.planes);
  std::filesystem::remove_all(folder);
}

// ---- Steps that are not taken ----

// Losses and norms as they come, some of them outliers, some not finite.
TEST_F(CudaTrainer, JudgesWithTheBitsOfTheCpu) {
  const std::unique_ptr<Backend> gpu = cuda_backend(0);
  Ledger ledger;
  struct Cells {
    Guard guard;
    double loss_sum, sum_squares;
    float share, loss_scale;
  };
  const Block cells(ledger, "workspace", sizeof(Cells), gpu->memory());
  auto* const there = cells.as<Cells>();
  const cuda::Stream stream;
  for (const bool released : {false, true}) {
    Cells here = {};
    here.guard.released = released;
    here.guard.parts = 3;
    here.guard.limit = 4;
    here.loss_scale = 8;
    int outliers = 0, skipped = 0;
    for (int i = 0; i < 300; ++i) {
      const double noise = static_cast<double>(i * i * 31 % 97) / 97;
      here.loss_sum = i % 41 == 40 ? 1e4 : i % 67 == 66 ? std::nan("") : 1000 + 300 * noise;
      here.share = 1.0f / static_cast<float>(490 + i % 7);
      here.sum_squares = i % 53 == 52 ? 1e9 : i % 71 == 70 ? INFINITY : 50 + 11 * noise;
      gpu->memory().write(there, &here, sizeof here);
      cuda::judge_loss(&there->guard, &there->loss_sum, &there->share, stream);
      judge_loss(here.guard, here.loss_sum * static_cast<double>(here.share));
      if (!released && i % 3 == 2) {
        cuda::judge_step(&there->guard, &there->sum_squares, &there->loss_scale, stream);
        judge_step(here.guard, here.sum_squares, here.loss_scale);
      }
      stream.wait();
      Cells got = {};
      gpu->memory().read(&got, there, sizeof got);
      const auto bits = [](const Cells& c) {
        const Guard& g = c.guard;
        std::vector<std::uint64_t> all;
        for (const double x : {g.losses.mean, g.losses.variance, g.norms.mean, g.norms.variance, g.loss,
                               g.norm, c.sum_squares, static_cast<double>(g.skip), g.outlier ? 1.0 : 0.0,
                               static_cast<double>(g.losses.count), static_cast<double>(g.norms.count)})
          all.push_back(std::isnan(x) ? 1 : std::bit_cast<std::uint64_t>(x));  // NaNs have many bits
        return all;
      };
      ASSERT_EQ(bits(got), bits(here)) << i << (released ? ", released" : "");
      outliers += here.guard.outlier ? 1 : 0;
      skipped += here.guard.skip != 0 ? 1 : 0;
    }
    EXPECT_GT(outliers, 2);
    EXPECT_EQ(skipped > outliers, released);
  }
}

// The same data with the same weights: what is skipped, and what of it.
TEST_F(CudaTrainer, SkipsWhatTheCpuSkips) {
  static const std::vector<std::uint8_t> noise = [] {
    std::vector<std::uint8_t> all(4096);
    for (std::size_t i = 0; i < all.size(); ++i) all[i] = static_cast<std::uint8_t>(128 + i * i * 31 % 97);
    return all;
  }();
  const Windows strange(noise, llama().context);
  for (const scruple_policy policy : {SCRUPLE_STORED, SCRUPLE_COMPRESSED, SCRUPLE_RELEASED})
    for (const int parts : {1, 2}) {
      if (policy == SCRUPLE_RELEASED && parts > 1) continue;
      const auto decisions = [&](OpenBackend open, bool graphs) {
        Job job = job_of(llama(), open);
        job.batch = 16, job.graphs = graphs;
        job.describe = describe_by("fp32", "fp32");
        job.gradients.policy = policy;
        job.gradients.micro_batches = parts;
        job.skip_outliers = policy == SCRUPLE_RELEASED ? 5 : 12;
        Training training(job);
        std::vector<bool> outliers;
        for (int i = 0; i < 160; ++i)
          outliers.push_back(training.step(i == 140 || i == 155 ? strange : training.windows).outlier);
        return std::pair(outliers, *training.outliers());
      };
      const auto [here, seen] = decisions(cpu_backend, true);
      for (const bool graphs : {true, false}) {
        SCOPED_TRACE(testing::Message()
                     << "policy " << policy << ", " << parts << " parts, graphs " << graphs);
        const auto [there, seen_there] = decisions(cuda_backend, graphs);
        EXPECT_EQ(there, here);
        EXPECT_EQ(std::count(here.begin(), here.end(), true), 2);
        EXPECT_EQ(seen_there.losses.count, seen.losses.count);
        EXPECT_EQ(seen_there.norms.count, seen.norms.count);
        EXPECT_NEAR(seen_there.losses.mean, seen.losses.mean, 1e-3 * seen.losses.mean);
        EXPECT_NEAR(seen_there.norms.mean, seen.norms.mean, 1e-2 * seen.norms.mean);
      }
    }
}

// A token that spoils every window it is in: whole steps are skipped on both, the same ones.
TEST_F(CudaTrainer, SkipsTheLossesThatTheCpuSkips) {
  const auto decisions = [&](OpenBackend open) {
    Job job = job_of(llama(), open);
    job.batch = 1;
    job.gradients.policy = SCRUPLE_RELEASED;
    Training training(job);
    std::vector<float> table = training.state().master(0);
    std::fill_n(table.begin() + 'k' * 64, 64, INFINITY);
    training.state().set(0, table.data());
    std::vector<std::int64_t> tensors;
    for (int i = 0; i < 40; ++i) {
      const std::vector<char> before = training.planes();
      const Outcome outcome = training.step();
      tensors.push_back(outcome.tensors);
      EXPECT_EQ(std::isfinite(outcome.loss), outcome.tensors == 0);
      EXPECT_EQ(training.planes() == before, outcome.tensors > 0);
    }
    return tensors;
  };
  const std::vector<std::int64_t> cpu = decisions(cpu_backend);
  EXPECT_EQ(decisions(cuda_backend), cpu);
  EXPECT_GT(std::count(cpu.begin(), cpu.end(), 0), 0) << "some windows are without it";
  EXPECT_LT(std::count(cpu.begin(), cpu.end(), 0), 40);
}

// ---- Saves ----

// Half a GB takes longer to copy than a step of three short windows takes: without waiting the copy has weights of after it.
TEST_F(CudaTrainer, AStepWaitsForTheCopiesOfWhatItWrites) {
  for (const scruple_policy policy : {SCRUPLE_STORED, SCRUPLE_RELEASED, SCRUPLE_COMPRESSED}) {
    SCOPED_TRACE(policy);
    Job job = job_of(gpt2({8, 1024, 16, 64, 256}), cuda_backend, "scruple", Precision::bf16);
    job.initial = spread_values(job.shape);
    job.gradients.policy = policy;
    Training training(job);
    Copies& copies = *training.copies();
    Ledger host;
    Block block;
    for (int step = 0; step < 4; ++step) {  // as it is, recorded, and replayed
      const std::vector<char> want = training.planes();
      if (step == 0) block = Block(host, "saves", std::ssize(want), copies.memory());
      std::vector<Copies::Plane> planes;
      char* to = block.as<char>();
      const auto add = [&](std::size_t tensor, const void* plane, std::int64_t bytes) {
        if (bytes > 0) planes.push_back({tensor, to, plane, bytes});
        to += bytes;
      };
      for (std::size_t t = 0; t < training.state().table().size(); ++t) {
        const scruple_tensor& row = training.state().table()[t];
        for (const scruple_array& array : std::span(row.arrays, SCRUPLE_GRADIENT)) {
          if (array.codes == nullptr) continue;
          const PlaneBytes bytes = plane_bytes(array.format, row.size);
          add(t, array.codes, bytes.codes), add(t, array.aux, bytes.aux);
        }
      }
      ASSERT_EQ(to, block.as<char>() + want.size());
      std::reverse(planes.begin(), planes.end());
      copies.take(planes);
      training.step();
      copies.wait();
      EXPECT_TRUE(std::equal(want.begin(), want.end(), block.as<char>())) << "step " << step;
      EXPECT_FALSE(training.planes() == want) << "step " << step;
    }
  }
}

TEST_F(CudaTrainer, ASaveBesideTrainingHasTheBytesOfOneThatWaits) {
  const auto folder = std::filesystem::path(::testing::TempDir()) / "cuda-saves";
  for (const scruple_policy policy : {SCRUPLE_STORED, SCRUPLE_RELEASED, SCRUPLE_COMPRESSED}) {
    std::filesystem::remove_all(folder);
    Job job = job_of(gpt2({2, 64, 2, 32, 256}), cuda_backend, "scruple", Precision::bf16);
    job.gradients.policy = policy;
    job.ema = 0.9;
    Training a(job), b(job);
    Saves saves(a, "scruple", folder / "a", 0, [](const std::string& words) { ADD_FAILURE() << words; });
    for (int step = 1; step <= 6; ++step) {
      a.step(), b.step();
      saves.save({}, step < 6);
      save(b, "scruple", {}, folder / "b", 0);
    }
    for (int step = 1; step <= 6; ++step) {
      EXPECT_EQ(saves.ended().value_or(Saved{.problem = "none"}).problem, "");
      const auto text = [&](const char* run) {  // it has every plane's checksum
        return io::read_text(folder / run / "checkpoints" / io::step_name(step) / "manifest.json", 1 << 20);
      };
      EXPECT_EQ(text("a"), text("b")) << policy << ", step " << step;
    }
  }
  std::filesystem::remove_all(folder);
}

}  // namespace
}  // namespace scruple::train
