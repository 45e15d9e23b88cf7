// Which tensors and which elements of them a block, a warp and a thread work on.
#pragma once

#include "engine/cuda_table.h"

namespace scruple {
inline namespace SCRUPLE_UNIT {

// The consecutive elements of a tensor that one thread works on.
struct Slice {
  i64 first;
  int n;  // 0 to N; fewer than N at the end of the tensor

  // first / divisor. Unsigned: by a power of two that is one shift.
  __device__ i64 over(int divisor) const {
    return static_cast<i64>(static_cast<u64>(first) / static_cast<u64>(divisor));
  }
};

template <int N>
__device__ Slice slice_of(i64 first, i64 size) {
  const i64 left = size - first;
  return {first, left >= N ? N : left > 0 ? static_cast<int>(left) : 0};
}

// The tiles of a block. They are next to each other, so that a block meets few rows.
struct BlockTiles {
  i64 first, end;
  __device__ explicit BlockTiles(const DeviceTable& table)
      : first(blockIdx.x * table.each), end(min(first + table.each, table.tiles)) {}
};

// The row that a warp works on, and the tile within it.
struct Cursor {
  int row = 0;
  i64 tile = 0;  // within the row

  // Searches 32 ways: each thread of a warp compares one row, so that a thousand tensors take two rounds. (A
  // block could do it in one, but its barrier cost AdamW a fifth of its speed on an H200: 0.65 of copy
  // bandwidth against 0.81.)
  __device__ void seek(const DeviceTable& table, i64 wanted) {
    int low = row, high = table.count;  // begins[low] <= wanted < begins[high]
    if (wanted < table.begins[low + 1]) high = low + 1;
    while (high - low > 1) {
      const int stride = (high - low + 31) / 32;
      const int mine = low + static_cast<int>(threadIdx.x % 32) * stride;
      const u32 not_above = __ballot_sync(0xffffffffu, mine < high && table.begins[mine] <= wanted);
      low += (__popc(not_above) - 1) * stride;
      high = min(high, low + stride);
    }
    row = low;
    tile = wanted - table.begins[low];
  }
};

// The row that a warp works on, with its constants, in shared memory. The compiler knows that the step's
// stores to planes cannot change it, and need not read it again.
struct Held {
  int index;
  i64 begin, end;  // tiles of the row
  DeviceRow row;
  Constants constants;

  __device__ void open() {
    if (threadIdx.x % 32 == 0) index = 0, end = 0;
    __syncwarp();
  }
  // `all` may be null: no constants.
  __device__ void seek(const DeviceTable& table, i64 tile, const Constants* all) {
    if (tile < end) return;
    Cursor cursor{index};
    cursor.seek(table, tile);
    const DeviceRow& found = table.rows[cursor.row];
    __syncwarp();  // every thread has finished with the last row
    if (threadIdx.x % 32 == 0) {
      index = cursor.row;
      begin = table.begins[cursor.row];
      end = table.begins[cursor.row + 1];
    }
    copy(found, row);
    if (all != nullptr) copy(all[found.constants], constants);
    __syncwarp();
  }

 private:
  template <class T>
  static __device__ void copy(const T& from, T& to) {
    static_assert(sizeof(T) % 8 == 0 && alignof(T) >= 8);
    for (unsigned i = threadIdx.x % 32; i < sizeof(T) / 8; i += 32)
      reinterpret_cast<u64*>(&to)[i] = reinterpret_cast<const u64*>(&from)[i];
  }
};

}  // namespace SCRUPLE_UNIT
}  // namespace scruple
