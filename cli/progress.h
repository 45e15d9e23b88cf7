// A run as it is watched: its progress line, its speed, and Ctrl-C.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>

#include "train/run/run.h"
#include "train/run/trainer.h"

namespace scruple::cli {

// A run that validates every so many steps (0: twenty times) and ends early where Interrupts says so.
train::Span span_of(std::int64_t steps, std::int64_t validate_every = 0);

// The tokens per second at which all of the device's peak would go into the model's products (an MFU of 1: Chowdhery et
// al., 2204.02311, section 4.1); 0: not known, as for fp32.
double most_tokens(const train::Trainer& trainer, const train::Job& job);
std::string share_words(double share);  // 1.2 %; - where it is not a number
// Of a run's weights, to be told in the terminal: less is on the page alone.
inline constexpr double kUnmovedToTell = 0.01;
std::string mfu_words(double rate, double most);  // 41.2 %; "" where the most is not known

// A line on stderr that rewrites itself on a terminal, cut to its width, and comes every few seconds elsewhere.
class StatusLine {
 public:
  StatusLine();
  ~StatusLine() { clear(); }
  bool is_terminal() const { return terminal_; }
  bool is_due(bool in_any_case = false);
  void put(std::string text);
  void clear();

 private:
  using Clock = std::chrono::steady_clock;
  bool terminal_;
  std::size_t width_ = 0;
  Clock::time_point last_;
};

class Progress {
 public:
  Progress(std::string label, const train::Job& job, const train::Trainer& trainer);
  void show(const train::Record& record, double seconds_left, bool is_saving = false);
  void validating(std::int64_t done, std::int64_t all);  // batches
  void warn(const std::string& message);                 // on a line of its own

 private:
  std::string line(const train::Record& record, double seconds_left, bool is_saving) const;
  std::string skipped_words(const train::Outcome& step) const;

  std::string label_;
  std::int64_t steps_;
  double most_tokens_;
  std::int64_t tensors_;
  const train::Ledger& ledger_;
  StatusLine status_;
};

std::string duration(double seconds);  // 0:07, 12:30, 3:05:00
// While one exists, Ctrl-C (and SIGTERM, SIGHUP) only sets a flag; a second one ends the program as usual. A signal that
// the program was started to ignore stays ignored.
class Interrupts {
 public:
  Interrupts();
  ~Interrupts();
  static bool asked() { return signal() != 0; }
  static int signal();        // the one that came; 0: none
  static const char* name();  // its name

 private:
  void (*before_[3])(int);
};

}  // namespace scruple::cli
