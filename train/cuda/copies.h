// Copies of planes in pinned host memory, on a stream of their own. A tensor's step waits for its copy, and for no other.
#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "train/cuda/device.h"
#include "train/pass/backend.h"

namespace scruple::train::cuda {

class PinnedCopies final : public Copies {
 public:
  // Of what is computed on this stream.
  explicit PinnedCopies(const Stream& stream) : stream_(stream) {}
  Memory& memory() override { return memory_; }
  void take(std::span<const Plane> planes) override;
  void wait() override;
  void before_step(std::size_t tensor) override;
  void before_steps() override;

 private:
  const Stream& stream_;
  PinnedMemory memory_;
  Stream copies_;
  Event reached_, all_;
  std::vector<Event> copied_;    // of each tensor
  std::vector<bool> is_waited_;  // of each tensor: by what is queued on stream_
  bool all_waited_ = true;
};

}  // namespace scruple::train::cuda
