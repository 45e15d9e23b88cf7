// Times of the layers' kernels in bf16 beside a copy's: a line of JSON for each. `bytes` is what must move once, so GB/s
// above a copy's mean that a cache helped. usage: layers [name]
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "train/cuda/layers.h"

namespace scruple::train::cuda {
namespace {

using Index = std::int64_t;

constexpr Index kRows = 65536, kWidth = 768, kInner = 3072;
constexpr Precision kType = Precision::bf16;

void must(cudaError_t error) {
  if (error == cudaSuccess) return;
  std::fprintf(stderr, "layers: %s\n", cudaGetErrorString(error));
  std::exit(1);
}

// Memory for the whole run.
void* take(Index bytes) {
  void* data = nullptr;
  must(cudaMalloc(&data, static_cast<std::size_t>(bytes)));
  return data;
}
__global__ void fill(__nv_bfloat16* data, Index count) {
  const Index stride = static_cast<Index>(gridDim.x) * blockDim.x;
  for (Index i = static_cast<Index>(blockIdx.x) * blockDim.x + threadIdx.x; i < count; i += stride)
    data[i] = __float2bfloat16_rn(
        static_cast<float>((static_cast<unsigned>(i) * 2654435761u) >> 16) / 32768.0f - 1.0f);
}
// bf16 values between -1 and 1.
void* values(Index count) {
  void* data = take(2 * count);
  fill<<<1024, 256>>>(static_cast<__nv_bfloat16*>(data), count);
  must(cudaGetLastError());
  return data;
}
float* floats(Index count, float value = 0) {
  auto* data = static_cast<float*>(take(4 * count));
  const std::vector<float> all(static_cast<std::size_t>(count), value);
  must(cudaMemcpy(data, all.data(), all.size() * 4, cudaMemcpyHostToDevice));
  return data;
}
std::int32_t* ints(const std::vector<std::int32_t>& all) {
  auto* data = static_cast<std::int32_t*>(take(4 * static_cast<Index>(all.size())));
  must(cudaMemcpy(data, all.data(), all.size() * 4, cudaMemcpyHostToDevice));
  return data;
}

double median_ms(const std::function<void()>& launch) {
  constexpr int kWarm = 3, kRuns = 20;
  cudaEvent_t before, after;
  must(cudaEventCreate(&before)), must(cudaEventCreate(&after));
  std::vector<float> times;
  for (int i = 0; i < kWarm + kRuns; ++i) {
    must(cudaEventRecord(before));
    launch();
    must(cudaEventRecord(after));
    must(cudaEventSynchronize(after));
    float ms = 0;
    must(cudaEventElapsedTime(&ms, before, after));
    if (i >= kWarm) times.push_back(ms);
  }
  must(cudaEventDestroy(before)), must(cudaEventDestroy(after));
  std::nth_element(times.begin(), times.begin() + kRuns / 2, times.end());
  return static_cast<double>(times[kRuns / 2]);
}

class Bench {
 public:
  explicit Bench(const char* only) : only_(only) {
    constexpr Index kBytes = Index{400} << 20;
    void *from = take(kBytes), *to = take(kBytes);
    must(cudaMemset(from, 0, kBytes));
    const double ms = median_ms([&] { must(cudaMemcpyAsync(to, from, kBytes, cudaMemcpyDeviceToDevice)); });
    copy_ = 2 * static_cast<double>(kBytes) / ms / 1e6;
    must(cudaFree(from)), must(cudaFree(to));
    std::printf("{\"kernel\": \"copy\", \"ms\": %.4f, \"bytes\": %lld, \"GB/s\": %.0f}\n", ms,
                static_cast<long long>(2 * kBytes), copy_);
  }
  void time(const char* name, Index bytes, const std::function<void()>& launch) const {
    if (only_ != nullptr && std::strcmp(only_, name) != 0) return;
    const double ms = median_ms(launch), speed = static_cast<double>(bytes) / ms / 1e6;
    std::printf(
        "{\"kernel\": \"%s\", \"ms\": %.4f, \"bytes\": %lld, \"GB/s\": %.0f, \"copy GB/s\": %.0f, \"of "
        "copy\": %.2f}\n",
        name, ms, static_cast<long long>(bytes), speed, copy_, speed / copy_);
    std::fflush(stdout);
  }

