// Matrix products: OpenBLAS's, or plain loops in a build without it (no_openblas.cpp). Each call is serial, so that its
// bits depend on its shape alone; parallel work is cut into calls by the layers.
#pragma once

#include <cstdint>
#include <string>

namespace scruple::train {

using Index = std::int64_t;

// Rows of fp32 values, `stride` apart.
struct View {
  const float* data;
  Index stride;
};
struct Target {
  float* data;
  Index stride;
  operator View() const { return {data, stride}; }
};

// A factor of a product: a matrix as it lies in memory, or transposed(matrix).
struct Factor {
  View view;
  bool is_transposed = false;

  Factor(View matrix) : view(matrix) {}
  Factor(Target matrix) : view(matrix) {}
};
inline Factor transposed(View view) {
  Factor factor = view;
  factor.is_transposed = true;
  return factor;
}

// OpenBLAS waits for ever where it cannot have its buffer, one per thread that calls it. Throws std::bad_alloc
// where this machine cannot give them.
void reserve_buffers(int threads);

std::string products_by();  // whose they are, where that decides their bits: "OpenBLAS 0.3.21 for Zen"; ""

// c = alpha a b + beta c, with a [m, k], b [k, n] and c [m, n].
void product(Index m, Index n, Index k, float alpha, Factor a, Factor b, float beta, Target c);

}  // namespace scruple::train
