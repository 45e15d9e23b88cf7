#include "train/run/average.h"

#include <algorithm>

#include "train/run/rows.h"

namespace scruple::train {
namespace {

constexpr std::uint64_t kOtherCoins = 0x9e3779b97f4a7c15;  // than those of the weights

}  // namespace

bool can_average(const scruple_format* weight) {
  const std::string visible = visible_format(info_of(weight).name);
  return (info_of(format_named(visible.c_str())).roles & SCRUPLE_ROLE_GRADIENT) != 0;
}

Average::Average(Backend& backend, const State& state, double decay, std::uint64_t seed, Ledger& ledger)
    : backend_(backend),
      decay_(decay),
      optimizer_("sgd", {{"lr", 1}, {"momentum", 0}, {"weight_decay", 1}, {"maximize", 1}}) {
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
    row.arrays[SCRUPLE_GRADIENT] = weight.arrays[SCRUPLE_WEIGHT];
    row.arrays[SCRUPLE_GRADIENT].rounding = SCRUPLE_NEAREST;  // it is read alone
    table_.push_back(row);
  }
}

double Average::decay_at(double decay, std::int64_t step) {
  const auto taken = static_cast<double>(step);
  return std::min(decay, (taken - 1) / (taken + 9));
}

void Average::take(std::int64_t step) {
  check(scruple_optimizer_set(optimizer_.raw(), "lr", 1 - decay_at(decay_, step)));
  for (scruple_tensor& row : table_) row.step = step;
  check(scruple_step(backend_.engine().raw(), table_.data(), static_cast<std::int64_t>(table_.size()),
                     nullptr));
}

}  // namespace scruple::train
