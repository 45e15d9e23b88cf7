// Matrix products without OpenBLAS: panels of 16 columns, 4 rows at a time. Each output's sum has one order, whatever the
// shape around it. Some times slower, and good enough where a GPU does the work.
#include <algorithm>
#include <cstring>

#include "train/cpu/blas.h"

namespace scruple::train {
namespace {

constexpr Index kRows = 4, kColumns = 16, kDepth = 256;
constexpr Index kTiles = 16;  // of rows, which stay in the cache

// Of a factor's lines, which are its rows or its columns, those from `first` on: panel[p][line], zeros where there is none.
template <Index kLines>
void pack(View from, bool lines_are_rows, Index first, Index lines, Index at, Index depth,
          float (&panel)[kDepth][kLines]) {
  if (lines < kLines) std::memset(panel, 0, sizeof panel);
  if (lines_are_rows) {
    for (Index i = 0; i < lines; ++i) {
      const float* const line = from.data + (first + i) * from.stride + at;
      for (Index p = 0; p < depth; ++p) panel[p][i] = line[p];
    }
    return;
  }
  for (Index p = 0; p < depth; ++p) std::copy_n(from.data + (at + p) * from.stride + first, lines, panel[p]);
}

using Sums = float[kRows][kColumns];
using Lanes = float __attribute__((vector_size(16)));  // in registers, which an array of floats is not
constexpr Index kLanes = 4;

void multiply(const float (&a)[kDepth][kRows], const float (&b)[kDepth][kColumns], Index depth, Sums& sums) {
  Lanes local[kRows][kColumns / kLanes] = {};
  for (Index p = 0; p < depth; ++p)
    for (Index c = 0; c < kColumns / kLanes; ++c) {
      Lanes column;
      std::memcpy(&column, &b[p][c * kLanes], sizeof column);
      for (Index r = 0; r < kRows; ++r) local[r][c] += a[p][r] * column;
    }
  std::memcpy(&sums, &local, sizeof sums);
}

// What is multiplied by 0 is not read.
void scale(Index m, Index n, float beta, Target c) {
  for (Index i = 0; i < m && beta != 1; ++i)
    for (Index j = 0; j < n; ++j) {
      float& value = c.data[i * c.stride + j];
      value = beta == 0 ? 0 : beta * value;
    }
}

}  // namespace

std::string products_by() { return ""; }

void reserve_buffers(int) {}

void product(Index m, Index n, Index k, float alpha, Factor a, Factor b, float beta, Target c) {
  float rows[kTiles][kDepth][kRows], columns[kDepth][kColumns];
  Sums sums;
  scale(m, n, beta, c);
  for (Index p = 0; p < k; p += kDepth) {
    const Index depth = std::min(kDepth, k - p);
    for (Index top = 0; top < m; top += kTiles * kRows) {
      const Index bottom = std::min(top + kTiles * kRows, m);
      for (Index i = top, t = 0; i < bottom; i += kRows, ++t)
        pack(a.view, !a.is_transposed, i, std::min(kRows, bottom - i), p, depth, rows[t]);
      for (Index j = 0; j < n; j += kColumns) {
        const Index wide = std::min(kColumns, n - j);
        pack(b.view, b.is_transposed, j, wide, p, depth, columns);
        for (Index i = top, t = 0; i < bottom; i += kRows, ++t) {
          multiply(rows[t], columns, depth, sums);
          for (Index r = 0; r < std::min(kRows, bottom - i); ++r)
            for (Index s = 0; s < wide; ++s) c.data[(i + r) * c.stride + j + s] += alpha * sums[r][s];
        }
      }
    }
  }
}

}  // namespace scruple::train
