// Times causal attention, forward and backward: one line of JSON for each case. FLOPs are those of 2 products
// forward and 5 backward over the pairs that see each other, as everybody counts them, whatever a kernel
// computes beside.
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <functional>
#include <vector>

#include "train/cuda/attention.h"
#include "train/cuda/device.h"

namespace {

using namespace scruple::train;
using cuda::check;

struct Memory {
  void* data = nullptr;
  explicit Memory(std::int64_t bytes) {
    check(cudaMalloc(&data, static_cast<std::size_t>(bytes)), "memory of the benchmark");
    check(cudaMemset(data, 0, static_cast<std::size_t>(bytes)), "memory of the benchmark");
  }
  Memory(const Memory&) = delete;
  ~Memory() { cudaFree(data); }
};

// bf16 values between -1 and 1: what GPUs do with zeros only costs less power, and time.
void fill(const Memory& to, std::int64_t count) {
  std::vector<std::uint16_t> values(static_cast<std::size_t>(count));
  std::uint32_t state = 1;
  for (std::uint16_t& value : values) {
    state = state * 1664525u + 1013904223u;
    value = static_cast<std::uint16_t>((state >> 31) << 15 | (0x3d80u + (state >> 8) % 0x200u));
  }
  check(cudaMemcpy(to.data, values.data(), values.size() * 2, cudaMemcpyHostToDevice),
        "values of the benchmark");
}

double median_ms(const std::function<void()>& act) {
  cudaEvent_t begin, end;
  check(cudaEventCreate(&begin), "an event");
  check(cudaEventCreate(&end), "an event");
  std::vector<float> times;
  for (int i = 0; i < 25; ++i) {
    check(cudaEventRecord(begin), "an event");
    act();
    check(cudaEventRecord(end), "an event");
    check(cudaEventSynchronize(end), "attention");
    float ms = 0;
    check(cudaEventElapsedTime(&ms, begin, end), "an event");
    if (i >= 5) times.push_back(ms);  // the first ones warm up
  }
  cudaEventDestroy(begin);
  cudaEventDestroy(end);
  std::sort(times.begin(), times.end());
  return times[times.size() / 2];
}

void measure(const cuda::Attention& shape) {
  const std::int64_t rows = shape.sequences * shape.length;
  const std::int64_t values = rows * (shape.heads + 2 * shape.kv_heads) * shape.head_width;
  const std::int64_t outputs = rows * shape.heads * shape.head_width;
  const Memory qkv(values * 2), dqkv(values * 2), y(outputs * 2), dy(outputs * 2),
      log_sums(rows * shape.heads * 4);
  const Memory workspace(cuda::attend_backward_bytes(shape));
  fill(qkv, values);
  fill(dy, outputs);
  auto* sums = static_cast<float*>(log_sums.data);
  const double forward = median_ms([&] { cuda::attend(shape, qkv.data, y.data, sums, nullptr); });
  const double backward = median_ms([&] {
    cuda::attend_backward(shape, qkv.data, y.data, sums, dy.data, dqkv.data, workspace.data, nullptr);
  });
  const double pairs = 0.5 * static_cast<double>(shape.length) * static_cast<double>(shape.length + 1);
  const double product = 2 * pairs * static_cast<double>(shape.sequences) * shape.heads * shape.head_width;
  std::printf(
      "{\"case\": \"%lld x %lld, heads %d/%d x %d, bf16\", \"forward_ms\": %.4f, \"backward_ms\": %.4f, "
      "\"forward_tflops\": %.1f, \"backward_tflops\": %.1f}\n",
      static_cast<long long>(shape.sequences), static_cast<long long>(shape.length), shape.heads,
      shape.kv_heads, shape.head_width, forward, backward, 2 * product / forward / 1e9,
      5 * product / backward / 1e9);
}

}  // namespace

// usage: attention_bench [SEQUENCES LENGTH HEADS KV_HEADS HEAD_WIDTH]
int main(int argc, char** argv) try {
  if (argc == 6) {
    measure({Precision::bf16, std::atoll(argv[1]), std::atoll(argv[2]), std::atoi(argv[3]),
             std::atoi(argv[4]), std::atoi(argv[5]), nullptr});
    return 0;
  }
  measure({Precision::bf16, 64, 1024, 12, 12, 64, nullptr});
  measure({Precision::bf16, 16, 1024, 20, 20, 64, nullptr});
  measure({Precision::bf16, 4, 1024, 32, 8, 128, nullptr});
  measure({Precision::bf16, 8, 2048, 32, 8, 128, nullptr});
} catch (const std::exception& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}
