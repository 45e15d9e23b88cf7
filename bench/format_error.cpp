// How far each moment format is from fp32: on moments of even and uneven groups after one encoding with
// nearest rounding, and after thousands of steps beside the exact moving average, with each rounding it
// offers. Groups are runs of elements whose gradient scales are lognormal(sigma). Prints the tables of
// bench/results/2026-11-15-following.md; takes a minute or two. --curve prints one case step by step instead,
// as CSV.
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "scruple/scruple.h"

namespace {

constexpr int64_t kSize = 1 << 19;
constexpr double kSigmas[] = {0, 0.5, 1, 2};

void check(scruple_status status) {
  if (status == SCRUPLE_OK) return;
  std::fprintf(stderr, "format_error: %s\n", scruple_last_error());
  std::exit(1);
}

// exp_avg and exp_avg_sq as after many steps of AdamW: m is normal, v the mean of 50 squares.
struct Moments {
  std::vector<float> m = std::vector<float>(kSize), v = std::vector<float>(kSize);

  explicit Moments(double sigma) {
    std::mt19937_64 random(1);
    std::normal_distribution<double> normal;
    std::chi_squared_distribution<double> squares(50);
    for (std::size_t i = 0; i < m.size(); ++i) {
      const double scale = 1e-4 * std::exp(sigma * normal(random));
      m[i] = static_cast<float>(scale * normal(random));
      v[i] = static_cast<float>(scale * scale * squares(random) / 50);
    }
  }
};

std::vector<float> round_trip(scruple_engine* engine, scruple_tensor tensor, int array,
                              const scruple_format* format, const std::vector<float>& values) {
  tensor.arrays[array] = {};
  tensor.arrays[array].format = format;
  check(scruple_tensor_alloc(engine, &tensor, 1u << array));
  check(scruple_encode(engine, &tensor, array, values.data()));
  std::vector<float> back(values.size());
  check(scruple_decode(engine, &tensor, array, back.data()));
  scruple_tensor_free(engine, &tensor);
  return back;
}

// Of exp_avg: root mean square error over root mean square, and the share of elements off by half or more.
std::string signed_error(const std::vector<float>& m, const std::vector<float>& back) {
  double error = 0, total = 0, lost = 0;
  for (std::size_t i = 0; i < m.size(); ++i) {
    const double off = static_cast<double>(back[i]) - m[i];
    error += off * off;
    total += static_cast<double>(m[i]) * m[i];
    lost += std::fabs(off) >= 0.5 * std::fabs(m[i]) ? 1 : 0;
  }
  char text[64];
  std::snprintf(text, sizeof text, "%.4f, %.2f %%", std::sqrt(error / total),
                100 * lost / static_cast<double>(m.size()));
  return text;
}

// Of exp_avg_sq: root mean square of the error of ln(1 / sqrt(v)), and the share of elements that became
// zero.
std::string nonneg_error(const std::vector<float>& v, const std::vector<float>& back) {
  double error = 0, counted = 0;
  for (std::size_t i = 0; i < v.size(); ++i) {
    if (back[i] <= 0) continue;
    const double off = 0.5 * std::log(static_cast<double>(back[i]) / v[i]);
    error += off * off;
    counted += 1;
  }
  char text[64];
  std::snprintf(text, sizeof text, "%.3f, %.1f %%", std::sqrt(error / counted),
                100 - 100 * counted / static_cast<double>(v.size()));
  return text;
}

void table(scruple_engine* engine, const scruple_tensor& tensor, int array, unsigned role,
           const char* title) {
  std::printf("\n%s\n| format |", title);
  for (const double sigma : kSigmas) std::printf(" sigma %g |", sigma);
  std::printf("\n| --- | --- | --- | --- | --- |\n");
  for (int i = 0; i < scruple_format_count(); ++i) {
    scruple_format_info info;
    check(scruple_get_format_info(scruple_format_at(i), &info));
    if ((info.roles & role) == 0) continue;
    std::printf("| `%s` |", info.name);
    for (const double sigma : kSigmas) {
      const Moments moments(sigma);
      const std::vector<float>& values = role == SCRUPLE_ROLE_SIGNED ? moments.m : moments.v;
      const std::vector<float> back = round_trip(engine, tensor, array, scruple_format_at(i), values);
      std::printf(" %s |", (role == SCRUPLE_ROLE_SIGNED ? signed_error : nonneg_error)(values, back).c_str());
    }
    std::printf("\n");
  }
}

// ---- How well a stored second moment follows the exact one ----
//
// Every row takes the same gradients, step by step, and rounds its exp_avg_sq after each: errors feed on
// themselves, which one encoding does not show. beta1 is 0, lr 1 and the weight set back to 0, so that a
// weight after a step is that step: -g / sqrt(v / (1 - beta2^t)).

constexpr std::size_t kFollowed = 4096;
constexpr int kMeasuredSteps = 50;  // spread over the second half of the stationary case

struct Run {
  double beta2;
  std::int64_t steps;
  // Gradients that stop do so at half of the run, but no more than 4 spans of 1 / (1 - beta2) steps before
  // its end, when the exact v has fallen to e^-4: at 0.95 half a run would leave less than a float can hold.
  std::int64_t last_gradient() const {
    return std::max<std::int64_t>(steps / 2, steps - std::lround(4 / (1 - beta2)));
  }
  double correction(std::int64_t t) const { return 1 - std::pow(beta2, static_cast<double>(t)); }
};
// 8 spans of 0.999; 4 of 0.9999, whose average holds 98 % of its weight by then.
constexpr Run kRuns[] = {{0.95, 8000}, {0.999, 8000}, {0.9999, 40000}};

// What multiplies element i's gradient in step t of a run.
struct Pattern {
  const char* name;
  float (*factor)(const Run& run, std::int64_t t, std::size_t i, std::mt19937_64& random);
};
bool is_shifted(const Run& run, std::int64_t t, std::size_t i) { return t > run.steps * 2 / 5 && i % 3 == 0; }
constexpr Pattern kPatterns[] = {
    {"stationary", [](const Run&, std::int64_t, std::size_t, std::mt19937_64&) { return 1.0f; }},
    {"a third x5", [](const Run& run, std::int64_t t, std::size_t i,
                      std::mt19937_64&) { return is_shifted(run, t, i) ? 5.0f : 1.0f; }},
    {"a third x0.2", [](const Run& run, std::int64_t t, std::size_t i,
                        std::mt19937_64&) { return is_shifted(run, t, i) ? 0.2f : 1.0f; }},
    {"in 1 % of steps", [](const Run&, std::int64_t, std::size_t,
                           std::mt19937_64& random) { return random() % 100 == 0 ? 1.0f : 0.0f; }},
    {"every fifth step",
     [](const Run&, std::int64_t t, std::size_t, std::mt19937_64&) { return t % 5 == 0 ? 1.0f : 0.0f; }},
    {"stopped", [](const Run& run, std::int64_t t, std::size_t,
                   std::mt19937_64&) { return t <= run.last_gradient() ? 1.0f : 0.0f; }},
};

// Normal gradients, each element with a scale of its own: 1e-4 lognormal(1).
class Gradients {
 public:
  Gradients(const Run& run, const Pattern& pattern) : run_(run), pattern_(pattern) {
    for (float& x : normals_) x = static_cast<float>(normal_(random_));
    for (float& x : scales_) x = static_cast<float>(1e-4 * std::exp(normal_(random_)));
  }
  // A window of the normals at a random place is as good as fresh ones, and costs next to nothing.
  const std::vector<float>& step(std::int64_t t) {
    const float* normal = normals_.data() + random_() % (normals_.size() - kFollowed);
    for (std::size_t i = 0; i < kFollowed; ++i) {
      g_[i] = normal[i] * scales_[i] * pattern_.factor(run_, t, i, random_);
    }
    return g_;
  }

