#include "train/cuda/copies.h"

#include <algorithm>
#include <future>
#include <thread>

namespace scruple::train::cuda {
namespace {

constexpr const char* kDoing = "copying a checkpoint from the GPU";

}  // namespace

// Pinning touches new memory page by page on one thread, and other threads' calls of the driver wait for it. So threads
// touch all of it first, in huge pages where the system has them, and pieces are pinned one by one: training goes on between
// them. Where there is no thread nothing is touched first.
void* PinnedMemory::take(std::int64_t bytes) {
  constexpr std::int64_t kPage = 4096, kMostThreads = 8, kWorthAThread = 64 << 20;
  auto* const memory = static_cast<char*>(host_memory().take(bytes));
  if (memory == nullptr) return nullptr;
  const std::int64_t cores = std::max(std::thread::hardware_concurrency(), 1u);
  const std::int64_t share =
      std::max((bytes + std::min(cores, kMostThreads) - 1) / std::min(cores, kMostThreads), kWorthAThread);
  std::vector<std::future<void>> touching;
  for (std::int64_t first = 0; first < bytes; first += share)
    touching.push_back(std::async(std::launch::async | std::launch::deferred, [=] {
      for (std::int64_t i = first; i < std::min(bytes, first + share); i += kPage)
        static_cast<volatile char*>(memory)[i] = 0;
    }));
  touching.clear();  // waits for those that run
  std::vector<void*>& pieces = pinned_[memory];
  for (std::int64_t first = 0, size = 0; first < bytes; first += size) {
    char* const piece = memory + first;
    size = std::min(bytes - first, rest_of_piece(piece));
    if (cudaHostRegister(piece, static_cast<std::size_t>(size), cudaHostRegisterDefault) != cudaSuccess) {
      cudaGetLastError();
      give_back(memory);
      return nullptr;
    }
    pieces.push_back(piece);
  }
  return memory;
}

void PinnedMemory::give_back(void* memory) noexcept {
  for (void* const piece : pinned_[memory]) cudaHostUnregister(piece);
  pinned_.erase(memory);
  host_memory().give_back(memory);
}

void PinnedCopies::queue(const Plane& plane) {
  for (std::int64_t first = 0, size = 0; first < plane.bytes; first += size) {
    auto* const to = static_cast<std::byte*>(plane.to) + first;
    size = std::min(plane.bytes - first, PinnedMemory::rest_of_piece(to));
    check(cudaMemcpyAsync(to, static_cast<const std::byte*>(plane.from) + first,
                          static_cast<std::size_t>(size), cudaMemcpyDeviceToHost, copies_),
          kDoing);
  }
}

void PinnedCopies::take(std::span<const Plane> planes) {
  if (reached_ == nullptr) {
    reached_ = new_event();
    all_ = new_event(cudaEventDisableTiming | cudaEventBlockingSync);  // a thread that waits for it sleeps
  }
  std::size_t tensors = 0;
  for (const Plane& plane : planes) tensors = std::max(tensors, plane.tensor + 1);
  while (copied_.size() < tensors) copied_.push_back(new_event());
  check(cudaEventRecord(reached_.get(), stream_), kDoing);
  check(cudaStreamWaitEvent(copies_, reached_.get()), kDoing);
  is_waited_.assign(tensors, false);
  all_waited_ = false;
  try {
    for (std::size_t i = 0; i < planes.size(); ++i) {
      const Plane& plane = planes[i];
      queue(plane);
      if (i + 1 == planes.size() || planes[i + 1].tensor != plane.tensor)
        check(cudaEventRecord(copied_[plane.tensor].get(), copies_), kDoing);
    }
    check(cudaEventRecord(all_.get(), copies_), kDoing);
  } catch (...) {
    cudaStreamSynchronize(copies_);
    all_waited_ = true;
    throw;
  }
}

void PinnedCopies::wait() { check(cudaEventSynchronize(all_.get()), kDoing); }

void PinnedCopies::before_step(std::size_t tensor) {
  if (all_waited_ || tensor >= is_waited_.size() || is_waited_[tensor]) return;
  check(cudaStreamWaitEvent(stream_, copied_[tensor].get()), kDoing);
  is_waited_[tensor] = true;
}

void PinnedCopies::before_steps() {
  if (all_waited_) return;
  check(cudaStreamWaitEvent(stream_, all_.get()), kDoing);
  all_waited_ = true;
}

}  // namespace scruple::train::cuda
