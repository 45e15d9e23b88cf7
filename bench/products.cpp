// Times the matrix products of a training step as cuBLASLt computes them, each with what is done in the same go.
// usage: products_bench [TOKENS WIDTH INNER VOCABULARY]
// Prints one JSON object a line: milliseconds (the median of 20) and TFLOP/s.
#include "train/cuda/products.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <string>
#include <vector>

using namespace scruple;
using namespace scruple::train;

namespace {

using Index = std::int64_t;

double median_ms(const cuda::Stream& stream, const std::function<void()>& work) {
  cudaEvent_t begin = nullptr, end = nullptr;
  cuda::check(cudaEventCreate(&begin), "making an event");
  cuda::check(cudaEventCreate(&end), "making an event");
  std::vector<float> times;
  for (int i = 0; i < 23; ++i) {
    cuda::check(cudaEventRecord(begin, stream), "timing");
    work();
    cuda::check(cudaEventRecord(end, stream), "timing");
    stream.wait();
    float ms = 0;
    cuda::check(cudaEventElapsedTime(&ms, begin, end), "timing");
    if (i >= 3) times.push_back(ms);
  }
  std::sort(times.begin(), times.end());
  return static_cast<double>(times[times.size() / 2]);
}

void run(Index tokens, Index width, Index inner, Index vocabulary) {
  cuda::Stream stream;
  cuda::DeviceMemory memory(stream);
  Ledger ledger;
  cuda::Products products(Precision::bf16, true, stream, memory, ledger);
  const Index part = std::min<Index>(tokens, 5248), widest = std::max(inner, 3 * width);
  const Block a(ledger, "a", tokens * widest * 2, memory), b(ledger, "b", tokens * widest * 2, memory),
      d(ledger, "d", tokens * widest * 2, memory), kept(ledger, "kept", tokens * widest * 2, memory),
      logits(ledger, "logits", part * (vocabulary + 64) * 2, memory),
      table(ledger, "table", (vocabulary + 64) * width * 4, memory), bias(ledger, "bias", widest * 2, memory);
  const auto time = [&](const std::string& what, const cuda::Product& p) {
    const double ms = median_ms(stream, [&] { products.run(p); });
    const double flops =
        2.0 * static_cast<double>(p.rows) * static_cast<double>(p.columns) * static_cast<double>(p.depth);
    std::printf(
        "{\"product\": \"%s\", \"rows\": %ld, \"columns\": %ld, \"depth\": %ld, \"ms\": %.4f, \"tflops\": "
        "%.1f}\n",
        what.c_str(), static_cast<long>(p.rows), static_cast<long>(p.columns), static_cast<long>(p.depth), ms,
        flops / ms * 1e-9);
  };
  const auto linear = [&](const std::string& name, Index in, Index out) {
    for (const bool first : {false, true}) {
      const std::string lies = name + (first ? ", [out, in]" : ", [in, out]");
      const cuda::Operand weight = {b.as<void>(), first ? in : out, first};
      const cuda::Operand back = {b.as<void>(), first ? in : out, !first};
      cuda::Product forward = {tokens, out, in, {a.as<void>(), in}, weight, d.as<void>(), out};
      cuda::Product backward = {tokens, in, out, {a.as<void>(), out}, back, d.as<void>(), in};
      time(lies, forward);
      forward.epilogue = cuda::Epilogue::bias, forward.bias = bias.as<void>();
      time(lies + ", bias", forward);
      forward.c = kept.as<void>();
      time(lies + ", bias, residual", forward);
      forward.c = nullptr, forward.epilogue = cuda::Epilogue::gelu, forward.kept = kept.as<void>();
      time(lies + ", gelu", forward);
      time(lies + ", backward", backward);
      backward.epilogue = cuda::Epilogue::gelu_backward, backward.kept = kept.as<void>();
      time(lies + ", backward, gelu", backward);
      const Index rows = first ? out : in, columns = first ? in : out;
      time(lies + ", gradient", {rows,
                                 columns,
                                 tokens,
                                 {a.as<void>(), rows, true},
                                 {b.as<void>(), columns},
                                 d.as<void>(),
                                 columns});
    }
  };
  linear("attention in", width, 3 * width);
  linear("attention out", width, width);
  linear("mlp in", width, inner);
  linear("mlp out", inner, width);
  for (const Index words : {vocabulary, (vocabulary + 63) / 64 * 64}) {
    const Index stride = (words + 7) / 8 * 8;
    time("head", {part,
                  words,
                  width,
                  {a.as<void>(), width},
                  {table.as<void>(), width, true},
                  logits.as<void>(),
                  stride});
    time("head, backward",
         {part, width, words, {logits.as<void>(), stride}, {table.as<void>(), width}, a.as<void>(), width});
    for (const bool wide : {false, true})
      time(wide ? "head, gradient, fp32, added" : "head, gradient", {.rows = words,
                                                                     .columns = width,
                                                                     .depth = part,
                                                                     .a = {logits.as<void>(), stride, true},
                                                                     .b = {a.as<void>(), width},
                                                                     .d = table.as<void>(),
                                                                     .stride = width,
                                                                     .c = wide ? table.as<void>() : nullptr,
                                                                     .wide = wide});
  }
}

}  // namespace

int main(int argc, char** argv) {
  const auto number = [&](int i, Index usual) { return argc > i ? std::atoll(argv[i]) : usual; };
  try {
    run(number(1, 65536), number(2, 768), number(3, 3072), number(4, 50257));
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
