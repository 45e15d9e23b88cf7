// The forward and backward pass of whatever a description describes, written out per layer. It knows neither
// how weights are stored nor what becomes of gradients: it asks for the one and hands over the other.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>

#include "engine/threads.h"
#include "train/description.h"
#include "train/ledger.h"

namespace scruple::train {

// What activations and their gradients are stored in between layers, and between forward and backward
// (Micikevicius et al., 1710.03740). Products and reductions accumulate in fp32; softmax, the norms'
// statistics and the loss stay fp32.
enum class Precision { fp32, bf16, fp16 };

// Whoever keeps the weights.
struct Weights {
  virtual ~Weights() = default;
  // The fp32 values that the model computes with: its own memory, or `scratch` filled with them. `scratch`
  // stays as it is until the layer is done; then it serves another parameter.
  virtual const float* values(int parameter, float* scratch) = 0;
};

// Computes rows [first, first + rows) of a gradient, in full; asked twice it gives the same bits. May read
// these rows of the weight, and no others. Uses the model's threads: not to be called from a piece of their
// work. Other tiles may round differently.
using FillRows = std::function<void(std::int64_t first, std::int64_t rows, float* tile)>;

// Whoever takes the gradients. Each parameter is handed over once per backward pass, as soon as its
// gradient can be computed; its weight may be stepped inside the call, each row once its tile is there.
struct Gradients {
  virtual ~Gradients() = default;
  virtual void take(int parameter, const FillRows& fill) = 0;
};

// batch x context tokens, and what follows each.
struct Batch {
  const std::int32_t *tokens, *targets;  // a target below 0 counts for nothing
  // Where in its window each token's document begins; nullptr: all at 0. A token sees nothing before it, and
  // its position is counted from it.
  const std::int32_t* starts = nullptr;
};

// What backward computes again rather than forward keep it (Chen et al., 1604.06174): nothing, the inside of
// each MLP, or all of each layer but its input. The bits are the same.
enum class Recompute { none, mlp, block };
inline constexpr const char* kRecomputes[] = {"none", "mlp", "block"};  // their names

class Transformer {
 public:
  // Activations and workspace are allocated here, once. Throws std::invalid_argument where problem_with()
  // finds one.
  Transformer(const Description& model, std::int64_t batch, Precision activations, Threads& threads,
              Ledger& ledger, Recompute recompute = Recompute::none);
  ~Transformer();

  // The mean loss in nats over the targets that count; 0 where none does. Keeps what backward needs.
  double forward(Weights& weights, const Batch& batch);
  // The same loss, for validation: backward cannot follow.
  double loss(Weights& weights, const Batch& batch);
  // Gradients of scale * loss, of the last forward; once for each, because it works in the same memory.
  void backward(Weights& weights, Gradients& gradients, float scale);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace scruple::train
