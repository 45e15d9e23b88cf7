// `scruple bench`: how fast the optimizer step runs here, against the copy bandwidth measured in the same
// run.
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <iostream>
#include <memory>
#include <nlohmann/json.hpp>

#include "choice.h"
#include "commands.h"
#include "memory.h"
#include "text.h"

namespace scruple::cli {
namespace {

using nlohmann::ordered_json;

constexpr const char* kFooter =
    R"(Columns:
  M params/s  millions of parameters stepped per second: the median of the repeats
  moved B     bytes that a step must move per parameter: it reads and writes weights and moments,
              and reads gradients
  GB/s        params/s * moved B
  copy GB/s   what a copy of 256 MiB (CUDA: 1 GiB) reaches, read + written, in the same run
  of copy     GB/s over copy GB/s: 1 is the speed of memory

Examples:
  scruple bench
  scruple bench --recipe scruple --params 64M --threads 2
  scruple bench --device cuda --params 1.1G)";

// Too large for any cache of its processor.
constexpr std::int64_t kCpuCopyBytes = std::int64_t{256} << 20;
constexpr std::int64_t kCudaCopyBytes = std::int64_t{1} << 30;
constexpr std::int64_t kPiece = std::int64_t{1} << 20;  // elements filled in at a time
constexpr double kShortest = 0.01;                      // seconds; what is shorter is timed several at once

struct Options {
  Choice choice;
  std::string params = "67108864";
  std::string tensors = "1";
  std::string engine = "cpu";
  int threads = 0;
  int repeat = 7;
  bool as_json = false;
};

struct Row {
  std::string recipe;
  double params_per_s = 0, best_params_per_s = 0, moved = 0, copy_gb_per_s = 0;
  double gb_per_s() const { return params_per_s * moved / 1e9; }
};

bool is_cuda(const Engine& engine) { return std::string(engine.name()).starts_with("cuda"); }

void wait_for(Engine& engine) { check(scruple_engine_synchronize(engine.raw())); }

// Until the engine has done it, not only queued it.
template <class Body>
double seconds(Engine& engine, const Body& body) {
  const auto start = std::chrono::steady_clock::now();
  body();
  wait_for(engine);
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

// How many of what takes `once` seconds fill kShortest.
int at_once(double once) { return std::max(1, static_cast<int>(kShortest / std::max(once, 1e-7))); }

// Values like those of training: a bell around 0 (four uniform numbers summed), by a linear congruential
// generator.
std::vector<float> bell(float spread, std::int64_t count) {
  std::uint64_t state = 42;
  const auto uniform = [&] {
    state = state * 6364136223846793005u + 1442695040888963407u;
    return static_cast<float>(static_cast<std::int32_t>(state >> 32)) * 0x1p-31f;
  };
  std::vector<float> values(static_cast<std::size_t>(count));
  for (float& value : values) value = spread * (uniform() + uniform() + uniform() + uniform());
  return values;
}

// Every piece of the tensor gets the same values: making up a billion would take longer than the measurement.
void fill(Engine& engine, const scruple_tensor& tensor, int array, const std::vector<float>& values) {
  const auto at_most = static_cast<std::int64_t>(values.size());
  for (std::int64_t first = 0; first < tensor.size; first += at_most) {
    scruple_tensor piece;
    check(scruple_tensor_view(&tensor, first, std::min(at_most, tensor.size - first), &piece));
    check(scruple_encode(engine.raw(), &piece, array, values.data()));
  }
}

// The tensors of one recipe, in memory and filled.
class Workload {
 public:
  Workload(Engine& engine, const std::vector<scruple_tensor>& descriptions) : engine_(engine) {
    std::int64_t largest = 0;
    for (const scruple_tensor& description : descriptions) largest = std::max(largest, description.size);
    const std::vector<float> weights = bell(0.02f, std::min(largest, kPiece));
    const std::vector<float> gradients = bell(1e-3f, std::min(largest, kPiece));
    for (const scruple_tensor& description : descriptions) {
      Tensor& tensor = owners_.emplace_back(engine, description);
      check(scruple_tensor_alloc(engine.raw(), &tensor.raw(), 1u << SCRUPLE_GRADIENT));
      fill(engine, tensor.raw(), SCRUPLE_WEIGHT, weights);
      fill(engine, tensor.raw(), SCRUPLE_GRADIENT, gradients);
      table_.push_back(tensor.raw());
    }
    wait_for(engine);  // the values go out of scope
  }
  void step() {
    check(scruple_step(engine_.raw(), table_.data(), static_cast<std::int64_t>(table_.size()), nullptr));
    for (scruple_tensor& tensor : table_) ++tensor.step;
  }

 private:
  Engine& engine_;
  std::vector<Tensor> owners_;
  std::vector<scruple_tensor> table_;
};

// The yardstick: two buffers in the engine's memory.
class Copy {
 public:
  explicit Copy(Engine& engine) : engine_(engine), from_(buffer()), to_(buffer()) {
    const std::vector<float> values = bell(1.0f, kPiece);
    fill(engine, from_.raw(), SCRUPLE_WEIGHT, values);  // touched, and no zero pages
    wait_for(engine);
    run();
    times_ = at_once(seconds(engine, [&] { copy(); }));
  }
  double run() {
    const double time = seconds(engine_, [&] {
      for (int i = 0; i < times_; ++i) copy();
    });
    return 2e-9 * static_cast<double>(bytes(engine_)) * times_ / time;
  }
  static std::int64_t bytes(const Engine& engine) { return is_cuda(engine) ? kCudaCopyBytes : kCpuCopyBytes; }

 private:
  Tensor buffer() {
    scruple_tensor description = {};
    description.optimizer = stateless_.raw();
    description.size = bytes(engine_) / std::int64_t{sizeof(float)};
    description.arrays[SCRUPLE_WEIGHT].format = format_named("fp32");
    return Tensor(engine_, description);
  }
  void copy() {
    check(scruple_copy(engine_.raw(), to_.raw().arrays[SCRUPLE_WEIGHT].codes,
                       from_.raw().arrays[SCRUPLE_WEIGHT].codes, bytes(engine_)));
  }

  Engine& engine_;
  Optimizer stateless_{"sgd"};  // a tensor must have one
  Tensor from_, to_;
  int times_ = 1;
};

std::vector<scruple_tensor> describe_all(const Options& options, const Optimizer& optimizer,
                                         const std::string& recipe, std::int64_t params,
                                         std::int64_t tensors) {
  std::vector<scruple_tensor> all;
  for (std::int64_t i = 0; i < tensors; ++i) {
    const std::int64_t size = params / tensors + (i < params % tensors ? 1 : 0);
    const bool known = !all.empty() && all.back().size == size;
    all.push_back(known ? all.back() : options.choice.describe(optimizer, recipe, size));
    all.back().id = static_cast<std::uint32_t>(i);
  }
  return all;
}

struct Traffic {
  std::int64_t held = 0, moved = 0;
};

Traffic traffic_of(const std::vector<scruple_tensor>& tensors) {
  Traffic sum;
  for (const scruple_tensor& tensor : tensors)
    for (const int a : used_arrays(tensor)) {
      const std::int64_t bytes = plane_bytes(tensor.arrays[a].format, tensor.size).total();
      sum.held += bytes;
      sum.moved += a == SCRUPLE_GRADIENT ? bytes : 2 * bytes;
    }
  return sum;
}

Row measure_recipe(const Options& options, Engine& engine, Copy& copy, const std::string& recipe,
                   const std::vector<scruple_tensor>& tensors, std::int64_t params) {
  const Traffic traffic = traffic_of(tensors);
  Workload workload(engine, tensors);
  seconds(engine, [&] { workload.step(); });
  const int steps_at_once = at_once(seconds(engine, [&] { workload.step(); }));

  std::vector<double> times;
  Row row{recipe};
  for (int i = 0; i < options.repeat; ++i) {
    times.push_back(seconds(engine, [&] {
      for (int s = 0; s < steps_at_once; ++s) workload.step();
    }));
    row.copy_gb_per_s = std::max(row.copy_gb_per_s, copy.run());
  }
  std::sort(times.begin(), times.end());
  const double steps = static_cast<double>(params) * steps_at_once;
  row.params_per_s = steps / times[times.size() / 2];
  row.best_params_per_s = steps / times.front();
  row.moved = static_cast<double>(traffic.moved) / static_cast<double>(params);
  return row;
}

void print_json(const std::vector<Row>& rows, const std::vector<Refusal>& refusals, const Options& options,
                const Engine& engine, std::int64_t params, std::int64_t tensors) {
  ordered_json all = {{"rows", ordered_json::array()}, {"refused", ordered_json::array()}};
  for (const Row& row : rows)
    all["rows"].push_back({{"optimizer", options.choice.optimizer},
                           {"recipe", row.recipe},
                           {"params", params},
                           {"tensors", tensors},
                           {"threads", engine.threads()},
                           {"engine", engine.name()},
                           {"gradient_format", options.choice.gradient},
                           {"params_per_s", row.params_per_s},
                           {"best_params_per_s", row.best_params_per_s},
                           {"moved_bytes_per_param", row.moved},
                           {"gb_per_s", row.gb_per_s()},
                           {"copy_gb_per_s", row.copy_gb_per_s},
                           {"copy_fraction", row.gb_per_s() / row.copy_gb_per_s}});
  for (const Refusal& refusal : refusals)
    all["refused"].push_back({{"recipe", refusal.recipe}, {"reason", refusal.reason}});
  std::cout << all.dump(2) << '\n';
}

void print_table(const std::vector<Row>& rows, const std::vector<Refusal>& refusals, const Options& options,
                 const Engine& engine, std::int64_t params, std::int64_t tensors) {
  std::cout << options.choice.optimizer << ", " << plural(params, "parameter") << " in "
            << plural(tensors, "tensor") << ", " << options.choice.gradient << " gradients, " << engine.name()
            << (is_cuda(engine) ? "" : ", " + plural(engine.threads(), "thread")) << "\n\n";
  Table table;
  table.rows = {{"recipe", "M params/s", "moved B", "GB/s", "copy GB/s", "of copy"}};
  for (const Row& row : rows)
    table.rows.push_back({row.recipe, fixed(row.params_per_s / 1e6, 1), fixed(row.moved, 3),
                          fixed(row.gb_per_s(), 2), fixed(row.copy_gb_per_s, 2),
                          fixed(row.gb_per_s() / row.copy_gb_per_s, 3)});
  table.print(std::cout);
  for (const Refusal& refusal : refusals)
    std::cout << '\n' << refusal.recipe << ": " << refusal.reason << '\n';
}

void run(const Options& options) {
  const std::int64_t params = parse_count(options.params, "--params");
  const std::int64_t tensors = parse_count(options.tensors, "--tensors");
  if (tensors > params || tensors > 1'000'000)
    throw UsageError("--tensors is " + grouped(tensors) + ", and --params is " + grouped(params) +
                     "; choose at most as many tensors as parameters, and at most 1,000,000");
  const Optimizer optimizer = options.choice.make_optimizer();
  check_engine(options.engine);
  Engine engine(options.engine.c_str(), options.threads);
  std::unique_ptr<Copy> copy;  // once the first recipe is known to be sound
  std::vector<Row> rows;
  const bool progress = isatty(STDERR_FILENO) != 0;
  const std::vector<Refusal> refusals = for_each_recipe(options.choice, [&](const std::string& recipe) {
    const std::vector<scruple_tensor> table = describe_all(options, optimizer, recipe, params, tensors);
    const std::int64_t needed = traffic_of(table).held + (copy ? 0 : 2 * Copy::bytes(engine));
    if (const std::int64_t free = free_memory(); !is_cuda(engine) && needed > free)
      refuse_memory("recipe " + recipe, needed, size_words(free) + " are free", "choose fewer --params");
    if (progress) std::cerr << "\r\033[K" << recipe << "..." << std::flush;
    if (!copy) copy = std::make_unique<Copy>(engine);
    rows.push_back(measure_recipe(options, engine, *copy, recipe, table, params));
  });
  if (progress) std::cerr << "\r\033[K" << std::flush;
  (options.as_json ? print_json : print_table)(rows, refusals, options, engine, params, tensors);
}

}  // namespace

void add_bench(CLI::App& program) {
  const auto options = std::make_shared<Options>();
  options->choice.gradient = "bf16";
  add_command(
      program, "bench", "Measure the optimizer step against this machine's copy bandwidth", "Choose a recipe",
      kFooter,
      joined({{{kModel, "--params", "", &options->params, "COUNT", "number of parameters: 64M, 1.1G"},
               {kModel, "--tensors", "", &options->tensors, "COUNT",
                "split them evenly over this many tensors"}},
              options->choice.options(),
              options->choice.format_options(),
              {{kMemory, "--gradient-format", "", &options->choice.gradient, "FORMAT",
                "format of the gradients"},
               {kRun, "--engine,--device", "", &options->engine, "NAME", "as 'scruple list' names it"},
               {kRun, "--threads", "", &options->threads, "N", "CPU threads; 0: one per core",
                whole_from(0, 1024)},
               {kRun, "--repeat", "", &options->repeat, "N", "timed repeats of each recipe",
                whole_from(1, 10000)},
               {kRun, "--json", "", &options->as_json, "", "print one JSON object with a list 'rows'"}}}),
      [options](const CLI::App&) { run(*options); });
}

}  // namespace scruple::cli
