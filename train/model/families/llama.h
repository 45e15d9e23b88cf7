// What Llama's config.json and those of the families after it have in common.
#pragma once

#include "train/model/families/config.h"
#include "train/model/families/families.h"

namespace scruple::train {

// transformers leaves out of a config what its classes have as defaults. 0: hidden_size / heads, and as many
// as heads.
struct LlamaDefaults {
  std::int64_t head_width = 0, kv_heads = 0;
  bool tied = false;
};
Description llama_like(const Config& config, const LlamaDefaults& defaults);  // its tensors
void llama_arithmetic(const Config& config, Description& model);

const Names& llama_names();

std::int64_t window_of(const Config& config);  // sliding_window, or 0: none
void qwen_arithmetic(const Config& config, Description& model);

}  // namespace scruple::train
