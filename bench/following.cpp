// How well Adam's second moment follows the gradients in a real run: beside every exp_avg_sq of the native
// trainer stands the exact average, in double, of the very gradients that its steps read.
// usage: following TEXT [--recipe NAME[:ROUNDING]]... [--steps 1500] [--seeds 3] [--layers 2] [--width 128]
//                  [--heads 4] [--context 64] [--batch 8] [--lr 1e-3] [--threads 1]
#include <algorithm>
#include <charconv>
#include <chrono>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <exception>
#include <iterator>
#include <list>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "io/file.h"
#include "train/run/trainer.h"

namespace {

using namespace scruple;
using train::Job, train::Trainer, train::Windows;

constexpr double kFactor = 1.5;     // sqrt(v) is off where it is this many times too large or too small
constexpr double kLargestNorm = 1;  // of the gradient
constexpr std::int64_t kValidationWindows = 512;

struct Options {
  std::string text;
  std::vector<std::string> recipes;
  std::int64_t steps = 1500, seeds = 3, batch = 8, threads = 1;
  train::GptShape shape = {.layers = 2, .width = 128, .heads = 4, .context = 64, .vocabulary = 256};
  double lr = 1e-3;
};

struct UsageError : std::runtime_error {
  using runtime_error::runtime_error;
};

template <class T>
T number(const std::string& name, const std::string& text) {
  T value = 0;
  const char* const end = text.data() + text.size();
  const auto [rest, error] = std::from_chars(text.data(), end, value);
  if (error != std::errc() || rest != end || !(value > 0))
    throw UsageError(name + " is '" + text + "'; it must be a number above 0");
  return value;
}

Options parse(const std::vector<std::string>& arguments) {
  Options o;
  const std::pair<const char*, std::int64_t*> counts[] = {
      {"--steps", &o.steps},       {"--seeds", &o.seeds},          {"--batch", &o.batch},
      {"--threads", &o.threads},   {"--layers", &o.shape.layers},  {"--width", &o.shape.width},
      {"--heads", &o.shape.heads}, {"--context", &o.shape.context}};
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    const std::string& name = arguments[i];
    if (!name.starts_with("--")) {
      if (!o.text.empty()) throw UsageError("two texts, " + o.text + " and " + name + "; give one");
      o.text = name;
      continue;
    }
    if (i + 1 == arguments.size()) throw UsageError(name + " has no value");
    const std::string& value = arguments[++i];
    const auto* const count =
        std::find_if(std::begin(counts), std::end(counts), [&](const auto& c) { return name == c.first; });
    if (count != std::end(counts))
      *count->second = number<std::int64_t>(name, value);
    else if (name == "--recipe")
      o.recipes.push_back(value);
    else if (name == "--lr")
      o.lr = number<double>(name, value);
    else
      throw UsageError("there is no option " + name);
  }
  if (o.text.empty()) throw UsageError("no text to train on");
  if (o.recipes.empty()) o.recipes = {"fp32", "split", "flash", "scruple", "scant"};
  return o;
}

// `scruple train`'s split: the last twentieth is for validation.
struct Data {
  Data(const std::string& path, std::int64_t context)
      : file(path),
        bytes(reinterpret_cast<const std::uint8_t*>(file.bytes().data()), file.bytes().size()),
        training(bytes.first(bytes.size() - held_out(path, context)), context),
        validation(bytes.last(held_out(path, context)), context) {}

  io::MappedFile file;
  std::span<const std::uint8_t> bytes;
  Windows training, validation;

 private:
  std::size_t held_out(const std::string& path, std::int64_t context) const {
    const auto window = static_cast<std::size_t>(context) + 1;
    if (bytes.size() < 20 * window)
      throw std::runtime_error(path + " has " + std::to_string(bytes.size()) + " bytes; at --context " +
                               std::to_string(context) + " it takes at least " + std::to_string(20 * window));
    return bytes.size() / 20;
  }
};

// ---- Formats ----

struct Recipe {
  std::string name;
  int rounding = -1;  // of the moments that can; -1: the recipe's
};

Recipe recipe_of(const std::string& text) {
  const std::size_t colon = text.find(':');
  if (colon == std::string::npos) return {text};
  const int rounding = find_rounding(text.substr(colon + 1));
  if (rounding != SCRUPLE_NEAREST && rounding != SCRUPLE_STOCHASTIC)
    throw UsageError("--recipe " + text + ": the rounding must be " + scruple_rounding_name(SCRUPLE_NEAREST) +
                     " or " + scruple_rounding_name(SCRUPLE_STOCHASTIC));
  return {text.substr(0, colon), rounding};
}

// Memory for gradients that outlives the step which read them, so that they can be read once more.
using Planes = std::list<std::vector<std::byte>>;

