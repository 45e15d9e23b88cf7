// Tiles of attention on tensor cores: their sizes for each head width, rows in shared memory, products of a
// warp's own rows with them, and the walk over a block's tiles. The kernels are in attention_tensor.cuh.
#pragma once

#include <cmath>

#include "train/cuda/attention_rows.cuh"

namespace scruple::train::cuda {

inline constexpr int kWarps = 4, kThreads = 32 * kWarps;

// The tiling of a kernel for one head width. A warp owns 16 x fragments rows (queries, say). The others (then
// keys) come in tiles through shared memory, and `chunk` of their rows are multiplied at a time. Chosen so
// that registers do not spill and shared memory stays below 99 KB, the limit of a block on compute capability
// 8.6.
struct Tiling {
  int fragments, tile, chunk;
  bool kept;  // the own rows stay in registers
  __host__ __device__ constexpr int own() const { return 16 * fragments * kWarps; }
};
template <int D>
inline constexpr Tiling kForward = {2, 64, 64, D == 64};
template <int D>
inline constexpr Tiling kQueryGradient = {2, D > 80 ? 32 : 64, 32, D == 64};
template <int D>
inline constexpr Tiling kKeyGradient = {D == 64 ? 2 : 1, 64, D == 64 ? 32 : 64, false};

// Rows of D 16-bit values in shared memory, in pieces of 16 bytes, laid out without bank conflicts: the same
// piece of eight rows lies in eight different groups of banks. Where a row has a multiple of 8 pieces they
// are swizzled (XOR with the row); else rows are padded to an odd number of pieces.
template <int D>
struct Tile {
  static constexpr int kPieces = D / 8;
  static constexpr bool kExchanged = kPieces % 8 == 0;
  static constexpr int kStride = 16 * (kExchanged ? kPieces : kPieces | 1);  // bytes
  static __host__ __device__ constexpr std::uint32_t place(int row, int piece) {
    return static_cast<std::uint32_t>(row * kStride + 16 * (kExchanged ? piece ^ (row & 7) : piece));
  }
  // From the address of piece 0 or 1 of a row, of a tile that begins at a multiple of 256 bytes or 8 rows: the
  // address so many pieces on, an even number.
  static __host__ __device__ constexpr std::uint32_t further(std::uint32_t address, int pieces) {
    return kExchanged ? address ^ (16u * pieces) : address + 16u * pieces;
  }
};

// The row and the piece that a lane names to load_matrices: of four matrices in the order (row 0, piece 0),
// (row 8, piece 0), (row 0, piece 1), (row 8, piece 1) ...
__host__ __device__ constexpr int down_row(int lane) { return lane % 16; }
__host__ __device__ constexpr int down_piece(int lane) { return lane / 16; }
// ... and (0, 0), (0, 1), (8, 0), (8, 1).
__host__ __device__ constexpr int across_row(int lane) { return lane % 8 + lane / 16 * 8; }
__host__ __device__ constexpr int across_piece(int lane) { return lane / 8 % 2; }
// Where value v of a lane's four lies in a 16 x 8 product.
__host__ __device__ constexpr int product_row(int lane, int v) { return lane / 4 + v / 2 * 8; }
__host__ __device__ constexpr int product_column(int lane, int v) { return lane % 4 * 2 + v % 2; }

__device__ inline int lane_of_thread() { return static_cast<int>(threadIdx.x) % 32; }
__device__ inline int warp_of_thread() { return static_cast<int>(threadIdx.x) / 32; }

template <class T>
__device__ std::uint32_t pack(float low, float high) {
  if constexpr (std::is_same_v<T, __half>) {
    const __half2 both = __floats2half2_rn(low, high);
    return *reinterpret_cast<const std::uint32_t*>(&both);
  } else {
    const __nv_bfloat162 both = __floats2bfloat162_rn(low, high);
    return *reinterpret_cast<const std::uint32_t*>(&both);
  }
}

// The sum or maximum over the four lanes that hold one row of a product.
__device__ inline float sum_of_row(float x) {
  x += __shfl_xor_sync(~0u, x, 1);
  return x + __shfl_xor_sync(~0u, x, 2);
}
__device__ inline float maximum_of_row(float x) {
  x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
  return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}

// kWide pieces of each row from piece kFirst on. A thread's rows are multiples of 8 apart: one place serves all.
template <int D, int kRows, int kFirst, int kWide, class T>
__device__ void load_pieces(std::uint32_t to, Rows<const T> from, int first, int length) {
  constexpr int kStep = kThreads / kWide;  // rows
  static_assert(kThreads % kWide == 0 && kStep % 8 == 0 && kRows % kStep == 0);
  const int row = static_cast<int>(threadIdx.x) / kWide,
            piece = kFirst + static_cast<int>(threadIdx.x) % kWide;
  const std::uint32_t place = to + Tile<D>::place(row, piece);
#pragma unroll
  for (int i = 0; i < kRows; i += kStep)
    copy_later(place + i * Tile<D>::kStride, from.row(first + row + i) + piece * 8, first + row + i < length);
}
// Rows first ... first + kRows - 1 of those that there are; zeros beyond the length, for NaN times 0 is NaN.
template <int D, int kRows, class T>
__device__ void load_tile(std::uint32_t to, Rows<const T> from, int first, int length) {
  constexpr int kPieces = Tile<D>::kPieces, kRest = kPieces % 8;
  load_pieces<D, kRows, 0, kPieces - kRest>(to, from, first, length);
  if constexpr (kRest > 0) load_pieces<D, kRows, kPieces - kRest, kRest>(to, from, first, length);
}

// The left sides of products with a warp's own rows.
template <int D, int M, bool kKept>
class Own {
 public:
  // `address` of the warp's first row in shared memory, where it has come by now.
  __device__ explicit Own(std::uint32_t address)
      : address_(address + Tile<D>::place(down_row(lane_of_thread()), down_piece(lane_of_thread()))) {
    if constexpr (kKept) {
#pragma unroll
      for (int k = 0; k < D / 16; ++k) read(k, kept_[k]);
    }
  }
  __device__ void fragments(int k, std::uint32_t (&to)[M][4]) const {
    if constexpr (kKept) {
#pragma unroll
      for (int m = 0; m < M; ++m)
#pragma unroll
        for (int i = 0; i < 4; ++i) to[m][i] = kept_[k][m][i];
    } else {
      read(k, to);
    }
  }

