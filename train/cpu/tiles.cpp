#include "train/cpu/tiles.h"

#include <algorithm>
#include <numeric>
#include <stdexcept>
#include <string>

namespace scruple::train {
namespace {

// No gradient buffer is larger, whatever the tensor.
constexpr std::int64_t kTileElements = (std::int64_t{1} << 20) / static_cast<std::int64_t>(sizeof(float));
constexpr std::int64_t kPieceElements = 128;  // pieces begin at multiples: scruple_tensor_view

// Rows of a tile: as many as fit, a whole number of pieces.
std::int64_t tile_rows(const Parameter& parameter) {
  const std::int64_t columns = parameter.shape.size() == 2 ? parameter.shape[1] : 1;
  const std::int64_t step = kPieceElements / std::gcd(kPieceElements, columns);
  const std::int64_t rows = kTileElements / columns / step * step;
  if (columns > kTileElements)
    throw std::runtime_error(parameter.name + " has rows of " + std::to_string(columns) +
                             " values, and a gradient tile of 1 MiB holds " + std::to_string(kTileElements) +
                             "; choose a smaller --width");
  if (rows == 0)
    throw std::runtime_error(parameter.name + " has rows of " + std::to_string(columns) + " values, and " +
                             std::to_string(step) +
                             " of them do not fit into a gradient tile of 1 MiB; choose a --width that is a "
                             "multiple of 128");
  return std::min(rows, parameter.shape[0]);
}

bool is_safe(const Bound& bound) {
  constexpr double kSafe = 0x1p120;  // sums of fp32 round, and so do 16-bit activations
  return bound != nullptr && bound() < kSafe;
}

}  // namespace

std::int64_t tile_bytes(const std::vector<Parameter>& parameters) {
  std::int64_t largest = 0;
  for (const Parameter& parameter : parameters)
    largest = std::max(largest, tile_rows(parameter) * (parameter.size() / parameter.shape[0]));
  return largest * static_cast<std::int64_t>(sizeof(float));
}

Tiles::Tiles(const std::vector<Parameter>& parameters, bool released, Ledger& ledger)
    : parameters_(parameters), tile_(ledger, released ? "gradients" : "workspace", tile_bytes(parameters)) {
  for (const Parameter& parameter : parameters_) rows_.push_back(tile_rows(parameter));
}

// A guard judges tiles as they come, which would leave a tensor of several half stepped where a late one is not finite. So
// such a gradient is computed twice, and all of it is looked at first, unless its bound is far from overflow.
void Tiles::take(int parameter, const FillRows& fill, const Bound& bound) {
  const auto p = static_cast<std::size_t>(parameter);
  const bool several = rows_[p] < parameters_[p].shape[0];
  if (several && sink_->measures() && !(sink_->only_guards() && is_safe(bound)))
    each_tile(parameter, fill, &Sink::measure);
  each_tile(parameter, fill, &Sink::add);
}

void Tiles::each_tile(int parameter, const FillRows& fill, SinkCall hand) {
  const Parameter& p = parameters_[static_cast<std::size_t>(parameter)];
  const std::int64_t step = rows_[static_cast<std::size_t>(parameter)], columns = p.size() / p.shape[0];
  for (std::int64_t first = 0; first < p.shape[0]; first += step) {
    const std::int64_t rows = std::min(step, p.shape[0] - first);
    fill(first, rows, tile_.as<float>());
    const scruple_piece piece = {parameter,
                                 first * columns,
                                 rows * columns,
                                 {format_named("fp32"), tile_.as<void>(), nullptr, SCRUPLE_NEAREST, 0}};
    (sink_->*hand)({&piece, 1});
  }
}

}  // namespace scruple::train
