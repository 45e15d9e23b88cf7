// What the parity tests run: every optimizer in every recipe, roundings, gradients, read from the registry.
#pragma once

#include "tests/support.h"

namespace scruple_tests {

struct Config {
  std::string rule = "adamw";
  scruple_tensor formats{};  // formats and roundings of every array
  Hypers hypers;
  std::string name;
};

// Every hyperparameter away from zero; of the flags none, or every one that the others allow, so that all slots are in
// use.
inline Hypers busy_hypers(const Rule& rule, bool with_flags = true) {
  const Engine engine;
  Optimizer optimizer(rule.name);
  Hypers set;
  for (const bool flags : {false, true})
    for (const scruple_hyper_info& hyper : rule.hypers) {
      if ((hyper.flag != 0) != flags || (flags && !with_flags)) continue;
      const double value = flags ? 1 : hyper.value == 0 ? 0.1 : 0.9 * hyper.value;
      optimizer.set(hyper.name, value);
      const Tensor probe(optimizer, 1, "fp32", engine);
      if (scruple_step(engine, &probe.row, 1, nullptr) == SCRUPLE_OK)
        set.emplace_back(hyper.name, value);
      else
        optimizer.set(hyper.name, 0);
    }
  return set;
}

inline void put(Config& config, int array, const scruple_format* format, int rounding) {
  config.formats.arrays[array] = {};
  config.formats.arrays[array].format = format;
  config.formats.arrays[array].rounding = rounding;
}

// A rule in a recipe's formats, whatever the tensor's size, with gradients in fp32.
inline Config config_of(const std::string& rule, const char* recipe = "fp32", const Hypers& hypers = {}) {
  const Optimizer optimizer(rule, hypers);
  Config config{rule, row_of(optimizer, std::int64_t{1} << 30, recipe), hypers, rule + " in " + recipe};
  put(config, SCRUPLE_GRADIENT, scruple_format_find("fp32"), SCRUPLE_NEAREST);
  return config;
}

// Every rule x recipe that exists, with the rule's defaults or with these hyperparameters, the gradient as the recipe
// has it. The formats are the recipe's whatever the tensor's size.
inline std::vector<Config> recipe_configs(const std::string& kind, const auto& hypers_of) {
  std::vector<Config> list;
  for (const Rule& rule : rules()) {
    if (kThreadSanitizer && rule.name != "adamw") continue;
    const Hypers hypers = hypers_of(rule);
    const Optimizer optimizer(rule.name, hypers);  // some slots must be exact
    for (const scruple_recipe_info& recipe : recipes()) {
      scruple_tensor row = row_of(optimizer, std::int64_t{1} << 30);
      if (scruple_tensor_use(&row, recipe.name) != SCRUPLE_OK) continue;
      list.push_back({rule.name, row, hypers, rule.name + " (" + kind + "), " + recipe.name});
      if (std::string(recipe.weight) != "bf16+8") continue;
      list.push_back(list.back());  // beside weights in fp32, for which the CUDA engine has kernels too
      put(list.back(), SCRUPLE_WEIGHT, scruple_format_find("fp32"), SCRUPLE_NEAREST);
      list.back().name += ", fp32 weights";
    }
  }
  return list;
}
inline std::vector<Config> recipe_configs(bool busy = true) {
  if (busy) return recipe_configs("all slots", [](const Rule& rule) { return busy_hypers(rule); });
  return recipe_configs("defaults", [](const Rule&) { return Hypers(); });
}

// Every rule with each format of groups that can hold one of its moments, in each rounding, beside fp32. Slots
// that flags ask for stay out: they make others exact.
inline std::vector<Config> moment_configs() {
  std::vector<Config> list;
  for (const Rule& rule : rules()) {
    Config plain{rule.name, {}, busy_hypers(rule, false), rule.name};
    for (int a = 0; a < SCRUPLE_ARRAYS; ++a) put(plain, a, scruple_format_find("fp32"), SCRUPLE_NEAREST);
    for (const Case& c : all_cases()) {
      Config config = plain;
      bool any = false;
      for (std::size_t slot = 0; slot < rule.slots.size(); ++slot) {
        if (rule.slots[slot].role != c.role || c.info.aux_is_scale == 0) continue;
        put(config, SCRUPLE_SLOT + static_cast<int>(slot), c.format, c.rounding);
        any = true;
      }
      config.name += ", " + c.name();
      if (any) list.push_back(config);
    }
  }
  return list;
}

// Every weight and moment rounded so where its format can; false where that changes nothing of nearest rounding.
inline bool set_rounding(Config& config, int rounding) {
  bool any = rounding == SCRUPLE_NEAREST;
  for (int a = SCRUPLE_WEIGHT; a < SCRUPLE_GRADIENT; ++a) {
    scruple_array& array = config.formats.arrays[a];
    if (array.format == nullptr) continue;
    const bool can = (info_of(array.format).roundings >> rounding & 1u) != 0;
    array.rounding = can ? rounding : SCRUPLE_NEAREST;
    any = any || can;
  }
  config.name += ", rounding " + std::to_string(rounding);
  return any;
}

struct GradientKind {
  const char* format;
  int rounding;
};
inline constexpr GradientKind kGradientKinds[] = {
    {"fp32", SCRUPLE_NEAREST}, {"bf16", SCRUPLE_NEAREST},  {"bf16", SCRUPLE_STOCHASTIC},
    {"fp16", SCRUPLE_NEAREST}, {"int8", SCRUPLE_NEAREST},  {"int8", SCRUPLE_STOCHASTIC},
    {"int8", SCRUPLE_DITHER},  {"root8", SCRUPLE_NEAREST}, {"root8", SCRUPLE_STOCHASTIC}};
inline bool accumulates(const GradientKind& kind) {
  return (info_of(scruple_format_find(kind.format)).roles & SCRUPLE_ROLE_ACCUMULATOR) != 0;
}
inline Config with_gradient(Config config, const GradientKind& kind) {
  put(config, SCRUPLE_GRADIENT, scruple_format_find(kind.format), kind.rounding);
  config.name += std::string(", gradient ") + kind.format + " " + std::to_string(kind.rounding);
  return config;
}

}  // namespace scruple_tests
