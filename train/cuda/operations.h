// The operations of the pass (train/pass/pass.h) on a GPU: kernels queued on one stream. Weights are read where they lie.
// Those of another type than the activations are converted, and codes decoded, into one scratch matrix, each time that they
// are needed.
#pragma once

#include <vector>

#include "train/cuda/attention.h"
#include "train/cuda/engine.h"
#include "train/cuda/inputs.h"
#include "train/cuda/layers.h"
#include "train/cuda/outbox.h"
#include "train/cuda/products.h"
#include "train/cuda/recording.h"
#include "train/cuda/residuals.h"
#include "train/pass/pass.h"

namespace scruple::train::cuda {

using Index = std::int64_t;

class Operations {
 public:
  struct Tensor {
    Block memory;
    void* data = nullptr;  // there, or in a residual that may wait elsewhere
    Index width = 0;       // values of a row
    Block rstd, mean;      // of a residual's rows, as the norm that read them found them
    Block log_sums;        // of the softmaxes of attention
  };

  // `rows` tokens at a time, at most. Without inputs and outbox, for generation: one sequence that goes on from a key-value
  // cache.
  Operations(const Setup& setup, Index rows, Visible weights, const Inputs* inputs, Outbox* outbox,
             const StreamEngine& engine, const Stream& stream, Memory& memory, Ledger& ledger);

  // Of a pass. Residuals leave for backward alone.
  void start(Visible weights, bool for_backward) { weights_ = weights, for_backward_ = for_backward; }
  void feed(const std::int32_t* tokens, Index count);  // the rows of the next pass, in generation
  const Places& places() const { return places_; }

  // The losses of all rows (0 where there is no target; in any order) and, for backward, the gradient of the last residual,
  // normed, and that of the head, times *loss_scale.
  void head(const float* loss_scale);
  const float* row_losses() const { return row_losses_.as<float>(); }
  void take_embeddings();
  // After the last row, into host memory; waits.
  void logits(float* values);
  Index length = 0;  // tokens in the key-value cache

  // ---- For the pass ----

  Tensor new_tensor(Activation activation);
  Tensor& residual(std::size_t index) { return residual_tensors_[index % residual_tensors_.size()]; }
  Tensor& g() { return g_; }
  void will_write(std::size_t index) {
    if (for_backward_) residuals_.write(static_cast<Index>(index));
  }
  void will_read(std::size_t index) { residuals_.read(static_cast<Index>(index)); }

  void embed(Tensor& x);
  void norm(const NormPlace& at, Tensor& x, Tensor& y);
  void linear(const LinearPlaces& at, const Tensor& x, Tensor& y) { product(at, x, y, nullptr); }
  void rope(const LayerPlaces& at, Tensor& qkv);
  void attend(const LayerPlaces& at, std::size_t layer, const Tensor& qkv, Tensor& y);
  void linear_residual(const LinearPlaces& at, const Tensor& x, const Tensor& residual, Tensor& y) {
    product(at, x, y, residual.data);
  }
  void up(const LinearPlaces& at, const Tensor& x, Tensor& up, Tensor& activated);
  void final_norm(const NormPlace& at, Tensor& x);

  void head_backward(const NormPlace& at, const Tensor& x);  // to g
  Tensor& up_backward(const LinearPlaces& at, Tensor& up);
  void linear_backward(const LinearPlaces& at) { product_backward(at, g_, dattended_); }
  Tensor& attend_backward(const LayerPlaces& at, const Tensor& qkv, const Tensor& attended);
  void norm_linear_backward(const NormPlace& norm, const LinearPlaces& at, const Tensor& dy, const Tensor& x);
  void take_linear(const LinearPlaces& at, const Tensor& x, const Tensor& dy);
  void take_norm(const NormPlace& at);
  void take_head_norms(const LayerPlaces& at);
  void take_head();

 private:
  Block values(const char* kind, Index count) const;
  Block floats(const char* kind, Index count) const;
  Tensor tensor(Index width) const;
  void add_statistics(Tensor& residual) const;
  Tensor alias(const Block& memory, Index width) const;
  void reserve_for_weights();
  void reserve_for_training();
  void reserve(Block& scratch, int parameter) const;  // for readable() and in_type()
  const scruple_array& weight(int parameter) const;
  bool is_coded(int parameter) const;
  // Where it lies, in its own type; what is coded in `scratch`, in the type of the activations, from value `first` on. No
  // parameter: nullptr.
  Values readable(int parameter, const Block& scratch, Index first = 0) const;
  // In the type of the activations, until the scratch takes another.
  const void* in_type(int parameter, const Block& scratch) const;
  const void* matrix(int parameter) const { return in_type(parameter, converted_matrix_); }
  const void* bias(int parameter) const { return in_type(parameter, converted_bias_); }
  Values vector(int parameter, int which) const;  // of a norm; `which` of those that a kernel reads
  Operand matrix_of(const LinearPlace& l, bool backward) const;
  Norm norm_of(const NormPlace& at) const;
  Attention attention() const;
  RopeShape rope_of(const LayerPlaces& at) const;
  bool has_rope() const { return model_.rotary.base > 0 || model_.head_norms; }
  bool fuses_gelu() const;
  bool caches() const { return inputs_ == nullptr; }
  // Whether the head leaves rows without a target out.
  bool gathers() const { return !caches() && inputs_->head_rows() < rows_; }
  void gather(const void* from, const std::int32_t* which, Index rows, void* to) const;
  const std::int32_t* tokens() const;
  const std::int32_t* positions() const;
  const void* head_table();
  void* at(const Tensor& x, Index element) const;

  void product(const LinearPlaces& at, const Tensor& x, Tensor& y, const void* residual);
  void product_backward(const LinearPlaces& at, const Tensor& dy, Tensor& dx);
  void norm_backward(const NormPlace& at, const Tensor& x, bool adds);
  void take_sums(int parameter, const Block& sums, Index parts, Index width, Index column);

  const Description model_;
  const Precision precision_;
  const Index most_rows_, part_rows_;
  const StreamEngine& engine_;
  const Stream& stream_;
  Memory& memory_;
  Ledger& ledger_;
  const Places places_;
  const std::vector<Parameter> parameters_;
  Index sequences_, rows_;
  Products products_;
  const Inputs* const inputs_;
  Outbox* const outbox_;
  Visible weights_;
  bool for_backward_ = false;

  Tensor hidden_;  // the last residual, normed, in rows of the head
  Block logits_, row_losses_, factor_;
  Block table_gradient_;  // of the head, in fp32, where it is a sum; else none
  // Gradients. Some share memory: what is inside a layer, and what goes in or out of it.
  Tensor g_, dqkv_, dactivated_, dup_, dattended_, dnormed_;
  Block inner_, outer_;
  Block roped_;  // queries and keys, where rope does not work in place
  Block rotation_, norm_sums_, bias_sums_, head_norm_sums_, attention_work_, cache_, fed_;
  Block converted_matrix_, converted_bias_, padded_table_, decoded_positions_, decoded_norms_;
  Residuals residuals_;
  std::vector<Tensor> residual_tensors_;
};

}  // namespace scruple::train::cuda
