// `scruple checkpoint`: looks into checkpoints, checks them, and makes others of them.
#include "io/checkpoint.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <filesystem>
#include <iostream>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>

#include "choice.h"
#include "commands.h"
#include "scruple/scruple.hpp"
#include "text.h"
#include "train/run/rows.h"

namespace scruple::cli {
namespace {

using io::Checkpoint;
using io::TensorState;
using nlohmann::ordered_json;

constexpr const char* kFooter =
    "DIR is a checkpoint, or a run that has some (of --save-every N, or of a stop): the last is taken.\n"
    "docs/checkpoint.md describes the files.\n"
    "\n"
    "Examples:\n"
    "  scruple checkpoint inspect run1\n"
    "  scruple checkpoint inspect run1 --histogram transformer.wte.weight\n"
    "  scruple checkpoint verify run1/checkpoints/step-00000100\n"
    "  scruple checkpoint convert run1 --recipe scant --out smaller\n"
    "  scruple checkpoint export run1 --to bf16 --out weights.safetensors\n"
    "  scruple checkpoint diff run1 run2\n"
    "  scruple checkpoint reshard run1 --shards 4 --out four";

struct Options {
  std::string folder, other, out, recipe, to = "fp32";
  std::vector<std::string> histograms;
  std::size_t shards = 0;
  bool json = false;
};

// A checkpoint whose tensors can be decoded, one at a time.
class Decoder {
 public:
  explicit Decoder(const Checkpoint& checkpoint) : checkpoint_(checkpoint) {
    for (const io::Group& group : train::groups_of(checkpoint))
      optimizers_.push_back(train::optimizer_of(group));
  }

  const Optimizer& optimizer(const TensorState& tensor) const { return optimizers_[tensor.group]; }
  Engine& engine() { return engine_; }

  Tensor load(const TensorState& tensor) {
    Tensor loaded(engine_, train::row_of(tensor, optimizer(tensor).raw()));
    train::load(engine_, checkpoint_, tensor, loaded.raw());
    return loaded;
  }

