// A caller may have set flush-to-zero or another rounding mode; our bits must not depend on it.
#pragma once

#include <cfenv>

namespace scruple {

// IEEE's default floating-point environment while it lives, the caller's again afterwards.
class DefaultFloatEnvironment {
 public:
  DefaultFloatEnvironment() {
    std::fegetenv(&saved_);
    std::fesetenv(FE_DFL_ENV);
  }
  ~DefaultFloatEnvironment() { std::fesetenv(&saved_); }
  DefaultFloatEnvironment(const DefaultFloatEnvironment&) = delete;
  DefaultFloatEnvironment& operator=(const DefaultFloatEnvironment&) = delete;

 private:
  std::fenv_t saved_;
};

}  // namespace scruple
