// An optimizer behind a handle: the update rule, chosen by name at run time, with its hyperparameters.
#pragma once

#include <memory>
#include <span>
#include <vector>

#include "include/scruple/scruple.h"
#include "optim/optimizer.h"

namespace scruple {

struct HyperField {
  const char* name;
  const char* doc;
  double value;  // the default
  Range range;
};

struct RuleInfo {
  const char* name;
  const char* doc;
  int index;  // its number in optim.def, its place in every unit's table
  std::span<const Slot> slots;
  std::vector<HyperField> hypers;
  Accumulation accumulation;  // how it takes a step in parts
};

// The constants of one step, and the hyperparameters, of any rule.
struct alignas(16) StepConstants {
  unsigned char bytes[64];
};
struct alignas(16) HyperBytes {
  unsigned char bytes[64];
};

}  // namespace scruple

struct scruple_optimizer {
  virtual ~scruple_optimizer() = default;
  virtual const scruple::RuleInfo& rule() const = 0;
  virtual void set(const char* name, double value) = 0;
  virtual double get(const char* name) const = 0;
  virtual unsigned active() const = 0;  // slots in use, as a bit mask
  virtual unsigned exact() const = 0;   // of these, those that must be fp32
  virtual const char* problem() const = 0;
  virtual double initial(int slot) const = 0;
  virtual scruple::HyperBytes hyper() const = 0;
  // `first`: of the parts of this step, or the whole of it. Reads lr_at, where it is set.
  virtual scruple::StepConstants prepare(scruple::i64 step, bool first) const = 0;
  virtual const char* problem_with_parts() const = 0;  // why it cannot take a step in parts, or nullptr

  std::uint64_t seed = 0;
  const double* lr_at = nullptr;  // in an engine's memory
  bool maximize = false;
};

namespace scruple {

const std::vector<RuleInfo>& rules();
std::unique_ptr<scruple_optimizer> make_optimizer(const char* rule);

}  // namespace scruple
