// The layers of a model, forward and backward, over activations that are stored in 16 or 32 bits. Work is cut
// into pieces by shape alone, never by the number of threads, and every sum has a fixed order: the bits are
// the same on any number.
#pragma once

#include <algorithm>
#include <functional>
#include <mutex>
#include <span>
#include <vector>

#include "engine/threads.h"
#include "train/cpu/blas.h"
#include "train/cpu/transformer.h"
#include "train/pass/ledger.h"

namespace scruple::train {

// ---- Where work runs ----

inline constexpr Index kChunk = 128;         // tokens to a piece of work
inline constexpr Index kQueries = 64;        // queries whose attention weights exist at a time
inline constexpr Index kHeadColumns = 1024;  // logits computed at a time
inline constexpr Index kDepth = 256;         // tokens decoded at a time for a weight's gradient

inline Index chunks_of(Index rows) { return (rows + kChunk - 1) / kChunk; }

// Scratch memory for one piece of work; taken when it starts, given back when it ends.
class Workspace {
 public:
  Workspace(Ledger& ledger, int slots, Index floats);
  float* take();
  void give(float* slot);

 private:
  Block memory_;
  std::mutex mutex_;
  std::vector<float*> free_;
};

class Arena {
 public:
  explicit Arena(Workspace& from) : from_(from), slot_(from.take()), next_(slot_) {}
  ~Arena() { from_.give(slot_); }
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;
  // Not cleared. Scratch that a layer's fp32 path does not touch costs address space only.
  float* floats(Index count);
  // What was taken so far may be taken again.
  void start_again() { next_ = slot_; }

 private:
  Workspace& from_;
  float *slot_, *next_;
};

struct Workers {
  Threads& threads;
  Workspace& workspace;
  void pieces(Index count, const std::function<void(Index, Arena&)>& piece) const;
  // piece(first, count, arena) over chunks of rows.
  void chunks(Index rows, const std::function<void(Index, Index, Arena&)>& piece) const;
};

// Floats of scratch that the largest piece of any layer takes.
Index workspace_of(const Description& model);

// ---- Activations ----

// A matrix of activations. It is read and written in blocks of fp32: in place where it is fp32, else
// through scratch.
class Matrix {
 public:
  Matrix() = default;
  Matrix(Ledger& ledger, Precision precision, Index rows, Index columns);

  Index columns() const { return columns_; }
  View read(Index row, Index rows, Index column, Index columns, float* scratch) const;
  // A block to be written in full, and then kept.
  Target open(Index row, Index column, Index columns, float* scratch);
  void clear();
  void keep(Index row, Index rows, Index column, Index columns, Target values);

 private:
  float* place(Index row, Index column) const { return memory_.as<float>() + row * columns_ + column; }
  u16* code(Index row, Index column) const { return memory_.as<u16>() + row * columns_ + column; }

