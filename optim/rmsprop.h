// RMSprop (Tieleman and Hinton, lecture 6.5; centred: Graves, 1308.0850, eq. 38-45), as torch.optim.RMSprop.
#pragma once

#include "optim/optimizer.h"

namespace scruple {
inline namespace SCRUPLE_UNIT {

struct RmsProp {
  static constexpr const char* name = "rmsprop";
  static constexpr const char* doc = "divides by a running root mean square (torch.optim.RMSprop)";
  static constexpr Slot slots[] = {
      {"square_avg", Sign::nonneg}, {"momentum_buffer", Sign::any, true}, {"grad_avg", Sign::any, true}};
  struct Hyper {
    double lr = 1e-2, alpha = 0.99, eps = 1e-8, weight_decay = 0, momentum = 0, centered = 0;
  };
  static void visit(auto& h, auto&& f) {
    f("lr", h.lr, Range::nonneg, kDocLr);
    f("alpha", h.alpha, Range::fraction, "decay of the mean square");
    f("eps", h.eps, Range::nonneg, kDocEps);
    f("weight_decay", h.weight_decay, Range::nonneg, kDocCoupled);
    f("momentum", h.momentum, Range::nonneg, "0: no momentum buffer");
    f("centered", h.centered, Range::flag, "divide by the standard deviation instead");
  }
  static unsigned active(const Hyper& h) {
    return 1u | (h.momentum != 0 ? 2u : 0u) | (h.centered != 0 ? 4u : 0u);
  }
  // Centred: the difference of two moments, which may be a small part of either.
  static constexpr unsigned exact(unsigned active) { return (active & 4u) != 0 ? 5 : 0; }
  static const char* problem(const Hyper&) { return nullptr; }
  struct Step {
    float a, c, eps, decay, momentum, lr;
  };
  static SCRUPLE_HD Step prepare(const Hyper& h, i64) {
    return {static_cast<float>(h.alpha),        static_cast<float>(1 - h.alpha), static_cast<float>(h.eps),
            static_cast<float>(h.weight_decay), static_cast<float>(h.momentum),  static_cast<float>(h.lr)};
  }
  template <unsigned Active, class F>
  static SCRUPLE_HD Elem<3, F> update(Elem<3, F> e, F g, const Step& k, auto& math) {
    g = fma(k.decay, e.w, g);
    e.s[0] = fma(k.a, e.s[0], k.c * (g * g));
    F mean_square = e.s[0];
    if constexpr (Active & 4) {
      e.s[2] = fma(k.a, e.s[2], k.c * g);
      const F variance = fma(-e.s[2], e.s[2], mean_square);
      mean_square = variance < 0 ? 0.0f : variance;  // fp32 is rounded too: the difference may dip below zero
    }
    F direction = math.over_root(g, mean_square, 1.0f, k.eps);
    if constexpr (Active & 2) direction = e.s[1] = fma(k.momentum, e.s[1], direction);
    e.w = fma(-k.lr, direction, e.w);
    return e;
  }
};

}  // namespace SCRUPLE_UNIT
}  // namespace scruple
