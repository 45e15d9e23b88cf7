// Chooses the kernels that compute an attention.
#include <cstdio>
#include <limits>

#include "train/cuda/attention.h"
#include "train/cuda/attention_plain.cuh"
#include "train/cuda/attention_tensor.cuh"

namespace scruple::train::cuda {
namespace {

constexpr int kWidest = 256;

Sizes sizes_of(const Attention& shape) {
  return {static_cast<int>(shape.sequences),
          static_cast<int>(shape.length),
          shape.heads,
          shape.kv_heads,
          shape.head_width,
          shape.positions};
}

// Calls act(kernels, a value of the type they compute with).
template <class T, class Act>
void choose_width(int width, Act act) {
  if constexpr (!std::is_same_v<T, float>) switch (width) {
      case 64: return act(TensorAttention<T, 64>{}, T{});
      case 80: return act(TensorAttention<T, 80>{}, T{});
      case 96: return act(TensorAttention<T, 96>{}, T{});
      case 128: return act(TensorAttention<T, 128>{}, T{});
      default: break;
    }
  if (width <= 128)
    act(PlainAttention<T, 2>{}, T{});
  else
    act(PlainAttention<T, 1>{}, T{});
}
template <class Act>
void choose(const Attention& shape, Act act) {
  switch (shape.precision) {
    case Precision::fp32: return choose_width<float>(shape.head_width, act);
    case Precision::bf16: return choose_width<__nv_bfloat16>(shape.head_width, act);
    case Precision::fp16: return choose_width<__half>(shape.head_width, act);
  }
}

bool nothing_in(const Attention& shape) { return shape.sequences == 0 || shape.length == 0; }

template <class... Values>
const char* message(const char* format, Values... values) {
  thread_local char text[256];
  std::snprintf(text, sizeof text, format, values...);
  return text;
}

}  // namespace

const char* problem_with(const Attention& shape) {
  if (shape.head_width < 1 || shape.head_width > kWidest)
    return message("attention has heads of 1 to %d values, and these have %d: choose another number of heads",
                   kWidest, shape.head_width);
  if (shape.heads < 1 || shape.kv_heads < 1 || shape.heads % shape.kv_heads != 0)
    return message(
        "%d heads cannot share %d heads of keys and values evenly: choose a number that divides %d",
        shape.heads, shape.kv_heads, shape.heads);
  if (shape.sequences < 0 || shape.length < 0)
    return message("%lld sequences of %lld tokens do not exist: choose 0 or more",
                   static_cast<long long>(shape.sequences), static_cast<long long>(shape.length));
  // The kernel of most blocks has one for 16 rows of a head; tokens, heads and bytes of a row are counted in 32 bits.
  constexpr std::int64_t kMost = std::numeric_limits<std::int32_t>::max();
  const std::int64_t slots =
      static_cast<std::int64_t>(shape.heads) + 2 * static_cast<std::int64_t>(shape.kv_heads);
  if (shape.length > kMost / 2 || slots * shape.head_width > kMost / 4 ||
      shape.sequences > kMost / slots / (padded(shape.length) / 16 + 1))
    return message(
        "%lld sequences of %lld tokens and %d heads are more than one launch takes: choose a smaller batch",
        static_cast<long long>(shape.sequences), static_cast<long long>(shape.length), shape.heads);
  return nullptr;
}

void attend(const Attention& shape, const void* qkv, void* y, float* log_sums, cudaStream_t stream) {
  if (nothing_in(shape)) return;
  choose(shape, [&]<class Kernels, class T>(Kernels, T) {
    Kernels::forward(sizes_of(shape), static_cast<const T*>(qkv), static_cast<T*>(y), log_sums, stream);
  });
}

std::int64_t attend_backward_bytes(const Attention& shape) {
  std::int64_t more = 0;
  choose(shape,
         [&]<class Kernels, class T>(Kernels, T) { more = Kernels::workspace_bytes(sizes_of(shape)); });
  return shape.sequences * shape.heads * padded(shape.length) * static_cast<std::int64_t>(sizeof(float2)) +
         more;
}

void attend_backward(const Attention& shape, const void* qkv, const void* y, const float* log_sums,
                     const void* dy, void* dqkv, void* workspace, cudaStream_t stream) {
  if (nothing_in(shape)) return;
  choose(shape, [&]<class Kernels, class T>(Kernels, T) {
    Kernels::backward(sizes_of(shape), static_cast<const T*>(qkv), static_cast<const T*>(y), log_sums,
                      static_cast<const T*>(dy), static_cast<T*>(dqkv), static_cast<float2*>(workspace),
                      stream);
  });
}

}  // namespace scruple::train::cuda