void* plane(Planes& planes, std::int64_t bytes) {
  return bytes == 0 ? nullptr : planes.emplace_back(static_cast<std::size_t>(bytes)).data();
}

scruple_tensor describe(const Recipe& recipe, const Optimizer& optimizer, std::int64_t size) {
  scruple_tensor row = {};
  row.optimizer = optimizer.raw();
  row.size = size;
  check(scruple_tensor_use(&row, recipe.name.c_str()));
  if (recipe.rounding < 0) return row;
  for (const int a : used_arrays(row))
    if (a != SCRUPLE_WEIGHT && a != SCRUPLE_GRADIENT &&
        (info_of(row.arrays[a].format).roundings >> recipe.rounding & 1u) != 0)
      row.arrays[a].rounding = recipe.rounding;
  return row;
}

int second_moment(const scruple_tensor& row) {
  for (const int a : used_arrays(row)) {
    const char* name = nullptr;
    check(scruple_tensor_array(&row, a, &name, nullptr, nullptr));
    if (std::strcmp(name, "exp_avg_sq") == 0) return a;
  }
  throw std::runtime_error("there is no exp_avg_sq");
}

// `scruple train` with its defaults, but for the gradient's memory.
Job job_of(const Options& options, const Recipe& recipe, std::uint64_t seed, Planes& planes) {
  Job job;
  job.shape = gpt2(options.shape);
  job.batch = options.batch;
  job.seed = seed;
  job.threads = static_cast<int>(options.threads);
  job.optimizer = [] { return Optimizer("adamw"); };
  job.describe = [recipe, &planes](const Optimizer& optimizer, std::int64_t size) {
    scruple_tensor row = describe(recipe, optimizer, size);
    scruple_array& gradient = row.arrays[SCRUPLE_GRADIENT];
    std::int64_t codes = 0, aux = 0;
    check(scruple_format_bytes(gradient.format, size, &codes, &aux));
    gradient.codes = plane(planes, codes), gradient.aux = plane(planes, aux);
    return row;
  };
  const Optimizer probe = job.optimizer();
  const std::string computed =
      train::visible_format(describe(recipe, probe, std::int64_t{1} << 20).arrays[SCRUPLE_WEIGHT]);
  if (computed == "fp16")
    throw std::runtime_error(recipe.name + " needs loss scaling, which is not done here");
  job.activations = computed == "bf16" ? train::Precision::bf16 : train::Precision::fp32;
  job.schedule = {train::Annealing::cosine, options.lr, options.steps / 20, options.steps};
  job.gradients.max_norm = kLargestNorm;
  return job;
}

// What cannot be run is refused before anything is.
void check_recipe(const Options& options, const std::string& name) {
  const Recipe recipe = recipe_of(name);
  Planes planes;
  const Job job = job_of(options, recipe, 1, planes);
  const Optimizer probe = job.optimizer();
  const scruple_tensor large = job.describe(probe, std::int64_t{1} << 20);
  const scruple_array& v = large.arrays[second_moment(large)];
  if (recipe.rounding >= 0 && v.rounding != recipe.rounding)
    throw std::runtime_error(name + ": " + info_of(v.format).name + " does not round like this");
}

// ---- The exact second moment, and how far the run's own is from it ----

struct Figures {
  double off = 0, zeros = 0;  // shares
  double rms = 0;             // of ln(sqrt(v / exact)); like the next, without zeros
  double step = 0;            // mean of sqrt(exact / v): how many times too large steps are
  double left_out = 0;        // elements that never had a gradient
  double loss = 0;
};

class Shadow {
 public:
  explicit Shadow(Trainer& trainer)
      : table_(trainer.state().table()), beta2_(trainer.groups().at(0).get("beta2")) {
    for (const scruple_tensor& row : table_) exact_.emplace_back(static_cast<std::size_t>(row.size));
  }

  // After each step that was taken; `clip` is what it multiplied the gradient by.
  void update(float clip) {
    for (std::size_t t = 0; t < exact_.size(); ++t) {
      const std::vector<float>& gradient = decoded(table_[t], SCRUPLE_GRADIENT);
      for (std::size_t i = 0; i < gradient.size(); ++i) {
        const double g = gradient[i] * clip;
        exact_[t][i] = beta2_ * exact_[t][i] + (1 - beta2_) * g * g;
      }
    }
  }

  Figures compare() {
    Figures f;
    double counted = 0;
    for (std::size_t t = 0; t < exact_.size(); ++t) {
      const std::vector<float>& v = decoded(table_[t], second_moment(table_[t]));
      for (std::size_t i = 0; i < v.size(); ++i) {
        if (exact_[t][i] == 0) {
          f.left_out += 1;
          continue;
        }
        counted += 1;
        const double ratio = std::sqrt(v[i] / exact_[t][i]);
        if (!(ratio <= kFactor && ratio >= 1 / kFactor)) f.off += 1;  // NaN is off too
        if (ratio == 0) {
          f.zeros += 1;
          continue;
        }
        f.rms += std::log(ratio) * std::log(ratio);
        f.step += 1 / ratio;
      }
    }
    f.rms = std::sqrt(f.rms / (counted - f.zeros));
    f.step /= counted - f.zeros;
    f.off /= counted, f.zeros /= counted;
    return f;
  }

