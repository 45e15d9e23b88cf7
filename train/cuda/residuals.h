// The residual stream before each layer and after the last. All of it is in device memory; or, offloaded,
// three buffers are, and the rest is in pinned host memory. Copies run beside the layers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "train/cuda/device.h"
#include "train/pass/ledger.h"

namespace scruple::train::cuda {

class Residuals {
 public:
  // `count` of `bytes` each.
  Residuals(std::int64_t count, std::int64_t bytes, bool offloads, const Stream& stream, Memory& memory,
            Ledger& ledger);

  // Of layer 0, 1...: the one that a pass is at, the one before, or the one after.
  void* at(std::int64_t index) const {
    return buffers_[static_cast<std::size_t>(index) % buffers_.size()].as<void>();
  }
  void start();  // of a pass, before anything is written
  // Forward: what is queued from here on writes number `index`; all before index - 1 have been read.
  void write(std::int64_t index);
  // Backward, from the last to the first: what is queued from here on reads number `index`, and none above it.
  void read(std::int64_t index);

 private:
  static constexpr std::int64_t kBuffers = 3;
  bool offloads() const { return host_.bytes() > 0; }
  bool leaves(std::int64_t index) const { return index < count_ - kBuffers; }  // the last ones stay
  std::byte* host(std::int64_t index) const { return host_.as<std::byte>() + index * bytes_; }
  cudaEvent_t copied(std::int64_t index) const { return copied_[static_cast<std::size_t>(index)].get(); }
  void wait_for(const Stream& waits, const Stream& queued);  // for all that is queued there so far
  void copy(std::int64_t index, bool to_host);

  const std::int64_t count_, bytes_;
  const Stream& stream_;
  std::vector<Block> buffers_;
  // Only where they are offloaded.
  OffloadMemory pinned_;
  Block host_;
  Stream copies_;  // waits for its work when it goes, before the memory does
  Event reached_;
  std::vector<Event> copied_;  // of each that leaves, to or from the host
};

}  // namespace scruple::train::cuda
