// `scruple compare`: every recipe trains the same small language model on the same batches of a text whose
// entropy is known; then the same for what goes wrong without them.
#include <algorithm>
#include <array>
#include <iostream>
#include <memory>
#include <optional>
#include <sstream>

#include "commands.h"
#include "comparison.h"
#include "io/file.h"
#include "progress.h"
#include "room.h"
#include "text.h"
#include "train/run/folder.h"
#include "train/text/corpus.h"

namespace scruple::cli {
namespace {

using train::Corpus;
using train::Grammar;
using train::Ledger;
using train::Record;
using train::Trainer;
using train::Windows;

constexpr const char* kFooter =
    R"(Every run begins with the same weights and sees the same batches. fp32 runs once more from another
seed: a gap to fp32 that is no larger than that is noise.

Columns:
  B/param     bytes of weights, moments and gradients per parameter, planned and measured
  peak MiB    all model memory at its peak, activations and workspace included
  ms/step     forward, backward and optimizer; without validations
  unmoved     share of the weights in fewer than 32 bits that a step with momentum leaves as they
              are, mean of the steps before validations: rounded to nearest, what does not move is
              lost
  val loss    nats per byte, or per token of a folder's model
  gap         to the fp32 run of the same optimizer and seed
  sd          with --seeds: standard deviation over the seeds; losses and gaps are then means

Examples:
  scruple compare
  scruple compare --recipes fp32,scruple,scant --seeds 3 --out demo
  scruple compare --model ./SmolLM2-135M --data notes.jsonl --recipes fp32,scruple --steps 50)";

// Long enough that no window is seen twice in the runs that people wait for.
constexpr std::int64_t kTrainingBytes = 4 << 20, kValidationBytes = 1 << 18;
constexpr std::uint64_t kGrammar = 1, kOtherGrammar = 2, kTrainingSeed = 1, kValidationSeed = 2;

constexpr const char* kSmallRate =
    "Fine-tuning at a small learning rate on a text of other words. A bf16 weight has 8 significant bits: an "
    "update below half its last bit is rounded away, and the weight stands still. 8 extra bits keep it.";
constexpr const char* kHalf =
    "Activations and their gradients in fp16. The loss is divided by 256, as in one of the 256 micro-batches "
    "of 2,048 tokens that make a batch of GPT-2's size. Most gradients are then below the smallest fp16 "
    "number and vanish, unless the loss is scaled up.";

// The hazards: fine-tuning at the peak rate over this; a loss divided as in one of so many micro-batches.
constexpr double kSmallRateOver = 250;
constexpr float kMicroBatches = 256;

// What is learned, cut into windows.
struct Text {
  Windows training, validation;
  std::shared_ptr<const void> owner;  // of the bytes
};

// The grammar's own loss on the windows that a validation takes. They are cut in the middle of a line, and a
// line is harder to guess at its beginning, so this is above the entropy, which counts whole lines.
double floor_of(const Grammar& grammar, const Windows& windows) {
  const std::int64_t count = train::validated_windows(train::Span().validation_windows, windows);
  std::vector<std::int32_t> tokens(static_cast<std::size_t>(windows.context())), targets = tokens;
  double nats = 0;
  for (std::int64_t i = 0; i < count; ++i) {
    windows.read(windows.even_start(i, count), tokens.data(), targets.data());
    nats += grammar.surprise(std::string(targets.begin(), targets.end()));
  }
  return nats / static_cast<double>(count * windows.context());
}

// The windows begin with a line.
Text text_of(const Grammar& grammar, std::int64_t context) {
  const auto corpora = std::make_shared<std::array<Corpus, 2>>(std::array{
      grammar.sample(kTrainingBytes, kTrainingSeed), grammar.sample(kValidationBytes, kValidationSeed)});
  const auto windows = [&](const Corpus& corpus) {
    return Windows(corpus.bytes, context, corpus.line_starts);
  };
  return {windows(corpora->front()), windows(corpora->back()), corpora};
}

Text text_of(const CompareOptions& options) {
  const ChosenModel& model = options.chosen;
  const std::int64_t context = model.config.shape.context;
  if (options.data.empty()) return text_of(Grammar(kGrammar), context);
  const std::string tokenizer = model.folder ? model.folder->folder() : "";
  const auto file = std::make_shared<train::Data>(open_data(options.data, options.cutting, model, tokenizer));
  return {file->training(), file->validation(), file};
}

bool is_adaptive(const std::string& recipe) {
  for (const scruple_recipe_info& info : all_recipes())
    if (info.name == recipe) return info.nonneg != nullptr;
  return true;  // the library says what it knows of an unknown name
}

train::Schedule schedule_for(const CompareOptions& options, const std::string& optimizer) {
  const double peak = optimizer == "sgd" ? options.sgd_lr : options.lr;
  return {train::Annealing::cosine, peak, std::max<std::int64_t>(options.model.steps / 20, 1),
          options.model.steps};
}

using Weights = std::vector<std::vector<float>>;

Weights weights_of(Trainer& trainer) {
  Weights all;
  for (std::size_t p = 0; p < trainer.state().parameters().size(); ++p)
    all.push_back(trainer.state().master(static_cast<int>(p)));
  return all;
}

// One run; fills in everything but the gap. `from`: the weights to start from, and those it ended with.
Run run_one(const std::string& name, const Choice& choice, const std::string& policy, const train::Job& job,
            const Text& text, Weights* from) try {
  Ledger ledger(free_memory(job));
  Trainer trainer(job, ledger);
  if (from != nullptr && !from->empty())
    for (std::size_t p = 0; p < from->size(); ++p)
      trainer.state().set(static_cast<int>(p), (*from)[p].data());
  Progress progress(name, job, trainer);
  train::Span span = span_of(job.schedule.steps);
  span.validating = [&](auto done, auto all) { progress.validating(done, all); };
  const Record record = train::run(trainer, text.training, text.validation, span, [&](const Record& seen) {
    progress.show(seen, train::seconds_left(seen, span));
  });
  if (from != nullptr) *from = weights_of(trainer);
  const auto params = static_cast<double>(trainer.state().size());
  const Memory plan = plan_of(choice, choice.recipe, job, policy);
  return {.name = name,
          .recipe = choice.recipe,
          .optimizer = choice.optimizer,
          .activations = precision_name(job.activations),
          .seed = job.seed,
          .measured = measured_parts(ledger, plan),
          .planned_each = static_cast<double>(plan.total()) / params,
          .measured_each = static_cast<double>(measured_total(ledger)) / params,
          .peak = ledger.peak(),
          .steps = job.schedule.steps,
          .record = record,
          .gap = {}};
} catch (const std::exception& error) {
  rethrow_shortage(error, job, savings(job, false));
}

class Comparer {
 public:
  explicit Comparer(const CompareOptions& options) : options_(options), text_(text_of(options)) {
    found_.params = train::parameter_count(options.chosen.config.shape);
    found_.has_weights = options.chosen.has_weights();
    found_.step = step_words(job_for(choice_for("fp32", "adamw"), options.model, options.gradients),
                             text_.training.layout());
    if (options.model.device == "cuda") found_.gpu = train::cuda_backend(options.model.threads)->device();
  }

