#include <algorithm>
#include <iterator>
#include <string>

#include "train/cuda/layers.h"

namespace scruple::train::cuda {

const scruple_format* format_of(Precision type) { return format_named(kPrecisions[static_cast<int>(type)]); }

std::optional<Precision> type_of(const scruple_format* format) {
  const std::string name = info_of(format).name;
  const auto found = std::find(std::begin(kPrecisions), std::end(kPrecisions), name);
  if (found == std::end(kPrecisions)) return std::nullopt;
  return static_cast<Precision>(found - std::begin(kPrecisions));
}

}  // namespace scruple::train::cuda
