// linear8: scaled integers as moments, kept as the ablation: an element far below its group's maximum becomes
// zero. Groups of 64 share an fp32 unit.
//   signed        GroupLinear<8>
//   non-negative  unit = absmax / 255, code = round(x / unit)
#pragma once

#include "formats/group_linear.h"

namespace scruple {
inline namespace SCRUPLE_UNIT {

// A type of its own: int8, which is GroupLinear<8> too, is no format for moments (kMomentCodec in
// formats/rows.h).
struct Linear8 : GroupLinear<8> {};

struct Linear8Nonneg {
  static constexpr const char* doc = GroupLinear<8>::doc;
  static constexpr int group = 64, bits = 8;
  static constexpr i32 top = 255;
  using Scale = float;
  static constexpr unsigned roundings = 1u << kNearest | 1u << kStochastic;
  static constexpr Layout layout(int) { return {8, 32, group}; }
  static constexpr Bound bound(int) { return {0, 0.5 / top + 0x1p-22, 0x1p-126}; }

  static SCRUPLE_HD Scale scale(float absmax) { return group_unit(absmax, top); }
  static SCRUPLE_HD float gain(float, Scale unit) { return group_gain(unit); }
  static SCRUPLE_HD float unit(Scale unit) { return unit; }
  static SCRUPLE_HD u32 encode(float x, float gain, u32 coin) {
    return round_scaled<8>(magnitude(x), gain, coin) & 0xffu;
  }
  static SCRUPLE_HD float decode(u32 code, float unit) { return static_cast<float>(code) * unit; }
};

}  // namespace SCRUPLE_UNIT
}  // namespace scruple
