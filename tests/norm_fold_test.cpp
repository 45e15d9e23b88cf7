// Norms: exact, by the fixed tree of engine/unit.h, on what is stored. Folds: what an accumulator loses, that
// its randomness is unbiased and fresh, and that a step reads exactly what decoding shows.
#include <limits>
#include <memory>

#include "tests/support.h"

namespace scruple_tests {
namespace {

const float kInf = std::numeric_limits<float>::infinity(), kNaN = std::numeric_limits<float>::quiet_NaN();

struct Kind {
  const scruple_format* format;
  int rounding;
  std::string name;
};

// Every format with a role, in every rounding it has.
std::vector<Kind> kinds(std::uint32_t role) {
  std::vector<Kind> list;
  for (int f = 0; f < scruple_format_count(); ++f) {
    const scruple_format_info info = info_of(scruple_format_at(f));
    if ((info.roles & role) == 0) continue;
    for (int r = 0; r <= SCRUPLE_WIDE; ++r)
      if ((info.roundings >> r & 1u) != 0)
        list.push_back({scruple_format_at(f), r, std::string(info.name) + " rounding " + std::to_string(r)});
  }
  return list;
}

Kind kind(const char* format, int rounding) { return {scruple_format_find(format), rounding, format}; }

bool is_fp32(const Kind& k) { return info_of(k.format).code_bits == 32; }

// ---- Norms ----

// A tensor with nothing but a gradient.
Tensor with_gradient(const scruple_optimizer* optimizer, scruple_engine* engine, const Kind& k,
                     const std::vector<float>& values) {
  Tensor tensor(optimizer, static_cast<std::int64_t>(values.size()));
  tensor.row.folds = 1;
  tensor.use(SCRUPLE_GRADIENT, k.format, k.rounding);
  tensor.encode(engine, SCRUPLE_GRADIENT, values);
  return tensor;
}

double norm_of(scruple_engine* engine, const std::vector<Tensor>& tensors, float* found_inf = nullptr) {
  std::vector<scruple_tensor> table;
  for (const Tensor& t : tensors) table.push_back(t.row);
  double norm = -1;
  CHECK_OK(scruple_norm(engine, table.data(), static_cast<std::int64_t>(table.size()), &norm, found_inf));
  return norm;
}

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

TEST(Norm, EqualsALongDoubleSumAndTheFixedTreeToTheBit) {
  const Engine engine(2);
  const Optimizer optimizer("sgd");
  std::vector<Tensor> tensors;
  long double exact = 0;
  for (const std::vector<float>& x : norm_data()) {
    tensors.push_back(with_gradient(optimizer, engine, kind("fp32", SCRUPLE_NEAREST), x));
    for (const float v : x) exact += static_cast<long double>(v) * static_cast<long double>(v);
  }
  const double norm = norm_of(engine, tensors);
  EXPECT_NEAR(norm / static_cast<double>(std::sqrt(exact)), 1.0, 1e-12);
  EXPECT_EQ(norm, tree_norm(norm_data())) << "the reduction tree changed: docs and other engines rely on it";
  for (std::size_t i = 0; i < tensors.size(); ++i)
    EXPECT_EQ(norm_of(engine, {tensors[i]}), tree_norm({norm_data()[i]}))
        << tensors[i].row.size << " elements";
}

TEST(Norm, SameBitsForEveryEngineAndThreadCountInEveryFormat) {
  const Optimizer optimizer("sgd");
  const Engine first;
  for (const Kind& k : kinds(SCRUPLE_ROLE_GRADIENT)) {
    std::vector<Tensor> tensors;
    std::vector<std::vector<float>> decoded;
    for (const std::vector<float>& x : norm_data()) {
      tensors.push_back(with_gradient(optimizer, first, k, x));
      decoded.push_back(tensors.back().decode(first, SCRUPLE_GRADIENT));
    }
    const double want = tree_norm(decoded);
    for (const std::string& name : cpu_engines())
      for (const int threads : {1, 2, 7}) {
        const Engine engine(threads, name.c_str());
        float found = -1;
        EXPECT_EQ(norm_of(engine, tensors, &found), want) << k.name << " on " << name << " x" << threads;
        EXPECT_EQ(found, 0.0f) << k.name;
      }
  }
}

TEST(Norm, AnyAlignment) {
  const Engine engine;
  const Optimizer optimizer("sgd");
  for (const Kind& k : kinds(SCRUPLE_ROLE_GRADIENT)) {
    const std::vector<float> x = Random(4).normals(5001);
    const Tensor aligned = with_gradient(optimizer, engine, k, x);
    Tensor odd(optimizer, 5001);
    odd.row.folds = 1;
    odd.use(SCRUPLE_GRADIENT, k.format, k.rounding, 1, 3);
    odd.encode(engine, SCRUPLE_GRADIENT, x);
    double a = 0, b = 0;
    CHECK_OK(scruple_norm(engine, &aligned.row, 1, &a, nullptr));
    CHECK_OK(scruple_norm(engine, &odd.row, 1, &b, nullptr));
    EXPECT_EQ(a, b) << k.name;
  }
}

TEST(Norm, FoundInfExactlyForNaNAndInfinity) {
  const Engine engine(2);
  const Optimizer optimizer("sgd");
  for (const Kind& k : kinds(SCRUPLE_ROLE_GRADIENT))
    for (const std::size_t at : {0u, 63u, 70000u, 70999u})
      for (const float special : {kNaN, kInf, -kInf, float_from(0x7f800001u), float_from(0xffffffffu)}) {
        std::vector<float> x(71000, 0.5f);
        x[at] = special;
        std::vector<Tensor> tensors;
        tensors.push_back(with_gradient(optimizer, engine, k, {1.0f, 2.0f}));
        tensors.push_back(with_gradient(optimizer, engine, k, x));
        float found = -1;
        const double norm = norm_of(engine, tensors, &found);
        EXPECT_EQ(found, 1.0f) << k.name << ", " << special << " at " << at;
        EXPECT_FALSE(std::isfinite(norm)) << k.name;
        EXPECT_EQ(scruple_clip_factor(norm, 1.0), 1.0f);
      }
}

TEST(Norm, HugeAndTinyFiniteGradientsAreNeitherFlaggedNorLost) {
  const Engine engine;
  const Optimizer optimizer("sgd");
  for (const float value : {3e38f, -3.4028234e38f, 1e-30f, 1e-44f}) {
    std::vector<Tensor> tensors;
    tensors.push_back(
        with_gradient(optimizer, engine, kind("fp32", SCRUPLE_NEAREST), std::vector<float>(100000, value)));
    float found = -1;
    const double norm = norm_of(engine, tensors, &found);
    EXPECT_EQ(found, 0.0f) << value;
    EXPECT_NEAR(norm / (std::fabs(static_cast<double>(value)) * std::sqrt(100000.0)), 1.0, 1e-12) << value;
  }
}

TEST(Norm, EmptyTablesAndOutputsThatAreNotWanted) {
  const Engine engine;
  const Optimizer optimizer("sgd");
  EXPECT_EQ(norm_of(engine, {}), 0.0);
  double norm = -1;
  float found = -1;
  CHECK_OK(scruple_norm(engine, nullptr, 0, &norm, &found));
  EXPECT_EQ(norm, 0.0);
  EXPECT_EQ(found, 0.0f);
  const Tensor t = with_gradient(optimizer, engine, kind("fp32", SCRUPLE_NEAREST), {3.0f, 4.0f});
  CHECK_OK(scruple_norm(engine, &t.row, 1, nullptr, nullptr));
  CHECK_OK(scruple_norm(engine, &t.row, 1, &norm, nullptr));
  EXPECT_EQ(norm, 5.0);
}

TEST(Norm, ClipsAsTorchDoes) {
  EXPECT_EQ(scruple_clip_factor(0.5, 1.0), 1.0f);
  EXPECT_EQ(scruple_clip_factor(0.0, 1.0), 1.0f);
  EXPECT_EQ(scruple_clip_factor(4.0, 1.0), static_cast<float>(1.0 / (4.0 + 1e-6)));
  EXPECT_EQ(scruple_clip_factor(100.0, 2.5), static_cast<float>(2.5 / (100.0 + 1e-6)));
  EXPECT_EQ(scruple_clip_factor(static_cast<double>(kInf), 1.0), 1.0f);
  EXPECT_EQ(scruple_clip_factor(static_cast<double>(kNaN), 1.0), 1.0f);
}

// ---- Folds ----

scruple_array fp32_array(const std::vector<float>& values) {
  scruple_array array{};
  array.format = scruple_format_find("fp32");
  array.codes = const_cast<float*>(values.data());
  return array;
}

struct Accumulator {
  Accumulator(const scruple_optimizer* optimizer, scruple_engine* on, const Kind& k, std::int64_t size)
      : engine(on), tensor(optimizer, size) {
    tensor.use(SCRUPLE_GRADIENT, k.format, k.rounding);
  }
  void fold(const std::vector<float>& g, float multiplier = 1) {
    const scruple_array incoming = fp32_array(g);
    CHECK_OK(scruple_fold(engine, &tensor.row, &incoming, 1, multiplier, nullptr));
    ++tensor.row.folds;
  }
  std::vector<float> sum() const { return tensor.decode(engine, SCRUPLE_GRADIENT); }

