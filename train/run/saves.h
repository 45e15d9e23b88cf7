// Checkpoints of a run while it trains. Where the device copies its planes beside its work, a thread writes them from those
// copies and training goes on; elsewhere training waits.
#pragma once

#include <chrono>
#include <cstdint>
#include <deque>
#include <functional>
#include <future>
#include <optional>
#include <string>
#include <vector>

#include "io/checkpoint.h"
#include "train/run/checkpoint.h"
#include "train/run/run.h"
#include "train/run/trainer.h"

namespace scruple::train {

class Saves {
 public:
  // Into the run's folder, whose last `keep` checkpoints stay. The trainer's ledger of the host counts the copies: one set,
  // which stays from the first save on. Where 4/3 of it are above its limit, or the host has no such memory, `warn` is told
  // once, and every save waits. The trainer must outlive it.
  Saves(Trainer& trainer, std::string recipe, std::string run, std::int64_t keep,
        std::function<void(const std::string&)> warn);
  ~Saves();
  Saves(const Saves&) = delete;
  Saves& operator=(const Saves&) = delete;

  // Begins to take the memory for copies, which takes seconds where it is large: training goes on meanwhile. Without it
  // the first save waits.
  void prepare();
  // Saves the trainer as it is, after the save before, for which it waits: there is one at a time. `goes_on`: training
  // will, so the checkpoint may still be being written when this returns.
  void save(const io::Metadata& notes, bool goes_on);
  // What the next step took: where it was longer than usual, it has waited for a save.
  void add_step(double seconds);
  bool is_writing() const { return writing_.valid(); }
  // The next one that has ended, well or not; nothing: none has that was not told yet.
  std::optional<Saved> ended();
  void wait();  // until none is being written

 private:
  using Clock = std::chrono::steady_clock;
  struct Written {
    Clock::time_point at;
    std::string problem;
  };
  std::future<Block> taking(std::int64_t bytes);
  bool has_room(std::int64_t bytes);
  void copy(Contents& contents);
  Written write(const Contents& contents, Copies* copies) const;

  Trainer& trainer_;
  const std::string recipe_, run_;
  const std::int64_t keep_;
  Ledger& host_;
  const std::function<void(const std::string&)> warn_;
  bool refused_ = false;  // the memory for copies
  Block block_;           // of one checkpoint's copies
  std::future<Block> taking_;
  Saved current_;  // the one that is being written
  Clock::time_point begun_;
  std::deque<double> steps_;  // seconds of the last ones that waited for nothing
  bool step_waits_ = false;   // the next one
  std::deque<Saved> ended_;
  std::future<Written> writing_;  // uses what stands above
};

}  // namespace scruple::train
