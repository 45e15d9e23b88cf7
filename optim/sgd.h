// SGD with momentum, dampening, Nesterov's variant and coupled decay, as torch.optim.SGD.
#pragma once

#include "optim/optimizer.h"

namespace scruple {
inline namespace SCRUPLE_UNIT {

// Sutskever et al., "On the importance of initialization and momentum" (2013), in torch's form:
//   b = momentum b + (1 - dampening) g, and b = g at the first step
//   direction = g + momentum b with Nesterov, else b
struct Momentum {
  float momentum, take, nesterov;  // nesterov: momentum, or -1 for plain

  static SCRUPLE_HD Momentum prepare(double momentum, double dampening, double nesterov, i64 t) {
    return {static_cast<float>(momentum), static_cast<float>(t == 1 ? 1 : 1 - dampening),
            static_cast<float>(nesterov != 0 ? momentum : -1)};
  }
  SCRUPLE_HD Momentum continued() const { return {1, take, nesterov}; }
  static const char* problem_with_parts(const auto& h) {
    if (h.momentum == 0) return "without momentum there is no buffer to take the parts";
    if (h.dampening != 0) return "dampening would differ between the parts of the first step";
    return h.nesterov != 0 ? "nesterov needs the whole gradient when the weight moves" : nullptr;
  }
  template <class F>
  SCRUPLE_HD F next(F buffer, F g) const {
    return fma(momentum, buffer, take * g);
  }
  template <class F>
  SCRUPLE_HD F direction(F buffer, F g) const {
    return nesterov >= 0 ? fma(nesterov, buffer, g) : buffer;
  }
};

struct Sgd {
  static constexpr const char* name = "sgd";
  static constexpr const char* doc = "SGD with momentum, coupled decay (torch.optim.SGD)";
  static constexpr Slot slots[] = {{"momentum_buffer", Sign::any, true}};
  struct Hyper {
    double lr = 1e-3, momentum = 0, dampening = 0, weight_decay = 0, nesterov = 0;
  };
  static void visit(auto& h, auto&& f) {
    f("lr", h.lr, Range::nonneg, kDocLr);
    f("momentum", h.momentum, Range::nonneg, "0: no momentum buffer");
    f("dampening", h.dampening, Range::nonneg, "the buffer takes 1 - dampening of the gradient");
    f("weight_decay", h.weight_decay, Range::nonneg, kDocCoupled);
    f("nesterov", h.nesterov, Range::flag, "step along gradient + momentum * buffer");
  }
  static unsigned active(const Hyper& h) { return h.momentum != 0 ? 1 : 0; }
  static const char* problem(const Hyper& h) {
    return h.nesterov != 0 && (h.momentum <= 0 || h.dampening != 0)
               ? "nesterov needs momentum above 0 and dampening 0"
               : nullptr;
  }
  struct Step {
    Momentum momentum;
    float lr, decay;
  };
  static SCRUPLE_HD Step prepare(const Hyper& h, i64 t) {
    return {Momentum::prepare(h.momentum, h.dampening, h.nesterov, t), static_cast<float>(h.lr),
            static_cast<float>(h.weight_decay)};
  }
  static constexpr Accumulation accumulation = Accumulation::momentum;
  // The decay came with the first part; the weight has not moved since.
  static SCRUPLE_HD Step continued(const Step& k) { return {k.momentum.continued(), k.lr, 0}; }
  static const char* problem_with_parts(const Hyper& h) { return Momentum::problem_with_parts(h); }
  template <unsigned Active, class F>
  static SCRUPLE_HD Elem<1, F> update(Elem<1, F> e, F g, const Step& k, auto&) {
    g = fma(k.decay, e.w, g);
    if constexpr (Active & 1) {
      e.s[0] = k.momentum.next(e.s[0], g);
      g = k.momentum.direction(e.s[0], g);
    }
    e.w = fma(-k.lr, g, e.w);
    return e;
  }
};

}  // namespace SCRUPLE_UNIT
}  // namespace scruple