 private:
  const Checkpoint& checkpoint_;
  Engine engine_;
  std::vector<Optimizer> optimizers_;
};

std::vector<int> state_arrays(const Tensor& tensor) {
  std::vector<int> arrays = used_arrays(tensor.raw());
  std::erase(arrays, int{SCRUPLE_GRADIENT});
  return arrays;
}

std::vector<float> values_of(const Tensor& tensor, int array) {
  std::vector<float> values(static_cast<std::size_t>(tensor.size()));
  tensor.decode(array, values.data());
  return values;
}

std::string shape_text(const std::vector<std::int64_t>& shape) {
  std::string text;
  for (const std::int64_t n : shape) text += (text.empty() ? "" : " x ") + std::to_string(n);
  return shape.empty() ? "one value" : text;
}

std::int64_t bytes_of(const io::Array& array) {
  std::int64_t sum = 0;
  for (const io::Plane& plane : array.planes) sum += plane.bytes();
  return sum;
}

// By the names of plans and ledgers.
std::vector<std::pair<std::string, std::int64_t>> bytes_by_kind(const Checkpoint& checkpoint) {
  std::vector<std::pair<std::string, std::int64_t>> kinds;
  std::int64_t sum = 0;
  for (const TensorState& tensor : checkpoint.manifest().tensors)
    for (const io::Array& array : tensor.arrays)
      for (const io::Plane& plane : array.planes) {
        const std::string kind = plane.kind == "scale"    ? "scales"
                                 : plane.kind == "extra"  ? "extra"
                                 : array.name == "weight" ? "weights"
                                                          : array.name;
        auto at = std::find_if(kinds.begin(), kinds.end(), [&](const auto& k) { return k.first == kind; });
        if (at == kinds.end()) at = kinds.insert(at, {kind, 0});
        at->second += plane.bytes();
        sum += plane.bytes();
      }
  kinds.emplace_back("manifest and headers", static_cast<std::int64_t>(checkpoint.bytes()) - sum);
  kinds.emplace_back("total", static_cast<std::int64_t>(checkpoint.bytes()));
  return kinds;
}

// ---- inspect ----

struct Histogram {
  std::int64_t zeros = 0, negative = 0, not_finite = 0;
  std::map<int, std::int64_t> exponents;  // e: 2^e <= |x| < 2^(e + 1)
};

Histogram histogram_of(const std::vector<float>& values) {
  Histogram histogram;
  for (const float x : values) {
    if (!std::isfinite(x)) {
      ++histogram.not_finite;
      continue;
    }
    histogram.negative += x < 0 ? 1 : 0;
    if (x == 0)
      ++histogram.zeros;
    else
      ++histogram.exponents[std::ilogb(x)];
  }
  return histogram;
}

ordered_json to_json(const Histogram& histogram) {
  ordered_json counts = ordered_json::object();
  for (const auto& [exponent, count] : histogram.exponents) counts[std::to_string(exponent)] = count;
  return {{"zeros", histogram.zeros},
          {"negative", histogram.negative},
          {"not_finite", histogram.not_finite},
          {"by_exponent", counts}};
}

void print(const std::string& name, const Histogram& histogram) {
  constexpr std::int64_t kWidth = 50;
  std::cout << '\n'
            << name << ": " << plural(histogram.zeros, "zero") << ", " << grouped(histogram.negative)
            << " negative, " << grouped(histogram.not_finite) << " not finite\n";
  std::int64_t most = 1;
  for (const auto& [exponent, count] : histogram.exponents) most = std::max(most, count);
  Table table;
  table.rows = {{"|x| from", "values", ""}};
  table.left = {2};
  for (const auto& [exponent, count] : histogram.exponents) {
    const auto length =
        static_cast<std::size_t>(static_cast<double>(count) / static_cast<double>(most) * kWidth);
    table.rows.push_back({"2^" + std::to_string(exponent), grouped(count), std::string(length, '#')});
  }
  table.print(std::cout);
}

ordered_json tensor_json(const TensorState& tensor) {
  ordered_json arrays = ordered_json::array();
  std::int64_t bytes = 0;
  for (const io::Array& array : tensor.arrays) {
    ordered_json planes = ordered_json::array();
    for (const io::Plane& plane : array.planes)
      planes.push_back({{"name", io::plane_name(tensor, array, plane)},
                        {"dtype", io::name_of(plane.dtype)},
                        {"shape", plane.shape},
                        {"bytes", plane.bytes()},
                        {"pieces", plane.pieces.size()}});
    arrays.push_back({{"name", array.name},
                      {"format", array.format},
                      {"rounding", array.rounding},
                      {"bytes", bytes_of(array)},
                      {"planes", planes}});
    bytes += bytes_of(array);
  }
  ordered_json norm = nullptr;
  if (tensor.adagc_norm) norm = *tensor.adagc_norm;
  return {{"name", tensor.name}, {"shape", tensor.shape}, {"group", tensor.group}, {"id", tensor.id},
          {"step", tensor.step}, {"adagc_norm", norm},    {"bytes", bytes},        {"arrays", arrays}};
}

ordered_json groups_json(const Checkpoint& checkpoint) {
  ordered_json groups = ordered_json::array();
  for (const io::Group& group : train::groups_of(checkpoint))
    groups.push_back(
        {{"optimizer", group.optimizer}, {"seed", group.seed}, {"hyperparameters", group.hyperparameters}});
  return groups;
}

ordered_json loss_scale_json(const io::Manifest& manifest) {
  if (!manifest.loss_scale) return nullptr;
  const io::LossScale& scale = *manifest.loss_scale;
  return {{"scale", scale.scale},
          {"growth", scale.growth},
          {"backoff", scale.backoff},
          {"interval", scale.interval},
          {"clean", scale.clean}};
}

std::vector<const TensorState*> chosen(const Checkpoint& checkpoint, const std::vector<std::string>& names) {
  std::vector<const TensorState*> tensors;
  for (const std::string& name : names) {
    const std::size_t before = tensors.size();
    for (const TensorState& tensor : checkpoint.manifest().tensors)
      if (name == "all" || name == tensor.name) tensors.push_back(&tensor);
    if (tensors.size() == before)
      throw UsageError("--histogram is '" + name + "', and " + checkpoint.folder() +
                       " has no tensor of that name; give one that 'inspect' lists, or all");
  }
  return tensors;
}

void print_checkpoint(const Checkpoint& checkpoint) {
  const io::Manifest& manifest = checkpoint.manifest();
  std::string optimizers;
  for (const io::Group& group : manifest.groups)
    if (optimizers.find(group.optimizer) == optimizers.npos)
      optimizers += (optimizers.empty() ? "" : ", ") + group.optimizer;
  std::cout << checkpoint.folder() << ": step " << grouped(manifest.step) << ", " << optimizers << ", recipe "
            << manifest.recipe << ", " << plural(static_cast<std::int64_t>(manifest.files.size()), "file")
            << ", version " << io::kCheckpointVersion << " by Scruple " << manifest.library << "\n\n";
  Table table;
  table.rows = {{"tensor", "shape", "formats", "bytes"}};
  table.left = {1, 2};
  std::int64_t elements = 0;
  for (const TensorState& tensor : manifest.tensors) {
    std::string formats;
    std::int64_t bytes = 0;
    for (const io::Array& array : tensor.arrays) {
      formats += (formats.empty() ? "" : ", ") + array.format;
      bytes += bytes_of(array);
    }
    elements += tensor.elements();
    table.rows.push_back({tensor.name, shape_text(tensor.shape), formats, grouped(bytes)});
  }
  table.print(std::cout);
  std::cout << '\n';
  Table kinds;
  kinds.rows = {{"kind", "bytes", "per parameter"}};
  for (const auto& [kind, bytes] : bytes_by_kind(checkpoint))
    kinds.rows.push_back(
        {kind, grouped(bytes),
         fixed(static_cast<double>(bytes) / static_cast<double>(std::max<std::int64_t>(elements, 1)), 3)});
  kinds.print(std::cout);
}

void inspect(const Options& options) {
  const Checkpoint checkpoint(io::find_checkpoint(options.folder));
  const io::Manifest& manifest = checkpoint.manifest();
  Decoder decoder(checkpoint);
  const std::vector<const TensorState*> shown = chosen(checkpoint, options.histograms);
  if (!options.json) {
    print_checkpoint(checkpoint);
    for (const TensorState* state : shown) {
      const Tensor tensor = decoder.load(*state);
      for (std::size_t a = 0; a < state->arrays.size(); ++a)
        print(state->name + " " + state->arrays[a].name,
              histogram_of(values_of(tensor, state_arrays(tensor)[a])));
    }
    return;
  }
  ordered_json tensors = ordered_json::array(), kinds = ordered_json::object();
  for (const TensorState& state : manifest.tensors) {
    ordered_json entry = tensor_json(state);
    if (std::find(shown.begin(), shown.end(), &state) != shown.end()) {
      const Tensor tensor = decoder.load(state);
      for (std::size_t a = 0; a < state.arrays.size(); ++a)
        entry["arrays"][a]["histogram"] = to_json(histogram_of(values_of(tensor, state_arrays(tensor)[a])));
    }
    tensors.push_back(entry);
  }
  for (const auto& [kind, bytes] : bytes_by_kind(checkpoint)) kinds[kind] = bytes;
  std::cout << ordered_json{{"folder", checkpoint.folder()},
                            {"version", io::kCheckpointVersion},
                            {"library", manifest.library},
                            {"recipe", manifest.recipe},
                            {"step", manifest.step},
                            {"files", manifest.files.size()},
                            {"groups", groups_json(checkpoint)},
                            {"loss_scale", loss_scale_json(manifest)},
                            {"trainer", manifest.trainer},
                            {"bytes", kinds},
                            {"tensors", tensors}}
                   .dump(2)
            << '\n';
}

// ---- verify ----

struct Problems {
  std::vector<std::string> list;
  bool weights = false;  // whether any is of a weight
  bool moments = false;  // whether any moment's bytes are damaged
};

// Everything that is wrong, not only the first: what else is lost decides what to do.
Problems problems_of(const Checkpoint& checkpoint) {
  Problems found;
  std::vector<std::string>& problems = found.list;
  const auto attempt = [&](const auto& call) {
    try {
      call();
      return true;
    } catch (const std::exception& error) {
      problems.emplace_back(error.what());
      return false;
    }
  };
  std::unique_ptr<Decoder> decoder;
  attempt([&] { decoder = std::make_unique<Decoder>(checkpoint); });
  for (const TensorState& state : checkpoint.manifest().tensors) {
    bool whole = decoder != nullptr;
    for (const io::Array& array : state.arrays)
      for (const io::Plane& plane : array.planes) {
        if (attempt([&] { checkpoint.verify(state, array, plane); })) continue;
        (&array == &state.arrays.front() ? found.weights : found.moments) = true;
        whole = false;
      }
    if (!whole) continue;
    attempt([&] {
      const Tensor tensor = decoder->load(state);
      const std::vector<int> arrays = state_arrays(tensor);
      for (std::size_t i = 0; i < arrays.size(); ++i) {
        const std::int64_t bad = histogram_of(values_of(tensor, arrays[i])).not_finite;
        if (bad == 0) continue;
        if (i == 0) found.weights = true;
        problems.push_back("tensor \"" + state.name + "\": " + grouped(bad) + " of " +
                           grouped(tensor.size()) + " values of its " + state.arrays[i].name +
                           (bad == 1 ? " is" : " are") + " not finite; the training has diverged");
      }
    });
  }
  return found;
}

void verify(const Options& options) {
  std::vector<std::string> problems;
  std::int64_t tensors = 0, bytes = 0;
  std::string folder = options.folder, advice;
  try {
    folder = io::find_checkpoint(options.folder);
    const Checkpoint checkpoint(folder);
    tensors = static_cast<std::int64_t>(checkpoint.manifest().tensors.size());
    bytes = static_cast<std::int64_t>(checkpoint.bytes());
    const Problems found = problems_of(checkpoint);
    problems = found.list;
    if (!problems.empty()) advice = io::advice_on_damage(folder);
    if (found.moments && !found.weights)
      advice = "; its weights are whole, and 'scruple checkpoint export " + folder +
               " --out FILE' saves them" + advice;
  } catch (const std::runtime_error& error) {
    problems.emplace_back(error.what());
  }
  if (options.json)
    std::cout << ordered_json{{"folder", folder},
                              {"ok", problems.empty()},
                              {"tensors", tensors},
                              {"bytes", bytes},
                              {"problems", problems}}
                     .dump(2)
              << '\n';
  else if (problems.empty())
    std::cout << folder << ": " << plural(tensors, "tensor") << " in " << grouped(bytes)
              << " bytes: complete, checksums fit, every value is finite\n";
  else
    for (const std::string& problem : problems) std::cout << problem << '\n';
  if (!problems.empty())
    throw std::runtime_error(folder + " has " +
                             plural(static_cast<std::int64_t>(problems.size()), "problem") + advice);
}

// ---- New checkpoints from old ones ----

void check_new(const std::string& path) {
  if (std::filesystem::exists(path))
    throw std::runtime_error("--out " + path + " is there already; choose another, or move it away");
}

struct Deviation {
  double squares = 0, reference = 0, largest = 0;
  void add(const std::vector<float>& before, const std::vector<float>& after) {
    for (std::size_t i = 0; i < before.size(); ++i) {
      const double error = static_cast<double>(after[i]) - static_cast<double>(before[i]);
      squares += error * error;
      reference += static_cast<double>(before[i]) * static_cast<double>(before[i]);
      largest = std::max(largest, std::abs(error));
    }
  }
  double relative() const { return reference > 0 ? std::sqrt(squares / reference) : 0; }
};

using Deviations = std::vector<std::pair<std::string, Deviation>>;

Deviation& deviation_of(Deviations& all, const std::string& name) {
  const auto found = std::find_if(all.begin(), all.end(), [&](const auto& d) { return d.first == name; });
  return found != all.end() ? found->second : all.emplace_back(name, Deviation()).second;
}

// The tensor in the formats of a recipe, without memory.
scruple_tensor row_in(const TensorState& tensor, const Optimizer& optimizer, const std::string& recipe) {
  scruple_tensor row = {};
  row.optimizer = optimizer.raw();
  row.size = tensor.elements();
  row.step = tensor.step;
  row.id = tensor.id;
  check(scruple_tensor_use(&row, recipe.c_str()));
  return row;
}

Tensor converted(Engine& engine, const Tensor& from, const scruple_tensor& row, Deviations& deviations) {
  Tensor to(engine, row);
  for (const int a : state_arrays(from)) {
    const std::vector<float> values = values_of(from, a);
    to.encode(a, values.data());
    const char* name = nullptr;
    check(scruple_tensor_array(&row, a, &name, nullptr, nullptr));
    deviation_of(deviations, name).add(values, values_of(to, a));
  }
  return to;
}

// What `scruple train --resume` reads: the formats are the recipe's now.
io::Metadata with_recipe(io::Metadata notes, const std::string& recipe) {
  if (!notes.contains("program")) return notes;
  for (const char* name : {"--weights", "--moments", "--second-moments", "--rounding"}) notes.erase(name);
  notes["--recipe"] = recipe;
  return notes;
}

void convert(const Options& options) {
  check_new(options.out);
  check_recipe(options.recipe);
  const Checkpoint checkpoint(io::find_checkpoint(options.folder));
  Decoder decoder(checkpoint);
  io::Manifest manifest = checkpoint.manifest();
  manifest.recipe = options.recipe;
  manifest.library = scruple_version();
  manifest.groups = train::groups_of(checkpoint);
  manifest.trainer = with_recipe(manifest.trainer, options.recipe);
  for (TensorState& tensor : manifest.tensors) {
    const TensorState form = train::stored_form(tensor.name, tensor.shape,
                                                row_in(tensor, decoder.optimizer(tensor), options.recipe));
    tensor.arrays = form.arrays;
  }
  Deviations deviations;
  std::unique_ptr<Tensor> now;
  io::write_checkpoint(options.out, manifest, manifest.files.size(),
                       [&](std::size_t t, std::size_t a, std::size_t p) -> std::span<const std::byte> {
                         const TensorState& before = checkpoint.manifest().tensors[t];
                         if (a == 0 && p == 0)
                           now = std::make_unique<Tensor>(converted(
                               decoder.engine(), decoder.load(before),
                               row_in(before, decoder.optimizer(before), options.recipe), deviations));
                         return train::plane_of(now->raw(), manifest.tensors[t], a, p);
                       });
  const auto before = static_cast<std::int64_t>(checkpoint.bytes());
  const auto after = static_cast<std::int64_t>(Checkpoint(options.out).bytes());
  if (options.json) {
    ordered_json errors = ordered_json::object();
    for (const auto& [name, error] : deviations)
      errors[name] = {{"relative_rms", error.relative()}, {"largest", error.largest}};
    std::cout << ordered_json{{"from", checkpoint.folder()}, {"to", options.out}, {"recipe", options.recipe},
                              {"bytes_before", before},      {"bytes", after},    {"error", errors}}
                     .dump(2)
              << '\n';
    return;
  }
  Table table;
  table.rows = {{"array", "relative RMS error", "largest error"}};
  for (const auto& [name, error] : deviations)
    table.rows.push_back({name, shortest(error.relative(), 3), shortest(error.largest, 3)});
  table.print(std::cout);
  std::cout << "\nwrote " << options.out << ": " << grouped(before) << " -> " << grouped(after) << " bytes\n";
}

// The weights of a checkpoint in fp32 or bf16. Nothing else is read, so that damaged moments do not matter.
class WeightReader {
 public:
  WeightReader(const Checkpoint& checkpoint, const std::string& to)
      : checkpoint_(checkpoint), dtype_(to == "bf16" ? io::Dtype::bf16 : io::Dtype::f32) {}

