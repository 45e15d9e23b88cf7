// Tensors as the device sees them: the row of each, the kernel that takes it, and the tables of rows that a
// call uploads.
#pragma once

#include <vector>

#include "engine/cuda_device.h"
#include "engine/cuda_table.h"
#include "engine/engine.h"

namespace scruple {

inline i64 round_up(i64 x, i64 to) { return (x + to - 1) / to * to; }
inline i64 tiles_of(i64 size, i64 tile) { return (size + tile - 1) / tile; }

// ---- Rows ----

inline DeviceArray device_array(const scruple_array& array, bool nonneg) {
  DeviceArray out{};
  out.codes = static_cast<u8*>(array.codes);
  out.aux = array.format->layout.aux_bits == 0 ? nullptr : static_cast<u8*>(array.aux);
  out.format = static_cast<u8>(array.format->index);
  out.rounding = static_cast<u8>(array.rounding);
  out.k = static_cast<u8>(array.format->k);
  set_any_ways(array.format->index, nonneg, array.rounding, out.ways);
  return out;
}

// Whether a thread may move 16 bytes at a time; scales are read one by one.
inline bool is_aligned(const scruple_array& array) {
  const auto address = [](const void* p) { return reinterpret_cast<std::uintptr_t>(p); };
  const int aux = array.format->layout.aux_bits, wanted = array.format->aux_is_scale ? aux / 8 : 16;
  if (address(array.codes) % 16 != 0) return false;
  return aux == 0 || address(array.aux) % static_cast<std::size_t>(wanted) == 0;
}

inline DeviceRow row_of(const scruple_tensor& t, u32 constants) {
  DeviceRow row{};
  row.constants = constants;
  row.size = t.size;
  row.offset = t.offset;
  row.id = t.id;
  row.folds = static_cast<u32>(t.folds);
  return row;
}

// ---- Which kernel takes a row ----

inline const std::vector<StepKernel>& step_kernels(int rule) {
  static const std::vector<std::vector<StepKernel>> kKernels = [] {
    std::vector<std::vector<StepKernel>> table(kRuleCount);
#define SCRUPLE_OPTIMIZER(number, Rule) table[number] = step_kernels_##Rule();
#include "optim/optim.def"
#undef SCRUPLE_OPTIMIZER
    return table;
  }();
  return kKernels[static_cast<std::size_t>(rule)];
}

// The kernel made for these formats, or the one that takes any.
struct Kernel {
  const void* entry;
  i64 tile;
};
inline Kernel kernel_of(const scruple_tensor& t, unsigned active) {
  const scruple_array& weight = t.arrays[SCRUPLE_WEIGHT];
  const bool any_rounding = weight.format->layout.code_bits == 32 || weight.format->aux_is_scale;
  for (const StepKernel& kernel : step_kernels(t.optimizer->rule().index)) {
    if (kernel.active == active && (any_rounding || kernel.weight_rounding == weight.rounding) &&
        has_formats(t, kernel.weight, kernel.moment, kernel.nonneg))
      return {kernel.kernel, i64{kernel.lane} * kBlock};
  }
  return {any_kernel(), kBlockTile};
}

inline const FoldKernel& fold_kernel(const scruple_array& total, int lane) {
  for (const FoldKernel& kernel : fold_kernels())
    if (kernel.format == total.format->index && kernel.lane == lane) return kernel;
  fail(SCRUPLE_UNSUPPORTED, total.format->name, " is no format that a GPU folds gradients into");
}

// ---- Tables ----

// The tensors of a call that go to one kernel. A step of 100 `scruple` and 20 `mixed` tensors has two of
// these, and makes two launches. Each is uploaded into the workspace at `at`: begins first, then rows; a
// DeviceTable points at both.
struct KernelTable {
  std::vector<i64> begins;
  std::vector<DeviceRow> rows;
  std::vector<u32> tensors;  // of each row, for messages
  const void* kernel = nullptr;
  i64 at = 0;  // in the workspace

  void clear() {
    begins.assign(1, 0);
    rows.clear();
    tensors.clear();
  }
  void add(const DeviceRow& row, i64 tensor, i64 tile) {
    begins.push_back(begins.back() + tiles_of(row.size, tile));
    rows.push_back(row);
    tensors.push_back(static_cast<u32>(tensor));
  }
  i64 begins_bytes() const { return round_up(static_cast<i64>(begins.size() * sizeof(i64)), 16); }
  i64 bytes() const { return begins_bytes() + static_cast<i64>(rows.size() * sizeof(DeviceRow)); }
};
static_assert(sizeof(DeviceRow) % 16 == 0);

// The device memory in which one kind of call (step, measure, fold) keeps its tables. Training makes the
// same call at every step: its tables are found where they are, and only rows that changed are uploaded.
struct Workspace {
  DeviceBuffer memory;
  std::vector<u8> shadow;  // a copy of `memory` on the host, kept by upload(), to see what has changed

  std::vector<KernelTable>
      tables;  // of the last call, one per kernel; those from `used` on wait to be used again
  std::size_t used = 0;
  u64 version = 0;  // of the table that they were made from
};

}  // namespace scruple
