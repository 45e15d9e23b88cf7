// flash8 against FlashOptim's formulas (2602.23349, section 3.2), written out here a second time: hand-checked vectors,
// random groups to the code, and reading of a state that others wrote. Groups of 32, s = max(absmax, 1e-12) as fp16.
//   signed        x = m / s, y = 2x / (1 + |x|), code = floor(127 y + 1/2);  m = s y / (2 - |y|), y = code / 127
//   non-negative  of sqrt(v): code = floor(255 sqrt(v) / s + 1/2);           v = (s code / 255)^2
#include <algorithm>

#include "tests/support.h"

namespace {

using namespace scruple_tests;

constexpr int kExpAvg = SCRUPLE_SLOT, kExpAvgSq = SCRUPLE_SLOT + 1;
constexpr std::size_t kGroup = 32;

struct State {
  std::vector<int> codes;
  std::vector<unsigned> scales;  // bits of fp16
};

struct Flash8 : testing::Test {
  const Engine engine;
  const Optimizer adamw;

  State write(int array, const std::vector<float>& values) const {
    Tensor t(adamw, static_cast<std::int64_t>(values.size()));
    t.use(array, "flash8");
    t.encode(engine, array, values);
    State state;
    for (const unsigned char byte : t.codes(array).bytes())
      state.codes.push_back(array == kExpAvg && byte >= 128 ? byte - 256 : byte);
    for (std::size_t i = 0; i < t.aux(array).size; i += 2)
      state.scales.push_back(t.aux(array).data()[i] | static_cast<unsigned>(t.aux(array).data()[i + 1]) << 8);
    return state;
  }
  std::vector<float> read(int array, const State& state) const {
    Tensor t(adamw, static_cast<std::int64_t>(state.codes.size()));
    t.use(array, "flash8");
    for (std::size_t i = 0; i < state.codes.size(); ++i)
      t.codes(array).data()[i] = static_cast<unsigned char>(state.codes[i]);
    for (std::size_t i = 0; i < state.scales.size(); ++i) {
      t.aux(array).data()[2 * i] = static_cast<unsigned char>(state.scales[i]);
      t.aux(array).data()[2 * i + 1] = static_cast<unsigned char>(state.scales[i] >> 8);
    }
    return t.decode(engine, array);
  }
};

double half_value(unsigned code) {
  const int exponent = static_cast<int>(code >> 10 & 31u), fraction = static_cast<int>(code & 1023u);
  return exponent == 31 ? INFINITY
                        : std::ldexp(exponent == 0 ? fraction : fraction + 1024, std::max(exponent, 1) - 25);
}

// The nearest half, ties to even, by search.
unsigned half_code(double x) {
  unsigned best = 0;
  for (unsigned code = 0; code < 0x7c00u; ++code) {
    const double distance = std::fabs(half_value(code) - x), least = std::fabs(half_value(best) - x);
    if (distance < least || (distance == least && code % 2 == 0)) best = code;
  }
  return x >= 65520 ? 0x7c00u : best;
}

// A code from the formula in double. `sure` is false within rounding of fp32 of the point where the code changes.
int formula(int array, double value, double absmax, bool* sure) {
  const double s = std::max(array == kExpAvg ? absmax : std::sqrt(absmax), static_cast<double>(1e-12f));
  const double x = array == kExpAvg ? value / s : std::sqrt(value) / s;
  const double y = array == kExpAvg ? 127 * (2 * x / (1 + std::fabs(x))) : 255 * x;
  *sure = std::fabs(y + 0.5 - std::nearbyint(y + 0.5)) > 1e-4;
  return static_cast<int>(std::floor(y + 0.5));
}

double formula_back(int array, int code, unsigned scale) {
  const double s = half_value(scale);
  if (array == kExpAvgSq) return std::pow(s * code / 255, 2);
  const double y = code / 127.0;
  return s * y / (2 - std::fabs(y));
}

TEST_F(Flash8, signed_codes_of_a_hand_checked_vector) {
  const std::vector<float> m = {1.0f,    // x = 1, y = 1
                                -1.0f,   // -127, never -128
                                0.5f,    // y = 2/3: floor(84.67 + 0.5)
                                -0.5f,   // floor(-84.67 + 0.5)
                                0.25f,   // y = 0.4: floor(50.8 + 0.5)
                                -0.25f,  // floor(-50.8 + 0.5)
                                0.1f,    // y = 0.1818: floor(23.09 + 0.5)
                                -0.1f,   // floor(-23.09 + 0.5)
                                0.01f,   // y = 0.0198: floor(2.515 + 0.5)
                                -0.01f,  // floor(-2.515 + 0.5)
                                0.003f,  // y = 0.00598: floor(0.76 + 0.5)
                                0.001f,  // floor(0.25 + 0.5): lost
                                -0.001f, 0.0f};
  const State state = write(kExpAvg, m);
  EXPECT_EQ(state.codes, (std::vector<int>{127, -127, 85, -85, 51, -51, 23, -23, 3, -3, 1, 0, 0, 0}));
  EXPECT_EQ(state.scales, (std::vector<unsigned>{0x3c00}));  // 1
}

TEST_F(Flash8, non_negative_codes_of_a_hand_checked_vector) {
  const std::vector<float> v = {4.0f,     // root 2, the maximum
                                1.0f,     // 0.5: floor(127.5 + 0.5), a tie, up
                                0.25f,    // 0.25: floor(63.75 + 0.5)
                                0.16f,    // 0.2: floor(51 + 0.5)
                                4e-4f,    // 0.01: floor(2.55 + 0.5)
                                1.6e-5f,  // 0.002: floor(0.51 + 0.5)
                                1.4e-5f,  // 0.00187: floor(0.477 + 0.5): lost, the flaw that companded8 mends
                                0.0f};
  const State state = write(kExpAvgSq, v);
  EXPECT_EQ(state.codes, (std::vector<int>{255, 128, 64, 51, 3, 1, 0, 0}));
  EXPECT_EQ(state.scales, (std::vector<unsigned>{0x4000}));  // 2
}

TEST_F(Flash8, scales_are_half_precision_with_a_floor) {
  struct Row {
    float absmax;
    unsigned scale;
    int code;  // of half of absmax
    const char* why;
  };
  constexpr Row kRows[] = {
      {1.0f, 0x3c00, 85, "1"},
      {0.1f, 0x2e66, 85, "0.1 to nearest"},
      {1.00049f, 0x3c01, 85, "just above a tie: up"},
      {1e-6f, 0x0011, 85, "subnormal: 16.8 of 2^-24; codes divide by 1e-6, not by the stored scale"},
      {3e-8f, 0x0001, 85, "just above half of the smallest"},
      {2.9e-8f, 0x0000, 85, "below it: the group is erased"},
      {1e-12f, 0x0000, 85, "the floor"},
      {5e-13f, 0x0000, 51, "under the floor: divided by 1e-12"},
      {0.0f, 0x0000, 0, "zeros"},
      {65504.0f, 0x7bff, 85, "the largest half"},
      {65519.0f, 0x7bff, 85, "rounds to it"},
      {70000.0f, 0x7c00, 85, "overflows to infinity"},
  };
  for (const Row& row : kRows) {
    const State state = write(kExpAvg, {row.absmax, 0.5f * row.absmax});
    EXPECT_EQ(state.scales[0], row.scale) << row.why;
    EXPECT_EQ(state.codes[1], row.code) << row.why;
    const State root = write(kExpAvgSq, {row.absmax * row.absmax, 0.0f});
    // The square of 1e-12 and less still is a float, the root of it the floor.
    EXPECT_EQ(root.scales[0], row.scale) << "non-negative: " << row.why;
  }
}

TEST_F(Flash8, random_groups_follow_the_formulas_to_the_code) {
  Random random(5);
  std::size_t unsure = 0, all = 0;
  for (const int array : {kExpAvg, kExpAvgSq})
    for (int round = 0; round < 200; ++round) {
      const double scale = std::pow(10.0, -7 + round % 11);
      std::vector<float> values(kGroup);
      double absmax = 0;
      for (float& x : values) {
        const double root = scale * random.normal() * random.lognormal(1);
        x = static_cast<float>(array == kExpAvg ? root : root * root);
        absmax = std::max(absmax, std::fabs(static_cast<double>(x)));
      }
      const State state = write(array, values);
      EXPECT_EQ(state.scales[0], half_code(array == kExpAvg ? absmax : std::sqrt(absmax)));
      for (std::size_t i = 0; i < kGroup; ++i) {
        bool sure = false;
        const int code = formula(array, values[i], absmax, &sure);
        ++all;
        unsure += sure ? 0 : 1;
        EXPECT_TRUE(!sure || code == state.codes[i])
            << values[i] << " beside " << absmax << ": " << state.codes[i];
      }
    }
  EXPECT_LT(unsure, all / 100);
}

TEST_F(Flash8, every_code_of_a_foreign_state_decodes_by_the_formulas) {
  for (const unsigned scale : {0x3c00u, 0x2e66u, 0x0011u, 0x0400u, 0x7bffu, 0x4a31u})
    for (const int array : {kExpAvg, kExpAvgSq}) {
      State state;
      for (int code = array == kExpAvg ? -127 : 0; code <= (array == kExpAvg ? 127 : 255); ++code)
        state.codes.push_back(code);
      state.scales.assign((state.codes.size() + kGroup - 1) / kGroup, scale);
      const std::vector<float> values = read(array, state);
      for (std::size_t i = 0; i < values.size(); ++i) {
        const double expected = formula_back(array, state.codes[i], scale);
        EXPECT_NEAR(values[i], expected, 4 * 0x1p-23 * std::fabs(expected)) << state.codes[i];
      }
    }
}

}  // namespace
