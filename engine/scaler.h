// Loss scaling (Micikevicius et al., 1710.03740, section 3.2): grow after a run of clean steps, back off on
// overflow.
#pragma once

#include "formats/codec.h"
#include "include/scruple/scruple.h"

namespace scruple {

// The constants are those that the frameworks settled on.
inline constexpr scruple_scaler kDynamicScaler{65536.0f, 2.0f, 0.5f, 2000, 0};

// The scale stays a normal, finite number.
inline constexpr float kSmallestScale = 0x1p-126f, kLargestScale = 0x1p127f;

inline namespace SCRUPLE_UNIT {

SCRUPLE_HD scruple_scaler updated(scruple_scaler s, bool overflow) {
  if (overflow) {
    s.scale = s.scale * s.backoff > kSmallestScale ? s.scale * s.backoff : kSmallestScale;
    s.clean = 0;
  } else if (s.clean >= s.interval - 1) {
    s.scale = s.scale * s.growth < kLargestScale ? s.scale * s.growth : kLargestScale;
    s.clean = 0;
  } else {
    ++s.clean;
  }
  return s;
}

}  // namespace SCRUPLE_UNIT
}  // namespace scruple
