// `scruple compare`: every recipe trains the same small language model on the same batches of a text whose
// entropy is known; then the same for what goes wrong without them.
#include <algorithm>
#include <array>
#include <cmath>
#include <iostream>
#include <memory>
#include <new>
#include <nlohmann/json.hpp>
#include <optional>

#include "commands.h"
#include "io/file.h"
#include "text.h"
#include "train/run/report.h"
#include "train/text/corpus.h"
#include "training.h"

namespace scruple::cli {
namespace {

using nlohmann::ordered_json;
using train::Corpus;
using train::Grammar;
using train::Ledger;
using train::Record;
using train::Trainer;
using train::Windows;

constexpr const char* kFooter =
    "Every run starts from the same weights and sees the same batches: of a text that a seeded grammar "
    "makes,\n"
    "or of --data. The grammar's own validation loss is the least that a model can hope for.\n"
    "Without --seeds each recipe runs once, and fp32 once more from another seed: what differs as little "
    "from\n"
    "fp32 as fp32 from itself is noise.\n"
    "\n"
    "Columns:\n"
    "  B/param     bytes of weights, moments and gradients per parameter: planned, and counted in the run\n"
    "  peak MiB    all model memory at its peak, activations and workspace included\n"
    "  ms/step     forward, backward and optimizer; validations are not counted\n"
    "  val loss    nats per byte, or per token of a folder's model, on text that was not trained on\n"
    "  gap         to the fp32 run of the same optimizer and seed\n"
    "  sd          with --seeds: standard deviation over the seeds; the losses and gaps are then means\n"
    "\n"
    "Examples:\n"
    "  scruple compare\n"
    "  scruple compare --recipes fp32,scruple,scant --seeds 3 --steps 400 --json\n"
    "  scruple compare --data book.txt --layers 4 --width 128\n"
    "  scruple compare --model ./SmolLM2-135M --data notes.jsonl --recipes fp32,scruple --steps 50\n"
    "  scruple compare --out demo          writes demo/report.html";

// Long enough that no window is seen twice in the runs that people wait for.
constexpr std::int64_t kTrainingBytes = 4 << 20, kValidationBytes = 1 << 18;
constexpr std::uint64_t kGrammar = 1, kOtherGrammar = 2, kTrainingSeed = 1, kValidationSeed = 2;

// The hazards: fine-tuning at the peak rate over this; a loss divided as in one of so many micro-batches.
constexpr double kSmallRateOver = 250;
constexpr float kMicroBatches = 256;

struct Options {
  ModelOptions model;
  ChosenModel chosen;
  GradientOptions gradients;
  CuttingOptions cutting;
  std::string recipes, data, out;
  double lr = 1e-2, sgd_lr = 0.3, weight_decay = 0.1;
  int seeds = 0;  // 0: one, and fp32 from a second
  int micro_batches = 1;
  bool as_json = false, no_hazards = false;
};

struct Run {
  std::string name, recipe, optimizer, activations;
  std::uint64_t seed = 0;
  std::vector<std::pair<std::string, std::int64_t>> measured;
  double planned_each = 0, measured_each = 0;
  std::int64_t peak = 0, steps = 0;  // steps: those that it was to take
  Record record;
  std::optional<double> gap;  // none where this run or its fp32 twin was stopped