 private:
  const Run& run_;
  const Pattern& pattern_;
  std::mt19937_64 random_{1};
  std::normal_distribution<double> normal_;
  std::vector<float> normals_ = std::vector<float>(1 << 20), scales_ = std::vector<float>(kFollowed),
                     g_ = std::vector<float>(kFollowed);
};

// exp_avg_sq in some format, moved by steps.
class Follower {
 public:
  explicit Follower(std::string name) : name_(std::move(name)) {}
  virtual ~Follower() = default;
  const std::string& name() const { return name_; }
  virtual void step(const std::vector<float>& g, std::int64_t t) = 0;
  virtual std::vector<float> moment() const = 0;
  // What the last step did to the weights. `correction` is 1 - beta2^t.
  virtual std::vector<float> update(const std::vector<float>& g, double correction) const = 0;

 private:
  std::string name_;
};

// A format of the registry, through the library's own step.
class Stored : public Follower {
 public:
  Stored(scruple_engine* engine, const scruple_optimizer* adamw, const scruple_format* format, int rounding,
         std::string name)
      : Follower(std::move(name)), engine_(engine) {
    tensor_.optimizer = adamw;
    tensor_.size = kFollowed;
    for (const int array : {SCRUPLE_WEIGHT, SCRUPLE_SLOT, SCRUPLE_GRADIENT}) {
      tensor_.arrays[array].format = scruple_format_find("fp32");
    }
    tensor_.arrays[kMoment].format = format;
    tensor_.arrays[kMoment].rounding = rounding;
    check(scruple_tensor_alloc(engine, &tensor_, SCRUPLE_STATE));
  }
  ~Stored() override { scruple_tensor_free(engine_, &tensor_); }
  Stored(const Stored&) = delete;
  Stored& operator=(const Stored&) = delete;

