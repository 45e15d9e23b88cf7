// Adagrad (Duchi et al., JMLR 12, 2011), as torch.optim.Adagrad.
#pragma once

#include "optim/optimizer.h"

namespace scruple {
inline namespace SCRUPLE_UNIT {

struct Adagrad {
  static constexpr const char* name = "adagrad";
  static constexpr const char* doc = "divides by the root of all squared gradients (torch.optim.Adagrad)";
  static constexpr Slot slots[] = {{"sum", Sign::nonneg}};
  struct Hyper {
    double lr = 1e-2, lr_decay = 0, weight_decay = 0, initial_accumulator_value = 0, eps = 1e-10;
  };
  static void visit(auto& h, auto&& f) {
    f("lr", h.lr, Range::nonneg, kDocLr);
    f("lr_decay", h.lr_decay, Range::nonneg, "lr is divided by 1 + (t - 1) lr_decay");
    f("weight_decay", h.weight_decay, Range::nonneg, kDocCoupled);
    f("initial_accumulator_value", h.initial_accumulator_value, Range::nonneg, "what the sum starts from");
    f("eps", h.eps, Range::nonneg, kDocEps);
  }
  static unsigned active(const Hyper&) { return 1; }
  static double initial(const Hyper& h, int) { return h.initial_accumulator_value; }
  static const char* problem(const Hyper&) { return nullptr; }
  struct Step {
    float lr, decay, eps;
  };
  static SCRUPLE_HD Step prepare(const Hyper& h, i64 t) {
    return {static_cast<float>(h.lr / (1 + static_cast<double>(t - 1) * h.lr_decay)),
            static_cast<float>(h.weight_decay), static_cast<float>(h.eps)};
  }
  template <unsigned Active, class F>
  static SCRUPLE_HD Elem<1, F> update(Elem<1, F> e, F g, const Step& k, auto& math) {
    g = fma(k.decay, e.w, g);
    e.s[0] = fma(g, g, e.s[0]);
    e.w = fma(-k.lr, math.over_root(g, e.s[0], 1.0f, k.eps), e.w);
    return e;
  }
};

}  // namespace SCRUPLE_UNIT
}  // namespace scruple
