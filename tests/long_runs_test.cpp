// Three thousand steps at the defaults, on completions whose prompts count for nothing and on documents that do not see
// each other, while the data turn to something else and back: gradients grow a hundredfold at each turn, and those of
// most rows of the embedding vanish for a thousand steps. `scruple` learns, and forgets, what fp32 does.
#include <algorithm>

#include "tests/descriptions.h"
#include "tests/files.h"
#include "train/trainer.h"

namespace scruple::train {
namespace {

constexpr int kPhases = 3, kSteps = 1000;
constexpr GptShape kShape = {2, 32, 2, 24, 256};

Job job_of(const std::string& recipe, const Description& shape, bool isolates) {
  Job job;
  job.shape = shape;
  job.batch = 8;
  job.isolates = isolates;
  job.threads = 1;
  job.optimizer = [] { return Optimizer("adamw"); };
  job.describe = [recipe](const Optimizer& optimizer, std::int64_t size) {
    scruple_tensor row = {};
    row.optimizer = optimizer.raw();
    row.size = size;
    check(scruple_tensor_use(&row, recipe.c_str()));
    return row;
  };
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
  // Three of ten signs, and the one after each, backwards: abc>dcb.
  std::string lines(char zero, bool has_prompts) const {
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

  // Of fp32, then of `scruple`.
  std::vector<std::vector<Phase>> phases(const Description& shape, bool has_prompts) const {
    const Cutting cutting = {.context = shape.context, .isolate = !has_prompts};
    const Reading reading = {.end = '\n'};
    const Data letters(put(lines('a', has_prompts), "letters.jsonl"), cutting, reading);
    const Data digits(put(lines('0', has_prompts), "digits.jsonl"), cutting, reading);
    std::vector<std::vector<Phase>> found;
    for (const char* recipe : {"fp32", "scruple"})
      found.push_back(train_on(letters, digits, job_of(recipe, shape, !has_prompts)));
    return found;
  }
};

TEST_F(LongRuns, OnCompletions) {
  for (const std::vector<Phase>& run : phases(gpt2(kShape), true))
    for (const Phase& phase : run) {
      EXPECT_LT(phase.learned, 0.03);  // every sign follows from the prompt
      EXPECT_GT(phase.other, 3.0);
      EXPECT_GT(phase.growth, 50);
    }
}

TEST_F(LongRuns, OnIsolatedDocuments) {
  const auto found = phases(other_parts(kShape, 1, 16), false);
  for (std::size_t i = 0; i < kPhases; ++i) {
    // Two of seven signs follow from nothing, and more of them where a window begins inside a document.
    EXPECT_LT(found[0][i].learned, 1.05);
    EXPECT_NEAR(found[1][i].learned, found[0][i].learned, 0.06);
    EXPECT_GT(found[1][i].other, 3.0);
  }
}

}  // namespace
}  // namespace scruple::train
