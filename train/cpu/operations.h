// The operations of the pass (train/pass/pass.h) on the CPU. The outputs of norms and activation functions
// are not stored: they are computed again wherever they are read, which is cheaper.
#pragma once

#include <optional>
#include <vector>

#include "train/cpu/layers.h"
#include "train/cpu/transformer.h"
#include "train/pass/pass.h"

namespace scruple::train {

class Operations {
 public:
  // A matrix of its own; or the norm of another's rows, or the activation function of them.
  struct Tensor {
    Matrix values;
    std::optional<Statistics> statistics;  // of a residual's rows, for the norm that reads them
    Block log_sums;                        // of the softmaxes of attention
    const Tensor* normed = nullptr;
    const NormPlace* norm = nullptr;
    const Tensor* activated = nullptr;
  };

  // `rows` tokens at a time, at most: `sequences` of them, or one that goes on from a key-value cache.
  Operations(const Setup& setup, Index rows, bool caches, Threads& threads, Ledger& ledger);

  void start(WeightValues& from, Gradients* to) { weights_ = &from, gradients_ = to; }
  void set_scale(float scale) { scale_ = scale; }      // of the gradient of each target's loss
  void feed(const std::int32_t* tokens, Index count);  // the rows of the next pass, in generation
  std::int32_t* tokens() const { return tokens_.as<std::int32_t>(); }
  std::int32_t* positions() const { return positions_.as<std::int32_t>(); }
  const Places& places() const { return places_; }

  // What follows each row; of those below 0 the head computes nothing.
  void set_targets(const std::int32_t* targets);
  // The sum of the losses of the others.
  double loss(bool for_backward);
  void take_embeddings();
  // After the last row.
  void logits(float* values);
  Index length = 0;  // tokens in the key-value cache

  // ---- For the pass ----

  Tensor new_tensor(Activation activation);
  Tensor& residual(std::size_t index) { return residuals_[index % residuals_.size()]; }
  Tensor& g() { return g_; }
  void will_write(std::size_t) {}
  void will_read(std::size_t) {}

  void embed(Tensor& x);
  void norm(const NormPlace& at, const Tensor& x, Tensor& y);
  void linear(const LinearPlaces& at, const Tensor& x, Tensor& y);
  void rope(const LayerPlaces&, Tensor&) {}  // where queries and keys are read
  void attend(const LayerPlaces& at, std::size_t layer, const Tensor& qkv, Tensor& y);
  void linear_residual(const LinearPlaces& at, const Tensor& x, const Tensor& residual, Tensor& y);
  void up(const LinearPlaces& at, const Tensor& x, Tensor& up, Tensor& activated);
  void final_norm(const NormPlace& at, const Tensor& x);

  void head_backward(const NormPlace& at, const Tensor& x);  // to g
  Tensor& up_backward(const LinearPlaces& at, const Tensor& up);
  void linear_backward(const LinearPlaces& at);
  Tensor& attend_backward(const LayerPlaces& at, const Tensor& qkv, const Tensor& attended);
  void norm_linear_backward(const NormPlace& norm, const LinearPlaces& at, const Tensor& dy, const Tensor& x);
  void take_linear(const LinearPlaces& at, const Tensor& x, const Tensor& dy);
  void take_norm(const NormPlace& at);
  void take_head_norms(const LayerPlaces& at);
  void take_head();

 private:
  Tensor stored(Index columns);
  Tensor residual_tensor();
  // Weights in fp32: their own memory, or scratch that stays until the same is asked of another layer.
  const float* values(int parameter, float* scratch) const;
  Norm norm_of(const NormPlace& at) const;
  std::vector<Linear> linear_of(const LinearPlaces& at, bool biases = true) const;
  const float* head_table() const { return values(places_.head, matrix_.as<float>()); }
  Normed read_normed(const NormPlace& at, const Tensor& x);
  void read(const Tensor& x, const std::function<void(const Source&)>& reader);
  Attention attention(const LayerPlaces& at);
  Cache cache_of(std::size_t layer) const;
  Counted counted() const { return {at_.as<std::int32_t>(), counted_}; }
  Head head();
  FillRows fill_head();
  double head_bound();
  double table_bound();

  const Description model_;
  const Places places_;
  const Precision precision_;
  const Index most_rows_;
  const bool caches_;
  Ledger& ledger_;
  Index sequences_, rows_;
  Matrix hidden_;  // the last residual, normed, in rows that count
  Matrix logits_;  // backward turns them into their gradients; empty where they are not kept
  Block log_sums_, tokens_, targets_, positions_;
  Block at_;  // rows that count: those with a target; of generation the last
  Index counted_ = 1;
  Tensor g_, dattended_, dqkv_, dup_;  // gradients; g is that of the residual
  Block norm_sums_, head_norm_sums_, chunk_losses_, cache_;
  float scale_ = 1;
  Block matrix_, vector_, rotation_;  // scratch for weights; cosines and sines of rope
  Workspace workspace_;
  Workers workers_;
  std::vector<Tensor> residuals_;
  WeightValues* weights_ = nullptr;
  Gradients* gradients_ = nullptr;
};

}  // namespace scruple::train
