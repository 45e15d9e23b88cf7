// A user's choice of formats and roundings, by the names of scruple.h. The command line and Python call it.
#include <algorithm>
#include <initializer_list>
#include <string>
#include <string_view>
#include <vector>

#include "capi/guard.h"
#include "engine/engine.h"

namespace {

using namespace scruple;

std::string_view text_of(const char* text) { return text == nullptr ? "(null)" : text; }

// What the optimizer uses of weight, slots and gradient, up to the array `end`.
std::vector<int> used_arrays(const scruple_tensor& t, int end) {
  std::vector<int> arrays;
  for (int a = 0; a < end; ++a)
    if (is_used(t, a)) arrays.push_back(a);
  return arrays;
}

// Whether an array is one of those that a name of several means.
bool is_of(const scruple_tensor& t, int array, std::string_view several) {
  const unsigned role = role_in_step(t, array);
  if (several == "weights") return role == SCRUPLE_ROLE_WEIGHT;
  if (several == "second moments") return role == SCRUPLE_ROLE_NONNEG;
  return role != SCRUPLE_ROLE_WEIGHT && role != SCRUPLE_ROLE_GRADIENT;  // moments
}

std::string quoted(const scruple_tensor& t, std::initializer_list<const char*> names,
                   const std::vector<int>& arrays) {
  std::string list;
  const auto add = [&](const char* name) { list += (list.empty() ? "'" : ", '") + std::string(name) + "'"; };
  for (const char* name : names) add(name);
  for (const int a : arrays)
    if (a != SCRUPLE_WEIGHT) add(array_name(t, a));
  return list;
}

// Those of `arrays` that `which` names: a slot or the gradient, or one of `names`, which are of several and may be of
// none.
std::vector<int> named(const scruple_tensor& t, const char* what, std::string_view which,
                       std::initializer_list<const char*> names, const std::vector<int>& arrays) {
  const bool several = std::find(names.begin(), names.end(), which) != names.end();
  std::vector<int> found;
  for (const int a : arrays)
    if (several ? is_of(t, a, which) : a != SCRUPLE_WEIGHT && which == array_name(t, a)) found.push_back(a);
  if (found.empty() && !several)
    fail(SCRUPLE_INVALID, what, " of '", which, "': ", t.optimizer->rule().name,
         " has none here; it can be of ", quoted(t, names, arrays));
  return found;
}

// All but dither, which is for gradients.
int find_rounding(const scruple_tensor& t, std::string_view name) {
  unsigned known = 0;
  for (int r = 0; r < kRoundings; ++r) {
    if (r == kDither) continue;
    if (name == rounding_name(r)) return r;
    known |= 1u << r;
  }
  fail(SCRUPLE_INVALID, "rounding is '", name, "'; it can be ", rounding_names(known), ", of ",
       quoted(t, {"weights", "moments"}, used_arrays(t, SCRUPLE_GRADIENT)), " or all that can");
}

bool is_fp32(const scruple_array& array) {
  return array.format != nullptr && array.format->layout.code_bits == 32;
}

}  // namespace

extern "C" {

scruple_status scruple_tensor_set_format(scruple_tensor* tensor, const char* which, const char* format) {
  return guarded([&] {
    scruple_tensor t = required(tensor, "tensor");
    check_tensor(t, 0);
    const scruple_format& wanted = find_format(format);
    std::vector<int> arrays = named(t, "format", text_of(which), {"weights", "moments", "second moments"},
                                    used_arrays(t, SCRUPLE_ARRAYS));
    std::erase_if(arrays, [&](int a) { return role_in_step(t, a) == SCRUPLE_ROLE_EXACT; });
    std::vector<int> fit = arrays;
    std::erase_if(fit, [&](int a) { return (wanted.roles & role_of(t, a)) == 0; });
    if (fit.empty() && !arrays.empty()) fit = {arrays.front()};
    for (const int a : fit) {
      scruple_array& array = t.arrays[a];
      if (array.owned != 0 && array.format != &wanted)
        fail(SCRUPLE_INVALID, "format ", wanted.name, " for ", array_name(t, a),
             ", of which this tensor owns planes of another layout; call scruple_tensor_free first");
      // Most steps of weights in scaled integers are below half a code, and lost to nearest.
      const bool becomes_codes = a == SCRUPLE_WEIGHT && wanted.aux_is_scale &&
                                 (array.format == nullptr || !array.format->aux_is_scale);
      array.format = &wanted;
      if (becomes_codes)
        array.rounding = kStochastic;
      else if (!can_round(wanted, role_of(t, a), array.rounding))
        array.rounding = kNearest;
    }
    *tensor = t;
  });
}

scruple_status scruple_tensor_set_rounding(scruple_tensor* tensor, const char* which, const char* rounding) {
  return guarded([&] {
    scruple_tensor t = required(tensor, "tensor");
    check_tensor(t, 0);
    const int wanted = find_rounding(t, text_of(rounding));
    const bool all = which == nullptr || *which == 0;
    std::vector<int> arrays = used_arrays(t, SCRUPLE_GRADIENT);
    if (!all) arrays = named(t, "rounding", which, {"weights", "moments"}, arrays);
    std::erase_if(arrays, [&](int a) { return is_fp32(t.arrays[a]); });  // which rounds nothing
    std::vector<int> fit = arrays;
    std::erase_if(fit, [&](int a) {
      return t.arrays[a].format == nullptr || !can_round(*t.arrays[a].format, role_of(t, a), wanted);
    });
    if (!all && fit.empty() && !arrays.empty()) {
      const int a = arrays.front();
      check_array(t, 0, a, false);  // where the format itself is wrong, that is the reason
      const scruple_format& format = *t.arrays[a].format;
      fail(SCRUPLE_UNSUPPORTED, "rounding '", rounding_name(wanted), "' of ",
           a == SCRUPLE_WEIGHT ? "weights" : array_name(t, a), " kept in ", format.name,
           ", which can be rounded ", rounding_names(roundings_for(format, role_of(t, a))),
           "; choose one of these, or another format");
    }
    for (const int a : fit) t.arrays[a].rounding = wanted;
    *tensor = t;
  });
}

scruple_status scruple_tensor_check(const scruple_tensor* tensor) {
  return guarded([&] {
    const scruple_tensor& t = required(tensor, "tensor");
    check_tensor(t, 0);
    for (const int a : used_arrays(t, SCRUPLE_ARRAYS))
      if (a != SCRUPLE_GRADIENT || t.arrays[a].format != nullptr) check_array(t, 0, a, false);
  });
}

}  // extern "C"
