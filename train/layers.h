// The layers of a model, forward and backward, over activations that are stored in 16 or 32 bits. Work is cut
// into pieces by shape alone, never by the number of threads, and every sum has a fixed order: the bits are
// the same on any number.
#pragma once

#include <functional>
#include <mutex>
#include <vector>

#include "engine/threads.h"
#include "train/blas.h"
#include "train/ledger.h"
#include "train/transformer.h"

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
  Workspace(Ledger& ledger, int lots, Index floats);
  float* take();
  void give(float* lot);

 private:
  Block memory_;
  std::mutex mutex_;
  std::vector<float*> free_;
};

class Lease {
 public:
  explicit Lease(Workspace& from) : from_(from), lot_(from.take()), next_(lot_) {}
  ~Lease() { from_.give(lot_); }
  Lease(const Lease&) = delete;
  Lease& operator=(const Lease&) = delete;
  // Not cleared. Scratch that a layer's fp32 path does not touch costs address space only.
  float* floats(Index count);

 private:
  Workspace& from_;
  float *lot_, *next_;
};

struct Crew {
  Threads& threads;
  Workspace& workspace;
  void pieces(Index count, const std::function<void(Index, Lease&)>& piece) const;
  // piece(first, count, lease) over chunks of rows.
  void chunks(Index rows, const std::function<void(Index, Index, Lease&)>& piece) const;
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
  void keep(Index row, Index rows, Index column, Index columns, Target values);

 private:
  float* place(Index row, Index column) const { return memory_.as<float>() + row * columns_ + column; }
  u16* code(Index row, Index column) const { return memory_.as<u16>() + row * columns_ + column; }

  Block memory_;
  Precision precision_ = Precision::fp32;
  Index columns_ = 0;
};

// Mean and 1 / deviation of each row.
struct Statistics {
  Statistics() = default;
  Statistics(Ledger& ledger, Index rows);
  float* mean() const { return memory.as<float>(); }
  float* rstd() const { return memory.as<float>() + rows; }
  Block memory;
  Index rows = 0;
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

// A layer norm's weight and bias (Ba et al., 1607.06450).
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

struct Activated final : Source {  // by GELU
  explicit Activated(const Matrix& m) : matrix(m) {}
  View read(Index row, Index rows, Index column, Index columns, float* scratch) const override;
  const Matrix& matrix;
};

// ---- Forward ----

struct Linear {
  Index in, out;
  const float *weight, *bias;  // [in, out] as Hugging Face's Conv1D; the backward pass needs no bias
};

// x = token embedding + position embedding.
void embed(const Crew& crew, const std::int32_t* tokens, Index rows, Index length, const float* token_table,
           const float* position_table, Matrix& x, Statistics& statistics);
// y = x w + b.
void linear(const Crew& crew, const Source& x, const Linear& layer, Index rows, Matrix& y);
// y = residual + x w + b, and the statistics of y's rows for the norm that follows.
void linear_residual(const Crew& crew, const Source& x, const Linear& layer, Index rows,
                     const Matrix& residual, Matrix& y, Statistics& statistics);

struct Attention {
  Index sequences, length, heads, width;
  Index head_width() const { return width / heads; }
};
// Causal attention of `qkv` [rows, 3 width] into `y` [rows, width]. Keeps the logarithm of each softmax's
// sum.
void attend(const Crew& crew, const Attention& shape, const Matrix& qkv, Matrix& y, float* log_sums);

// The final norm, into `hidden`.
void normalise(const Crew& crew, const Normed& x, Index rows, Matrix& hidden);
// The sum of -log softmax(hidden table^T)[target] over the rows; logits are rounded before the loss sees
// them.
double head(const Crew& crew, const Matrix& hidden, const float* table, const std::int32_t* targets,
            Index rows, Matrix& logits, float* log_sums, double* chunk_losses);

// ---- Backward ----

// logits = (softmax(logits) - [target]) scale, then `g` = the gradient of the norm's input; the norm's own
// gradient is left in `sums`.
void head_backward(const Crew& crew, const float* table, const std::int32_t* targets, Index rows, float scale,
                   const float* log_sums, Matrix& logits, const Normed& x, Matrix& g, float* sums);
// dx = g w^T.
void linear_backward(const Crew& crew, const Matrix& g, const Linear& layer, Index rows, Matrix& dx);
// dx = g w^T gelu'(x).
void activated_backward(const Crew& crew, const Matrix& g, const Linear& layer, Index rows, const Matrix& x,
                        Matrix& dx);
// residual += the gradient of the input of the norm before `layer`, whose output's gradient is g w^T.
void normed_backward(const Crew& crew, const Matrix& g, const Linear& layer, Index rows, const Normed& x,
                     Matrix& residual, float* sums);
void attend_backward(const Crew& crew, const Attention& shape, const Matrix& qkv, const Matrix& y,
                     const float* log_sums, const Matrix& dy, Matrix& dqkv);

// ---- Gradients of parameters ----

// x^T g
void weight_gradient(const Crew& crew, const Source& x, const Matrix& g, Index tokens, Index first,
                     Index rows, float* tile);
// The sum of g's rows.
void bias_gradient(const Crew& crew, const Matrix& g, Index tokens, Index first, Index count, float* tile);
// `sums` holds two rows (weight, bias) of `width` per chunk of tokens.
void norm_gradient(const float* sums, Index tokens, Index width, bool bias, Index first, Index count,
                   float* tile);
void position_gradient(const Crew& crew, const Matrix& g, Index sequences, Index length, Index first,
                       Index rows, float* tile);
// Adds g's rows to those of the tokens that they stand for.
void token_gradient(const Crew& crew, const Matrix& g, const std::int32_t* tokens, Index count, Index first,
                    Index rows, float* tile);

}  // namespace scruple::train
