// The trainer as a whole: policies, accumulation, clipping, loss scaling and thread counts on a small model
// that learns a real (tiny) task.
#include "train/run/trainer.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <fstream>
#include <limits>
#include <map>
#include <memory>
#include <set>

#include "formats/codec.h"
#include "tests/descriptions.h"
#include "tests/jobs.h"
#include "train/run/run.h"
#include "train/text/corpus.h"

namespace scruple::train {
namespace {

constexpr GptShape kSmall = {2, 32, 2, 24, 256};

Job job_of(const std::string& recipe, scruple_policy policy = SCRUPLE_STORED,
           const std::string& gradient = "fp32") {
  Job job;
  job.shape = gpt2(kSmall);
  job.batch = 8;
  job.threads = 2;
  const bool sgd = recipe == "lpmm";
  job.optimizer = [sgd] {
    return sgd ? Optimizer("sgd", {{"momentum", 0.9}}) : Optimizer("adamw", {{"weight_decay", 0.1}});
  };
  job.describe = describe_by(recipe, gradient);
  job.schedule = {Annealing::constant, sgd ? 0.1 : 3e-3, 0, 1000};
  job.gradients.policy = policy;
  return job;
}

// The grammar's lines: enough for a few hundred steps.
const Windows& text(std::int64_t context = kSmall.context) {
  static const Corpus corpus = Grammar(1).sample(200'000, 1);
  static const Windows windows(corpus.bytes, context, corpus.line_starts);
  return windows;
}

std::vector<Outcome> take(Trainer& trainer, int steps) {
  std::vector<Outcome> outcomes;
  for (int i = 0; i < steps; ++i) outcomes.push_back(trainer.step(text()));
  return outcomes;
}

// Every byte of weights, extra bits, moments and scales.
std::vector<char> planes_of(Trainer& trainer) {
  std::vector<char> all;
  for (const scruple_tensor& row : trainer.state().table())
    for (int a = SCRUPLE_WEIGHT; a < SCRUPLE_GRADIENT; ++a) {
      const scruple_array& array = row.arrays[a];
      if (array.codes == nullptr) continue;
      std::int64_t codes = 0, aux = 0;
      check(scruple_format_bytes(array.format, row.size, &codes, &aux));
      all.insert(all.end(), static_cast<char*>(array.codes), static_cast<char*>(array.codes) + codes);
      if (aux > 0) all.insert(all.end(), static_cast<char*>(array.aux), static_cast<char*>(array.aux) + aux);
    }
  return all;
}

std::vector<std::string> recipes() {
  std::vector<std::string> names;
  for (int i = 0; i < scruple_recipe_count(); ++i) {
    scruple_recipe_info info;
    check(scruple_recipe_at(i, &info));
    names.emplace_back(info.name);
  }
  return names;
}

std::vector<char> planes_after(const Job& job, int steps) {
  Ledger ledger;
  Trainer trainer(job, ledger);
  take(trainer, steps);
  return planes_of(trainer);
}

TEST(Policies, StoredReleasedAndCompressedGiveTheSameBits) {
  for (const std::string& recipe : recipes()) {
    const auto with = [&](scruple_policy policy) {
      Job job = job_of(recipe, policy);
      job.gradients.max_norm = 0;
      return planes_after(job, 3);
    };
    const std::vector<char> stored = with(SCRUPLE_STORED);
    EXPECT_EQ(stored, with(SCRUPLE_RELEASED)) << recipe;
    EXPECT_EQ(stored, with(SCRUPLE_COMPRESSED)) << recipe;
  }
}

// Several tiles per tensor: rows of 1 MiB are 1,024 at this width, and the vocabulary has more.
TEST(Policies, TheSameBitsInSeveralTiles) {
  const auto with = [&](scruple_policy policy) {
    Job job = job_of("scruple", policy);
    job.shape = gpt2({1, 256, 2, 24, 2048});
    job.batch = 2;
    return planes_after(job, 2);
  };
  const std::vector<char> stored = with(SCRUPLE_STORED);
  EXPECT_EQ(stored, with(SCRUPLE_RELEASED));
  EXPECT_EQ(stored, with(SCRUPLE_COMPRESSED));
}

TEST(Policies, TheSameBitsForEveryPart) {
  const auto with = [&](scruple_policy policy) {
    Job job = job_of("scruple", policy);
    job.shape = other_parts({2, 32, 4, 24, 256}, 2, 10);
    job.gradients.max_norm = 0;
    return planes_after(job, 3);
  };
  const std::vector<char> stored = with(SCRUPLE_STORED);
  EXPECT_EQ(stored, with(SCRUPLE_RELEASED));
  EXPECT_EQ(stored, with(SCRUPLE_COMPRESSED));
}

TEST(Policies, ReleasedHoldsOneTileOfGradients) {
  Job job = job_of("scruple", SCRUPLE_RELEASED);
  job.shape = gpt2({1, 256, 2, 24, 4096});
  job.batch = 2;
  Ledger ledger;
  Trainer trainer(job, ledger);
  take(trainer, 2);
  EXPECT_GT(ledger.peak("gradients"), 0);
  EXPECT_LE(ledger.peak("gradients"), 1 << 20);
}

TEST(Policies, CompressedGivesItsAccumulatorsBackAfterEachStep) {
  Ledger ledger;
  Trainer trainer(job_of("scruple", SCRUPLE_COMPRESSED, "int8"), ledger);
  take(trainer, 2);
  for (const Ledger::Entry& entry : ledger.entries())
    if (entry.kind == "gradients") {
      EXPECT_EQ(entry.now, 0);
    }
  EXPECT_GT(ledger.peak("gradients"), trainer.state().size());
  EXPECT_LT(ledger.peak("gradients"), trainer.state().size() * 12 / 10);
}

// Clipping by the tensor's own norm computes gradients twice, tile by tile; a limit that nothing reaches
// changes nothing.
TEST(Policies, MeasuringFirstChangesNoBit) {
  Job job = job_of("scruple", SCRUPLE_RELEASED);
  job.shape = gpt2({1, 256, 2, 24, 2048});
  job.batch = 2;
  const std::vector<char> plain = planes_after(job, 2);
  job.gradients.tensor_norm = 1e6;
  EXPECT_EQ(plain, planes_after(job, 2));
  job.gradients.tensor_norm = 1e-3;
  EXPECT_NE(plain, planes_after(job, 2));
}

TEST(Accumulation, FourMicroBatchesAreOneLargeBatch) {
  for (const scruple_policy policy : {SCRUPLE_STORED, SCRUPLE_COMPRESSED}) {
    Job large = job_of("fp32", policy), small = large;
    large.gradients.max_norm = small.gradients.max_norm = 0.5;
    small.batch = large.batch / 4;
    small.gradients.micro_batches = 4;
    Ledger ledger;
    Trainer a(large, ledger), b(small, ledger);
    const Outcome one = a.step(text()), four = b.step(text());
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
  Ledger ledger;
  Trainer trainer(job, ledger);
  const std::unique_ptr<Backend> backend = cpu_backend(1);
  const std::unique_ptr<Network> network =
      backend->network(job, trainer.state().visible(), SCRUPLE_STORED, ledger);
  const Windows windows = data.validation();
  std::vector<std::int32_t> tokens(kSmall.context), targets(kSmall.context), starts(kSmall.context);
  double sum = 0, together = 0, counted = 0;
  std::set<std::int64_t> counts;
  for (std::int64_t w = 0; w < 6; ++w) {
    windows.read(windows.even_start(w, 6), tokens.data(), targets.data(), starts.data());
    const auto count = std::count_if(targets.begin(), targets.end(), [](std::int32_t t) { return t >= 0; });
    const auto weight = static_cast<double>(count);
    counts.insert(count);
    sum += weight * network->loss(trainer.state().visible(), {tokens.data(), targets.data(), starts.data()});
    together += weight * network->loss(trainer.state().visible(), {tokens.data(), targets.data()});
    counted += weight;
  }
  EXPECT_GT(counts.size(), 1u) << "windows with as many targets show nothing";
  EXPECT_NE(sum, together) << "documents that do not see each other anyway show nothing";
  EXPECT_NEAR(trainer.validate(windows, 6), sum / counted, 1e-12);
}

// Three documents in batches of two: each counts once.
TEST(Validation, TakesNoDocumentTwice) {
  const Data data = documents("few.jsonl", {.context = kSmall.context, .validation_share = 3 / 64.0});
  Job job = job_of("fp32");
  job.batch = 2;
  Ledger ledger;
  Trainer trainer(job, ledger);
  const std::unique_ptr<Backend> backend = cpu_backend(1);
  job.batch = 3;
  const std::unique_ptr<Network> network =
      backend->network(job, trainer.state().visible(), SCRUPLE_STORED, ledger);
  const Windows windows = data.validation();
  ASSERT_EQ(windows.count(), 3);
  std::vector<std::int32_t> tokens(3 * kSmall.context), targets(tokens.size());
  for (std::int64_t w = 0; w < 3; ++w)
    windows.read(w, tokens.data() + w * kSmall.context, targets.data() + w * kSmall.context);
  EXPECT_NEAR(trainer.validate(windows, 64),
              network->loss(trainer.state().visible(), {tokens.data(), targets.data()}), 1e-6);
}

// Micro-batches with few targets weigh less, or a long answer among short ones would count too little.
TEST(Accumulation, EveryTargetWeighsTheSame) {
  const Data data = documents("uneven.jsonl", {.context = kSmall.context});
  const auto train = [&](std::int64_t batch, int parts) {
    Job job = job_of("fp32");
    job.batch = batch;
    job.gradients.micro_batches = parts;
    job.optimizer = [] { return Optimizer("sgd"); };
    Ledger ledger;
    Trainer trainer(job, ledger);
    std::vector<double> losses;
    for (int i = 0; i < 5; ++i) losses.push_back(trainer.step(data.training()).loss);
    return losses;
  };
  const std::vector<double> whole = train(8, 1), in_parts = train(2, 4);
  for (std::size_t i = 0; i < whole.size(); ++i) EXPECT_NEAR(whole[i], in_parts[i], 1e-5) << "step " << i + 1;
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
  Ledger ledger;
  Trainer a(stored, ledger), b(released, ledger);
  for (int i = 0; i < 5; ++i) EXPECT_NEAR(a.step(text()).loss, b.step(text()).loss, 1e-5);
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
    Ledger ledger;
    Trainer trainer(job, ledger);
    take(trainer, 300);
    return trainer.validate(text(), 128);
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
    Ledger ledger;
    Trainer trainer(job, ledger);
    const std::vector<char> before = planes_of(trainer);
    const Outcome first = trainer.step(text());
    EXPECT_TRUE(first.skipped);
    EXPECT_EQ(before, planes_of(trainer));
    const Outcome second = trainer.step(text());
    EXPECT_EQ(second.loss_scale, 0x1p39f);
    double last = 0;
    int skipped = 0;
    for (int i = 0; i < 120; ++i) {
      const Outcome outcome = trainer.step(text());
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
    Ledger ledger;
    Trainer trainer(job, ledger);
    const double before = trainer.validate(text(), 64);
    take(trainer, 60);
    return before - trainer.validate(text(), 64);
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
      Ledger ledger;
      Trainer trainer(job, ledger);
      curves.emplace_back();
      for (const Outcome& outcome : take(trainer, 10))
        curves.back().insert(curves.back().end(), {outcome.loss, outcome.norm});
      planes.push_back(planes_of(trainer));
    }
    for (std::size_t i = 1; i < curves.size(); ++i) {
      EXPECT_EQ(0, std::memcmp(curves[0].data(), curves[i].data(), curves[0].size() * sizeof(double)));
      EXPECT_EQ(planes[0], planes[i]);
    }
  }
}

TEST(Learning, EveryRecipeLearns) {
  for (const std::string& recipe : recipes()) {
    Job job = job_of(recipe, SCRUPLE_STORED, "");
    job.gradients.max_norm = 1;
    Ledger ledger;
    Trainer trainer(job, ledger);
    const double before = trainer.validate(text(), 64);
    take(trainer, 60);
    const double after = trainer.validate(text(), 64);
    EXPECT_NEAR(before, std::log(256), 0.2) << recipe;  // it starts without a clue
    EXPECT_LT(after, before - 1.5) << recipe;
  }
}

TEST(Learning, AModelOfOtherPartsLearns) {
  Job job = job_of("scruple");
  job.shape = other_parts({2, 32, 4, 24, 256}, 2, 10);
  Ledger ledger;
  Trainer trainer(job, ledger);
  const double before = take(trainer, 1).front().loss;
  EXPECT_NEAR(before, std::log(256), 0.3);
  EXPECT_LT(take(trainer, 99).back().loss, 0.6 * before);
}

TEST(State, TheModelComputesWithTheVisibleHalf) {
  Ledger ledger;
  Trainer trainer(job_of("scruple"), ledger);
  take(trainer, 3);
  bool differs = false;
  for (int p = 0; p < static_cast<int>(trainer.state().parameters().size()); ++p) {
    const std::vector<float> master = trainer.state().master(p);
    std::vector<float> scratch(master.size());
    const float* const visible = visible_values(
        trainer.engine(), trainer.state().visible()[static_cast<std::size_t>(p)], scratch.data());
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
  Ledger ledger;
  Trainer trainer(job, ledger);
  double before = 0, after = 0;
  const auto sum = [&](double& matrices, bool check_norms) {
    for (std::size_t p = 0; p < trainer.state().parameters().size(); ++p) {
      const Parameter& parameter = trainer.state().parameters()[p];
      for (const float w : trainer.state().master(static_cast<int>(p))) {
        if (parameter.decays) matrices += std::abs(w);
        if (!parameter.decays && check_norms) {
          ASSERT_NEAR(w, parameter.mean, 0.0011) << parameter.name;  // one step of Adam moves it by 0.001
        }
      }
    }
  };
  sum(before, false);
  take(trainer, 1);
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

// The validations and saves that run() makes after a step are those that seconds_left() counts.
TEST(Rates, TheTimeLeftHasValidationsAndSaves) {
  for (const std::int64_t every : {0, 1, 2, 3, 5, 7})
    for (const bool last : {false, true}) {
      Ledger ledger;
      Trainer trainer(job_of("fp32"), ledger);
      Span span = {.steps = 5, .validate_every = every, .validation_windows = 1};
      span.save_every = every, span.save_last = last;
      std::vector<std::pair<std::int64_t, std::int64_t>> done,
          left;  // validations and saves, after each step
      const Record end = run(trainer, text(), text(), span, [&](const Record& record) {
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

TEST(Windows, ValidationIsSpreadOverTheWholeText) {
  const std::vector<std::uint8_t> bytes(50);
  const Windows few(bytes, 10);  // 40 of them
  EXPECT_EQ(few.count(), 40);
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
  for (const scruple_policy policy : {SCRUPLE_STORED, SCRUPLE_RELEASED, SCRUPLE_COMPRESSED}) {
    for (const char* recipe : {"fp32", "scruple", "lpmm"}) {
      const Job job = job_of(recipe, policy, policy == SCRUPLE_COMPRESSED ? "int8" : "fp32");
      const Ledger counted = memory_of(job);
      Ledger ledger;
      Trainer trainer(job, ledger);
      take(trainer, 2);
      EXPECT_EQ(counted.peak(), ledger.peak()) << recipe << policy;
      EXPECT_EQ(counted.entries().size(), ledger.entries().size()) << recipe << policy;
      for (const Ledger::Entry& entry : ledger.entries())
        EXPECT_EQ(counted.peak(entry.kind), entry.peak) << recipe << policy << entry.kind;
    }
  }
}

TEST(Memory, WhatIsCountedForOtherPartsIsWhatIsTaken) {
  Job job = job_of("scruple", SCRUPLE_COMPRESSED, "int8");
  job.shape = other_parts({2, 32, 4, 24, 256}, 2, 10);
  const Ledger counted = memory_of(job);
  Ledger ledger;
  Trainer trainer(job, ledger);
  take(trainer, 2);
  EXPECT_EQ(counted.peak(), ledger.peak());
  for (const Ledger::Entry& entry : ledger.entries())
    EXPECT_EQ(counted.peak(entry.kind), entry.peak) << entry.kind;
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
  Ledger ledger;
  Trainer trainer(job, ledger);
  { const Block before(ledger, "workspace", 64 << 20); }
  Span span;
  span.steps = 6;
  std::int64_t taken = 0;
  std::unique_ptr<Block> grows;
  const Record record = run(trainer, text(), text(), span, [&](const Record&) {
    if (++taken == 2) grows = std::make_unique<Block>(ledger, "later", 7);
    if (taken == 4) grows.reset();
  });
  std::vector<std::int64_t> steps;
  for (const Held& held : record.memory) steps.push_back(held.step);
  ASSERT_EQ(steps, (std::vector<std::int64_t>{1, 3, 5})) << "where they change";
  for (const Held& held : record.memory)
    for (std::size_t k = 0; k < held.bytes.size(); ++k) {
      const Ledger::Entry& entry = ledger.entries()[k];
      if (entry.kind == "later")
        EXPECT_EQ(held.bytes[k], held.step == 3 ? 7 : 0);
      else if (entry.kind == "workspace")
        EXPECT_LT(held.bytes[k], 64 << 20);
      else
        EXPECT_EQ(held.bytes[k], entry.peak) << entry.kind;
    }
  EXPECT_EQ(record.memory[0].bytes.size() + 1, record.memory[1].bytes.size());
  EXPECT_GT(ledger.peak("gradients"), trainer.state().size());
}

TEST(Memory, TheLedgerIsEmptyAfterwards) {
  Ledger ledger;
  {
    Trainer trainer(job_of("scruple", SCRUPLE_COMPRESSED, "int8"), ledger);
    take(trainer, 1);
  }
  for (const Ledger::Entry& entry : ledger.entries()) EXPECT_EQ(entry.now, 0) << entry.kind;
}

}  // namespace
}  // namespace scruple::train
