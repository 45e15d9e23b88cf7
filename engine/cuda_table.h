// What the CUDA engine's host side and its kernels hand each other: the table of tensors as the device sees
// it, and the constants of a step.
#pragma once

#include <vector>

#include "engine/coins.h"
#include "engine/rule.h"
#include "engine/unit.h"
#include "include/scruple/scruple.h"

namespace scruple {

inline constexpr int kBlock = 256;       // threads
inline constexpr int kBlockTile = 2048;  // elements of a tile of the general kernel

struct DeviceArray {
  u8* codes;  // null: the array is not there
  u8* aux;
  u8 format, rounding, k;
  u8 ways[3];  // how the general kernel loads, decodes and encodes it
  u16 zero;
};

// One tensor as kernels see it. A model has hundreds of rows, so a row is uploaded only when it changes. What
// changes at every step is not in it: Constants, and `coins`, which a kernel draws into the uploaded row. An
// accumulator is read with coins[SCRUPLE_GRADIENT] (the last fold's) and written with coins[kNextFold].
inline constexpr int kNextFold = SCRUPLE_ARRAYS;
struct DeviceRow {
  i64 size, offset;
  u32 id, folds;
  u32 constants;  // index
  u16 active;     // slots in use, as a bit mask
  u16 aligned;  // 1: planes begin at multiples of 16 bytes, scales at whole ones, so whole tiles need no care
  float spread;
  u32 zero;  // filled, since rows are compared by their bytes
  DeviceArray arrays[SCRUPLE_ARRAYS];
  Coins coins[SCRUPLE_ARRAYS + 1];  // from element 0 of this tensor, or shard, on
};

// One optimizer at one step. Kernels read Constants. The device computes them from a ConstantsSource, because
// the learning rate, the step count and the multiplier may be in device memory.
struct Constants {
  StepConstants step;
  u64 seed;
  float multiplier;
  u32 t;
  u32 skip;
  i32 rule;
  u32 keep_weight;  // another part follows
};
struct ConstantsSource {
  HyperBytes hyper;
  const double* lr;
  u64 seed;
  i64 t;
  i32 rule;
  float multiplier;
};

// Tiles begins[i] to begins[i + 1] are those of row i. A block takes `each` of them.
struct DeviceTable {
  const i64* begins;
  const DeviceRow* rows;
  int count;
  i64 tiles, each = 1;
};

// ---- Kernels, as cudaLaunchKernel takes them ----

// (DeviceTable, const Constants*), for the formats (rows of formats.def) of a recipe and one rounding of its
// weights; coins, and so the rounding of moments, are data.
struct StepKernel {
  unsigned active;
  int weight, moment, nonneg;
  int weight_rounding;
  int lane;  // elements of one thread
  const void* kernel;
};
// Per optimizer, one name each: step_kernels_AdamW() and so on.
#define SCRUPLE_OPTIMIZER(number, Rule) std::vector<StepKernel> step_kernels_##Rule();
#include "optim/optim.def"
#undef SCRUPLE_OPTIMIZER

// Tables are uploaded as kernel parameters. That needs no pinned memory, no event, and no host copy that a
// captured graph would have to keep alive. CUDA 12.1 and later allow 32,764 bytes of parameters.
inline constexpr int kUploadBytes = 32256;
struct Upload {
  u8* to;
  i64 bytes;
  alignas(16) u8 data[kUploadBytes];
};
inline constexpr int kPreparedAtOnce = 32;
struct PrepareInput {
  Constants* to;
  int count;
  const float *found_inf, *clip, *loss_scale;
  const i64* steps;
  u32 part, keep_weight;
  ConstantsSource sources[kPreparedAtOnce];
};
static_assert(sizeof(Upload) <= 32764 && sizeof(PrepareInput) <= 4096);  // 4 KiB travel at no cost

struct NormOutput {
  const double* sums;  // of chunks
  i64 chunks;
  double* sum;  // may be null
  scruple_measure_options options;
};

struct GradientKernels {
  const void* upload;       // (Upload), one block
  const void* prepare;      // (PrepareInput), a thread per source
  const void* draw;         // (DeviceRow*, int rows, const Constants*), a thread per row and array
  const void* sum_squares;  // (DeviceTable in chunks, double* sums)
  const void* finish_norm;  // (NormOutput), one block
  const void* advance;      // (Advance), one thread
};
const GradientKernels& gradient_kernels();

// (DeviceTable, float multiplier): adds arrays[0], the arriving gradient, to accumulators of one format. A
// thread takes 16 elements; 8 where either array has 32 bits, so that a warp reads neighbouring bytes.
inline constexpr int kFoldLane = 16, kWideFoldLane = 8;
struct FoldKernel {
  int format;
  int lane;
  const void* kernel;
};
const std::vector<FoldKernel>& fold_kernels();

const void* any_kernel();  // (DeviceTable, const Constants*), as a StepKernel of any formats

// Elements of an array in another format: to or from plain values (fp32, bf16, fp16), which have neither scales
// nor coins.
struct ArrayPart {
  DeviceArray array{};
  i64 first = 0;  // element
  Coins coins{};  // of element 0
  bool aligned = false;
};
struct ArrayWork {
  ArrayPart from{}, to{};  // from.array.codes null: `otherwise` everywhere
  i64 size = 0;
  bool to_plain = false;
  float otherwise = 0, overflow = kNoOverflow;
};
const void* array_kernel();                                               // (ArrayWork)
void set_any_ways(int format, bool nonneg, int rounding, u8 (&ways)[3]);  // of both, for a DeviceArray

int least_architecture();  // that the kernels were compiled for, such as 800

}  // namespace scruple
