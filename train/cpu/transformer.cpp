#include "train/cpu/transformer.h"

#include <algorithm>
#include <stdexcept>

#include "train/cpu/loader.h"

namespace scruple::train {
struct Transformer::State {
  // What forward keeps for backward. Norms, rotations, activation functions and attention weights are always
  // computed again. Here: the residual stream before a layer, or in the middle of one.
  struct Residual {
    Residual(Ledger& ledger, Precision precision, const Description& model, Index rows)
        : x(ledger, precision, rows, model.width), statistics(ledger, model, rows) {}
    Matrix x;
    Statistics statistics;
  };
  // Here: of every layer, or only of the one that is at work (Recompute::block).
  struct Inside {
    Inside(Ledger& ledger, Precision precision, const Description& model, Index rows)
        : qkv(ledger, precision, rows, model.qkv_width()),
          attended(ledger, precision, rows, model.query_width()),
          log_sums(ledger, "activations", rows * model.heads * static_cast<Index>(sizeof(float))),
          middle(ledger, precision, model, rows) {}
    Matrix qkv, attended;
    Block log_sums;
    Residual middle;
  };

  State(const Setup& setup, Threads& threads, Ledger& ledger)
      : State(setup.shape, setup.batch, setup.activations, setup.recompute, threads, ledger) {}
  State(const Description& m, Index batch, Precision precision, Recompute what, Threads& threads,
        Ledger& ledger)
      : model(m),
        recompute(what),
        sequences(batch),
        rows(batch * m.context),
        hidden(ledger, precision, rows, m.width),
        logits(ledger, precision, keeps_logits(m) ? rows : 0, m.vocabulary),
        log_sums(ledger, "activations", rows * 4),
        tokens(ledger, "activations", rows * 4),
        targets(ledger, "activations", rows * 4),
        positions(ledger, "activations", rows * 4),
        g(ledger, precision, rows, m.width),
        g_attended(ledger, precision, rows, m.query_width()),
        g_qkv(ledger, precision, rows, m.qkv_width()),
        g_expanded(ledger, precision, rows, m.expanded_width()),
        norm_sums(ledger, "workspace", chunks_of(rows) * 2 * m.width * 4),
        head_norm_sums(ledger, "workspace", m.head_norms ? batch * m.kv_heads * 2 * m.head_width * 4 : 0),
        chunk_losses(ledger, "workspace", chunks_of(rows) * 8),
        loader(m, ledger),
        workspace(ledger, threads.count(), workspace_of(m)),
        workers{threads, workspace} {
    for (Index i = 0; i <= m.layers; ++i) residuals.emplace_back(ledger, precision, m, rows);
    for (Index i = 0; i < (what == Recompute::block ? 1 : m.layers); ++i)
      insides.emplace_back(ledger, precision, m, rows);
    for (Index i = 0; i < (what == Recompute::none ? m.layers : 1); ++i)
      expansions.emplace_back(ledger, precision, rows, m.expanded_width());
  }

  Head head_of(Weights& weights) {
    return {hidden, loader.head(weights), model.vocabulary, targets.as<std::int32_t>(),
            rows,   log_sums.as<float>()};
  }
  Attention attention(Weights& weights, const LayerPlaces& at) {
    return loader.attention(weights, at, sequences, model.context, positions.as<std::int32_t>());
  }
  const Places& places() const { return loader.places(); }
  const LayerPlaces& place_of(Index layer) const { return places().layers[static_cast<std::size_t>(layer)]; }
  Residual& residual_of(Index layer) { return residuals[static_cast<std::size_t>(layer)]; }
  Inside& inside_of(Index layer) { return insides[static_cast<std::size_t>(layer) % insides.size()]; }
  Matrix& expanded_of(Index layer) { return expansions[static_cast<std::size_t>(layer) % expansions.size()]; }

  void read(const Batch& batch);
  void run(Weights& weights);
  void attend_in(Weights& weights, Index layer);
  void expand_in(Weights& weights, Index layer);
  void compute_again(Weights& weights, Index layer);
  double loss(Weights& weights, bool for_backward);
  void back_through_head(Weights& weights, Gradients& gradients);
  void back_through_mlp(Weights& weights, Gradients& gradients, Index index);
  void back_through_attention(Weights& weights, Gradients& gradients, Index index);
  void take_linear(Gradients& gradients, const LinearPlaces& places_at, const Source& in, const Matrix& dy);
  void take_norm(Gradients& gradients, const NormPlace& at);
  void take_head_norms(Gradients& gradients, const LayerPlaces& at);
  FillRows fill_head(Weights& weights);
  void take_embeddings(Weights& weights, Gradients& gradients);

