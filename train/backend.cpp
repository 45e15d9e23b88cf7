#include "train/backend.h"

namespace scruple::train {

const float* visible_values(Engine& engine, const scruple_tensor& weight, float* scratch) {
  static const scruple_format* const fp32 = format_named("fp32");
  const scruple_array& array = weight.arrays[SCRUPLE_WEIGHT];
  if (array.format == fp32) return static_cast<const float*>(array.codes);
  check(scruple_decode(engine.raw(), &weight, SCRUPLE_WEIGHT, scratch));
  return scratch;
}

}  // namespace scruple::train
