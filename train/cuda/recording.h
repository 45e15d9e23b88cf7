// The work of a micro-batch as CUDA graphs, recorded once and launched again: the host then queues a few graphs in place
// of hundreds of kernels. Gradients are handed to the sink between two graphs, since a sink decides on the host.
#pragma once

#include <functional>
#include <vector>

#include "train/backend.h"
#include "train/cuda/device.h"

namespace scruple::train::cuda {

// What the host does between two graphs; once with the sink of the pass that is recorded, then with those of its replays.
using Act = std::function<void(Sink&)>;

class Recording {
 public:
  explicit Recording(const Stream& stream) : stream_(stream) {}
  ~Recording() { clear(); }
  Recording(const Recording&) = delete;
  Recording& operator=(const Recording&) = delete;

  // What is queued from begin() to finish() is recorded, and runs as well.
  void begin();
  void between(Sink& sink, const Act& act);  // where nothing is recorded: at once
  void finish();
  void cancel() noexcept;  // after an exception: nothing is recorded
  void clear() noexcept;

  bool is_there() const { return !running_ && !parts_.empty(); }
  void replay(Sink& sink) const;

 private:
  // A graph, and what is done after it; nothing after the last.
  struct Part {
    cudaGraphExec_t graph;
    Act act;
  };
  void begin_part();
  void end_part(Act act);

  const Stream& stream_;
  bool running_ = false;
  std::vector<Part> parts_;
};

}  // namespace scruple::train::cuda