  scruple_engine* engine;
  Tensor tensor;
};

std::vector<float> micro_batch(int n, std::size_t size = 4096) {
  return Random(100 + static_cast<std::uint64_t>(n)).normals(size, 1e-4);
}

double relative_l2(const std::vector<float>& got, const std::vector<double>& want) {
  double error = 0, scale = 0;
  for (std::size_t i = 0; i < got.size(); ++i) {
    error += (static_cast<double>(got[i]) - want[i]) * (static_cast<double>(got[i]) - want[i]);
    scale += want[i] * want[i];
  }
  return std::sqrt(error / scale);
}

TEST(Fold, Fp32AddsWithOneRounding) {
  const Engine engine;
  const Optimizer optimizer("sgd");
  Accumulator acc(optimizer, engine, kind("fp32", SCRUPLE_NEAREST), 4096);
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
TEST(Fold, AnInt8AccumulatorErrsAsItsRoundingImplies) {
  const Engine engine;
  const Optimizer optimizer("sgd");
  const Kind nearest = kind("int8", SCRUPLE_NEAREST), stochastic = kind("int8", SCRUPLE_STOCHASTIC),
             dither = kind("int8", SCRUPLE_DITHER);
  std::vector<std::unique_ptr<Accumulator>> accs;
  for (const Kind* k : {&nearest, &stochastic, &dither})
    accs.push_back(std::make_unique<Accumulator>(optimizer, engine, *k, 65536));
  std::vector<double> exact(65536, 0.0);
  for (int n = 1; n <= 16; ++n) {
    const std::vector<float> g = micro_batch(n, 65536);
    for (std::size_t i = 0; i < g.size(); ++i) exact[i] += static_cast<double>(g[i]);
    double error[3];
    for (std::size_t a = 0; a < 3; ++a) {
      accs[a]->fold(g);
      error[a] = relative_l2(accs[a]->sum(), exact);
    }
    const double predicted = 2.4 / 127 * std::sqrt((n + 1) / 24.0);
    EXPECT_NEAR(error[2] / predicted, 1.0, 0.15) << "dither, N = " << n;
    EXPECT_NEAR(error[1] / predicted / std::sqrt(2.0), 1.0, 0.15) << "stochastic, N = " << n;
    EXPECT_LT(error[2], 0.8 * error[1]) << "dither against stochastic, N = " << n;
    EXPECT_LT(error[0], error[1]) << "nearest against stochastic, N = " << n;
    EXPECT_LT(error[1], 0.037) << "numerics.md, section 4";
  }
}

TEST(Fold, ABf16AccumulatorErrsAsItsRoundingImplies) {
  const Engine engine;
  const Optimizer optimizer("sgd");
  for (const int rounding : {SCRUPLE_NEAREST, SCRUPLE_STOCHASTIC}) {
    Accumulator acc(optimizer, engine, kind("bf16", rounding), 65536);
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
TEST(Fold, StochasticAndDitheredSumsAreUnbiased) {
  constexpr int kSeeds = 400, kFolds = 4;
  const Engine engine;
  for (const Kind& k :
       {kind("int8", SCRUPLE_STOCHASTIC), kind("int8", SCRUPLE_DITHER), kind("bf16", SCRUPLE_STOCHASTIC)}) {
    std::vector<double> exact(1024, 0.0), mean(1024, 0.0);
    double single = 0;
    for (int n = 0; n < kFolds; ++n) {
      const std::vector<float> g = micro_batch(n, 1024);
      for (std::size_t i = 0; i < g.size(); ++i) exact[i] += static_cast<double>(g[i]);
    }
    for (int seed = 0; seed < kSeeds; ++seed) {
      Optimizer optimizer("sgd");
      optimizer.seed(static_cast<std::uint64_t>(seed) * 0x100000001u);
      Accumulator acc(optimizer, engine, k, 1024);
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
TEST(Fold, SmallGradientsBesideALargeOneSurviveRandomRounding) {
  const Engine engine;
  const Optimizer optimizer("sgd");
  std::vector<float> g(65536, 0.001f);
  for (std::size_t i = 0; i < g.size(); i += 64) g[i] = 1.0f;
  for (const int rounding : {SCRUPLE_NEAREST, SCRUPLE_STOCHASTIC, SCRUPLE_DITHER}) {
    Accumulator acc(optimizer, engine, kind("int8", rounding), 65536);
    for (int n = 0; n < 16; ++n) acc.fold(g, 1.0f / 16);
    const std::vector<float> sum = acc.sum();
    double mean = 0;
    for (std::size_t i = 0; i < sum.size(); ++i)
      if (i % 64 != 0) mean += static_cast<double>(sum[i]) / (65536.0 * 63 / 64);
    const double want = rounding == SCRUPLE_NEAREST ? 0.0 : 0.001;
    EXPECT_NEAR(mean, want, 0.0001) << "rounding " << rounding;
  }
}

TEST(Fold, TheFirstFoldOverwritesWhateverWasThere) {
  const Engine engine;
  const Optimizer optimizer("sgd");
  for (const Kind& k : kinds(SCRUPLE_ROLE_ACCUMULATOR)) {
    Accumulator clean(optimizer, engine, k, 1000), dirty(optimizer, engine, k, 1000);
    std::memset(dirty.tensor.codes(SCRUPLE_GRADIENT).data(), 0xff, dirty.tensor.codes(SCRUPLE_GRADIENT).size);
    std::memset(dirty.tensor.aux(SCRUPLE_GRADIENT).data(), 0xff, dirty.tensor.aux(SCRUPLE_GRADIENT).size);
    clean.fold(micro_batch(1, 1000));
    dirty.fold(micro_batch(1, 1000));
    EXPECT_EQ(clean.tensor.bytes(SCRUPLE_GRADIENT), dirty.tensor.bytes(SCRUPLE_GRADIENT)) << k.name;
    EXPECT_TRUE(dirty.tensor.intact());
    const Bytes once = clean.tensor.bytes(SCRUPLE_GRADIENT);
    clean.fold(micro_batch(2, 1000));
    EXPECT_NE(clean.tensor.bytes(SCRUPLE_GRADIENT), once) << k.name << ": the second fold adds";
  }
}

TEST(Fold, ClearingLeavesZeros) {
  const Engine engine;
  const Optimizer optimizer("sgd");
  for (const Kind& k : kinds(SCRUPLE_ROLE_ACCUMULATOR)) {
    Accumulator acc(optimizer, engine, k, 1000);
    std::memset(acc.tensor.codes(SCRUPLE_GRADIENT).data(), 0xff, acc.tensor.codes(SCRUPLE_GRADIENT).size);
    std::memset(acc.tensor.aux(SCRUPLE_GRADIENT).data(), 0xff, acc.tensor.aux(SCRUPLE_GRADIENT).size);
    CHECK_OK(scruple_clear(engine, &acc.tensor.row, 1));
    EXPECT_TRUE(acc.tensor.intact());
    for (const float x : acc.sum()) ASSERT_EQ(x, 0.0f) << k.name;
    double norm = -1;
    CHECK_OK(scruple_norm(engine, &acc.tensor.row, 1, &norm, nullptr));
    EXPECT_EQ(norm, 0.0) << k.name;
  }
}

TEST(Fold, ANonFiniteGradientStaysVisible) {
  const Engine engine;
  const Optimizer optimizer("sgd");
  for (const Kind& k : kinds(SCRUPLE_ROLE_ACCUMULATOR))
    for (const float special : {kNaN, kInf, -kInf}) {
      Accumulator acc(optimizer, engine, k, 1000);
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

TEST(Fold, NormAndStepReadExactlyWhatDecodingShows) {
  const Engine engine;
  for (int rule = 0; rule < scruple_rule_count(); ++rule) {
    scruple_rule_info info{};
    CHECK_OK(scruple_rule_at(rule, &info));
    const Optimizer optimizer(info.name);
    for (const Kind& k : kinds(SCRUPLE_ROLE_ACCUMULATOR)) {
      Tensor stored(optimizer, 1000, "fp32", engine), plain = stored;
      for (Tensor* t : {&stored, &plain}) t->encode(engine, SCRUPLE_WEIGHT, Random(9).normals(1000));
      stored.use(SCRUPLE_GRADIENT, k.format, k.rounding);
      for (int t = 1; t <= 5; ++t) {
        stored.row.step = plain.row.step = t;
        stored.row.folds = 0;
        for (int fold = 0; fold < 3; ++fold, ++stored.row.folds) {
          const std::vector<float> g = micro_batch(10 * t + fold, 1000);
          const scruple_array incoming = fp32_array(g);
          CHECK_OK(scruple_fold(engine, &stored.row, &incoming, 1, 0.7f, nullptr));
        }
        plain.encode(engine, SCRUPLE_GRADIENT, stored.decode(engine, SCRUPLE_GRADIENT));
        double a = 0, b = 0;
        CHECK_OK(scruple_norm(engine, &stored.row, 1, &a, nullptr));
        CHECK_OK(scruple_norm(engine, &plain.row, 1, &b, nullptr));
        EXPECT_EQ(a, b) << info.name << ", " << k.name;
        EXPECT_GT(a, 0.0);
        step(engine, stored);
        step(engine, plain);
      }
      for (int a = SCRUPLE_WEIGHT; a < SCRUPLE_GRADIENT; ++a)
        EXPECT_EQ(stored.bytes(a), plain.bytes(a)) << info.name << ", " << k.name;
    }
  }
}

TEST(Fold, AnIncomingFormatIsFoldedAsItDecodes) {
  const Engine engine;
  const Optimizer optimizer("sgd");
  for (const Kind& from : kinds(SCRUPLE_ROLE_GRADIENT)) {
    if (from.rounding == SCRUPLE_DITHER) continue;
    const Tensor arriving = with_gradient(optimizer, engine, from, micro_batch(3, 1000));
    const std::vector<float> decoded = arriving.decode(engine, SCRUPLE_GRADIENT);
    for (const Kind& k : kinds(SCRUPLE_ROLE_ACCUMULATOR)) {
      Accumulator a(optimizer, engine, k, 1000), b(optimizer, engine, k, 1000);
      a.fold(micro_batch(1, 1000));
      b.fold(micro_batch(1, 1000));
      CHECK_OK(scruple_fold(engine, &a.tensor.row, &arriving.row.arrays[SCRUPLE_GRADIENT], 1, 0.5f, nullptr));
      b.fold(decoded, 0.5f);
      EXPECT_EQ(a.tensor.bytes(SCRUPLE_GRADIENT), b.tensor.bytes(SCRUPLE_GRADIENT))
          << from.name << " into " << k.name;
    }
  }
}

TEST(Fold, StepsFoldsTensorsAndSeedsDrawDifferentRandomNumbers) {
  const Engine engine;
  for (const Kind& k : kinds(SCRUPLE_ROLE_ACCUMULATOR)) {
    if (is_fp32(k) || (k.rounding != SCRUPLE_STOCHASTIC && k.rounding != SCRUPLE_DITHER)) continue;
    const auto folded = [&](std::int64_t at_step, std::int64_t folds, std::uint32_t id, std::uint64_t seed) {
      Optimizer optimizer("sgd");
      optimizer.seed(seed);
      Accumulator acc(optimizer, engine, k, 1000);
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

TEST(Fold, AMultiplierOfAnyFiniteValueIncludingZero) {
  const Engine engine;
  const Optimizer optimizer("sgd");
  Accumulator acc(optimizer, engine, kind("fp32", SCRUPLE_NEAREST), 3);
  acc.fold({1, 2, 3}, -2);
  EXPECT_EQ(acc.sum(), (std::vector<float>{-2, -4, -6}));
  acc.fold({1, 2, 3}, 0);
  EXPECT_EQ(acc.sum(), (std::vector<float>{-2, -4, -6}));
}

TEST(Fold, EmptyTensorsAndTables) {
  const Engine engine(2);
  const Optimizer optimizer("sgd");
  CHECK_OK(scruple_fold(engine, nullptr, nullptr, 0, 1.0f, nullptr));
  CHECK_OK(scruple_clear(engine, nullptr, 0));
  for (const Kind& k : kinds(SCRUPLE_ROLE_ACCUMULATOR)) {
    Accumulator acc(optimizer, engine, k, 0);
    acc.fold({});
    CHECK_OK(scruple_clear(engine, &acc.tensor.row, 1));
    EXPECT_TRUE(acc.tensor.intact());
  }
}

}  // namespace
}  // namespace scruple_tests
