// Norms: exact, by the fixed tree of engine/unit.h, on what is stored. Folds: what an accumulator loses, that
// its randomness is unbiased and fresh, and that a step reads exactly what decoding shows.
#include "tests/support.h"

namespace scruple_tests {
namespace {

struct Kind {
  const scruple_format* format;
  int rounding;
  std::string name;
};

// Every format with a role, in every rounding it has.
std::vector<Kind> kinds(std::uint32_t role) {
  std::vector<Kind> list;
  for (const scruple_format* format : formats()) {
    const scruple_format_info info = info_of(format);
    if ((info.roles & role) == 0) continue;
    for (int r = 0; r <= SCRUPLE_WIDE; ++r)
      if ((info.roundings >> r & 1u) != 0)
        list.push_back({format, r, std::string(info.name) + " rounding " + std::to_string(r)});
  }
  return list;
}

Kind kind(const char* format, int rounding) { return {scruple_format_find(format), rounding, format}; }

bool is_fp32(const Kind& k) { return info_of(k.format).code_bits == 32; }

// ---- Norms ----

struct Norm : testing::Test {
  // A tensor with nothing but a gradient.
  Tensor with_gradient(const Kind& k, const std::vector<float>& values, std::size_t codes_shift = 0,
                       std::size_t aux_shift = 0) const {
    Tensor tensor(optimizer, length(values));
    tensor.row.folds = 1;
    tensor.use(SCRUPLE_GRADIENT, k.format, k.rounding, codes_shift, aux_shift);
    tensor.encode(engine, SCRUPLE_GRADIENT, values);
    return tensor;
  }

