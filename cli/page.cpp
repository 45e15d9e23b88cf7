#include "page.h"

#include <algorithm>
#include <cmath>
#include <functional>

#include "progress.h"
#include "rate.h"
#include "room.h"
#include "text.h"
#include "training.h"

namespace scruple::cli {
namespace {

using train::Outcome;
using train::Record;

// All but the learning rate, which the schedule decides, and flags that are off.
std::string hyper_words(const Optimizer& optimizer) {
  std::vector<std::string> words;
  for (const scruple_hyper_info& hyper : hypers_of(optimizer)) {
    const double value = optimizer.get(hyper.name);
    if (std::string(hyper.name) == "lr" || (hyper.flag != 0 && value == 0)) continue;
    words.push_back(hyper.name + (hyper.flag != 0 ? "" : " " + shortest(value)));
  }
  return joined(words);
}

// Of a large tensor; a recipe may leave small ones in fp32.
std::string formats_of(const train::Job& job, const Optimizer& optimizer) {
  const scruple_tensor tensor = job.describe(optimizer, std::int64_t{1} << 20);
  std::vector<std::string> words;
  for (const int a : used_arrays(tensor)) {
    const scruple_array& array = tensor.arrays[a];
    if (a == SCRUPLE_GRADIENT && job.gradients.policy == SCRUPLE_RELEASED) continue;
    words.push_back(std::string(array_name(tensor, a)) + " " + info_of(array.format).name);
    if (array.rounding != SCRUPLE_NEAREST)
      words.back() += std::string(" ") + scruple_rounding_name(array.rounding);
  }
  return joined(words);
}

std::string rate_of(const train::Schedule& schedule) {
  return shortest(schedule.peak) + " at its peak, " + plural(schedule.warmup, "step") + " of warm-up, " +
         schedule_words(schedule);
}

std::string batch_of(const train::Job& job) {
  const std::int64_t parts = job.gradients.micro_batches;
  return plural(job.batch, "window") + " of " + grouped(job.shape.context) +
         (parts > 1 ? ", " + grouped(parts) + " micro-batches" : "");
}

std::string epochs_of(const Record& record) {
  const bool is_known = !record.steps.empty() && std::isfinite(record.steps.back().epoch);
  return is_known ? fixed(record.steps.back().epoch, 2) : "not counted: windows are drawn by chance";
}

// What lies under the noise: a mean over the last 50 steps or so. "" of a run that is too short for it.
std::vector<train::Curve> with_smoothed(const train::Curve& loss) {
  constexpr double kShare = 0.02;
  constexpr std::size_t kShort = 100;
  if (loss.y.size() < kShort) return {loss};
  train::Curve smoothed = {"training, smoothed", loss.x, {}, false};
  double mean = 0, weight = 0;
  for (const double y : loss.y) {
    if (std::isfinite(y)) mean += kShare * (y - mean), weight += kShare * (1 - weight);
    smoothed.y.push_back(mean / weight);
  }
  return {loss, smoothed};
}

train::Figures settings_of(const Trained& run) {
  const train::Job& job = run.job;
  const Optimizer optimizer = job.optimizer();
  scruple_rule_info rule;
  check(scruple_rule_at(scruple_optimizer_rule(optimizer.raw()), &rule));
  return {"Settings",
          "",
          {{"setting", "value"},
           {"data", run.data},
           {"model", run.kind + ", " + shape_words(job.shape)},
           {"parameters", grouped(train::parameter_count(job.shape))},
           {"recipe", run.recipe},
           {"formats", formats_of(job, optimizer)},
           {"activations", precision_name(job.activations)},
           {"gradients", kPolicies[job.gradients.policy] + gradient_words(job)},
           {"optimizer", rule.name},
           {"hyperparameters", hyper_words(optimizer)},
           {"learning rate", rate_of(job.schedule)},
           {"steps", grouped(job.schedule.steps) + " of " + step_words(job, run.layout)},
           {"batch", batch_of(job)},
           {"layout", std::string(train::kLayouts[static_cast<int>(run.layout)]) +
                          (job.isolates ? ", documents isolated" : "")},
           {"epochs taken", epochs_of(run.record)},
           {"seed", std::to_string(job.seed)}}};
}

// Means over all that are known.
std::string saves_of(const Record& record) {
  double waited = 0, seconds = 0;
  for (const auto& [step, saved] : record.saves) waited += saved.waited, seconds += saved.seconds;
  const auto count = static_cast<double>(record.saves.size());
  return grouped(static_cast<std::int64_t>(record.saves.size())) + " of " +
         size_words(record.saves.back().second.bytes) + ", each in " + fixed(seconds / count, 2) +
         " s, for which training waited " + fixed(waited / count, 2) + " s";
}

train::Figures speed_of(const Trained& run) {
  const Record& record = run.record;
  const std::int64_t taken = record.taken();
  const auto before = static_cast<std::int64_t>(record.resumed);
  train::Figures speed = {
      "Speed",
      "Validations are not counted.",
      {{"of the run", "value"}, {"device", run.trainer.backend().device()}, {"steps taken", grouped(taken)}}};
  if (before > 0) speed.rows.push_back({"of them in earlier sessions", grouped(before)});
  speed.rows.push_back(
      {"skipped, their gradients not finite", grouped(record.skipped() - record.outliers())});
  if (record.tensors_skipped() > 0)
    speed.rows.push_back({"tensors that these left as they were", grouped(record.tensors_skipped())});
  if (record.outliers() > 0)
    speed.rows.push_back({"skipped, their loss or norm an outlier", grouped(record.outliers())});
  if (taken > before) {
    speed.rows.push_back({"ms per step", fixed(record.ms_per_step(), 1)});
    const double rate = record.tokens_per_second();
    speed.rows.push_back({"tokens per second", grouped(std::llround(rate))});
    if (const std::string mfu = mfu_words(rate, most_tokens(run.trainer, run.job)); !mfu.empty())
      speed.rows.push_back({"of the device's peak (MFU)", mfu});
    speed.rows.push_back({before > 0 ? "time of the last session's steps" : "time of the steps",
                          duration(record.step_seconds)});
  }
  if (!record.saves.empty()) speed.rows.push_back({"saves", saves_of(record)});
  return speed;
}

// Points where an amount changes, and at both ends: one for each step would be a long line of equal numbers.
train::Chart memory_chart(const train::Ledger& ledger, const Record& record) {
  const Unit unit = unit_for(ledger.peak(), 1);
  train::Chart chart = {"Kinds on top of each other, step by step",
                        "The most that each held during a step" +
                            std::string(record.resumed > 0 ? " of the last session." : "."),
                        "step",
                        unit.name,
                        {},
                        {}};
  chart.stacked = true;
  for (std::size_t k = 0; k < ledger.entries().size(); ++k) {
    train::Curve curve = {ledger.entries()[k].kind, {}, {}, false};
    const auto add = [&](std::int64_t step, const train::Held& held) {
      if (!curve.x.empty() && curve.x.back() == static_cast<double>(step)) return;
      curve.x.push_back(static_cast<double>(step));
      curve.y.push_back(k < held.bytes.size() ? static_cast<double>(held.bytes[k]) / unit.bytes : 0);
    };
    for (std::size_t i = 0; i < record.memory.size(); ++i) {
      if (i > 0) add(record.memory[i].step - 1, record.memory[i - 1]);
      add(record.memory[i].step, record.memory[i]);
    }
    add(record.taken(), record.memory.back());
    chart.curves.push_back(curve);
  }
  if (ledger.limit() < ledger.peak() / 2 * 3) {  // else it would be far out of the picture
    chart.note += " The limit is --memory-limit, or what was free at the start.";
    chart.levels.emplace_back("limit", static_cast<double>(ledger.limit()) / unit.bytes);
  }
  return chart;
}

train::Section memory_of(const Trained& run) {
  const train::Ledger& ledger = run.trainer.ledger();
  const auto params = static_cast<double>(train::parameter_count(run.job.shape));
  train::Bars::Row planned = {"planned", {}}, measured = {"measured", {}};
  for (const auto& [kind, bytes] : run.plan.parts())
    planned.parts.emplace_back(kind, static_cast<double>(bytes) / params);
  for (const auto& [kind, bytes] : measured_parts(ledger, run.plan))
    measured.parts.emplace_back(kind, static_cast<double>(bytes) / params);
  train::Figures kinds = {"Peak by kind",
                          "Kinds do not all peak at once, so the total may be below their sum.",
                          {{"kind", "MiB", "bytes per parameter"}}};
  const auto add = [&](const std::string& name, std::int64_t bytes) {
    const auto size = static_cast<double>(bytes);
    kinds.rows.push_back({name, fixed(size * 0x1p-20, 2), fixed(size / params, 3)});
  };
  for (const train::Ledger::Entry& entry : ledger.entries()) add(entry.kind, entry.peak);
  add("total", ledger.peak());
  for (const train::Ledger::Entry& entry : ledger.host_entries())
    add(entry.kind + ", in host memory", entry.peak);
  train::Section section = {"Memory",
                            "",
                            {kinds},
                            {{"Weights, moments, gradients", "", "bytes per parameter", {planned, measured}}},
                            {}};
  if (!run.record.memory.empty()) section.charts.push_back(memory_chart(ledger, run.record));
  return section;
}

// Steps of which nothing is known but that they were taken (train::unseen) are left out.
train::Curve curve_of(const std::string& name, const Record& record,
                      const std::function<double(const Outcome&)>& value) {
  train::Curve curve = {name, {}, {}, false};
  for (std::size_t i = 0; i < record.steps.size(); ++i) {
    if (std::isnan(record.steps[i].lr)) continue;
    curve.x.push_back(static_cast<double>(i + 1));
    curve.y.push_back(value(record.steps[i]));
  }
  return curve;
}

train::Chart small_chart(const std::string& title, const std::string& y_label, const Record& record,
                         const std::function<double(const Outcome&)>& value) {
  return {title, "", "step", y_label, {curve_of(title, record, value)}, {}, /*small=*/true};
}

train::Chart speed_chart(const Record& record) {
  train::Curve curve = {"Throughput", {}, {}, false};
  for (std::size_t i = 0; i < record.seconds.size(); ++i) {
    curve.x.push_back(static_cast<double>(record.resumed + i + 1));
    curve.y.push_back(static_cast<double>(record.steps[record.resumed + i].tokens) / record.seconds[i]);
  }
  return {"Throughput", "", "step", "tokens per second", {curve}, {}, /*small=*/true};
}

train::Chart unmoved_chart(const Record& record) {
  train::Curve all = {"all weights", {}, {}, false}, most = {"the tensor with the most", {}, {}, false};
  for (const auto& [step, found] : record.unmoved) {
    all.x.push_back(static_cast<double>(step)), all.y.push_back(100 * found.share);
    most.x.push_back(static_cast<double>(step)), most.y.push_back(100 * found.most);
  }
  return {"Unmoved weights",
          "What a step leaves as it is. Rounded to nearest it is lost; rounded stochastically it moves on "
          "average.",
          "step",
          "per cent",
          {all, most},
          {},
          /*small=*/true};
}

// The norm where the policy knows it, the loss scale where there is one.
train::Section steps_of(const train::Job& job, const Record& record) {
  train::Section section = {"Step by step", "", {}, {}, {}};
  const auto any = [&](const auto& holds) {
    return std::any_of(record.steps.begin(), record.steps.end(), holds);
  };
  if (any([](const Outcome& step) { return std::isfinite(step.norm); })) {
    section.charts.push_back(small_chart("Gradient norm", "norm before clipping", record,
                                         [](const Outcome& step) { return step.norm; }));
    if (job.gradients.max_norm > 0)
      section.charts.back().levels.emplace_back("clipped above", job.gradients.max_norm);
  }
  section.charts.push_back(
      small_chart("Learning rate", "rate", record, [](const Outcome& step) { return step.lr; }));
  if (any([](const Outcome& step) { return step.loss_scale != 1; }))
    section.charts.push_back(small_chart("Loss scale", "scale", record, [](const Outcome& step) {
      return static_cast<double>(step.loss_scale);
    }));
  if (!record.unmoved.empty()) section.charts.push_back(unmoved_chart(record));
  if (!record.seconds.empty()) section.charts.push_back(speed_chart(record));
  return section;
}

train::Section loss_of(const Record& record, const train::Job& job) {
  const train::Curve loss = curve_of("training", record, [](const Outcome& step) { return step.loss; });
  if (!record.validates)
    return {"Loss",
            "",
            {},
            {},
            {{"Training", "There was no validation.", "step", nats_per(job.shape), with_smoothed(loss), {}}}};
  train::Curve validation = {"validation", {}, {}, true};
  for (const auto& [step, value] : record.validations)
    validation.x.push_back(static_cast<double>(step)), validation.y.push_back(value);
  std::vector<train::Curve> curves = with_smoothed(loss);
  curves.push_back(validation);
  return {"Loss", "", {}, {}, {{"Training and validation", "", "step", nats_per(job.shape), curves, {}}}};
}

}  // namespace

std::string validation_words(const Record& record, const train::Job& job) {
  const std::string unit = " " + nats_per(job.shape);
  if (!record.validates) {
    constexpr std::int64_t kMeanOf = 20;
    double sum = 0;
    std::int64_t count = 0;
    for (auto step = record.steps.rbegin(); step != record.steps.rend() && count < kMeanOf; ++step)
      if (!std::isnan(step->lr) && step->tokens != 0)
        sum += step->loss, ++count;  // else it is not known, or is none
    const std::string mean = count == 0 ? ""
                                        : "; training loss " + fixed(sum / static_cast<double>(count), 4) +
                                              unit + ", mean of the last " + plural(count, "step");
    return "no validation" + mean;
  }
  if (record.validations.empty()) return "no validation was finished";
  const auto at = [&](const std::pair<std::int64_t, double>& validation, std::int64_t usual) {
    return fixed(validation.second, 4) +
           (validation.first == usual ? "" : " (after step " + grouped(validation.first) + ")");
  };
  const auto &first = record.validations.front(), &last = record.validations.back();
  if (first.first == last.first) return "validation loss " + at(last, -1) + unit;
  return "validation loss " + at(first, 0) + " -> " + at(last, job.schedule.steps) + unit;
}

train::Report page_of(const Trained& run) {
  const train::Job& job = run.job;
  const Record& record = run.record;
  const std::string lead = run.kind + ", " + shape_words(job.shape) + ", recipe " + run.recipe + ", " +
                           grouped(record.taken()) + " of " + plural(job.schedule.steps, "step") + "; " +
                           validation_words(record, job) + ".";
  return {"Scruple: " + run.data,
          lead,
          {loss_of(record, job),
           {"Settings and speed", "", {settings_of(run), speed_of(run)}, {}, {}},
           memory_of(run),
           steps_of(job, record)}};
}

}  // namespace scruple::cli