 private:
  const char* only_;
  double copy_ = 0;
};

void norms(const Bench& bench, Index rows, Index width, const std::string& suffix) {
  const Index plane = 2 * rows * width;
  void *x = values(rows * width), *y = values(rows * width), *g = values(rows * width);
  float *mean = floats(rows), *rstd = floats(rows, 1), *sums = floats(norm_parts(rows) * 2 * width);
  const Values weight{values(width), kType}, bias{values(width), kType},
      out{take(4 * width), Precision::fp32};
  const Norm layer{NormKind::layer, 1e-5f, weight, bias}, rms{NormKind::rms, 1e-5f, weight, {}};
  bench.time(("layer_norm" + suffix).c_str(), 2 * plane,
             [&] { norm_forward(kType, layer, x, rows, width, y, mean, rstd, nullptr); });
  bench.time(("rms_norm" + suffix).c_str(), 2 * plane,
             [&] { norm_forward(kType, rms, x, rows, width, y, nullptr, rstd, nullptr); });
  bench.time(("layer_norm_backward" + suffix).c_str(), 4 * plane,
             [&] { norm_backward(kType, layer, y, x, mean, rstd, rows, width, true, g, sums, nullptr); });
  bench.time(("rms_norm_backward" + suffix).c_str(), 4 * plane,
             [&] { norm_backward(kType, rms, y, x, nullptr, rstd, rows, width, true, g, sums, nullptr); });
  bench.time(("sum_parts" + suffix).c_str(), norm_parts(rows) * width * 4,
             [&] { sum_parts(sums, norm_parts(rows), 2 * width, width, out, nullptr); });
  float* parts = floats(bias_parts(rows) * width);
  bench.time(("bias_gradient" + suffix).c_str(), plane,
             [&] { bias_gradient(kType, y, rows, width, width, parts, out, nullptr); });
  for (void* data : {x, y, g, static_cast<void*>(mean), static_cast<void*>(rstd), static_cast<void*>(sums),
                     weight.data, bias.data, out.data, static_cast<void*>(parts)})
    must(cudaFree(data));
}

// Tokens as text has them: token i about as often as 1 / (i + 1).
std::vector<std::int32_t> zipf(Index count, Index words) {
  std::vector<double> below;
  double sum = 0;
  for (Index i = 0; i < words; ++i) below.push_back(sum += 1 / static_cast<double>(i + 1));
  std::vector<std::int32_t> tokens;
  unsigned state = 1;
  for (Index i = 0; i < count; ++i) {
    state = state * 1664525u + 1013904223u;
    const double at = static_cast<double>(state) * 0x1p-32 * sum;
    tokens.push_back(
        static_cast<std::int32_t>(std::upper_bound(below.begin(), below.end(), at) - below.begin()));
  }
  return tokens;
}

void tables(const Bench& bench) {
  constexpr Index kWords = 16384;
  const std::vector<std::int32_t> tokens = zipf(kRows, kWords);
  std::vector<std::vector<std::int32_t>> of(kWords);
  for (Index r = 0; r < kRows; ++r)
    of[static_cast<std::size_t>(tokens[static_cast<std::size_t>(r)])].push_back(static_cast<std::int32_t>(r));
  std::vector<std::int32_t> target, begin{0}, order, positions;
  for (Index word = 0; word < kWords; ++word) {
    const auto& rows = of[static_cast<std::size_t>(word)];
    if (rows.empty()) continue;
    target.push_back(static_cast<std::int32_t>(word));
    order.insert(order.end(), rows.begin(), rows.end());
    begin.push_back(static_cast<std::int32_t>(order.size()));
  }
  for (Index r = 0; r < kRows; ++r) positions.push_back(static_cast<std::int32_t>(r % 1024));
  const auto targets = static_cast<Index>(target.size());
  void *x = values(kRows * kWidth), *words = values(kWords * kWidth), *places = values(1024 * kWidth);
  const std::int32_t *token_plane = ints(tokens), *position_plane = ints(positions);
  bench.time(
      "embed", 2 * kRows * kWidth * 2,
      [&] {  // a row of the table is read as often as it occurs, if from a cache
        embed(kType, token_plane, position_plane, kRows, kWidth, {words, kType}, {places, kType}, x, nullptr);
      });
  const Occurrences occurrences{ints(target), ints(begin), ints(order), targets};
  const Values table{floats(kWords * kWidth), Precision::fp32};
  bench.time("embedding_gradient", 2 * kRows * kWidth + 8 * targets * kWidth,
             [&] { embedding_gradient(kType, x, kWidth, occurrences, 0, table, nullptr); });
  const Values small{take(2 * kRows * kWidth), kType};
  const Values wide{floats(kRows * kWidth), Precision::fp32};
  bench.time("convert", 6 * kRows * kWidth, [&] { convert(wide, small, kRows * kWidth, nullptr); });
  for (void* data : {x, words, places, table.data, small.data, wide.data}) must(cudaFree(data));
}

void heads(const Bench& bench) {
  constexpr int kHeads = 32, kKeys = 8, kHead = 128;
  constexpr Index kQkv = (kHeads + 2 * kKeys) * kHead, kRoped = (kHeads + kKeys) * kHead;
  std::vector<std::int32_t> positions;
  for (Index r = 0; r < kRows; ++r) positions.push_back(static_cast<std::int32_t>(r % 4096));
  void *qkv = values(kRows * kQkv), *to = values(kRows * kQkv), *norm = values(2 * kHead);
  const Values query{norm, kType}, key{static_cast<char*>(norm) + 2 * kHead, kType};
  const RopeShape plain{kRows, kHeads, kKeys, kHead, ints(positions), floats(4096 * kHead, 0.7f),
                        {},    {},     1e-6f};
  RopeShape normed = plain;
  normed.query_norm = query, normed.key_norm = key;
  float* sums = floats(rope_parts(normed) * 2 * kHead);
  bench.time("turn", 4 * kRows * kRoped, [&] { rope(kType, plain, qkv, qkv, nullptr); });
  bench.time("rope_normed", 4 * kRows * kQkv, [&] { rope(kType, normed, qkv, to, nullptr); });
  bench.time("rope_backward", 4 * kRows * kRoped,
             [&] { rope_backward(kType, plain, qkv, to, sums, nullptr); });
  bench.time("rope_backward_normed", 6 * kRows * kRoped,
             [&] { rope_backward(kType, normed, qkv, to, sums, nullptr); });
  for (void* data : {qkv, to, norm}) must(cudaFree(data));
}

void activations(const Bench& bench) {
  constexpr Index kPlane = 2 * kRows * kInner;
  void *x = values(2 * kRows * kInner), *y = values(kRows * kInner), *dx = values(2 * kRows * kInner);
  bench.time("gelu", 2 * kPlane, [&] { activate(kType, Mlp::gelu, x, kRows, kInner, y, nullptr); });
  bench.time("gelu_backward", 3 * kPlane,
             [&] { activate_backward(kType, Mlp::gelu, y, x, kRows, kInner, dx, nullptr); });
  bench.time("gated", 3 * kPlane, [&] { activate(kType, Mlp::swiglu, x, kRows, kInner, y, nullptr); });
  bench.time("gated_backward", 5 * kPlane,
             [&] { activate_backward(kType, Mlp::swiglu, y, x, kRows, kInner, dx, nullptr); });
  for (void* data : {x, y, dx}) must(cudaFree(data));
}

void loss(const Bench& bench) {
  constexpr Index kLossRows = 8192, kWords = 50257, kStride = 50264;
  std::vector<std::int32_t> targets;
  for (Index r = 0; r < kLossRows; ++r) targets.push_back(static_cast<std::int32_t>(r * 7919 % kWords));
  void* logits = values(kLossRows * kStride);
  const std::int32_t* target_plane = ints(targets);
  float *scale = floats(1, 1), *losses = floats(kLossRows);
  auto* sum = static_cast<double*>(take(8));
  bench.time("cross_entropy_loss", 2 * kLossRows * kWords, [&] {
    cross_entropy(kType, logits, kLossRows, kWords, kStride, target_plane, nullptr, losses, nullptr);
  });
  bench.time("cross_entropy", 4 * kLossRows * kWords, [&] {
    cross_entropy(kType, logits, kLossRows, kWords, kStride, target_plane, scale, losses, nullptr);
  });
  bench.time("sum_losses", 4 * kLossRows, [&] { sum_losses(losses, kLossRows, sum, nullptr); });
  must(cudaFree(logits));
}

}  // namespace
}  // namespace scruple::train::cuda

int main(int argc, char** argv) {
  using namespace scruple::train::cuda;
  const Bench bench(argc > 1 ? argv[1] : nullptr);
  norms(bench, kRows, kWidth, "");
  norms(bench, 8192, 4096, "_4096");
  norms(bench, 8192, 5120, "_5120");
  tables(bench);
  heads(bench);
  activations(bench);
  loss(bench);
  return 0;
}
