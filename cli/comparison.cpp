#include "comparison.h"

#include <algorithm>
#include <cmath>
#include <iostream>
#include <nlohmann/json.hpp>

#include "progress.h"
#include "text.h"

namespace scruple::cli {
namespace {

using nlohmann::ordered_json;

double mean(const std::vector<double>& values) {
  double sum = 0;
  for (const double value : values) sum += value;
  return sum / static_cast<double>(values.size());
}

double deviation(const std::vector<double>& values) {
  const double middle = mean(values);
  double sum = 0;
  for (const double value : values) sum += (value - middle) * (value - middle);
  return values.size() < 2 ? 0 : std::sqrt(sum / static_cast<double>(values.size() - 1));
}

// The runs of one recipe over all seeds. One that was stopped stands alone: it is no part of a mean.
std::vector<std::vector<const Run*>> by_recipe(const std::vector<Run>& runs) {
  std::vector<std::vector<const Run*>> groups;
  for (const Run& run : runs) {
    const auto same = std::find_if(groups.begin(), groups.end(), [&](const auto& g) {
      return run.complete() && g[0]->complete() && g[0]->name == run.name;
    });
    if (same == groups.end())
      groups.push_back({&run});
    else
      same->push_back(&run);
  }
  return groups;
}

template <class Value>
std::vector<double> each(const std::vector<const Run*>& runs, const Value& value) {
  std::vector<double> all;
  all.reserve(runs.size());
  for (const Run* run : runs) all.push_back(value(*run));
  return all;
}

std::string with_sign(double value) {
  const std::string text = fixed(value, 4);
  return text.starts_with("-") || text == "nan" ? text : "+" + text;
}

// The loss at the end of a run, or the last that a stopped one has.
std::string loss_words(const Run& run) {
  if (run.record.validations.empty()) return "-";
  const std::string loss = fixed(run.record.final_loss(), 4);
  return run.complete() ? loss : loss + " (after step " + grouped(run.record.validations.back().first) + ")";
}

// Of what seeds a row is, where that is not all that were asked for.
std::string seed_words(const std::vector<const Run*>& runs, const CompareOptions& options) {
  if (options.seeds < 2 || runs.size() == static_cast<std::size_t>(options.seeds)) return "";
  if (!runs[0]->complete()) return ", seed " + std::to_string(runs[0]->seed);
  return ", " + std::to_string(runs.size()) + " of " + plural(options.seeds, "seed");
}

std::vector<std::vector<std::string>> table_of_runs(const Comparison& found, const CompareOptions& options) {
  const bool spread = options.seeds > 1;
  std::vector<std::string> heads = {"recipe",   "optimizer", "B/param planned", "measured",
                                    "peak MiB", "ms/step",   "unmoved",         "val loss"};
  if (spread) heads.emplace_back("sd of loss");
  heads.emplace_back("gap to fp32");
  if (spread) heads.emplace_back("sd of gap");
  std::vector<std::vector<std::string>> rows = {heads};
  const auto add = [&](const std::string& name, const std::vector<const Run*>& runs, bool reference) {
    const Run& run = *runs.front();
    const auto loss = each(runs, [](const Run& r) { return r.record.final_loss(); });
    const auto time = each(runs, [](const Run& r) { return r.record.ms_per_step(); });
    std::vector<double> gaps;
    for (const Run* one : runs)
      if (one->gap && !reference) gaps.push_back(*one->gap);
    const auto sd = [](const std::vector<double>& of) {
      return of.size() < 2 ? "-" : fixed(deviation(of), 4);
    };
    std::vector<std::string> row = {name, run.optimizer, fixed(run.planned_each, 3)};
    if (run.record.steps.empty())
      row.insert(row.end(), {"-", "-", "-"});  // a step would have taken more
    else
      row.insert(row.end(), {fixed(run.measured_each, 3), fixed(static_cast<double>(run.peak) * 0x1p-20, 2),
                             fixed(mean(time), 1)});
    row.push_back(share_words(mean(each(runs, [](const Run& r) { return r.record.mean_unmoved(); }))));
    row.push_back(runs.size() == 1 ? loss_words(run) : fixed(mean(loss), 4));
    if (spread) row.push_back(sd(loss));
    row.push_back(gaps.empty() ? "-" : with_sign(mean(gaps)));
    if (spread) row.push_back(sd(gaps));
    rows.push_back(row);
  };
  for (const auto& runs : by_recipe(found.runs)) {
    const bool reference = runs[0]->recipe == "fp32";
    add(runs[0]->recipe + seed_words(runs, options), runs, reference);
    if (!reference) continue;
    for (const Run& run : found.again)
      if (run.optimizer == runs[0]->optimizer) add("fp32, seed 2", {&run}, false);
  }
  return rows;
}

// What of the gaps is noise.
std::string about_noise(const Comparison& found, const CompareOptions& options) {
  if (options.seeds == 1)
    return "One seed: nothing here tells a gap from noise. Without --seeds, or with more, something does.";
  if (options.seeds > 1) {
    std::size_t fewest = found.runs.size(), most = 0;
    for (const auto& runs : by_recipe(found.runs))
      fewest = std::min(fewest, runs.size()), most = std::max(most, runs.size());
    if (most < 2)
      return "Stopped before any recipe had run from two seeds: nothing here tells a gap from noise.";
    return "Means over " + plural(options.seeds, "seed") +
           (fewest < static_cast<std::size_t>(options.seeds) ? ", or as many as were finished" : "") +
           "; sd is the standard deviation over them. A gap that is not well above its sd is noise.";
  }
  std::string away;
  for (const Run& run : found.again)
    if (run.gap) away += (away.empty() ? "" : ", ") + with_sign(*run.gap) + " with " + run.optimizer;
  if (away.empty())
    return "Stopped before fp32 had run from a second seed: nothing here tells a gap from noise.";
  return std::string("Seed 2 is fp32 ") +
         (found.has_weights ? "on other batches" : "from other weights and batches") +
         ", and nothing else: " + away + ". Gaps of that size are noise; --seeds 3 measures it better.";
}

std::vector<std::vector<std::string>> table_of_hazard(const std::vector<Run>& runs) {
  std::vector<std::vector<std::string>> rows = {{"run", "unmoved", "val loss before", "after", "learned"}};
  for (const Run& run : runs) {
    const double before = run.record.first_loss(), after = run.record.final_loss();
    rows.push_back({run.name, share_words(run.record.mean_unmoved()),
                    run.record.validations.empty() ? "-" : fixed(before, 4), loss_words(run),
                    run.complete() ? fixed(before - after, 4) : "-"});
  }
  return rows;
}

std::string heading(const Comparison& found, const CompareOptions& options) {
  const train::Description& shape = options.chosen.config.shape;
  const bool is_gpt = options.model.is_gpt();
  return (is_gpt ? "A byte-level GPT of "
                 : options.model.model + ", " + kind_words(options.chosen.config) + " of ") +
         grouped(found.params) + " parameters (" + plural(shape.layers, "layer") + ", width " +
         grouped(shape.width) + ", context " + grouped(shape.context) + ")" +
         (found.gpu.empty() ? "" : " on " + found.gpu) + ", " + plural(options.model.steps, "step") + " of " +
         found.step +
         (found.floor ? "; the grammar that makes the text, which no model beats but by chance, has a "
                        "validation loss of " +
                            fixed(*found.floor, 4) + " nats per byte."
                      : " of " + name_of(options.data) + ".");
}

// By what it was stopped, and where: "" where it was not.
std::string stop_words(const Comparison& found, const CompareOptions& options) {
  if (!found.stopped) return "";
  const Run& run = found.last();
  return std::string("Stopped by ") + Interrupts::name() + " in the run '" + run.name +
         (options.seeds > 1 ? ", seed " + std::to_string(run.seed) : "") + "', after step " +
         grouped(run.record.taken()) + " of " + grouped(run.steps) + ": that run is not complete.";
}

constexpr const char* kOneSeed = "One seed: nothing here tells a small gap from noise.";
ordered_json json_of(const Run& run) {
  return {{"recipe", run.recipe},
          {"optimizer", run.optimizer},
          {"seed", run.seed},
          {"activations", run.activations},
          {"bytes_per_param_planned", run.planned_each},
          {"bytes_per_param_measured", run.measured_each},
          {"peak_bytes", run.peak},
          {"ms_per_step", run.record.ms_per_step()},
          {"steps", run.record.steps.size()},
          {"unmoved", run.record.mean_unmoved()},
          {"val_loss", run.complete() ? ordered_json(run.record.final_loss()) : ordered_json()},
          {"gap", run.gap ? ordered_json(*run.gap) : ordered_json()}};
}

train::Chart chart_of(const std::string& title, const std::string& note, const std::string& unit,
                      const std::vector<Run>& runs, std::optional<double> floor) {
  train::Chart chart = {title, note, "step", "validation loss, " + unit, {}, {}};
  for (const Run& run : runs) {
    train::Curve curve = {run.name, {}, {}, &run == &runs.front()};
    for (const auto& [step, loss] : run.record.validations)
      curve.x.push_back(static_cast<double>(step)), curve.y.push_back(loss);
    chart.curves.push_back(curve);
  }
  if (floor) chart.levels.emplace_back("the grammar's own loss", *floor);
  return chart;
}

// The runs of the first seed, and fp32's of the second.
train::Chart chart_of(const std::string& optimizer, const Comparison& found, const CompareOptions& options) {
  std::vector<Run> runs;
  for (const std::vector<Run>* list : {&found.runs, &found.again})
    for (const Run& run : *list)
      if (run.optimizer == optimizer && (run.seed == 1 || list == &found.again)) runs.push_back(run);
  const bool again =
      std::any_of(runs.begin(), runs.end(), [](const Run& run) { return run.seed == 2 && run.complete(); });
  const std::string note = options.seeds > 1 ? "Seed 1 of " + grouped(options.seeds) +
                                                   ": the gaps in the legend are of this seed alone."
                           : again ? "What is no further from fp32 than its second seed is noise."
                                   : kOneSeed;
  return chart_of("Loss, " + optimizer, note, nats_per(options.chosen.config.shape), runs, found.floor);
}

train::Bars bars_of(const Comparison& found) {
  train::Bars bars = {"Memory by kind, as counted in the run", "", "bytes per parameter", {}};
  for (const Run& run : found.runs) {
    if (run.seed > 1 || run.record.steps.empty()) continue;
    train::Bars::Row row = {run.name, {}};
    for (const auto& [kind, bytes] : run.measured)
      row.parts.emplace_back(kind, static_cast<double>(bytes) / static_cast<double>(found.params));
    bars.rows.push_back(row);
  }
  return bars;
}

}  // namespace

void print(const Comparison& found, const CompareOptions& options) {
  std::cout << heading(found, options) << "\n\n";
  Table{table_of_runs(found, options), {1}}.print(std::cout);
  std::cout << '\n' << about_noise(found, options) << '\n';
  for (const Hazard& hazard : found.hazards) {
    std::cout << '\n' << hazard.text << "\n\n";
    Table{table_of_hazard(hazard.runs), {}}.print(std::cout);
  }
  if (found.stopped) std::cout << '\n' << stop_words(found, options) << '\n';
}

void print_json(const Comparison& found, const CompareOptions& options) {
  ordered_json rows = ordered_json::array(), again = rows, hazards = ordered_json::object();
  for (const Run& run : found.runs) rows.push_back(json_of(run));
  for (const Run& run : found.again) again.push_back(json_of(run));
  for (const Hazard& hazard : found.hazards)
    for (const Run& run : hazard.runs)
      hazards[hazard.key].push_back(
          {{"run", run.name},
           {"unmoved", run.record.mean_unmoved()},
           {"val_loss_before", run.record.first_loss()},
           {"val_loss", run.complete() ? ordered_json(run.record.final_loss()) : ordered_json()}});
  const ordered_json all = {{"floor", found.floor ? ordered_json(*found.floor) : ordered_json()},
                            {"params", found.params},
                            {"steps", options.model.steps},
                            {"rows", rows},
                            {"second_seed", again},
                            {"hazards", hazards},
                            {"stopped", found.stopped}};
  std::cout << all.dump(2) << '\n';
}

train::Report report_of(const Comparison& found, const CompareOptions& options) {
  const std::string stop = stop_words(found, options);
  train::Report report = {
      "Scruple: recipes compared", heading(found, options) + (stop.empty() ? "" : " " + stop), {}};
  train::Section recipes = {"Recipes",
                            "",
                            {{"", about_noise(found, options), table_of_runs(found, options)}},
                            {bars_of(found)},
                            {}};
  for (const char* optimizer : {"adamw", "sgd"})
    if (train::Chart chart = chart_of(optimizer, found, options); !chart.curves.empty())
      recipes.charts.push_back(std::move(chart));
  report.sections.push_back(recipes);
  for (const Hazard& hazard : found.hazards)
    report.sections.push_back(
        {hazard.title,
         hazard.text,
         {{"", "", table_of_hazard(hazard.runs)}},
         {},
         {chart_of("Loss", kOneSeed, nats_per(options.chosen.config.shape), hazard.runs, {})}});
  return report;
}

}  // namespace scruple::cli
