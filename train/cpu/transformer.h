// The forward and backward pass of a model on the CPU. It asks for weights in fp32 and hands gradients over,
// and knows neither how weights are stored nor what the optimizer does with gradients.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>

#include "engine/threads.h"
#include "train/pass/backend.h"

namespace scruple::train {

// Whoever keeps the weights.
struct WeightValues {
  virtual ~WeightValues() = default;
  // The fp32 values that the model computes with: its own memory, or `scratch` filled with them. `scratch`
  // stays as it is until the layer is done; then it serves another parameter.
  virtual const float* values(int parameter, float* scratch) = 0;
};

// Computes rows [first, first + rows) of a gradient. The same rows give the same bits when asked again; other
// tiles of the same rows may round differently. Reads no other rows of the weight, since they may have been
// stepped. It uses the model's threads, so it must not be called from them.
using FillRows = std::function<void(std::int64_t first, std::int64_t rows, float* tile)>;

// What no element of a gradient is larger than, in magnitude, where it is finite and the loss is; by the rule of Cauchy
// and Schwarz, at a small part of what the gradient costs.
using Bound = std::function<double()>;

// Whoever takes the gradients. Each parameter is handed over once per backward pass, as soon as its
// gradient can be computed; its weight may be stepped inside the call, each row once its tile is there.
struct Gradients {
  virtual ~Gradients() = default;
  virtual void take(int parameter, const FillRows& fill, const Bound& bound = nullptr) = 0;
};

class Transformer {
 public:
  // Activations and workspace are allocated here, once. Throws std::invalid_argument where problem_with()
  // finds one.
  Transformer(const Setup& setup, Threads& threads, Ledger& ledger);
  ~Transformer();

  // A Network's train() in two. Backward once for each forward, because it works in the same memory.
  double forward(WeightValues& weights, const Batch& batch);
  double loss(WeightValues& weights, const Batch& batch);
  void backward(WeightValues& weights, Gradients& gradients, float scale);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

// Goes on token by token: a key-value cache keeps what was fed, so that a new token costs the work of one.
class CachedTransformer {
 public:
  // Takes its memory here: keys and values of a whole context, in fp32. Throws as above.
  CachedTransformer(const Description& model, Threads& threads, Ledger& ledger);
  ~CachedTransformer();

  // A Generator's.
  void feed(WeightValues& weights, const std::int32_t* tokens, std::int64_t count, float* logits);
  std::int64_t length() const;
  void clear();

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace scruple::train
