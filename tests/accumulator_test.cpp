// Gradient accumulators in few bits, over the micro-batches of a step: how far the mean is off, that it is right on
// average, and that small elements beside large ones keep their steps. Where another accumulator is known to fail, the
// same experiment shows it. What was measured is in the test's properties (--gtest_output=xml).
#include <algorithm>

#include "tests/support.h"

namespace scruple_tests {
namespace {

constexpr std::size_t kGroup = 64;

struct Kind {
  const char* format;
  int rounding;
  const char* name;
};
constexpr Kind kFp32 = {"fp32", SCRUPLE_NEAREST, "fp32"};
constexpr Kind kInt8 = {"int8", SCRUPLE_DITHER, "int8_dither"};
constexpr Kind kRoot8 = {"root8", SCRUPLE_STOCHASTIC, "root8"};

Tensor accumulator(const Optimizer& optimizer, const Kind& kind, std::size_t size) {
  Tensor tensor(optimizer, static_cast<std::int64_t>(size));
  tensor.use(SCRUPLE_GRADIENT, kind.format, kind.rounding);
  return tensor;
}

// ---- Even groups ----------------------------------------------------------------------------------

// Relative L2 error of the mean of n normal gradients.
double error_of_mean(const Engine& engine, const Kind& kind, int n) {
  constexpr std::size_t kElements = 65536;
  const Optimizer optimizer("sgd");
  Tensor tensor = accumulator(optimizer, kind, kElements);
  std::vector<double> exact(kElements);
  Random random(41);
  for (int i = 0; i < n; ++i) {
    const std::vector<float> g = random.normals(kElements, 1e-4);
    for (std::size_t e = 0; e < kElements; ++e) exact[e] += static_cast<double>(g[e]) / n;
    fold(engine, tensor, g, static_cast<float>(1.0 / n));
  }
  return relative_l2(tensor.decode(engine, SCRUPLE_GRADIENT), exact);
}

// root8 gives codes to the small elements of uneven groups: of even ones it keeps a little less than int8.
TEST(Accumulators, Root8ErrsAtMostTwiceAsMuchAsInt8InEvenGroups) {
  const Engine engine;
  for (const int n : {1, 4, 16, 64}) {
    const double even = error_of_mean(engine, kInt8, n), root = error_of_mean(engine, kRoot8, n);
    const std::string of = "_error_of_" + std::to_string(n);
    record(kInt8.name + of, even);
    record(kRoot8.name + of, root);
    EXPECT_LE(root, 2 * even) << n << " micro-batches; int8 errs by " << even;
  }
}

// ---- Uneven groups --------------------------------------------------------------------------------

constexpr int kMicroBatches = 4, kSteps = 400;

struct Uneven {
  std::vector<double> scales;  // of each element's gradient
  std::vector<bool> small;     // under a hundredth of the group's largest
};
Uneven uneven(std::size_t size) {
  Uneven u{std::vector<double>(size), std::vector<bool>(size)};
  Random random(43);
  for (double& s : u.scales) s = 1e-3 * random.lognormal(2);
  for (std::size_t i = 0; i < size; ++i) {
    const auto group = u.scales.begin() + static_cast<std::ptrdiff_t>(i / kGroup * kGroup);
    u.small[i] = u.scales[i] < *std::max_element(group, group + kGroup) / 100;
  }
  return u;
}

// Mean |step| of the small elements, over all steps, in learning rates. A micro-batch's gradient is a mean of
// either sign and as much noise: from noise alone Adam would step as far as from gradients.
double mean_step(const Engine& engine, const Kind& kind) {
  constexpr std::size_t kElements = 4096;
  const Uneven u = uneven(kElements);
  const Optimizer adamw("adamw", {{"lr", 1.0}, {"weight_decay", 0.0}});
  Tensor tensor(adamw, static_cast<std::int64_t>(kElements), "fp32", engine);
  tensor.use(SCRUPLE_GRADIENT, kind.format, kind.rounding);
  Random random(44);
  double sum = 0, count = 0;
  for (int t = 1; t <= kSteps; ++t) {
    tensor.row.step = t;
    tensor.row.folds = 0;
    for (int n = 0; n < kMicroBatches; ++n) {
      std::vector<float> g(kElements);
      for (std::size_t i = 0; i < kElements; ++i)
        g[i] = static_cast<float>(u.scales[i] * (random.normal() + (i % 2 == 0 ? 1 : -1)));
      fold(engine, tensor, g, static_cast<float>(1.0 / kMicroBatches));
    }
    tensor.encode(engine, SCRUPLE_WEIGHT, std::vector<float>(kElements));
    step(engine, tensor);
    const std::vector<float> steps = tensor.decode(engine, SCRUPLE_WEIGHT);
    for (std::size_t i = 0; i < kElements; ++i) {
      if (!u.small[i]) continue;
      sum += std::fabs(static_cast<double>(steps[i]));
      count += 1;
    }
  }
  EXPECT_GT(count, 0.2 * kElements * kSteps) << "too few small elements to say anything";
  return sum / count;
}

TEST(Accumulators, Root8KeepsTheStepsOfSmallElementsBesideLargeOnes) {
  const Engine engine;
  const double exact = mean_step(engine, kFp32), ratio = mean_step(engine, kRoot8) / exact;
  record("root8_step", ratio);
  EXPECT_NEAR(ratio, 1, 0.05);
}

TEST(Accumulators, PowerInt8LosesTheStepsOfSmallElements) {
  const Engine engine;
  const double ratio = mean_step(engine, kInt8) / mean_step(engine, kFp32);
  record("int8_dither_step", ratio);
  EXPECT_LT(ratio, 0.8);
}

// ---- On average --------------------------------------------------------------------------------------

// Four groups: normal, lognormal, one with a zero at every other place, and one that steps through its
// maximum's range evenly; the largest of a group is among them.
std::vector<double> values_to_keep() {
  Random random(45);
  std::vector<double> x(4 * kGroup);
  for (std::size_t i = 0; i < kGroup; ++i) {
    x[i] = random.normal();
    x[kGroup + i] = (random.uniform() < 0.5 ? -1 : 1) * random.lognormal(2);
    x[2 * kGroup + i] = i % 2 == 0 ? 0 : random.normal();
    x[3 * kGroup + i] = (i % 3 == 0 ? -1.0 : 1.0) * static_cast<double>(i + 1) / kGroup;
  }
  return x;
}

// In standard errors, how far the mean of many draws is off: the worst element, and where it is.
struct Worst {
  double errors = 0, of_group = 0;  // `of_group`: its bias over the group's maximum
  std::size_t element = 0;
};

Worst worst_bias(const Engine& engine, const Kind& kind, int folds) {
  constexpr int kDraws = 4000;
  const Optimizer optimizer("sgd");
  const std::vector<double> x = values_to_keep();
  Random random(46);
  std::vector<std::vector<float>> parts(static_cast<std::size_t>(folds));
  std::vector<double> exact(x.size()), sum(x.size()), squares(x.size());
  for (std::vector<float>& part : parts)
    for (std::size_t i = 0; i < x.size(); ++i) {
      const double noise = x[i] == 0 || folds == 1 ? 1 : 1 + 0.5 * random.normal();
      part.push_back(static_cast<float>(x[i] * noise));
      exact[i] += static_cast<double>(part[i]) / folds;
    }
  Tensor tensor = accumulator(optimizer, kind, x.size());
  for (int draw = 1; draw <= kDraws; ++draw) {
    tensor.row.step = draw;
    tensor.row.folds = 0;
    for (const std::vector<float>& part : parts) fold(engine, tensor, part, static_cast<float>(1.0 / folds));
    const std::vector<float> got = tensor.decode(engine, SCRUPLE_GRADIENT);
    for (std::size_t i = 0; i < x.size(); ++i) {
      const double error = static_cast<double>(got[i]) - exact[i];
      sum[i] += error / kDraws;
      squares[i] += error * error / kDraws;
    }
  }
  Worst worst;
  for (std::size_t i = 0; i < x.size(); ++i) {
    const auto group = exact.begin() + static_cast<std::ptrdiff_t>(i / kGroup * kGroup);
    double absmax = 0;
    for (auto e = group; e != group + kGroup; ++e) absmax = std::max(absmax, std::fabs(*e));
    // What 4,000 draws cannot show: a coin that falls the other way once in as many, and the ulps of fp32.
    const double off = std::max(std::fabs(sum[i]) - 0x1p-18 * absmax, 0.0);
    const double standard = std::sqrt(std::max(squares[i] - sum[i] * sum[i], 1e-300) / kDraws);
    if (off / standard > worst.errors) worst = {off / standard, sum[i] / absmax, i};
  }
  return worst;
}

TEST(Accumulators, AreUnbiasedAtEveryElement) {
  const Engine engine;
  for (const Kind& kind : {kInt8, kRoot8})
    for (const int folds : {1, 4}) {
      const Worst worst = worst_bias(engine, kind, folds);
      record(std::string(kind.name) + "_bias_of_" + std::to_string(folds), worst.errors);
      EXPECT_LE(worst.errors, 5) << kind.name << ", " << folds << " micro-batches, element " << worst.element
                                 << ": its mean is off by " << worst.of_group << " of the group's maximum";
    }
}

// ---- bf16 -----------------------------------------------------------------------------------------

// What 1,024 parts add up to, over what they should, on average: each is an eighth of bf16's gap at the end.
double kept_in_bf16(const Engine& engine, int rounding) {
  constexpr std::size_t kElements = 4096;
  constexpr int kParts = 1024;
  const Optimizer optimizer("sgd");
  Tensor tensor = accumulator(optimizer, {"bf16", rounding, ""}, kElements);
  Random random(47);
  std::vector<double> scales(kElements), exact(kElements);
  for (double& s : scales) s = (random.uniform() < 0.5 ? -1e-3 : 1e-3) * random.lognormal(1);
  for (int n = 0; n < kParts; ++n) {
    std::vector<float> g(kElements);
    for (std::size_t i = 0; i < kElements; ++i) {
      g[i] = static_cast<float>(scales[i] * (0.5 + random.uniform()));
      exact[i] += static_cast<double>(g[i]) / kParts;
    }
    fold(engine, tensor, g, static_cast<float>(1.0 / kParts));
  }
  const std::vector<float> got = tensor.decode(engine, SCRUPLE_GRADIENT);
  double kept = 0;
  for (std::size_t i = 0; i < kElements; ++i)
    kept += static_cast<double>(got[i]) / exact[i] / static_cast<double>(kElements);
  return kept;
}

TEST(Accumulators, Bf16KeepsAThousandPartsWhenRoundedStochastically) {
  const Engine engine;
  const double kept = kept_in_bf16(engine, SCRUPLE_STOCHASTIC);
  record("bf16_stochastic_kept", kept);
  EXPECT_NEAR(kept, 1, 0.01);
}

TEST(Accumulators, PowerBf16LosesThemWhenRoundedToNearest) {
  const Engine engine;
  const double kept = kept_in_bf16(engine, SCRUPLE_NEAREST);
  record("bf16_nearest_kept", kept);
  EXPECT_LT(kept, 0.8);
}

}  // namespace
}  // namespace scruple_tests
