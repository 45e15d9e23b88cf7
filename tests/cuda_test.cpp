// The CUDA engine gives the bits of the CPU engines, in memory and on streams of its own. SCRUPLE_TEST_ENGINE
// puts another engine in its place (all but the tests about streams, graphs and host pointers run on any),
// and SCRUPLE_TEST_QUICK=1 takes about a fiftieth of the launches.
// The step is here; formats, norms, memory, streams and graphs are in tests/cuda/.
#include "tests/cuda/pair.h"

namespace scruple_tests {
namespace {

void every_length_of(Lab& lab, bool busy, const std::vector<std::size_t>& shifts) {
  Course course(lab, {every_length(), shifts}, 10, Data::kNormal, shifts[0] % 4);
  const std::vector<int> roundings =
      quick() ? std::vector<int>{SCRUPLE_STOCHASTIC}
              : std::vector<int>{SCRUPLE_NEAREST, SCRUPLE_STOCHASTIC, SCRUPLE_TRUNCATE};
  for (const Config& recipe : recipe_configs(busy))
    for (const int rounding : roundings) {
      Config rounded = recipe;
      if (!set_rounding(rounded, rounding) && !quick()) continue;
      for (const GradientKind& kind : gradient_kinds()) course.expect_same(with_gradient(rounded, kind));
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
  DeviceGradients gradients(lab().device, sizes, steps + 1);
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
      }
}

TEST_F(CudaParity, OneTensorAlone) {
  for (const std::int64_t size : {1, 64, 257, 5000, 70001}) {
    if (quick() && size != 257) continue;
    Course course(lab(), {{size}, {0}, {5}}, 10);
    for (const Config& recipe : recipe_configs()) course.expect_same(recipe);
  }
}

TEST_F(CudaParity, AThousandTensors) {
  Course course(lab(), {many_sizes(), {0, 1, 4}}, 10);
  std::size_t turn = 0;
  for (const Config& recipe : recipe_configs()) {
    const GradientKind& kind = kGradientKinds[turn++ % std::size(kGradientKinds)];
    course.expect_same(with_gradient(recipe, kind));
  }
}

std::vector<Config> every_rule_and_recipe() {
  std::vector<Config> configs;
  std::size_t turn = 0;
  for (const bool busy : {true, false})
    for (const Config& recipe : recipe_configs(busy)) {
      const GradientKind& kind = kGradientKinds[turn++ % std::size(kGradientKinds)];
      configs.push_back(accumulates(kind) ? with_gradient(recipe, kind) : recipe);
    }
  return configs;
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
  DeviceGradients gradients(lab().device, shape.sizes, steps + 1);
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
  for (const Data data : {Data::kNonFinite, Data::kSubnormal}) {
    Course course(lab(), {{1, 5, 63, 64, 65, 200, 1025, 3000, 4099}, {0, 1}}, 4, data);
    for (const Config& recipe : recipe_configs())
      for (const int rounding : {SCRUPLE_NEAREST, SCRUPLE_STOCHASTIC})
        for (const GradientKind& kind : gradient_kinds()) {
          Config config = recipe;
          if (!set_rounding(config, rounding) || (quick() && rounding != SCRUPLE_NEAREST)) continue;
          course.expect_same(with_gradient(config, kind));
        }
  }
}

// Moments so small that the GPU's own root and division are not enough; without eps every bit of them shows. Sixteen
// neighbours share a scale, so that a thread has only such.
TEST_F(CudaParity, SmallMomentsWithoutEps) {
  Course course(lab(), {{4096, 4099}, {0}}, 4, Data::kManyScales);
  for (const Config& recipe : recipe_configs(false)) {
    Config config = recipe;
    const Optimizer optimizer(config.rule.c_str());
    double eps = 0;
    if (scruple_optimizer_get(optimizer, "eps", &eps) != SCRUPLE_OK) continue;
    config.hypers.emplace_back("eps", 0.0);
    course.expect_same(with_gradient(config, kGradientKinds[0]));
  }
}

TEST_F(CudaParity, OffsetsOfShards) {
  const std::int64_t far = std::int64_t{1} << 40;  // 2^35: where the count of a random block passes 2^32
  const Shape shape{{1, 9, 200, 1025, 3000, 2049},
                    {0},
                    {5, 13, far, far + 3, (std::int64_t{1} << 35) - 1000, (std::int64_t{1} << 32) - 77}};
  const int steps = steps_of(4);
  DeviceGradients gradients(lab().device, shape.sizes, steps + 1);
  for (const Config& recipe : recipe_configs())
    for (const GradientKind& kind : {kGradientKinds[2], kGradientKinds[5], kGradientKinds[6]}) {
      Config config = recipe;
      set_rounding(config, SCRUPLE_STOCHASTIC);
      if (quick() && kind.rounding != SCRUPLE_DITHER) continue;
      for (std::size_t first = 0; first < shape.offsets.size(); ++first) {
        Shape roped = shape;
        std::rotate(roped.offsets.begin(), roped.offsets.begin() + static_cast<std::ptrdiff_t>(first),
                    roped.offsets.end());
        if (first > 0 && (quick() || recipe.rule != "sgd")) break;
        expect_same(lab(), with_gradient(config, kind), roped, gradients, steps);
      }
    }
}

TEST_F(CudaParity, ViewsStepLikeTheWhole) {
  const Shape shape{{1, 128, 129, 5000, quick() ? 1000 : 70001}, {0, 3, 0}};
  const int steps = steps_of(3);
  DeviceGradients gradients(lab().device, shape.sizes, steps + 1);
  for (const Config& recipe : recipe_configs())
    for (const int rounding : {SCRUPLE_NEAREST, SCRUPLE_STOCHASTIC}) {
      Config config = recipe;
      if (!set_rounding(config, rounding) || (quick() && rounding != SCRUPLE_NEAREST)) continue;
      Pair pair(lab(), config, shape);
      for (int t = 1; t <= steps; ++t) {
        pair.take_gradients(t, gradients);
        pair.step(On::kHost);
        std::vector<scruple_tensor> views;
        for (const scruple_tensor& row : pair.twin->rows)
          for_views(row, [&](const scruple_tensor& view) { views.push_back(view); });
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
  DeviceGradients gradients(lab().device, many.sizes, 5, Data::kNormal);
  Pair a(lab(), lab().memory, {config}, few), b(lab(), other, std::vector<Config>(600, config), many);
  DeviceGradients few_gradients(lab().device, few.sizes, 5, Data::kNormal);
  for (int t = 1; t <= 4; ++t) {
    a.walk(t, t, few_gradients);
    b.walk(t, t, gradients);
  }
  EXPECT_EQ(a.difference(), "");
  EXPECT_EQ(b.difference(), "");
}

// The engine keeps the last table; what changes between steps with the same planes must reach the device.
TEST_F(CudaParity, WhatChangesInATableIsSeen) {
  Config config = busy_config("adamw", "scruple");
  set_rounding(config, SCRUPLE_STOCHASTIC);
  const Shape shape{{70, 1000, 9000}};
  DeviceGradients gradients(lab().device, shape.sizes, 7, Data::kNormal);
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
  DeviceGradients gradients(lab().device, {1, 100, 70000}, 2);
  for (const Config& recipe : recipe_configs()) {
    Pair pair(lab(), recipe, {{1, 100, 70000}});
    pair.take_gradients(1, gradients);
    for (const float flag : {1.0f, kNaN, -1.0f, 0x1p-149f, 0.0f, -0.0f}) {
      const DeviceCell<float> there(lab().device, flag);
      CHECK_OK(try_step(lab().device, pair.twin->rows, {.found_inf = there.at()}));
      if (flag == 0) pair.step(On::kHost);
      ASSERT_EQ(pair.difference(), "") << recipe.name << ", flag " << flag;
    }
  }
}

TEST_F(CudaParity, MultiplierClipLossScaleStepsAndLearningRateFromMemory) {
  DeviceGradients gradients(lab().device, {1, 100, 3000}, 4);
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
        const float multiplier = t == 2 ? -0.7f : 1.1f, host_clip = 0.3f, host_scale = 1000.0f;
        const auto options = [&](const float* c, const float* scale, const std::int64_t* taken) {
          return StepOptions{.multiplier = multiplier,
                             .clip = t == 1 ? nullptr : c,
                             .loss_scale = t == 2 ? nullptr : scale,
                             .steps = t == 3 ? nullptr : taken};
        };
        pair.Table::step(options(&host_clip, &host_scale, &host_steps));
        CHECK_OK(try_step(lab().device, pair.twin->rows, options(clip.at(), loss_scale.at(), steps.at())));
      }
      ASSERT_EQ(pair.difference(), "") << config.name << ", gradient " << kind.format << " " << kind.rounding;
    }
}

TEST_F(CudaParity, StepsFarIntoATraining) {
  DeviceGradients gradients(lab().device, {100, 3000}, 2);
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
  float found = -1;
  EXPECT_EQ(norm_of(lab().device, {}, &found), 0.0);
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
  DeviceGradients gradients(lab().device, {0, 0, 0}, 3);
  for (const Config& recipe : recipe_configs()) expect_same(lab(), recipe, {{0, 0, 0}}, gradients, 2);
}

}  // namespace
}  // namespace scruple_tests
