// How long the GPU has nothing to do while a program trains: a library that the CUDA driver loads into any program.
//
//     g++ -O2 -std=c++20 -shared -fPIC bench/gpu_idle.cpp -o libgpu_idle.so -I/usr/local/cuda/include -lcupti
//     CUDA_INJECTION64_PATH=$PWD/libgpu_idle.so scruple train --device cuda --validate-every 1000000 ...
//
// CUPTI (part of the CUDA toolkit, and of torch) tells when each kernel, copy and fill began and ended. Printed is how
// much of the time none was running, in the middle of the run: from 0.4 to 0.9 of its kernels, so that neither warm-up
// nor the end counts. Gaps up to 10 microseconds lie between kernels; longer ones wait for the host. Being watched
// slows a program down, so its idle share is at most what is printed.
#include <cupti.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <utility>
#include <vector>

namespace {

using Span = std::pair<std::uint64_t, std::uint64_t>;  // nanoseconds

std::mutex mutex;
std::vector<Span>& spans() {
  static auto* const all = new std::vector<Span>;  // lives until the program has ended
  return *all;
}

constexpr std::size_t kBuffer = std::size_t{8} << 20;

void CUPTIAPI give_buffer(std::uint8_t** buffer, std::size_t* size, std::size_t* most) {
  *buffer = static_cast<std::uint8_t*>(std::aligned_alloc(8, kBuffer));
  *size = *buffer == nullptr ? 0 : kBuffer;
  *most = 0;
}

void CUPTIAPI take_buffer(CUcontext, std::uint32_t, std::uint8_t* buffer, std::size_t, std::size_t filled) {
  const std::lock_guard lock(mutex);
  const auto keep = [](const auto* record) { spans().emplace_back(record->start, record->end); };
  for (CUpti_Activity* record = nullptr;
       cuptiActivityGetNextRecord(buffer, filled, &record) == CUPTI_SUCCESS;) {
    if (record->kind == CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL)
      keep(reinterpret_cast<const CUpti_ActivityKernel10*>(record));
    else if (record->kind == CUPTI_ACTIVITY_KIND_MEMCPY)
      keep(reinterpret_cast<const CUpti_ActivityMemcpy6*>(record));
    else if (record->kind == CUPTI_ACTIVITY_KIND_MEMSET)
      keep(reinterpret_cast<const CUpti_ActivityMemset4*>(record));
  }
  std::free(buffer);
}

void print() {
  cuptiActivityFlushAll(CUPTI_ACTIVITY_FLAG_FLUSH_FORCED);
  const std::lock_guard lock(mutex);
  std::vector<Span>& all = spans();
  std::erase_if(all, [](const Span& span) { return span.first == 0; });
  std::sort(all.begin(), all.end());
  const std::size_t first = all.size() * 4 / 10, last = all.size() * 9 / 10;
  if (last < first + 2) {
    std::fprintf(stderr, "gpu_idle: %zu kernels are too few\n", all.size());
    return;
  }
  constexpr std::array<double, 4> kUpTo = {2, 10, 100, 1e12};  // microseconds
  std::array<double, 4> idle{};
  std::array<std::size_t, 4> count{};
  std::uint64_t busy_until = all[first].second;
  for (std::size_t i = first + 1; i < last; ++i) {
    if (all[i].first > busy_until) {
      const double gap = static_cast<double>(all[i].first - busy_until) / 1e3;
      const auto which =
          static_cast<std::size_t>(std::lower_bound(kUpTo.begin(), kUpTo.end(), gap) - kUpTo.begin());
      idle[which] += gap, ++count[which];
    }
    busy_until = std::max(busy_until, all[i].second);
  }
  const double whole = static_cast<double>(busy_until - all[first].first) / 1e3;
  std::fprintf(stderr, "gpu_idle: %zu kernels, copies and fills in %.1f ms\n", last - first, whole / 1e3);
  const std::array<const char*, 4> names = {"up to 2 us", "2 to 10 us", "10 to 100 us", "longer"};
  for (std::size_t i = 0; i < names.size(); ++i)
    std::fprintf(stderr, "  gaps %-13s %7zu  %7.3f %% of the time\n", names[i], count[i],
                 100 * idle[i] / whole);
}

}  // namespace

// The name that the CUDA driver calls.
extern "C" int InitializeInjection() {
  bool works = cuptiActivityRegisterCallbacks(give_buffer, take_buffer) == CUPTI_SUCCESS;
  for (const CUpti_ActivityKind kind :
       {CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL, CUPTI_ACTIVITY_KIND_MEMCPY, CUPTI_ACTIVITY_KIND_MEMSET})
    works &= cuptiActivityEnable(kind) == CUPTI_SUCCESS;
  if (works)
    std::atexit(print);
  else
    std::fprintf(stderr, "gpu_idle: CUPTI watches nothing here\n");
  return 1;
}
