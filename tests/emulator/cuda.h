// What the CUDA engine's kernels need in order to be compiled as C++ and run by tests/emulator/cuda.cpp: a
// thread is a fiber, and a warp's fibers meet where a GPU's threads exchange values. Slow, and without the
// GPU's own arithmetic (tests/fast_math_test.cu has that) and its freedom in the order of warps, but every
// address, branch and shuffle is the kernel's.
#pragma once

// The libraries first: some use __noinline__ as the name of an attribute.
#include <cuda_runtime_api.h>
#include <vector_functions.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#undef __device__
#undef __global__
#undef __shared__
#undef __forceinline__
#undef __noinline__
#undef __launch_bounds__
#undef __grid_constant__
#define __device__
#define __global__
#define __shared__ thread_local
#define __forceinline__ inline
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __grid_constant__ &  // as on a GPU, no thread has a copy
#define alignas(bytes) __attribute__((aligned(bytes)))
#define __CUDA_ARCH_LIST__ 900

namespace emulator {

extern uint3 thread, block, blocks, threads;
extern std::uint64_t exchanged[32];  // of the warp at work
void meet_warp();
void meet_block();

template <class T>
T exchange(T value, unsigned from) {
  static_assert(sizeof value <= 8);
  std::memcpy(&exchanged[thread.x % 32], &value, sizeof value);
  meet_warp();
  std::memcpy(&value, &exchanged[from], sizeof value);
  meet_warp();
  return value;
}
// Called, lest a compiler join it with a negation, which changes the signs of zeros.
float fused(float a, float b, float c);
// What a GPU would refuse.
template <class T>
void check_aligned(const T* at) {
  if (reinterpret_cast<std::uintptr_t>(at) % sizeof(T) != 0) std::abort();
}

}  // namespace emulator

#define __builtin_fmaf emulator::fused
#define __builtin_assume(condition) ((condition) ? void() : std::abort())
#define threadIdx emulator::thread
#define blockIdx emulator::block
#define blockDim emulator::threads
#define gridDim emulator::blocks

inline void __syncwarp() { emulator::meet_warp(); }
inline void __syncthreads() { emulator::meet_block(); }
template <class T>
T __shfl_xor_sync(unsigned, T value, int other) {
  return emulator::exchange(value, emulator::thread.x % 32 ^ static_cast<unsigned>(other));
}
template <class T>
T __shfl_up_sync(unsigned, T value, unsigned by) {
  const unsigned lane = emulator::thread.x % 32;
  return emulator::exchange(value, lane < by ? lane : lane - by);
}
template <class T>
T __shfl_down_sync(unsigned, T value, unsigned by) {
  const unsigned lane = emulator::thread.x % 32;
  return emulator::exchange(value, lane + by < 32 ? lane + by : lane);
}
inline unsigned __ballot_sync(unsigned, bool mine) {
  unsigned all = 0;
  emulator::exchanged[emulator::thread.x % 32] = mine;
  emulator::meet_warp();
  for (unsigned i = 0; i < 32; ++i) all |= static_cast<unsigned>(emulator::exchanged[i] & 1u) << i;
  emulator::meet_warp();
  return all;
}
inline bool __any_sync(unsigned, bool mine) { return __ballot_sync(~0u, mine) != 0; }
inline int __popc(unsigned x) { return std::popcount(x); }
inline unsigned __byte_perm(unsigned low, unsigned high, unsigned which) {
  const std::uint64_t both = static_cast<std::uint64_t>(high) << 32 | low;
  unsigned out = 0;
  for (int i = 0; i < 4; ++i)
    out |= static_cast<unsigned>(both >> 8 * (which >> 4 * i & 7u) & 0xffu) << 8 * i;
  return out;
}
inline unsigned __funnelshift_l(unsigned low, unsigned high, int by) {
  return static_cast<unsigned>((static_cast<std::uint64_t>(high) << 32 | low) << (by & 31) >> 32);
}
inline unsigned __funnelshift_r(unsigned low, unsigned high, int by) {
  return static_cast<unsigned>((static_cast<std::uint64_t>(high) << 32 | low) >> (by & 31));
}
template <class T>
T __ldcs(const T* from) {
  emulator::check_aligned(from);
  return *from;
}
template <class T>
void __stcs(T* to, T value) {
  emulator::check_aligned(to);
  *to = value;
}
using std::max;
using std::min;

namespace scruple {
inline namespace device {
inline float corrected_root(float x) { return std::sqrt(x); }
}  // namespace device
}  // namespace scruple
