#include "train/run/rows.h"

#include <algorithm>
#include <cstdint>
#include <span>
#include <stdexcept>
#include <utility>

#include "optim/renamed.h"

namespace scruple::train {

std::vector<int> stored_arrays(const scruple_tensor& row) {
  std::vector<int> arrays = used_arrays(row);
  std::erase(arrays, int{SCRUPLE_GRADIENT});
  return arrays;
}

namespace {

using io::fail;

std::string array_name(const scruple_tensor& row, int array) {
  const char* name = nullptr;
  check(scruple_tensor_array(&row, array, &name, nullptr, nullptr));
  return name;
}

std::vector<io::Plane> planes_of(const scruple_format* format, const std::vector<std::int64_t>& shape,
                                 std::int64_t size) {
  const scruple_format_info info = info_of(format);
  const PlaneBytes whole = plane_bytes(format, size), block = plane_bytes(format, io::kBlock);
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

// What cannot be read is damaged: others of the run may not be.
void read_plane(Memory& memory, const io::Checkpoint& checkpoint, const io::TensorState& tensor,
                const io::Array& array, const io::Plane& plane, std::span<std::byte> to) try {
  if (memory.is_host()) return checkpoint.read(tensor, array, plane, to);
  io::PlaneReader reader(checkpoint, tensor, array, plane);
  std::vector<std::byte> copy(std::min(kPart, to.size()));
  for (; !to.empty(); to = to.subspan(std::min(copy.size(), to.size()))) {
    const std::span<std::byte> part = std::span(copy).first(std::min(copy.size(), to.size()));
    reader.read(part);
    memory.write(to.data(), part.data(), signed_size(part.size()));
  }
} catch (const std::runtime_error& error) {
  fail(error.what(), io::advice_on_damage(checkpoint.folder()));
}

}  // namespace

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

Tensor load_weight(Engine& engine, const io::Checkpoint& checkpoint, const io::TensorState& tensor) {
  static const Optimizer stateless{"sgd", {{"momentum", 0.0}}};
  io::TensorState alone = tensor;
  alone.arrays.resize(1);
  Tensor loaded(engine, row_of(alone, stateless.raw()));
  load(engine, checkpoint, alone, loaded.raw());
  return loaded;
}

bool is_average(const io::TensorState& tensor) { return tensor.name.starts_with(kAverage); }

std::span<const io::TensorState> trained_of(const io::Manifest& manifest) {
  const auto end = std::find_if(manifest.tensors.begin(), manifest.tensors.end(), is_average);
  return {manifest.tensors.begin(), end};
}

std::span<const io::TensorState> averages_of(const io::Manifest& manifest) {
  return std::span(manifest.tensors).subspan(trained_of(manifest).size());
}

void check_averages(const io::Checkpoint& checkpoint) {
  const auto weights = trained_of(checkpoint.manifest()), averages = averages_of(checkpoint.manifest());
  if (averages.empty())
    fail(checkpoint.folder(),
         " has no averages of the weights: its run was trained without --ema. Leave --ema out here, or train "
         "with it");
  const bool fits =
      std::equal(weights.begin(), weights.end(), averages.begin(), averages.end(),
                 [](const io::TensorState& weight, const io::TensorState& average) {
                   return average.name == kAverage + weight.name && average.shape == weight.shape;
                 });
  if (!fits) fail(checkpoint.folder(), ": its averages are not those of its weights; it is damaged");
}

io::Metadata notes_of(const io::Checkpoint& checkpoint) {
  io::Metadata notes;
  for (const auto& [key, value] : checkpoint.manifest().trainer)
    notes[key.starts_with("--") ? key.substr(2) : key == "data_bytes" ? "data_tokens" : key] = value;
  return notes;
}

std::vector<io::Group> groups_of(const io::Checkpoint& checkpoint) {
  std::vector<io::Group> groups = checkpoint.manifest().groups;
  for (io::Group& group : groups)
    group.hyperparameters = with_current_names(group.hyperparameters, checkpoint.folder());
  return groups;
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

}  // namespace scruple::train
