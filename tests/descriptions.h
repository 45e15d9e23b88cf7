// A model of every part that GPT-2 does not have. What such models compute is compared with torch in gradients_test.py.
#pragma once

#include "train/model/families/gpt2.h"
#include "train/model/families/llama.h"

namespace scruple::train {

inline Description other_parts(const GptShape& sizes, std::int64_t kv_heads, std::int64_t head_width) {
  Description model = gpt2(sizes);
  model.names = &llama_names();
  model.kv_heads = kv_heads, model.head_width = head_width, model.inner = 3 * sizes.width + 1;
  model.norm = NormKind::rms, model.head_norms = true;
  model.positions = 0, model.rotary.base = 100;
  model.mlp = Mlp::gated_silu;
  model.attention_out_bias = model.mlp_bias = model.tied = false;
  model.outputs_first = true;
  return model;
}

}  // namespace scruple::train
