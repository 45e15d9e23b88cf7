// The native model against an independent reference (gpt_reference.h): loss, logits and the gradient of
// every value of every parameter; and what it promises beside: the same bits on any number of threads,
// 16-bit activations, one layer's weights at a time.
#include "tests/gpt.h"

#include <complex>
#include <stdexcept>
#include <string>

#include "train/cpu/layers.h"

namespace scruple::train {
namespace {

TEST(GptReference, LossAndEveryGradient) {
  const Description shapes[] = {kOdd, gpt2({1, 6, 1, 5, 4}), gpt2({1, 10, 5, 1, 3}), gpt2({1, 1, 1, 2, 2})};
  for (const Description& shape : shapes) {
    SCOPED_TRACE("width " + std::to_string(shape.width));
    Examples batch(shape, 2);
    batch.targets[0] = -1;
    const Result got = run(shape, batch);
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
  const Result got = run(shape, batch, {.tile_rows = 500});
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
    const Result one = run(short_one, document, {.scale = share});
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
    const Result packed = run(shape, batch), want = alone(shape, batch);
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
      const Result want = run(shape, batch, {precision});
      for (std::size_t i = 0; i < batch.tokens.size(); ++i)
        if (batch.starts[i] == 0) batch.tokens[i] = 5;
      EXPECT_TRUE(same_bits(want, run(shape, batch, {precision})));
      batch.starts.clear();
      EXPECT_NE(want.loss, run(shape, batch, {precision}).loss) << "one document";
    }
}

TEST(GptDocuments, OneStartIsNoStarts) {
  for (const Description& shape : with_many_words(kLargeOnes)) {
    Examples batch(shape, 2);
    const Result want = run(shape, batch, {Precision::bf16});
    cut(shape, {shape.context}, batch);
    EXPECT_TRUE(same_bits(want, run(shape, batch, {Precision::bf16})));
  }
}

TEST(GptTargets, NoneThatCountsIsNoLossAndNoGradient) {
  for (const Description& shape : with_many_words(kSmallOnes))
    for (const Precision precision : kTypes) {
      Examples batch(shape, 2);
      std::fill(batch.targets.begin(), batch.targets.end(), -100);
      const Result got = run(shape, batch, {precision, 1024});
      EXPECT_EQ(got.loss, 0);
      for (const float g : flat(got.gradients)) EXPECT_EQ(g, 0.0f);
    }
}

TEST(GptBits, SameOnAnyNumberOfThreads) {
  for (const Description& shape : with_many_words(kLargeOnes))
    for (const Precision precision : kTypes) {
      Examples batch(shape, 3);
      for (std::size_t i = 0; i < 200; ++i) batch.targets[i] = -1;  // more than a piece of work
      const Result one = run(shape, batch, {.precision = precision, .scale = 64, .threads = 1});
      EXPECT_TRUE(std::isfinite(one.loss));
      for (const int threads : {2, 3, 5})
        EXPECT_TRUE(
            same_bits(one, run(shape, batch, {.precision = precision, .scale = 64, .threads = threads})))
            << threads << " threads";
    }
}

TEST(GptBits, SameForDirectWeights) {
  for (const Description& shape : with_many_words(kSmallOnes)) {
    const Examples batch(shape, 2);
    EXPECT_TRUE(same_bits(run(shape, batch), run(shape, batch, {.direct = true})));
  }
}

TEST(GptBits, ASecondPassIsLikeTheFirst) {
  for (const Description& shape : with_many_words(kLargeOnes)) {
    for (const Precision precision : kTypes) {
      Gpt gpt(shape, 2, {precision});
      Examples batch(shape, 2);
      const Examples other(shape, 2, 99);
      for (std::size_t i = 0; i < 200; ++i)
        batch.targets[i] = -1;  // what the other left there does not count
      const Result first = gpt.pass(batch);
      gpt.pass(other);
      EXPECT_TRUE(same_bits(first, gpt.pass(batch)));
    }
  }
}

// Validation has the loss of training.
TEST(GptBits, LossAloneIsTheSame) {
  for (const Description& shape : with_many_words(kSmallOnes)) {
    Gpt gpt(shape, 2, {Precision::bf16});
    const Examples batch(shape, 2);
    EXPECT_EQ(gpt.model.loss(gpt.store, batch.all()), gpt.forward(batch));
  }
}

TEST(GptGradients, TilesChangeRoundingOnly) {
  for (const Description& shape : with_many_words(kLargeOnes)) {
    const Examples batch(shape, 2);
    const Result whole = run(shape, batch);
    for (const std::int64_t rows : {2, 7, 64}) {
      const Result tiled = run(shape, batch, {.tile_rows = rows});
      for (std::size_t i = 0; i < whole.gradients.size(); ++i)
        EXPECT_LE(relative_error(tiled.gradients[i], whole.gradients[i]), 1e-6) << i;
    }
  }
}

// A policy may step rows of a weight as soon as their gradient has been taken. No gradient that follows may
// see the new values.
TEST(GptGradients, StayWhenWeightsAreSteppedInside) {
  for (const Description& shape : with_many_words(kSmallOnes)) {
    const Examples batch(shape, 2);
    const Result want = run(shape, batch, {.tile_rows = 5});
    for (const bool direct : {false, true})
      EXPECT_TRUE(
          same_bits(want, run(shape, batch, {.tile_rows = 5, .direct = direct, .step_inside = true})));
  }
}

// The token table is read twice, as the embedding and as the head; a token that is never read still has a gradient.
TEST(GptGradients, TheTokenTableIsTied) {
  Examples batch(kOdd, 1);
  std::fill(batch.tokens.begin(), batch.tokens.end(), 3);
  std::fill(batch.targets.begin(), batch.targets.end(), 5);
  const Result got = run(kOdd, batch);
  for (const float g : got.gradients[0]) EXPECT_NE(g, 0.0f);
}

TEST(GptGradients, ScaleIsAFactor) {
  for (const Description& shape : with_many_words(kSmallOnes)) {
    const Examples batch(shape, 2);
    const Result one = run(shape, batch), many = run(shape, batch, {.scale = 1024});
    EXPECT_EQ(one.loss, many.loss);
    const std::vector<float> g = flat(one.gradients), scaled = flat(many.gradients);
    for (std::size_t i = 0; i < g.size(); ++i) EXPECT_EQ(g[i] * 1024, scaled[i]);
  }
}

TEST(GptPrecision, SixteenBitsAreCloseAndAreSixteenBits) {
  for (const Description& shape : with_many_words(kSmallOnes)) {
    const Examples batch(shape, 2);
    const Result exact = run(shape, batch, {.scale = 256});
    for (const Precision precision : {Precision::bf16, Precision::fp16}) {
      const double tolerance = precision == Precision::bf16 ? 0.1 : 0.0125;
      const Result got = run(shape, batch, {precision, 256});
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
    const auto gradients = [&](Precision precision, float scale) {
      return flat(run(shape, batch, {precision, scale}).gradients);
    };
    for (const float g : gradients(Precision::fp16, 1e-9f)) EXPECT_EQ(g, 0.0f);
    bool finite = true;
    for (const float g : gradients(Precision::fp16, 1e9f)) finite = finite && std::isfinite(g);
    EXPECT_FALSE(finite);
    for (const float g : gradients(Precision::bf16, 1e9f)) EXPECT_TRUE(std::isfinite(g));
  }
}

TEST(GptPrecision, ANaNReachesTheLossAndTheGradients) {
  for (const Description& shape : with_many_words(kSmallOnes)) {
    for (const Precision precision : kTypes) {
      Gpt gpt(shape, 1, {precision});
      gpt.store.values_of[4][0] = std::numeric_limits<float>::quiet_NaN();
      const Result got = gpt.pass(Examples(shape, 1));
      EXPECT_TRUE(std::isnan(got.loss));
      EXPECT_TRUE(std::isnan(got.gradients[2][0]));
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

constexpr Recompute kRecomputed[] = {Recompute::norms, Recompute::mlp, Recompute::keep_attention,
                                     Recompute::block};

TEST(GptRecompute, ChangesNoBit) {
  for (const Description& shape : {kSmallOnes[0], kSmallOnes[1], kLargeOnes[0], kLargeOnes[1]})
    for (const Precision precision : kTypes) {
      Description deep = shape;
      deep.layers = 3;
      Examples batch(deep, 2);
      cut(deep, {shape.context / 2, shape.context - shape.context / 2}, batch);
      batch.targets[1] = -1;
      const Result want = run(deep, batch, {precision});
      for (const Recompute recompute : kRecomputed)
        EXPECT_TRUE(same_bits(want, run(deep, batch, {.precision = precision, .recompute = recompute})));
    }
}

// A layer is computed again before any of its weights is stepped.
TEST(GptRecompute, SeesNoWeightThatWasStepped) {
  for (const Description& shape : kSmallOnes) {
    const Examples batch(shape, 2);
    const Result want = run(shape, batch, {.tile_rows = 5});
    for (const Recompute recompute : kRecomputed)
      EXPECT_TRUE(same_bits(
          want,
          run(shape, batch, {.tile_rows = 5, .recompute = recompute, .direct = true, .step_inside = true})));
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

TEST(GptErrors, BackwardNeedsItsForward) {
  Gpt gpt(kOdd, 1);
  const Examples batch(kOdd, 1);
  EXPECT_THROW(gpt.backward(), std::logic_error);
  gpt.pass(batch);
  EXPECT_THROW(gpt.backward(), std::logic_error);
  gpt.forward(batch);
  gpt.model.loss(gpt.store, batch.all());
  EXPECT_THROW(gpt.backward(), std::logic_error);
}

TEST(GptErrors, ADocumentBeginsAtOneOfItsTokens) {
  Gpt gpt(kOdd, 2);
  Examples batch(kOdd, 2);
  const std::vector<std::int32_t> right = {0, 0, 2, 2, 4, 5, 5, 0, 1, 1, 1, 1, 1, 1};
  for (const auto& [place, wrong] : {std::pair{0, 1}, {3, 1}, {3, 0}, {3, 4}, {3, -1}, {7, 5}, {13, 14}}) {
    batch.starts = right;
    gpt.forward(batch);
    batch.starts[static_cast<std::size_t>(place)] = wrong;
    EXPECT_THROW(gpt.forward(batch), std::invalid_argument) << place;
  }
}

TEST(GptErrors, TokensOutsideTheVocabularyAndBatchesOfNone) {
  Gpt gpt(kOdd, 1);
  for (const std::int32_t bad : {-1, 11}) {
    Examples batch(kOdd, 1);
    batch.tokens[3] = bad;
    EXPECT_THROW(gpt.forward(batch), std::invalid_argument);
  }
  Examples beyond(kOdd, 1);
  beyond.targets[3] = 11;
  EXPECT_THROW(gpt.forward(beyond), std::invalid_argument);
  EXPECT_THROW(Transformer({kOdd, 0}, gpt.pool, gpt.ledger), std::invalid_argument);
  EXPECT_THROW(Transformer({kOdd, std::int64_t{1} << 40}, gpt.pool, gpt.ledger), std::invalid_argument);
}

}  // namespace
}  // namespace scruple::train