  bool complete() const { return !record.stopped; }
};

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

Text text_of(const Options& options) {
  const ChosenModel& model = options.chosen;
  const std::int64_t context = model.config.shape.context;
  if (options.data.empty()) return text_of(Grammar(kGrammar), context);
  const std::string tokenizer = model.folder ? model.folder->folder() : "";
  const auto file = std::make_shared<train::Data>(
      open_data(options.data, options.cutting.cutting(context), model, tokenizer));
  return {file->training(), file->validation(), file};
}

bool is_adaptive(const std::string& recipe) {
  for (const scruple_recipe_info& info : all_recipes())
    if (info.name == recipe) return info.nonneg != nullptr;
  return true;  // the library says what it knows of an unknown name
}

train::Schedule schedule_for(const Options& options, const std::string& optimizer) {
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
  const std::int64_t steps = job.schedule.steps;
  Progress progress(name, job, trainer, ledger);
  Run result;
  result.name = name;
  result.recipe = choice.recipe;
  result.optimizer = choice.optimizer;
  result.activations = precision_name(job.activations);
  result.seed = job.seed;
  result.steps = steps;
  train::Span span = span_of(steps);
  span.validating = [&](auto done, auto all) { progress.validating(done, all); };
  result.record = train::run(trainer, text.training, text.validation, span, [&](const Record& record) {
    progress.show(record, train::seconds_left(record, span));
  });
  if (from != nullptr) *from = weights_of(trainer);
  const auto params = static_cast<double>(trainer.state().size());
  const Memory plan = plan_of(choice, choice.recipe, job, policy);
  result.measured = measured_parts(ledger, plan);
  result.planned_each = static_cast<double>(plan.total()) / params;
  result.measured_each = static_cast<double>(measured_total(ledger)) / params;
  result.peak = ledger.peak();
  return result;
} catch (const std::bad_alloc&) {
  rethrow_shortage(job, savings(job, false));
}

// Everything that compare found out, to print and to draw.
struct Comparison {
  std::optional<double> floor;  // the least validation loss that a model can hope for, where it is known
  std::int64_t params = 0;
  bool has_weights = false;  // the model begins with a folder's, whatever the seed
  std::string gpu;           // that the runs are on; "": the CPU
  std::vector<Run> runs;
  std::vector<Run> again;             // fp32 from a second seed, with its gap to the first
  std::vector<Run> small_rate, half;  // the hazards
  bool stopped = false;               // in the last run of the last list that has any

