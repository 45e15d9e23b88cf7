// The headers behind formats.def, and None for the roles that a format does not serve.
#pragma once

#include "formats/companded8.h"
#include "formats/flash8.h"
#include "formats/fp32.h"
#include "formats/group_linear.h"
#include "formats/linear8.h"
#include "formats/log.h"
#include "formats/master.h"
#include "formats/nf4.h"
#include "formats/root8.h"
#include "formats/rounded.h"
#include "formats/split.h"

namespace scruple {
inline namespace SCRUPLE_UNIT {

struct None {
  static constexpr const char* doc = "";
  static constexpr unsigned roundings = 0;
  static constexpr Layout layout(int) { return {0, 0, 1}; }
  static constexpr Bound bound(int) { return {0, 0, 0}; }
};

}  // namespace SCRUPLE_UNIT
}  // namespace scruple
