// The pass on a GPU: it queues kernels on one stream, and waits only to give losses or logits.
#pragma once

#include <memory>
#include <vector>

#include "train/cuda/engine.h"
#include "train/pass/backend.h"

namespace scruple::train::cuda {

class Transformer final : public Network {
 public:
  // Memory is taken here. Throws std::invalid_argument where there is no such model.
  Transformer(const Setup& setup, Visible weights, bool released, const StreamEngine& engine,
              const Stream& stream, Copies& copies, Memory& memory, Ledger& ledger);
  ~Transformer() override;

  void prepare(const Batch& batch, float weight) override;
  void train(Visible weights, const Batch& batch, Sink& sink, float weight) override;
  std::vector<double> losses() override;
  void watch(Guard* guard) override;
  void judge(double* sum_squares, const float* loss_scale) override;
  double loss(Visible weights, const Batch& batch) override;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

// Goes on token by token, from a key-value cache in the type of the token table; in fp32 where that is coded.
class CachedTransformer final : public Generator {
 public:
  CachedTransformer(const Description& model, Visible weights, const StreamEngine& engine,
                    const Stream& stream, Memory& memory, Ledger& ledger);
  ~CachedTransformer() override;

  void feed(Visible weights, const std::int32_t* tokens, std::int64_t count, float* logits) override;
  std::int64_t length() const override;
  void clear() override;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace scruple::train::cuda
