// One table on an engine under test and on the CPU's, which must give the same bits: tables, gradients for both, and the
// fixtures of cuda_test's files.
#pragma once

#include "tests/device.h"
#include "tests/table.h"

namespace scruple_tests {

// ---- What to run ----

inline const std::vector<std::size_t> kOddShifts = {1, 3, 6, 4, 2, 8, 7};

inline int steps_of(int full) { return quick() ? 2 : full; }

// 0 to two groups of the largest kind and one.
inline std::vector<std::int64_t> every_length() {
  if (quick()) return {0, 1, 7, 64, 65, 129, 257};
  std::vector<std::int64_t> sizes;
  for (std::int64_t n = 0; n <= 257; ++n) sizes.push_back(n);
  return sizes;
}
// Whole tiles among them, of 2,048, in tensors that are aligned and in others.
inline std::vector<std::int64_t> some_lengths() {
  if (quick()) return {2100, 65, 2500, 1};
  return {1, 2, 7, 8, 31, 32, 33, 63, 64, 65, 100, 127, 128, 129, 1023, 1024, 1025, 2500, 4097, 2049};
}

// With every slot in use.
inline Config busy_config(const std::string& rule, const std::string& recipe) {
  for (const Config& config : recipe_configs())
    if (config.rule == rule && config.name.ends_with(" " + recipe)) return config;
  ADD_FAILURE() << "no recipe " << recipe << " for " << rule;
  return {};
}

inline std::vector<GradientKind> gradient_kinds() {
  if (quick()) return {kGradientKinds[1], kGradientKinds[6]};
  return {std::begin(kGradientKinds), std::end(kGradientKinds)};
}

inline std::vector<std::int64_t> many_sizes() {
  std::vector<std::int64_t> sizes;
  for (int i = 0; i < (quick() ? 40 : 1000); ++i) sizes.push_back(i * 37 % 301);
  return sizes;
}

// ---- The same work on both engines ----

// Gradients once more in the memory of the engine under test, `shift` bytes past an alignment of 256.
class DeviceGradients : public Gradients {
 public:
  DeviceGradients(scruple_engine* engine, const std::vector<std::int64_t>& sizes, int sets,
                  Data data = Data::kNormal, std::size_t shift = 0)
      : Gradients(sizes, sets, data), shift_(shift), device_(engine) {
    upload();
  }
  void upload() {
    const std::size_t bytes = values.size() * sizeof(float);
    device_.reserve(bytes + shift_);
    device_.write(values.data(), bytes, shift_);
  }
  std::vector<scruple_array> on_device(int set) const { return arrays(device_.data() + shift_, set); }

 private:
  std::size_t shift_;
  DeviceMemory device_;
};

enum class On { kBoth, kDevice, kHost };

// Where the engine under test and the reference live; `memory` is reused by one Pair after the other.
struct Lab {
  explicit Lab(const std::string& name) : device(0, name.c_str()), memory(device) {}
  Engine device, host{0, "cpu"};
  DeviceMemory memory;
};

// A table on the host for the reference engine, and its twin for the engine under test.
struct Pair : Table {
  Pair(const Lab& lab, DeviceMemory& memory, const std::vector<Config>& configs, const Shape& shape,
       Data kind = Data::kNormal)
      : Table(lab.host, configs, shape, kind), device(lab.device), device_optimizers(optimizers_of(configs)) {
    begin();
    twin = std::make_unique<Twin>(memory, tensors);
    for (std::size_t i = 0; i < tensors.size(); ++i)
      twin->rows[i].optimizer = *device_optimizers[i % configs.size()];
  }
  Pair(Lab& lab, const Config& config, const Shape& shape, Data kind = Data::kNormal)
      : Pair(lab, lab.memory, {config}, shape, kind) {}

