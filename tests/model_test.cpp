// Models as Hugging Face folders: what is written is read back bit for bit, what does not fit is refused.
#include "train/model/model.h"

#include <cstring>
#include <nlohmann/json.hpp>

#include "tests/files.h"
#include "tests/models.h"
#include "train/text/vocabulary.h"

namespace scruple_tests {
namespace {

using scruple::io::Dtype;
using scruple::io::Safetensors;
using scruple::io::SafetensorsWriter;
using scruple::io::TensorInfo;
using scruple::train::gpt2_model;
using scruple::train::GptShape;
using scruple::train::Model;
using scruple::train::Parameter;
using scruple::train::ParameterData;
using scruple::train::parameters_of;
using scruple::train::read_model;
using scruple::train::write_model;

constexpr GptShape kShape{2, 16, 4, 8, 256};

// Values that fp32, bf16 and fp16 all hold exactly: k / 64 with |k| < 128.
float value_at(std::size_t tensor, std::int64_t i) {
  return static_cast<float>((static_cast<std::int64_t>(tensor) * 37 + i * 11) % 255 - 127) / 64;
}

// The bits of such a value in 16, worked out here and not by the library: it has at most 7 significant bits.
std::uint16_t bits16(float value, Dtype dtype) {
  std::uint32_t bits = 0;
  std::memcpy(&bits, &value, sizeof bits);
  if (dtype == Dtype::bf16) return static_cast<std::uint16_t>(bits >> 16);
  if (value == 0) return 0;
  const std::uint32_t exponent = (bits >> 23 & 0xff) - 127 + 15;
  return static_cast<std::uint16_t>((bits >> 16 & 0x8000) | exponent << 10 | (bits >> 13 & 0x3ff));
}

struct Weights {
  explicit Weights(const GptShape& shape, const std::vector<Dtype>& dtypes) {
    const std::vector<Parameter> list = parameters_of(gpt2(shape));
    for (std::size_t t = 0; t < list.size(); ++t) {
      const Dtype dtype = dtypes[t % dtypes.size()];
      std::string bytes;
      for (std::int64_t i = 0; i < list[t].size(); ++i) {
        const float value = value_at(t, i);
        const std::uint16_t narrow = bits16(value, dtype);
        bytes += dtype == Dtype::f32 ? std::string(reinterpret_cast<const char*>(&value), 4)
                                     : std::string(reinterpret_cast<const char*>(&narrow), 2);
      }
      planes.push_back(bytes);
      data.push_back({dtype, nullptr});
    }
    for (std::size_t t = 0; t < list.size(); ++t) data[t].values = [this, t] { return planes[t].data(); };
  }
  std::vector<std::string> planes;
  std::vector<ParameterData> data;
};

class ModelFolders : public Files {
 protected:
  void write(const std::vector<Dtype>& dtypes = {Dtype::f32}) {
    write_model(model_, gpt2_model(kShape), Weights(kShape, dtypes).data);
  }
  nlohmann::json config() const { return nlohmann::json::parse(std::ifstream(model_ + "/config.json")); }
  void set_config(const std::string& text) const { std::ofstream(model_ + "/config.json") << text; }
  void change(const char* key, const nlohmann::json& value) const {
    nlohmann::json changed = config();
    changed[key] = value;
    set_config(changed.dump());
  }
  // Writes model.safetensors again with other names, shapes or types; an empty name leaves a tensor out.
  void rewrite(const std::function<void(TensorInfo&)>& change,
               const std::vector<TensorInfo>& more = {}) const {
    const std::string path = model_ + "/model.safetensors";
    const Safetensors old(path);
    std::vector<TensorInfo> tensors;
    std::vector<std::string> data;
    for (TensorInfo info : old.tensors()) {
      const auto bytes = old.at(info.name).data;
      change(info);
      if (info.name.empty()) continue;
      tensors.push_back(info);
      data.emplace_back(reinterpret_cast<const char*>(bytes.data()), bytes.size());
    }
    for (const TensorInfo& info : more) {
      tensors.push_back(info);
      data.emplace_back(static_cast<std::size_t>(info.bytes()), '\0');
    }
    SafetensorsWriter writer(path, tensors);
    for (std::size_t i = 0; i < tensors.size(); ++i) writer.write(i, std::as_bytes(std::span(data[i])));
    writer.finish();
  }
  void expect_refused(const std::string& words) const {
    expect_words(message_of([&] { read_model(model_); }), words, model_);
  }
  void expect_whole() const {
    const Model model = read_model(model_);
    const std::vector<Parameter> list = parameters_of(gpt2(kShape));
    ASSERT_EQ(model.parameters.size(), list.size());
    for (std::size_t t = 0; t < list.size(); ++t) {
      ASSERT_EQ(static_cast<std::int64_t>(model.parameters[t].size()), list[t].size()) << list[t].name;
      for (std::int64_t i = 0; i < list[t].size(); ++i)
        ASSERT_EQ(model.parameters[t][static_cast<std::size_t>(i)], value_at(t, i))
            << list[t].name << " " << i;
    }
  }

