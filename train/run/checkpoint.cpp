#include "train/run/checkpoint.h"

#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <span>
#include <vector>

#include "train/model/families/families.h"
#include "train/run/folder.h"

namespace scruple::train {

using io::fail;

std::string checkpoints_of(const std::string& run) { return run + "/checkpoints"; }

ModelConfig config_of(const io::Checkpoint& checkpoint) {
  const io::Metadata notes = notes_of(checkpoint);
  const auto program = notes.find("program");
  if (program == notes.end() || program->second != kProgram)
    fail(
        checkpoint.folder(),
        " was not saved by 'scruple train', so nothing says what model its tensors make; 'scruple checkpoint "
        "export' writes them for other programs");
  const auto noted = [&](const char* key) {
    const auto found = notes.find(key);
    const char* const text = found == notes.end() ? "" : found->second.c_str();
    char* end = nullptr;
    const std::int64_t value = std::strtoll(text, &end, 10);
    if (end == text || *end != '\0')
      fail(checkpoint.folder(), " does not note the run's --", key, "; it is damaged, or of another program");
    return value;
  };
  const std::int64_t context = noted("context");
  if (const auto config = notes.find(kConfigNote); config != notes.end())
    return {describe(config->second, checkpoint.folder() + ": its model's config", context), config->second};
  const GptShape shape = {
      .layers = noted("layers"), .width = noted("width"), .heads = noted("heads"), .context = context};
  if (const std::string problem = problem_with(gpt2(shape)); !problem.empty())
    fail(checkpoint.folder(), ": ", problem);
  return gpt2_model(shape);
}

void check_tensors(const io::Checkpoint& checkpoint, const std::vector<Parameter>& parameters) {
  const std::span<const io::TensorState> tensors = trained_of(checkpoint.manifest());
  if (tensors.size() != parameters.size())
    fail(checkpoint.folder(), " has ", tensors.size(), " tensors, and a model of its shape has ",
         parameters.size());
  for (std::size_t p = 0; p < parameters.size(); ++p)
    if (tensors[p].name != parameters[p].name || tensors[p].shape != parameters[p].shape)
      fail(checkpoint.folder(), ": tensor ", p, " is \"", tensors[p].name, "\", and its model has \"",
           parameters[p].name, "\" there, or of another shape");
}

constexpr const char* kStep = "step";  // in the metadata of exported weights

void write_weights(const std::string& folder, const ModelConfig& model, Trainer& trainer, Ledger& ledger) {
  const std::vector<scruple_tensor>& visible = trainer.state().visible();
  Memory& memory = trainer.memory();
  std::vector<ParameterData> data;
  Block decoded;
  std::vector<float> copy;  // of a weight that the host cannot read
  for (const scruple_tensor& row : visible) {
    const scruple_array& weight = row.arrays[SCRUPLE_WEIGHT];
    const std::string format = info_of(weight.format).name;
    const bool is_half = format == "bf16" || format == "fp16";
    const io::Dtype dtype = format == "bf16" ? io::Dtype::bf16 : is_half ? io::Dtype::f16 : io::Dtype::f32;
    data.push_back({dtype, [&, format, is_half]() -> const void* {
                      decoded = Block();
                      if (is_half && memory.is_host()) return weight.codes;
                      if (memory.is_host()) {
                        if (format != "fp32")
                          decoded = Block(ledger, "workspace", row.size * std::int64_t{sizeof(float)});
                        return visible_values(trainer.engine(), row, decoded.as<float>());
                      }
                      copy.resize(static_cast<std::size_t>(is_half ? (row.size + 1) / 2 : row.size));
                      if (is_half)
                        memory.read(copy.data(), weight.codes, 2 * row.size);
                      else
                        check(scruple_decode(trainer.engine().raw(), &row, SCRUPLE_WEIGHT, copy.data()));
                      return copy.data();
                    }});
  }
  write_model(folder, model, data, {{kStep, std::to_string(trainer.steps_taken())}});
}

std::int64_t weights_step(const std::string& folder) {
  try {
    const io::Safetensors weights(folder + "/model.safetensors");
    const auto step = weights.metadata().find(kStep);
    const bool whole = std::filesystem::exists(folder + "/config.json");  // which comes last
    return !whole || step == weights.metadata().end() ? -1 : std::strtoll(step->second.c_str(), nullptr, 10);
  } catch (const std::exception&) {
    return -1;
  }
}

void keep_last(const std::string& run, std::int64_t keep) {
  const std::string folder = checkpoints_of(run);
  const std::vector<std::int64_t> steps = io::saved_steps(folder);
  for (std::size_t i = 0; keep > 0 && i + static_cast<std::size_t>(keep) < steps.size(); ++i)
    io::remove_folder(folder + "/" + io::step_name(steps[i]));
}

Contents contents_of(Trainer& trainer, const std::string& recipe, const io::Metadata& notes) {
  const Position position = trainer.position();
  const State& state = trainer.state();
  Contents contents;
  io::Manifest& manifest = contents.manifest;
  manifest.library = scruple_version();
  manifest.recipe = recipe;
  manifest.step = trainer.steps_taken();
  for (std::size_t g = 0; g < trainer.groups().size(); ++g)
    manifest.groups.push_back(group_of(trainer.groups().at(g)));
  if (const scruple_scaler& scaler = position.scaler; scaler.scale > 0)
    manifest.loss_scale = {scaler.scale, scaler.growth, scaler.backoff, scaler.interval, scaler.clean};
  manifest.trainer = notes;
  if (trainer.outliers() != nullptr) manifest.trainer[kOutliersNote] = trainer.outliers()->state();
  for (std::size_t p = 0; p < state.parameters().size(); ++p) {
    const Parameter& parameter = state.parameters()[p];
    io::TensorState& tensor =
        manifest.tensors.emplace_back(stored_form(parameter.name, parameter.shape, state.table()[p]));
    tensor.group = trainer.groups().group_of(p);
    tensor.step = position.steps[p];
    if (position.adagc_norms[p] > 0 && std::isfinite(position.adagc_norms[p]))
      tensor.adagc_norm = position.adagc_norms[p];
  }
  std::vector<scruple_tensor>& rows = contents.rows;
  rows = state.table();
  if (const Average* average = trainer.average()) {
    manifest.groups.push_back(group_of(average->optimizer()));
    for (std::size_t p = 0; p < state.parameters().size(); ++p) {
      const scruple_tensor& row = rows.emplace_back(average->table()[p]);
      manifest.tensors.push_back(
          stored_form(kAverage + state.parameters()[p].name, state.parameters()[p].shape, row));
      manifest.tensors.back().group = manifest.groups.size() - 1;
    }
  }
  return contents;
}

void write(const Contents& contents, Memory& memory, const std::string& run, std::int64_t keep) {
  const io::Manifest& manifest = contents.manifest;
  const std::string folder = checkpoints_of(run);
  make_folder(folder);
  io::NewCheckpoint made(folder + "/" + io::step_name(manifest.step), manifest, 1);
  for (std::size_t t = 0; t < manifest.tensors.size(); ++t)
    for (std::size_t a = 0; a < manifest.tensors[t].arrays.size(); ++a)
      for (std::size_t p = 0; p < manifest.tensors[t].arrays[a].planes.size(); ++p)
        for_each_part(memory, plane_of(contents.rows[t], manifest.tensors[t], a, p),
                      [&](std::span<const std::byte> part) { made.write(t, a, p, part); });
  made.finish();
  keep_last(run, keep);
}

void save(Trainer& trainer, const std::string& recipe, const io::Metadata& notes, const std::string& run,
          std::int64_t keep) {
  write(contents_of(trainer, recipe, notes), trainer.memory(), run, keep);
}

}  // namespace scruple::train
