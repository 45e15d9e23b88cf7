// The pass token by token, with a cache of keys and values: the logits of the reference and of the whole pass, however the
// tokens are cut into pieces.
#include <stdexcept>
#include <string>

#include "tests/gpt.h"
#include "train/cpu/transformer.h"

namespace scruple::train {
namespace {

struct Cached {
  explicit Cached(const Description& shape, int threads = 2)
      : words(static_cast<std::size_t>(shape.vocabulary)),
        pool(threads),
        generator(shape, pool, ledger),
        store(shape) {}
  std::vector<float> feed(const std::int32_t* tokens, std::int64_t count) {
    std::vector<float> logits(words);
    generator.feed(store, tokens, count, logits.data());
    return logits;
  }

  const std::size_t words;
  Threads pool;
  Ledger ledger;
  CachedTransformer generator;
  Store store;
};

// The logits after all tokens, fed in pieces of these lengths.
std::vector<float> logits_after(const Description& shape, const std::vector<std::int32_t>& tokens,
                                const std::vector<std::int64_t>& pieces, int threads = 2) {
  Cached cached(shape, threads);
  std::vector<float> logits;
  for (const std::int64_t count : pieces)
    logits = cached.feed(tokens.data() + cached.generator.length(), count);
  EXPECT_EQ(cached.generator.length(), static_cast<std::int64_t>(tokens.size()));
  return logits;
}

TEST(Generator, IsTheReferenceAfterAnyPrefix) {
  const Examples batch(kOdd, 1);
  const auto p = in_double(Store(kOdd));
  const gpt_reference::Shape shape = plain(kOdd);
  for (int count = 1; count <= kOdd.context; ++count) {
    const std::vector<std::int32_t> tokens(batch.tokens.begin(), batch.tokens.begin() + count);
    const auto rows = gpt_reference::Model<double>{shape, p}.logits(tokens.data(), count);
    EXPECT_LE(relative_error(logits_after(kOdd, tokens, {count}), rows.back()), 2e-6) << count;
    const std::vector<std::int64_t> ones(tokens.size(), 1);
    EXPECT_LE(relative_error(logits_after(kOdd, tokens, ones), rows.back()), 2e-6) << count;
  }
}

// The longest one passes through the layers in several parts.
TEST(Generator, PiecesChangeRoundingOnly) {
  std::vector<Description> shapes = with_many_words(kLargeOnes);
  shapes.push_back(other_parts({2, 24, 6, 700, 50}, 3, 10));
  for (const Description& shape : shapes) {
    const Examples batch(shape, 1);
    const std::int64_t all = shape.context;
    const std::vector<float> whole = logits_after(shape, batch.tokens, {all});
    const std::vector<std::int64_t> ones(batch.tokens.size(), 1);
    for (const auto& pieces : {ones, {1, all - 1}, {all - 1, 1}, {70, 1, all - 72, 1}}) {
      const std::vector<float> logits = logits_after(shape, batch.tokens, pieces);
      for (std::size_t i = 0; i < whole.size(); ++i) ASSERT_NEAR(logits[i], whole[i], 1e-5);
    }
  }
}

// The loss of forward from the logits after each token.
TEST(Generator, AgreesWithForward) {
  for (const Description& shape : with_many_words(kLargeOnes)) {
    for (const Precision precision : kTypes) {
      const Examples batch(shape, 1);
      const double loss = Gpt(shape, 1, {precision}).forward(batch);
      Cached cached(shape);
      double mean = 0;
      for (std::size_t t = 0; t < batch.tokens.size(); ++t) {
        const std::vector<float> logits = cached.feed(&batch.tokens[t], 1);
        double sum = 0;
        for (const float l : logits) sum += std::exp(static_cast<double>(l));
        const auto target = static_cast<std::size_t>(batch.targets[t]);
        mean += (std::log(sum) - static_cast<double>(logits[target])) / static_cast<double>(shape.context);
      }
      EXPECT_NEAR(loss, mean, precision == Precision::fp32 ? 1e-5 : 1e-2);
    }
  }
}

TEST(Generator, SameBitsOnAnyNumberOfThreads) {
  for (const Description& shape : with_many_words(kLargeOnes)) {
    const Examples batch(shape, 1);
    const std::vector<std::int64_t> pieces = {140, 1, 9};
    const std::vector<float> one = logits_after(shape, batch.tokens, pieces, 1);
    for (const int threads : {2, 5}) EXPECT_EQ(logits_after(shape, batch.tokens, pieces, threads), one);
  }
}

TEST(Generator, RefusesWhatIsBeyondTheContextAndForgets) {
  Cached cached(kOdd);
  const Examples batch(kOdd, 1);
  const std::int32_t outside[] = {3, 11}, below[] = {3, -1}, *tokens = batch.tokens.data();
  EXPECT_THROW(cached.feed(outside, 2), std::invalid_argument);
  EXPECT_THROW(cached.feed(below, 2), std::invalid_argument);
  EXPECT_THROW(cached.feed(tokens, 0), std::invalid_argument);
  EXPECT_THROW(cached.feed(tokens, 8), std::invalid_argument);
  EXPECT_EQ(cached.generator.length(), 0);
  const std::vector<float> first = cached.feed(tokens, 5);
  try {
    cached.feed(tokens, 3);
    ADD_FAILURE() << "8 tokens in a context of 7";
  } catch (const std::invalid_argument& error) {
    const std::string said = error.what();
    EXPECT_NE(said.find("3 tokens after 5 was asked for; the context is 7"), said.npos) << said;
  }
  EXPECT_EQ(cached.generator.length(), 5);
  EXPECT_NE(cached.feed(tokens, 2), first);
  cached.generator.clear();
  EXPECT_EQ(cached.generator.length(), 0);
  EXPECT_EQ(cached.feed(tokens, 5), first);
}

TEST(Generator, CountsWhatItTakes) {
  for (const Description& shape : with_many_words(kLargeOnes)) {
    Threads pool(2);
    Ledger planned = Ledger::counter(), taken;
    const CachedTransformer counted(shape, pool, planned), generator(shape, pool, taken);
    for (const Ledger::Entry& entry : planned.entries())
      EXPECT_EQ(entry.peak, taken.peak(entry.kind)) << entry.kind;
    EXPECT_EQ(taken.peak("cache"), 8 * shape.layers * shape.context * shape.key_width());
  }
}

}  // namespace
}  // namespace scruple::train
