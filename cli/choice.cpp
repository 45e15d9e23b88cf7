#include "choice.h"

#include <algorithm>
#include <iterator>

#include "text.h"

namespace scruple::cli {
namespace {

constexpr const char* kDefaultRecipe = "scruple";

// The library's own sentence does not say which name was perhaps meant, nor that a format had nothing to hold.
void use_format(scruple_tensor& tensor, const char* which, const std::string& name, unsigned roles) {
  if (name.empty()) return;
  std::vector<std::string> known;
  for (int f = 0; f < scruple_format_count(); ++f) known.emplace_back(info_of(scruple_format_at(f)).name);
  check_name("format", name, known);
  const std::vector<int> arrays = used_arrays(tensor);
  const auto serves = [&](int array) {
    int role = 0;
    check(scruple_tensor_array(&tensor, array, nullptr, &role, nullptr));
    return (static_cast<unsigned>(role) & roles) != 0;
  };
  if (std::none_of(arrays.begin(), arrays.end(), serves))
    throw UsageError("format " + name +
                     " has no moment to hold: the optimizer keeps none of that kind; leave it out");
  check(scruple_tensor_set_format(&tensor, which, name.c_str()));
}

// int8 to int12, of which lpmm makes no weights where a tensor has few elements.
bool are_scaled_integers(const std::string& weights) {
  const scruple_format* const format = scruple_format_find(weights.c_str());
  return format != nullptr && info_of(format).aux_is_scale != 0 &&
         (info_of(format).roles & SCRUPLE_ROLE_WEIGHT) != 0;
}

// All but dither, which is for gradients.
std::vector<std::string> rounding_names() {
  std::vector<std::string> names;
  for (int r = 0; scruple_rounding_name(r) != nullptr; ++r)
    if (r != SCRUPLE_DITHER) names.emplace_back(scruple_rounding_name(r));
  return names;
}

// "MODE", or "WHICH=MODE" for the weights, the moments, or the slot of that name.
void use_rounding(scruple_tensor& tensor, const std::string& text) {
  const std::size_t equals = text.find('=');
  const std::string which = equals == std::string::npos ? "" : text.substr(0, equals);
  const std::string mode = equals == std::string::npos ? text : text.substr(equals + 1);
  const std::vector<std::string> modes = rounding_names();
  if (std::find(modes.begin(), modes.end(), mode) == modes.end())
    throw UsageError("--rounding is '" + mode + "'; it must be " + either(modes) +
                     ", alone or for some arrays: weights=wide, moments=nearest, exp_avg_sq=stochastic" +
                     did_you_mean(mode, modes));
  const scruple_status status = scruple_tensor_set_rounding(&tensor, which.c_str(), mode.c_str());
  if (status != SCRUPLE_INVALID) return check(status);
  const std::string problem = scruple_last_error();
  std::vector<std::string> known = {"weights", "moments"};
  for (const int a : used_arrays(tensor))
    if (a != SCRUPLE_WEIGHT && a != SCRUPLE_GRADIENT) known.emplace_back(array_name(tensor, a));
  throw UsageError("--rounding " + text + ": " + problem + did_you_mean(which, known));
}

// torch's default momentum of 0 would show SGD without the state it is known for.
void give_momentum(Optimizer& optimizer) {
  const int rule = scruple_optimizer_rule(optimizer.raw());
  scruple_rule_info info;
  check(scruple_rule_at(rule, &info));
  for (int s = 0; s < info.slots; ++s) {
    scruple_slot_info slot;
    check(scruple_rule_slot(rule, s, &slot));
    if (slot.optional == 0) return;
  }
  for (const scruple_hyper_info& hyper : hypers_of(optimizer))
    if (std::string(hyper.name) == "momentum" && hyper.value == 0) optimizer.set("momentum", 0.9);
}

}  // namespace

OptionTable Choice::options() {
  return {{kOptimizer, "--optimizer", "optimizer", &optimizer, "NAME", "as 'scruple list' names it"},
          {kOptimizer, "--set", "set", &hypers, "NAME=VALUE",
           "a hyperparameter; may be repeated (SGD starts at momentum=0.9)"},
          {kMemory, "--recipe", "recipe", &recipe, "NAME",
           "as 'scruple list' names it (default: all that serve the optimizer)"}};
}

OptionTable Choice::format_options() {
  return {{kMemory, "--weights", "weights", &weights, "FORMAT",
           "format of the weights, in place of the recipe's"},
          {kMemory, "--moments", "moments", &moments, "FORMAT", "format of every moment that it can hold"},
          {kMemory, "--second-moments", "second-moments", &second_moments, "FORMAT",
           "format of the non-negative moments"},
          {kMemory, "--rounding", "rounding", &roundings, "[WHICH=]MODE",
           either(rounding_names()) + ": of all, or of WHICH (weights, moments, a slot); may be repeated"}};
}

Optimizer Choice::make_optimizer() const {
  std::vector<std::string> known;
  scruple_rule_info info;
  for (int r = 0; r < scruple_rule_count(); ++r) {
    check(scruple_rule_at(r, &info));
    known.emplace_back(info.name);
  }
  check_name("optimizer", optimizer, known);
  Optimizer made(optimizer.c_str());
  give_momentum(made);
  std::vector<std::string> known_hypers;
  for (const scruple_hyper_info& hyper : hypers_of(made)) known_hypers.emplace_back(hyper.name);
  for (const std::string& text : hypers) {
    const std::size_t equals = text.find('=');
    if (equals == std::string::npos)
      throw UsageError("--set is '" + text + "'; it must be NAME=VALUE, such as eps=1e-6");
    const std::string name = text.substr(0, equals);
    double before = 0;  // the library also knows names that were
    if (scruple_optimizer_get(made.raw(), name.c_str(), &before) != SCRUPLE_OK)
      check_name("hyperparameter of " + optimizer, name, known_hypers);
    made.set(name.c_str(), parse_number(text.substr(equals + 1), name));
  }
  return made;
}

scruple_tensor Choice::describe(const Optimizer& rule, const std::string& with_recipe,
                                std::int64_t size) const {
  check_recipe(with_recipe);
  scruple_tensor tensor = {};
  tensor.optimizer = rule.raw();
  tensor.size = size;
  tensor.step = 1;
  check(scruple_tensor_use(&tensor, with_recipe.c_str()));
  scruple_array& accumulator = tensor.arrays[SCRUPLE_GRADIENT];
  use_format(tensor, "gradient", gradient, SCRUPLE_ROLE_GRADIENT);
  if (unbiased)
    for (const int rounding : {SCRUPLE_STOCHASTIC, SCRUPLE_DITHER})  // the last that its format can
      if ((info_of(accumulator.format).roundings >> rounding & 1u) != 0) accumulator.rounding = rounding;
  if (stays_fp32(with_recipe, size)) return tensor;
  const bool few = are_scaled_integers(weights) && stays_fp32("lpmm", size);
  use_format(tensor, "weights", few ? "fp32" : weights, SCRUPLE_ROLE_WEIGHT);
  use_format(tensor, "moments", moments, SCRUPLE_ROLE_SIGNED | SCRUPLE_ROLE_NONNEG);
  use_format(tensor, "second moments", second_moments, SCRUPLE_ROLE_NONNEG);
  for (const std::string& rounding : roundings) use_rounding(tensor, rounding);
  check(scruple_tensor_check(&tensor));
  return tensor;
}

Choice Choice::for_policy(const std::string& policy, const std::string& with_recipe,
                          std::int64_t size) const {
  Choice chosen = *this;
  chosen.unbiased = policy == "compressed";
  if (policy != "compressed" || !gradient.empty() || stays_fp32(with_recipe, size)) return chosen;
  for (const scruple_recipe_info& info : all_recipes())
    if (info.name == with_recipe && info_of(format_named(info.gradient)).code_bits > 8)
      chosen.gradient = "root8";
  return chosen;
}

bool stays_fp32(const std::string& recipe, std::int64_t size) {
  const std::vector<scruple_recipe_info> known = all_recipes();
  return std::any_of(known.begin(), known.end(), [&](const scruple_recipe_info& info) {
    return info.name == recipe && size <= info.small;
  });
}

std::vector<std::string> Choice::recipes() const {
  if (!recipe.empty()) return {recipe};
  if (!weights.empty() || !moments.empty() || !second_moments.empty()) return {kDefaultRecipe};
  std::vector<std::string> names;
  for (const scruple_recipe_info& known : all_recipes()) names.emplace_back(known.name);
  return names;
}

std::vector<scruple_recipe_info> all_recipes() {
  std::vector<scruple_recipe_info> recipes(static_cast<std::size_t>(scruple_recipe_count()));
  for (std::size_t i = 0; i < recipes.size(); ++i) check(scruple_recipe_at(static_cast<int>(i), &recipes[i]));
  return recipes;
}

std::vector<scruple_hyper_info> hypers_of(const Optimizer& optimizer) {
  const int rule = scruple_optimizer_rule(optimizer.raw());
  scruple_rule_info info;
  check(scruple_rule_at(rule, &info));
  std::vector<scruple_hyper_info> hypers(static_cast<std::size_t>(info.hypers));
  for (int h = 0; h < info.hypers; ++h)
    check(scruple_rule_hyper(rule, h, &hypers[static_cast<std::size_t>(h)]));
  return hypers;
}

void check_name(const std::string& kind, const std::string& name, const std::vector<std::string>& known) {
  if (std::find(known.begin(), known.end(), name) != known.end()) return;
  const std::string meant = did_you_mean(name, known);
  throw UsageError("unknown " + kind + " '" + name + "'" + meant +
                   (meant.empty() ? "; known: " : " Known: ") + joined(known));
}

void check_recipe(const std::string& name) {
  std::vector<std::string> known;
  for (const scruple_recipe_info& info : all_recipes()) known.emplace_back(info.name);
  check_name("recipe", name, known);
}

// What follows cuda: is the library's to check.
void check_engine(const std::string& name) {
  if (name == "cpu") return;  // the list of engines wakes the GPU's driver
  std::vector<std::string> known = {"cpu"};
  for (int e = 0; e < scruple_engine_count(); ++e) {
    scruple_engine_info info;
    check(scruple_engine_at(e, &info));
    known.emplace_back(info.name);
  }
  check_name("engine", name.substr(0, name.find(':')), known);
}

const char* array_name(const scruple_tensor& tensor, int array) {
  const char* name = nullptr;
  check(scruple_tensor_array(&tensor, array, &name, nullptr, nullptr));
  return name;
}

}  // namespace scruple::cli
