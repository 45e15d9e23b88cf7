// Steps that are not to be taken: their loss or their gradient's norm is far above what it has been.
#pragma once

#include <cstdint>
#include <string>

namespace scruple::train {

// Mean and variance of what was seen, the latest 50 values before all (West, 1979, with weights that fall).
class Running {
 public:
  void add(double value);
  // How many standard deviations it lies above the mean; 0 while fewer than 20 values were seen.
  double above(double value) const;

 private:
  friend class Outliers;
  std::int64_t count_ = 0;
  double mean_ = 0, variance_ = 0;
};

class Outliers {
 public:
  // More than `limit` deviations are an outlier. `state`: as state() said it; "": nothing was seen.
  explicit Outliers(double limit, const std::string& state = "");
  // What is not finite is none: such a step is not taken anyway.
  bool is_outlier(double loss, double norm) const;
  void add(double loss, double norm);  // of a step that was taken
  std::string state() const;           // every bit of it

 private:
  double limit_;
  Running loss_, norm_;
};

}  // namespace scruple::train
