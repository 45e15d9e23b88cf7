// Qwen 2 and 2.5 (Yang et al., 2407.10671): Llama whose queries, keys and values have biases.
#include "train/model/families/llama.h"

namespace scruple::train {

// Some layers slide, if the config says so; the context must then fit into their window.
std::int64_t qwen_window(const Config& config) {
  bool slides = config.flag("use_sliding_window", false);
  for (const std::string& type : config.strings("layer_types")) {
    if (type != "full_attention" && type != "sliding_attention")
      config.refuse("layer_types", "this trainer computes with full_attention and sliding_attention only");
    slides = slides || type == "sliding_attention";
  }
  return slides ? window_of(config) : 0;
}

Description qwen2_family(const Config& config) {
  Description model = llama_like(config, {.kv_heads = 32});
  model.qkv_bias = true;
  model.window = qwen_window(config);
  return model;
}

}  // namespace scruple::train
