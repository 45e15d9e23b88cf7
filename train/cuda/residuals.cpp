#include "train/cuda/residuals.h"

#include <algorithm>

namespace scruple::train::cuda {
namespace {

cudaEvent_t new_event() {
  cudaEvent_t made = nullptr;
  check(cudaEventCreateWithFlags(&made, cudaEventDisableTiming), "making an event");
  return made;
}

}  // namespace

Residuals::Residuals(std::int64_t count, std::int64_t bytes, bool offloads, const Stream& stream,
                     Memory& memory, Ledger& ledger)
    : count_(count), bytes_(bytes), stream_(stream) {
  for (std::int64_t i = 0; i < (offloads ? std::min(kBuffers, count) : count); ++i)
    buffers_.emplace_back(ledger, "activations", bytes, memory);
  if (!offloads || count <= kBuffers || ledger.only_counts()) return;
  host_ = pinned<std::byte>(count * bytes);
  reached_ = new_event();
  for (std::int64_t i = 0; i < count; ++i) copied_.push_back(new_event());
}

Residuals::~Residuals() {
  if (offloads()) cudaStreamSynchronize(copies_);
  for (const cudaEvent_t event : copied_) cudaEventDestroy(event);
  if (reached_ != nullptr) cudaEventDestroy(reached_);
}

// After all that the passes have queued so far.
void Residuals::copy(std::int64_t index, bool to_host) {
  check(cudaEventRecord(reached_, stream_), "offloading");
  check(cudaStreamWaitEvent(copies_, reached_), "offloading");
  void* const from = to_host ? at(index) : host(index);
  check(cudaMemcpyAsync(to_host ? host(index) : at(index), from, static_cast<std::size_t>(bytes_),
                        cudaMemcpyDefault, copies_),
        "offloading");
  check(cudaEventRecord(copied(index), copies_), "offloading");
}

void Residuals::write(std::int64_t index) {
  if (!offloads()) return;
  if (index > 0) copy(index - 1, true);
  if (index >= kBuffers)  // its buffer holds another one, until that is copied
    check(cudaStreamWaitEvent(stream_, copied(index - kBuffers)), "offloading");
}

void Residuals::read(std::int64_t index) {
  if (!offloads()) return;
  // The last ones are still there; the others come one layer before they are needed.
  const std::int64_t next = index - 1;
  if (index <= count_ - 1 - kBuffers) check(cudaStreamWaitEvent(stream_, copied(index)), "offloading");
  if (next >= 0 && next <= count_ - 1 - kBuffers) copy(next, false);
}

}  // namespace scruple::train::cuda
