#include "train/cuda/device.h"

#include <new>
#include <stdexcept>
#include <utility>

namespace scruple::train::cuda {

void check(cudaError_t error, const char* doing) {
  if (error == cudaSuccess) return;
  cudaGetLastError();  // so that the next call does not report it again
  if (error == cudaErrorMemoryAllocation) throw std::bad_alloc();
  throw std::runtime_error(std::string(doing) + ": CUDA says " + cudaGetErrorName(error) + ", " +
                           cudaGetErrorString(error) + "; it may come from work queued earlier on this GPU");
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

namespace {

// What is given back stays with the process: the next step takes it again.
void keep_pool() {
  int device = 0;
  cudaMemPool_t pool = nullptr;
  check(cudaGetDevice(&device), "reading the current device");
  check(cudaDeviceGetDefaultMemPool(&pool, device), "finding the memory pool");
  std::uint64_t keep = ~std::uint64_t{0};
  check(cudaMemPoolSetAttribute(pool, cudaMemPoolAttrReleaseThreshold, &keep), "setting up the memory pool");
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
  check(cudaMemsetAsync(memory, 0, size, stream_), "clearing device memory");
  return memory;
}

void DeviceMemory::give_back(void* memory) noexcept { cudaFreeAsync(memory, stream_); }

void DeviceMemory::read(void* to_host, const void* from, std::int64_t bytes) {
  check(cudaMemcpyAsync(to_host, from, static_cast<std::size_t>(bytes), cudaMemcpyDeviceToHost, stream_),
        "copying from the GPU");
  stream_.wait();
}

void DeviceMemory::write(void* to, const void* from_host, std::int64_t bytes) {
  check(cudaMemcpyAsync(to, from_host, static_cast<std::size_t>(bytes), cudaMemcpyHostToDevice, stream_),
        "copying to the GPU");
  stream_.wait();
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
  return static_cast<std::int64_t>(free);
}

double peak_flops(const std::string& name) {
  struct Peak {
    const char* name;
    double tera;
  };
  constexpr Peak kPeaks[] = {{"B200", 2250},      {"H200", 989},       {"H100 PCIe", 756}, {"H100 NVL", 835},
                             {"H100", 989},       {"GH200", 989},      {"A100", 312},      {"L40S", 362},
                             {"RTX 5090", 209.5}, {"RTX 4090", 165.2}, {"RTX 3090", 71}};
  for (const Peak& peak : kPeaks)
    if (name.find(peak.name) != std::string::npos) return peak.tera * 1e12;
  return 0;
}

}  // namespace scruple::train::cuda
