#include "train/run/outliers.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <stdexcept>

namespace scruple::train {

void Running::add(double value) {
  constexpr double kLeast = 0.02;
  ++count_;
  const double share = std::max(1 / static_cast<double>(count_), kLeast), difference = value - mean_;
  mean_ += share * difference;
  variance_ = (1 - share) * (variance_ + share * difference * difference);
}

double Running::above(double value) const {
  constexpr std::int64_t kFewest = 20;
  if (count_ < kFewest) return 0;
  constexpr double kRounding = 1e-6;  // of values that are all the same
  return (value - mean_) / std::max(std::sqrt(variance_), kRounding * std::abs(mean_));
}

Outliers::Outliers(double limit, const std::string& state) : limit_(limit) {
  if (state.empty()) return;
  long long losses = 0, norms = 0;
  if (std::sscanf(state.c_str(), "%lld %la %la %lld %la %la", &losses, &loss_.mean_, &loss_.variance_, &norms,
                  &norm_.mean_, &norm_.variance_) != 6)
    throw std::runtime_error("the checkpoint's running means for --skip-outliers are '" + state +
                             "', which are none; it is damaged");
  loss_.count_ = losses, norm_.count_ = norms;
}

bool Outliers::is_outlier(double loss, double norm) const {
  const auto is_far = [this](const Running& seen, double value) {
    return std::isfinite(value) && seen.above(value) > limit_;
  };
  return is_far(loss_, loss) || is_far(norm_, norm);
}

void Outliers::add(double loss, double norm) {
  if (!std::isfinite(loss) || !std::isfinite(norm)) return;
  loss_.add(loss), norm_.add(norm);
}

std::string Outliers::state() const {
  char text[256];
  std::snprintf(text, sizeof text, "%lld %a %a %lld %a %a", static_cast<long long>(loss_.count_), loss_.mean_,
                loss_.variance_, static_cast<long long>(norm_.count_), norm_.mean_, norm_.variance_);
  return text;
}

}  // namespace scruple::train
