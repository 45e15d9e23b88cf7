// Mistral (Jiang et al., 2310.06825): Llama with a sliding window.
#include "train/model/families/llama.h"

namespace scruple::train {

const Family kMistral = {"mistral", [](const Config& config) { return llama_like(config, {.kv_heads = 8}); },
                         [](const Config& config, Description& model) {
                           llama_arithmetic(config, model);
                           model.window = window_of(config);
                         }};

}  // namespace scruple::train
