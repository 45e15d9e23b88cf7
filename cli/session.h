// A run of `scruple train`: its options, a session that trains it, what its checkpoints note, and what it leaves.
#pragma once

#include <cstdint>
#include <exception>
#include <memory>
#include <string>
#include <vector>

#include "io/checkpoint.h"
#include "memory.h"
#include "options.h"
#include "rate.h"
#include "train/run/folder.h"
#include "train/run/run.h"
#include "train/run/trainer.h"
#include "train/text/data.h"
#include "training.h"

namespace scruple::cli {

inline constexpr int kSaveMinutes = 15;  // between checkpoints, where --save-every is not given

struct TrainOptions {
  Choice choice;
  ModelOptions model;
  GradientOptions gradients;
  CuttingOptions cutting;
  RateOptions rate;
  std::vector<std::string> data;
  std::string validation_data, out, activations, memory_limit, resume;
  double ema = 0, epochs = 0, skip_outliers = 0;
  std::int64_t validate_every = 0, save_every = 0, keep = 2, stop_when = 0;
  bool force = false;

  OptionTable options();  // all of them, in the order of the help
  Choice chosen() const;  // with the weight decay
  train::Schedule schedule() const { return rate.schedule(model.steps); }
  std::int64_t limit() const;  // of memory
  // Checkpoints that stay while it trains: the last one may turn out to be of ruined weights.
  std::int64_t kept() const { return keep == 1 ? 2 : keep; }
};

// New, or going on from a checkpoint.
struct Session {
  TrainOptions options;
  ChosenModel model;
  std::unique_ptr<train::RunFolder> folder;  // locked
  std::unique_ptr<io::Checkpoint> from;
  io::Metadata before;     // what that checkpoint notes
  bool in_place = false;   // goes on in the folder that it was begun in
  std::int64_t first = 0;  // the steps that it had before it was made longer; 0: it was not

  // Filled in when it trains.
  std::string tokenizer;                    // the folder that has it
  std::unique_ptr<train::Data> validation;  // of --validation-data
  train::Job job;
  Memory plan;  // of weights, moments and gradients
  train::Ledger ledger;
  io::Metadata notes;      // for its checkpoints; empty until one is wanted
  std::string unsaved;     // why the last save failed, or ""
  std::int64_t saved = 0;  // the step of the last checkpoint; 0: there is none
};

// What was asked for, complete and checked as far as it can be before data and device are touched.
Session session_of(const CLI::App& command, const TrainOptions& given);
// All that a checkpoint needs to go on: settings, given or by default, and what is read and computed with.
io::Metadata notes_for(const Session& session, const train::Data& data, const train::Trainer& trainer);
// --epochs, where it was given, as steps of this data.
void count_epochs(Session& session, const train::Windows& data);
// Throws where the run was started with other data, or validated with other.
void check_data(const Session& session, const train::Data& data);
bool validates(const TrainOptions& options);
// "on cuda after cpu": on what it goes on, where its bits may be others there; "" where they are the same.
std::string moved_words(const Session& session, const train::Trainer& trainer);
// What would take less memory: of a run that goes on, only what leaves its bits as they are.
std::string savings_of(const Session& session);

// What a run has left, and what it could not.
struct Ending {
  std::string weights;  // the folder that has them; "": none does
  bool metrics = false, report = false;
  std::vector<std::string> problems;
};

// Everything that a run leaves, whatever fails; the weights last, so that their step is that of all. A run that a
// `failure` ended leaves none: it may have been in the middle of a step.
Ending finish(Session& session, const train::Record& record, train::Trainer& trainer, train::Metrics& metrics,
              train::Layout layout, const std::exception_ptr& failure);
// Says how it went and what was written. Throws where that is no success: the exit code tells.
void conclude(const Session& session, const train::Record& record, const Ending& ending, double most_tokens,
              const std::exception_ptr& failure);

}  // namespace scruple::cli
