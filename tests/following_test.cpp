// What a state kept in few bits must do over thousands of steps: follow each element's own history, be right on average
// where it is divided by, and move weights by steps however small. Over 5,000 steps at the defaults of every optimizer,
// with the fp32 recipe beside it as the exact one (itself held to tests/reference.h). What was measured is in the test's
// properties (--gtest_output=xml).
#include <algorithm>
#include <functional>
#include <map>
#include <memory>
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
    for (const Rule& rule : rules()) add_rule(rule.name);
    for (Row& row : rows_) {
      row.tensor.row.id = static_cast<std::uint32_t>(table_.size());
      row.tensor.row.arrays[SCRUPLE_GRADIENT] = fp32_array(gradient_.data());
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
    auto& optimizer = optimizers_[rule] = std::make_unique<Optimizer>(rule);
    Tensor probe(*optimizer, static_cast<std::int64_t>(kElements));
    if (slots_of(probe.row).empty() && has_hyper(*optimizer, "momentum")) optimizer->set("momentum", 0.9);
    hypers_[rule] = reference::hypers_of(*optimizer);
    sampled_[rule].resize((kElements + kSampled - 1) / kSampled);
    for (const scruple_recipe_info& recipe : recipes()) {
      EXPECT_GT(static_cast<std::int64_t>(kElements), recipe.small) << recipe.name;
      if (!serves(*optimizer, kElements, recipe.name)) continue;
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

  void take(std::int64_t t) {
    for (std::size_t i = 0; i < kElements; ++i) {
      const double scale = t > kShift && i % 3 == 0 ? factor_ * scales_[i] : scales_[i];
      gradient_[i] = static_cast<float>(scale * random_.normal());
    }
    const bool look = t >= kFirstLook && (t - kFirstLook) % kBetweenLooks == 0;
    if (look) clear_weights();
    for (scruple_tensor& row : table_) row.step = t;
    CHECK_OK(scruple_step(engine_, table_.data(), length(table_), nullptr));
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
        std::vector<double> got, want;
        for (std::size_t i = 0; i < elements.size(); ++i) {
          got.push_back(static_cast<double>(last[i * kSampled]));
          want.push_back(elements[i].slots.at(slot.name));
        }
        EXPECT_LE(relative_l2(got, want), 2e-5) << name_of(c, row, slot.name);  // false of 0 / 0, too
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

// visit(scenario, run, row, slot) over the moments of a role.
void for_moments(Use use, int role, const auto& visit) {
  for (const Scenario& c : kScenarios)
    for (const Row& row : run_of(c).rows())
      for (const SlotAt& slot : slots_of(row.tensor.row))
        if (row.use == use && slot.role == role) visit(c, run_of(c), row, slot);
}

TEST(Following, SecondMomentsOfScrupleFollowEachElement) {
  int looked_at = 0;
  for_moments(Use::whole, SCRUPLE_ROLE_NONNEG, [&](auto& c, auto& run, const Row& row, auto& slot) {
    const std::vector<double> errors = log_errors(run, row, slot.array);
    const double worst = *std::max_element(errors.begin(), errors.end());
    record(name_of(c, row, slot.name + " rms_ln"), errors.back());
    if (row.recipe != "scruple") return;
    EXPECT_LE(worst, 0.12) << name_of(c, row, slot.name) << ", at the end " << errors.back();
    ++looked_at;
  });
  EXPECT_GE(looked_at, kRuns * 4) << "adam, adamw, adagrad and rmsprop have one each";
}

TEST(Following, PowerNearestRoundingStandsStillInTheSameRun) {
  for_moments(Use::nearest, SCRUPLE_ROLE_NONNEG, [&](auto& c, auto& run, const Row& row, auto& slot) {
    if (row.recipe != "scruple") return;
    const double error = log_errors(run, row, slot.array).back();
    record(name_of(c, row, slot.name + " nearest rms_ln"), error);
    const bool stalls = c.factor != 1 && row.rule.starts_with("adam");
    EXPECT_GT(error, stalls ? 0.3 : 0) << name_of(c, row, slot.name);
  });
}

// ---- Signed moments ---------------------------------------------------------------------------

// What one step keeps of a slot where the gradient is zero: beta.
double kept(const Run& run, const std::string& rule, const std::string& slot) {
  reference::Element element;
  element.t = 1000;
  element.slots[slot] = 1;
  reference::find(rule)(element, 0, reference::hypers_of(run.optimizer(rule)));
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
  for_moments(Use::whole, SCRUPLE_ROLE_SIGNED, [&](auto& c, auto& run, const Row& row, auto& slot) {
    const Deviation d = deviation(run, row, slot);
    const std::string name = name_of(c, row, slot.name);
    record(name + " error", d.error);
    record(name + " noise", d.noise);
    // 5 %: that is how well so many elements tell their variance.
    EXPECT_LE(d.error, 1.05 * d.noise + 1e-6) << name;
    looked_at += is_fp32(row.tensor.row.arrays[slot.array]) ? 0 : 1;
  });
  EXPECT_GE(looked_at, kRuns * 5) << "sgd, sgdw, adam, adamw and lion have one each";
}

TEST(Following, StochasticSignedMomentsAreUnbiased) {
  for_moments(Use::whole, SCRUPLE_ROLE_SIGNED, [&](auto& c, auto& run, const Row& row, auto& slot) {
    if (row.tensor.row.arrays[slot.array].rounding != SCRUPLE_STOCHASTIC) return;
    const Deviation d = deviation(run, row, slot);
    const std::string name = name_of(c, row, slot.name);
    record(name + " bias", d.mean);
    record(name + " bias_in_standard_errors", d.mean / d.standard_error);
    EXPECT_LE(std::fabs(d.mean), 5 * d.standard_error) << name << ", in units of the noise";
    EXPECT_LT(d.standard_error, 0.02) << name << ": too few elements to say anything";
  });
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
