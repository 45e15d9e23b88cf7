#include "train/layers.h"

#include <algorithm>
#include <cmath>

#include "formats/bf16.h"
#include "formats/fp16.h"
#include "train/math.h"

namespace scruple::train {
namespace {

constexpr float kEpsilon = 1e-5f;                      // of the norms
constexpr Index kLine = 16;                            // floats to a cache line
constexpr Index kTileRows = 128, kTileColumns = 1024;  // of a weight's gradient to a piece of work, at most

Index padded(Index floats) { return (floats + kLine - 1) / kLine * kLine; }

}  // namespace

// ---- Where work runs ----

Workspace::Workspace(Ledger& ledger, int lots, Index floats)
    : memory_(ledger, "workspace", lots * padded(floats) * static_cast<Index>(sizeof(float))) {
  for (int i = 0; i < lots; ++i) free_.push_back(memory_.as<float>() + i * padded(floats));
}

float* Workspace::take() {
  const std::lock_guard lock(mutex_);
  float* lot = free_.back();
  free_.pop_back();
  return lot;
}

void Workspace::give(float* lot) {
  const std::lock_guard lock(mutex_);
  free_.push_back(lot);
}

float* Lease::floats(Index count) {
  float* here = next_;
  next_ += padded(count);
  return here;
}

void Crew::pieces(Index count, const std::function<void(Index, Lease&)>& piece) const {
  threads.run(count, [&](i64 i) {
    Lease lease(workspace);
    piece(i, lease);
  });
}

void Crew::chunks(Index rows, const std::function<void(Index, Index, Lease&)>& piece) const {
  pieces(chunks_of(rows),
         [&](Index i, Lease& lease) { piece(i * kChunk, std::min(kChunk, rows - i * kChunk), lease); });
}

Index workspace_of(const Description& model) {
  const Index width = padded(model.width), wide = padded(model.inner), head_width = padded(model.head_width);
  const Index length = padded(model.context), vocabulary = padded(model.vocabulary);
  const Index chunk = kChunk * (2 * wide + 3 * width);  // activated_backward takes the most
  const Index head = kChunk * (3 * width + std::min(kHeadColumns, vocabulary)) + vocabulary;
  const Index attention = 6 * length * head_width + 2 * kQueries * length + 4 * kQueries * head_width;
  const Index gradient = kDepth * (kTileRows + std::min(kTileColumns, wide));
  return std::max({chunk, head, attention, gradient}) + 16 * kLine;
}

// ---- Activations ----

Matrix::Matrix(Ledger& ledger, Precision precision, Index rows, Index columns)
    : memory_(ledger, "activations", rows * columns * (precision == Precision::fp32 ? 4 : 2)),
      precision_(precision),
      columns_(columns) {}

View Matrix::read(Index row, Index rows, Index column, Index columns, float* scratch) const {
  if (precision_ == Precision::fp32) return {place(row, column), columns_};
  for (Index r = 0; r < rows; ++r) {
    const u16* __restrict from = code(row + r, column);
    float* __restrict to = scratch + r * columns;
    if (precision_ == Precision::bf16)
      for (Index i = 0; i < columns; ++i) to[i] = Bf16::decode(from[i]);
    else
      for (Index i = 0; i < columns; ++i) to[i] = Fp16::decode(from[i]);
  }
  return {scratch, columns};
}

Target Matrix::open(Index row, Index column, Index columns, float* scratch) {
  if (precision_ == Precision::fp32) return {place(row, column), columns_};
  return {scratch, columns};
}

// Overflow must stay visible to loss scaling: no saturation, and a NaN is written as one that survives
// rounding.
void Matrix::keep(Index row, Index rows, Index column, Index columns, Target values) {
  if (precision_ == Precision::fp32) return;
  for (Index r = 0; r < rows; ++r) {
    const float* __restrict from = values.data + r * values.stride;
    u16* __restrict to = code(row + r, column);
    if (precision_ == Precision::bf16)
      for (Index i = 0; i < columns; ++i) to[i] = Bf16::nearest(canonical(from[i]));
    else
      for (Index i = 0; i < columns; ++i) to[i] = Fp16::ieee(from[i]);
  }
}

Statistics::Statistics(Ledger& ledger, Index count)
    : memory(ledger, "activations", 2 * count * static_cast<Index>(sizeof(float))), rows(count) {}

View Stored::read(Index row, Index rows, Index column, Index columns, float* scratch) const {
  return matrix.read(row, rows, column, columns, scratch);
}

namespace {

// Row r of a view that may be in `scratch` already. Loops that work in place vectorise; those over two
// pointers that turn out to be equal do not.
float* in_scratch(View view, Index r, Index columns, float* scratch) {
  float* to = scratch + r * columns;
  if (view.data != scratch) std::copy_n(view.data + r * view.stride, columns, to);
  return to;
}

}  // namespace

View Normed::read(Index row, Index rows, Index column, Index columns, float* scratch) const {
  const View x = matrix.read(row, rows, column, columns, scratch);
  const float *weight = norm.weight + column, *bias = norm.bias + column;
  for (Index r = 0; r < rows; ++r) {
    const float mean = statistics.mean()[row + r], rstd = statistics.rstd()[row + r];
    float* to = in_scratch(x, r, columns, scratch);
    for (Index i = 0; i < columns; ++i) to[i] = (to[i] - mean) * rstd * weight[i] + bias[i];
  }
  return {scratch, columns};
}

View Activated::read(Index row, Index rows, Index column, Index columns, float* scratch) const {
  const View x = matrix.read(row, rows, column, columns, scratch);
  for (Index r = 0; r < rows; ++r) {
    float* to = in_scratch(x, r, columns, scratch);
    for (Index i = 0; i < columns; ++i) to[i] = gelu(to[i]);
  }
  return {scratch, columns};
}

namespace {

// Of the values as stored, so that the backward pass sees the function that was computed.
void measure(const Matrix& x, Index first, Index rows, float* scratch, Statistics& statistics) {
  const Index width = x.columns();
  const View view = x.read(first, rows, 0, width, scratch);
  for (Index r = 0; r < rows; ++r) {
    const float* row = view.data + r * view.stride;
    const float mean = sum_of(width, [&](Index i) { return row[i]; }) / static_cast<float>(width);
    const float squares = sum_of(width, [&](Index i) { return (row[i] - mean) * (row[i] - mean); });
    statistics.mean()[first + r] = mean;
    statistics.rstd()[first + r] = 1.0f / std::sqrt(squares / static_cast<float>(width) + kEpsilon);
  }
}

}  // namespace

// ---- Forward ----

void embed(const Crew& crew, const std::int32_t* tokens, Index rows, Index length, const float* token_table,
           const float* position_table, Matrix& x, Statistics& statistics) {
  const Index width = x.columns();
  crew.chunks(rows, [&](Index first, Index count, Lease& lease) {
    float* scratch = lease.floats(count * width);
    const Target out = x.open(first, 0, width, scratch);
    for (Index r = 0; r < count; ++r) {
      const float* token = token_table + tokens[first + r] * width;
      const float* position = position_table + (first + r) % length * width;
      float* to = out.data + r * out.stride;
      for (Index i = 0; i < width; ++i) to[i] = token[i] + position[i];
    }
    x.keep(first, count, 0, width, out);
    measure(x, first, count, scratch, statistics);
  });
}

void linear(const Crew& crew, const Source& x, const Linear& layer, Index rows, Matrix& y) {
  crew.chunks(rows, [&](Index first, Index count, Lease& lease) {
    const View in = x.read(first, count, 0, layer.in, lease.floats(count * layer.in));
    const Target out = y.open(first, 0, layer.out, lease.floats(count * layer.out));
    for (Index r = 0; r < count; ++r) std::copy_n(layer.bias, layer.out, out.data + r * out.stride);
    product(count, layer.out, layer.in, 1, in, View{layer.weight, layer.out}, 1, out);
    y.keep(first, count, 0, layer.out, out);
  });
}

void linear_residual(const Crew& crew, const Source& x, const Linear& layer, Index rows,
                     const Matrix& residual, Matrix& y, Statistics& statistics) {
  crew.chunks(rows, [&](Index first, Index count, Lease& lease) {
    const View in = x.read(first, count, 0, layer.in, lease.floats(count * layer.in));
    const View old = residual.read(first, count, 0, layer.out, lease.floats(count * layer.out));
    float* scratch = lease.floats(count * layer.out);
    const Target out = y.open(first, 0, layer.out, scratch);
    for (Index r = 0; r < count; ++r) {
      const float* from = old.data + r * old.stride;
      float* to = out.data + r * out.stride;
      for (Index i = 0; i < layer.out; ++i) to[i] = from[i] + layer.bias[i];
    }
    product(count, layer.out, layer.in, 1, in, View{layer.weight, layer.out}, 1, out);
    y.keep(first, count, 0, layer.out, out);
    measure(y, first, count, scratch, statistics);
  });
}

namespace {

// One head of one sequence: its queries, keys and values, [length, head_width] each.
struct Head {
  Head(const Attention& s, const Matrix& qkv, Index piece, Lease& lease)
      : shape(s), row(piece / s.heads * s.length), column(piece % s.heads * s.head_width()), number(piece) {
    const Index width = shape.head_width(), size = shape.length * width;
    q = qkv.read(row, shape.length, column, width, lease.floats(size));
    k = qkv.read(row, shape.length, shape.width + column, width, lease.floats(size));
    v = qkv.read(row, shape.length, 2 * shape.width + column, width, lease.floats(size));
    scale = 1.0f / std::sqrt(static_cast<float>(width));
  }
  View query(Index first) const { return {q.data + first * q.stride, q.stride}; }
  float* log_sums(float* all) const { return all + number * shape.length; }
  const float* log_sums(const float* all) const { return all + number * shape.length; }