  const std::string model_ = path("a/model");
};

TEST_F(ModelFolders, EveryTypeComesBack) {
  for (const std::vector<Dtype>& dtypes :
       {std::vector{Dtype::f32}, {Dtype::bf16}, {Dtype::f16}, {Dtype::bf16, Dtype::f32, Dtype::f16}}) {
    write(dtypes);
    expect_whole();
    const scruple::train::Description shape = read_model(model_).shape;
    EXPECT_EQ(shape.layers, kShape.layers);
    EXPECT_EQ(shape.width, kShape.width);
    EXPECT_EQ(shape.heads, kShape.heads);
    EXPECT_EQ(shape.context, kShape.context);
    EXPECT_EQ(shape.vocabulary, kShape.vocabulary);
  }
}

TEST_F(ModelFolders, NamesAndShapesAreHuggingFaces) {
  write();
  const Safetensors file(model_ + "/model.safetensors");
  EXPECT_EQ(file.metadata().at("format"), "pt");
  EXPECT_EQ(file.find("lm_head.weight"), nullptr) << "tied";
  EXPECT_EQ(file.tensors().size(), 4u + 12 * 2);
  using Shape = std::vector<std::int64_t>;
  const std::pair<const char*, Shape> wanted[] = {{"transformer.wte.weight", {256, 16}},
                                                  {"transformer.wpe.weight", {8, 16}},
                                                  {"transformer.h.1.ln_1.weight", {16}},
                                                  {"transformer.h.1.ln_1.bias", {16}},
                                                  {"transformer.h.1.attn.c_attn.weight", {16, 48}},
                                                  {"transformer.h.1.attn.c_attn.bias", {48}},
                                                  {"transformer.h.1.attn.c_proj.weight", {16, 16}},
                                                  {"transformer.h.1.attn.c_proj.bias", {16}},
                                                  {"transformer.h.1.ln_2.weight", {16}},
                                                  {"transformer.h.1.ln_2.bias", {16}},
                                                  {"transformer.h.1.mlp.c_fc.weight", {16, 64}},
                                                  {"transformer.h.1.mlp.c_fc.bias", {64}},
                                                  {"transformer.h.1.mlp.c_proj.weight", {64, 16}},
                                                  {"transformer.h.1.mlp.c_proj.bias", {16}},
                                                  {"transformer.ln_f.weight", {16}},
                                                  {"transformer.ln_f.bias", {16}}};
  for (const auto& [name, shape] : wanted) EXPECT_EQ(file.at(name).shape, shape) << name;
}

TEST_F(ModelFolders, TheConfigSaysWhatTheTrainerComputes) {
  write({Dtype::bf16});
  const nlohmann::json found = config();
  const nlohmann::json wanted = nlohmann::json::parse(R"({
      "architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "n_embd": 16, "n_layer": 2, "n_head": 4,
      "n_positions": 8, "n_ctx": 8, "vocab_size": 256, "activation_function": "gelu_new",
      "layer_norm_epsilon": 1e-5, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
      "tie_word_embeddings": true, "bos_token_id": 10, "eos_token_id": 10, "torch_dtype": "bfloat16"})");
  for (const auto& [key, value] : wanted.items()) EXPECT_EQ(found.value(key, nlohmann::json()), value) << key;
}

TEST_F(ModelFolders, FilesOfTheHubAreRead) {
  write();
  rewrite([](TensorInfo& info) { info.name = info.name.substr(std::string("transformer.").size()); },
          {{"h.0.attn.bias", Dtype::u8, {1, 1, 8, 8}}, {"h.1.attn.masked_bias", Dtype::f32, {}}});
  expect_whole();
  nlohmann::json changed = config();
  for (const char* key :
       {"activation_function", "layer_norm_epsilon", "tie_word_embeddings", "n_ctx", "n_inner"})
    changed.erase(key);
  changed["task_specific_params"] = {{"text-generation", {{"max_length", 50}}}};
  set_config(changed.dump());
  expect_whole();
}

TEST_F(ModelFolders, OtherArchitecturesAreRefused) {
  write();
  const auto refused = [&](const char* key, const nlohmann::json& value, const std::string& words) {
    const nlohmann::json old = config();
    change(key, value);
    expect_refused(words);
    set_config(old.dump());
  };
  refused("model_type", "falcon",
          "model_type is \"falcon\"; this trainer knows gpt2, llama, mistral, qwen2, qwen3");
  refused("model_type", "llama", "num_hidden_layers is missing");
  refused("model_type", nullptr, "model_type is null");
  refused("activation_function", "relu", "activation_function is \"relu\"");
  refused("layer_norm_epsilon", 0, "layer_norm_epsilon is 0; it must be a number above 0");
  refused("tie_word_embeddings", "no", "tie_word_embeddings is \"no\"; it must be true or false");
  refused("tie_word_embeddings", false, "lacks \"lm_head.weight\", which its config.json asks for");
  refused("scale_attn_weights", false, "scale_attn_weights");
  refused("scale_attn_by_inverse_layer_idx", true, "scale_attn_by_inverse_layer_idx");
  refused("add_cross_attention", true, "add_cross_attention");
  refused("n_inner", 100, "has shape [16, 64], and the config asks for [16, 100]");
  refused("n_embd", "16", "n_embd is \"16\"; it must be an integer");
  refused("n_embd", 16.5, "n_embd is 16.5");
  refused("n_embd", 0, "width");
  refused("n_head", 3, "heads");
  refused("n_layer", -1, "layers");
  refused("n_layer", 1'000'000'000'000, "layers");
  refused("vocab_size", 18446744073709551615u, "vocabulary");
  refused("n_positions", 9, "\"transformer.wpe.weight\" has shape [8, 16], and the config asks for [9, 16]");
  refused(
      "n_layer", 3,
      R"(lacks "transformer.h.2.ln_1.weight", "transformer.h.2.ln_1.bias", "transformer.h.2.attn.c_attn.weight")"
      " and 9 more");
  refused("n_layer", 1, "and 9 more, for which its config.json has no place");
  set_config("{\n\"n_layer\":");
  expect_refused("config.json is no JSON from byte 13 on (line 2 of it, where it ends)");
  set_config("[1]");
  expect_refused("not a JSON object");
  set_config("{}");
  expect_refused("model_type is missing");
  set_config(std::string(2 << 20, ' '));
  expect_refused("at most");
  std::filesystem::remove(model_ + "/config.json");
  expect_refused("config.json");
}

TEST_F(ModelFolders, TensorsThatDoNotFitAreRefused) {
  const auto refused = [&](const std::string& words, const std::function<void(TensorInfo&)>& change,
                           const std::vector<TensorInfo>& more = {}) {
    write();
    rewrite(change, more);
    expect_refused(words);
  };
  const auto as_is = [](TensorInfo&) {};
  const std::string fc = "transformer.h.1.mlp.c_fc.weight";
  refused("lacks \"" + fc + "\"", [&](TensorInfo& info) { info.name = info.name == fc ? "" : info.name; });
  refused("has shape [64, 16], and the config asks for [16, 64]", [&](TensorInfo& info) {
    if (info.name == fc) info.shape = {64, 16};  // torch.nn.Linear's order
  });
  refused("is I32; only F32, BF16 and F16 are read", [&](TensorInfo& info) {
    if (info.name == fc) info.dtype = Dtype::i32;
  });
  refused("has \"score.weight\", for which its config.json has no place", as_is,
          {{"score.weight", Dtype::f32, {1}}});
  refused("head is not tied", as_is, {{"lm_head.weight", Dtype::f32, {256, 16}}});
  std::filesystem::remove(model_ + "/model.safetensors");
  expect_refused("model.safetensors");
}

// The weights in three files, as large models have them.
TEST_F(ModelFolders, ShardsAreReadTogether) {
  write({Dtype::bf16, Dtype::f32});
  const std::string one = model_ + "/model.safetensors";
  nlohmann::json index = {{"metadata", {{"total_size", 1}}}, {"weight_map", nlohmann::json::object()}};
  {
    const Safetensors whole(one);
    std::vector<std::vector<TensorInfo>> parts(3);
    for (std::size_t i = 0; i < whole.tensors().size(); ++i) {
      parts[i % 3].push_back(whole.tensors()[i]);
      index["weight_map"][whole.tensors()[i].name] = "part-" + std::to_string(i % 3) + ".safetensors";
    }
    for (std::size_t p = 0; p < parts.size(); ++p) {
      SafetensorsWriter writer(model_ + "/part-" + std::to_string(p) + ".safetensors", parts[p]);
      for (std::size_t i = 0; i < parts[p].size(); ++i) writer.write(i, whole.at(parts[p][i].name).data);
      writer.finish();
    }
  }
  std::filesystem::remove(one);
  const auto put_index = [&](const nlohmann::json& json) {
    std::ofstream(model_ + "/model.safetensors.index.json") << json.dump();
  };
  expect_refused("no weights, neither model.safetensors nor its index; name the config.json itself");
  put_index(index);
  expect_whole();
  for (const char* file : {"../part-0.safetensors", "/part-0.safetensors", "", "."}) {
    nlohmann::json hostile = index;
    hostile["weight_map"]["transformer.wte.weight"] = file;
    put_index(hostile);
    expect_refused("it must be the name of a file in the same folder");
  }
  for (const auto& [text, words] : {std::pair{"", "index.json is no JSON from byte 1 on"},
                                    {"{", "index.json is no JSON from byte 2 on"},
                                    {"[]", "index.json is not a JSON object"},
                                    {"{\"weight_map\": 3}", "has no \"weight_map\""},
                                    {"{\"weight_map\": {}}", "has no \"weight_map\""}}) {
    std::ofstream(model_ + "/model.safetensors.index.json") << text;
    expect_refused(words);
  }
  put_index(index);
  std::filesystem::remove(model_ + "/part-1.safetensors");
  expect_refused("/model.safetensors.index.json names part-1.safetensors, which is not there");
}

// What the model computes with, written back as it was: the rest of a config is the user's.
TEST_F(ModelFolders, AConfigIsWrittenBack) {
  write({Dtype::bf16});
  change("my_note", "kept");
  change("dtype", "float32");
  const scruple::train::ModelFolder from(model_);
  write_model(path("copy"), from.config(), Weights(kShape, {Dtype::bf16}).data);
  nlohmann::json wanted = config();
  wanted["dtype"] = "bfloat16";
  EXPECT_EQ(nlohmann::json::parse(std::ifstream(path("copy/config.json"))), wanted);
}

// A folder in fp32 or fp16 stays one, whatever its model computed with, unless that has more bits.
TEST_F(ModelFolders, TheTypeStaysWhereNothingIsLost) {
  struct Row {
    Dtype folder, computed, written;
    const char* name;
  };
  for (const auto& [folder, computed, written, name] :
       {Row{Dtype::f32, Dtype::bf16, Dtype::f32, "float32"},
        Row{Dtype::f32, Dtype::f16, Dtype::f32, "float32"},
        Row{Dtype::f16, Dtype::bf16, Dtype::f16, "float16"},
        Row{Dtype::f16, Dtype::f32, Dtype::f32, "float32"},
        Row{Dtype::bf16, Dtype::f16, Dtype::f16, "float16"},
        Row{Dtype::bf16, Dtype::f32, Dtype::f32, "float32"}}) {
    write({folder});
    const scruple::train::ModelFolder from(model_);
    write_model(path("copy"), from.config(), Weights(kShape, {computed}).data);
    const Safetensors copy(path("copy/model.safetensors"));
    const Weights wanted(kShape, {written});
    for (std::size_t t = 0; const Parameter& parameter : parameters_of(gpt2(kShape))) {
      const auto& tensor = copy.at(parameter.name);
      EXPECT_EQ(tensor.dtype, written);
      EXPECT_EQ(std::string(reinterpret_cast<const char*>(tensor.data.data()), tensor.data.size()),
                wanted.planes[t++]);
    }
    EXPECT_EQ(nlohmann::json::parse(std::ifstream(path("copy/config.json")))["torch_dtype"], name);
  }
}

TEST_F(ModelFolders, AConfigAloneHasNoWeights) {
  write();
  const scruple::train::ModelFolder config(model_ + "/config.json", 4);
  EXPECT_FALSE(config.has_weights());
  EXPECT_EQ(config.config().shape.context, 4);
  EXPECT_EQ(config.config().shape.positions, kShape.context) << "of the learned positions all rows stay";
  EXPECT_EQ(config.folder(), model_);
  EXPECT_EQ(scruple::train::folder_of_model("config.json"), ".");
}

TEST_F(ModelFolders, TokenizersAreCopied) {
  write();
  std::ofstream(model_ + "/tokenizer.json") << "new";
  std::ofstream(model_ + "/merges.txt") << "new";
  std::ofstream(model_ + "/other.txt") << "new";
  std::filesystem::create_directories(path("to"));
  std::ofstream(path("to/merges.txt")) << "old";
  scruple::train::copy_tokenizer(model_, path("to"));
  EXPECT_EQ(content("to/tokenizer.json"), "new");
  EXPECT_EQ(content("to/merges.txt"), "old") << "what is there stays";
  EXPECT_FALSE(std::filesystem::exists(path("to/other.txt")));
}

TEST_F(ModelFolders, AHeadThatRepeatsTheEmbeddingIsNoHarm) {
  write_model(model_, gpt2_model(kShape), [] {
    static Weights weights(kShape, {Dtype::f32});
    weights.planes[0].assign(weights.planes[0].size(), '\0');  // wte, so that the zeros added below repeat it
    return weights.data;
  }());
  rewrite([](TensorInfo&) {}, {{"lm_head.weight", Dtype::f32, {256, 16}}});
  EXPECT_EQ(read_model(model_).parameters[0][0], 0.0f);
}

TEST_F(ModelFolders, WrongRequestsAreRefused) {
  const auto refused = [&](const GptShape& shape, const std::vector<ParameterData>& data, const char* words) {
    expect_words(message_of([&] { write_model(model_, gpt2_model(shape), data); }), words, words);
  };
  Weights weights(kShape, {Dtype::f32});
  refused({2, 16, 3, 8, 256}, weights.data, "heads");
  refused({3, 16, 4, 8, 256}, weights.data, "has 40 parameters, but 28 were given");
  weights.data[3].dtype = Dtype::i32;
  refused(kShape, weights.data, "a parameter is I32");
  weights.data[3].dtype = Dtype::f32;
  EXPECT_FALSE(std::filesystem::exists(model_)) << "nothing was made";
  std::ofstream(path("a")) << "a file in the way";
  refused(kShape, weights.data, "cannot make the folder");
}

// For checks by hand with transformers: SCRUPLE_EXPORT_TO=DIR leaves a model there.
TEST(ModelInterop, LeavesAModel) {
  const char* const folder = std::getenv("SCRUPLE_EXPORT_TO");
  if (folder == nullptr) GTEST_SKIP() << "set SCRUPLE_EXPORT_TO to keep a model";
  write_model(folder, gpt2_model(kShape), Weights(kShape, {Dtype::f32}).data);
}

}  // namespace
}  // namespace scruple_tests
