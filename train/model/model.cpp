#include "train/model/model.h"

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <set>

#include "formats/bf16.h"
#include "formats/fp16.h"
#include "train/model/families/families.h"
#include "train/text/json_object.h"

namespace scruple::train {
namespace {

namespace fs = std::filesystem;
using io::Dtype;
using io::fail;
using nlohmann::ordered_json;

constexpr std::string_view kPrefix = "transformer.", kHead = "lm_head.weight";
constexpr const char* kConfig = "/config.json";
constexpr const char* kWeights = "/model.safetensors";
constexpr const char* kIndex = "/model.safetensors.index.json";
constexpr std::size_t kMaxIndex = std::size_t{1}
                                  << 28;  // bytes; that of a model of 400 B parameters has 200 KB

bool is_float(Dtype dtype) { return dtype == Dtype::f32 || dtype == Dtype::bf16 || dtype == Dtype::f16; }

const char* torch_name(Dtype dtype) {
  return dtype == Dtype::bf16 ? "bfloat16" : dtype == Dtype::f16 ? "float16" : "float32";
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

// The files that an index names, each once. They lie beside it.
std::set<std::string> files_of(const std::string& path) {
  const ordered_json index = json_object(path, io::read_text(path, kMaxIndex));
  const auto map = index.find("weight_map");
  if (map == index.end() || !map->is_object() || map->empty())
    fail(path, " has no \"weight_map\", an object that names the file of each tensor");
  std::set<std::string> files;
  for (const auto& [name, file] : map->items()) {
    const std::string found = file.is_string() ? file.get<std::string>() : "";
    if (found.empty() || found.find('/') != std::string::npos || found.starts_with("."))
      fail(path, ": \"", name.substr(0, 80), "\" is in ", file.dump().substr(0, 80),
           "; it must be the name of a file in the same folder");
    files.insert(found);
  }
  return files;
}

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

template <class Format>
void decode(const std::byte* from, std::int64_t count, float* to) {
  for (std::int64_t i = 0; i < count; ++i) {
    u16 code = 0;
    std::memcpy(&code, from + 2 * i, sizeof code);
    to[i] = Format::decode(code);
  }
}

// ---- Writing ----

std::string with_dtype(const std::string& config, const char* dtype) {
  ordered_json json = ordered_json::parse(config);
  json[json.contains("dtype") ? "dtype" : "torch_dtype"] = dtype;  // transformers 5, and before
  return json.dump(2) + "\n";
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
  if (is_folder) open_weights();
}

void ModelFolder::open_weights() {
  std::error_code ignored;
  const bool one = fs::exists(folder_ + kWeights, ignored);
  if (!one && !fs::exists(folder_ + kIndex, ignored))
    fail(folder_, " has a config.json and no weights, neither model.safetensors nor its index",
         pickled_in(folder_));
  for (const std::string& name : one ? std::set<std::string>{&kWeights[1]} : files_of(folder_ + kIndex)) {
    if (!one && !fs::exists(folder_ + "/" + name, ignored))
      fail(folder_, kIndex, " names ", name, ", which is not there; fetch that file too");
    files_.push_back(std::make_unique<io::Safetensors>(folder_ + "/" + name));
  }
  std::vector<std::string> missing;
  for (const Parameter& parameter : parameters_of(config_.shape)) {
    const io::StoredTensor* const tensor = find(parameter.name);
    tensors_.push_back(tensor);
    if (tensor == nullptr)
      missing.push_back(parameter.name);
    else if (tensor->shape != parameter.shape)
      fail(folder_, ": tensor \"", tensor->name, "\" has shape ", written(tensor->shape),
           ", and the config asks for ", written(parameter.shape));
    else if (!is_float(tensor->dtype))
      fail(folder_, ": tensor \"", tensor->name, "\" is ", io::name_of(tensor->dtype),
           "; only F32, BF16 and F16 are read");
  }
  if (!missing.empty()) fail(folder_, " lacks ", listed(missing), ", which the model of its config.json has");
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
    fail(folder_, " has ", listed(rest), ", which the model of its config.json has not",
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
  const std::byte* const from = tensor.data.data() + first * io::bytes_of(tensor.dtype);
  if (tensor.dtype == Dtype::f32)
    std::memcpy(values, from, static_cast<std::size_t>(count) * sizeof(float));
  else if (tensor.dtype == Dtype::bf16)
    decode<Bf16>(from, count, values);
  else
    decode<Fp16>(from, count, values);
}

void copy_tokenizer(const std::string& from, const std::string& to) {
  for (const char* name : kTokenizerFiles) {
    std::error_code error;
    const fs::path source = fs::path(from) / name, target = fs::path(to) / name;
    if (!fs::exists(source, error) || fs::exists(target, error)) continue;
    fs::copy_file(source, target, error);
    if (error) fail("cannot copy ", source.string(), " to ", target.string(), ": ", error.message());
  }
}

bool has_tokenizer(const std::string& folder) {
  std::error_code ignored;
  return fs::exists(fs::path(folder) / kTokenizerFiles[0], ignored);
}

namespace {

// A JSON object of the folder; empty where there is none.
ordered_json object_in(const std::string& folder, const char* name) {
  const fs::path path = fs::path(folder) / name;
  std::error_code ignored;
  if (!fs::exists(path, ignored)) return ordered_json::object();
  return json_object(path.string(), io::read_text(path.string(), kMaxIndex));
}

// What the first file that has an eos_token_id gives: a number or several.
std::vector<Token> numbered_ends(const std::string& folder, const Tokenizer& tokenizer) {
  std::vector<Token> found;
  for (const char* name : {"generation_config.json", "config.json"}) {
    const ordered_json ids = object_in(folder, name).value("eos_token_id", ordered_json());
    for (const ordered_json& id : ids.is_array() ? ids : ordered_json::array({ids}))
      if (id.is_number_unsigned() && id.get<std::uint64_t>() < static_cast<std::uint64_t>(tokenizer.size()))
        found.push_back(static_cast<Token>(id.get<std::uint64_t>()));
    if (!found.empty()) break;
  }
  return found;
}

}  // namespace

std::optional<Token> end_token(const std::string& folder, const Tokenizer& tokenizer) {
  for (const char* name : {"tokenizer_config.json", "special_tokens_map.json"}) {
    const ordered_json json = object_in(folder, name);
    ordered_json token = json.value("eos_token", ordered_json());
    if (token.is_object()) token = ordered_json(token.value("content", ordered_json()));
    if (token.is_string())
      if (const auto found = tokenizer.find(token.get<std::string>())) return found;
  }
  const std::vector<Token> numbered = numbered_ends(folder, tokenizer);
  return numbered.empty() ? std::optional<Token>() : numbered.front();
}

std::vector<Token> stop_tokens(const std::string& folder, const Tokenizer& tokenizer) {
  std::vector<Token> stops = numbered_ends(folder, tokenizer);
  if (const auto end = end_token(folder, tokenizer)) stops.push_back(*end);
  return stops;
}

void write_model(const std::string& folder, const ModelConfig& model,
                 const std::vector<ParameterData>& parameters, io::Metadata notes) {
  check_request(folder, model.shape, parameters);
  std::error_code error;
  fs::create_directories(folder, error);
  if (error) fail("cannot make the folder ", folder, ": ", error.message());
  const std::vector<Parameter> list = parameters_of(model.shape);
  std::vector<io::TensorInfo> tensors;
  for (std::size_t i = 0; i < list.size(); ++i)
    tensors.push_back({list[i].name, parameters[i].dtype, list[i].shape});
  notes["format"] = "pt";
  io::SafetensorsWriter writer(folder + kWeights, tensors, notes);
  for (std::size_t i = 0; i < list.size(); ++i)
    writer.write(i, {static_cast<const std::byte*>(parameters[i].values()),
                     static_cast<std::size_t>(tensors[i].bytes())});
  writer.finish();
  io::write_text(folder + kConfig, with_dtype(model.text, torch_name(parameters[0].dtype)));
}

}  // namespace scruple::train
