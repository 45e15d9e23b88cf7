// The loss scaler: when it grows, when it backs off, that a static one never moves and that its struct is all
// its state.
#include <cfloat>

#include "tests/support.h"

namespace scruple_tests {
namespace {

constexpr int kInterval = 2000;

bool same(const scruple_scaler& a, const scruple_scaler& b) {
  return a.scale == b.scale && a.growth == b.growth && a.backoff == b.backoff && a.interval == b.interval &&
         a.clean == b.clean;
}

TEST(Scaler, StartsWhereTheFrameworksStart) {
  const scruple_scaler s = scruple_scaler_dynamic();
  EXPECT_EQ(s.scale, 65536.0f);
  EXPECT_EQ(s.growth, 2.0f);
  EXPECT_EQ(s.backoff, 0.5f);
  EXPECT_EQ(s.interval, kInterval);
  EXPECT_EQ(s.clean, 0);
}

TEST(Scaler, HalvesOnOverflowAndCountsFromZeroAgain) {
  scruple_scaler s = scruple_scaler_dynamic();
  for (int i = 0; i < kInterval - 1; ++i) CHECK_OK(scruple_scaler_update(&s, 0.0f));
  CHECK_OK(scruple_scaler_update(&s, 1.0f));
  EXPECT_EQ(s.scale, 32768.0f);
  EXPECT_EQ(s.clean, 0);
  for (int i = 0; i < kInterval - 1; ++i) CHECK_OK(scruple_scaler_update(&s, 0.0f));
  EXPECT_EQ(s.scale, 32768.0f);
  CHECK_OK(scruple_scaler_update(&s, 0.0f));
  EXPECT_EQ(s.scale, 65536.0f);
  CHECK_OK(scruple_scaler_update(&s, 1.0f));
  CHECK_OK(scruple_scaler_update(&s, 1.0f));
  EXPECT_EQ(s.scale, 16384.0f) << "two overflows in a row";
  CHECK_OK(scruple_scaler_update(&s, kNaN));
  EXPECT_EQ(s.scale, 8192.0f) << "any flag but 0 is an overflow";
}

TEST(Scaler, StaysAFiniteNumberAboveZero) {
  scruple_scaler s = scruple_scaler_dynamic();
  for (int i = 0; i < 400; ++i) CHECK_OK(scruple_scaler_update(&s, 1.0f));
  EXPECT_GT(s.scale, 0.0f);
  EXPECT_GE(s.scale, FLT_MIN) << "1 / scale must be finite";
  s.interval = 1;
  for (int i = 0; i < 400; ++i) CHECK_OK(scruple_scaler_update(&s, 0.0f));
  EXPECT_TRUE(std::isfinite(s.scale));
}

TEST(Scaler, AStaticScaleNeverChanges) {
  for (const float scale : {1.0f, 8.0f, 1000.0f, 32768.0f, 0.1f, 0x1p-126f, 0x1p126f}) {
    scruple_scaler s{};
    CHECK_OK(scruple_scaler_static(scale, &s));
    for (int i = 0; i < 3 * kInterval; ++i) {
      CHECK_OK(scruple_scaler_update(&s, i % 700 == 3 ? 1.0f : 0.0f));
      ASSERT_EQ(s.scale, scale) << "update " << i;
    }
  }
}

// Whatever scale is accepted is kept, at the ends of the range too.
TEST(Scaler, AStaticScaleThatIsAcceptedIsKept) {
  for (const float scale : {FLT_MAX, 0x1p127f, 3e38f, FLT_MIN, 1e-40f, FLT_TRUE_MIN}) {
    scruple_scaler s{};
    if (scruple_scaler_static(scale, &s) != SCRUPLE_OK) continue;
    CHECK_OK(scruple_scaler_update(&s, 1.0f));
    for (int i = 0; i < kInterval; ++i) CHECK_OK(scruple_scaler_update(&s, 0.0f));
    EXPECT_EQ(s.scale, scale);
  }
}

TEST(Scaler, ACopyTakenMidwayContinuesIdentically) {
  scruple_scaler s = scruple_scaler_dynamic(), copy{};
  Random random(11);
  for (int i = 0; i < 20000; ++i) {
    if (i == 7777) copy = s;
    const float flag = random.next() % 3001 == 0 ? 1.0f : 0.0f;
    CHECK_OK(scruple_scaler_update(&s, flag));
    if (i < 7777) continue;
    CHECK_OK(scruple_scaler_update(&copy, flag));
    ASSERT_TRUE(same(s, copy)) << "update " << i;
  }
}

TEST(Scaler, InvalidStatesAreRefusedAndLeftAlone) {
  const scruple_scaler good = scruple_scaler_dynamic();
  std::vector<scruple_scaler> bad;
  for (const float scale : {0.0f, -1.0f, kNaN, kInf}) bad.push_back(good), bad.back().scale = scale;
  for (const float growth : {0.5f, 0.0f, -2.0f, kNaN, kInf}) bad.push_back(good), bad.back().growth = growth;
  for (const float backoff : {0.0f, -0.5f, 1.5f, kNaN, kInf})
    bad.push_back(good), bad.back().backoff = backoff;
  for (const int interval : {0, -5}) bad.push_back(good), bad.back().interval = interval;
  bad.push_back(good), bad.back().clean = -1;
  bad.push_back({});
  for (const scruple_scaler& state : bad) {
    scruple_scaler s = state;
    EXPECT_INVALID(scruple_scaler_update(&s, 0.0f), "scale");
    EXPECT_EQ(std::memcmp(&s, &state, sizeof s), 0);
  }
  for (const float scale : {0.0f, -1.0f, kNaN, kInf, -kInf}) {
    scruple_scaler s = good;
    EXPECT_EQ(scruple_scaler_static(scale, &s), SCRUPLE_INVALID) << scale;
    EXPECT_TRUE(same(s, good)) << scale;
  }
  EXPECT_EQ(scruple_scaler_update(nullptr, 0.0f), SCRUPLE_INVALID);
  EXPECT_EQ(scruple_scaler_static(8.0f, nullptr), SCRUPLE_INVALID);
}

// ---- fp16 gradients and the loss scale ----

TEST(Fp16, AGradientThatOverflowsIsSeenAndAWeightSaturates) {
  const Engine engine;
  const Optimizer optimizer("sgd");
  struct Value {
    float value;
    bool overflows;
  };
  constexpr Value kValues[] = {{1e6f, true},       {-1e6f, true},       {65520.0f, true},  {-65520.0f, true},
                               {65519.99f, false}, {-65519.99f, false}, {65504.0f, false}, {1.0f, false}};
  for (const int rounding : {SCRUPLE_NEAREST, SCRUPLE_TRUNCATE, SCRUPLE_STOCHASTIC})
    for (const auto& [value, overflows] : kValues) {
      std::vector<float> values(300, 0.5f);
      values[177] = value;
      Tensor gradient(optimizer, 300);
      gradient.use(SCRUPLE_GRADIENT, "fp16", rounding);
      gradient.encode(engine, SCRUPLE_GRADIENT, values);
      float found_inf = -1;
      CHECK_OK(scruple_norm(engine, &gradient.row, 1, nullptr, &found_inf));
      EXPECT_EQ(found_inf, overflows ? 1.0f : 0.0f) << value << ", rounding " << rounding;
      const float stored = gradient.decode(engine, SCRUPLE_GRADIENT)[177];
      EXPECT_EQ(std::isinf(stored), overflows) << value;
      EXPECT_EQ(std::signbit(stored), std::signbit(value)) << value;

      Tensor weight(optimizer, 300);
      weight.use(SCRUPLE_WEIGHT, "fp16", rounding);
      weight.encode(engine, SCRUPLE_WEIGHT, values);
      const float kept = weight.decode(engine, SCRUPLE_WEIGHT)[177];
      EXPECT_EQ(kept, std::fabs(value) < 65504 ? value : std::copysign(65504.0f, value))
          << value << ", rounding " << rounding;
    }
}

constexpr std::int32_t kMost = std::numeric_limits<std::int32_t>::max();

TEST(LossScale, AStateWithMoreCleanStepsThanAnIntervalIsRefused) {
  const std::pair<std::int32_t, std::int32_t> states[] = {
      // interval, clean
      {2000, 2000}, {2000, 2001}, {1, 1}, {5, kMost}, {kMost, kMost}, {kMost - 1, kMost}};
  const Engine engine;
  const Optimizer optimizer("sgd");
  const Tensor tensor(optimizer, 256, "fp32", engine);
  for (const auto& [interval, clean] : states) {
    scruple_scaler scaler = scruple_scaler_dynamic();
    scaler.interval = interval;
    scaler.clean = clean;
    const scruple_scaler before = scaler;
    for (const float found_inf : {0.0f, 1.0f})
      EXPECT_INVALID(scruple_scaler_update(&scaler, found_inf), "clean");
    EXPECT_EQ(std::memcmp(&scaler, &before, sizeof scaler), 0);
    scruple_sink_options options = SCRUPLE_SINK_OPTIONS_INIT;
    options.scaler = &scaler;
    scruple_sink* sink = nullptr;
    EXPECT_EQ(scruple_sink_create(engine, &tensor.row, 1, &options, &sink), SCRUPLE_INVALID);
    scruple_sink_destroy(sink);
  }
}

// On the host and in the engine's memory alike.
TEST(LossScale, GrowsOnceAnIntervalAndOverflowBeginsOneAnew) {
  const Engine engine;
  for (const std::int32_t interval : {1, 2, 7, 2000}) {
    scruple_scaler host = scruple_scaler_dynamic();
    host.interval = interval;
    scruple_scaler device = host;
    std::int64_t steps = 0;
    const auto update = [&](float found_inf) {
      CHECK_OK(scruple_scaler_update(&host, found_inf));
      CHECK_OK(scruple_advance(engine, &found_inf, &device, &steps));
      ASSERT_EQ(std::memcmp(&host, &device, sizeof host), 0);
    };
    for (std::int32_t i = 1; i <= 3 * interval; ++i) {
      update(0);
      ASSERT_EQ(host.scale, std::ldexp(65536.0f, i / interval)) << "step " << i << " of " << interval;
      ASSERT_EQ(host.clean, i % interval);
    }
    for (std::int32_t i = 1; i < interval; ++i) update(0);
    update(1);
    EXPECT_EQ(host.scale, std::ldexp(65536.0f, 2)) << interval;
    EXPECT_EQ(host.clean, 0);
    for (std::int32_t i = 1; i < interval; ++i) update(0);
    EXPECT_EQ(host.scale, std::ldexp(65536.0f, 2)) << interval;
    update(0);
    EXPECT_EQ(host.scale, std::ldexp(65536.0f, 3)) << interval;
    EXPECT_EQ(steps, 3 * interval + interval - 1 + interval);
  }
}

TEST(LossScale, CleanStepsCannotOverflow) {
  scruple_scaler scaler = scruple_scaler_dynamic();
  scaler.interval = kMost;
  scaler.clean = kMost - 2;
  CHECK_OK(scruple_scaler_update(&scaler, 0));
  EXPECT_EQ(scaler.clean, kMost - 1);
  EXPECT_EQ(scaler.scale, 65536.0f);
  CHECK_OK(scruple_scaler_update(&scaler, 0));
  EXPECT_EQ(scaler.clean, 0);
  EXPECT_EQ(scaler.scale, 131072.0f);
  scaler.clean = kMost - 1;
  CHECK_OK(scruple_scaler_update(&scaler, 1));
  EXPECT_EQ(scaler.clean, 0);
  EXPECT_EQ(scaler.scale, 65536.0f);
}

}  // namespace
}  // namespace scruple_tests
