// A second stream: what the engine queues there runs beside the passes. A step moves bytes and leaves the tensor cores
// alone, so it can hide under products.
#pragma once

#include <functional>

#include "train/backend.h"
#include "train/cuda/device.h"

namespace scruple::train::cuda {

class Beside {
 public:
  // Of an engine whose stream is `stream`. nullptr: nothing runs beside it, all is in the stream's order.
  Beside(const Stream& stream, Engine* engine);
  ~Beside();
  Beside(const Beside&) = delete;
  Beside& operator=(const Beside&) = delete;
  bool is_there() const { return engine_ != nullptr; }

  // What `queue` has the engine do comes after all that the stream was given so far, and after what ran beside it before.
  // The stream must not be recorded.
  void run(const std::function<void()>& queue);
  // What the stream is given from here on comes after all that ran beside it. The same: not while it is recorded.
  void join() const;

 private:
  void come_back();

  const Stream& stream_;
  Engine* const engine_;
  Stream second_;
  cudaEvent_t reached_ = nullptr, done_ = nullptr;  // by the stream; on the second
};

}  // namespace scruple::train::cuda
