// The CUDA engine gives the bits of the CPU engines, in memory and on streams of its own. SCRUPLE_TEST_ENGINE
// puts another engine in its place (all but the tests about streams, graphs and host pointers run on any),
// and SCRUPLE_TEST_QUICK=1 takes about a fiftieth of the launches.
#include <atomic>
#include <chrono>
#include <functional>
#include <limits>

#include "tests/configs.h"
#include "tests/device.h"

#if defined(SCRUPLE_TEST_CUDA)
#include <cuda_runtime_api.h>
#endif

namespace scruple_tests {
namespace {

const float kInf = std::numeric_limits<float>::infinity(), kNaN = std::numeric_limits<float>::quiet_NaN();

std::int64_t length(const auto& list) { return static_cast<std::int64_t>(list.size()); }

// ---- What to run ----

// Shifts and offsets are dealt out to the tensors in turn.
struct Shape {
  std::vector<std::int64_t> sizes;
  std::vector<std::size_t> shifts = {0};  // of codes planes; aux planes lie one byte further where not 0, so
                                          // that 16 is odd for them alone
  std::vector<std::int64_t> offsets = {0, 5, 10};
};

const std::vector<std::size_t> kOddShifts = {1, 3, 6, 4, 2, 8, 7};

int steps_of(int full) { return quick() ? 2 : full; }

// 0 to two groups of the largest kind and one.
std::vector<std::int64_t> every_length() {
  if (quick()) return {0, 1, 7, 64, 65, 129, 257};
  std::vector<std::int64_t> sizes;
  for (std::int64_t n = 0; n <= 257; ++n) sizes.push_back(n);
  return sizes;
}
// Whole tiles among them, of 2,048, in tensors that are aligned and in others.
std::vector<std::int64_t> some_lengths() {
  if (quick()) return {2100, 65, 2500, 1};
  return {1, 2, 7, 8, 31, 32, 33, 63, 64, 65, 100, 127, 128, 129, 1023, 1024, 1025, 2500, 4097, 2049};
}

Config config_of(const std::string& rule, const std::string& recipe, bool busy = true) {
  for (const Config& config : recipe_configs(busy))
    if (config.rule == rule && config.name.substr(config.name.rfind(' ') + 1) == recipe) return config;
  ADD_FAILURE() << "no recipe " << recipe << " for " << rule;
  return {};
}

std::vector<GradientKind> gradient_kinds() {
  if (quick()) return {kGradientKinds[1], kGradientKinds[6]};
  return {std::begin(kGradientKinds), std::end(kGradientKinds)};
}

// A window into one long list, so that making data costs nothing: normal numbers with groups of zeros, a few
// outliers and a few tiny ones.
void values_of(float* out, std::size_t size, std::uint64_t which, Data data) {
  static const std::vector<float> kNormals = [] {
    std::vector<float> list = Random(5).normals(std::size_t{1} << 18);
    for (std::size_t i = 0; i < list.size(); ++i) {
      if (i / 160 % 11 == 5) list[i] = i % 2 == 0 ? 0.0f : -0.0f;
      if (i % 97 == 0) list[i] *= 1e4f;
      if (i % 89 == 0) list[i] *= 1e-6f;
    }
    return list;
  }();
  const std::size_t from = static_cast<std::size_t>(which * 7919 % 20000);
  const float scale = data == Data::kSubnormal ? 0x1p-128f : 1.0f;
  for (std::size_t i = 0; i < size; ++i) out[i] = kNormals[(from + i) % kNormals.size()] * scale;
  if (data == Data::kManyScales)  // down to 2^-75, whose square is at the end of fp32
    for (std::size_t i = 0; i < size; ++i)
      out[i] = std::ldexp(out[i], -static_cast<int>((i / 16 * 7 + which) % 76));
  if (data != Data::kNonFinite || which % 3 == 2) return;
  const float specials[] = {kNaN, kInf, -kInf, float_from(0xffa00001u), 3e38f};
  for (std::size_t i = which % 61; i < size; i += 173) out[i] = specials[(i + which) % 5];
}

// ---- The same work on both engines ----

// fp32 gradients for every tensor of a table and every step, made once per table: on the host and in the
// memory of the engine under test, `shift` bytes past an alignment of 256.
class Gradients {
 public:
  Gradients(scruple_engine* engine, const std::vector<std::int64_t>& sizes, int sets,
            Data data = Data::kNormal, std::size_t shift = 0)
      : shift_(shift), device_(engine) {
    for (const std::int64_t size : sizes) {
      begins_.push_back(per_set_);
      per_set_ += static_cast<std::size_t>(size);
    }
    values_.resize(per_set_ * static_cast<std::size_t>(sets) + 1);
    for (std::size_t s = 0; s < static_cast<std::size_t>(sets); ++s)
      for (std::size_t i = 0; i < sizes.size(); ++i)
        values_of(&values_[s * per_set_ + begins_[i]], static_cast<std::size_t>(sizes[i]), 1000 * s + i,
                  data);
    upload();
  }
  void upload() {
    const std::size_t bytes = values_.size() * sizeof(float);
    device_.reserve(bytes + shift_);
    device_.write(values_.data(), bytes, shift_);
  }
  float* host(std::size_t set, std::size_t tensor) { return &values_[set * per_set_ + begins_[tensor]]; }
  std::vector<scruple_array> on_host(int set) { return arrays(values_.data(), set); }
  std::vector<scruple_array> on_device(int set) const { return arrays(device_.data() + shift_, set); }
  std::size_t bytes_per_set() const { return per_set_ * sizeof(float); }

 private:
  std::vector<scruple_array> arrays(void* from, int set) const {
    std::vector<scruple_array> list(begins_.size());
    const scruple_format* fp32 = scruple_format_find("fp32");
    const std::size_t first = static_cast<std::size_t>(set) * per_set_;
    for (std::size_t i = 0; i < list.size(); ++i) {
      list[i].format = fp32;
      list[i].codes = static_cast<unsigned char*>(from) + (first + begins_[i]) * sizeof(float);
    }
    return list;
  }

  std::size_t shift_, per_set_ = 0;
  std::vector<std::size_t> begins_;
  std::vector<float> values_;
  DeviceMemory device_;
};

enum class On { kBoth, kDevice, kHost };

// Where the engine under test and the reference live; `memory` is reused by one Pair after the other.
struct Lab {
  explicit Lab(const std::string& name) : device(0, name.c_str()), memory(device) {}
  Engine device, host{0, "cpu"};
  DeviceMemory memory;
};

// One table of a config, on the host for the reference engine and as a twin for the engine under test.
struct Pair {
  Pair(const Lab& lab, DeviceMemory& memory, const std::vector<Config>& configs, const Shape& shape,
       Data data = Data::kNormal)
      : device(lab.device), host(lab.host) {
    for (const Config& config : configs)
      for (auto* list : {&optimizers, &device_optimizers}) {
        list->push_back(std::make_unique<Optimizer>(config.rule.c_str()));
        list->back()->seed(0x123456789abcdefu);
        for (const auto& [name, value] : config.hypers) list->back()->set(name.c_str(), value);
      }
    std::vector<float> values;
    for (std::size_t i = 0; i < shape.sizes.size(); ++i) {
      const Config& config = configs[i % configs.size()];
      Tensor tensor(*optimizers[i % configs.size()], shape.sizes[i]);
      tensor.row.id = static_cast<std::uint32_t>(3 + i);
      tensor.row.offset = shape.offsets[i % shape.offsets.size()];
      const std::size_t shift = shape.shifts[i % shape.shifts.size()];
      for (int a = 0; a < SCRUPLE_ARRAYS; ++a)
        if (tensor.used(a))
          tensor.use(a, config.formats.arrays[a].format, config.formats.arrays[a].rounding, shift,
                     shift == 0 ? 0 : shift + 1);
      values.resize(static_cast<std::size_t>(shape.sizes[i]) + 1);
      values_of(values.data(), values.size() - 1, i, data == Data::kNonFinite ? Data::kNormal : data);
      CHECK_OK(scruple_tensor_reset(host, &tensor.row));
      CHECK_OK(scruple_encode(host, &tensor.row, SCRUPLE_WEIGHT, values.data()));
      accumulates = accumulates && (info_of(config.formats.arrays[SCRUPLE_GRADIENT].format).roles &
                                    SCRUPLE_ROLE_ACCUMULATOR) != 0;
      tensors.push_back(std::move(tensor));
    }
    for (const Tensor& tensor : tensors) rows.push_back(tensor.row);
    twin = std::make_unique<Twin>(memory, tensors);
    for (std::size_t i = 0; i < tensors.size(); ++i)
      twin->rows[i].optimizer = *device_optimizers[i % configs.size()];
  }
  Pair(Lab& lab, const Config& config, const Shape& shape, Data data = Data::kNormal)
      : Pair(lab, lab.memory, {config}, shape, data) {}

  void each_row(const auto& change) {
    for (std::size_t i = 0; i < rows.size(); ++i)
      change(rows[i]), change(twin->rows[i]), change(tensors[i].row);
  }
  // Two micro-batches folded; formats that do not accumulate are encoded by the reference and copied.
  void take_gradients(int t, Gradients& gradients, On on = On::kBoth) {
    each_row([&](scruple_tensor& row) { row.step = t, row.folds = 0; });
    fold(t - 1, gradients, on);
  }
  // `steps` lies in the memory of the one engine that folds.
  void fold(int set, Gradients& gradients, On on = On::kBoth, const std::int64_t* steps = nullptr) {
    each_row([&](scruple_tensor& row) { row.folds = 0; });
    if (!accumulates) {
      const std::vector<scruple_array> values = gradients.on_host(set);
      for (std::size_t i = 0; i < rows.size(); ++i)
        CHECK_OK(scruple_encode(host, &rows[i], SCRUPLE_GRADIENT, static_cast<float*>(values[i].codes)));
      twin->upload_gradients(tensors);
      return;
    }
    for (int n = 0; n < 2; ++n) {
      if (on != On::kHost) {
        CHECK_OK(scruple_fold(device, twin->rows.data(), gradients.on_device(set + n).data(), length(rows),
                              0.375f, steps));
      }
      if (on != On::kDevice) {
        CHECK_OK(
            scruple_fold(host, rows.data(), gradients.on_host(set + n).data(), length(rows), 0.375f, steps));
      }
      each_row([](scruple_tensor& row) { ++row.folds; });
    }
  }
  void step(On on = On::kBoth) {
    if (on != On::kHost) {
      CHECK_OK(scruple_step(device, twin->rows.data(), length(rows), nullptr));
    }
    if (on != On::kDevice) {
      CHECK_OK(scruple_step(host, rows.data(), length(rows), nullptr));
    }
  }
  void walk(int first, int last, Gradients& gradients, On on = On::kBoth) {
    for (int t = first; t <= last; ++t) {
      take_gradients(t, gradients, on);
      step(on);
    }
  }
  std::string difference() { return twin->difference(tensors); }

  scruple_engine *device, *host;
  std::vector<std::unique_ptr<Optimizer>> optimizers, device_optimizers;  // one per config
  bool accumulates = true;
  std::vector<Tensor> tensors;
  std::vector<scruple_tensor> rows;  // of the tensors; the twin has its own
  std::unique_ptr<Twin> twin;
};

void expect_same(Lab& lab, const Config& config, const Shape& shape, Gradients& gradients, int steps,
                 Data data = Data::kNormal) {
  Pair pair(lab, config, shape, data);
  pair.walk(1, steps, gradients);
  const std::string difference = pair.difference();
  ASSERT_TRUE(difference.empty()) << config.name << ", after " << steps << " steps: " << difference;
}

class Cuda : public testing::Test {
 protected:
  void SetUp() override {
    const std::string name = engine_under_test(), reason = why_unavailable(name);
    ASSERT_TRUE(reason.empty() ||
                std::getenv("SCRUPLE_TEST_ENGINE") == nullptr)  // asked for: it must be there
        << "engine " << name << ": " << reason;
    if (!reason.empty()) GTEST_SKIP() << "engine " << name << ": " << reason;
    lab_ = std::make_unique<Lab>(name);
    if (lab_->device.handle == nullptr) GTEST_SKIP() << "engine " << name << ": " << scruple_last_error();
  }
  Lab& lab() { return *lab_; }

