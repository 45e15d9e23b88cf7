#include "train/run/average.h"

#include <algorithm>

#include "train/run/rows.h"

namespace scruple::train {
namespace {

constexpr std::uint64_t kOtherCoins = 0x9e3779b97f4a7c15;  // than those of the weights

constexpr std::int64_t kPiece = 1 << 18;  // elements that are decoded at once

bool is_gradient(const scruple_format* format) {
  return (info_of(format).roles & SCRUPLE_ROLE_GRADIENT) != 0;
}

}  // namespace

Average::Average(Backend& backend, const State& state, double decay, std::uint64_t seed, Ledger& ledger)
    : backend_(backend),
      decay_(decay),
      optimizer_("sgd", {{"lr", 1}, {"momentum", 0}, {"weight_decay", 1}, {"maximize", 1}}) {
  std::int64_t most = 0;  // elements of a piece that is decoded
  optimizer_.set_seed(seed ^ kOtherCoins);
  for (const scruple_tensor& weight : state.visible()) {
    scruple_tensor row = {};
    row.optimizer = optimizer_.raw();
    row.size = weight.size;
    row.id = weight.id;
    row.step = 1;
    const auto plane = [&](std::int64_t bytes) {
      return planes_.emplace_back(ledger, "ema", bytes, backend.memory()).as<void>();
    };
    const PlaneBytes bytes = plane_bytes(format_named(kAverageFormat), row.size);
    row.arrays[SCRUPLE_WEIGHT] = {format_named(kAverageFormat), plane(bytes.codes), plane(bytes.aux),
                                  SCRUPLE_STOCHASTIC, 0};
    table_.push_back(row);
    if (is_gradient(weight.arrays[SCRUPLE_WEIGHT].format)) {
      row.arrays[SCRUPLE_GRADIENT] = weight.arrays[SCRUPLE_WEIGHT];
      row.arrays[SCRUPLE_GRADIENT].rounding = SCRUPLE_NEAREST;  // it is read alone
      direct_.push_back(row);
    } else {
      coded_.emplace_back(row, weight);
      most = std::clamp(row.size, most, kPiece);
    }
  }
  if (most > 0) decoded_ = Block(ledger, "workspace", most * std::int64_t{sizeof(float)}, backend.memory());
}

double Average::decay_at(double decay, std::int64_t step) {
  const auto taken = static_cast<double>(step);
  return std::min(decay, (taken - 1) / (taken + 9));
}

void Average::take(std::int64_t step) {
  check(scruple_optimizer_set(optimizer_.raw(), "lr", 1 - decay_at(decay_, step)));
  scruple_engine* const engine = backend_.engine().raw();
  for (scruple_tensor& row : direct_) row.step = step;
  check(scruple_step(engine, direct_.data(), static_cast<std::int64_t>(direct_.size()), nullptr));
  for (const auto& [average, weight] : coded_)
    for (std::int64_t first = 0; first < average.size; first += kPiece) {
      const std::int64_t size = std::min(kPiece, average.size - first);
      scruple_tensor into = {}, from = {};
      check(scruple_tensor_view(&average, first, size, &into));
      check(scruple_tensor_view(&weight, first, size, &from));
      check(scruple_decode_as(engine, &from, SCRUPLE_WEIGHT, format_named("fp32"), decoded_.as<void>()));
      into.step = step;
      into.arrays[SCRUPLE_GRADIENT] = {format_named("fp32"), decoded_.as<void>(), nullptr, SCRUPLE_NEAREST,
                                       0};
      check(scruple_step(engine, &into, 1, nullptr));
    }
}

}  // namespace scruple::train
