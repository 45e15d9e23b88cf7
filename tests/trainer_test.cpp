// The trainer as a whole, on every device and on the CPU: policies, accumulation, clipping, loss scaling and thread counts
// on a small model that learns a real (tiny) task.
#include "train/run/trainer.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <memory>
#include <optional>
#include <set>

#include "formats/codec.h"
#include "tests/descriptions.h"
#include "tests/jobs.h"
#include "train/run/checkpoint.h"
#include "train/run/run.h"

namespace scruple::train {
namespace {

constexpr GptShape kSmall = {2, 32, 2, 24, 256};

Job job_of(const std::string& recipe, scruple_policy policy = SCRUPLE_STORED,
           const std::string& gradient = "fp32") {
  Job job = job_of(gpt2(kSmall), 8, recipe, 3e-3);
  job.describe = describe_by(recipe, gradient);
  job.gradients.policy = policy;
  return job;
}

const Windows& text() { return train::text(kSmall.context); }

std::vector<std::string> recipes() {
  std::vector<std::string> names;
  for (int i = 0; i < scruple_recipe_count(); ++i) {
    scruple_recipe_info info;
    check(scruple_recipe_at(i, &info));
    names.emplace_back(info.name);
  }
  return names;
}

// ---- On every device ----

struct Device {
  const char* name;
  OpenBackend open;
  Precision activations;
};

class Devices : public ::testing::TestWithParam<Device> {
 protected:
  void SetUp() override {
    if (!on_cpu() && !has_cuda()) GTEST_SKIP() << "this machine has no GPU that the trainer could run on";
  }
  static bool on_cpu() { return GetParam().open == cpu_backend; }
  static Job job_of(const Description& shape, const std::string& recipe, double lr = 1e-3) {
    Job job = train::job_of(shape, 3, recipe, lr);
    job.backend = GetParam().open;
    job.activations = GetParam().activations;
    return job;
  }
};
INSTANTIATE_TEST_SUITE_P(All, Devices,
                         ::testing::Values(Device{"cpu", cpu_backend, Precision::fp32},
                                           Device{"cuda", cuda_backend, Precision::bf16}),
                         [](const auto& device) { return device.param.name; });

TEST_P(Devices, PoliciesGiveTheSameBits) {
  for (const std::string& recipe : on_cpu() ? recipes() : std::vector<std::string>{"fp32", "scruple", "lpmm"})
    for (const SmallModel& family : small_models()) {
      Job job = job_of(family.shape, recipe);
      // What is kept must hold what is handed over: tied tables come in fp32.
      job.describe = describe_by(recipe, "fp32");
      const Taken stored = take(job, 3);
      for (const scruple_policy policy : {SCRUPLE_STORED, SCRUPLE_RELEASED, SCRUPLE_COMPRESSED}) {
        job.gradients.policy = policy;
        expect_same(take(job, 3), stored, recipe + ", " + family.name + ", policy " + std::to_string(policy));
      }
    }
}

TEST_P(Devices, RecomputationGivesTheSameBits) {
  for (const char* recipe : {"scruple", "lpmm"})
    for (const SmallModel& family : small_models()) {
      Job job = job_of(family.shape, recipe);
      const Taken none = take(job, 3);
      for (const Recompute recompute :
           {Recompute::norms, Recompute::mlp, Recompute::keep_attention, Recompute::block}) {
        job.recompute = recompute;
        expect_same(take(job, 3), none, std::string(recipe) + ", " + family.name);
      }
    }
}

TEST_P(Devices, LearnsInEveryRecipe) {
  for (const std::string& recipe : recipes())
    for (const SmallModel& family : small_models()) {
      if (recipe != "lpmm" && family.name != std::string("gpt2")) continue;  // one is enough
      Job job = job_of(family.shape, recipe, 3e-3);
      if (on_cpu() || recipe == "lpmm") job.gradients.max_norm = 1;
      const std::vector<double> losses = take(job, 60).losses;
      EXPECT_NEAR(losses.front(), std::log(256), 0.2) << recipe;  // it starts without a clue
      EXPECT_LT(losses.back(), 0.7 * losses.front()) << recipe << ", " << family.name;
    }
}

TEST_P(Devices, ARunGoesOnToTheBit) {
  const std::string folder = ::testing::TempDir() + GetParam().name + "_run";
  for (const char* recipe : {"scruple", "lpmm"}) {
    std::filesystem::remove_all(folder);
    Job job = job_of(llama(), recipe);
    job.activations = Precision::fp16;
    job.scaler = scruple_scaler_dynamic();
    job.gradients.micro_batches = 2;
    job.gradients.max_norm = 1;
    Training whole(job);
    whole.take(4);
    save(whole, recipe, {}, folder, 0);
    const std::vector<Outcome> outcomes = whole.take(4);
    const io::Checkpoint checkpoint(io::find_checkpoint(folder));
    Training second(job, &checkpoint);
    EXPECT_EQ(second.steps_taken(), 4);
    for (const Outcome& outcome : outcomes) EXPECT_EQ(second.step().loss, outcome.loss) << recipe;
    EXPECT_TRUE(second.planes() == whole.planes()) << recipe;
  }
}

TEST_P(Devices, AStepBelowTheLastBitIsSeen) {
  for (const auto& [format, lr] :
       {std::pair{"bf16", 1e-9}, {"bf16", 1e-2}, {"int10", 1e-9}, {"int10", 1e-2}}) {
    Job job = job_of(gpt2(kSmall), "scruple", lr);
    job.describe = [format = format](const Optimizer& optimizer, std::int64_t size) {
      scruple_tensor row = describe_by("scruple")(optimizer, size);
      row.arrays[SCRUPLE_WEIGHT].format = format_named(size > 4096 ? format : "fp32");
      row.arrays[SCRUPLE_WEIGHT].rounding = SCRUPLE_NEAREST;
      return row;
    };
    Training training(job);
    training.step();
    const std::vector<std::vector<float>> before = training.state().heads();
    training.step();
    const std::optional<Unmoved> found = training.state().unmoved_since(before);
    ASSERT_TRUE(found.has_value());
    if (lr < 1e-3)
      EXPECT_EQ(found->share, 1) << format;
    else
      EXPECT_LT(found->share, 0.05) << format;
  }
}

// ---- On the CPU ----

// Several tiles per tensor: rows of 1 MiB are 1,024 at this width, and the vocabulary has more.
TEST(Policies, TheSameBitsInSeveralTiles) {
  Job job = job_of("scruple");
  job.shape = gpt2({1, 256, 2, 24, 2048});
  job.batch = 2;
  const Taken stored = take(job, 2);
  for (const scruple_policy policy : {SCRUPLE_RELEASED, SCRUPLE_COMPRESSED}) {
    job.gradients.policy = policy;
    expect_same(take(job, 2), stored, std::to_string(policy));
  }
}

TEST(Policies, ReleasedHoldsOneTileOfGradients) {
  Job job = job_of("scruple", SCRUPLE_RELEASED);
  job.shape = gpt2({1, 256, 2, 24, 4096});
  job.batch = 2;
  Training training(job);
  training.take(2);
  EXPECT_GT(training.counted.peak("gradients"), 0);
  EXPECT_LE(training.counted.peak("gradients"), 1 << 20);
}

TEST(Policies, CompressedGivesItsAccumulatorsBackAfterEachStep) {
  Training training(job_of("scruple", SCRUPLE_COMPRESSED, "int8"));
  training.take(2);
  for (const Ledger::Entry& entry : training.counted.entries())
    if (entry.kind == "gradients") {
      EXPECT_EQ(entry.now, 0);
    }
  EXPECT_GT(training.counted.peak("gradients"), training.state().size());
  EXPECT_LT(training.counted.peak("gradients"), training.state().size() * 12 / 10);
}

// Clipping by the tensor's own norm computes gradients twice, tile by tile; a limit that nothing reaches
// changes nothing.
TEST(Policies, MeasuringFirstChangesNoBit) {
  Job job = job_of("scruple", SCRUPLE_RELEASED);
  job.shape = gpt2({1, 256, 2, 24, 2048});
  job.batch = 2;
  const std::vector<char> plain = take(job, 2).planes;
  job.gradients.tensor_norm = 1e6;
  EXPECT_EQ(plain, take(job, 2).planes);
  job.gradients.tensor_norm = 1e-3;
  EXPECT_NE(plain, take(job, 2).planes);
}

TEST(Accumulation, FourMicroBatchesAreOneLargeBatch) {
  for (const scruple_policy policy : {SCRUPLE_STORED, SCRUPLE_COMPRESSED}) {
    Job large = job_of("fp32", policy), small = large;
    large.gradients.max_norm = small.gradients.max_norm = 0.5;
    small.batch = large.batch / 4;
    small.gradients.micro_batches = 4;
    Training a(large), b(small);
    const Outcome one = a.step(), four = b.step();
    EXPECT_NEAR(one.loss, four.loss, 1e-5 * one.loss);
    EXPECT_NEAR(one.norm, four.norm, 1e-4 * one.norm);
    EXPECT_GT(one.norm, 0.5);  // so that clipping had something to do
    for (std::size_t p = 0; p < a.state().parameters().size(); ++p) {
      const std::vector<float> x = a.state().master(static_cast<int>(p)),
                               y = b.state().master(static_cast<int>(p));
      double difference = 0, size = 0;
      for (std::size_t i = 0; i < x.size(); ++i)
        difference += std::pow(x[i] - y[i], 2), size += std::pow(x[i], 2);
      // Adam's first step is lr times the gradient's sign: where that is noise, so is the step.
      EXPECT_LT(std::sqrt(difference), 1e-3 * std::sqrt(size) + 1e-3) << a.state().parameters()[p].name;
    }
  }
}

// Completions of 1 to 13 letters.
Data documents(const std::string& name, const Cutting& cutting) {
  const std::string path = ::testing::TempDir() + name;
  std::ofstream file(path);
  for (int i = 0; i < 64; ++i)
    file << R"({"prompt": "count: ", "completion": ")"
         << std::string(static_cast<std::size_t>(1 + i % 13), "abcdefg"[i % 7]) << "\"}\n";
  file.close();
  return {path, cutting};
}

// Validation isolates documents as training does, and every target weighs the same in it.
TEST(Validation, IsTheMeanOverTargetsOfIsolatedDocuments) {
  const Data data = documents(
      "validated.jsonl",
      {.context = kSmall.context, .layout = Layout::packed, .isolate = true, .validation_share = 0.5});
  Job job = job_of("fp32");
  job.batch = 1;
  job.isolates = true;
  Training training(job);
  const std::unique_ptr<Backend> backend = cpu_backend(1);
  const std::unique_ptr<Network> network =
      backend->network(job, training.state().visible(), SCRUPLE_STORED, training.counted);
  const Windows windows = data.validation();
  std::vector<std::int32_t> tokens(kSmall.context), targets(kSmall.context), starts(kSmall.context);
  double sum = 0, together = 0, counted = 0;
  std::set<std::int64_t> counts;
  for (std::int64_t w = 0; w < 6; ++w) {
    windows.read(windows.even_start(w, 6), tokens.data(), targets.data(), starts.data());
    const auto count = std::count_if(targets.begin(), targets.end(), [](std::int32_t t) { return t >= 0; });
    const auto weight = static_cast<double>(count);
    counts.insert(count);
    sum += weight * network->loss(training.state().visible(), {tokens.data(), targets.data(), starts.data()});
    together += weight * network->loss(training.state().visible(), {tokens.data(), targets.data()});
    counted += weight;
  }
  EXPECT_GT(counts.size(), 1u) << "windows with as many targets show nothing";
  EXPECT_NE(sum, together) << "documents that do not see each other anyway show nothing";
  EXPECT_NEAR(training.validate(windows, 6), sum / counted, 1e-12);
}

// Three documents in batches of two: each counts once.
TEST(Validation, TakesNoDocumentTwice) {
  const Data data = documents(
      "few.jsonl", {.context = kSmall.context, .layout = Layout::padded, .validation_share = 3 / 64.0});
  Job job = job_of("fp32");
  job.batch = 2;
  Training training(job);
  const std::unique_ptr<Backend> backend = cpu_backend(1);
  job.batch = 3;
  const std::unique_ptr<Network> network =
      backend->network(job, training.state().visible(), SCRUPLE_STORED, training.counted);
  const Windows windows = data.validation();
  ASSERT_EQ(windows.count(), 3);
  std::vector<std::int32_t> tokens(3 * kSmall.context), targets(tokens.size());
  for (std::int64_t w = 0; w < 3; ++w)
    windows.read(w, tokens.data() + w * kSmall.context, targets.data() + w * kSmall.context);
  EXPECT_NEAR(training.validate(windows, 64),
              network->loss(training.state().visible(), {tokens.data(), targets.data()}), 1e-6);
}

// Micro-batches with few targets weigh less, or a long answer among short ones would count too little.
TEST(Accumulation, EveryTargetWeighsTheSame) {
  const Data data = documents("uneven.jsonl", {.context = kSmall.context, .layout = Layout::padded});
  const auto train = [&](std::int64_t batch, int parts) {
    Job job = job_of("fp32");
    job.batch = batch;
    job.gradients.micro_batches = parts;
    job.optimizer = [] { return Optimizer("sgd"); };
    Training training(job);
    std::vector<double> losses;
    for (int i = 0; i < 5; ++i) losses.push_back(training.step(data.training()).loss);
    return losses;
  };
  const std::vector<double> whole = train(8, 1), in_parts = train(2, 4);
  for (std::size_t i = 0; i < whole.size(); ++i) EXPECT_NEAR(whole[i], in_parts[i], 1e-5) << "step " << i + 1;
}

// Documents that share windows give the gradients of the same ones, each in a window of its own.
TEST(Accumulation, WholeDocumentsInAWindowAreAsEachByItself) {
  const auto step = [&](Layout layout) {
    const Data data = documents("whole.jsonl", {.context = kSmall.context, .layout = layout});
    const Windows windows = data.training();
    Job job = job_of("fp32");
    job.batch = windows.count();
    job.isolates = windows.isolates();
    job.optimizer = [] { return Optimizer("sgd"); };
    job.schedule = {Annealing::constant, 0.5, 0, 100};
    job.gradients.max_norm = 0;
    Training training(job);
    const Outcome outcome = training.step(windows);
    std::vector<std::vector<float>> weights;
    for (std::size_t p = 0; p < training.state().parameters().size(); ++p)
      weights.push_back(training.state().master(static_cast<int>(p)));
    return std::tuple(outcome, weights, windows.count());
  };
  const auto [alone, one, windows] = step(Layout::padded);
  const auto [together, other, fewer] = step(Layout::whole);
  EXPECT_LT(4 * fewer, 3 * windows);
  EXPECT_NEAR(alone.loss, together.loss, 1e-5);
  EXPECT_NEAR(alone.norm, together.norm, 1e-5 * alone.norm);
  for (std::size_t p = 0; p < one.size(); ++p)
    for (std::size_t i = 0; i < one[p].size(); ++i)
      ASSERT_NEAR(one[p][i], other[p][i], 1e-5) << p << ", " << i;
}

TEST(Accumulation, MomentumFoldedInBackwardIsTheMeanGradient) {
  Job stored = job_of("fp32"), released = job_of("fp32", SCRUPLE_RELEASED);
  for (Job* job : {&stored, &released}) {
    job->optimizer = [] { return Optimizer("sgd", {{"momentum", 0.9}}); };
    job->schedule = {Annealing::constant, 0.1, 0, 100};
    job->gradients.micro_batches = 4;
    job->batch = 2;
  }
  released.gradients.accumulation = SCRUPLE_ACCUMULATE_MOMENTUM;
  Training a(stored), b(released);
  for (int i = 0; i < 5; ++i) EXPECT_NEAR(a.step().loss, b.step().loss, 1e-5);
}

// Int8 accumulators cost no more than another seed does.
TEST(Accumulation, Int8AccumulatorsStayWithinTheNoiseOfSeeds) {
  const auto loss = [&](std::uint64_t seed, const char* format) {
    Job job = job_of("scruple", SCRUPLE_COMPRESSED);
    job.describe =
        describe_by("scruple", format, std::string(format) == "int8" ? SCRUPLE_DITHER : SCRUPLE_NEAREST);
    job.seed = seed;
    job.batch = 2;
    job.gradients.micro_batches = 4;
    job.gradients.max_norm = 1;
    job.schedule = {Annealing::cosine, 5e-3, 10, 300};
    Training training(job);
    training.take(300);
    return training.validate(128);
  };
  std::vector<double> exact;
  for (std::uint64_t seed = 1; seed <= 3; ++seed) exact.push_back(loss(seed, "fp32"));
  double gap = 0, spread = 0;
  const double mean = (exact[0] + exact[1] + exact[2]) / 3;
  for (std::uint64_t seed = 1; seed <= 3; ++seed) {
    gap += (loss(seed, "int8") - exact[seed - 1]) / 3;
    spread += std::pow(exact[seed - 1] - mean, 2) / 2;
  }
  std::printf("int8 accumulators: gap %.4f, deviation over seeds %.4f, loss %.4f\n", gap, std::sqrt(spread),
              mean);
  EXPECT_LT(std::abs(gap), std::max(0.01, std::sqrt(spread)));
}

TEST(LossScale, AnOverflowTouchesNothingAndHalvesTheScale) {
  for (const scruple_policy policy : {SCRUPLE_STORED, SCRUPLE_COMPRESSED}) {
    Job job = job_of("scruple", policy);
    job.activations = Precision::fp16;
    job.describe = describe_by("scruple", policy == SCRUPLE_COMPRESSED ? "int8" : "fp32");
    job.scaler = scruple_scaler_dynamic();
    job.scaler.scale = 0x1p40f;  // gradients of the logits overflow fp16
    Training training(job);
    const std::vector<char> before = training.planes();
    const Outcome first = training.step();
    EXPECT_TRUE(first.skipped);
    EXPECT_EQ(before, training.planes());
    const Outcome second = training.step();
    EXPECT_EQ(second.loss_scale, 0x1p39f);
    double last = 0;
    int skipped = 0;
    for (int i = 0; i < 120; ++i) {
      const Outcome outcome = training.step();
      skipped += outcome.skipped;
      last = outcome.loss;
    }
    EXPECT_LT(skipped, 40);
    EXPECT_LT(last, first.loss - 1);
  }
}

// A loss so small that most gradients are below the smallest fp16 number.
TEST(LossScale, GradientsThatUnderflowTrainWithScalingAndStallWithout) {
  const auto learned = [&](Precision activations, scruple_scaler scaler) {
    Job job = job_of("mixed");
    job.activations = activations;
    job.scaler = scaler;
    job.scaler.scale *= 0x1p-18f;
    Training training(job);
    const double before = training.validate(64);
    training.take(60);
    return before - training.validate(64);
  };
  scruple_scaler none;
  check(scruple_scaler_static(1, &none));
  const double reference = learned(Precision::fp32, none);
  EXPECT_GT(reference, 1.5);
  EXPECT_NEAR(learned(Precision::fp16, scruple_scaler_dynamic()), reference, 0.1);
  EXPECT_LT(learned(Precision::fp16, none), 0.1 * reference);
}

TEST(Threads, LossCurvesAreTheSameToTheBit) {
  for (const Precision activations : {Precision::fp32, Precision::bf16, Precision::fp16}) {
    std::vector<std::vector<double>> curves;
    std::vector<std::vector<char>> planes;
    for (const int threads : {1, 2, 3}) {
      Job job = job_of("scruple", SCRUPLE_COMPRESSED, "int8");
      job.threads = threads;
      job.activations = activations;
      job.gradients.max_norm = 1;
      Training training(job);
      curves.emplace_back();
      for (const Outcome& outcome : training.take(10))
        curves.back().insert(curves.back().end(), {outcome.loss, outcome.norm});
      planes.push_back(training.planes());
    }
    for (std::size_t i = 1; i < curves.size(); ++i) {
      EXPECT_EQ(0, std::memcmp(curves[0].data(), curves[i].data(), curves[0].size() * sizeof(double)));
      EXPECT_EQ(planes[0], planes[i]);
    }
  }
}

TEST(Learning, AModelOfOtherPartsLearns) {
  Job job = job_of("scruple");
  job.shape = other_parts({2, 32, 4, 24, 256}, 2, 10);
  Training training(job);
  const double before = training.take(1).front().loss;
  EXPECT_NEAR(before, std::log(256), 0.3);
  EXPECT_LT(training.take(99).back().loss, 0.6 * before);
}

TEST(State, TheModelComputesWithTheVisibleHalf) {
  Training training(job_of("scruple"));
  training.take(3);
  bool differs = false;
  for (int p = 0; p < static_cast<int>(training.state().parameters().size()); ++p) {
    const std::vector<float> master = training.state().master(p);
    std::vector<float> scratch(master.size());
    const float* const visible = visible_values(
        training.engine(), training.state().visible()[static_cast<std::size_t>(p)], scratch.data());
    for (std::size_t i = 0; i < master.size(); ++i) {
      ASSERT_EQ(bits_of(visible[i]) & 0xffffu, 0u) << "not a bf16 number";
      ASSERT_NEAR(visible[i], master[i], std::abs(master[i]) * 0x1p-8f);
      differs = differs || visible[i] != master[i];
    }
  }
  EXPECT_TRUE(differs);
}

TEST(State, NormsAndBiasesDoNotDecay) {
  Job job = job_of("fp32");
  job.optimizer = [] { return Optimizer("adamw", {{"weight_decay", 500}}); };
  job.schedule = {Annealing::constant, 1e-3, 0, 10};
  Training training(job);
  double before = 0, after = 0;
  const auto sum = [&](double& matrices, bool check_norms) {
    for (std::size_t p = 0; p < training.state().parameters().size(); ++p) {
      const Parameter& parameter = training.state().parameters()[p];
      for (const float w : training.state().master(static_cast<int>(p))) {
        if (parameter.decays) matrices += std::abs(w);
        if (!parameter.decays && check_norms) {
          ASSERT_NEAR(w, parameter.mean, 0.0011) << parameter.name;  // one step of Adam moves it by 0.001
        }
      }
    }
  };
  sum(before, false);
  training.take(1);
  sum(after, true);
  EXPECT_LT(after, 0.8 * before);  // halved, and moved by 0.001 each
}

// By hand, for GPT-2 124M: 12 layers of 12 x 768 x 768 and the head; positions and rows of the token table are only read.
TEST(Rates, OperationsOfAToken) {
  const double weights = 12.0 * 12 * 768 * 768 + 50257.0 * 768, attention = 12.0 * 768 * 1024;
  Description model = gpt2({12, 768, 12, 1024, 50257});
  EXPECT_EQ(flops_per_token(model), 6 * (weights + attention));
  model.tied = false;
  EXPECT_EQ(flops_per_token(model), 6 * (weights + attention));
}

// The validations and saves that run() makes after a step are those that seconds_left() counts.
TEST(Rates, TheTimeLeftHasValidationsAndSaves) {
  for (const std::int64_t every : {0, 1, 2, 3, 5, 7})
    for (const bool last : {false, true}) {
      Training training(job_of("fp32"));
      Span span = {.steps = 5, .validate_every = every, .validation_windows = 1};
      span.save_every = every, span.save_last = last;
      std::vector<std::pair<std::int64_t, std::int64_t>> done,
          left;  // validations and saves, after each step
      const Record end = run(training, text(), text(), span, [&](const Record& record) {
        Record timed = record;  // in whole units
        timed.step_seconds = 0;
        timed.validating = {100, 1}, timed.saving = {1, 1};
        const auto seconds = std::llround(seconds_left(timed, span));
        left.emplace_back(seconds / 100, seconds % 100);
        done.emplace_back(record.validating.times, record.saving.times);
      });
      ASSERT_EQ(left.size(), 5u);
      for (std::size_t i = 0; i < left.size(); ++i) {
        EXPECT_EQ(left[i].first, end.validating.times - done[i].first) << every << ", step " << i + 1;
        EXPECT_EQ(left[i].second, end.saving.times - done[i].second) << every << ", step " << i + 1;
      }
      Record middle = end;
      middle.steps.resize(3), middle.step_seconds = 6, middle.validating = middle.saving = {};
      EXPECT_NEAR(seconds_left(middle, span), 2 * 2, 1e-9);
    }
}

TEST(Rates, ARunIsSavedAfterSoMuchTime) {
  for (const double seconds : {0.0, 1e-9, 1e9}) {
    Training training(job_of("fp32"));
    Span span = {.steps = 4, .validate_every = 100, .validation_windows = 1};
    span.save_seconds = seconds;
    std::vector<std::size_t> saved;
    run(
        training, text(), text(), span, [](const Record&) {},
        [&](const Record& record) {
          saved.push_back(record.steps.size());
          return true;
        });
    const std::vector<std::size_t> each = {1, 2, 3, 4};  // the last too, where one was saved before
    EXPECT_EQ(saved, seconds == 1e-9 ? each : std::vector<std::size_t>()) << seconds;
  }
}

TEST(Windows, ValidationIsSpreadOverTheWholeText) {
  const std::vector<std::uint8_t> bytes(50);
  const Windows few(bytes, 10);  // 40 of them
  EXPECT_EQ(few.places(), 40);
  EXPECT_EQ(few.even_start(0, 64), 0);
  EXPECT_EQ(few.even_start(32, 64), 19);
  EXPECT_EQ(few.even_start(63, 64), 39);
  EXPECT_EQ(few.even_start(0, 1), 0);
}

TEST(Memory, CompressedGradientsThatWillNotFitAreRefusedAtOnce) {
  const auto make = [](std::int64_t limit) {
    Ledger ledger(limit);
    Trainer trainer(job_of("scruple", SCRUPLE_COMPRESSED, "fp32"), ledger);
    return ledger.peak() + trainer.state().size() * 4;
  };
  const std::int64_t needed = make(std::int64_t{1} << 30);
  EXPECT_NO_THROW(make(needed));
  EXPECT_THROW(make(needed - 1), std::runtime_error);
}

TEST(Memory, WhatDoesNotFitIsRefusedBeforeItIsTouched) {
  Job job = job_of("fp32");
  job.shape = gpt2({96, 12288, 96, 2048, 256});
  Ledger ledger(std::int64_t{1} << 30);
  try {
    Trainer trainer(job, ledger);
    FAIL() << "174 billion parameters fit into 1 GiB";
  } catch (const std::runtime_error& error) {
    EXPECT_NE(std::string(error.what()).find("1024 MiB are free"), std::string::npos) << error.what();
  }
}

TEST(Memory, WhatIsCountedBeforehandIsWhatIsTaken) {
  for (const scruple_policy policy : {SCRUPLE_STORED, SCRUPLE_RELEASED, SCRUPLE_COMPRESSED})
    for (const char* recipe : {"fp32", "scruple", "lpmm"})
      for (const Description& shape : {gpt2(kSmall), other_parts({2, 32, 4, 24, 256}, 2, 10)}) {
        SCOPED_TRACE(std::string(recipe) + ", policy " + std::to_string(policy));
        Job job = job_of(recipe, policy, policy == SCRUPLE_COMPRESSED ? "int8" : "fp32");
        job.shape = shape;
        const Ledger counted = memory_of(job);
        Training training(job);
        training.take(2);
        EXPECT_EQ(counted.peak(), training.counted.peak());
        EXPECT_EQ(counted.entries().size(), training.counted.entries().size());
        for (const Ledger::Entry& entry : training.counted.entries())
          EXPECT_EQ(counted.peak(entry.kind), entry.peak) << entry.kind;
      }
}

TEST(Memory, AHighIsThePeakSinceTheMark) {
  Ledger ledger;
  const Block stays(ledger, "weights", 10);
  { const Block before(ledger, "weights", 1000), gone(ledger, "workspace", 100); }
  ledger.mark();
  { const Block within(ledger, "gradients", 50); }
  { const Block less(ledger, "gradients", 20); }
  const Block more(ledger, "weights", 5);
  std::map<std::string, std::int64_t> highs, peaks;
  for (const Ledger::Entry& entry : ledger.entries())
    highs[entry.kind] = entry.high, peaks[entry.kind] = entry.peak;
  EXPECT_EQ(highs,
            (std::map<std::string, std::int64_t>{{"weights", 15}, {"workspace", 0}, {"gradients", 50}}));
  EXPECT_EQ(peaks,
            (std::map<std::string, std::int64_t>{{"weights", 1010}, {"workspace", 100}, {"gradients", 50}}));
}

// Accumulators are there within a step alone, and what a validation or a start takes is not a step's.
TEST(Memory, ARunKnowsWhatEachStepHeld) {
  const Job job = job_of("scruple", SCRUPLE_COMPRESSED, "int8");
  Training training(job);
  { const Block before(training.counted, "workspace", 64 << 20); }
  Span span;
  span.steps = 6;
  std::int64_t taken = 0;
  std::unique_ptr<Block> grows;
  const Record record = run(training, text(), text(), span, [&](const Record&) {
    if (++taken == 2) grows = std::make_unique<Block>(training.counted, "later", 7);
    if (taken == 4) grows.reset();
  });
  std::vector<std::int64_t> steps;
  for (const Held& held : record.memory) steps.push_back(held.step);
  ASSERT_EQ(steps, (std::vector<std::int64_t>{1, 3, 5})) << "where they change";
  for (const Held& held : record.memory)
    for (std::size_t k = 0; k < held.bytes.size(); ++k) {
      const Ledger::Entry& entry = training.counted.entries()[k];
      if (entry.kind == "later")
        EXPECT_EQ(held.bytes[k], held.step == 3 ? 7 : 0);
      else if (entry.kind == "workspace")
        EXPECT_LT(held.bytes[k], 64 << 20);
      else
        EXPECT_EQ(held.bytes[k], entry.peak) << entry.kind;
    }
  EXPECT_EQ(record.memory[0].bytes.size() + 1, record.memory[1].bytes.size());
  EXPECT_GT(training.counted.peak("gradients"), training.state().size());
}

TEST(Memory, TheLedgerIsEmptyAfterwards) {
  Ledger ledger;
  Trainer(job_of("scruple", SCRUPLE_COMPRESSED, "int8"), ledger).step(text());
  for (const Ledger::Entry& entry : ledger.entries()) EXPECT_EQ(entry.now, 0) << entry.kind;
}

}  // namespace
}  // namespace scruple::train
