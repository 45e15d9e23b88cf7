// formats.def and recipes.def for those who choose code when it is compiled: the row of a format by its number,
// the number of a format by its name, and every recipe in numbers.
#pragma once

#include "formats/all.h"

namespace scruple {
inline namespace SCRUPLE_UNIT {

inline constexpr int kNoFormat = -1;

template <int Number>
struct FormatRow;
template <>
struct FormatRow<kNoFormat> {
  using Signed = None;
  using Nonneg = None;
  static constexpr int k = 0;
};
#define SCRUPLE_FORMAT(number, name, letters, K, S, N) \
  template <>                                          \
  struct FormatRow<number> {                           \
    using Signed = S;                                  \
    using Nonneg = N;                                  \
    static constexpr int k = K;                        \
    static constexpr const char* roles = letters;      \
  };
#include "formats/formats.def"
#undef SCRUPLE_FORMAT

constexpr bool same_name(const char* a, const char* b) {
  for (; *a != 0 && *a == *b; ++a, ++b) {
  }
  return *a == *b;
}

// kNoFormat: there is none of this name.
constexpr int format_index(const char* wanted) {
#define SCRUPLE_FORMAT(number, name, ...) \
  if (same_name(name, wanted)) return number;
#include "formats/formats.def"
#undef SCRUPLE_FORMAT
  return kNoFormat;
}

struct RecipeRow {
  int weight, moment, nonneg, gradient;
  Rounding weight_rounding;
};
inline constexpr RecipeRow kRecipeRows[] = {
#define SCRUPLE_RECIPE(name, weight, moment, nonneg, gradient, weight_rounding, ...) \
  {format_index(weight), format_index(moment), format_index(nonneg), format_index(gradient), weight_rounding},
#include "formats/recipes.def"
#undef SCRUPLE_RECIPE
};

}  // namespace SCRUPLE_UNIT
}  // namespace scruple
