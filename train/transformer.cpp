#include "train/transformer.h"

#include <algorithm>
#include <stdexcept>

#include "train/layers.h"

namespace scruple::train {
namespace {

std::string text(Index number) { return std::to_string(number); }

}  // namespace

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

  State(const Description& m, Index batch, Precision precision, Threads& threads, Ledger& ledger,
        Recompute what)
      : model(m),
        places(places_of(m)),
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
        rotation(ledger, "workspace", rotation_floats(m) * 4),
        chunk_losses(ledger, "workspace", chunks_of(rows) * 8),
        matrix_scratch(ledger, "workspace", largest_matrix(m) * 4),
        vector_scratch(ledger, "workspace", vector_floats(m) * 4),
        workspace(ledger, threads.count(), workspace_of(m)),
        workers{threads, workspace} {
    for (Index i = 0; i <= m.layers; ++i) residuals.emplace_back(ledger, precision, m, rows);
    for (Index i = 0; i < (what == Recompute::block ? 1 : m.layers); ++i)
      insides.emplace_back(ledger, precision, m, rows);
    for (Index i = 0; i < (what == Recompute::none ? m.layers : 1); ++i)
      expansions.emplace_back(ledger, precision, rows, m.expanded_width());
    if (m.rotary.base > 0 && !ledger.only_counts()) rotation_of(m, rotation.as<float>());
  }

  // Both embeddings are wanted at once, and all matrices of one input.
  static Index largest_matrix(const Description& m) {
    return std::max((m.vocabulary + m.positions) * m.width, m.width * widest_outputs(m));
  }
  static Index widest_outputs(const Description& m) {
    return std::max({m.width, m.qkv_width(), m.expanded_width()});
  }
  // A norm, the norms of heads, and the biases of all products of one input.
  static Index vector_floats(const Description& m) {
    return 2 * m.width + (m.head_norms ? 2 * m.head_width : 0) + widest_outputs(m);
  }

  // ---- Weights, each asked for where it is needed ----
  const float* values(Weights& weights, int parameter, float* scratch) {
    return parameter < 0 ? nullptr : weights.values(parameter, scratch);
  }
  Norm norm(Weights& weights, const NormPlace& at) {
    float* scratch = vector_scratch.as<float>();
    return {values(weights, at.weight, scratch), values(weights, at.bias, scratch + model.width)};
  }
  std::vector<Linear> linear_at(Weights& weights, const LinearPlaces& places_at, bool biases = true) {
    std::vector<Linear> layers_at;
    float *matrix = matrix_scratch.as<float>(),
          *vector = vector_scratch.as<float>() + vector_floats(model) - widest_outputs(model);
    for (const LinearPlace& at : places_at) {
      layers_at.push_back({at.in, at.out, at.column, weights.values(at.weight, matrix),
                           biases ? values(weights, at.bias, vector) : nullptr, model.outputs_first});
      matrix += at.in * at.out, vector += at.out;
    }
    return layers_at;
  }
  std::vector<Linear> without_biases(Weights& weights, const LinearPlaces& at) {
    return linear_at(weights, at, false);
  }
  Head head_of(Weights& weights) {
    const float* table = weights.values(places.head, matrix_scratch.as<float>());
    return {hidden, table, model.vocabulary, targets.as<std::int32_t>(), rows, log_sums.as<float>()};
  }
  Attention attention(Weights& weights, const LayerPlaces& at, Index count, Index length) {
    float* scratch = vector_scratch.as<float>() + 2 * model.width;
    return {count,
            length,
            model.heads,
            model.kv_heads,
            model.head_width,
            positions.as<std::int32_t>(),
            model.rotary.base > 0 ? rotation.as<float>() : nullptr,
            values(weights, at.query_norm.weight, scratch),
            values(weights, at.key_norm.weight, scratch + model.head_width),
            static_cast<float>(model.epsilon)};
  }

  const LayerPlaces& place_of(Index layer) const { return places.layers[static_cast<std::size_t>(layer)]; }
  Residual& residual_of(Index layer) { return residuals[static_cast<std::size_t>(layer)]; }
  Inside& inside_of(Index layer) { return insides[static_cast<std::size_t>(layer) % insides.size()]; }
  Matrix& expanded_of(Index layer) { return expansions[static_cast<std::size_t>(layer) % expansions.size()]; }

  void read(const Batch& batch);
  void place(const std::int32_t* starts, Index count, Index length);
  void run(Weights& weights, const std::int32_t* input, Index count, Index length);
  void attend_in(Weights& weights, Index layer, Index count, Index length);
  void expand_in(Weights& weights, Index layer, Index tokens_read);
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
  void check(const std::int32_t* list, Index count, const char* what) const;