  io::TensorInfo info(const TensorState& tensor) const { return {tensor.name, dtype_, tensor.shape}; }

  std::vector<std::byte> read(const TensorState& tensor) {
    const io::Array& weight = tensor.arrays.front();
    std::vector<std::byte> bytes(static_cast<std::size_t>(info(tensor).bytes()));
    if (weight.planes.front().dtype == io::Dtype::bf16 && dtype_ == io::Dtype::bf16) {
      checkpoint_.read(tensor, weight, weight.planes.front(), bytes);  // the visible weights as they are
      return bytes;
    }
    TensorState alone = tensor;
    alone.arrays.resize(1);
    const Tensor wide(engine_, train::row_of(alone, stateless_.raw()));
    train::load(engine_, checkpoint_, alone, wide.raw());
    const std::vector<float> values = values_of(wide, SCRUPLE_WEIGHT);
    scruple_tensor row = wide.raw();
    row.arrays[SCRUPLE_WEIGHT] = {format_named(dtype_ == io::Dtype::bf16 ? "bf16" : "fp32"), bytes.data(),
                                  nullptr, SCRUPLE_NEAREST, 0};
    check(scruple_encode(engine_.raw(), &row, SCRUPLE_WEIGHT, values.data()));
    return bytes;
  }

 private:
  const Checkpoint& checkpoint_;
  const io::Dtype dtype_;
  Engine engine_;
  const Optimizer stateless_{"sgd", {{"momentum", 0.0}}};
};

void export_weights(const Options& options) {
  check_new(options.out);
  const Checkpoint checkpoint(io::find_checkpoint(options.folder));
  WeightReader weights(checkpoint, options.to);
  const std::vector<TensorState>& tensors = checkpoint.manifest().tensors;
  std::vector<io::TensorInfo> infos;
  infos.reserve(tensors.size());
  for (const TensorState& tensor : tensors) infos.push_back(weights.info(tensor));
  io::SafetensorsWriter writer(options.out, infos, {{"format", "pt"}});
  for (std::size_t t = 0; t < tensors.size(); ++t) writer.write(t, weights.read(tensors[t]));
  writer.finish();
  if (options.json)
    std::cout << ordered_json{{"from", checkpoint.folder()},
                              {"to", options.out},
                              {"dtype", options.to},
                              {"tensors", tensors.size()},
                              {"bytes", writer.bytes()}}
                     .dump(2)
              << '\n';
  else
    std::cout << "wrote " << options.out << ": "
              << plural(static_cast<std::int64_t>(tensors.size()), "tensor") << " in " << options.to << ", "
              << grouped(static_cast<std::int64_t>(writer.bytes())) << " bytes\n";
}

void reshard(const Options& options) {
  check_new(options.out);
  const Checkpoint checkpoint(io::find_checkpoint(options.folder));
  std::vector<std::byte> memory;
  io::write_checkpoint(options.out, checkpoint.manifest(), options.shards,
                       [&](std::size_t t, std::size_t a, std::size_t p) -> std::span<const std::byte> {
                         const TensorState& tensor = checkpoint.manifest().tensors[t];
                         const io::Plane& plane = tensor.arrays[a].planes[p];
                         memory.resize(static_cast<std::size_t>(plane.bytes()));
                         checkpoint.read(tensor, tensor.arrays[a], plane, memory);
                         return memory;
                       });
  const auto before = static_cast<std::int64_t>(checkpoint.manifest().files.size());
  if (options.json)
    std::cout << ordered_json{{"from", checkpoint.folder()},
                              {"to", options.out},
                              {"files_before", before},
                              {"files", options.shards}}
                     .dump(2)
              << '\n';
  else
    std::cout << "wrote " << options.out << ": " << plural(before, "file") << " -> "
              << plural(static_cast<std::int64_t>(options.shards), "file") << '\n';
}

// ---- diff ----

// Two checkpoints, array by array.
class Difference {
 public:
  Difference(const Checkpoint& a, const Checkpoint& b) : decode_a_(a), decode_b_(b) {
    setting("step", a.manifest().step, b.manifest().step);
    setting("recipe", a.manifest().recipe, b.manifest().recipe);
    setting("groups", groups_json(a), groups_json(b));
    setting("loss_scale", loss_scale_json(a.manifest()), loss_scale_json(b.manifest()));
    for (const TensorState& tensor : a.manifest().tensors) {
      const TensorState* const other = find(b, tensor.name);
      if (other == nullptr)
        note(tensor.name, "only in the first");
      else
        compare(tensor, *other);
    }
    for (const TensorState& tensor : b.manifest().tensors)
      if (find(a, tensor.name) == nullptr) note(tensor.name, "only in the second");
  }

