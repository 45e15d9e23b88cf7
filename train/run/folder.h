// A run's folder: who may write into it, an earlier run that a new one replaces, and metrics.jsonl.
#pragma once

#include <cstdint>
#include <fstream>
#include <string>

#include "train/run/run.h"

namespace scruple::train {

// Locked (flock) for as long as this lives: a kill gives the lock back. Where a file system has no locks, nobody is
// kept out.
class RunFolder {
 public:
  // Throws where another process has the lock. A folder that is not there is not made.
  explicit RunFolder(const std::string& path);
  ~RunFolder();
  RunFolder(const RunFolder&) = delete;
  RunFolder& operator=(const RunFolder&) = delete;

  const std::string& path() const { return path_; }
  // For a new run, before anything is trained: throws where its files could not be written, or those of an earlier
  // run are there. With `replace` begin() will remove those; but whatever a run has not written is refused.
  void claim(bool replace);
  // The new run has something to write: what it replaces goes.
  void begin();

 private:
  std::string path_;
  int lock_ = -1;
  bool replaces_ = false;
};

void make_folder(const std::string& path);  // and those above it
std::string metrics_path(const std::string& run);

// metrics.jsonl: a line per step, per validation and per save. Where the disk is full the lines wait.
class Metrics {
 public:
  explicit Metrics(const std::string& run) : path_(metrics_path(run)) {}

  // What of the record is not written yet. The first call makes the file anew: earlier sessions may have gone
  // further, or been killed in the middle of a line. Whether all is written that there was up to now.
  bool write(const Record& record);
  const std::string& path() const { return path_; }

 private:
  std::string next_lines(const Record& record);

  std::string path_, waiting_;
  std::ofstream file_;
  std::uintmax_t written_ = 0;
  bool made_ = false;
  std::int64_t skipped_ = 0, tokens_ = 0;  // of the steps that were written; tokens_ below 0: not known
  std::size_t steps_ = 0, validations_ = 0, unmoved_ = 0, saves_ = 0;
};

// A record of steps that left no trace but a checkpoint: their learning rates are NaN.
Record unseen(std::int64_t steps);
// What the sessions before saw, up to the checkpoint that was saved after `steps` steps; what they did after it will
// be done again.
Record read_metrics(const std::string& run, std::int64_t steps);

}  // namespace scruple::train
