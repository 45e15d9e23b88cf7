// `scruple plan`: where every byte of a model's training state goes, recipe by recipe.
#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <iostream>
#include <memory>
#include <nlohmann/json.hpp>

#include "choice.h"
#include "commands.h"
#include "memory.h"
#include "names.h"
#include "text.h"
#include "train/model/families/families.h"
#include "train/model/files.h"
#include "train/model/model.h"
#if defined(SCRUPLE_HAS_TRAIN)
#include "room.h"
#include "training.h"
#endif

namespace scruple::cli {
namespace {

using nlohmann::ordered_json;

constexpr const char* kModels =
    "Columns:\n"
    "  weights      the codes of the weights\n"
    "  extra        bits or a master copy that complete a 16-bit weight\n"
    "  exp_avg...   the codes of each moment\n"
    "  scales       the scales of weights and moments\n"
    "  gradients    with their scales\n"
#if defined(SCRUPLE_HAS_TRAIN)
    "  activations, workspace   of a whole run, with --batch\n"
#endif
    "  total        all of these\n"
    "  released, compressed     the totals with these --gradients\n"
#if defined(SCRUPLE_HAS_TRAIN)
    "  host         what --offload keeps in host memory\n"
#endif
    "\n"
    "PATH is .safetensors files (shards add up), an index of shards, a config.json, or the folder of a\n"
    "model, a run or a checkpoint. Only shapes are read.\n"
    "Configs: ";  // planned_families()
constexpr const char* kExamples =
    ".\n"
    "\n"
#if !defined(SCRUPLE_HAS_TRAIN)
    "This build leaves the trainer out, and with it --batch, which counts a whole run.\n"
    "\n"
#endif
    "Examples:\n"
    "  scruple plan --params 8.03e9\n"
    "  scruple plan run1 --optimizer lion\n"
#if defined(SCRUPLE_HAS_TRAIN)
    "  scruple plan ./Qwen3-8B --recipe scruple --gradients compressed --batch 4 --recompute block\n"
#endif
    "  scruple plan --params 1.1B --weights bf16+4 --moments companded8 --second-moments log5";

struct Options {
  Choice choice;
  std::string params, policy;
  std::vector<std::string> files;
  std::int64_t batch = 0, context = 0;  // batch 0: the state alone
  int threads = 0;
  std::string device, recompute, activations;
  std::string offload, memory_limit;
  bool ema = false, as_json = false;
};

struct Row {
  std::string recipe, policy;
  Memory memory;
  std::int64_t released = 0, compressed = 0;                    // totals
  std::int64_t activations = 0, workspace = 0;                  // of a run with --batch
  std::vector<std::pair<std::string, std::int64_t>> host = {};  // of a run on a GPU, what lies in host memory
  std::vector<std::pair<std::string, std::string>> chosen = {};  // by --recompute auto and --offload auto
  std::int64_t too_much = 0;  // what it needs, where that is above --memory-limit

