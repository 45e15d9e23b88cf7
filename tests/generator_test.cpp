// Generation on every device: the pass with a key-value cache gives the logits that the CPU's gives in fp32, which
// cached_transformer_test compares with a reference.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "formats/bf16.h"
#include "formats/fp16.h"
#include "include/scruple/scruple.hpp"
#include "tests/descriptions.h"
#include "train/pass/backend.h"

namespace scruple::train {
namespace {

using Logits = std::vector<float>;

// Weights in a backend's memory, of one format, and a generator over them. They are those of `like`, if it is given.
struct Model {
  Model(Backend& backend, const Description& model, const std::string& format, const Model* like = nullptr)
      : shape(model) {
    std::mt19937 random(1);
    for (const Parameter& p : parameters_of(shape)) {
      const float deviation = p.shape.size() == 2 ? 1 / std::sqrt(static_cast<float>(shape.width)) : 0.2f;
      std::normal_distribution<float> normal(static_cast<float>(p.mean), deviation);
      std::vector<float> values(static_cast<std::size_t>(p.size()));
      for (float& x : values) x = Bf16::decode(Bf16::nearest(normal(random)));  // of which fp16 has most, too
      if (like != nullptr)
        check(
            scruple_decode(backend.engine().raw(), &like->rows[rows.size()], SCRUPLE_WEIGHT, values.data()));
      scruple_tensor row = {};
      row.size = p.size();
      row.optimizer = optimizer.raw();
      scruple_array& weight = row.arrays[SCRUPLE_WEIGHT];
      weight.format = format_named(format.c_str());
      const PlaneBytes bytes = plane_bytes(weight.format, row.size);
      weight.codes = planes.emplace_back(ledger, "weights", bytes.codes, backend.memory()).as<void>();
      if (bytes.aux > 0)
        weight.aux = planes.emplace_back(ledger, "scales", bytes.aux, backend.memory()).as<void>();
      check(scruple_encode(backend.engine().raw(), &row, SCRUPLE_WEIGHT, values.data()));
      rows.push_back(row);
    }
    generator = backend.generator(shape, rows, ledger);
  }
  Logits feed(const std::vector<std::int32_t>& tokens, std::size_t first, std::size_t count) {
    Logits logits(static_cast<std::size_t>(shape.vocabulary));
    generator->feed(rows, tokens.data() + first, static_cast<std::int64_t>(count), logits.data());
    return logits;
  }

  Description shape;
  Optimizer optimizer{"sgd", {{"momentum", 0.0}}};
  Ledger ledger;
  std::vector<Block> planes;
  std::vector<scruple_tensor> rows;
  std::unique_ptr<Generator> generator;
};

double relative_error(const Logits& got, const Logits& want) {
  double difference = 0, norm = 0;
  for (std::size_t i = 0; i < got.size(); ++i)
    difference += std::pow(got[i] - want[i], 2), norm += std::pow(want[i], 2);
  return std::sqrt(difference / norm);
}

std::vector<std::int32_t> random_tokens(const Description& shape) {
  std::mt19937 random(2);
  std::uniform_int_distribution<std::int32_t> token(0, static_cast<std::int32_t>(shape.vocabulary) - 1);
  std::vector<std::int32_t> tokens(static_cast<std::size_t>(shape.context));
  for (std::int32_t& t : tokens) t = token(random);
  return tokens;
}

// GPT-2's parts and all others; heads of odd widths; a context of more tokens than pass at once.
const Description kShapes[] = {gpt2({2, 48, 3, 70, 300}), other_parts({2, 64, 4, 40, 1100}, 2, 32),
                               other_parts({2, 128, 2, 1100, 320}, 1, 128)};

class Generation : public testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    if (!on_cpu() && !has_cuda()) GTEST_SKIP() << "this machine has no GPU that the trainer could run on";
    backend = on_cpu() ? cpu_backend(2) : cuda_backend(2);
    oracle = cpu_backend(2);
  }
  static bool on_cpu() { return std::string(GetParam()) == "cpu"; }
  std::unique_ptr<Backend> backend, oracle;
};

