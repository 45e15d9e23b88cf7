#include "train/run/run.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <optional>
#include <utility>

namespace scruple::train {
namespace {

constexpr std::int64_t kHopeless = 10;  // losses in a row that are lost, or steps that are skipped
constexpr double kLost = 10;            // times the first loss

using Clock = std::chrono::steady_clock;

// Counts what it takes until it ends.
class Timer {
 public:
  explicit Timer(double& seconds) : seconds_(seconds) {}
  ~Timer() { seconds_ += std::chrono::duration<double>(Clock::now() - begin_).count(); }
  Timer(const Timer&) = delete;
  Timer& operator=(const Timer&) = delete;

 private:
  double& seconds_;
  Clock::time_point begin_ = Clock::now();
};

double now() {
  return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
}

// How many steps from `step` to the last are followed by what comes every so many of them, and after the last.
std::int64_t due_from(std::int64_t step, std::int64_t last, std::int64_t every) {
  if (every <= 0) return 1;
  return last / every - (step - 1) / every + (last % every == 0 ? 0 : 1);
}

// How many steps at the end are so, of those from `first` on.
template <class Test>
std::int64_t at_end(const Record& record, std::size_t first, const Test& is_so) {
  std::size_t i = record.steps.size();
  while (i > first && is_so(record.steps[i - 1])) --i;
  return static_cast<std::int64_t>(record.steps.size() - i);
}

// Not finite, or so far above the first one that no spike is.
bool is_lost(const Record& record, double loss) {
  const auto first = std::find_if(record.steps.begin(), record.steps.end(),
                                  [](const Outcome& step) { return std::isfinite(step.loss); });
  return !std::isfinite(loss) || (first != record.steps.end() && loss > kLost * std::max(1.0, first->loss));
}

// Amounts rarely change: a long run keeps few of them.
void note_memory(std::int64_t step, const Ledger& ledger, std::vector<Held>& memory) {
  Held held = {step, {}};
  for (const Ledger::Entry& entry : ledger.entries()) held.bytes.push_back(entry.high);
  if (memory.empty() || memory.back().bytes != held.bytes) memory.push_back(std::move(held));
}

}  // namespace

double Record::ms_per_step() const {
  return steps.size() == resumed ? 0 : 1e3 * step_seconds / static_cast<double>(steps.size() - resumed);
}

double Record::tokens_per_second() const {
  std::int64_t tokens = 0;
  for (std::size_t i = resumed; i < steps.size(); ++i) tokens += steps[i].tokens;
  return static_cast<double>(tokens) / step_seconds;
}

std::int64_t Record::skipped() const {
  return std::count_if(steps.begin(), steps.end(), [](const Outcome& step) { return step.skipped; });
}

std::int64_t Record::outliers() const {
  return std::count_if(steps.begin(), steps.end(), [](const Outcome& step) { return step.outlier; });
}

std::int64_t Record::empty() const {
  return std::count_if(steps.begin(), steps.end(), [](const Outcome& step) { return step.tokens == 0; });
}

std::int64_t Record::tensors_skipped() const {
  std::int64_t sum = 0;
  for (const Outcome& step : steps) sum += step.outlier ? 0 : step.tensors;
  return sum;
}

double Record::first_loss() const { return validations.empty() ? std::nan("") : validations.front().second; }

double Record::final_loss() const { return validations.empty() ? std::nan("") : validations.back().second; }

std::pair<std::int64_t, double> Record::best() const {
  std::pair<std::int64_t, double> found = {0, std::nan("")};
  for (const auto& [step, loss] : validations)
    if (std::isfinite(loss) && !(loss >= found.second)) found = {step, loss};
  return found;
}

double Record::mean_unmoved() const {
  double sum = 0;
  for (const auto& [step, found] : unmoved) sum += found.share;
  return sum / static_cast<double>(unmoved.size());
}

bool has_settled(const Record& record, std::int64_t patience) {
  if (patience == 0 || record.validations.empty()) return false;
  const std::int64_t best = record.best().first;
  return std::count_if(record.validations.begin(), record.validations.end(),
                       [best](const auto& validation) { return validation.first > best; }) >= patience;
}

std::int64_t losses_lost(const Record& record) {
  return at_end(record, record.resumed,
                [&](const Outcome& step) { return step.tokens != 0 && is_lost(record, step.loss); });
}

// How many steps at the end speak against the weights: by their loss, or by gradients that are not finite though no loss
// scale explains it.
std::int64_t doubtful(const Record& record) {
  return at_end(record, record.resumed, [&](const Outcome& step) {
    const bool skips = step.skipped && !step.outlier && step.loss_scale <= 1;
    return step.tokens != 0 && (skips || is_lost(record, step.loss));
  });
}

std::int64_t good_steps(const Record& record) {
  const std::int64_t taken = record.taken(), bad = doubtful(record);
  const bool is_validated = !record.validations.empty() && record.validations.back().first == taken;
  const bool ends_badly =
      is_validated ? is_lost(record, record.final_loss()) : !record.stopped && losses_lost(record) > 0;
  const bool is_ruined = bad >= kHopeless || ends_badly;
  return is_ruined ? taken - bad - 1 : taken;
}

std::int64_t outliers_lost(const Record& record) {
  return at_end(record, 0, [](const Outcome& step) { return step.outlier; });
}

std::int64_t skipped_at_last(const Record& record) {
  return at_end(record, record.resumed, [&](const Outcome& step) {
    return step.skipped && step.loss_scale == record.steps.back().loss_scale;
  });
}

double seconds_left(const Record& record, const Span& span) {
  const std::int64_t taken = record.taken();
  const bool saves = span.save_every > 0 || span.save_last;
  const auto all = [](std::int64_t times, double each) { return static_cast<double>(times) * each; };
  return all(span.steps - taken, 1e-3 * record.ms_per_step()) +
         all(due_from(taken, span.steps, span.validate_every), record.validating.mean()) +
         all(saves ? due_from(taken, span.steps, span.save_every) : 0, record.saving.mean());
}

void run(Record& record, Trainer& trainer, const Windows& data, const Windows& validation, const Span& span,
         const Watch& watch, const Save& save) {
  record.resumed = record.steps.size();
  record.validates = span.validates;
  bool hopeless = false;
  const auto is_due = [&](std::int64_t step) {
    return step == 0 || step == span.steps || (span.validate_every > 0 && step % span.validate_every == 0);
  };
  const auto validate_if_due = [&](std::int64_t step) {
    if (!span.validates || (!is_due(step) && !hopeless) ||
        (!record.validations.empty() && record.validations.back().first == step))
      return;
    ++record.validating.times;
    const Timer timer(record.validating.seconds);
    const double loss = trainer.validate(validation, span.validation_windows, [&](auto done, auto all) {
      span.validating(done, all);
      return span.go_on();
    });
    if (span.go_on()) record.validations.emplace_back(step, loss);
  };
  auto saved = static_cast<std::int64_t>(record.resumed);
  Clock::time_point last_save = Clock::now();
  const auto save_now = [&](std::int64_t step) {
    if (step == saved || good_steps(record) < step ||
        (step < span.steps && !record.stopped && doubtful(record) > 0))
      return;
    last_save = Clock::now();
    ++record.saving.times;
    const Timer timer(record.saving.seconds);
    if (save(record)) saved = step;
  };
  auto step = static_cast<std::int64_t>(record.resumed);
  validate_if_due(step);  // which an earlier session may not have finished
  const auto settled = [&] { return step < span.steps && has_settled(record, span.patience); };
  while (step < span.steps && !hopeless && !settled() && span.go_on()) {
    trainer.ledger().mark();
    const bool looks = is_due(step + 1);
    const std::vector<std::vector<float>> before =
        looks ? trainer.state().heads() : std::vector<std::vector<float>>();
    double seconds = 0;
    {
      const Timer timer(seconds);
      record.steps.push_back(trainer.step(data, step + 1 < span.steps));
    }
    record.seconds.push_back(seconds);
    record.steps.back().time = now();
    record.step_seconds += seconds;
    ++step;
    if (looks && !record.steps.back().skipped && record.steps.back().tokens != 0)
      if (const std::optional<Unmoved> found = trainer.state().unmoved_since(before))
        record.unmoved.emplace_back(step, *found);
    note_memory(step, trainer.ledger(), record.memory);
    watch(record);
    hopeless = doubtful(record) >= kHopeless || outliers_lost(record) >= kHopeless ||
               skipped_at_last(record) >= kHopeless;
    validate_if_due(step);
    const std::chrono::duration<double> unsaved = Clock::now() - last_save;
    const bool is_late = span.save_seconds > 0 && unsaved.count() >= span.save_seconds;
    const bool is_time = span.save_every > 0 && step % span.save_every == 0;
    if ((is_time || is_late) && step < span.steps) save_now(step);
  }
  record.settled = settled();
  const bool all_taken = step == span.steps || hopeless || record.settled;
  const bool lacks_last =
      span.validates && (record.validations.empty() || record.validations.back().first < step);
  record.stopped = !all_taken || lacks_last;
  const bool has_saved = saved > static_cast<std::int64_t>(record.resumed);
  const bool lost_steps = hopeless && record.steps.back().skipped;
  if (!span.saves_end()) saved = -1;  // the last save failed after all: another one is tried
  if (span.save_every > 0 || span.save_last || has_saved || record.stopped || lost_steps) save_now(step);
}

Record run(Trainer& trainer, const Windows& data, const Windows& validation, const Span& span,
           const Watch& watch, const Save& save, Record record) {
  run(record, trainer, data, validation, span, watch, save);
  return record;
}

}  // namespace scruple::train
