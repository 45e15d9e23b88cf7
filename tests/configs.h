// What the parity tests run: every optimizer in every recipe, roundings, gradients, read from the registry.
#pragma once

#include <utility>

#include "tests/support.h"

namespace scruple_tests {

enum class Data { kNormal, kSubnormal, kNonFinite, kManyScales };

struct Config {
  std::string rule = "adamw";
  scruple_tensor formats{};  // formats and roundings of every array
  std::vector<std::pair<std::string, double>> hypers;
  std::string name;
};

inline std::string rule_name(int index) {
  scruple_rule_info info{};
  CHECK_OK(scruple_rule_at(index, &info));
  return info.name;
}

// Every hyperparameter away from zero and every flag that the others allow: all slots are in use.
inline std::vector<std::pair<std::string, double>> busy_hypers(int rule) {
  const Engine engine;
  Optimizer optimizer(rule_name(rule).c_str());
  scruple_rule_info info{};
  CHECK_OK(scruple_rule_at(rule, &info));
  std::vector<std::pair<std::string, double>> set;
  for (const int flags : {0, 1})
    for (int h = 0; h < info.hypers; ++h) {
      scruple_hyper_info hyper{};
      CHECK_OK(scruple_rule_hyper(rule, h, &hyper));
      if (hyper.flag != flags) continue;
      const double value = hyper.flag != 0 ? 1 : hyper.value == 0 ? 0.1 : 0.9 * hyper.value;
      optimizer.set(hyper.name, value);
      const Tensor probe(optimizer, 1, "fp32", engine);
      if (scruple_step(engine, &probe.row, 1, nullptr) == SCRUPLE_OK)
        set.emplace_back(hyper.name, value);
      else
        optimizer.set(hyper.name, 0);
    }
  return set;
}

// Every rule x recipe that exists, with every slot in use or with the rule's defaults. The formats are the
// recipe's whatever the tensor's size.
inline std::vector<Config> recipe_configs(bool busy = true) {
  std::vector<Config> list;
  for (int rule = 0; rule < scruple_rule_count(); ++rule) {
    if (kThreadSanitizer && rule_name(rule) != "adamw") continue;
    const auto hypers = busy ? busy_hypers(rule) : std::vector<std::pair<std::string, double>>{};
    for (int recipe = 0; recipe < scruple_recipe_count(); ++recipe) {
      scruple_recipe_info info{};
      CHECK_OK(scruple_recipe_at(recipe, &info));
      Optimizer optimizer(rule_name(rule).c_str());
      for (const auto& [name, value] : hypers)
        optimizer.set(name.c_str(), value);  // some slots must be exact
      scruple_tensor row{};
      row.optimizer = optimizer;
      row.size = std::int64_t{1} << 30;
      if (scruple_tensor_use(&row, info.name) != SCRUPLE_OK) continue;
      list.push_back({rule_name(rule), row, hypers,
                      rule_name(rule) + (busy ? " (all slots), " : " (defaults), ") + info.name});
      if (std::string(info.weight) != "bf16+8") continue;
      list.push_back(list.back());  // beside weights in fp32, for which the CUDA engine has kernels too
      list.back().formats.arrays[SCRUPLE_WEIGHT] = {};
      list.back().formats.arrays[SCRUPLE_WEIGHT].format = scruple_format_find("fp32");
      list.back().name += ", fp32 weights";
    }
  }
  return list;
}

inline void put(Config& config, int array, const scruple_format* format, int rounding) {
  config.formats.arrays[array] = {};
  config.formats.arrays[array].format = format;
  config.formats.arrays[array].rounding = rounding;
}

// Every rule with each format of groups that can hold one of its moments, in each rounding, beside fp32. Slots
// that flags ask for stay out: they make others exact.
inline std::vector<Config> moment_configs() {
  std::vector<Config> list;
  for (int rule = 0; rule < scruple_rule_count(); ++rule) {
    scruple_rule_info info{};
    CHECK_OK(scruple_rule_at(rule, &info));
    Config plain{info.name, {}, {}, info.name};
    for (int a = 0; a < SCRUPLE_ARRAYS; ++a) put(plain, a, scruple_format_find("fp32"), SCRUPLE_NEAREST);
    for (int h = 0; h < info.hypers; ++h) {
      scruple_hyper_info hyper{};
      CHECK_OK(scruple_rule_hyper(rule, h, &hyper));
      if (hyper.flag == 0) plain.hypers.emplace_back(hyper.name, hyper.value == 0 ? 0.1 : 0.9 * hyper.value);
    }
    for (const Case& c : all_cases()) {
      Config config = plain;
      bool any = false;
      for (int s = 0; s < info.slots; ++s) {
        scruple_slot_info slot{};
        CHECK_OK(scruple_rule_slot(rule, s, &slot));
        if (slot.role != c.role || c.info.aux_is_scale == 0) continue;
        put(config, SCRUPLE_SLOT + s, c.format, c.rounding);
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
inline Config with_gradient(Config config, const GradientKind& kind) {
  put(config, SCRUPLE_GRADIENT, scruple_format_find(kind.format), kind.rounding);
  config.name += std::string(", gradient ") + kind.format + " " + std::to_string(kind.rounding);
  return config;
}

}  // namespace scruple_tests
