// formats.def and recipes.def for those who choose code when it is compiled: the row of a format by its number,
// the number of a format by its name, and every recipe in numbers.
#pragma once

#include <type_traits>

#include "formats/formats.def"

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

// The letters of formats.def, a bit for each.
constexpr u32 role_bits(const char* letters) {
  u32 bits = 0;
  for (; *letters != 0; ++letters) bits |= 1u << (*letters - 'a');
  return bits;
}
constexpr bool serves(const char* roles, char role) { return (role_bits(roles) >> (role - 'a') & 1u) != 0; }

// The roles of all formats that a codec serves.
template <class C>
constexpr u32 roles_of_codec() {
  u32 bits = 0;
#define SCRUPLE_FORMAT(number, name, letters, k, Signed, Nonneg) \
  if (std::is_same_v<C, Signed> || std::is_same_v<C, Nonneg>) bits |= role_bits(letters);
#include "formats/formats.def"
#undef SCRUPLE_FORMAT
  return bits;
}
// Whether a codec holds moments alone. In a group of them a value that is not finite is stored as 0, lest one
// element cost the whole group. A weight or a gradient has no other place to be seen in: there it makes the
// group NaN.
template <class C>
constexpr bool kMomentCodec = (roles_of_codec<C>() & role_bits("wga")) == 0;

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
