#include "rate.h"

#include <algorithm>
#include <cmath>

#include "names.h"
#include "text.h"
#include "training.h"

namespace scruple::cli {
namespace {

constexpr double kCooldown = 0.2;

// PATTERN=X
struct Given {
  std::string pattern;
  double value;
};

Given parse(const std::string& text, const std::string& option, const char* example) {
  const std::size_t at = text.rfind('=');
  if (at == std::string::npos || at == 0)
    throw UsageError(option + " is '" + text + "'; it must be a pattern of names and a number, such as '" +
                     example + "'");
  const std::string number = text.substr(at + 1), what = option + ": the number of '" + text + "'";
  const double value = parse_number(number, what);
  if (!(value >= 0) || !std::isfinite(value))
    throw UsageError(what + " is '" + number + "'; it must be finite, and 0 or more");
  return {text.substr(0, at), value};
}

void check_fits(const Given& given, const std::string& option,
                const std::vector<train::Parameter>& parameters) {
  const auto is_meant = [&](const train::Parameter& parameter) {
    return train::fits(parameter, given.pattern);
  };
  if (std::any_of(parameters.begin(), parameters.end(), is_meant)) return;
  constexpr std::size_t kTold = 12;
  std::vector<std::string> names;
  for (const train::Parameter& parameter : parameters) names.push_back(parameter.name);
  const auto has_it = [&](const std::string& name) { return name.find(given.pattern) != name.npos; };
  const std::string meant = std::any_of(names.begin(), names.end(), has_it)
                                ? "; did you mean '*" + given.pattern + "*'?"
                                : did_you_mean(given.pattern, names);
  const auto more = static_cast<std::int64_t>(names.size()) - static_cast<std::int64_t>(kTold);
  names.resize(std::min(names.size(), kTold));
  throw UsageError(option + ": no parameter of the model has a name like '" + given.pattern + "'" +
                   (meant.empty() ? "; * stands for any letters. " : meant + " ") +
                   "Names: " + joined(names) + (more > 0 ? " and " + grouped(more) + " more" : ""));
}

}  // namespace

OptionTable RateOptions::options() {
  return {{kOptimizer, "--lr", "lr", &lr, "RATE",
           "peak learning rate (default: " + shortest(kLr) + "; of a folder's weights " +
               shortest(kTuningLr) + ")",
           above_zero()},
          {kOptimizer, "--schedule", "schedule", &annealing, "SHAPE",
           "after the warmup: cosine or linear (both fall to the last step), constant, wsd (constant, then a "
           "linear fall: --cooldown) or inverse-sqrt (peak x sqrt(warmup / step))",
           one_of(train::kAnnealings)},
          {kOptimizer, "--warmup", "warmup", &warmup, "N",
           "steps of linear rise (default: a twentieth of --steps)", whole_from(0)},
          {kOptimizer, "--cooldown", "cooldown", &cooldown, "SHARE",
           "wsd: share of --steps in which the rate falls, at the end (default: " + shortest(kCooldown) + ")",
           a_share()},
          {kOptimizer, "--min-lr", "min-lr", &min_lr, "RATE",
           "what the rate falls to, and never below (default: 0)", above_zero()},
          {kOptimizer, "--weight-decay", "weight-decay", &weight_decay, "X",
           "of matrices; norms and biases never decay (default: the optimizer's)", not_negative()},
          {kOptimizer, "--lr-for", "lr-for", &lr_for, "PATTERN=X",
           "parameters with such names take X times the rate, as in 'lm_head.*=0.5'; 0: they stay; may be "
           "repeated, the last that fits counts"},
          {kOptimizer, "--weight-decay-for", "weight-decay-for", &weight_decay_for, "PATTERN=X",
           "parameters with such names decay by X, as in '*.wpe.weight=0'; may be repeated"}};
}

void RateOptions::complete() {
  const bool is_wsd = annealing == train::kAnnealings[static_cast<int>(train::Annealing::wsd)];
  const bool is_constant = annealing == train::kAnnealings[static_cast<int>(train::Annealing::constant)];
  if (cooldown > 0 && !is_wsd)
    throw UsageError("--cooldown is for --schedule wsd, and --schedule is " + annealing +
                     "; leave one of them out");
  if (min_lr > 0 && is_constant)
    throw UsageError("--min-lr has no effect: --schedule constant does not fall; leave one of them out");
  if (is_wsd && cooldown == 0) cooldown = kCooldown;
  if (lr > 0 && min_lr > lr)
    throw UsageError("--min-lr is " + shortest(min_lr) + ", above the peak --lr " + shortest(lr) +
                     "; choose a smaller one");
}

train::Schedule RateOptions::schedule(std::int64_t steps) const {
  const std::int64_t rise = warmup >= 0 ? warmup : steps / 20;
  if (rise > steps)
    throw UsageError("--warmup is " + std::to_string(rise) + ", and the run has " + plural(steps, "step") +
                     "; choose a --warmup of at most that");
  const auto fall = static_cast<std::int64_t>(std::llround(cooldown * static_cast<double>(steps)));
  if (rise + fall > steps)
    throw UsageError("--warmup is " + std::to_string(rise) + " and --cooldown " + shortest(cooldown) +
                     " of " + std::to_string(steps) + " steps, " + std::to_string(fall) +
                     "; together they must be at most --steps");
  return {
      value_named<train::Annealing>(train::kAnnealings, annealing).value(), lr, rise, steps, min_lr, fall};
}

std::vector<train::Override> RateOptions::overrides(const std::vector<train::Parameter>& parameters) const {
  std::vector<train::Override> all;
  for (const std::string& text : lr_for) {
    const Given given = parse(text, "--lr-for", "lm_head.*=0.5");
    check_fits(given, "--lr-for", parameters);
    all.push_back({given.pattern, given.value, {}});
  }
  for (const std::string& text : weight_decay_for) {
    const Given given = parse(text, "--weight-decay-for", "*.wpe.weight=0");
    check_fits(given, "--weight-decay-for", parameters);
    all.push_back({given.pattern, {}, given.value});
  }
  return all;
}

std::string schedule_words(const train::Schedule& schedule) {
  std::string text = train::kAnnealings[static_cast<int>(schedule.annealing)];
  if (schedule.least > 0) text += " to " + shortest(schedule.least);
  if (schedule.annealing == train::Annealing::wsd)
    text += " over the last " + plural(schedule.cooldown, "step");
  return text;
}

std::string longer_words(const train::Schedule& schedule) {
  const std::string name = train::kAnnealings[static_cast<int>(schedule.annealing)];
  switch (schedule.annealing) {
    case train::Annealing::wsd:
      return "the plateau of wsd is longer, and the rate falls over the last " +
             plural(schedule.cooldown, "step");
    case train::Annealing::inverse_sqrt: return "the " + name + " schedule goes on";
    default: return "the " + name + " schedule spans all of them";
  }
}

}  // namespace scruple::cli
