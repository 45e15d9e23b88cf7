#include "train/cpu/transformer.h"

#include <algorithm>
#include <stdexcept>

#include "train/cpu/operations.h"

namespace scruple::train {
namespace {

constexpr Index kAtOnce = 4 * kChunk;  // tokens that are fed together, at most

}  // namespace

// ---- Training ----

struct Transformer::State {
  State(const Setup& setup, Threads& threads, Ledger& ledger)
      : model(setup.shape),
        rows(setup.batch * model.context),
        on(setup, rows, false, threads, ledger),
        pass(on, on.places(), setup.recompute) {}

  double forward(WeightValues& weights, const Batch& batch, bool for_backward) {
    ready = false;
    counted = read_batch(model, rows, batch, on.positions());
    std::copy_n(batch.tokens, rows, on.tokens());
    on.set_targets(batch.targets);
    on.start(weights, nullptr);
    pass.forward();
    const double sum = on.loss(for_backward);
    ready = for_backward;
    return sum / static_cast<double>(std::max<Index>(counted, 1));
  }

  const Description model;
  const Index rows;
  Operations on;
  Pass<Operations> pass;
  Index counted = 0;   // targets
  bool ready = false;  // for backward
};

Transformer::Transformer(const Setup& setup, Threads& threads, Ledger& ledger) {
  check_setup(setup);
  state_ = std::make_unique<State>(setup, threads, ledger);
}

Transformer::~Transformer() = default;

double Transformer::forward(WeightValues& weights, const Batch& batch) {
  return state_->forward(weights, batch, true);
}

double Transformer::loss(WeightValues& weights, const Batch& batch) {
  return state_->forward(weights, batch, false);
}

void Transformer::backward(WeightValues& weights, Gradients& gradients, float scale) {
  State& s = *state_;
  if (!s.ready)
    throw std::logic_error(
        "backward was called without a forward pass before it; each forward serves one backward, and loss() "
        "uses the same memory: call forward first");
  s.ready = false;
  s.on.start(weights, &gradients);
  s.on.set_scale(scale / static_cast<float>(std::max<Index>(s.counted, 1)));
  s.pass.backward();
  s.on.take_embeddings();
}

// ---- Generation ----

struct CachedTransformer::State : CachedPass<Operations> {
  using CachedPass::CachedPass;
};

CachedTransformer::CachedTransformer(const Description& model, Threads& threads, Ledger& ledger) {
  const Setup setup = {model, 1};
  check_setup(setup);
  state_ = std::make_unique<State>(setup, kAtOnce, true, threads, ledger);
}

CachedTransformer::~CachedTransformer() = default;

void CachedTransformer::feed(WeightValues& weights, const std::int32_t* tokens, std::int64_t count,
                             float* logits) {
  state_->feed(weights, tokens, count, logits);
}

std::int64_t CachedTransformer::length() const { return state_->length(); }

void CachedTransformer::clear() { state_->clear(); }

}  // namespace scruple::train
