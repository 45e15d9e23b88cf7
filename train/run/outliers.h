// What --skip-outliers has seen, as a checkpoint keeps it. train/pass/guard.h decides by it.
#pragma once

#include <string>

#include "train/pass/guard.h"

namespace scruple::train {

struct Outliers {
  RunningMean losses, norms;

  // `state`: as state() said it; "": nothing was seen.
  explicit Outliers(const std::string& state = "");
  std::string state() const;  // every bit of it
};

}  // namespace scruple::train
