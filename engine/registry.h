// The lists formats.def and recipes.def as tables: what each format looks like from outside, which roles it
// serves.
#pragma once

#include <span>
#include <string>

#include "formats/codec.h"
#include "include/scruple/scruple.h"

struct scruple_format {
  const char* name;
  const char* doc;
  unsigned roles;
  int k;
  int index;  // its number in formats.def: its place here and in every unit's table
  scruple::Layout layout;
  bool aux_is_scale;
  unsigned roundings[2];  // [0] signed, [1] non-negative
  scruple::Bound bound[2];
  float spread;    // of a non-negative moment under stochastic rounding (formats/log.h)
  float overflow;  // the least magnitude that a gradient loses to infinity
};

namespace scruple {

struct Recipe {
  const char *name, *weight, *moment, *nonneg, *gradient;
  Rounding weight_rounding, moment_rounding, nonneg_rounding, gradient_rounding;
  i64 small;
  const char* doc;
};

// Elements of a tensor, shards of it included: what byte counts and random counters can address.
inline constexpr i64 kMaxElements = i64{1} << 50;

struct Bytes {
  i64 codes, aux;
};

std::span<const scruple_format> formats();
std::span<const Recipe> recipes();

const scruple_format& find_format(const char* name);
const Recipe& find_recipe(const char* name);

Bytes bytes_of(const scruple_format& format, i64 size);
// visit(plane, bytes) for each plane of an array of `size` elements that is not empty.
void for_planes(const scruple_array& array, i64 size, const auto& visit) {
  const Bytes bytes = bytes_of(*array.format, size);
  if (bytes.codes > 0) visit(array.codes, bytes.codes);
  if (bytes.aux > 0) visit(array.aux, bytes.aux);
}
// The formats that serve a role, as a sentence part: "fp32, bf16, ...".
std::string formats_for(unsigned role);
const char* role_name(unsigned role);
const char* rounding_name(int rounding);
// How an array of this role can be rounded in the format, as bits; and such bits as a sentence part.
unsigned roundings_for(const scruple_format& format, unsigned role);
std::string rounding_names(unsigned roundings);
bool can_round(const scruple_format& format, unsigned role, int rounding);
// The first rounding whose codes decode alike: split weights decode by their rounding, all others do not.
int reads_as(const scruple_format& format, int rounding);

}  // namespace scruple