  ordered_json settings = ordered_json::array(), tensors = ordered_json::array();
  std::map<std::string, std::vector<std::string>>
      notes;                                 // "step 41 -> 61", and the tensors of which it is true
  std::int64_t compared = 0, differing = 0;  // arrays; differing: in their values
  bool same() const { return settings.empty() && tensors.empty(); }

 private:
  static const TensorState* find(const Checkpoint& checkpoint, const std::string& name) {
    for (const TensorState& tensor : checkpoint.manifest().tensors)
      if (tensor.name == name) return &tensor;
    return nullptr;
  }
  void setting(const char* name, const ordered_json& a, const ordered_json& b) {
    if (a != b) settings.push_back({{"name", name}, {"first", a}, {"second", b}});
  }
  void note(const std::string& tensor, const std::string& what) {
    tensors.push_back({{"tensor", tensor}, {"difference", what}});
    notes[what].push_back(tensor);
  }
  template <class T>
  void field(const std::string& tensor, const char* name, const T& a, const T& b) {
    if (a != b) note(tensor, name + (" " + ordered_json(a).dump()) + " -> " + ordered_json(b).dump());
  }

  void compare(const TensorState& a, const TensorState& b) {
    if (a.shape != b.shape)
      return note(a.name, "shape " + shape_text(a.shape) + " -> " + shape_text(b.shape));
    field(a.name, "step", a.step, b.step);
    field(a.name, "id", a.id, b.id);
    field(a.name, "group", a.group, b.group);
    field(a.name, "AdaGC's norm", a.adagc_norm.value_or(0), b.adagc_norm.value_or(0));
    const Tensor first = decode_a_.load(a), second = decode_b_.load(b);
    for (std::size_t i = 0; i < std::max(a.arrays.size(), b.arrays.size()); ++i) {
      if (i >= a.arrays.size() || i >= b.arrays.size() || a.arrays[i].name != b.arrays[i].name)
        return note(a.name, "its optimizer's arrays");
      compare_arrays(a, b, i, first, second);
    }
  }

