// What a state kept in few bits must do over thousands of steps: follow each element's own history, be right
// on average where it is divided by, and move weights by steps however small; and what it cannot do is
// refused. Over 5,000 steps at the defaults of every optimizer, with the fp32 recipe beside it as the exact
// one (itself held to tests/reference.h). What was measured is in the test's properties (--gtest_output=xml).
#include <algorithm>
#include <cctype>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <set>
#include <span>

#include "tests/reference.h"
#include "tests/support.h"

namespace scruple_tests {
namespace {

constexpr std::int64_t kSteps = 5000, kShift = 1500, kFirstLook = 3500, kBetweenLooks = 250;
constexpr std::size_t kElements = 4224;  // above every recipe's `small`, a multiple of every group
constexpr std::size_t kSampled = 128;    // every so many elements have a double beside them

// A third of the elements, spread over every group, changes its gradient's scale by `factor` at step kShift.
struct Scenario {
  const char* name;
  double factor;
};
constexpr Scenario kAll[] = {{"stationary", 1}, {"third_x5", 5}, {"third_x0.2", 0.2}};
constexpr std::size_t kLeftOut = kSlowBuild ? 2 : 0;  // sanitizers take the last alone
constexpr std::span<const Scenario> kScenarios = std::span(kAll).subspan(kLeftOut);
constexpr int kRuns = static_cast<int>(kScenarios.size());

// A property's name may have letters, digits and underscores.
void record(std::string name, double value) {
  for (char& c : name)
    if (std::isalnum(static_cast<unsigned char>(c)) == 0) c = '_';
  testing::Test::RecordProperty(name, std::to_string(value));
}

std::vector<scruple_recipe_info> recipes() {
  std::vector<scruple_recipe_info> all(static_cast<std::size_t>(scruple_recipe_count()));
  for (std::size_t i = 0; i < all.size(); ++i) CHECK_OK(scruple_recipe_at(static_cast<int>(i), &all[i]));
  return all;
}

std::vector<std::string> rules() {
  std::vector<std::string> names;
  for (int i = 0; i < scruple_rule_count(); ++i) {
    scruple_rule_info info{};
    CHECK_OK(scruple_rule_at(i, &info));
    names.emplace_back(info.name);
  }
  return names;
}

bool has_hyper(const scruple_optimizer* optimizer, const char* name) {
  double value = 0;
  return scruple_optimizer_get(optimizer, name, &value) == SCRUPLE_OK;
}

reference::Hypers hypers_of(const scruple_optimizer* optimizer) {
  reference::Hypers hypers;
  const int rule = scruple_optimizer_rule(optimizer);
  scruple_rule_info info{};
  CHECK_OK(scruple_rule_at(rule, &info));
  for (int i = 0; i < info.hypers; ++i) {
    scruple_hyper_info hyper{};
    CHECK_OK(scruple_rule_hyper(rule, i, &hyper));
    CHECK_OK(scruple_optimizer_get(optimizer, hyper.name, &hypers[hyper.name]));
  }
  return hypers;
}

bool serves(const scruple_optimizer* optimizer, const char* recipe) {
  scruple_tensor row{};
  row.optimizer = optimizer;
  row.size = static_cast<std::int64_t>(kElements);
  return scruple_tensor_use(&row, recipe) == SCRUPLE_OK;
}

struct SlotAt {
  int array;
  std::string name;
  int role;  // in a step
};
std::vector<SlotAt> slots_of(const scruple_tensor& row) {
  std::vector<SlotAt> slots;
  for (int a = SCRUPLE_SLOT; a < SCRUPLE_GRADIENT; ++a) {
    const char* name = nullptr;
    int role = 0, used = 0;
    if (scruple_tensor_array(&row, a, &name, &role, &used) == SCRUPLE_OK && used != 0)
      slots.push_back({a, name, role});
  }
  return slots;
}

bool is_fp32(const scruple_array& array) { return array.format == scruple_format_find("fp32"); }

// ---- One long run of every optimizer in every recipe --------------------------------------------

// How a row differs from its recipe. All rows read one gradient in fp32: what is looked at is the state.
enum class Use {
  whole,    // not at all
  nearest,  // non-negative moments are rounded to nearest
  roots     // all but the non-negative moments is fp32: steps are to fp32's as roots are to each other
};

struct Row {
  std::string rule, recipe;
  Use use;
  Tensor tensor;
  std::vector<std::array<std::vector<float>, SCRUPLE_ARRAYS>> looks;  // arrays at each look, decoded
};

class Run {
 public:
  explicit Run(const Scenario& c) : factor_(c.factor), gradient_(kElements), scales_(kElements) {
    for (double& s : scales_) s = 1e-3 * random_.lognormal(1);
    for (const std::string& rule : rules()) add_rule(rule);
    for (Row& row : rows_) {
      row.tensor.row.id = static_cast<std::uint32_t>(table_.size());
      row.tensor.row.arrays[SCRUPLE_GRADIENT] = shared_gradient();
      table_.push_back(row.tensor.row);
    }
    for (std::int64_t t = 1; t <= kSteps; ++t) take(t);
  }

