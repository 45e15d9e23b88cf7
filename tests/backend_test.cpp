// A backend that is no CPU's: the loop, the state, the sink and checkpoints ask of it what train/pass/backend.h says, and no
// more. It has memory of its own, which says that the host cannot touch it, reads weights as bf16 codes and hands
// gradients over whole, as bf16.
#include "train/pass/backend.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <stdexcept>
#include <utility>

#include "formats/bf16.h"
#include "tests/files.h"
#include "tests/jobs.h"
#include "tests/models.h"
#include "train/model/model.h"
#include "train/run/checkpoint.h"
#include "train/run/trainer.h"

namespace scruple::train {
namespace {

// Memory that knows what it gave, and what of it was copied. (The host can touch it in truth: the engine is the CPU's.)
class Arena final : public Memory {
 public:
  void* take(std::int64_t bytes) override {
    void* const memory = std::calloc(1, static_cast<std::size_t>(bytes));
    given[memory] = bytes;
    std::int64_t now = 0;
    for (const auto& [place, size] : given) now += size;
    most = std::max(most, now);
    return memory;
  }
  void give_back(void* memory) noexcept override {
    given.erase(memory);
    std::free(memory);
  }
  bool is_host() const override { return false; }
  void read(void* to_host, const void* from, std::int64_t bytes) override {
    read_bytes += bytes;
    Memory::read(to_host, from, bytes);
  }
  void write(void* to, const void* from_host, std::int64_t bytes) override {
    written_bytes += bytes;
    Memory::write(to, from_host, bytes);
  }
  bool has(const void* memory) const { return given.contains(const_cast<void*>(memory)); }

  std::map<void*, std::int64_t> given;
  std::int64_t most = 0;  // bytes at once
  std::int64_t read_bytes = 0, written_bytes = 0;
};

Arena arena;

// A loss of half the squares of all weights, whatever the batch: each gradient is its weight.
class Squares final : public Network {
 public:
  explicit Squares(Ledger& ledger) : ledger_(ledger) {}
  double loss(Visible weights, const Batch&) override {
    double sum = 0;
    for (const scruple_tensor& row : weights)
      for (std::int64_t i = 0; i < row.size; ++i) {
        const double w = static_cast<double>(Bf16::decode(codes_of(row)[i]));
        sum += w * w / 2;
      }
    return sum;
  }
  void train(Visible weights, const Batch& batch, Sink& sink, float weight) override {
    losses_.push_back(loss(weights, batch));
    const float scale = *sink.loss_scale() * weight;
    for (std::size_t p = weights.size(); p-- > 0;) {
      const std::int64_t size = weights[p].size;
      const Block whole(ledger_, "gradients", size * 2, arena);
      for (std::int64_t i = 0; i < size; ++i) {
        const float gradient = Bf16::decode(codes_of(weights[p])[i]) * scale;
        whole.as<u16>()[i] = static_cast<u16>(bits_of(gradient) >> 16);  // exact: scale is a power of two
      }
      sink.add(static_cast<std::int64_t>(p), 0, size, whole.as<void>(), "bf16");
    }
  }
  std::vector<double> losses() override { return std::exchange(losses_, {}); }
  void watch(Guard*) override {}
  void judge(double*, const float*) override {}

 private:
  static const u16* codes_of(const scruple_tensor& row) {
    const scruple_array& weight = row.arrays[SCRUPLE_WEIGHT];
    EXPECT_STREQ(info_of(weight.format).name, "bf16");
    EXPECT_EQ(weight.aux, nullptr) << "extra bits are the optimizer's";
    EXPECT_TRUE(arena.has(weight.codes));
    return static_cast<const u16*>(weight.codes);
  }
  Ledger& ledger_;
  std::vector<double> losses_;
};

class Stranger final : public Backend {
 public:
  Engine& engine() override { return engine_; }
  Memory& memory() override { return arena; }
  std::int64_t released_bytes(const std::vector<Parameter>&, Precision) const override { return 0; }
  std::unique_ptr<Network> network(const Setup&, Visible, scruple_policy, Ledger& ledger) override {
    return std::make_unique<Squares>(ledger);
  }
  std::unique_ptr<Generator> generator(const Description&, Visible, Ledger&) override { return nullptr; }
  std::string device() const override { return "a stranger"; }