 private:
  std::unique_ptr<Lab> lab_;
};
class CudaParity : public Cuda {};
class CudaFormats : public Cuda {};
// A block has many tiles, and meets one row after the other, as in tables of hundreds of millions of elements.
class CudaFewBlocks : public Cuda {
 protected:
  void SetUp() override {
    setenv("SCRUPLE_CUDA_BLOCKS", "3", 1);
    Cuda::SetUp();
    unsetenv("SCRUPLE_CUDA_BLOCKS");
  }
};
class CudaNorm : public Cuda {};
class CudaLoop : public Cuda {};
class CudaMemory : public Cuda {};
class CudaBig : public Cuda {};
class CudaThreads : public Cuda {};

// What only a CUDA engine has.
class CudaOnly : public Cuda {
 protected:
  void SetUp() override {
    if (!is_cuda(engine_under_test())) GTEST_SKIP() << engine_under_test() << " is not a CUDA engine";
    Cuda::SetUp();
  }
};
class CudaErrors : public CudaOnly {};
class CudaStream : public CudaOnly {};
class CudaGraph : public CudaOnly {};

// ---- Parity of the step ----

void every_length_of(Lab& lab, bool busy, const std::vector<std::size_t>& shifts) {
  const Shape shape{every_length(), shifts};
  const int steps = steps_of(10);
  Gradients gradients(lab.device, shape.sizes, steps + 1, Data::kNormal, shifts[0] % 4);
  const std::vector<int> roundings =
      quick() ? std::vector<int>{SCRUPLE_STOCHASTIC}
              : std::vector<int>{SCRUPLE_NEAREST, SCRUPLE_STOCHASTIC, SCRUPLE_TRUNCATE};
  for (const Config& recipe : recipe_configs(busy))
    for (const int rounding : roundings) {
      Config rounded = recipe;
      if (!set_rounding(rounded, rounding) && !quick()) continue;
      for (const GradientKind& kind : gradient_kinds()) {
        expect_same(lab, with_gradient(rounded, kind), shape, gradients, steps);
        if (testing::Test::HasFatalFailure()) return;
      }
    }
}
TEST_F(CudaParity, EveryLengthRuleRecipeRoundingAndGradient) { every_length_of(lab(), true, {0}); }
TEST_F(CudaParity, EveryLengthRuleRecipeRoundingAndGradientAtOddAddresses) {
  every_length_of(lab(), true, kOddShifts);
}
TEST_F(CudaParity, EveryLengthWithDefaultHyperparameters) { every_length_of(lab(), false, {0}); }
TEST_F(CudaParity, EveryLengthWithDefaultHyperparametersAtOddAddresses) {
  if (quick()) GTEST_SKIP() << "quick";
  every_length_of(lab(), false, kOddShifts);
}

// The kinds of gradient and rounding take turns, so that every recipe meets some and every kind many.
TEST_F(CudaParity, LargeTensors) {
  const std::vector<std::int64_t> sizes =
      quick() ? std::vector<std::int64_t>{65537} : std::vector<std::int64_t>{65535, 65536, 65537, 200003};
  const int steps = steps_of(10);
  Gradients gradients(lab().device, sizes, steps + 1);
  std::size_t turn = 0;
  for (const bool busy : {true, false})
    for (const std::vector<std::size_t>& shifts : {std::vector<std::size_t>{0}, kOddShifts})
      for (const Config& recipe : recipe_configs(busy)) {
        if (quick() && (!busy || shifts[0] != 0)) continue;
        Config config = recipe;  // as the recipe rounds, then the roundings
        const int rounding = static_cast<int>(turn / std::size(kGradientKinds) % 4) - 1;
        if (rounding >= 0) set_rounding(config, rounding);
        config = with_gradient(config, kGradientKinds[turn++ % std::size(kGradientKinds)]);
        expect_same(lab(), config, {sizes, shifts}, gradients, steps);
        if (HasFatalFailure()) return;
      }
}

TEST_F(CudaParity, OneTensorAlone) {
  for (const std::int64_t size : {1, 64, 257, 5000, 70001}) {
    if (quick() && size != 257) continue;
    const Shape shape{{size}, {0}, {5}};
    const int steps = steps_of(10);
    Gradients gradients(lab().device, shape.sizes, steps + 1);
    for (const Config& recipe : recipe_configs()) {
      expect_same(lab(), recipe, shape, gradients, steps);
      if (HasFatalFailure()) return;
    }
  }
}

std::vector<std::int64_t> many_sizes() {
  std::vector<std::int64_t> sizes;
  for (int i = 0; i < (quick() ? 40 : 1000); ++i) sizes.push_back(i * 37 % 301);
  return sizes;
}

TEST_F(CudaParity, AThousandTensors) {
  const Shape shape{many_sizes(), {0, 1, 4}};
  const int steps = steps_of(10);
  Gradients gradients(lab().device, shape.sizes, steps + 1);
  std::size_t turn = 0;
  for (const Config& recipe : recipe_configs()) {
    const GradientKind& kind = kGradientKinds[turn++ % std::size(kGradientKinds)];
    expect_same(lab(), with_gradient(recipe, kind), shape, gradients, steps);
    if (HasFatalFailure()) return;
  }
}

std::vector<Config> every_rule_and_recipe() {
  std::vector<Config> configs;
  std::size_t turn = 0;
  for (const bool busy : {true, false})
    for (const Config& recipe : recipe_configs(busy)) {
      const GradientKind& kind = kGradientKinds[turn++ % std::size(kGradientKinds)];
      configs.push_back(info_of(scruple_format_find(kind.format)).roles & SCRUPLE_ROLE_ACCUMULATOR
                            ? with_gradient(recipe, kind)
                            : recipe);
    }
  return configs;
}
// Side by side in one table, each with steps of its own.
void expect_same_in_one_table(Lab& lab, const std::vector<Config>& configs, std::int64_t largest) {
  Shape shape{{}, {0, 3}};
  for (std::size_t i = 0; i < configs.size() * (quick() ? 1 : 11); ++i)
    shape.sizes.push_back(static_cast<std::int64_t>(i) * 193 % largest);
  shape.sizes[8] = 66000;  // aligned, so of whole tiles
  const int steps = steps_of(10);
  Gradients gradients(lab.device, shape.sizes, steps + 1);
  Pair pair(lab, lab.memory, configs, shape);
  for (int t = 1; t <= steps; ++t) {
    pair.take_gradients(t, gradients);
    for (std::size_t i = 0; i < pair.rows.size(); ++i)
      pair.rows[i].step = pair.twin->rows[i].step = t + static_cast<std::int64_t>(i % 3) * 1000;
    pair.step();
  }
  EXPECT_EQ(pair.difference(), "");
}
TEST_F(CudaParity, EveryRuleAndRecipeInOneTable) {
  expect_same_in_one_table(lab(), every_rule_and_recipe(), 1700);
}
TEST_F(CudaFewBlocks, EveryRuleAndRecipeInOneTable) {
  expect_same_in_one_table(lab(), every_rule_and_recipe(), 9000);
}

TEST_F(CudaParity, FiveStepsHereAndFiveThereAreTenOnEither) {
  const Shape shape{{1, 63, 64, 129, 1025, 3000, 0, 257}, {0, 3, 0}};
  const int steps = steps_of(10), half = steps / 2;
  Gradients gradients(lab().device, shape.sizes, steps + 1);
  for (const bool busy : {true, false})
    for (const Config& recipe : recipe_configs(busy))
      for (const bool as_is : {true, false}) {
        Config config = recipe;
        if (!as_is && (!set_rounding(config, SCRUPLE_STOCHASTIC) || quick())) continue;
        DeviceMemory other(lab().device);
        Pair whole(lab(), other, {config}, shape), to_host(lab(), config, shape);
        whole.walk(1, steps, gradients);
        ASSERT_EQ(whole.difference(), "") << config.name;
        to_host.walk(1, half, gradients, On::kDevice);
        to_host.twin->download(to_host.tensors);
        to_host.walk(half + 1, steps, gradients, On::kHost);
        ASSERT_EQ(whole.twin->difference(to_host.tensors), "") << config.name << ", to the CPU";
        for (const Tensor& tensor : to_host.tensors) ASSERT_TRUE(tensor.intact()) << config.name;
        Pair to_device(lab(), config, shape);
        to_device.walk(1, half, gradients, On::kHost);
        to_device.twin->upload(to_device.tensors);
        to_device.walk(half + 1, steps, gradients, On::kDevice);
        ASSERT_EQ(to_device.twin->difference(whole.tensors), "") << config.name << ", from the CPU";
      }
}

TEST_F(CudaParity, NonFiniteGradientsAndSubnormalData) {
  const Shape shape{{1, 5, 63, 64, 65, 200, 1025, 3000, 4099}, {0, 1}};
  const int steps = steps_of(4);
  for (const Data data : {Data::kNonFinite, Data::kSubnormal}) {
    Gradients gradients(lab().device, shape.sizes, steps + 1, data);
    for (const Config& recipe : recipe_configs())
      for (const int rounding : {SCRUPLE_NEAREST, SCRUPLE_STOCHASTIC})
        for (const GradientKind& kind : gradient_kinds()) {
          Config config = recipe;
          if (!set_rounding(config, rounding) || (quick() && rounding != SCRUPLE_NEAREST)) continue;
          expect_same(lab(), with_gradient(config, kind), shape, gradients, steps, data);
          if (HasFatalFailure()) return;
        }
  }
}

// Moments so small that the GPU's own root and division are not enough; without eps every bit of them shows. Sixteen
// neighbours share a scale, so that a thread has only such.
TEST_F(CudaParity, SmallMomentsWithoutEps) {
  const Shape shape{{4096, 4099}, {0}};
  const int steps = steps_of(4);
  Gradients gradients(lab().device, shape.sizes, steps + 1, Data::kManyScales);
  for (const Config& recipe : recipe_configs(false)) {
    Config config = recipe;
    const Optimizer optimizer(config.rule.c_str());
    double eps = 0;
    if (scruple_optimizer_get(optimizer, "eps", &eps) != SCRUPLE_OK) continue;
    config.hypers.emplace_back("eps", 0.0);
    expect_same(lab(), with_gradient(config, kGradientKinds[0]), shape, gradients, steps, Data::kManyScales);
    if (HasFatalFailure()) return;
  }
}

TEST_F(CudaParity, OffsetsOfShards) {
  const std::int64_t far = std::int64_t{1} << 40;  // 2^35: where the count of a random block passes 2^32
  const Shape shape{{1, 9, 200, 1025, 3000, 2049},
                    {0},
                    {5, 13, far, far + 3, (std::int64_t{1} << 35) - 1000, (std::int64_t{1} << 32) - 77}};
  const int steps = steps_of(4);
  Gradients gradients(lab().device, shape.sizes, steps + 1);
  for (const Config& recipe : recipe_configs())
    for (const GradientKind& kind : {kGradientKinds[2], kGradientKinds[5], kGradientKinds[6]}) {
      Config config = recipe;
      set_rounding(config, SCRUPLE_STOCHASTIC);
      if (quick() && kind.rounding != SCRUPLE_DITHER) continue;
      for (std::size_t first = 0; first < shape.offsets.size(); ++first) {
        Shape turned = shape;
        std::rotate(turned.offsets.begin(), turned.offsets.begin() + static_cast<std::ptrdiff_t>(first),
                    turned.offsets.end());
        if (first > 0 && (quick() || recipe.rule != "sgd")) break;
        expect_same(lab(), with_gradient(config, kind), turned, gradients, steps);
        if (HasFatalFailure()) return;
      }
    }
}

TEST_F(CudaParity, ViewsStepLikeTheWhole) {
  const Shape shape{{1, 128, 129, 5000, quick() ? 1000 : 70001}, {0, 3, 0}};
  const int steps = steps_of(3);
  Gradients gradients(lab().device, shape.sizes, steps + 1);
  for (const Config& recipe : recipe_configs())
    for (const int rounding : {SCRUPLE_NEAREST, SCRUPLE_STOCHASTIC}) {
      Config config = recipe;
      if (!set_rounding(config, rounding) || (quick() && rounding != SCRUPLE_NEAREST)) continue;
      Pair pair(lab(), config, shape);
      for (int t = 1; t <= steps; ++t) {
        pair.take_gradients(t, gradients);
        pair.step(On::kHost);
        std::vector<scruple_tensor> views;
        for (const scruple_tensor& row : pair.twin->rows) {
          std::int64_t first = 0, width = 128;
          do {
            scruple_tensor view{};
            const std::int64_t n = std::min(width, row.size - first);
            CHECK_OK(scruple_tensor_view(&row, first, n, &view));
            views.push_back(view);
            first += n;
            width = width == 128 ? 384 : width == 384 ? 1152 : 128 * 77;
          } while (first < row.size);
        }
        if (t % 2 == 0) {
          CHECK_OK(scruple_step(lab().device, views.data(), length(views), nullptr));
        } else {
          for (const scruple_tensor& view : views) CHECK_OK(scruple_step(lab().device, &view, 1, nullptr));
        }
      }
      ASSERT_EQ(pair.difference(), "") << config.name;
    }
}

// One table of few optimizers, one of many, in turn: see CudaNorm.TablesThatTakeTurns.
TEST_F(CudaParity, TablesThatTakeTurns) {
  const Config config = recipe_configs(true).back();
  DeviceMemory other(lab().device);
  const Shape few{std::vector<std::int64_t>(100, 70)}, many{std::vector<std::int64_t>(600, 70)};
  Gradients gradients(lab().device, many.sizes, 5, Data::kNormal);
  Pair a(lab(), lab().memory, {config}, few), b(lab(), other, std::vector<Config>(600, config), many);
  Gradients few_gradients(lab().device, few.sizes, 5, Data::kNormal);
  for (int t = 1; t <= 4; ++t) {
    a.walk(t, t, few_gradients);
    b.walk(t, t, gradients);
  }
  EXPECT_EQ(a.difference(), "");
  EXPECT_EQ(b.difference(), "");
}

// The engine keeps the last table; what changes between steps with the same planes must reach the device.
TEST_F(CudaParity, WhatChangesInATableIsSeen) {
  Config config = config_of("adamw", "scruple");
  set_rounding(config, SCRUPLE_STOCHASTIC);
  const Shape shape{{70, 1000, 9000}};
  Gradients gradients(lab().device, shape.sizes, 7, Data::kNormal);
  Pair pair(lab(), config, shape);
  const auto both = [&](const auto& change) {
    change(*pair.optimizers[0]), change(*pair.device_optimizers[0]);
  };
  const auto walk = [&](int t, const char* what) {
    pair.walk(t, t, gradients);
    EXPECT_EQ(pair.difference(), "") << "after a change of " << what;
  };
  walk(1, "nothing");
  pair.each_row([](scruple_tensor& row) { row.offset += 16; });
  walk(2, "offset");
  pair.each_row([](scruple_tensor& row) { row.id += 100; });
  walk(3, "id");
  both([](Optimizer& optimizer) { optimizer.seed(99); });
  walk(4, "seed");
  both([](Optimizer& optimizer) { optimizer.set("lr", 0.5); });
  walk(5, "learning rate");
  pair.each_row([&](scruple_tensor& row) { row.arrays[SCRUPLE_SLOT].rounding = SCRUPLE_NEAREST; });
  walk(6, "rounding");
}

TEST_F(CudaParity, FoundInfSkipsTheWholeCall) {
  Gradients gradients(lab().device, {1, 100, 70000}, 2);
  for (const Config& recipe : recipe_configs()) {
    Pair pair(lab(), recipe, {{1, 100, 70000}});
    pair.take_gradients(1, gradients);
    for (const float flag : {1.0f, kNaN, -1.0f, 0x1p-149f, 0.0f, -0.0f}) {
      const DeviceCell<float> there(lab().device, flag);
      scruple_step_options options = SCRUPLE_STEP_OPTIONS_INIT;
      options.found_inf = there.at();
      CHECK_OK(scruple_step(lab().device, pair.twin->rows.data(), 3, &options));
      if (flag == 0) pair.step(On::kHost);
      ASSERT_EQ(pair.difference(), "") << recipe.name << ", flag " << flag;
    }
  }
}

TEST_F(CudaParity, MultiplierClipLossScaleStepsAndLearningRateFromMemory) {
  Gradients gradients(lab().device, {1, 100, 3000}, 4);
  const DeviceCell<float> clip(lab().device, 0.3f), loss_scale(lab().device, 1000.0f);
  DeviceCell<std::int64_t> steps(lab().device);
  DeviceCell<double> lr(lab().device);
  for (const Config& recipe : recipe_configs())
    for (const GradientKind& kind : gradient_kinds()) {
      Config config = recipe;
      set_rounding(config, SCRUPLE_STOCHASTIC);
      Pair pair(lab(), with_gradient(config, kind), {{1, 100, 3000}});
      double host_lr = 0;
      std::int64_t host_steps = 0;
      CHECK_OK(scruple_optimizer_read_lr(*pair.device_optimizers[0], lr.at()));
      CHECK_OK(scruple_optimizer_read_lr(*pair.optimizers[0], &host_lr));
      for (int t = 1; t <= 3; ++t) {
        pair.take_gradients(1, gradients);
        host_lr = 0.007 / t;
        host_steps = 41 * t * t;
        lr.set(host_lr);
        steps.set(host_steps);
        scruple_step_options options = SCRUPLE_STEP_OPTIONS_INIT;
        options.multiplier = t == 2 ? -0.7f : 1.1f;
        const float host_clip = 0.3f, host_scale = 1000.0f;
        options.clip = t == 1 ? nullptr : &host_clip;
        options.loss_scale = t == 2 ? nullptr : &host_scale;
        options.steps = t == 3 ? nullptr : &host_steps;
        CHECK_OK(scruple_step(lab().host, pair.rows.data(), 3, &options));
        options.clip = t == 1 ? nullptr : clip.at();
        options.loss_scale = t == 2 ? nullptr : loss_scale.at();
        options.steps = t == 3 ? nullptr : steps.at();
        CHECK_OK(scruple_step(lab().device, pair.twin->rows.data(), 3, &options));
      }
      ASSERT_EQ(pair.difference(), "") << config.name << ", gradient " << kind.format << " " << kind.rounding;
    }
}

TEST_F(CudaParity, StepsFarIntoATraining) {
  Gradients gradients(lab().device, {100, 3000}, 2);
  for (const Config& recipe : recipe_configs()) {
    Config config = recipe;
    set_rounding(config, SCRUPLE_STOCHASTIC);
    Pair pair(lab(), config, {{100, 3000}});
    for (const std::int64_t t : {std::int64_t{1000}, std::int64_t{123456789}, std::int64_t{0xffffffff}}) {
      pair.take_gradients(1, gradients);
      pair.each_row([&](scruple_tensor& row) { row.step = t; });
      pair.step();
    }
    ASSERT_EQ(pair.difference(), "") << recipe.name;
  }
}

TEST_F(CudaParity, EmptyTables) {
  CHECK_OK(scruple_step(lab().device, nullptr, 0, nullptr));
  CHECK_OK(scruple_fold(lab().device, nullptr, nullptr, 0, 1.0f, nullptr));
  CHECK_OK(scruple_clear(lab().device, nullptr, 0));
  double norm = -1;
  float found = -1;
  CHECK_OK(scruple_norm(lab().device, nullptr, 0, &norm, &found));
  EXPECT_EQ(norm, 0.0);
  EXPECT_EQ(found, 0.0f);
  const DeviceCell<double> there(lab().device, -1.0);
  const DeviceCell<float> flag(lab().device, -1.0f), clip(lab().device, -1.0f);
  scruple_measure_options options = SCRUPLE_MEASURE_OPTIONS_INIT;
  options.norm = there.at();
  options.found_inf = flag.at();
  options.clip = clip.at();
  CHECK_OK(scruple_measure(lab().device, nullptr, 0, &options));
  EXPECT_EQ(there.get(), 0.0);
  EXPECT_EQ(flag.get(), 0.0f);
  EXPECT_EQ(clip.get(), 1.0f);
  Gradients gradients(lab().device, {0, 0, 0}, 3);
  for (const Config& recipe : recipe_configs()) {
    expect_same(lab(), recipe, {{0, 0, 0}}, gradients, 2);
    if (HasFatalFailure()) return;
  }
}

// ---- Every format ----

Config fp32_config(const std::string& name) {
  Config config;
  const Optimizer optimizer("adamw");
  config.formats.optimizer = optimizer;
  config.formats.size = 1;
  CHECK_OK(scruple_tensor_use(&config.formats, "fp32"));
  config.name = name;
  return config;
}

TEST_F(CudaFormats, EveryFormatInEveryRoleAndRounding) {
  const Shape shape{some_lengths(), {0, 1, 16}};
  const int steps = steps_of(4);
  Gradients gradients(lab().device, shape.sizes, steps + 1);
  const std::vector<Case> cases = all_cases();
  for (const Case& c : cases) {  // alone among fp32
    Config config = fp32_config("adamw with " + c.name());
    put(config, c.array, c.format, c.rounding);
    expect_same(lab(), config, shape, gradients, steps);
    if (HasFatalFailure()) return;
  }
  for (int f = 0; f < scruple_format_count(); ++f)  // wherever it can stand
    for (int rounding = SCRUPLE_NEAREST; rounding <= SCRUPLE_WIDE; ++rounding) {
      Config config = fp32_config("");
      for (const Case& c : cases)
        if (c.format == scruple_format_at(f) && c.rounding == rounding) {
          put(config, c.array, c.format, c.rounding);
          config.name += c.name() + "; ";
        }
      if (config.name.empty()) continue;
      expect_same(lab(), config, shape, gradients, steps);
      if (HasFatalFailure()) return;
    }
}

TEST_F(CudaFormats, MixturesThatNoRecipeNames) {
  const Shape shape{some_lengths(), {0, 3, 0}};
  const int steps = steps_of(4);
  Gradients gradients(lab().device, shape.sizes, steps + 1);
  struct Mixture {
    const char *weight, *moment, *nonneg;
  };
  constexpr Mixture kMixtures[] = {
      {"bf16+5", "flash8", "log4"},       {"fp16+3", "nf4", "bf16"},       {"int9", "linear8", "flash8"},
      {"int12", "companded8", "linear8"}, {"bf16+fp32", "nf4", "log4"},    {"fp16+16", "bf16", "companded8"},
      {"fp16", "linear8", "fp32"},        {"fp16+fp32", "fp32", "flash8"}, {"bf16+16", "companded8", "bf16"},
      {"bf16+15", "nf4", "log5"},         {"int11", "flash8", "log4"}};
  std::size_t turn = 0;
  for (const Mixture& m : kMixtures)
    for (const int rounding : {SCRUPLE_NEAREST, SCRUPLE_STOCHASTIC, SCRUPLE_TRUNCATE}) {
      Config config = fp32_config(std::string(m.weight) + " " + m.moment + " " + m.nonneg);
      put(config, SCRUPLE_WEIGHT, scruple_format_find(m.weight), SCRUPLE_NEAREST);
      put(config, SCRUPLE_SLOT, scruple_format_find(m.moment), SCRUPLE_NEAREST);
      put(config, SCRUPLE_SLOT + 1, scruple_format_find(m.nonneg), SCRUPLE_NEAREST);
      set_rounding(config, rounding);
      config = with_gradient(config, kGradientKinds[turn++ % std::size(kGradientKinds)]);
      expect_same(lab(), config, shape, gradients, steps);
      if (HasFatalFailure()) return;
    }
}

// Extra bits that point below a zero are of the weight that stood there before.
TEST_F(CudaFormats, WeightsThatOthersMadeZero) {
  const Shape shape{{4099, 300}, {0}};
  const int steps = steps_of(4);
  Gradients gradients(lab().device, shape.sizes, steps + 1);
  for (const Case& c : all_cases()) {
    if (c.array != SCRUPLE_WEIGHT || c.info.code_bits != 16) continue;
    Config config = fp32_config("adamw with " + c.name());
    put(config, c.array, c.format, c.rounding);
    Pair pair(lab(), config, shape);
    pair.walk(1, steps / 2, gradients);
    for (Tensor& tensor : pair.tensors)
      for (std::int64_t i = 0; i < tensor.row.size; i += 5)
        std::memset(tensor.planes[SCRUPLE_WEIGHT][0].data() + 2 * i, 0, 2);
    pair.twin->upload(pair.tensors);
    pair.walk(steps / 2 + 1, steps, gradients);
    ASSERT_EQ(pair.difference(), "") << config.name;
  }
}

// Any format in any array of any rule, by lot.
std::vector<Config> mixtures_by_lot() {
  std::vector<Config> mixtures;
  const std::vector<Case> cases = all_cases();
  Random random(77);
  const auto draw = [&](int role) {
    for (;;) {
      const Case& c = cases[random.next() % cases.size()];
      if (c.role == role) return c;
    }
  };
  for (int n = 0; n < (quick() ? 14 : 200); ++n) {
    const int rule = n % scruple_rule_count();
    Config config{rule_name(rule), {}, {}, rule_name(rule)};
    if (n / scruple_rule_count() % 2 == 0) config.hypers = busy_hypers(rule);
    Optimizer optimizer(config.rule.c_str());
    for (const auto& [name, value] : config.hypers) optimizer.set(name.c_str(), value);
    scruple_tensor probe{};
    probe.optimizer = optimizer;
    scruple_rule_info info{};
    CHECK_OK(scruple_rule_at(rule, &info));
    const auto choose = [&](int array, int role) {
      const Case c = draw(role);
      put(config, array, c.format, c.rounding);
      config.name += ", " + std::string(c.info.name) + " " + std::to_string(c.rounding);
    };
    choose(SCRUPLE_WEIGHT, SCRUPLE_ROLE_WEIGHT);
    for (int s = 0; s < info.slots; ++s) {
      scruple_slot_info slot{};
      CHECK_OK(scruple_rule_slot(rule, s, &slot));
      int role = 0;
      CHECK_OK(scruple_tensor_array(&probe, SCRUPLE_SLOT + s, nullptr, &role, nullptr));
      if (role == SCRUPLE_ROLE_EXACT)
        put(config, SCRUPLE_SLOT + s, scruple_format_find("fp32"), SCRUPLE_NEAREST);
      else
        choose(SCRUPLE_SLOT + s, slot.role);
    }
    choose(SCRUPLE_GRADIENT, SCRUPLE_ROLE_GRADIENT);
    mixtures.push_back(config);
  }
  return mixtures;
}
TEST_F(CudaFormats, MixturesByLot) {
  const Shape shape{some_lengths(), {0, 1, 6}};
  const int steps = steps_of(4);
  for (const Data data : {Data::kNormal, Data::kNonFinite}) {
    Gradients gradients(lab().device, shape.sizes, steps + 1, data);
    for (const Config& config : mixtures_by_lot()) {
      expect_same(lab(), config, shape, gradients, steps, data);
      if (HasFatalFailure()) return;
    }
  }
}
TEST_F(CudaFormats, MomentsOfNonFiniteGradients) {
  const Shape shape{{65, 4099, 200}, {0, 0, 3}};  // whole tiles among them
  const int steps = steps_of(4);
  Gradients gradients(lab().device, shape.sizes, steps + 1, Data::kNonFinite);
  for (const Config& config : moment_configs()) {
    expect_same(lab(), config, shape, gradients, steps, Data::kNonFinite);
    if (HasFatalFailure()) return;
  }
}
TEST_F(CudaFewBlocks, MixturesInOneTable) { expect_same_in_one_table(lab(), mixtures_by_lot(), 9000); }

// Encoding from host and device memory, decoding to both.
TEST_F(CudaFormats, EncodeAndDecode) {
  const Optimizer adamw;
  Shape shape{some_lengths(), {0, 1, 6, 3}, {0, 5, 13, std::int64_t{1} << 40}};
  shape.sizes.push_back(0);
  shape.sizes.push_back(70001);
  std::size_t largest = 70001;
  DeviceMemory scratch(lab().device, largest * sizeof(float) + 16), other(lab().device);
  std::vector<float> values(largest), want(largest), got(largest);
  for (const Case& c : all_cases())
    for (const Data data : {Data::kNormal, Data::kSubnormal, Data::kNonFinite}) {
      std::vector<Tensor> tensors;
      for (std::size_t i = 0; i < shape.sizes.size(); ++i) {
        Tensor tensor(adamw, shape.sizes[i]);
        tensor.row.id = static_cast<std::uint32_t>(i);
        tensor.row.step = 3;
        tensor.row.offset = shape.offsets[i % 4];
        tensor.use(c.array, c.format, c.rounding, shape.shifts[i % 4], shape.shifts[i % 4]);
        tensors.push_back(std::move(tensor));
      }
      Twin from_host(lab().memory, tensors), from_device(other, tensors);
      for (std::size_t i = 0; i < tensors.size(); ++i) {
        const std::size_t n = static_cast<std::size_t>(shape.sizes[i]), bytes = n * sizeof(float);
        values_of(values.data(), n, i, data);
        if (c.nonneg())
          for (float& x : values) x = std::fabs(x);
        CHECK_OK(scruple_encode(lab().host, &tensors[i].row, c.array, values.data()));
        scratch.write(values.data(), bytes, 4);
        CHECK_OK(scruple_encode(lab().device, &from_host.rows[i], c.array, values.data()));
        std::fill_n(values.begin(), n, 12345.0f);  // the call has taken what it needs
        CHECK_OK(scruple_encode(lab().device, &from_device.rows[i], c.array,
                                reinterpret_cast<float*>(scratch.data() + 4)));
        CHECK_OK(scruple_decode(lab().host, &tensors[i].row, c.array, want.data()));
        std::fill_n(got.begin(), n, 0.0f);
        CHECK_OK(scruple_decode(lab().device, &from_host.rows[i], c.array, got.data()));
        ASSERT_EQ(std::memcmp(want.data(), got.data(), bytes), 0) << c.name() << ", decoded to the host";
        CHECK_OK(scruple_decode(lab().device, &from_device.rows[i], c.array,
                                reinterpret_cast<float*>(scratch.data() + 8)));
        scratch.read(got.data(), bytes, 8);
        ASSERT_EQ(std::memcmp(want.data(), got.data(), bytes), 0) << c.name() << ", decoded to the device";
      }
      ASSERT_EQ(from_host.difference(tensors), "") << c.name() << ", encoded from the host";
      ASSERT_EQ(from_device.difference(tensors), "") << c.name() << ", encoded from the device";
      if (quick()) break;
    }
}

TEST_F(CudaFormats, ResetWritesInitialValuesAndClearZeros) {
  const Shape shape{some_lengths(), {0, 3}, {0, 5}};
  for (int rule = 0; rule < scruple_rule_count(); ++rule) {
    Optimizer optimizer(rule_name(rule).c_str());
    for (const auto& [name, value] : busy_hypers(rule)) optimizer.set(name.c_str(), value);
    scruple_rule_info info{};
    CHECK_OK(scruple_rule_at(rule, &info));
    for (const Case& c : all_cases()) {
      std::vector<Tensor> tensors;
      for (std::size_t i = 0; i < shape.sizes.size(); ++i) {
        Tensor tensor(optimizer, shape.sizes[i]);
        tensor.row.id = static_cast<std::uint32_t>(i);
        tensor.row.offset = shape.offsets[i % 2];
        tensor.use(SCRUPLE_WEIGHT, "fp32");
        tensor.use(SCRUPLE_GRADIENT, "fp32");
        for (int s = 0; s < info.slots; ++s) {
          scruple_slot_info slot{};
          CHECK_OK(scruple_rule_slot(rule, s, &slot));
          if (slot.role == c.role)
            tensor.use(SCRUPLE_SLOT + s, c.format, c.rounding, shape.shifts[i % 2]);
          else
            tensor.use(SCRUPLE_SLOT + s, "fp32");
        }
        if (c.role == SCRUPLE_ROLE_GRADIENT)
          tensor.use(SCRUPLE_GRADIENT, c.format, c.rounding, shape.shifts[i % 2]);
        for (auto& planes : tensor.planes)
          for (Plane& plane : planes)
            if (plane.size > 0) std::memset(plane.data(), 0xff, plane.size);
        tensors.push_back(std::move(tensor));
      }
      Twin twin(lab().memory, tensors);
      std::vector<scruple_tensor> rows;
      for (std::size_t i = 0; i < tensors.size(); ++i) {
        rows.push_back(tensors[i].row);
        CHECK_OK(scruple_tensor_reset(lab().host, &tensors[i].row));
        CHECK_OK(scruple_tensor_reset(lab().device, &twin.rows[i]));
      }
      CHECK_OK(scruple_clear(lab().host, rows.data(), length(rows)));
      CHECK_OK(scruple_clear(lab().device, twin.rows.data(), length(twin.rows)));
      ASSERT_EQ(twin.difference(tensors), "") << rule_name(rule) << ", " << c.name();
    }
    if (quick() && rule == 1) break;
  }
}

// Any gradient format into any accumulator, 1 and 3 folds.
TEST_F(CudaFormats, Folds) {
  const Optimizer sgd("sgd");
  Shape shape{some_lengths(), {0, 1, 6}, {0, 5, std::int64_t{1} << 40}};
  shape.sizes.push_back(70001);
  DeviceMemory other(lab().device);
  const std::vector<Case> cases = all_cases();
  for (const Case& from : cases)
    for (const Case& to : cases) {
      if (from.role != SCRUPLE_ROLE_GRADIENT || from.rounding == SCRUPLE_DITHER ||
          from.rounding == SCRUPLE_TRUNCATE)
        continue;
      if (to.role != SCRUPLE_ROLE_GRADIENT || (to.info.roles & SCRUPLE_ROLE_ACCUMULATOR) == 0) continue;
      std::vector<Tensor> into, arriving;
      std::vector<scruple_tensor> rows;
      std::vector<scruple_array> host_incoming, device_incoming;
      std::vector<float> values(70001);
      for (std::size_t i = 0; i < shape.sizes.size(); ++i) {
        Tensor tensor(sgd, shape.sizes[i]), source(sgd, shape.sizes[i]);
        tensor.row.id = static_cast<std::uint32_t>(i);
        tensor.row.offset = shape.offsets[i % 3];
        tensor.use(SCRUPLE_GRADIENT, to.format, to.rounding, shape.shifts[i % 3]);
        source.use(SCRUPLE_GRADIENT, from.format, from.rounding, shape.shifts[(i + 1) % 3]);
        values_of(values.data(), static_cast<std::size_t>(shape.sizes[i]), i, Data::kNormal);
        CHECK_OK(scruple_encode(lab().host, &source.row, SCRUPLE_GRADIENT, values.data()));
        into.push_back(std::move(tensor));
        arriving.push_back(std::move(source));
      }
      Twin twin(lab().memory, into), twin_arriving(other, arriving);
      for (std::size_t i = 0; i < into.size(); ++i) {
        rows.push_back(into[i].row);
        host_incoming.push_back(arriving[i].row.arrays[SCRUPLE_GRADIENT]);
        device_incoming.push_back(twin_arriving.rows[i].arrays[SCRUPLE_GRADIENT]);
      }
      for (int fold = 0; fold < 3; ++fold) {
        for (std::size_t i = 0; i < rows.size(); ++i) rows[i].folds = twin.rows[i].folds = fold;
        const float multiplier = fold == 1 ? -0.3f : 1.0f;
        CHECK_OK(
            scruple_fold(lab().host, rows.data(), host_incoming.data(), length(rows), multiplier, nullptr));
        CHECK_OK(scruple_fold(lab().device, twin.rows.data(), device_incoming.data(), length(rows),
                              multiplier, nullptr));
        ASSERT_EQ(twin.difference(into), "") << from.name() << " into " << to.name() << ", fold " << fold;
      }
    }
}

// ---- Memory ----

void expect_same_planes(scruple_engine* device, const scruple_tensor& there, const scruple_tensor& here,
                        const std::string& name) {
  for (int a = 0; a < SCRUPLE_ARRAYS; ++a) {
    if (here.arrays[a].codes == nullptr) continue;
    std::int64_t codes = 0, aux = 0;
    CHECK_OK(scruple_format_bytes(here.arrays[a].format, here.size, &codes, &aux));
    const auto expect_same_plane = [&](const void* got, const void* want, std::int64_t bytes) {
      Bytes copy(static_cast<std::size_t>(bytes));
      if (bytes == 0) return;
      CHECK_OK(scruple_copy(device, copy.data(), got, bytes));
      CHECK_OK(scruple_engine_synchronize(device));
      EXPECT_EQ(std::memcmp(copy.data(), want, copy.size()), 0) << name << ", array " << a;
    };
    expect_same_plane(there.arrays[a].codes, here.arrays[a].codes, codes);
    expect_same_plane(there.arrays[a].aux, here.arrays[a].aux, aux);
  }
}

TEST_F(CudaMemory, AllocatedTensorsBeginAsOnTheCpu) {
  for (const Config& recipe : recipe_configs()) {
    Optimizer optimizer(recipe.rule.c_str());
    for (const auto& [name, value] : recipe.hypers) optimizer.set(name.c_str(), value);
    scruple_tensor there = recipe.formats;
    there.optimizer = optimizer;
    there.size = 5003;
    there.step = 1;
    scruple_tensor here = there;
    CHECK_OK(scruple_tensor_alloc(lab().device, &there, SCRUPLE_STATE | 1u << SCRUPLE_GRADIENT));
    CHECK_OK(scruple_tensor_alloc(lab().host, &here, SCRUPLE_STATE | 1u << SCRUPLE_GRADIENT));
    expect_same_planes(lab().device, there, here, recipe.name);
    scruple_tensor_free(lab().device, &there);
    scruple_tensor_free(lab().host, &here);
    EXPECT_EQ(there.arrays[SCRUPLE_WEIGHT].codes, nullptr);
  }
}

// Each plane ends where its memory ends: who reads beyond is stopped by compute-sanitizer, and, but for scales, which do
// not fill 256 bytes, by the emulator.
TEST_F(CudaMemory, WholeTilesReadNothingBeyondTheirPlanes) {
  constexpr std::int64_t kTile = 2048;
  const Optimizer adamw;
  std::vector<float> values(kTile);
  values_of(values.data(), values.size(), 1, Data::kNormal);
  for (const Case& c : all_cases()) {
    Config config = fp32_config(c.name());
    put(config, c.array, c.format, c.rounding);
    scruple_tensor there = config.formats;
    there.optimizer = adamw;
    there.size = kTile;
    there.step = 1;
    scruple_tensor here = there;
    for (auto [engine, row] : {std::pair{lab().device.handle, &there}, {lab().host.handle, &here}}) {
      CHECK_OK(scruple_tensor_alloc(engine, row, SCRUPLE_STATE | 1u << SCRUPLE_GRADIENT));
      for (const int array : {SCRUPLE_WEIGHT, SCRUPLE_GRADIENT})
        CHECK_OK(scruple_encode(engine, row, array, values.data()));
      for (; row->step <= 3; ++row->step) CHECK_OK(scruple_step(engine, row, 1, nullptr));
    }
    expect_same_planes(lab().device, there, here, config.name);
    scruple_tensor_free(lab().device, &there);
    scruple_tensor_free(lab().host, &here);
  }
}

TEST_F(CudaMemory, CopiesBetweenAnyTwoPlaces) {
  for (const std::size_t n : {std::size_t{0}, std::size_t{1}, std::size_t{255}, (std::size_t{5} << 20) + 3}) {
    DeviceMemory first(lab().device, n + 8), second(lab().device, n + 8);
    Bytes from(n), host(n + 1, 0xee), back(n + 4, 0xee);
    Random random(n);
    for (unsigned char& byte : from) byte = static_cast<unsigned char>(random.next());
    const auto copy = [&](void* to, const void* source) {
      CHECK_OK(scruple_copy(lab().device, to, source, static_cast<std::int64_t>(n)));
    };
    copy(first.data() + 3, from.data());
    copy(second.data() + 1, first.data() + 3);
    copy(back.data() + 1, second.data() + 1);
    CHECK_OK(scruple_engine_synchronize(lab().device));
    copy(host.data(), back.data() + 1);
    CHECK_OK(scruple_engine_synchronize(lab().device));
    EXPECT_TRUE(n == 0 || std::memcmp(host.data(), from.data(), n) == 0) << n;
    EXPECT_EQ(host[n], 0xee);
    EXPECT_EQ(back[0], 0xee);
    EXPECT_EQ(back[n + 1], 0xee);
  }
}

// ---- Norms ----

// Tensors with nothing but a gradient.
std::vector<Tensor> gradients_only(scruple_engine* engine, const scruple_optimizer* optimizer, const Case& c,
                                   const std::vector<std::int64_t>& sizes, std::size_t shift,
                                   const std::function<void(std::size_t, std::vector<float>&)>& edit) {
  std::vector<Tensor> tensors;
  for (std::size_t i = 0; i < sizes.size(); ++i) {
    std::vector<float> values(static_cast<std::size_t>(sizes[i]));
    values_of(values.data(), values.size(), i, Data::kNormal);
    edit(i, values);
    Tensor tensor(optimizer, sizes[i]);
    tensor.row.folds = 1;
    tensor.use(SCRUPLE_GRADIENT, c.format, c.rounding, shift, shift == 0 ? 0 : shift + 1);
    tensor.encode(engine, SCRUPLE_GRADIENT, values);
    tensors.push_back(std::move(tensor));
  }
  return tensors;
}

std::vector<Case> gradient_cases() {
  std::vector<Case> list;
  for (const Case& c : all_cases())
    if (c.role == SCRUPLE_ROLE_GRADIENT) list.push_back(c);
  return list;
}

// norm and measure of the engine against the reference's, to the bit.
void expect_same_norm(Lab& lab, const std::vector<scruple_tensor>& host_rows,
                      const std::vector<scruple_tensor>& device_rows, const std::string& what) {
  double want = -1, got = -1;
  float want_found = -1, got_found = -1;
  CHECK_OK(scruple_norm(lab.host, host_rows.data(), length(host_rows), &want, &want_found));
  CHECK_OK(scruple_norm(lab.device, device_rows.data(), length(host_rows), &got, &got_found));
  ASSERT_EQ(std::memcmp(&want, &got, sizeof want), 0) << what << ": norm " << got << ", want " << want;
  ASSERT_EQ(want_found, got_found) << what;
  struct Outputs {  // without padding: memcmp compares it
    double norm = -1;
    float found_inf = -1, clip = -1, loss_scale = 1024.0f * 3, unused = 0;
  };
  Outputs here;
  DeviceCell<Outputs> there(lab.device, here);
  for (const double max_norm : {0.0, 1.0, 1e9}) {
    scruple_measure_options options = SCRUPLE_MEASURE_OPTIONS_INIT;
    options.max_norm = max_norm;
    const auto use = [&](Outputs* outputs) {
      options.norm = &outputs->norm;
      options.found_inf = &outputs->found_inf;
      options.clip = &outputs->clip;
      options.loss_scale = max_norm == 0 ? nullptr : &outputs->loss_scale;
    };
    use(&here);
    CHECK_OK(scruple_measure(lab.host, host_rows.data(), length(host_rows), &options));
    use(there.at());
    CHECK_OK(scruple_measure(lab.device, device_rows.data(), length(host_rows), &options));
    const Outputs back = there.get();
    ASSERT_EQ(std::memcmp(&here, &back, sizeof here), 0)
        << what << ", measured under " << max_norm << ": norm " << back.norm << " (want " << here.norm
        << "), found_inf " << back.found_inf << " (" << here.found_inf << "), clip " << back.clip << " ("
        << here.clip << ")";
    if (max_norm == 0) {
      ASSERT_EQ(std::memcmp(&back.norm, &want, sizeof want), 0) << what << ": measure is not norm";
    }
  }
}

TEST_F(CudaNorm, EqualsTheCpusToTheBit) {
  const Optimizer optimizer("sgd");
  const std::vector<std::int64_t> sizes = {1,    7,     8,     9,     255, 256,    257,    2047, 2048,
                                           2049, 65535, 65536, 65537, 0,   150001, 131072, 33};
  for (const Case& c : gradient_cases())
    for (const std::size_t shift : {0u, 1u, 6u, 4u}) {
      if (quick() && shift > 1) continue;
      const std::vector<Tensor> tensors =
          gradients_only(lab().host, optimizer, c, sizes, shift, [](std::size_t i, std::vector<float>& x) {
            for (float& v : x) v *= static_cast<float>(1 + i % 5);
          });
      Twin twin(lab().memory, tensors);
      std::vector<scruple_tensor> rows;
      for (const Tensor& tensor : tensors) rows.push_back(tensor.row);
      const std::string what = c.name() + ", shift " + std::to_string(shift);
      expect_same_norm(lab(), rows, twin.rows, what + ", all");
      for (std::size_t i = 0; i < rows.size(); ++i) {
        if (HasFatalFailure() || (quick() && i % 4 != 0)) continue;
        expect_same_norm(lab(), {rows[i]}, {twin.rows[i]}, what + ", size " + std::to_string(rows[i].size));
      }
      if (HasFatalFailure()) return;
    }
}

TEST_F(CudaNorm, OfAMillionAndOfManyTensors) {
  const Optimizer optimizer("sgd");
  std::vector<std::int64_t> many = many_sizes();
  for (const std::vector<std::int64_t>& sizes :
       {std::vector<std::int64_t>{1 << 20}, std::vector<std::int64_t>{(1 << 20) + 4321, 999999}, many})
    for (const Case& c : gradient_cases()) {
      const std::vector<Tensor> tensors =
          gradients_only(lab().host, optimizer, c, sizes, 0, [](std::size_t, std::vector<float>&) {});
      Twin twin(lab().memory, tensors);
      std::vector<scruple_tensor> rows;
      for (const Tensor& tensor : tensors) rows.push_back(tensor.row);
      expect_same_norm(lab(), rows, twin.rows, c.name() + ", " + std::to_string(sizes.size()) + " tensors");
      if (HasFatalFailure() || quick()) return;
    }
}

// An engine keeps the last tables on the device; none may be overwritten by what another call puts there.
TEST_F(CudaNorm, TablesThatTakeTurns) {
  const Optimizer optimizer("sgd");
  const Case c = gradient_cases().front();
  DeviceMemory other(lab().device);
  const std::vector<Tensor> many =
      gradients_only(lab().host, optimizer, c, std::vector<std::int64_t>(300, 100), 0,
                     [](std::size_t, std::vector<float>&) {});
  const std::vector<Tensor> one = gradients_only(lab().host, optimizer, c, {std::int64_t{8} << 20}, 0,
                                                 [](std::size_t, std::vector<float>&) {});
  Twin many_twin(lab().memory, many), one_twin(other, one);
  std::vector<scruple_tensor> many_rows, one_rows = {one[0].row};
  for (const Tensor& tensor : many) many_rows.push_back(tensor.row);
  for (int turn = 0; turn < 3; ++turn) {
    expect_same_norm(lab(), many_rows, many_twin.rows, "300 tensors");
    expect_same_norm(lab(), one_rows, one_twin.rows, "one tensor");
  }
}

TEST_F(CudaNorm, FindsANonFiniteGradientAnywhere) {
  const Optimizer optimizer("sgd");
  const std::vector<std::int64_t> sizes = {3, 71000};
  for (const Case& c : gradient_cases()) {
    DeviceCell<float> flag(lab().device), clip(lab().device);
    for (const std::size_t at : {0u, 63u, 255u, 2048u, 65535u, 65536u, 70000u, 70999u}) {
      const float specials[] = {kNaN, kInf, -kInf, float_from(0x7f800001u), float_from(0xffffffffu)};
      const float special = specials[at % 5];
      const std::vector<Tensor> tensors =
          gradients_only(lab().host, optimizer, c, sizes, 0, [&](std::size_t i, std::vector<float>& x) {
            if (i == 1) x[at] = special;
          });
      Twin twin(lab().memory, tensors);
      float found = -1;
      CHECK_OK(scruple_norm(lab().device, twin.rows.data(), 2, nullptr, &found));
      ASSERT_EQ(found, 1.0f) << c.name() << ", " << special << " at " << at;
      flag.set(-1.0f);
      clip.set(-1.0f);
      scruple_measure_options options = SCRUPLE_MEASURE_OPTIONS_INIT;
      options.found_inf = flag.at();
      options.clip = clip.at();
      options.max_norm = 1e-3;
      CHECK_OK(scruple_measure(lab().device, twin.rows.data(), 2, &options));
      ASSERT_EQ(flag.get(), 1.0f) << c.name() << ", " << special << " at " << at;
      ASSERT_EQ(clip.get(), 1.0f) << c.name();
      CHECK_OK(scruple_norm(lab().device, twin.rows.data(), 1, nullptr, &found));
      ASSERT_EQ(found, 0.0f) << c.name() << ": the other tensor is clean";
      if (quick()) break;
    }
  }
}

TEST_F(CudaNorm, HugeAndTinyGradients) {
  const Optimizer optimizer("sgd");
  for (const Case& c : gradient_cases())
    for (const float value : {3e38f, -3.4028234e38f, 1e-30f, 1e-44f, 0.0f}) {
      const std::vector<Tensor> tensors =
          gradients_only(lab().host, optimizer, c, {5000}, 0,
                         [&](std::size_t, std::vector<float>& x) { std::fill(x.begin(), x.end(), value); });
      Twin twin(lab().memory, tensors);
      expect_same_norm(lab(), {tensors[0].row}, twin.rows, c.name() + ", " + std::to_string(value));
      if (HasFatalFailure()) return;
    }
}

// ---- The whole loop without the host ----

// Everything that a loop keeps beside its tensors; no padding, so that memcmp compares it.
struct State {
  scruple_scaler scaler = {256.0f, 2.0f, 0.5f, 3, 0};
  float found_inf = -1, clip = -1, unused = 0;
  double norm = -1, lr = 0;
  std::int64_t steps = 0;
};
static_assert(sizeof(State) == 56);
bool same_state(const State& a, const State& b) { return std::memcmp(&a, &b, sizeof a) == 0; }

constexpr double kMaxNorm = 2.0;

// What one step queues once the gradients are there. `state` lies in the engine's memory.
void queue_step(scruple_engine* engine, const std::vector<scruple_tensor>& rows, State* state) {
  scruple_measure_options measure = SCRUPLE_MEASURE_OPTIONS_INIT;
  measure.max_norm = kMaxNorm;
  measure.loss_scale = &state->scaler.scale;
  measure.steps = &state->steps;
  measure.norm = &state->norm;
  measure.found_inf = &state->found_inf;
  measure.clip = &state->clip;
  CHECK_OK(scruple_measure(engine, rows.data(), length(rows), &measure));
  scruple_step_options options = SCRUPLE_STEP_OPTIONS_INIT;
  options.found_inf = &state->found_inf;
  options.clip = &state->clip;
  options.loss_scale = &state->scaler.scale;
  options.steps = &state->steps;
  CHECK_OK(scruple_step(engine, rows.data(), length(rows), &options));
  CHECK_OK(scruple_advance(engine, &state->found_inf, &state->scaler, &state->steps));
}

// Steps whose gradients hold an infinity or a NaN.
bool is_bad(int t) { return t == 4 || t == 5 || t == 13 || t == 20; }

void spoil(Gradients& gradients, int steps) {
  for (int t = 1; t <= steps; ++t)
    if (is_bad(t)) gradients.host(static_cast<std::size_t>(t), 2)[t * 11] = t == 5 ? kNaN : kInf;
  gradients.upload();
}

// The loop on the reference engine, whose memory can be watched: what a skipped step leaves alone.
void reference_loop(Pair& pair, Gradients& gradients, int steps, State& state) {
  int skipped = 0;
  for (int t = 1; t <= steps; ++t) {
    pair.fold(t, gradients, On::kHost, &state.steps);
    std::vector<Bytes> before;
    for (const Tensor& tensor : pair.tensors) before.push_back(all_planes(tensor));
    const std::int64_t taken = state.steps;
    queue_step(pair.host, pair.rows, &state);
    const bool skip = state.found_inf != 0;
    skipped += skip ? 1 : 0;
    ASSERT_EQ(state.steps, taken + (skip ? 0 : 1));
    for (std::size_t i = 0; i < before.size(); ++i) {
      if (!skip && pair.rows[i].size <= 50) continue;  // too few to be sure that a step changes them
      ASSERT_EQ(same_bytes(before[i], all_planes(pair.tensors[i])), skip) << "step " << t;
    }
  }
  ASSERT_GT(state.steps, 0);
  ASSERT_TRUE(steps <= 5 || skipped > 2);
}

std::vector<Config> loop_configs() {
  std::vector<Config> configs;
  std::size_t turn = 0;
  for (Config config : recipe_configs()) configs.push_back(with_gradient(config, kGradientKinds[turn++ % 3]));
  for (const char* recipe : {"fp32", "lpmm"}) configs.push_back(config_of("sgd", recipe));
  for (const int rounding : {SCRUPLE_NEAREST, SCRUPLE_STOCHASTIC, SCRUPLE_DITHER})
    configs.push_back(with_gradient(config_of("adamw", "scruple"), {"int8", rounding}));
  return configs;
}

TEST_F(CudaLoop, MeasureStepAdvanceWithoutTheHost) {
  const Shape shape{{3, 128, 4000, 0, 70001}, {0, 1}};
  const int steps = quick() ? 6 : 20;
  Gradients gradients(lab().device, shape.sizes, steps + 2);
  spoil(gradients, steps);
  for (const Config& config : loop_configs()) {
    Pair pair(lab(), config, shape);
    State here;
    here.lr = 0.01;
    DeviceCell<State> there(lab().device, here);
    CHECK_OK(scruple_optimizer_read_lr(*pair.optimizers[0], &here.lr));
    CHECK_OK(scruple_optimizer_read_lr(*pair.device_optimizers[0], &there.at()->lr));
    for (int t = 1; t <= steps; ++t) {
      pair.fold(t, gradients, On::kDevice, &there.at()->steps);
      queue_step(lab().device, pair.twin->rows, there.at());
    }
    reference_loop(pair, gradients, steps, here);
    if (HasFatalFailure()) return;
    ASSERT_EQ(pair.difference(), "") << config.name;
    const State back = there.get();
    ASSERT_TRUE(same_state(here, back))
        << config.name << ": scale " << back.scaler.scale << " (want " << here.scaler.scale << "), clean "
        << back.scaler.clean << " (" << here.scaler.clean << "), steps " << back.steps << " (" << here.steps
        << "), norm " << back.norm << " (" << here.norm << "), clip " << back.clip << " (" << here.clip
        << ")";
    EXPECT_NE(here.scaler.scale, State().scaler.scale) << "the scaler was exercised";
  }
}

TEST_F(CudaLoop, AdvanceTakesAnyPart) {
  const float flags[] = {0.0f, 1.0f, 0.0f, 0.0f, kNaN, 0.0f, 0.0f, 0.0f, 0.0f};
  for (const unsigned mask : {0u, 1u, 2u, 3u, 4u, 5u, 6u, 7u}) {
    State here;
    DeviceCell<State> there(lab().device, here);
    for (const float flag : flags) {
      here.found_inf = flag;
      State now = there.get();
      now.found_inf = flag;
      there.set(now);
      const auto advance = [&](scruple_engine* engine, State* state) {
        CHECK_OK(scruple_advance(engine, mask & 1u ? &state->found_inf : nullptr,
                                 mask & 2u ? &state->scaler : nullptr, mask & 4u ? &state->steps : nullptr));
      };
      advance(lab().host, &here);
      advance(lab().device, there.at());
      EXPECT_TRUE(same_state(here, there.get())) << mask;
    }
  }
}

// ---- More than 2^31 elements ----

// The fixed tree of a norm, of one chunk of at most 65536 values.
double chunk_sum(const float* x, std::size_t n) {
  double sum = 0;
  for (std::size_t at = 0; at < n; at += 2048) {
    double level[256] = {};
    for (std::size_t i = at; i < std::min(n, at + 2048); ++i)
      level[i % 256] += static_cast<double>(x[i]) * static_cast<double>(x[i]);
    for (std::size_t width = 128; width > 0; width /= 2)
      for (std::size_t i = 0; i < width; ++i) level[i] = level[2 * i] + level[2 * i + 1];
    sum += level[0];
  }
  return sum;
}

// A block of planes is repeated to fill a tensor of 2^31 + 1000 elements (fewer for a CPU engine), two steps
// are taken, and windows of it are compared with the same window stepped on the CPU.
TEST_F(CudaBig, OverTwoToThe31Elements) {
  if (quick()) GTEST_SKIP() << "quick";
  const bool cuda = is_cuda(engine_under_test());
  const std::int64_t block_size = std::int64_t{1} << (cuda ? 24 : 19),
                     base = std::int64_t{1} << (cuda ? 31 : 22), size = base + 1000;
  const Optimizer optimizer;
  Tensor block(optimizer, block_size, "scruple", lab().host);
  for (int a = 0; a < SCRUPLE_ARRAYS; ++a) {
    if (!block.used(a)) continue;
    if (a != SCRUPLE_GRADIENT) block.row.arrays[a].rounding = SCRUPLE_STOCHASTIC;
    std::vector<float> values(static_cast<std::size_t>(block_size));
    values_of(values.data(), values.size(), static_cast<std::uint64_t>(a), Data::kNormal);
    if (a == SCRUPLE_SLOT + 1)
      for (float& x : values) x = x * x;
    CHECK_OK(scruple_encode(lab().host, &block.row, a, values.data()));
  }

  scruple_tensor big = block.row;
  big.size = size;
  big.id = 5;
  for (scruple_array& array : big.arrays) array.codes = array.aux = nullptr;
  if (scruple_tensor_alloc(lab().device, &big, SCRUPLE_STATE | 1u << SCRUPLE_GRADIENT) != SCRUPLE_OK)
    GTEST_SKIP() << "no memory for " << size << " elements: " << scruple_last_error();
  const auto copy = [&](void* to, const void* from, std::int64_t bytes) {
    CHECK_OK(scruple_copy(lab().device, to, from, bytes));
  };
  for (int a = 0; a < SCRUPLE_ARRAYS; ++a) {
    if (!block.used(a)) continue;
    std::int64_t block_bytes[2], bytes[2];
    CHECK_OK(scruple_format_bytes(big.arrays[a].format, block_size, &block_bytes[0], &block_bytes[1]));
    CHECK_OK(scruple_format_bytes(big.arrays[a].format, size, &bytes[0], &bytes[1]));
    const scruple_array &from = block.row.arrays[a], &to = big.arrays[a];
    for (const bool aux : {false, true}) {
      auto* plane = static_cast<unsigned char*>(aux ? to.aux : to.codes);
      std::int64_t have = block_bytes[aux ? 1 : 0];
      copy(plane, aux ? from.aux : from.codes, have);
      while (have > 0 && have < bytes[aux ? 1 : 0]) {
        const std::int64_t more = std::min(have, bytes[aux ? 1 : 0] - have);
        copy(plane + have, plane, more);
        have += more;
      }
    }
  }
  CHECK_OK(scruple_engine_synchronize(lab().device));

  // The norm first: chunks repeat as the block does.
  std::vector<float> decoded = block.decode(lab().host, SCRUPLE_GRADIENT);
  std::vector<double> sums;
  for (std::size_t at = 0; at < decoded.size(); at += 65536) sums.push_back(chunk_sum(&decoded[at], 65536));
  double total = 0, norm = -1;
  for (std::int64_t chunk = 0; chunk < base / 65536; ++chunk)
    total += sums[static_cast<std::size_t>(chunk) % sums.size()];
  total += chunk_sum(decoded.data(), 1000);
  CHECK_OK(scruple_norm(lab().device, &big, 1, &norm, nullptr));
  EXPECT_EQ(norm, std::sqrt(total));

  for (int t = 1; t <= 2; ++t) {
    big.step = t;
    CHECK_OK(scruple_step(lab().device, &big, 1, nullptr));
  }
  CHECK_OK(scruple_engine_synchronize(lab().device));

  std::vector<std::pair<std::int64_t, std::int64_t>> windows = {{base - 2048, 3048}};
  const std::int64_t marks[] = {2048,
                                65536,
                                block_size,
                                base / 8,
                                base / 4,
                                base / 2,
                                base / 4 * 3,
                                base / 2 + 65536,
                                65535 * (base >> 20) / 128 * 128};
  for (const std::int64_t mark : marks) windows.emplace_back(mark - 2048, 4096);
  Random random(8);
  for (int i = 0; i < 64; ++i)
    windows.emplace_back(
        static_cast<std::int64_t>(random.next() % static_cast<std::uint64_t>(base / 128 - 32)) * 128, 4096);
  for (const auto& [first, n] : windows) {
    std::vector<Tensor> expected;
    expected.emplace_back(optimizer, n);
    Tensor& window = expected[0];
    window.row.id = big.id;
    window.row.offset = first;
    for (int a = 0; a < SCRUPLE_ARRAYS; ++a)
      if (block.used(a)) window.use(a, block.row.arrays[a].format, block.row.arrays[a].rounding);
    for (std::int64_t at = 0; at < n; at += 128) {
      const std::int64_t piece = std::min<std::int64_t>(128, n - at);
      scruple_tensor from{}, to{};
      CHECK_OK(scruple_tensor_view(&block.row, (first + at) % block_size, 128, &from));
      CHECK_OK(scruple_tensor_view(&window.row, at, piece, &to));
      for (int a = 0; a < SCRUPLE_ARRAYS; ++a) {
        if (!block.used(a)) continue;
        std::int64_t codes = 0, aux = 0;
        CHECK_OK(scruple_format_bytes(to.arrays[a].format, piece, &codes, &aux));
        std::memcpy(to.arrays[a].codes, from.arrays[a].codes, static_cast<std::size_t>(codes));
        if (aux > 0) std::memcpy(to.arrays[a].aux, from.arrays[a].aux, static_cast<std::size_t>(aux));
      }
    }
    for (int t = 1; t <= 2; ++t) {
      window.row.step = t;
      step(lab().host, window);
    }
    scruple_tensor view{};
    CHECK_OK(scruple_tensor_view(&big, first, n, &view));
    for (int a = 0; a < SCRUPLE_ARRAYS; ++a) {
      if (!block.used(a)) continue;
      Bytes codes(window.codes(a).size), aux(window.aux(a).size);
      copy(codes.data(), view.arrays[a].codes, length(codes));
      copy(aux.data(), view.arrays[a].aux, length(aux));
      CHECK_OK(scruple_engine_synchronize(lab().device));
      EXPECT_TRUE(same_bytes(codes, window.codes(a).bytes()))
          << "array " << a << " codes, window at " << first;
      EXPECT_TRUE(same_bytes(aux, window.aux(a).bytes())) << "array " << a << " aux, window at " << first;
    }
    if (HasFailure()) break;
  }
  scruple_tensor_free(lab().device, &big);
}

// ---- Threads ----

TEST_F(CudaThreads, TwoHostThreadsShareAnEngine) {
  const Shape shape{{20000, 10, 70000, 129}};
  const int steps = steps_of(10);
  Gradients gradients(lab().device, shape.sizes, steps + 1), more(lab().device, shape.sizes, steps + 1);
  DeviceMemory other(lab().device);
  Pair first(lab(), config_of("adamw", "scruple"), shape),
      second(lab(), other, {config_of("lion", "lpmm")}, shape);
  std::thread thread([&] { second.walk(1, steps, more); });
  first.walk(1, steps, gradients);
  thread.join();
  EXPECT_EQ(first.difference(), "");
  EXPECT_EQ(second.difference(), "");
}

TEST_F(CudaThreads, TwoEnginesSideBySide) {
  const Shape shape{{20000, 10, 70000, 129}};
  const int steps = steps_of(10);
  Lab rival(engine_under_test());
  Gradients gradients(lab().device, shape.sizes, steps + 1), more(rival.device, shape.sizes, steps + 1);
  Pair first(lab(), config_of("adamw", "scruple"), shape), second(rival, config_of("lion", "lpmm"), shape);
  std::thread thread([&] { second.walk(1, steps, more); });
  first.walk(1, steps, gradients);
  thread.join();
  EXPECT_EQ(first.difference(), "");
  EXPECT_EQ(second.difference(), "");
}

// ---- Errors ----

void expect_message(std::initializer_list<std::string> parts) {
  const std::string message = scruple_last_error();
  EXPECT_FALSE(message.empty());
  for (const std::string& part : parts)
    EXPECT_NE(message.find(part), std::string::npos) << part << ": " << message;
}

TEST(CudaErrorsAnywhere, AnUnavailableEngineSaysWhy) {
  const std::string reason = why_unavailable("cuda");
  if (reason.empty()) GTEST_SKIP() << "it is available here";
  bool listed = false;
  for (int i = 0; i < scruple_engine_count(); ++i) {
    scruple_engine_info info{};
    CHECK_OK(scruple_engine_at(i, &info));
    listed = listed || std::string(info.name) == "cuda";
  }
  if (!listed) GTEST_SKIP() << reason;
  for (const char* name : {"cuda", "cuda:0"}) {
    scruple_engine* engine = nullptr;
    EXPECT_EQ(scruple_engine_create(name, 0, &engine), SCRUPLE_UNAVAILABLE) << name;
    expect_message({reason});
    EXPECT_EQ(engine, nullptr);
  }
}

TEST(CudaErrorsAnywhere, CpuEnginesHaveNoStreams) {
  const Engine engine;
  int dummy = 0;
  EXPECT_EQ(scruple_engine_set_stream(engine, &dummy), SCRUPLE_INVALID);
  expect_message({"stream"});
  CHECK_OK(scruple_engine_set_stream(engine, nullptr));
  CHECK_OK(scruple_engine_synchronize(engine));
}

TEST_F(CudaErrors, DevicesThatDoNotExist) {
  for (const char* name :
       {"cuda:99", "cuda:x", "cuda:", "cuda:-1", "cuda:0x", "cuda: 0", "cuda:99999999999999999999"}) {
    scruple_engine* engine = nullptr;
    const scruple_status status = scruple_engine_create(name, 0, &engine);
    EXPECT_TRUE(status == SCRUPLE_INVALID || status == SCRUPLE_UNAVAILABLE) << name << ": " << status;
    expect_message({name});
    EXPECT_EQ(engine, nullptr) << name;
    scruple_engine_destroy(engine);
  }
  const Engine first(0, "cuda:0");
  EXPECT_NE(first.handle, nullptr);
}

// The engine still steps, and to the right bits.
void expect_works(Lab& lab) {
  Gradients gradients(lab.device, {100, 5000}, 3);
  expect_same(lab, config_of("adamw", "scruple"), {{100, 5000}}, gradients, 2);
}

TEST_F(CudaErrors, HostPointersAreRefused) {
  Gradients gradients(lab().device, {100, 5000}, 3);
  for (const Config& config : {config_of("adamw", "scruple"), config_of("adamw", "fp32")}) {
    Pair pair(lab(), config, {{100, 5000}});
    pair.take_gradients(1, gradients);
    const char* names[] = {"weight", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "gradient"};
    for (int a = 0; a < SCRUPLE_ARRAYS; ++a)
      for (const bool aux : {false, true}) {
        std::vector<scruple_tensor> rows = pair.twin->rows;
        scruple_array &array = rows[1].arrays[a], &host = pair.rows[1].arrays[a];
        if (aux && pair.tensors[1].aux(a).size == 0) continue;
        (aux ? array.aux : array.codes) = aux ? host.aux : host.codes;
        EXPECT_EQ(scruple_step(lab().device, rows.data(), 2, nullptr), SCRUPLE_INVALID) << names[a];
        expect_message({"tensor 1", names[a]});
      }
    // The other calls that take tables.
    std::vector<scruple_tensor> rows = pair.twin->rows;
    rows[1].arrays[SCRUPLE_GRADIENT].codes = pair.rows[1].arrays[SCRUPLE_GRADIENT].codes;
    double norm = 0;
    EXPECT_EQ(scruple_norm(lab().device, rows.data(), 2, &norm, nullptr), SCRUPLE_INVALID);
    expect_message({"tensor 1", "gradient"});
    EXPECT_EQ(scruple_clear(lab().device, rows.data(), 2), SCRUPLE_INVALID);
    expect_message({"tensor 1", "gradient"});
    EXPECT_EQ(scruple_fold(lab().device, rows.data(), gradients.on_device(0).data(), 2, 1.0f, nullptr),
              SCRUPLE_INVALID);
    expect_message({"tensor 1", "gradient"});
    EXPECT_EQ(
        scruple_fold(lab().device, pair.twin->rows.data(), gradients.on_host(0).data(), 2, 1.0f, nullptr),
        SCRUPLE_INVALID);
    expect_message({"tensor 0", "gradient"});
    EXPECT_EQ(scruple_encode(lab().device, &rows[1], SCRUPLE_GRADIENT, gradients.host(0, 1)),
              SCRUPLE_INVALID);
    expect_message({"gradient"});
    EXPECT_EQ(pair.difference(), "") << "a refused call wrote something";
    pair.step();
    EXPECT_EQ(pair.difference(), "") << config.name;
  }
  expect_works(lab());
}

TEST_F(CudaErrors, TooLargeAnAllocation) {
  const Optimizer optimizer;
  scruple_tensor tensor{};
  tensor.optimizer = optimizer;
  tensor.size = std::int64_t{1} << 49;
  CHECK_OK(scruple_tensor_use(&tensor, "scruple"));
  EXPECT_EQ(scruple_tensor_alloc(lab().device, &tensor, SCRUPLE_STATE), SCRUPLE_OUT_OF_MEMORY);
  expect_message({});
  for (const scruple_array& array : tensor.arrays) EXPECT_EQ(array.codes, nullptr);
  expect_works(lab());
  // A first plane that fits and a second that does not: the first is given back.
  tensor.size = 1 << 20;
  scruple_tensor small = tensor;
  CHECK_OK(scruple_tensor_alloc(lab().device, &small, SCRUPLE_STATE));
  scruple_tensor_free(lab().device, &small);
}

#if defined(SCRUPLE_TEST_CUDA)

#define CUDA_OK(call) EXPECT_EQ((call), cudaSuccess) << #call

// ---- Streams ----

// A stream that does not wait for the default one.
struct Stream {
  Stream() { CUDA_OK(cudaStreamCreateWithFlags(&handle, cudaStreamNonBlocking)); }
  ~Stream() { cudaStreamDestroy(handle); }
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;
  operator cudaStream_t() const { return handle; }
  // Whatever is queued next waits some milliseconds: work that is not ordered behind it runs too early.
  void delay() const {
    CUDA_OK(cudaLaunchHostFunc(
        handle, [](void*) { std::this_thread::sleep_for(std::chrono::milliseconds(5)); }, nullptr));
  }
  void copy(void* to, const void* from, std::size_t bytes) const {
    CUDA_OK(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, handle));
  }
  void wait() const { CUDA_OK(cudaStreamSynchronize(handle)); }

