// A GPU for tests: the CUDA runtime's functions as far as the engine calls them, over host memory, and
// launches block by block, a fiber to each thread.
#include "tests/emulator/cuda.h"

#include <setjmp.h>
#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>

#include <map>

#include "engine/clip.h"
#include "engine/cuda_table.h"

namespace emulator {

uint3 thread, block, blocks, threads;
std::uint64_t exchanged[32];

namespace {

// Entered once by its context; from then on jumps, which ask the system for nothing, lead in and out.
struct Fiber {
  enum { kNew, kReady, kWaits, kEnded } state = kNew;
  ucontext_t context{};
  jmp_buf inside{};
  std::vector<char> stack = std::vector<char>(128 << 10);
};
std::vector<std::unique_ptr<Fiber>> fibers;
jmp_buf outside;
const void* body = nullptr;
void (*call_body)(const void*) = nullptr;

Fiber& mine() { return *fibers[thread.x]; }
void leave() {
  if (_setjmp(mine().inside) == 0) _longjmp(outside, 1);
}
void live() {
  for (;;) {
    call_body(body);
    mine().state = Fiber::kEnded;
    leave();
  }
}
void enter(Fiber& fiber) {
  const bool is_new = fiber.state == Fiber::kNew;
  fiber.state = Fiber::kReady;
  if (_setjmp(outside) != 0) return;
  if (!is_new) _longjmp(fiber.inside, 1);
  getcontext(&fiber.context);
  fiber.context.uc_stack.ss_sp = fiber.stack.data();
  fiber.context.uc_stack.ss_size = fiber.stack.size();
  makecontext(&fiber.context, live, 0);
  setcontext(&fiber.context);
}

// Each runs until it meets its warp; then all have, and the next round begins. No other warp runs before this
// one waits for its block or has ended, so `exchanged` is its own.
void run_warp(unsigned first) {
  for (bool any = true; any;) {
    any = false;
    for (unsigned i = first; i < std::min(first + 32, threads.x); ++i) {
      if (fibers[i]->state != Fiber::kReady && fibers[i]->state != Fiber::kNew) continue;
      thread = {i, 0, 0};
      enter(*fibers[i]);
      any = true;
    }
  }
}

void run_block() {
  while (fibers.size() < threads.x) fibers.push_back(std::make_unique<Fiber>());
  for (unsigned i = 0; i < threads.x; ++i)
    if (fibers[i]->state == Fiber::kEnded) fibers[i]->state = Fiber::kReady;
  for (bool any = true; any;) {
    for (unsigned first = 0; first < threads.x; first += 32) run_warp(first);
    any = false;
    for (unsigned i = 0; i < threads.x; ++i)
      if (fibers[i]->state == Fiber::kWaits) fibers[i]->state = Fiber::kReady, any = true;
  }
}

void run(dim3 grid, dim3 of_block, const auto& kernel) {
  body = &kernel;
  call_body = [](const void* what) { (*static_cast<decltype(&kernel)>(what))(); };
  blocks = {grid.x, 1, 1}, threads = {of_block.x, 1, 1};
  for (unsigned b = 0; b < grid.x; ++b) {
    block = {b, 0, 0};
    run_block();
  }
}

template <class... Parameters>
void launch(const void* kernel, dim3 grid, dim3 of_block, void** arguments) {
  const auto call = [&]<std::size_t... I>(std::index_sequence<I...>) {
    run(grid, of_block, [&] {
      reinterpret_cast<void (*)(Parameters...)>(const_cast<void*>(kernel))(
          *static_cast<std::decay_t<Parameters>*>(arguments[I])...);
    });
  };
  call(std::index_sequence_for<Parameters...>());
}

std::map<std::uintptr_t, std::size_t> memory, pinned;
const std::size_t kPage = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
std::size_t whole_pages(std::size_t bytes) { return (bytes + kPage - 1) / kPage * kPage; }

}  // namespace

float fused(float a, float b, float c) { return std::fma(a, b, c); }
void meet_warp() { leave(); }
void meet_block() {
  mine().state = Fiber::kWaits;
  leave();
}

}  // namespace emulator

// ---- The CUDA runtime ----

using namespace scruple;
namespace {
cudaError_t done() { return cudaSuccess; }
}  // namespace

cudaError_t cudaLaunchKernel(const void* kernel, dim3 grid, dim3 block, void** arguments, std::size_t,
                             cudaStream_t) {
  const GradientKernels& some = gradient_kernels();
  const auto is_fold = [&](const FoldKernel& fold) { return fold.kernel == kernel; };
  if (kernel == some.upload)
    emulator::launch<const Upload&>(kernel, grid, block, arguments);
  else if (kernel == some.prepare)
    emulator::launch<const PrepareInput&>(kernel, grid, block, arguments);
  else if (kernel == some.draw)
    emulator::launch<DeviceRow*, int, const Constants*>(kernel, grid, block, arguments);
  else if (kernel == some.sum_squares)
    emulator::launch<DeviceTable, double*>(kernel, grid, block, arguments);
  else if (kernel == some.finish_norm)
    emulator::launch<const NormOutput&>(kernel, grid, block, arguments);
  else if (kernel == some.advance)
    emulator::launch<const Advance&>(kernel, grid, block, arguments);
  else if (kernel == array_kernel())
    emulator::launch<const ArrayWork&>(kernel, grid, block, arguments);
  else if (std::ranges::any_of(fold_kernels(), is_fold))
    emulator::launch<DeviceTable, float>(kernel, grid, block, arguments);
  else
    emulator::launch<DeviceTable, const Constants*>(kernel, grid, block, arguments);
  return done();
}

