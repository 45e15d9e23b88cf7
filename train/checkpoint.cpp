#include "train/checkpoint.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <iterator>
#include <utility>

#include "train/families/families.h"

namespace scruple::train {
namespace {

using io::fail;

std::string array_name(const scruple_tensor& row, int array) {
  const char* name = nullptr;
  check(scruple_tensor_array(&row, array, &name, nullptr, nullptr));
  return name;
}

std::vector<int> stored_arrays(const scruple_tensor& row) {
  std::vector<int> arrays = used_arrays(row);
  std::erase(arrays, int{SCRUPLE_GRADIENT});
  return arrays;
}

struct Bytes {
  std::int64_t codes = 0, aux = 0;
};
Bytes bytes_of_planes(const scruple_format* format, std::int64_t size) {
  Bytes bytes;
  check(scruple_format_bytes(format, size, &bytes.codes, &bytes.aux));
  return bytes;
}

std::vector<io::Plane> planes_of(const scruple_format* format, const std::vector<std::int64_t>& shape,
                                 std::int64_t size) {
  const scruple_format_info info = info_of(format);
  const Bytes whole = bytes_of_planes(format, size), block = bytes_of_planes(format, io::kBlock);
  return io::planes_of(
      {info.name, info.aux_bits, info.aux_is_scale != 0, whole.codes, whole.aux, block.codes, block.aux},
      shape);
}

// Which array of the row the checkpoint's is; throws where the optimizer has none of that name.
int index_of(const scruple_tensor& row, const io::TensorState& tensor, const io::Array& array) {
  for (const int a : stored_arrays(row))
    if (array_name(row, a) == array.name) return a;
  fail("tensor \"", tensor.name, "\" has an array \"", array.name, "\", which its optimizer does not use");
}

bool reads_alike(const io::Array& a, const io::Array& b) {
  const auto read_as = [](const io::Array& x) {
    return scruple_format_reads_as(format_named(x.format.c_str()), find_rounding(x.rounding));
  };
  return a.format == b.format && read_as(a) == read_as(b);
}

// The stored tensor is what a row in its formats takes, plane by plane; `other_formats`: moments may be in others.
void check_planes(const io::TensorState& tensor, const scruple_tensor& row, bool other_formats) {
  const io::TensorState wanted = stored_form(tensor.name, tensor.shape, row);
  for (std::size_t a = 0; a < std::max(wanted.arrays.size(), tensor.arrays.size()); ++a) {
    const bool has = a < tensor.arrays.size();
    if (a >= wanted.arrays.size() || !has || tensor.arrays[a].name != wanted.arrays[a].name)
      fail("tensor \"", tensor.name, "\" has ", has ? "\"" + tensor.arrays[a].name + "\"" : "nothing",
           " where its optimizer keeps ",
           a < wanted.arrays.size() ? "\"" + wanted.arrays[a].name + "\"" : "nothing");
    const io::Array &found = tensor.arrays[a], &asked = wanted.arrays[a];
    if (!reads_alike(found, asked)) {
      if (found.name != "weight" && other_formats) continue;
      fail("tensor \"", tensor.name, "\": ", found.name, " is stored as ", found.format, " (", found.rounding,
           "), and ", asked.format, " (", asked.rounding,
           ") was asked for; 'scruple checkpoint convert' changes it");
    }
    if (!std::equal(found.planes.begin(), found.planes.end(), asked.planes.begin(), asked.planes.end(),
                    io::same_form))
      fail("tensor \"", tensor.name, "\": the planes of ", found.name, " are not those of ", found.format);
  }
}

io::LossScale stored_form(const scruple_scaler& scaler) {
  return {scaler.scale, scaler.growth, scaler.backoff, scaler.interval, scaler.clean};
}

}  // namespace

io::TensorState stored_form(std::string name, std::vector<std::int64_t> shape, const scruple_tensor& row) {
  io::TensorState tensor;
  tensor.name = std::move(name);
  tensor.shape = std::move(shape);
  tensor.id = row.id;
  tensor.step = row.step;
  for (const int a : stored_arrays(row)) {
    const scruple_array& array = row.arrays[a];
    tensor.arrays.push_back({array_name(row, a), info_of(array.format).name,
                             scruple_rounding_name(array.rounding),
                             planes_of(array.format, tensor.shape, row.size)});
  }
  return tensor;
}

scruple_tensor row_of(const io::TensorState& tensor, const scruple_optimizer* optimizer) {
  scruple_tensor row = {};
  row.optimizer = optimizer;
  row.size = tensor.elements();
  row.step = tensor.step;
  row.id = tensor.id;
  const std::vector<int> arrays = stored_arrays(row);
  if (tensor.arrays.size() != arrays.size())
    fail("tensor \"", tensor.name, "\" has ", tensor.arrays.size(), " arrays, and its optimizer keeps ",
         arrays.size());
  for (const io::Array& stored : tensor.arrays) {
    const int rounding = find_rounding(stored.rounding);
    if (rounding < 0) fail("tensor \"", tensor.name, "\": rounding \"", stored.rounding, "\" is not known");
    row.arrays[index_of(row, tensor, stored)] = {format_named(stored.format.c_str()), nullptr, nullptr,
                                                 rounding, 0};
  }
  for (const int a : arrays)
    if (row.arrays[a].format == nullptr) fail("tensor \"", tensor.name, "\" has no ", array_name(row, a));
  check_planes(tensor, row, false);
  return row;
}

std::span<std::byte> plane_of(const scruple_tensor& row, const io::TensorState& tensor, std::size_t array,
                              std::size_t plane) {
  const scruple_array& found = row.arrays[index_of(row, tensor, tensor.arrays[array])];
  const auto bytes = static_cast<std::size_t>(tensor.arrays[array].planes[plane].bytes());
  return {static_cast<std::byte*>(plane == 0 ? found.codes : found.aux), bytes};
}

namespace {

constexpr std::size_t kPart = std::size_t{64} << 20;  // bytes of a copy for memory that the host cannot touch

std::int64_t signed_size(std::size_t bytes) { return static_cast<std::int64_t>(bytes); }

// `bytes` of a device, where they lie or as copies of parts, in order.
void for_each_part(Memory& memory, std::span<const std::byte> bytes,
                   const std::function<void(std::span<const std::byte>)>& take) {
  if (memory.is_host()) return take(bytes);
  std::vector<std::byte> copy(std::min(kPart, bytes.size()));
  for (; !bytes.empty(); bytes = bytes.subspan(std::min(copy.size(), bytes.size()))) {
    const std::span<std::byte> part = std::span(copy).first(std::min(copy.size(), bytes.size()));
    memory.read(part.data(), bytes.data(), signed_size(part.size()));
    take(part);
  }
}

void read_plane(Memory& memory, const io::Checkpoint& checkpoint, const io::TensorState& tensor,
                const io::Array& array, const io::Plane& plane, std::span<std::byte> to) {
  if (memory.is_host()) return checkpoint.read(tensor, array, plane, to);
  io::PlaneReader reader(checkpoint, tensor, array, plane);
  std::vector<std::byte> copy(std::min(kPart, to.size()));
  for (; !to.empty(); to = to.subspan(std::min(copy.size(), to.size()))) {
    const std::span<std::byte> part = std::span(copy).first(std::min(copy.size(), to.size()));
    reader.read(part);
    memory.write(to.data(), part.data(), signed_size(part.size()));
  }
}

}  // namespace

void load(Engine& engine, const io::Checkpoint& checkpoint, const io::TensorState& tensor,
          const scruple_tensor& row, Memory& memory) {
  check_planes(tensor, row, true);
  const io::TensorState wanted = stored_form(tensor.name, tensor.shape, row);
  for (std::size_t a = 0; a < tensor.arrays.size(); ++a) {
    const io::Array& array = tensor.arrays[a];
    const auto read_into = [&](const scruple_tensor& to) {
      for (std::size_t p = 0; p < array.planes.size(); ++p)
        read_plane(memory, checkpoint, tensor, array, array.planes[p], plane_of(to, tensor, a, p));
    };
    if (reads_alike(array, wanted.arrays[a])) {
      read_into(row);
      continue;
    }
    const Tensor stored(engine, row_of(tensor, row.optimizer));
    read_into(stored.raw());
    std::vector<float> values(static_cast<std::size_t>(row.size));
    const int which = index_of(row, tensor, array);
    stored.decode(which, values.data());
    check(scruple_encode(engine.raw(), &row, which, values.data()));
  }
}

io::Group group_of(const Optimizer& optimizer) {
  const int rule = scruple_optimizer_rule(optimizer.raw());
  scruple_rule_info info;
  check(scruple_rule_at(rule, &info));
  io::Group group = {info.name, optimizer.seed(), {}};
  for (int h = 0; h < info.hypers; ++h) {
    scruple_hyper_info hyper;
    check(scruple_rule_hyper(rule, h, &hyper));
    group.hyperparameters[hyper.name] = optimizer.get(hyper.name);
  }
  return group;
}

Optimizer optimizer_of(const io::Group& group) {
  Optimizer optimizer(group.optimizer.c_str());
  for (const auto& [name, value] : group.hyperparameters) optimizer.set(name.c_str(), value);
  optimizer.set_seed(group.seed);
  return optimizer;
}

std::string checkpoints_of(const std::string& run) { return run + "/checkpoints"; }

std::string find_checkpoint(const std::string& folder) { return io::find_checkpoint(folder); }

namespace {

std::int64_t noted(const io::Checkpoint& checkpoint, const char* name) {
  const io::Metadata& notes = checkpoint.manifest().trainer;
  const auto found = notes.find(name);
  const char* const text = found == notes.end() ? "" : found->second.c_str();
  char* end = nullptr;
  const std::int64_t value = std::strtoll(text, &end, 10);
  if (end == text || *end != '\0') fail(checkpoint.folder(), " says nothing of the run's ", name);
  return value;
}

}  // namespace

ModelConfig config_of(const io::Checkpoint& checkpoint) {
  const io::Metadata& notes = checkpoint.manifest().trainer;
  const auto program = notes.find("program");
  if (program == notes.end() || program->second != kProgram)
    fail(checkpoint.folder(),
         " was not saved by 'scruple train', so nothing says what model its tensors make");
  const std::int64_t context = noted(checkpoint, "--context");
  if (const auto config = notes.find(kConfigNote); config != notes.end())
    return {describe(config->second, checkpoint.folder() + ": its model's config", context), config->second};
  const GptShape shape = {.layers = noted(checkpoint, "--layers"),
                          .width = noted(checkpoint, "--width"),
                          .heads = noted(checkpoint, "--heads"),
                          .context = context};
  if (const std::string problem = problem_with(gpt2(shape)); !problem.empty())
    fail(checkpoint.folder(), ": ", problem);
  return gpt2_model(shape);
}

Model model_of(Engine& engine, const io::Checkpoint& checkpoint) {
  Model model;
  model.shape = config_of(checkpoint).shape;
  const io::Manifest& manifest = checkpoint.manifest();
  const std::vector<Parameter> parameters = parameters_of(model.shape);
  if (manifest.tensors.size() != parameters.size())
    fail(checkpoint.folder(), " has ", manifest.tensors.size(), " tensors, and a model of its shape has ",
         parameters.size());
  for (std::size_t p = 0; p < parameters.size(); ++p) {
    const io::TensorState& tensor = manifest.tensors[p];
    if (tensor.name != parameters[p].name || tensor.shape != parameters[p].shape)
      fail(checkpoint.folder(), ": tensor ", p, " is \"", tensor.name, "\", and its model has \"",
           parameters[p].name, "\" there, or of another shape");
    const Optimizer optimizer = optimizer_of(manifest.groups.at(tensor.group));
    const Tensor stored(engine, row_of(tensor, optimizer.raw()));
    scruple_tensor row = stored.raw();
    for (std::size_t plane = 0; plane < tensor.arrays[0].planes.size(); ++plane)
      checkpoint.read(tensor, tensor.arrays[0], tensor.arrays[0].planes[plane],
                      plane_of(row, tensor, 0, plane));
    const std::string visible = visible_format(row.arrays[SCRUPLE_WEIGHT]);
    if (visible != tensor.arrays[0].format)
      row.arrays[SCRUPLE_WEIGHT] = {format_named(visible.c_str()), row.arrays[SCRUPLE_WEIGHT].codes, nullptr,
                                    SCRUPLE_NEAREST, 0};
    std::vector<float>& values = model.parameters.emplace_back(static_cast<std::size_t>(row.size));
    check(scruple_decode(engine.raw(), &row, SCRUPLE_WEIGHT, values.data()));
  }
  return model;
}

namespace {
constexpr const char* kStep = "step";  // in the metadata of exported weights
}

void write_weights(const std::string& folder, const ModelConfig& model, Trainer& trainer, Ledger& ledger) {
  const std::vector<scruple_tensor>& visible = trainer.state().visible();
  Memory& memory = trainer.memory();
  std::vector<ParameterData> data;
  Block decoded;
  std::vector<float> copy;  // of a weight that the host cannot read
  for (const scruple_tensor& row : visible) {
    const scruple_array& weight = row.arrays[SCRUPLE_WEIGHT];
    const std::string format = info_of(weight.format).name;
    const bool is_half = format == "bf16" || format == "fp16";
    const io::Dtype dtype = format == "bf16" ? io::Dtype::bf16 : is_half ? io::Dtype::f16 : io::Dtype::f32;
    if (is_half && memory.is_host()) {
      data.push_back({dtype, [&weight] { return weight.codes; }});
    } else if (memory.is_host()) {
      data.push_back({dtype, [&, format] {
                        decoded = Block();
                        if (format != "fp32")
                          decoded = Block(ledger, "workspace", row.size * std::int64_t{sizeof(float)});
                        return visible_values(trainer.engine(), row, decoded.as<float>());
                      }});
    } else {
      data.push_back({dtype, [&, is_half] {
                        copy.resize(static_cast<std::size_t>(is_half ? (row.size + 1) / 2 : row.size));
                        if (is_half)
                          memory.read(copy.data(), weight.codes, 2 * row.size);
                        else
                          check(scruple_decode(trainer.engine().raw(), &row, SCRUPLE_WEIGHT, copy.data()));
                        return copy.data();
                      }});
    }
  }
  write_model(folder, model, data, {{kStep, std::to_string(trainer.steps_taken())}});
}

std::int64_t weights_step(const std::string& folder) {
  try {
    const io::Safetensors weights(folder + "/model.safetensors");
    const auto step = weights.metadata().find(kStep);
    const bool whole = std::filesystem::exists(folder + "/config.json");  // which comes last
    return !whole || step == weights.metadata().end() ? -1 : std::strtoll(step->second.c_str(), nullptr, 10);
  } catch (const std::exception&) {
    return -1;
  }
}

void keep_last(const std::string& run, std::int64_t keep) {
  const std::string folder = checkpoints_of(run);
  const std::vector<std::int64_t> steps = io::saved_steps(folder);
  for (std::size_t i = 0; keep > 0 && i + static_cast<std::size_t>(keep) < steps.size(); ++i)
    io::remove_folder(folder + "/" + io::step_name(steps[i]));
}

void save(Trainer& trainer, const std::string& recipe, const io::Metadata& notes, const std::string& run,
          std::int64_t keep) {
  const Position position = trainer.position();
  const State& state = trainer.state();
  io::Manifest manifest;
  manifest.library = scruple_version();
  manifest.recipe = recipe;
  manifest.step = position.taken;
  manifest.groups = {group_of(trainer.decaying()), group_of(trainer.undecayed())};
  if (position.scaler.scale > 0) manifest.loss_scale = stored_form(position.scaler);
  manifest.trainer = notes;
  for (std::size_t p = 0; p < state.parameters().size(); ++p) {
    const Parameter& parameter = state.parameters()[p];
    io::TensorState& tensor =
        manifest.tensors.emplace_back(stored_form(parameter.name, parameter.shape, state.table()[p]));
    tensor.group = parameter.decays ? 0 : 1;
    tensor.step = position.steps[p];
    if (position.adagc_norms[p] > 0 && std::isfinite(position.adagc_norms[p]))
      tensor.adagc_norm = position.adagc_norms[p];
  }
  const std::string folder = checkpoints_of(run);
  std::error_code error;
  std::filesystem::create_directories(folder, error);
  if (error) fail("cannot make the folder ", folder, ": ", error.message());
  io::NewCheckpoint made(folder + "/" + io::step_name(position.taken), manifest, 1);
  for (std::size_t t = 0; t < manifest.tensors.size(); ++t)
    for (std::size_t a = 0; a < manifest.tensors[t].arrays.size(); ++a)
      for (std::size_t p = 0; p < manifest.tensors[t].arrays[a].planes.size(); ++p)
        for_each_part(trainer.memory(), plane_of(state.table()[t], manifest.tensors[t], a, p),
                      [&](std::span<const std::byte> part) { made.write(t, a, p, part); });
  made.finish();
  keep_last(run, keep);
}

}  // namespace scruple::train
