#include "train/cpu/generate.h"

#include <algorithm>
#include <numeric>
#include <stdexcept>
#include <string>
#include <vector>

#include "train/cpu/loader.h"

namespace scruple::train {
namespace {

constexpr Index kAtOnce = 4 * kChunk;  // tokens that pass through the layers together, at most

}  // namespace

struct CachedTransformer::State {
  State(const Description& m, Threads& threads, Ledger& ledger)
      : model(m),
        rows(std::min(kAtOnce, m.context)),
        x(ledger, Precision::fp32, rows, m.width),
        middle(ledger, Precision::fp32, rows, m.width),
        qkv(ledger, Precision::fp32, rows, m.qkv_width()),
        attended(ledger, Precision::fp32, rows, m.query_width()),
        expanded(ledger, Precision::fp32, rows, m.expanded_width()),
        hidden(ledger, Precision::fp32, rows, m.width),
        x_statistics(ledger, m, rows),
        middle_statistics(ledger, m, rows),
        positions(ledger, "activations", rows * 4),
        cache(ledger, "cache", 2 * m.layers * layer_floats() * 4),
        loader(m, ledger),
        workspace(ledger, threads.count(), workspace_of(m)),
        workers{threads, workspace} {}

  Index layer_floats() const { return model.context * model.key_width(); }
  Cache cache_of(Index layer) const {
    float* keys = cache.as<float>() + 2 * layer * layer_floats();
    return {keys, keys + layer_floats(), model.context, length};
  }
  void run(Weights& weights, const std::int32_t* tokens, Index count);
  void run_layer(Weights& weights, Index layer, Index count);
  void last_logits(Weights& weights, Index row, float* logits);

  const Description model;
  const Index rows;
  Matrix x, middle, qkv, attended, expanded, hidden;
  Statistics x_statistics, middle_statistics;
  Block positions, cache;
  Loader loader;
  Workspace workspace;
  Workers workers;
  Index length = 0;
};

void CachedTransformer::State::run(Weights& weights, const std::int32_t* tokens, Index count) {
  std::iota(positions.as<std::int32_t>(), positions.as<std::int32_t>() + count,
            static_cast<std::int32_t>(length));
  loader.embed(workers, weights, tokens, positions.as<std::int32_t>(), count, x, x_statistics);
  for (Index i = 0; i < model.layers; ++i) run_layer(weights, i, count);
}

void CachedTransformer::State::run_layer(Weights& weights, Index layer, Index count) {
  const LayerPlaces& at = loader.places().layers[static_cast<std::size_t>(layer)];
  const Norm first = loader.norm(weights, at.attention_norm);
  linear(workers, Normed(x, x_statistics, first), loader.linear(weights, at.attention_in), count, qkv);
  attend_cached(workers, loader.attention(weights, at, 1, count, positions.as<std::int32_t>()), qkv,
                cache_of(layer), attended);
  linear_residual(workers, Stored(attended), loader.linear(weights, at.attention_out).front(), count, x,
                  middle, middle_statistics);
  const Norm second = loader.norm(weights, at.mlp_norm);
  linear(workers, Normed(middle, middle_statistics, second), loader.linear(weights, at.mlp_in), count,
         expanded);
  linear_residual(workers, Activated(expanded, model.mlp), loader.linear(weights, at.mlp_out).front(), count,
                  middle, x, x_statistics);
}

void CachedTransformer::State::last_logits(Weights& weights, Index row, float* logits) {
  const Norm last = loader.norm(weights, loader.places().last_norm);
  normalise(workers, Normed(x, x_statistics, last), row + 1, hidden);
  const float* table = loader.head(weights);
  const Index width = model.width, vocabulary = model.vocabulary;
  workers.pieces((vocabulary + kHeadColumns - 1) / kHeadColumns, [&](Index piece, Arena& arena) {
    const Index column = piece * kHeadColumns, columns = std::min(kHeadColumns, vocabulary - column);
    const View in = hidden.read(row, 1, 0, width, arena.floats(width));
    product(1, columns, width, 1, in, transposed({table + column * width, width}), 0,
            {logits + column, vocabulary});
  });
}

CachedTransformer::CachedTransformer(const Description& model, Threads& threads, Ledger& ledger) {
  if (const std::string problem = problem_with(model); !problem.empty()) throw std::invalid_argument(problem);
  state_ = std::make_unique<State>(model, threads, ledger);
}

CachedTransformer::~CachedTransformer() = default;

void CachedTransformer::feed(Weights& weights, const std::int32_t* tokens, std::int64_t count,
                             float* logits) {
  State& s = *state_;
  if (count < 1 || count > s.model.context - s.length)
    throw std::invalid_argument("feeding " + std::to_string(count) + " tokens after " +
                                std::to_string(s.length) + " was asked for; the context is " +
                                std::to_string(s.model.context) +
                                ": feed at least 1, and beyond the context clear, then feed the last ones");
  check_tokens(s.model, tokens, count);
  for (Index first = 0; first < count; first += s.rows) {
    const Index now = std::min(s.rows, count - first);
    s.run(weights, tokens + first, now);
    if (first + now == count) s.last_logits(weights, now - 1, logits);
    s.length += now;
  }
}

std::int64_t CachedTransformer::length() const { return state_->length; }

void CachedTransformer::clear() { state_->length = 0; }

}  // namespace scruple::train
