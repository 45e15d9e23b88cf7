// Norm, clipping, loss scale, step count and learning rate that stay in the engine's memory: measure, a step
// that reads them, advance. Each equals what the host would have computed and passed by value.
#include "tests/table.h"

namespace scruple_tests {
namespace {

Config measured(const std::string& rule, const char* recipe, const GradientKind& kind, int rounding) {
  Hypers hypers;  // a momentum and a decay, where the rule has them
  for (const char* name : {"momentum", "weight_decay", "lr_decay"})
    if (has_hyper(Optimizer(rule), name)) hypers.emplace_back(name, 0.1);
  Config config = config_of(rule, recipe, hypers);
  set_rounding(config, rounding);
  return with_gradient(config, kind);
}

// A few tensors of one optimizer, with gradients to measure.
struct Measured : Table {
  Measured(scruple_engine* on, const std::string& rule, const char* recipe, const GradientKind& kind,
           int rounding = SCRUPLE_NEAREST)
      : Table(on, {measured(rule, recipe, kind, rounding)}, {{5, 0, 128, 3001, 70000}}) {
    begin();
  }

  // Gradient number n; `bad` puts a value into the last tensor.
  void fill(int n, float bad = 0, const std::int64_t* steps = nullptr) {
    for (scruple_tensor& row : rows) {
      std::vector<float> values = values_of(row.size, static_cast<std::uint64_t>(n));
      if (bad != 0 && row.size == 70000) values[66666] = bad;
      const scruple_array incoming = fp32_array(values.data());
      row.folds = 0;
      if (accumulates)
        CHECK_OK(scruple_fold(engine, &row, &incoming, 1, 1.0f, steps));
      else
        CHECK_OK(scruple_encode(engine, &row, SCRUPLE_GRADIENT, values.data()));
      row.folds = accumulates ? 1 : 0;
    }
  }
  scruple_status measure(const scruple_measure_options& options) const {
    return scruple_measure(engine, rows.data(), length(rows), &options);
  }
};

// Every rule, in a recipe that serves it.
std::vector<std::pair<std::string, const char*>> walks() {
  std::vector<std::pair<std::string, const char*>> list;
  for (const Rule& rule : rules()) {
    if (kThreadSanitizer && rule.name != "adamw") continue;
    list.emplace_back(rule.name, "scruple");
    list.emplace_back(rule.name, "scant");
  }
  list.emplace_back("sgd", "lpmm");
  list.emplace_back("adamw", "fp32");
  return list;
}

struct Outputs {
  double norm = -7;
  float found_inf = -7, clip = -7;
};

scruple_measure_options measure_into(Outputs& out, double max_norm, const float* loss_scale = nullptr,
                                     const std::int64_t* steps = nullptr) {
  scruple_measure_options options = SCRUPLE_MEASURE_OPTIONS_INIT;
  options.max_norm = max_norm;
  options.loss_scale = loss_scale;
  options.steps = steps;
  options.norm = &out.norm;
  options.found_inf = &out.found_inf;
  options.clip = &out.clip;
  return options;
}

// ---- Measure ----

TEST(Measure, EqualsNormAndClipFactor) {
  for (const std::string& name : cpu_engines())
    for (const int threads : {1, 3}) {
      const Engine engine(threads, name);
      for (const GradientKind& kind : kGradientKinds) {
        Measured table(engine, "sgd", "fp32", kind);
        table.fill(1);
        const double norm = norm_of(engine, table.rows);
        EXPECT_GT(norm, 1.0);
        for (const double max_norm : {0.0, 1e-3, 1.0, 1e9}) {
          Outputs out;
          CHECK_OK(table.measure(measure_into(out, max_norm)));
          EXPECT_EQ(out.norm, norm) << kind.format;
          EXPECT_EQ(out.found_inf, 0.0f) << kind.format;
          EXPECT_EQ(out.clip, scruple_clip_factor(norm, max_norm)) << kind.format << " under " << max_norm;
          EXPECT_EQ(out.clip < 1, (max_norm > 0 && max_norm < 1e9)) << kind.format << " under " << max_norm;
        }
      }
    }
}

TEST(Measure, TheLossScaleDividesTheNorm) {
  const Engine engine;
  Measured table(engine, "sgd", "fp32", kGradientKinds[0]);
  table.fill(1);
  const double norm = norm_of(engine, table.rows);
  for (const float scale : {1.0f, 65536.0f, 3000.0f, 0x1p-20f}) {
    Outputs out;
    CHECK_OK(table.measure(measure_into(out, 0.5, &scale)));
    EXPECT_EQ(out.norm, norm / static_cast<double>(scale)) << scale;
    EXPECT_EQ(out.clip, scruple_clip_factor(norm / static_cast<double>(scale), 0.5)) << scale;
    EXPECT_EQ(out.found_inf, 0.0f);
  }
}

TEST(Measure, AnyOutputMayBeAbsent) {
  const Engine engine;
  Measured table(engine, "sgd", "fp32", kGradientKinds[1]);
  table.fill(1);
  Outputs want;
  CHECK_OK(table.measure(measure_into(want, 1.0)));
  for (int mask = 0; mask < 8; ++mask) {
    Outputs out;
    scruple_measure_options options = measure_into(out, 1.0);
    if ((mask & 1) == 0) options.norm = nullptr;
    if ((mask & 2) == 0) options.found_inf = nullptr;
    if ((mask & 4) == 0) options.clip = nullptr;
    CHECK_OK(table.measure(options));
    EXPECT_EQ(out.norm, (mask & 1) != 0 ? want.norm : -7.0) << mask;
    EXPECT_EQ(out.found_inf, (mask & 2) != 0 ? want.found_inf : -7.0f) << mask;
    EXPECT_EQ(out.clip, (mask & 4) != 0 ? want.clip : -7.0f) << mask;
  }
}

TEST(Measure, FindsWhatIsNotFiniteAndLeavesItUnclipped) {
  const Engine engine(2);
  for (const GradientKind& kind : kGradientKinds)
    for (const float bad : {kInf, -kInf, kNaN}) {
      Measured table(engine, "sgd", "fp32", kind);
      table.fill(1, bad);
      const float scale = 512.0f;
      Outputs out;
      CHECK_OK(table.measure(measure_into(out, 1.0, &scale)));
      EXPECT_EQ(out.found_inf, 1.0f) << kind.format << " " << bad;
      EXPECT_FALSE(std::isfinite(out.norm)) << kind.format << " " << bad;
      EXPECT_EQ(out.clip, 1.0f) << kind.format << " " << bad;
    }
}

// A finite sum over a tiny loss scale is a large norm, not an overflow.
TEST(Measure, TheFlagIsAboutTheGradientsNotTheQuotient) {
  const Engine engine;
  Measured table(engine, "sgd", "fp32", kGradientKinds[0]);
  for (Tensor& tensor : table.tensors)
    tensor.encode(engine, SCRUPLE_GRADIENT,
                  std::vector<float>(static_cast<std::size_t>(tensor.row.size), 3e38f));
  const float scale = 0x1p-126f;
  Outputs out;
  CHECK_OK(table.measure(measure_into(out, 1.0, &scale)));
  EXPECT_EQ(out.found_inf, 0.0f);
  EXPECT_TRUE(std::isfinite(out.norm));
}

TEST(Measure, EmptyTables) {
  const Engine engine;
  Outputs out;
  const scruple_measure_options options = measure_into(out, 1.0);
  CHECK_OK(scruple_measure(engine, nullptr, 0, &options));
  EXPECT_EQ(out.norm, 0.0);
  EXPECT_EQ(out.found_inf, 0.0f);
  EXPECT_EQ(out.clip, 1.0f);
}

TEST(Measure, RefusesWhatItMust) {
  const Engine engine;
  Measured table(engine, "sgd", "fp32", kGradientKinds[0]);
  table.fill(1);
  Outputs out;
  const scruple_measure_options good = measure_into(out, 1.0);
  std::vector<scruple_tensor> rows = table.rows;
  EXPECT_INVALID(scruple_measure(nullptr, rows.data(), 1, &good), "engine");
  EXPECT_INVALID(scruple_measure(engine, rows.data(), 1, nullptr), "options");
  EXPECT_INVALID(scruple_measure(engine, nullptr, 1, &good), "null");
  EXPECT_INVALID(scruple_measure(engine, rows.data(), -1, &good), "count");
  for (const std::size_t size :
       {std::size_t{0}, offsetof(scruple_measure_options, max_norm), sizeof good + 8}) {
    scruple_measure_options bad = good;
    bad.struct_size = size;
    EXPECT_INVALID(table.measure(bad), "SCRUPLE_MEASURE_OPTIONS_INIT");
  }
  for (const double max_norm : {-1.0, -0x1p-1074, static_cast<double>(kNaN), static_cast<double>(kInf)}) {
    scruple_measure_options bad = good;
    bad.max_norm = max_norm;
    EXPECT_INVALID(table.measure(bad), "max_norm");
  }
  rows[0].arrays[SCRUPLE_GRADIENT].codes = nullptr;
  EXPECT_INVALID(scruple_measure(engine, rows.data(), 5, &good), "gradient");
  EXPECT_EQ(out.norm, -7.0) << "a refused call wrote an output";
  EXPECT_EQ(out.found_inf, -7.0f);
  EXPECT_EQ(out.clip, -7.0f);
}

// ---- What a step reads from memory ----

TEST(StepOptions, ClipAndLossScaleAreAMultiplier) {
  const Engine engine(2);
  const float clip = 0.3f, scale = 1000.0f;
  for (const auto& [rule, recipe] : walks())
    for (const float multiplier : {1.0f, -0.7f})
      for (int mask = 0; mask < 4; ++mask) {
        const bool clips = (mask & 1) != 0, scales = (mask & 2) != 0;
        Measured by_pointer(engine, rule, recipe, kGradientKinds[0]),
            by_value(engine, rule, recipe, kGradientKinds[0]);
        for (int t = 1; t <= 2; ++t) {
          for (Measured* table : {&by_pointer, &by_value}) table->at_step(t), table->fill(t);
          by_pointer.step({.multiplier = multiplier,
                           .clip = clips ? &clip : nullptr,
                           .loss_scale = scales ? &scale : nullptr});
          by_value.step({.multiplier = multiplier * (clips ? clip : 1.0f) / (scales ? scale : 1.0f)});
        }
        ASSERT_EQ(by_pointer.bytes(), by_value.bytes()) << rule << " " << recipe << ", mask " << mask;
      }
}

// fp32, in the order multiplier * clip / loss_scale: another order gives another last bit.
TEST(StepOptions, TheOrderOfTheProductIsTheDocumentedOne) {
  const Engine engine;
  const Optimizer sgd("sgd", {{"lr", 1.0}});
  const auto stepped = [&](float multiplier, const float* clip, const float* scale) {
    Tensor tensor(sgd, 1, "fp32", engine);
    tensor.encode(engine, SCRUPLE_GRADIENT, {-1.0f});
    CHECK_OK(try_step(engine, {tensor.row}, {.multiplier = multiplier, .clip = clip, .loss_scale = scale}));
    return tensor.decode(engine, SCRUPLE_WEIGHT)[0];
  };
  Random random(3);
  int differs = 0;
  for (int i = 0; i < 300; ++i) {
    const float m = static_cast<float>(random.lognormal(1)), c = static_cast<float>(random.uniform()),
                s = static_cast<float>(random.lognormal(3));
    const volatile float product = m * c;  // rounded here
    const float want = product / s;
    EXPECT_EQ(bits(stepped(m, &c, &s)), bits(want)) << m << " " << c << " " << s;
    const volatile float quotient = c / s, inverse = 1 / s;
    differs += m * quotient != want || product * inverse != want ? 1 : 0;
  }
  EXPECT_GT(differs, 50) << "the values tell the orders apart";
}

TEST(StepOptions, StepsAreAddedToTheTensorsStep) {
  const Engine engine(2);
  for (const auto& [rule, recipe] : walks())
    for (const int rounding : {SCRUPLE_NEAREST, SCRUPLE_STOCHASTIC})
      for (const GradientKind& kind : kGradientKinds) {
        Measured counted(engine, rule, recipe, kind, rounding), plain(engine, rule, recipe, kind, rounding);
        for (const std::int64_t taken : {std::int64_t{0}, std::int64_t{1}, std::int64_t{41}}) {
          counted.at_step(3);
          plain.at_step(3 + taken);
          if (!counted.accumulates) counted.at_step(3 + taken);  // encoding has the tensor's step alone
          counted.fill(static_cast<int>(taken), 0, &taken);
          counted.at_step(3);
          plain.fill(static_cast<int>(taken));
          ASSERT_EQ(counted.bytes(), plain.bytes())
              << rule << ", fold into " << kind.format << " " << kind.rounding;
          Outputs a, b;
          CHECK_OK(counted.measure(measure_into(a, 1.0, nullptr, &taken)));
          CHECK_OK(plain.measure(measure_into(b, 1.0)));
          EXPECT_EQ(a.norm, b.norm) << rule << " " << kind.format << " " << kind.rounding;
          counted.step({.steps = &taken});
          plain.step();
          ASSERT_EQ(counted.bytes(), plain.bytes())
              << rule << " " << recipe << ", rounding " << rounding << ", gradient " << kind.format << " "
              << kind.rounding << ", " << taken << " steps";
        }
      }
}

// They reach the bias corrections and, separately, the random numbers of weight and moments.
TEST(StepOptions, StepsMatter) {
  const Engine engine;
  const auto after = [&](const char* rule, int rounding, std::int64_t steps, int array) {
    Measured table(engine, rule, "scruple", kGradientKinds[1], rounding);
    table.fill(1);
    table.step({.steps = &steps});
    return table.tensors.back().bytes(array);
  };
  EXPECT_NE(after("adamw", SCRUPLE_NEAREST, 0, SCRUPLE_WEIGHT),
            after("adamw", SCRUPLE_NEAREST, 5, SCRUPLE_WEIGHT))
      << "bias correction";
  for (const int array : {SCRUPLE_WEIGHT, SCRUPLE_SLOT}) {
    EXPECT_EQ(after("lion", SCRUPLE_NEAREST, 0, array), after("lion", SCRUPLE_NEAREST, 5, array))
        << "Lion has no bias correction";
    EXPECT_NE(after("lion", SCRUPLE_STOCHASTIC, 0, array), after("lion", SCRUPLE_STOCHASTIC, 5, array))
        << "random numbers of array " << array;
  }
}

TEST(StepOptions, AFlagSkipsWhateverElseIsGiven) {
  const Engine engine;
  Measured table(engine, "adamw", "scruple", kGradientKinds[1]);
  table.fill(1);
  const Bytes before = table.bytes();
  const float flag = 1, nan = kNaN;
  const std::int64_t steps = 3;
  table.step({.found_inf = &flag, .clip = &nan, .loss_scale = &nan, .steps = &steps});
  EXPECT_EQ(table.bytes(), before);
}

// Callers built against an older header: what lies beyond their struct_size is not read.
TEST(StepOptions, FieldsBeyondStructSizeAreNotThere) {
  const Engine engine;
  const float clip = 0.25f, scale = 8.0f;
  const std::int64_t steps = 7;
  const auto stepped = [&](std::size_t struct_size, bool with_clip, bool with_scale, bool with_steps) {
    Measured table(engine, "adamw", "scruple", kGradientKinds[0]);
    table.fill(1);
    scruple_step_options options = SCRUPLE_STEP_OPTIONS_INIT;
    options.struct_size = struct_size;
    if (with_clip) options.clip = &clip;
    if (with_scale) options.loss_scale = &scale;
    if (with_steps) options.steps = &steps;
    CHECK_OK(scruple_step(engine, table.rows.data(), length(table.rows), &options));
    return table.bytes();
  };
  const std::size_t whole = sizeof(scruple_step_options);
  EXPECT_EQ(stepped(offsetof(scruple_step_options, clip), true, true, true),
            stepped(whole, false, false, false));
  EXPECT_EQ(stepped(offsetof(scruple_step_options, loss_scale), true, true, true),
            stepped(whole, true, false, false));
  EXPECT_EQ(stepped(offsetof(scruple_step_options, steps), true, true, true),
            stepped(whole, true, true, false));
  EXPECT_NE(stepped(whole, true, true, true), stepped(whole, true, true, false));
}

TEST(ReadLr, IsTheLearningRateSet) {
  const Engine engine(2);
  for (const auto& [rule, recipe] : walks()) {
    Measured read(engine, rule, recipe, kGradientKinds[1]), set(engine, rule, recipe, kGradientKinds[1]);
    double lr = 0;
    CHECK_OK(scruple_optimizer_read_lr(*read.optimizers[0], &lr));
    double remembered = 0, initial = 0;
    CHECK_OK(scruple_optimizer_get(*set.optimizers[0], "lr", &initial));
    const auto expect_same_step = [&](int t, double set_lr) {
      set.optimizers[0]->set("lr", set_lr);
      for (Measured* table : {&read, &set}) {
        table->at_step(t);
        table->fill(t);
        table->step();
      }
      ASSERT_EQ(read.bytes(), set.bytes()) << rule << " " << recipe << ", step " << t;
    };
    for (int t = 1; t <= 3; ++t) {
      lr = 0.02 / t;
      expect_same_step(t, 0.02 / t);
    }
    CHECK_OK(scruple_optimizer_get(*read.optimizers[0], "lr", &remembered));
    EXPECT_EQ(remembered, initial) << "what was set is kept";
    CHECK_OK(scruple_optimizer_read_lr(*read.optimizers[0], nullptr));
    lr = 1e9;
    expect_same_step(4, initial);  // what is set counts again
  }
  EXPECT_INVALID(scruple_optimizer_read_lr(nullptr, nullptr), "optimizer");
}

// ---- Advance ----

bool same(const scruple_scaler& a, const scruple_scaler& b) { return std::memcmp(&a, &b, sizeof a) == 0; }

TEST(Advance, UpdatesTheScalerAndCountsTheStepsTaken) {
  const Engine engine;
  scruple_scaler scaler = {16.0f, 2.0f, 0.5f, 2, 0}, want = scaler;
  std::int64_t steps = 100, taken = 100;
  for (const float flag : {0.0f, 0.0f, 1.0f, 0.0f, kNaN, 0.0f, 0.0f, 0.0f, -0.0f, -1.0f}) {
    CHECK_OK(scruple_advance(engine, &flag, &scaler, &steps));
    CHECK_OK(scruple_scaler_update(&want, flag));
    if (flag == 0) ++taken;
    EXPECT_TRUE(same(scaler, want)) << "flag " << flag << ": " << scaler.scale << ", want " << want.scale;
    EXPECT_EQ(steps, taken) << "flag " << flag;
  }
  EXPECT_EQ(taken, 107);
}

TEST(Advance, AnyPartMayBeAbsent) {
  const Engine engine;
  for (const float flag : {0.0f, 1.0f})
    for (int mask = 0; mask < 8; ++mask) {
      scruple_scaler scaler = {16.0f, 2.0f, 0.5f, 2, 1}, want = scaler;
      const scruple_scaler untouched = scaler;
      std::int64_t steps = 5;
      const bool has_flag = (mask & 1) != 0, has_scaler = (mask & 2) != 0, has_steps = (mask & 4) != 0;
      CHECK_OK(scruple_advance(engine, has_flag ? &flag : nullptr, has_scaler ? &scaler : nullptr,
                               has_steps ? &steps : nullptr));
      const bool skipped = has_flag && flag != 0;
      CHECK_OK(scruple_scaler_update(&want, skipped ? 1.0f : 0.0f));
      EXPECT_TRUE(same(scaler, has_scaler ? want : untouched)) << mask;
      EXPECT_EQ(steps, has_steps && !skipped ? 6 : 5) << mask;
    }
  EXPECT_INVALID(scruple_advance(nullptr, nullptr, nullptr, nullptr), "engine");
}

TEST(Streams, ACpuEngineHasNone) {
  for (const std::string& name : cpu_engines()) {
    const Engine engine(2, name);
    CHECK_OK(scruple_engine_set_stream(engine, nullptr));
    CHECK_OK(scruple_engine_synchronize(engine));
    int dummy = 0;
    EXPECT_INVALID(scruple_engine_set_stream(engine, &dummy), "stream");
    Measured table(engine, "adamw", "scruple", kGradientKinds[1]);
    table.fill(1);
    table.step();
    CHECK_OK(scruple_engine_synchronize(engine));
  }
  EXPECT_INVALID(scruple_engine_set_stream(nullptr, nullptr), "engine");
  EXPECT_INVALID(scruple_engine_synchronize(nullptr), "engine");
}

// ---- The whole loop ----

// Twenty steps, four of them spoilt, with everything in the engine's memory, and again with the host
// deciding: norm, clip factor, scaler update, and a table whose step the host counts.
TEST(Loop, EqualsTheLoopThatTheHostRuns) {
  const Engine engine(2);
  constexpr double kMaxNorm = 0.4;
  for (const auto& [rule, recipe] : walks())
    for (const GradientKind& kind : kGradientKinds) {
      if (!accumulates(kind)) continue;
      if (rule != "adamw" && kind.rounding != SCRUPLE_NEAREST && kind.rounding != SCRUPLE_DITHER) continue;
      Measured in_memory(engine, rule, recipe, kind, SCRUPLE_STOCHASTIC),
          on_host(engine, rule, recipe, kind, SCRUPLE_STOCHASTIC);
      scruple_scaler scaler = {256.0f, 2.0f, 0.5f, 3, 0}, host_scaler = scaler;
      std::int64_t steps = 0, host_steps = 0;
      Outputs out;
      int skipped = 0;
      for (int n = 1; n <= 20; ++n) {
        const float bad = n == 4 || n == 20 ? kInf : n == 5 || n == 13 ? kNaN : 0.0f;

        in_memory.fill(n, bad, &steps);
        CHECK_OK(in_memory.measure(measure_into(out, kMaxNorm, &scaler.scale, &steps)));
        in_memory.step(
            {.found_inf = &out.found_inf, .clip = &out.clip, .loss_scale = &scaler.scale, .steps = &steps});
        CHECK_OK(scruple_advance(engine, &out.found_inf, &scaler, &steps));

        on_host.at_step(host_steps + 1);
        on_host.fill(n, bad);
        float found_inf = -1;
        const double norm =
            norm_of(engine, on_host.rows, &found_inf) / static_cast<double>(host_scaler.scale);
        if (found_inf == 0) {
          on_host.step({.multiplier = scruple_clip_factor(norm, kMaxNorm) / host_scaler.scale});
          ++host_steps;
        } else {
          ++skipped;
        }
        CHECK_OK(scruple_scaler_update(&host_scaler, found_inf));

        ASSERT_EQ(out.found_inf, found_inf) << rule << " " << kind.format << ", step " << n;
        ASSERT_TRUE(same(scaler, host_scaler)) << rule << ", step " << n << ": " << scaler.scale;
        ASSERT_EQ(steps, host_steps) << rule << ", step " << n;
        ASSERT_TRUE(same_bytes(in_memory.bytes(), on_host.bytes()))
            << rule << " " << recipe << ", gradient " << kind.format << " " << kind.rounding << ", step "
            << n;
      }
      EXPECT_EQ(skipped, 4);
      EXPECT_EQ(steps, 16);
    }
}

}  // namespace
}  // namespace scruple_tests
