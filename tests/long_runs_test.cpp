// Three thousand steps at the defaults, on completions whose prompts count for nothing and on documents that do not see
// each other, while the data turn to something else and back: gradients grow a hundredfold at each turn, and those of
// most rows of the embedding vanish for a thousand steps. `scruple` learns, and forgets, what fp32 does.
// With SCRUPLE_TEST_DEVICE=cuda on a GPU, and there with each policy for gradients.
#include <algorithm>
#include <cstdlib>

#include "tests/descriptions.h"
#include "tests/files.h"
#include "tests/jobs.h"
#include "train/run/trainer.h"

namespace scruple::train {
namespace {

constexpr int kPhases = 3, kSteps = 1000;

bool on_gpu() {
  const char* const device = std::getenv("SCRUPLE_TEST_DEVICE");
  return device != nullptr && std::string(device) == "cuda";
}

// Groups of moments reach over rows: some of a group vanish beside others. A GPU's heads are 64 wide, whose attention runs
// on tensor cores in 16 bits; its sizes are multiples of 8, as 16-bit products want them.
Description completing() {
  Description model = gpt2({2, on_gpu() ? 48 : 32, 2, 24, 256});
  if (!on_gpu()) return model;
  static const Names apart = [&] {  // one product for all is for heads as wide together as the model
    Names names = *model.names;
    names.qkv = {"attn.q", "attn.k", "attn.v"};
    return names;
  }();
  model.names = &apart, model.head_width = 64;
  return model;
}
Description isolating() {
  if (!on_gpu()) return other_parts({2, 32, 2, 24, 256}, 1, 16);
  Description model = other_parts({2, 48, 2, 72, 256}, 1, 64);  // more than one tile of attention
  model.inner = 144;
  return model;
}

Job job_of(const std::string& recipe, const Description& shape, bool isolates = false) {
  Job job = job_of(shape, 8, recipe, 1e-3);
  job.backend = on_gpu() ? cuda_backend : cpu_backend;
  job.isolates = isolates;
  job.threads = 1;
  job.optimizer = [] { return Optimizer("adamw"); };
  job.activations = recipe == "fp32" ? Precision::fp32 : Precision::bf16;
  job.schedule = {Annealing::constant, 1e-3, 50, kPhases * kSteps};
  job.gradients.max_norm = 1;
  return job;
}

// After a phase: the losses on what it trained on and on the other data; how much larger the largest norm of a gradient
// among its first ten was than the mean of its last hundred.
struct Phase {
  double learned, other, growth;
};

std::vector<Phase> train_on(const Data& letters, const Data& digits, const Job& job) {
  Ledger ledger;
  Trainer trainer(job, ledger);
  std::vector<Phase> phases;
  for (int phase = 0; phase < kPhases; ++phase) {
    const Data &now = phase == 1 ? digits : letters, &other = phase == 1 ? letters : digits;
    const Windows windows = now.training();
    double first = 0, last = 0;
    for (int step = 0; step < kSteps; ++step) {
      const double norm = trainer.step(windows).norm;
      if (step < 10) first = std::max(first, norm);
      if (step >= kSteps - 100) last += norm / 100;
    }
    phases.push_back(
        {trainer.validate(now.validation(), 64), trainer.validate(other.validation(), 64), first / last});
  }
  return phases;
}

class LongRuns : public scruple_tests::Files {
 protected:
  void SetUp() override {
    if (on_gpu() && !has_cuda()) GTEST_SKIP() << "this machine has no GPU that the trainer could run on";
  }

  // Three of ten signs, and the one after each, backwards: abc>dcb.
  static std::string lines(char zero, bool has_prompts) {
    std::string all;
    std::uint32_t state = 1;
    for (int line = 0; line < 2000; ++line) {
      std::string given, wanted;
      for (int i = 0; i < 3; ++i) {
        state = state * 1664525u + 1013904223u;  // Numerical Recipes' generator
        const int sign = static_cast<int>((state >> 16) % 10);
        given += static_cast<char>(zero + sign);
        wanted = static_cast<char>(zero + (sign + 1) % 10) + wanted;
      }
      all += has_prompts ? R"({"prompt": ")" + given + R"(>", "completion": ")" + wanted + "\"}\n"
                         : R"({"text": ")" + given + ">" + wanted + "\"}\n";
    }
    return all;
  }

  // On documents where they are isolated, else on completions.
  std::vector<Phase> phases(const Job& job) const {
    const Cutting cutting = {.context = job.shape.context,
                             .layout = job.isolates ? Layout::packed : Layout::padded,
                             .isolate = job.isolates};
    const Reading reading = {.end = '\n'};
    const Data letters(put(lines('a', !job.isolates), "letters.jsonl"), cutting, reading);
    const Data digits(put(lines('0', !job.isolates), "digits.jsonl"), cutting, reading);
    return train_on(letters, digits, job);
  }

  void expect_learned(const Job& job) const {
    for (const Phase& phase : phases(job)) {
      EXPECT_LT(phase.learned, 0.03);  // every sign follows from the prompt
      // Forgotten: on a GPU, with its shape, from 1.8 up, as the seed will have it. And no weight has run away.
      EXPECT_GT(phase.other, on_gpu() ? 1.0 : 3.0);
      EXPECT_LT(phase.other, 20);
      if (job.gradients.policy != SCRUPLE_RELEASED) {  // that one knows no norm
        EXPECT_GT(phase.growth, 50);
      }
    }
  }
};

TEST_F(LongRuns, OnCompletions) {
  for (const char* recipe : {"fp32", "scruple"}) {
    SCOPED_TRACE(recipe);
    expect_learned(job_of(recipe, completing()));
  }
}

TEST_F(LongRuns, OnIsolatedDocuments) {
  const std::vector<Phase> fp32 = phases(job_of("fp32", isolating(), true));
  const std::vector<Phase> scruple = phases(job_of("scruple", isolating(), true));
  for (std::size_t i = 0; i < kPhases; ++i) {
    // Two of seven signs follow from nothing, and more of them where a window begins inside a document.
    EXPECT_LT(fp32[i].learned, 1.05);
    EXPECT_NEAR(scruple[i].learned, fp32[i].learned, 0.06);
    EXPECT_GT(scruple[i].other, 3.0);
    EXPECT_LT(scruple[i].other, 20);
  }
}

// A GPU hands gradients over in its own way, and steps them in between the layers of the backward pass.
class LongGpuRuns : public LongRuns {
 protected:
  void SetUp() override {
    if (!on_gpu()) GTEST_SKIP() << "a GPU's: SCRUPLE_TEST_DEVICE=cuda";
    LongRuns::SetUp();
  }
};

TEST_F(LongGpuRuns, OnCompletionsWithReleasedGradients) {
  Job job = job_of("scruple", completing());
  job.gradients.policy = SCRUPLE_RELEASED;
  job.gradients.max_norm = 0;  // each is stepped before the norm of all is known
  job.gradients.tensor_norm = 1;
  expect_learned(job);
}

TEST_F(LongGpuRuns, OnCompletionsWithCompressedGradients) {
  Job job = job_of("scruple", completing());
  job.gradients.policy = SCRUPLE_COMPRESSED;
  job.gradients.micro_batches = 2;
  job.batch = 4;
  expect_learned(job);
}

}  // namespace
}  // namespace scruple::train
