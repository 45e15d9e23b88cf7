// Every optimizer of the registry, in fp32, against a double-precision reference written from the papers (reference.h),
// over sets of hyperparameters that the registry itself generates; and its published defaults.
#include "tests/reference.h"
#include "tests/support.h"

namespace scruple_tests {
namespace {

using Set = reference::Hypers;

constexpr int kSteps = 120;
constexpr std::size_t kElements = 67;

Set defaults_of(const Rule& rule) {
  Set set;
  for (const scruple_hyper_info& h : rule.hypers) set[h.name] = h.value;
  return set;
}

// Every hyperparameter away from zero and from its default, and eps where it shows; flags off.
Set non_zero(const Rule& rule) {
  Set set;
  for (const scruple_hyper_info& h : rule.hypers)
    set[h.name] = h.flag != 0 ? 0 : h.value < 1e-6 ? 0.1 : 0.9 * h.value;
  return set;
}

// Defaults, all non-zero, and all non-zero but one, each with every combination of the flags.
std::vector<Set> sets_of(const Rule& rule) {
  std::vector<Set> plain = {defaults_of(rule), non_zero(rule)};
  for (const scruple_hyper_info& h : rule.hypers) {
    if (h.flag != 0) continue;
    plain.push_back(non_zero(rule));
    plain.back()[h.name] = 0;
  }
  std::vector<Set> sets = plain;
  for (const scruple_hyper_info& h : rule.hypers) {
    if (h.flag == 0) continue;
    const std::size_t before = sets.size();
    for (std::size_t i = 0; i < before; ++i) {
      sets.push_back(sets[i]);
      sets.back()[h.name] = 1;
    }
  }
  return sets;
}

testing::AssertionResult is_published(const Rule& rule) {
  if (reference::published().contains(rule.name)) return testing::AssertionSuccess();
  return testing::AssertionFailure() << "optimizer '" << rule.name
                                     << "' has no reference: write it, and its defaults, from its paper "
                                        "into published() of tests/reference.h";
}

std::string text(const Rule& rule, const Set& set) {
  std::string all = rule.name;
  for (const auto& [name, value] : set) all += " " + name + "=" + std::to_string(value);
  return all;
}

Optimizer with(const Rule& rule, const Set& set) { return Optimizer(rule.name, {set.begin(), set.end()}); }

// Weights from 0.01 to 10 of both signs.
std::vector<float> initial_weights() {
  Random random(1);
  std::vector<float> w(kElements);
  for (float& x : w)
    x = static_cast<float>((random.uniform() < 0.5 ? -1 : 1) * std::exp(-4.6 + 6.9 * random.uniform()));
  return w;
}

// Gradients that are never near zero; each element keeps a magnitude of its own (1e-3 to 10) and turns its
// sign now and then, so that momentum crosses zero in large strides.
std::vector<float> gradients(int t) {
  std::vector<float> g(kElements);
  for (std::size_t i = 0; i < kElements; ++i) {
    Random element(1000 + i), step(7777 * static_cast<std::uint64_t>(t) + i);
    const double scale = std::exp(-6.9 + 9.2 * element.uniform());
    const int period = 11 + static_cast<int>(i % 23);
    const double sign = (t / period + static_cast<int>(i)) % 2 == 0 ? 1 : -1;
    g[i] = static_cast<float>(sign * scale * (0.3 + 1.4 * step.uniform()));
  }
  return g;
}

// One optimizer over the data: a tensor, and its elements in double.
struct Trial {
  Trial(scruple_engine* on, const Rule& rule, const Set& set)
      : engine(on), optimizer(with(rule, set)), tensor(optimizer, kElements, "fp32", on) {
    tensor.encode(engine, SCRUPLE_WEIGHT, initial_weights());
  }
  scruple_status step(int t, float sign = 1) {
    std::vector<float> g = gradients(t);
    for (float& x : g) x *= sign;
    tensor.encode(engine, SCRUPLE_GRADIENT, g);
    tensor.row.step = t;
    return scruple_step(engine, &tensor.row, 1, nullptr);
  }
  std::vector<float> weights() const { return tensor.decode(engine, SCRUPLE_WEIGHT); }

  scruple_engine* engine;
  Optimizer optimizer;
  Tensor tensor;
};

// What rounding to float may do, in units of 2^-24. A weight is rounded at most three times a step (what decay keeps,
// its product, the sum). Everything else that is rounded (constants, moments, the direction) is off by at most kUlps a
// step, times what cancellation makes of it, and an error in a moment lives on: after t steps a moment, and the step
// taken along it, are off by kUlps (t + 4) of the largest.
constexpr double kUlp = 0x1p-24, kUlps = 2;

struct Tracked {
  reference::Element element;
  double largest_step = 0, weight_bound = 0;
  std::map<std::string, double> largest_slot;

