// Copies of planes in pinned host memory, on a stream of their own. A tensor's step waits for its copy, and for no other.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <vector>

#include "train/cuda/device.h"
#include "train/pass/backend.h"

namespace scruple::train::cuda {

// Host memory in large blocks that copies run to beside other work. It is pinned in pieces, which end where an address is a
// multiple of kPiece: a copy lies in one of them.
class PinnedMemory final : public Memory {
 public:
  static constexpr std::int64_t kPiece = 256 << 20;
  // Bytes from there to the end of its piece.
  static std::int64_t rest_of_piece(const void* at) {
    return kPiece - static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(at) % kPiece);
  }
  void* take(std::int64_t bytes) override;
  void give_back(void* memory) noexcept override;

 private:
  std::map<void*, std::vector<void*>> pinned_;  // pieces of each block
};

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
  void queue(const Plane& plane);

  const Stream& stream_;
  PinnedMemory memory_;
  Stream copies_;
  Event reached_, all_;
  std::vector<Event> copied_;    // of each tensor
  std::vector<bool> is_waited_;  // of each tensor: by what is queued on stream_
  bool all_waited_ = true;
};

}  // namespace scruple::train::cuda
