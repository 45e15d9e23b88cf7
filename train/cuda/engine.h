// The library's engine on the stream of a GPU's work.
#pragma once

#include <optional>

#include "include/scruple/scruple.hpp"
#include "train/cuda/device.h"

namespace scruple::train::cuda {

// Made when it is first used, as the stream; where there is no GPU it says why.
class StreamEngine {
 public:
  explicit StreamEngine(const Stream& stream) : stream_(stream) {}
  Engine& operator*() const {
    if (!engine_) {
      engine_.emplace("cuda");
      engine_->set_stream(stream_);
    }
    return *engine_;
  }

 private:
  const Stream& stream_;
  mutable std::optional<Engine> engine_;
};

}  // namespace scruple::train::cuda
