// `scruple checkpoint`: looks into checkpoints, checks them, and makes others of them.
#include "checkpoint.h"

#include <algorithm>
#include <iostream>
#include <memory>

#include "commands.h"
#include "train/run/rows.h"

namespace scruple::cli {
namespace {

constexpr const char* kFooter =
    R"(DIR is a checkpoint, or a run that has some (of --save-every N, or of a stop): the last is taken.
docs/checkpoint.md describes the files.

Examples:
  scruple checkpoint inspect run1
  scruple checkpoint inspect run1 --histogram transformer.wte.weight
  scruple checkpoint verify run1/checkpoints/step-00000100
  scruple checkpoint convert run1 --recipe scant --out smaller
  scruple checkpoint export run1 --to bf16 --out weights.safetensors
  scruple checkpoint diff run1 run2
  scruple checkpoint reshard run1 --shards 4 --out four)";

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
  group->footer(kFooter);
  group->require_subcommand(1);
  const auto options = std::make_shared<CheckpointOptions>();
  const auto add = [&](const char* name, const char* doc, void (*run)(const CheckpointOptions&)) {
    CLI::App* command = group->add_subcommand(name, doc);
    command->add_option("folder", options->folder, "a checkpoint, or a run that has some")
        ->type_name("DIR")
        ->required();
    command->add_flag("--json", options->json, "for programs");
    command->callback([options, run] { run(*options); });
    return command;
  };
  const auto add_out = [&](CLI::App* command, const char* type) {
    command->add_option("--out", options->out, "what to write")->type_name(type)->required();
    return command;
  };
  add("inspect", "Tensors, formats, bytes by kind", inspect)
      ->add_option("--histogram", options->histograms,
                   "magnitudes of this tensor's values, or of all; may be repeated")
      ->type_name("NAME")
      ->allow_extra_args(false);
  add("verify", "Checksums, structure, values that are not finite", verify);
  add_out(add("convert", "The same state in another recipe's formats, and the error of that", convert), "DIR")
      ->add_option("--recipe", options->recipe, "as 'scruple list' names it")
      ->type_name("NAME")
      ->required();
  CLI::App* weights =
      add_out(add("export", "The weights for other programs; nothing else is read", export_weights), "FILE");
  weights
      ->add_option("--to", options->to,
                   "fp32: the master weights; bf16: the visible ones, or the nearest to the master's")
      ->type_name("FORMAT")
      ->capture_default_str()
      ->check(one_of({"fp32", "bf16"}));
  weights
      ->add_flag_callback(
          "--fp32", [options] { options->to = "fp32"; }, "--to fp32")
      ->excludes("--to");
  add("diff", "What differs between two checkpoints; exit code 1 if anything does", diff)
      ->add_option("other", options->other, "the second checkpoint")
      ->type_name("DIR")
      ->required();
  add_out(add("merge", "One file from a sharded checkpoint",
              [](const CheckpointOptions& given) {
                CheckpointOptions one = given;
                one.shards = 1;
                reshard(one);
              }),
          "DIR");
  add_out(add("reshard", "Cut anew into this many files", reshard), "DIR")
      ->add_option("--shards", options->shards, "number of files")
      ->type_name("N")
      ->required()
      ->check(CLI::Range(std::size_t{1}, io::kMaxShards));
}

}  // namespace scruple::cli
