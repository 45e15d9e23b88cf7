// Every optimizer in double precision, one element at a time, and its published defaults: from the papers and from the
// documentation of torch.optim, never from optim/. A rule that has no entry in published() fails its tests.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <map>
#include <string>

#include "tests/support.h"

namespace reference {

// Hyperparameters by name, all of them.
using Hypers = std::map<std::string, double>;

struct Element {
  double w = 0;
  std::map<std::string, double> slots;  // by the rule's slot names; absent: zero
  std::int64_t t = 0;                   // steps taken
  // How far, relative to its parts, the worst step stood from a point where rounding alone changes the
  // result: the sign of Lion's direction, the difference of two squares under a centred root.
  double margin = std::numeric_limits<double>::infinity();
  // By how much the worst sum (gradient and decay, a centred mean square) was smaller than its parts:
  // rounding errors grow by as much.
  double cancellation = 1;
};

using Update = void (*)(Element& e, double g, const Hypers& h);

namespace detail {

inline bool is_on(const Hypers& h, const char* flag) { return h.at(flag) != 0; }

// torch: `maximize` negates the gradient before anything else looks at it.
inline double ascent(double g, const Hypers& h) { return is_on(h, "maximize") ? -g : g; }

// torch: weight_decay w is added to the gradient (L2).
inline double with_decay(Element& e, double g, const Hypers& h) {
  const double decay = h.at("weight_decay") * e.w, sum = ascent(g, h) + decay;
  e.cancellation = std::max(e.cancellation, (std::fabs(g) + std::fabs(decay)) / std::fabs(sum));
  return sum;
}

// torch's momentum: the first step copies the gradient into the buffer, without dampening.
inline double along_momentum(Element& e, double g, const Hypers& h) {
  const double momentum = h.at("momentum");
  if (momentum == 0) return g;
  double& buffer = e.slots["momentum_buffer"];
  buffer = e.t == 1 ? g : momentum * buffer + (1 - h.at("dampening")) * g;
  return is_on(h, "nesterov") ? g + momentum * buffer : buffer;
}

// Decoupled decay: w <- w - lr decay w (torch), or, with a peak rate given, w <- w - (lr / peak) decay w: the
// schedule multiplier eta of Loshchilov and Hutter, 1711.05101, without the rate alpha.
inline double decayed(double w, const Hypers& h) {
  const double peak = h.at("decay_lr");
  return w - (peak > 0 ? h.at("lr") / peak : h.at("lr")) * h.at("weight_decay") * w;
}

// torch.optim.SGD.
inline void sgd(Element& e, double g, const Hypers& h) {
  ++e.t;
  g = with_decay(e, g, h);
  e.w -= h.at("lr") * along_momentum(e, g, h);
}

// 1711.05101, algorithm 1, with torch's momentum.
inline void sgdw(Element& e, double g, const Hypers& h) {
  ++e.t;
  const double direction = along_momentum(e, ascent(g, h), h);
  e.w = decayed(e.w, h) - h.at("lr") * direction;
}

// 1412.6980, algorithm 1; AMSGrad as torch has it (the maximum of the uncorrected second moments).
inline double adam_step(Element& e, double g, const Hypers& h) {
  const double beta1 = h.at("beta1"), beta2 = h.at("beta2"), t = static_cast<double>(e.t);
  double &m = e.slots["exp_avg"], &v = e.slots["exp_avg_sq"];
  m = beta1 * m + (1 - beta1) * g;
  v = beta2 * v + (1 - beta2) * g * g;
  double used = v;
  if (is_on(h, "amsgrad")) {
    double& largest = e.slots["max_exp_avg_sq"];
    used = largest = std::max(largest, v);
  }
  const double m_hat = m / (1 - std::pow(beta1, t)), v_hat = used / (1 - std::pow(beta2, t));
  return h.at("lr") * m_hat / (std::sqrt(v_hat) + h.at("eps"));
}

inline void adam(Element& e, double g, const Hypers& h) {
  ++e.t;
  e.w -= adam_step(e, with_decay(e, g, h), h);
}

// 1711.05101, algorithm 2.
inline void adamw(Element& e, double g, const Hypers& h) {
  ++e.t;
  const double kept = decayed(e.w, h);
  e.w = kept - adam_step(e, ascent(g, h), h);
}

// 2302.06675, algorithm 2.
inline void lion(Element& e, double g, const Hypers& h) {
  ++e.t;
  g = ascent(g, h);
  const double beta1 = h.at("beta1"), beta2 = h.at("beta2");
  double& m = e.slots["exp_avg"];
  const double c = beta1 * m + (1 - beta1) * g;
  e.margin = std::min(e.margin, std::fabs(c) / (beta1 * std::fabs(m) + (1 - beta1) * std::fabs(g)));
  const double sign = c > 0 ? 1 : c < 0 ? -1 : 0;
  e.w = decayed(e.w, h) - h.at("lr") * sign;
  m = beta2 * m + (1 - beta2) * g;
}

// Duchi et al., 2011, in torch's form: lr_decay counts from the second step, the sum starts from a given value.
inline void adagrad(Element& e, double g, const Hypers& h) {
  ++e.t;
  g = with_decay(e, g, h);
  double& sum = e.slots["sum"];
  if (e.t == 1) sum = h.at("initial_accumulator_value");
  sum += g * g;
  const double lr = h.at("lr") / (1 + static_cast<double>(e.t - 1) * h.at("lr_decay"));
  e.w -= lr * g / (std::sqrt(sum) + h.at("eps"));
}

// torch.optim.RMSprop; centred as in Graves, 1308.0850.
inline void rmsprop(Element& e, double g, const Hypers& h) {
  ++e.t;
  g = with_decay(e, g, h);
  const double alpha = h.at("alpha");
  double& square = e.slots["square_avg"];
  square = alpha * square + (1 - alpha) * g * g;
  double variance = square;
  if (is_on(h, "centered")) {
    double& mean = e.slots["grad_avg"];
    mean = alpha * mean + (1 - alpha) * g;
    variance = square - mean * mean;
    e.margin = std::min(e.margin, variance / square);
    e.cancellation = std::max(e.cancellation, (square + mean * mean) / variance);
  }
  double direction = g / (std::sqrt(std::max(variance, 0.0)) + h.at("eps"));
  if (h.at("momentum") != 0) {
    double& buffer = e.slots["momentum_buffer"];
    direction = buffer = h.at("momentum") * buffer + direction;
  }
  e.w -= h.at("lr") * direction;
}

}  // namespace detail

struct Published {
  Update update;
  Hypers defaults;
};

// By the rule's name. Defaults: torch.optim's documentation; Lion's its authors' code; SGDW's are SGD's; decay_lr is ours.
inline const std::map<std::string, Published>& published() {
  static const std::map<std::string, Published> kAll = [] {
    const Hypers sgd = {{"lr", 1e-3},        {"momentum", 0}, {"dampening", 0},
                        {"weight_decay", 0}, {"nesterov", 0}, {"maximize", 0}};
    const Hypers adam = {{"lr", 1e-3},        {"beta1", 0.9}, {"beta2", 0.999}, {"eps", 1e-8},
                         {"weight_decay", 0}, {"amsgrad", 0}, {"maximize", 0}};
    const Hypers lion = {{"lr", 1e-4},        {"beta1", 0.9},  {"beta2", 0.99},
                         {"weight_decay", 0}, {"decay_lr", 0}, {"maximize", 0}};
    const Hypers adagrad = {{"lr", 1e-2},        {"lr_decay", 0},
                            {"weight_decay", 0}, {"initial_accumulator_value", 0},
                            {"eps", 1e-10},      {"maximize", 0}};
    const Hypers rmsprop = {{"lr", 1e-2},    {"alpha", 0.99}, {"eps", 1e-8},  {"weight_decay", 0},
                            {"momentum", 0}, {"centered", 0}, {"maximize", 0}};
    Hypers sgdw = sgd, adamw = adam;
    sgdw["decay_lr"] = adamw["decay_lr"] = 0;
    adamw["weight_decay"] = 1e-2;
    return std::map<std::string, Published>{{"sgd", {detail::sgd, sgd}},
                                            {"sgdw", {detail::sgdw, sgdw}},
                                            {"adam", {detail::adam, adam}},
                                            {"adamw", {detail::adamw, adamw}},
                                            {"lion", {detail::lion, lion}},
                                            {"adagrad", {detail::adagrad, adagrad}},
                                            {"rmsprop", {detail::rmsprop, rmsprop}}};
  }();
  return kAll;
}

inline Update find(const std::string& rule) { return published().at(rule).update; }

// As they are set.
inline Hypers hypers_of(const scruple_optimizer* optimizer) {
  Hypers hypers;
  const scruple_tests::Rule rule = scruple_tests::rule_of(optimizer);
  for (const scruple_hyper_info& hyper : rule.hypers)
    CHECK_OK(scruple_optimizer_get(optimizer, hyper.name, &hypers[hyper.name]));
  return hypers;
}

}  // namespace reference
