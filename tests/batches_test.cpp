// Windows in batches: of a whole text every token counts once, in training's memory and in validation's.
#include "train/run/batches.h"

#include <gtest/gtest.h>

#include <cmath>
#include <fstream>
#include <vector>

#include "tests/jobs.h"

namespace scruple::train {
namespace {

constexpr std::int64_t kContext = 5;

Setup setup_of(std::int64_t batch) {
  Setup setup;
  setup.shape = gpt2({1, 32, 2, kContext, 256});
  setup.batch = batch;
  return setup;
}

Job job_with(std::int64_t batch) {
  static const std::vector<Parameter> parameters = parameters_of(setup_of(1).shape);
  Job job = job_of(setup_of(batch).shape, batch, "fp32", 1e-3);
  job.initial = random_values(parameters, 1, 1);
  return job;
}

std::string file_of(const std::string& name, const std::string& text) {
  const std::string path = ::testing::TempDir() + name;
  std::ofstream(path) << text;
  return path;
}

// Each target that counts, in order; every batch but the last is full.
std::vector<std::int32_t> counted(const Windows& data, std::int64_t in_batch) {
  Ledger ledger;
  Batches batches(setup_of(in_batch), data.isolates(), ledger);
  std::vector<std::int32_t> all;
  const std::int64_t count = count_of_all(data);
  for (std::int64_t first = 0; first < count; first += in_batch) {
    const Counted read = batches.read(
        data, [&](std::int64_t w) { return first + w < count ? window_of_all(data, first + w) : Window(); });
    const std::size_t before = all.size();
    const Batch batch = batches.batch();
    for (std::int64_t i = 0; i < in_batch * kContext; ++i)
      if (batch.targets[i] >= 0) all.push_back(batch.targets[i]);
    EXPECT_EQ(static_cast<std::size_t>(read.targets), all.size() - before);
  }
  return all;
}

TEST(Whole, EveryTokenOfATextCountsOnce) {
  for (std::size_t size = kContext + 1; size < 5 * kContext; ++size) {
    std::string text;
    for (std::size_t i = 0; i < size; ++i) text += static_cast<char>('A' + i);
    const Data data(file_of("whole", text), {.context = kContext, .validation_share = 0});
    for (const std::int64_t batch : {1, 2, 3})
      EXPECT_EQ(counted(data.training(), batch), std::vector<std::int32_t>(text.begin() + 1, text.end()))
          << size << ", batch " << batch;
  }
}

TEST(Whole, OfPromptsTheCompletionsAlone) {
  std::string lines, wanted;
  for (const char c : {'a', 'b', 'c'}) {
    const std::string completion(static_cast<std::size_t>(c - 'a' + 1), c);
    lines += R"({"prompt": "x", "completion": ")" + completion + "\"}\n";
    wanted += completion;
  }
  for (const Layout layout : {Layout::padded, Layout::packed}) {
    const Data data(file_of("whole.jsonl", lines),
                    {.context = kContext, .layout = layout, .validation_share = 0});
    EXPECT_EQ(counted(data.training(), 2), std::vector<std::int32_t>(wanted.begin(), wanted.end()))
        << kLayouts[static_cast<int>(layout)];
  }
}

// The mean over targets, not over windows or batches, whatever the batch.
TEST(Losses, EveryTargetWeighsTheSame) {
  const Data data(file_of("losses", "the quick brown fox jumps over dogs"),
                  {.context = kContext, .validation_share = 0});
  const Windows windows = data.training();
  const auto loss_in = [&](std::int64_t in_batch) {
    const Job job = job_with(in_batch);
    Passes passes(job);
    Batches batches(job, false, passes.ledger);
    return loss_over(
        *passes.network, passes.state.visible(), batches, windows, count_of_all(windows),
        [&](std::int64_t index) { return window_of_all(windows, index); }, [](auto, auto) { return true; });
  };
  const Loss one = loss_in(1), four = loss_in(4);
  EXPECT_EQ(one.targets, 34);
  EXPECT_EQ(one.windows, 7);
  EXPECT_EQ(four.targets, 34);
  EXPECT_EQ(four.windows, 7);
  EXPECT_NEAR(one.mean(), four.mean(), 1e-6);
  EXPECT_NEAR(one.mean(), std::log(256), 0.5);
}

TEST(Losses, AStopLeavesWhatWasSeen) {
  const Data data(file_of("losses", std::string(60, 'x')), {.context = kContext, .validation_share = 0});
  const Job job = job_with(2);
  Passes passes(job);
  Batches batches(job, false, passes.ledger);
  const Windows windows = data.training();
  const Loss loss = loss_over(
      *passes.network, passes.state.visible(), batches, windows, count_of_all(windows),
      [&](std::int64_t index) { return window_of_all(windows, index); },
      [](std::int64_t done, std::int64_t all) { return all == 6 && done < 2; });
  EXPECT_EQ(loss.windows, 4);
  EXPECT_EQ(loss.targets, 20);
}

}  // namespace
}  // namespace scruple::train
