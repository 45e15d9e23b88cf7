// The layers on a GPU against the same formulas in double: every type, widths and rows around the edges of vectors, warps
// and blocks, pointers that are not aligned. Each runs twice and must give the same bits, and writes nothing beside its
// output. The derivatives in double are themselves held against differences.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <map>
#include <string>
#include <vector>

#include "train/cuda/layers.h"

namespace scruple::train::cuda {
namespace {

using Index = std::int64_t;
using Doubles = std::vector<double>;
using Ints = std::vector<std::int32_t>;

constexpr Precision kTypes[] = {Precision::fp32, Precision::bf16, Precision::fp16};

const char* name_of(Precision type) { return kPrecisions[static_cast<int>(type)]; }
// A type other than this one, for weights beside activations.
Precision other_than(Precision type) { return type == Precision::fp32 ? Precision::bf16 : Precision::fp32; }

// ---- Numbers ----

// From a counter: about normal, deviation 1.
double noise(Index i, unsigned seed) {
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
Doubles noises(Index count, unsigned seed, double scale = 1, double mean = 0) {
  Doubles x(static_cast<std::size_t>(count));
  for (Index i = 0; i < count; ++i) x[static_cast<std::size_t>(i)] = mean + scale * noise(i, seed);
  return x;
}

double rounding_of(Precision type) {
  return type == Precision::fp32 ? 1e-5 : type == Precision::bf16 ? 0x1p-8 : 0x1p-11;
}
// Of one rounding, and of arithmetic in fp32 on values of this scale.
double tolerance(Precision type, double want, double scale) {
  return rounding_of(type) * std::fabs(want) * 1.01 + 4e-6 * scale + (type == Precision::fp16 ? 0x1p-24 : 0);
}

// ---- Memory ----

void must(cudaError_t error) { ASSERT_EQ(error, cudaSuccess) << cudaGetErrorString(error); }

bool no_device() {
  int count = 0;
  const bool none = cudaGetDeviceCount(&count) != cudaSuccess || count == 0;
  cudaGetLastError();
  return none;
}
#define NEEDS_DEVICE() \
  if (no_device()) GTEST_SKIP() << "no GPU"

using Bytes = std::vector<unsigned char>;

// Values on the device between guard bytes, `shift` values off alignment.
class Plane {
 public:
  Plane(Precision type, Index count, int shift = 0) : type_(type), count_(count), shift_(shift) {
    must(cudaMalloc(&base_, static_cast<std::size_t>(whole())));
    must(cudaMemset(base_, kGuard, static_cast<std::size_t>(whole())));
  }
  Plane(Precision type, const Doubles& values, int shift = 0)
      : Plane(type, static_cast<Index>(values.size()), shift) {
    set(values);
  }
  Plane(const Plane&) = delete;
  ~Plane() { cudaFree(base_); }

  void* data() const { return static_cast<unsigned char*>(base_) + begin(); }
  float* floats() const { return static_cast<float*>(data()); }
  Values values() const { return {data(), type_}; }

  void set(const Doubles& values) {
    Bytes bytes(values.size() * static_cast<std::size_t>(bytes_of(type_)));
    for (std::size_t i = 0; i < values.size(); ++i) put(bytes, i, static_cast<float>(values[i]));
    set_bytes(bytes);
  }
  void set_bytes(const Bytes& bytes) {
    if (!bytes.empty()) must(cudaMemcpy(data(), bytes.data(), bytes.size(), cudaMemcpyHostToDevice));
  }
  Bytes bytes() const {
    Bytes bytes(static_cast<std::size_t>(count_ * bytes_of(type_)));
    if (!bytes.empty()) must(cudaMemcpy(bytes.data(), data(), bytes.size(), cudaMemcpyDeviceToHost));
    return bytes;
  }
  // As stored: what was set has been rounded.
  Doubles get() const {
    const Bytes all = bytes();
    Doubles values(static_cast<std::size_t>(count_));
    for (std::size_t i = 0; i < values.size(); ++i) values[i] = take(all, i);
    return values;
  }
  bool guarded() const {
    Bytes all(static_cast<std::size_t>(whole()));
    must(cudaMemcpy(all.data(), base_, all.size(), cudaMemcpyDeviceToHost));
    for (Index i = 0; i < whole(); ++i)
      if ((i < begin() || i >= begin() + count_ * bytes_of(type_)) &&
          all[static_cast<std::size_t>(i)] != kGuard)
        return false;
    return true;
  }

 private:
  static constexpr unsigned char kGuard = 0xa5;
  static constexpr Index kGuards = 256;
  Index begin() const { return kGuards + shift_ * bytes_of(type_); }
  Index whole() const { return begin() + count_ * bytes_of(type_) + kGuards; }
  void put(Bytes& bytes, std::size_t i, float x) const {
    if (type_ == Precision::fp32) {
      std::memcpy(&bytes[4 * i], &x, 4);
    } else if (type_ == Precision::bf16) {
      const __nv_bfloat16 code = __float2bfloat16_rn(x);
      std::memcpy(&bytes[2 * i], &code, 2);
    } else {
      const __half code = __float2half_rn(x);
      std::memcpy(&bytes[2 * i], &code, 2);
    }
  }
  double take(const Bytes& bytes, std::size_t i) const {
    if (type_ == Precision::fp32) {
      float x;
      std::memcpy(&x, &bytes[4 * i], 4);
      return static_cast<double>(x);
    }
    if (type_ == Precision::bf16) {
      __nv_bfloat16 code;
      std::memcpy(&code, &bytes[2 * i], 2);
      return static_cast<double>(__bfloat162float(code));
    }
    __half code;
    std::memcpy(&code, &bytes[2 * i], 2);
    return static_cast<double>(__half2float(code));
  }

  Precision type_;
  Index count_;
  int shift_;
  void* base_ = nullptr;
};

class IntPlane {
 public:
  explicit IntPlane(const Ints& values) {
    must(cudaMalloc(&data_, std::max<std::size_t>(4, values.size() * 4)));
    if (!values.empty()) must(cudaMemcpy(data_, values.data(), values.size() * 4, cudaMemcpyHostToDevice));
  }
  IntPlane(const IntPlane&) = delete;
  ~IntPlane() { cudaFree(data_); }
  const std::int32_t* data() const { return static_cast<const std::int32_t*>(data_); }

 private:
  void* data_ = nullptr;
};

// Launches twice from the same state of `outputs`: the same bits, and nothing beside them.
void run_twice(const std::vector<Plane*>& outputs, const std::function<void()>& launch) {
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
    EXPECT_TRUE(outputs[i]->guarded()) << "beside output " << i;
  }
}

// The first difference above what one rounding and fp32 sums of this scale explain. A scale for all, or one for each.
void expect_near(Precision type, const Doubles& got, const Doubles& want, const Doubles& scales,
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

std::string about(Precision type, Index rows, Index width, int shift) {
  return std::string(name_of(type)) + ", " + std::to_string(rows) + " x " + std::to_string(width) +
         ", shifted by " + std::to_string(shift);
}

struct Shape {
  Index rows, width;
};
// Around vectors (8, 4), what a warp (256, 512, 768, 1024) and what a block (4096, 8192) keeps, and beyond.
constexpr Shape kShapes[] = {{1, 1},     {3, 7},    {127, 64},   {300, 65},   {33, 264},  {300, 768},
                             {3, 1000},  {9, 1024}, {127, 1025}, {300, 1032}, {40, 2048}, {3, 4096},
                             {40, 4104}, {3, 5000}, {2, 8200},   {3, 16392},  {2, 20001}};

// Positions of documents: they start again at 0 here and there.
Ints some_positions(Index rows, Index most) {
  Ints positions;
  std::int32_t next = 0;
  for (Index row = 0; row < rows; ++row) {
    positions.push_back(next);
    next = noise(row, 99) > 1 || next + 1 == most ? 0 : next + 1;
  }
  return positions;
}

// ---- convert ----

TEST(Layers, ConvertRoundsAsTheHostDoes) {
  NEEDS_DEVICE();
  const double inf = std::numeric_limits<double>::infinity();
  for (Precision from : kTypes)
    for (Precision to : kTypes)
      for (Index count : {1, 7, 8, 65, 1000, 100003})
        for (int shifts = 0; shifts < 3; ++shifts) {
          SCOPED_TRACE(std::string(name_of(from)) + " to " + name_of(to) + ", " + std::to_string(count));
          Doubles values = noises(count, 1, 3);
          // Ties to even both ways in bf16 and fp16; beyond fp16; its subnormals.
          const double special[] = {1 + 0x1p-8, 1 + 3 * 0x1p-8, 1 + 0x1p-11, 1 + 3 * 0x1p-11,
                                    1e30,       -inf,           0x1.8p-24,   -0.0};
          for (std::size_t i = 0; i < 8 && i < values.size(); ++i) values[values.size() - 1 - i] = special[i];
          const Plane in(from, values, shifts == 1 ? 1 : 0);
          Plane out(to, count, shifts == 2 ? 1 : 0), want(to, in.get());
          run_twice({&out}, [&] { convert(in.values(), out.values(), count, nullptr); });
          EXPECT_EQ(out.bytes(), want.bytes());
        }
  Plane nan(Precision::fp32, Doubles(9, std::nan(""))), out(Precision::bf16, 9);
  convert(nan.values(), out.values(), 9, nullptr);
  for (double x : out.get()) EXPECT_TRUE(std::isnan(x));
}

// ---- embed and its gradient ----

TEST(Layers, EmbedAddsPositions) {
  NEEDS_DEVICE();
  constexpr Index kWords = 50, kPlaces = 40;
  for (Precision type : kTypes)
    for (const Shape& shape : {Shape{1, 1}, {3, 7}, {127, 64}, {300, 65}, {300, 768}, {3, 1025}, {5, 5000}})
      for (int variant = 0; variant < 4; ++variant) {
        const bool placed = variant != 1;
        const int shift = variant == 2 ? 1 : 0;
        SCOPED_TRACE(about(type, shape.rows, shape.width, shift) + (placed ? ", with positions" : ""));
        const Plane words(variant == 3 ? other_than(type) : type, noises(kWords * shape.width, 1), shift);
        const Plane places(variant == 0 ? Precision::fp32 : type, noises(kPlaces * shape.width, 2));
        Plane x(type, shape.rows * shape.width);
        Ints tokens;
        for (Index r = 0; r < shape.rows; ++r)
          tokens.push_back(static_cast<std::int32_t>((r * 31 + 49) % kWords));
        const Ints positions = some_positions(shape.rows, kPlaces);
        const IntPlane token_plane(tokens), position_plane(positions);
        run_twice({&x}, [&] {
          embed(type, token_plane.data(), placed ? position_plane.data() : nullptr, shape.rows, shape.width,
                words.values(), placed ? places.values() : Values{}, x.data(), nullptr);
        });
        const Doubles a = words.get(), b = places.get();
        Doubles want;
        for (Index r = 0; r < shape.rows; ++r)
          for (Index c = 0; c < shape.width; ++c)
            want.push_back(
                a[static_cast<std::size_t>(tokens[static_cast<std::size_t>(r)] * shape.width + c)] +
                (placed
                     ? b[static_cast<std::size_t>(positions[static_cast<std::size_t>(r)] * shape.width + c)]
                     : 0));
        expect_near(type, x.get(), want, {0.1}, "x");
      }
}

struct ReaderLists {
  Ints target, begin, order;
};
ReaderLists readers_of(const Ints& tokens) {
  std::map<std::int32_t, Ints> rows;
  for (std::size_t r = 0; r < tokens.size(); ++r) rows[tokens[r]].push_back(static_cast<std::int32_t>(r));
  ReaderLists lists;
  lists.begin.push_back(0);
  for (const auto& [target, of] : rows) {
    lists.target.push_back(target);
    lists.order.insert(lists.order.end(), of.begin(), of.end());
    lists.begin.push_back(static_cast<std::int32_t>(lists.order.size()));
  }
  return lists;
}

struct TableCase {
  Index rows, words, width, first;
};

// Token r of a case: every fourth is one of three, which so have many readers.
std::int32_t token_of(const TableCase& c, Index r) {
  const Index word = r % 4 == 0 ? r % 3 : (r * 7919) % c.words;
  return static_cast<std::int32_t>(c.first + word);
}

TEST(Layers, EmbeddingGradientAddsReaders) {
  NEEDS_DEVICE();
  // Few and many readers to a target; one target to a block, and several; a slab of columns, and several.
  const TableCase cases[] = {{1, 1, 1, 0},         {3, 2, 7, 5},         {127, 300, 64, 0},
                             {3000, 20, 65, 1000}, {4000, 2500, 16, 3},  {300, 40, 768, 50},
                             {500, 3, 1025, 0},    {130, 3, 4096, 9},    {97, 3, 65, 0},
                             {132, 3, 264, 0},     {40000, 20000, 16, 0}};
  for (Precision type : kTypes)
    for (const TableCase& c : cases)
      for (int variant = 0; variant < 3; ++variant) {
        const int shift = variant == 2 ? 1 : 0;
        const Precision table_type = variant == 1 ? type : Precision::fp32;
        SCOPED_TRACE(about(type, c.rows, c.width, shift) + ", table " + name_of(table_type));
        Ints tokens;
        for (Index r = 0; r < c.rows; ++r) tokens.push_back(token_of(c, r));
        const ReaderLists lists = readers_of(tokens);
        const IntPlane target(lists.target), begin(lists.begin), order(lists.order);
        const Plane g(type, noises(c.rows * c.width, 1), shift);
        Plane table(table_type, noises(c.words * c.width, 2));  // nobody reads the last ones, often
        Doubles want = table.get(), sizes(want.size(), 0.1);
        run_twice({&table}, [&] {
          embedding_gradient(
              type, g.data(), c.width,
              {target.data(), begin.data(), order.data(), static_cast<Index>(lists.target.size())}, c.first,
              table.values(), nullptr);
        });
        const Doubles rows = g.get();
        for (Index r = 0; r < c.rows; ++r)
          for (Index i = 0; i < c.width; ++i) {
            const auto at =
                static_cast<std::size_t>((tokens[static_cast<std::size_t>(r)] - c.first) * c.width + i);
            const double value = rows[static_cast<std::size_t>(r * c.width + i)];
            want[at] += value, sizes[at] += std::fabs(value);
          }
        expect_near(table_type, table.get(), want, sizes, "table");
      }
}

// ---- Norms in double ----

struct NormCase {
  NormKind kind;
  double epsilon;
  Index rows, width;
};
struct NormResult {
  Doubles y, mean, rstd;
};

NormResult norm_in_double(const NormCase& c, const Doubles& x, const Doubles& weight, const Doubles& bias) {
  NormResult result{Doubles(x.size()), {}, {}};
  const double n = static_cast<double>(c.width);
  for (Index r = 0; r < c.rows; ++r) {
    const double* row = &x[static_cast<std::size_t>(r * c.width)];
    double mean = 0, squares = 0;
    if (c.kind == NormKind::layer)
      for (Index i = 0; i < c.width; ++i) mean += row[i] / n;
    for (Index i = 0; i < c.width; ++i) squares += (row[i] - mean) * (row[i] - mean) / n;
    const double rstd = 1 / std::sqrt(squares + c.epsilon);
    for (Index i = 0; i < c.width; ++i) {
      const auto at = static_cast<std::size_t>(i);
      result.y[static_cast<std::size_t>(r * c.width + i)] =
          (row[i] - mean) * rstd * weight[at] + (bias.empty() ? 0 : bias[at]);
    }
    result.mean.push_back(mean), result.rstd.push_back(rstd);
  }
  return result;
}

struct NormGradients {
  Doubles dx, dweight, dbias;
  Doubles dweight_size, dbias_size;  // sums of magnitudes
};

NormGradients norm_back_in_double(const NormCase& c, const Doubles& dy, const Doubles& x,
                                  const Doubles& weight) {
  const NormResult forward = norm_in_double(c, x, weight, {});
  const auto width = static_cast<std::size_t>(c.width);
  NormGradients out{Doubles(x.size()), Doubles(width), Doubles(width), Doubles(width), Doubles(width)};
  const double n = static_cast<double>(c.width);
  for (std::size_t r = 0; r < static_cast<std::size_t>(c.rows); ++r) {
    const double mean = forward.mean[r], rstd = forward.rstd[r];
    double mean_a = 0, mean_ah = 0;
    for (std::size_t i = 0; i < width; ++i) {
      const double h = (x[r * width + i] - mean) * rstd, g = dy[r * width + i], a = g * weight[i];
      if (c.kind == NormKind::layer) mean_a += a / n;
      mean_ah += a * h / n;
      out.dweight[i] += g * h, out.dbias[i] += g;
      // x and the mean are rounded before they are subtracted.
      out.dweight_size[i] += std::fabs(g) * (std::fabs(x[r * width + i]) + std::fabs(mean)) * rstd;
      out.dbias_size[i] += std::fabs(g);
    }
    for (std::size_t i = 0; i < width; ++i) {
      const double h = (x[r * width + i] - mean) * rstd;
      out.dx[r * width + i] = rstd * (dy[r * width + i] * weight[i] - mean_a - h * mean_ah);
    }
  }
  return out;
}

double inner_product(const Doubles& a, const Doubles& b) {
  double sum = 0;
  for (std::size_t i = 0; i < a.size(); ++i) sum += a[i] * b[i];
  return sum;
}

// (f(x + e) - f(x - e)) / 2e for each coordinate of x, where f is dy . y.
Doubles differences(Doubles x, const std::function<double(const Doubles&)>& f) {
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
void expect_slopes(const Doubles& analytic, const Doubles& measured, const char* what) {
  ASSERT_EQ(analytic.size(), measured.size());
  for (std::size_t i = 0; i < analytic.size(); ++i)
    EXPECT_NEAR(analytic[i], measured[i], 1e-7) << what << " " << i;
}

TEST(LayersReference, NormGradientsAreSlopes) {
  for (NormKind kind : {NormKind::layer, NormKind::rms}) {
    const NormCase c{kind, 1e-3, 3, 5};
    const Doubles x = noises(15, 1, 2, 0.5), dy = noises(15, 2), weight = noises(5, 3, 0.5, 1),
                  bias = noises(5, 4);
    const NormGradients back = norm_back_in_double(c, dy, x, weight);
    const auto y = [&](const Doubles& xs, const Doubles& ws, const Doubles& bs) {
      return inner_product(norm_in_double(c, xs, ws, bs).y, dy);
    };
    expect_slopes(back.dx, differences(x, [&](const Doubles& v) { return y(v, weight, bias); }), "dx");
    expect_slopes(back.dweight, differences(weight, [&](const Doubles& v) { return y(x, v, bias); }),
                  "dweight");
    expect_slopes(back.dbias, differences(bias, [&](const Doubles& v) { return y(x, weight, v); }), "dbias");
  }
}

// ---- Norms ----

void check_normalise(Precision type, NormKind kind, const Shape& shape, int variant) {
  const int shift = variant == 1 ? 1 : 0;
  const bool biased = kind == NormKind::layer && variant != 2;
  // Far from 0, so that a variance from squares alone would show: in fp32 a thousand deviations, in 16 bits a few.
  const double offset = variant == 0 ? (type == Precision::fp32 ? 1000 : 5) : 0;
  SCOPED_TRACE(about(type, shape.rows, shape.width, shift) + (kind == NormKind::layer ? ", layer" : ", rms"));
  const Plane x(type, noises(shape.rows * shape.width, 1, 1, offset), shift);
  const Plane weight(variant == 0 ? other_than(type) : type, noises(shape.width, 2, 0.3, 1));
  const Plane bias(Precision::fp32, noises(shape.width, 3), variant == 3 ? 1 : 0);
  Plane y(type, shape.rows * shape.width), mean(Precision::fp32, shape.rows),
      rstd(Precision::fp32, shape.rows);
  const Norm norm{kind, 1e-5f, weight.values(), biased ? bias.values() : Values{}};
  const bool keeps_mean = kind == NormKind::layer;
  run_twice({&y, &mean, &rstd}, [&] {
    normalise(type, norm, x.data(), shape.rows, shape.width, y.data(), keeps_mean ? mean.floats() : nullptr,
              rstd.floats(), nullptr);
  });
  const NormCase c{kind, static_cast<double>(1e-5f), shape.rows, shape.width};
  const NormResult want = norm_in_double(c, x.get(), weight.get(), biased ? bias.get() : Doubles());
  if (shape.width == 1 && kind == NormKind::layer) {  // nothing but rounding, times 1 / sqrt(epsilon)
    expect_near(type, mean.get(), want.mean, {1}, "mean");
    return;
  }
  const double scale = 1 + 0.1 * offset;  // the mean's rounding, in deviations
  expect_near(type, y.get(), want.y, {scale}, "y");
  if (keeps_mean) expect_near(Precision::fp32, mean.get(), want.mean, {0.1}, "mean");
  expect_near(Precision::fp32, rstd.get(), want.rstd, {0.1}, "rstd");
}

TEST(Layers, Normalise) {
  NEEDS_DEVICE();
  for (Precision type : kTypes)
    for (NormKind kind : {NormKind::layer, NormKind::rms})
      for (const Shape& shape : kShapes)
        for (int variant = 0; variant < 4; ++variant) check_normalise(type, kind, shape, variant);
}

void check_normalise_backward(Precision type, NormKind kind, const Shape& shape, int variant) {
  const bool adds = variant % 2 == 1;
  const int shift = variant == 2 ? 1 : 0;
  SCOPED_TRACE(about(type, shape.rows, shape.width, shift) + (kind == NormKind::layer ? ", layer" : ", rms") +
               (adds ? ", adds" : ""));
  const Index count = shape.rows * shape.width, parts = norm_parts(shape.rows);
  const Plane x(type, noises(count, 1, 1, 0.5)), dy(type, noises(count, 2), shift);
  const Plane weight(variant == 0 ? other_than(type) : type, noises(shape.width, 3, 0.3, 1));
  const NormCase c{kind, static_cast<double>(1e-5f), shape.rows, shape.width};
  const NormResult forward = norm_in_double(c, x.get(), weight.get(), {});
  const Plane mean(Precision::fp32, forward.mean), rstd(Precision::fp32, forward.rstd);
  Plane g(type, noises(count, 4)), sums(Precision::fp32, parts * 2 * shape.width);
  const Doubles before = g.get();
  const Norm norm{kind, 1e-5f, weight.values(), {}};
  run_twice({&g, &sums}, [&] {
    normalise_backward(type, norm, dy.data(), x.data(), kind == NormKind::layer ? mean.floats() : nullptr,
                       rstd.floats(), shape.rows, shape.width, adds, g.data(), sums.floats(), nullptr);
  });
  NormGradients want = norm_back_in_double(c, dy.get(), x.get(), weight.get());
  if (adds)
    for (std::size_t i = 0; i < want.dx.size(); ++i) want.dx[i] += before[i];
  const Precision out_type = variant == 0 ? type : Precision::fp32;
  Plane dweight(out_type, shape.width), dbias(out_type, shape.width, shift);
  run_twice({&dweight, &dbias}, [&] {
    sum_parts(sums.floats(), parts, 2 * shape.width, shape.width, dweight.values(), nullptr);
    sum_parts(sums.floats() + shape.width, parts, 2 * shape.width, shape.width, dbias.values(), nullptr);
  });
  expect_near(out_type, dbias.get(), want.dbias, want.dbias_size, "dbias");
  // One column: h is 0, or as good as 1, and rstd up to 1 / sqrt(epsilon) magnifies what fp32 leaves of the rest.
  if (shape.width == 1) return;
  const double steepest = *std::max_element(forward.rstd.begin(), forward.rstd.end());
  expect_near(type, g.get(), want.dx, {std::max(1.0, steepest)}, "dx");
  expect_near(out_type, dweight.get(), want.dweight, want.dweight_size, "dweight");
}

TEST(Layers, NormaliseBackward) {
  NEEDS_DEVICE();
  for (Precision type : kTypes)
    for (NormKind kind : {NormKind::layer, NormKind::rms})
      for (const Shape& shape : kShapes)
        for (int variant = 0; variant < 3; ++variant) check_normalise_backward(type, kind, shape, variant);
  // More rows than all blocks take at once.
  for (const Shape& shape : {Shape{5000, 64}, {2500, 72}, {1000, 1040}})
    check_normalise_backward(Precision::bf16, NormKind::layer, shape, 1);
}

// One workspace serves all widths and types.
TEST(Layers, PartsAreFewAndKnownFromTheRows) {
  for (Index rows : {Index{1}, Index{3}, Index{300}, Index{65536}, Index{1} << 31}) {
    EXPECT_GE(norm_parts(rows), 1);
    EXPECT_GE(bias_parts(rows), 1);
    EXPECT_LE(norm_parts(rows), 4096);
    EXPECT_LE(bias_parts(rows), 4096);
  }
}

// ---- Sums of columns ----

TEST(Layers, SumPartsAndBiasGradient) {
  NEEDS_DEVICE();
  for (Precision type : kTypes)
    for (const Shape& shape :
         {Shape{1, 1}, {3, 7}, {127, 64}, {300, 65}, {9000, 40}, {70, 768}, {300, 1025}, {40, 5000}})
      for (int variant = 0; variant < 4; ++variant) {
        // A product's columns among those of others: rows further apart, from a column that may be odd.
        const Index beside = variant == 0 ? 0 : variant == 1 ? 16 : 5, column = variant == 3 ? 1 : 0;
        const Index stride = shape.width + beside, parts = bias_parts(shape.rows);
        SCOPED_TRACE(about(type, shape.rows, shape.width, 0) + ", stride " + std::to_string(stride));
        const Plane dy(type, noises(shape.rows * stride, 1, 1, 0.1));
        const Precision out_type = variant == 2 ? other_than(type) : type;
        Plane sums(Precision::fp32, parts * shape.width), out(out_type, shape.width, variant == 3 ? 1 : 0);
        const char* first = static_cast<const char*>(dy.data()) + column * bytes_of(type);
        run_twice({&sums, &out}, [&] {
          bias_gradient(type, first, shape.rows, stride, shape.width, sums.floats(), out.values(), nullptr);
        });
        Doubles want(static_cast<std::size_t>(shape.width)), sizes(want.size());
        const Doubles values = dy.get();
        for (Index r = 0; r < shape.rows; ++r)
          for (Index i = 0; i < shape.width; ++i) {
            const double value = values[static_cast<std::size_t>(r * stride + column + i)];
            want[static_cast<std::size_t>(i)] += value,
                sizes[static_cast<std::size_t>(i)] += std::fabs(value);
          }
        expect_near(out_type, out.get(), want, sizes, "bias");
      }
  // The sum of nothing.
  Plane none(Precision::bf16, 9);
  sum_parts(nullptr, 0, 9, 9, none.values(), nullptr);
  for (double x : none.get()) EXPECT_EQ(x, 0);
  bias_gradient(Precision::bf16, nullptr, 0, 9, 9, nullptr, none.values(), nullptr);
  for (double x : none.get()) EXPECT_EQ(x, 0);
}

// ---- Heads in double ----

struct HeadsCase {
  Index rows;
  int heads, kv_heads, width;
  bool turned, query_norm, key_norm;
  Index qkv() const { return static_cast<Index>(heads + 2 * kv_heads) * width; }
};
constexpr double kHeadEpsilon = 1e-3;
constexpr Index kContext = 37;

struct HeadsInputs {
  Ints positions;
  Doubles rotation, query_norm, key_norm;
  const Doubles& norm(const HeadsCase& c, int head) const { return head < c.heads ? query_norm : key_norm; }
};

HeadsInputs heads_inputs(const HeadsCase& c) {
  HeadsInputs in{some_positions(c.rows, kContext), {}, {}, {}};
  for (Index p = 0; c.turned && p < kContext; ++p)
    for (int part = 0; part < 2; ++part)
      for (int i = 0; i < c.width / 2; ++i) {
        const double angle = static_cast<double>(p) * std::pow(100.0, -2.0 * i / c.width);
        in.rotation.push_back(
            static_cast<double>(static_cast<float>(part == 0 ? std::cos(angle) : std::sin(angle))));
      }
  if (c.query_norm) in.query_norm = noises(c.width, 5, 0.3, 1);
  if (c.key_norm) in.key_norm = noises(c.width, 6, 0.3, 1);
  return in;
}

void rotate(const HeadsInputs& in, Index position, int width, double sign, double* x) {
  const int pairs = width / 2;
  for (int i = 0; i < pairs; ++i) {
    const double c = in.rotation[static_cast<std::size_t>(position * width + i)];
    const double s = sign * in.rotation[static_cast<std::size_t>(position * width + pairs + i)];
    const double a = x[i], b = x[i + pairs];
    x[i] = a * c - b * s, x[i + pairs] = b * c + a * s;
  }
}

double head_rstd(const double* x, int width) {
  double squares = 0;
  for (int i = 0; i < width; ++i) squares += x[i] * x[i] / width;
  return 1 / std::sqrt(squares + kHeadEpsilon);
}

Doubles turn_in_double(const HeadsCase& c, const HeadsInputs& in, Doubles x) {
  for (Index r = 0; r < c.rows; ++r)
    for (int head = 0; head < c.heads + c.kv_heads; ++head) {
      double* at = &x[static_cast<std::size_t>(r * c.qkv() + head * c.width)];
      const Doubles& norm = in.norm(c, head);
      if (!norm.empty()) {
        const double rstd = head_rstd(at, c.width);
        for (int i = 0; i < c.width; ++i) at[i] *= rstd * norm[static_cast<std::size_t>(i)];
      }
      if (c.turned) rotate(in, in.positions[static_cast<std::size_t>(r)], c.width, 1, at);
    }
  return x;
}

struct HeadGradients {
  Doubles dx, query_norm, key_norm, query_size, key_size;
};

HeadGradients turn_back_in_double(const HeadsCase& c, const HeadsInputs& in, const Doubles& x, Doubles g) {
  const auto width = static_cast<std::size_t>(c.width);
  HeadGradients out{{}, Doubles(width), Doubles(width), Doubles(width), Doubles(width)};
  for (Index r = 0; r < c.rows; ++r)
    for (int head = 0; head < c.heads + c.kv_heads; ++head) {
      const auto first = static_cast<std::size_t>(r * c.qkv() + head * c.width);
      double* d = &g[first];
      if (c.turned) rotate(in, in.positions[static_cast<std::size_t>(r)], c.width, -1, d);
      const Doubles& norm = in.norm(c, head);
      if (norm.empty()) continue;
      Doubles& sum = head < c.heads ? out.query_norm : out.key_norm;
      Doubles& size = head < c.heads ? out.query_size : out.key_size;
      const double rstd = head_rstd(&x[first], c.width);
      double mean = 0;
      for (std::size_t i = 0; i < width; ++i) {
        const double h = x[first + i] * rstd;
        mean += d[i] * norm[i] * h / c.width;
        sum[i] += d[i] * h, size[i] += std::fabs(d[i] * h);
      }
      for (std::size_t i = 0; i < width; ++i) d[i] = rstd * (d[i] * norm[i] - x[first + i] * rstd * mean);
    }
  out.dx = std::move(g);
  return out;
}

TEST(LayersReference, HeadGradientsAreSlopes) {
  const HeadsCase c{3, 2, 1, 6, true, true, true};
  const HeadsInputs in = heads_inputs(c);
  const Doubles x = noises(c.rows * c.qkv(), 1), g = noises(c.rows * c.qkv(), 2);
  const HeadGradients back = turn_back_in_double(c, in, x, g);
  expect_slopes(back.dx,
                differences(x, [&](const Doubles& v) { return inner_product(turn_in_double(c, in, v), g); }),
                "dx");
  const auto of_norms = [&](const Doubles& query, const Doubles& key) {
    return inner_product(turn_in_double(c, {in.positions, in.rotation, query, key}, x), g);
  };
  expect_slopes(back.query_norm,
                differences(in.query_norm, [&](const Doubles& v) { return of_norms(v, in.key_norm); }),
                "query");
  expect_slopes(back.key_norm,
                differences(in.key_norm, [&](const Doubles& v) { return of_norms(in.query_norm, v); }),
                "key");
}

// ---- Heads ----

constexpr HeadsCase kHeadsCases[] = {
    {1, 1, 1, 2, true, false, false},   {3, 2, 1, 6, true, true, true},
    {37, 4, 2, 64, true, false, false}, {300, 12, 12, 64, true, true, true},
    {37, 5, 1, 80, true, true, true},   {37, 3, 3, 96, true, false, true},
    {300, 6, 2, 128, true, true, true}, {37, 4, 4, 128, true, false, false},
    {9, 2, 1, 256, true, true, true},   {9, 2, 1, 250, true, true, false},
    {37, 3, 1, 64, false, true, true},  {37, 3, 1, 7, false, true, true},
    {9, 2, 2, 33, false, true, true},   {9, 2, 1, 300, false, true, true},
    {3, 2, 1, 600, false, true, true},  {37, 3, 1, 64, false, false, false},
    {5, 3, 1, 7, false, false, false},  {127, 7, 1, 40, true, true, true},
    {5000, 2, 1, 16, true, true, true},
};

struct HeadsOnDevice {
  HeadsOnDevice(const HeadsCase& c, const HeadsInputs& in, Precision norm_type)
      : positions(in.positions),
        rotation(Precision::fp32, in.rotation),
        query_norm(norm_type, in.query_norm),
        key_norm(norm_type, in.key_norm),
        shape{c.rows,
              c.heads,
              c.kv_heads,
              c.width,
              c.turned ? positions.data() : nullptr,
              c.turned ? rotation.floats() : nullptr,
              c.query_norm ? query_norm.values() : Values{},
              c.key_norm ? key_norm.values() : Values{},
              static_cast<float>(kHeadEpsilon)} {}
  IntPlane positions;
  Plane rotation, query_norm, key_norm;
  Turning shape;
};

std::string about(Precision type, const HeadsCase& c, int variant) {
  return std::string(name_of(type)) + ", " + std::to_string(c.rows) + " rows, heads " +
         std::to_string(c.heads) + "/" + std::to_string(c.kv_heads) + " x " + std::to_string(c.width) +
         (c.turned ? ", turned" : "") + (c.query_norm ? ", query norm" : "") +
         (c.key_norm ? ", key norm" : "") + ", variant " + std::to_string(variant);
}

TEST(Layers, Turn) {
  NEEDS_DEVICE();
  for (Precision type : kTypes)
    for (const HeadsCase& c : kHeadsCases)
      for (int variant = 0; variant < 3; ++variant) {  // beside, in place, in place and not aligned
        SCOPED_TRACE(about(type, c, variant));
        HeadsInputs in = heads_inputs(c);
        const HeadsOnDevice device(c, in, variant == 0 ? Precision::fp32 : type);
        in.query_norm = device.query_norm.get(), in.key_norm = device.key_norm.get();
        Plane qkv(type, noises(c.rows * c.qkv(), 1), variant == 2 ? 1 : 0), beside(type, c.rows * c.qkv());
        const Doubles x = qkv.get();
        Plane& to = variant == 0 ? beside : qkv;
        run_twice({&to}, [&] { turn(type, device.shape, qkv.data(), to.data(), nullptr); });
        const Doubles got = to.get(), want = turn_in_double(c, in, x);
        expect_near(type, got, want, {1}, "turned");
        for (Index r = 0; r < c.rows; ++r)  // values are copied, bit for bit
          for (Index i = c.qkv() - c.kv_heads * c.width; i < c.qkv(); ++i)
            ASSERT_EQ(got[static_cast<std::size_t>(r * c.qkv() + i)],
                      x[static_cast<std::size_t>(r * c.qkv() + i)]);
        if (variant == 0) EXPECT_EQ(qkv.get(), x);
      }
}

TEST(Layers, TurnBackward) {
  NEEDS_DEVICE();
  for (Precision type : kTypes)
    for (const HeadsCase& c : kHeadsCases)
      for (int variant = 0; variant < 2; ++variant) {
        SCOPED_TRACE(about(type, c, variant));
        HeadsInputs in = heads_inputs(c);
        const HeadsOnDevice device(c, in, variant == 0 ? Precision::fp32 : type);
        in.query_norm = device.query_norm.get(), in.key_norm = device.key_norm.get();
        const Plane qkv(type, noises(c.rows * c.qkv(), 1));
        Plane dqkv(type, noises(c.rows * c.qkv(), 2), variant);
        const Index parts = turn_parts(device.shape);
        Plane sums(Precision::fp32, parts * 2 * c.width);
        const HeadGradients want = turn_back_in_double(c, in, qkv.get(), dqkv.get());
        const bool normed = c.query_norm || c.key_norm;
        run_twice({&dqkv, &sums}, [&] {
          turn_backward(type, device.shape, normed ? qkv.data() : nullptr, dqkv.data(),
                        normed ? sums.floats() : nullptr, nullptr);
        });
        expect_near(type, dqkv.get(), want.dx, {2}, "dqkv");
        Plane norm(Precision::fp32, c.width);
        if (c.query_norm) {
          sum_parts(sums.floats(), parts, 2 * c.width, c.width, norm.values(), nullptr);
          expect_near(Precision::fp32, norm.get(), want.query_norm, want.query_size, "query norm");
        }
        if (c.key_norm) {
          sum_parts(sums.floats() + c.width, parts, 2 * c.width, c.width, norm.values(), nullptr);
          expect_near(Precision::fp32, norm.get(), want.key_norm, want.key_size, "key norm");
        }
      }
}

// ---- Activations ----

double gelu_in_double(double x) {
  return 0.5 * x * (1 + std::tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)));
}
double gelu_slope_in_double(double x) {
  const double t = std::tanh(0.7978845608028654 * (x + 0.044715 * x * x * x));
  return 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * 0.7978845608028654 * (1 + 3 * 0.044715 * x * x);
}
double logistic_in_double(double x) {
  return x > 0 ? 1 / (1 + std::exp(-x)) : std::exp(x) / (1 + std::exp(x));
}
double silu_slope_in_double(double x) {
  const double gate = logistic_in_double(x);
  return gate + x * gate * (1 - gate);
}

TEST(LayersReference, ActivationGradientsAreSlopes) {
  for (double x : {-6.0, -3.0, -0.7, 0.0, 0.3, 1.0, 5.0}) {
    const auto silu = [](const Doubles& v) { return v[0] * logistic_in_double(v[0]); };
    EXPECT_NEAR(gelu_slope_in_double(x),
                differences({x}, [](const Doubles& v) { return gelu_in_double(v[0]); })[0], 1e-8);
    EXPECT_NEAR(silu_slope_in_double(x), differences({x}, silu)[0], 1e-8);
  }
}

struct Activated {
  Doubles y, dx;
};
Activated activate_in_double(Mlp mlp, const Doubles& x, const Doubles& dy, Index rows, Index inner) {
  Activated out{Doubles(dy.size()), Doubles(x.size())};
  const auto n = static_cast<std::size_t>(inner);
  for (std::size_t r = 0; r < static_cast<std::size_t>(rows); ++r)
    for (std::size_t i = 0; i < n; ++i) {
      const std::size_t at = r * n + i;
      if (mlp == Mlp::gelu) {
        out.y[at] = gelu_in_double(x[at]), out.dx[at] = dy[at] * gelu_slope_in_double(x[at]);
        continue;
      }
      const std::size_t left = 2 * r * n + i, right = left + n;
      const double gate = x[left], silu = gate * logistic_in_double(gate);
      out.y[at] = silu * x[right];
      out.dx[left] = dy[at] * x[right] * silu_slope_in_double(gate), out.dx[right] = dy[at] * silu;
    }
  return out;
}

void check_activation(Precision type, Mlp mlp, const Shape& shape, int variant) {
  const int shift = variant == 3 ? 1 : 0;
  SCOPED_TRACE(about(type, shape.rows, shape.width, shift) + (mlp == Mlp::gelu ? ", gelu" : ", gated") +
               ", variant " + std::to_string(variant));
  const Index out_count = shape.rows * shape.width, in_count = (mlp == Mlp::gelu ? 1 : 2) * out_count;
  Plane x(type, noises(in_count, 1, 3), shift), dy(type, noises(out_count, 2)),
      y(type, out_count, variant == 2 ? 1 : 0);
  const Activated want = activate_in_double(mlp, x.get(), dy.get(), shape.rows, shape.width);
  const Bytes dy_before = dy.bytes();
  run_twice({&y}, [&] { activate(type, mlp, x.data(), shape.rows, shape.width, y.data(), nullptr); });
  expect_near(type, y.get(), want.y, {0.5}, "activated");
  Plane beside(type, in_count);
  Plane& dx = variant == 0 ? beside : variant == 1 && mlp == Mlp::gelu ? dy : x;
  run_twice({&dx}, [&] {
    activate_backward(type, mlp, dy.data(), x.data(), shape.rows, shape.width, dx.data(), nullptr);
  });
  expect_near(type, dx.get(), want.dx, {1}, "dexpanded");
  if (&dx != &dy) EXPECT_EQ(dy.bytes(), dy_before);
}

TEST(Layers, Activations) {
  NEEDS_DEVICE();
  for (Precision type : kTypes)
    for (Mlp mlp : {Mlp::gelu, Mlp::gated_silu})
      for (const Shape& shape : {Shape{1, 1},
                                 {3, 7},
                                 {127, 64},
                                 {300, 65},
                                 {127, 768},
                                 {3, 1024},
                                 {9, 1025},
                                 {5, 4096},
                                 {3, 5000},
                                 {64, 3072}})
        for (int variant = 0; variant < 4; ++variant) check_activation(type, mlp, shape, variant);
}

// Far from 0 a function is 0 or the value itself, and its slope 0 or 1: no infinity on the way may become a NaN.
TEST(Layers, ActivationsFarFromZero) {
  NEEDS_DEVICE();
  const Doubles far = {-10000, -1000, -300, -88, -80, -20, -10, 0, 10, 20, 80, 88, 300, 1000, 10000, 3};
  for (Precision type : kTypes)
    for (Mlp mlp : {Mlp::gelu, Mlp::gated_silu}) {
      SCOPED_TRACE(std::string(name_of(type)) + (mlp == Mlp::gelu ? ", gelu" : ", gated"));
      const Index inner = mlp == Mlp::gelu ? 16 : 8;
      Doubles values = far;
      if (mlp == Mlp::gated_silu)  // two rows of 8 gates and 8 values
        for (int i = 0; i < 8; ++i) values.insert(values.begin() + 8 + i, 1.0);
      if (mlp == Mlp::gated_silu) values.insert(values.end(), 8, 1.0);
      const Index rows = mlp == Mlp::gelu ? 1 : 2;
      const Plane x(type, values), dy(type, Doubles(16, 1.0));
      Plane y(type, 16), dx(type, static_cast<Index>(values.size()));
      activate(type, mlp, x.data(), rows, inner, y.data(), nullptr);
      activate_backward(type, mlp, dy.data(), x.data(), rows, inner, dx.data(), nullptr);
      const Activated want = activate_in_double(mlp, x.get(), dy.get(), rows, inner);
      expect_near(type, y.get(), want.y, {0.1}, "activated");
      expect_near(type, dx.get(), want.dx, {0.1}, "dexpanded");
    }
}

// ---- The loss ----

struct LossCase {
  Index rows, vocabulary, stride;
};

struct LossResult {
  Doubles losses, gradients;
};
LossResult loss_in_double(const LossCase& c, const Doubles& logits, const Ints& targets, double scale) {
  LossResult out{Doubles(static_cast<std::size_t>(c.rows)), Doubles(logits.size())};
  for (Index r = 0; r < c.rows; ++r) {
    const std::int32_t target = targets[static_cast<std::size_t>(r)];
    if (target < 0) continue;
    const double* x = &logits[static_cast<std::size_t>(r * c.stride)];
    double* g = &out.gradients[static_cast<std::size_t>(r * c.stride)];
    double top = x[0], sum = 0;
    for (Index i = 1; i < c.vocabulary; ++i) top = std::max(top, x[i]);
    for (Index i = 0; i < c.vocabulary; ++i) sum += std::exp(x[i] - top);
    out.losses[static_cast<std::size_t>(r)] = std::log(sum) + top - x[target];
    for (Index i = 0; i < c.vocabulary; ++i)
      g[i] = scale * (std::exp(x[i] - top) / sum - (i == target ? 1 : 0));
  }
  return out;
}

// Rows of several kinds: plain, spread to +-80, one of 1e4, some of -infinity; and those that count for nothing, which may
// even hold a NaN, as the columns beyond the vocabulary do.
Doubles some_logits(const LossCase& c, const Ints& targets) {
  Doubles x = noises(c.rows * c.stride, 1, 2);
  for (Index r = 0; r < c.rows; ++r) {
    double* row = &x[static_cast<std::size_t>(r * c.stride)];
    for (Index i = c.vocabulary; i < c.stride; ++i) row[i] = std::nan("");
    if (targets[static_cast<std::size_t>(r)] < 0) row[c.vocabulary / 2] = std::nan("");
    if (targets[static_cast<std::size_t>(r)] < 0) continue;
    if (r % 5 == 1)
      for (Index i = 0; i < c.vocabulary; ++i) row[i] = (i * 37 % 161 - 80.0) * (i % 7 == 0 ? 1 : 0.5);
    if (r % 5 == 2) row[(r * 11) % c.vocabulary] = 1e4;
    if (r % 5 == 3)
      for (Index i = 0; i < c.vocabulary; i += 2)
        if (i != targets[static_cast<std::size_t>(r)]) row[i] = -std::numeric_limits<double>::infinity();
  }
  return x;
}

TEST(Layers, CrossEntropy) {
  NEEDS_DEVICE();
  const LossCase cases[] = {{3, 1, 1},         {6, 7, 7},         {6, 7, 8},        {127, 65, 65},
                            {127, 65, 72},     {11, 1000, 1003},  {11, 4096, 4096}, {11, 5000, 5120},
                            {7, 50257, 50264}, {7, 50257, 50257}, {6, 8193, 8200},  {3, 131072, 131072}};
  for (Precision type : kTypes)
    for (const LossCase& c : cases)
      for (int shift : {0, 1}) {
        SCOPED_TRACE(about(type, c.rows, c.vocabulary, shift) + ", stride " + std::to_string(c.stride));
        Ints targets;
        for (Index r = 0; r < c.rows; ++r)
          targets.push_back(r % 4 == 3
                                ? -1 - static_cast<std::int32_t>(r)
                                : static_cast<std::int32_t>((r * 7919 + c.vocabulary - 1) % c.vocabulary));
        const IntPlane target_plane(targets);
        Plane logits(type, some_logits(c, targets), shift), losses(Precision::fp32, c.rows);
        const Plane scale(Precision::fp32, Doubles{3.25});
        const LossResult want = loss_in_double(c, logits.get(), targets, 3.25);
        const Bytes before = logits.bytes();
        run_twice({&losses}, [&] {
          cross_entropy(type, logits.data(), c.rows, c.vocabulary, c.stride, target_plane.data(), nullptr,
                        losses.floats(), nullptr);
        });
        EXPECT_EQ(logits.bytes(), before) << "without a scale";
        expect_near(Precision::fp32, losses.get(), want.losses, {1}, "losses");
        run_twice({&losses, &logits}, [&] {
          cross_entropy(type, logits.data(), c.rows, c.vocabulary, c.stride, target_plane.data(),
                        scale.floats(), losses.floats(), nullptr);
        });
        expect_near(Precision::fp32, losses.get(), want.losses, {1}, "losses beside gradients");
        expect_near(type, logits.get(), want.gradients, {0.25}, "gradients");
      }
}

TEST(Layers, SumLosses) {
  NEEDS_DEVICE();
  for (Index rows : {0, 1, 3, 1000, 1025, 70001}) {
    const Plane losses(Precision::fp32, noises(rows, 1, 1, 8));
    double *sum = nullptr, first = 0, second = 0;
    must(cudaMalloc(&sum, 8));
    sum_losses(losses.floats(), rows, sum, nullptr);
    must(cudaMemcpy(&first, sum, 8, cudaMemcpyDeviceToHost));
    sum_losses(losses.floats(), rows, sum, nullptr);
    must(cudaMemcpy(&second, sum, 8, cudaMemcpyDeviceToHost));
    must(cudaFree(sum));
    double want = 0;
    for (double x : losses.get()) want += x;
    EXPECT_NEAR(first, want, 1e-12 * want);  // fp32 would be off by 1e-7
    EXPECT_EQ(std::memcmp(&first, &second, 8), 0);
  }
}

// Nothing to do: nothing is launched, whatever the pointers are.
TEST(Layers, Empty) {
  NEEDS_DEVICE();
  const Norm norm{NormKind::layer, 1e-5f, {}, {}};
  const Turning shape{0, 2, 1, 64, nullptr, nullptr, {}, {}, 1e-5f};
  for (Precision type : kTypes) {
    convert({}, {}, 0, nullptr);
    embed(type, nullptr, nullptr, 0, 64, {}, {}, nullptr, nullptr);
    embedding_gradient(type, nullptr, 64, {nullptr, nullptr, nullptr, 0}, 0, {}, nullptr);
    normalise(type, norm, nullptr, 0, 64, nullptr, nullptr, nullptr, nullptr);
    normalise_backward(type, norm, nullptr, nullptr, nullptr, nullptr, 0, 64, true, nullptr, nullptr,
                       nullptr);
    turn(type, shape, nullptr, nullptr, nullptr);
    turn_backward(type, shape, nullptr, nullptr, nullptr, nullptr);
    activate(type, Mlp::gelu, nullptr, 0, 64, nullptr, nullptr);
    activate_backward(type, Mlp::gated_silu, nullptr, nullptr, 0, 64, nullptr, nullptr);
    cross_entropy(type, nullptr, 0, 64, 64, nullptr, nullptr, nullptr, nullptr);
  }
  must(cudaDeviceSynchronize());
}

}  // namespace
}  // namespace scruple::train::cuda
