// Norms, and loops that read them from memory, to the bit.
#include <functional>

#include "tests/cuda/loop.h"

namespace scruple_tests {
namespace {

using Edit = std::function<void(std::size_t, std::vector<float>&)>;

// Tensors with nothing but a gradient.
std::vector<Tensor> gradients_only(scruple_engine* engine, const Optimizer& optimizer, const Case& c,
                                   const std::vector<std::int64_t>& sizes, const Edit& edit = {},
                                   std::size_t codes_shift = 0) {
  return tensors_of(optimizer, {sizes, {codes_shift}, {0}},
                    [&](Tensor& tensor, std::size_t i, std::size_t shift) {
                      std::vector<float> values = values_of(tensor.row.size, i);
                      if (edit) edit(i, values);
                      tensor.row.folds = 1;
                      tensor.use(SCRUPLE_GRADIENT, c.format, c.rounding, shift, shift == 0 ? 0 : shift + 1);
                      tensor.encode(engine, SCRUPLE_GRADIENT, values);
                    });
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
  if (testing::Test::HasFatalFailure()) return;  // one is enough
  float want_found = -1, got_found = -1;
  const double want = norm_of(lab.host, host_rows, &want_found);
  const double got = norm_of(lab.device, device_rows, &got_found);
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
      const Edit scale = [](std::size_t i, std::vector<float>& x) {
        for (float& v : x) v *= static_cast<float>(1 + i % 5);
      };
      const std::vector<Tensor> tensors = gradients_only(lab().host, optimizer, c, sizes, scale, shift);
      Twin twin(lab().memory, tensors);
      const std::vector<scruple_tensor> rows = rows_of(tensors);
      const std::string what = c.name() + ", shift " + std::to_string(shift);
      expect_same_norm(lab(), rows, twin.rows, what + ", all");
      for (std::size_t i = 0; i < rows.size(); ++i) {
        if (quick() && i % 4 != 0) continue;
        expect_same_norm(lab(), {rows[i]}, {twin.rows[i]}, what + ", size " + std::to_string(rows[i].size));
      }
    }
}

TEST_F(CudaNorm, OfAMillionAndOfManyTensors) {
  const Optimizer optimizer("sgd");
  const std::vector<std::int64_t> one = {1 << 20}, two = {(1 << 20) + 4321, 999999}, many = many_sizes();
  for (const auto& sizes : {one, two, many})
    for (const Case& c : gradient_cases()) {
      const std::vector<Tensor> tensors = gradients_only(lab().host, optimizer, c, sizes);
      Twin twin(lab().memory, tensors);
      expect_same_norm(lab(), rows_of(tensors), twin.rows,
                       c.name() + ", " + std::to_string(sizes.size()) + " tensors");
      if (HasFatalFailure() || quick()) return;
    }
}

// An engine keeps the last tables on the device; none may be overwritten by what another call puts there.
TEST_F(CudaNorm, TablesThatTakeTurns) {
  const Optimizer optimizer("sgd");
  const Case c = gradient_cases().front();
  DeviceMemory other(lab().device);
  const std::vector<Tensor> many =
      gradients_only(lab().host, optimizer, c, std::vector<std::int64_t>(300, 100));
  const std::vector<Tensor> one = gradients_only(lab().host, optimizer, c, {std::int64_t{8} << 20});
  Twin many_twin(lab().memory, many), one_twin(other, one);
  for (int turn = 0; turn < 3; ++turn) {
    expect_same_norm(lab(), rows_of(many), many_twin.rows, "300 tensors");
    expect_same_norm(lab(), rows_of(one), one_twin.rows, "one tensor");
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
          gradients_only(lab().host, optimizer, c, sizes, [&](std::size_t i, std::vector<float>& x) {
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
          gradients_only(lab().host, optimizer, c, {5000},
                         [&](std::size_t, std::vector<float>& x) { std::fill(x.begin(), x.end(), value); });
      Twin twin(lab().memory, tensors);
      expect_same_norm(lab(), {tensors[0].row}, twin.rows, c.name() + ", " + std::to_string(value));
    }
}

// ---- The whole loop without the host ----

TEST_F(CudaLoop, MeasureStepAdvanceWithoutTheHost) {
  const Shape shape{{3, 128, 4000, 0, 70001}, {0, 1}};
  const int steps = quick() ? 6 : 20;
  DeviceGradients gradients(lab().device, shape.sizes, steps + 2);
  spoil(gradients, steps);
  for (const Config& config : loop_configs()) {
    Loop loop(lab(), config, shape);
    for (int t = 1; t <= steps; ++t) loop.queue(t, gradients);
    loop.expect_same(gradients, steps);
    if (HasFatalFailure()) return;
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

}  // namespace
}  // namespace scruple_tests
