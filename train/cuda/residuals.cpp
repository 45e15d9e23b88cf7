#include "train/cuda/residuals.h"

#include <algorithm>

namespace scruple::train::cuda {

Residuals::Residuals(std::int64_t count, std::int64_t bytes, bool offloads, const Stream& stream,
                     Memory& memory, Ledger& ledger)
    : count_(count), bytes_(bytes), stream_(stream) {
  for (std::int64_t i = 0; i < (offloads ? std::min(kBuffers, count) : count); ++i)
    buffers_.emplace_back(ledger, "activations", bytes, memory);
  if (!offloads || count <= kBuffers) return;
  host_ = Block(ledger.host(), "activations", (count - kBuffers) * bytes, pinned_);
  if (ledger.only_counts()) return;
  reached_ = new_event();
  for (std::int64_t i = 0; leaves(i); ++i) copied_.push_back(new_event());
}

// A pass that an exception ended may have left copies behind.
void Residuals::start() {
  if (offloads()) wait_for(stream_, copies_);
}

void Residuals::wait_for(const Stream& waits, const Stream& queued) {
  check(cudaEventRecord(reached_.get(), queued), "offloading");
  check(cudaStreamWaitEvent(waits, reached_.get()), "offloading");
}

void Residuals::copy(std::int64_t index, bool to_host) {
  wait_for(copies_, stream_);
  void* const from = to_host ? at(index) : host(index);
  check(cudaMemcpyAsync(to_host ? host(index) : at(index), from, static_cast<std::size_t>(bytes_),
                        cudaMemcpyDefault, copies_),
        "offloading");
  check(cudaEventRecord(copied(index), copies_), "offloading");
}

void Residuals::write(std::int64_t index) {
  if (!offloads()) return;
  if (index > 0 && leaves(index - 1)) copy(index - 1, true);
  if (index >= kBuffers)  // its buffer holds another one, until that is copied
    check(cudaStreamWaitEvent(stream_, copied(index - kBuffers)), "offloading");
}

void Residuals::read(std::int64_t index) {
  if (!offloads()) return;
  // The last ones are still there; the others come one layer before they are needed.
  const std::int64_t next = index - 1;
  if (leaves(index)) check(cudaStreamWaitEvent(stream_, copied(index)), "offloading");
  if (next >= 0 && leaves(next)) copy(next, false);
}

}  // namespace scruple::train::cuda