  void advance(reference::Update update, double g, const Set& set) {
    const double before = element.w;
    update(element, g, set);
    largest_step = std::max(largest_step, std::fabs(element.w - before));
    weight_bound += 3 * kUlp * std::fabs(before) + relative_bound() * largest_step;
    for (const auto& [name, value] : element.slots)
      largest_slot[name] = std::max(largest_slot[name], std::fabs(value));
  }
  double relative_bound() const {
    return kUlp * kUlps * static_cast<double>(element.t + 4) * element.cancellation;
  }
  double slot_bound(const std::string& name) { return relative_bound() * largest_slot[name] + 0x1p-149; }
};

// True if every array is within its bound of the reference.
bool follows(const Trial& trial, std::vector<Tracked>& all) {
  for (int a = SCRUPLE_WEIGHT; a < SCRUPLE_GRADIENT; ++a) {
    if (!trial.tensor.used(a)) continue;
    const char* name = nullptr;
    CHECK_OK(scruple_tensor_array(&trial.tensor.row, a, &name, nullptr, nullptr));
    const std::vector<float> values = trial.tensor.decode(trial.engine, a);
    for (std::size_t i = 0; i < kElements; ++i) {
      const double want = a == SCRUPLE_WEIGHT ? all[i].element.w : all[i].element.slots[name];
      const double bound = a == SCRUPLE_WEIGHT ? all[i].weight_bound : all[i].slot_bound(name);
      if (std::fabs(static_cast<double>(values[i]) - want) <= bound) continue;
      ADD_FAILURE() << name << "[" << i << "] at step " << all[i].element.t << ": " << values[i]
                    << ", reference " << want << ", off by "
                    << std::fabs(static_cast<double>(values[i]) - want) << ", bound " << bound;
      return false;
    }
  }
  return true;
}

// The reference over the whole run, to know whether rounding can decide anything in it.
bool is_well_posed(reference::Update update, const Set& set) {
  const std::vector<float> w = initial_weights();
  std::vector<reference::Element> elements(kElements);
  for (std::size_t i = 0; i < kElements; ++i) elements[i].w = static_cast<double>(w[i]);
  double margin = 1;
  for (int t = 1; t <= kSteps; ++t) {
    const std::vector<float> g = gradients(t);
    for (std::size_t i = 0; i < kElements; ++i) {
      update(elements[i], static_cast<double>(g[i]), set);
      margin = std::min(margin, elements[i].margin);
    }
  }
  return margin > 1e-5;
}

TEST(Optim, EveryRuleInFp32EqualsItsDoublePrecisionReferenceToFloatRounding) {
  const Engine engine;
  for (const Rule& rule : rules()) {
    ASSERT_TRUE(is_published(rule));
    const reference::Update update = reference::find(rule.name);
    int checked = 0, refused = 0, ill_posed = 0;
    for (const Set& set : sets_of(rule)) {
      SCOPED_TRACE(text(rule, set));
      Trial trial(engine, rule, set);
      if (const scruple_status status = trial.step(1); status != SCRUPLE_OK) {
        EXPECT_EQ(status, SCRUPLE_INVALID) << scruple_last_error();
        EXPECT_TRUE(same_bytes(trial.weights(), initial_weights()));
        ++refused;
        continue;
      }
      if (!is_well_posed(update, set)) {
        ++ill_posed;
        continue;
      }
      std::vector<Tracked> all(kElements);
      const std::vector<float> w = initial_weights();
      for (std::size_t i = 0; i < kElements; ++i) all[i].element.w = static_cast<double>(w[i]);
      for (int t = 1; t <= kSteps; ++t) {
        if (t > 1) {
          ASSERT_EQ(trial.step(t), SCRUPLE_OK) << scruple_last_error();
        }
        const std::vector<float> g = gradients(t);
        for (std::size_t i = 0; i < kElements; ++i) all[i].advance(update, static_cast<double>(g[i]), set);
        if (!follows(trial, all)) return;
      }
      EXPECT_TRUE(trial.tensor.intact());
      ++checked;
    }
    // Nesterov's variant contradicts dampening; a centred mean square of a single sample is zero.
    EXPECT_GT(checked, refused + ill_posed) << rule.name << ": too few sets of hyperparameters compared";
    std::printf("%s: %d sets compared, %d refused, %d ill-posed\n", rule.name.c_str(), checked, refused,
                ill_posed);
  }
}

TEST(Optim, EveryHyperparameterChangesTheResult) {
  const Engine engine;
  for (const Rule& rule : rules()) {
    for (const scruple_hyper_info& h : rule.hypers) {
      Set with = non_zero(rule), without = with;
      if (std::strcmp(h.name, "nesterov") == 0) with["dampening"] = without["dampening"] = 0;
      with[h.name] = h.flag != 0 ? 1 : with[h.name];
      without[h.name] = 0;
      Trial a(engine, rule, with), b(engine, rule, without);
      for (int t = 1; t <= 3; ++t) {
        ASSERT_EQ(a.step(t), SCRUPLE_OK) << text(rule, with) << ": " << scruple_last_error();
        ASSERT_EQ(b.step(t), SCRUPLE_OK) << text(rule, without) << ": " << scruple_last_error();
      }
      // AMSGrad needs a moment that falls, which a later step may bring.
      for (int t = 4; t <= kSteps; ++t) a.step(t), b.step(t);
      EXPECT_FALSE(same_bytes(a.weights(), b.weights())) << rule.name << ": " << h.name << " changes nothing";
    }
  }
}

TEST(Optim, MaximizeIsDescentOnNegatedGradients) {
  const Engine engine;
  for (const Rule& rule : rules()) {
    Set up = non_zero(rule);
    up["maximize"] = 1;
    Trial climb(engine, rule, up), descend(engine, rule, non_zero(rule));
    for (int t = 1; t <= 30; ++t) {
      ASSERT_EQ(climb.step(t), SCRUPLE_OK);
      ASSERT_EQ(descend.step(t, -1.0f), SCRUPLE_OK);
    }
    for (int a = SCRUPLE_WEIGHT; a < SCRUPLE_GRADIENT; ++a)
      EXPECT_EQ(climb.tensor.bytes(a), descend.tensor.bytes(a)) << rule.name << ", array " << a;
  }
}

TEST(Optim, DecoupledDecayFollowsLrOrLrOverDecayLr) {
  const Engine engine;
  for (const Rule& rule : rules()) {
    if (!rule.has("decay_lr")) continue;
    Set tied = non_zero(rule), same = tied, off = tied;
    tied["decay_lr"] = off["decay_lr"] = 0;
    tied["lr"] = same["lr"] = off["lr"] = 0x1p-7;
    tied["weight_decay"] = 0.5;
    same["weight_decay"] = 0.25;  // 0.25 lr / 0.5 = 0.5 lr: the same decay
    same["decay_lr"] = 0.5;
    off["weight_decay"] = 0;
    Trial a(engine, rule, tied), b(engine, rule, same), c(engine, rule, off);
    for (int t = 1; t <= 20; ++t) {
      ASSERT_EQ(a.step(t), SCRUPLE_OK);
      ASSERT_EQ(b.step(t), SCRUPLE_OK);
      ASSERT_EQ(c.step(t), SCRUPLE_OK);
    }
    EXPECT_EQ(a.tensor.bytes(SCRUPLE_WEIGHT), b.tensor.bytes(SCRUPLE_WEIGHT)) << rule.name;
    EXPECT_NE(a.tensor.bytes(SCRUPLE_WEIGHT), c.tensor.bytes(SCRUPLE_WEIGHT)) << rule.name;
  }
}

TEST(Optim, AHyperparameterIsFoundByItsOldName) {
  for (const Rule& rule : rules()) {
    const Optimizer optimizer(rule.name);
    const bool has = rule.has("decay_lr");
    EXPECT_EQ(scruple_optimizer_set(optimizer, "max_lr", 0.25), has ? SCRUPLE_OK : SCRUPLE_INVALID);
    for (const char* name : {"max_lr", "decay_lr"}) {
      double value = 0;
      EXPECT_EQ(scruple_optimizer_get(optimizer, name, &value), has ? SCRUPLE_OK : SCRUPLE_INVALID);
      EXPECT_EQ(value, has ? 0.25 : 0) << rule.name << " " << name;
    }
  }
}

TEST(Optim, HyperparametersSharedByTwoTensorsOrOwnedByEachGiveTheSameBits) {
  const Engine engine;
  for (const Rule& rule : rules()) {
    const Set slow = non_zero(rule);
    Set fast = slow;
    fast["lr"] = 3 * slow.at("lr");
    Trial a(engine, rule, slow), b(engine, rule, fast), together_a(engine, rule, slow),
        together_b(engine, rule, fast);
    for (int t = 1; t <= 5; ++t) {
      ASSERT_EQ(a.step(t), SCRUPLE_OK);
      ASSERT_EQ(b.step(t), SCRUPLE_OK);
      scruple_tensor table[2] = {together_a.tensor.row, together_b.tensor.row};
      for (scruple_tensor& row : table) {
        row.step = t;
        CHECK_OK(scruple_encode(engine, &row, SCRUPLE_GRADIENT, gradients(t).data()));
      }
      CHECK_OK(scruple_step(engine, table, 2, nullptr));
    }
    EXPECT_EQ(a.tensor.bytes(SCRUPLE_WEIGHT), together_a.tensor.bytes(SCRUPLE_WEIGHT)) << rule.name;
    EXPECT_EQ(b.tensor.bytes(SCRUPLE_WEIGHT), together_b.tensor.bytes(SCRUPLE_WEIGHT)) << rule.name;
    EXPECT_NE(a.tensor.bytes(SCRUPLE_WEIGHT), b.tensor.bytes(SCRUPLE_WEIGHT)) << rule.name;
  }
}

TEST(Optim, DefaultsAreThePublishedOnes) {
  for (const Rule& rule : rules()) {
    ASSERT_TRUE(is_published(rule));
    const Set& defaults = reference::published().at(rule.name).defaults;
    EXPECT_EQ(defaults_of(rule), defaults) << rule.name;
    const Optimizer fresh(rule.name);
    for (const auto& [name, value] : defaults) {
      double got = -1;
      CHECK_OK(scruple_optimizer_get(fresh, name.c_str(), &got));
      EXPECT_EQ(got, value) << rule.name << " " << name;
    }
    EXPECT_EQ(scruple_optimizer_seed(fresh), 0u);
    EXPECT_EQ(scruple_optimizer_rule(fresh), rule.index);
  }
}

TEST(Optim, OptionalSlotsAreUsedExactlyWhenAHyperparameterAsks) {
  const std::map<std::string, const char*> asks = {
      {"momentum_buffer", "momentum"}, {"max_exp_avg_sq", "amsgrad"}, {"grad_avg", "centered"}};
  for (const Rule& rule : rules()) {
    Optimizer optimizer(rule.name);
    const Tensor tensor(optimizer, 1);
    for (int s = 0; s < static_cast<int>(rule.slots.size()); ++s) {
      const scruple_slot_info& slot = rule.slots[static_cast<std::size_t>(s)];
      EXPECT_EQ(tensor.used(SCRUPLE_SLOT + s), slot.optional == 0) << rule.name << " " << slot.name;
      if (slot.optional == 0) continue;
      const auto found = asks.find(slot.name);
      ASSERT_NE(found, asks.end()) << "say in this table what asks for the optional slot " << slot.name;
      optimizer.set(found->second, 1);
      EXPECT_TRUE(tensor.used(SCRUPLE_SLOT + s)) << rule.name << " " << slot.name;
    }
  }
}

TEST(Optim, SlotsStartFromTheirInitialValue) {
  const Engine engine;
  for (const Rule& rule : rules()) {
    const Optimizer optimizer = with(rule, non_zero(rule));
    const Tensor tensor(optimizer, 5, "fp32", engine);
    for (int s = 0; s < static_cast<int>(rule.slots.size()); ++s) {
      if (!tensor.used(SCRUPLE_SLOT + s)) continue;
      const float start = rule.has("initial_accumulator_value") ? 0.1f : 0.0f;
      EXPECT_EQ(tensor.decode(engine, SCRUPLE_SLOT + s), std::vector<float>(5, start)) << rule.name;
    }
  }
}

// The engines look for a NaN in the weight alone (optim/optimizer.h).
TEST(Optim, ANaNInTheGradientOrInAnySlotReachesTheWeight) {
  const Engine engine;
  for (const Rule& rule : rules()) {
    const Optimizer optimizer(rule.name);
    for (const char* on : {"momentum", "amsgrad", "centered"})  // every optional slot in use
      (void)scruple_optimizer_set(optimizer, on, on == std::string("momentum") ? 0.9 : 1.0);
    for (int array = SCRUPLE_SLOT; array < SCRUPLE_ARRAYS; ++array) {
      Tensor tensor(optimizer, 3, "fp32", engine);
      if (!tensor.used(array)) continue;
      tensor.row.step = 2;
      const std::vector<float> ones(3, 1.0f), bad = {1.0f, kNaN, 1.0f};
      for (int a = 0; a < SCRUPLE_ARRAYS; ++a)
        if (tensor.used(a)) tensor.encode(engine, a, a == array ? bad : ones);
      step(engine, tensor);
      const std::vector<float> weights = tensor.decode(engine, SCRUPLE_WEIGHT);
      EXPECT_FALSE(std::isnan(weights[0]) || std::isnan(weights[2])) << rule.name << ", array " << array;
      EXPECT_TRUE(std::isnan(weights[1])) << rule.name << ", array " << array;
    }
  }
}

}  // namespace
}  // namespace scruple_tests
