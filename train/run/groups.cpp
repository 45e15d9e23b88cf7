#include "train/run/groups.h"

#include <fnmatch.h>

namespace scruple::train {
namespace {

constexpr const char* kDecay = "weight_decay";

bool decays_at_all(const Optimizer& optimizer) {
  double value = 0;
  return scruple_optimizer_get(optimizer.raw(), kDecay, &value) == SCRUPLE_OK;
}

}  // namespace

bool fits(const Parameter& parameter, const std::string& pattern) {
  return fnmatch(pattern.c_str(), parameter.name.c_str(), 0) == 0;
}

Groups::Groups(const std::vector<Parameter>& parameters, const std::function<Optimizer()>& make,
               const std::vector<Override>& overrides, std::uint64_t seed) {
  const std::optional<double> none = decays_at_all(make()) ? std::optional(0.0) : std::nullopt;
  groups_.push_back({1, std::nullopt, make()});
  groups_.push_back({1, none, make()});
  for (Group& group : groups_) {
    if (group.weight_decay) group.optimizer.set(kDecay, *group.weight_decay);
    group.optimizer.set_seed(seed);
  }
  for (const Parameter& parameter : parameters) {
    double rate = 1;
    std::optional<double> weight_decay;
    for (const Override& one : overrides) {
      if (!fits(parameter, one.pattern)) continue;
      if (one.rate) rate = *one.rate;
      if (one.weight_decay) weight_decay = one.weight_decay;
    }
    const bool is_plain = rate == 1 && !weight_decay;
    if (!weight_decay && !parameter.decays) weight_decay = none;
    group_of_.push_back(is_plain ? (parameter.decays ? 0u : 1u)
                                 : find_or_add(rate, weight_decay, make, seed));
  }
}

std::size_t Groups::find_or_add(double rate, std::optional<double> weight_decay,
                                const std::function<Optimizer()>& make, std::uint64_t seed) {
  for (std::size_t g = 0; g < groups_.size(); ++g)
    if (groups_[g].rate == rate && groups_[g].weight_decay == weight_decay) return g;
  Group& made = groups_.emplace_back(Group{rate, weight_decay, make()});
  if (weight_decay) made.optimizer.set(kDecay, *weight_decay);
  made.optimizer.set_seed(seed);
  return groups_.size() - 1;
}

void Groups::set_rate(double rate) {
  for (const Group& group : groups_)
    check(scruple_optimizer_set(group.optimizer.raw(), "lr", rate * group.rate));
}

}  // namespace scruple::train
