#include "progress.h"

#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <iostream>
#include <utility>

#include "text.h"

namespace scruple::cli {
namespace {

volatile std::sig_atomic_t interrupted = 0;  // by this signal
constexpr int kSignals[] = {SIGINT, SIGTERM, SIGHUP};

// Programs such as coreutils' timeout send a signal twice at once, to the process and to its group.
extern "C" void note_interrupt(int signal) {
  static volatile std::sig_atomic_t first = 0;  // the second in which it came
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC, &now);
  const auto second = static_cast<std::sig_atomic_t>(now.tv_sec);
  if (interrupted != 0) {
    if (second - first < 2) return;
    std::signal(signal, SIG_DFL);
    std::raise(signal);
    return;
  }
  interrupted = signal;
  first = second;
  constexpr char kSaid[] = "\nscruple: stopping after this step; once more to stop at once\n";
  (void)!write(STDERR_FILENO, kSaid, sizeof kSaid - 1);
}

// Of the terminal that stderr is. A line of all its columns would make some terminals go to the next.
std::size_t columns_for_a_line() {
  winsize window{};
  long columns = ioctl(STDERR_FILENO, TIOCGWINSZ, &window) == 0 ? window.ws_col : 0;
  const char* const set = std::getenv("COLUMNS");
  if (columns == 0 && set != nullptr) columns = std::strtol(set, nullptr, 10);
  constexpr long kUsual = 80;
  return static_cast<std::size_t>(std::max(columns > 0 ? columns : kUsual, 2L) - 1);
}

// The last save, or that there is one at work.
std::string save_words(const train::Record& record, bool is_saving) {
  if (is_saving) return "  saving";
  if (record.saves.empty()) return "";
  const train::Saved& last = record.saves.back().second;
  constexpr double kShort = 0.1;  // seconds that are not worth a word
  return "  saved step " + grouped(last.step) +
         (last.seconds < kShort
              ? ""
              : " in " + fixed(last.seconds, 1) + " s, waited " + fixed(last.waited, 1) + " s");
}

}  // namespace

train::Span span_of(std::int64_t steps, std::int64_t validate_every) {
  train::Span span;
  span.steps = steps;
  span.validate_every = validate_every > 0 ? validate_every : std::max<std::int64_t>(steps / 20, 1);
  span.go_on = [] { return !Interrupts::asked(); };
  return span;
}

double most_tokens(const train::Trainer& trainer, const train::Job& job) {
  if (job.activations == train::Precision::fp32) return 0;
  return trainer.backend().peak_flops() / train::flops_per_token(job.shape);
}

std::string share_words(double share) { return std::isnan(share) ? "-" : fixed(100 * share, 1) + " %"; }

std::string mfu_words(double rate, double most) { return most > 0 ? share_words(rate / most) : ""; }

Progress::Progress(std::string label, const train::Job& job, const train::Trainer& trainer)
    : label_(std::move(label)),
      steps_(job.schedule.steps),
      most_tokens_(most_tokens(trainer, job)),
      tensors_(std::ssize(train::parameters_of(job.shape))),
      ledger_(trainer.ledger()) {}

StatusLine::StatusLine() : terminal_(isatty(STDERR_FILENO) != 0), last_(Clock::now()) {}

void StatusLine::clear() {
  if (terminal_ && width_ > 0)
    std::cerr << '\r' << std::string(std::min(width_, columns_for_a_line()), ' ') << '\r' << std::flush;
  width_ = 0;
}

void Progress::warn(const std::string& message) {
  status_.clear();
  std::cerr << "scruple: " << message << std::endl;
}

std::string Progress::line(const train::Record& record, double seconds_left, bool is_saving) const {
  const double rate = record.tokens_per_second();
  const train::Outcome& last = record.steps.back();
  std::string text = label_ + "  step " + grouped(record.taken()) + "/" + grouped(steps_);
  if (!std::isnan(last.epoch)) text += "  epoch " + fixed(last.epoch, 2);
  text += "  loss " + fixed(last.loss, 4) + "  ";
  if (!record.validations.empty()) text += "val " + fixed(record.validations.back().second, 4) + "  ";
  text += grouped(std::llround(rate)) + " tokens/s  ";
  if (const std::string mfu = mfu_words(rate, most_tokens_); !mfu.empty()) text += "MFU " + mfu + "  ";
  text += duration(seconds_left) + " left  peak " + size_words(ledger_.peak());
  if (last.loss_scale != 1) text += "  scale " + shortest(last.loss_scale);
  if (last.skipped) text += "  " + skipped_words(last);
  if (!record.unmoved.empty() && record.unmoved.back().second.share >= kUnmovedToTell)
    text += "  unmoved " + share_words(record.unmoved.back().second.share);
  return text + save_words(record, is_saving);
}

// Of released gradients some tensors may have been stepped.
std::string Progress::skipped_words(const train::Outcome& step) const {
  if (step.outlier) return "outlier skipped";
  if (step.tensors == 0 || step.tensors == tensors_) return "skipped";
  return grouped(step.tensors) + " of " + plural(tensors_, "tensor") + " skipped";
}

bool StatusLine::is_due(bool in_any_case) {
  const auto pause = terminal_ ? std::chrono::milliseconds(100) : std::chrono::seconds(10);
  if (Clock::now() - last_ < pause && !in_any_case) return false;
  last_ = Clock::now();
  return true;
}

void StatusLine::put(std::string text) {
  if (!terminal_) {
    std::cerr << text << std::endl;
    return;
  }
  const std::size_t columns = columns_for_a_line();
  text.resize(std::min(text.size(), columns));
  width_ = std::min(width_, columns);  // the window may have become narrower
  std::cerr << '\r' << text << std::string(width_ > text.size() ? width_ - text.size() : 0, ' ')
            << std::flush;
  width_ = text.size();
}

void Progress::show(const train::Record& record, double seconds_left, bool is_saving) {
  const bool last = record.taken() == steps_;
  if (status_.is_due(last && !status_.is_terminal())) status_.put(line(record, seconds_left, is_saving));
}

void Progress::validating(std::int64_t done, std::int64_t all) {
  if (status_.is_due()) status_.put(label_ + "  validating, " + std::to_string(100 * done / all) + " %");
}

std::string duration(double seconds) {
  const std::int64_t whole = std::llround(seconds);
  char text[64];
  if (whole < 3600)
    std::snprintf(text, sizeof text, "%d:%02d", static_cast<int>(whole / 60), static_cast<int>(whole % 60));
  else
    std::snprintf(text, sizeof text, "%lld:%02d:%02d", static_cast<long long>(whole / 3600),
                  static_cast<int>(whole / 60 % 60), static_cast<int>(whole % 60));
  return text;
}

Interrupts::Interrupts() {
  interrupted = 0;
  for (std::size_t i = 0; i < std::size(kSignals); ++i) {
    before_[i] = std::signal(kSignals[i], note_interrupt);
    if (before_[i] == SIG_IGN) std::signal(kSignals[i], SIG_IGN);
  }
}

Interrupts::~Interrupts() {
  for (std::size_t i = 0; i < std::size(kSignals); ++i) std::signal(kSignals[i], before_[i]);
}

int Interrupts::signal() { return interrupted; }

const char* Interrupts::name() {
  return interrupted == SIGINT ? "Ctrl-C (SIGINT)" : interrupted == SIGTERM ? "SIGTERM" : "SIGHUP";
}

}  // namespace scruple::cli