TEST_P(Generation, IsTheOraclesInEveryType) {
  for (const Description& shape : kShapes) {
    const std::vector<std::int32_t> tokens = random_tokens(shape);
    Model want(*oracle, shape, "fp32");
    const Logits all = want.feed(tokens, 0, tokens.size());
    for (const auto& [format, limit] : {std::pair{"fp32", 1e-3}, {"bf16", 5e-2}, {"fp16", 1e-2}}) {
      Model model(*backend, shape, format);
      EXPECT_LT(relative_error(model.feed(tokens, 0, tokens.size()), all), limit) << format;
    }
  }
}

TEST_P(Generation, CodesAreTheirValues) {
  for (const Description& shape : kShapes)
    for (const char* format : {"int10", "int8"}) {
      const std::vector<std::int32_t> tokens = random_tokens(shape);
      Model coded(*backend, shape, format), plain(*backend, shape, "fp32", &coded);
      EXPECT_EQ(coded.feed(tokens, 0, tokens.size()), plain.feed(tokens, 0, tokens.size())) << format;
    }
}

TEST_P(Generation, PiecesChangeRoundingOnly) {
  for (const Description& shape : kShapes) {
    const std::vector<std::int32_t> tokens = random_tokens(shape);
    Model model(*backend, shape, "fp32");
    const Logits whole = model.feed(tokens, 0, tokens.size());
    model.generator->clear();
    EXPECT_EQ(model.generator->length(), 0);
    EXPECT_EQ(model.feed(tokens, 0, tokens.size()), whole) << "the same bits again";
    model.generator->clear();
    Logits last;
    const std::size_t steps[] = {7, 1, 1, 13, 1};
    std::size_t fed = 0;
    for (std::size_t i = 0; fed < tokens.size(); ++i) {
      const std::size_t count = std::min(i < 5 ? steps[i] : std::size_t{97}, tokens.size() - fed);
      last = model.feed(tokens, fed, count);
      fed += count;
    }
    EXPECT_EQ(model.generator->length(), shape.context);
    EXPECT_LT(relative_error(last, whole), 1e-3);
    // A token that was fed matters, however long ago.
    std::vector<std::int32_t> other = tokens;
    other[0] = (other[0] + 1) % static_cast<std::int32_t>(shape.vocabulary);
    model.generator->clear();
    EXPECT_NE(model.feed(other, 0, other.size()), whole);
  }
}

TEST_P(Generation, RefusesWhatIsBeyondTheContext) {
  const Description& shape = kShapes[0];
  const std::vector<std::int32_t> tokens = random_tokens(shape);
  Model model(*backend, shape, "bf16");
  const Logits first = model.feed(tokens, 0, 5);
  EXPECT_THROW(model.feed(tokens, 0, tokens.size()), std::invalid_argument);
  EXPECT_THROW(model.feed({300}, 0, 1), std::invalid_argument);
  EXPECT_EQ(model.generator->length(), 5);
  model.generator->clear();
  EXPECT_EQ(model.feed(tokens, 0, 5), first);
}

// What is counted beforehand is what is taken.
TEST_P(Generation, CountsWhatItTakes) {
  for (const char* format : {"bf16", "int10"}) {
    Model model(*backend, kShapes[1], format);
    Ledger counted = Ledger::counter(), taken;
    const auto planned = backend->generator(model.shape, model.rows, counted);
    const auto made = backend->generator(model.shape, model.rows, taken);
    EXPECT_EQ(counted.peak(), taken.peak());
    EXPECT_GT(taken.peak("cache"), 0);
  }
}

INSTANTIATE_TEST_SUITE_P(Devices, Generation, testing::Values("cpu", "cuda"),
                         [](const auto& device) { return std::string(device.param); });

}  // namespace
}  // namespace scruple::train
