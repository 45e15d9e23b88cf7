// Lion (Chen et al., "Symbolic Discovery of Optimization Algorithms", 2302.06675, algorithm 2).
#pragma once

#include "optim/optimizer.h"

namespace scruple {
inline namespace SCRUPLE_UNIT {

struct Lion {
  static constexpr const char* name = "lion";
  static constexpr const char* doc = "sign of an interpolated momentum, decoupled decay";
  static constexpr Slot slots[] = {{"exp_avg", Sign::any}};
  static constexpr bool hides_infinity = true;  // of the momentum, behind its sign
  struct Hyper {
    double lr = 1e-4, beta1 = 0.9, beta2 = 0.99, weight_decay = 0, decay_lr = 0;
  };
  static void visit(auto& h, auto&& f) {
    f("lr", h.lr, Range::nonneg, kDocLr);
    f("beta1", h.beta1, Range::fraction, "share of the momentum in the direction");
    f("beta2", h.beta2, Range::fraction, "decay of the momentum");
    f("weight_decay", h.weight_decay, Range::nonneg, kDocDecoupled);
    f("decay_lr", h.decay_lr, Range::nonneg, kDocDecayLr);
  }
  static unsigned active(const Hyper&) { return 1; }
  static const char* problem(const Hyper&) { return nullptr; }
  struct Step {
    float b1, c1, b2, c2, lr, keep;
  };
  static SCRUPLE_HD Step prepare(const Hyper& h, i64) {
    return {static_cast<float>(h.beta1), static_cast<float>(1 - h.beta1),
            static_cast<float>(h.beta2), static_cast<float>(1 - h.beta2),
            static_cast<float>(h.lr),    static_cast<float>(decay_keep(h.lr, h.weight_decay, h.decay_lr))};
  }
  // sign(0) is 0, and the sign of a NaN is NaN: a bad gradient stays visible.
  template <unsigned Active, class F>
  static SCRUPLE_HD Elem<1, F> update(Elem<1, F> e, F g, const Step& k, auto&) {
    const F c = fma(k.b1, e.s[0], k.c1 * g);
    const auto zero_or_nan = magnitude_bits(c) - 1u >= 0x7f800000u;
    const F sign = select(zero_or_nan, c, with_sign_of(c, 1.0f));
    e.w = fma(-k.lr, sign, e.w * k.keep);
    e.s[0] = fma(k.b2, e.s[0], k.c2 * g);
    return e;
  }
};

}  // namespace SCRUPLE_UNIT
}  // namespace scruple
