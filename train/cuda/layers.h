// The layers of a model beside its products and its attention, forward and backward. Activations are of one type
// (Precision); arithmetic and sums are fp32, in a fixed order: the same input gives the same bits on one kind of GPU.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <optional>

#include "train/pass/backend.h"

namespace scruple::train::cuda {

inline std::int64_t bytes_of(Precision type) { return type == Precision::fp32 ? 4 : 2; }
// Of the library; the formats of weights and gradients that have a type here are these three.
const scruple_format* format_of(Precision type);
std::optional<Precision> type_of(const scruple_format* format);

// Values that a kernel reads or writes in whatever type they have: weights, biases, gradients of them.
struct Values {
  void* data = nullptr;  // nullptr: there are none
  Precision type = Precision::fp32;
};

// to[i] = from[i]
void convert(Values from, Values to, std::int64_t count, cudaStream_t stream);

// Of `rows` rows of `words` 16-bit words, `stride` words apart: digest[0] += a hash of the words and their places,
// digest[1] += how many are not 0.
void add_digest(const void* values, std::int64_t rows, std::int64_t words, std::int64_t stride,
                unsigned long long* digest, cudaStream_t stream);

// *out = *a *b
void multiply(const float* a, const float* b, float* out, cudaStream_t stream);

// x = token embedding + position embedding, where there is a table of positions.
void embed(Precision precision, const std::int32_t* tokens, const std::int32_t* positions, std::int64_t rows,
           std::int64_t width, Values token_table, Values position_table, void* x, cudaStream_t stream);

// Rows that were read from one row of a table, for the gradient of tables: row `target[i]` was read by rows
// order[begin[i]] to order[begin[i + 1]], in this order. In device memory.
struct Occurrences {
  const std::int32_t *target, *begin, *order;
  std::int64_t count;  // of targets
};
// table[target - first] += the sum of the rows of g in which it occurs; other rows stay as they are. Targets ascend.
void embedding_gradient(Precision precision, const void* g, std::int64_t width, Occurrences occurrences,
                        std::int64_t first, Values table, cudaStream_t stream);

// y = norm(x) weight + bias; keeps 1 / deviation of each row, and the mean where the norm has one (else nullptr).
struct Norm {
  NormKind kind;
  float epsilon;
  Values weight, bias;
};
void norm_forward(Precision precision, const Norm& norm, const void* x, std::int64_t rows, std::int64_t width,
                  void* y, float* mean, float* rstd, cudaStream_t stream);
// g (+)= the gradient of x, where dy is that of y: adds where `adds`, else overwrites. `sums`, norm_parts(rows) x 2 x
// width floats, take parts of the gradients of weight and bias.
std::int64_t norm_parts(std::int64_t rows);
void norm_backward(Precision precision, const Norm& norm, const void* dy, const void* x, const float* mean,
                   const float* rstd, std::int64_t rows, std::int64_t width, bool adds, void* g, float* sums,
                   cudaStream_t stream);
// The sum of `parts` rows of `sums`, which are `stride` floats apart, over `width` columns.
void sum_parts(const float* sums, std::int64_t parts, std::int64_t stride, std::int64_t width, Values out,
               cudaStream_t stream);
// out[i] = the sum of column i of dy, whose rows are `stride` values apart; column 0 is where dy points. `sums`:
// bias_parts(rows) x width floats.
std::int64_t bias_parts(std::int64_t rows);
void bias_gradient(Precision precision, const void* dy, std::int64_t rows, std::int64_t stride,
                   std::int64_t width, float* sums, Values out, cudaStream_t stream);

// Queries and keys as attention wants them: each head normed by itself where there are weights (RMS, Zhang & Sennrich,
// 1910.07467), then rotated by its position (Su et al., 2104.09864; value i with value i + head_width / 2, as Hugging Face
// lays them out). Values are copied. `to` may be `qkv`.
struct RopeShape {
  std::int64_t rows;
  int heads, kv_heads, head_width;
  const std::int32_t* positions;
  const float* rotation;  // for each position cosines, then sines, of head_width / 2 angles; nullptr: no rope
  Values query_norm, key_norm;  // no data: not normed
  float epsilon;
};
void rope(Precision precision, const RopeShape& shape, const void* qkv, void* to, cudaStream_t stream);
// dqkv, in place, from the gradient of what rope() gave to that of `qkv`. `sums`, rope_parts(shape) x 2 x head_width
// floats, take parts of the gradients of both norms, query's first; used only where there are norms.
std::int64_t rope_parts(const RopeShape& shape);
void rope_backward(Precision precision, const RopeShape& shape, const void* qkv, void* dqkv, float* sums,
                   cudaStream_t stream);

// GELU in its tanh form of `inner` values (Hendrycks & Gimpel, 1606.08415), or SiLU of the left half of 2 inner values
// times the right half (Shazeer, 2002.05202).
void activate(Precision precision, Mlp mlp, const void* expanded, std::int64_t rows, std::int64_t inner,
              void* activated, cudaStream_t stream);
// The gradient of `expanded` from that of `activated`. dexpanded may be `expanded`, and for GELU `dactivated`.
void activate_backward(Precision precision, Mlp mlp, const void* dactivated, const void* expanded,
                       std::int64_t rows, std::int64_t inner, void* dexpanded, cudaStream_t stream);

// losses[row] = -log softmax(logits[row])[target], 0 where the target is below 0. Rows are `stride` values apart.
// Where `scale` is given (one float in device memory), logits become *scale (softmax(logits) - [target]), and 0 where the
// target is below 0 and in the columns from `vocabulary` to `stride`.
void cross_entropy(Precision precision, void* logits, std::int64_t rows, std::int64_t vocabulary,
                   std::int64_t stride, const std::int32_t* targets, const float* scale, float* losses,
                   cudaStream_t stream);
// *sum = their sum in double.
void sum_losses(const float* losses, std::int64_t rows, double* sum, cudaStream_t stream);

}  // namespace scruple::train::cuda
