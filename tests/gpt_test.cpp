// The native model against an independent reference (gpt_reference.h): loss, logits and the gradient of
// every value of every parameter; and what it promises beside: the same bits on any number of threads,
// 16-bit activations, one layer's weights at a time.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <set>
#include <span>
#include <stdexcept>

#include "tests/descriptions.h"
#include "tests/gpt_reference.h"
#include "train/cpu/blas.h"
#include "train/cpu/layers.h"
#include "train/cpu/math.h"
#include "train/cpu/transformer.h"
#include "train/model/families/gpt2.h"

namespace scruple::train {
namespace {

using Values = std::vector<std::vector<float>>;
constexpr Precision kTypes[] = {Precision::fp32, Precision::bf16, Precision::fp16};

// WeightValues in fp32. Handed out as copies in the caller's scratch, as a low-bit store would.
struct Store : WeightValues {
  explicit Store(const Description& shape, unsigned seed = 1) {
    std::mt19937 random(seed);
    for (const Parameter& p : parameters_of(shape)) {
      // Far from the initial values, so that every path matters: norms and biases too.
      const float deviation = p.shape.size() == 2 ? 1 / std::sqrt(static_cast<float>(shape.width)) : 0.2f;
      std::normal_distribution<float> normal(static_cast<float>(p.mean), deviation);
      std::vector<float>& v = values_of.emplace_back(static_cast<std::size_t>(p.size()));
      for (float& x : v) x = normal(random);
    }
  }
  const float* values(int parameter, float* scratch) override {
    const std::vector<float>& v = values_of[static_cast<std::size_t>(parameter)];
    if (direct) return v.data();
    std::copy(v.begin(), v.end(), scratch);
    return scratch;
  }
  Values values_of;
  bool direct = false;
};

// Keeps every gradient, asking for `tile_rows` rows at a time.
struct Keep : Gradients {
  Keep(const Description& shape, std::int64_t rows) : list(parameters_of(shape)), tile_rows(rows) {
    for (const Parameter& p : list)
      all.emplace_back(static_cast<std::size_t>(p.size()), std::numeric_limits<float>::quiet_NaN());
  }
  void take(int parameter, const FillRows& fill) override {
    const Parameter& p = list[static_cast<std::size_t>(parameter)];
    EXPECT_TRUE(taken.insert(parameter).second) << p.name << " was handed over twice";
    const auto at = static_cast<std::size_t>(parameter);
    const std::int64_t rows = p.shape[0], width = p.size() / rows, step = tile_rows > 0 ? tile_rows : rows;
    for (std::int64_t first = 0; first < rows; first += step) {
      const std::int64_t count = std::min(step, rows - first);
      float* tile = all[at].data() + first * width;
      fill(first, count, tile);
      std::vector<float> again(static_cast<std::size_t>(count * width), -1.0f);
      fill(first, count, again.data());
      EXPECT_EQ(std::memcmp(again.data(), tile, again.size() * sizeof(float)), 0) << p.name;
      if (step_in != nullptr) std::fill_n(step_in->values_of[at].data() + first * width, count * width, 1e9f);
    }
  }
  std::vector<Parameter> list;
  std::int64_t tile_rows;
  Values all;
  std::set<int> taken;
  Store* step_in = nullptr;  // steps each tile as soon as it is there
};

struct Examples {
  Examples(const Description& shape, std::int64_t sequences, unsigned seed = 7) : size(sequences) {
    std::mt19937 random(seed);
    std::uniform_int_distribution<std::int32_t> token(0, static_cast<std::int32_t>(shape.vocabulary) - 1);
    for (std::int64_t i = 0; i < sequences * shape.context; ++i)
      tokens.push_back(token(random)), targets.push_back(token(random));
  }
  Batch all() const { return {tokens.data(), targets.data(), starts.empty() ? nullptr : starts.data()}; }
  std::int64_t size;
  std::vector<std::int32_t> tokens, targets, starts;
};

struct Result {
  double loss;
  Values gradients;
};

Result run(const Description& shape, const Examples& batch, Precision precision, int threads = 2,
           float scale = 1, std::int64_t tile_rows = 0, bool direct = false,
           Recompute recompute = Recompute::none) {
  Threads pool(threads);
  Ledger ledger;
  Transformer model({shape, batch.size, precision, recompute}, pool, ledger);
  Store store(shape);
  store.direct = direct;
  Keep keep(shape, tile_rows);
  const double loss = model.forward(store, batch.all());
  model.backward(store, keep, scale);
  EXPECT_EQ(keep.taken.size(), keep.list.size());
  return {loss, keep.all};
}

template <class A, class B>
double relative_error(const std::vector<A>& got, const std::vector<B>& want) {
  double difference = 0, norm = 0;
  for (std::size_t i = 0; i < got.size(); ++i) {
    difference += std::pow(static_cast<double>(got[i]) - static_cast<double>(want[i]), 2);
    norm += std::pow(static_cast<double>(want[i]), 2);
  }
  return std::sqrt(difference / std::max(norm, 1e-300));
}

bool same_bits(const Result& a, const Result& b) {
  if (std::memcmp(&a.loss, &b.loss, sizeof a.loss) != 0) return false;
  for (std::size_t i = 0; i < a.gradients.size(); ++i)
    if (std::memcmp(a.gradients[i].data(), b.gradients[i].data(), a.gradients[i].size() * sizeof(float)) != 0)
      return false;
  return true;
}

gpt_reference::Shape plain(const Description& s) {
  return {static_cast<int>(s.layers), static_cast<int>(s.width), static_cast<int>(s.heads),
          static_cast<int>(s.context), static_cast<int>(s.vocabulary)};
}

gpt_reference::Parameters<double> in_double(const Store& store) {
  gpt_reference::Parameters<double> p;
  for (const std::vector<float>& v : store.values_of) p.emplace_back(v.begin(), v.end());
  return p;
}

const Description kOdd = gpt2({2, 12, 3, 7, 11});
// More than one chunk of tokens, of queries and of gradient tiles.
const Description kLarge = gpt2({2, 160, 5, 150, 300});

const Description kSmallOnes[] = {kOdd, other_parts({2, 12, 6, 7, 11}, 3, 10)};
const Description kLargeOnes[] = {kLarge, other_parts({2, 160, 4, 150, 300}, 2, 34)};
// More words than logits are computed at a time.
const Description kWordyOnes[] = {gpt2({1, 12, 3, 150, 1100}), other_parts({1, 12, 6, 150, 2100}, 3, 10)};

std::vector<Description> with_many_words(std::span<const Description> shapes) {
  std::vector<Description> all(shapes.begin(), shapes.end());
  all.insert(all.end(), std::begin(kWordyOnes), std::end(kWordyOnes));
  return all;
}

TEST(GptReference, LossAndEveryGradient) {
  const Description shapes[] = {kOdd, gpt2({1, 6, 1, 5, 4}), gpt2({1, 10, 5, 1, 3}), gpt2({1, 1, 1, 2, 2})};
  for (const Description& shape : shapes) {
    SCOPED_TRACE("width " + std::to_string(shape.width));
    Examples batch(shape, 2);
    batch.targets[0] = -1;
    const Result got = run(shape, batch, Precision::fp32, 2, 1, 0);
    const auto p = in_double(Store(shape));
    EXPECT_NEAR(got.loss, gpt_reference::loss(plain(shape), p, batch.tokens, batch.targets), 1e-6);
    const auto want = gpt_reference::gradients(plain(shape), p, batch.tokens, batch.targets);
    const auto list = parameters_of(shape);
    for (std::size_t i = 0; i < list.size(); ++i) {
      double size = 0;
      for (const double w : want[i]) size += std::abs(w);
      if (size < 1e-12) {  // a norm over one value, a key's bias: no gradient at all
        for (const float g : got.gradients[i]) EXPECT_NEAR(g, 0, 1e-6) << list[i].name;
        continue;
      }
      EXPECT_LE(relative_error(got.gradients[i], want[i]), 1e-5) << list[i].name;
    }
  }
}

// The derivative along a random direction in each parameter.
void check_directions(const Description& shape, std::int64_t sequences) {
  Examples batch(shape, sequences);
  for (std::size_t i = 2; i < batch.targets.size(); i += 3) batch.targets[i] = -100;
  const Result got = run(shape, batch, Precision::fp32, 2, 1, 500);
  const auto p = in_double(Store(shape));
  const gpt_reference::Shape small = plain(shape);
  EXPECT_NEAR(got.loss, gpt_reference::loss(small, p, batch.tokens, batch.targets), 1e-5);
  std::mt19937 random(3);
  std::normal_distribution<double> normal;
  const auto list = parameters_of(shape);
  for (std::size_t i = 0; i < list.size(); ++i) {
    gpt_reference::Parameters<std::complex<double>> z;
    for (const std::vector<double>& values : p) z.emplace_back(values.begin(), values.end());
    double along = 0, norm = 0;
    for (std::size_t j = 0; j < z[i].size(); ++j) {
      const double direction = normal(random), g = static_cast<double>(got.gradients[i][j]);
      z[i][j].imag(1e-100 * direction);
      along += direction * g;
      norm += g * g;
    }
    const auto loss = gpt_reference::Model<std::complex<double>>{small, z}.loss(batch.tokens, batch.targets);
    EXPECT_NEAR(along, loss.imag() / 1e-100, 1e-5 * std::sqrt(norm)) << list[i].name;
  }
}

// Beyond one piece of work there are too many derivatives for the reference to take each. Here: several chunks of
// tokens, blocks of queries and blocks of logits; then several tiles of a weight's gradient, down and across.
TEST(GptReference, ManyTokens) { check_directions(gpt2({1, 32, 2, 150, 1100}), 2); }
TEST(GptReference, WideLayers) { check_directions(gpt2({1, 260, 2, 5, 140}), 1); }

// ---- Documents, and targets that do not count ----

// Each window is documents of these lengths, beginning with another of them.
void cut(const Description& shape, const std::vector<std::int64_t>& lengths, Examples& batch) {
  batch.starts.clear();
  for (std::int64_t w = 0; w < batch.size; ++w) {
    std::int32_t start = 0;
    for (std::size_t d = 0; d < lengths.size(); ++d) {
      const auto length = lengths[(d + static_cast<std::size_t>(w)) % lengths.size()];
      batch.starts.insert(batch.starts.end(), static_cast<std::size_t>(length), start);
      start += static_cast<std::int32_t>(length);
    }
    ASSERT_EQ(start, shape.context);
  }
}

// The documents of a batch, each in a model whose context it fills.
Result alone(const Description& shape, const Examples& batch) {
  Result sum = {};
  for (std::size_t first = 0, end = 1; first < batch.tokens.size(); first = end++) {
    while (end < batch.tokens.size() && batch.starts[end] == batch.starts[first]) ++end;
    Description short_one = shape;
    short_one.context = static_cast<std::int64_t>(end - first);
    Examples document(short_one, 1);
    std::copy(batch.tokens.begin() + first, batch.tokens.begin() + end, document.tokens.begin());
    std::copy(batch.targets.begin() + first, batch.targets.begin() + end, document.targets.begin());
    const float share = static_cast<float>(end - first) / static_cast<float>(batch.tokens.size());
    const Result one = run(short_one, document, Precision::fp32, 2, share);
    sum.loss += one.loss * static_cast<double>(share);
    sum.gradients.resize(one.gradients.size());
    for (std::size_t i = 0; i < one.gradients.size(); ++i) {
      sum.gradients[i].resize(one.gradients[i].size());
      for (std::size_t j = 0; j < one.gradients[i].size(); ++j) sum.gradients[i][j] += one.gradients[i][j];
    }
  }
  return sum;
}

TEST(GptDocuments, PackedOnesAreAsAlone) {
  const std::vector<std::int64_t> few = {3, 4}, many = {1, 66, 5, 78};
  std::vector<Description> shapes = with_many_words(kLargeOnes);
  shapes.insert(shapes.end(), std::begin(kSmallOnes), std::end(kSmallOnes));
  for (const Description& shape : shapes) {
    Examples batch(shape, 3);
    cut(shape, shape.context == 7 ? few : many, batch);
    const Result packed = run(shape, batch, Precision::fp32), want = alone(shape, batch);
    EXPECT_NEAR(packed.loss, want.loss, 1e-6 * want.loss);
    for (std::size_t p = 0; p < want.gradients.size(); ++p)
      EXPECT_LE(relative_error(packed.gradients[p], want.gradients[p]), 3e-6) << parameters_of(shape)[p].name;
  }
}

// Not one bit: no token of one document reaches another.
TEST(GptDocuments, NothingOfTheOneBeforeIsSeen) {
  for (const Description& shape : with_many_words(kLargeOnes))
    for (const Precision precision : kTypes) {
      Examples batch(shape, 2);
      cut(shape, {90, 60}, batch);
      for (std::size_t i = 0; i < batch.targets.size(); ++i)
        if (batch.starts[i] == 0) batch.targets[i] = -1;
      const Result want = run(shape, batch, precision);
      for (std::size_t i = 0; i < batch.tokens.size(); ++i)
        if (batch.starts[i] == 0) batch.tokens[i] = 5;
      EXPECT_TRUE(same_bits(want, run(shape, batch, precision)));
      batch.starts.clear();
      EXPECT_NE(want.loss, run(shape, batch, precision).loss) << "one document";
    }
}

TEST(GptDocuments, OneStartIsNoStarts) {
  for (const Description& shape : with_many_words(kLargeOnes)) {
    Examples batch(shape, 2);
    const Result want = run(shape, batch, Precision::bf16);
    cut(shape, {shape.context}, batch);
    EXPECT_TRUE(same_bits(want, run(shape, batch, Precision::bf16)));
  }
}

TEST(GptTargets, NoneThatCountsIsNoLossAndNoGradient) {
  for (const Description& shape : with_many_words(kSmallOnes))
    for (const Precision precision : kTypes) {
      Examples batch(shape, 2);
      std::fill(batch.targets.begin(), batch.targets.end(), -100);
      const Result got = run(shape, batch, precision, 2, 1024);
      EXPECT_EQ(got.loss, 0);
      for (const std::vector<float>& gradient : got.gradients)
        for (const float g : gradient) EXPECT_EQ(g, 0.0f);
    }
}

TEST(GptBits, SameOnAnyNumberOfThreads) {
  for (const Description& shape : with_many_words(kLargeOnes))
    for (const Precision precision : kTypes) {
      const Examples batch(shape, 3);
      const Result one = run(shape, batch, precision, 1, 64);
      EXPECT_TRUE(std::isfinite(one.loss));
      for (const int threads : {2, 3, 5})
        EXPECT_TRUE(same_bits(one, run(shape, batch, precision, threads, 64))) << threads << " threads";
    }
}

TEST(GptBits, SameForDirectWeights) {
  for (const Description& shape : with_many_words(kSmallOnes)) {
    const Examples batch(shape, 2);
    EXPECT_TRUE(same_bits(run(shape, batch, Precision::fp32, 2, 1, 0, false),
                          run(shape, batch, Precision::fp32, 2, 1, 0, true)));
  }
}

TEST(GptBits, ASecondPassIsLikeTheFirst) {
  for (const Description& shape : with_many_words(kSmallOnes)) {
    for (const Precision precision : kTypes) {
      Threads pool(2);
      Ledger ledger;
      Transformer model({shape, 2, precision}, pool, ledger);
      Store store(shape);
      const Examples batch(shape, 2), other(shape, 2, 99);
      Result result[2];
      for (Result& r : result) {
        Keep keep(shape, 0), ignored(shape, 0);
        r.loss = model.forward(store, batch.all());
        model.backward(store, keep, 1);
        r.gradients = keep.all;
        model.forward(store, other.all());
        model.backward(store, ignored, 1);
      }
      EXPECT_TRUE(same_bits(result[0], result[1]));
    }
  }
}

TEST(GptGradients, TilesChangeRoundingOnly) {
  for (const Description& shape : with_many_words(kLargeOnes)) {
    const Examples batch(shape, 2);
    const Result whole = run(shape, batch, Precision::fp32);
    for (const std::int64_t rows : {2, 7, 64}) {
      const Result tiled = run(shape, batch, Precision::fp32, 2, 1, rows);
      for (std::size_t i = 0; i < whole.gradients.size(); ++i)
        EXPECT_LE(relative_error(tiled.gradients[i], whole.gradients[i]), 1e-6) << i;
    }
  }
}

// A policy may step rows of a weight as soon as their gradient has been taken. No gradient that follows may
// see the new values.
TEST(GptGradients, StayWhenWeightsAreSteppedInside) {
  for (const Description& shape : with_many_words(kSmallOnes)) {
    for (const bool direct : {false, true}) {
      const Examples batch(shape, 2);
      const Result want = run(shape, batch, Precision::fp32, 2, 1, 5);
      Threads pool(2);
      Ledger ledger;
      Transformer model({shape, 2, Precision::fp32}, pool, ledger);
      Store store(shape);
      store.direct = direct;
      Keep keep(shape, 5);
      keep.step_in = &store;
      const double loss = model.forward(store, batch.all());
      model.backward(store, keep, 1);
      EXPECT_TRUE(same_bits(want, {loss, keep.all}));
    }
  }
}

// The token table is read twice, as the embedding and as the head; a token that is never read still has a gradient.
TEST(GptGradients, TheTokenTableIsTied) {
  Examples batch(kOdd, 1);
  std::fill(batch.tokens.begin(), batch.tokens.end(), 3);
  std::fill(batch.targets.begin(), batch.targets.end(), 5);
  const Result got = run(kOdd, batch, Precision::fp32);
  for (std::size_t i = 0; i < got.gradients[0].size(); ++i) EXPECT_NE(got.gradients[0][i], 0.0f);
}

TEST(GptGradients, ScaleIsAFactor) {
  for (const Description& shape : with_many_words(kSmallOnes)) {
    const Examples batch(shape, 2);
    const Result one = run(shape, batch, Precision::fp32), many = run(shape, batch, Precision::fp32, 2, 1024);
    EXPECT_EQ(one.loss, many.loss);
    for (std::size_t i = 0; i < one.gradients.size(); ++i)
      for (std::size_t j = 0; j < one.gradients[i].size(); ++j)
        EXPECT_EQ(one.gradients[i][j] * 1024, many.gradients[i][j]);
  }
}

TEST(GptPrecision, SixteenBitsAreCloseAndAreSixteenBits) {
  for (const Description& shape : with_many_words(kSmallOnes)) {
    const Examples batch(shape, 2);
    const Result exact = run(shape, batch, Precision::fp32, 2, 256);
    for (const Precision precision : {Precision::bf16, Precision::fp16}) {
      const double tolerance = precision == Precision::bf16 ? 0.1 : 0.0125;
      const Result got = run(shape, batch, precision, 2, 256);
      EXPECT_NEAR(got.loss, exact.loss, tolerance * exact.loss);
      EXPECT_NE(got.loss, exact.loss);
      for (std::size_t i = 0; i < exact.gradients.size(); ++i) {
        const double error = relative_error(got.gradients[i], exact.gradients[i]);
        EXPECT_LE(error, tolerance) << i;
        EXPECT_GE(error, precision == Precision::bf16 ? 1e-4 : 1e-5) << i;
      }
    }
  }
}

TEST(GptPrecision, Fp16UnderflowsAndOverflows) {
  for (const Description& shape : kSmallOnes) {
    const Examples batch(shape, 2);
    for (const std::vector<float>& gradient : run(shape, batch, Precision::fp16, 2, 1e-9f).gradients)
      for (const float g : gradient) EXPECT_EQ(g, 0.0f);
    bool finite = true;
    for (const std::vector<float>& gradient : run(shape, batch, Precision::fp16, 2, 1e9f).gradients)
      for (const float g : gradient) finite = finite && std::isfinite(g);
    EXPECT_FALSE(finite);
    for (const std::vector<float>& gradient : run(shape, batch, Precision::bf16, 2, 1e9f).gradients)
      for (const float g : gradient) EXPECT_TRUE(std::isfinite(g));
  }
}

TEST(GptPrecision, ANaNReachesTheLossAndTheGradients) {
  for (const Description& shape : with_many_words(kSmallOnes)) {
    for (const Precision precision : kTypes) {
      Threads pool(1);
      Ledger ledger;
      Transformer model({shape, 1, precision}, pool, ledger);
      Store store(shape);
      store.values_of[4][0] = std::numeric_limits<float>::quiet_NaN();
      const Examples batch(shape, 1);
      Keep keep(shape, 0);
      EXPECT_TRUE(std::isnan(model.forward(store, batch.all())));
      model.backward(store, keep, 1);
      EXPECT_TRUE(std::isnan(keep.all[2][0]));
    }
  }
}

TEST(GptPrecision, ActivationsAreRoundedToNearest) {
  const float all_ones = float_of(0x7fffffffu);  // a NaN that a careless rounding turns into -0
  for (const Precision precision : kTypes) {
    Ledger ledger;
    Matrix matrix(ledger, precision, 1, 4);
    const float values[4] = {1 + 0x1.8p-8f, 1 + 0x1.8p-11f, all_ones, 1e5f};
    float scratch[4] = {};
    const Target to = matrix.open(0, 0, 4, scratch);
    std::copy_n(values, 4, to.data);
    matrix.keep(0, 1, 0, 4, to);
    const float* got = matrix.read(0, 1, 0, 4, scratch).data;
    EXPECT_EQ(got[0], precision == Precision::bf16 ? 1 + 0x1p-7f : values[0]);
    EXPECT_EQ(got[1], precision == Precision::bf16   ? 1.0f
                      : precision == Precision::fp16 ? 1 + 0x1p-10f
                                                     : values[1]);
    EXPECT_TRUE(std::isnan(got[2]));
    EXPECT_EQ(std::isinf(got[3]), precision == Precision::fp16);
  }
}

TEST(GptPrecision, HalvesTheActivations) {
  for (const Description& shape : kLargeOnes) {
    Threads pool(1);
    std::int64_t bytes[3] = {};
    for (int i = 0; i < 3; ++i) {
      Ledger ledger;
      const Transformer model({shape, 4, kTypes[i]}, pool, ledger);
      bytes[i] = ledger.peak("activations");
      EXPECT_GT(ledger.peak("workspace"), 0);
    }
    EXPECT_NEAR(static_cast<double>(bytes[1]) / static_cast<double>(bytes[0]), 0.5, 0.02);
    EXPECT_EQ(bytes[1], bytes[2]);
  }
}

// The largest array of a model with many words would be [tokens, vocabulary].
TEST(GptMemory, DoesNotGrowWithTheWords) {
  Threads pool(2);
  std::int64_t bytes[2] = {};
  for (const bool many : {false, true}) {
    Ledger ledger = Ledger::counter();
    const Transformer model({gpt2({2, 64, 2, 512, many ? 200000 : 2000}), 8, Precision::fp32}, pool, ledger);
    bytes[many] = ledger.peak("activations");
  }
  EXPECT_EQ(bytes[0], bytes[1]);
}

TEST(GptRecompute, ChangesNoBit) {
  for (const Description& shape : {kSmallOnes[0], kSmallOnes[1], kLargeOnes[0], kLargeOnes[1]})
    for (const Precision precision : kTypes) {
      Description deep = shape;
      deep.layers = 3;
      Examples batch(deep, 2);
      cut(deep, {shape.context / 2, shape.context - shape.context / 2}, batch);
      batch.targets[1] = -1;
      const Result want = run(deep, batch, precision);
      for (const Recompute recompute :
           {Recompute::norms, Recompute::mlp, Recompute::keep_attention, Recompute::block})
        EXPECT_TRUE(same_bits(want, run(deep, batch, precision, 2, 1, 0, false, recompute)));
    }
}

// A layer is computed again before any of its weights is stepped.
TEST(GptRecompute, SeesNoWeightThatWasStepped) {
  for (const Description& shape : kSmallOnes)
    for (const Recompute recompute :
         {Recompute::norms, Recompute::mlp, Recompute::keep_attention, Recompute::block}) {
      const Examples batch(shape, 2);
      Threads pool(2);
      Ledger ledger;
      Transformer model({shape, 2, Precision::fp32, recompute}, pool, ledger);
      Store store(shape);
      store.direct = true;
      Keep keep(shape, 5);
      keep.step_in = &store;
      const double loss = model.forward(store, batch.all());
      model.backward(store, keep, 1);
      EXPECT_TRUE(same_bits(run(shape, batch, Precision::fp32, 2, 1, 5), {loss, keep.all}));
    }
}

TEST(GptRecompute, SavesAllLayersButOne) {
  for (Description shape : kLargeOnes) {
    shape.layers = 6;
    Threads pool(2);
    const std::int64_t tokens = 4 * shape.context, width = shape.width;
    const auto activations = [&](Recompute recompute) {
      Ledger planned = Ledger::counter(), taken;
      const Transformer counted({shape, 4, Precision::bf16, recompute}, pool, planned);
      const Transformer model({shape, 4, Precision::bf16, recompute}, pool, taken);
      EXPECT_EQ(planned.entries().size(), taken.entries().size());
      for (const Ledger::Entry& entry : planned.entries())
        EXPECT_EQ(entry.peak, taken.peak(entry.kind)) << entry.kind;
      return taken.peak("activations");
    };
    const std::int64_t all = activations(Recompute::none);
    const std::int64_t expanded = 2 * tokens * shape.up_width();
    EXPECT_EQ(all - activations(Recompute::mlp), 5 * expanded);
    const std::int64_t inside =
        2 * tokens * (shape.qkv_width() + shape.query_width() + width) + 4 * tokens * (shape.heads + 2);
    EXPECT_EQ(all - activations(Recompute::block), 5 * (expanded + inside));
  }
}

// Validation has the loss of training.
TEST(GptBits, LossAloneIsTheSame) {
  for (const Description& shape : with_many_words(kSmallOnes)) {
    Threads pool(2);
    Ledger ledger;
    Transformer model({shape, 2, Precision::bf16}, pool, ledger);
    Store store(shape);
    const Examples batch(shape, 2);
    EXPECT_EQ(model.loss(store, batch.all()), model.forward(store, batch.all()));
  }
}

// ---- Token by token ----

// The logits after all tokens, fed in pieces of these lengths.
std::vector<float> logits_after(const Description& shape, const std::vector<std::int32_t>& tokens,
                                const std::vector<std::int64_t>& pieces, int threads = 2) {
  Threads pool(threads);
  Ledger ledger;
  CachedTransformer generator(shape, pool, ledger);
  Store store(shape);
  std::vector<float> logits(static_cast<std::size_t>(shape.vocabulary));
  for (const std::int64_t count : pieces)
    generator.feed(store, tokens.data() + generator.length(), count, logits.data());
  EXPECT_EQ(generator.length(), static_cast<std::int64_t>(tokens.size()));
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
      Threads pool(2);
      Ledger ledger;
      Transformer model({shape, 1, precision}, pool, ledger);
      CachedTransformer generator(shape, pool, ledger);
      Store store(shape);
      const Examples batch(shape, 1);
      const double loss = model.forward(store, batch.all());
      double mean = 0;
      for (std::size_t t = 0; t < batch.tokens.size(); ++t) {
        std::vector<float> logits(static_cast<std::size_t>(shape.vocabulary));
        generator.feed(store, &batch.tokens[t], 1, logits.data());
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
  Threads pool(1);
  Ledger ledger;
  CachedTransformer generator(kOdd, pool, ledger);
  Store store(kOdd);
  const Examples batch(kOdd, 1);
  std::vector<float> logits(static_cast<std::size_t>(kOdd.vocabulary)), first = logits;
  const std::int32_t outside[] = {3, 11}, below[] = {3, -1};
  EXPECT_THROW(generator.feed(store, outside, 2, logits.data()), std::invalid_argument);
  EXPECT_THROW(generator.feed(store, below, 2, logits.data()), std::invalid_argument);
  EXPECT_THROW(generator.feed(store, batch.tokens.data(), 0, logits.data()), std::invalid_argument);
  EXPECT_THROW(generator.feed(store, batch.tokens.data(), 8, logits.data()), std::invalid_argument);
  EXPECT_EQ(generator.length(), 0);
  generator.feed(store, batch.tokens.data(), 5, first.data());
  try {
    generator.feed(store, batch.tokens.data(), 3, logits.data());
    ADD_FAILURE() << "8 tokens in a context of 7";
  } catch (const std::invalid_argument& error) {
    const std::string said = error.what();
    EXPECT_NE(said.find("3 tokens after 5 was asked for; the context is 7"), said.npos) << said;
  }
  EXPECT_EQ(generator.length(), 5);
  generator.feed(store, batch.tokens.data(), 2, logits.data());
  EXPECT_NE(logits, first);
  generator.clear();
  EXPECT_EQ(generator.length(), 0);
  generator.feed(store, batch.tokens.data(), 5, logits.data());
  EXPECT_EQ(logits, first);
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

TEST(GptErrors, BackwardNeedsItsForward) {
  Threads pool(1);
  Ledger ledger;
  Transformer model({kOdd, 1, Precision::fp32}, pool, ledger);
  Store store(kOdd);
  Keep keep(kOdd, 0);
  const Examples batch(kOdd, 1);
  EXPECT_THROW(model.backward(store, keep, 1), std::logic_error);
  model.forward(store, batch.all());
  model.backward(store, keep, 1);
  EXPECT_THROW(model.backward(store, keep, 1), std::logic_error);
  model.forward(store, batch.all());
  model.loss(store, batch.all());
  EXPECT_THROW(model.backward(store, keep, 1), std::logic_error);
}

TEST(GptErrors, ADocumentBeginsAtOneOfItsTokens) {
  Threads pool(1);
  Ledger ledger;
  Transformer model({kOdd, 2, Precision::fp32}, pool, ledger);
  Store store(kOdd);
  Examples batch(kOdd, 2);
  const std::vector<std::int32_t> right = {0, 0, 2, 2, 4, 5, 5, 0, 1, 1, 1, 1, 1, 1};
  for (const auto& [place, wrong] : {std::pair{0, 1}, {3, 1}, {3, 0}, {3, 4}, {3, -1}, {7, 5}, {13, 14}}) {
    batch.starts = right;
    model.forward(store, batch.all());
    batch.starts[static_cast<std::size_t>(place)] = wrong;
    EXPECT_THROW(model.forward(store, batch.all()), std::invalid_argument) << place;
  }
}

TEST(GptErrors, TokensOutsideTheVocabularyAndBatchesOfNone) {
  Threads pool(1);
  Ledger ledger;
  Transformer model({kOdd, 1, Precision::fp32}, pool, ledger);
  Store store(kOdd);
  for (const std::int32_t bad : {-1, 11}) {
    Examples batch(kOdd, 1);
    batch.tokens[3] = bad;
    EXPECT_THROW(model.forward(store, batch.all()), std::invalid_argument);
  }
  Examples beyond(kOdd, 1);
  beyond.targets[3] = 11;
  EXPECT_THROW(model.forward(store, beyond.all()), std::invalid_argument);
  EXPECT_THROW(Transformer({kOdd, 0}, pool, ledger), std::invalid_argument);
  EXPECT_THROW(Transformer({kOdd, std::int64_t{1} << 40}, pool, ledger), std::invalid_argument);
}

TEST(GptShapes, ProblemsAreNamed) {
  EXPECT_EQ(problem_with(gpt2({})), "");
  EXPECT_EQ(problem_with(kOdd), "");
  EXPECT_NE(problem_with(gpt2({0, 12, 3, 7, 11})).find("layers = 0"), std::string::npos);
  EXPECT_NE(problem_with(gpt2({1, -4, 3, 7, 11})).find("width = -4"), std::string::npos);
  EXPECT_NE(problem_with(gpt2({1, 12, 0, 7, 11})).find("heads = 0"), std::string::npos);
  EXPECT_NE(problem_with(gpt2({1, 12, 3, 0, 11})).find("context = 0"), std::string::npos);
  EXPECT_NE(problem_with(gpt2({1, 12, 3, 7, 1})).find("vocabulary = 1"), std::string::npos);
  EXPECT_NE(problem_with(gpt2({1, 13, 3, 7, 11})).find("multiple of the heads, such as 15"),
            std::string::npos);
  EXPECT_NE(problem_with(Description()).find("no names"), std::string::npos);
  const std::int64_t huge = std::int64_t{1} << 40;
  EXPECT_NE(problem_with(gpt2({huge, 12, 3, 7, 11})), "");
  EXPECT_NE(problem_with(gpt2({1, huge, 1, 7, 11})), "");
  EXPECT_NE(problem_with(gpt2({1, 12, 3, huge, 11})), "");
  EXPECT_NE(problem_with(gpt2({1, 12, 3, 7, huge})), "");
}

TEST(GptShapes, ParametersAreGpt2s) {
  std::int64_t size = 0;
  const std::vector<Parameter> list = parameters_of(gpt2({12, 768, 12, 1024, 50257}));
  std::set<std::string> names;
  for (const Parameter& p : list) {
    size += p.size();
    names.insert(p.name);
    EXPECT_EQ(p.decays, p.shape.size() == 2) << p.name;
    EXPECT_EQ(p.deviation == 0, p.shape.size() == 1) << p.name;
  }
  EXPECT_EQ(size, 124439808);  // of the published checkpoint
  EXPECT_EQ(list.size(), names.size());
  EXPECT_EQ(list[4].name, "transformer.h.0.attn.c_attn.weight");
  EXPECT_EQ(list[4].shape, (std::vector<std::int64_t>{768, 2304}));
  EXPECT_EQ(list[2].mean, 1);
  EXPECT_EQ(list[12].name, "transformer.h.0.mlp.c_proj.weight");
  EXPECT_NEAR(list[12].deviation, 0.02 / std::sqrt(24), 1e-12);
  EXPECT_EQ(list.back().name, "transformer.ln_f.bias");
}

// OpenBLAS built without threads is not always safe to call from several.
TEST(GptMath, ProductsFromManyThreadsAtOnce) {
  constexpr Index kSide = 16;
  std::atomic<int> wrong = 0;
  Threads pool(4);
  pool.run(64, [&](i64 piece) {
    std::vector<float> a(kSide * kSide), b(kSide * kSide), c(kSide * kSide), want(kSide * kSide, 0.0f);
    for (std::size_t i = 0; i < a.size(); ++i) {
      a[i] = static_cast<float>((7 * i + static_cast<std::size_t>(piece)) % 13);
      b[i] = static_cast<float>((3 * i + static_cast<std::size_t>(piece)) % 11);
    }
    for (std::size_t i = 0; i < a.size(); ++i)
      for (std::size_t k = 0; k < kSide; ++k) want[i] += a[i / kSide * kSide + k] * b[k * kSide + i % kSide];
    for (int repeat = 0; repeat < 10000; ++repeat) {
      product(kSide, kSide, kSide, 1, View{a.data(), kSide}, View{b.data(), kSide}, 0, {c.data(), kSide});
      if (c != want) ++wrong;
    }
  });
  EXPECT_EQ(wrong, 0);
}

TEST(GptMath, ExpAndGelu) {
  for (float x = -87; x < 88; x += 0.00371f) {
    const double want = std::exp(static_cast<double>(x));
    EXPECT_NEAR(exp_of(x), want, 2.5e-7 * want) << x;
  }
  EXPECT_TRUE(std::isnan(exp_of(std::numeric_limits<float>::quiet_NaN())));
  EXPECT_EQ(exp_of(0), 1);
  for (float x = -9; x < 9; x += 0.00271f) {
    const double d = x, s = std::sqrt(2 / std::acos(-1.0)), t = std::tanh(s * (d + 0.044715 * d * d * d));
    const double slope = 0.5 * (1 + t) + 0.5 * d * (1 - t * t) * s * (1 + 3 * 0.044715 * d * d);
    EXPECT_NEAR(gelu(x), 0.5 * d * (1 + t), 1e-6 * std::max(1.0, std::abs(d))) << x;
    EXPECT_NEAR(gelu_slope(x), slope, 2e-6) << x;
  }
  EXPECT_EQ(gelu(50), 50);
}

}  // namespace
}  // namespace scruple::train
