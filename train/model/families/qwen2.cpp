// Qwen 2 and 2.5 (Yang et al., 2407.10671): Llama whose queries, keys and values have biases.
#include "train/model/families/llama.h"

namespace scruple::train {

// Some layers slide, if the config says so; the context must then fit into their window.
void qwen_arithmetic(const Config& config, Description& model) {
  llama_arithmetic(config, model);
  bool slides = config.flag("use_sliding_window", false);
  for (const std::string& type : config.strings("layer_types")) {
    if (type != "full_attention" && type != "sliding_attention")
      config.refuse("layer_types", "this trainer computes with full_attention and sliding_attention only");
    slides = slides || type == "sliding_attention";
  }
  model.window = slides ? window_of(config) : 0;
}

const Family kQwen2 = {"qwen2",
                       [](const Config& config) {
                         Description model = llama_like(config, {.kv_heads = 32});
                         model.qkv_bias = true;
                         return model;
                       },
                       qwen_arithmetic};

}  // namespace scruple::train
