// Values for the layers on a GPU, and how far their results may be off.
#pragma once

#include <algorithm>
#include <functional>
#include <string>

#include "tests/cuda/arrays.h"
#include "train/cuda/layers.h"

namespace scruple::train::cuda {

using Index = std::int64_t;
using Ints = std::vector<std::int32_t>;

inline const char* name_of(Precision type) { return kPrecisions[static_cast<int>(type)]; }
// A type other than this one, for weights beside activations.
inline Precision other_than(Precision type) {
  return type == Precision::fp32 ? Precision::bf16 : Precision::fp32;
}

// ---- Numbers ----

// From a counter: about normal, deviation 1.
inline double noise(Index i, unsigned seed) {
  std::uint64_t x = static_cast<std::uint64_t>(i) * 0x9e3779b97f4a7c15ull + seed * 0xd1b54a32d192ed03ull;
  double sum = 0;
  for (int k = 0; k < 4; ++k) {
    x += 0x9e3779b97f4a7c15ull;
    std::uint64_t z = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    sum += static_cast<double>((z ^ (z >> 31)) >> 11) * 0x1p-53 - 0.5;
  }
  return sum * 1.7320508;
}
inline Doubles noises(Index count, unsigned seed, double scale = 1, double mean = 0) {
  Doubles x(static_cast<std::size_t>(count));
  for (Index i = 0; i < count; ++i) x[i] = mean + scale * noise(i, seed);
  return x;
}

inline double rounding_of(Precision type) {
  return type == Precision::fp32 ? 1e-5 : type == Precision::bf16 ? 0x1p-8 : 0x1p-11;
}
// Of one rounding, and of arithmetic in fp32 on values of this scale.
inline double tolerance(Precision type, double want, double scale) {
  return rounding_of(type) * std::fabs(want) * 1.01 + 4e-6 * scale + (type == Precision::fp16 ? 0x1p-24 : 0);
}

// ---- Memory ----

// Values on the device, `shift` of them off alignment.
class Plane : public Array {
 public:
  Plane(Precision type, Index count, int shift = 0)
      : Array(count * bytes_of(type), 0xa5, shift * bytes_of(type)), type_(type), count_(count) {}
  Plane(Precision type, const Doubles& values, int shift = 0)
      : Plane(type, static_cast<Index>(values.size()), shift) {
    Bytes bytes(values.size() * bytes_of(type_));
    for (std::size_t i = 0; i < values.size(); ++i) cuda::set(bytes, type_, i, values[i]);
    set_bytes(bytes);
  }

  float* floats() const { return static_cast<float*>(data()); }
  Values values() const { return {data(), type_}; }
  // As stored: what was set has been rounded.
  Doubles get() const {
    const Bytes all = bytes();
    Doubles values(count_);
    for (std::size_t i = 0; i < values.size(); ++i) values[i] = cuda::get(all, type_, i);
    return values;
  }

 private:
  Precision type_;
  Index count_;
};

struct IntPlane : Array {
  explicit IntPlane(const Ints& values) : Array(values.size() * 4) {
    if (!values.empty())
      must(cudaMemcpy(Array::data(), values.data(), values.size() * 4, cudaMemcpyHostToDevice));
  }
  const std::int32_t* data() const { return static_cast<const std::int32_t*>(Array::data()); }
};

// Launches twice from the same state of `outputs`: the same bits, and nothing beside them.
inline void run_twice(const std::vector<Plane*>& outputs, const std::function<void()>& launch) {
  std::vector<Bytes> before, once;
  for (const Plane* plane : outputs) before.push_back(plane->bytes());
  launch();
  must(cudaDeviceSynchronize());
  for (std::size_t i = 0; i < outputs.size(); ++i) {
    once.push_back(outputs[i]->bytes());
    outputs[i]->set_bytes(before[i]);
  }
  launch();
  must(cudaDeviceSynchronize());
  for (std::size_t i = 0; i < outputs.size(); ++i) {
    EXPECT_EQ(once[i], outputs[i]->bytes()) << "output " << i << " differs the second time";
  }
}

// The first difference above what one rounding and fp32 sums of this scale explain. A scale for all, or one for each.
inline void expect_near(Precision type, const Doubles& got, const Doubles& want, const Doubles& scales,
                        const char* what) {
  ASSERT_EQ(got.size(), want.size());
  for (std::size_t i = 0; i < got.size(); ++i) {
    const double scale = scales.size() == 1 ? scales[0] : scales[i];
    if (std::fabs(got[i] - want[i]) <= tolerance(type, want[i], scale)) continue;
    ADD_FAILURE() << what << "[" << i << "] is " << got[i] << ", not " << want[i] << " (" << name_of(type)
                  << ", scale " << scale << ")";
    return;
  }
}

inline std::string about(Precision type, Index rows, Index width, int shift) {
  return std::string(name_of(type)) + ", " + std::to_string(rows) + " x " + std::to_string(width) +
         ", shifted by " + std::to_string(shift);
}

struct Shape {
  Index rows, width;
};
// Around vectors (8, 4), what a warp (256, 512, 768, 1024) and what a block (4096, 8192) keeps, and beyond.
inline constexpr Shape kShapes[] = {{1, 1},     {3, 7},    {127, 64},   {300, 65},   {33, 264},  {300, 768},
                                    {3, 1000},  {9, 1024}, {127, 1025}, {300, 1032}, {40, 2048}, {3, 4096},
                                    {40, 4104}, {3, 5000}, {2, 8200},   {3, 16392},  {2, 20001}};

// Positions of documents: they start again at 0 here and there.
inline Ints some_positions(Index rows, Index most) {
  Ints positions;
  std::int32_t next = 0;
  for (Index row = 0; row < rows; ++row) {
    positions.push_back(next);
    next = noise(row, 99) > 1 || next + 1 == most ? 0 : next + 1;
  }
  return positions;
}

// ---- Derivatives by differences ----

inline double inner_product(const Doubles& a, const Doubles& b) {
  double sum = 0;
  for (std::size_t i = 0; i < a.size(); ++i) sum += a[i] * b[i];
  return sum;
}

// (f(x + e) - f(x - e)) / 2e for each coordinate of x, where f is dy . y.
inline Doubles differences(Doubles x, const std::function<double(const Doubles&)>& f) {
  constexpr double kStep = 1e-5;
  Doubles slopes;
  for (double& value : x) {
    const double kept = value;
    value = kept + kStep;
    const double above = f(x);
    value = kept - kStep;
    slopes.push_back((above - f(x)) / (2 * kStep));
    value = kept;
  }
  return slopes;
}
inline void expect_slopes(const Doubles& analytic, const Doubles& measured, const char* what) {
  ASSERT_EQ(analytic.size(), measured.size());
  for (std::size_t i = 0; i < analytic.size(); ++i)
    EXPECT_NEAR(analytic[i], measured[i], 1e-7) << what << " " << i;
}

class Layers : public NeedsGpu {};

}  // namespace scruple::train::cuda
