// Gemma 1 and 2 (Gemma Team, 2403.08295 and 2408.00118): Llama's tensors. They are not trained: their MLP is gated by
// GELU, their norms scale by 1 + weight, and Gemma 2 caps its logits.
#include "train/model/families/llama.h"

namespace scruple::train {
namespace {

Description gemma_like(const Config& config, std::int64_t kv_heads) {
  Description model = llama_like(config, {.head_width = 256, .kv_heads = kv_heads, .tied = true});
  model.qkv_bias = model.attention_out_bias = config.flag("attention_bias", false);
  return model;
}

// Attention and MLP are normed once more before they join the residual stream.
const Names& gemma2_names() {
  static const Names names = [] {
    Names changed = llama_names();
    changed.attention_out_norm = "post_attention_layernorm";
    changed.mlp_norm = "pre_feedforward_layernorm";
    changed.mlp_out_norm = "post_feedforward_layernorm";
    return changed;
  }();
  return names;
}

}  // namespace

const Family kGemma = {"gemma", [](const Config& config) { return gemma_like(config, 16); }, nullptr};

const Family kGemma2 = {"gemma2",
                        [](const Config& config) {
                          Description model = gemma_like(config, 4);
                          model.names = &gemma2_names();
                          return model;
                        },
                        nullptr};

}  // namespace scruple::train
