// `scruple checkpoint inspect` and `verify`.
#include <algorithm>
#include <cmath>
#include <iostream>
#include <map>
#include <memory>

#include "checkpoint.h"
#include "commands.h"
#include "text.h"
#include "train/run/rows.h"

namespace scruple::cli {
namespace {

using io::Checkpoint;
using io::TensorState;
using nlohmann::ordered_json;

std::int64_t bytes_of(const io::Array& array) {
  std::int64_t sum = 0;
  for (const io::Plane& plane : array.planes) sum += plane.bytes();
  return sum;
}

std::int64_t bytes_of(const TensorState& tensor) {
  std::int64_t sum = 0;
  for (const io::Array& array : tensor.arrays) sum += bytes_of(array);
  return sum;
}

// By the names of plans and ledgers.
std::vector<std::pair<std::string, std::int64_t>> bytes_by_kind(const Checkpoint& checkpoint) {
  std::vector<std::pair<std::string, std::int64_t>> kinds;
  std::int64_t sum = 0;
  for (const TensorState& tensor : checkpoint.manifest().tensors)
    for (const io::Array& array : tensor.arrays)
      for (const io::Plane& plane : array.planes) {
        const std::string kind = train::is_average(tensor) ? "ema"
                                 : plane.kind == "scale"   ? "scales"
                                 : plane.kind == "extra"   ? "extra"
                                 : array.name == "weight"  ? "weights"
                                                           : array.name;
        entry_of(kinds, kind) += plane.bytes();
        sum += plane.bytes();
      }
  kinds.emplace_back("manifest and headers", static_cast<std::int64_t>(checkpoint.bytes()) - sum);
  kinds.emplace_back("total", static_cast<std::int64_t>(checkpoint.bytes()));
  return kinds;
}

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
  }
  ordered_json norm = nullptr;
  if (tensor.adagc_norm) norm = *tensor.adagc_norm;
  return {{"name", tensor.name}, {"shape", tensor.shape}, {"group", tensor.group},     {"id", tensor.id},
          {"step", tensor.step}, {"adagc_norm", norm},    {"bytes", bytes_of(tensor)}, {"arrays", arrays}};
}

std::vector<const TensorState*> chosen(const Checkpoint& checkpoint, const std::vector<std::string>& names) {
  std::vector<const TensorState*> tensors;
  for (const std::string& name : names) {
    const std::size_t before = tensors.size();
    for (const TensorState& tensor : checkpoint.manifest().tensors)
      if (name == "all" || name == tensor.name) tensors.push_back(&tensor);
    if (tensors.size() == before)
      throw UsageError("--histogram is '" + name + "', and " + checkpoint.folder() +
                       " has no tensor of that name; take one that 'inspect' lists, or all");
  }
  return tensors;
}

void print_checkpoint(const Checkpoint& checkpoint) {
  const io::Manifest& manifest = checkpoint.manifest();
  std::vector<std::string> optimizers;
  for (const io::Group& group : manifest.groups)
    if (std::find(optimizers.begin(), optimizers.end(), group.optimizer) == optimizers.end())
      optimizers.push_back(group.optimizer);
  std::cout << checkpoint.folder() << ": step " << grouped(manifest.step) << ", " << joined(optimizers)
            << ", recipe " << manifest.recipe << ", "
            << plural(static_cast<std::int64_t>(manifest.files.size()), "file") << ", version "
            << io::kCheckpointVersion << " by Scruple " << manifest.library << "\n\n";
  Table table;
  table.rows = {{"tensor", "shape", "formats", "bytes"}};
  table.left = {1, 2};
  std::int64_t elements = 0;
  for (const TensorState& tensor : manifest.tensors) {
    std::vector<std::string> formats;
    for (const io::Array& array : tensor.arrays) formats.push_back(array.format);
    if (!train::is_average(tensor)) elements += tensor.elements();
    table.rows.push_back({tensor.name, shape_text(tensor.shape), joined(formats), grouped(bytes_of(tensor))});
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
      const std::vector<int> arrays = train::stored_arrays(tensor.raw());
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

}  // namespace

void inspect(const CheckpointOptions& options) {
  const Checkpoint checkpoint(io::find_checkpoint(options.folder));
  const io::Manifest& manifest = checkpoint.manifest();
  Decoder decoder(checkpoint);
  const std::vector<const TensorState*> shown = chosen(checkpoint, options.histograms);
  const auto histograms_of = [&](const TensorState& state) {
    const Tensor tensor = decoder.load(state);
    std::vector<Histogram> all;
    for (const int a : train::stored_arrays(tensor.raw())) all.push_back(histogram_of(values_of(tensor, a)));
    return all;
  };
  if (!options.json) {
    print_checkpoint(checkpoint);
    for (const TensorState* state : shown) {
      const std::vector<Histogram> all = histograms_of(*state);
      for (std::size_t a = 0; a < all.size(); ++a) print(state->name + " " + state->arrays[a].name, all[a]);
    }
    return;
  }
  ordered_json tensors = ordered_json::array(), kinds = ordered_json::object();
  for (const TensorState& state : manifest.tensors) {
    ordered_json entry = tensor_json(state);
    if (std::find(shown.begin(), shown.end(), &state) != shown.end()) {
      const std::vector<Histogram> all = histograms_of(state);
      for (std::size_t a = 0; a < all.size(); ++a) entry["arrays"][a]["histogram"] = to_json(all[a]);
    }
    tensors.push_back(entry);
  }
  for (const auto& [kind, bytes] : bytes_by_kind(checkpoint)) kinds[kind] = bytes;
  print_json({{"folder", checkpoint.folder()},
              {"version", io::kCheckpointVersion},
              {"library", manifest.library},
              {"recipe", manifest.recipe},
              {"step", manifest.step},
              {"files", manifest.files.size()},
              {"groups", groups_json(checkpoint)},
              {"loss_scale", loss_scale_json(manifest)},
              {"trainer", manifest.trainer},
              {"bytes", kinds},
              {"tensors", tensors}});
}

void verify(const CheckpointOptions& options) {
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
    print_json({{"folder", folder},
                {"ok", problems.empty()},
                {"tensors", tensors},
                {"bytes", bytes},
                {"problems", problems}});
  else if (problems.empty())
    std::cout << folder << ": " << plural(tensors, "tensor") << " in " << grouped(bytes)
              << " bytes: complete, checksums fit, every value is finite\n";
  else
    std::cout << joined(problems, "\n") << '\n';
  if (!problems.empty())
    throw std::runtime_error(folder + " has " +
                             plural(static_cast<std::int64_t>(problems.size()), "problem") + advice);
}

}  // namespace scruple::cli
