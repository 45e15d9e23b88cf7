#include "train/cuda/device.h"

#include <algorithm>
#include <cctype>
#include <cstring>
#include <new>
#include <stdexcept>
#include <utility>

namespace scruple::train::cuda {
namespace {

// What the ledger does not count: cuBLAS's kernels, graphs, the engine's tables.
constexpr std::int64_t kUncounted = 256 << 20;

// Not of any work: this machine has no GPU that this build could use, or its driver is not the right one.
bool is_of_machine(cudaError_t error) {
  switch (error) {
    case cudaErrorNoDevice:
    case cudaErrorInvalidDevice:
    case cudaErrorDevicesUnavailable:
    case cudaErrorNoKernelImageForDevice:
    case cudaErrorInitializationError:
    case cudaErrorInsufficientDriver:
    case cudaErrorCallRequiresNewerDriver:
    case cudaErrorUnsupportedPtxVersion:
    case cudaErrorStubLibrary:
    case cudaErrorCompatNotSupportedOnDevice:
    case cudaErrorSystemDriverMismatch:
    case cudaErrorSystemNotReady: return true;
    default: return false;
  }
}

}  // namespace

void* take_pinned(std::int64_t bytes) {
  void* memory = nullptr;
  const cudaError_t error = cudaMallocHost(&memory, static_cast<std::size_t>(bytes));
  if (error == cudaSuccess) return memory;
  cudaGetLastError();
  throw std::runtime_error("the host has no " + std::to_string((bytes >> 20) + 1) +
                           " MiB of memory that the GPU can copy from (" + cudaGetErrorString(error) +
                           "); close what else runs here, and leave --offload out if it was asked for");
}

void check(cudaError_t error, const char* doing) {
  if (error == cudaSuccess) return;
  cudaGetLastError();  // so that the next call does not report it again
  if (error == cudaErrorMemoryAllocation) throw std::bad_alloc();
  throw std::runtime_error(std::string(doing) + ": CUDA says " + cudaGetErrorName(error) + ", " +
                           cudaGetErrorString(error) +
                           (is_of_machine(error) ? "; look at the driver and the GPU, or use --device cpu"
                                                 : "; it may come from work queued earlier on this GPU"));
}

Stream::~Stream() {
  if (stream_ == nullptr) return;
  cudaStreamSynchronize(stream_);
  cudaStreamDestroy(stream_);
}
Stream::operator cudaStream_t() const {
  if (stream_ == nullptr)
    check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "making a stream");
  return stream_;
}
void Stream::wait() const { check(cudaStreamSynchronize(*this), "waiting for the GPU"); }

Event new_event(unsigned flags) {
  cudaEvent_t made = nullptr;
  check(cudaEventCreateWithFlags(&made, flags), "making an event");
  return Event(made);
}

namespace {

cudaMemPool_t pool() {
  int device = 0;
  cudaMemPool_t found = nullptr;
  check(cudaGetDevice(&device), "reading the current device");
  check(cudaDeviceGetDefaultMemPool(&found, device), "finding the memory pool");
  return found;
}

// What is given back stays with the process: the next step takes it again.
void keep_pool() {
  std::uint64_t keep = ~std::uint64_t{0};
  check(cudaMemPoolSetAttribute(pool(), cudaMemPoolAttrReleaseThreshold, &keep),
        "setting up the memory pool");
}

std::int64_t pool_bytes(cudaMemPoolAttr what) {
  std::uint64_t bytes = 0;
  check(cudaMemPoolGetAttribute(pool(), what, &bytes), "asking the memory pool");
  return static_cast<std::int64_t>(bytes);
}

}  // namespace

void* DeviceMemory::take(std::int64_t bytes) {
  if (!std::exchange(pooled_, true)) keep_pool();
  void* memory = nullptr;
  const auto size = static_cast<std::size_t>(bytes);
  const cudaError_t error = cudaMallocAsync(&memory, size, stream_);
  if (error == cudaErrorMemoryAllocation) {
    cudaGetLastError();
    return nullptr;
  }
  check(error, "taking device memory");
  if (const cudaError_t cleared = cudaMemsetAsync(memory, 0, size, stream_); cleared != cudaSuccess) {
    give_back(memory);
    check(cleared, "clearing device memory");
  }
  return memory;
}

void DeviceMemory::give_back(void* memory) noexcept { cudaFreeAsync(memory, stream_); }

void DeviceMemory::read(void* to_host, const void* from, std::int64_t bytes) {
  check(cudaMemcpyAsync(to_host, from, static_cast<std::size_t>(bytes), cudaMemcpyDefault, stream_),
        "copying from the GPU");
  stream_.wait();
}

void DeviceMemory::write(void* to, const void* from_host, std::int64_t bytes) {
  check(cudaMemcpyAsync(to, from_host, static_cast<std::size_t>(bytes), cudaMemcpyDefault, stream_),
        "copying to the GPU");
  stream_.wait();
}

void* OffloadMemory::take(std::int64_t bytes) {
  return std::memset(take_pinned(bytes), 0, static_cast<std::size_t>(bytes));
}

std::string device_name() {
  int device = 0;
  cudaDeviceProp properties;
  check(cudaGetDevice(&device), "reading the current device");
  check(cudaGetDeviceProperties(&properties, device), "reading the device's name");
  return properties.name;
}

std::int64_t free_device_bytes() {
  std::size_t free = 0, total = 0;
  check(cudaMemGetInfo(&free, &total), "asking for free device memory");
  const std::int64_t kept =
      pool_bytes(cudaMemPoolAttrReservedMemCurrent) - pool_bytes(cudaMemPoolAttrUsedMemCurrent);
  return std::max<std::int64_t>(static_cast<std::int64_t>(free) + kept - kUncounted, 0);
}

double peak_flops(const std::string& name) {
  struct Peak {
    const char* name;
    double tera;
  };
  constexpr Peak kPeaks[] = {{"B200", 2250},    {"H200 NVL", 835},   {"H200", 989},       {"H100 PCIe", 756},
                             {"H100 NVL", 835}, {"H100", 989},       {"GH200", 989},      {"A100", 312},
                             {"L40S", 362},     {"RTX 5090", 209.5}, {"RTX 4090", 165.2}, {"RTX 3090", 71}};
  const auto ends_word = [&](std::size_t at) { return at >= name.size() || std::isalnum(name[at]) == 0; };
  for (const Peak& peak : kPeaks) {
    const std::size_t at = name.find(peak.name);
    if (at == std::string::npos || !ends_word(at + std::string(peak.name).size())) continue;
    if (at == 0 || ends_word(at - 1)) return peak.tera * 1e12;
  }
  return 0;
}

}  // namespace scruple::train::cuda