  Block memory_;
  Precision precision_ = Precision::fp32;
  Index columns_ = 0;
};

// Mean and 1 / deviation of each row, as its norm wants them: RMS norm takes the mean to be 0.
struct Statistics {
  Statistics(Ledger& ledger, const Description& model, Index rows);
  float* mean() const { return memory.as<float>(); }
  float* rstd() const { return memory.as<float>() + rows; }
  Block memory;
  Index rows;
  NormKind kind;
  float epsilon;
};

// Where a linear layer's input comes from: activations as they were stored, or what is cheaper to compute
// again than to keep.
struct Source {
  virtual ~Source() = default;
  virtual View read(Index row, Index rows, Index column, Index columns, float* scratch) const = 0;
};

struct Stored final : Source {
  explicit Stored(const Matrix& m) : matrix(m) {}
  View read(Index row, Index rows, Index column, Index columns, float* scratch) const override;
  const Matrix& matrix;
};

// Row r of a view, copied to `scratch` unless the view is there already. The loop that follows can then work
// in place: compilers vectorise that, but not a loop over two pointers that may be equal.
inline float* in_scratch(View view, Index r, Index columns, float* scratch) {
  float* to = scratch + r * columns;
  if (view.data != scratch) std::copy_n(view.data + r * view.stride, columns, to);
  return to;
}

// A norm's weight and bias; RMS norm has no bias.
struct Norm {
  const float *weight, *bias;
};

struct Normed final : Source {
  Normed(const Matrix& m, const Statistics& s, Norm n) : matrix(m), statistics(s), norm(n) {}
  View read(Index row, Index rows, Index column, Index columns, float* scratch) const override;
  const Matrix& matrix;
  const Statistics& statistics;
  Norm norm;
};

// GELU of the values, or SiLU of the left half of each row times the right half.
struct Activated final : Source {
  Activated(const Matrix& m, Mlp k) : matrix(m), kind(k) {}
  View read(Index row, Index rows, Index column, Index columns, float* scratch) const override;
  const Matrix& matrix;
  Mlp kind;
};

// ---- Forward ----

struct Linear {
  Index in, out;
  Index column;                // of its first output in y
  const float *weight, *bias;  // no bias: nullptr, as in the backward pass, which needs none
  bool outputs_first;          // the weight lies [out, in], else [in, out]
};

// x = token embedding + position embedding, where there is a table of positions.
void embed(const Workers& workers, const std::int32_t* tokens, const std::int32_t* positions, Index rows,
           const float* token_table, const float* position_table, Matrix& x, Statistics& statistics);
// y = x w + b, for each of the layers.
void linear(const Workers& workers, const Source& x, std::span<const Linear> layers, Index rows, Matrix& y);
// y = residual + x w + b, and the statistics of y's rows for the norm that follows.
void linear_residual(const Workers& workers, const Source& x, const Linear& layer, Index rows,
                     const Matrix& residual, Matrix& y, Statistics& statistics);

struct Attention {
  Index sequences, length, heads, kv_heads, head_width;
  const std::int32_t* positions;       // of each row in its document, which begins at 0
  const float* rotation;               // cosines and sines (rope_table), or nullptr
  const float *query_norm, *key_norm;  // weights of RMS norms, or nullptr
  float epsilon;
  Index group() const { return heads / kv_heads; }
  Index query(Index head) const { return head * head_width; }  // columns of `qkv`
  Index key(Index kv_head) const { return (heads + kv_head) * head_width; }
  Index value(Index kv_head) const { return (heads + kv_heads + kv_head) * head_width; }
};
// Causal attention of `qkv` (queries, keys and values beside each other) into `y`, a column for each query;
// each document of a sequence by itself. Keys and queries are normed and rotated as they are read. Keeps the
// logarithm of each softmax's sum.
void attend(const Workers& workers, const Attention& shape, const Matrix& qkv, Matrix& y, float* log_sums);
// Keys as attention sees them, and values: [context, head_width] for each key-value head.
struct Cache {
  float *keys, *values;
  Index context, length;  // rows for each head, and how many are there
};
// Attention of one sequence to what is in the cache and to itself; its keys and values are added.
void attend_cached(const Workers& workers, const Attention& shape, const Matrix& qkv, const Cache& cache,
                   Matrix& y);

// Rows of the model that have a target: the head computes with these alone.
struct Counted {
  const std::int32_t* at;  // ascending
  Index count;
};
// The final norm of these rows, one after the other into `hidden`.
void norm_forward(const Workers& workers, const Normed& x, Counted rows, Matrix& hidden);

// The output head: logits = hidden table^T.
struct Head {
  const Matrix& hidden;
  const float* table;  // [vocabulary, width]
  Index vocabulary;
  const std::int32_t* targets;
  Counted rows;
  float* log_sums;  // log sum exp(logits), per row
};
// Small vocabularies keep their logits for backward. For larger ones [rows, vocabulary] values never exist at
// once: logits are computed in pieces, and once more for each tile of the table's gradient.
inline bool keeps_logits(const Description& model) { return model.vocabulary <= kHeadColumns; }
// The sum of -log softmax(logits)[target] over the rows; logits are rounded before the loss sees them.
double head(const Workers& workers, const Head& head, Matrix& logits, double* chunk_losses);
// The same without `logits`. Leaves the gradient of each row's loss in its row of `g`, if there is one to write to.
double head_in_pieces(const Workers& workers, const Head& head, Matrix* g, double* chunk_losses);

// ---- Backward ----

// logits = (softmax(logits) - [target]) scale, then `g` = the gradient of the norm's input, in rows that count; the norm's
// own gradient is left in `sums`, for each chunk of these.
void head_backward(const Workers& workers, const Head& head, float scale, Matrix& logits, const Normed& x,
                   Matrix& g, float* sums);
// From what head_in_pieces left in `g`, times `scale`, to the same.
void head_in_pieces_backward(const Workers& workers, Counted rows, float scale, const Normed& x, Matrix& g,
                             float* sums);
// dx = g w^T.
void linear_backward(const Workers& workers, const Matrix& g, const Linear& layer, Index rows, Matrix& dx);
// dx = the gradient of what `x` activates, whose own is g w^T.
void activated_backward(const Workers& workers, const Matrix& g, const Linear& layer, Index rows,
                        const Activated& x, Matrix& dx);
// residual += the gradient of the input of the norm before `layers`, whose output's gradient is the sum of
// each layer's g w^T.
void normed_backward(const Workers& workers, const Matrix& g, std::span<const Linear> layers, Index rows,
                     const Normed& x, Matrix& residual, float* sums);
// Leaves the gradients of both head norms, where there are any, in `sums`.
void attend_backward(const Workers& workers, const Attention& shape, const Matrix& qkv, const Matrix& y,
                     const float* log_sums, const Matrix& dy, Matrix& dqkv, float* sums);

// ---- Gradients of parameters ----

// Columns of a matrix of activations, or of one that is computed from it.
struct Part {
  const Source& source;
  Index column, columns;
};
// The root of the sum of its squares; not finite where one of it is not, or where the sum is too large for fp32.
double frobenius_norm(const Workers& workers, const Part& part, Index tokens);
// Rows [first, first + rows) of a^T b.
void weight_gradient(const Workers& workers, const Part& a, const Part& b, Index tokens, Index first,
                     Index rows, float* tile);
// Rows [first, first + rows) of the gradient of the head's table, of logits that were not kept. Reads these rows
// of the table and no others.
void head_gradient(const Workers& workers, const Head& head, float scale, Index first, Index rows,
                   float* tile);
// The sum of g's rows.
void bias_gradient(const Workers& workers, const Matrix& g, Index tokens, Index first, Index count,
                   float* tile);
// `sums` holds two rows of `width` (weight and bias; of head norms those of the queries and the keys) for
// each of `parts`: chunks of tokens, or groups of heads.
void norm_gradient(const float* sums, Index parts, Index width, bool second, Index first, Index count,
                   float* tile);
// Adds g's rows to those of a table that they were read from: tokens, or positions.
void embedding_gradient(const Workers& workers, const Matrix& g, const std::int32_t* read_from, Index count,
                        Index first, Index rows, float* tile);

}  // namespace scruple::train