  // What cannot be run is refused before anything is.
  void check_runs() const {
    for (const auto& [recipe, optimizer] : runs()) {
      const train::Job job = job_of(recipe, optimizer);
      check_room("recipe " + recipe, choice_for(recipe, optimizer), job, options_.gradients.policy,
                 savings(job, false));
      Ledger ledger(free_memory(job));
      const Trainer trainer(job, ledger);
    }
    if (options_.no_hazards) return;
    const Choice largest = choice_for("fp32", "adamw");  // of the hazards, which store their gradients
    check_room("recipe fp32 with stored gradients, which --no-hazards leaves out,", largest,
               job_for(largest, options_.model, {}), "stored",
               "choose a smaller model, --batch or --context");
  }

  Comparison run() {
    const Interrupts interrupts;
    if (options_.data.empty()) found_.floor = floor_of(Grammar(kGrammar), text_.validation);
    const std::vector<std::pair<std::string, std::string>> wanted = runs();
    for (int s = 0; s < std::max(options_.seeds, 1); ++s) {
      options_.model.seed = static_cast<std::uint64_t>(s) + 1;
      for (const auto& [recipe, optimizer] : wanted) {
        const bool first = s == 0 && recipe == "fp32" && optimizer == "adamw";
        train(found_.runs, recipe, optimizer, first ? &trained_ : nullptr);
      }
    }
    for (Run& run : found_.runs) run.gap = gap_of(run, run.seed);
    if (options_.seeds == 0) second_seed(wanted);
    if (!options_.no_hazards && !found_.stopped) hazards();
    return found_;
  }

