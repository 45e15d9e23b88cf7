// The sizes of a model's tensors: from a number of parameters, safetensors headers, an index of them, a Hugging Face
// config.json, or a checkpoint.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace scruple::cli {

struct Model {
  std::map<std::int64_t, std::int64_t> tensors;  // elements of a tensor, how many tensors have that many
  std::int64_t params = 0;
  std::vector<std::string> notes;  // what the reader of the figures should know

  void add(std::int64_t size);  // a tensor of so many elements
  std::int64_t tensor_count() const;
};

Model one_tensor(std::int64_t params);
// Files that end in .json are configs or indices, all others safetensors, whose shards add up; a folder is a model, a
// checkpoint or a run.
Model read_model(const std::vector<std::string>& paths);

}  // namespace scruple::cli
