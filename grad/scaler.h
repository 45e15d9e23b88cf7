// Loss scaling (Micikevicius et al., 1710.03740, section 3.2): grow after a run of clean steps, back off on overflow.
#pragma once

#include "include/scruple/scruple.h"

namespace scruple {

// The constants are those that the frameworks settled on.
inline constexpr scruple_scaler kDynamicScaler{65536.0f, 2.0f, 0.5f, 2000, 0};

inline scruple_scaler updated(scruple_scaler s, bool overflow) {
  constexpr float kLargest = 0x1p127f, kSmallest = 0x1p-126f;  // the scale stays a normal, finite number
  if (overflow) {
    s.scale = s.scale * s.backoff > kSmallest ? s.scale * s.backoff : kSmallest;
    s.clean = 0;
  } else if (++s.clean >= s.interval) {
    s.scale = s.scale * s.growth < kLargest ? s.scale * s.growth : kLargest;
    s.clean = 0;
  }
  return s;
}

}  // namespace scruple
