// `scruple checkpoint`: looks into checkpoints, checks them, and makes others of them.
#include "checkpoint.h"

#include <CLI/CLI.hpp>
#include <algorithm>
#include <iostream>
#include <memory>

#include "commands.h"
#include "options.h"
#include "train/run/rows.h"

namespace scruple::cli {
namespace {

constexpr const char* kFooter =
    R"(DIR is a checkpoint, or a run that has some (by --save-every, or since Ctrl-C): then its last one.
docs/checkpoint.md describes the files.

Examples:
  scruple checkpoint inspect run1
  scruple checkpoint verify run1/checkpoints/step-00000100
  scruple checkpoint export run1 --to bf16 --out weights.safetensors)";

}  // namespace

void print_json(const nlohmann::ordered_json& object) { std::cout << object.dump(2) << '\n'; }

Decoder::Decoder(const io::Checkpoint& checkpoint) : checkpoint_(checkpoint) {
  for (const io::Group& group : train::groups_of(checkpoint))
    optimizers_.push_back(train::optimizer_of(group));
}

Tensor Decoder::load(const io::TensorState& tensor) {
  Tensor loaded(engine_, train::row_of(tensor, optimizer(tensor).raw()));
  train::load(engine_, checkpoint_, tensor, loaded.raw());
  return loaded;
}

std::vector<float> values_of(const Tensor& tensor, int array) {
  std::vector<float> values(static_cast<std::size_t>(tensor.size()));
  tensor.decode(array, values.data());
  return values;
}

std::string shape_text(const std::vector<std::int64_t>& shape) {
  std::string text;
  for (const std::int64_t n : shape) text += (text.empty() ? "" : " x ") + std::to_string(n);
  return shape.empty() ? "one value" : text;
}

nlohmann::ordered_json groups_json(const io::Checkpoint& checkpoint) {
  auto groups = nlohmann::ordered_json::array();
  for (const io::Group& group : train::groups_of(checkpoint))
    groups.push_back(
        {{"optimizer", group.optimizer}, {"seed", group.seed}, {"hyperparameters", group.hyperparameters}});
  return groups;
}

nlohmann::ordered_json loss_scale_json(const io::Manifest& manifest) {
  if (!manifest.loss_scale) return nullptr;
  const io::LossScale& scale = *manifest.loss_scale;
  return {{"scale", scale.scale},
          {"growth", scale.growth},
          {"backoff", scale.backoff},
          {"interval", scale.interval},
          {"clean", scale.clean}};
}

void Deviation::add(const std::vector<float>& before, const std::vector<float>& after) {
  for (std::size_t i = 0; i < before.size(); ++i) {
    const double error = static_cast<double>(after[i]) - static_cast<double>(before[i]);
    squares += error * error;
    reference += static_cast<double>(before[i]) * static_cast<double>(before[i]);
    largest = std::max(largest, std::abs(error));
  }
}

void add_checkpoint(CLI::App& program) {
  CLI::App* group =
      program.add_subcommand("checkpoint", "Inspect, verify, convert, export, diff, merge, reshard");
  group->group("Look after checkpoints");
  group->footer(kFooter);
  group->require_subcommand(1);
  const auto options = std::make_shared<CheckpointOptions>();
  const auto add = [&](const std::string& name, const char* doc, void (*run)(const CheckpointOptions&),
                       const std::vector<const char*>& examples, OptionTable rows = {}) {
    std::string footer = examples.size() > 1 ? "Examples:" : "Example:";
    for (const char* example : examples) footer += "\n  scruple checkpoint " + name + " " + example;
    rows.insert(rows.begin(), required({kNone, "folder", "", &options->folder, "DIR",
                                        "a checkpoint, or a run that has some"}));
    rows.push_back({kNone, "--json", "", &options->json, "", "print one JSON object"});
    return &add_command(*group, name, doc, group->get_group(), footer, rows,
                        [options, run](const CLI::App&) { run(*options); });
  };
  const Option out_folder = required({kNone, "--out", "", &options->out, "DIR", "new folder to write"});
  const Option out_file = required({kNone, "--out", "", &options->out, "FILE", "new file to write"});
  add("inspect", "Show tensors, formats, and bytes by kind", inspect,
      {"run1", "run1 --histogram transformer.wte.weight"},
      {{kNone, "--histogram", "", &options->histograms, "NAME",
        "magnitudes of this tensor's values, or of all; may be repeated"}});
  add("verify", "Check checksums, structure, and that every value is finite", verify,
      {"run1", "run1/checkpoints/step-00000100"});
  add("convert", "Write the same state in another recipe's formats, and the error", convert,
      {"run1 --recipe scant --out smaller"},
      {out_folder,
       required({kNone, "--recipe", "", &options->recipe, "NAME", "as 'scruple list' names it"})});
  add("export", "Write the weights for other programs; nothing else is read", export_weights,
      {"run1 --out weights.safetensors", "run1 --to bf16 --out weights.safetensors",
       "run1 --ema --out averages.safetensors"},
      {out_file,
       {kNone, "--to", "", &options->to, "FORMAT", "fp32: master weights; bf16: visible ones, or rounded",
        one_of({"fp32", "bf16"})},
       {kNone, "--ema", "", &options->ema, "", "the moving averages of the weights (train --ema)"}})
      ->add_flag_callback(
          "--fp32", [options] { options->to = "fp32"; }, "the same as --to fp32")
      ->excludes("--to");
  add("diff", "Show what differs between two checkpoints; exit code 1 if anything does", diff, {"run1 run2"},
      {required({kNone, "other", "", &options->other, "DIR", "the second checkpoint, or run"})});
  add("merge", "Make one file of a sharded checkpoint",
      [](const CheckpointOptions& given) {
        CheckpointOptions one = given;
        one.shards = 1;
        reshard(one);
      },
      {"four --out one"}, {out_folder});
  add("reshard", "Cut a checkpoint anew into this many files", reshard, {"run1 --shards 4 --out four"},
      {out_folder, required({kNone, "--shards", "", &options->shards, "N", "number of files",
                             whole_from(1, std::int64_t{io::kMaxShards})})});
}

}  // namespace scruple::cli
