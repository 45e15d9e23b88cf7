// The CPU's products and functions, which the transformer is made of.
#include <gtest/gtest.h>

#include <atomic>
#include <cmath>
#include <limits>
#include <vector>

#include "engine/threads.h"
#include "train/cpu/blas.h"
#include "train/cpu/math.h"

namespace scruple::train {
namespace {

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
