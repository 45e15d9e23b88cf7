// The lattice of coins (engine/coins.h): each element's coin is uniform and independent from step to step; arrays,
// tensors, seeds and writes share none; sums of rounded values err no more than with a coin of its own for each.
#include "engine/coins.h"

#include <algorithm>

#include "tests/support.h"

namespace {

using namespace scruple_tests;
using scruple::CoinKey;
using scruple::Coins;
using scruple::draw_coins;

double fraction(std::uint32_t coin) { return static_cast<double>(coin) * 0x1p-32; }

CoinKey key_at(std::uint32_t step) { return {0x0123456789abcdefu, step, 7, SCRUPLE_SLOT, 0}; }

// Correlation of two uniform numbers over draws, in standard errors of independent ones.
class Correlation {
 public:
  void add(double a, double b) {
    sum_ += (a - 0.5) * (b - 0.5);
    ++count_;
  }
  double deviations() const { return sum_ * 12 / std::sqrt(count_); }

 private:
  double sum_ = 0, count_ = 0;
};

constexpr std::uint32_t kSteps = 20000;

TEST(Coins, documented) {  // written a second time
  const CoinKey key{0xfedcba9876543210u, 5, 3, 2, 1};
  const scruple::PhiloxBlock drawn = scruple::philox({{1, 2, 5, 3}}, {{0x76543210u, 0xfedcba98u}});
  const std::uint32_t step = 0x9e3779b1u - (1u << 24) + (drawn.x[1] >> 7);
  for (const std::uint64_t e :
       {std::uint64_t{0}, std::uint64_t{1}, std::uint64_t{12345}, (std::uint64_t{1} << 40) + 3})
    EXPECT_EQ(draw_coins(key).from(static_cast<std::int64_t>(e)).first,
              drawn.x[0] + static_cast<std::uint32_t>(e) * step);
  EXPECT_EQ(draw_coins(key)[3], draw_coins(key).from(3).first);
}

TEST(Coins, each_element_is_uniform_over_steps) {
  constexpr int kBins = 64;
  for (const std::int64_t element : {0, 1, 63, 1 << 20, 123456789}) {
    std::vector<double> seen(kBins);
    for (std::uint32_t step = 1; step <= kSteps; ++step)
      ++seen[draw_coins(key_at(step)).from(element).first >> 26];
    double chi_squared = 0;
    for (const double n : seen) chi_squared += (n - kSteps / kBins) * (n - kSteps / kBins) * kBins / kSteps;
    EXPECT_LT(chi_squared, kBins - 1 + 5 * std::sqrt(2.0 * (kBins - 1))) << "element " << element;
  }
}

TEST(Coins, each_element_is_independent_of_the_step_before) {
  for (const std::int64_t element : {0, 5, 1 << 20}) {
    Correlation next, after;
    for (std::uint32_t step = 1; step <= kSteps; ++step) {
      const auto at = [&](std::uint32_t s) { return fraction(draw_coins(key_at(s)).from(element).first); };
      next.add(at(step), at(step + 1));
      after.add(at(step), at(step + 2));
    }
    EXPECT_LT(std::fabs(next.deviations()), 5) << element;
    EXPECT_LT(std::fabs(after.deviations()), 5) << element;
  }
}

TEST(Coins, seeds_tensors_arrays_and_writes_share_none) {
  const auto other = [](std::uint32_t step, int which) {
    CoinKey key = key_at(step);
    if (which == 0) ++key.seed;
    if (which == 1) key.seed += std::uint64_t{1} << 32;
    if (which == 2) ++key.id;
    if (which == 3) ++key.array;
    if (which == 4) ++key.write;
    if (which == 5) ++key.write, ++key.array;
    return key;
  };
  for (int which = 0; which < 6; ++which)
    for (const std::int64_t element : {0, 1000}) {
      Correlation both;
      for (std::uint32_t step = 1; step <= kSteps; ++step)
        both.add(fraction(draw_coins(key_at(step)).from(element).first),
                 fraction(draw_coins(other(step, which)).from(element).first));
      EXPECT_LT(std::fabs(both.deviations()), 5) << "change " << which << ", element " << element;
    }
}

// Far apart, elements of one tensor are independent over steps too; a lattice without its tilt binds those a
// Fibonacci number apart, here to 0.99 of each other.
TEST(Coins, far_elements_are_independent) {
  for (const std::int64_t distance : {17711, 28657, 46368, 65536, 1 << 20, 832040}) {
    Correlation both, straight;
    for (std::uint32_t step = 1; step <= kSteps; ++step) {
      const Coins coins = draw_coins(key_at(step)), untilted{coins.first, 0x9e3779b1u};
      both.add(fraction(coins.first), fraction(coins.from(distance).first));
      straight.add(fraction(coins.first), fraction(untilted.from(distance).first));
    }
    EXPECT_LT(std::fabs(both.deviations()), 5) << distance;
    if (distance == 17711 || distance == 832040) {
      EXPECT_GT(straight.deviations(), 100) << distance;  // the power of this test
    }
  }
}

// ---- Sums of rounded values, in units of one step -------------------------------------------------
// Error of the sum over `count` elements, `stride` apart, of values with the fractions f: root mean square over steps.
double sum_error(const std::vector<double>& f, std::int64_t stride, bool own_coins) {
  Random random(3);
  double squares = 0;
  constexpr std::uint32_t kDraws = 20000;
  for (std::uint32_t step = 1; step <= kDraws; ++step) {
    const Coins coins = draw_coins(key_at(step));
    double error = 0;
    for (std::size_t i = 0; i < f.size(); ++i) {
      const double coin =
          own_coins ? random.uniform() : fraction(coins.from(static_cast<std::int64_t>(i) * stride).first);
      error += (f[i] + coin >= 1 ? 1 : 0) - f[i];
    }
    squares += error * error / kDraws;
  }
  return std::sqrt(squares);
}

// Rows, columns of matrices of many widths (powers of two, models', Fibonacci numbers), values all alike or all
// different.
TEST(Coins, sums_err_no_more_than_with_a_coin_for_each) {
  constexpr std::size_t n = 256;
  Random random(5);
  std::vector<double> different(n), alike(n, 0.3), slope(n);
  for (double& x : different) x = random.uniform();
  for (std::size_t i = 0; i < n; ++i) slope[i] = static_cast<double>(i) / n;
  for (const std::int64_t stride : {1,    2,    3,    64,   89,   128,   144,   610,   768,   987,    1024,
                                    1597, 2048, 4096, 4181, 8192, 11008, 14336, 50257, 65536, 1 << 20}) {
    for (const auto& [name, f] : {std::pair{"different", &different}, {"alike", &alike}, {"slope", &slope}}) {
      const double ours = sum_error(*f, stride, false), own = sum_error(*f, stride, true);
      EXPECT_LT(ours, 1.3 * own) << name << ", " << stride << " apart";  // 20,000 draws, a long tail
      if (stride == 1) {
        EXPECT_LT(ours, 0.8 * own) << name << ": neighbours should do better";
      }
    }
  }
}

}  // namespace
