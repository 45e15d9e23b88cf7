// A backend that is no CPU's: the loop, the state and the sink ask of it what train/backend.h says, and no more. It has
// memory of its own, reads weights as bf16 codes and hands gradients over whole, as bf16.
#include "train/backend.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <map>
#include <utility>

#include "formats/bf16.h"
#include "train/trainer.h"

namespace scruple::train {
namespace {

// Memory that knows what it gave.
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
  bool has(const void* memory) const { return given.contains(const_cast<void*>(memory)); }

  std::map<void*, std::int64_t> given;
  std::int64_t most = 0;  // bytes at once
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
  std::int64_t released_bytes(const std::vector<Parameter>&) const override { return 0; }
  std::unique_ptr<Network> network(const Setup&, scruple_policy, Ledger& ledger) override {
    return std::make_unique<Squares>(ledger);
  }
  std::unique_ptr<Generator> generator(const Description&, Ledger&) override { return nullptr; }

 private:
  Engine engine_{"cpu", 1};
};

Job job_of(scruple_policy policy) {
  Job job;
  job.shape = gpt2({1, 32, 2, 8, 256});
  job.batch = 1;
  job.backend = [](int) -> std::unique_ptr<Backend> { return std::make_unique<Stranger>(); };
  job.optimizer = [] { return Optimizer("sgd", {{"momentum", 0.0}}); };
  job.describe = [](const Optimizer& optimizer, std::int64_t size) {
    scruple_tensor row = {};
    row.optimizer = optimizer.raw();
    row.size = size;
    check(scruple_tensor_use(&row, "scruple"));
    return row;
  };
  job.schedule = {Annealing::constant, 0.125, 0, 100};
  job.gradients.policy = policy;
  return job;
}

class BackendTest : public ::testing::TestWithParam<scruple_policy> {};

TEST_P(BackendTest, TrainsInItsOwnMemoryAndFormats) {
  const std::vector<std::uint8_t> text(100, 'a');
  const Windows windows(text, 8);
  arena.most = 0;
  {
    Job job = job_of(GetParam());
    if (GetParam() == SCRUPLE_COMPRESSED) job.gradients.micro_batches = 2;
    Ledger ledger;
    Trainer trainer(job, ledger);
    for (const scruple_tensor& row : trainer.state().table()) {
      EXPECT_TRUE(arena.has(row.arrays[SCRUPLE_WEIGHT].codes));
      EXPECT_TRUE(arena.has(row.arrays[SCRUPLE_WEIGHT].aux));
    }
    const double before = trainer.validate(windows, 1);
    for (int step = 0; step < 20; ++step) trainer.step(windows);
    // Each step keeps 7/8 of every weight.
    const double kept = std::pow(0.875, 40), after = trainer.validate(windows, 1);
    EXPECT_NEAR(after / before, kept, 0.03 * kept);
    std::int64_t counted = 0;
    for (const Ledger::Entry& entry : ledger.entries())
      if (entry.kind != "activations" && entry.kind != "workspace") counted += entry.peak;
    EXPECT_GT(ledger.peak("gradients"), 0);
    EXPECT_EQ(arena.most, counted) << "all planes, gradients and accumulators";
  }
  EXPECT_TRUE(arena.given.empty()) << "planes, accumulators and gradients go back where they came from";
}

INSTANTIATE_TEST_SUITE_P(Policies, BackendTest,
                         ::testing::Values(SCRUPLE_STORED, SCRUPLE_RELEASED, SCRUPLE_COMPRESSED));

}  // namespace
}  // namespace scruple::train
