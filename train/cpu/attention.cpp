#include <algorithm>
#include <cmath>

#include "train/cpu/layers.h"
#include "train/cpu/math.h"

// Attention on the CPU, a few queries at a time: scores of a whole context never exist at once.

namespace scruple::train {

namespace {

// Turns the pairs (i, i + d/2) of a row by the angles of its position; back, where `sign` is -1.
void rope(const float* rotation, Index position, Index width, float sign, float* row) {
  const Index pairs = width / 2;
  const float* __restrict cosine = rotation + position * width;
  const float* __restrict sine = cosine + pairs;
  float* __restrict left = row, * __restrict right = row + pairs;
  for (Index i = 0; i < pairs; ++i) {
    const float a = left[i], b = right[i], s = sign * sine[i];
    left[i] = a * cosine[i] - b * s;
    right[i] = b * cosine[i] + a * s;
  }
}

float rms_rstd(const float* x, Index width, float epsilon) {
  const float squares = sum_of(width, [&](Index i) { return x[i] * x[i]; });
  return 1.0f / std::sqrt(squares / static_cast<float>(width) + epsilon);
}

// The queries of one head of one document, or the keys of one: [length, head_width] from `column` of qkv.
struct Roped {
  const Attention& shape;
  const Matrix& qkv;
  const float* norm;  // or nullptr
  Index row, length, column;

  // As attention sees them.
  View read(float* scratch) const {
    const Index width = shape.head_width;
    const View x = qkv.read(row, length, column, width, scratch);
    if (norm == nullptr && shape.rotation == nullptr) return x;
    for (Index r = 0; r < length; ++r) {
      float* to = in_scratch(x, r, width, scratch);
      if (norm != nullptr) {
        const float rstd = rms_rstd(to, width, shape.epsilon);
        for (Index i = 0; i < width; ++i) to[i] *= rstd * norm[i];
      }
      if (shape.rotation != nullptr) rope(shape.rotation, shape.positions[row + r], width, 1, to);
    }
    return {scratch, width};
  }

  // From the gradient of rows first, first + 1... as attention sees them to that of qkv, in place. Adds the
  // norm's own gradient to `sums`.
  void back(Index first, Index count, Target g, float* scratch, float* sums) const {
    const Index width = shape.head_width;
    if (shape.rotation != nullptr)
      for (Index r = 0; r < count; ++r)
        rope(shape.rotation, shape.positions[row + first + r], width, -1, g.data + r * g.stride);
    if (norm == nullptr) return;
    const View x = qkv.read(row + first, count, column, width, scratch);
    for (Index r = 0; r < count; ++r) rms_row(x.data + r * x.stride, g.data + r * g.stride, sums);
  }

  // The backward pass of RMS norm (Zhang & Sennrich, 1910.07467), per row: with h = x rstd and a = g weight,
  // dx = rstd (a - h mean(a h)).
  void rms_row(const float* __restrict x, float* __restrict g, float* __restrict sums) const {
    const Index width = shape.head_width;
    const float rstd = rms_rstd(x, width, shape.epsilon);
    const float mean =
        sum_of(width, [&](Index i) { return g[i] * norm[i] * x[i]; }) * rstd / static_cast<float>(width);
    for (Index i = 0; i < width; ++i) sums[i] += g[i] * x[i] * rstd;
    for (Index i = 0; i < width; ++i) g[i] = rstd * (g[i] * norm[i] - x[i] * rstd * mean);
  }
};

// The heads that share keys and values, in one document: [first, first + length) of a sequence.
struct Group {
  Group(const Attention& s, const Matrix& m, Index piece, Index first_row, Index rows)
      : shape(s),
        qkv(m),
        sequence(piece / s.kv_heads),
        kv_head(piece % s.kv_heads),
        first(first_row),
        row(sequence * s.length + first_row),
        length(rows),
        scale(1.0f / std::sqrt(static_cast<float>(s.head_width))) {}

