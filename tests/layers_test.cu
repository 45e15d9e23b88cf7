// The layers on a GPU against the same formulas in double: every type, widths and rows around the edges of vectors, warps
// and blocks, pointers that are not aligned. Each runs twice and must give the same bits, and writes nothing beside its
// output. The derivatives in double are themselves held against differences.
#include <limits>
#include <map>

#include "tests/cuda/layers.h"
#include "train/cuda/layers.h"

namespace scruple::train::cuda {
namespace {

// ---- convert ----

TEST_F(Layers, ConvertRoundsAsTheHostDoes) {
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

TEST_F(Layers, EmbedAddsPositions) {
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
            want.push_back(a[tokens[r] * shape.width + c] + (placed ? b[positions[r] * shape.width + c] : 0));
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

// Token r of a case: every fourth is one of three, which so have many occurrences.
std::int32_t token_of(const TableCase& c, Index r) {
  const Index word = r % 4 == 0 ? r % 3 : (r * 7919) % c.words;
  return static_cast<std::int32_t>(c.first + word);
}

TEST_F(Layers, EmbeddingGradientAddsReaders) {
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
            const auto at = static_cast<std::size_t>((tokens[r] - c.first) * c.width + i);
            const double value = rows[r * c.width + i];
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
    const double* row = &x[r * c.width];
    double mean = 0, squares = 0;
    if (c.kind == NormKind::layer)
      for (Index i = 0; i < c.width; ++i) mean += row[i] / n;
    for (Index i = 0; i < c.width; ++i) squares += (row[i] - mean) * (row[i] - mean) / n;
    const double rstd = 1 / std::sqrt(squares + c.epsilon);
    for (Index i = 0; i < c.width; ++i) {
      const auto at = static_cast<std::size_t>(i);
      result.y[r * c.width + i] = (row[i] - mean) * rstd * weight[at] + (bias.empty() ? 0 : bias[at]);
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
    norm_forward(type, norm, x.data(), shape.rows, shape.width, y.data(),
                 keeps_mean ? mean.floats() : nullptr, rstd.floats(), nullptr);
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

TEST_F(Layers, Normalise) {
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
    norm_backward(type, norm, dy.data(), x.data(), kind == NormKind::layer ? mean.floats() : nullptr,
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

TEST_F(Layers, NormaliseBackward) {
  for (Precision type : kTypes)
    for (NormKind kind : {NormKind::layer, NormKind::rms})
      for (const Shape& shape : kShapes)
        for (int variant = 0; variant < 3; ++variant) check_normalise_backward(type, kind, shape, variant);
  // More rows than all blocks take at once.
  for (const Shape& shape : {Shape{5000, 64}, {2500, 72}, {1000, 1040}})
    check_normalise_backward(Precision::bf16, NormKind::layer, shape, 1);
}

// One workspace serves all widths and types.
TEST(LayersReference, PartsAreFewAndKnownFromTheRows) {
  for (Index rows : {Index{1}, Index{3}, Index{300}, Index{65536}, Index{1} << 31}) {
    EXPECT_GE(norm_parts(rows), 1);
    EXPECT_GE(bias_parts(rows), 1);
    EXPECT_LE(norm_parts(rows), 4096);
    EXPECT_LE(bias_parts(rows), 4096);
  }
}

// ---- Sums of columns ----

TEST_F(Layers, SumPartsAndBiasGradient) {
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
            const double value = values[r * stride + column + i];
            want[i] += value, sizes[i] += std::fabs(value);
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

}  // namespace
}  // namespace scruple::train::cuda
