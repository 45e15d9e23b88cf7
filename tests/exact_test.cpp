// Moments of which small differences count, and steps in parts: exact in every recipe, or refused before anything changes.
#include <algorithm>
#include <map>
#include <memory>
#include <set>

#include "tests/reference.h"
#include "tests/support.h"

namespace scruple_tests {
namespace {

constexpr std::size_t kElements = 4224;  // above every recipe's `small`, a multiple of every group

// ---- Moments that must be exact -------------------------------------------------------------------

// Formats that hold the slot's kind of moment but not one of which small differences count are refused, and
// nothing is written.
void expect_low_bits_refused(const Engine& engine, const Optimizer& optimizer) {
  int refused = 0;
  const Rule rule = rule_of(optimizer);
  for (const SlotAt& slot : slots_of(Tensor(optimizer, 256, "scruple", engine).row)) {
    if (slot.role != SCRUPLE_ROLE_EXACT) continue;
    const int role = rule.slots[static_cast<std::size_t>(slot.array - SCRUPLE_SLOT)].role;
    for (const scruple_format* format : formats()) {
      const std::uint32_t roles = info_of(format).roles;
      if ((roles & static_cast<std::uint32_t>(role)) == 0 || (roles & SCRUPLE_ROLE_EXACT) != 0) continue;
      Tensor tensor(optimizer, 256, "scruple", engine);
      tensor.use(slot.array, format);
      const Bytes before = all_planes(tensor);
      EXPECT_UNSUPPORTED(scruple_step(engine, &tensor.row, 1, nullptr), "fp32", slot.name);
      EXPECT_EQ(all_planes(tensor), before) << slot.name;
      ++refused;
    }
  }
  EXPECT_GE(refused, 10) << "two slots, and at least five formats";
}

struct NamedRow {
  std::string recipe;
  Tensor tensor;
};

// The optimizer in every recipe that serves it, its own gradient format included; fp32 first.
std::vector<NamedRow> in_every_recipe(const Optimizer& optimizer, const Engine& engine) {
  std::vector<NamedRow> rows;
  for (const scruple_recipe_info& recipe : recipes())
    if (serves(optimizer, kElements, recipe.name))
      rows.push_back(
          {recipe.name, Tensor(optimizer, static_cast<std::int64_t>(kElements), recipe.name, engine)});
  EXPECT_EQ(rows.at(0).recipe, "fp32");
  return rows;
}

// visit(rule, rows) for every rule that has this flag, with it on, in every recipe; low-bit formats are refused. How many
// rules there were.
int for_exact(const Engine& engine, const char* flag, const Hypers& more, const auto& visit) {
  int tested = 0;
  for (const Rule& rule : rules()) {
    if (!rule.has(flag)) continue;
    Optimizer optimizer(rule.name, more);
    optimizer.set(flag, 1);
    expect_low_bits_refused(engine, optimizer);
    std::vector<NamedRow> rows = in_every_recipe(optimizer, engine);
    EXPECT_GE(rows.size(), 6u) << rule.name;
    visit(rule.name, rows);
    ++tested;
  }
  return tested;
}

// A maximum of noisy values ratchets upwards: of this one, in every recipe, nothing is noisy.
TEST(Exact, AmsgradKeepsItsMaximumInEveryRecipe) {
  const Engine engine;
  const int tested =
      for_exact(engine, "amsgrad", {}, [&](const std::string& rule, std::vector<NamedRow>& rows) {
        Random random(11);
        std::vector<double> scales(kElements);
        for (double& s : scales) s = 1e-3 * random.lognormal(1);
        std::vector<float> gradient(kElements);
        for (std::int64_t t = 1; t <= 3000; ++t) {
          for (std::size_t i = 0; i < kElements; ++i)
            gradient[i] = static_cast<float>(scales[i] * random.normal());
          for (NamedRow& row : rows) {
            row.tensor.row.step = t;
            row.tensor.encode(engine, SCRUPLE_GRADIENT, gradient);
            step(engine, row.tensor);
          }
        }
        const int largest = SCRUPLE_SLOT + 2;
        const std::vector<float> exact = rows[0].tensor.decode(engine, largest);
        for (const NamedRow& row : rows) {
          const std::vector<float> got = row.tensor.decode(engine, largest);
          double mean = 0, mean_root = 0;
          for (std::size_t i = 0; i < kElements; ++i) {
            const double ratio = static_cast<double>(got[i]) / static_cast<double>(exact[i]);
            mean += ratio / static_cast<double>(kElements);
            mean_root += std::sqrt(ratio) / static_cast<double>(kElements);
          }
          record(rule + " " + row.recipe + " maximum", mean);
          EXPECT_NEAR(mean, 1, 0.05) << rule << " " << row.recipe;
          EXPECT_NEAR(mean_root, 1, 0.05) << rule << " " << row.recipe;
        }
      });
  EXPECT_EQ(tested, 2) << "adam and adamw";
}

// The square of the mean is 25 times the variance: a low-bit difference of two moments would have nothing left.
TEST(Exact, CenteredStepsAreThoseOfFp32InEveryRecipe) {
  const Engine engine;
  const Hypers lr = {{"lr", 1e-3}};
  const int tested =
      for_exact(engine, "centered", lr, [&](const std::string& rule, std::vector<NamedRow>& rows) {
        std::vector<std::pair<double, double>> range(rows.size(), {1e300, 0});  // of step / fp32's step
        Random random(12);
        std::vector<float> gradient(kElements), exact;
        for (std::int64_t t = 1; t <= 1000; ++t) {
          for (float& g : gradient) g = static_cast<float>(1 + 0.2 * random.normal());
          for (std::size_t r = 0; r < rows.size(); ++r) {
            Tensor& tensor = rows[r].tensor;
            tensor.row.step = t;
            tensor.encode(engine, SCRUPLE_WEIGHT, std::vector<float>(kElements));
            tensor.encode(engine, SCRUPLE_GRADIENT, gradient);
            step(engine, tensor);
            const std::vector<float> got = tensor.decode(engine, SCRUPLE_WEIGHT);
            if (r == 0) exact = got;
            for (std::size_t i = 0; i < kElements; ++i) {
              const double ratio = static_cast<double>(got[i]) / static_cast<double>(exact[i]);
              range[r] = {std::min(range[r].first, ratio), std::max(range[r].second, ratio)};
            }
          }
        }
        for (std::size_t r = 0; r < rows.size(); ++r) {
          record(rule + " " + rows[r].recipe + " least", range[r].first);
          record(rule + " " + rows[r].recipe + " most", range[r].second);
          EXPECT_GE(range[r].first, 0.5) << rule << " " << rows[r].recipe;
          EXPECT_LE(range[r].second, 2.0) << rule << " " << rows[r].recipe;
        }
      });
  EXPECT_EQ(tested, 1) << "rmsprop";
}

// ---- A step in parts --------------------------------------------------------------------------------

// SGD: the mean gradient's step (reference.h). AdamA (2305.19982): both moments decay once, then take
// (1 - b1) g_i / N and (1 - b2) (g_i / N)^2 of every part.
struct Parts {
  double first = 0, second = 0;  // the sums of g_i / N and of their squares
};
void exact_step(const std::string& rule, reference::Element& e, const Parts& g, const reference::Hypers& h) {
  if (rule != "adamw") return reference::find(rule)(e, g.first, h);
  const auto t = static_cast<double>(++e.t);
  const double b1 = h.at("beta1"), b2 = h.at("beta2");
  double &m = e.slots["exp_avg"], &v = e.slots["exp_avg_sq"];
  m = b1 * m + (1 - b1) * g.first;
  v = b2 * v + (1 - b2) * g.second;
  const double m_hat = m / (1 - std::pow(b1, t)), v_hat = v / (1 - std::pow(b2, t));
  e.w -= h.at("lr") * (h.at("weight_decay") * e.w + m_hat / (std::sqrt(v_hat) + h.at("eps")));
}

std::unique_ptr<Optimizer> accumulating(const std::string& rule) {
  auto optimizer = std::make_unique<Optimizer>(rule);
  if (rule == "sgd") optimizer->set("momentum", 0.9);
  return optimizer;
}

StepOptions part_of(int part, int parts) {
  return {.multiplier = static_cast<float>(1.0 / parts), .part = part, .parts = parts};
}

bool all_slots_fp32(const Tensor& tensor) {
  for (const SlotAt& slot : slots_of(tensor.row))
    if (!is_fp32(tensor.row.arrays[slot.array])) return false;
  return true;
}

// The worst relative L2 error of the weight's way and of the slots after 20 steps of `parts` parts, by recipe.
std::map<std::string, double> parts_errors(const std::string& rule, int parts) {
  const Engine engine;
  const auto optimizer = accumulating(rule);
  std::vector<NamedRow> rows = in_every_recipe(*optimizer, engine);
  std::erase_if(rows, [](const NamedRow& row) { return !all_slots_fp32(row.tensor); });
  for (NamedRow& row : rows) {
    row.tensor.use(SCRUPLE_GRADIENT, "fp32");
    row.tensor.encode(engine, SCRUPLE_WEIGHT, std::vector<float>(kElements));
  }
  Random random(13);
  std::vector<reference::Element> exact(kElements);
  const reference::Hypers hypers = reference::hypers_of(*optimizer);
  for (std::int64_t t = 1; t <= 20; ++t) {
    std::vector<Parts> sums(kElements);
    for (int part = 0; part < parts; ++part) {
      const std::vector<float> gradient = random.normals(kElements, 1e-3);
      for (std::size_t i = 0; i < kElements; ++i) {
        const double g = static_cast<double>(gradient[i]) / parts;
        sums[i].first += g;
        sums[i].second += g * g;
      }
      const StepOptions options = part_of(part, parts);
      for (NamedRow& row : rows) {
        row.tensor.row.step = t;
        row.tensor.encode(engine, SCRUPLE_GRADIENT, gradient);
        CHECK_OK(try_step(engine, {row.tensor.row}, options));
      }
    }
    for (std::size_t i = 0; i < kElements; ++i) exact_step(rule, exact[i], sums[i], hypers);
  }
  std::map<std::string, double> errors;
  for (const NamedRow& row : rows) {
    std::vector<SlotAt> arrays = slots_of(row.tensor.row);
    arrays.push_back({SCRUPLE_WEIGHT, "weight", SCRUPLE_ROLE_WEIGHT});
    for (const SlotAt& array : arrays) {
      std::vector<double> want;
      for (const reference::Element& e : exact)
        want.push_back(array.array == SCRUPLE_WEIGHT ? e.w : e.slots.at(array.name));
      errors[row.recipe] =
          std::max(errors[row.recipe], relative_l2(row.tensor.decode(engine, array.array), want));
    }
  }
  return errors;
}

TEST(Parts, ManyErrNoMoreThanOneWhereMomentsAreFp32) {
  for (const std::string& rule : {std::string("sgd"), std::string("adamw")}) {
    const std::map<std::string, double> one = parts_errors(rule, 1);
    std::set<std::string> accepted;
    for (const auto& [recipe, error] : one) accepted.insert(recipe);
    EXPECT_EQ(accepted, (std::set<std::string>{"fp32", "mixed", "split"})) << rule;
    for (const int parts : {32, 128})
      for (const auto& [recipe, error] : parts_errors(rule, parts)) {
        record(rule + " " + recipe + " " + std::to_string(parts) + " per_million", 1e6 * error);
        EXPECT_LE(error, std::max(1.2 * one.at(recipe), 1e-5)) << rule << " " << recipe << " x" << parts;
      }
  }
}

TEST(Parts, AreRefusedBeforeAnythingChangesWhereMomentsAreNot) {
  const Engine engine;
  for (const std::string& rule : {std::string("sgd"), std::string("adamw")}) {
    const auto optimizer = accumulating(rule);
    std::set<std::string> refused;
    for (NamedRow& row : in_every_recipe(*optimizer, engine)) {
      Tensor& tensor = row.tensor;
      if (all_slots_fp32(tensor)) continue;
      tensor.encode(engine, SCRUPLE_WEIGHT, Random(1).normals(kElements));
      tensor.encode(engine, SCRUPLE_GRADIENT, Random(2).normals(kElements));
      step(engine, tensor);  // a state worth keeping
      tensor.row.step = 2;
      const Bytes before = all_planes(tensor);
      for (const int parts : {2, 32, 128})
        for (const int part : {0, 1, parts - 1}) {
          const StepOptions options = part_of(part, parts);
          EXPECT_UNSUPPORTED(try_step(engine, {tensor.row}, options), "fp32", "compressed");
          ASSERT_EQ(all_planes(tensor), before) << rule << " " << row.recipe;
        }
      refused.insert(row.recipe);
    }
    std::set<std::string> low_bit = {"flash", "scruple", "scant"};
    if (rule == "sgd") low_bit.insert("lpmm");
    EXPECT_EQ(refused, low_bit) << rule;
  }
}

}  // namespace
}  // namespace scruple_tests
