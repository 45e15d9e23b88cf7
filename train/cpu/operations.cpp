#include "train/cpu/operations.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <numeric>

namespace scruple::train {
namespace {

Index widest_outputs(const Description& m) { return std::max({m.width, m.qkv_width(), m.up_width()}); }

// Both embeddings are wanted at once, and all matrices of one input.
Index largest_matrix(const Description& m) {
  return std::max((m.vocabulary + m.positions) * m.width, m.width * widest_outputs(m));
}

// Behind a norm and the norms of heads stand the biases of all products of one input.
Index biases_at(const Description& m) { return 2 * m.width + (m.head_norms ? 2 * m.head_width : 0); }

}  // namespace

Operations::Operations(const Setup& setup, Index rows, bool caches, Threads& threads, Ledger& ledger)
    : model_(setup.shape),
      places_(places_of(model_)),
      precision_(setup.activations),
      most_rows_(rows),
      caches_(caches),
      ledger_(ledger),
      sequences_(setup.batch),
      rows_(rows),
      hidden_(ledger, precision_, caches ? 1 : rows, model_.width),
      tokens_(ledger, "activations", rows * 4),
      positions_(ledger, "activations", rows * 4),
      at_(ledger, "activations", (caches ? 1 : rows) * 4),
      matrix_(ledger, "workspace", largest_matrix(model_) * 4),
      vector_(ledger, "workspace", (biases_at(model_) + widest_outputs(model_)) * 4),
      rotation_(ledger, "workspace", rope_floats(model_) * 4),
      workspace_(ledger, threads.count(), workspace_of(model_)),
      workers_{threads, workspace_} {
  if (model_.rotary.base > 0 && !ledger.only_counts()) rope_table(model_, rotation_.as<float>());
  for (Index i = 0; i <= (caches ? 0 : model_.layers); ++i) residuals_.push_back(residual_tensor());
  if (caches) {
    cache_ = Block(ledger, "cache", 2 * model_.layers * model_.context * model_.key_width() * 4);
    return;
  }
  logits_ = Matrix(ledger, precision_, keeps_logits(model_) ? rows : 0, model_.vocabulary);
  log_sums_ = Block(ledger, "activations", rows * 4);
  targets_ = Block(ledger, "activations", rows * 4);
  g_ = stored(model_.width);
  dattended_ = stored(model_.query_width());
  dqkv_ = stored(model_.qkv_width());
  dup_ = stored(model_.up_width());
  norm_sums_ = Block(ledger, "workspace", chunks_of(rows) * 2 * model_.width * 4);
  if (model_.head_norms)
    head_norm_sums_ = Block(ledger, "workspace", sequences_ * model_.kv_heads * 2 * model_.head_width * 4);
  chunk_losses_ = Block(ledger, "workspace", chunks_of(rows) * 8);
}

// ---- Tensors ----

Operations::Tensor Operations::stored(Index columns) {
  Tensor tensor;
  tensor.values = Matrix(ledger_, precision_, most_rows_, columns);
  return tensor;
}

Operations::Tensor Operations::residual_tensor() {
  Tensor tensor = stored(model_.width);
  tensor.statistics.emplace(ledger_, model_, most_rows_);
  return tensor;
}

Operations::Tensor Operations::new_tensor(Activation activation) {
  switch (activation) {
    case Activation::qkv: return stored(model_.qkv_width());
    case Activation::middle: return residual_tensor();
    case Activation::up: return stored(model_.up_width());
    case Activation::attended: {
      Tensor tensor = stored(model_.query_width());
      if (!caches_) tensor.log_sums = Block(ledger_, "activations", most_rows_ * model_.heads * 4);
      return tensor;
    }
    default: return {};
  }
}

// ---- Weights ----

const float* Operations::values(int parameter, float* scratch) const {
  return parameter < 0 ? nullptr : weights_->values(parameter, scratch);
}

Norm Operations::norm_of(const NormPlace& at) const {
  float* const scratch = vector_.as<float>();
  return {values(at.weight, scratch), values(at.bias, scratch + model_.width)};
}

std::vector<Linear> Operations::linear_of(const LinearPlaces& places, bool biases) const {
  std::vector<Linear> layers;
  float *matrix = matrix_.as<float>(), *vector = vector_.as<float>() + biases_at(model_);
  for (const LinearPlace& at : places) {
    layers.push_back({at.in, at.out, at.column, values(at.weight, matrix),
                      biases ? values(at.bias, vector) : nullptr, model_.outputs_first});
    matrix += at.in * at.out, vector += at.out;
  }
  return layers;
}

Attention Operations::attention(const LayerPlaces& at) {
  float* const scratch = vector_.as<float>() + 2 * model_.width;
  return {sequences_,
          rows_ / sequences_,
          model_.heads,
          model_.kv_heads,
          model_.head_width,
          positions(),
          model_.rotary.base > 0 ? rotation_.as<float>() : nullptr,
          values(at.query_norm.weight, scratch),
          values(at.key_norm.weight, scratch + model_.head_width),
          static_cast<float>(model_.epsilon)};
}

Normed Operations::read_normed(const NormPlace& at, const Tensor& x) {
  return {x.values, *x.statistics, norm_of(at)};
}

void Operations::read(const Tensor& x, const std::function<void(const Source&)>& reader) {
  if (x.normed != nullptr)
    reader(read_normed(*x.norm, *x.normed));
  else if (x.activated != nullptr)
    reader(Activated(x.activated->values, model_.mlp));
  else
    reader(Stored(x.values));
}

// ---- Forward ----

void Operations::feed(const std::int32_t* tokens, Index count) {
  rows_ = count;
  std::copy_n(tokens, count, this->tokens());
  std::iota(positions(), positions() + count, static_cast<std::int32_t>(length));
  *at_.as<std::int32_t>() = static_cast<std::int32_t>(count - 1);
}

void Operations::embed(Tensor& x) {
  float* const scratch = matrix_.as<float>();
  const float* const table = values(places_.tokens, scratch);
  const float* const position_table = values(places_.positions, scratch + model_.vocabulary * model_.width);
  train::embed(workers_, tokens(), positions(), rows_, table, position_table, x.values, *x.statistics);
}

void Operations::norm(const NormPlace& at, const Tensor& x, Tensor& y) { y.normed = &x, y.norm = &at; }

void Operations::linear(const LinearPlaces& at, const Tensor& x, Tensor& y) {
  read(x, [&](const Source& in) { train::linear(workers_, in, linear_of(at), rows_, y.values); });
}

Cache Operations::cache_of(std::size_t layer) const {
  const Index floats = model_.context * model_.key_width();
  float* const keys = cache_.as<float>() + 2 * static_cast<Index>(layer) * floats;
  return {keys, keys + floats, model_.context, length};
}

void Operations::attend(const LayerPlaces& at, std::size_t layer, const Tensor& qkv, Tensor& y) {
  if (caches_)
    attend_cached(workers_, attention(at), qkv.values, cache_of(layer), y.values);
  else
    train::attend(workers_, attention(at), qkv.values, y.values, y.log_sums.as<float>());
}

void Operations::linear_residual(const LinearPlaces& at, const Tensor& x, const Tensor& residual, Tensor& y) {
  read(x, [&](const Source& in) {
    train::linear_residual(workers_, in, linear_of(at).front(), rows_, residual.values, y.values,
                           *y.statistics);
  });
}

void Operations::up(const LinearPlaces& at, const Tensor& x, Tensor& up, Tensor& activated) {
  linear(at, x, up);
  activated.activated = &up;
}

void Operations::final_norm(const NormPlace& at, const Tensor& x) {
  norm_forward(workers_, read_normed(at, x), counted(), hidden_);
}

// ---- The head ----

void Operations::set_targets(const std::int32_t* targets) {
  counted_ = 0;
  for (Index row = 0; row < rows_; ++row) {
    if (targets[row] < 0) continue;
    at_.as<std::int32_t>()[counted_] = static_cast<std::int32_t>(row);
    targets_.as<std::int32_t>()[counted_++] = targets[row];
  }
}

Head Operations::head() {
  return {hidden_,   head_table(),         model_.vocabulary, targets_.as<std::int32_t>(),
          counted(), log_sums_.as<float>()};
}

double Operations::loss(bool for_backward) {
  double* const losses = chunk_losses_.as<double>();
  if (for_backward && counted_ < rows_) g_.values.clear();  // rows that do not count have no gradient
  if (keeps_logits(model_)) return train::head(workers_, head(), logits_, losses);
  return head_in_pieces(workers_, head(), for_backward ? &g_.values : nullptr, losses);
}

void Operations::logits(float* values) {
  const float* const table = head_table();
  const Index width = model_.width, vocabulary = model_.vocabulary;
  workers_.pieces((vocabulary + kHeadColumns - 1) / kHeadColumns, [&](Index piece, Arena& arena) {
    const Index column = piece * kHeadColumns, columns = std::min(kHeadColumns, vocabulary - column);
    const View in = hidden_.read(0, 1, 0, width, arena.floats(width));
    product(1, columns, width, 1, in, transposed({table + column * width, width}), 0,
            {values + column, vocabulary});
  });
}

void Operations::head_backward(const NormPlace& at, const Tensor& x) {
  const Normed in = read_normed(at, x);
  std::fill_n(norm_sums_.as<float>(), norm_sums_.bytes() / 4, 0.0f);  // of chunks of which no row counts
  if (keeps_logits(model_))
    train::head_backward(workers_, head(), scale_, logits_, in, g_.values, norm_sums_.as<float>());
  else
    head_in_pieces_backward(workers_, counted(), scale_, in, g_.values, norm_sums_.as<float>());
}

FillRows Operations::fill_head() {
  if (keeps_logits(model_))
    return [this](Index first, Index count, float* tile) {
      const Stored outputs(logits_), inputs(hidden_);
      weight_gradient(workers_, {outputs, 0, model_.vocabulary}, {inputs, 0, model_.width}, counted_, first,
                      count, tile);
    };
  return [this, head = head()](Index first, Index count, float* tile) {
    head_gradient(workers_, head, scale_, first, count, tile);
  };
}

// A row's softmax less its target: no longer than the root of 2, where the loss is finite. Times the scale it is kept in
// the type of the activations.
double Operations::head_bound() {
  if (std::abs(scale_) > 0x1p15f) return std::numeric_limits<double>::infinity();
  return std::sqrt(2.0 * static_cast<double>(counted_)) * static_cast<double>(std::abs(scale_)) *
         frobenius_norm(workers_, {Stored(hidden_), 0, model_.width}, counted_);
}

// Of a table whose rows were read: the sum of some rows of g.
double Operations::table_bound() {
  return std::sqrt(static_cast<double>(rows_)) *
         frobenius_norm(workers_, {Stored(g_.values), 0, model_.width}, rows_);
}

void Operations::take_head() {
  gradients_->take(places().head, fill_head(), [this] { return head_bound(); });
}

// The gradient of a table that is the output head as well is the sum of both.
void Operations::take_embeddings() {
  if (places().positions >= 0)
    gradients_->take(
        places().positions,
        [&](Index first, Index count, float* tile) {
          std::fill_n(tile, count * model_.width, 0.0f);
          embedding_gradient(workers_, g_.values, positions(), rows_, first, count, tile);
        },
        [this] { return table_bound(); });
  const FillRows as_head = model_.tied ? fill_head() : nullptr;
  gradients_->take(
      places().tokens,
      [&](Index first, Index count, float* tile) {
        if (model_.tied)
          as_head(first, count, tile);
        else
          std::fill_n(tile, count * model_.width, 0.0f);
        embedding_gradient(workers_, g_.values, tokens(), rows_, first, count, tile);
      },
      [this] { return table_bound() + (model_.tied ? head_bound() : 0); });
}

// ---- Backward ----

Operations::Tensor& Operations::up_backward(const LinearPlaces& at, const Tensor& up) {
  activated_backward(workers_, g_.values, linear_of(at, false).front(), rows_,
                     Activated(up.values, model_.mlp), dup_.values);
  return dup_;
}

void Operations::linear_backward(const LinearPlaces& at) {
  train::linear_backward(workers_, g_.values, linear_of(at, false).front(), rows_, dattended_.values);
}

Operations::Tensor& Operations::attend_backward(const LayerPlaces& at, const Tensor& qkv,
                                                const Tensor& attended) {
  train::attend_backward(workers_, attention(at), qkv.values, attended.values, attended.log_sums.as<float>(),
                         dattended_.values, dqkv_.values, head_norm_sums_.as<float>());
  return dqkv_;
}

void Operations::norm_linear_backward(const NormPlace& norm, const LinearPlaces& at, const Tensor& dy,
                                      const Tensor& x) {
  const Normed in = read_normed(norm, x);
  normed_backward(workers_, dy.values, linear_of(at, false), rows_, in, g_.values, norm_sums_.as<float>());
}

// As the matrix lies: x^T dy, or dy^T x.
void Operations::take_linear(const LinearPlaces& places, const Tensor& x, const Tensor& dy) {
  const Stored out(dy.values), up(x.activated != nullptr ? x.activated->values : x.values);
  read(x, [&](const Source& in) {
    for (const LinearPlace& at : places) {
      const Part inputs = {in, 0, at.in}, outputs = {out, at.column, at.out};
      gradients_->take(
          at.weight,
          [&](Index first, Index count, float* tile) {
            if (model_.outputs_first)
              weight_gradient(workers_, outputs, inputs, rows_, first, count, tile);
            else
              weight_gradient(workers_, inputs, outputs, rows_, first, count, tile);
          },
          [&] {
            const double norm = frobenius_norm(workers_, outputs, rows_);
            if (x.activated == nullptr) return norm * frobenius_norm(workers_, inputs, rows_);
            // Without the function, which costs more than all the rest: |gelu(x)| <= |x|, |silu(x) y| <= |x y|.
            const double before = frobenius_norm(workers_, {up, 0, up.matrix.columns()}, rows_);
            return norm * (model_.mlp == Mlp::swiglu ? before * before : before);
          });
      if (at.bias < 0) continue;
      gradients_->take(at.bias, [&](Index first, Index count, float* tile) {
        bias_gradient(workers_, dy.values, rows_, at.column + first, count, tile);
      });
    }
  });
}

void Operations::take_norm(const NormPlace& at) {
  for (const bool bias : {false, true}) {
    if (bias && at.bias < 0) continue;
    gradients_->take(bias ? at.bias : at.weight, [&](Index first, Index count, float* tile) {
      norm_gradient(norm_sums_.as<float>(), chunks_of(rows_), model_.width, bias, first, count, tile);
    });
  }
}

void Operations::take_head_norms(const LayerPlaces& at) {
  if (!model_.head_norms) return;
  for (const bool key : {false, true})
    gradients_->take(key ? at.key_norm.weight : at.query_norm.weight,
                     [&](Index first, Index count, float* tile) {
                       norm_gradient(head_norm_sums_.as<float>(), sequences_ * model_.kv_heads,
                                     model_.head_width, key, first, count, tile);
                     });
}

}  // namespace scruple::train
