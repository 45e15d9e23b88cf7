// companded8, our 8-bit moments: each flaw of flash8 that it mends is a property here, and where another format is
// known to fail the same experiment shows it, because a comparison in which nothing can lose shows nothing.
#include <algorithm>

#include "tests/support.h"

namespace {

using namespace scruple_tests;

constexpr int kExpAvg = SCRUPLE_SLOT, kExpAvgSq = SCRUPLE_SLOT + 1;
constexpr std::size_t kGroup = 64;

struct Companded8 : testing::Test {
  const Engine engine;
  const Optimizer adamw;

  std::vector<float> round_trip(int array, int rounding, const std::vector<float>& values,
                                std::int64_t at_step = 1) const {
    Tensor t(adamw, static_cast<std::int64_t>(values.size()));
    t.use(array, "companded8", rounding);
    t.row.step = at_step;
    t.encode(engine, array, values);
    return t.decode(engine, array);
  }
};

TEST_F(Companded8, works_for_group_maxima_from_1e_30_to_1e30) {
  const scruple_format_info info = info_of(scruple_format_find("companded8"));
  for (const int array : {kExpAvg, kExpAvgSq}) {
    const scruple_bound bound = array == kExpAvg ? info.bound : info.bound_nonneg;
    EXPECT_LE(bound.relative, 0x1p-5);
    EXPECT_LE(bound.group, 1.0 / 4000);
    for (int decade = -30; decade <= 30; ++decade) {
      Random random(static_cast<std::uint64_t>(decade + 100));
      std::vector<float> values(kGroup);
      for (std::size_t i = 0; i < kGroup; ++i) {
        const double share = i == 0 ? 1 : random.lognormal(2) / 100;
        const double sign = array == kExpAvg && random.next32() % 2 == 0 ? -1 : 1;
        values[i] = static_cast<float>(sign * std::pow(10.0, decade) * std::min(share, 1.0));
      }
      const double largest = std::fabs(values[0]);
      const std::vector<float> out = round_trip(array, SCRUPLE_NEAREST, values);
      for (std::size_t i = 0; i < kGroup; ++i) {
        const double x = values[i], error = std::fabs(static_cast<double>(out[i]) - x);
        // Not the absolute term: at 1e-30 nothing may hide behind it.
        EXPECT_LE(error, bound.relative * std::fabs(x) + bound.group * largest)
            << "1e" << decade << ": " << x;
        EXPECT_TRUE(out[i] == 0 || std::signbit(out[i]) == std::signbit(values[i]));
      }
      EXPECT_NEAR(out[0] / static_cast<double>(values[0]), 1, 1e-6) << "the maximum itself is kept";
    }
  }
}

// v keeps about 3 % wherever it is at least 1/1000 of the maximum, a root 30 times smaller.
TEST_F(Companded8, second_moments_keep_3_percent_over_three_decades) {
  std::vector<float> values(kGroup, 1.0f);
  for (int i = 0; i < 3000; ++i) {
    values[1] = static_cast<float>(std::pow(10.0, -i / 1000.0));
    EXPECT_NEAR(round_trip(kExpAvgSq, SCRUPLE_NEAREST, values)[1] / values[1], 1, 1.01 / 32) << values[1];
  }
}

// ---- Zeros --------------------------------------------------------------------------------------
TEST_F(Companded8, above_zero_never_decodes_to_zero) {
  for (const int rounding : {SCRUPLE_NEAREST, SCRUPLE_STOCHASTIC})
    for (int top = -149; top <= 127; ++top) {
      // The group's maximum beside every smaller power of two, and beside the smallest numbers of fp32.
      std::vector<float> values;
      const float largest = std::ldexp(1.0f, top);
      for (int low = -149; low <= top; ++low) {
        if (values.size() % kGroup == 0) values.push_back(largest);
        values.push_back(std::ldexp(1.0f, low));
        if (values.size() % kGroup == 0) values.push_back(largest);
        values.push_back(std::min(std::nextafter(std::ldexp(1.0f, low), 1e38f), largest));
      }
      const std::vector<float> out = round_trip(kExpAvgSq, rounding, values, top + 200);
      for (std::size_t i = 0; i < values.size(); ++i)
        ASSERT_GT(out[i], 0.0f) << values[i] << " beside " << largest << " rounding " << rounding;
    }
}

TEST_F(Companded8, a_group_of_zeros_stays_zero_beside_others) {
  std::vector<float> values(3 * kGroup, 0.0f);
  values[5] = 1.0f;
  values[2 * kGroup] = 1e-20f;
  for (const int array : {kExpAvg, kExpAvgSq}) {
    const std::vector<float> out = round_trip(array, SCRUPLE_NEAREST, values);
    for (std::size_t i = kGroup; i < 2 * kGroup; ++i) ASSERT_EQ(out[i], 0.0f);
  }
}

// AdamW's arrays in fp32, but for its moments.
Tensor with_moments(const Optimizer& adamw, std::size_t n, const char* exp_avg, const char* exp_avg_sq,
                    int rounding) {
  Tensor t(adamw, static_cast<std::int64_t>(n));
  t.use(SCRUPLE_WEIGHT, "fp32");
  t.use(kExpAvg, exp_avg, exp_avg == std::string("fp32") ? SCRUPLE_NEAREST : rounding);
  t.use(kExpAvgSq, exp_avg_sq, rounding);
  t.use(SCRUPLE_GRADIENT, "fp32");
  return t;
}

// ---- Decay --------------------------------------------------------------------------------------
// A few real gradients, then none: sqrt(v) of each element, relative to where it began, after 3 / (1 - beta2) steps.
std::vector<double> decayed(const Engine& engine, const char* format, int rounding, double beta2,
                            std::size_t n) {
  const Optimizer adamw("adamw", {{"lr", 1e-3}, {"beta2", beta2}});
  Tensor t = with_moments(adamw, n, "fp32", format, rounding);
  Random random(3);
  std::vector<double> scale(n);
  for (double& s : scale) s = 1e-4 * random.lognormal(1);
  for (; t.row.step <= 5; ++t.row.step) {
    std::vector<float> gradient(n);
    for (std::size_t i = 0; i < n; ++i) gradient[i] = static_cast<float>(scale[i] * random.normal());
    t.encode(engine, SCRUPLE_GRADIENT, gradient);
    step(engine, t);
  }
  const std::vector<float> before = t.decode(engine, kExpAvgSq);
  t.encode(engine, SCRUPLE_GRADIENT, std::vector<float>(n, 0.0f));
  const auto steps = static_cast<std::int64_t>(std::lround(3 / (1 - beta2)));
  for (std::int64_t i = 0; i < steps; ++i, ++t.row.step) step(engine, t);
  const std::vector<float> after = t.decode(engine, kExpAvgSq);
  std::vector<double> ratios(n);
  for (std::size_t i = 0; i < n; ++i) {
    EXPECT_GT(before[i], 0.0f);
    ratios[i] = std::sqrt(static_cast<double>(after[i]) / before[i]);
  }
  return ratios;
}

constexpr double kDecayed = 0.22313;  // exp(-3 / 2)

TEST_F(Companded8, the_scale_carries_slow_decay_of_every_element) {
  for (const double beta2 : {0.99, 0.999, 0.9999})
    for (const double ratio : decayed(engine, "companded8", SCRUPLE_NEAREST, beta2, 2 * kGroup))
      EXPECT_NEAR(ratio, kDecayed, 0.02 * kDecayed) << "beta2 " << beta2;
}

TEST_F(Companded8, the_scale_carries_slow_decay_on_average_when_rounding_is_stochastic) {
  for (const double beta2 : {0.99, 0.999, 0.9999}) {
    double squares = 0;
    const std::vector<double> ratios = decayed(engine, "companded8", SCRUPLE_STOCHASTIC, beta2, 4 * kGroup);
    for (const double ratio : ratios) squares += ratio * ratio;
    const double mean = std::sqrt(squares / static_cast<double>(ratios.size()));  // v is what stays unbiased
    EXPECT_NEAR(mean, kDecayed, 0.02 * kDecayed) << "beta2 " << beta2;
  }
}

// The experiment can fail: flash8's fp16 scale, as numerics says, stalls.
TEST_F(Companded8, flash8_stalls_in_the_same_experiment) {
  double furthest = 0;
  for (const double ratio : decayed(engine, "flash8", SCRUPLE_NEAREST, 0.9999, 2 * kGroup))
    furthest = std::max(furthest, std::fabs(ratio - kDecayed) / kDecayed);
  EXPECT_GT(furthest, 0.2);
}

// ---- Steps that explode -------------------------------------------------------------------------
// AdamW with lr = 1 and no decay on gradients whose scale differs within a group (lognormal, sigma 2, fixed
// for each element), dense or sparse: the largest change of a weight in one step.
double largest_update(const Engine& engine, const char* format, int rounding, double density) {
  constexpr std::size_t n = 16 * kGroup;
  const Optimizer adamw("adamw", {{"lr", 1.0}, {"beta1", 0.9}, {"beta2", 0.999}, {"weight_decay", 0.0}});
  Tensor t = with_moments(adamw, n, format, format, rounding);
  Random random(17);
  std::vector<double> scale(n);
  for (double& s : scale) s = random.lognormal(2);
  std::vector<float> weights(n, 0.0f), gradient(n);
  double largest = 0;
  for (; t.row.step <= 400; ++t.row.step) {
    for (std::size_t i = 0; i < n; ++i)
      gradient[i] = random.uniform() < density ? static_cast<float>(scale[i] * random.normal()) : 0.0f;
    t.encode(engine, SCRUPLE_WEIGHT, std::vector<float>(n, 0.0f));
    t.encode(engine, SCRUPLE_GRADIENT, gradient);
    step(engine, t);
    for (const float w : t.decode(engine, SCRUPLE_WEIGHT))
      largest = std::max(largest, std::fabs(static_cast<double>(w)));
  }
  return largest;
}

TEST_F(Companded8, updates_stay_under_3_learning_rates_with_uneven_gradients) {
  for (const double density : {1.0, 0.01}) {
    const double exact = largest_update(engine, "fp32", SCRUPLE_NEAREST, density);
    EXPECT_LT(exact, 3) << "density " << density;
    for (const int rounding : {SCRUPLE_NEAREST, SCRUPLE_STOCHASTIC})
      EXPECT_LT(largest_update(engine, "companded8", rounding, density), 3)
          << "density " << density << " rounding " << rounding << "; fp32: " << exact;
  }
}

TEST_F(Companded8, linear8_explodes_in_the_same_experiment) {
  EXPECT_GT(largest_update(engine, "linear8", SCRUPLE_NEAREST, 1.0), 30);
  EXPECT_GT(largest_update(engine, "linear8", SCRUPLE_NEAREST, 0.01), 30);
}

// ---- Swamping -----------------------------------------------------------------------------------
struct Followed {
  double mean_m, error_m, mean_v, error_v;  // mean over the small elements, and its standard error
  double exact_m, exact_v;                  // the EMA in double
};

// One large element in each group holds the scale still; 63 small ones see one history: 300 gradients of
// 0.05, then 700 of 0.02, so that v moves by far less than a code in every step.
Followed follow(const Engine& engine, int rounding) {
  constexpr std::size_t n = 4096;
  const Optimizer adamw("adamw", {{"lr", 0.0}, {"beta1", 0.98}, {"beta2", 0.999}});
  Tensor t = with_moments(adamw, n, "companded8", "companded8", rounding);
  Followed f{};
  for (; t.row.step <= 1000; ++t.row.step) {
    const float g = t.row.step <= 300 ? 0.05f : 0.02f;
    std::vector<float> gradient(n, g);
    for (std::size_t i = 0; i < n; i += kGroup) gradient[i] = 1.0f;
    t.encode(engine, SCRUPLE_GRADIENT, gradient);
    step(engine, t);
    f.exact_m = 0.98 * f.exact_m + 0.02 * g;
    f.exact_v = 0.999 * f.exact_v + 0.001 * g * g;
  }
  const auto statistics = [&](int array, double* mean, double* error) {
    const std::vector<float> values = t.decode(engine, array);
    double sum = 0, squares = 0, count = 0;
    for (std::size_t i = 0; i < n; ++i) {
      if (i % kGroup == 0) continue;
      sum += values[i];
      squares += static_cast<double>(values[i]) * values[i];
      ++count;
    }
    *mean = sum / count;
    *error = std::sqrt(std::max(squares / count - *mean * *mean, 0.0) / count);
  };
  statistics(kExpAvg, &f.mean_m, &f.error_m);
  statistics(kExpAvgSq, &f.mean_v, &f.error_v);
  return f;
}

TEST_F(Companded8, stochastic_rounding_follows_the_exact_ema_on_average) {
  const Followed f = follow(engine, SCRUPLE_STOCHASTIC);
  // 5 standard errors, and 1e-4 of the value for what fp32 itself loses over 1,000 steps.
  EXPECT_NEAR(f.mean_m, f.exact_m, 5 * f.error_m + 1e-4 * f.exact_m);
  EXPECT_NEAR(f.mean_v, f.exact_v, 5 * f.error_v + 1e-4 * f.exact_v);
  EXPECT_LT(f.error_v, 0.01 * f.exact_v) << "too few elements to say anything";
  EXPECT_LT(f.error_m, 0.01 * f.exact_m) << "too few elements to say anything";
}

}  // namespace
