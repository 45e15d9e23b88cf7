// Configs of every family, as Hugging Face writes them: what description they make, and what is refused and how.
#include "train/model/families/families.h"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <set>

#include "tests/files.h"

namespace scruple::train {
namespace {

using nlohmann::json;
using scruple_tests::expect_words;
using scruple_tests::message_of;

const json kGpt2 = {{"model_type", "gpt2"}, {"n_embd", 768},       {"n_layer", 12},
                    {"n_head", 12},         {"n_positions", 1024}, {"vocab_size", 50257}};

json decoder(const char* type) {
  return {{"model_type", type},       {"hidden_size", 24},
          {"intermediate_size", 34},  {"num_hidden_layers", 2},
          {"num_attention_heads", 6}, {"num_key_value_heads", 3},
          {"head_dim", 10},           {"max_position_embeddings", 64},
          {"vocab_size", 37},         {"hidden_act", "silu"},
          {"rms_norm_eps", 1e-5},     {"rope_theta", 500.0}};
}

class Families : public scruple_tests::Files {
 protected:
  Description read(const json& config, std::int64_t context = 0) const {
    return describe(config.dump(), path("config.json"), context);
  }
  void refused(json config, const char* key, const json& value, const std::string& words) const {
    if (value.is_discarded())
      config.erase(key);
    else
      config[key] = value;
    const std::string message = message_of([&] { read(config); });
    expect_words(message, words, config.dump());
    expect_words(message, path("config.json"), "the place");
  }
};
const json kMissing = json(json::value_t::discarded);

TEST_F(Families, SizesOfPublishedModels) {
  EXPECT_EQ(parameter_count(read(kGpt2)), 124439808);
  // Llama 3.2 1B, Mistral 7B, Qwen 2.5 0.5B and Qwen 3 0.6B, from their configs on the hub.
  const auto sized = [](const char* type, std::vector<std::int64_t> s, bool tied) {
    json config = decoder(type);
    config["hidden_size"] = s[0], config["intermediate_size"] = s[1], config["num_hidden_layers"] = s[2];
    config["num_attention_heads"] = s[3], config["num_key_value_heads"] = s[4], config["head_dim"] = s[5];
    config["vocab_size"] = s[6], config["tie_word_embeddings"] = tied;
    return config;
  };
  EXPECT_EQ(parameter_count(read(sized("llama", {2048, 8192, 16, 32, 8, 64, 128256}, true))), 1235814400);
  EXPECT_EQ(parameter_count(read(sized("mistral", {4096, 14336, 32, 32, 8, 128, 32000}, false))), 7241732096);
  EXPECT_EQ(parameter_count(read(sized("qwen2", {896, 4864, 24, 14, 2, 64, 151936}, true))), 494032768);
  EXPECT_EQ(parameter_count(read(sized("qwen3", {1024, 3072, 28, 16, 8, 128, 151936}, true))), 596049920);
}

// What `scruple plan` counts by describe_tensors(). tests/models_test.py has what transformers makes of such configs.
TEST_F(Families, PlannedIsWhatIsTrained) {
  const auto planned = [&](const json& config) {
    return parameter_count(describe_tensors(config.dump(), "config.json"));
  };
  const std::vector<std::pair<const char*, json>> optional = {{"num_key_value_heads", 8},
                                                              {"num_key_value_heads", nullptr},
                                                              {"head_dim", 4},
                                                              {"tie_word_embeddings", true},
                                                              {"tie_word_embeddings", false},
                                                              {"attention_bias", true},
                                                              {"mlp_bias", true},
                                                              {"sliding_window", 7},
                                                              {"use_sliding_window", true},
                                                              {"initializer_range", 0.1},
                                                              {"rope_scaling", nullptr},
                                                              {"n_inner", 100},
                                                              {"n_inner", nullptr},
                                                              {"layer_norm_epsilon", 1e-3},
                                                              {"add_cross_attention", false}};
  for (const char* type : {"gpt2", "llama", "mistral", "qwen2", "qwen3"}) {
    json config = std::string(type) == "gpt2" ? kGpt2 : decoder(type);
    if (std::string(type) != "gpt2") {
      config["num_attention_heads"] = 32, config["hidden_size"] = 64;
      for (const char* key : {"num_key_value_heads", "head_dim", "rope_theta", "rms_norm_eps"})
        config.erase(key);
    }
    EXPECT_EQ(planned(config), parameter_count(read(config))) << config;
    for (const auto& [key, value] : optional) {
      json changed = config;
      changed[key] = value;
      EXPECT_EQ(planned(changed), parameter_count(read(changed))) << changed;
    }
  }
  // Gemma 2B and Gemma 2 2B, which are planned only.
  json gemma = decoder("gemma");
  gemma.update({{"hidden_size", 2048},
                {"intermediate_size", 16384},
                {"num_hidden_layers", 18},
                {"num_attention_heads", 8},
                {"num_key_value_heads", 1},
                {"head_dim", 256},
                {"vocab_size", 256000}});
  EXPECT_EQ(planned(gemma), 2506172416);
  refused(gemma, "hidden_act", "gelu", "model_type is \"gemma\"; this trainer knows gpt2, llama");
  gemma.update({{"model_type", "gemma2"},
                {"hidden_size", 2304},
                {"intermediate_size", 9216},
                {"num_hidden_layers", 26},
                {"num_key_value_heads", 4}});
  EXPECT_EQ(planned(gemma), 2614341888);
  json other = decoder("llama");  // computed differently, and as large
  other["hidden_act"] = "gelu", other["rope_scaling"] = "linear", other.erase("max_position_embeddings");
  EXPECT_EQ(planned(other), planned(decoder("llama")));
  refused(kGpt2, "n_head", kMissing, "n_head is missing; it must be an integer");
  refused(kGpt2, "n_embd", std::int64_t{1} << 62, "choose width from 1 to 131072");
  expect_words(message_of([&] {
                 planned({{"model_type", "gemma3"}});
               }),
               "known are gpt2, llama, mistral, qwen2, qwen3, gemma, gemma2; for another", "not known");
}

TEST_F(Families, NamesAndShapesAreHuggingFaces) {
  json config = decoder("qwen3");
  config["attention_bias"] = true;
  std::set<std::string> names;
  for (const Parameter& p : parameters_of(read(config))) {
    EXPECT_TRUE(names.insert(p.name).second) << p.name;
    EXPECT_EQ(p.decays, p.shape.size() == 2) << p.name;
  }
  for (const char* name :
       {"model.embed_tokens.weight", "model.layers.0.self_attn.q_proj.bias",
        "model.layers.1.self_attn.k_norm.weight", "model.layers.1.mlp.down_proj.weight",
        "model.layers.0.post_attention_layernorm.weight", "model.norm.weight", "lm_head.weight"})
    EXPECT_TRUE(names.contains(name)) << name;
  EXPECT_EQ(names.size(), 2 + 2 * 15 + 1);
  const Parameter query = parameters_of(read(config))[2];
  EXPECT_EQ(query.name, "model.layers.0.self_attn.q_proj.weight");
  EXPECT_EQ(query.shape, (std::vector<std::int64_t>{60, 24}));  // [out, in]
}

TEST_F(Families, BothWaysOfWritingRotaryPositions) {
  const json llama3 = {{"rope_type", "llama3"},
                       {"factor", 8.0},
                       {"low_freq_factor", 1.5},
                       {"high_freq_factor", 4.0},
                       {"original_max_position_embeddings", 32}};
  json old = decoder("llama"), recent = old;
  old["rope_scaling"] = llama3;
  recent.erase("rope_theta");
  recent["rope_parameters"] = llama3;
  recent["rope_parameters"]["rope_theta"] = 500.0;
  for (const json& config : {old, recent}) {
    const Rotary rotary = read(config).rotary;
    EXPECT_EQ(rotary.base, 500);
    EXPECT_EQ(rotary.factor, 8);
    EXPECT_EQ(rotary.slow, 1.5);
    EXPECT_EQ(rotary.fast, 4);
    EXPECT_EQ(rotary.first_context, 32);
  }
  old["rope_scaling"] = nullptr;
  EXPECT_EQ(read(old).rotary.factor, 1);
}

TEST_F(Families, WhatAConfigLeavesOutIsTransformersDefault) {
  json config = decoder("qwen3");
  for (const char* key : {"head_dim", "rope_theta", "rms_norm_eps"}) config.erase(key);
  const Description model = read(config);
  EXPECT_EQ(model.head_width, 128);
  EXPECT_EQ(model.rotary.base, 10000);
  EXPECT_EQ(model.epsilon, 1e-6);
  EXPECT_FALSE(model.tied);
  config["model_type"] = "llama";
  config["num_key_value_heads"] = nullptr;
  EXPECT_EQ(read(config).head_width, 4);
  EXPECT_EQ(read(config).kv_heads, 6);
}

TEST_F(Families, TheContextMayBeShorter) {
  for (const json& config : {kGpt2, decoder("llama")}) {
    const Description whole = read(config), shorter = read(config, 16);
    EXPECT_EQ(shorter.context, 16);
    EXPECT_EQ(parameter_count(whole), parameter_count(shorter));
    expect_words(message_of([&] { read(config, 2000); }), "a context of 2000 was asked for", "beyond");
    expect_words(message_of([&] { read(config, -1); }), "context = -1", "negative");
  }
}

TEST_F(Families, MorePositionsThanAnybodyTrainsWith) {
  json config = decoder("llama");
  config["max_position_embeddings"] = std::int64_t{1} << 60;
  EXPECT_EQ(read(config).context, kMaxContext);
  EXPECT_EQ(read(config, 1024).context, 1024);
  expect_words(message_of([&] { read(config, kMaxContext + 1); }), "choose context from 1 to 1048576",
               "more");
}

TEST_F(Families, AWindowBoundsTheContext) {
  json config = decoder("mistral");
  config["max_position_embeddings"] = 8192;
  expect_words(message_of([&] { read(config, 4097); }), "sees the last 4096 (its sliding window)",
               "left out");
  EXPECT_EQ(read(config, 4096).window, 4096);
  EXPECT_EQ(read(config).context, 4096) << "all that every token sees";
  config["sliding_window"] = nullptr;
  EXPECT_EQ(read(config).context, 8192);
  refused(config, "sliding_window", 0, "sliding_window is 0; it must be null, or 1 or more");
  json qwen = decoder("qwen2");
  qwen["sliding_window"] = 16;
  EXPECT_EQ(read(qwen).window, 0) << "it is not used";
  qwen["use_sliding_window"] = true;
  expect_words(message_of([&] { read(qwen, 64); }), "a context of 64 was asked for", "used");
  qwen["use_sliding_window"] = false;
  qwen["layer_types"] = {"full_attention", "sliding_attention"};
  expect_words(message_of([&] { read(qwen, 17); }), "sees the last 16", "used in a layer");
  refused(qwen, "layer_types", {"linear_attention"}, "layer_types is [\"linear_attention\"]; this trainer");
  refused(qwen, "layer_types", {1}, "it must be an array of strings");
}

TEST_F(Families, UnknownOnesAreRefusedWithTheList) {
  const std::string list = "this trainer knows gpt2, llama, mistral, qwen2, qwen3";
  refused(kGpt2, "model_type", "gemma3", "model_type is \"gemma3\"; " + list);
  refused(kGpt2, "model_type", kMissing, "model_type is missing; " + list);
  refused(kGpt2, "model_type", 7, "model_type is 7; it must be a string");
}

TEST_F(Families, HostileConfigsAreRefusedWithTheKey) {
  const json llama = decoder("llama");
  refused(llama, "hidden_act", "gelu", "hidden_act is \"gelu\"; this trainer computes with \"silu\" only");
  for (const char* key : {"hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
                          "max_position_embeddings", "vocab_size"}) {
    refused(llama, key, kMissing, std::string(key) + " is missing; it must be an integer");
    refused(llama, key, "12", std::string(key) + " is \"12\"; it must be an integer");
    refused(llama, key, 0, " = 0 was asked for");
    refused(llama, key, -5, " = -5 was asked for");
    if (std::string(key) != "max_position_embeddings")
      refused(llama, key, std::int64_t{1} << 60, " was asked for; choose ");
  }
  refused(llama, "num_key_value_heads", 4, "6 heads cannot share 4 key-value heads");
  refused(llama, "num_key_value_heads", 0, "key-value heads = 0");
  refused(llama, "num_key_value_heads", 12, "key-value heads = 12");
  refused(llama, "head_dim", 9, "a head is 9 wide; choose an even head width");
  refused(llama, "head_dim", std::int64_t{1} << 40, "head width = 1099511627776");
  refused(llama, "head_dim", -2, "head width = -2");
  json undivided = llama;
  undivided.erase("head_dim");
  refused(undivided, "num_attention_heads", 7, "without head_dim it must divide hidden_size, 24");
  refused(undivided, "num_attention_heads", 0, "num_attention_heads is 0");
  refused(llama, "rms_norm_eps", 0, "rms_norm_eps is 0; it must be a number above 0");
  refused(llama, "rms_norm_eps", "small", "rms_norm_eps is \"small\"");
  refused(llama, "rope_theta", -1.0, "rope_theta is -1.0");
  refused(llama, "rope_theta", 1e-3, "rope_theta is 0.001; it must be above 1");
  refused(llama, "tie_word_embeddings", 1, "tie_word_embeddings is 1; it must be true or false");
  refused(llama, "attention_bias", "yes", "attention_bias is \"yes\"");
  refused(llama, "rope_scaling", "linear", "rope_scaling is \"linear\"; it must be an object");
  refused(llama, "rope_scaling", {{"type", "linear"}, {"factor", 2}},
          "rope_scaling: type is \"linear\"; this trainer computes with \"default\" and \"llama3\" only");
  refused(llama, "rope_scaling", {{"rope_type", "llama3"}}, "rope_scaling: factor is missing");
  refused(llama, "rope_parameters", {{"partial_rotary_factor", 0.5}}, "partial_rotary_factor is 0.5");
  refused(llama, "rope_parameters",
          {{"rope_type", "llama3"},
           {"factor", 8},
           {"low_freq_factor", 4},
           {"high_freq_factor", 4},
           {"original_max_position_embeddings", 8}},
          "high_freq_factor is 4; it must be above low_freq_factor");
  refused(kGpt2, "n_inner", 0, "MLP width = 0");
  refused(kGpt2, "n_head", 5, "a width of 768 cannot be shared by 5 heads");
  for (const char* text : {"", "{", "[]", "3", "{\"model_type\": \"llama\", \"hidden_size\": 1e999}", "\xff"})
    EXPECT_NE(message_of([&] { describe(text, "config.json"); }), "no error") << text;
  expect_words(message_of([&] { describe(std::string(5000, '['), "config.json"); }),
               "config.json is nested more than 32 deep", "depth");
  expect_words(message_of([&] { describe(std::string(5, '['), "config.json"); }),
               "is no JSON from byte 6 on (line 1 of it, where it ends)", "cut");
  json broken = llama;
  broken["hidden_size"] = std::string(100000, 'x');
  EXPECT_LT(message_of([&] { read(broken); }).size(), 400u) << "a message is not as long as the file";
}

}  // namespace
}  // namespace scruple::train
