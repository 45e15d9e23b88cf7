#include "train/export.h"

#include <cstring>
#include <filesystem>
#include <set>

#include "formats/bf16.h"
#include "formats/fp16.h"
#include "train/families/families.h"

namespace scruple::train {
namespace {

using io::Dtype;
using io::fail;

constexpr std::string_view kPrefix = "transformer.", kHead = "lm_head.weight";

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

// ---- The weights ----

// The hub's own GPT-2 files lack the prefix.
const io::StoredTensor& stored(const io::Safetensors& file, const std::string& name) {
  const bool prefixed = name.starts_with(kPrefix);
  const io::StoredTensor* const bare = prefixed ? file.find(name.substr(kPrefix.size())) : nullptr;
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
bool repeats_embedding(const io::StoredTensor& tensor, const io::StoredTensor& embedding) {
  return tensor.name == kHead && tensor.dtype == embedding.dtype && tensor.shape == embedding.shape &&
         std::memcmp(tensor.data.data(), embedding.data.data(), embedding.data.size()) == 0;
}

// What old files carry beside the weights: GPT-2's the causal mask of each layer, Llama's its frequencies.
bool is_buffer(std::string_view name) {
  return name.ends_with(".attn.bias") || name.ends_with(".attn.masked_bias") ||
         name.ends_with(".rotary_emb.inv_freq");
}

// A tensor that nobody asks for means that the file is of another model.
void check_rest(const io::Safetensors& file, const Description& model) {
  std::set<std::string_view> known;
  const std::vector<Parameter> list = parameters_of(model);
  for (const Parameter& parameter : list) known.insert(stored(file, parameter.name).name);
  const io::StoredTensor& embedding =
      stored(file, list[static_cast<std::size_t>(places_of(model).tokens)].name);
  for (const io::StoredTensor& tensor : file.tensors())
    if (!known.contains(tensor.name) && !is_buffer(tensor.name) && !repeats_embedding(tensor, embedding))
      fail(file.path(), ": tensor \"", tensor.name.substr(0, 80),
           "\" has no place in the model that config.json describes",
           tensor.name == kHead ? "; its head is not tied to the embedding" : "");
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
  io::write_text(config_path(folder), gpt2_config(shape, torch_name(parameters[0].dtype)));
}

Model read_model(const std::string& folder, std::int64_t context) {
  Model model;
  model.shape = describe(config_path(folder), context);
  const io::Safetensors file(weights_path(folder));
  const std::vector<Parameter> list = parameters_of(model.shape);
  for (const Parameter& parameter : list) check_tensor(file, parameter);
  check_rest(file, model.shape);
  for (const Parameter& parameter : list) model.parameters.push_back(as_floats(stored(file, parameter.name)));
  return model;
}

}  // namespace scruple::train