 private:
  static void check_room(const std::string& what, const Choice& choice, const train::Job& job,
                         const std::string& policy, const std::string& advice) {
    checked_memory(what, job, plan_of(choice, choice.recipe, job, policy), advice);
  }

  // (recipe, optimizer) of every run, each fp32 twin before those that are measured by it.
  std::vector<std::pair<std::string, std::string>> runs() const {
    std::vector<std::string> names;
    if (options_.recipes.empty()) {
      for (const scruple_recipe_info& info : all_recipes()) names.emplace_back(info.name);
    } else {
      std::stringstream list(options_.recipes);
      for (std::string name; std::getline(list, name, ',');) {
        std::erase(name, ' ');
        if (std::find(names.begin(), names.end(), name) == names.end()) names.push_back(name);
      }
    }
    std::vector<std::pair<std::string, std::string>> adaptive = {{"fp32", "adamw"}},
                                                     momentum = {{"fp32", "sgd"}};
    for (const std::string& name : names)
      if (name != "fp32") (is_adaptive(name) ? adaptive : momentum).emplace_back(name, optimizer_for(name));
    const bool asked = std::find(names.begin(), names.end(), "fp32") != names.end();
    if (adaptive.size() == 1 && !asked) adaptive.clear();
    if (momentum.size() > 1) adaptive.insert(adaptive.end(), momentum.begin(), momentum.end());
    return adaptive;
  }

  static const char* optimizer_for(const std::string& recipe) {
    return is_adaptive(recipe) ? "adamw" : "sgd";
  }

  Choice choice_for(const std::string& recipe, const std::string& optimizer) const {
    Choice choice;
    choice.recipe = recipe;
    choice.optimizer = optimizer;
    const double decay = optimizer == "sgd" ? 0 : options_.weight_decay;
    choice.hypers = {"weight_decay=" + shortest(decay, 17)};
    return choice;
  }

  // With activations in the type that the weights are computed in, on every device: fp32 is the reference.
  train::Job job_for(const Choice& choice, const ModelOptions& model,
                     const GradientOptions& gradients) const {
    train::Job job = make_job(choice, choice.recipe, model, options_.chosen, gradients,
                              computed_in(choice, choice.recipe));
    fit(job, model);
    return job;
  }

  train::Job job_of(const std::string& recipe, const std::string& optimizer) const {
    GradientOptions gradients = options_.gradients;
    ModelOptions model = options_.model;
    if (recipe == "lpmm") split(model, gradients);
    train::Job job = job_for(choice_for(recipe, optimizer), model, gradients);
    job.isolates = text_.training.isolates();
    job.schedule = schedule_for(options_, optimizer);
    return job;
  }

  void train(std::vector<Run>& into, const std::string& recipe, const std::string& optimizer,
             Weights* weights) {
    if (found_.stopped) return;
    const std::string name =
        recipe + (optimizer == "adamw" ? "" : ", " + optimizer) + (&into == &found_.again ? ", seed 2" : "");
    into.push_back(run_one(name, choice_for(recipe, optimizer), options_.gradients.policy,
                           job_of(recipe, optimizer), text_, weights));
    found_.stopped = into.back().record.stopped;
  }

