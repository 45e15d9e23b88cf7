#include "model.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <memory>
#include <nlohmann/json.hpp>
#include <set>
#include <stdexcept>

#include "scruple/scruple.hpp"
#include "text.h"

namespace scruple::cli {
namespace {

using nlohmann::json;

constexpr std::int64_t kMaxHeader =
    100'000'000;               // what the safetensors library itself accepts; of a .json too
constexpr int kMaxDepth = 16;  // a header of nothing but brackets must not fill the memory

[[noreturn]] void fail(const std::string& message) { throw std::runtime_error(message); }

std::int64_t multiply(std::int64_t a, std::int64_t b) {
  std::int64_t product = 0;
  if (__builtin_mul_overflow(a, b, &product) || product > kMaxCount) fail("more than 2^50 elements");
  return product;
}

std::int64_t product(const std::vector<std::int64_t>& shape) {
  if (std::find(shape.begin(), shape.end(), 0) != shape.end())
    return 0;  // even where the rest would overflow
  std::int64_t elements = 1;
  for (const std::int64_t dimension : shape) elements = multiply(elements, dimension);
  return elements;
}

std::ifstream open(const std::string& path, std::int64_t& size) {
  std::ifstream file(path, std::ios::binary | std::ios::ate);
  if (!file) fail(std::string("cannot open it: ") + std::strerror(errno));
  size = static_cast<std::int64_t>(file.tellg());
  file.seekg(0);
  // A directory opens, but has no end or cannot be read.
  if (size < 0 || size == INT64_MAX || file.peek() == std::ifstream::traits_type::eof())
    fail("it is empty or no file");
  return file;
}

json parse(std::ifstream& file, std::int64_t length) {
  std::string text(static_cast<std::size_t>(length), '\0');
  if (!file.read(text.data(), length)) fail("cannot read it");
  const auto limit_depth = [](int depth, json::parse_event_t, json&) {
    if (depth > kMaxDepth) fail("its JSON is nested too deeply");
    return true;
  };
  try {
    return json::parse(text, limit_depth);
  } catch (const json::parse_error& error) {
    fail("it is not valid JSON from byte " + std::to_string(error.byte) + " on");
  } catch (const json::exception&) {
    fail("it is not valid JSON");
  }
}

// ---- safetensors ----

struct Dtype {
  const char* name;
  int bytes;
  bool trains;  // integers and masks are no parameters
};
constexpr Dtype kDtypes[] = {{"F64", 8, true},     {"F32", 4, true},     {"F16", 2, true},  {"BF16", 2, true},
                             {"F8_E5M2", 1, true}, {"F8_E4M3", 1, true}, {"I64", 8, false}, {"I32", 4, false},
                             {"I16", 2, false},    {"I8", 1, false},     {"U64", 8, false}, {"U32", 4, false},
                             {"U16", 2, false},    {"U8", 1, false},     {"BOOL", 1, false}};

const Dtype& find_dtype(const json& entry) {
  const json& name = entry.at("dtype");
  for (const Dtype& dtype : kDtypes)
    if (name == dtype.name) return dtype;
  fail("dtype " + name.dump() + " is unknown");
}

std::vector<std::int64_t> shape_of(const json& entry) {
  std::vector<std::int64_t> shape;
  for (const json& dimension : entry.at("shape")) {
    if (!dimension.is_number_unsigned()) fail("its shape is " + entry.at("shape").dump());
    if (dimension.get<std::uint64_t>() > static_cast<std::uint64_t>(kMaxCount))
      fail("more than 2^50 elements");
    shape.push_back(dimension.get<std::int64_t>());
  }
  return shape;
}

// Returns where the tensor's data ends. The data itself is never read, but a header that contradicts itself
// is refused.
std::int64_t add_entry(Model& model, const json& entry, std::int64_t& integers) {
  if (!entry.is_object() || !entry.contains("dtype") || !entry.contains("shape") ||
      !entry.at("shape").is_array())
    fail("it needs a dtype and a shape");
  const Dtype& dtype = find_dtype(entry);
  const std::vector<std::int64_t> shape = shape_of(entry);
  const std::int64_t bytes = product(shape) * dtype.bytes;
  const json offsets = entry.value("data_offsets", json());
  if (!offsets.is_array() || offsets.size() != 2 || !offsets[0].is_number_unsigned() ||
      !offsets[1].is_number_unsigned() || offsets[0] > offsets[1] ||
      offsets[1].get<std::uint64_t>() - offsets[0].get<std::uint64_t>() !=
          static_cast<std::uint64_t>(bytes) ||
      offsets[1].get<std::uint64_t>() > static_cast<std::uint64_t>(INT64_MAX / 2))
    fail("its data_offsets are " + offsets.dump() + ", but its shape takes " + std::to_string(bytes) +
         " bytes");
  if (dtype.trains)
    model.add(shape);
  else
    ++integers;
  return offsets[1].get<std::int64_t>();
}

// In a file of a checkpoint: whether the tensor completes a weight, or is a moment of it: "WEIGHT/exp_avg".
bool belongs_to_another(const json& root, const std::string& name) {
  for (std::size_t at = name.find('/'); at != name.npos; at = name.find('/', at + 1))
    if (root.contains(name.substr(0, at))) return true;
  return false;
}

void add_safetensors(Model& model, const std::string& path) {
  std::int64_t file_size = 0;
  std::ifstream file = open(path, file_size);
  std::array<unsigned char, 8> prefix{};
  if (file_size < 8)
    fail("it has " + plural(file_size, "byte") + "; a safetensors file begins with 8 bytes of length");
  file.read(reinterpret_cast<char*>(prefix.data()), 8);
  std::uint64_t length = 0;
  for (std::size_t i = 8; i-- > 0;) length = length << 8 | prefix[i];
  if (length > static_cast<std::uint64_t>(kMaxHeader))
    fail("its header claims " + std::to_string(length) +
         " bytes, over the limit of 100 MB; is it a safetensors file?");
  const std::int64_t header = static_cast<std::int64_t>(length);
  if (header > file_size - 8)
    fail("its header claims " + plural(header, "byte") + ", but only " + grouped(file_size - 8) + " follow");
  const json root = parse(file, header);
  if (!root.is_object()) fail("its header is no JSON object");

  const json notes = root.value("__metadata__", json());
  const bool of_checkpoint = notes.is_object() && notes.contains("scruple_checkpoint");
  Model state;  // of an optimizer
  std::int64_t integers = 0, data_end = 0, ignored = 0;
  for (const auto& [name, entry] : root.items()) {
    if (name == "__metadata__") continue;
    try {
      const bool is_state = of_checkpoint && belongs_to_another(root, name);
      data_end =
          std::max(data_end, add_entry(is_state ? state : model, entry, is_state ? ignored : integers));
    } catch (const std::runtime_error& error) {
      fail("tensor " + json(name).dump() + ": " + error.what());
    }
  }
  if (integers > 0)
    model.notes.push_back(path + ": " + plural(integers, "tensor") + " of integers not counted" +
                          (of_checkpoint ? "; the checkpoint's folder says what they stand for" : ""));
  if (data_end > file_size - 8 - header)
    model.notes.push_back(path + ": the file is cut short; the shapes are those of its header");
}

// ---- config.json ----

// A Llama-like decoder and where the kinds differ. The defaults are those of the Hugging Face config classes,
// which leave out of the file what equals them.
struct Decoder {
  const char* type;
  bool tied;
  std::int64_t head_dim;  // 0: hidden_size / num_attention_heads
  bool bias;              // q, k and v have biases even without attention_bias
  int norms;              // per layer
  bool head_norms;        // q_norm and k_norm
};
constexpr Decoder kDecoders[] = {
    {"llama", false, 0, false, 2, false},  {"mistral", false, 0, false, 2, false},
    {"qwen2", false, 0, true, 2, false},   {"qwen3", false, 128, false, 2, true},
    {"gemma", true, 256, false, 2, false}, {"gemma2", true, 256, false, 4, false},
};

class Config {
 public:
  explicit Config(json root) : root_(std::move(root)) {}

