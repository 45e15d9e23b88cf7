// `scruple checkpoint convert`, `export`, `reshard` and `merge`: new files of the same state.
#include <filesystem>
#include <iostream>
#include <memory>

#include "checkpoint.h"
#include "choice.h"
#include "text.h"
#include "train/run/rows.h"

namespace scruple::cli {
namespace {

using io::Checkpoint;
using io::TensorState;
using nlohmann::ordered_json;

void check_new(const std::string& path) {
  if (std::filesystem::exists(path))
    throw std::runtime_error("--out " + path + " is there already; choose another, or move it away");
}

using Deviations = std::vector<std::pair<std::string, Deviation>>;

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
  for (const int a : train::stored_arrays(from.raw())) {
    const std::vector<float> values = values_of(from, a);
    to.encode(a, values.data());
    entry_of(deviations, array_name(row, a)).add(values, values_of(to, a));
  }
  return to;
}

// What `scruple train --resume` reads: the formats are the recipe's now.
io::Metadata with_recipe(const Checkpoint& checkpoint, const std::string& recipe) {
  if (!checkpoint.manifest().trainer.contains("program")) return checkpoint.manifest().trainer;
  io::Metadata notes = train::notes_of(checkpoint);
  for (const char* key : {"weights", "moments", "second-moments", "rounding"}) notes.erase(key);
  notes["recipe"] = recipe;
  return notes;
}

// A tensor's weights in fp32 or bf16. Nothing else is read, so that damaged moments do not matter.
std::vector<std::byte> weights_in(const io::TensorInfo& info, Engine& engine, const Checkpoint& checkpoint,
                                  const TensorState& tensor) {
  const bool half = info.dtype == io::Dtype::bf16;
  const io::Array& weight = tensor.arrays.front();
  std::vector<std::byte> bytes(static_cast<std::size_t>(info.bytes()));
  if (half && weight.planes.front().dtype == io::Dtype::bf16) {
    checkpoint.read(tensor, weight, weight.planes.front(), bytes);  // the visible weights as they are
    return bytes;
  }
  const Tensor stored = train::load_weight(engine, checkpoint, tensor);
  scruple_tensor row = stored.raw();
  row.arrays[SCRUPLE_WEIGHT] = {format_named(half ? "bf16" : "fp32"), bytes.data(), nullptr, SCRUPLE_NEAREST,
                                0};
  check(scruple_encode(engine.raw(), &row, SCRUPLE_WEIGHT, values_of(stored, SCRUPLE_WEIGHT).data()));
  return bytes;
}

}  // namespace

void convert(const CheckpointOptions& options) {
  check_new(options.out);
  check_recipe(options.recipe);
  const Checkpoint checkpoint(io::find_checkpoint(options.folder));
  Decoder decoder(checkpoint);
  io::Manifest manifest = checkpoint.manifest();
  manifest.recipe = options.recipe;
  manifest.library = scruple_version();
  manifest.groups = train::groups_of(checkpoint);
  manifest.trainer = with_recipe(checkpoint, options.recipe);
  for (TensorState& tensor : manifest.tensors) {
    if (train::is_average(tensor)) continue;  // no recipe has it
    const TensorState form = train::stored_form(tensor.name, tensor.shape,
                                                row_in(tensor, decoder.optimizer(tensor), options.recipe));
    tensor.arrays = form.arrays;
  }
  Deviations deviations;
  std::unique_ptr<Tensor> now;
  io::write_checkpoint(
      options.out, manifest, manifest.files.size(),
      [&](std::size_t t, std::size_t a, std::size_t p) -> std::span<const std::byte> {
        const TensorState& before = checkpoint.manifest().tensors[t];
        if (a == 0 && p == 0)
          now = std::make_unique<Tensor>(
              train::is_average(before)
                  ? decoder.load(before)
                  : converted(decoder.engine(), decoder.load(before),
                              row_in(before, decoder.optimizer(before), options.recipe), deviations));
        return train::plane_of(now->raw(), manifest.tensors[t], a, p);
      });
  const auto before = static_cast<std::int64_t>(checkpoint.bytes());
  const auto after = static_cast<std::int64_t>(Checkpoint(options.out).bytes());
  ordered_json errors = ordered_json::object();
  Table table;
  table.rows = {{"array", "relative RMS error", "largest error"}};
  for (const auto& [name, error] : deviations) {
    errors[name] = {{"relative_rms", error.relative()}, {"largest", error.largest}};
    table.rows.push_back({name, shortest(error.relative(), 3), shortest(error.largest, 3)});
  }
  if (options.json)
    return print_json({{"from", checkpoint.folder()},
                       {"to", options.out},
                       {"recipe", options.recipe},
                       {"bytes_before", before},
                       {"bytes", after},
                       {"error", errors}});
  table.print(std::cout);
  std::cout << "\nwrote " << options.out << ": " << grouped(before) << " -> " << grouped(after) << " bytes\n";
}

void export_weights(const CheckpointOptions& options) {
  check_new(options.out);
  const Checkpoint checkpoint(io::find_checkpoint(options.folder));
  const io::Dtype dtype = options.to == "bf16" ? io::Dtype::bf16 : io::Dtype::f32;
  if (options.ema) train::check_averages(checkpoint);
  const std::span<const TensorState> trained = train::trained_of(checkpoint.manifest()),
                                     tensors =
                                         options.ema ? train::averages_of(checkpoint.manifest()) : trained;
  std::vector<io::TensorInfo> infos;
  for (const TensorState& tensor : trained) infos.push_back({tensor.name, dtype, tensor.shape});
  io::SafetensorsWriter writer(options.out, infos, {{"format", "pt"}});
  Engine engine;
  for (std::size_t t = 0; t < tensors.size(); ++t)
    writer.write(t, weights_in(infos[t], engine, checkpoint, tensors[t]));
  writer.finish();
  if (options.json)
    return print_json({{"from", checkpoint.folder()},
                       {"to", options.out},
                       {"dtype", options.to},
                       {"tensors", tensors.size()},
                       {"bytes", writer.bytes()}});
  std::cout << "wrote " << options.out << ": " << plural(static_cast<std::int64_t>(tensors.size()), "tensor")
            << " in " << options.to << ", " << grouped(static_cast<std::int64_t>(writer.bytes()))
            << " bytes\n";
}

void reshard(const CheckpointOptions& options) {
  check_new(options.out);
  const Checkpoint checkpoint(io::find_checkpoint(options.folder));
  std::vector<std::byte> memory;
  io::write_checkpoint(options.out, checkpoint.manifest(), static_cast<std::size_t>(options.shards),
                       [&](std::size_t t, std::size_t a, std::size_t p) -> std::span<const std::byte> {
                         const TensorState& tensor = checkpoint.manifest().tensors[t];
                         const io::Plane& plane = tensor.arrays[a].planes[p];
                         memory.resize(static_cast<std::size_t>(plane.bytes()));
                         checkpoint.read(tensor, tensor.arrays[a], plane, memory);
                         return memory;
                       });
  const auto before = static_cast<std::int64_t>(checkpoint.manifest().files.size());
  if (options.json)
    return print_json({{"from", checkpoint.folder()},
                       {"to", options.out},
                       {"files_before", before},
                       {"files", options.shards}});
  std::cout << "wrote " << options.out << ": " << plural(before, "file") << " -> "
            << plural(options.shards, "file") << '\n';
}

}  // namespace scruple::cli
