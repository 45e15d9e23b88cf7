// The GPU that a model is trained on: errors, the stream that all work is queued on, and memory that comes and goes with
// it.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <memory>
#include <string>

#include "train/pass/ledger.h"

namespace scruple::train::cuda {

// Throws std::runtime_error with CUDA's words; std::bad_alloc where it has no more memory.
void check(cudaError_t error, const char* doing);

// Made when it is first used: what only counts needs no GPU.
class Stream {
 public:
  Stream() = default;
  ~Stream();
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;
  operator cudaStream_t() const;
  void wait() const;

 private:
  mutable cudaStream_t stream_ = nullptr;
};

// How far a stream has got.
struct DestroyEvent {
  void operator()(cudaEvent_t event) const { cudaEventDestroy(event); }
};
using Event = std::unique_ptr<CUevent_st, DestroyEvent>;
Event new_event(unsigned flags = cudaEventDisableTiming);

// Device memory, taken and given back in the stream's order: neither waits.
class DeviceMemory final : public Memory {
 public:
  explicit DeviceMemory(const Stream& stream) : stream_(stream) {}
  void* take(std::int64_t bytes) override;
  void give_back(void* memory) noexcept override;
  bool is_host() const override { return false; }
  void read(void* to_host, const void* from, std::int64_t bytes) override;
  void write(void* to, const void* from_host, std::int64_t bytes) override;

 private:
  const Stream& stream_;
  bool pooled_ = false;
};

// Host memory that copies run from and to beside other work. Whoever owns it waits for them before it goes.
struct FreePinned {
  void operator()(void* memory) const { cudaFreeHost(memory); }
};
template <class T>
using Pinned = std::unique_ptr<T[], FreePinned>;
void* take_pinned(std::int64_t bytes);  // throws std::runtime_error
template <class T>
Pinned<T> pinned(std::int64_t count) {
  return Pinned<T>(static_cast<T*>(take_pinned(count * std::int64_t{sizeof(T)})));
}

// For what comes to the GPU by copies: moments, residuals.
class OffloadMemory final : public Memory {
 public:
  void* take(std::int64_t bytes) override;
  void give_back(void* memory) noexcept override { cudaFreeHost(memory); }
};

std::string device_name();
std::int64_t free_device_bytes();  // less what runs take uncounted
// Of 16-bit products with fp32 sums and no sparsity, by the maker's data sheets; 0: not known here.
double peak_flops(const std::string& name);

}  // namespace scruple::train::cuda