  // The references once more, from other weights and batches: how far apart two runs are that nothing but
  // chance tells apart.
  void second_seed(const std::vector<std::pair<std::string, std::string>>& wanted) {
    options_.model.seed = 2;
    for (const auto& [recipe, optimizer] : wanted)
      if (recipe == "fp32") train(found_.again, recipe, optimizer, nullptr);
    for (Run& run : found_.again) run.gap = gap_of(run, 1);
  }

  // LPMM's micro-batching: the same windows, folded into the low-bit accumulators in several parts.
  void split(ModelOptions& model, GradientOptions& gradients) const {
    model.batch /= options_.micro_batches;
    gradients.accumulate *= options_.micro_batches;
  }

  // To the fp32 run of this seed.
  std::optional<double> gap_of(const Run& run, std::uint64_t seed) const {
    for (const Run& other : found_.runs)
      if (other.recipe == "fp32" && other.optimizer == run.optimizer && other.seed == seed &&
          other.complete() && run.complete())
        return run.record.final_loss() - other.record.final_loss();
    return {};
  }

  void hazards();
  void run_hazard(const Hazard& hazard, const std::string& name, const Choice& choice, const train::Job& job,
                  const Text& text, Weights from);

  CompareOptions options_;
  Text text_;
  Weights trained_;  // by fp32 AdamW
  Comparison found_;
};

void Comparer::run_hazard(const Hazard& hazard, const std::string& name, const Choice& choice,
                          const train::Job& job, const Text& text, Weights from) {
  if (found_.stopped) return;
  if (found_.hazards.empty() || found_.hazards.back().key != hazard.key) found_.hazards.push_back(hazard);
  std::vector<Run>& runs = found_.hazards.back().runs;
  runs.push_back(run_one(name, choice, options_.gradients.policy, job, text, &from));
  found_.stopped = runs.back().record.stopped;
}

void Comparer::hazards() {
  options_.model.seed = 1;
  options_.gradients = {};  // they are about weights and activations
  const std::int64_t steps = std::max<std::int64_t>(options_.model.steps / 4, 1);
  const auto choose = [&](const char* recipe, const char* weights) {
    Choice choice = choice_for(recipe, "adamw");
    choice.weights = weights;
    return choice;
  };

  if (!trained_.empty()) {
    const Text other = text_of(Grammar(kOtherGrammar), options_.chosen.config.shape.context);
    const auto tune = [&](const char* name, const Choice& choice) {
      train::Job job = job_for(choice, options_.model, options_.gradients);
      job.schedule = {train::Annealing::constant, options_.lr / kSmallRateOver, 0, steps};
      run_hazard({"A small learning rate", "small_learning_rate", kSmallRate, {}}, name, choice, job, other,
                 trained_);
    };
    tune("fp32", choose("fp32", ""));
    tune("scruple: 24-bit weights", choose("scruple", ""));
    tune("bf16 weights, no extra bits", choose("scruple", "bf16"));
  }

  const auto half = [&](const char* name, const Choice& choice, const char* activations,
                        scruple_scaler scaler) {
    train::Job job =
        make_job(choice, choice.recipe, options_.model, options_.chosen, options_.gradients, activations);
    job.schedule = {train::Annealing::cosine, options_.lr, std::max<std::int64_t>(steps / 5, 1), steps};
    job.isolates = text_.training.isolates();
    job.scaler = scaler;
    job.scaler.scale /= kMicroBatches;
    run_hazard({"fp16 without loss scaling", "fp16", kHalf, {}}, name, choice, job, text_, {});
  };
  scruple_scaler one;
  check(scruple_scaler_static(1, &one));
  half("fp32", choose("fp32", ""), "fp32", one);
  half("fp16, dynamic loss scale", choose("mixed", "fp16+fp32"), "fp16", scruple_scaler_dynamic());
  half("fp16, no loss scale", choose("mixed", "fp16+fp32"), "fp16", one);
}

void compare(const CompareOptions& options) {
  if (options.model.batch % options.micro_batches != 0)
    throw UsageError("--micro-batches is " + std::to_string(options.micro_batches) +
                     "; it must divide --batch, " + std::to_string(options.model.batch));
  const std::string path = options.out + "/report.html";
  Comparer comparer(options);
  comparer.check_runs();
  if (!options.out.empty()) {
    train::make_folder(options.out);
    const io::NewFile probe(path);  // what could not be written after is refused before
  }
  const Comparison found = comparer.run();
  options.as_json ? print_json(found, options) : print(found, options);
  if (!options.out.empty()) {
    io::write_text(path, train::to_html(report_of(found, options)));
    if (!options.as_json) std::cout << "\nCurves and memory: " << path << '\n';
  }
  if (found.stopped) throw Stopped{Interrupts::signal()};
}

void run(const CLI::App& command, CompareOptions& options) {
  refuse_sizes(options.model, command);
  for (const char* name : {"--layout", "--isolate", "--validation"})
    if (options.data.empty() && is_given(command, name))
      throw UsageError(std::string(name) + " is for --data, which is not given; leave it out, or add --data");
  options.chosen = choose_model(options.model);
  if (!options.model.is_gpt()) {
    if (options.data.empty())
      throw UsageError("--model " + options.model.model + " needs --data; the grammar's text is for gpt");
    options.no_hazards = true;  // they are of the grammar's text
  }
  if (options.chosen.has_weights() && !is_given(command, "--lr")) options.lr = kTuningLr;
  if (options.chosen.has_weights() && !is_given(command, "--sgd-lr")) options.sgd_lr = kTuningSgdLr;
  options.model.device = device_for(options.model.device);
  check_device(options.model.device);
  compare(options);
}

}  // namespace

