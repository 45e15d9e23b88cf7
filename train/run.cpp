#include "train/run.h"

#include <chrono>
#include <cmath>

namespace scruple::train {

double Record::ms_per_step() const {
  return steps.empty() ? 0 : 1e3 * step_seconds / static_cast<double>(steps.size());
}

double Record::first_loss() const { return validations.empty() ? std::nan("") : validations.front().second; }

double Record::final_loss() const { return validations.empty() ? std::nan("") : validations.back().second; }

Record run(Trainer& trainer, const Windows& data, const Windows& validation, const Span& span,
           const std::function<void(const Record&)>& watch) {
  Record record;
  const auto validate = [&] {
    const double loss = trainer.validate(validation, span.validation_windows, span.go_on);
    if (span.go_on()) record.validations.emplace_back(record.steps.size(), loss);
  };
  validate();
  for (std::int64_t step = 1; step <= span.steps && span.go_on(); ++step) {
    const auto before = std::chrono::steady_clock::now();
    record.steps.push_back(trainer.step(data));
    record.step_seconds += std::chrono::duration<double>(std::chrono::steady_clock::now() - before).count();
    watch(record);
    const bool due = span.validate_every > 0 && step % span.validate_every == 0;
    if (due || step == span.steps) validate();
  }
  record.stopped = static_cast<std::int64_t>(record.steps.size()) < span.steps;
  return record;
}

}  // namespace scruple::train