  cudaStream_t handle = nullptr;
};

// Host memory that copies do not wait for.
struct Pinned {
  explicit Pinned(std::size_t bytes) { CUDA_OK(cudaMallocHost(&data, bytes)); }
  ~Pinned() { cudaFreeHost(data); }
  Pinned(const Pinned&) = delete;
  Pinned& operator=(const Pinned&) = delete;
  template <class T>
  T* as() const {
    return static_cast<T*>(data);
  }
  void* data = nullptr;
};

// The gradients arrive by the caller's own copy on the stream, and the weights leave by one; nothing but the
// stream orders them with the step between.
TEST_F(CudaStream, WorkIsOrderedWithTheCallers) {
  constexpr std::size_t kSize = 300000;
  const Stream stream;
  const Shape shape{{kSize}};
  const int steps = steps_of(10);
  Gradients gradients(lab().device, shape.sizes, steps + 1);
  Pair pair(lab(), with_gradient(config_of("adamw", "scruple"), {"fp32", SCRUPLE_NEAREST}), shape);
  const Pinned arriving(gradients.bytes_per_set() * static_cast<std::size_t>(steps)), leaving(kSize * 2);
  CHECK_OK(scruple_engine_set_stream(lab().device, stream.handle));
  for (int t = 1; t <= steps; ++t) {
    const std::size_t n = static_cast<std::size_t>(t - 1);
    std::memcpy(arriving.as<char>() + n * kSize * 4, gradients.host(n, 0), kSize * 4);
    pair.each_row([&](scruple_tensor& row) { row.step = t; });
    CHECK_OK(scruple_encode(lab().host, pair.rows.data(), SCRUPLE_GRADIENT, gradients.host(n, 0)));
    pair.step(On::kHost);

    stream.delay();
    stream.copy(pair.twin->rows[0].arrays[SCRUPLE_GRADIENT].codes, arriving.as<char>() + n * kSize * 4,
                kSize * 4);
    pair.step(On::kDevice);
    stream.copy(leaving.data, pair.twin->rows[0].arrays[SCRUPLE_WEIGHT].codes, kSize * 2);
    if (t % 3 != 0 && t != steps) continue;  // else the queue grows
    stream.wait();
    ASSERT_EQ(std::memcmp(leaving.data, pair.tensors[0].codes(SCRUPLE_WEIGHT).data(), kSize * 2), 0)
        << "after step " << t;
  }
  CHECK_OK(scruple_engine_synchronize(lab().device));
  CHECK_OK(scruple_engine_set_stream(lab().device, nullptr));
  EXPECT_EQ(pair.difference(), "");
}

TEST_F(CudaStream, OrderIsKeptWhenTheStreamChanges) {
  const Stream streams[2];
  const Shape shape{{300000, 5, 1000}};
  const int steps = steps_of(10);
  Gradients gradients(lab().device, shape.sizes, steps + 1);
  for (const Config& config : {config_of("adamw", "scruple"), config_of("sgd", "lpmm")}) {
    Pair pair(lab(), config, shape);
    CHECK_OK(scruple_engine_synchronize(lab().device));
    for (int t = 1; t <= steps; ++t) {
      const Stream& now = streams[t % 2];
      if (t % 4 < 2) now.delay();
      CHECK_OK(scruple_engine_set_stream(lab().device, t % 5 == 0 ? nullptr : now.handle));
      pair.walk(t, t, gradients, On::kDevice);
    }
    pair.walk(1, steps, gradients, On::kHost);
    CHECK_OK(scruple_engine_synchronize(lab().device));
    EXPECT_EQ(pair.difference(), "") << config.name;
    CHECK_OK(scruple_engine_set_stream(lab().device, nullptr));
  }
}

// Calls that hand values to the host wait for them, whatever the stream is still busy with.
TEST_F(CudaStream, HostResultsAreWaitedFor) {
  const Stream stream;
  const Shape shape{{70001}};
  Gradients gradients(lab().device, shape.sizes, 3);
  Pair pair(lab(), config_of("adamw", "scruple"), shape);
  CHECK_OK(scruple_engine_set_stream(lab().device, stream.handle));
  pair.take_gradients(1, gradients);
  stream.delay();
  double want = 0, got = -1;
  CHECK_OK(scruple_norm(lab().device, pair.twin->rows.data(), 1, &got, nullptr));
  CHECK_OK(scruple_norm(lab().host, pair.rows.data(), 1, &want, nullptr));
  EXPECT_EQ(got, want);
  stream.delay();
  pair.step();
  std::vector<float> values(70001);
  CHECK_OK(scruple_decode(lab().device, pair.twin->rows.data(), SCRUPLE_WEIGHT, values.data()));
  EXPECT_TRUE(same_bytes(values, pair.tensors[0].decode(lab().host, SCRUPLE_WEIGHT)));
  stream.delay();
  pair.step();
  CHECK_OK(scruple_engine_synchronize(lab().device));
  EXPECT_EQ(cudaStreamQuery(stream), cudaSuccess) << "the step was still running";
  EXPECT_EQ(pair.difference(), "");
  CHECK_OK(scruple_engine_set_stream(lab().device, nullptr));
}

// ---- Graphs ----

// What `queue` puts on the stream, to be replayed.
struct Graph {
  Graph(const Stream& on, const std::function<void()>& queue) : stream(on) {
    CUDA_OK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
    queue();
    cudaGraph_t graph = nullptr;
    CUDA_OK(cudaStreamEndCapture(stream, &graph));
    CUDA_OK(cudaGraphInstantiateWithFlags(&handle, graph, 0));
    CUDA_OK(cudaGraphDestroy(graph));
  }
  ~Graph() { cudaGraphExecDestroy(handle); }
  Graph(const Graph&) = delete;
  Graph& operator=(const Graph&) = delete;
  void replay() const { CUDA_OK(cudaGraphLaunch(handle, stream)); }

