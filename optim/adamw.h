// AdamW: Adam with decoupled decay (Loshchilov and Hutter, 1711.05101, algorithm 2), as torch.optim.AdamW.
#pragma once

#include "optim/adam.h"

namespace scruple {
inline namespace SCRUPLE_UNIT {

struct AdamW {
  static constexpr const char* name = "adamw";
  static constexpr const char* doc = "Adam, decoupled decay (torch.optim.AdamW)";
  static constexpr auto& slots = AdamMoments::slots;
  struct Hyper {
    double lr = 1e-3, beta1 = 0.9, beta2 = 0.999, eps = 1e-8, weight_decay = 1e-2, amsgrad = 0, decay_lr = 0;
  };
  static void visit(auto& h, auto&& f) {
    AdamMoments::visit_common(h, f, kDocDecoupled);
    f("decay_lr", h.decay_lr, Range::nonneg, kDocDecayLr);
  }
  static unsigned active(const Hyper& h) { return h.amsgrad != 0 ? 7 : 3; }
  static constexpr unsigned exact(unsigned active) { return AdamMoments::exact(active); }
  static const char* problem(const Hyper&) { return nullptr; }
  struct Step {
    AdamMoments moments;
    float keep;
  };
  static SCRUPLE_HD Step prepare(const Hyper& h, i64 t) {
    return {AdamMoments::prepare(h, t), static_cast<float>(decay_keep(h.lr, h.weight_decay, h.decay_lr))};
  }
  static constexpr Accumulation accumulation = Accumulation::adama;
  static SCRUPLE_HD Step continued(const Step& k) { return {k.moments.continued(), k.keep}; }
  static const char* problem_with_parts(const Hyper& h) {
    return h.amsgrad != 0 ? "amsgrad would compare second moments that are not complete" : nullptr;
  }
  template <unsigned Active, class F>
  static SCRUPLE_HD Elem<3, F> update(Elem<3, F> e, F g, const Step& k, auto& math) {
    return k.moments.advance<Active>(e, g, e.w * k.keep, math);
  }
};

}  // namespace SCRUPLE_UNIT
}  // namespace scruple
