// The loss scaler: when it grows, when it backs off, that a static one never moves and that its struct is all
// its state.
#include <cfloat>
#include <limits>

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

TEST(Scaler, DoublesAfterExactlyTwoThousandCleanSteps) {
  scruple_scaler s = scruple_scaler_dynamic();
  float want = s.scale;
  for (int round = 0; round < 3; ++round) {
    for (int i = 0; i < kInterval - 1; ++i) {
      CHECK_OK(scruple_scaler_update(&s, 0.0f));
      ASSERT_EQ(s.scale, want) << "after " << i + 1 << " clean steps";
    }
    CHECK_OK(scruple_scaler_update(&s, 0.0f));
    want *= 2;
    ASSERT_EQ(s.scale, want) << "after " << kInterval << " clean steps";
    EXPECT_EQ(s.clean, 0);
  }
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
  CHECK_OK(scruple_scaler_update(&s, std::numeric_limits<float>::quiet_NaN()));
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
  const float nan = std::numeric_limits<float>::quiet_NaN(), inf = std::numeric_limits<float>::infinity();
  const scruple_scaler good = scruple_scaler_dynamic();
  std::vector<scruple_scaler> bad;
  for (const float scale : {0.0f, -1.0f, nan, inf}) bad.push_back(good), bad.back().scale = scale;
  for (const float growth : {0.5f, 0.0f, -2.0f, nan, inf}) bad.push_back(good), bad.back().growth = growth;
  for (const float backoff : {0.0f, -0.5f, 1.5f, nan, inf}) bad.push_back(good), bad.back().backoff = backoff;
  for (const int interval : {0, -5}) bad.push_back(good), bad.back().interval = interval;
  bad.push_back(good), bad.back().clean = -1;
  bad.push_back({});
  for (const scruple_scaler& state : bad) {
    scruple_scaler s = state;
    EXPECT_EQ(scruple_scaler_update(&s, 0.0f), SCRUPLE_INVALID);
    EXPECT_NE(std::string(scruple_last_error()).find("scale"), std::string::npos) << scruple_last_error();
    EXPECT_EQ(std::memcmp(&s, &state, sizeof s), 0);
  }
  for (const float scale : {0.0f, -1.0f, nan, inf, -inf}) {
    scruple_scaler s = good;
    EXPECT_EQ(scruple_scaler_static(scale, &s), SCRUPLE_INVALID) << scale;
    EXPECT_TRUE(same(s, good)) << scale;
  }
  EXPECT_EQ(scruple_scaler_update(nullptr, 0.0f), SCRUPLE_INVALID);
  EXPECT_EQ(scruple_scaler_static(8.0f, nullptr), SCRUPLE_INVALID);
}

}  // namespace
}  // namespace scruple_tests
