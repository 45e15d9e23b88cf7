#include "train/run/state.h"

#include <algorithm>
#include <cstddef>
#include <memory>
#include <thread>
#include <utility>

#include "engine/threads.h"
#include "train/random.h"

namespace scruple::train {
namespace {

// What a plane of an array is called in plans, ledgers and reports.
std::string kind_of(const scruple_tensor& tensor, int array, bool aux) {
  if (aux) return info_of(tensor.arrays[array].format).aux_is_scale != 0 ? "scales" : "extra";
  if (array == SCRUPLE_WEIGHT) return "weights";
  const char* name = nullptr;
  check(scruple_tensor_array(&tensor, array, &name, nullptr, nullptr));
  return name;
}

// The first values of an array, or their codes. Copied to the host, wherever the planes lie: it is seldom asked for.
std::vector<float> head_of(const scruple_tensor& row, int array, bool codes, Memory& memory) {
  constexpr std::int64_t kMost = 1 << 16;  // as watch_updates of scruple.torch
  scruple_tensor head = {};
  head.optimizer = row.optimizer;
  head.size = std::min(row.size, kMost);
  head.step = 1;
  scruple_array& copied = head.arrays[array];
  copied = row.arrays[array];
  const auto copy = [&](void*& plane, std::int64_t bytes) {
    std::vector<std::byte> held(static_cast<std::size_t>(bytes));
    if (bytes > 0) memory.read(held.data(), std::exchange(plane, held.data()), bytes);
    return held;
  };
  const PlaneBytes bytes = plane_bytes(copied.format, head.size);
  const std::vector<std::byte> held[] = {copy(copied.codes, bytes.codes), copy(copied.aux, bytes.aux)};
  std::vector<float> ones, values(static_cast<std::size_t>(head.size));
  if (codes) {
    ones.resize(static_cast<std::size_t>(bytes.aux) / sizeof(float), 1);
    copied.aux = ones.data();
  }
  check(scruple_decode(Engine("cpu", 1).raw(), &head, array, values.data()));
  return values;
}

// What is counted here, and taken by the engine.
class EngineMemory final : public Memory {
  void* take(std::int64_t) override { return this; }
  void give_back(void*) noexcept override {}
} engine_memory;

}  // namespace

std::string visible_format(const std::string& format) { return format.substr(0, format.find('+')); }

std::string visible_format(const scruple_array& weight) {
  return visible_format(info_of(weight.format).name);
}

State::State(Backend& backend, const std::vector<Parameter>& parameters, const OptimizerOf& optimizer_of,
             const Describe& describe, Ledger& ledger, bool offloads)
    : backend_(backend), parameters_(parameters) {
  constexpr std::int64_t kSmall = 1 << 16;  // copies of fewer elements would cost more than they save
  const auto plane = [&](const scruple_tensor& row, int array, bool aux, std::int64_t bytes) {
    const bool away = scruple_tensor_on_host(&row, array, aux ? 1 : 0) != 0;
    Memory& memory = away ? backend.offload_memory() : backend.memory();
    return planes_.emplace_back(away ? ledger.host() : ledger, kind_of(row, array, aux), bytes, memory)
        .as<void>();
  };
  for (const Parameter& parameter : parameters_) {
    scruple_tensor row = describe(optimizer_of(table_.size()), parameter.size());
    row.id = static_cast<std::uint32_t>(table_.size());
    row.step = 1;
    row.host = offloads && row.size > kSmall ? SCRUPLE_HOST_STATE : 0;
    for (const int a : used_arrays(row)) {
      if (a == SCRUPLE_GRADIENT) continue;  // the sink's
      const PlaneBytes bytes = plane_bytes(row.arrays[a].format, row.size);
      row.arrays[a].codes = plane(row, a, false, bytes.codes);
      if (bytes.aux > 0) row.arrays[a].aux = plane(row, a, true, bytes.aux);
    }
    table_.push_back(row);
    scruple_array& weight = row.arrays[SCRUPLE_WEIGHT];
    const std::string format = visible_format(weight);
    if (format != info_of(weight.format).name)
      weight = {format_named(format.c_str()), weight.codes, nullptr, SCRUPLE_NEAREST, 0};
    visible_.push_back(row);
  }
  const auto is_away = [](const scruple_tensor& row) { return row.host != 0; };
  if (std::any_of(table_.begin(), table_.end(), is_away))
    planes_.emplace_back(ledger, "workspace", SCRUPLE_HOST_RING_BYTES, engine_memory);
}

Fill random_values(const std::vector<Parameter>& parameters, std::uint64_t seed, int threads) {
  constexpr std::int64_t kPiece = 1 << 14;
  const int cores = static_cast<int>(std::max(std::thread::hardware_concurrency(), 1u));
  const auto workers = std::make_shared<Threads>(threads > 0 ? threads : cores);
  return [&parameters, seed, workers](int which, std::int64_t first, std::int64_t count, float* values) {
    const Parameter& parameter = parameters[static_cast<std::size_t>(which)];
    const auto stream = kInitialStream + static_cast<std::uint32_t>(which);
    workers->run((count + kPiece - 1) / kPiece, [&](std::int64_t piece) {
      for (std::int64_t i = piece * kPiece; i < std::min(count, (piece + 1) * kPiece); ++i) {
        const double normal =
            parameter.deviation > 0 ? random_normal(seed, stream, static_cast<std::uint64_t>(first + i)) : 0;
        values[i] = static_cast<float>(parameter.mean + parameter.deviation * normal);
      }
    });
  };
}

void State::start(const Fill& fill, Ledger& ledger) {
  constexpr std::int64_t kMost = 1 << 20;  // values at a time: with fewer, threads wait too often
  std::int64_t most = 0;
  for (const scruple_tensor& row : table_) most = std::clamp(row.size, most, kMost);
  const Block part(ledger, "workspace", most * std::int64_t{sizeof(float)});
  for (std::size_t p = 0; p < parameters_.size(); ++p) {
    for (std::int64_t first = 0; first < table_[p].size; first += most) {
      scruple_tensor view = {};
      check(scruple_tensor_view(&table_[p], first, std::min(most, table_[p].size - first), &view));
      fill(static_cast<int>(p), first, view.size, part.as<float>());
      check(scruple_encode(backend_.engine().raw(), &view, SCRUPLE_WEIGHT, part.as<float>()));
    }
    check(scruple_tensor_reset(backend_.engine().raw(), &table_[p]));
  }
}

void State::set(int parameter, const float* values) {
  check(scruple_encode(backend_.engine().raw(), &table_[static_cast<std::size_t>(parameter)], SCRUPLE_WEIGHT,
                       values));
}

std::vector<float> State::master(int parameter) const {
  const scruple_tensor& row = table_[static_cast<std::size_t>(parameter)];
  std::vector<float> values(static_cast<std::size_t>(row.size));
  check(scruple_decode(backend_.engine().raw(), &row, SCRUPLE_WEIGHT, values.data()));
  return values;
}

std::vector<std::vector<float>> State::heads() const {
  std::vector<std::vector<float>> all(table_.size());
  for (std::size_t p = 0; p < table_.size(); ++p) {
    const scruple_format_info info = info_of(table_[p].arrays[SCRUPLE_WEIGHT].format);
    if (info.bits_per_value < 32)
      all[p] = head_of(table_[p], SCRUPLE_WEIGHT, info.aux_is_scale != 0, backend_.memory());
  }
  return all;
}

std::optional<Unmoved> State::unmoved_since(const std::vector<std::vector<float>>& before) const {
  Unmoved found;
  double unmoved_of_all = 0, all = 0;
  const std::vector<std::vector<float>> now = heads();
  for (std::size_t p = 0; p < table_.size(); ++p) {
    if (now[p].empty()) continue;
    const int slot = used_arrays(table_[p])[1];  // the first moment, which most rules have
    std::vector<float> momentum(now[p].size(), 1);
    if (slot != SCRUPLE_GRADIENT) momentum = head_of(table_[p], slot, false, backend_.memory());
    double unmoved = 0, moving = 0;
    for (std::size_t i = 0; i < now[p].size(); ++i) {
      if (momentum[i] == 0) continue;
      ++moving;
      unmoved += now[p][i] == before[p][i] ? 1 : 0;
    }
    if (moving == 0) continue;
    unmoved_of_all += unmoved, all += moving;
    if (const double share = unmoved / moving; share > found.most || found.tensor.empty())
      found.most = share, found.tensor = parameters_[p].name;
  }
  if (all == 0) return {};
  found.share = unmoved_of_all / all;
  return found;
}

std::int64_t State::size() const {
  std::int64_t sum = 0;
  for (const Parameter& parameter : parameters_) sum += parameter.size();
  return sum;
}

}  // namespace scruple::train
