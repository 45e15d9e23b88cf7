#include "train/run/weights.h"

#include "train/run/checkpoint.h"
#include "train/run/rows.h"
#include "train/run/state.h"

namespace scruple::train {
namespace {

const char* format_of(io::Dtype dtype) {
  return dtype == io::Dtype::bf16 ? "bf16" : dtype == io::Dtype::f16 ? "fp16" : "fp32";
}

}  // namespace

void Weights::add(std::int64_t size, const char* format, const std::function<const void*()>& codes,
                  Backend& backend, Ledger& ledger) {
  scruple_tensor row = {};
  row.size = size;
  row.optimizer = optimizer_.raw();
  row.arrays[SCRUPLE_WEIGHT].format = format_named(format);
  const std::int64_t bytes = plane_bytes(row.arrays[SCRUPLE_WEIGHT].format, size).codes;
  const Block& plane = planes_.emplace_back(ledger, "weights", bytes, backend.memory());
  row.arrays[SCRUPLE_WEIGHT].codes = plane.as<void>();
  if (!ledger.only_counts()) backend.memory().write(plane.as<void>(), codes(), bytes);
  rows_.push_back(row);
}

Weights::Weights(const ModelFolder& folder, Backend& backend, Ledger& ledger)
    : shape_(folder.config().shape) {
  for (const Parameter& parameter : parameters_of(shape_)) {
    const io::StoredTensor& stored = folder.stored(static_cast<int>(rows_.size()));
    add(
        parameter.size(), format_of(stored.dtype), [&] { return stored.data.data(); }, backend, ledger);
  }
}

Weights::Weights(const io::Checkpoint& checkpoint, Backend& backend, Ledger& ledger)
    : shape_(config_of(checkpoint).shape) {
  const io::Manifest& manifest = checkpoint.manifest();
  const std::vector<io::Group> groups = groups_of(checkpoint);
  const std::vector<Parameter> parameters = parameters_of(shape_);
  Engine engine;
  if (manifest.tensors.size() != parameters.size())
    io::fail(checkpoint.folder(), " has ", manifest.tensors.size(), " tensors, and a model of its shape has ",
             parameters.size());
  for (std::size_t p = 0; p < parameters.size(); ++p) {
    const io::TensorState& tensor = manifest.tensors[p];
    if (tensor.name != parameters[p].name || tensor.shape != parameters[p].shape)
      io::fail(checkpoint.folder(), ": tensor ", p, " is \"", tensor.name, "\", and its model has \"",
               parameters[p].name, "\" there, or of another shape");
    const Optimizer optimizer = optimizer_of(groups.at(tensor.group));
    const Tensor stored(engine, row_of(tensor, optimizer.raw()));
    scruple_tensor row = stored.raw();
    const std::string visible = visible_format(row.arrays[SCRUPLE_WEIGHT]);
    const bool is_computed_in = visible == "fp32" || visible == "bf16" || visible == "fp16";
    std::vector<float> decoded;
    const auto codes = [&]() -> const void* {
      for (std::size_t plane = 0; plane < tensor.arrays[0].planes.size(); ++plane)
        checkpoint.read(tensor, tensor.arrays[0], tensor.arrays[0].planes[plane],
                        plane_of(row, tensor, 0, plane));
      if (is_computed_in) return row.arrays[SCRUPLE_WEIGHT].codes;
      decoded.resize(static_cast<std::size_t>(row.size));
      check(scruple_decode(engine.raw(), &row, SCRUPLE_WEIGHT, decoded.data()));
      return decoded.data();
    };
    add(row.size, is_computed_in ? visible.c_str() : "fp32", codes, backend, ledger);
  }
}

}  // namespace scruple::train
