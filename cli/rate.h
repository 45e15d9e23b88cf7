// The learning rate and the weight decay of a run: over its steps, and of parameters by their names.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "options.h"
#include "train/run/groups.h"
#include "train/run/schedule.h"

namespace scruple::cli {

inline constexpr double kLr = 1e-3;  // of new weights

struct RateOptions {
  double lr = 0, min_lr = 0, cooldown = 0, weight_decay = -1;
  std::string annealing = train::kAnnealings[0];
  std::int64_t warmup = -1;
  std::vector<std::string> lr_for, weight_decay_for;  // PATTERN=X

  OptionTable options();
  void complete();  // what was not said; throws where options do not go together
  // Throws where the steps are too few for it.
  train::Schedule schedule(std::int64_t steps) const;
  // Throws where a pattern fits none of the parameters.
  std::vector<train::Override> overrides(const std::vector<train::Parameter>& parameters) const;
};

// "cosine", "wsd to 1e-05 over the last 200 steps".
std::string schedule_words(const train::Schedule& schedule);
// What of a schedule becomes other where a run becomes longer.
std::string longer_words(const train::Schedule& schedule);

}  // namespace scruple::cli
