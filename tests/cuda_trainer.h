// What tests of the trainer on a GPU share.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <string>
#include <utility>
#include <vector>

#include "tests/descriptions.h"
#include "tests/jobs.h"

namespace scruple::train {

class CudaTrainer : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!has_cuda()) GTEST_SKIP() << "this machine has no GPU that the trainer could run on";
  }
};

inline Job job_of(const Description& shape, OpenBackend backend, const std::string& recipe = "fp32",
                  Precision activations = Precision::fp32) {
  Job job = job_of(shape, 3, recipe, 1e-3);
  job.backend = backend;
  job.activations = activations;
  return job;
}

// Matrices whose moments are large enough to be offloaded.
inline Job with_large_matrices(scruple_policy policy) {
  Description shape = llama();
  shape.width = 320, shape.head_width = 80, shape.inner = 640;
  Job job = job_of(shape, cuda_backend, "scruple", Precision::bf16);
  job.gradients.policy = policy;
  return job;
}

// Values that are quick to draw, spread as first weights are.
inline Fill spread_values(const Description& shape) {
  const std::vector<Parameter> all = parameters_of(shape);
  return [all](int which, std::int64_t first, std::int64_t count, float* values) {
    const Parameter& parameter = all[static_cast<std::size_t>(which)];
    for (std::int64_t i = 0; i < count; ++i) {
      const auto mixed = static_cast<std::uint64_t>(first + i + which * 7919) * 0x9e3779b97f4a7c15u;
      const double uniform = static_cast<double>(mixed >> 40) / (1 << 24) - 0.5;
      values[i] = static_cast<float>(parameter.mean + parameter.deviation * 3.46 * uniform);
    }
  };
}

// Every byte of weights, moments and accumulators, scales included.
inline std::vector<std::vector<char>> bytes_of(Backend& backend, const std::vector<scruple_tensor>& rows) {
  std::vector<std::vector<char>> all;
  backend.engine().synchronize();
  for (const scruple_tensor& row : rows)
    for (const scruple_array& array : row.arrays) {
      if (array.format == nullptr || array.codes == nullptr) continue;
      const PlaneBytes size = plane_bytes(array.format, row.size);
      for (const auto& [plane, count] : {std::pair{array.codes, size.codes}, std::pair{array.aux, size.aux}})
        if (count > 0)
          backend.memory().read(all.emplace_back(static_cast<std::size_t>(count)).data(), plane, count);
    }
  return all;
}

}  // namespace scruple::train