 private:
  Engine engine_{"cpu", 1};
};

Job job_of(scruple_policy policy) {
  Job job;
  job.shape = gpt2({1, 32, 2, 8, 256});
  job.batch = 1;
  job.backend = [](int) -> std::unique_ptr<Backend> { return std::make_unique<Stranger>(); };
  job.optimizer = [] { return Optimizer("sgd", {{"momentum", 0.0}}); };
  job.describe = describe_by("scruple");
  job.schedule = {Annealing::constant, 0.125, 0, 100};
  job.gradients.policy = policy;
  return job;
}

// Memory that cannot be had, in either way of saying so: nothing stays counted.
TEST(Ledger, AFailedBlockIsGivenBack) {
  class Failing final : public Memory {
   public:
    explicit Failing(bool throws) : throws_(throws) {}
    void* take(std::int64_t) override {
      if (throws_) throw std::runtime_error("the device is gone");
      return nullptr;
    }
    void give_back(void*) noexcept override { ADD_FAILURE() << "nothing was taken"; }

   private:
    const bool throws_;
  };
  for (const bool throws : {true, false}) {
    Failing memory(throws);
    Ledger ledger(1000);
    EXPECT_ANY_THROW(Block(ledger, "weights", 600, memory));
    EXPECT_ANY_THROW(Block(ledger, "weights", 1001, memory));
    EXPECT_EQ(ledger.entries()[0].now, 0);
    EXPECT_NO_THROW(Block(ledger, "weights", 1000)) << "there is room for it";
  }
}

TEST(CheckSetup, ABatchHasFewerRowsThanAnIntCanCount) {
  train::Setup setup;
  setup.shape = gpt2({1, 32, 2, 1024, 256});
  setup.batch = (1 << 21) - 1;
  EXPECT_NO_THROW(check_setup(setup));
  setup.batch = 1 << 21;
  EXPECT_THROW(check_setup(setup), std::invalid_argument);
}

class BackendTest : public ::testing::TestWithParam<scruple_policy> {};

TEST_P(BackendTest, TrainsInItsOwnMemoryAndFormats) {
  arena.most = 0;
  {
    Job job = job_of(GetParam());
    if (GetParam() == SCRUPLE_COMPRESSED) job.gradients.micro_batches = 2;
    Training training(job);
    for (const scruple_tensor& row : training.state().table()) {
      EXPECT_TRUE(arena.has(row.arrays[SCRUPLE_WEIGHT].codes));
      EXPECT_TRUE(arena.has(row.arrays[SCRUPLE_WEIGHT].aux));
    }
    const double before = training.validate(1);
    training.take(20);
    // Each step keeps 7/8 of every weight.
    const double kept = std::pow(0.875, 40), after = training.validate(1);
    EXPECT_NEAR(after / before, kept, 0.03 * kept);
    std::int64_t counted = 0;
    for (const Ledger::Entry& entry : training.counted.entries())
      if (entry.kind != "activations" && entry.kind != "workspace") counted += entry.peak;
    if (GetParam() == SCRUPLE_RELEASED) counted += std::int64_t{sizeof(Guard)};
    EXPECT_GT(training.counted.peak("gradients"), 0);
    EXPECT_EQ(arena.most, counted) << "all planes, gradients and accumulators, and the guard";
  }
  EXPECT_TRUE(arena.given.empty()) << "planes, accumulators and gradients go back where they came from";
}

Job with_momentum(const char* recipe = "scruple") {
  Job job = job_of(SCRUPLE_STORED);
  job.optimizer = [] { return Optimizer("sgd", {{"momentum", 0.5}}); };
  job.describe = describe_by(recipe);
  return job;
}

using BackendFiles = scruple_tests::Files;

TEST_F(BackendFiles, EveryPlaneIsCopiedToACheckpointAndBackAndTheRunGoesOnToTheBit) {
  Training whole(with_momentum());
  whole.take(4);
  {
    Training first(with_momentum());
    first.take(2);
    arena.read_bytes = 0;
    save(first, "scruple", {}, path("run"), 0);
    EXPECT_EQ(arena.read_bytes, static_cast<std::int64_t>(first.planes().size()));
  }
  const io::Checkpoint saved(io::find_checkpoint(path("run")));
  arena.written_bytes = 0;
  Training second(with_momentum(), &saved);
  EXPECT_EQ(arena.written_bytes, static_cast<std::int64_t>(second.planes().size()));
  second.take(2);
  EXPECT_EQ(second.planes(), whole.planes());
}

// Of the machine and of every control group around it; a page cache is no memory in use.
TEST_F(BackendFiles, WhatTheHostHasFreeIsTheLeastOfItsLimits) {
  const auto write = [&](const std::string& file, const std::string& text) {
    std::filesystem::create_directories(std::filesystem::path(path(file)).parent_path());
    std::ofstream(path(file)) << text;
  };
  const auto free = [&] { return free_host_memory(path("")); };
  write("proc/meminfo", "MemTotal: 9000 kB\nMemAvailable: 5000 kB\nSwapFree: 1 kB\n");
  EXPECT_EQ(free(), 5000 * 1024);
  write("proc/self/cgroup", "4:memory:/pods/mine\n0::/jobs/mine\n");
  EXPECT_EQ(free(), 5000 * 1024) << "no limits are there";
  write("sys/fs/cgroup/jobs/mine/memory.max", "max\n");
  write("sys/fs/cgroup/jobs/memory.max", "4000000\n");
  EXPECT_EQ(free(), 4000000);
  write("sys/fs/cgroup/jobs/memory.current", "3000000\n");
  EXPECT_EQ(free(), 1000000);
  write("sys/fs/cgroup/jobs/memory.stat", "anon 1500000\nactive_file 500000\ninactive_file 1000000\n");
  EXPECT_EQ(free(), 2000000);
  write("sys/fs/cgroup/memory.max", "1900000\n");
  EXPECT_EQ(free(), 1900000) << "a container sees its own group as the root";
  write("sys/fs/cgroup/jobs/mine/memory.max", "1800000\n");
  EXPECT_EQ(free(), 1800000);
  write("sys/fs/cgroup/memory/pods/mine/memory.limit_in_bytes", "1700000\n");
  write("sys/fs/cgroup/memory/pods/mine/memory.usage_in_bytes", "200000\n");
  write("sys/fs/cgroup/memory/pods/mine/memory.stat", "total_inactive_file 100000\n");
  EXPECT_EQ(free(), 1600000) << "version 1";
  write("sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n");
  EXPECT_EQ(free(), 1600000);
  write("sys/fs/cgroup/jobs/memory.current", "6000000\n");
  EXPECT_EQ(free(), 0) << "more in use than the limit";
}

// Recipes have changed: moments are decoded and encoded.
TEST_F(BackendFiles, MomentsOfAnotherFormatAreTakenUp) {
  Training first(with_momentum());
  first.step();
  save(first, "scruple", {}, path("run"), 0);
  const io::Checkpoint saved(io::find_checkpoint(path("run")));
  Job job = with_momentum();
  job.describe = [describe = job.describe](const Optimizer& optimizer, std::int64_t size) {
    scruple_tensor row = describe(optimizer, size);
    row.arrays[SCRUPLE_WEIGHT + 1] = {format_named("fp32"), nullptr, nullptr, SCRUPLE_NEAREST, 0};
    return row;
  };
  Training second(job, &saved);
  for (std::size_t p = 0; p < first.state().table().size(); ++p) {
    const scruple_tensor &a = first.state().table()[p], &b = second.state().table()[p];
    std::vector<float> want(static_cast<std::size_t>(a.size)), got(want.size());
    check(scruple_decode(first.engine().raw(), &a, SCRUPLE_WEIGHT + 1, want.data()));
    check(scruple_decode(second.engine().raw(), &b, SCRUPLE_WEIGHT + 1, got.data()));
    EXPECT_EQ(want, got);
  }
}

TEST_F(BackendFiles, ItsWeightsAreWrittenAsTheModelComputesWithThem) {
  for (const char* recipe : {"scruple", "lpmm", "fp32"}) {
    Ledger ledger;
    Trainer trainer(with_momentum(recipe), ledger);
    const std::string folder = path(recipe);
    write_weights(folder, gpt2_model({1, 32, 2, 8, 256}), trainer, ledger);
    const Model model = read_model(folder);
    for (std::size_t p = 0; p < model.parameters.size(); ++p) {
      const scruple_tensor& row = trainer.state().visible()[p];
      std::vector<float> want(static_cast<std::size_t>(row.size));
      check(scruple_decode(trainer.engine().raw(), &row, SCRUPLE_WEIGHT, want.data()));
      EXPECT_EQ(model.parameters[p], want) << recipe << ' ' << p;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Policies, BackendTest,
                         ::testing::Values(SCRUPLE_STORED, SCRUPLE_RELEASED, SCRUPLE_COMPRESSED));

}  // namespace
}  // namespace scruple::train