  std::int64_t total() const { return memory.total() + activations + workspace; }
  // Everything by name, in the order of columns.
  std::vector<std::pair<std::string, std::int64_t>> parts() const {
    std::vector<std::pair<std::string, std::int64_t>> all = memory.parts();
    if (activations > 0) all.insert(all.end(), {{"activations", activations}, {"workspace", workspace}});
    return all;
  }
  static constexpr const char* kSaves = "saves";  // of `host`: copies, from which they are written
  std::int64_t host_bytes(bool of_saves) const {
    std::int64_t sum = 0;
    for (const auto& [name, bytes] : host) sum += (name == kSaves) == of_saves ? bytes : 0;
    return sum;
  }
};

struct Plan {
  Model model;
  std::vector<Row> rows;
  std::vector<Refusal> refusals;
};

// Adds to a row what a run takes beside weights, moments and gradients.
using AddRun = std::function<void(Row&)>;

#if defined(SCRUPLE_HAS_TRAIN)
OptionTable run_options(Options& options) {
  options.device = kDevices[0];
  options.recompute = train::kRecomputes[0];
  return {
      {kRun, "--batch", "", &options.batch, "N",
       "count a whole 'scruple train' with this batch, which the next four, --recompute, --offload and "
       "--memory-limit describe",
       whole_from(1)},
      {kRun, "--context", "", &options.context, "N", "tokens of a window (default: as train)", whole_from(1)},
      recompute_option(options.recompute, ""),
      offload_option(options.offload, ""),
      {kMemory, "--memory-limit", "", &options.memory_limit, "SIZE",
       "tell whether the run fits, and choose by it where others are auto: 22GiB, 24GB"},
      {kRun, "--activations", "", &options.activations, "TYPE",
       either(train::kPrecisions) + " (default: as train)", one_of(train::kPrecisions)},
      {kRun, "--device", "", &options.device, "DEVICE", "cpu, cuda or auto", a_device(), false,
       kDeviceVariable},
      {kRun, "--threads", "", &options.threads, "N", "CPU threads, each with its own memory; 0: one per core",
       whole_from(0, 1024)}};
}

// The environment says where runs are trained, also where none is counted.
bool names_device(const Options& options) {
  const char* const set = std::getenv(kDeviceVariable);
  return options.device != kDevices[0] && (set == nullptr || options.device != set);
}

// cuda or cpu; "" without --batch.
std::string device_of_run(const Options& options) {
  return options.batch == 0 ? "" : device_for(options.device);
}

// None without --batch.
AddRun run_of(const Options& options) {
  if (options.batch == 0) {
    if (options.context > 0 || options.threads > 0 || names_device(options) ||
        options.recompute != train::kRecomputes[0] || !options.activations.empty() ||
        !options.offload.empty() || !options.memory_limit.empty())
      throw UsageError(
          "--context, --device, --threads, --recompute, --activations, --offload and --memory-limit describe "
          "a run; add its --batch");
    return {};
  }
  const bool any_recompute = options.recompute == kAuto, any_offload = options.offload == kAuto;
  if ((any_recompute || any_offload) && options.memory_limit.empty())
    throw UsageError(
        "--recompute auto and --offload auto choose what fits; say into how much: --memory-limit 22GiB");
  const std::int64_t limit =
      options.memory_limit.empty() ? kNoLimit : parse_size(options.memory_limit, "--memory-limit");
  if (options.files.size() != 1)
    throw UsageError("--batch counts the run of one model; name its folder or its config.json");
  ModelOptions run;
  run.model = options.files.front(), run.context = options.context, run.batch = options.batch;
  run.recompute = options.recompute, run.threads = options.threads;
  run.device = device_of_run(options), run.offload = options.offload;
  std::error_code ignored;
  if (std::filesystem::is_directory(run.model, ignored)) run.model += "/config.json";
  return [=, &options, model = choose_model(run)](Row& row) {
    GradientOptions gradients;
    gradients.policy = row.policy;
    train::Job job = make_job(options.choice, row.recipe, run, model, gradients, options.activations);
    job.ema = options.ema ? 0.999 : 0;  // any decay takes as much
    fit(job, any_recompute, any_offload && on_gpu(job), limit, kNoLimit);
    if (any_recompute) row.chosen.emplace_back("recompute", recompute_name(job));
    if (any_offload) row.chosen.emplace_back("offload", offload_words(job));
    const train::Ledger needed = train::memory_of(job);
    row.too_much = needed.peak() > limit ? needed.peak() : 0;
    row.activations = needed.peak("activations"), row.workspace = needed.peak("workspace");
    row.memory.gradients = needed.peak("gradients");  // a tile, where they are released
    for (const train::Ledger::Entry& entry : needed.host_entries())
      row.host.emplace_back(entry.kind, entry.peak);
    if (run.device == "cuda" && !job.offloads_state) row.host.emplace_back(Row::kSaves, row.memory.saved());
    if (!job.offloads_state) return;
    row.memory.extra = needed.peak("extra"), row.memory.scales = needed.peak("scales");
    for (auto& [name, bytes] : row.memory.slots) bytes = needed.peak(name);
  };
}
#else
OptionTable run_options(Options&) { return {}; }
AddRun run_of(const Options&) { return {}; }
std::string device_of_run(const Options&) { return ""; }
#endif

// Where a folder's weights do not fit its config.json, or its model is none of the trainer's, the plan says so.
void note_what_train_refuses(Model& model, const std::vector<std::string>& paths) {
  for (const std::string& path : paths) {
    std::error_code ignored;
    if (!std::filesystem::exists(path + "/config.json", ignored) || train::weight_files(path).empty())
      continue;
    try {
      const train::ModelFolder folder(path);
    } catch (const std::runtime_error& error) {
      model.notes.push_back(std::string("'scruple train' would refuse this model: ") + error.what());
    }
  }
}

Plan make_plan(const Options& options) {
  if (options.params.empty() == options.files.empty())
    throw UsageError("give either --params or a model, such as: scruple plan --params 8.03e9");
  Plan plan;
  const Choice& choice = options.choice;
  const Optimizer optimizer = choice.make_optimizer();
  plan.model =
      options.files.empty() ? one_tensor(parse_count(options.params, "--params")) : read_model(options.files);
  note_what_train_refuses(plan.model, options.files);
  const AddRun add_run = run_of(options);
  plan.refusals = for_each_recipe(choice, [&](const std::string& recipe) {
    const std::string policy = options.policy.empty() ? "stored" : options.policy;
    const auto with = [&](const std::string& other) {
      Memory memory = measure(choice, optimizer, recipe, plan.model, other);
      if (options.ema) memory.ema = ema_bytes(plan.model);
      return memory;
    };
    Row row = {recipe, policy, with(policy), with("released").total(), with("compressed").total()};
    if (add_run) add_run(row);
    plan.rows.push_back(row);
  });
  return plan;
}

void print_json(const Plan& plan, const Options& options) {
  ordered_json rows = ordered_json::array(), refusals = ordered_json::array();
  const auto object = [](const auto& pairs) {
    ordered_json all = ordered_json::object();
    for (const auto& [name, bytes] : pairs) all[name] = bytes;
    return all;
  };
  const std::string device = device_of_run(options);
  const double params = static_cast<double>(plan.model.params);
  for (const Row& row : plan.rows)
    rows.push_back({{"recipe", row.recipe},
                    {"optimizer", options.choice.optimizer},
                    {"gradients", row.policy},
                    {"bytes_per_param", static_cast<double>(row.total()) / params},
                    {"total_bytes", row.total()},
                    {"fits", row.too_much == 0},
                    {"chosen", object(row.chosen)},
                    {"host_bytes", row.host_bytes(false) + row.host_bytes(true)},
                    {"host_parts", object(row.host)},
                    {"parts", object(row.parts())}});
  for (const Refusal& refusal : plan.refusals)
    refusals.push_back({{"recipe", refusal.recipe}, {"reason", refusal.reason}});
  const ordered_json all = {{"params", plan.model.params},
                            {"tensors", plan.model.tensor_count()},
                            {"device", device.empty() ? ordered_json() : ordered_json(device)},
                            {"rows", rows},
                            {"refused", refusals},
                            {"notes", plan.model.notes}};
  std::cout << all.dump(2) << '\n';
}

// On a GPU a checkpoint is copied to host memory, and written from there.
std::string saves_words(const Plan& plan) {
  std::vector<std::int64_t> sizes;
  for (const Row& row : plan.rows)
    if (row.host_bytes(true) > 0) sizes.push_back(row.host_bytes(true));
  if (sizes.empty()) return "training waits for each save";
  const auto [least, most] = std::minmax_element(sizes.begin(), sizes.end());
  return "training goes on during a save where the host has memory for the copy, " + size_words(*least) +
         (*least < *most ? " to " + size_words(*most) : "");
}

void print_table(const Plan& plan, const Options& options) {
  std::int64_t largest = 0;
  for (const Row& row : plan.rows) largest = std::max(largest, row.total());
  const Unit unit = unit_for(largest);
  const double params = static_cast<double>(plan.model.params);
  const auto size = [&](std::int64_t bytes) {
    return bytes == 0 ? "-" : fixed(static_cast<double>(bytes) / unit.bytes, unit.bytes == 1 ? 0 : 2);
  };
  const auto each = [&](std::int64_t bytes) { return fixed(static_cast<double>(bytes) / params, 3); };
  const bool all_policies = options.policy.empty() && options.batch == 0;
  const auto offloads = [](const Row& row) { return row.host_bytes(false) > 0; };
  const bool any_offloads = std::any_of(plan.rows.begin(), plan.rows.end(), offloads);

  const std::string device = device_of_run(options);
  Table table;
  for (const Row& row : plan.rows) {
    std::vector<std::string> header = {"recipe"}, cells = {row.recipe};
    for (const auto& [name, value] : row.chosen) header.push_back(name), cells.push_back(value);
    for (const auto& [name, bytes] : row.parts()) header.push_back(name), cells.push_back(size(bytes));
    const auto add_total = [&](const char* name, std::int64_t bytes) {
      header.insert(header.end(), {name, "B/param"});
      cells.insert(cells.end(), {size(bytes), each(bytes)});
    };
    add_total("total", row.total());
    if (any_offloads) header.emplace_back("host"), cells.push_back(size(row.host_bytes(false)));
    if (all_policies) add_total("released", row.released), add_total("compressed", row.compressed);
    if (table.rows.empty()) table.rows.push_back(header);
    table.rows.push_back(cells);
  }
  std::cout << options.choice.optimizer << ", " << plural(plan.model.params, "parameter") << " in "
            << plural(plan.model.tensor_count(), "tensor") << ", gradients " << plan.rows.front().policy
            << (device.empty()     ? ""
                : device == "cuda" ? ", on a GPU"
                                   : ", on the CPU")
            << "; sizes in " << unit.name << "\n\n";
  table.print(std::cout);
  if (device == "cuda") std::cout << '\n' << saves_words(plan) << '\n';
  for (const Row& row : plan.rows)
    if (row.too_much > 0)
      std::cout << '\n'
                << row.recipe << " needs " << need_words(row.too_much) << ", and --memory-limit is "
                << options.memory_limit << '\n';
  for (const Refusal& refusal : plan.refusals)
    std::cout << '\n' << refusal.recipe << ": " << refusal.reason << '\n';
  for (const std::string& note : plan.model.notes) std::cout << '\n' << note << '\n';
}

}  // namespace

void add_plan(CLI::App& program) {
  const auto options = std::make_shared<Options>();
  add_command(program, "plan", "Show where every byte of the training state goes, per recipe",
              "Choose a recipe", kModels + train::planned_families() + kExamples,
              joined({{{kModel, "--params", "", &options->params, "COUNT",
                        "number of parameters: 8.03e9, 8.03B, 125M, 8030261248"},
                       {kModel, "--model,model", "", &options->files, "PATH",
                        "files or a folder to read the tensors' shapes from", anything(), false, nullptr,
                        /*takes_many=*/true}},
                      options->choice.options(),
                      {{kMemory, "--gradients", "", &options->policy, "POLICY",
                        either(kPolicies) + " (default: stored, and others' totals)", one_of(kPolicies)}},
                      options->choice.format_options(),
                      {{kMemory, "--ema", "", &options->ema, "",
                        "with a moving average of the weights (train --ema)"}},
                      run_options(*options),
                      {{kRun, "--json", "", &options->as_json, "",
                        "print one JSON object with a list 'rows'; sizes in bytes"}}}),
              [options](const CLI::App&) {
                const Plan plan = make_plan(*options);
                options->as_json ? print_json(plan, *options) : print_table(plan, *options);
              });
}

}  // namespace scruple::cli
