// Mistral (Jiang et al., 2310.06825): Llama with a sliding window.
#include "train/model/families/llama.h"

namespace scruple::train {

Description mistral_family(const Config& config) {
  Description model = llama_like(config, {.kv_heads = 8});
  model.window = window_of(config);
  return model;
}

}  // namespace scruple::train
