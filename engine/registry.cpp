#include "engine/registry.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <type_traits>

#include "engine/failure.h"
#include "engine/unit.h"
#include "formats/formats.def"

namespace scruple {
namespace {

constexpr unsigned roles_of(const char* letters) {
  unsigned roles = 0;
  for (; *letters != 0; ++letters)
    roles |= *letters == 'w'   ? SCRUPLE_ROLE_WEIGHT
             : *letters == 's' ? SCRUPLE_ROLE_SIGNED
             : *letters == 'n' ? SCRUPLE_ROLE_NONNEG
             : *letters == 'x' ? SCRUPLE_ROLE_EXACT
             : *letters == 'g' ? SCRUPLE_ROLE_GRADIENT
                               : SCRUPLE_ROLE_ACCUMULATOR;
  return roles;
}

constexpr unsigned kGradientRoles = SCRUPLE_ROLE_GRADIENT | SCRUPLE_ROLE_ACCUMULATOR;

template <class C>
constexpr float spread_of_codec() {
  if constexpr (requires { C::spread; }) return C::spread;
  return 1;
}
template <class C>
constexpr float overflow_of_codec() {
  return std::is_same_v<C, Rounded<Fp16>> ? Fp16::kOverflow : kNoOverflow;
}

template <class Signed, class Nonneg>
constexpr scruple_format row(const char* name, const char* roles, int k, int index) {
  const bool any = Signed::roundings != 0;
  const Layout layout = any ? Signed::layout(k) : Nonneg::layout(k);
  return {name,
          any ? Signed::doc : Nonneg::doc,
          roles_of(roles),
          k,
          index,
          layout,
          layout.group > 1,
          {(roles_of(roles) & kGradientRoles) != 0 ? Signed::roundings : Signed::roundings & ~(1u << kDither),
           Nonneg::roundings},
          {Signed::bound(k), Nonneg::bound(k)},
          spread_of_codec<Nonneg>(),
          overflow_of_codec<Signed>()};
}

constexpr std::array<scruple_format, kFormatCount> make_formats() {
  std::array<scruple_format, kFormatCount> table{};
#define SCRUPLE_FORMAT(number, name, roles, k, Signed, Nonneg) \
  table[number] = row<Signed, Nonneg>(name, roles, k, number);
#include "formats/formats.def"
#undef SCRUPLE_FORMAT
  return table;
}
constexpr std::array<scruple_format, kFormatCount> kFormats = make_formats();
// There are as many rows as numbers, so a number that stands twice leaves another place empty.
static_assert(std::all_of(kFormats.begin(), kFormats.end(),
                          [](const scruple_format& format) { return format.name != nullptr; }),
              "formats.def: a number stands twice, and another is missing");

constexpr Recipe kRecipes[] = {
#define SCRUPLE_RECIPE(...) {__VA_ARGS__},
#include "formats/recipes.def"
#undef SCRUPLE_RECIPE
};

template <class Table>
const auto& find(const Table& table, const char* kind, const char* name) {
  if (name == nullptr) fail(SCRUPLE_INVALID, "the name of a ", kind, " is null; known: ", names_of(table));
  for (const auto& entry : table)
    if (std::strcmp(entry.name, name) == 0) return entry;
  fail(SCRUPLE_INVALID, "unknown ", kind, " '", name, "'; known: ", names_of(table));
}

}  // namespace

std::span<const scruple_format> formats() { return kFormats; }
std::span<const Recipe> recipes() { return kRecipes; }

const scruple_format& find_format(const char* name) { return find(formats(), "format", name); }
const Recipe& find_recipe(const char* name) { return find(recipes(), "recipe", name); }

Bytes bytes_of(const scruple_format& format, i64 size) {
  const Layout& l = format.layout;
  const i64 groups = (size + l.group - 1) / l.group;
  return {(size * l.code_bits + 7) / 8, (groups * l.aux_bits + 7) / 8};
}

std::string formats_for(unsigned role) {
  return names_of(formats(), [=](const scruple_format& format) { return (format.roles & role) != 0; });
}

const char* role_name(unsigned role) {
  switch (role) {
    case SCRUPLE_ROLE_WEIGHT: return "a weight";
    case SCRUPLE_ROLE_SIGNED: return "a signed moment";
    case SCRUPLE_ROLE_NONNEG: return "a non-negative moment";
    case SCRUPLE_ROLE_EXACT: return "a moment of which maxima or small differences count (amsgrad, centered)";
    case SCRUPLE_ROLE_GRADIENT: return "a gradient";
    default: return "a gradient accumulator";
  }
}

const char* rounding_name(int rounding) {
  constexpr const char* kNames[] = {"nearest", "truncate", "stochastic", "dither", "wide"};
  static_assert(std::size(kNames) == kRoundings);
  return rounding >= 0 && rounding < kRoundings ? kNames[rounding] : "unknown";
}

unsigned roundings_for(const scruple_format& format, unsigned role) {
  const unsigned roundings = format.roundings[role == SCRUPLE_ROLE_NONNEG ? 1 : 0];
  const bool is_gradient = role == SCRUPLE_ROLE_GRADIENT || role == SCRUPLE_ROLE_ACCUMULATOR;
  // To read dithered codes takes the number of writes, and only gradients and accumulators count theirs.
  return is_gradient ? roundings : roundings & ~(1u << kDither);
}

bool can_round(const scruple_format& format, unsigned role, int rounding) {
  return rounding >= 0 && rounding < kRoundings && (roundings_for(format, role) >> rounding & 1u) != 0;
}

std::string rounding_names(unsigned roundings) {
  std::string names;
  for (int r = 0; r < kRoundings; ++r)
    if ((roundings >> r & 1u) != 0) names += (names.empty() ? "" : ", ") + std::string(rounding_name(r));
  return names;
}

// Split weights are the only formats that can round wide.
int reads_as(const scruple_format& format, int rounding) {
  const bool is_split = (format.roundings[0] >> kWide & 1u) != 0;
  return is_split && (rounding == kTruncate || rounding == kStochastic) ? rounding : int{kNearest};
}

}  // namespace scruple
