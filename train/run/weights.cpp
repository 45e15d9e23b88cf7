#include "train/run/weights.h"

#include <optional>

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

Weights::Weights(const io::Checkpoint& checkpoint, Backend& backend, Ledger& ledger, bool averages)
    : shape_(config_of(checkpoint).shape) {
  check_tensors(checkpoint, parameters_of(shape_));
  Engine engine;
  const io::Manifest& manifest = checkpoint.manifest();
  if (averages) check_averages(checkpoint);
  for (const io::TensorState& tensor : averages ? averages_of(manifest) : trained_of(manifest)) {
    const std::string visible = visible_format(tensor.arrays.front().format);
    const bool is_computed_in = visible == "fp32" || visible == "bf16" || visible == "fp16";
    std::optional<Tensor> stored;
    std::vector<float> decoded;
    const auto codes = [&]() -> const void* {
      stored.emplace(load_weight(engine, checkpoint, tensor));
      if (is_computed_in) return stored->raw().arrays[SCRUPLE_WEIGHT].codes;
      decoded.resize(static_cast<std::size_t>(stored->size()));
      stored->decode(SCRUPLE_WEIGHT, decoded.data());
      return decoded.data();
    };
    add(tensor.elements(), is_computed_in ? visible.c_str() : "fp32", codes, backend, ledger);
  }
}

}  // namespace scruple::train