  const Description model;
  const Recompute recompute;
  const Index sequences, rows;
  Matrix hidden;  // the last layer's output, normalised
  Matrix logits;  // backward turns them into their gradients; empty where they are not kept
  Block log_sums, tokens, targets, positions;
  Index counted = 0;                        // targets
  float scale = 1;                          // of the gradient of each
  Matrix g, g_attended, g_qkv, g_expanded;  // gradients; g is that of the residual stream
  Block norm_sums, head_norm_sums, chunk_losses;
  Loader loader;
  Workspace workspace;
  Workers workers;
  std::vector<Residual> residuals;  // before each layer, and after the last
  std::vector<Inside> insides;
  std::vector<Matrix> expansions;  // inside each MLP
  bool ready = false;              // for backward
};

// ---- Forward ----

void Transformer::State::read(const Batch& batch) {
  counted = read_batch(model, rows, batch, positions.as<std::int32_t>());
  std::copy_n(batch.tokens, rows, tokens.as<std::int32_t>());
  std::copy_n(batch.targets, rows, targets.as<std::int32_t>());
}

void Transformer::State::run(Weights& weights) {
  Residual& first = residuals.front();
  loader.embed(workers, weights, tokens.as<std::int32_t>(), positions.as<std::int32_t>(), rows, first.x,
               first.statistics);
  for (Index i = 0; i < model.layers; ++i) {
    attend_in(weights, i);
    expand_in(weights, i);
    Residual& out = residual_of(i + 1);
    linear_residual(workers, Activated(expanded_of(i), model.mlp),
                    loader.linear(weights, place_of(i).mlp_out).front(), rows, inside_of(i).middle.x, out.x,
                    out.statistics);
  }
  const Norm last = loader.norm(weights, places().last_norm);
  normalise(workers, Normed(residuals.back().x, residuals.back().statistics, last), rows, hidden);
}

// From the layer's input to its middle.
void Transformer::State::attend_in(Weights& weights, Index layer) {
  const Residual& in = residual_of(layer);
  Inside& inside = inside_of(layer);
  const LayerPlaces& at = place_of(layer);
  const Norm before = loader.norm(weights, at.attention_norm);
  linear(workers, Normed(in.x, in.statistics, before), loader.linear(weights, at.attention_in), rows,
         inside.qkv);
  attend(workers, attention(weights, at), inside.qkv, inside.attended, inside.log_sums.as<float>());
  linear_residual(workers, Stored(inside.attended), loader.linear(weights, at.attention_out).front(), rows,
                  in.x, inside.middle.x, inside.middle.statistics);
}

void Transformer::State::expand_in(Weights& weights, Index layer) {
  const Residual& middle = inside_of(layer).middle;
  const Norm before = loader.norm(weights, place_of(layer).mlp_norm);
  linear(workers, Normed(middle.x, middle.statistics, before), loader.linear(weights, place_of(layer).mlp_in),
         rows, expanded_of(layer));
}

// The last layer is the one that forward has left.
void Transformer::State::compute_again(Weights& weights, Index layer) {
  if (recompute == Recompute::none || layer + 1 == model.layers) return;
  if (recompute == Recompute::block) attend_in(weights, layer);
  expand_in(weights, layer);
}

double Transformer::State::loss(Weights& weights, bool for_backward) {
  run(weights);
  double* losses = chunk_losses.as<double>();
  const Head last = head_of(weights);
  const double sum = keeps_logits(model) ? head(workers, last, logits, losses)
                                         : head_in_pieces(workers, last, for_backward ? &g : nullptr, losses);
  return sum / static_cast<double>(std::max<Index>(counted, 1));
}

// ---- Backward ----

// As the matrix lies: x^T dy, or dy^T x.
void Transformer::State::take_linear(Gradients& gradients, const LinearPlaces& places_at, const Source& in,
                                     const Matrix& dy) {
  const Stored out(dy);
  for (const LinearPlace& at : places_at) {
    const Part inputs = {in, 0, at.in}, outputs = {out, at.column, at.out};
    gradients.take(at.weight, [&](Index first, Index count, float* tile) {
      if (model.outputs_first)
        weight_gradient(workers, outputs, inputs, rows, first, count, tile);
      else
        weight_gradient(workers, inputs, outputs, rows, first, count, tile);
    });
    if (at.bias < 0) continue;
    gradients.take(at.bias, [&](Index first, Index count, float* tile) {
      bias_gradient(workers, dy, rows, at.column + first, count, tile);
    });
  }
}

void Transformer::State::take_norm(Gradients& gradients, const NormPlace& at) {
  for (const bool bias : {false, true}) {
    if (bias && at.bias < 0) continue;
    gradients.take(bias ? at.bias : at.weight, [&](Index first, Index count, float* tile) {
      norm_gradient(norm_sums.as<float>(), chunks_of(rows), model.width, bias, first, count, tile);
    });
  }
}

void Transformer::State::take_head_norms(Gradients& gradients, const LayerPlaces& at) {
  for (const bool key : {false, true})
    gradients.take(key ? at.key_norm.weight : at.query_norm.weight,
                   [&](Index first, Index count, float* tile) {
                     norm_gradient(head_norm_sums.as<float>(), sequences * model.kv_heads, model.head_width,
                                   key, first, count, tile);
                   });
}

void Transformer::State::back_through_head(Weights& weights, Gradients& gradients) {
  const Normed in(residuals.back().x, residuals.back().statistics, loader.norm(weights, places().last_norm));
  if (keeps_logits(model))
    head_backward(workers, head_of(weights), scale, logits, in, g, norm_sums.as<float>());
  else
    head_in_pieces_backward(workers, rows, scale, in, g, norm_sums.as<float>());
  take_norm(gradients, places().last_norm);
  if (!model.tied) gradients.take(places().head, fill_head(weights));
}

// A weight may change when its gradient is taken: what reads it comes first. A norm's weight is read for
// the gradient of the linear layer after it.
void Transformer::State::back_through_mlp(Weights& weights, Gradients& gradients, Index index) {
  const Residual& middle = inside_of(index).middle;
  const LayerPlaces& at = place_of(index);
  const Activated activated(expanded_of(index), model.mlp);
  activated_backward(workers, g, loader.without_biases(weights, at.mlp_out).front(), rows, activated,
                     g_expanded);
  take_linear(gradients, at.mlp_out, activated, g);
  const Normed in(middle.x, middle.statistics, loader.norm(weights, at.mlp_norm));
  normed_backward(workers, g_expanded, loader.without_biases(weights, at.mlp_in), rows, in, g,
                  norm_sums.as<float>());
  take_linear(gradients, at.mlp_in, in, g_expanded);
  take_norm(gradients, at.mlp_norm);
}

void Transformer::State::back_through_attention(Weights& weights, Gradients& gradients, Index index) {
  const Inside& inside = inside_of(index);
  const LayerPlaces& at = place_of(index);
  linear_backward(workers, g, loader.without_biases(weights, at.attention_out).front(), rows, g_attended);
  take_linear(gradients, at.attention_out, Stored(inside.attended), g);
  attend_backward(workers, attention(weights, at), inside.qkv, inside.attended, inside.log_sums.as<float>(),
                  g_attended, g_qkv, head_norm_sums.as<float>());
  if (model.head_norms) take_head_norms(gradients, at);
  const Normed in(residual_of(index).x, residual_of(index).statistics,
                  loader.norm(weights, at.attention_norm));
  normed_backward(workers, g_qkv, loader.without_biases(weights, at.attention_in), rows, in, g,
                  norm_sums.as<float>());
  take_linear(gradients, at.attention_in, in, g_qkv);
  take_norm(gradients, at.attention_norm);
}

FillRows Transformer::State::fill_head(Weights& weights) {
  if (keeps_logits(model))
    return [this](Index first, Index count, float* tile) {
      const Stored outputs(logits), inputs(hidden);
      weight_gradient(workers, {outputs, 0, model.vocabulary}, {inputs, 0, model.width}, rows, first, count,
                      tile);
    };
  return [this, head = head_of(weights)](Index first, Index count, float* tile) {
    head_gradient(workers, head, scale, first, count, tile);
  };
}

// The gradient of a table that is the output head as well is the sum of both.
void Transformer::State::take_embeddings(Weights& weights, Gradients& gradients) {
  if (places().positions >= 0)
    gradients.take(places().positions, [&](Index first, Index count, float* tile) {
      std::fill_n(tile, count * model.width, 0.0f);
      embedding_gradient(workers, g, positions.as<std::int32_t>(), rows, first, count, tile);
    });
  const FillRows as_head = model.tied ? fill_head(weights) : nullptr;
  gradients.take(places().tokens, [&](Index first, Index count, float* tile) {
    if (model.tied)
      as_head(first, count, tile);
    else
      std::fill_n(tile, count * model.width, 0.0f);
    embedding_gradient(workers, g, tokens.as<std::int32_t>(), rows, first, count, tile);
  });
}

// ---- The model ----

Transformer::Transformer(const Setup& setup, Threads& threads, Ledger& ledger) {
  check_setup(setup);
  state_ = std::make_unique<State>(setup, threads, ledger);
}

Transformer::~Transformer() = default;

double Transformer::forward(Weights& weights, const Batch& batch) {
  State& s = *state_;
  s.ready = false;
  s.read(batch);
  const double loss = s.loss(weights, true);
  s.ready = true;
  return loss;
}

double Transformer::loss(Weights& weights, const Batch& batch) {
  State& s = *state_;
  s.ready = false;
  s.read(batch);
  return s.loss(weights, false);
}

void Transformer::backward(Weights& weights, Gradients& gradients, float scale) {
  State& s = *state_;
  if (!s.ready)
    throw std::logic_error(
        "backward was called without a forward pass before it; each forward serves one backward, and loss() "
        "uses the same memory: call forward first");
  s.ready = false;
  s.scale = scale / static_cast<float>(std::max<Index>(s.counted, 1));
  s.back_through_head(weights, gradients);
  for (Index i = s.model.layers - 1; i >= 0; --i) {
    s.compute_again(weights, i);
    s.back_through_mlp(weights, gradients, i);
    s.back_through_attention(weights, gradients, i);
  }
  s.take_embeddings(weights, gradients);
}

}  // namespace scruple::train
