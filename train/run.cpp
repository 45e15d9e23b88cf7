#include "train/run.h"

#include <chrono>
#include <cmath>

namespace scruple::train {

double Record::ms_per_step() const {
  return steps.size() == resumed ? 0 : 1e3 * step_seconds / static_cast<double>(steps.size() - resumed);
}

double Record::first_loss() const { return validations.empty() ? std::nan("") : validations.front().second; }

double Record::final_loss() const { return validations.empty() ? std::nan("") : validations.back().second; }

Record run(Trainer& trainer, const Windows& data, const Windows& validation, const Span& span,
           const Watch& watch, const Save& save, Record record) {
  record.resumed = record.steps.size();
  const auto validate_if_due = [&](std::int64_t step) {
    const bool due =
        step == 0 || step == span.steps || (span.validate_every > 0 && step % span.validate_every == 0);
    if (!due || (!record.validations.empty() && record.validations.back().first == step)) return;
    const double loss = trainer.validate(validation, span.validation_windows, [&](auto done, auto all) {
      span.validating(done, all);
      return span.go_on();
    });
    if (span.go_on()) record.validations.emplace_back(step, loss);
  };
  auto saved = static_cast<std::int64_t>(record.resumed);
  const auto save_now = [&](std::int64_t step) {
    if (step != saved && save(record)) saved = step;
  };
  auto step = static_cast<std::int64_t>(record.resumed);
  validate_if_due(step);  // which an earlier session may not have finished
  while (step < span.steps && span.go_on()) {
    const auto before = std::chrono::steady_clock::now();
    record.steps.push_back(trainer.step(data));
    record.step_seconds += std::chrono::duration<double>(std::chrono::steady_clock::now() - before).count();
    ++step;
    watch(record);
    validate_if_due(step);
    if (span.save_every > 0 && step % span.save_every == 0 && step < span.steps) save_now(step);
  }
  record.stopped = step < span.steps || record.validations.empty() || record.validations.back().first < step;
  if (span.save_every > 0 || span.save_last || record.stopped) save_now(step);
  return record;
}

}  // namespace scruple::train