 private:
  __device__ void read(int k, std::uint32_t (&to)[M][4]) const {
#pragma unroll
    for (int m = 0; m < M; ++m)
      load_matrices(to[m], Tile<D>::further(address_, k * 2) + m * 16 * Tile<D>::kStride);
  }
  std::uint32_t address_;
  std::uint32_t kept_[kKept ? D / 16 : 1][M][4];
};

template <int M, int N>
__device__ void clear(float (&c)[M][N][4]) {
#pragma unroll
  for (int m = 0; m < M; ++m)
#pragma unroll
    for (int n = 0; n < N; ++n)
#pragma unroll
      for (int v = 0; v < 4; ++v) c[m][n][v] = 0;
}

// c = own rows times the rows at `other`, over D. not_known() hides from the compiler that the lane is the
// same in every tile. Else it would keep the addresses of all steps from tile to tile, and spill registers.
template <class T, int D, int M, int N, bool kKept>
__device__ void multiply_rows(float (&c)[M][N][4], const Own<D, M, kKept>& own, std::uint32_t other) {
  const int lane = not_known(lane_of_thread());
  const std::uint32_t at = other + Tile<D>::place(across_row(lane), across_piece(lane));
  clear(c);
#pragma unroll
  for (int k = 0; k < D / 16; ++k) {
    std::uint32_t left[M][4];
    own.fragments(k, left);
#pragma unroll
    for (int n = 0; n < N; n += 2) {
      std::uint32_t right[4];
      load_matrices(right, Tile<D>::further(at, k * 2) + n * 8 * Tile<D>::kStride);
#pragma unroll
      for (int m = 0; m < M; ++m) {
        multiply<T>(c[m][n], left[m], right[0], right[1]);
        multiply<T>(c[m][n + 1], left[m], right[2], right[3]);
      }
    }
  }
}

// c += weights times the rows at `other`: one weight for each of these rows.
template <class T, int D, int M, int N>
__device__ void add_weighted(float (&c)[M][D / 8][4], const float (&weights)[M][N][4], std::uint32_t other) {
  const int lane = not_known(lane_of_thread());
  const std::uint32_t at = other + Tile<D>::place(down_row(lane), down_piece(lane));
#pragma unroll
  for (int k = 0; k < N / 2; ++k) {
    std::uint32_t left[M][4];
#pragma unroll
    for (int m = 0; m < M; ++m)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float(&w)[4] = weights[m][2 * k + i / 2];
        left[m][i] = pack<T>(w[i % 2 * 2], w[i % 2 * 2 + 1]);
      }
#pragma unroll
    for (int n = 0; n < D / 8; n += 2) {
      std::uint32_t right[4];
      load_matrices_transposed(right, Tile<D>::further(at, n) + k * 16 * Tile<D>::kStride);
#pragma unroll
      for (int m = 0; m < M; ++m) {
        multiply<T>(c[m][n], left[m], right[0], right[1]);
        multiply<T>(c[m][n + 1], left[m], right[2], right[3]);
      }
    }
  }
}