  const Description model;
  const Places places;
  const Recompute recompute;
  const Index sequences, rows;
  Matrix hidden;  // the last layer's output, normalised
  Matrix logits;  // backward turns them into their gradients; empty where they are not kept
  Block log_sums, tokens, targets, positions;
  Index counted = 0;                        // targets
  float scale = 1;                          // of the gradient of each
  Matrix g, g_attended, g_qkv, g_expanded;  // gradients; g is that of the residual stream
  Block norm_sums, head_norm_sums, rotation, chunk_losses, matrix_scratch, vector_scratch;
  Workspace workspace;
  Workers workers;
  std::vector<Residual> residuals;  // before each layer, and after the last
  std::vector<Inside> insides;
  std::vector<Matrix> expansions;  // inside each MLP
  bool ready = false;              // for backward
};

// ---- Forward ----

void Transformer::State::check(const std::int32_t* list, Index count, const char* what) const {
  for (Index i = 0; i < count; ++i)
    if (list[i] < 0 || list[i] >= model.vocabulary)
      throw std::invalid_argument(std::string(what) + " " + text(i) + " is " + text(list[i]) +
                                  "; the model's vocabulary is 0 to " + text(model.vocabulary - 1));
}

void Transformer::State::read(const Batch& batch) {
  check(batch.tokens, rows, "token");
  counted = 0;
  for (Index i = 0; i < rows; ++i) {
    if (batch.targets[i] < 0) continue;
    ++counted;
    if (batch.targets[i] >= model.vocabulary)
      throw std::invalid_argument("target " + text(i) + " is " + text(batch.targets[i]) +
                                  "; the model's vocabulary is 0 to " + text(model.vocabulary - 1) +
                                  ", and a target below 0 counts for nothing");
  }
  place(batch.starts, sequences, model.context);
  std::copy_n(batch.tokens, rows, tokens.as<std::int32_t>());
  std::copy_n(batch.targets, rows, targets.as<std::int32_t>());
}

// Positions, from where documents start.
void Transformer::State::place(const std::int32_t* starts, Index count, Index length) {
  for (Index i = 0; i < count * length; ++i) {
    const Index here = i % length, before = here == 0 || starts == nullptr ? 0 : starts[i - 1];
    const Index start = starts == nullptr ? 0 : starts[i];
    if (start != before && start != here)
      throw std::invalid_argument("start " + text(i) + " is " + text(start) + ", of token " + text(here) +
                                  " of its window; give " + text(before) +
                                  ", where the document of the token before begins, or " + text(here) +
                                  " where another begins");
    positions.as<std::int32_t>()[i] = static_cast<std::int32_t>(here - start);
  }
}

void Transformer::State::run(Weights& weights, const std::int32_t* input, Index count, Index length) {
  Residual& first = residuals.front();
  float* scratch = matrix_scratch.as<float>();
  const float* tokens_at = weights.values(places.tokens, scratch);
  const float* positions_at = values(weights, places.positions, scratch + model.vocabulary * model.width);
  embed(workers, input, positions.as<std::int32_t>(), count * length, tokens_at, positions_at, first.x,
        first.statistics);
  for (Index i = 0; i < model.layers; ++i) {
    attend_in(weights, i, count, length);
    expand_in(weights, i, count * length);
    Residual& out = residual_of(i + 1);
    linear_residual(workers, Activated(expanded_of(i), model.mlp),
                    linear_at(weights, place_of(i).mlp_out).front(), count * length, inside_of(i).middle.x,
                    out.x, out.statistics);
  }
  const Norm last = norm(weights, places.last_norm);
  normalise(workers, Normed(residuals.back().x, residuals.back().statistics, last), count * length, hidden);
}

// From the layer's input to its middle.
void Transformer::State::attend_in(Weights& weights, Index layer, Index count, Index length) {
  const Residual& in = residual_of(layer);
  Inside& inside = inside_of(layer);
  const LayerPlaces& at = place_of(layer);
  const Norm before = norm(weights, at.attention_norm);
  linear(workers, Normed(in.x, in.statistics, before), linear_at(weights, at.attention_in), count * length,
         inside.qkv);
  attend(workers, attention(weights, at, count, length), inside.qkv, inside.attended,
         inside.log_sums.as<float>());
  linear_residual(workers, Stored(inside.attended), linear_at(weights, at.attention_out).front(),
                  count * length, in.x, inside.middle.x, inside.middle.statistics);
}

void Transformer::State::expand_in(Weights& weights, Index layer, Index tokens_read) {
  const Residual& middle = inside_of(layer).middle;
  const Norm before = norm(weights, place_of(layer).mlp_norm);
  linear(workers, Normed(middle.x, middle.statistics, before), linear_at(weights, place_of(layer).mlp_in),
         tokens_read, expanded_of(layer));
}

