// What `scruple compare` is asked for and has found, and how it looks: as text, as JSON, as a page.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "options.h"
#include "train/run/report.h"
#include "train/run/run.h"
#include "training.h"

namespace scruple::cli {

struct CompareOptions {
  ModelOptions model;
  ChosenModel chosen;
  GradientOptions gradients;
  CuttingOptions cutting;
  std::vector<std::string> data;
  std::string recipes, out;  // recipes "": all that the device serves
  double lr = 1e-2, sgd_lr = 0.3, weight_decay = 0.1;
  int seeds = 0;  // 0: one, and fp32 from a second
  int micro_batches = 1;
  bool as_json = false, no_hazards = false;

  OptionTable options();
};

struct Run {
  std::string name, recipe, optimizer, activations;
  std::uint64_t seed = 0;
  std::vector<std::pair<std::string, std::int64_t>> measured;
  double planned_each = 0, measured_each = 0;  // bytes per parameter
  std::int64_t peak = 0, steps = 0;            // steps: those that it was to take
  train::Record record;
  std::optional<double> gap;  // none where this run or its fp32 twin was stopped

  bool complete() const { return !record.stopped; }
};

// What goes wrong without the recipes: runs, and what they show.
struct Hazard {
  std::string title, key, text;  // key: in JSON
  std::vector<Run> runs;
};

// Everything that compare found out, to print and to draw.
struct Comparison {
  std::optional<double> floor;  // the least validation loss that a model can hope for, where it is known
  std::int64_t params = 0;
  bool has_weights = false;  // the model begins with a folder's, whatever the seed
  std::string gpu;           // that the runs are on; "": the CPU
  std::string step;          // what each step sees
  std::vector<Run> runs;
  std::vector<Run> again;       // fp32 from a second seed, with its gap to the first
  std::vector<Hazard> hazards;  // each with runs
  bool stopped = false;         // in the last run of the last list that has any

  const Run& last() const {
    return !hazards.empty() ? hazards.back().runs.back() : !again.empty() ? again.back() : runs.back();
  }
};

void print(const Comparison& found, const CompareOptions& options);
void print_json(const Comparison& found, const CompareOptions& options);
train::Report report_of(const Comparison& found, const CompareOptions& options);

}  // namespace scruple::cli