 private:
  const std::vector<float>& decoded(const scruple_tensor& row, int array) {
    values_.resize(static_cast<std::size_t>(row.size));
    check(scruple_decode(engine_.raw(), &row, array, values_.data()));
    return values_;
  }

  Engine engine_{"cpu", 1};
  const std::vector<scruple_tensor>& table_;
  double beta2_;
  std::vector<std::vector<double>> exact_;
  std::vector<float> values_;
};

// ---- Runs ----

Figures follow(const Options& options, const std::string& name, std::uint64_t seed, const Data& data) {
  Planes planes;  // outlives the trainer
  train::Ledger ledger;
  Trainer trainer(job_of(options, recipe_of(name), seed, planes), ledger);
  Shadow shadow(trainer);
  const auto before = std::chrono::steady_clock::now();
  for (std::int64_t step = 1; step <= options.steps; ++step) {
    const train::Outcome outcome = trainer.step(data.training);
    if (!outcome.skipped) shadow.update(scruple_clip_factor(outcome.norm, kLargestNorm));
    if (step % std::max<std::int64_t>(options.steps / 5, 1) != 0) continue;
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - before;
    std::fprintf(stderr, "%s, seed %d: step %d of %d, loss %.4f, %.0f s\n", name.c_str(),
                 static_cast<int>(seed), static_cast<int>(step), static_cast<int>(options.steps),
                 outcome.loss, seconds.count());
  }
  Figures figures = shadow.compare();
  figures.loss = trainer.validate(data.validation, kValidationWindows);
  return figures;
}

Figures mean(const std::vector<Figures>& all) {
  Figures sum;
  for (double Figures::*const part :
       {&Figures::off, &Figures::zeros, &Figures::rms, &Figures::step, &Figures::left_out, &Figures::loss}) {
    for (const Figures& f : all) sum.*part += f.*part;
    sum.*part /= static_cast<double>(all.size());
  }
  return sum;
}

void print(const std::string& recipe, const std::string& seed, const Figures& f) {
  std::printf("| %-18s | %4s | %8.3f %% | %7.4f | %9.4f | %8.4f %% | %8.0f | %7.4f |\n", recipe.c_str(),
              seed.c_str(), 100 * f.off, f.rms, f.step, 100 * f.zeros, f.left_out, f.loss);
  std::fflush(stdout);
}

void run(const Options& options) {
  for (const std::string& name : options.recipes) check_recipe(options, name);
  const Data data(options.text, options.shape.context);
  std::int64_t size = 0;
  for (const train::Parameter& parameter : train::parameters_of(gpt2(options.shape)))
    size += parameter.size();
  std::printf("%lld parameters, %lld steps of %lld x %lld bytes of %s (%zu)\n", static_cast<long long>(size),
              static_cast<long long>(options.steps), static_cast<long long>(options.batch),
              static_cast<long long>(options.shape.context), options.text.c_str(), data.bytes.size());
  std::puts(
      "off: share of elements whose sqrt(v) is off by more than 1.5x; RMS of ln(sqrt(v / exact)) and mean\n"
      "of sqrt(exact / v): of those that are not zero; left out: elements that never had a gradient");
  std::printf("| %-18s | %4s | %10s | %7s | %9s | %10s | %8s | %7s |\n", "recipe", "seed", "off", "RMS ln",
              "mean", "v = 0", "left out", "loss");
  std::printf("| --- | --- | --- | --- | --- | --- | --- | --- |\n");
  for (const std::string& name : options.recipes) {
    std::vector<Figures> all;
    for (std::int64_t seed = 1; seed <= options.seeds; ++seed) {
      all.push_back(follow(options, name, static_cast<std::uint64_t>(seed), data));
      print(name, std::to_string(seed), all.back());
    }
    print(name, "mean", mean(all));
  }
}

}  // namespace

int main(int argc, char** argv) {
  try {
    run(parse({argv + 1, argv + argc}));
    return 0;
  } catch (const UsageError& error) {
    std::fprintf(stderr,
                 "following: %s\nusage: following TEXT [--recipe NAME[:ROUNDING]]... [--steps N] [--seeds N] "
                 "[--layers N] [--width N] [--heads N] [--context N] [--batch N] [--lr RATE] [--threads N]\n",
                 error.what());
    return 2;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "following: %s\n", error.what());
    return 1;
  }
}
