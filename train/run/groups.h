// The optimizers of a run: the parameters of a group share one, with its learning rate and its weight decay.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "include/scruple/scruple.hpp"
#include "train/model/description.h"

namespace scruple::train {

// Another rate or weight decay for parameters whose name fits a pattern of a shell: *, ?, [a-z].
struct Override {
  std::string pattern;
  std::optional<double> rate;  // as many times the schedule's
  std::optional<double> weight_decay;
};
bool fits(const Parameter& parameter, const std::string& pattern);

class Groups {
 public:
  // Group 0 has the matrices, group 1 what does not decay; then come those of overrides, of which the last that fits
  // counts. Throws where `make`'s optimizer has no such decay.
  Groups(const std::vector<Parameter>& parameters, const std::function<Optimizer()>& make,
         const std::vector<Override>& overrides, std::uint64_t seed);

  std::size_t size() const { return groups_.size(); }
  std::size_t group_of(std::size_t parameter) const { return group_of_[parameter]; }
  const Optimizer& at(std::size_t group) const { return groups_[group].optimizer; }
  const Optimizer& of(std::size_t parameter) const { return at(group_of(parameter)); }
  void set_rate(double rate);

 private:
  struct Group {
    double rate;  // as many times the schedule's
    std::optional<double> weight_decay;
    Optimizer optimizer;
  };
  std::size_t find_or_add(double rate, std::optional<double> weight_decay,
                          const std::function<Optimizer()>& make, std::uint64_t seed);

  std::vector<Group> groups_;
  std::vector<std::size_t> group_of_;  // each parameter's
};

}  // namespace scruple::train