  // nullptr where the recipe does not serve the rule.
  const Row* find(const std::string& rule, const std::string& recipe, Use use = Use::whole) const {
    for (const Row& row : rows_)
      if (row.rule == rule && row.recipe == recipe && row.use == use) return &row;
    return nullptr;
  }
  const std::vector<Row>& rows() const { return rows_; }
  const Optimizer& optimizer(const std::string& rule) const { return *optimizers_.at(rule); }
  // By the rule's name, one for each sampled element.
  const std::map<std::string, std::vector<reference::Element>>& sampled() const { return sampled_; }

 private:
  void add_rule(const std::string& rule) {
    auto& optimizer = optimizers_[rule] = std::make_unique<Optimizer>(rule.c_str());
    Tensor probe(*optimizer, static_cast<std::int64_t>(kElements));
    if (slots_of(probe.row).empty() && has_hyper(*optimizer, "momentum")) optimizer->set("momentum", 0.9);
    hypers_[rule] = hypers_of(*optimizer);
    sampled_[rule].resize((kElements + kSampled - 1) / kSampled);
    for (const scruple_recipe_info& recipe : recipes()) {
      EXPECT_GT(static_cast<std::int64_t>(kElements), recipe.small) << recipe.name;
      if (!serves(*optimizer, recipe.name)) continue;
      for (const Use use : {Use::whole, Use::nearest, Use::roots}) add_row(rule, recipe.name, use);
    }
  }

  void add_row(const std::string& rule, const char* recipe, Use use) {
    Tensor tensor(*optimizers_[rule], static_cast<std::int64_t>(kElements), recipe, engine_);
    bool differs = use == Use::whole;
    for (const SlotAt& slot : slots_of(tensor.row)) {
      const scruple_array array = tensor.row.arrays[slot.array];
      const bool low_bit = slot.role == SCRUPLE_ROLE_NONNEG && !is_fp32(array);
      if (use == Use::nearest && low_bit && array.rounding != SCRUPLE_NEAREST)
        tensor.use(slot.array, array.format, SCRUPLE_NEAREST), differs = true;
      if (use == Use::roots && low_bit) differs = true;
      if (use == Use::roots && slot.role != SCRUPLE_ROLE_NONNEG) tensor.use(slot.array, "fp32");
    }
    if (!differs) return;
    if (use == Use::roots) tensor.use(SCRUPLE_WEIGHT, "fp32");
    CHECK_OK(scruple_tensor_reset(engine_, &tensor.row));
    rows_.push_back({rule, recipe, use, std::move(tensor), {}});
  }

  scruple_array shared_gradient() {
    scruple_array array{};
    array.format = scruple_format_find("fp32");
    array.codes = gradient_.data();
    return array;
  }

