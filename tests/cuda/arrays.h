// Numbers of any type in a GPU's memory, between guard bytes: for tests of the trainer's kernels.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <vector>

#include "train/pass/backend.h"

namespace scruple::train::cuda {

using Bytes = std::vector<unsigned char>;
using Doubles = std::vector<double>;

inline constexpr Precision kTypes[] = {Precision::fp32, Precision::bf16, Precision::fp16};

inline void must(cudaError_t error) { ASSERT_EQ(error, cudaSuccess) << cudaGetErrorString(error); }

class NeedsGpu : public testing::Test {
 protected:
  void SetUp() override {
    int count = 0;
    const bool none = cudaGetDeviceCount(&count) != cudaSuccess || count == 0;
    cudaGetLastError();
    if (none) GTEST_SKIP() << "no GPU";
  }
};

// Number i of an array of this type.
template <class T>
void write(Bytes& to, std::size_t i, T value) {
  std::memcpy(to.data() + i * sizeof(T), &value, sizeof(T));
}
template <class T>
T read(const Bytes& from, std::size_t i) {
  T value;
  std::memcpy(&value, from.data() + i * sizeof(T), sizeof(T));
  return value;
}
inline void set(Bytes& to, Precision type, std::size_t i, double value) {
  switch (type) {
    case Precision::fp32: return write(to, i, static_cast<float>(value));
    case Precision::bf16: return write(to, i, __float2bfloat16_rn(static_cast<float>(value)));
    case Precision::fp16: return write(to, i, __float2half_rn(static_cast<float>(value)));
  }
}
inline double get(const Bytes& from, Precision type, std::size_t i) {
  switch (type) {
    case Precision::fp32: return read<float>(from, i);
    case Precision::bf16: return __bfloat162float(read<__nv_bfloat16>(from, i));
    default: return __half2float(read<__half>(from, i));
  }
}

// Bytes, `shift` of them past an alignment of 256. At first they and their guards are `fill`.
class Array {
 public:
  explicit Array(std::size_t bytes, int fill = 0xa5, std::size_t shift = 0)
      : fill_(fill), begin_(kGuard + shift), end_(begin_ + bytes) {
    must(cudaMalloc(&memory_, end_ + kGuard));
    must(cudaMemset(memory_, fill, end_ + kGuard));
  }
  explicit Array(const Bytes& from) : Array(from.size(), 0xff) { set_bytes(from); }
  Array(const Array&) = delete;
  ~Array() { cudaFree(memory_); }

  void* data() const { return static_cast<unsigned char*>(memory_) + begin_; }
  void set_bytes(const Bytes& bytes) {
    if (!bytes.empty()) must(cudaMemcpy(data(), bytes.data(), bytes.size(), cudaMemcpyHostToDevice));
  }
  // What it holds; nothing was written beside it.
  Bytes bytes() const {
    Bytes all(end_ + kGuard);
    must(cudaMemcpy(all.data(), memory_, all.size(), cudaMemcpyDeviceToHost));
    for (std::size_t i = 0; i < all.size(); ++i)
      if ((i < begin_ || i >= end_) && all[i] != fill_) {
        ADD_FAILURE() << "written beside an array of " << end_ - begin_ << " bytes";
        break;
      }
    return {all.begin() + begin_, all.begin() + end_};
  }

 private:
  static constexpr std::size_t kGuard = 256;
  int fill_;
  std::size_t begin_, end_;
  void* memory_ = nullptr;
};

}  // namespace scruple::train::cuda
