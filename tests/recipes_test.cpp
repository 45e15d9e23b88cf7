// Every recipe, and every weight and moment format by itself, follows the fp32 recipe over 200 steps as closely as its
// formats' stated error bounds imply; and what a recipe or a format does not serve is refused with what does.
#include <algorithm>

#include "tests/support.h"

namespace scruple_tests {
namespace {

constexpr int kSteps = 200;
constexpr std::size_t kElements = 8192;  // above every recipe's `small`
constexpr double kDisplacement = 0.2;    // how far the reference moves its weights, which are around 1
constexpr double kBeta = 0.9;            // of every moving average
constexpr int kWeightStride = kSlowBuild ? 7 : 1;  // under sanitizers, every seventh weight format

// ---- The problem: gradients that breathe slowly and never change sign, weights of both signs, no decay ----

const std::vector<float>& initial_weights() {
  static const std::vector<float> kWeights = [] {
    Random random(31);
    std::vector<float> w(kElements);
    for (float& x : w)
      x = static_cast<float>((random.uniform() < 0.5 ? -1 : 1) * (0.5 + 1.5 * random.uniform()));
    return w;
  }();
  return kWeights;
}

// Magnitude of each element's gradient, sign included.
const std::vector<double>& amplitudes() {
  static const std::vector<double> kAmplitudes = [] {
    Random random(32);
    std::vector<double> a(kElements);
    for (double& x : a) x = (random.uniform() < 0.5 ? -1e-2 : 1e-2) * random.lognormal(0.3);
    return a;
  }();
  return kAmplitudes;
}

// Exact in bf16, so that every recipe's gradient array (but an int8 one) holds the same numbers.
const std::vector<float>& gradients(int t) {
  static const std::vector<std::vector<float>> kAll = [] {
    std::vector<std::vector<float>> all;
    for (int s = 1; s <= kSteps; ++s) {
      std::vector<float>& g = all.emplace_back(kElements);
      for (std::size_t i = 0; i < kElements; ++i)
        g[i] = float_from(bits(static_cast<float>(amplitudes()[i] *
                                                  (1 + 0.5 * std::sin(0.1 * s + static_cast<double>(i))))) &
                          0xffff0000u);
    }
    return all;
  }();
  return kAll[static_cast<std::size_t>(t - 1)];
}

std::vector<float> prefix(const std::vector<float>& values, std::int64_t size) {
  return {values.begin(), values.begin() + size};
}

void train(scruple_engine* engine, Tensor& tensor) {
  tensor.encode(engine, SCRUPLE_WEIGHT, prefix(initial_weights(), tensor.row.size));
  CHECK_OK(scruple_tensor_reset(engine, &tensor.row));
  for (int t = 1; t <= kSteps; ++t) {
    tensor.row.step = t;
    tensor.row.folds = 1;
    tensor.encode(engine, SCRUPLE_GRADIENT, prefix(gradients(t), tensor.row.size));
    step(engine, tensor);
  }
  EXPECT_TRUE(tensor.intact());
}

// Every average over ten steps, no decay, a rate at which the fp32 recipe moves by kDisplacement on average.
void set_up(Optimizer& optimizer, scruple_engine* engine) {
  double value = 0;
  for (const char* name : {"momentum", "beta1", "beta2", "alpha"})
    if (scruple_optimizer_get(optimizer, name, &value) == SCRUPLE_OK) optimizer.set(name, kBeta);
  if (scruple_optimizer_get(optimizer, "weight_decay", &value) == SCRUPLE_OK)
    optimizer.set("weight_decay", 0);
  Tensor probe(optimizer, kElements, "fp32", engine);
  train(engine, probe);
  const std::vector<float> end = probe.decode(engine, SCRUPLE_WEIGHT);
  double moved = 0, lr = 0;
  for (std::size_t i = 0; i < kElements; ++i)
    moved += std::fabs(static_cast<double>(end[i] - initial_weights()[i])) / kElements;
  CHECK_OK(scruple_optimizer_get(optimizer, "lr", &lr));
  optimizer.set("lr", lr * kDisplacement / moved);
}

// How far from where the reference went, over how far it went.
double distance(const std::vector<float>& got, const std::vector<float>& want,
                const std::vector<float>& origin) {
  std::vector<double> way, wanted_way;
  for (std::size_t i = 0; i < got.size(); ++i) {
    way.push_back(static_cast<double>(got[i]) - static_cast<double>(origin[i]));
    wanted_way.push_back(static_cast<double>(want[i]) - static_cast<double>(origin[i]));
  }
  return relative_l2(way, wanted_way);
}

// ---- What a format's bound implies ----

// The largest |amplitude| among the `group` elements around i.
double group_max(std::size_t i, std::int64_t group) {
  const std::size_t g = static_cast<std::size_t>(group), first = i / g * g;
  double largest = 0;
  for (std::size_t j = first; j < std::min(kElements, first + g); ++j)
    largest = std::max(largest, std::fabs(amplitudes()[j]));
  return largest;
}

// Half a code of a moment relative to its value, root mean square over the elements: the bound's relative
// part and its group part, where the group's maximum stands above the element as the gradients' amplitudes do
// (squared for a second moment).
double half_code(const scruple_format* format, int role) {
  const scruple_format_info info = info_of(format);
  const scruple_bound bound = role == SCRUPLE_ROLE_NONNEG ? info.bound_nonneg : info.bound;
  double sum = 0;
  for (std::size_t i = 0; i < kElements; ++i) {
    const double above = group_max(i, info.group_size) / std::fabs(amplitudes()[i]);
    const double e = bound.relative + bound.group * (role == SCRUPLE_ROLE_NONNEG ? above * above : above);
    sum += e * e / kElements;
  }
  return std::sqrt(sum);
}

// How many writes an error in a slot outlives: 1 / (1 - beta) of a moving average; of a sum that forgets
// nothing, a third of the steps (its errors are measured against a sum that grows).
double memory(const Tensor& tensor) {
  double value = 0;
  for (const char* name : {"momentum", "beta1", "beta2", "alpha"})
    if (scruple_optimizer_get(tensor.row.optimizer, name, &value) == SCRUPLE_OK) return 1 / (1 - kBeta);
  return kSteps / 3.0;
}

// The relative error of a slot whose every write errs by up to e: nearest and stochastic rounding (twice as
// wide, so as large as e on average) err now this way and now that, and add up as the root of the writes;
// truncation errs by up to 2 e and always inward.
double moment_bound(const Tensor& tensor, const SlotAt& slot) {
  const scruple_array& array = tensor.row.arrays[slot.array];
  const double e = half_code(array.format, slot.role), writes = memory(tensor);
  return (array.rounding == SCRUPLE_TRUNCATE ? 2 * writes : std::sqrt(writes)) * e + 1e-5;
}

// A weight errs by at most half a code at each of the steps: N e where the errors agree, as nearest
// rounding's may, twice that when truncated; with stochastic rounding (twice as wide, and a split gives one
// bit to the direction) the root of N. Per element, in the weight's own units.
double weight_bound(const scruple_array& array, double weight) {
  constexpr double kLargest = 2.0 + 5 * kDisplacement;  // no weight goes further
  const scruple_bound bound = info_of(array.format).bound;
  const double e =
      bound.relative * (std::fabs(weight) + 5 * kDisplacement) + bound.group * kLargest + bound.absolute;
  if (array.rounding == SCRUPLE_STOCHASTIC) return std::sqrt(static_cast<double>(kSteps)) * (4 * e + 0x1p-22);
  return (array.rounding == SCRUPLE_TRUNCATE ? 2 : 1) * kSteps * e;
}

// The distance from the fp32 recipe's weights, relative to the way they went, that a tensor's formats allow.
// An error in a first moment shifts the step by as much, one in a second moment by half; an int8 gradient
// errs afresh every step.
double distance_bound(const Tensor& tensor) {
  double bound = weight_bound(tensor.row.arrays[SCRUPLE_WEIGHT], 1.3) / kDisplacement + 1e-5;
  for (const SlotAt& slot : slots_of(tensor.row))
    bound += moment_bound(tensor, slot) * (slot.role == SCRUPLE_ROLE_NONNEG ? 0.5 : 1);
  const scruple_format* gradient = tensor.row.arrays[SCRUPLE_GRADIENT].format;
  if (info_of(gradient).group_size > 1) bound += 2 * half_code(gradient, SCRUPLE_ROLE_GRADIENT);
  return bound;
}

// ---- The properties ----

std::vector<float> weights_of(scruple_engine* engine, const Tensor& tensor) {
  return tensor.decode(engine, SCRUPLE_WEIGHT);
}

Tensor trained(const Optimizer& optimizer, scruple_engine* engine, const char* recipe,
               std::int64_t size = static_cast<std::int64_t>(kElements)) {
  Tensor tensor(optimizer, size, recipe, engine);
  train(engine, tensor);
  return tensor;
}

bool can_hold(const scruple_format* format, int role, int rounding) {
  const scruple_format_info info = info_of(format);
  return (info.roles & static_cast<unsigned>(role)) != 0 && (info.roundings >> rounding & 1u) != 0;
}

// Sums with no rounding of their own (moments and gradients in fp32): the bound holds for each element.
void expect_weights_follow(const Tensor& tensor, const std::vector<float>& got,
                           const std::vector<float>& want, const std::string& name) {
  const scruple_array& array = tensor.row.arrays[SCRUPLE_WEIGHT];
  if (array.rounding == SCRUPLE_STOCHASTIC) {
    double error = 0, bound = 0;
    for (std::size_t i = 0; i < got.size(); ++i) {
      const double allowed = weight_bound(array, static_cast<double>(want[i]));
      error += std::pow(static_cast<double>(got[i]) - static_cast<double>(want[i]), 2);
      bound += allowed * allowed;
    }
    EXPECT_LE(std::sqrt(error), std::sqrt(bound)) << name;
    return;
  }
  for (std::size_t i = 0; i < got.size(); ++i)
    ASSERT_LE(std::fabs(static_cast<double>(got[i]) - static_cast<double>(want[i])),
              weight_bound(array, static_cast<double>(want[i])))
        << name << ", element " << i;
}

TEST(Recipes, EveryWeightFormatFollowsFp32WithinItsBoundTimesTheSteps) {
  const Engine engine(2);
  for (const char* rule : {"sgd", "adamw"}) {
    Optimizer optimizer(rule);
    set_up(optimizer, engine);
    const std::vector<float> want = weights_of(engine, trained(optimizer, engine, "fp32"));
    for (int f = 0; f < scruple_format_count(); f += kWeightStride)
      for (const int rounding : {SCRUPLE_NEAREST, SCRUPLE_TRUNCATE, SCRUPLE_STOCHASTIC}) {
        const scruple_format* format = scruple_format_at(f);
        if (!can_hold(format, SCRUPLE_ROLE_WEIGHT, rounding)) continue;
        Tensor tensor(optimizer, kElements, "fp32", engine);
        tensor.use(SCRUPLE_WEIGHT, format, rounding);
        train(engine, tensor);
        const std::string name =
            std::string(rule) + " " + info_of(format).name + " " + std::to_string(rounding);
        expect_weights_follow(tensor, weights_of(engine, tensor), want, name);
      }
  }
}

TEST(Recipes, EverySlotInEveryFormatFollowsFp32WithinItsBound) {
  const Engine engine(2);
  for (const Rule& rule : rules()) {
    Optimizer optimizer(rule.name);
    set_up(optimizer, engine);
    const Tensor reference = trained(optimizer, engine, "fp32");
    for (const SlotAt& slot : slots_of(reference.row))
      for (const scruple_format* format : formats())
        for (const int rounding : {SCRUPLE_NEAREST, SCRUPLE_TRUNCATE, SCRUPLE_STOCHASTIC}) {
          if (!can_hold(format, slot.role, rounding)) continue;
          const int a = slot.array;
          Tensor tensor(optimizer, kElements, "fp32", engine);
          tensor.use(a, format, rounding);
          train(engine, tensor);
          SCOPED_TRACE(rule.name + " " + slot.name + " " + info_of(format).name + " " +
                       std::to_string(rounding));
          EXPECT_LE(
              distance(tensor.decode(engine, a), reference.decode(engine, a), std::vector<float>(kElements)),
              moment_bound(tensor, slot));
          EXPECT_LE(distance(weights_of(engine, tensor), weights_of(engine, reference), initial_weights()),
                    distance_bound(tensor));
        }
  }
}

TEST(Recipes, EveryPairOfWeightAndMomentFormatFollowsFp32) {
  constexpr std::int64_t kSmall = 1000;
  const Engine engine;
  for (const char* rule : {"sgd", "adamw"}) {
    Optimizer optimizer(rule);
    set_up(optimizer, engine);
    const std::vector<float> want = weights_of(engine, trained(optimizer, engine, "fp32", kSmall));
    for (int w = 0; w < scruple_format_count(); w += kWeightStride)
      for (int m = 0; m < scruple_format_count(); ++m) {
        const scruple_format *weight = scruple_format_at(w), *moment = scruple_format_at(m);
        if (!can_hold(weight, SCRUPLE_ROLE_WEIGHT, SCRUPLE_NEAREST)) continue;
        Tensor tensor(optimizer, kSmall, "fp32", engine);
        tensor.use(SCRUPLE_WEIGHT, weight);
        bool any = false;
        for (const SlotAt& slot : slots_of(tensor.row))
          if (can_hold(moment, slot.role, SCRUPLE_NEAREST)) tensor.use(slot.array, moment), any = true;
        if (!any) continue;
        train(engine, tensor);
        EXPECT_LE(distance(weights_of(engine, tensor), want, initial_weights()), distance_bound(tensor))
            << rule << " " << info_of(weight).name << " with " << info_of(moment).name;
      }
  }
}

TEST(Recipes, EveryRecipeOfEveryRuleItServesFollowsFp32) {
  const Engine engine(2);
  for (const Rule& rule : rules()) {
    Optimizer optimizer(rule.name);
    set_up(optimizer, engine);
    const std::vector<float> want = weights_of(engine, trained(optimizer, engine, "fp32"));
    for (const scruple_recipe_info& recipe : recipes()) {
      if (!serves(optimizer, kElements, recipe.name)) continue;
      const Tensor tensor = trained(optimizer, engine, recipe.name);
      EXPECT_LE(distance(weights_of(engine, tensor), want, initial_weights()), distance_bound(tensor))
          << rule.name << " " << recipe.name;
    }
  }
}

// The master copy and the 16 extra bits lose nothing: the wide weight is the fp32 recipe's bit for bit, and
// the visible half is it, rounded.
TEST(Recipes, MixedAndSplitKeepTheWeightsOfFp32ToTheBit) {
  const Engine engine;
  for (const Rule& rule : rules()) {
    Optimizer optimizer(rule.name);
    set_up(optimizer, engine);
    const Tensor reference = trained(optimizer, engine, "fp32");
    for (const char* recipe : {"mixed", "split"}) {
      const Tensor tensor = trained(optimizer, engine, recipe);
      EXPECT_TRUE(same_bytes(weights_of(engine, tensor), weights_of(engine, reference)))
          << rule.name << " " << recipe;
      for (int a = SCRUPLE_SLOT; a < SCRUPLE_GRADIENT; ++a)
        EXPECT_EQ(tensor.bytes(a), reference.bytes(a)) << rule.name << " " << recipe;
      const Bytes visible = tensor.codes(SCRUPLE_WEIGHT).bytes();
      ASSERT_EQ(visible.size(), 2 * kElements);
      const std::vector<float> wide = weights_of(engine, reference);
      for (std::size_t i = 0; i < kElements; ++i) {
        const float half =
            float_from(static_cast<std::uint32_t>(visible[2 * i] | visible[2 * i + 1] << 8) << 16);
        ASSERT_LE(std::fabs(half - wide[i]), std::fabs(wide[i]) * 0x1p-8f) << rule.name << " " << recipe;
      }
    }
  }
}

// ---- What is refused, and sizes ----

TEST(Recipes, LpmmRefusesRulesWithASecondMomentAndListsThoseItServes) {
  for (const Rule& rule : rules()) {
    bool nonneg = false;
    for (const scruple_slot_info& slot : rule.slots) nonneg = nonneg || slot.role == SCRUPLE_ROLE_NONNEG;
    const Optimizer optimizer(rule.name);
    for (const std::int64_t size : {10, 100000}) {
      scruple_tensor row = row_of(optimizer, size);
      const scruple_tensor before = row;
      const scruple_status status = scruple_tensor_use(&row, "lpmm");
      if (!nonneg) {
        CHECK_OK(status);
        continue;
      }
      expect_refused(status, SCRUPLE_UNSUPPORTED, {"lpmm", rule.name, "sgd, sgdw, lion"});
      EXPECT_EQ(std::memcmp(&row, &before, sizeof row), 0) << rule.name << ": the tensor was changed";
    }
  }
}

TEST(Recipes, LpmmKeepsSmallTensorsInFp32) {
  const Optimizer optimizer("sgd");
  for (const std::int64_t size : {1, 4096, 4097}) {
    const scruple_tensor row = row_of(optimizer, size, "lpmm");
    EXPECT_STREQ(info_of(row.arrays[SCRUPLE_WEIGHT].format).name, size <= 4096 ? "fp32" : "int10") << size;
    EXPECT_STREQ(info_of(row.arrays[SCRUPLE_SLOT].format).name, size <= 4096 ? "fp32" : "linear8") << size;
    EXPECT_STREQ(info_of(row.arrays[SCRUPLE_GRADIENT].format).name, size <= 4096 ? "fp32" : "int8") << size;
  }
}

TEST(Recipes, AFormatInTheWrongRoleIsRefusedWithTheFormatsThatFit) {
  const Engine engine;
  const Optimizer optimizer("adamw");
  const std::pair<int, std::uint32_t> roles[] = {{SCRUPLE_WEIGHT, SCRUPLE_ROLE_WEIGHT},
                                                 {SCRUPLE_SLOT, SCRUPLE_ROLE_SIGNED},
                                                 {SCRUPLE_SLOT + 1, SCRUPLE_ROLE_NONNEG},
                                                 {SCRUPLE_GRADIENT, SCRUPLE_ROLE_GRADIENT}};
  for (const auto& [array, role] : roles) {
    std::string fitting;
    for (const scruple_format* format : formats())
      if ((info_of(format).roles & role) != 0)
        fitting += (fitting.empty() ? "" : ", ") + std::string(info_of(format).name);
    for (const scruple_format* format : formats()) {
      const scruple_format_info info = info_of(format);
      if ((info.roles & role) != 0) continue;
      Tensor tensor(optimizer, 100, "fp32", engine);
      tensor.use(array, format);
      const Bytes before = all_planes(tensor);
      EXPECT_UNSUPPORTED(scruple_step(engine, &tensor.row, 1, nullptr), std::string("format ") + info.name,
                         fitting);
      EXPECT_EQ(all_planes(tensor), before);
    }
  }
}

// Bytes a parameter as promised, gradients stored, in a tensor of a million.
TEST(Recipes, BytesPerParameter) {
  struct Row {
    const char *rule, *recipe;
    double bytes;
  };
  constexpr Row kRows[] = {
      {"adamw", "fp32", 16},     {"adamw", "mixed", 16},      {"adamw", "split", 14},
      {"adamw", "flash", 7.125}, {"adamw", "scruple", 7.125}, {"adamw", "scant", 6.71875},
      {"sgd", "fp32", 12},       {"lion", "scruple", 6.0625}, {"sgd", "lpmm", 3.4375}};
  constexpr std::int64_t kMillion = std::int64_t{1} << 20;
  for (const Row& row : kRows) {
    Optimizer optimizer(row.rule);
    if (std::strcmp(row.rule, "sgd") == 0) optimizer.set("momentum", 0.9);
    const scruple_tensor t = row_of(optimizer, kMillion, row.recipe);
    std::int64_t total = 0;
    for (int a = 0; a < SCRUPLE_ARRAYS; ++a) {
      std::int64_t codes = 0, aux = 0;
      if (!is_used(t, a)) continue;
      CHECK_OK(scruple_format_bytes(t.arrays[a].format, t.size, &codes, &aux));
      total += codes + aux;
    }
    EXPECT_DOUBLE_EQ(static_cast<double>(total) / static_cast<double>(kMillion), row.bytes)
        << row.rule << " " << row.recipe;
  }
}

}  // namespace
}  // namespace scruple_tests
