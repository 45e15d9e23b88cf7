#include "train/run.h"

#include <chrono>

namespace scruple::train {

double Record::ms_per_step() const { return 1e3 * step_seconds / static_cast<double>(steps.size()); }

Record run(Trainer& trainer, const Windows& data, const Windows& validation, const Span& span,
           const std::function<bool(const Record&)>& watch) {
  Record record;
  const auto validate = [&] {
    const auto taken = static_cast<std::int64_t>(record.steps.size());
    record.validations.emplace_back(taken, trainer.validate(validation, span.validation_windows));
  };
  validate();
  for (std::int64_t step = 1; step <= span.steps && !record.stopped; ++step) {
    const auto before = std::chrono::steady_clock::now();
    record.steps.push_back(trainer.step(data));
    record.step_seconds += std::chrono::duration<double>(std::chrono::steady_clock::now() - before).count();
    record.stopped = !watch(record) && step < span.steps;
    const bool due = span.validate_every > 0 && step % span.validate_every == 0;
    if (due || step == span.steps || record.stopped) validate();
  }
  return record;
}

}  // namespace scruple::train
