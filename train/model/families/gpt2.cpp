#include "train/model/families/gpt2.h"

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>

#include "train/model/families/config.h"
#include "train/model/families/families.h"

namespace scruple::train {
namespace {

using nlohmann::ordered_json;

// What decides the arithmetic and has one right value here, which is transformers' default too.
const std::vector<std::pair<const char*, ordered_json>>& fixed_settings() {
  static const std::vector<std::pair<const char*, ordered_json>> settings = {
      {"activation_function", "gelu_new"},
      {"scale_attn_weights", true},
      {"scale_attn_by_inverse_layer_idx", false},
      {"add_cross_attention", false},
  };
  return settings;
}

struct Size {
  const char* key;
  std::int64_t GptShape::*field;
};
constexpr Size kSizes[] = {{"n_embd", &GptShape::width},
                           {"n_layer", &GptShape::layers},
                           {"n_head", &GptShape::heads},
                           {"n_positions", &GptShape::context},
                           {"vocab_size", &GptShape::vocabulary}};

// Where text ends: the line feed for models of bytes, the last token for others, as in GPT-2's own
// vocabulary.
std::int64_t end_token(std::int64_t vocabulary) {
  return tokens_are_bytes(vocabulary) ? '\n' : vocabulary - 1;
}

}  // namespace

// Section 2.3 of the paper, and the code that came with it: normal(0, 0.02), positions normal(0, 0.01), and
// the projections into the residual stream smaller by the square root of their number.
Description gpt2(const GptShape& shape) {
  static const Names names = {.tokens = "transformer.wte",
                              .positions = "transformer.wpe",
                              .layers = "transformer.h.",
                              .attention_norm = "ln_1",
                              .qkv = {"attn.c_attn"},
                              .query_norm = nullptr,
                              .key_norm = nullptr,
                              .attention_out = "attn.c_proj",
                              .mlp_norm = "ln_2",
                              .mlp_up = {"mlp.c_fc"},
                              .mlp_down = "mlp.c_proj",
                              .last_norm = "transformer.ln_f",
                              .head = "lm_head"};
  Description model;
  model.layers = shape.layers, model.width = shape.width, model.heads = model.kv_heads = shape.heads;
  model.context = model.positions = shape.context, model.vocabulary = shape.vocabulary;
  model.head_width = shape.heads > 0 ? shape.width / shape.heads : 0;
  model.inner = 4 * std::clamp<std::int64_t>(shape.width, 0, 1 << 17);  // problem_with() refuses others
  model.qkv_bias = model.attention_out_bias = model.mlp_bias = true;
  model.outputs_first = false;
  model.residual = model.deviation / std::sqrt(2.0 * static_cast<double>(shape.layers));
  model.names = &names;
  return model;
}

Description gpt2_tensors(const Config& config, const LlamaTraits&) {
  config.expect("add_cross_attention", false);  // it has tensors of its own
  GptShape shape = {.heads = 1};                // which no tensor depends on
  for (const Size& size : kSizes)
    if (size.field != &GptShape::heads || config.has(size.key)) shape.*size.field = config.integer(size.key);
  Description model = gpt2(shape);
  model.inner = config.integer("n_inner", model.inner);
  model.tied = config.flag("tie_word_embeddings", true);
  return model;
}

void gpt2_arithmetic(const Config& config, const LlamaTraits&, Description& model) {
  for (const auto& [key, value] : fixed_settings()) config.expect(key, value);
  config.integer("n_head");
  model.epsilon = config.positive("layer_norm_epsilon", model.epsilon);
}

std::string gpt2_config(const GptShape& shape) {
  ordered_json config = {{"architectures", {"GPT2LMHeadModel"}}, {"model_type", "gpt2"}};
  config["activation_function"] = "gelu_new";
  config["layer_norm_epsilon"] = gpt2(shape).epsilon;
  config["tie_word_embeddings"] = true;
  for (const auto& [key, value] : fixed_settings()) config[key] = value;
  for (const Size& size : kSizes) config[size.key] = shape.*size.field;
  config["n_ctx"] = shape.context;
  config["n_inner"] = nullptr;  // four times n_embd
  for (const char* dropout : {"resid_pdrop", "embd_pdrop", "attn_pdrop"}) config[dropout] = 0.0;
  for (const char* token : {"bos_token_id", "eos_token_id"}) config[token] = end_token(shape.vocabulary);
  return config.dump(2) + "\n";
}

}  // namespace scruple::train