  void compare_arrays(const TensorState& a, const TensorState& b, std::size_t i, const Tensor& first,
                      const Tensor& second) {
    const io::Array &x = a.arrays[i], &y = b.arrays[i];
    ++compared;
    bool equal = x.format == y.format && x.rounding == y.rounding;
    if (!equal) notes[x.name + " " + form_of(x) + " -> " + form_of(y)].push_back(a.name);
    for (std::size_t p = 0; equal && p < x.planes.size(); ++p) {
      const auto left = train::plane_of(first.raw(), a, i, p), right = train::plane_of(second.raw(), b, i, p);
      equal = left.size() == right.size() && std::equal(left.begin(), left.end(), right.begin());
    }
    if (equal) return;
    const std::vector<float> u = values_of(first, state_arrays(first)[i]),
                             v = values_of(second, state_arrays(second)[i]);
    std::int64_t count = 0;
    for (std::size_t k = 0; k < u.size(); ++k)
      count += std::bit_cast<std::uint32_t>(u[k]) != std::bit_cast<std::uint32_t>(v[k]) ? 1 : 0;
    differing += count > 0 ? 1 : 0;
    Deviation deviation;
    deviation.add(u, v);
    tensors.push_back({{"tensor", a.name},
                       {"array", x.name},
                       {"formats", {x.format, y.format}},
                       {"roundings", {x.rounding, y.rounding}},
                       {"values", u.size()},
                       {"differing", count},
                       {"relative_rms", deviation.relative()},
                       {"largest", deviation.largest}});
  }
  static std::string form_of(const io::Array& array) { return array.format + " (" + array.rounding + ")"; }

