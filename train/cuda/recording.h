// The work of a micro-batch as CUDA graphs, recorded once and launched again: the host then queues a few graphs in place
// of hundreds of kernels. Gradients are handed to the sink between two graphs, since a sink decides on the host.
#pragma once

#include <map>
#include <vector>

#include "train/cuda/device.h"
#include "train/pass/backend.h"

namespace scruple::train::cuda {

// How a sink takes pieces: Sink::add, or Sink::measure.
using SinkCall = void (Sink::*)(std::span<const scruple_piece>);

class Recording {
 public:
  // `copies`: of planes that a sink steps as soon as it has a gradient; nullptr: it waits for Sink::end().
  Recording(const Stream& stream, Copies* copies) : stream_(stream), copies_(copies) { choose(0); }
  ~Recording() {
    for (auto& [shape, parts] : recorded_) parts_ = &parts, clear();
  }
  Recording(const Recording&) = delete;
  Recording& operator=(const Recording&) = delete;

  // There is one recording for each shape of work; the others below are about the one that is chosen.
  void choose(std::int64_t shape) { parts_ = &recorded_[shape]; }
  // What is queued from begin() to finish() is recorded, and runs as well.
  void begin();
  bool is_running() const { return running_; }
  void hand(Sink& sink, SinkCall how, std::span<const scruple_piece> pieces);
  void finish();
  void cancel() noexcept;  // after an exception: nothing is recorded
  void clear() noexcept;

  // Pieces to the sink, while nothing is recorded: what it steps waits for copies.
  void deliver(Sink& sink, SinkCall how, std::span<const scruple_piece> pieces) const;
  bool is_there() const { return !running_ && !parts_->empty(); }
  void replay(Sink& sink) const;

 private:
  // A graph, and what goes to the sink after it; nothing after the last.
  struct Part {
    cudaGraphExec_t graph;
    SinkCall how;
    std::vector<scruple_piece> pieces;
  };
  void begin_part();
  void end_part(SinkCall how, std::span<const scruple_piece> pieces);

  const Stream& stream_;
  Copies* const copies_;
  bool running_ = false;
  std::map<std::int64_t, std::vector<Part>> recorded_;
  std::vector<Part>* parts_ = nullptr;
};

}  // namespace scruple::train::cuda