  void take(std::int64_t t) {
    for (std::size_t i = 0; i < kElements; ++i) {
      const double scale = t > kShift && i % 3 == 0 ? factor_ * scales_[i] : scales_[i];
      gradient_[i] = static_cast<float>(scale * random_.normal());
    }
    const bool look = t >= kFirstLook && (t - kFirstLook) % kBetweenLooks == 0;
    if (look) clear_weights();
    for (scruple_tensor& row : table_) row.step = t;
    CHECK_OK(scruple_step(engine_, table_.data(), static_cast<std::int64_t>(table_.size()), nullptr));
    for (auto& [rule, elements] : sampled_)
      for (std::size_t i = 0; i < elements.size(); ++i)
        reference::find(rule)(elements[i], static_cast<double>(gradient_[i * kSampled]), hypers_[rule]);
    if (!look) return;
    for (Row& row : rows_) {
      auto& arrays = row.looks.emplace_back();
      for (const SlotAt& slot : slots_of(row.tensor.row))
        arrays[static_cast<std::size_t>(slot.array)] = row.tensor.decode(engine_, slot.array);
      arrays[SCRUPLE_WEIGHT] = row.tensor.decode(engine_, SCRUPLE_WEIGHT);
    }
  }

  // From zero a step is what the weight becomes.
  void clear_weights() {
    for (Row& row : rows_) {
      Plane& codes = row.tensor.codes(SCRUPLE_WEIGHT);
      if (is_fp32(row.tensor.row.arrays[SCRUPLE_WEIGHT])) std::fill_n(codes.data(), codes.size, 0);
    }
  }

