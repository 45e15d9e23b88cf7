#include "train/cpu/layers.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

#include "formats/bf16.h"
#include "formats/fp16.h"
#include "train/cpu/math.h"

namespace scruple::train {
namespace {

constexpr Index kLine = 16;                            // floats to a cache line
constexpr Index kTileRows = 128, kTileColumns = 1024;  // of a weight's gradient to a piece of work, at most

Index padded(Index floats) { return (floats + kLine - 1) / kLine * kLine; }

}  // namespace

// ---- Where work runs ----

Workspace::Workspace(Ledger& ledger, int slots, Index floats)
    : memory_(ledger, "workspace", slots * padded(floats) * static_cast<Index>(sizeof(float))) {
  for (int i = 0; i < slots; ++i) free_.push_back(memory_.as<float>() + i * padded(floats));
}

float* Workspace::take() {
  const std::lock_guard lock(mutex_);
  float* slot = free_.back();
  free_.pop_back();
  return slot;
}

void Workspace::give(float* slot) {
  const std::lock_guard lock(mutex_);
  free_.push_back(slot);
}

float* Arena::floats(Index count) {
  float* here = next_;
  next_ += padded(count);
  return here;
}

void Workers::pieces(Index count, const std::function<void(Index, Arena&)>& piece) const {
  threads.run(count, [&](i64 i) {
    Arena arena(workspace);
    piece(i, arena);
  });
}

void Workers::chunks(Index rows, const std::function<void(Index, Index, Arena&)>& piece) const {
  pieces(chunks_of(rows),
         [&](Index i, Arena& arena) { piece(i * kChunk, std::min(kChunk, rows - i * kChunk), arena); });
}

Index workspace_of(const Description& model) {
  const Index width = padded(model.width), inner = padded(model.inner), qkv = padded(model.qkv_width());
  const Index wide = padded(model.up_width()), head_width = padded(model.head_width);
  const Index length = padded(model.context), columns = padded(std::min(kHeadColumns, model.vocabulary));
  const Index activated = model.mlp == Mlp::swiglu ? 4 * inner : 2 * inner;  // in activated_backward
  const Index chunk = kChunk * (std::max({activated, wide, qkv}) + 3 * width);
  const Index head = kChunk * (3 * width + columns + 3) + columns;
  const Index attention = 6 * length * head_width + 2 * kQueries * length + 4 * kQueries * head_width;
  const Index gradient = kDepth * (kTileRows + std::max(width, std::min(kTileColumns, std::max(wide, qkv))));
  return std::max({chunk, head, attention, gradient}) + 16 * kLine;
}

// ---- Activations ----

Matrix::Matrix(Ledger& ledger, Precision precision, Index rows, Index columns)
    : memory_(ledger, "activations", rows * columns * (precision == Precision::fp32 ? 4 : 2)),
      precision_(precision),
      columns_(columns) {}

SCRUPLE_WIDE View Matrix::read(Index row, Index rows, Index column, Index columns, float* scratch) const {
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

void Matrix::clear() { std::fill_n(memory_.as<std::byte>(), memory_.bytes(), std::byte{0}); }

// Overflow must stay visible to loss scaling: no saturation, and a NaN is written as one that survives
// rounding.
SCRUPLE_WIDE void Matrix::keep(Index row, Index rows, Index column, Index columns, Target values) {
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

Statistics::Statistics(Ledger& ledger, const Description& model, Index count)
    : memory(ledger, "activations", 2 * count * static_cast<Index>(sizeof(float))),
      rows(count),
      kind(model.norm),
      epsilon(static_cast<float>(model.epsilon)) {}

View Stored::read(Index row, Index rows, Index column, Index columns, float* scratch) const {
  return matrix.read(row, rows, column, columns, scratch);
}

View Normed::read(Index row, Index rows, Index column, Index columns, float* scratch) const {
  const View x = matrix.read(row, rows, column, columns, scratch);
  const float* weight = norm.weight + column;
  for (Index r = 0; r < rows; ++r) {
    const float mean = statistics.mean()[row + r], rstd = statistics.rstd()[row + r];
    float* to = in_scratch(x, r, columns, scratch);
    if (statistics.kind == NormKind::rms) {
      for (Index i = 0; i < columns; ++i) to[i] *= rstd * weight[i];
    } else {
      const float* bias = norm.bias + column;
      for (Index i = 0; i < columns; ++i) to[i] = (to[i] - mean) * rstd * weight[i] + bias[i];
    }
  }
  return {scratch, columns};
}

namespace {

SCRUPLE_WIDE void gelu_row(float* values, Index count) {
  for (Index i = 0; i < count; ++i) values[i] = gelu(values[i]);
}

// silu(gates) times what stands beside them in the right half of the row.
SCRUPLE_WIDE void gate_row(const Matrix& matrix, Index row, Index column, Index columns, float* gates) {
  constexpr Index kPart = 512;
  float decoded[kPart];
  for (Index first = 0; first < columns; first += kPart) {
    const Index count = std::min(kPart, columns - first);
    const Index from = matrix.columns() / 2 + column + first;
    const float* __restrict values = matrix.read(row, 1, from, count, decoded).data;
    float* __restrict to = gates + first;
    for (Index i = 0; i < count; ++i) to[i] = silu(to[i]) * values[i];
  }
}

}  // namespace

View Activated::read(Index row, Index rows, Index column, Index columns, float* scratch) const {
  const View x = matrix.read(row, rows, column, columns, scratch);
  for (Index r = 0; r < rows; ++r) {
    float* to = in_scratch(x, r, columns, scratch);
    if (kind == Mlp::swiglu)
      gate_row(matrix, row + r, column, columns, to);
    else
      gelu_row(to, columns);
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
    float mean = 0;
    if (statistics.kind == NormKind::layer)
      mean = sum_of(width, [&](Index i) { return row[i]; }) / static_cast<float>(width);
    const float squares = sum_of(width, [&](Index i) { return (row[i] - mean) * (row[i] - mean); });
    statistics.mean()[first + r] = mean;
    statistics.rstd()[first + r] = 1.0f / std::sqrt(squares / static_cast<float>(width) + statistics.epsilon);
  }
}

}  // namespace

// ---- Forward ----

void embed(const Workers& workers, const std::int32_t* tokens, const std::int32_t* positions, Index rows,
           const float* token_table, const float* position_table, Matrix& x, Statistics& statistics) {
  const Index width = x.columns();
  workers.chunks(rows, [&](Index first, Index count, Arena& arena) {
    float* scratch = arena.floats(count * width);
    const Target out = x.open(first, 0, width, scratch);
    for (Index r = 0; r < count; ++r) {
      const float* token = token_table + tokens[first + r] * width;
      float* to = out.data + r * out.stride;
      if (position_table == nullptr) {
        std::copy_n(token, width, to);
      } else {
        const float* position = position_table + positions[first + r] * width;
        for (Index i = 0; i < width; ++i) to[i] = token[i] + position[i];
      }
    }
    x.keep(first, count, 0, width, out);
    measure(x, first, count, scratch, statistics);
  });
}

namespace {

// A layer's weight, and the same turned over, as factors of a product.
Factor weight_of(const Linear& layer) {
  return layer.outputs_first ? transposed({layer.weight, layer.in}) : Factor(View{layer.weight, layer.out});
}
Factor weight_transposed(const Linear& layer) {
  return layer.outputs_first ? Factor(View{layer.weight, layer.in}) : transposed({layer.weight, layer.out});
}

}  // namespace

void linear(const Workers& workers, const Source& x, std::span<const Linear> layers, Index rows, Matrix& y) {
  workers.chunks(rows, [&](Index first, Index count, Arena& arena) {
    const Index width = layers.front().in;
    const View in = x.read(first, count, 0, width, arena.floats(count * width));
    for (const Linear& layer : layers) {
      const Target out = y.open(first, layer.column, layer.out, arena.floats(count * layer.out));
      const bool biased = layer.bias != nullptr;
      for (Index r = 0; biased && r < count; ++r)
        std::copy_n(layer.bias, layer.out, out.data + r * out.stride);
      product(count, layer.out, layer.in, 1, in, weight_of(layer), biased ? 1.0f : 0.0f, out);
      y.keep(first, count, layer.column, layer.out, out);
    }
  });
}

void linear_residual(const Workers& workers, const Source& x, const Linear& layer, Index rows,
                     const Matrix& residual, Matrix& y, Statistics& statistics) {
  workers.chunks(rows, [&](Index first, Index count, Arena& arena) {
    const View in = x.read(first, count, 0, layer.in, arena.floats(count * layer.in));
    const View old = residual.read(first, count, 0, layer.out, arena.floats(count * layer.out));
    float* scratch = arena.floats(count * layer.out);
    const Target out = y.open(first, 0, layer.out, scratch);
    for (Index r = 0; r < count; ++r) {
      const float* from = old.data + r * old.stride;
      float* to = out.data + r * out.stride;
      if (layer.bias == nullptr)
        std::copy_n(from, layer.out, to);
      else
        for (Index i = 0; i < layer.out; ++i) to[i] = from[i] + layer.bias[i];
    }
    product(count, layer.out, layer.in, 1, in, weight_of(layer), 1, out);
    y.keep(first, count, 0, layer.out, out);
    measure(y, first, count, scratch, statistics);
  });
}

void norm_forward(const Workers& workers, const Normed& x, Counted rows, Matrix& hidden) {
  const Index width = hidden.columns();
  workers.chunks(rows.count, [&](Index first, Index count, Arena& arena) {
    float* scratch = arena.floats(width);
    const Target out = hidden.open(first, 0, width, arena.floats(count * width));
    for (Index r = 0; r < count; ++r)
      std::copy_n(x.read(rows.at[first + r], 1, 0, width, scratch).data, width, out.data + r * out.stride);
    hidden.keep(first, count, 0, width, out);
  });
}

namespace {

double sum_in_order(const double* chunk_losses, Index rows) {
  double total = 0;
  for (Index i = 0; i < chunks_of(rows); ++i) total += chunk_losses[i];
  return total;
}

}  // namespace

double head(const Workers& workers, const Head& head, Matrix& logits, double* chunk_losses) {
  const Index width = head.hidden.columns(), vocabulary = head.vocabulary;
  workers.chunks(head.rows.count, [&](Index first, Index count, Arena& arena) {
    const View in = head.hidden.read(first, count, 0, width, arena.floats(count * width));
    const Target out = logits.open(first, 0, vocabulary, arena.floats(count * vocabulary));
    product(count, vocabulary, width, 1, in, transposed({head.table, width}), 0, out);
    logits.keep(first, count, 0, vocabulary, out);
    float* line = arena.floats(vocabulary);
    double loss = 0;
    for (Index r = first; r < first + count; ++r) {
      const float* row = logits.read(r, 1, 0, vocabulary, line).data;
      const float top = largest_of(row, vocabulary);
      const float sum = sum_of(vocabulary, [&](Index i) { return exp_of(row[i] - top); });
      const double log_sum = static_cast<double>(top) + std::log(static_cast<double>(sum));
      head.log_sums[r] = static_cast<float>(log_sum);
      loss += log_sum - static_cast<double>(row[head.targets[r]]);
    }
    chunk_losses[first / kChunk] = loss;
  });
  return sum_in_order(chunk_losses, head.rows.count);
}

namespace {

// A softmax whose values come in pieces (Milakov & Gimelshein, 1805.02867, algorithm 3).
struct Running {
  float top, sum;
  float at_target;

  // `values` become e^(value - top). Returns what to multiply earlier ones by.
  float add(float* values, Index count, bool first) {
    const float largest = largest_of(values, count), before = top;
    top = first || largest > before ? largest : before;
    const float factor = first ? 0.0f : exp_of(before - top);
    for (Index i = 0; i < count; ++i) values[i] = exp_of(values[i] - top);
    const float part = sum_of(count, [&](Index i) { return values[i]; });
    sum = first ? part : sum * factor + part;
    return factor;
  }
  double log_sum() const { return static_cast<double>(top) + std::log(static_cast<double>(sum)); }
};

}  // namespace

// The gradient of `hidden` is softmax(hidden table^T) table - table[target]. That is attention with the table
// as keys and values, so it is computed in the same pass over the logits, piece by piece.
double head_in_pieces(const Workers& workers, const Head& head, Matrix* g, double* chunk_losses) {
  const Index width = head.hidden.columns(), vocabulary = head.vocabulary;
  workers.chunks(head.rows.count, [&](Index first, Index count, Arena& arena) {
    const std::int32_t* targets = head.targets + first;
    const View in = head.hidden.read(first, count, 0, width, arena.floats(count * width));
    const Target logits = {arena.floats(count * kHeadColumns), kHeadColumns};
    const Target mean = {arena.floats(count * width), width};
    Running rows[kChunk] = {};
    for (Index column = 0; column < vocabulary; column += kHeadColumns) {
      const Index columns = std::min(kHeadColumns, vocabulary - column);
      const View part = {head.table + column * width, width};
      product(count, columns, width, 1, in, transposed(part), 0, logits);
      for (Index r = 0; r < count; ++r) {
        float* values = logits.data + r * logits.stride;
        if (targets[r] >= column && targets[r] < column + columns)
          rows[r].at_target = values[targets[r] - column];
        const float factor = rows[r].add(values, columns, column == 0);
        if (g == nullptr || column == 0 || factor == 1) continue;
        for (Index i = 0; i < width; ++i) mean.data[r * width + i] *= factor;
      }
      if (g != nullptr) product(count, width, columns, 1, logits, part, column == 0 ? 0.0f : 1.0f, mean);
    }
    double loss = 0;
    for (Index r = 0; r < count; ++r) {
      const double log_sum = rows[r].log_sum();
      head.log_sums[first + r] = static_cast<float>(log_sum);
      loss += log_sum - static_cast<double>(rows[r].at_target);
    }
    chunk_losses[first / kChunk] = loss;
    if (g == nullptr) return;
    float* scratch = arena.floats(width);
    for (Index r = 0; r < count; ++r) {
      const float *target = head.table + targets[r] * width, *sum = mean.data + r * width;
      const float inverse = 1.0f / rows[r].sum;
      const Index row = head.rows.at[first + r];
      const Target out = g->open(row, 0, width, scratch);
      for (Index i = 0; i < width; ++i) out.data[i] = sum[i] * inverse - target[i];
      g->keep(row, 1, 0, width, out);
    }
  });
  return sum_in_order(chunk_losses, head.rows.count);
}

// ---- Backward ----

namespace {

// The backward pass of a norm, per row: with h = (x - mean) rstd and a = g weight, dx = rstd (a - mean(a) - h
// mean(a h)) (Ba et al., 1607.06450, eq. 4); RMS norm subtracts no mean, neither from x nor from a (Zhang &
// Sennrich, 1910.07467). Adds g h and g to the chunk's two rows of `sums`.
SCRUPLE_WIDE void norm_row(NormKind kind, const float* __restrict x, float mean, float rstd,
                           const float* __restrict weight, const float* __restrict g, Index width, bool add,
                           float* __restrict dx, float* __restrict sums) {
  const auto h = [&](Index i) { return (x[i] - mean) * rstd; };
  const float n = static_cast<float>(width);
  float mean_a = 0;
  if (kind == NormKind::layer) mean_a = sum_of(width, [&](Index i) { return g[i] * weight[i]; }) / n;
  const float mean_ah = sum_of(width, [&](Index i) { return g[i] * weight[i] * h(i); }) / n;
  for (Index i = 0; i < width; ++i) sums[i] += g[i] * h(i);
  for (Index i = 0; i < width; ++i) sums[width + i] += g[i];
  if (!add) std::fill_n(dx, width, 0.0f);
  for (Index i = 0; i < width; ++i) dx[i] += rstd * (g[i] * weight[i] - mean_a - h(i) * mean_ah);
}

// `out` gets the gradient of the norm's input, on top of what it holds where `add`; of row at[r] where rows are `at`.
void norm_rows(const Normed& x, Index first, Index count, const std::int32_t* at, View g, bool add,
               Matrix& out, float* sums, Arena& arena) {
  const Index width = out.columns();
  float *in = arena.floats(width), *scratch = arena.floats(width);
  float* own = sums + first / kChunk * 2 * width;
  std::fill_n(own, 2 * width, 0.0f);
  for (Index r = 0; r < count; ++r) {
    const Index row = at == nullptr ? first + r : at[first + r];
    out.read(row, 1, 0, width, scratch);
    const Target to = out.open(row, 0, width, scratch);  // the same place
    norm_row(x.statistics.kind, x.matrix.read(row, 1, 0, width, in).data, x.statistics.mean()[row],
             x.statistics.rstd()[row], x.norm.weight, g.data + r * g.stride, width, add, to.data, own);
    out.keep(row, 1, 0, width, to);
  }
}

// values = (softmax - [target]) scale, where `target` may be none of them.
SCRUPLE_WIDE void softmax_gradient(Index count, Index target, float scale, float log_sum, float* values) {
  const bool here = target >= 0 && target < count;
  const float at_target = here ? (exp_of(values[target] - log_sum) - 1.0f) * scale : 0.0f;
  for (Index i = 0; i < count; ++i) values[i] = exp_of(values[i] - log_sum) * scale;
  if (here) values[target] = at_target;
}

}  // namespace

void head_backward(const Workers& workers, const Head& head, float scale, Matrix& logits, const Normed& x,
                   Matrix& g, float* sums) {
  const Index width = g.columns(), vocabulary = head.vocabulary;
  workers.chunks(head.rows.count, [&](Index first, Index count, Arena& arena) {
    float* line = arena.floats(vocabulary);
    for (Index r = first; r < first + count; ++r) {
      logits.read(r, 1, 0, vocabulary, line);
      const Target out = logits.open(r, 0, vocabulary, line);  // the same place
      softmax_gradient(vocabulary, head.targets[r], scale, head.log_sums[r], out.data);
      logits.keep(r, 1, 0, vocabulary, out);
    }
    const View part = logits.read(first, count, 0, vocabulary, arena.floats(count * vocabulary));
    const Target dh = {arena.floats(count * width), width};
    product(count, width, vocabulary, 1, part, View{head.table, width}, 0, dh);
    norm_rows(x, first, count, head.rows.at, dh, false, g, sums, arena);
  });
}

void head_in_pieces_backward(const Workers& workers, Counted rows, float scale, const Normed& x, Matrix& g,
                             float* sums) {
  const Index width = g.columns();
  workers.chunks(rows.count, [&](Index first, Index count, Arena& arena) {
    float* scratch = arena.floats(count * width);
    for (Index r = 0; r < count; ++r) {
      float* to = scratch + r * width;
      in_scratch(g.read(rows.at[first + r], 1, 0, width, to), 0, width, to);
      for (Index i = 0; i < width; ++i) to[i] *= scale;
    }
    norm_rows(x, first, count, rows.at, {scratch, width}, false, g, sums, arena);
  });
}

void linear_backward(const Workers& workers, const Matrix& g, const Linear& layer, Index rows, Matrix& dx) {
  workers.chunks(rows, [&](Index first, Index count, Arena& arena) {
    const View dy = g.read(first, count, 0, layer.out, arena.floats(count * layer.out));
    const Target out = dx.open(first, 0, layer.in, arena.floats(count * layer.in));
    product(count, layer.in, layer.out, 1, dy, weight_transposed(layer), 0, out);
    dx.keep(first, count, 0, layer.in, out);
  });
}

namespace {

SCRUPLE_WIDE void gelu_row_backward(const float* __restrict x, Index count, float* __restrict g) {
  for (Index i = 0; i < count; ++i) g[i] *= gelu_slope(x[i]);
}

// `value_g` begins as the gradient of silu(gate) value.
SCRUPLE_WIDE void swiglu_row_backward(const float* __restrict gate, const float* __restrict value,
                                      Index count, float* __restrict gate_g, float* __restrict value_g) {
  for (Index i = 0; i < count; ++i) {
    const float g = value_g[i];
    gate_g[i] = g * value[i] * silu_slope(gate[i]);
    value_g[i] = g * silu(gate[i]);
  }
}

}  // namespace

void activated_backward(const Workers& workers, const Matrix& g, const Linear& layer, Index rows,
                        const Activated& x, Matrix& dx) {
  const Index inner = layer.in;
  const bool gated = x.kind == Mlp::swiglu;
  workers.chunks(rows, [&](Index first, Index count, Arena& arena) {
    const View dy = g.read(first, count, 0, layer.out, arena.floats(count * layer.out));
    const View in = x.matrix.read(first, count, 0, inner, arena.floats(count * inner));
    const Target out = dx.open(first, 0, inner, arena.floats(count * inner));
    if (!gated) {
      product(count, inner, layer.out, 1, dy, weight_transposed(layer), 0, out);
      for (Index r = 0; r < count; ++r)
        gelu_row_backward(in.data + r * in.stride, inner, out.data + r * out.stride);
    } else {
      const View beside = x.matrix.read(first, count, inner, inner, arena.floats(count * inner));
      const Target right = dx.open(first, inner, inner, arena.floats(count * inner));
      product(count, inner, layer.out, 1, dy, weight_transposed(layer), 0, right);
      for (Index r = 0; r < count; ++r)
        swiglu_row_backward(in.data + r * in.stride, beside.data + r * beside.stride, inner,
                            out.data + r * out.stride, right.data + r * right.stride);
      dx.keep(first, count, inner, inner, right);
    }
    dx.keep(first, count, 0, inner, out);
  });
}

void normed_backward(const Workers& workers, const Matrix& g, std::span<const Linear> layers, Index rows,
                     const Normed& x, Matrix& residual, float* sums) {
  workers.chunks(rows, [&](Index first, Index count, Arena& arena) {
    const Index width = layers.front().in;
    const Target dh = {arena.floats(count * width), width};
    float beta = 0;
    for (const Linear& layer : layers) {
      const View dy = g.read(first, count, layer.column, layer.out, arena.floats(count * layer.out));
      product(count, width, layer.out, 1, dy, weight_transposed(layer), beta, dh);
      beta = 1;
    }
    norm_rows(x, first, count, nullptr, dh, true, residual, sums, arena);
  });
}

// ---- Gradients of parameters ----

namespace {

void add_row(const float* __restrict from, Index count, float* __restrict to) {
  for (Index i = 0; i < count; ++i) to[i] += from[i];
}

// Wide pieces compute the columns of `a` fewer times, high ones decode `b` fewer times. But several threads
// need enough pieces.
Index tile_height(Index rows) { return rows < 4 * kTileRows ? kTileRows / 2 : kTileRows; }

}  // namespace

double frobenius_norm(const Workers& workers, const Part& part, Index tokens) {
  const Index across = (part.columns + kTileColumns - 1) / kTileColumns,
              down = (tokens + kDepth - 1) / kDepth;
  std::vector<double> sums(static_cast<std::size_t>(across * down));
  workers.pieces(across * down, [&](Index piece, Arena& arena) {
    const Index column = piece % across * kTileColumns, token = piece / across * kDepth;
    const Index columns = std::min(kTileColumns, part.columns - column),
                depth = std::min(kDepth, tokens - token);
    float *scratch = arena.floats(kDepth * columns), *squares = arena.floats(columns);
    const View x = part.source.read(token, depth, part.column + column, columns, scratch);
    std::fill_n(squares, columns, 0.0f);
    for (Index r = 0; r < depth; ++r)
      for (Index c = 0; c < columns; ++c) squares[c] += x.data[r * x.stride + c] * x.data[r * x.stride + c];
    double& sum = sums[static_cast<std::size_t>(piece)];
    for (Index c = 0; c < columns; ++c) sum += static_cast<double>(squares[c]);
  });
  return std::sqrt(std::accumulate(sums.begin(), sums.end(), 0.0));
}

void weight_gradient(const Workers& workers, const Part& a, const Part& b, Index tokens, Index first,
                     Index rows, float* tile) {
  const Index columns = b.columns, most = tile_height(rows);
  if (tokens == 0) std::fill_n(tile, rows * columns, 0.0f);
  const Index across = (columns + kTileColumns - 1) / kTileColumns, down = (rows + most - 1) / most;
  workers.pieces(across * down, [&](Index piece, Arena& arena) {
    const Index row = piece / across * most, column = piece % across * kTileColumns;
    const Index height = std::min(most, rows - row), breadth = std::min(kTileColumns, columns - column);
    float *a_scratch = arena.floats(kDepth * height), *b_scratch = arena.floats(kDepth * breadth);
    const Target out = {tile + row * columns + column, columns};
    for (Index token = 0; token < tokens; token += kDepth) {
      const Index depth = std::min(kDepth, tokens - token);
      const View left = a.source.read(token, depth, a.column + first + row, height, a_scratch);
      const View right = b.source.read(token, depth, b.column + column, breadth, b_scratch);
      product(height, breadth, depth, 1, transposed(left), right, token == 0 ? 0.0f : 1.0f, out);
    }
  });
}

void head_gradient(const Workers& workers, const Head& head, float scale, Index first, Index rows,
                   float* tile) {
  const Index width = head.hidden.columns(), most = tile_height(rows);
  if (head.rows.count == 0) std::fill_n(tile, rows * width, 0.0f);
  workers.pieces((rows + most - 1) / most, [&](Index piece, Arena& arena) {
    const Index row = piece * most, height = std::min(most, rows - row), word = first + row;
    const Target logits = {arena.floats(kDepth * height), height};
    float* scratch = arena.floats(kDepth * width);
    for (Index token = 0; token < head.rows.count; token += kDepth) {
      const Index depth = std::min(kDepth, head.rows.count - token);
      const View hidden = head.hidden.read(token, depth, 0, width, scratch);
      product(depth, height, width, 1, hidden, transposed({head.table + word * width, width}), 0, logits);
      for (Index r = 0; r < depth; ++r)
        softmax_gradient(height, head.targets[token + r] - word, scale, head.log_sums[token + r],
                         logits.data + r * height);
      product(height, width, depth, 1, transposed(logits), hidden, token == 0 ? 0.0f : 1.0f,
              {tile + row * width, width});
    }
  });
}

void bias_gradient(const Workers& workers, const Matrix& g, Index tokens, Index first, Index count,
                   float* tile) {
  workers.pieces((count + kTileRows - 1) / kTileRows, [&](Index piece, Arena& arena) {
    const Index column = piece * kTileRows, columns = std::min(kTileRows, count - column);
    float *scratch = arena.floats(kDepth * columns), *part = arena.floats(columns);
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

void norm_gradient(const float* sums, Index parts, Index width, bool second, Index first, Index count,
                   float* tile) {
  std::fill_n(tile, count, 0.0f);
  for (Index part = 0; part < parts; ++part)
    add_row(sums + (2 * part + (second ? 1 : 0)) * width + first, count, tile);
}

void embedding_gradient(const Workers& workers, const Matrix& g, const std::int32_t* read_from, Index count,
                        Index first, Index rows, float* tile) {
  const Index width = g.columns();
  workers.chunks(rows, [&](Index row, Index height, Arena& arena) {
    float* scratch = arena.floats(width);
    for (Index t = 0; t < count; ++t) {
      const Index at = read_from[t] - first - row;
      if (at < 0 || at >= height) continue;
      const float* from = g.read(t, 1, 0, width, scratch).data;
      add_row(from, width, tile + (row + at) * width);
    }
  });
}

}  // namespace scruple::train
