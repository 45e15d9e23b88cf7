#include "train/export.h"

#include <cstring>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <set>

#include "formats/bf16.h"
#include "formats/fp16.h"

namespace scruple::train {
namespace {

using io::Dtype;
using io::fail;
using nlohmann::ordered_json;

constexpr std::string_view kPrefix = "transformer.";
constexpr std::size_t kMaxConfig = 1 << 20;

std::string config_path(const std::string& folder) { return folder + "/config.json"; }
std::string weights_path(const std::string& folder) { return folder + "/model.safetensors"; }

bool is_float(Dtype dtype) { return dtype == Dtype::f32 || dtype == Dtype::bf16 || dtype == Dtype::f16; }

const char* torch_name(Dtype dtype) {
  return dtype == Dtype::bf16 ? "bfloat16" : dtype == Dtype::f16 ? "float16" : "float32";
}

std::string written(const std::vector<std::int64_t>& shape) {
  std::string text;
  for (const std::int64_t n : shape) text += (text.empty() ? "" : ", ") + std::to_string(n);
  return "[" + text + "]";
}

// ---- The config ----

// What decides the arithmetic and has one right value here: the trainer knows no other.
struct Fixed {
  const char* key;
  ordered_json value;
  bool required;  // otherwise transformers' default is this value too
};

const std::vector<Fixed>& fixed_settings() {
  static const std::vector<Fixed> settings = {
      {"model_type", "gpt2", true},          {"activation_function", "gelu_new", false},
      {"layer_norm_epsilon", 1e-5, false},   {"tie_word_embeddings", true, false},
      {"scale_attn_weights", true, false},   {"scale_attn_by_inverse_layer_idx", false, false},
      {"add_cross_attention", false, false},
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
  constexpr std::int64_t kBytes = 256;
  return vocabulary == kBytes ? '\n' : vocabulary - 1;
}

std::string config_of(const GptShape& shape, Dtype dtype) {
  ordered_json config = {{"architectures", {"GPT2LMHeadModel"}}};
  for (const Fixed& setting : fixed_settings()) config[setting.key] = setting.value;
  for (const Size& size : kSizes) config[size.key] = shape.*size.field;
  config["n_ctx"] = shape.context;
  config["n_inner"] = nullptr;  // four times n_embd
  for (const char* dropout : {"resid_pdrop", "embd_pdrop", "attn_pdrop"}) config[dropout] = 0.0;
  for (const char* token : {"bos_token_id", "eos_token_id"}) config[token] = end_token(shape.vocabulary);
  config["torch_dtype"] = torch_name(dtype);
  return config.dump(2) + "\n";
}

ordered_json parse_config(const std::string& path) {
  ordered_json config =
      ordered_json::parse(io::read_text(path, kMaxConfig), nullptr, /*allow_exceptions=*/false);
  if (!config.is_object())
    fail(path, " is not a JSON object; it should be a Hugging Face config of a GPT-2 model");
  return config;
}

void check_settings(const ordered_json& config, const std::string& path) {
  for (const Fixed& setting : fixed_settings()) {
    const auto found = config.find(setting.key);
    if (found == config.end() && !setting.required) continue;
    if (found == config.end() || *found != setting.value)
      fail(path, ": ", setting.key, " is ", found == config.end() ? "missing" : found->dump().substr(0, 80),
           "; this trainer computes with ", setting.value.dump(), " only");
  }
}

GptShape shape_of(const ordered_json& config, const std::string& path) {
  GptShape shape;
  for (const Size& size : kSizes) {
    const auto found = config.find(size.key);
    if (found == config.end() || !found->is_number_integer())
      fail(path, ": ", size.key, " is ", found == config.end() ? "missing" : found->dump().substr(0, 80),
           "; it must be an integer");
    shape.*size.field = found->get<std::int64_t>();
  }
  if (const std::string problem = problem_with(gpt2(shape)); !problem.empty()) fail(path, ": ", problem);
  const auto inner = config.find("n_inner");
  if (inner != config.end() && !inner->is_null() && *inner != 4 * shape.width)
    fail(path, ": n_inner is ", inner->dump().substr(0, 80), "; this trainer's is 4 * n_embd, ",
         4 * shape.width);
  return shape;
}

// ---- The weights ----

// The hub's own GPT-2 files lack the prefix.
const io::StoredTensor& stored(const io::Safetensors& file, const std::string& name) {
  const io::StoredTensor* const bare = file.find(name.substr(kPrefix.size()));
  return bare != nullptr ? *bare : file.at(name);
}

void check_tensor(const io::Safetensors& file, const Parameter& parameter) {
  const io::StoredTensor& tensor = stored(file, parameter.name);
  if (tensor.shape != parameter.shape)
    fail(file.path(), ": tensor \"", tensor.name, "\" has shape ", written(tensor.shape),
         ", and the config asks for ", written(parameter.shape));
  if (!is_float(tensor.dtype))
    fail(file.path(), ": tensor \"", tensor.name, "\" is ", io::name_of(tensor.dtype),
         "; only F32, BF16 and F16 are read");
}

// A head of its own is no harm where it is the embedding once more.
bool repeats_embedding(const io::Safetensors& file, const io::StoredTensor& tensor) {
  const io::StoredTensor& embedding = stored(file, std::string(kPrefix) + "wte.weight");
  return tensor.name == "lm_head.weight" && tensor.dtype == embedding.dtype &&
         tensor.shape == embedding.shape &&
         std::memcmp(tensor.data.data(), embedding.data.data(), embedding.data.size()) == 0;
}

// Old files carry the causal mask of each layer as a tensor.
bool is_mask(std::string_view name) {
  return name.ends_with(".attn.bias") || name.ends_with(".attn.masked_bias");
}

// A tensor that nobody asks for means that the file is of another model.
void check_rest(const io::Safetensors& file, const std::vector<Parameter>& parameters) {
  std::set<std::string_view> known;
  for (const Parameter& parameter : parameters) known.insert(stored(file, parameter.name).name);
  for (const io::StoredTensor& tensor : file.tensors())
    if (!known.contains(tensor.name) && !is_mask(tensor.name) && !repeats_embedding(file, tensor))
      fail(file.path(), ": tensor \"", tensor.name.substr(0, 80),
           "\" has no place in the model that config.json describes",
           tensor.name == "lm_head.weight" ? "; its head is not tied to the embedding" : "");
}

std::vector<float> as_floats(const io::StoredTensor& tensor) {
  const auto width = static_cast<std::size_t>(io::bytes_of(tensor.dtype));
  std::vector<float> values(tensor.data.size() / width);
  if (values.empty()) return values;
  if (tensor.dtype == Dtype::f32) {
    std::memcpy(values.data(), tensor.data.data(), tensor.data.size());
    return values;
  }
  for (std::size_t i = 0; i < values.size(); ++i) {
    u16 code = 0;
    std::memcpy(&code, tensor.data.data() + i * width, width);
    values[i] = tensor.dtype == Dtype::bf16 ? Bf16::decode(code) : Fp16::decode(code);
  }
  return values;
}

void check_request(const std::string& folder, const GptShape& shape,
                   const std::vector<ParameterData>& parameters, std::size_t wanted) {
  if (const std::string problem = problem_with(gpt2(shape)); !problem.empty())
    fail("cannot write ", folder, ": ", problem);
  if (parameters.size() != wanted)
    fail("cannot write ", folder, ": a model of this shape has ", wanted, " parameters, but ",
         parameters.size(), " were given; give them in the order of parameters_of");
  for (const ParameterData& parameter : parameters)
    if (!is_float(parameter.dtype))
      fail("cannot write ", folder, ": a parameter is ", io::name_of(parameter.dtype),
           "; give F32, BF16 or F16");
}

}  // namespace

void write_model(const std::string& folder, const GptShape& shape,
                 const std::vector<ParameterData>& parameters, io::Metadata notes) {
  const std::vector<Parameter> list =
      problem_with(gpt2(shape)).empty() ? parameters_of(gpt2(shape)) : std::vector<Parameter>();
  check_request(folder, shape, parameters, list.size());
  std::error_code error;
  std::filesystem::create_directories(folder, error);
  if (error) fail("cannot make the folder ", folder, ": ", error.message());

  std::vector<io::TensorInfo> tensors;
  for (std::size_t i = 0; i < list.size(); ++i)
    tensors.push_back({list[i].name, parameters[i].dtype, list[i].shape});
  notes["format"] = "pt";
  io::SafetensorsWriter writer(weights_path(folder), tensors, notes);
  for (std::size_t i = 0; i < list.size(); ++i)
    writer.write(i, {static_cast<const std::byte*>(parameters[i].values()),
                     static_cast<std::size_t>(tensors[i].bytes())});
  writer.finish();
  io::write_text(config_path(folder), config_of(shape, parameters[0].dtype));
}

Model read_model(const std::string& folder) {
  const ordered_json config = parse_config(config_path(folder));
  check_settings(config, config_path(folder));
  Model model;
  model.shape = gpt2(shape_of(config, config_path(folder)));
  const io::Safetensors file(weights_path(folder));
  const std::vector<Parameter> list = parameters_of(model.shape);
  for (const Parameter& parameter : list) check_tensor(file, parameter);
  check_rest(file, list);
  for (const Parameter& parameter : list) model.parameters.push_back(as_floats(stored(file, parameter.name)));
  return model;
}

}  // namespace scruple::train
