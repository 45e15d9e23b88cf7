// The families of models, by the model_type of their config.json: what tensors a config asks for, what they are called,
// and, where the trainer knows the family, how it computes. families.cpp has them all in one table.
#pragma once

#include <cstdint>
#include <string>

#include "train/model/description.h"

namespace scruple::train {

class Config;

// How a family differs from Llama. A config.json may leave out head_width, kv_heads and tied: then
// transformers' default for the family counts, which is given here.
struct LlamaTraits {
  std::int64_t head_width = 0, kv_heads = 0;      // defaults; 0: hidden_size / heads, and as many as heads
  bool tied = false;                              // the same
  bool biased_qkv = false;                        // in any case
  bool attention_bias = false, mlp_bias = false;  // it has these keys
  bool head_norms = false;
  bool output_norms = false;  // attention and MLP are normed before they join the residual stream
  enum { nowhere, everywhere, in_some_layers } slides = nowhere;
};

struct Family {
  const char* model_type;
  // All that decides the number, the names and the sizes of its tensors.
  Description (*tensors)(const Config& config, const LlamaTraits& traits);
  // All else that the trainer computes with; refuses what it would compute differently. None: it is planned only.
  void (*arithmetic)(const Config& config, const LlamaTraits& traits, Description& model);
  LlamaTraits traits = {};
};
Description gpt2_tensors(const Config& config, const LlamaTraits& traits);
void gpt2_arithmetic(const Config& config, const LlamaTraits& traits, Description& model);
Description llama_tensors(const Config& config, const LlamaTraits& traits);
void llama_arithmetic(const Config& config, const LlamaTraits& traits, Description& model);
const Names& llama_names();

inline constexpr std::size_t kMaxConfig = 1 << 20;  // bytes of a config.json

// Reads the text of a config.json; `place` names the file in messages. `context`: how many tokens the model
// sees. 0: as many as the config allows, at most kMaxContext and its sliding window. Throws
// std::runtime_error where the family is unknown, or where the trainer would compute something else.
Description describe(const std::string& config, const std::string& place, std::int64_t context = 0);
// The same for its parameters alone, also of what the trainer does not compute with.
Description describe_tensors(const std::string& config, const std::string& place);

std::string planned_families();  // "gpt2, llama, ..."

}  // namespace scruple::train