  void each_row(const auto& change) {
    for (auto* list : {&rows, &twin->rows})
      for (scruple_tensor& row : *list) change(row);
  }
  void take_gradients(int t, DeviceGradients& gradients, On on = On::kBoth) {
    each_row([&](scruple_tensor& row) { row.step = t; });
    fold(t - 1, gradients, on);
  }
  // As Table::take: what the reference has to encode is copied. `steps` lies in the memory of the one engine that folds.
  void fold(int set, DeviceGradients& gradients, On on = On::kBoth, const std::int64_t* steps = nullptr) {
    if (!accumulates || on != On::kDevice) take(set, gradients, steps);
    if (!accumulates) return twin->upload_gradients(tensors);
    if (on != On::kHost)
      fold_two(device, twin->rows, gradients.on_device(set), gradients.on_device(set + 1), steps);
  }
  void step(On on = On::kBoth) {
    if (on != On::kHost) CHECK_OK(scruple_step(device, twin->rows.data(), length(rows), nullptr));
    if (on != On::kDevice) Table::step();
  }
  void walk(int first, int last, DeviceGradients& gradients, On on = On::kBoth) {
    for (int t = first; t <= last; ++t) {
      take_gradients(t, gradients, on);
      step(on);
    }
  }
  std::string difference() { return twin->difference(tensors); }

  scruple_engine* device;
  std::vector<std::unique_ptr<Optimizer>> device_optimizers;  // one per config
  std::unique_ptr<Twin> twin;
};

inline void expect_same(Lab& lab, const Config& config, const Shape& shape, DeviceGradients& gradients,
                        int steps, Data data = Data::kNormal) {
  if (testing::Test::HasFatalFailure()) return;  // one is enough
  Pair pair(lab, config, shape, data);
  pair.walk(1, steps, gradients);
  const std::string difference = pair.difference();
  ASSERT_TRUE(difference.empty()) << config.name << ", after " << steps << " steps: " << difference;
}
// A shape, and the steps that configs take in it.
struct Course {
  Course(Lab& on, const Shape& of, int most_steps, Data kind = Data::kNormal, std::size_t shift = 0)
      : lab(on),
        shape(of),
        steps(steps_of(most_steps)),
        data(kind),
        gradients(on.device, of.sizes, steps + 1, kind, shift) {}
  void expect_same(const Config& config) {
    scruple_tests::expect_same(lab, config, shape, gradients, steps, data);
  }

  Lab& lab;
  Shape shape;
  int steps;
  Data data;
  DeviceGradients gradients;
};
// Side by side in one table, each with steps of its own.
inline void expect_same_in_one_table(Lab& lab, const std::vector<Config>& configs, std::int64_t largest) {
  Shape shape{{}, {0, 3}};
  for (std::size_t i = 0; i < configs.size() * (quick() ? 1 : 11); ++i)
    shape.sizes.push_back(static_cast<std::int64_t>(i) * 193 % largest);
  shape.sizes[8] = 66000;  // aligned, so of whole tiles
  const int steps = steps_of(10);
  DeviceGradients gradients(lab.device, shape.sizes, steps + 1);
  Pair pair(lab, lab.memory, configs, shape);
  for (int t = 1; t <= steps; ++t) {
    pair.take_gradients(t, gradients);
    for (std::size_t i = 0; i < pair.rows.size(); ++i)
      pair.rows[i].step = pair.twin->rows[i].step = t + static_cast<std::int64_t>(i % 3) * 1000;
    pair.step();
  }
  EXPECT_EQ(pair.difference(), "");
}
// The engine still steps, and to the right bits.
inline void expect_works(Lab& lab) {
  DeviceGradients gradients(lab.device, {100, 5000}, 3);
  expect_same(lab, busy_config("adamw", "scruple"), {{100, 5000}}, gradients, 2);
}

// Tensors of a shape, whose arrays fill(tensor, i, shift) makes.
inline std::vector<Tensor> tensors_of(const Optimizer& optimizer, const Shape& shape, const auto& fill) {
  std::vector<Tensor> tensors;
  for (std::size_t i = 0; i < shape.sizes.size(); ++i) {
    Tensor& tensor = tensors.emplace_back(optimizer, shape.sizes[i]);
    tensor.row.id = static_cast<std::uint32_t>(i);
    tensor.row.offset = shape.offsets[i % shape.offsets.size()];
    fill(tensor, i, shape.shifts[i % shape.shifts.size()]);
  }
  return tensors;
}

// The planes of a tensor of the engine under test, and of the same in host memory.
inline void expect_same_planes(scruple_engine* device, const scruple_tensor& there,
                               const scruple_tensor& here, const std::string& name) {
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

}  // namespace scruple_tests
