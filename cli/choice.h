// What the user may choose: optimizer, recipe, formats one by one, hyperparameters.
#pragma once

#include <string>
#include <vector>

#include "commands.h"
#include "options.h"
#include "scruple/scruple.hpp"

namespace scruple::cli {

struct Choice {
  std::string optimizer = "adamw";
  std::string recipe;  // "": all that serve the optimizer, or the default one where formats are chosen
  std::string weights, moments, second_moments, gradient;
  std::vector<std::string> roundings;  // mode, or which=mode
  std::vector<std::string> hypers;     // name=value
  bool unbiased = false;               // gradients are dithered, or rounded stochastically, where they can be

  OptionTable options();         // what most choose
  OptionTable format_options();  // in place of the recipe's
  Optimizer make_optimizer() const;
  // One tensor's formats by a recipe and the choices that override it; throws with the library's reason.
  scruple_tensor describe(const Optimizer& rule, const std::string& with_recipe, std::int64_t size) const;
  std::vector<std::string> recipes() const;
  // The same choice with what a gradient policy asks for: compressed gradients are root8 unless the choice names
  // a format, the recipe has one of 8 bits, or it leaves the tensor in fp32.
  Choice for_policy(const std::string& policy, const std::string& with_recipe, std::int64_t size) const;
};

struct Refusal {
  std::string recipe, reason;
};

// Calls body with each chosen recipe and returns those that do not fit, with the reason. One must fit.
template <class Body>
std::vector<Refusal> for_each_recipe(const Choice& choice, const Body& body) {
  std::vector<Refusal> refusals;
  const std::vector<std::string> names = choice.recipes();
  for (const std::string& name : names) {
    try {
      body(name);
    } catch (const Error& error) {
      if (refusals.size() + 1 == names.size() || error.status() != SCRUPLE_UNSUPPORTED) throw;
      refusals.push_back({name, error.what()});
    }
  }
  return refusals;
}

// Whether the recipe leaves a tensor of this size in fp32 because it is small; choices of formats do not
// reach it then.
bool stays_fp32(const std::string& recipe, std::int64_t size);
std::vector<scruple_recipe_info> all_recipes();
std::vector<scruple_hyper_info> hypers_of(const Optimizer& optimizer);
// Throws where `known` lacks the name, and says which was perhaps meant.
void check_name(const std::string& kind, const std::string& name, const std::vector<std::string>& known);
void check_recipe(const std::string& name);
void check_engine(const std::string& name);
const char* array_name(const scruple_tensor& tensor, int array);

}  // namespace scruple::cli