OptionTable CompareOptions::options() {
  OptionTable of_data = cutting.options();
  row_named(of_data, "--validation").check = a_share();  // losses are what it compares
  row_named(of_data, "--validation").help = "share of the data for validation, from its end";
  OptionTable of_model = model.options();
  std::erase_if(of_model, [](const Option& option) { return option.name == "--seed"; });
  return joined(
      {{{kData, "--data", "", &data, "PATH", "as in train (default: a text that a seeded grammar makes)"}},
       of_data,
       {{kMemory, "--recipes", "", &recipes, "NAMES",
         "with commas between (default: all that the device serves)"}},
       gradients.options(),
       {{kMemory, "--micro-batches", "", &micro_batches, "N",
         "lpmm: parts of a batch that are folded one by one", whole_from(1)},
        {kOptimizer, "--lr", "", &lr, "RATE",
         "peak learning rate of AdamW; of a folder's weights " + shortest(kTuningLr), above_zero()},
        {kOptimizer, "--sgd-lr", "", &sgd_lr, "RATE",
         "peak learning rate of SGD; of a folder's weights " + shortest(kTuningSgdLr), above_zero()},
        {kOptimizer, "--weight-decay", "", &weight_decay, "X", "of AdamW", not_negative()},
        {kRun, "--seeds", "", &seeds, "N",
         "runs of each recipe, from seed 1 on (default: 1, and fp32 again from 2)", whole_from(1, 1000)},
        {kRun, "--out", "", &out, "DIR", "folder to write report.html into"}},
       of_model,
       {{kRun, "--no-hazards", "", &no_hazards, "", "leave out what goes wrong without the recipes"},
        {kRun, "--json", "", &as_json, "", "print one JSON object with a list 'rows'"}}});
}

void add_compare(CLI::App& program) {
  const auto options = std::make_shared<CompareOptions>();
  options->model.shape.layers = 2, options->model.shape.width = 64;
  options->model.steps = 400;
  add_command(program, "compare", "Train every recipe on the same text and compare them", "Choose a recipe",
              kFooter, options->options(), [options](const CLI::App& command) { run(command, *options); });
}

}  // namespace scruple::cli