  bool has(const char* key) const { return root_.contains(key) && !root_.at(key).is_null(); }
  std::int64_t number(const char* key) const {
    if (!has(key)) fail(std::string("it has no ") + key);
    const json& value = root_.at(key);
    if (!value.is_number_unsigned() || value == 0 || value > std::int64_t{1} << 40)
      fail(std::string(key) + " is " + value.dump() + "; it must be a whole number from 1 to 2^40");
    return value.get<std::int64_t>();
  }
  std::int64_t number(const char* key, std::int64_t otherwise) const {
    return has(key) ? number(key) : otherwise;
  }
  bool flag(const char* key, bool otherwise) const {
    if (!has(key)) return otherwise;
    if (!root_.at(key).is_boolean())
      fail(std::string(key) + " is " + root_.at(key).dump() + "; it must be true or false");
    return root_.at(key).get<bool>();
  }
  std::string text(const char* key) const {
    return has(key) && root_.at(key).is_string() ? root_.at(key).get<std::string>() : "";
  }
  std::int64_t head_dim(std::int64_t hidden, std::int64_t heads, std::int64_t otherwise) const {
    if (has("head_dim")) return number("head_dim");
    if (otherwise > 0) return otherwise;
    if (hidden % heads != 0)
      fail("hidden_size " + std::to_string(hidden) + " is no multiple of num_attention_heads " +
           std::to_string(heads));
    return hidden / heads;
  }

