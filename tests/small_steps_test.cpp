// Weights in 8 to 12 bits over 3,000 steps at the defaults, while the data change and the gradients' scale with them, from
// 20 to 1e-3 to 1e3. Steps are far below the distance of two codes. Rounded stochastically, the loss ends where fp32's
// does, within what seeds differ by; to nearest it does not.
#include <algorithm>
#include <map>

#include "tests/support.h"

namespace scruple_tests {
namespace {

constexpr std::size_t kInputs = 66, kUnits = 64, kElements = kInputs * kUnits;  // more than stay in fp32
constexpr std::size_t kBatch = 8, kValidated = 256;
constexpr int kPhaseSteps = 1000, kSeeds = kSlowBuild ? 2 : 3;
constexpr float kScales[] = {20, 1e-3f, 1e3f};  // of the gradients, in each phase
constexpr std::size_t kPhases = std::size(kScales);

struct Example {
  std::array<float, kInputs> x;
  float y = 0;
};

// A layer of tanh under a mean with fixed signs. Weights lie by input, so that every loop runs along the units.
struct Network {
  static float sign(std::size_t unit) { return unit % 2 == 0 ? 0.25f : -0.25f; }

  static std::array<float, kUnits> hidden(const std::vector<float>& w, const Example& e) {
    std::array<float, kUnits> h{};
    for (std::size_t i = 0; i < kInputs; ++i)
      for (std::size_t u = 0; u < kUnits; ++u) h[u] += e.x[i] * w[i * kUnits + u];
    for (float& value : h) value = std::tanh(value);
    return h;
  }
  static float output(const std::array<float, kUnits>& h) {
    float sum = 0;
    for (std::size_t u = 0; u < kUnits; ++u) sum += sign(u) * h[u];
    return sum;
  }
  static double loss(const std::vector<float>& w, const std::vector<Example>& examples) {
    double sum = 0;
    for (const Example& e : examples) sum += std::pow(static_cast<double>(output(hidden(w, e)) - e.y), 2) / 2;
    return sum / static_cast<double>(examples.size());
  }
  static void add_gradient(const std::vector<float>& w, const Example& e, float scale,
                           std::vector<float>& g) {
    std::array<float, kUnits> h = hidden(w, e);
    const float error = scale * (output(h) - e.y);
    for (std::size_t u = 0; u < kUnits; ++u) h[u] = error * sign(u) * (1 - h[u] * h[u]);
    for (std::size_t i = 0; i < kInputs; ++i)
      for (std::size_t u = 0; u < kUnits; ++u) g[i * kUnits + u] += e.x[i] * h[u];
  }
};

std::vector<Example> examples_of(const std::vector<float>& teacher, std::size_t count, Random& random) {
  std::vector<Example> examples(count);
  for (Example& e : examples) {
    for (float& x : e.x) x = static_cast<float>(0.1 * random.normal());
    e.y = Network::output(Network::hidden(teacher, e)) + static_cast<float>(0.3 * random.normal());
  }
  return examples;
}

// What a state is kept in; a recipe's own weights where none are named.
struct Kind {
  const char *rule, *recipe, *weights;
};

using Losses = std::array<double, kPhases>;  // on new examples of each phase, at its end

Losses losses_of(const Kind& kind, int rounding, int seed) {
  const Engine engine;
  Optimizer optimizer(kind.rule);
  if (has_hyper(optimizer, "momentum")) optimizer.set("momentum", 0.9);
  optimizer.seed(static_cast<std::uint64_t>(seed));
  Tensor tensor(optimizer, kElements, kind.recipe, engine);
  if (*kind.weights != 0) tensor.use(SCRUPLE_WEIGHT, kind.weights);
  if (!is_fp32(tensor.row.arrays[SCRUPLE_WEIGHT])) tensor.row.arrays[SCRUPLE_WEIGHT].rounding = rounding;
  Random data(1), draws(static_cast<std::uint64_t>(100 + seed));  // the data are one set for all seeds
  tensor.encode(engine, SCRUPLE_WEIGHT, draws.normals(kElements, 1.7));
  CHECK_OK(scruple_tensor_reset(engine, &tensor.row));
  Losses losses{};
  for (std::size_t phase = 0; phase < kPhases; ++phase) {
    const std::vector<float> teacher = data.normals(kElements, 1.7);
    const std::vector<Example> examples = examples_of(teacher, 2048, data);
    const std::vector<Example> validated = examples_of(teacher, kValidated, data);
    for (int s = 0; s < kPhaseSteps; ++s) {
      const std::vector<float> weights = tensor.decode(engine, SCRUPLE_WEIGHT);
      std::vector<float> gradient(kElements);
      for (std::size_t b = 0; b < kBatch; ++b)
        Network::add_gradient(weights, examples[draws.next() % examples.size()], kScales[phase] / kBatch,
                              gradient);
      ++tensor.row.step;
      tensor.row.folds = 1;
      tensor.encode(engine, SCRUPLE_GRADIENT, gradient);
      step(engine, tensor);
    }
    losses[phase] = Network::loss(tensor.decode(engine, SCRUPLE_WEIGHT), validated);
  }
  return losses;
}

struct Spread {
  Losses mean{}, deviation{};
};
Spread spread_of(const Kind& kind, int rounding) {
  Spread s;
  Losses squares{};
  for (int seed = 0; seed < kSeeds; ++seed) {
    const Losses losses = losses_of(kind, rounding, seed);
    for (std::size_t p = 0; p < kPhases; ++p)
      s.mean[p] += losses[p] / kSeeds, squares[p] += losses[p] * losses[p] / kSeeds;
  }
  for (std::size_t p = 0; p < kPhases; ++p)
    s.deviation[p] = std::sqrt(std::max(0.0, squares[p] - s.mean[p] * s.mean[p]) * kSeeds / (kSeeds - 1));
  return s;
}

// In deviations among fp32's seeds: how far the mean loss lies above fp32's, in the phase where it does most.
double above_fp32(const Kind& kind, int rounding) {
  static std::map<std::string, Spread> fp32;
  const auto [found, is_new] = fp32.try_emplace(kind.rule);
  if (is_new) found->second = spread_of({kind.rule, "fp32", ""}, SCRUPLE_NEAREST);
  const Spread spread = spread_of(kind, rounding);
  double most = -1e9;
  for (std::size_t p = 0; p < kPhases; ++p) {
    const Spread& exact = found->second;
    EXPECT_LT(exact.mean[p], 2.0) << "fp32 learns";
    most = std::max(most, (spread.mean[p] - exact.mean[p]) / exact.deviation[p]);
  }
  return most;
}

class SmallSteps : public testing::TestWithParam<Kind> {};

TEST_P(SmallSteps, StochasticFollowsFp32AndNearestDoesNot) {
  const double stochastic = above_fp32(GetParam(), SCRUPLE_STOCHASTIC);
  const double nearest = above_fp32(GetParam(), SCRUPLE_NEAREST);
  record("stochastic_deviations", stochastic);
  record("nearest_deviations", nearest);
  EXPECT_LT(stochastic, 0.5);
  EXPECT_GT(nearest, 3);
}

constexpr Kind kKinds[] = {{"sgd", "lpmm", ""},           {"lion", "lpmm", ""},
                           {"adamw", "scruple", "int8"},  {"adamw", "scruple", "int9"},
                           {"adamw", "scruple", "int10"}, {"adamw", "scruple", "int11"},
                           {"adamw", "scruple", "int12"}, {"sgd", "scruple", "int12"}};
INSTANTIATE_TEST_SUITE_P(Kinds, SmallSteps, testing::ValuesIn(kKinds), [](const auto& kind) {
  return std::string(kind.param.rule) + "_" + kind.param.recipe + "_" + kind.param.weights;
});

}  // namespace
}  // namespace scruple_tests
