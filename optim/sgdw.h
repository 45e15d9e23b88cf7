// SGDW: SGD with momentum and decoupled decay (Loshchilov and Hutter, 1711.05101, algorithm 1).
#pragma once

#include "optim/sgd.h"

namespace scruple {
inline namespace SCRUPLE_UNIT {

struct Sgdw {
  static constexpr const char* name = "sgdw";
  static constexpr const char* doc = "SGD with momentum, decoupled decay";
  static constexpr Slot slots[] = {{"momentum_buffer", Sign::any, true}};
  struct Hyper : Sgd::Hyper {
    double decay_lr = 0;
  };
  static void visit(auto& h, auto&& f) {
    Sgd::visit(h, [&](const char* field, auto& value, Range range, const char* doc) {
      f(field, value, range, doc == kDocCoupled ? kDocDecoupled : doc);
    });
    f("decay_lr", h.decay_lr, Range::nonneg, kDocDecayLr);
  }
  static unsigned active(const Hyper& h) { return Sgd::active(h); }
  static const char* problem(const Hyper& h) { return Sgd::problem(h); }
  struct Step {
    Momentum momentum;
    float lr, keep;
  };
  static SCRUPLE_HD Step prepare(const Hyper& h, i64 t) {
    return {Momentum::prepare(h.momentum, h.dampening, h.nesterov, t), static_cast<float>(h.lr),
            static_cast<float>(decay_keep(h.lr, h.weight_decay, h.decay_lr))};
  }
  static constexpr Accumulation accumulation = Accumulation::momentum;
  static SCRUPLE_HD Step continued(const Step& k) { return {k.momentum.continued(), k.lr, k.keep}; }
  static const char* problem_with_parts(const Hyper& h) { return Momentum::problem_with_parts(h); }
  template <unsigned Active, class F>
  static SCRUPLE_HD Elem<1, F> update(Elem<1, F> e, F g, const Step& k, auto&) {
    if constexpr (Active & 1) {
      e.s[0] = k.momentum.next(e.s[0], g);
      g = k.momentum.direction(e.s[0], g);
    }
    e.w = fma(-k.lr, g, e.w * k.keep);
    return e;
  }
};

}  // namespace SCRUPLE_UNIT
}  // namespace scruple
