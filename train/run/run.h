// The loop around a trainer: steps, validations, what was seen, and a chance to stop.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "train/run/trainer.h"

namespace scruple::train {

struct Span {
  std::int64_t steps = 0;
  std::int64_t validate_every = 0;  // 0: only before the first and after the last
  std::int64_t validation_windows = 64;
  std::function<bool()> go_on = [] { return true; };  // asked before every step and batch of a validation
  std::function<void(std::int64_t done, std::int64_t all)> validating = [](auto, auto) {};  // its batches
  std::int64_t save_every = 0;  // 0: only where go_on ended the run; otherwise also after the last step
  double save_seconds = 0;      // also after the first step that ends so long after the last save; 0: never
  bool save_last = false;       // after the last step though save_every is 0
  bool validates = true;
  // Asked before the last save: waits for one that is still being written. False: that one failed.
  std::function<bool()> saves_end = [] { return true; };
  std::int64_t patience = 0;  // ends after so many validations in a row that are not the best; 0: never
};

// What something took, each time.
struct Timed {
  double seconds = 0;
  std::int64_t times = 0;
  double mean() const { return times == 0 ? 0 : seconds / static_cast<double>(times); }
};

// A checkpoint that was saved, or could not be.
struct Saved {
  std::int64_t step = 0;
  double waited = 0;       // seconds that training waited for it
  double seconds = 0;      // until it was written
  std::int64_t bytes = 0;  // of its planes
  std::string problem;     // why there is none; "": there is
};

// What each kind of memory held at most during a step, in the order of the ledger's entries.
struct Held {
  std::int64_t step;
  std::vector<std::int64_t> bytes;
};

struct Record {
  std::vector<Outcome> steps;
  std::vector<std::pair<std::int64_t, double>> validations;  // steps taken, loss
  std::vector<std::pair<std::int64_t, Unmoved>> unmoved;  // of steps before validations that were not skipped
  double step_seconds = 0;                                // without the validations
  std::vector<double> seconds;                            // of each step of this session
  std::vector<std::pair<std::int64_t, Saved>>
      saves;                 // those that succeeded; steps taken when one was known to
  std::vector<Held> memory;  // of each step of this session that held other amounts than the last
  Timed validating, saving;  // of this session
  std::size_t resumed = 0;   // steps of earlier sessions among `steps`
  bool stopped = false;      // before its last step, or its last validation, because it was told to
  bool validates = true;     // else it has no validations, and never will
  bool settled = false;      // ended by Span::patience

  std::int64_t taken() const { return static_cast<std::int64_t>(steps.size()); }
  double ms_per_step() const;
  double tokens_per_second() const;      // of this session's steps
  std::int64_t skipped() const;          // steps, for whatever reason; released: in whole or in part
  std::int64_t outliers() const;         // among them
  std::int64_t empty() const;            // steps without a target
  std::int64_t tensors_skipped() const;  // released: of steps that were no outliers
  // Of the first and of the last validation that was finished; NaN: none was.
  double first_loss() const;
  double final_loss() const;
  std::pair<std::int64_t, double> best()
      const;                    // the first validation of the least loss, of those that are finite
  double mean_unmoved() const;  // of the shares; NaN: no step was looked at
};

// How many seconds a run still takes, right after a step: the steps, validations and saves to come, each at
// its mean time in this session.
double seconds_left(const Record& record, const Span& span);

// Whether so many validations at the end are no better than the best before them; 0: never.
bool has_settled(const Record& record, std::int64_t patience);

// How many losses at the end of this session are lost: not finite, or more than ten times the first (or 1).
std::int64_t losses_lost(const Record& record);

// Steps at the end of this session that speak against the weights: their loss is lost, or their gradients are not finite
// though no loss scale explains it.
std::int64_t doubtful(const Record& record);

// The last step after which the weights are good as far as is known. They are not where ten steps in a row are doubtful, a
// validation after the last is lost or, without one, the last loss. Where the user has stopped the run, that one says too
// little. Below 0: not even the first weights are.
std::int64_t good_steps(const Record& record);

// How many steps at the end were skipped as outliers.
std::int64_t outliers_lost(const Record& record);

// How many steps at the end of this session were skipped, in whole or in part, at one and the same loss scale: a dynamic
// one that shrinks finds its way.
std::int64_t skipped_at_last(const Record& record);

using Watch = std::function<void(const Record&)>;
using Save = std::function<bool(const Record&)>;

// Trains to the end of the span. `record` has an entry for each step that the trainer has taken, those of
// earlier sessions included, and gets the new ones.
// - `watch` is called after every step.
// - `save` is called after the steps that the span names. Where it returns false it is called again when the
//   run ends. It may return while the checkpoint is being written: Span::saves_end waits for that.
// - When losses stay lost, or gradients not finite, the run ends early and does not save: its weights are ruined.
// - When one step after another is skipped as an outlier, or because a loss scale is too large, it ends early too, and saves:
//   the weights are from before.
// - If anything throws, the record ends with the last whole step.
void run(
    Record& record, Trainer& trainer, const Windows& data, const Windows& validation, const Span& span,
    const Watch& watch, const Save& save = [](const Record&) { return true; });
// The same, from a record to a record.
Record run(
    Trainer& trainer, const Windows& data, const Windows& validation, const Span& span, const Watch& watch,
    const Save& save = [](const Record&) { return true; }, Record record = {});

}  // namespace scruple::train
