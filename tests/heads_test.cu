// Heads, activations and the loss on a GPU, held to the same formulas in double as the layers of layers_test.cu are.
#include <limits>

#include "tests/cuda/layers.h"
#include "train/cuda/layers.h"

namespace scruple::train::cuda {
namespace {

// ---- Heads in double ----

struct HeadsCase {
  Index rows;
  int heads, kv_heads, width;
  bool roped, query_norm, key_norm;
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
  for (Index p = 0; c.roped && p < kContext; ++p)
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
    const double c = in.rotation[position * width + i];
    const double s = sign * in.rotation[position * width + pairs + i];
    const double a = x[i], b = x[i + pairs];
    x[i] = a * c - b * s, x[i + pairs] = b * c + a * s;
  }
}

double head_rstd(const double* x, int width) {
  double squares = 0;
  for (int i = 0; i < width; ++i) squares += x[i] * x[i] / width;
  return 1 / std::sqrt(squares + kHeadEpsilon);
}

Doubles rope_in_double(const HeadsCase& c, const HeadsInputs& in, Doubles x) {
  for (Index r = 0; r < c.rows; ++r)
    for (int head = 0; head < c.heads + c.kv_heads; ++head) {
      double* at = &x[r * c.qkv() + head * c.width];
      const Doubles& norm = in.norm(c, head);
      if (!norm.empty()) {
        const double rstd = head_rstd(at, c.width);
        for (int i = 0; i < c.width; ++i) at[i] *= rstd * norm[i];
      }
      if (c.roped) rotate(in, in.positions[r], c.width, 1, at);
    }
  return x;
}

struct HeadGradients {
  Doubles dx, query_norm, key_norm, query_size, key_size;
};

HeadGradients rope_backward_in_double(const HeadsCase& c, const HeadsInputs& in, const Doubles& x,
                                      Doubles g) {
  const auto width = static_cast<std::size_t>(c.width);
  HeadGradients out{{}, Doubles(width), Doubles(width), Doubles(width), Doubles(width)};
  for (Index r = 0; r < c.rows; ++r)
    for (int head = 0; head < c.heads + c.kv_heads; ++head) {
      const auto first = static_cast<std::size_t>(r * c.qkv() + head * c.width);
      double* d = &g[first];
      if (c.roped) rotate(in, in.positions[r], c.width, -1, d);
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
  const HeadGradients back = rope_backward_in_double(c, in, x, g);
  expect_slopes(back.dx,
                differences(x, [&](const Doubles& v) { return inner_product(rope_in_double(c, in, v), g); }),
                "dx");
  const auto of_norms = [&](const Doubles& query, const Doubles& key) {
    return inner_product(rope_in_double(c, {in.positions, in.rotation, query, key}, x), g);
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
              c.roped ? positions.data() : nullptr,
              c.roped ? rotation.floats() : nullptr,
              c.query_norm ? query_norm.values() : Values{},
              c.key_norm ? key_norm.values() : Values{},
              static_cast<float>(kHeadEpsilon)} {}
  IntPlane positions;
  Plane rotation, query_norm, key_norm;
  RopeShape shape;
};

std::string about_heads(Precision type, const HeadsCase& c, int variant) {
  return std::string(name_of(type)) + ", " + std::to_string(c.rows) + " rows, heads " +
         std::to_string(c.heads) + "/" + std::to_string(c.kv_heads) + " x " + std::to_string(c.width) +
         (c.roped ? ", rope" : "") + (c.query_norm ? ", query norm" : "") + (c.key_norm ? ", key norm" : "") +
         ", variant " + std::to_string(variant);
}

TEST_F(Layers, Turn) {
  for (Precision type : kTypes)
    for (const HeadsCase& c : kHeadsCases)
      for (int variant = 0; variant < 3; ++variant) {  // beside, in place, in place and not aligned
        SCOPED_TRACE(about_heads(type, c, variant));
        HeadsInputs in = heads_inputs(c);
        const HeadsOnDevice device(c, in, variant == 0 ? Precision::fp32 : type);
        in.query_norm = device.query_norm.get(), in.key_norm = device.key_norm.get();
        Plane qkv(type, noises(c.rows * c.qkv(), 1), variant == 2 ? 1 : 0), beside(type, c.rows * c.qkv());
        const Doubles x = qkv.get();
        Plane& to = variant == 0 ? beside : qkv;
        run_twice({&to}, [&] { rope(type, device.shape, qkv.data(), to.data(), nullptr); });
        const Doubles got = to.get(), want = rope_in_double(c, in, x);
        expect_near(type, got, want, {1}, "turned");
        for (Index r = 0; r < c.rows; ++r)  // values are copied, bit for bit
          for (Index i = c.qkv() - c.kv_heads * c.width; i < c.qkv(); ++i)
            ASSERT_EQ(got[r * c.qkv() + i], x[r * c.qkv() + i]);
        if (variant == 0) EXPECT_EQ(qkv.get(), x);
      }
}

TEST_F(Layers, TurnBackward) {
  for (Precision type : kTypes)
    for (const HeadsCase& c : kHeadsCases)
      for (int variant = 0; variant < 2; ++variant) {
        SCOPED_TRACE(about_heads(type, c, variant));
        HeadsInputs in = heads_inputs(c);
        const HeadsOnDevice device(c, in, variant == 0 ? Precision::fp32 : type);
        in.query_norm = device.query_norm.get(), in.key_norm = device.key_norm.get();
        const Plane qkv(type, noises(c.rows * c.qkv(), 1));
        Plane dqkv(type, noises(c.rows * c.qkv(), 2), variant);
        const Index parts = rope_parts(device.shape);
        Plane sums(Precision::fp32, parts * 2 * c.width);
        const HeadGradients want = rope_backward_in_double(c, in, qkv.get(), dqkv.get());
        const bool normed = c.query_norm || c.key_norm;
        run_twice({&dqkv, &sums}, [&] {
          rope_backward(type, device.shape, normed ? qkv.data() : nullptr, dqkv.data(),
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

TEST_F(Layers, Activations) {
  for (Precision type : kTypes)
    for (Mlp mlp : {Mlp::gelu, Mlp::swiglu})
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
TEST_F(Layers, ActivationsFarFromZero) {
  const Doubles far = {-10000, -1000, -300, -88, -80, -20, -10, 0, 10, 20, 80, 88, 300, 1000, 10000, 3};
  for (Precision type : kTypes)
    for (Mlp mlp : {Mlp::gelu, Mlp::swiglu}) {
      SCOPED_TRACE(std::string(name_of(type)) + (mlp == Mlp::gelu ? ", gelu" : ", gated"));
      const Index inner = mlp == Mlp::gelu ? 16 : 8;
      Doubles values = far;
      if (mlp == Mlp::swiglu)  // two rows of 8 gates and 8 values
        for (int i = 0; i < 8; ++i) values.insert(values.begin() + 8 + i, 1.0);
      if (mlp == Mlp::swiglu) values.insert(values.end(), 8, 1.0);
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
  LossResult out{Doubles(c.rows), Doubles(logits.size())};
  for (Index r = 0; r < c.rows; ++r) {
    const std::int32_t target = targets[r];
    if (target < 0) continue;
    const double* x = &logits[r * c.stride];
    double* g = &out.gradients[r * c.stride];
    double top = x[0], sum = 0;
    for (Index i = 1; i < c.vocabulary; ++i) top = std::max(top, x[i]);
    for (Index i = 0; i < c.vocabulary; ++i) sum += std::exp(x[i] - top);
    out.losses[r] = std::log(sum) + top - x[target];
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
    double* row = &x[r * c.stride];
    for (Index i = c.vocabulary; i < c.stride; ++i) row[i] = std::nan("");
    if (targets[r] < 0) row[c.vocabulary / 2] = std::nan("");
    if (targets[r] < 0) continue;
    if (r % 5 == 1)
      for (Index i = 0; i < c.vocabulary; ++i) row[i] = (i * 37 % 161 - 80.0) * (i % 7 == 0 ? 1 : 0.5);
    if (r % 5 == 2) row[(r * 11) % c.vocabulary] = 1e4;
    if (r % 5 == 3)
      for (Index i = 0; i < c.vocabulary; i += 2)
        if (i != targets[r]) row[i] = -std::numeric_limits<double>::infinity();
  }
  return x;
}

TEST_F(Layers, CrossEntropy) {
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

TEST_F(Layers, SumLosses) {
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
TEST_F(Layers, Empty) {
  const Norm norm{NormKind::layer, 1e-5f, {}, {}};
  const RopeShape shape{0, 2, 1, 64, nullptr, nullptr, {}, {}, 1e-5f};
  for (Precision type : kTypes) {
    convert({}, {}, 0, nullptr);
    embed(type, nullptr, nullptr, 0, 64, {}, {}, nullptr, nullptr);
    embedding_gradient(type, nullptr, 64, {nullptr, nullptr, nullptr, 0}, 0, {}, nullptr);
    norm_forward(type, norm, nullptr, 0, 64, nullptr, nullptr, nullptr, nullptr);
    norm_backward(type, norm, nullptr, nullptr, nullptr, nullptr, 0, 64, true, nullptr, nullptr, nullptr);
    rope(type, shape, nullptr, nullptr, nullptr);
    rope_backward(type, shape, nullptr, nullptr, nullptr, nullptr);
    activate(type, Mlp::gelu, nullptr, 0, 64, nullptr, nullptr);
    activate_backward(type, Mlp::swiglu, nullptr, nullptr, 0, 64, nullptr, nullptr);
    cross_entropy(type, nullptr, 0, 64, 64, nullptr, nullptr, nullptr, nullptr);
  }
  must(cudaDeviceSynchronize());
}

}  // namespace
}  // namespace scruple::train::cuda
