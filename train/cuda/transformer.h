// The forward and backward pass of whatever a description describes, on a GPU: it queues kernels on one stream, and waits
// only to give losses. Weights are read where they lie; those of another type than the activations are converted as they are needed.
#pragma once

#include <memory>
#include <vector>

#include "train/cuda/device.h"
#include "train/pass/backend.h"

namespace scruple::train::cuda {

class Transformer final : public Network {
 public:
  // Memory is taken here. Throws std::invalid_argument where there is no such model.
  Transformer(const Setup& setup, Visible weights, bool released, const Stream& stream, Memory& memory,
              Ledger& ledger);
  ~Transformer() override;

  void train(Visible weights, const Batch& batch, Sink& sink, float weight) override;
  std::vector<double> losses() override;
  double loss(Visible weights, const Batch& batch) override;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace scruple::train::cuda