// Writes a warp's own rows, from `first` on, through its part of shared memory: 16 bytes at a time. `factors`
// of rows.
template <class T, int D, int M>
__device__ void store_rows(const float (&c)[M][D / 8][4], const float (&factors)[M][2], std::uint32_t own,
                           Rows<T> to, int first, int length) {
  const int lane = lane_of_thread();
  __syncwarp();
#pragma unroll
  for (int m = 0; m < M; ++m)
#pragma unroll
    for (int n = 0; n < D / 8; ++n)
#pragma unroll
      for (int half = 0; half < 2; ++half)
        store_shared(
            own + Tile<D>::place(m * 16 + product_row(lane, 2 * half), n) + 2 * product_column(lane, 0),
            pack<T>(c[m][n][2 * half] * factors[m][half], c[m][n][2 * half + 1] * factors[m][half]));
  __syncwarp();
  constexpr int kPieces = Tile<D>::kPieces;
#pragma unroll
  for (int i = 0; i < M * 16 * kPieces / 32; ++i) {
    const int row = (i * 32 + lane) / kPieces, piece = (i * 32 + lane) % kPieces;
    const uint4 value = load_shared(own + Tile<D>::place(row, piece));
    if (first + row < length) *reinterpret_cast<uint4*>(to.row(first + row) + piece * 8) = value;
  }
}
template <int M>
struct Factors {
  float of[M][2];
  __device__ explicit Factors(float x) {
#pragma unroll
    for (int m = 0; m < M; ++m) of[m][0] = of[m][1] = x;
  }
};

struct Range {
  int begin, end;
};

// Walks over the chunks of a block's tiles. All warps of the block call `arrive` before each tile, because it
// has a barrier; each warp calls `act` for its own chunks alone. These are one range, so three loops do it
// instead of one with a branch, around which every accumulator would have to be carried.
template <int kEach, class Arrive, class Act>
__device__ void walk(Range all, Range own, Arrive arrive, Act act) {
  int chunk = all.begin;
  const auto arrive_at_tile = [&] {
    if (chunk % kEach == 0) arrive(chunk / kEach);
  };
#pragma unroll 1
  for (const int end = min(own.begin, all.end); chunk < end; ++chunk) arrive_at_tile();
#pragma unroll 1
  for (const int end = min(own.end, all.end); chunk < end; ++chunk) {
    arrive_at_tile();
    act(chunk);
  }
#pragma unroll 1
  for (; chunk < all.end; ++chunk) arrive_at_tile();
}

}  // namespace scruple::train::cuda
