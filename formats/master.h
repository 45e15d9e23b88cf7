// bf16+fp32 and fp16+fp32: a 16-bit weight beside a whole fp32 master copy, as in Mixed Precision Training
// (Micikevicius et al., 1710.03740, section 3.1). The visible half is the master rounded to nearest, ties to
// even.
#pragma once

#include "formats/bf16.h"
#include "formats/fp16.h"

namespace scruple {
inline namespace SCRUPLE_UNIT {

template <class HalfType>
struct Master {
  using Half = HalfType;
  static constexpr const char* doc = "16-bit weight beside an fp32 master copy";
  static constexpr unsigned roundings = 1u << kNearest;
  static constexpr Layout layout(int) { return {16, 32, 1}; }
  static constexpr Bound bound(int) { return {0, 0, 0}; }
};

}  // namespace SCRUPLE_UNIT
}  // namespace scruple
