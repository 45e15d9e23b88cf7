// Qwen 3, the dense ones (Yang et al., 2505.09388): heads are as wide as they like, and queries and keys are
// normed.
#include "train/model/families/llama.h"

namespace scruple::train {

const Family kQwen3 = {"qwen3",
                       [](const Config& config) {
                         Description model = llama_like(config, {.head_width = 128, .kv_heads = 32});
                         model.head_norms = true;
                         model.qkv_bias = model.attention_out_bias = config.flag("attention_bias", false);
                         return model;
                       },
                       qwen_arithmetic};

}  // namespace scruple::train