  const Stream& stream;
  cudaGraphExec_t handle = nullptr;
};

// One call of the same size that writes nothing, so that the engine has its memory.
void warm(Lab& lab, Pair& pair) {
  const DeviceCell<float> skip(lab.device, 1.0f);
  scruple_step_options options = SCRUPLE_STEP_OPTIONS_INIT;
  options.found_inf = skip.at();
  CHECK_OK(scruple_step(lab.device, pair.twin->rows.data(), length(pair.rows), &options));
  CHECK_OK(scruple_engine_synchronize(lab.device));
}

double lr_of(int t) { return 0.01 / (1 + 0.3 * t); }

Shape graph_shape() {
  Shape shape{{3, 128, 4000, 0, 70001}, {0, 1}};
  for (int i = 0; i < 200; ++i) shape.sizes.push_back(i * 37 % 301);
  return shape;
}

// Captured once, replayed ten times with learning rate and step changing in device memory; in between the
// same engine takes plain steps of other tensors, larger and smaller tables, norms and copies.
TEST_F(CudaGraph, AReplayedStepFollowsLearningRateAndStep) {
  const Stream stream;
  const Shape shape = graph_shape();
  const Shape plain_shape{many_sizes(), {0}};
  const int steps = steps_of(10);
  Gradients gradients(lab().device, shape.sizes, steps + 1);
  Gradients plain_gradients(lab().device, plain_shape.sizes, steps + 1);
  DeviceMemory other(lab().device);
  struct Cells {
    double lr;
    std::int64_t steps;
  };
  const DeviceCell<Cells> cells(lab().device);
  const Pinned schedule(sizeof(Cells) * static_cast<std::size_t>(steps + 1));
  for (int t = 1; t <= steps; ++t) schedule.as<Cells>()[t] = {lr_of(t), t - 1};
  for (const Config& recipe : recipe_configs())
    for (const bool busy_engine : {false, true}) {
      if (quick() && busy_engine) continue;
      Config config = recipe;
      set_rounding(config, SCRUPLE_STOCHASTIC);
      Pair pair(lab(), config, shape), plain(lab(), other, {config_of("lion", "lpmm")}, plain_shape);
      CHECK_OK(scruple_engine_set_stream(lab().device, stream.handle));
      CHECK_OK(scruple_optimizer_read_lr(*pair.device_optimizers[0], &cells.at()->lr));
      pair.take_gradients(1, gradients, On::kDevice);  // step 1, and the device adds
      warm(lab(), pair);
      scruple_step_options options = SCRUPLE_STEP_OPTIONS_INIT;
      options.steps = &cells.at()->steps;
      const std::vector<scruple_tensor> captured = pair.twin->rows;
      {
        const Graph graph(stream, [&] {
          std::vector<scruple_tensor> table = captured;  // the table need not outlive the call
          CHECK_OK(scruple_step(lab().device, table.data(), length(table), &options));
        });
        for (int t = 1; t <= steps; ++t) {
          pair.take_gradients(t, gradients, On::kDevice);
          if (busy_engine) plain.walk(t, t, plain_gradients, On::kDevice);
          stream.copy(cells.at(), &schedule.as<Cells>()[t], sizeof(Cells));
          graph.replay();
          if (busy_engine && t % 3 == 0) {
            double norm = 0;
            CHECK_OK(scruple_norm(lab().device, plain.twin->rows.data(), length(plain.rows), &norm, nullptr));
          }
        }
        CHECK_OK(scruple_engine_synchronize(lab().device));
        stream.wait();
      }
      for (int t = 1; t <= steps; ++t) {
        pair.optimizers[0]->set("lr", lr_of(t));
        pair.walk(t, t, gradients, On::kHost);
      }
      ASSERT_EQ(pair.difference(), "") << config.name << (busy_engine ? ", with other calls in between" : "");
      if (busy_engine) {
        plain.walk(1, steps, plain_gradients, On::kHost);
        ASSERT_EQ(plain.difference(), "") << config.name << ": the plain steps in between";
      }
      CHECK_OK(scruple_engine_set_stream(lab().device, nullptr));
      expect_works(lab());
      if (HasFatalFailure()) return;
    }
}

// Fold, measure, step and advance in one graph: nothing but the incoming gradient comes from outside.
TEST_F(CudaGraph, AWholeLoopInAGraph) {
  const Stream stream;
  const Shape shape = graph_shape();
  const int steps = quick() ? 6 : 20;
  Gradients gradients(lab().device, shape.sizes, steps + 2), incoming(lab().device, shape.sizes, 2);
  spoil(gradients, steps);
  for (const Config& config : loop_configs()) {
    Pair pair(lab(), config, shape);
    State here;
    here.lr = 0.01;
    const DeviceCell<State> there(lab().device, here);
    CHECK_OK(scruple_optimizer_read_lr(*pair.optimizers[0], &here.lr));
    CHECK_OK(scruple_optimizer_read_lr(*pair.device_optimizers[0], &there.at()->lr));
    CHECK_OK(scruple_engine_set_stream(lab().device, stream.handle));
    {
      // Once outside, on what is then put back: the engine has its memory.
      pair.fold(0, incoming, On::kDevice, &there.at()->steps);
      queue_step(lab().device, pair.twin->rows, there.at());
      pair.twin->upload(pair.tensors);
      CHECK_OK(scruple_copy(lab().device, there.at(), &here, sizeof here));
      CHECK_OK(scruple_engine_synchronize(lab().device));
    }
    {
      const Graph graph(stream, [&] {
        pair.fold(0, incoming, On::kDevice, &there.at()->steps);
        queue_step(lab().device, pair.twin->rows, there.at());
      });
      for (int t = 1; t <= steps; ++t) {
        stream.copy(incoming.on_device(0)[0].codes, gradients.on_device(t)[0].codes,
                    2 * gradients.bytes_per_set());
        graph.replay();
      }
      stream.wait();
    }
    CHECK_OK(scruple_engine_synchronize(lab().device));
    reference_loop(pair, gradients, steps, here);
    if (HasFatalFailure()) return;
    ASSERT_EQ(pair.difference(), "") << config.name;
    const State back = there.get();
    ASSERT_TRUE(same_state(here, back))
        << config.name << ": scale " << back.scaler.scale << " (want " << here.scaler.scale << "), steps "
        << back.steps << " (" << here.steps << "), norm " << back.norm << " (" << here.norm << ")";
    CHECK_OK(scruple_engine_set_stream(lab().device, nullptr));
  }
}

// Two graphs of one engine, and one of another, replayed in turn.
TEST_F(CudaGraph, SeveralGraphsLiveSideBySide) {
  const Stream stream;
  const Shape shape = graph_shape();
  Gradients gradients(lab().device, shape.sizes, 3);
  Lab rival(engine_under_test());
  DeviceMemory memory_b(lab().device), memory_c(lab().device);
  Pair a(lab(), config_of("adamw", "scruple"), shape), b(lab(), memory_b, {config_of("sgd", "lpmm")}, shape),
      c(rival, memory_c, {config_of("adam", "flash")}, shape);
  Pair* const pairs[] = {&a, &b, &c};
  std::vector<std::unique_ptr<Graph>> graphs;
  for (Pair* pair : pairs) {
    CHECK_OK(scruple_engine_set_stream(pair->device, stream.handle));
    pair->take_gradients(1, gradients);
    const DeviceCell<float> skip(pair->device, 1.0f);
    scruple_step_options options = SCRUPLE_STEP_OPTIONS_INIT;
    options.found_inf = skip.at();
    CHECK_OK(scruple_step(pair->device, pair->twin->rows.data(), length(pair->rows), &options));
    CHECK_OK(scruple_engine_synchronize(pair->device));
  }
  for (Pair* pair : pairs)
    graphs.push_back(std::make_unique<Graph>(stream, [&] { pair->step(On::kDevice); }));
  for (const std::size_t which : {0u, 1u, 2u, 0u, 2u, 1u, 1u, 0u}) {
    graphs[which]->replay();
    pairs[which]->step(On::kHost);
  }
  stream.wait();
  for (Pair* pair : pairs) EXPECT_EQ(pair->difference(), "");
  graphs.clear();
  for (Pair* pair : pairs) CHECK_OK(scruple_engine_set_stream(pair->device, nullptr));
}

// A table larger than the engine has memory for cannot be captured: it says so, and everything goes on.
TEST_F(CudaGraph, ATableTooLargeToCaptureIsAClearError) {
  constexpr std::size_t kTensors = 20000, kBytes = 16;
  const Stream stream;
  Lab fresh(engine_under_test());
  const Optimizer sgd("sgd");
  DeviceMemory planes(fresh.device, kTensors * kBytes * 2);
  std::vector<float> ones(kTensors * kBytes * 2 / sizeof(float), 1.0f);
  planes.write(ones.data(), ones.size() * sizeof(float));
  std::vector<scruple_tensor> rows(kTensors);
  for (std::size_t i = 0; i < kTensors; ++i) {
    rows[i].optimizer = sgd;
    rows[i].size = kBytes / sizeof(float);
    rows[i].step = 1;
    for (const int a : {SCRUPLE_WEIGHT, SCRUPLE_GRADIENT}) {
      rows[i].arrays[a].format = scruple_format_find("fp32");
      rows[i].arrays[a].codes = planes.data() + (2 * i + (a == SCRUPLE_GRADIENT ? 1 : 0)) * kBytes;
    }
  }
  CHECK_OK(scruple_engine_set_stream(fresh.device, stream.handle));
  CUDA_OK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
  const scruple_status status = scruple_step(fresh.device, rows.data(), length(rows), nullptr);
  EXPECT_NE(status, SCRUPLE_OK);
  expect_message({"captur"});
  cudaGraph_t graph = nullptr;
  EXPECT_EQ(cudaStreamEndCapture(stream, &graph), cudaSuccess) << "the refusal broke the capture";
  if (graph != nullptr) cudaGraphDestroy(graph);
  cudaGetLastError();
  CHECK_OK(scruple_step(fresh.device, rows.data(), length(rows), nullptr));
  std::vector<float> back(ones.size());
  planes.read(back.data(), back.size() * sizeof(float));
  EXPECT_EQ(back[0], std::fma(-1e-3f, 1.0f, 1.0f));
  EXPECT_EQ(back[8 * (kTensors - 1) + 3], back[0]);
  EXPECT_EQ(back[8 * (kTensors - 1) + 4], 1.0f);
  {  // and now that it has its memory, it can be captured
    const Graph later(stream,
                      [&] { CHECK_OK(scruple_step(fresh.device, rows.data(), length(rows), nullptr)); });
    later.replay();
    stream.wait();
    planes.read(back.data(), back.size() * sizeof(float));
    EXPECT_EQ(back[0], std::fma(-1e-3f, 1.0f, std::fma(-1e-3f, 1.0f, 1.0f)));
  }
  CHECK_OK(scruple_engine_set_stream(fresh.device, nullptr));
  expect_works(fresh);
}

// Calls that must wait for the device cannot be captured; they say so instead of breaking the engine.
TEST_F(CudaGraph, HandingValuesToTheHostCannotBeCaptured) {
  const Stream stream;
  Gradients gradients(lab().device, {100}, 2);
  Pair pair(lab(), config_of("adamw", "scruple"), {{100}});
  pair.take_gradients(1, gradients);
  CHECK_OK(scruple_engine_synchronize(lab().device));
  CHECK_OK(scruple_engine_set_stream(lab().device, stream.handle));
  CUDA_OK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
  double norm = 0;
  EXPECT_NE(scruple_norm(lab().device, pair.twin->rows.data(), 1, &norm, nullptr), SCRUPLE_OK);
  expect_message({});
  cudaGraph_t graph = nullptr;
  cudaStreamEndCapture(stream, &graph);
  if (graph != nullptr) cudaGraphDestroy(graph);
  cudaGetLastError();
  CHECK_OK(scruple_engine_set_stream(lab().device, nullptr));
  expect_works(lab());
}

#endif

}  // namespace
}  // namespace scruple_tests
