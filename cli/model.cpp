#include "model.h"

#include <algorithm>
#include <filesystem>
#include <stdexcept>

#include "io/checkpoint.h"
#include "io/safetensors.h"
#include "text.h"
#include "train/model/families/families.h"
#include "train/model/files.h"

namespace scruple::cli {
namespace {

constexpr std::int64_t kTooMany = kMaxCount + 1;

// In a file of a checkpoint: whether the tensor completes a weight, or is a moment of it: "WEIGHT/exp_avg".
bool belongs_to_another(const io::Safetensors& file, const std::string& name) {
  for (std::size_t at = name.find('/'); at != name.npos; at = name.find('/', at + 1))
    if (file.find(name.substr(0, at)) != nullptr) return true;
  return false;
}

bool is_integer(io::Dtype dtype) {
  const std::string_view name = io::name_of(dtype);
  return name.starts_with('I') || name.starts_with('U') || name == "BOOL";
}

// The data is never read, so that it may still be on its way.
void add_safetensors(Model& model, const std::string& path) {
  const io::Safetensors file(path, /*may_be_cut=*/true);
  const bool of_checkpoint = file.metadata().contains("scruple_checkpoint");
  std::int64_t integers = 0;
  bool is_cut = false;
  for (const io::StoredTensor& tensor : file.tensors()) {
    is_cut |= static_cast<std::int64_t>(tensor.data.size()) < tensor.bytes();
    if (of_checkpoint && belongs_to_another(file, tensor.name)) continue;
    if (is_integer(tensor.dtype))
      ++integers;
    else
      model.add(tensor.bytes() / io::bytes_of(tensor.dtype));
  }
  if (integers > 0)
    model.notes.push_back(path + ": " + plural(integers, "tensor") + " of integers not counted" +
                          (of_checkpoint ? "; the checkpoint's folder says what they stand for" : ""));
  if (is_cut) model.notes.push_back(path + ": the file is cut short; the shapes are those of its header");
}

void add_checkpoint(Model& model, const std::string& path) {
  const io::Checkpoint checkpoint(io::find_checkpoint(path));
  for (const io::TensorState& tensor : checkpoint.manifest().tensors)
    model.add(io::TensorInfo{tensor.name, io::Dtype::u8, tensor.shape}.bytes());
  if (path != checkpoint.folder())
    model.notes.push_back(path + ": its last checkpoint is " + checkpoint.folder());
}

void add_json(Model& model, const std::string& path) {
  const std::string text = io::read_text(path, train::kMaxIndex);
  if (text.find("\"weight_map\"") == text.npos) {
    for (const train::Parameter& parameter : parameters_of(train::describe_tensors(text, path)))
      model.add(parameter.size());
    return;
  }
  for (const std::string& file : train::weight_files(path)) add_safetensors(model, file);
}

// A model as Hugging Face lays it out or 'scruple train' leaves it, a checkpoint, or a run that has some.
void add_folder(Model& model, const std::string& path) {
  const auto has = [&](const char* name) { return std::filesystem::exists(path + "/" + name); };
  if (has("manifest.json")) return add_checkpoint(model, path);
  const std::vector<std::string> files = train::weight_files(path);
  for (const std::string& file : files) add_safetensors(model, file);
  if (!files.empty()) return;
  if (has("checkpoints")) return add_checkpoint(model, path);
  if (has("config.json")) return add_json(model, path + "/config.json");
  throw std::runtime_error(path +
                           " has no model.safetensors, no index of shards, no checkpoint and no config.json; "
                           "give files of the model, or --params");
}

}  // namespace

void Model::add(std::int64_t size) {
  params = std::min(params + std::min(size, kTooMany), kTooMany);
  ++tensors[size];
}

std::int64_t Model::tensor_count() const {
  std::int64_t sum = 0;
  for (const auto& [size, count] : tensors) sum += count;
  return sum;
}

Model one_tensor(std::int64_t params) {
  Model model;
  model.add(params);
  return model;
}

Model read_model(const std::vector<std::string>& paths) {
  Model model;
  for (const std::string& path : paths) {
    const bool is_json = path.ends_with(".json");
    if (is_json && paths.size() > 1)
      throw std::runtime_error(path + ": a .json file stands for a whole model; give it alone");
    (std::filesystem::is_directory(path) ? add_folder : is_json ? add_json : add_safetensors)(model, path);
  }
  if (model.params == 0) throw std::runtime_error(paths.front() + ": it has no parameters");
  if (model.params == kTooMany)
    throw std::runtime_error(paths.front() + ": it has more than 2^50 parameters");
  return model;
}

}  // namespace scruple::cli
