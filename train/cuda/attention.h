// Causal attention on tensor cores (Dao et al., 2205.14135; 2307.08691): neither pass writes the weights down. Sums have a
// fixed order, so the same input gives the same bits on one kind of GPU.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "train/pass/backend.h"

namespace scruple::train::cuda {

// The input is queries, keys and values side by side, normed and rotated: rows of (heads + 2 kv_heads) x
// head_width values. 16-bit values run on tensor cores for the head widths that attention.cu lists. All else
// runs on plain arithmetic: other head widths up to 256, and fp32.
struct Attention {
  Precision precision;
  std::int64_t sequences, length;  // rows = sequences x length
  int heads, kv_heads, head_width;
  // Of each row in its document, which begins at 0; a token sees nothing before its document. nullptr: every sequence is
  // one document.
  const std::int32_t* positions;
};

// Why there is no such attention, or nullptr.
const char* problem_with(const Attention& shape);
// y: rows of heads x head_width. log_sums, [sequences, heads, length]: the logarithm of each softmax's sum, of scores
// times 1 / sqrt(head_width).
void attend(const Attention& shape, const void* qkv, void* y, float* log_sums, cudaStream_t stream);
// Keys as attention sees them, and values behind them: [context, kv_heads x head_width] each, of which `length` rows are
// there.
struct Cache {
  void* data;
  std::int64_t context, length;
};
// Attention of one sequence to what is in the cache and to itself; its keys and values are added.
void attend_cached(const Attention& shape, const void* qkv, const Cache& cache, void* y, cudaStream_t stream);
// Bytes that attend_backward works in.
std::int64_t attend_backward_bytes(const Attention& shape);
void attend_backward(const Attention& shape, const void* qkv, const void* y, const float* log_sums,
                     const void* dy, void* dqkv, void* workspace, cudaStream_t stream);

}  // namespace scruple::train::cuda
