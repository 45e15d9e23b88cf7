#include "train/cuda/copies.h"

#include <algorithm>

namespace scruple::train::cuda {
namespace {

constexpr const char* kDoing = "copying a checkpoint from the GPU";

// A thread that waits for it sleeps.
Event new_patient_event() {
  cudaEvent_t made = nullptr;
  check(cudaEventCreateWithFlags(&made, cudaEventDisableTiming | cudaEventBlockingSync), "making an event");
  return Event(made);
}

}  // namespace

void PinnedCopies::take(std::span<const Plane> planes) {
  if (reached_ == nullptr) reached_ = new_event(), all_ = new_patient_event();
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
      check(cudaMemcpyAsync(plane.to, plane.from, static_cast<std::size_t>(plane.bytes),
                            cudaMemcpyDeviceToHost, copies_),
            kDoing);
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