  void step(const std::vector<float>& g, std::int64_t t) override {
    std::memset(tensor_.arrays[SCRUPLE_WEIGHT].codes, 0, kFollowed * sizeof(float));
    tensor_.arrays[SCRUPLE_GRADIENT].codes = const_cast<float*>(g.data());  // a step only reads it
    tensor_.step = t;
    check(scruple_step(engine_, &tensor_, 1, nullptr));
  }
  std::vector<float> moment() const override { return decoded(kMoment); }
  std::vector<float> update(const std::vector<float>&, double) const override {
    return decoded(SCRUPLE_WEIGHT);
  }

 private:
  static constexpr int kMoment = SCRUPLE_SLOT + 1;
  std::vector<float> decoded(int array) const {
    std::vector<float> values(kFollowed);
    check(scruple_decode(engine_, &tensor_, array, values.data()));
    return values;
  }
  scruple_engine* engine_;
  scruple_tensor tensor_ = {};
};

// The peers' formats: a table of levels in [0, 1] times the block's maximum in fp32, nearest. The maximum is
// raised to 1e-12, as torchao does; bitsandbytes does not, but only the first steps here are as small.
class Mapped : public Follower {
 public:
  Mapped(std::string name, std::vector<float> levels, std::size_t block, double beta2)
      : Follower(std::move(name)), levels_(std::move(levels)), block_(block), beta2_(beta2) {
    for (std::size_t c = 0; c + 1 < levels_.size(); ++c) ends_.push_back((levels_[c] + levels_[c + 1]) / 2);
    ends_.push_back(std::numeric_limits<float>::infinity());
  }
  void step(const std::vector<float>& g, std::int64_t) override {
    const float keep = static_cast<float>(beta2_), take = static_cast<float>(1 - beta2_);
    for (std::size_t first = 0; first < kFollowed; first += block_) {
      float& scale = scales_[first / block_];
      float most = 1e-12f;
      for (std::size_t i = first; i < first + block_; ++i) {
        v_[i] = keep * (levels_[codes_[i]] * scale) + take * (g[i] * g[i]);
        most = std::max(most, v_[i]);
      }
      scale = most;
      for (std::size_t i = first; i < first + block_; ++i) codes_[i] = nearest(v_[i] / scale, codes_[i]);
    }
  }
  std::vector<float> moment() const override {
    std::vector<float> values(kFollowed);
    for (std::size_t i = 0; i < kFollowed; ++i) values[i] = levels_[codes_[i]] * scales_[i / block_];
    return values;
  }
  std::vector<float> update(const std::vector<float>& g, double correction) const override {
    std::vector<float> values(kFollowed);
    for (std::size_t i = 0; i < kFollowed; ++i) {
      values[i] = static_cast<float>(-g[i] / std::sqrt(v_[i] / correction));
    }
    return values;
  }

