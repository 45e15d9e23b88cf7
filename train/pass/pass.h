// The forward and backward pass of a model, the same code for every device. A device supplies the operations:
// today `train/cpu/operations.h` and `train/cuda/operations.h`.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "train/pass/backend.h"

namespace scruple::train {

// What a layer computes between two residuals, in this order. `attention_normed` and `mlp_normed` are outputs of
// norms, `middle` is the residual between attention and MLP, `up` goes into the activation function.
enum class Activation { attention_normed, qkv, attended, middle, mlp_normed, up, activated };
inline constexpr int kActivations = 7;

// Whether forward keeps it for backward, or backward computes it again.
bool keeps(Recompute recompute, Activation activation);

// Operations has:
//   Tensor                     an activation; on the CPU some are computed again whenever they are read
//   new_tensor(activation)     memory for one
//   residual(i)                before layer i, or after the last
//   will_write(i), will_read(i)   residuals may wait elsewhere (offloading)
//   embed, norm, linear, rope, attend, linear_residual, up, final_norm
//   head_backward, up_backward, linear_backward, attend_backward, norm_linear_backward
//   take_linear, take_norm, take_head_norms, take_head
// and, for generation: feed, logits, length.
template <class Operations>
class Pass {
  using Tensor = typename Operations::Tensor;

 public:
  Pass(Operations& on, const Places& places, Recompute recompute)
      : on_(on), places_(places), recompute_(recompute) {
    for (int a = 0; a < kActivations; ++a)
      for (std::size_t i = 0; i < (keeps(a) ? places.layers.size() : 1); ++i)
        tensors_[static_cast<std::size_t>(a)].push_back(on.new_tensor(static_cast<Activation>(a)));
  }

  // From tokens to the last residual, normed.
  void forward() {
    on_.embed(on_.residual(0));
    for (std::size_t i = 0; i < places_.layers.size(); ++i) {
      on_.will_write(i + 1);
      compute(i, false);
      on_.linear_residual(places_.layers[i].mlp_down, at(Activation::activated, i), at(Activation::middle, i),
                          on_.residual(i + 1));
    }
    on_.final_norm(places_.last_norm, on_.residual(places_.layers.size()));
  }

  // From the head, which has seen the loss, to the gradient of the first residual. A weight may be stepped as soon as its
  // gradient is taken: whatever reads a weight comes before that.
  void backward() {
    on_.head_backward(places_.last_norm, on_.residual(places_.layers.size()));
    on_.take_norm(places_.last_norm);
    if (places_.head != places_.tokens) on_.take_head();
    for (std::size_t i = places_.layers.size(); i-- > 0;) {
      on_.will_read(i);
      // Activations that are not kept share memory among the layers: the last layer's are still there.
      if (i + 1 < places_.layers.size()) compute(i, true);
      mlp_backward(i);
      attention_backward(i);
    }
  }

 private:
  bool keeps(int activation) const { return train::keeps(recompute_, static_cast<Activation>(activation)); }
  Tensor& at(Activation activation, std::size_t layer) {
    std::vector<Tensor>& all = tensors_[static_cast<std::size_t>(activation)];
    return all[layer % all.size()];
  }

  // A layer's activations; `again`: those that were not kept.
  void compute(std::size_t layer, bool again) {
    const LayerPlaces& l = places_.layers[layer];
    const auto wants = [&](Activation a) { return !again || !keeps(static_cast<int>(a)); };
    Tensor &residual = on_.residual(layer), &middle = at(Activation::middle, layer);
    Tensor &normed = at(Activation::attention_normed, layer), &qkv = at(Activation::qkv, layer);
    Tensor &attended = at(Activation::attended, layer), &mlp_normed = at(Activation::mlp_normed, layer);
    Tensor &up = at(Activation::up, layer), &activated = at(Activation::activated, layer);
    if (wants(Activation::attention_normed)) on_.norm(l.attention_norm, residual, normed);
    if (wants(Activation::qkv)) {
      on_.linear(l.qkv, normed, qkv);
      on_.rope(l, qkv);
    }
    if (wants(Activation::attended)) on_.attend(l, layer, qkv, attended);
    if (wants(Activation::middle)) on_.linear_residual(l.attention_out, attended, residual, middle);
    if (wants(Activation::mlp_normed)) on_.norm(l.mlp_norm, middle, mlp_normed);
    if (wants(Activation::up)) on_.up(l.mlp_up, mlp_normed, up, activated);
  }

  void mlp_backward(std::size_t layer) {
    const LayerPlaces& l = places_.layers[layer];
    Tensor &middle = at(Activation::middle, layer), &normed = at(Activation::mlp_normed, layer);
    Tensor& dup = on_.up_backward(l.mlp_down, at(Activation::up, layer));
    on_.take_linear(l.mlp_down, at(Activation::activated, layer), on_.g());
    on_.norm_linear_backward(l.mlp_norm, l.mlp_up, dup, middle);
    on_.take_linear(l.mlp_up, normed, dup);
    on_.take_norm(l.mlp_norm);
  }

  void attention_backward(std::size_t layer) {
    const LayerPlaces& l = places_.layers[layer];
    Tensor &qkv = at(Activation::qkv, layer), &attended = at(Activation::attended, layer);
    on_.linear_backward(l.attention_out);
    on_.take_linear(l.attention_out, attended, on_.g());
    Tensor& dqkv = on_.attend_backward(l, qkv, attended);
    on_.take_head_norms(l);
    on_.norm_linear_backward(l.attention_norm, l.qkv, dqkv, on_.residual(layer));
    on_.take_linear(l.qkv, at(Activation::attention_normed, layer), dqkv);
    on_.take_norm(l.attention_norm);
  }

  Operations& on_;
  const Places& places_;
  const Recompute recompute_;
  std::array<std::vector<Tensor>, kActivations> tensors_;
};

// Generation: the same pass over one sequence, which goes on from a key-value cache. At most `at_once` tokens are fed
// together; `rest` is what the operations want to know beside the setup and that.
template <class Operations>
class CachedPass {
 public:
  template <class... Rest>
  CachedPass(const Setup& setup, std::int64_t at_once, Rest&&... rest)
      : model_(setup.shape),
        rows_(std::min(at_once, model_.context)),
        on_(setup, rows_, std::forward<Rest>(rest)...),
        pass_(on_, on_.places(), Recompute::block) {}

  // The logits after the last of these tokens.
  template <class Weights>
  void feed(Weights& weights, const std::int32_t* tokens, std::int64_t count, float* logits) {
    check_feed(model_, on_.length, tokens, count);
    on_.start(weights, {});  // for no backward pass
    for (std::int64_t first = 0; first < count; first += rows_) {
      const std::int64_t now = std::min(rows_, count - first);
      on_.feed(tokens + first, now);
      pass_.forward();
      on_.length += now;
    }
    on_.logits(logits);
  }
  std::int64_t length() const { return on_.length; }
  void clear() { on_.length = 0; }

 private:
  const Description model_;
  const std::int64_t rows_;
  Operations on_;
  Pass<Operations> pass_;
};

}  // namespace scruple::train
