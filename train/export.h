// A model as a folder that Hugging Face's transformers loads with GPT2LMHeadModel.from_pretrained:
// config.json and model.safetensors. Problems are thrown as std::runtime_error.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "io/safetensors.h"
#include "train/families/gpt2.h"
#include "train/transformer.h"

namespace scruple::train {

// One parameter, f32, bf16 or f16; `values` is called when it is written, and its memory may then be reused.
struct ParameterData {
  io::Dtype dtype;
  std::function<const void*()> values;
};

// `parameters` in the order of parameters_of(shape). The folder is made if need be; each of the two files
// appears whole or not at all, the config last. The output head is tied to the embedding and not stored
// again. `notes` go into the metadata of the weights.
void write_model(const std::string& folder, const GptShape& shape,
                 const std::vector<ParameterData>& parameters, io::Metadata notes = {});

struct Model final : Weights {
  Description shape;
  std::vector<std::vector<float>> parameters;  // in the order of parameters_of(shape)
  const float* values(int parameter, float*) override {
    return parameters[static_cast<std::size_t>(parameter)].data();
  }
};

// Reads such a folder, and those of every family (train/families/families.h) on the Hugging Face hub that have
// one file of weights; refuses whatever this trainer would compute differently.
// `context` as in describe().
Model read_model(const std::string& folder, std::int64_t context = 0);

}  // namespace scruple::train
