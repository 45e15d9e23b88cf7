// A model of every part that GPT-2 does not have, and small models of every family. What such models compute is compared with torch in gradients_test.py.
#pragma once

#include <vector>

#include "train/model/families/families.h"
#include "train/model/families/gpt2.h"

namespace scruple::train {

inline Description other_parts(const GptShape& sizes, std::int64_t kv_heads, std::int64_t head_width) {
  Description model = gpt2(sizes);
  model.names = &llama_names();
  model.kv_heads = kv_heads, model.head_width = head_width, model.inner = 3 * sizes.width + 1;
  model.norm = NormKind::rms, model.head_norms = true;
  model.positions = 0, model.rotary.base = 100;
  model.mlp = Mlp::swiglu;
  model.attention_out_bias = model.mlp_bias = model.tied = false;
  model.outputs_first = true;
  return model;
}

inline constexpr std::int64_t kFamilyContext = 40;

// Sizes are multiples of 8, as 16-bit products want them.
inline Description llama(std::int64_t layers = 2) {
  Description model = other_parts({layers, 64, 4, kFamilyContext, 256}, 2, 16);
  model.inner = 168;
  model.head_norms = false;
  return model;
}

struct SmallModel {
  const char* name;
  Description shape;
};

inline std::vector<SmallModel> small_models() {
  Description qwen2 = llama();
  qwen2.qkv_bias = qwen2.tied = true;
  Description qwen3 = llama();
  qwen3.head_norms = true;
  Description wide = llama();
  wide.heads = 2, wide.kv_heads = 1, wide.head_width = 64;
  Description stretched = llama();
  stretched.rotary.factor = 8, stretched.rotary.first_context = 16;
  return {{"gpt2", gpt2({2, 64, 4, kFamilyContext, 256})},
          {"llama", llama()},
          {"qwen2", qwen2},
          {"qwen3", qwen3},
          {"heads of 64", wide},
          {"llama 3", stretched}};
}

}  // namespace scruple::train