 private:
  // From the old code it is rarely far.
  std::uint8_t nearest(float x, std::uint8_t code) const {
    while (x >= ends_[code]) ++code;
    while (code > 0 && x < ends_[code - 1u]) --code;
    return code;
  }
  std::vector<float> levels_, ends_;  // a code's values end where it is as far to the next
  std::size_t block_;
  double beta2_;
  std::vector<float> v_ = std::vector<float>(kFollowed);  // before rounding: what the step divided by
  std::vector<float> scales_ = std::vector<float>(kFollowed);
  std::vector<std::uint8_t> codes_ = std::vector<std::uint8_t>(kFollowed);
};

// Dettmers' dynamic tree (1511.04561, 2110.02861), unsigned: 0, 1, and in every decade from 1e-7 to 1 the
// centres of 2, 4, .. 128 intervals of equal width. bitsandbytes (functional.py: create_dynamic_map, signed =
// False; blocks of 256 in its CUDA kernels) and torchao (optim/quant_utils.py, optim/adam.py) have the same.
std::vector<float> dynamic_map() {
  std::vector<float> levels = {0.0f};
  for (int decade = 0; decade < 7; ++decade) {
    const int intervals = 2 << decade;
    for (int k = 0; k < intervals; ++k) {
      levels.push_back(static_cast<float>((0.1 + 0.9 * (k + 0.5) / intervals) * std::pow(10, decade - 6)));
    }
  }
  levels.push_back(1.0f);
  return levels;
}

// torchao's 4-bit second moment (optim/subclass_4bit.py): sixteenths, without 0; blocks of 128.
std::vector<float> sixteenths() {
  std::vector<float> levels;
  for (int k = 1; k <= 16; ++k) levels.push_back(static_cast<float>(k) / 16);
  return levels;
}

using Followers = std::vector<std::unique_ptr<Follower>>;

Followers all_followers(scruple_engine* engine, const scruple_optimizer* adamw, double beta2) {
  Followers rows;
  for (int i = 0; i < scruple_format_count(); ++i) {
    const scruple_format* format = scruple_format_at(i);
    scruple_format_info info;
    check(scruple_get_format_info(format, &info));
    if ((info.roles & SCRUPLE_ROLE_NONNEG) == 0) continue;
    for (const int rounding : {SCRUPLE_NEAREST, SCRUPLE_STOCHASTIC}) {
      if ((info.roundings >> rounding & 1) == 0) continue;
      const std::string name = std::string("`") + info.name + "` " + scruple_rounding_name(rounding);
      rows.push_back(std::make_unique<Stored>(engine, adamw, format, rounding, name));
    }
  }
  rows.push_back(std::make_unique<Mapped>("bitsandbytes, torchao 8-bit nearest", dynamic_map(), 256, beta2));
  rows.push_back(std::make_unique<Mapped>("torchao 4-bit nearest", sixteenths(), 128, beta2));
  return rows;
}

// Root mean square of ln(sqrt(v) / sqrt(exact)) over the elements that are not zero, and the share of those
// that became zero.
struct FollowingError {
  double rms, zero;
};

FollowingError following_error(const std::vector<double>& exact, const std::vector<float>& v) {
  double error = 0, counted = 0, zero = 0;
  for (std::size_t i = 0; i < v.size(); ++i) {
    if (exact[i] <= 0) continue;
    if (v[i] <= 0) {
      zero += 1;
      continue;
    }
    const double off = 0.5 * std::log(v[i] / exact[i]);
    error += off * off;
    counted += 1;
  }
  return {std::sqrt(error / counted), zero / (zero + counted)};
}

std::string cell(const FollowingError& error) {
  char text[64];
  const int end = std::snprintf(text, sizeof text, "%.3f", error.rms);
  if (error.zero > 0) {
    std::snprintf(text + end, sizeof text - static_cast<std::size_t>(end), ", %.2f %%", 100 * error.zero);
  }
  return text;
}

// By what factor steps were off: the mean and the 99th percentile. An element that became zero divides by its
// latest gradient alone, by next to nothing when that is small: a few such elements make the mean, and a run
// of other gradients makes another.
std::string step_error(std::vector<float> factors) {
  double sum = 0;
  for (const float factor : factors) sum += factor;
  const auto high = factors.begin() + static_cast<std::ptrdiff_t>(factors.size() / 100 * 99);
  std::nth_element(factors.begin(), high, factors.end());
  char text[64];
  std::snprintf(text, sizeof text, "%.3f | %.2f", sum / static_cast<double>(factors.size()), *high);
  return text;
}

void append_factors(const std::vector<double>& exact, const std::vector<float>& g, double correction,
                    const std::vector<float>& update, std::vector<float>& factors) {
  for (std::size_t i = 0; i < kFollowed; ++i) {
    if (g[i] == 0) continue;
    factors.push_back(static_cast<float>(std::fabs(update[i] / g[i]) * std::sqrt(exact[i] / correction)));
  }
}

// The exact moving average of squared gradients.
void average(std::vector<double>& exact, const std::vector<float>& g, double beta2) {
  for (std::size_t i = 0; i < kFollowed; ++i) {
    exact[i] = beta2 * exact[i] + (1 - beta2) * (static_cast<double>(g[i]) * g[i]);
  }
}

// One pattern, all rows: appends a cell to each line; the first, stationary one also fills in `steps`.
void follow(const Run& run, const Pattern& pattern, Followers& rows, std::vector<std::string>& lines,
            std::vector<std::string>& steps) {
  Gradients gradients(run, pattern);
  std::vector<double> exact(kFollowed);
  std::vector<std::vector<float>> factors(rows.size());
  const bool measured = &pattern == &kPatterns[0];
  for (std::int64_t t = 1; t <= run.steps; ++t) {
    const std::vector<float>& g = gradients.step(t);
    average(exact, g, run.beta2);
    const bool measure = measured && t > run.steps / 2 && t % (run.steps / 2 / kMeasuredSteps) == 0;
    for (std::size_t r = 0; r < rows.size(); ++r) {
      rows[r]->step(g, t);
      if (!measure) continue;
      append_factors(exact, g, run.correction(t), rows[r]->update(g, run.correction(t)), factors[r]);
    }
  }
  for (std::size_t r = 0; r < rows.size(); ++r) {
    lines[r] += " " + cell(following_error(exact, rows[r]->moment())) + " |";
    if (measured) steps[r] = " " + step_error(std::move(factors[r])) + " |";
  }
}

void set_hypers(scruple_optimizer* adamw, const Run& run) {
  const std::pair<const char*, double> hypers[] = {
      {"lr", 1}, {"beta1", 0}, {"beta2", run.beta2}, {"eps", 1e-30}, {"weight_decay", 0}};
  for (const auto& [name, value] : hypers) check(scruple_optimizer_set(adamw, name, value));
}

void following_table(scruple_engine* engine, scruple_optimizer* adamw, const Run& run) {
  set_hypers(adamw, run);
  std::vector<std::string> lines, steps;
  for (const Pattern& pattern : kPatterns) {
    Followers rows = all_followers(engine, adamw, run.beta2);
    lines.resize(rows.size());
    steps.resize(rows.size());
    for (std::size_t r = 0; r < rows.size(); ++r) {
      if (lines[r].empty()) lines[r] = "| " + rows[r]->name() + " |";
    }
    follow(run, pattern, rows, lines, steps);
  }
  std::printf(
      "\nexp_avg_sq after %lld steps with beta2 %g (\"stopped\": the last %lld without gradients): "
      "RMS of ln(sqrt(v) / sqrt(exact)), share of elements that became zero if any; of the stationary "
      "case, by what factor steps were off\n| format |",
      static_cast<long long>(run.steps), run.beta2, static_cast<long long>(run.steps - run.last_gradient()));
  for (const Pattern& pattern : kPatterns) std::printf(" %s |", pattern.name);
  std::printf(" steps, mean | steps, 99th percentile |\n| --- |");
  for (std::size_t i = 0; i < std::size(kPatterns) + 2; ++i) std::printf(" --- |");
  std::printf("\n");
  for (std::size_t r = 0; r < lines.size(); ++r) std::printf("%s%s\n", lines[r].c_str(), steps[r].c_str());
}

// A third of the gradients grows by 5 at step 3,200: the error of every row every 50 steps.
void following_curve(scruple_engine* engine, scruple_optimizer* adamw) {
  const Run& run = kRuns[1];
  const Pattern& pattern = kPatterns[1];
  set_hypers(adamw, run);
  Followers rows = all_followers(engine, adamw, run.beta2);
  Gradients gradients(run, pattern);
  std::vector<double> exact(kFollowed);
  std::printf("step");
  for (const auto& row : rows) std::printf(",\"%s\"", row->name().c_str());
  for (std::int64_t t = 1; t <= run.steps; ++t) {
    const std::vector<float>& g = gradients.step(t);
    average(exact, g, run.beta2);
    for (const auto& row : rows) row->step(g, t);
    if (t % 50 != 0) continue;
    std::printf("\n%lld", static_cast<long long>(t));
    for (const auto& row : rows) std::printf(",%.4f", following_error(exact, row->moment()).rms);
  }
  std::printf("\n");
}

}  // namespace

int main(int count, char** words) {
  const bool curve = count == 2 && std::string(words[1]) == "--curve";
  if (count > 1 && !curve) {
    std::fprintf(stderr, "usage: format_error [--curve]\n");
    return 2;
  }
  scruple_engine* engine = nullptr;
  check(scruple_engine_create("cpu", 1, &engine));
  scruple_optimizer* adamw = nullptr;
  check(scruple_optimizer_create("adamw", &adamw));
  if (curve) {
    following_curve(engine, adamw);
  } else {
    scruple_tensor tensor = {};
    tensor.optimizer = adamw;
    tensor.size = kSize;
    table(engine, tensor, SCRUPLE_SLOT, SCRUPLE_ROLE_SIGNED,
          "exp_avg: relative RMS error, share of elements off by half or more");
    table(engine, tensor, SCRUPLE_SLOT + 1, SCRUPLE_ROLE_NONNEG,
          "exp_avg_sq: RMS error of ln(1 / sqrt(v)), share of elements that became zero");
    for (const Run& run : kRuns) following_table(engine, adamw, run);
  }
  scruple_optimizer_destroy(adamw);
  scruple_engine_destroy(engine);
  return 0;
}