  const Engine engine_;
  const double factor_;
  Random random_{7};
  std::vector<float> gradient_;
  std::vector<double> scales_;
  std::map<std::string, std::unique_ptr<Optimizer>> optimizers_;
  std::map<std::string, reference::Hypers> hypers_;
  std::map<std::string, std::vector<reference::Element>> sampled_;
  std::vector<Row> rows_;
  std::vector<scruple_tensor> table_;
};

// Each scenario is run once, when a test first asks for it.
const Run& run_of(const Scenario& c) {
  static std::map<std::string, std::unique_ptr<Run>> runs;
  std::unique_ptr<Run>& run = runs[c.name];
  if (run == nullptr) run = std::make_unique<Run>(c);
  return *run;
}

const std::vector<float>& at_look(const Row& row, std::size_t look, int array) {
  return row.looks[look][static_cast<std::size_t>(array)];
}

// visit(value, exact, look, element) over the looks of an array, the fp32 recipe's row being exact.
void for_looks(const Run& run, const Row& row, int array, const auto& visit) {
  const Row& exact = *run.find(row.rule, "fp32");
  for (std::size_t k = 0; k < row.looks.size(); ++k) {
    const std::vector<float>&got = at_look(row, k, array), &want = at_look(exact, k, array);
    for (std::size_t i = 0; i < got.size(); ++i)
      visit(static_cast<double>(got[i]), static_cast<double>(want[i]), k, i);
  }
}

std::string name_of(const Scenario& c, const Row& row, const std::string& what) {
  return std::string(c.name) + " " + row.rule + " " + row.recipe + " " + what;
}

// fp32's own rounding over 5,000 steps is what remains.
TEST(Following, TheFp32RecipeIsTheReferenceInDouble) {
  for (const Scenario& c : kScenarios)
    for (const auto& [rule, elements] : run_of(c).sampled()) {
      const Row& row = *run_of(c).find(rule, "fp32");
      for (const SlotAt& slot : slots_of(row.tensor.row)) {
        const std::vector<float>& last = at_look(row, row.looks.size() - 1, slot.array);
        double error = 0, square = 0;
        for (std::size_t i = 0; i < elements.size(); ++i) {
          const double want = elements[i].slots.at(slot.name);
          error += std::pow(static_cast<double>(last[i * kSampled]) - want, 2);
          square += want * want;
        }
        EXPECT_GT(square, 0);
        EXPECT_LE(std::sqrt(error / square), 2e-5) << name_of(c, row, slot.name);
      }
    }
}

// ---- Non-negative moments follow each element -----------------------------------------------------

// Root mean square of ln(sqrt(v) / exact) over the elements, at each look.
std::vector<double> log_errors(const Run& run, const Row& row, int array) {
  std::vector<double> errors(row.looks.size());
  for_looks(run, row, array, [&](double v, double exact, std::size_t look, std::size_t) {
    const double error = 0.5 * std::log(v / exact);
    errors[look] += error * error / static_cast<double>(kElements);
  });
  for (double& e : errors) e = std::sqrt(e);
  return errors;
}

TEST(Following, SecondMomentsOfScrupleFollowEachElement) {
  int looked_at = 0;
  for (const Scenario& c : kScenarios)
    for (const Row& row : run_of(c).rows())
      for (const SlotAt& slot : slots_of(row.tensor.row)) {
        if (slot.role != SCRUPLE_ROLE_NONNEG || row.use != Use::whole) continue;
        const std::vector<double> errors = log_errors(run_of(c), row, slot.array);
        const double worst = *std::max_element(errors.begin(), errors.end());
        record(name_of(c, row, slot.name + " rms_ln"), errors.back());
        if (row.recipe != "scruple") continue;
        EXPECT_LE(worst, 0.12) << name_of(c, row, slot.name) << ", at the end " << errors.back();
        ++looked_at;
      }
  EXPECT_GE(looked_at, kRuns * 4) << "adam, adamw, adagrad and rmsprop have one each";
}

TEST(Following, PowerNearestRoundingStandsStillInTheSameRun) {
  for (const Scenario& c : kScenarios)
    for (const Row& row : run_of(c).rows()) {
      if (row.use != Use::nearest || row.recipe != "scruple") continue;
      for (const SlotAt& slot : slots_of(row.tensor.row)) {
        if (slot.role != SCRUPLE_ROLE_NONNEG) continue;
        const double error = log_errors(run_of(c), row, slot.array).back();
        record(name_of(c, row, slot.name + " nearest rms_ln"), error);
        if (c.factor == 1 || !row.rule.starts_with("adam")) continue;
        EXPECT_GT(error, 0.3) << name_of(c, row, slot.name);
      }
    }
}

// ---- Signed moments ---------------------------------------------------------------------------

// What one step keeps of a slot where the gradient is zero: beta.
double kept(const Run& run, const std::string& rule, const std::string& slot) {
  reference::Element element;
  element.t = 1000;
  element.slots[slot] = 1;
  reference::find(rule)(element, 0, hypers_of(run.optimizer(rule)));
  return element.slots[slot];
}

// The noise of an average whose every write is rounded. A format's bound is half a gap between codes at x:
//   gap(x) = 2 (relative |x| + group absmax + absolute); of companded8, 1/16 (|x| + absmax / 247).
// Between two codes a gap apart, x anywhere with the same likelihood, stochastic rounding errs by a variance
// of gap^2 / 6 (the mean of p (1 - p) gap^2) and nearest by gap^2 / 12. The next steps keep beta of the
// error, so errors of independent writes add up to gap^2 / 6 / (1 - beta^2): of companded8 at beta 0.9 at
// most 5.9 % of the value, at Lion's 0.99 18 %. Less in truth: the gap stays while x grows to twice itself.
std::vector<double> noise_of(const std::vector<float>& exact, const scruple_array& array, double beta) {
  const scruple_format_info info = info_of(array.format);
  const double share = (array.rounding == SCRUPLE_STOCHASTIC ? 1.0 / 6 : 1.0 / 12) / (1 - beta * beta);
  const auto group = static_cast<std::size_t>(info.group_size);
  std::vector<double> noise(exact.size());
  for (std::size_t first = 0; first < exact.size(); first += group) {
    const std::size_t end = std::min(first + group, exact.size());
    double absmax = 0;
    for (std::size_t i = first; i < end; ++i)
      absmax = std::max(absmax, std::fabs(static_cast<double>(exact[i])));
    for (std::size_t i = first; i < end; ++i) {
      const double x = std::fabs(static_cast<double>(exact[i]));
      const scruple_bound& b = info.bound;
      noise[i] = 2 * (b.relative * x + b.group * absmax + b.absolute) * std::sqrt(share);
    }
  }
  return noise;
}

struct Deviation {
  double error = 0, noise = 0;          // root mean squares, relative to that of the exact moment
  double mean = 0, standard_error = 0;  // of (m - exact) sign(exact) in units of each element's noise
  double count = 0, exact = 0, square = 0;
};

Deviation deviation(const Run& run, const Row& row, const SlotAt& slot) {
  Deviation d;
  std::vector<std::vector<double>> noise;
  for (std::size_t k = 0; k < row.looks.size(); ++k)
    noise.push_back(noise_of(at_look(*run.find(row.rule, "fp32"), k, slot.array),
                             row.tensor.row.arrays[slot.array], kept(run, row.rule, slot.name)));
  for_looks(run, row, slot.array, [&](double m, double exact, std::size_t k, std::size_t i) {
    const double outward = (m - exact) * (exact < 0 ? -1 : 1) / std::max(noise[k][i], 1e-300);
    d.error += (m - exact) * (m - exact);
    d.noise += noise[k][i] * noise[k][i];
    d.exact += exact * exact;
    d.mean += outward;
    d.square += outward * outward;
    d.count += 1;
  });
  d.error = std::sqrt(d.error / d.exact);
  d.noise = std::sqrt(d.noise / d.exact);
  d.mean /= d.count;
  d.standard_error = std::sqrt((d.square / d.count - d.mean * d.mean) / d.count);
  return d;
}

TEST(Following, SignedMomentsStayWithinTheNoiseOfTheirFormat) {
  int looked_at = 0;
  for (const Scenario& c : kScenarios)
    for (const Row& row : run_of(c).rows()) {
      if (row.use != Use::whole) continue;
      for (const SlotAt& slot : slots_of(row.tensor.row)) {
        if (slot.role != SCRUPLE_ROLE_SIGNED) continue;
        const Deviation d = deviation(run_of(c), row, slot);
        const std::string name = name_of(c, row, slot.name);
        record(name + " error", d.error);
        record(name + " noise", d.noise);
        // 5 %: that is how well so many elements tell their variance.
        EXPECT_LE(d.error, 1.05 * d.noise + 1e-6) << name;
        looked_at += is_fp32(row.tensor.row.arrays[slot.array]) ? 0 : 1;
      }
    }
  EXPECT_GE(looked_at, kRuns * 5) << "sgd, sgdw, adam, adamw and lion have one each";
}

TEST(Following, StochasticSignedMomentsAreUnbiased) {
  for (const Scenario& c : kScenarios)
    for (const Row& row : run_of(c).rows()) {
      if (row.use != Use::whole) continue;
      for (const SlotAt& slot : slots_of(row.tensor.row)) {
        const bool stochastic = row.tensor.row.arrays[slot.array].rounding == SCRUPLE_STOCHASTIC;
        if (slot.role != SCRUPLE_ROLE_SIGNED || !stochastic) continue;
        const Deviation d = deviation(run_of(c), row, slot);
        const std::string name = name_of(c, row, slot.name);
        record(name + " bias", d.mean);
        record(name + " bias_in_standard_errors", d.mean / d.standard_error);
        EXPECT_LE(std::fabs(d.mean), 5 * d.standard_error) << name << ", in units of the noise";
        EXPECT_LT(d.standard_error, 0.02) << name << ": too few elements to say anything";
      }
    }
}

// ---- Steps ------------------------------------------------------------------------------------

struct Ratio {
  double mean = 0, below = 0;  // `below`: the share under the limit
};

// |step| over fp32's, of the last step. Both rows have one first moment in fp32, so that this is the ratio of their
// denominators.
Ratio step_ratio(const Run& run, const Row& row, double limit) {
  Ratio r;
  double count = 0;
  for_looks(run, row, SCRUPLE_WEIGHT, [&](double step, double exact, std::size_t look, std::size_t) {
    if (exact == 0 || look + 1 != row.looks.size()) return;
    const double ratio = step / exact;
    r.mean += ratio;
    r.below += ratio < limit ? 1 : 0;
    count += 1;
  });
  EXPECT_GT(count, 0.99 * static_cast<double>(kElements));
  return {r.mean / count, r.below / count};
}

// After a shift the elements that shrank still carry what they were off by when they were large: 98 % stay below.
// Adagrad's sum forgets nothing, and its limit of the mean is wider by 1 %.
TEST(Following, StepsAreThoseOfFp32OnAverage) {
  struct Limit {
    double mean, most;  // 99 % of the elements step at most `most` times as far
  };
  const std::map<std::string, Limit> limits = {{"scruple", {0.02, 1.25}}, {"scant", {0.03, 2.0}}};
  int looked_at = 0;
  for (const Scenario& c : kScenarios)
    for (const Row& row : run_of(c).rows()) {
      if (row.use != Use::roots) continue;
      const auto found = limits.find(row.recipe);
      const Limit limit = found == limits.end() ? Limit{0, 2.0} : found->second;
      const Ratio ratio = step_ratio(run_of(c), row, limit.most);
      record(name_of(c, row, "step mean"), ratio.mean);
      record(name_of(c, row, "step below"), ratio.below);
      if (found == limits.end()) continue;
      const bool forgets = row.rule != "adagrad";
      EXPECT_NEAR(ratio.mean, 1, limit.mean + (forgets ? 0 : 0.01))
          << name_of(c, row, "mean of step / fp32's step");
      EXPECT_GE(ratio.below, c.factor == 1 ? 0.99 : 0.98)
          << name_of(c, row, "share of steps below ") << limit.most << " x fp32's";
      ++looked_at;
    }
  EXPECT_GE(looked_at, kRuns * 4 * 2) << "adam, adamw, adagrad and rmsprop, in two recipes";
}

// ---- Moments that must be exact -------------------------------------------------------------------

// Formats that hold the slot's kind of moment but not one of which small differences count are refused, and
// nothing is written.
void expect_low_bits_refused(const Engine& engine, const Optimizer& optimizer) {
  int refused = 0;
  const int rule = scruple_optimizer_rule(optimizer);
  for (const SlotAt& slot : slots_of(Tensor(optimizer, 256, "scruple", engine).row)) {
    if (slot.role != SCRUPLE_ROLE_EXACT) continue;
    scruple_slot_info info{};
    CHECK_OK(scruple_rule_slot(rule, slot.array - SCRUPLE_SLOT, &info));
    for (int f = 0; f < scruple_format_count(); ++f) {
      const std::uint32_t roles = info_of(scruple_format_at(f)).roles;
      if ((roles & static_cast<std::uint32_t>(info.role)) == 0 || (roles & SCRUPLE_ROLE_EXACT) != 0) continue;
      Tensor tensor(optimizer, 256, "scruple", engine);
      tensor.use(slot.array, scruple_format_at(f));
      const Bytes before = all_planes(tensor);
      EXPECT_EQ(scruple_step(engine, &tensor.row, 1, nullptr), SCRUPLE_UNSUPPORTED);
      const std::string message = scruple_last_error();
      for (const std::string& word : {std::string("fp32"), slot.name})
        EXPECT_NE(message.find(word), std::string::npos) << message;
      EXPECT_EQ(all_planes(tensor), before) << message;
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
    if (serves(optimizer, recipe.name))
      rows.push_back(
          {recipe.name, Tensor(optimizer, static_cast<std::int64_t>(kElements), recipe.name, engine)});
  EXPECT_EQ(rows.at(0).recipe, "fp32");
  return rows;
}

// A maximum of noisy values ratchets upwards: of this one, in every recipe, nothing is noisy.
TEST(Exact, AmsgradKeepsItsMaximumInEveryRecipe) {
  const Engine engine;
  int tested = 0;
  for (const std::string& rule : rules()) {
    Optimizer optimizer(rule.c_str());
    if (!has_hyper(optimizer, "amsgrad")) continue;
    optimizer.set("amsgrad", 1);
    ++tested;
    expect_low_bits_refused(engine, optimizer);
    std::vector<NamedRow> rows = in_every_recipe(optimizer, engine);
    EXPECT_GE(rows.size(), 6u) << rule;
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
  }
  EXPECT_EQ(tested, 2) << "adam and adamw";
}

// The square of the mean is 25 times the variance: a low-bit difference of two moments would have nothing left.
TEST(Exact, CenteredStepsAreThoseOfFp32InEveryRecipe) {
  const Engine engine;
  int tested = 0;
  for (const std::string& rule : rules()) {
    Optimizer optimizer(rule.c_str());
    if (!has_hyper(optimizer, "centered")) continue;
    optimizer.set("centered", 1);
    optimizer.set("lr", 1e-3);
    ++tested;
    expect_low_bits_refused(engine, optimizer);
    std::vector<NamedRow> rows = in_every_recipe(optimizer, engine);
    EXPECT_GE(rows.size(), 6u) << rule;
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
  }
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
  auto optimizer = std::make_unique<Optimizer>(rule.c_str());
  if (rule == "sgd") optimizer->set("momentum", 0.9);
  return optimizer;
}

scruple_step_options part_of(int part, int parts) {
  scruple_step_options options = SCRUPLE_STEP_OPTIONS_INIT;
  options.multiplier = static_cast<float>(1.0 / parts);
  options.part = part;
  options.parts = parts;
  return options;
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
  const reference::Hypers hypers = hypers_of(*optimizer);
  for (std::int64_t t = 1; t <= 20; ++t) {
    std::vector<Parts> sums(kElements);
    for (int part = 0; part < parts; ++part) {
      const std::vector<float> gradient = random.normals(kElements, 1e-3);
      for (std::size_t i = 0; i < kElements; ++i) {
        const double g = static_cast<double>(gradient[i]) / parts;
        sums[i].first += g;
        sums[i].second += g * g;
      }
      const scruple_step_options options = part_of(part, parts);
      for (NamedRow& row : rows) {
        row.tensor.row.step = t;
        row.tensor.encode(engine, SCRUPLE_GRADIENT, gradient);
        CHECK_OK(scruple_step(engine, &row.tensor.row, 1, &options));
      }
    }
    for (std::size_t i = 0; i < kElements; ++i) exact_step(rule, exact[i], sums[i], hypers);
  }
  std::map<std::string, double> errors;
  for (const NamedRow& row : rows) {
    std::vector<SlotAt> arrays = slots_of(row.tensor.row);
    arrays.push_back({SCRUPLE_WEIGHT, "weight", SCRUPLE_ROLE_WEIGHT});
    for (const SlotAt& array : arrays) {
      const std::vector<float> got = row.tensor.decode(engine, array.array);
      double error = 0, square = 0;
      for (std::size_t i = 0; i < kElements; ++i) {
        const double want = array.array == SCRUPLE_WEIGHT ? exact[i].w : exact[i].slots.at(array.name);
        error += std::pow(static_cast<double>(got[i]) - want, 2);
        square += want * want;
      }
      errors[row.recipe] = std::max(errors[row.recipe], std::sqrt(error / square));
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
          const scruple_step_options options = part_of(part, parts);
          EXPECT_EQ(scruple_step(engine, &tensor.row, 1, &options), SCRUPLE_UNSUPPORTED) << row.recipe;
          const std::string message = scruple_last_error();
          for (const char* word : {"fp32", "compressed"})
            EXPECT_NE(message.find(word), std::string::npos) << message;
          ASSERT_EQ(all_planes(tensor), before) << rule << " " << row.recipe;
        }
      refused.insert(row.recipe);
    }
    std::set<std::string> low_bit = {"flash", "scruple", "scant"};
    if (rule == "sgd") low_bit.insert("lpmm");
    EXPECT_EQ(refused, low_bit) << rule;
  }
}

// ---- fp16 gradients and the loss scale ----------------------------------------------------------------

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
      EXPECT_EQ(scruple_scaler_update(&scaler, found_inf), SCRUPLE_INVALID) << interval << " " << clean;
    EXPECT_NE(std::string(scruple_last_error()).find("clean"), std::string::npos) << scruple_last_error();
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

// ---- Weights that never stall -------------------------------------------------------------------------

struct Journey {
  const char* name;
  double lr, least, most;  // of |w| at the start; all stay within one power of two
  std::int64_t steps;
};
// The step itself is in fp32, so a rate has to be several ulps of the weight (at 0.05 fp32 itself loses
// 1e-9), and both are far under half a code of 24 bits (128 ulps).
constexpr Journey kJourneys[] = {{"lr_1e-9", 1e-9, 6e-4, 8.5e-4, 100000},
                                 {"lr_1e-7", 1e-7, 0.019, 0.028, 20000}};

// `sampled` after every thousandth step. How far all elements went on average, over lr a step: every gradient
// keeps its sign and size, so that Adam's step is lr.
double way_of(const Journey& journey, int rounding, const std::function<void(const Tensor&)>& sampled) {
  constexpr std::size_t n = 256;
  const Engine engine;
  const Optimizer adamw("adamw", {{"lr", journey.lr}, {"weight_decay", 0.0}});
  Tensor tensor(adamw, n, "scruple", engine);
  EXPECT_EQ(tensor.row.arrays[SCRUPLE_WEIGHT].rounding, SCRUPLE_WIDE);
  EXPECT_STREQ(info_of(tensor.row.arrays[SCRUPLE_WEIGHT].format).name, "bf16+8");
  tensor.row.arrays[SCRUPLE_WEIGHT].rounding = rounding;
  Random random(14);
  std::vector<float> weights(n), gradient(n);
  for (std::size_t i = 0; i < n; ++i) {
    const double size = journey.least + (journey.most - journey.least) * random.uniform();
    weights[i] = static_cast<float>(random.uniform() < 0.5 ? size : -size);
    gradient[i] = static_cast<float>((random.uniform() < 0.5 ? 1 : -1) * random.lognormal(0.5));
  }
  tensor.encode(engine, SCRUPLE_WEIGHT, weights);
  tensor.encode(engine, SCRUPLE_GRADIENT, gradient);
  const std::vector<float> start = tensor.decode(engine, SCRUPLE_WEIGHT);
  for (std::int64_t t = 1; t <= journey.steps; ++t) {
    tensor.row.step = t;
    step(engine, tensor);
    if (t % 1000 == 0) sampled(tensor);
  }
  const std::vector<float> end = tensor.decode(engine, SCRUPLE_WEIGHT);
  double way = 0;
  for (std::size_t i = 0; i < n; ++i)
    way += (static_cast<double>(end[i]) - static_cast<double>(start[i])) * (gradient[i] < 0 ? 1 : -1);
  return way / static_cast<double>(n) / (journey.lr * static_cast<double>(journey.steps));
}

TEST(Weights, OfScrupleTakeTheSmallestStepsOnAverageAndShowTheNearestHalf) {
  const Engine engine;
  for (const Journey& journey : kJourneys) {
    const double way = way_of(journey, SCRUPLE_WIDE, [&](const Tensor& tensor) {
      const std::vector<float> wide = tensor.decode(engine, SCRUPLE_WEIGHT);
      const unsigned char* visible = tensor.codes(SCRUPLE_WEIGHT).data();
      for (std::size_t i = 0; i < wide.size(); ++i)  // ties away from zero
        ASSERT_EQ(visible[2 * i] | visible[2 * i + 1] << 8, (bits(wide[i]) + 0x8000u) >> 16)
            << journey.name << " " << wide[i];
    });
    record(std::string(journey.name) + " wide", way);
    EXPECT_NEAR(way, 1, 0.03) << journey.name;
  }
}

TEST(Weights, PowerNearestDoesNotMoveInTheSameSteps) {
  for (const Journey& journey : kJourneys)
    EXPECT_EQ(way_of(journey, SCRUPLE_NEAREST, [](const Tensor&) {}), 0) << journey.name;
}

}  // namespace
}  // namespace scruple_tests