  Decoder decode_a_, decode_b_;
};

// A setting as people read it.
std::string text_of(const ordered_json& value, bool exactly) {
  if (value.is_number_float() && !exactly) return shortest(value);
  return value.is_string() ? value.get<std::string>() : value.is_null() ? "none" : value.dump();
}

// What of a setting differs, field by field: "group 1 lr: 0.001 -> 0.002".
void print_setting(const std::string& name, const ordered_json& first, const ordered_json& second) {
  if (first == second) return;
  if (!first.is_structured() && !second.is_structured()) {
    const bool exactly = text_of(first, false) == text_of(second, false);
    std::cout << name << ": " << text_of(first, exactly) << " -> " << text_of(second, exactly) << '\n';
    return;
  }
  const auto fields_of = [](const ordered_json& x) {
    return x.is_structured() ? x.flatten() : ordered_json::object();
  };
  const ordered_json fields = fields_of(first), others = fields_of(second);
  ordered_json all = fields;
  all.update(others);
  for (const auto& [path, value] : all.items()) {
    std::string words = path;  // "/1/hyperparameters/lr"
    if (const std::size_t at = words.find("/hyperparameters"); at != words.npos)
      words.erase(at, words.find('/', at + 1) - at);
    std::replace(words.begin(), words.end(), '/', ' ');
    print_setting(name + words, fields.value(path, ordered_json()), others.value(path, ordered_json()));
  }
}

void print_difference(const Difference& difference) {
  for (const ordered_json& setting : difference.settings)
    print_setting(setting["name"] == "groups" ? "group" : setting["name"], setting["first"],
                  setting["second"]);
  for (const auto& [note, tensors] : difference.notes)
    std::cout << (tensors.size() == 1 ? tensors.front()
                                      : grouped(static_cast<std::int64_t>(tensors.size())) + " tensors")
              << ": " << note << '\n';
  Table table;
  table.rows = {{"tensor", "array", "differing", "relative RMS", "largest"}};
  table.left = {1};
  for (const ordered_json& row : difference.tensors)
    if (row.value("differing", std::int64_t{0}) > 0)
      table.rows.push_back({row["tensor"], row["array"],
                            grouped(row["differing"]) + " of " + grouped(row["values"]),
                            shortest(row["relative_rms"], 3), shortest(row["largest"], 3)});
  if (table.rows.size() > 1) {
    std::cout << '\n';
    table.print(std::cout);
  }
  std::cout << '\n'
            << grouped(difference.differing) << " of " << plural(difference.compared, "array")
            << (difference.differing == 1 ? " differs in its values\n" : " differ in their values\n");
}

void diff(const Options& options) {
  const Checkpoint first(io::find_checkpoint(options.folder)), second(io::find_checkpoint(options.other));
  const Difference difference(first, second);
  if (options.json)
    std::cout << ordered_json{{"first", first.folder()},
                              {"second", second.folder()},
                              {"same", difference.same()},
                              {"settings", difference.settings},
                              {"tensors", difference.tensors}}
                     .dump(2)
              << '\n';
  else if (difference.same())
    std::cout << "the same, to the bit\n";
  else
    print_difference(difference);
  if (!difference.same()) throw std::runtime_error("the two checkpoints differ");
}

}  // namespace

void add_checkpoint(CLI::App& program) {
  CLI::App* group =
      program.add_subcommand("checkpoint", "Inspect, verify, convert, export, diff, merge, reshard");
  group->footer(kFooter);
  group->require_subcommand(1);
  const auto options = std::make_shared<Options>();
  const auto add = [&](const char* name, const char* doc, void (*run)(const Options&)) {
    CLI::App* command = group->add_subcommand(name, doc);
    command->add_option("folder", options->folder, "a checkpoint, or a run that has some")
        ->type_name("DIR")
        ->required();
    command->add_flag("--json", options->json, "for programs");
    command->callback([options, run] { run(*options); });
    return command;
  };
  const auto add_out = [&](CLI::App* command, const char* type) {
    command->add_option("--out", options->out, "what to write")->type_name(type)->required();
    return command;
  };
  add("inspect", "Tensors, formats, bytes by kind", inspect)
      ->add_option("--histogram", options->histograms,
                   "magnitudes of this tensor's values, or of all; may be repeated")
      ->type_name("NAME")
      ->allow_extra_args(false);
  add("verify", "Checksums, structure, values that are not finite", verify);
  add_out(add("convert", "The same state in another recipe's formats, and the error of that", convert), "DIR")
      ->add_option("--recipe", options->recipe, "as 'scruple list' names it")
      ->type_name("NAME")
      ->required();
  CLI::App* weights =
      add_out(add("export", "The weights for other programs; nothing else is read", export_weights), "FILE");
  weights
      ->add_option("--to", options->to,
                   "fp32: the master weights; bf16: the visible ones, or the nearest to the master's")
      ->type_name("FORMAT")
      ->capture_default_str()
      ->check(one_of({"fp32", "bf16"}));
  weights
      ->add_flag_callback(
          "--fp32", [options] { options->to = "fp32"; }, "--to fp32")
      ->excludes("--to");
  add("diff", "What differs between two checkpoints; exit code 1 if anything does", diff)
      ->add_option("other", options->other, "the second checkpoint")
      ->type_name("DIR")
      ->required();
  add_out(add("merge", "One file from a sharded checkpoint",
              [](const Options& given) {
                Options one = given;
                one.shards = 1;
                reshard(one);
              }),
          "DIR");
  add_out(add("reshard", "Cut anew into this many files", reshard), "DIR")
      ->add_option("--shards", options->shards, "number of files")
      ->type_name("N")
      ->required()
      ->check(CLI::Range(std::size_t{1}, io::kMaxShards));
}

}  // namespace scruple::cli