  const Engine engine{2};
  const Optimizer optimizer{"sgd"};
};

// The tree, written from its description: segments of 2048 values, padded with zeros, are 8 rows of 256
// lanes; each lane adds its column from the top, lanes are added in adjacent pairs; segments in order within
// a chunk of 65536, chunks in order over all tensors.
double tree_sum(const std::vector<float>& x, std::size_t first, std::size_t last) {
  std::vector<double> level(256, 0.0);
  for (std::size_t row = 0; row < 8; ++row)
    for (std::size_t lane = 0; lane < 256; ++lane) {
      const std::size_t i = first + row * 256 + lane;
      const double value = i < last ? static_cast<double>(x[i]) : 0.0;
      level[lane] += value * value;
    }
  while (level.size() > 1) {
    std::vector<double> pairs;
    for (std::size_t i = 0; i < level.size(); i += 2) pairs.push_back(level[i] + level[i + 1]);
    level = pairs;
  }
  return level[0];
}

double tree_norm(const std::vector<std::vector<float>>& tensors) {
  double total = 0;
  for (const std::vector<float>& x : tensors)
    for (std::size_t chunk = 0; chunk < x.size(); chunk += 65536) {
      const std::size_t end = std::min(x.size(), chunk + 65536);
      double sum = 0;
      for (std::size_t at = chunk; at < end; at += 2048) sum += tree_sum(x, at, std::min(end, at + 2048));
      total += sum;
    }
  return std::sqrt(total);
}

std::vector<std::vector<float>> norm_data() {
  std::vector<std::vector<float>> all;
  Random random(21);
  for (const std::size_t n :
       {0u, 1u, 255u, 256u, 257u, 2047u, 2048u, 2049u, 65535u, 65536u, 65537u, 150001u}) {
    std::vector<float> x = random.normals(n, random.lognormal(2));
    for (float& v : x) v *= static_cast<float>(random.lognormal(1));
    all.push_back(x);
  }
  return all;
}

TEST_F(Norm, EqualsALongDoubleSumAndTheFixedTreeToTheBit) {
  std::vector<Tensor> tensors;
  long double exact = 0;
  for (const std::vector<float>& x : norm_data()) {
    tensors.push_back(with_gradient(kind("fp32", SCRUPLE_NEAREST), x));
    for (const float v : x) exact += static_cast<long double>(v) * static_cast<long double>(v);
  }
  const double norm = norm_of(engine, rows_of(tensors));
  EXPECT_NEAR(norm / static_cast<double>(std::sqrt(exact)), 1.0, 1e-12);
  EXPECT_EQ(norm, tree_norm(norm_data())) << "the reduction tree changed: docs and other engines rely on it";
  for (std::size_t i = 0; i < tensors.size(); ++i)
    EXPECT_EQ(norm_of(engine, tensors[i]), tree_norm({norm_data()[i]})) << tensors[i].row.size << " elements";
}

TEST_F(Norm, SameBitsForEveryEngineAndThreadCountInEveryFormat) {
  for (const Kind& k : kinds(SCRUPLE_ROLE_GRADIENT)) {
    std::vector<Tensor> tensors;
    std::vector<std::vector<float>> decoded;
    for (const std::vector<float>& x : norm_data()) {
      tensors.push_back(with_gradient(k, x));
      decoded.push_back(tensors.back().decode(engine, SCRUPLE_GRADIENT));
    }
    const double want = tree_norm(decoded);
    for (const std::string& name : cpu_engines())
      for (const int threads : {1, 2, 7}) {
        const Engine other(threads, name);
        float found = -1;
        EXPECT_EQ(norm_of(other, rows_of(tensors), &found), want)
            << k.name << " on " << name << " x" << threads;
        EXPECT_EQ(found, 0.0f) << k.name;
      }
  }
}

TEST_F(Norm, AnyAlignment) {
  for (const Kind& k : kinds(SCRUPLE_ROLE_GRADIENT)) {
    const std::vector<float> x = Random(4).normals(5001);
    const Tensor aligned = with_gradient(k, x);
    const Tensor odd = with_gradient(k, x, 1, 3);
    EXPECT_EQ(norm_of(engine, aligned), norm_of(engine, odd)) << k.name;
  }
}

TEST_F(Norm, FoundInfExactlyForNaNAndInfinity) {
  for (const Kind& k : kinds(SCRUPLE_ROLE_GRADIENT))
    for (const std::size_t at : {0u, 63u, 70000u, 70999u})
      for (const float special : {kNaN, kInf, -kInf, float_from(0x7f800001u), float_from(0xffffffffu)}) {
        std::vector<float> x(71000, 0.5f);
        x[at] = special;
        std::vector<Tensor> tensors;
        tensors.push_back(with_gradient(k, {1.0f, 2.0f}));
        tensors.push_back(with_gradient(k, x));
        float found = -1;
        const double norm = norm_of(engine, rows_of(tensors), &found);
        EXPECT_EQ(found, 1.0f) << k.name << ", " << special << " at " << at;
        EXPECT_FALSE(std::isfinite(norm)) << k.name;
        EXPECT_EQ(scruple_clip_factor(norm, 1.0), 1.0f);
      }
}

TEST_F(Norm, HugeAndTinyFiniteGradientsAreNeitherFlaggedNorLost) {
  for (const float value : {3e38f, -3.4028234e38f, 1e-30f, 1e-44f}) {
    std::vector<Tensor> tensors;
    tensors.push_back(with_gradient(kind("fp32", SCRUPLE_NEAREST), std::vector<float>(100000, value)));
    float found = -1;
    const double norm = norm_of(engine, rows_of(tensors), &found);
    EXPECT_EQ(found, 0.0f) << value;
    EXPECT_NEAR(norm / (std::fabs(static_cast<double>(value)) * std::sqrt(100000.0)), 1.0, 1e-12) << value;
  }
}

TEST_F(Norm, EmptyTablesAndOutputsThatAreNotWanted) {
  float found = -1;
  EXPECT_EQ(norm_of(engine, {}), 0.0);
  EXPECT_EQ(norm_of(engine, {}, &found), 0.0);
  EXPECT_EQ(found, 0.0f);
  const Tensor t = with_gradient(kind("fp32", SCRUPLE_NEAREST), {3.0f, 4.0f});
  CHECK_OK(scruple_norm(engine, &t.row, 1, nullptr, nullptr));
  EXPECT_EQ(norm_of(engine, t), 5.0);
}

TEST_F(Norm, ClipsAsTorchDoes) {
  EXPECT_EQ(scruple_clip_factor(0.5, 1.0), 1.0f);
  EXPECT_EQ(scruple_clip_factor(0.0, 1.0), 1.0f);
  EXPECT_EQ(scruple_clip_factor(4.0, 1.0), static_cast<float>(1.0 / (4.0 + 1e-6)));
  EXPECT_EQ(scruple_clip_factor(100.0, 2.5), static_cast<float>(2.5 / (100.0 + 1e-6)));
  EXPECT_EQ(scruple_clip_factor(static_cast<double>(kInf), 1.0), 1.0f);
  EXPECT_EQ(scruple_clip_factor(static_cast<double>(kNaN), 1.0), 1.0f);
}

// ---- Folds ----

struct Accumulator {
  Accumulator(const scruple_optimizer* optimizer, scruple_engine* on, const Kind& k, std::int64_t size)
      : engine(on), tensor(optimizer, size) {
    tensor.use(SCRUPLE_GRADIENT, k.format, k.rounding);
  }
  void fold(const std::vector<float>& g, float multiplier = 1) {
    scruple_tests::fold(engine, tensor, g, multiplier);
  }
  void soil() {
    for (Plane* plane : {&tensor.codes(SCRUPLE_GRADIENT), &tensor.aux(SCRUPLE_GRADIENT)})
      if (plane->size > 0) std::memset(plane->data(), 0xff, plane->size);
  }
  std::vector<float> sum() const { return tensor.decode(engine, SCRUPLE_GRADIENT); }
  Bytes bytes() const { return tensor.bytes(SCRUPLE_GRADIENT); }

