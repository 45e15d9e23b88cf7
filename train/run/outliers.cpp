#include "train/run/outliers.h"

#include <cstdio>
#include <stdexcept>

namespace scruple::train {

Outliers::Outliers(const std::string& state) {
  if (state.empty()) return;
  long long loss_count = 0, norm_count = 0;
  if (std::sscanf(state.c_str(), "%lld %la %la %lld %la %la", &loss_count, &losses.mean, &losses.variance,
                  &norm_count, &norms.mean, &norms.variance) != 6)
    throw std::runtime_error("the checkpoint's running means for --skip-outliers are '" + state +
                             "', which are none; it is damaged");
  losses.count = loss_count, norms.count = norm_count;
}

std::string Outliers::state() const {
  char text[256];
  std::snprintf(text, sizeof text, "%lld %a %a %lld %a %a", static_cast<long long>(losses.count), losses.mean,
                losses.variance, static_cast<long long>(norms.count), norms.mean, norms.variance);
  return text;
}

}  // namespace scruple::train