  const Run& last() const {
    for (const std::vector<Run>* list : {&half, &small_rate, &again})
      if (!list->empty()) return list->back();
    return runs.back();
  }
};

class Comparer {
 public:
  explicit Comparer(const Options& options) : options_(options), text_(text_of(options)) {
    found_.params = train::parameter_count(options.chosen.config.shape);
    found_.has_weights = options.chosen.has_weights();
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
      const bool on_gpu = options_.model.device == "cuda";
      for (const scruple_recipe_info& info : all_recipes())
        if (!on_gpu || serves_gpu(choice_for(info.name, optimizer_for(info.name)), info.name))
          names.emplace_back(info.name);
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
    return make_job(choice, choice.recipe, model, options_.chosen, gradients,
                    computed_in(choice, choice.recipe));
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
  void run_hazard(std::vector<Run>& into, const std::string& name, const Choice& choice,
                  const train::Job& job, const Text& text, Weights from);

  Options options_;
  Text text_;
  Weights trained_;  // by fp32 AdamW
  Comparison found_;
};

void Comparer::run_hazard(std::vector<Run>& into, const std::string& name, const Choice& choice,
                          const train::Job& job, const Text& text, Weights from) {
  if (found_.stopped) return;
  into.push_back(run_one(name, choice, options_.gradients.policy, job, text, &from));
  found_.stopped = into.back().record.stopped;
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
      run_hazard(found_.small_rate, name, choice, job, other, trained_);
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
    run_hazard(found_.half, name, choice, job, text_, {});
  };
  scruple_scaler one;
  check(scruple_scaler_static(1, &one));
  half("fp32", choose("fp32", ""), "fp32", one);
  half("fp16, dynamic loss scale", choose("mixed", "fp16+fp32"), "fp16", scruple_scaler_dynamic());
  half("fp16, no loss scale", choose("mixed", "fp16+fp32"), "fp16", one);
}

// ---- What it looks like ----

double mean(const std::vector<double>& values) {
  double sum = 0;
  for (const double value : values) sum += value;
  return sum / static_cast<double>(values.size());
}

double deviation(const std::vector<double>& values) {
  const double middle = mean(values);
  double sum = 0;
  for (const double value : values) sum += (value - middle) * (value - middle);
  return values.size() < 2 ? 0 : std::sqrt(sum / static_cast<double>(values.size() - 1));
}

// The runs of one recipe over all seeds. One that was stopped stands alone: it is no part of a mean.
std::vector<std::vector<const Run*>> by_recipe(const std::vector<Run>& runs) {
  std::vector<std::vector<const Run*>> groups;
  for (const Run& run : runs) {
    const auto same = std::find_if(groups.begin(), groups.end(), [&](const auto& g) {
      return run.complete() && g[0]->complete() && g[0]->name == run.name;
    });
    if (same == groups.end())
      groups.push_back({&run});
    else
      same->push_back(&run);
  }
  return groups;
}

template <class Value>
std::vector<double> each(const std::vector<const Run*>& runs, const Value& value) {
  std::vector<double> all;
  all.reserve(runs.size());
  for (const Run* run : runs) all.push_back(value(*run));
  return all;
}

std::string with_sign(double value) {
  const std::string text = fixed(value, 4);
  return text.starts_with("-") || text == "nan" ? text : "+" + text;
}

// The loss at the end of a run, or the last that a stopped one has.
std::string loss_words(const Run& run) {
  if (run.record.validations.empty()) return "-";
  const std::string loss = fixed(run.record.final_loss(), 4);
  return run.complete() ? loss : loss + " (after step " + grouped(run.record.validations.back().first) + ")";
}

// Of what seeds a row is, where that is not all that were asked for.
std::string seed_words(const std::vector<const Run*>& runs, const Options& options) {
  if (options.seeds < 2 || runs.size() == static_cast<std::size_t>(options.seeds)) return "";
  if (!runs[0]->complete()) return ", seed " + std::to_string(runs[0]->seed);
  return ", " + std::to_string(runs.size()) + " of " + plural(options.seeds, "seed");
}

std::vector<std::vector<std::string>> table_of_runs(const Comparison& found, const Options& options) {
  const bool spread = options.seeds > 1;
  std::vector<std::string> heads = {"recipe",   "optimizer", "B/param planned", "measured",
                                    "peak MiB", "ms/step",   "val loss"};
  if (spread) heads.emplace_back("sd of loss");
  heads.emplace_back("gap to fp32");
  if (spread) heads.emplace_back("sd of gap");
  std::vector<std::vector<std::string>> rows = {heads};
  const auto add = [&](const std::string& name, const std::vector<const Run*>& runs, bool reference) {
    const Run& run = *runs.front();
    const auto loss = each(runs, [](const Run& r) { return r.record.final_loss(); });
    const auto time = each(runs, [](const Run& r) { return r.record.ms_per_step(); });
    std::vector<double> gaps;
    for (const Run* one : runs)
      if (one->gap && !reference) gaps.push_back(*one->gap);
    const auto sd = [](const std::vector<double>& of) {
      return of.size() < 2 ? "-" : fixed(deviation(of), 4);
    };
    std::vector<std::string> row = {name, run.optimizer, fixed(run.planned_each, 3)};
    if (run.record.steps.empty())
      row.insert(row.end(), {"-", "-", "-"});  // a step would have taken more
    else
      row.insert(row.end(), {fixed(run.measured_each, 3), fixed(static_cast<double>(run.peak) * 0x1p-20, 2),
                             fixed(mean(time), 1)});
    row.push_back(runs.size() == 1 ? loss_words(run) : fixed(mean(loss), 4));
    if (spread) row.push_back(sd(loss));
    row.push_back(gaps.empty() ? "-" : with_sign(mean(gaps)));
    if (spread) row.push_back(sd(gaps));
    rows.push_back(row);
  };
  for (const auto& runs : by_recipe(found.runs)) {
    const bool reference = runs[0]->recipe == "fp32";
    add(runs[0]->recipe + seed_words(runs, options), runs, reference);
    if (!reference) continue;
    for (const Run& run : found.again)
      if (run.optimizer == runs[0]->optimizer) add("fp32, seed 2", {&run}, false);
  }
  return rows;
}

// What of the gaps is noise.
std::string about_noise(const Comparison& found, const Options& options) {
  if (options.seeds == 1)
    return "One seed: nothing here tells a gap from noise. Without --seeds, or with more, something does.";
  if (options.seeds > 1) {
    std::size_t fewest = found.runs.size(), most = 0;
    for (const auto& runs : by_recipe(found.runs))
      fewest = std::min(fewest, runs.size()), most = std::max(most, runs.size());
    if (most < 2)
      return "Stopped before any recipe had run from two seeds: nothing here tells a gap from noise.";
    return "Means over " + plural(options.seeds, "seed") +
           (fewest < static_cast<std::size_t>(options.seeds) ? ", or as many as were finished" : "") +
           "; sd is the standard deviation over them. A gap that is not well above its sd is noise.";
  }
  std::string away;
  for (const Run& run : found.again)
    if (run.gap) away += (away.empty() ? "" : ", ") + with_sign(*run.gap) + " with " + run.optimizer;
  if (away.empty())
    return "Stopped before fp32 had run from a second seed: nothing here tells a gap from noise.";
  return std::string("Seed 2 is fp32 ") +
         (found.has_weights ? "on other batches" : "from other weights and batches") +
         ", and nothing else: " + away + ". Gaps of that size are noise; --seeds 3 measures it better.";
}

std::vector<std::vector<std::string>> table_of_hazard(const std::vector<Run>& runs) {
  std::vector<std::vector<std::string>> rows = {{"run", "val loss before", "after", "learned"}};
  for (const Run& run : runs) {
    const double before = run.record.first_loss(), after = run.record.final_loss();
    rows.push_back({run.name, run.record.validations.empty() ? "-" : fixed(before, 4), loss_words(run),
                    run.complete() ? fixed(before - after, 4) : "-"});
  }
  return rows;
}

std::string heading(const Comparison& found, const Options& options) {
  const train::Description& shape = options.chosen.config.shape;
  const bool is_gpt = options.model.is_gpt();
  return (is_gpt ? "A byte-level GPT of "
                 : options.model.model + ", " + kind_words(options.chosen.config) + " of ") +
         grouped(found.params) + " parameters (" + plural(shape.layers, "layer") + ", width " +
         grouped(shape.width) + ", context " + grouped(shape.context) + ")" +
         (found.gpu.empty() ? "" : " on " + found.gpu) + ", " + plural(options.model.steps, "step") + " of " +
         grouped(options.model.batch * options.gradients.accumulate * shape.context) + " " +
         token_word(shape) + "s" +
         (found.floor ? "; the grammar that makes the text, which no model beats but by chance, has a "
                        "validation loss of " +
                            fixed(*found.floor, 4) + " nats per byte."
                      : " of " + options.data + ".");
}

// By what it was stopped, and where: "" where it was not.
std::string stop_words(const Comparison& found, const Options& options) {
  if (!found.stopped) return "";
  const Run& run = found.last();
  return std::string("Stopped by ") + Interrupts::name() + " in the run '" + run.name +
         (options.seeds > 1 ? ", seed " + std::to_string(run.seed) : "") + "', after step " +
         grouped(static_cast<std::int64_t>(run.record.steps.size())) + " of " + grouped(run.steps) +
         ": that run is not complete.";
}

constexpr const char* kOneSeed = "One seed: nothing here tells a small gap from noise.";
constexpr const char* kSmallRate =
    "Fine-tuning at a small learning rate on a text of other words. A bf16 weight has 8 significant bits: an "
    "update "
    "below half its last bit is rounded away, and the weight stands still. 8 extra bits keep it.";
constexpr const char* kHalf =
    "Activations and their gradients in fp16. The loss is divided by 256, as in one of the 256 micro-batches "
    "of 2,048 "
    "tokens that make a batch of GPT-2's size. Most gradients are then below the smallest fp16 number and "
    "vanish, unless "
    "the loss is scaled up.";

void print(const Comparison& found, const Options& options) {
  std::cout << heading(found, options) << "\n\n";
  Table{table_of_runs(found, options), {1}}.print(std::cout);
  std::cout << '\n' << about_noise(found, options) << '\n';
  if (!found.small_rate.empty()) {
    std::cout << '\n' << kSmallRate << "\n\n";
    Table{table_of_hazard(found.small_rate), {}}.print(std::cout);
  }
  if (!found.half.empty()) {
    std::cout << '\n' << kHalf << "\n\n";
    Table{table_of_hazard(found.half), {}}.print(std::cout);
  }
  if (found.stopped) std::cout << '\n' << stop_words(found, options) << '\n';
}

ordered_json json_of(const Run& run) {
  return {{"recipe", run.recipe},
          {"optimizer", run.optimizer},
          {"seed", run.seed},
          {"activations", run.activations},
          {"bytes_per_param_planned", run.planned_each},
          {"bytes_per_param_measured", run.measured_each},
          {"peak_bytes", run.peak},
          {"ms_per_step", run.record.ms_per_step()},
          {"steps", run.record.steps.size()},
          {"val_loss", run.complete() ? ordered_json(run.record.final_loss()) : ordered_json()},
          {"gap", run.gap ? ordered_json(*run.gap) : ordered_json()}};
}

void print_json(const Comparison& found, const Options& options) {
  ordered_json rows = ordered_json::array(), again = rows, hazards = ordered_json::object();
  for (const Run& run : found.runs) rows.push_back(json_of(run));
  for (const Run& run : found.again) again.push_back(json_of(run));
  const auto add = [&](const char* name, const std::vector<Run>& runs) {
    for (const Run& run : runs)
      hazards[name].push_back(
          {{"run", run.name},
           {"val_loss_before", run.record.first_loss()},
           {"val_loss", run.complete() ? ordered_json(run.record.final_loss()) : ordered_json()}});
  };
  add("small_learning_rate", found.small_rate);
  add("fp16", found.half);
  const ordered_json all = {{"floor", found.floor ? ordered_json(*found.floor) : ordered_json()},
                            {"params", found.params},
                            {"steps", options.model.steps},
                            {"rows", rows},
                            {"second_seed", again},
                            {"hazards", hazards},
                            {"stopped", found.stopped}};
  std::cout << all.dump(2) << '\n';
}

train::Chart chart_of(const std::string& title, const std::string& note, const std::string& unit,
                      const std::vector<Run>& runs, std::optional<double> floor) {
  train::Chart chart = {title, note, "step", "validation loss, " + unit, {}, {}};
  for (const Run& run : runs) {
    train::Curve curve = {run.name, {}, {}, &run == &runs.front()};
    for (const auto& [step, loss] : run.record.validations)
      curve.x.push_back(static_cast<double>(step)), curve.y.push_back(loss);
    chart.curves.push_back(curve);
  }
  if (floor) chart.levels.emplace_back("the grammar's own loss", *floor);
  return chart;
}

// The runs of the first seed, and fp32's of the second.
train::Chart chart_of(const std::string& optimizer, const Comparison& found, const Options& options) {
  std::vector<Run> runs;
  for (const std::vector<Run>* list : {&found.runs, &found.again})
    for (const Run& run : *list)
      if (run.optimizer == optimizer && (run.seed == 1 || list == &found.again)) runs.push_back(run);
  const bool again =
      std::any_of(runs.begin(), runs.end(), [](const Run& run) { return run.seed == 2 && run.complete(); });
  const std::string note = options.seeds > 1 ? "Seed 1 of " + grouped(options.seeds) +
                                                   ": the gaps in the legend are of this seed alone."
                           : again ? "What is no further from fp32 than its second seed is noise."
                                   : kOneSeed;
  return chart_of("Loss, " + optimizer, note, nats_per(options.chosen.config.shape), runs, found.floor);
}

train::Bars bars_of(const Comparison& found) {
  train::Bars bars = {"Memory by kind, as counted in the run", "", "bytes per parameter", {}};
  for (const Run& run : found.runs) {
    if (run.seed > 1 || run.record.steps.empty()) continue;
    train::Bars::Row row = {run.name, {}};
    for (const auto& [kind, bytes] : run.measured)
      row.parts.emplace_back(kind, static_cast<double>(bytes) / static_cast<double>(found.params));
    bars.rows.push_back(row);
  }
  return bars;
}

train::Report report_of(const Comparison& found, const Options& options) {
  const std::string stop = stop_words(found, options);
  train::Report report = {
      "Scruple: recipes compared", heading(found, options) + (stop.empty() ? "" : " " + stop), {}};
  train::Section recipes = {"Recipes",
                            "",
                            {{"", about_noise(found, options), table_of_runs(found, options)}},
                            {bars_of(found)},
                            {}};
  for (const char* optimizer : {"adamw", "sgd"})
    if (train::Chart chart = chart_of(optimizer, found, options); !chart.curves.empty())
      recipes.charts.push_back(std::move(chart));
  report.sections.push_back(recipes);
  const auto add = [&](const char* title, const char* text, const std::vector<Run>& runs) {
    if (!runs.empty())
      report.sections.push_back(
          {title,
           text,
           {{"", "", table_of_hazard(runs)}},
           {},
           {chart_of("Loss", kOneSeed, nats_per(options.chosen.config.shape), runs, {})}});
  };
  add("A small learning rate", kSmallRate, found.small_rate);
  add("fp16 without loss scaling", kHalf, found.half);
  return report;
}

void compare(const Options& options) {
  if (options.model.batch % options.micro_batches != 0)
    throw UsageError("--micro-batches is " + std::to_string(options.micro_batches) +
                     "; it must divide --batch, " + std::to_string(options.model.batch));
  const std::string path = options.out + "/report.html";
  Comparer comparer(options);
  comparer.check_runs();
  if (!options.out.empty()) {
    make_folder(options.out);
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

}  // namespace

void add_compare(CLI::App& program) {
  CLI::App* command =
      program.add_subcommand("compare", "Train every recipe on the same text and compare them");
  command->footer(kFooter);
  const auto options = std::make_shared<Options>();
  options->model.shape.layers = 2, options->model.shape.width = 64;
  options->model.steps = 400;
  command
      ->add_option("--recipes", options->recipes,
                   "names with commas between them (default: all that the device serves)")
      ->type_name("LIST");
  command->add_option("--data", options->data, "what to learn instead of the grammar's text, as in train")
      ->type_name("PATH");
  options->cutting.add_options(*command);
  command
      ->add_option("--seeds", options->seeds,
                   "runs of each recipe, from seed 1 on (default: one, and fp32 from a second)")
      ->type_name("N")
      ->check(CLI::Range(1, 1000));
  command
      ->add_option("--lr", options->lr,
                   "peak learning rate of AdamW; of a folder's weights " + shortest(kTuningLr))
      ->capture_default_str()
      ->check(above_zero());
  command
      ->add_option("--sgd-lr", options->sgd_lr,
                   "peak learning rate of SGD with momentum; of a folder's weights " + shortest(kTuningSgdLr))
      ->capture_default_str()
      ->check(above_zero());
  command->add_option("--weight-decay", options->weight_decay, "of AdamW")
      ->capture_default_str()
      ->check(not_negative());
  command
      ->add_option("--micro-batches", options->micro_batches,
                   "lpmm: parts of a batch that are folded one by one")
      ->type_name("N")
      ->capture_default_str()
      ->check(whole_from(1));
  options->model.add_options(*command);
  command->remove_option(command->get_option("--seed"));
  options->gradients.add_options(*command);
  command->add_flag("--no-hazards", options->no_hazards,
                    "leave out the second part: what the recipes protect from");
  command->add_option("--out", options->out, "folder to write report.html into")->type_name("DIR");
  command->add_flag("--json", options->as_json, "print one JSON object with a list 'rows'");
  command->callback([command, options] {
    refuse_sizes(options->model, *command);
    for (const char* name : {"--layout", "--isolate", "--validation"})
      if (options->data.empty() && command->count(name) > 0)
        throw UsageError(std::string(name) + " is for --data; the grammar's text is cut as it is made");
    options->chosen = choose_model(options->model);
    if (!options->model.is_gpt()) {
      if (options->data.empty())
        throw UsageError("--model " + options->model.model +
                         " needs --data: the grammar's text is for the gpt");
      options->no_hazards = true;  // they are of the grammar's text
    }
    if (options->chosen.has_weights() && command->count("--lr") == 0) options->lr = kTuningLr;
    if (options->chosen.has_weights() && command->count("--sgd-lr") == 0) options->sgd_lr = kTuningSgdLr;
    options->model.device = device_for(options->model.device);
    check_device(options->model.device);
    compare(*options);
  });
}

}  // namespace scruple::cli
