// Llama, and the families that are Llama with a difference or two.
#include "train/model/families/config.h"
#include "train/model/families/families.h"

namespace scruple::train {
namespace {

// transformers writes {"rope_parameters": {"rope_theta": ...}} since its version 5; before, rope_theta stood
// beside {"rope_scaling": ...}, or null.
Rotary rotary_of(const Config& config) {
  const bool recent = config.has("rope_parameters");
  const Config scaling = config.object(recent ? "rope_parameters" : "rope_scaling");
  Rotary rotary;
  rotary.base = (recent && scaling.has("rope_theta") ? scaling : config).positive("rope_theta", 10000);
  if (rotary.base <= 1) config.refuse("rope_theta", "it must be above 1");
  scaling.expect("partial_rotary_factor", 1.0);
  const char* const key = scaling.has("rope_type") ? "rope_type" : "type";
  const std::string type = scaling.string(key, "default");
  if (type == "default") return rotary;
  if (type != "llama3") scaling.refuse(key, "this trainer computes with \"default\" and \"llama3\" only");
  rotary.factor = scaling.positive("factor");
  rotary.slow = scaling.positive("low_freq_factor");
  rotary.fast = scaling.positive("high_freq_factor");
  rotary.first_context = scaling.integer("original_max_position_embeddings");
  if (rotary.fast <= rotary.slow) scaling.refuse("high_freq_factor", "it must be above low_freq_factor");
  if (rotary.first_context < 1) scaling.refuse("original_max_position_embeddings", "it must be 1 or more");
  return rotary;
}

}  // namespace

const Names& llama_names() {
  static const Names names = {.tokens = "model.embed_tokens",
                              .positions = nullptr,
                              .layers = "model.layers.",
                              .attention_norm = "input_layernorm",
                              .qkv = {"self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"},
                              .query_norm = "self_attn.q_norm",
                              .key_norm = "self_attn.k_norm",
                              .attention_out = "self_attn.o_proj",
                              .mlp_norm = "post_attention_layernorm",
                              .mlp_up = {"mlp.gate_proj", "mlp.up_proj"},
                              .mlp_down = "mlp.down_proj",
                              .last_norm = "model.norm",
                              .head = "lm_head"};
  return names;
}

namespace {

// Gemma 2 calls the norm of the MLP's input otherwise, because what attention gives is normed too.
const Names& sandwich_names() {
  static const Names names = [] {
    Names changed = llama_names();
    changed.attention_out_norm = "post_attention_layernorm";
    changed.mlp_norm = "pre_feedforward_layernorm";
    changed.mlp_out_norm = "post_feedforward_layernorm";
    return changed;
  }();
  return names;
}

// How many tokens a token sees; the context must fit into that. 0: all.
std::int64_t window_of(const Config& config, const LlamaTraits& traits) {
  constexpr const char* kKey = "sliding_window";
  bool slides = traits.slides == LlamaTraits::everywhere;
  if (traits.slides == LlamaTraits::in_some_layers) {
    slides = config.flag("use_sliding_window", false);
    for (const std::string& type : config.strings("layer_types")) {
      if (type != "full_attention" && type != "sliding_attention")
        config.refuse("layer_types", "this trainer computes with full_attention and sliding_attention only");
      slides = slides || type == "sliding_attention";
    }
  }
  if (!slides) return 0;
  const std::int64_t window = config.integer(kKey, 4096, 0);
  if (window < 1 && config.has(kKey)) config.refuse(kKey, "it must be null, or 1 or more");
  return window;
}

}  // namespace

Description llama_tensors(const Config& config, const LlamaTraits& traits) {
  Description model;
  model.layers = config.integer("num_hidden_layers");
  model.width = config.integer("hidden_size");
  model.heads = config.integer("num_attention_heads");
  model.vocabulary = config.integer("vocab_size");
  model.inner = config.integer("intermediate_size");
  model.kv_heads =
      config.integer("num_key_value_heads", traits.kv_heads > 0 ? traits.kv_heads : model.heads, model.heads);
  model.head_width = config.integer("head_dim", traits.head_width);
  if (model.head_width == 0) {
    if (model.heads < 1 || model.width % model.heads != 0)
      config.refuse("num_attention_heads",
                    "without head_dim it must divide hidden_size, " + std::to_string(model.width));
    model.head_width = model.width / model.heads;
  }
  model.norm = NormKind::rms;
  model.mlp = Mlp::swiglu;
  model.tied = config.flag("tie_word_embeddings", traits.tied);
  model.attention_out_bias = traits.attention_bias && config.flag("attention_bias", false);
  model.qkv_bias = traits.biased_qkv || model.attention_out_bias;
  model.mlp_bias = traits.mlp_bias && config.flag("mlp_bias", false);
  model.head_norms = traits.head_norms;
  model.names = traits.output_norms ? &sandwich_names() : &llama_names();
  return model;
}

void llama_arithmetic(const Config& config, const LlamaTraits& traits, Description& model) {
  config.expect("hidden_act", "silu");
  model.context = config.integer("max_position_embeddings");
  model.epsilon = config.positive("rms_norm_eps", 1e-6);
  model.rotary = rotary_of(config);
  model.deviation = model.residual = config.positive("initializer_range", 0.02);
  model.window = window_of(config, traits);
}

}  // namespace scruple::train