// Aligned as CUDA's are. After the last 256 bytes follows a page that cannot be read, and stops who does.
cudaError_t cudaMalloc(void** at, std::size_t bytes) {
  if (bytes > std::size_t{16} << 30) return cudaErrorMemoryAllocation;
  const std::size_t size = emulator::whole_pages(bytes);
  void* const first =
      mmap(nullptr, size + emulator::kPage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (first == MAP_FAILED) return cudaErrorMemoryAllocation;
  char* const end = static_cast<char*>(first) + size;
  if (mprotect(end, emulator::kPage, PROT_NONE) != 0) std::abort();
  *at = end - (bytes + 255) / 256 * 256;
  emulator::memory[reinterpret_cast<std::uintptr_t>(*at)] = bytes;
  return done();
}
cudaError_t cudaFree(void* at) {
  const auto address = reinterpret_cast<std::uintptr_t>(at);
  const auto found = emulator::memory.find(address);
  if (found == emulator::memory.end()) return at == nullptr ? done() : cudaErrorInvalidValue;
  munmap(static_cast<char*>(at) - address % emulator::kPage,
         emulator::whole_pages(found->second) + emulator::kPage);
  emulator::memory.erase(found);
  return done();
}
cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* found, const void* at) {
  const auto address = reinterpret_cast<std::uintptr_t>(at);
  const auto lies_in = [&](const std::map<std::uintptr_t, std::size_t>& all) {
    auto next = all.upper_bound(address);
    return next != all.begin() && (--next, address <= next->first + next->second);
  };
  *found = {};
  found->type = lies_in(emulator::memory)   ? cudaMemoryTypeDevice
                : lies_in(emulator::pinned) ? cudaMemoryTypeHost
                                            : cudaMemoryTypeUnregistered;
  return done();
}
cudaError_t cudaHostAlloc(void** at, std::size_t bytes, unsigned) {
  emulator::pinned[reinterpret_cast<std::uintptr_t>(*at = std::malloc(bytes))] = bytes;
  return done();
}
cudaError_t cudaFreeHost(void* at) {
  emulator::pinned.erase(reinterpret_cast<std::uintptr_t>(at));
  std::free(at);
  return done();
}
cudaError_t cudaMemGetInfo(std::size_t* free, std::size_t* total) {
  *free = *total = std::size_t{16} << 30;
  return done();
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, std::size_t bytes, cudaMemcpyKind, cudaStream_t) {
  std::memcpy(to, from, bytes);
  return done();
}
cudaError_t cudaMemsetAsync(void* to, int value, std::size_t bytes, cudaStream_t) {
  std::memset(to, value, bytes);
  return done();
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr which, int) {
  *value = which == cudaDevAttrMultiProcessorCount ? 2 : 0;
  return done();
}
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* found, int) {
  *found = {};
  found->major = 9;
  std::strcpy(found->name, "emulator");
  return done();
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void*, int, std::size_t) {
  *blocks = 3;
  return done();
}
cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return done();
}
cudaError_t cudaGetDeviceCount(int* count) {
  *count = 1;
  return done();
}
cudaError_t cudaDriverGetVersion(int* version) {
  *version = CUDART_VERSION;
  return done();
}
cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) {
  *status = cudaStreamCaptureStatusNone;
  return done();
}
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  *event = nullptr;
  return done();
}
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) {
  *stream = nullptr;
  return done();
}
cudaError_t cudaStreamDestroy(cudaStream_t) { return done(); }
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes*, const void*) { return done(); }
cudaError_t cudaSetDevice(int) { return done(); }
cudaError_t cudaEventDestroy(cudaEvent_t) { return done(); }
cudaError_t cudaEventRecord(cudaEvent_t, cudaStream_t) { return done(); }
cudaError_t cudaEventSynchronize(cudaEvent_t) { return done(); }
cudaError_t cudaStreamWaitEvent(cudaStream_t, cudaEvent_t, unsigned) { return done(); }
cudaError_t cudaStreamSynchronize(cudaStream_t) { return done(); }
cudaError_t cudaGetLastError() { return done(); }
const char* cudaGetErrorName(cudaError_t) { return "cudaErrorMemoryAllocation"; }
const char* cudaGetErrorString(cudaError_t) { return "out of memory"; }
