// Adam with coupled decay (Kingma and Ba, 1412.6980, algorithm 1; AMSGrad: Reddi et al., 1904.09237), as
// torch.optim.Adam.
#pragma once

#include "optim/optimizer.h"

namespace scruple {
inline namespace SCRUPLE_UNIT {

// The part that Adam and AdamW share: both moments and the step along them.
//   m = b1 m + (1 - b1) g;  v = b2 v + (1 - b2) g^2;  w -= lr / (1 - b1^t)  m / (sqrt(v / (1 - b2^t)) + eps)
struct AdamMoments {
  static constexpr Slot slots[] = {
      {"exp_avg", Sign::any}, {"exp_avg_sq", Sign::nonneg}, {"max_exp_avg_sq", Sign::nonneg, true}};
  static void visit_common(auto& h, auto&& f, const char* decay_doc) {
    f("lr", h.lr, Range::nonneg, kDocLr);
    f("beta1", h.beta1, Range::fraction, "decay of the first moment");
    f("beta2", h.beta2, Range::fraction, "decay of the second moment");
    f("eps", h.eps, Range::nonneg, kDocEps);
    f("weight_decay", h.weight_decay, Range::nonneg, decay_doc);
    f("amsgrad", h.amsgrad, Range::flag, "divide by the largest second moment so far");
  }
  // AMSGrad: the largest of many noisy values is too large, and grows with their number.
  static constexpr unsigned exact(unsigned active) { return (active & 4u) != 0 ? 6 : 0; }

  float b1, c1, b2, c2, lr, root_correction, eps;

  static SCRUPLE_HD AdamMoments prepare(const auto& h, i64 t) {
    const double correction1 = 1 - power(h.beta1, t), correction2 = 1 - power(h.beta2, t);
    return {static_cast<float>(h.beta1),
            static_cast<float>(1 - h.beta1),
            static_cast<float>(h.beta2),
            static_cast<float>(1 - h.beta2),
            static_cast<float>(h.lr / correction1),
            static_cast<float>(1 / __builtin_sqrt(correction2)),
            static_cast<float>(h.eps)};
  }
  // AdamA (Zhang et al., "Adam Accumulation to Reduce Memory Footprints of both Activations and Gradients",
  // 2305.19982): both moments decay once a step, however many gradients it takes in.
  SCRUPLE_HD AdamMoments continued() const {
    AdamMoments k = *this;
    k.b1 = k.b2 = 1;
    return k;
  }
  // `kept` is the weight after decay.
  template <unsigned Active, class F>
  SCRUPLE_HD Elem<3, F> advance(Elem<3, F> e, F g, F kept, auto& math) const {
    e.s[0] = fma(b1, e.s[0], c1 * g);
    e.s[1] = fma(b2, e.s[1], c2 * (g * g));
    F v = e.s[1];
    if constexpr (Active & 4) {
      e.s[2] = e.s[2] <= v || v != v ? v : e.s[2];  // the larger; a NaN of either stays
      v = e.s[2];
    }
    e.w = fma(-lr, math.over_root(e.s[0], v, root_correction, eps), kept);
    return e;
  }
};

struct Adam {
  static constexpr const char* name = "adam";
  static constexpr const char* doc = "Adam, coupled decay (torch.optim.Adam)";
  static constexpr auto& slots = AdamMoments::slots;
  struct Hyper {
    double lr = 1e-3, beta1 = 0.9, beta2 = 0.999, eps = 1e-8, weight_decay = 0, amsgrad = 0;
  };
  static void visit(auto& h, auto&& f) { AdamMoments::visit_common(h, f, kDocCoupled); }
  static unsigned active(const Hyper& h) { return h.amsgrad != 0 ? 7 : 3; }
  static constexpr unsigned exact(unsigned active) { return AdamMoments::exact(active); }
  static const char* problem(const Hyper&) { return nullptr; }
  struct Step {
    AdamMoments moments;
    float decay;
  };
  static SCRUPLE_HD Step prepare(const Hyper& h, i64 t) {
    return {AdamMoments::prepare(h, t), static_cast<float>(h.weight_decay)};
  }
  static constexpr Accumulation accumulation = Accumulation::adama;
  static SCRUPLE_HD Step continued(const Step& k) { return {k.moments.continued(), k.decay}; }
  static const char* problem_with_parts(const Hyper& h) {
    if (h.amsgrad != 0) return "amsgrad would compare second moments that are not complete";
    return h.weight_decay != 0 ? "coupled weight decay would be added with every part (adamw decays once)"
                               : nullptr;
  }
  template <unsigned Active, class F>
  static SCRUPLE_HD Elem<3, F> update(Elem<3, F> e, F g, const Step& k, auto& math) {
    return k.moments.advance<Active>(e, fma(k.decay, e.w, g), e.w, math);
  }
};

}  // namespace SCRUPLE_UNIT
}  // namespace scruple
