// Every format on the engine under test: in steps, mixed, encoded, decoded, reset, folded.
#include "tests/cuda/pair.h"

namespace scruple_tests {
namespace {

// fp32, but for one array.
Config fp32_with(const Case& c) {
  Config config = config_of("adamw");
  config.name = "adamw with " + c.name();
  put(config, c.array, c.format, c.rounding);
  return config;
}

TEST_F(CudaFormats, EveryFormatInEveryRoleAndRounding) {
  Course course(lab(), {some_lengths(), {0, 1, 16}}, 4);
  const std::vector<Case> cases = all_cases();
  for (const Case& c : cases) course.expect_same(fp32_with(c));  // alone among fp32
  for (const scruple_format* format : formats())                 // wherever it can stand
    for (int rounding = SCRUPLE_NEAREST; rounding <= SCRUPLE_WIDE; ++rounding) {
      Config config = config_of("adamw");
      config.name = "";
      for (const Case& c : cases)
        if (c.format == format && c.rounding == rounding) {
          put(config, c.array, c.format, c.rounding);
          config.name += c.name() + "; ";
        }
      if (!config.name.empty()) course.expect_same(config);
    }
}

TEST_F(CudaFormats, MixturesThatNoRecipeNames) {
  Course course(lab(), {some_lengths(), {0, 3, 0}}, 4);
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
      Config config = config_of("adamw");
      config.name = std::string(m.weight) + " " + m.moment + " " + m.nonneg;
      put(config, SCRUPLE_WEIGHT, scruple_format_find(m.weight), SCRUPLE_NEAREST);
      put(config, SCRUPLE_SLOT, scruple_format_find(m.moment), SCRUPLE_NEAREST);
      put(config, SCRUPLE_SLOT + 1, scruple_format_find(m.nonneg), SCRUPLE_NEAREST);
      set_rounding(config, rounding);
      config = with_gradient(config, kGradientKinds[turn++ % std::size(kGradientKinds)]);
      course.expect_same(config);
    }
}

// Extra bits that point below a zero are of the weight that stood there before.
TEST_F(CudaFormats, WeightsThatOthersMadeZero) {
  const Shape shape{{4099, 300}, {0}};
  const int steps = steps_of(4);
  DeviceGradients gradients(lab().device, shape.sizes, steps + 1);
  for (const Case& c : all_cases()) {
    if (c.array != SCRUPLE_WEIGHT || c.info.code_bits != 16) continue;
    const Config config = fp32_with(c);
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
  const std::vector<Rule> all = rules();
  for (std::size_t n = 0; n < (quick() ? 14 : 200); ++n) {
    const Rule& rule = all[n % all.size()];
    Config config{rule.name, {}, {}, rule.name};
    if (n / all.size() % 2 == 0) config.hypers = busy_hypers(rule);
    const Optimizer optimizer(config.rule, config.hypers);
    const scruple_tensor probe = row_of(optimizer, 0);
    const auto choose = [&](int array, int role) {
      const Case c = draw(role);
      put(config, array, c.format, c.rounding);
      config.name += ", " + std::string(c.info.name) + " " + std::to_string(c.rounding);
    };
    choose(SCRUPLE_WEIGHT, SCRUPLE_ROLE_WEIGHT);
    for (std::size_t slot = 0; slot < rule.slots.size(); ++slot) {
      const int array = SCRUPLE_SLOT + static_cast<int>(slot);
      int role = 0;
      CHECK_OK(scruple_tensor_array(&probe, array, nullptr, &role, nullptr));
      if (role == SCRUPLE_ROLE_EXACT)
        put(config, array, scruple_format_find("fp32"), SCRUPLE_NEAREST);
      else
        choose(array, rule.slots[slot].role);
    }
    choose(SCRUPLE_GRADIENT, SCRUPLE_ROLE_GRADIENT);
    mixtures.push_back(config);
  }
  return mixtures;
}
TEST_F(CudaFormats, MixturesByLot) {
  for (const Data data : {Data::kNormal, Data::kNonFinite}) {
    Course course(lab(), {some_lengths(), {0, 1, 6}}, 4, data);
    for (const Config& config : mixtures_by_lot()) course.expect_same(config);
  }
}
TEST_F(CudaFormats, MomentsOfNonFiniteGradients) {
  const Shape shape{{65, 4099, 200}, {0, 0, 3}};  // whole tiles among them
  const int steps = steps_of(4);
  DeviceGradients gradients(lab().device, shape.sizes, steps + 1, Data::kNonFinite);
  for (const Config& config : moment_configs())
    expect_same(lab(), config, shape, gradients, steps, Data::kNonFinite);
}
TEST_F(CudaFewBlocks, MixturesInOneTable) { expect_same_in_one_table(lab(), mixtures_by_lot(), 9000); }

// Encoding from host and device memory, decoding to both.
TEST_F(CudaFormats, EncodeAndDecode) {
  const Optimizer adamw;
  Shape shape{some_lengths(), {0, 1, 6, 3}, {0, 5, 13, std::int64_t{1} << 40}};
  shape.sizes.push_back(0);
  shape.sizes.push_back(70001);
  std::size_t largest = 70001;
  DeviceMemory scratch(lab().device, largest * sizeof(float) + 64), other(lab().device);
  std::vector<float> values(largest), want(largest), got(largest);
  std::vector<unsigned char> want_bytes(largest * sizeof(float));
  for (const Case& c : all_cases())
    for (const Data data : {Data::kNormal, Data::kSubnormal, Data::kNonFinite}) {
      std::vector<Tensor> tensors =
          tensors_of(adamw, shape, [&](Tensor& tensor, std::size_t, std::size_t shift) {
            tensor.row.step = 3;
            tensor.use(c.array, c.format, c.rounding, shift, shift);
          });
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
        // Where a tile's values go by words, and where not; beside them nothing is written.
        for (const char* to : {"fp32", "bf16", "fp16"})
          for (const std::size_t shift : {16, 20, 17}) {
            const scruple_format* const format = scruple_format_find(to);
            const std::size_t all = n * (std::string(to) == "fp32" ? 4 : 2);
            std::fill_n(got.begin(), n, 12345.0f);
            std::vector<unsigned char> before(all + 2 * shift, 0xa5), after(before.size());
            scratch.write(before.data(), before.size());
            CHECK_OK(scruple_decode_as(lab().host, &tensors[i].row, c.array, format, want_bytes.data()));
            CHECK_OK(
                scruple_decode_as(lab().device, &from_host.rows[i], c.array, format, scratch.data() + shift));
            scratch.read(after.data(), after.size());
            std::memcpy(before.data() + shift, want_bytes.data(), all);
            ASSERT_EQ(before, after) << c.name() << " as " << to << " on the device, shifted by " << shift;
            if (shift != 16) continue;
            CHECK_OK(scruple_decode_as(lab().device, &from_host.rows[i], c.array, format, got.data()));
            ASSERT_EQ(std::memcmp(want_bytes.data(), got.data(), all), 0)
                << c.name() << " as " << to << " on the host";
          }
      }
      ASSERT_EQ(from_host.difference(tensors), "") << c.name() << ", encoded from the host";
      ASSERT_EQ(from_device.difference(tensors), "") << c.name() << ", encoded from the device";
      if (quick()) break;
    }
}

TEST_F(CudaFormats, ResetWritesInitialValuesAndClearZeros) {
  const Shape shape{some_lengths(), {0, 3}, {0, 5}};
  for (const Rule& rule : rules()) {
    const Optimizer optimizer(rule.name, busy_hypers(rule));
    for (const Case& c : all_cases()) {
      std::vector<Tensor> tensors =
          tensors_of(optimizer, shape, [&](Tensor& tensor, std::size_t, std::size_t shift) {
            const auto use = [&](int array, int role) {
              if (role == c.role)
                tensor.use(array, c.format, c.rounding, shift);
              else
                tensor.use(array, "fp32");
            };
            tensor.use(SCRUPLE_WEIGHT, "fp32");
            use(SCRUPLE_GRADIENT, SCRUPLE_ROLE_GRADIENT);
            for (std::size_t slot = 0; slot < rule.slots.size(); ++slot)
              use(SCRUPLE_SLOT + static_cast<int>(slot), rule.slots[slot].role);
            for (auto& planes : tensor.planes)
              for (Plane& plane : planes)
                if (plane.size > 0) std::memset(plane.data(), 0xff, plane.size);
          });
      Twin twin(lab().memory, tensors);
      const std::vector<scruple_tensor> rows = rows_of(tensors);
      for (std::size_t i = 0; i < tensors.size(); ++i) {
        CHECK_OK(scruple_tensor_reset(lab().host, &tensors[i].row));
        CHECK_OK(scruple_tensor_reset(lab().device, &twin.rows[i]));
      }
      CHECK_OK(scruple_clear(lab().host, rows.data(), length(rows)));
      CHECK_OK(scruple_clear(lab().device, twin.rows.data(), length(twin.rows)));
      ASSERT_EQ(twin.difference(tensors), "") << rule.name << ", " << c.name();
    }
    if (quick() && rule.index == 1) break;
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
      const std::vector<Tensor> into =
          tensors_of(sgd, shape, [&](Tensor& tensor, std::size_t, std::size_t shift) {
            tensor.use(SCRUPLE_GRADIENT, to.format, to.rounding, shift);
          });
      const std::vector<Tensor> arriving =
          tensors_of(sgd, shape, [&](Tensor& tensor, std::size_t i, std::size_t) {
            tensor.row.id = 0, tensor.row.offset = 0;
            tensor.use(SCRUPLE_GRADIENT, from.format, from.rounding, shape.shifts[(i + 1) % 3]);
            tensor.encode(lab().host, SCRUPLE_GRADIENT, values_of(tensor.row.size, i));
          });
      Twin twin(lab().memory, into), twin_arriving(other, arriving);
      std::vector<scruple_tensor> rows = rows_of(into);
      std::vector<scruple_array> host_incoming, device_incoming;
      for (std::size_t i = 0; i < into.size(); ++i) {
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

}  // namespace
}  // namespace scruple_tests