  const Attention& shape;
  Index row, column, number;
  View q{}, k{}, v{};
  float scale;
};

// Softmax of queries first, first + 1... over the keys that each may see; the rest of a row is cleared for
// the products.
void causal_softmax(Target scores, Index first, Index count, float* log_sums) {
  for (Index r = 0; r < count; ++r) {
    float* row = scores.data + r * scores.stride;
    const Index seen = first + r + 1;
    const float top = largest_of(row, seen);
    for (Index i = 0; i < seen; ++i) row[i] = exp_of(row[i] - top);
    const float sum = sum_of(seen, [&](Index i) { return row[i]; });
    const float inverse = 1.0f / sum;
    for (Index i = 0; i < seen; ++i) row[i] *= inverse;
    std::fill(row + seen, row + first + count, 0.0f);
    log_sums[first + r] = top + std::log(sum);
  }
}

}  // namespace

// softmax(q k^T / sqrt(d)) v (Vaswani et al., 1706.03762, eq. 1), a few queries at a time.
void attend(const Crew& crew, const Attention& shape, const Matrix& qkv, Matrix& y, float* log_sums) {
  const Index width = shape.head_width();
  crew.pieces(shape.sequences * shape.heads, [&](Index piece, Lease& lease) {
    const Head head(shape, qkv, piece, lease);
    const Target scores = {lease.floats(kQueries * shape.length), shape.length};
    float* scratch = lease.floats(kQueries * width);
    for (Index first = 0; first < shape.length; first += kQueries) {
      const Index count = std::min(kQueries, shape.length - first), seen = first + count;
      product(count, seen, width, head.scale, head.query(first), transposed(head.k), 0, scores);
      causal_softmax(scores, first, count, head.log_sums(log_sums));
      const Target out = y.open(head.row + first, head.column, width, scratch);
      product(count, width, seen, 1, scores, head.v, 0, out);
      y.keep(head.row + first, count, head.column, width, out);
    }
  });
}

void normalise(const Crew& crew, const Normed& x, Index rows, Matrix& hidden) {
  const Index width = hidden.columns();
  crew.chunks(rows, [&](Index first, Index count, Lease& lease) {
    const View values = x.read(first, count, 0, width, lease.floats(count * width));
    const Target out = hidden.open(first, 0, width, lease.floats(count * width));
    for (Index r = 0; r < count; ++r)
      std::copy_n(values.data + r * values.stride, width, out.data + r * out.stride);
    hidden.keep(first, count, 0, width, out);
  });
}

double head(const Crew& crew, const Matrix& hidden, const float* table, const std::int32_t* targets,
            Index rows, Matrix& logits, float* log_sums, double* chunk_losses) {
  const Index width = hidden.columns(), vocabulary = logits.columns();
  crew.chunks(rows, [&](Index first, Index count, Lease& lease) {
    const View in = hidden.read(first, count, 0, width, lease.floats(count * width));
    float* scratch = lease.floats(count * std::min(kHeadColumns, vocabulary));
    for (Index column = 0; column < vocabulary; column += kHeadColumns) {
      const Index columns = std::min(kHeadColumns, vocabulary - column);
      const Target out = logits.open(first, column, columns, scratch);
      product(count, columns, width, 1, in, transposed({table + column * width, width}), 0, out);
      logits.keep(first, count, column, columns, out);
    }
    float* line = lease.floats(vocabulary);
    double loss = 0;
    for (Index r = 0; r < count; ++r) {
      const float* row = logits.read(first + r, 1, 0, vocabulary, line).data;
      const float top = largest_of(row, vocabulary);
      const float sum = sum_of(vocabulary, [&](Index i) { return exp_of(row[i] - top); });
      const double log_sum = static_cast<double>(top) + std::log(static_cast<double>(sum));
      log_sums[first + r] = static_cast<float>(log_sum);
      loss += log_sum - static_cast<double>(row[targets[first + r]]);
    }
    chunk_losses[first / kChunk] = loss;
  });
  double total = 0;
  for (Index i = 0; i < chunks_of(rows); ++i) total += chunk_losses[i];
  return total;
}

// ---- Backward ----

namespace {

// The backward pass of layer norm (Ba et al., 1607.06450, eq. 4), per row: with h = (x - mean) rstd and a =
// g weight, dx = rstd (a - mean(a) - h mean(a h)). Adds g h and g to the chunk's two rows of `sums`.
void norm_row(const float* __restrict x, float mean, float rstd, const float* __restrict weight,
              const float* __restrict g, Index width, bool add, float* __restrict dx,
              float* __restrict sums) {
  const auto h = [&](Index i) { return (x[i] - mean) * rstd; };
  const float n = static_cast<float>(width);
  const float mean_a = sum_of(width, [&](Index i) { return g[i] * weight[i]; }) / n;
  const float mean_ah = sum_of(width, [&](Index i) { return g[i] * weight[i] * h(i); }) / n;
  for (Index i = 0; i < width; ++i) sums[i] += g[i] * h(i);
  for (Index i = 0; i < width; ++i) sums[width + i] += g[i];
  if (!add) std::fill_n(dx, width, 0.0f);
  for (Index i = 0; i < width; ++i) dx[i] += rstd * (g[i] * weight[i] - mean_a - h(i) * mean_ah);
}

// `out` gets the gradient of the norm's input, on top of what it holds where `add`.
void norm_rows(const Normed& x, Index first, Index count, View g, bool add, Matrix& out, float* sums,
               Lease& lease) {
  const Index width = out.columns();
  const View in = x.matrix.read(first, count, 0, width, lease.floats(count * width));
  float* scratch = lease.floats(count * width);
  out.read(first, count, 0, width, scratch);
  const Target to = out.open(first, 0, width, scratch);  // the same place
  float* own = sums + first / kChunk * 2 * width;
  std::fill_n(own, 2 * width, 0.0f);
  for (Index r = 0; r < count; ++r)
    norm_row(in.data + r * in.stride, x.statistics.mean()[first + r], x.statistics.rstd()[first + r],
             x.norm.weight, g.data + r * g.stride, width, add, to.data + r * to.stride, own);
  out.keep(first, count, 0, width, to);
}

void softmax_gradient(Matrix& logits, Index row, Index target, float scale, float log_sum, float* scratch) {
  const Index vocabulary = logits.columns();
  logits.read(row, 1, 0, vocabulary, scratch);
  const Target out = logits.open(row, 0, vocabulary, scratch);  // the same place
  float* values = out.data;
  const float at_target = (exp_of(values[target] - log_sum) - 1.0f) * scale;
  for (Index i = 0; i < vocabulary; ++i) values[i] = exp_of(values[i] - log_sum) * scale;
  values[target] = at_target;
  logits.keep(row, 1, 0, vocabulary, out);
}

}  // namespace

void head_backward(const Crew& crew, const float* table, const std::int32_t* targets, Index rows, float scale,
                   const float* log_sums, Matrix& logits, const Normed& x, Matrix& g, float* sums) {
  const Index width = g.columns(), vocabulary = logits.columns();
  crew.chunks(rows, [&](Index first, Index count, Lease& lease) {
    float* line = lease.floats(vocabulary);
    for (Index r = first; r < first + count; ++r)
      softmax_gradient(logits, r, targets[r], scale, log_sums[r], line);
    float* scratch = lease.floats(count * std::min(kHeadColumns, vocabulary));
    const Target dh = {lease.floats(count * width), width};
    for (Index column = 0; column < vocabulary; column += kHeadColumns) {
      const Index columns = std::min(kHeadColumns, vocabulary - column);
      const View part = logits.read(first, count, column, columns, scratch);
      product(count, width, columns, 1, part, View{table + column * width, width}, column == 0 ? 0.0f : 1.0f,
              dh);
    }
    norm_rows(x, first, count, dh, false, g, sums, lease);
  });
}

void linear_backward(const Crew& crew, const Matrix& g, const Linear& layer, Index rows, Matrix& dx) {
  crew.chunks(rows, [&](Index first, Index count, Lease& lease) {
    const View dy = g.read(first, count, 0, layer.out, lease.floats(count * layer.out));
    const Target out = dx.open(first, 0, layer.in, lease.floats(count * layer.in));
    product(count, layer.in, layer.out, 1, dy, transposed({layer.weight, layer.out}), 0, out);
    dx.keep(first, count, 0, layer.in, out);
  });
}

void activated_backward(const Crew& crew, const Matrix& g, const Linear& layer, Index rows, const Matrix& x,
                        Matrix& dx) {
  crew.chunks(rows, [&](Index first, Index count, Lease& lease) {
    const View dy = g.read(first, count, 0, layer.out, lease.floats(count * layer.out));
    const View in = x.read(first, count, 0, layer.in, lease.floats(count * layer.in));
    const Target out = dx.open(first, 0, layer.in, lease.floats(count * layer.in));
    product(count, layer.in, layer.out, 1, dy, transposed({layer.weight, layer.out}), 0, out);
    for (Index r = 0; r < count; ++r) {
      const float* __restrict from = in.data + r * in.stride;
      float* __restrict to = out.data + r * out.stride;
      for (Index i = 0; i < layer.in; ++i) to[i] *= gelu_slope(from[i]);
    }
    dx.keep(first, count, 0, layer.in, out);
  });
}

void normed_backward(const Crew& crew, const Matrix& g, const Linear& layer, Index rows, const Normed& x,
                     Matrix& residual, float* sums) {
  crew.chunks(rows, [&](Index first, Index count, Lease& lease) {
    const View dy = g.read(first, count, 0, layer.out, lease.floats(count * layer.out));
    const Target dh = {lease.floats(count * layer.in), layer.in};
    product(count, layer.in, layer.out, 1, dy, transposed({layer.weight, layer.out}), 0, dh);
    norm_rows(x, first, count, dh, true, residual, sums, lease);
  });
}

namespace {

// p = softmax from the kept sums; ds = p (dp - sum_j p_j dp_j) / sqrt(d), where that sum is dy . y (Dao et
// al., 2205.14135, appendix B.2). `scores` becomes p and `dp` becomes ds; both are cleared where nothing is
// seen.
void softmax_backward(Target scores, Target dp, Index first, Index count, const float* log_sums, View y,
                      View dy, Index width, float scale) {
  for (Index r = 0; r < count; ++r) {
    float *p = scores.data + r * scores.stride, *ds = dp.data + r * dp.stride;
    const float *a = y.data + r * y.stride, *b = dy.data + r * dy.stride;
    const float mean = sum_of(width, [&](Index i) { return a[i] * b[i]; }), log_sum = log_sums[first + r];
    const Index seen = first + r + 1;
    for (Index i = 0; i < seen; ++i) p[i] = exp_of(p[i] - log_sum);
    for (Index i = 0; i < seen; ++i) ds[i] = p[i] * (ds[i] - mean) * scale;
    std::fill(p + seen, p + first + count, 0.0f);
    std::fill(ds + seen, ds + first + count, 0.0f);
  }
}

}  // namespace

void attend_backward(const Crew& crew, const Attention& shape, const Matrix& qkv, const Matrix& y,
                     const float* log_sums, const Matrix& dy, Matrix& dqkv) {
  const Index width = shape.head_width(), length = shape.length;
  crew.pieces(shape.sequences * shape.heads, [&](Index piece, Lease& lease) {
    const Head head(shape, qkv, piece, lease);
    const Target p = {lease.floats(kQueries * length), length},
                 dp = {lease.floats(kQueries * length), length};
    const Target dk = dqkv.open(head.row, shape.width + head.column, width, lease.floats(length * width));
    const Target dv = dqkv.open(head.row, 2 * shape.width + head.column, width, lease.floats(length * width));
    float *y_scratch = lease.floats(kQueries * width), *dy_scratch = lease.floats(kQueries * width);
    float* dq_scratch = lease.floats(kQueries * width);
    for (Index r = 0; r < length; ++r) {
      std::fill_n(dk.data + r * dk.stride, width, 0.0f);
      std::fill_n(dv.data + r * dv.stride, width, 0.0f);
    }
    for (Index first = 0; first < length; first += kQueries) {
      const Index count = std::min(kQueries, length - first), seen = first + count, row = head.row + first;
      const View out = y.read(row, count, head.column, width, y_scratch);
      const View g = dy.read(row, count, head.column, width, dy_scratch);
      product(count, seen, width, head.scale, head.query(first), transposed(head.k), 0, p);
      product(count, seen, width, 1, g, transposed(head.v), 0, dp);
      softmax_backward(p, dp, first, count, head.log_sums(log_sums), out, g, width, head.scale);
      product(seen, width, count, 1, transposed(p), g, 1, dv);
      product(seen, width, count, 1, transposed(dp), head.query(first), 1, dk);
      const Target dq = dqkv.open(row, head.column, width, dq_scratch);
      product(count, width, seen, 1, dp, head.k, 0, dq);
      dqkv.keep(row, count, head.column, width, dq);
    }
    dqkv.keep(head.row, length, shape.width + head.column, width, dk);
    dqkv.keep(head.row, length, 2 * shape.width + head.column, width, dv);
  });
}

// ---- Gradients of parameters ----

namespace {

void add_row(const float* __restrict from, Index count, float* __restrict to) {
  for (Index i = 0; i < count; ++i) to[i] += from[i];
}

}  // namespace

// Pieces are broad, for a column of x may have to be computed, and high, for g may have to be decoded; but
// there should be enough of them for several threads.
void weight_gradient(const Crew& crew, const Source& x, const Matrix& g, Index tokens, Index first,
                     Index rows, float* tile) {
  const Index columns = g.columns(), most = rows < 4 * kTileRows ? kTileRows / 2 : kTileRows;
  const Index across = (columns + kTileColumns - 1) / kTileColumns, down = (rows + most - 1) / most;
  crew.pieces(across * down, [&](Index piece, Lease& lease) {
    const Index row = piece / across * most, column = piece % across * kTileColumns;
    const Index height = std::min(most, rows - row), breadth = std::min(kTileColumns, columns - column);
    float *x_scratch = lease.floats(kDepth * height), *g_scratch = lease.floats(kDepth * breadth);
    const Target out = {tile + row * columns + column, columns};
    for (Index token = 0; token < tokens; token += kDepth) {
      const Index depth = std::min(kDepth, tokens - token);
      const View in = x.read(token, depth, first + row, height, x_scratch);
      const View dy = g.read(token, depth, column, breadth, g_scratch);
      product(height, breadth, depth, 1, transposed(in), dy, token == 0 ? 0.0f : 1.0f, out);
    }
  });
}

void bias_gradient(const Crew& crew, const Matrix& g, Index tokens, Index first, Index count, float* tile) {
  crew.pieces((count + kTileRows - 1) / kTileRows, [&](Index piece, Lease& lease) {
    const Index column = piece * kTileRows, columns = std::min(kTileRows, count - column);
    float *scratch = lease.floats(kDepth * columns), *part = lease.floats(columns);
    std::fill_n(tile + column, columns, 0.0f);
    for (Index token = 0; token < tokens; token += kDepth) {
      const Index depth = std::min(kDepth, tokens - token);
      const View dy = g.read(token, depth, first + column, columns, scratch);
      std::fill_n(part, columns, 0.0f);
      for (Index r = 0; r < depth; ++r) add_row(dy.data + r * dy.stride, columns, part);
      add_row(part, columns, tile + column);  // sums of sums round less often
    }
  });
}

void norm_gradient(const float* sums, Index tokens, Index width, bool bias, Index first, Index count,
                   float* tile) {
  std::fill_n(tile, count, 0.0f);
  for (Index chunk = 0; chunk < chunks_of(tokens); ++chunk) {
    const float* part = sums + (2 * chunk + (bias ? 1 : 0)) * width + first;
    add_row(part, count, tile);
  }
}

void position_gradient(const Crew& crew, const Matrix& g, Index sequences, Index length, Index first,
                       Index rows, float* tile) {
  const Index width = g.columns();
  crew.chunks(rows, [&](Index row, Index count, Lease& lease) {
    float* scratch = lease.floats(width);
    for (Index r = row; r < row + count; ++r) {
      float* sum = tile + r * width;
      std::fill_n(sum, width, 0.0f);
      for (Index s = 0; s < sequences; ++s) {
        const float* from = g.read(s * length + first + r, 1, 0, width, scratch).data;
        add_row(from, width, sum);
      }
    }
  });
}

void token_gradient(const Crew& crew, const Matrix& g, const std::int32_t* tokens, Index count, Index first,
                    Index rows, float* tile) {
  const Index width = g.columns();
  crew.chunks(rows, [&](Index row, Index height, Lease& lease) {
    float* scratch = lease.floats(width);
    for (Index t = 0; t < count; ++t) {
      const Index at = tokens[t] - first - row;
      if (at < 0 || at >= height) continue;
      const float* from = g.read(t, 1, 0, width, scratch).data;
      add_row(from, width, tile + (row + at) * width);
    }
  });
}

}  // namespace scruple::train