 private:
  json root_;
};

void add_decoder(Model& model, const Config& config, const Decoder& kind) {
  const std::int64_t hidden = config.number("hidden_size"), inner = config.number("intermediate_size"),
                     layers = config.number("num_hidden_layers"),
                     heads = config.number("num_attention_heads"), vocabulary = config.number("vocab_size");
  const std::int64_t head = config.head_dim(hidden, heads, kind.head_dim);
  const std::int64_t queries = multiply(heads, head),
                     keys = multiply(config.number("num_key_value_heads", heads), head);

  model.add({vocabulary, hidden}, config.flag("tie_word_embeddings", kind.tied) ? 1 : 2);
  model.add({hidden, queries}, 2 * layers);  // q_proj and o_proj
  model.add({hidden, keys}, 2 * layers);     // k_proj and v_proj
  model.add({hidden, inner}, 3 * layers);    // gate_proj, up_proj, down_proj
  model.add({hidden}, kind.norms * layers + 1);
  if (kind.head_norms) model.add({head}, 2 * layers);
  const bool all_biases = config.flag("attention_bias", false);
  if (all_biases || kind.bias) {
    model.add({queries}, layers);
    model.add({keys}, 2 * layers);
  }
  if (all_biases) model.add({hidden}, layers);  // o_proj
  if (config.flag("mlp_bias", false)) {
    model.add({inner}, 2 * layers);
    model.add({hidden}, layers);
  }
}

void add_gpt2(Model& model, const Config& config) {
  const std::int64_t hidden = config.number("n_embd"), layers = config.number("n_layer");
  const std::int64_t inner = config.number("n_inner", multiply(4, hidden));
  model.add({config.number("vocab_size"), hidden}, config.flag("tie_word_embeddings", true) ? 1 : 2);
  model.add({config.number("n_positions"), hidden});
  model.add({hidden, multiply(3, hidden)}, layers);  // attn.c_attn
  model.add({multiply(3, hidden)}, layers);
  model.add({hidden, hidden}, layers);     // attn.c_proj
  model.add({hidden, inner}, 2 * layers);  // mlp.c_fc and mlp.c_proj
  model.add({inner}, layers);
  model.add({hidden}, 6 * layers + 2);  // two norms with biases and the biases of both c_proj; ln_f
}

// ---- Models of several files ----

// The index that Hugging Face writes beside shards: {"weight_map": {tensor: file}}.
void add_index(Model& model, const json& map, const std::filesystem::path& folder) {
  std::set<std::string> files;
  if (!map.is_object() || map.empty()) fail("its weight_map names no shards");
  for (const auto& [tensor, file] : map.items()) {
    if (!file.is_string() ||
        std::filesystem::path(file.get<std::string>()).filename() != file.get<std::string>())
      fail("tensor " + json(tensor).dump() + " is in " + file.dump() +
           "; it must be a file beside the index");
    files.insert(file);
  }
  for (const std::string& file : files) {
    try {
      add_safetensors(model, folder / file);
    } catch (const std::runtime_error& error) {
      fail("its index names the shard " + json(file).dump() + ": " + error.what());
    }
  }
}

void add_checkpoint(Model& model, const std::string& path) {
  scruple_checkpoint* opened = nullptr;
  check(scruple_checkpoint_open(path.c_str(), &opened));
  const std::unique_ptr<scruple_checkpoint, void (*)(scruple_checkpoint*)> owner(opened,
                                                                                 scruple_checkpoint_close);
  const scruple_checkpoint_contents& contents = *scruple_checkpoint_manifest(opened);
  for (std::int64_t t = 0; t < contents.tensor_count; ++t) {
    const scruple_checkpoint_tensor& tensor = contents.tensors[t];
    model.add({tensor.shape, tensor.shape + tensor.dimensions});
  }
  if (path != contents.folder) model.notes.push_back(path + ": its last checkpoint is " + contents.folder);
}

void add_json(Model& model, const std::string& path) {
  std::int64_t size = 0;
  std::ifstream file = open(path, size);
  if (size > kMaxHeader) fail("it has " + plural(size, "byte") + "; the limit is 100 MB");
  json root = parse(file, size);
  if (root.is_object() && root.contains("weight_map"))
    return add_index(model, root.at("weight_map"), std::filesystem::path(path).parent_path());
  if (!root.is_object()) fail("it is no JSON object");
  const Config config(std::move(root));
  const std::string type = config.text("model_type");
  if (type == "gpt2") return add_gpt2(model, config);
  std::string known;
  for (const Decoder& kind : kDecoders) {
    if (type == kind.type) return add_decoder(model, config, kind);
    known += std::string(kind.type) + ", ";
  }
  fail((type.empty() ? "it has no model_type" : "unknown model_type " + json(type).dump()) +
       "; known: " + known + "gpt2; for another model give its .safetensors files or --params");
}

// A model as Hugging Face lays it out or 'scruple train' leaves it, a checkpoint, or a run that has some.
void add_folder(Model& model, const std::string& path) {
  const std::filesystem::path folder = path;
  const auto has = [&](const char* name) { return std::filesystem::exists(folder / name); };
  if (has("manifest.json")) return add_checkpoint(model, path);
  if (has("model.safetensors")) return add_safetensors(model, folder / "model.safetensors");
  if (has("model.safetensors.index.json")) return add_json(model, folder / "model.safetensors.index.json");
  if (has("checkpoints")) return add_checkpoint(model, path);
  if (has("config.json")) return add_json(model, folder / "config.json");
  fail(
      "it has no model.safetensors, no index of shards, no checkpoint and no config.json; give files of the "
      "model, or --params");
}

}  // namespace

void Model::add(const std::vector<std::int64_t>& shape, std::int64_t count) {
  const std::int64_t size = product(shape);
  params += multiply(size, count);
  if (params > kMaxCount) fail("more than 2^50 parameters");
  tensors[size] += count;
}

std::int64_t Model::tensor_count() const {
  std::int64_t sum = 0;
  for (const auto& [size, count] : tensors) sum += count;
  return sum;
}

Model one_tensor(std::int64_t params) {
  Model model;
  model.add({params});
  return model;
}

Model read_model(const std::vector<std::string>& paths) {
  Model model;
  for (const std::string& path : paths) {
    try {
      if (path.ends_with(".json") && paths.size() > 1)
        fail("a .json file stands for a whole model; give it alone");
      if (std::filesystem::is_directory(path))
        add_folder(model, path);
      else if (path.ends_with(".json"))
        add_json(model, path);
      else
        add_safetensors(model, path);
    } catch (const std::runtime_error& error) {
      fail(path + ": " + error.what());
    }
  }
  if (model.params == 0) fail(paths.front() + ": it has no parameters");
  return model;
}

}  // namespace scruple::cli