// The last layer is the one that forward has left.
void Transformer::State::compute_again(Weights& weights, Index layer) {
  if (recompute == Recompute::none || layer + 1 == model.layers) return;
  if (recompute == Recompute::block) attend_in(weights, layer, sequences, model.context);
  expand_in(weights, layer, rows);
}

double Transformer::State::loss(Weights& weights, bool for_backward) {
  run(weights, tokens.as<std::int32_t>(), sequences, model.context);
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
  const Normed in(residuals.back().x, residuals.back().statistics, norm(weights, places.last_norm));
  if (keeps_logits(model))
    head_backward(workers, head_of(weights), scale, logits, in, g, norm_sums.as<float>());
  else
    head_in_pieces_backward(workers, rows, scale, in, g, norm_sums.as<float>());
  take_norm(gradients, places.last_norm);
  if (!model.tied) gradients.take(places.head, fill_head(weights));
}

// A weight may change when its gradient is taken: what reads it comes first. A norm's weight is read for
// the gradient of the linear layer after it.
void Transformer::State::back_through_mlp(Weights& weights, Gradients& gradients, Index index) {
  const Residual& middle = inside_of(index).middle;
  const LayerPlaces& at = place_of(index);
  const Activated activated(expanded_of(index), model.mlp);
  activated_backward(workers, g, without_biases(weights, at.mlp_out).front(), rows, activated, g_expanded);
  take_linear(gradients, at.mlp_out, activated, g);
  const Normed in(middle.x, middle.statistics, norm(weights, at.mlp_norm));
  normed_backward(workers, g_expanded, without_biases(weights, at.mlp_in), rows, in, g,
                  norm_sums.as<float>());
  take_linear(gradients, at.mlp_in, in, g_expanded);
  take_norm(gradients, at.mlp_norm);
}

void Transformer::State::back_through_attention(Weights& weights, Gradients& gradients, Index index) {
  const Inside& inside = inside_of(index);
  const LayerPlaces& at = place_of(index);
  linear_backward(workers, g, without_biases(weights, at.attention_out).front(), rows, g_attended);
  take_linear(gradients, at.attention_out, Stored(inside.attended), g);
  attend_backward(workers, attention(weights, at, sequences, model.context), inside.qkv, inside.attended,
                  inside.log_sums.as<float>(), g_attended, g_qkv, head_norm_sums.as<float>());
  if (model.head_norms) take_head_norms(gradients, at);
  const Normed in(residual_of(index).x, residual_of(index).statistics, norm(weights, at.attention_norm));
  normed_backward(workers, g_qkv, without_biases(weights, at.attention_in), rows, in, g,
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
  if (places.positions >= 0)
    gradients.take(places.positions, [&](Index first, Index count, float* tile) {
      std::fill_n(tile, count * model.width, 0.0f);
      embedding_gradient(workers, g, positions.as<std::int32_t>(), rows, first, count, tile);
    });
  const FillRows as_head = model.tied ? fill_head(weights) : nullptr;
  gradients.take(places.tokens, [&](Index first, Index count, float* tile) {
    if (model.tied)
      as_head(first, count, tile);
    else
      std::fill_n(tile, count * model.width, 0.0f);
    embedding_gradient(workers, g, tokens.as<std::int32_t>(), rows, first, count, tile);
  });
}

// ---- The model ----

Transformer::Transformer(const Description& model, std::int64_t batch, Precision activations,
                         Threads& threads, Ledger& ledger, Recompute recompute) {
  if (const std::string problem = problem_with(model); !problem.empty()) throw std::invalid_argument(problem);
  const Index most = (Index{1} << 31) / model.context;
  if (batch < 1 || batch > most)
    throw std::invalid_argument("a batch of " + text(batch) + " sequences was asked for; with a context of " +
                                text(model.context) + " choose from 1 to " + text(most));
  state_ = std::make_unique<State>(model, batch, activations, threads, ledger, recompute);
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
        "backward was called without a forward pass before it; each forward serves one "
        "backward, and next() uses the same memory: call forward first");
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

void Transformer::next(Weights& weights, const std::int32_t* tokens, std::int64_t count, float* logits) {
  State& s = *state_;
  s.ready = false;
  if (count < 1 || count > s.model.context)
    throw std::invalid_argument("the logits after " + text(count) +
                                " tokens were asked for; the context is 1 to " + text(s.model.context) +
                                ": pass the last ones");
  s.check(tokens, count, "token");
  s.place(nullptr, 1, count);
  s.run(weights, tokens, 1, count);
  const Index width = s.model.width;
  Arena arena(s.workspace);
  const View last = s.hidden.read(count - 1, 1, 0, width, arena.floats(width));
  const float* table = s.head_of(weights).table;
  product(1, s.model.vocabulary, width, 1, last, transposed({table, width}), 0, {logits, s.model.vocabulary});
}

}  // namespace scruple::train
