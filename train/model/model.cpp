#include "train/model/model.h"

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <set>
#include <span>

#include "formats/bf16.h"
#include "formats/fp16.h"
#include "train/model/families/families.h"
#include "train/model/files.h"

namespace scruple::train {
namespace {

namespace fs = std::filesystem;
using io::Dtype;
using io::fail;
using nlohmann::ordered_json;

constexpr std::string_view kPrefix = "transformer.", kHead = "lm_head.weight";
constexpr const char* kConfig = "/config.json";

bool is_float(Dtype dtype) { return dtype == Dtype::f32 || dtype == Dtype::bf16 || dtype == Dtype::f16; }

const char* torch_name(Dtype dtype) {
  return dtype == Dtype::bf16 ? "bfloat16" : dtype == Dtype::f16 ? "float16" : "float32";
}

// What the text of a config.json says that weights are stored in. transformers 5 calls it dtype.
std::optional<Dtype> dtype_of(const std::string& config) {
  const nlohmann::json root = nlohmann::json::parse(config);
  const auto found = root.find(root.contains("dtype") ? "dtype" : "torch_dtype");
  for (const Dtype dtype : {Dtype::f32, Dtype::bf16, Dtype::f16})
    if (found != root.end() && *found == torch_name(dtype)) return dtype;
  return {};
}

std::string with_dtype(const std::string& config, Dtype dtype) {
  ordered_json json = ordered_json::parse(config);
  json[json.contains("dtype") ? "dtype" : "torch_dtype"] = torch_name(dtype);
  return json.dump(2) + "\n";
}

std::string written(const std::vector<std::int64_t>& shape) {
  std::string text;
  for (const std::int64_t n : shape) text += (text.empty() ? "" : ", ") + std::to_string(n);
  return "[" + text + "]";
}

// "a", "b", "c" and 7 more
std::string listed(const std::vector<std::string>& names) {
  constexpr std::size_t kSome = 3;
  std::string text;
  for (std::size_t i = 0; i < std::min(kSome, names.size()); ++i)
    text += (i > 0 ? ", \"" : "\"") + names[i].substr(0, 80) + "\"";
  return text + (names.size() > kSome ? " and " + std::to_string(names.size() - kSome) + " more" : "");
}

// ---- Reading ----

// What to do where there are no safetensors: convert weights of another kind, if there are any.
std::string pickled_in(const std::string& folder) {
  for (const auto& entry : fs::directory_iterator(folder)) {
    const std::string name = entry.path().filename().string();
    if (name.ends_with(".bin") || name.ends_with(".pt") || name.ends_with(".pth"))
      return "; it has " + name +
             ", which only Python reads. Convert it: python -c \"from transformers import "
             "AutoModelForCausalLM "
             "as M; M.from_pretrained('" +
             folder + "').save_pretrained('" + folder + "')\"";
    if (name.ends_with(".gguf"))
      return "; it has " + name + ", whose weights are rounded for inference; fetch the model's safetensors";
  }
  return "; name the config.json itself to begin without them";
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

// ---- Values ----

template <class Format>
void decode(const std::byte* from, std::int64_t count, float* to) {
  for (std::int64_t i = 0; i < count; ++i) {
    u16 code = 0;
    std::memcpy(&code, from + 2 * i, sizeof code);
    to[i] = Format::decode(code);
  }
}

void decode(Dtype dtype, const std::byte* from, std::int64_t count, float* to) {
  if (dtype == Dtype::f32)
    std::memcpy(to, from, static_cast<std::size_t>(count) * sizeof(float));
  else if (dtype == Dtype::bf16)
    decode<Bf16>(from, count, to);
  else
    decode<Fp16>(from, count, to);
}

// ---- Writing ----

// The type of the config where that holds what the model computed with, and else that. A bf16 value fits fp16 but for
// its range: what is beyond becomes the largest that there is.
Dtype stored_type(Dtype computed, std::optional<Dtype> asked) {
  const bool fits = asked == Dtype::f32 || (asked == Dtype::f16 && computed == Dtype::bf16);
  return fits ? *asked : computed;
}

// Writes all of a parameter, a piece at a time where its type changes.
void write_values(io::SafetensorsWriter& writer, std::size_t place, const io::TensorInfo& stored,
                  const ParameterData& parameter) {
  const auto* const from = static_cast<const std::byte*>(parameter.values());
  if (stored.dtype == parameter.dtype)
    return writer.write(place, {from, static_cast<std::size_t>(stored.bytes())});
  constexpr std::int64_t kPiece = 1 << 16;
  const std::int64_t size = stored.bytes() / io::bytes_of(stored.dtype);
  std::vector<float> values;
  std::vector<u16> codes;
  for (std::int64_t first = 0; first < size; first += kPiece) {
    values.resize(static_cast<std::size_t>(std::min(kPiece, size - first)));
    decode(parameter.dtype, from + first * io::bytes_of(parameter.dtype),
           static_cast<std::int64_t>(values.size()), values.data());
    codes.clear();
    if (stored.dtype == Dtype::f16)
      for (const float x : values) codes.push_back(Fp16::nearest(x));
    writer.write(place, codes.empty() ? std::as_bytes(std::span(values)) : std::as_bytes(std::span(codes)));
  }
}

void check_request(const std::string& folder, const Description& shape,
                   const std::vector<ParameterData>& parameters) {
  if (const std::string problem = problem_with(shape); !problem.empty())
    fail("cannot write ", folder, ": ", problem);
  if (const std::size_t wanted = parameters_of(shape).size(); parameters.size() != wanted)
    fail("cannot write ", folder, ": a model of this shape has ", wanted, " parameters, but ",
         parameters.size(), " were given; give them in the order of parameters_of");
  for (const ParameterData& parameter : parameters)
    if (!is_float(parameter.dtype))
      fail("cannot write ", folder, ": a parameter is ", io::name_of(parameter.dtype),
           "; give F32, BF16 or F16");
}

}  // namespace

ModelConfig gpt2_model(const GptShape& shape) { return {gpt2(shape), gpt2_config(shape)}; }

std::string folder_of_model(const std::string& path) {
  std::error_code ignored;
  if (fs::is_directory(path, ignored)) return path;
  const std::string above = fs::path(path).parent_path().string();
  return above.empty() ? "." : above;
}

ModelFolder::ModelFolder(const std::string& path, std::int64_t context) : folder_(folder_of_model(path)) {
  std::error_code ignored;
  const bool is_folder = fs::is_directory(path, ignored);
  if (path.ends_with(".safetensors"))
    fail(path, " has weights alone; give its folder, where its config.json is");
  const std::string config = is_folder ? path + kConfig : path;
  config_.text = io::read_text(config, kMaxConfig);
  config_.shape = describe(config_.text, config, context);
  if (!is_folder) return;
  open_weights();
  const Dtype stored = tensors_[static_cast<std::size_t>(places_of(config_.shape).tokens)]->dtype;
  if (dtype_of(config_.text) != stored) config_.text = with_dtype(config_.text, stored);
}

void ModelFolder::open_weights() {
  for (const std::string& path : weight_files(folder_))
    files_.push_back(std::make_unique<io::Safetensors>(path));
  if (files_.empty())
    fail(folder_, " has a config.json and no weights, neither model.safetensors nor its index",
         pickled_in(folder_));
  std::vector<std::string> missing;
  for (const Parameter& parameter : parameters_of(config_.shape)) {
    const io::StoredTensor* const tensor = find(parameter.name);
    tensors_.push_back(tensor);
    if (tensor == nullptr)
      missing.push_back(parameter.name);
    else if (tensor->shape != parameter.shape)
      fail(folder_, ": tensor \"", tensor->name, "\" has shape ", written(tensor->shape),
           ", and the config asks for ", written(parameter.shape),
           "; take the config.json that came with these weights");
    else if (!is_float(tensor->dtype))
      fail(folder_, ": tensor \"", tensor->name, "\" is ", io::name_of(tensor->dtype),
           "; only F32, BF16 and F16 are read");
  }
  if (!missing.empty())
    fail(folder_, " lacks ", listed(missing),
         ", which its config.json asks for; fetch all its files, or the config.json of these weights");
  check_rest();
}

// A tensor that nobody asks for means that the files are of another model.
void ModelFolder::check_rest() const {
  std::set<std::string_view> known;
  for (const io::StoredTensor* const tensor : tensors_) known.insert(tensor->name);
  const auto& embedding = *tensors_[static_cast<std::size_t>(places_of(config_.shape).tokens)];
  std::vector<std::string> rest;
  for (const auto& file : files_)
    for (const io::StoredTensor& tensor : file->tensors())
      if (!known.contains(tensor.name) && !is_buffer(tensor.name) && !repeats_embedding(tensor, embedding))
        rest.push_back(tensor.name);
  if (!rest.empty())
    fail(folder_, " has ", listed(rest), ", for which its config.json has no place",
         rest.front() == kHead ? "; its head is not tied to the embedding" : "");
}

// The hub's own GPT-2 files lack the prefix.
const io::StoredTensor* ModelFolder::find(const std::string& name) const {
  for (const auto& file : files_)
    for (const std::string_view spelling :
         {std::string_view(name),
          std::string_view(name).substr(name.starts_with(kPrefix) ? kPrefix.size() : 0)})
      if (const io::StoredTensor* const tensor = file->find(spelling)) return tensor;
  return nullptr;
}

void ModelFolder::read(int parameter, std::int64_t first, std::int64_t count, float* values) const {
  const io::StoredTensor& tensor = *tensors_[static_cast<std::size_t>(parameter)];
  decode(tensor.dtype, tensor.data.data() + first * io::bytes_of(tensor.dtype), count, values);
}

void write_model(const std::string& folder, const ModelConfig& model,
                 const std::vector<ParameterData>& parameters, io::Metadata notes) {
  check_request(folder, model.shape, parameters);
  std::error_code error;
  fs::create_directories(folder, error);
  if (error) fail("cannot make the folder ", folder, ": ", error.message());
  const std::vector<Parameter> list = parameters_of(model.shape);
  std::vector<io::TensorInfo> tensors;
  const std::optional<Dtype> asked = dtype_of(model.text);
  for (std::size_t i = 0; i < list.size(); ++i)
    tensors.push_back({list[i].name, stored_type(parameters[i].dtype, asked), list[i].shape});
  notes["format"] = "pt";
  io::SafetensorsWriter writer(folder + "/" + kWeightsName, tensors, notes);
  for (std::size_t i = 0; i < list.size(); ++i) write_values(writer, i, tensors[i], parameters[i]);
  writer.finish();
  io::write_text(folder + kConfig, with_dtype(model.text, tensors[0].dtype));
}

}  // namespace scruple::train
