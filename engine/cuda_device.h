// CUDA's runtime as the engine uses it: errors as Failures, the current device, memory that grows.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <vector>

#include "engine/failure.h"
#include "formats/codec.h"

namespace scruple {

inline void check(cudaError_t error, const char* doing) {
  if (error == cudaSuccess) return;
  cudaGetLastError();  // so that the next call does not report it again
  const bool no_memory = error == cudaErrorMemoryAllocation;
  fail(no_memory ? SCRUPLE_OUT_OF_MEMORY : SCRUPLE_DEVICE, doing, ": CUDA says ", cudaGetErrorName(error),
       ", ", cudaGetErrorString(error),
       no_memory ? "" : "; it may come from work queued earlier on this device");
}

inline void* allocate(i64 bytes) {
  void* memory = nullptr;
  const cudaError_t error = cudaMalloc(&memory, static_cast<std::size_t>(std::max<i64>(bytes, 1)));
  if (error == cudaErrorMemoryAllocation) {
    cudaGetLastError();
    std::size_t free = 0, total = 0;
    cudaMemGetInfo(&free, &total);
    fail(SCRUPLE_OUT_OF_MEMORY, "out of device memory: ", bytes, " bytes were asked for, ", free, " of ",
         total, " are free");
  }
  check(error, "allocating device memory");
  return memory;
}

inline void* allocate_pinned(i64 bytes) {
  void* memory = nullptr;
  const auto size = static_cast<std::size_t>(std::max<i64>(bytes, 1));
  const cudaError_t error = cudaHostAlloc(&memory, size, cudaHostAllocPortable);
  if (error == cudaErrorMemoryAllocation) {
    cudaGetLastError();
    fail(SCRUPLE_OUT_OF_MEMORY, "the host has no ", bytes,
         " bytes that can be pinned for copies to the device; a container or 'ulimit -l' may allow fewer "
         "than there are");
  }
  check(error, "allocating pinned host memory");
  std::memset(memory, 0, size);
  return memory;
}

inline int attribute(cudaDeviceAttr what, int device) {
  int value = 0;
  check(cudaDeviceGetAttribute(&value, what, device), "reading a device attribute");
  return value;
}

// The engine's device is current while it lives, the caller's again afterwards.
class CurrentDevice {
 public:
  explicit CurrentDevice(int device) {
    check(cudaGetDevice(&before_), "reading the current device");
    if (device != before_) check(cudaSetDevice(device), "choosing a device");
    changed_ = device != before_;
  }
  ~CurrentDevice() {
    if (changed_) cudaSetDevice(before_);
  }
  CurrentDevice(const CurrentDevice&) = delete;
  CurrentDevice& operator=(const CurrentDevice&) = delete;

 private:
  int before_ = 0;
  bool changed_ = false;
};

// Device memory that grows. Older, smaller pieces are kept: a captured graph may still use them.
class DeviceBuffer {
 public:
  DeviceBuffer() = default;
  DeviceBuffer(const DeviceBuffer&) = delete;
  DeviceBuffer& operator=(const DeviceBuffer&) = delete;
  ~DeviceBuffer() {
    for (void* piece : pieces_) cudaFree(piece);  // waits for what still uses it
  }
  i64 size() const { return size_; }
  template <class T>
  T* at(i64 offset) const {
    return reinterpret_cast<T*>(static_cast<u8*>(pieces_.back()) + offset);
  }
  void reserve(i64 bytes, bool capturing) {
    if (bytes <= size_) return;
    if (capturing)
      fail(SCRUPLE_INVALID, "this table needs ", bytes, " bytes of the engine's device memory and it has ",
           size_,
           ", which cannot grow while a stream is captured; make the same call once before the capture");
    const i64 wanted = static_cast<i64>(std::bit_ceil(static_cast<std::size_t>(bytes)));
    pieces_.reserve(pieces_.size() + 1);  // so that nothing can fail once the memory is there
    pieces_.push_back(allocate(wanted));
    size_ = wanted;
  }

 private:
  std::vector<void*> pieces_;
  i64 size_ = 0;
};

}  // namespace scruple
