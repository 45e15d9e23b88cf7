#include "train/model/families/families.h"

#include <algorithm>

#include "io/file.h"
#include "train/model/families/config.h"

namespace scruple::train {
namespace {

constexpr Family like_llama(const char* model_type, const LlamaTraits& traits) {
  return {model_type, llama_tensors, llama_arithmetic, traits};
}
constexpr Family planned_like_llama(const char* model_type, const LlamaTraits& traits) {
  return {model_type, llama_tensors, nullptr, traits};
}
constexpr auto kSome = LlamaTraits::in_some_layers;

// GPT-2 (Radford et al., 2019); Llama 1 to 3 (Touvron et al., 2302.13971, 2307.09288; Dubey et al., 2407.21783); Mistral
// (Jiang et al., 2310.06825); Qwen 2 and 2.5 (Yang et al., 2407.10671); Qwen 3, the dense ones (Yang et al., 2505.09388);
// Gemma 1 and 2 (Gemma Team, 2403.08295, 2408.00118), which gate by GELU, scale norms by 1 + weight and cap logits.
constexpr Family kFamilies[] = {
    {"gpt2", gpt2_tensors, gpt2_arithmetic},
    like_llama("llama", {.attention_bias = true, .mlp_bias = true}),
    like_llama("mistral", {.kv_heads = 8, .slides = LlamaTraits::everywhere}),
    like_llama("qwen2", {.kv_heads = 32, .biased_qkv = true, .slides = kSome}),
    like_llama(
        "qwen3",
        {.head_width = 128, .kv_heads = 32, .attention_bias = true, .head_norms = true, .slides = kSome}),
    planned_like_llama("gemma", {.head_width = 256, .kv_heads = 16, .tied = true, .attention_bias = true}),
    planned_like_llama(
        "gemma2",
        {.head_width = 256, .kv_heads = 4, .tied = true, .attention_bias = true, .output_norms = true}),
};

bool can(const Family& family, bool train) { return !train || family.arithmetic != nullptr; }

std::string names_of(bool train) {
  std::string names;
  for (const Family& family : kFamilies)
    if (can(family, train)) names += (names.empty() ? "" : ", ") + std::string(family.model_type);
  return names;
}

Family family_of(const Config& config, bool train, const std::string& otherwise) {
  const std::string type = config.string("model_type", "");
  for (const Family& family : kFamilies)
    if (type == family.model_type && can(family, train)) return family;
  config.refuse("model_type", otherwise);
}

Description checked(const Description& model, const std::string& place) {
  if (const std::string problem = problem_with(model); !problem.empty()) io::fail(place, ": ", problem);
  return model;
}

}  // namespace

Description describe(const std::string& text, const std::string& place, std::int64_t context) {
  const Config config(text, place);
  const Family family = family_of(config, true, "this trainer knows " + names_of(true));
  Description model = family.tensors(config, family.traits);
  family.arithmetic(config, family.traits, model);
  if (context != 0 && context > model.context)
    io::fail(place, ": a context of ", context, " was asked for, and the model's is ", model.context,
             " at most; choose a smaller --context");
  model.context = context != 0 ? context : std::min(model.context, kMaxContext);
  if (context == 0 && model.window > 0) model.context = std::min(model.context, model.window);
  return checked(model, place);
}

Description describe_tensors(const std::string& text, const std::string& place) {
  const Config config(text, place);
  const Family family = family_of(
      config, false,
      "known are " + names_of(false) + "; for another model give its .safetensors files or --params");
  Description model = family.tensors(config, family.traits);
  model.context = 1;  // no tensor depends on it
  return checked(model, place);
}

std::string planned_families() { return names_of(false); }

}  // namespace scruple::train
