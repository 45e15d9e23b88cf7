// A model as Hugging Face keeps it: a folder with config.json and the weights in one or several safetensors files.
// transformers loads what is written here. Problems are thrown as std::runtime_error.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "include/scruple/scruple.h"
#include "io/safetensors.h"
#include "train/model/families/gpt2.h"

namespace scruple::train {

struct ModelConfig {
  Description shape;
  std::string text;  // of its config.json, with the type that its weights are stored in
};
ModelConfig gpt2_model(const GptShape& shape);

// The folder that a model is in: what `path` names, or where the config.json is that it names.
std::string folder_of_model(const std::string& path);

// A model's folder, its files mapped; or a config.json, a model without weights. All that can be wrong with the names
// and shapes of its tensors is found when it is opened; values are read one parameter at a time.
class ModelFolder {
 public:
  // `context` as in describe().
  explicit ModelFolder(const std::string& path, std::int64_t context = 0);

  const ModelConfig& config() const { return config_; }
  const std::string& folder() const { return folder_; }
  bool has_weights() const { return !tensors_.empty(); }
  // `count` values of parameters_of(shape)[parameter] from `first` on, as fp32.
  void read(int parameter, std::int64_t first, std::int64_t count, float* values) const;
  // The same as it is stored.
  const io::StoredTensor& stored(int parameter) const {
    return *tensors_[static_cast<std::size_t>(parameter)];
  }

 private:
  void open_weights();
  void check_rest() const;
  const io::StoredTensor* find(const std::string& name) const;

  std::string folder_;
  ModelConfig config_;
  std::vector<std::unique_ptr<io::Safetensors>> files_;
  std::vector<const io::StoredTensor*> tensors_;  // of each parameter
};

// One parameter, f32, bf16 or f16; `values` is called when it is written, and its memory may then be reused.
struct ParameterData {
  io::Dtype dtype;
  std::function<const void*()> values;
};

// `parameters` in the order of parameters_of(shape). The folder is made if need be; each of the two files
// appears whole or not at all, the config last. A head that is tied to the embedding is not stored
// again. Weights are stored in the type that the config names, where that loses nothing but fp16's range; else in their
// own. `notes` go into the metadata of the weights.
void write_model(const std::string& folder, const ModelConfig& model,
                 const std::vector<ParameterData>& parameters, io::Metadata notes = {});

}  // namespace scruple::train