  scruple_engine* engine;
  Tensor tensor;
};

struct Fold : Norm {
  Accumulator accumulator(const Kind& k, std::int64_t size = 1000) const {
    return {optimizer, engine, k, size};
  }
};

std::vector<float> micro_batch(int n, std::size_t size = 4096) {
  return Random(100 + static_cast<std::uint64_t>(n)).normals(size, 1e-4);
}

TEST_F(Fold, Fp32AddsWithOneRounding) {
  Accumulator acc = accumulator(kind("fp32", SCRUPLE_NEAREST), 4096);
  std::vector<float> want(4096, 0.0f);
  for (int n = 0; n < 16; ++n) {
    const std::vector<float> g = micro_batch(n);
    acc.fold(g, 0.3f);
    for (std::size_t i = 0; i < g.size(); ++i) want[i] = std::fma(g[i], 0.3f, want[i]);
    ASSERT_TRUE(same_bytes(acc.sum(), want)) << n;
  }
}

// After N folds of independent normal gradients. A write of a partial sum of k gradients errs by step_k /
// sqrt(12) with nearest rounding and dither, step_k / sqrt(6) with stochastic; step_k = absmax / 127 and
// absmax of 64 normals is 2.4 sigma sqrt(k). Summed over k = 1..N and divided by the sum's own sigma sqrt(N):
//   dither 2.4 / 127 sqrt((N + 1) / 24), stochastic sqrt(2) times as much.
TEST_F(Fold, AnInt8AccumulatorErrsAsItsRoundingImplies) {
  const Kind nearest = kind("int8", SCRUPLE_NEAREST), stochastic = kind("int8", SCRUPLE_STOCHASTIC),
             dither = kind("int8", SCRUPLE_DITHER);
  Accumulator accs[] = {accumulator(nearest, 65536), accumulator(stochastic, 65536),
                        accumulator(dither, 65536)};
  std::vector<double> exact(65536, 0.0);
  for (int n = 1; n <= 16; ++n) {
    const std::vector<float> g = micro_batch(n, 65536);
    for (std::size_t i = 0; i < g.size(); ++i) exact[i] += static_cast<double>(g[i]);
    double error[3];
    for (std::size_t a = 0; a < 3; ++a) {
      accs[a].fold(g);
      error[a] = relative_l2(accs[a].sum(), exact);
    }
    const double predicted = 2.4 / 127 * std::sqrt((n + 1) / 24.0);
    EXPECT_NEAR(error[2] / predicted, 1.0, 0.15) << "dither, N = " << n;
    EXPECT_NEAR(error[1] / predicted / std::sqrt(2.0), 1.0, 0.15) << "stochastic, N = " << n;
    EXPECT_LT(error[2], 0.8 * error[1]) << "dither against stochastic, N = " << n;
    EXPECT_LT(error[0], error[1]) << "nearest against stochastic, N = " << n;
    EXPECT_LT(error[1], 0.037) << "numerics.md, section 4";
  }
}

TEST_F(Fold, ABf16AccumulatorErrsAsItsRoundingImplies) {
  for (const int rounding : {SCRUPLE_NEAREST, SCRUPLE_STOCHASTIC}) {
    Accumulator acc = accumulator(kind("bf16", rounding), 65536);
    std::vector<double> exact(65536, 0.0);
    const double unit = info_of(scruple_format_find("bf16")).bound.relative;  // half a step, relative
    for (int n = 1; n <= 16; ++n) {
      const std::vector<float> g = micro_batch(n, 65536);
      acc.fold(g);
      for (std::size_t i = 0; i < g.size(); ++i) exact[i] += static_cast<double>(g[i]);
      EXPECT_LT(relative_l2(acc.sum(), exact), unit * std::sqrt((n + 1) / 2.0)) << rounding << ", N = " << n;
    }
  }
}

// Over many seeds the mean of what is stored is the exact sum: the error of the mean falls with the root of the seeds.
TEST_F(Fold, StochasticAndDitheredSumsAreUnbiased) {
  constexpr int kSeeds = 400, kFolds = 4;
  for (const Kind& k :
       {kind("int8", SCRUPLE_STOCHASTIC), kind("int8", SCRUPLE_DITHER), kind("bf16", SCRUPLE_STOCHASTIC)}) {
    std::vector<double> exact(1024, 0.0), mean(1024, 0.0);
    double single = 0;
    for (int n = 0; n < kFolds; ++n) {
      const std::vector<float> g = micro_batch(n, 1024);
      for (std::size_t i = 0; i < g.size(); ++i) exact[i] += static_cast<double>(g[i]);
    }
    for (int seed = 0; seed < kSeeds; ++seed) {
      Optimizer seeded("sgd");
      seeded.seed(static_cast<std::uint64_t>(seed) * 0x100000001u);
      Accumulator acc(seeded, engine, k, 1024);
      for (int n = 0; n < kFolds; ++n) acc.fold(micro_batch(n, 1024));
      const std::vector<float> sum = acc.sum();
      single += relative_l2(sum, exact) / kSeeds;
      for (std::size_t i = 0; i < sum.size(); ++i) mean[i] += static_cast<double>(sum[i]) / kSeeds;
    }
    std::vector<float> rounded_mean(mean.begin(), mean.end());
    EXPECT_LT(relative_l2(rounded_mean, exact), 1.2 * single / std::sqrt(static_cast<double>(kSeeds)))
        << k.name;
  }
}

// Increments far below half a step of their group: nearest rounding loses every one of them, randomness none
// on average.
TEST_F(Fold, SmallGradientsBesideALargeOneSurviveRandomRounding) {
  std::vector<float> g(65536, 0.001f);
  for (std::size_t i = 0; i < g.size(); i += 64) g[i] = 1.0f;
  for (const int rounding : {SCRUPLE_NEAREST, SCRUPLE_STOCHASTIC, SCRUPLE_DITHER}) {
    Accumulator acc = accumulator(kind("int8", rounding), 65536);
    for (int n = 0; n < 16; ++n) acc.fold(g, 1.0f / 16);
    const std::vector<float> sum = acc.sum();
    double mean = 0;
    for (std::size_t i = 0; i < sum.size(); ++i)
      if (i % 64 != 0) mean += static_cast<double>(sum[i]) / (65536.0 * 63 / 64);
    const double want = rounding == SCRUPLE_NEAREST ? 0.0 : 0.001;
    EXPECT_NEAR(mean, want, 0.0001) << "rounding " << rounding;
  }
}

TEST_F(Fold, TheFirstFoldOverwritesWhateverWasThere) {
  for (const Kind& k : kinds(SCRUPLE_ROLE_ACCUMULATOR)) {
    Accumulator clean = accumulator(k), dirty = accumulator(k);
    dirty.soil();
    clean.fold(micro_batch(1, 1000));
    dirty.fold(micro_batch(1, 1000));
    EXPECT_EQ(clean.bytes(), dirty.bytes()) << k.name;
    EXPECT_TRUE(dirty.tensor.intact());
    const Bytes once = clean.bytes();
    clean.fold(micro_batch(2, 1000));
    EXPECT_NE(clean.bytes(), once) << k.name << ": the second fold adds";
  }
}

TEST_F(Fold, ClearingLeavesZeros) {
  for (const Kind& k : kinds(SCRUPLE_ROLE_ACCUMULATOR)) {
    Accumulator acc = accumulator(k);
    acc.soil();
    CHECK_OK(scruple_clear(engine, &acc.tensor.row, 1));
    EXPECT_TRUE(acc.tensor.intact());
    for (const float x : acc.sum()) ASSERT_EQ(x, 0.0f) << k.name;
    EXPECT_EQ(norm_of(engine, acc.tensor), 0.0) << k.name;
  }
}

TEST_F(Fold, ANonFiniteGradientStaysVisible) {
  for (const Kind& k : kinds(SCRUPLE_ROLE_ACCUMULATOR))
    for (const float special : {kNaN, kInf, -kInf}) {
      Accumulator acc = accumulator(k);
      std::vector<float> g = micro_batch(1, 1000);
      acc.fold(g);
      g[777] = special;
      acc.fold(g);
      acc.fold(micro_batch(2, 1000));
      const std::vector<float> sum = acc.sum();
      EXPECT_FALSE(std::isfinite(sum[777])) << k.name << " " << special;
      const std::int64_t group = info_of(k.format).group_size;
      for (std::int64_t i = 0; i < 1000; ++i)
        ASSERT_TRUE(i / group == 777 / group || std::isfinite(sum[static_cast<std::size_t>(i)])) << k.name;
      float found = 0;
      CHECK_OK(scruple_norm(engine, &acc.tensor.row, 1, nullptr, &found));
      EXPECT_EQ(found, 1.0f) << k.name << " " << special;
    }
}

TEST_F(Fold, NormAndStepReadExactlyWhatDecodingShows) {
  for (const Rule& rule : rules()) {
    const Optimizer of_rule(rule.name);
    for (const Kind& k : kinds(SCRUPLE_ROLE_ACCUMULATOR)) {
      Tensor stored(of_rule, 1000, "fp32", engine), plain = stored;
      for (Tensor* t : {&stored, &plain}) t->encode(engine, SCRUPLE_WEIGHT, Random(9).normals(1000));
      stored.use(SCRUPLE_GRADIENT, k.format, k.rounding);
      for (int t = 1; t <= 5; ++t) {
        stored.row.step = plain.row.step = t;
        stored.row.folds = 0;
        for (int n = 0; n < 3; ++n) fold(engine, stored, micro_batch(10 * t + n, 1000), 0.7f);
        plain.encode(engine, SCRUPLE_GRADIENT, stored.decode(engine, SCRUPLE_GRADIENT));
        const double norm = norm_of(engine, stored);
        EXPECT_EQ(norm, norm_of(engine, plain)) << rule.name << ", " << k.name;
        EXPECT_GT(norm, 0.0);
        step(engine, stored);
        step(engine, plain);
      }
      for (int a = SCRUPLE_WEIGHT; a < SCRUPLE_GRADIENT; ++a)
        EXPECT_EQ(stored.bytes(a), plain.bytes(a)) << rule.name << ", " << k.name;
    }
  }
}

TEST_F(Fold, AnIncomingFormatIsFoldedAsItDecodes) {
  for (const Kind& from : kinds(SCRUPLE_ROLE_GRADIENT)) {
    if (from.rounding == SCRUPLE_DITHER) continue;
    const Tensor arriving = with_gradient(from, micro_batch(3, 1000));
    const std::vector<float> decoded = arriving.decode(engine, SCRUPLE_GRADIENT);
    for (const Kind& k : kinds(SCRUPLE_ROLE_ACCUMULATOR)) {
      Accumulator a = accumulator(k), b = accumulator(k);
      a.fold(micro_batch(1, 1000));
      b.fold(micro_batch(1, 1000));
      CHECK_OK(scruple_fold(engine, &a.tensor.row, &arriving.row.arrays[SCRUPLE_GRADIENT], 1, 0.5f, nullptr));
      b.fold(decoded, 0.5f);
      EXPECT_EQ(a.bytes(), b.bytes()) << from.name << " into " << k.name;
    }
  }
}

TEST_F(Fold, StepsFoldsTensorsAndSeedsDrawDifferentRandomNumbers) {
  for (const Kind& k : kinds(SCRUPLE_ROLE_ACCUMULATOR)) {
    if (is_fp32(k) || (k.rounding != SCRUPLE_STOCHASTIC && k.rounding != SCRUPLE_DITHER)) continue;
    const auto folded = [&](std::int64_t at_step, std::int64_t folds, std::uint32_t id, std::uint64_t seed) {
      Optimizer seeded("sgd");
      seeded.seed(seed);
      Accumulator acc(seeded, engine, k, 1000);
      acc.tensor.row.step = at_step;
      acc.tensor.row.folds = folds;
      acc.tensor.row.id = id;
      acc.fold(micro_batch(5, 1000));
      return acc.tensor.codes(SCRUPLE_GRADIENT).bytes();
    };
    const Bytes base = folded(1, 0, 0, 0);
    EXPECT_EQ(base, folded(1, 0, 0, 0)) << k.name;
    EXPECT_NE(base, folded(2, 0, 0, 0)) << k.name << ": step";
    EXPECT_NE(base, folded(1, 1, 0, 0)) << k.name << ": fold";
    EXPECT_NE(base, folded(1, 0, 1, 0)) << k.name << ": tensor";
    EXPECT_NE(base, folded(1, 0, 0, 1)) << k.name << ": seed";
  }
}

TEST_F(Fold, AMultiplierOfAnyFiniteValueIncludingZero) {
  Accumulator acc = accumulator(kind("fp32", SCRUPLE_NEAREST), 3);
  acc.fold({1, 2, 3}, -2);
  EXPECT_EQ(acc.sum(), (std::vector<float>{-2, -4, -6}));
  acc.fold({1, 2, 3}, 0);
  EXPECT_EQ(acc.sum(), (std::vector<float>{-2, -4, -6}));
}

TEST_F(Fold, EmptyTensorsAndTables) {
  CHECK_OK(scruple_fold(engine, nullptr, nullptr, 0, 1.0f, nullptr));
  CHECK_OK(scruple_clear(engine, nullptr, 0));
  for (const Kind& k : kinds(SCRUPLE_ROLE_ACCUMULATOR)) {
    Accumulator acc = accumulator(k, 0);
    acc.fold({});
    CHECK_OK(scruple_clear(engine, &acc.tensor.row, 1));
    EXPECT_TRUE(acc.tensor.intact());
  }
}

}  // namespace
}  // namespace scruple_tests