  Index first_head() const { return kv_head * shape.group(); }
  Roped keys() const { return {shape, qkv, shape.key_norm, row, length, shape.key(kv_head)}; }
  Roped queries(Index head) const { return {shape, qkv, shape.query_norm, row, length, shape.query(head)}; }
  View values(float* scratch) const {
    return qkv.read(row, length, shape.value(kv_head), shape.head_width, scratch);
  }
  Index log_sums(Index head) const { return (sequence * shape.heads + head) * shape.length + first; }

  const Attention& shape;
  const Matrix& qkv;
  Index sequence, kv_head, first, row, length;
  float scale;
};

// A document is computed as if it were alone, and gives the bits that it would give alone.
void each_document(const Attention& shape, const Matrix& qkv, Index piece,
                   const std::function<void(const Group&)>& document) {
  const std::int32_t* positions = shape.positions + piece / shape.kv_heads * shape.length;
  for (Index first = 0, end = 1; first < shape.length; first = end++) {
    while (end < shape.length && positions[end] != 0) ++end;
    document(Group(shape, qkv, piece, first, end - first));
  }
}

View from_row(View view, Index row) { return {view.data + row * view.stride, view.stride}; }

// Softmax of queries first, first + 1... over the keys that each may see; the rest of a row is cleared for
// the products. `log_sums` are those of these queries, or nullptr.
SCRUPLE_WIDE void causal_softmax(Target scores, Index first, Index count, float* log_sums) {
  for (Index r = 0; r < count; ++r) {
    float* row = scores.data + r * scores.stride;
    const Index seen = first + r + 1;
    const float top = largest_of(row, seen);
    for (Index i = 0; i < seen; ++i) row[i] = exp_of(row[i] - top);
    const float sum = sum_of(seen, [&](Index i) { return row[i]; });
    const float inverse = 1.0f / sum;
    for (Index i = 0; i < seen; ++i) row[i] *= inverse;
    std::fill(row + seen, row + first + count, 0.0f);
    if (log_sums != nullptr) log_sums[r] = top + std::log(sum);
  }
}

// The group's queries over keys and values that begin `past` rows before them.
void attend_over(const Group& group, View k, View v, Index past, Matrix& y, float* log_sums, Arena& arena) {
  const Attention& shape = group.shape;
  const Index width = shape.head_width, length = group.length, keys = past + length;
  float* q_scratch = arena.floats(length * width);
  const Target scores = {arena.floats(kQueries * keys), keys};
  float* scratch = arena.floats(kQueries * width);
  for (Index head = group.first_head(); head < group.first_head() + shape.group(); ++head) {
    const View q = group.queries(head).read(q_scratch);
    for (Index first = 0; first < length; first += kQueries) {
      const Index count = std::min(kQueries, length - first), seen = past + first + count;
      product(count, seen, width, group.scale, from_row(q, first), transposed(k), 0, scores);
      causal_softmax(scores, past + first, count,
                     log_sums == nullptr ? nullptr : log_sums + group.log_sums(head) + first);
      const Target out = y.open(group.row + first, shape.query(head), width, scratch);
      product(count, width, seen, 1, scores, v, 0, out);
      y.keep(group.row + first, count, shape.query(head), width, out);
    }
  }
}

}  // namespace

// softmax(q k^T / sqrt(d)) v (Vaswani et al., 1706.03762, eq. 1), a few queries at a time.
void attend(const Workers& workers, const Attention& shape, const Matrix& qkv, Matrix& y, float* log_sums) {
  workers.pieces(shape.sequences * shape.kv_heads, [&](Index piece, Arena& arena) {
    each_document(shape, qkv, piece, [&](const Group& group) {
      arena.start_again();
      const Index floats = group.length * shape.head_width;
      const View k = group.keys().read(arena.floats(floats)), v = group.values(arena.floats(floats));
      attend_over(group, k, v, 0, y, log_sums, arena);
    });
  });
}

void attend_cached(const Workers& workers, const Attention& shape, const Matrix& qkv, const Cache& cache,
                   Matrix& y) {
  const Index width = shape.head_width;
  workers.pieces(shape.kv_heads, [&](Index piece, Arena& arena) {
    const Group group(shape, qkv, piece, 0, shape.length);
    const Index own = piece * cache.context * width;
    float* scratch = arena.floats(shape.length * width);
    for (const bool keys : {true, false}) {
      const View from = keys ? group.keys().read(scratch) : group.values(scratch);
      float* to = (keys ? cache.keys : cache.values) + own + cache.length * width;
      for (Index r = 0; r < shape.length; ++r)
        std::copy_n(from.data + r * from.stride, width, to + r * width);
    }
    attend_over(group, {cache.keys + own, width}, {cache.values + own, width}, cache.length, y, nullptr,
                arena);
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

// Adds the gradients of the head norms to `q_sums` and `k_sums`.
SCRUPLE_WIDE void attend_document_backward(const Group& group, const Matrix& y, const float* log_sums,
                                           const Matrix& dy, Matrix& dqkv, float* q_sums, float* k_sums,
                                           Arena& arena) {
  const Attention& shape = group.shape;
  const Index width = shape.head_width, length = group.length;
  const Roped keys = group.keys();
  const View k = keys.read(arena.floats(length * width)), v = group.values(arena.floats(length * width));
  float* q_scratch = arena.floats(length * width);
  const Target p = {arena.floats(kQueries * length), length}, dp = {arena.floats(kQueries * length), length};
  const Index k_column = shape.key(group.kv_head), v_column = shape.value(group.kv_head);
  const Target dk = dqkv.open(group.row, k_column, width, arena.floats(length * width));
  const Target dv = dqkv.open(group.row, v_column, width, arena.floats(length * width));
  float *y_scratch = arena.floats(kQueries * width), *dy_scratch = arena.floats(kQueries * width);
  float *dq_scratch = arena.floats(kQueries * width), *raw = arena.floats(length * width);
  for (Index r = 0; r < length; ++r) {
    std::fill_n(dk.data + r * dk.stride, width, 0.0f);
    std::fill_n(dv.data + r * dv.stride, width, 0.0f);
  }
  for (Index head = group.first_head(); head < group.first_head() + shape.group(); ++head) {
    const Roped queries = group.queries(head);
    const View q = queries.read(q_scratch);
    const Index column = shape.query(head);
    for (Index first = 0; first < length; first += kQueries) {
      const Index count = std::min(kQueries, length - first), seen = first + count, row = group.row + first;
      const View out = y.read(row, count, column, width, y_scratch);
      const View g = dy.read(row, count, column, width, dy_scratch);
      product(count, seen, width, group.scale, from_row(q, first), transposed(k), 0, p);
      product(count, seen, width, 1, g, transposed(v), 0, dp);
      softmax_backward(p, dp, first, count, log_sums + group.log_sums(head), out, g, width, group.scale);
      product(seen, width, count, 1, transposed(p), g, 1, dv);
      product(seen, width, count, 1, transposed(dp), from_row(q, first), 1, dk);
      const Target dq = dqkv.open(row, column, width, dq_scratch);
      product(count, width, seen, 1, dp, k, 0, dq);
      queries.back(first, count, dq, raw, q_sums);
      dqkv.keep(row, count, column, width, dq);
    }
  }
  keys.back(0, length, dk, raw, k_sums);
  dqkv.keep(group.row, length, k_column, width, dk);
  dqkv.keep(group.row, length, v_column, width, dv);
}

}  // namespace

void attend_backward(const Workers& workers, const Attention& shape, const Matrix& qkv, const Matrix& y,
                     const float* log_sums, const Matrix& dy, Matrix& dqkv, float* sums) {
  const Index width = shape.head_width;
  workers.pieces(shape.sequences * shape.kv_heads, [&](Index piece, Arena& arena) {
    float *q_sums = nullptr, *k_sums = nullptr;
    if (shape.query_norm != nullptr) {
      q_sums = sums + 2 * piece * width, k_sums = q_sums + width;
      std::fill_n(q_sums, 2 * width, 0.0f);
    }
    each_document(shape, qkv, piece, [&](const Group& group) {
      arena.start_again();
      attend_document_backward(group, y, log_sums, dy, dqkv, q_sums, k_sums, arena);
    });
  });
}

}  // namespace scruple::train
