// What every optimizer is written with. An optimizer is a struct with
//   name, doc, slots     what it is called and which moments it keeps
//   Hyper, visit         hyperparameters; visit is the one list that the ABI, the command line and the docs read
//   active(h)            which slots these hyperparameters need, as a bit mask
//   exact(active)        where it has this: which of them no low-bit format can hold, since what counts is a small
//                        difference or the maximum of many noisy values. They stay fp32 in every recipe.
//   problem(h)           why these hyperparameters contradict each other, or nullptr
//   Step, prepare(h, t)  the constants of step t, in double with + - * / sqrt only: the same on every engine
//   update<Active>       the formula: floats in, floats out, no storage. F is float, or a vector of floats
//                        (engine/lanes.h). A NaN in the weight, the gradient or any slot must reach the
//                        weight: the engines look for one there alone. `math` divides by roots.
//   hides_infinity       where it has this: an infinite slot need not show in the weight
// and, where a step can be taken in parts (gradients of micro-batches going straight into the moments),
//   accumulation         by which method
//   continued(k)         the constants of the parts after the first: nothing decays
//   problem_with_parts(h)        why these hyperparameters cannot, or nullptr
// All arithmetic is IEEE; fma is written where it is wanted and the compiler may not add any.
#pragma once

#include "formats/codec.h"

namespace scruple {

enum class Sign { any, nonneg };

struct Slot {
  const char* name;
  Sign sign;
  bool optional = false;
};

// How the gradients of several micro-batches make one step without being kept.
//   momentum  b = mu b + g_1 / N, then b += g_i / N: exactly the step of the mean gradient
//   adama     m = b1 m + (1 - b1) g_1 / N, v = b2 v + (1 - b2) (g_1 / N)^2, then the same without decay
enum class Accumulation { none, momentum, adama };

// Values a hyperparameter may take: 0 and up, [0, 1), or 0 and 1.
enum class Range { nonneg, fraction, flag };

inline namespace SCRUPLE_UNIT {

// One element, or a vector of them: the weight and its moments.
template <int N, class F = float>
struct Elem {
  F w;
  F s[N];
};

// Whether `active`, as a bit mask, can be the slots in use: all that are not optional, and no others than
// there are.
template <class Rule>
constexpr bool can_be_active(unsigned active) {
  constexpr unsigned kSlots = sizeof(Rule::slots) / sizeof(Slot);
  for (unsigned s = 0; s < kSlots; ++s)
    if ((active >> s & 1u) == 0 && !Rule::slots[s].optional) return false;
  return active >> kSlots == 0;
}

// The one expensive operation, handed to `update` because engines do it in different ways to the same bits:
// a / (sqrt(x) scale + eps). `spread`: what the root of a noisy x is multiplied by so that steps are right on
// average (formats/log.h); 1 for most formats.
struct IeeeMath {
  float spread = 1;
  template <class F>
  SCRUPLE_HD F over_root(F a, F x, float scale, float eps) const {
    return a / fma(root(x), scale * spread, eps);
  }
};

template <class Rule>
constexpr unsigned exact_slots(unsigned active) {
  if constexpr (requires { Rule::exact(active); }) return Rule::exact(active);
  return 0;
}

// base^t by squaring: the same bits everywhere, which std::pow does not promise.
SCRUPLE_HD double power(double base, i64 t) {
  double result = 1;
  for (; t > 0; t >>= 1, base *= base)
    if (t & 1) result *= base;
  return result;
}

// What decoupled decay leaves of a weight. Tied to the rate as in torch (1 - lr decay), or, where decay_lr is
// given, independent of the peak rate (1 - decay lr / decay_lr; Loshchilov and Hutter, 1711.05101, algorithm
// 2).
SCRUPLE_HD double decay_keep(double lr, double weight_decay, double decay_lr) {
  return 1 - weight_decay * (decay_lr > 0 ? lr / decay_lr : lr);
}

}  // namespace SCRUPLE_UNIT

inline constexpr const char* kDocLr = "learning rate";
inline constexpr const char* kDocEps = "added to the denominator";
inline constexpr const char* kDocDecoupled = "decoupled weight decay";
inline constexpr const char* kDocCoupled = "weight decay added to the gradient (L2)";
inline constexpr const char* kDocDecayLr =
    "if above 0, decay is weight_decay * lr / decay_lr instead of weight_decay * lr";

}  // namespace scruple
