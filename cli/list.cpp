// `scruple list`: everything this library knows, read from its registry.
#include <iostream>
#include <memory>
#include <nlohmann/json.hpp>

#include "choice.h"
#include "commands.h"
#include "memory.h"
#include "text.h"

namespace scruple::cli {
namespace {

using nlohmann::ordered_json;

constexpr const char* kFooter =
    "Columns:\n"
    "  slots      the moments an optimizer keeps; [in brackets] only when a hyperparameter asks for them\n"
    "  bits       per value, scales and extra bits included\n"
    "  roles      w weight, s signed moment, n non-negative moment, x exact moment (amsgrad,\n"
    "             centered), g gradient, a gradient accumulator\n"
    "  rounding   n nearest, t truncate, s stochastic, d dither, w wide\n"
    "  error      largest error with nearest rounding: of |x|, + g * the largest |x| of its group,\n"
    "             + a constant; as a non-negative moment after the slash\n"
    "  B/param    bytes per parameter of the optimizer named, by what becomes of the gradients\n"
    "\n"
    "Examples:\n"
    "  scruple list\n"
    "  scruple list --json";

constexpr std::int64_t kLarge = std::int64_t{1} << 30;  // large enough that no padding shows

struct Role {
  unsigned bit;
  const char* letter;
  const char* name;
};
constexpr Role kRoles[] = {
    {SCRUPLE_ROLE_WEIGHT, "w", "weight"},     {SCRUPLE_ROLE_SIGNED, "s", "signed"},
    {SCRUPLE_ROLE_NONNEG, "n", "nonneg"},     {SCRUPLE_ROLE_EXACT, "x", "exact"},
    {SCRUPLE_ROLE_GRADIENT, "g", "gradient"}, {SCRUPLE_ROLE_ACCUMULATOR, "a", "accumulator"}};

ordered_json optimizers() {
  ordered_json list = ordered_json::array();
  for (int r = 0; r < scruple_rule_count(); ++r) {
    scruple_rule_info rule;
    check(scruple_rule_at(r, &rule));
    ordered_json slots = ordered_json::array(), hypers = ordered_json::array();
    for (int s = 0; s < rule.slots; ++s) {
      scruple_slot_info slot;
      check(scruple_rule_slot(r, s, &slot));
      slots.push_back({{"name", slot.name},
                       {"nonneg", slot.role == SCRUPLE_ROLE_NONNEG},
                       {"optional", slot.optional != 0}});
    }
    for (int h = 0; h < rule.hypers; ++h) {
      scruple_hyper_info hyper;
      check(scruple_rule_hyper(r, h, &hyper));
      hypers.push_back(
          {{"name", hyper.name}, {"default", hyper.value}, {"flag", hyper.flag != 0}, {"doc", hyper.doc}});
    }
    list.push_back({{"name", rule.name}, {"doc", rule.doc}, {"slots", slots}, {"hyperparameters", hypers}});
  }
  return list;
}

ordered_json bound_json(const scruple_bound& bound) {
  return {{"relative", bound.relative}, {"group", bound.group}, {"absolute", bound.absolute}};
}

ordered_json formats() {
  ordered_json list = ordered_json::array();
  for (int f = 0; f < scruple_format_count(); ++f) {
    const scruple_format_info info = info_of(scruple_format_at(f));
    ordered_json roles = ordered_json::array(), roundings = ordered_json::array();
    for (const Role& role : kRoles)
      if ((info.roles & role.bit) != 0) roles.push_back(role.name);
    for (int r = 0; scruple_rounding_name(r) != nullptr; ++r)
      if ((info.roundings >> r & 1u) != 0) roundings.push_back(scruple_rounding_name(r));
    ordered_json entry = {{"name", info.name},
                          {"doc", info.doc},
                          {"bits_per_value", info.bits_per_value},
                          {"code_bits", info.code_bits},
                          {"aux_bits", info.aux_bits},
                          {"group_size", info.group_size},
                          {"roles", roles},
                          {"roundings", roundings}};
    if ((info.roles & ~unsigned{SCRUPLE_ROLE_NONNEG}) != 0) entry["error"] = bound_json(info.bound);
    if ((info.roles & SCRUPLE_ROLE_NONNEG) != 0) entry["error_nonneg"] = bound_json(info.bound_nonneg);
    list.push_back(entry);
  }
  return list;
}

// Bytes per parameter of a recipe: with AdamW, or with SGD where AdamW has a moment that the recipe cannot
// hold.
ordered_json bytes_per_param(const char* recipe) {
  for (const char* optimizer : {"adamw", "sgd"}) {
    Choice choice;
    choice.optimizer = optimizer;
    const Optimizer rule = choice.make_optimizer();
    ordered_json bytes = {{"optimizer", optimizer}};
    try {
      for (const char* policy : kPolicies) {
        const Memory memory = measure(choice, rule, recipe, one_tensor(kLarge), policy);
        bytes[policy] = static_cast<double>(memory.total()) / kLarge;
      }
      return bytes;
    } catch (const Error& error) {
      if (error.status() != SCRUPLE_UNSUPPORTED) throw;
    }
  }
  return nullptr;
}

ordered_json name_or_null(const char* name) { return name == nullptr ? ordered_json() : ordered_json(name); }

ordered_json recipes() {
  ordered_json list = ordered_json::array();
  for (const scruple_recipe_info& info : all_recipes())
    list.push_back({{"name", info.name},
                    {"doc", info.doc},
                    {"weight", name_or_null(info.weight)},
                    {"moment", name_or_null(info.moment)},
                    {"nonneg", name_or_null(info.nonneg)},
                    {"gradient", name_or_null(info.gradient)},
                    {"weight_rounding", scruple_rounding_name(info.weight_rounding)},
                    {"moment_rounding", scruple_rounding_name(info.moment_rounding)},
                    {"nonneg_rounding", scruple_rounding_name(info.nonneg_rounding)},
                    {"gradient_rounding", scruple_rounding_name(info.gradient_rounding)},
                    {"small", info.small},
                    {"bytes_per_param", bytes_per_param(info.name)}});
  return list;
}

ordered_json engines() {
  ordered_json list = ordered_json::array();
  for (int e = 0; e < scruple_engine_count(); ++e) {
    scruple_engine_info info;
    check(scruple_engine_at(e, &info));
    list.push_back({{"name", info.name},
                    {"doc", info.doc},
                    {"available", info.available != 0},
                    {"reason", info.available != 0 ? "" : info.reason}});
  }
  return list;
}

// ---- The same for people ----

std::string str(const ordered_json& value) { return value.is_null() ? "-" : value.get<std::string>(); }

void print_optimizers(const ordered_json& list) {
  std::cout << "Optimizers\n";
  for (const ordered_json& rule : list) {
    std::cout << "\n  " << str(rule["name"]) << ": " << str(rule["doc"]) << "\n    slots:";
    for (const ordered_json& slot : rule["slots"])
      std::cout << (slot["optional"] ? " [" + str(slot["name"]) + "]" : " " + str(slot["name"]));
    std::cout << '\n';
    Table table;
    for (const ordered_json& hyper : rule["hyperparameters"])
      table.rows.push_back({"    " + str(hyper["name"]), shortest(hyper["default"]), str(hyper["doc"])});
    table.left = {1, 2};
    table.print(std::cout);
  }
}

std::string bound_text(const ordered_json& bound) {
  std::string text;
  const auto add = [&](const char* key, const char* times) {
    const double value = bound[key];
    if (value != 0) text += (text.empty() ? "" : " + ") + shortest(value, 3) + times;
  };
  add("relative", "");
  add("group", " g");
  add("absolute", " abs");
  return text.empty() ? "exact" : text;
}

void print_formats(const ordered_json& list) {
  std::cout << "\nFormats\n\n";
  Table table;
  table.rows = {{"  name", "bits", "roles", "rounding", "error", "what it is"}};
  table.left = {2, 3, 4, 5};
  for (const ordered_json& format : list) {
    std::string roles, roundings, error;
    for (const Role& role : kRoles)
      for (const ordered_json& name : format["roles"])
        if (name == role.name) roles += role.letter;
    for (const ordered_json& name : format["roundings"]) roundings += str(name)[0];
    if (format.contains("error")) error = bound_text(format["error"]);
    if (format.contains("error_nonneg"))
      error += (error.empty() ? "/ " : " / ") + bound_text(format["error_nonneg"]);
    table.rows.push_back({"  " + str(format["name"]), shortest(format["bits_per_value"]), roles, roundings,
                          error, str(format["doc"])});
  }
  table.print(std::cout);
}

void print_recipes(const ordered_json& list) {
  std::cout << "\nRecipes\n\n";
  Table table;
  table.rows = {{"  name", "weight", "moment", "nonneg", "gradient", "for", "B/param stored", "released",
                 "compressed", "what it is"}};
  table.left = {1, 2, 3, 4, 5, 9};
  for (const ordered_json& recipe : list) {
    std::vector<std::string> row = {"  " + str(recipe["name"]), str(recipe["weight"]), str(recipe["moment"]),
                                    str(recipe["nonneg"]), str(recipe["gradient"])};
    const ordered_json& bytes = recipe["bytes_per_param"];
    row.push_back(bytes.is_null() ? "-" : str(bytes["optimizer"]));
    for (const char* policy : kPolicies) row.push_back(bytes.is_null() ? "-" : fixed(bytes[policy], 4));
    row.push_back(str(recipe["doc"]));
    table.rows.push_back(row);
  }
  table.print(std::cout);
}

void print_engines(const ordered_json& list) {
  std::cout
      << "\nEngines ('cpu' takes the last of the cpu- units that is available; 'cuda:N' is device N)\n\n";
  Table table;
  table.left = {1, 2};
  for (const ordered_json& engine : list)
    table.rows.push_back({"  " + str(engine["name"]), engine["available"] ? "available" : "not available",
                          engine["available"] ? str(engine["doc"]) : str(engine["reason"])});
  table.print(std::cout);
}

void run(bool as_json) {
  const ordered_json all = {
      {"optimizers", optimizers()}, {"formats", formats()}, {"recipes", recipes()}, {"engines", engines()}};
  if (as_json) {
    std::cout << all.dump(2) << '\n';
    return;
  }
  print_optimizers(all["optimizers"]);
  print_formats(all["formats"]);
  print_recipes(all["recipes"]);
  print_engines(all["engines"]);
}

}  // namespace

void add_list(CLI::App& program) {
  const auto as_json = std::make_shared<bool>(false);
  add_command(program, "list", "Show optimizers, formats, recipes and engines", "Choose a recipe", kFooter,
              {{kNone, "--json", "", as_json.get(), "",
                "print one JSON object: optimizers, formats, recipes, engines"}},
              [as_json](const CLI::App&) { run(*as_json); });
}

}  // namespace scruple::cli
