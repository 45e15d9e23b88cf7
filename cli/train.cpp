// `scruple train`: a byte-level GPT on any file.
#include <algorithm>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <memory>
#include <nlohmann/json.hpp>

#include "commands.h"
#include "io/file.h"
#include "text.h"
#include "train/export.h"
#include "train/report.h"
#include "training.h"

namespace scruple::cli {
namespace {

using nlohmann::ordered_json;
using train::Ledger;
using train::Outcome;
using train::Record;
using train::Trainer;
using train::Windows;

constexpr const char* kFooter =
    "Writes into --out: metrics.jsonl (a line per step), report.html (curves and memory), and the weights "
    "as\n"
    "Hugging Face's GPT-2 (config.json, model.safetensors): transformers loads the folder as it is, 'scruple "
    "sample'\n"
    "continues a text with it. The last twentieth of the file is kept for validation. Ctrl-C ends after the "
    "current\n"
    "step and saves what there is.\n"
    "\n"
    "Examples:\n"
    "  scruple train --data book.txt --out run1\n"
    "  scruple train --data book.txt --out run2 --layers 6 --width 384 --heads 6 --context 256 --steps 2000\n"
    "  scruple train --data book.txt --out run3 --gradients compressed --accumulate 4 --clip 1\n"
    "  scruple train --data book.txt --out run4 --recipe lpmm --optimizer sgd --lr 0.3 --accumulate 4\n"
    "  scruple train --data book.txt --out run5 --weights fp16+8 --loss-scale dynamic";

constexpr std::int64_t kValidationWindows = 64;

struct Options {
  Choice choice;
  ModelOptions model;
  GradientOptions gradients;
  std::string data, out, activations, schedule = "cosine", kind = "gpt";
  double lr = 1e-3, weight_decay = -1;
  std::int64_t warmup = -1, validate_every = 0;
};

train::Schedule schedule_of(const Options& options) {
  const std::vector<std::string> names = {"cosine", "linear", "constant"};
  const auto at = std::find(names.begin(), names.end(), options.schedule) - names.begin();
  const std::int64_t steps = options.model.steps;
  const std::int64_t warmup = options.warmup >= 0 ? options.warmup : steps / 20;
  if (warmup > steps)
    throw UsageError("--warmup is " + std::to_string(warmup) + " and there are " + std::to_string(steps) +
                     " steps; it must not be larger");
  return {static_cast<train::Shape>(at), options.lr, warmup, steps};
}

// Fails before anything is trained if the results could not be written after.
void claim(const std::string& folder) {
  std::error_code error;
  std::filesystem::create_directories(folder, error);
  if (error) throw std::runtime_error("cannot make the folder " + folder + ": " + error.message());
  for (const char* name : {"metrics.jsonl", "model.safetensors"})
    if (std::filesystem::exists(folder + "/" + name))
      throw std::runtime_error(folder + " has " + name +
                               " of an earlier run; choose another --out, or move it away");
}

std::ofstream open_metrics(const std::string& folder) {
  std::ofstream file(folder + "/metrics.jsonl");
  if (!file) throw std::runtime_error("cannot write into " + folder + "; choose another --out");
  return file;
}

ordered_json json_of(std::int64_t step, const Outcome& outcome) {
  return {{"step", step},
          {"loss", outcome.loss},
          {"lr", outcome.lr},
          {"norm", outcome.norm},
          {"loss_scale", outcome.loss_scale},
          {"skipped", outcome.skipped}};
}

// Where every byte goes, before the first is trained.
void print_memory(const Memory& plan, const Ledger& ledger, std::int64_t params, bool released) {
  Table table;
  table.rows = {{"memory", "MiB", "B/param"}};
  std::int64_t sum = 0;
  const auto add = [&](const std::string& name, std::int64_t bytes) {
    sum += bytes;
    if (bytes > 0)
      table.rows.push_back({name, fixed(static_cast<double>(bytes) * 0x1p-20, 2),
                            fixed(static_cast<double>(bytes) / static_cast<double>(params), 3)});
  };
  for (const auto& [name, bytes] : plan.parts())
    add(name == "gradients" && released ? "gradient tile" : name,
        name == "gradients" && released ? ledger.peak(name) : bytes);
  add("activations", ledger.peak("activations"));
  add("workspace", ledger.peak("workspace"));
  std::int64_t total = sum;
  sum = 0;
  add("total", total);
  table.print(std::cout);
  std::cout << std::endl;
}

void print_start(const Options& options, const train::Job& job, const Model& model, std::int64_t bytes) {
  const train::GptShape& s = job.shape;
  std::cout << "gpt: " << plural(s.layers, "layer") << ", width " << s.width << ", "
            << plural(s.heads, "head") << ", context " << s.context << "; " << grouped(model.params)
            << " parameters\n"
            << options.choice.optimizer << ", recipe " << options.choice.recipe << ", gradients "
            << options.gradients.policy << ", activations " << precision_name(job.activations) << ", clip "
            << (job.gradients.max_norm > 0 ? shortest(job.gradients.max_norm) : "off") << '\n'
            << plural(options.model.steps, "step") << " of "
            << grouped(job.batch * job.gradients.micro_batches * s.context) << " bytes; " << options.data
            << " has " << grouped(bytes) << "\n\n";
}

train::Report report_of(const Options& options, const Record& record, const Ledger& ledger,
                        const Memory& plan, const Model& model) {
  const auto params = static_cast<double>(model.params);
  train::Curve loss = {"training", {}, {}, false}, validation = {"validation", {}, {}, true},
               rate = {"lr", {}, {}, false};
  for (std::size_t i = 0; i < record.steps.size(); ++i) {
    loss.x.push_back(static_cast<double>(i + 1)), loss.y.push_back(record.steps[i].loss);
    rate.x.push_back(static_cast<double>(i + 1)), rate.y.push_back(record.steps[i].lr);
  }
  for (const auto& [step, value] : record.validations)
    validation.x.push_back(static_cast<double>(step)), validation.y.push_back(value);
  train::Bars::Row planned = {"planned", {}}, measured = {"measured", {}};
  for (const auto& [kind, bytes] : plan.parts())
    planned.parts.emplace_back(kind, static_cast<double>(bytes) / params);
  for (const auto& [kind, bytes] : measured_parts(ledger, plan))
    measured.parts.emplace_back(kind, static_cast<double>(bytes) / params);
  train::Figures memory = {"Peak memory by kind", "", {{"kind", "bytes", "per parameter"}}};
  for (const Ledger::Entry& entry : ledger.entries())
    memory.rows.push_back(
        {entry.kind, grouped(entry.peak), fixed(static_cast<double>(entry.peak) / params, 3)});
  const std::string lead = options.choice.optimizer + ", recipe " + options.choice.recipe + ", gradients " +
                           options.gradients.policy + ", " + grouped(model.params) + " parameters, " +
                           plural(static_cast<std::int64_t>(record.steps.size()), "step") +
                           "; final validation loss " + fixed(record.final_loss(), 4) + " nats per byte.";
  return {"Scruple: " + options.data,
          lead,
          {{"Loss", "", {}, {}, {{"Loss", "", "step", "nats per byte", {loss, validation}, {}}}},
           {"Memory",
            "",
            {memory},
            {{"Weights, moments, gradients", "", "bytes per parameter", {planned, measured}}},
            {}},
           {"Learning rate", "", {}, {}, {{"Learning rate", "", "step", "", {rate}, {}}}}}};
}

// The weights as the model computes with them: 16-bit halves as they are, low-bit ones decoded.
void write_weights(const Options& options, train::State& state) {
  std::vector<train::ParameterData> data;
  std::vector<std::vector<float>> decoded(state.parameters().size());
  for (std::size_t p = 0; p < decoded.size(); ++p) {
    const scruple_array& weight = state.visible(static_cast<int>(p));
    const std::string format = info_of(weight.format).name;
    if (format == "bf16" || format == "fp16") {
      data.push_back({format == "bf16" ? io::Dtype::bf16 : io::Dtype::f16, weight.codes});
      continue;
    }
    decoded[p].resize(static_cast<std::size_t>(state.parameters()[p].size()));
    data.push_back({io::Dtype::f32, state.values(static_cast<int>(p), decoded[p].data())});
  }
  train::write_model(options.out, options.model.shape, data);
}

void run(const Options& given) {
  Options options = given;
  if (options.choice.recipe.empty())
    options.choice.recipe = options.choice.recipes().size() == 1 ? options.choice.recipes()[0] : "scruple";
  if (options.weight_decay >= 0)
    options.choice.hypers.insert(options.choice.hypers.begin(),
                                 "weight_decay=" + shortest(options.weight_decay, 17));
  const io::MappedFile file(options.data);
  const std::span<const std::uint8_t> bytes(reinterpret_cast<const std::uint8_t*>(file.bytes().data()),
                                            file.bytes().size());
  const std::int64_t context = options.model.shape.context;
  const auto size = static_cast<std::int64_t>(bytes.size());
  if (size < 2 * (context + 1))
    throw std::runtime_error(options.data + " has " + plural(size, "byte") +
                             ", and training and validation take at least " +
                             std::to_string(2 * (context + 1)) + " at --context " + std::to_string(context) +
                             "; give a longer file or a smaller context");
  const std::int64_t held_out = std::max(size / 20, context + 1);
  const Windows training(bytes.first(static_cast<std::size_t>(size - held_out)), context);
  const Windows validation(bytes.last(static_cast<std::size_t>(held_out)), context);

  train::Job job =
      make_job(options.choice, options.choice.recipe, options.model, options.gradients, options.activations);
  job.schedule = schedule_of(options);
  if (const std::string problem = problem_with(job.shape); !problem.empty()) throw UsageError(problem);
  const Model model = model_of(job.shape);
  const Memory plan = measure(options.choice, options.choice.make_optimizer(), options.choice.recipe, model,
                              options.gradients.policy);
  Ledger ledger(free_memory());
  Trainer trainer(job, ledger);
  claim(options.out);
  std::ofstream metrics = open_metrics(options.out);

  print_start(options, job, model, size);
  print_memory(plan, ledger, model.params, options.gradients.policy == "released");
  Record record;
  {
    const Interrupts interrupts;
    Progress progress(options.choice.recipe, options.model.steps,
                      job.batch * job.gradients.micro_batches * context, ledger);
    const std::int64_t every = options.validate_every > 0
                                   ? options.validate_every
                                   : std::max<std::int64_t>(options.model.steps / 20, 1);
    std::size_t validations = 0;
    record = train::run(trainer, training, validation, {options.model.steps, every, kValidationWindows},
                        [&](const Record& seen) {
                          for (; validations < seen.validations.size(); ++validations)
                            metrics << ordered_json{{"step", seen.validations[validations].first},
                                                    {"val_loss", seen.validations[validations].second}}
                                    << '\n';
                          metrics << json_of(static_cast<std::int64_t>(seen.steps.size()), seen.steps.back())
                                  << std::endl;
                          progress.show(seen);
                          return !Interrupts::asked();
                        });
    for (; validations < record.validations.size(); ++validations)
      metrics << ordered_json{{"step", record.validations[validations].first},
                              {"val_loss", record.validations[validations].second}}
              << '\n';
  }
  if (!metrics.flush()) throw std::runtime_error("cannot write " + options.out + "/metrics.jsonl");
  io::write_text(options.out + "/report.html",
                 train::to_html(report_of(options, record, ledger, plan, model)));
  write_weights(options, trainer.state());
  const double params = static_cast<double>(model.params);
  if (record.stopped)
    std::cout << "Stopped by Ctrl-C after step " << record.steps.size() << " of " << options.model.steps
              << "; what there is was saved.\n";
  std::cout << "validation loss " << fixed(record.validations.front().second, 4) << " -> "
            << fixed(record.final_loss(), 4) << " nats per byte; " << fixed(record.ms_per_step(), 1)
            << " ms per step; peak " << mebibytes(ledger.peak()) << '\n'
            << "weights, moments and gradients: " << fixed(static_cast<double>(plan.total()) / params, 3)
            << " bytes per parameter planned, "
            << fixed(static_cast<double>(measured_total(ledger)) / params, 3) << " measured\n"
            << "wrote " << options.out << "/: model.safetensors, config.json, metrics.jsonl, report.html\n";
}

}  // namespace

void add_train(CLI::App& program) {
  CLI::App* command = program.add_subcommand("train", "Train a byte-level GPT on a file");
  command->footer(kFooter);
  const auto options = std::make_shared<Options>();
  options->model.shape = {4, 128, 4, 128, 256};
  command->add_option("--data", options->data, "the file to learn")->type_name("FILE")->required();
  command->add_option("--out", options->out, "the folder to write")->type_name("DIR")->required();
  command->add_option("--model", options->kind, "architecture")
      ->capture_default_str()
      ->check(CLI::IsMember({"gpt"}));
  options->model.add_options(*command);
  options->choice.add_options(*command);
  command->get_option("--recipe")
      ->description("formats of weights, moments and gradients (default: scruple)");
  command->add_option("--lr", options->lr, "peak learning rate")
      ->capture_default_str()
      ->check(CLI::PositiveNumber);
  command->add_option("--schedule", options->schedule, "cosine, linear (both down to 0) or constant")
      ->capture_default_str()
      ->check(CLI::IsMember({"cosine", "linear", "constant"}));
  command->add_option("--warmup", options->warmup, "steps of linear rise (default: a twentieth)")
      ->check(CLI::NonNegativeNumber);
  command->add_option("--weight-decay", options->weight_decay, "of matrices; norms and biases never decay")
      ->check(CLI::NonNegativeNumber);
  options->gradients.add_options(*command);
  command
      ->add_option("--gradient-format", options->choice.gradient, "format of stored or compressed gradients")
      ->type_name("FORMAT");
  command
      ->add_option("--rounding", options->choice.rounding, "nearest or stochastic, in place of the recipe's")
      ->check(CLI::IsMember({"nearest", "stochastic"}));
  command
      ->add_option("--activations", options->activations,
                   "fp32, bf16 or fp16 (default: as the weights are computed)")
      ->check(CLI::IsMember({"fp32", "bf16", "fp16"}));
  command
      ->add_option("--validate-every", options->validate_every,
                   "steps between validations (default: a twentieth)")
      ->check(CLI::PositiveNumber);
  command->callback([options] { run(*options); });
}

}  // namespace scruple::cli
