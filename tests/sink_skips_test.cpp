// Steps that are skipped: overflows, what a guard sees, and tensors that stay out. On every engine, as in sink_test.cpp.
#include "tests/sink.h"

namespace scruple_tests {
namespace {

INSTANTIATE_TEST_SUITE_P(Engines, Sinks, testing::ValuesIn(engines_to_test()), engine_name);

// ---- Overflow ----

TEST_P(Sinks, AnOverflowSkipsTheWholeStepAndNothingElse) {
  for (const scruple_policy policy : {SCRUPLE_STORED, SCRUPLE_COMPRESSED})
    for (const char* format : {"fp32", "int8"}) {
      const Config config = with_gradient(config_of("adamw", "scruple"), {format, SCRUPLE_NEAREST});
      Model model(engine, config), clean(engine, config);
      scruple_scaler scaler = scruple_scaler_dynamic();
      SinkOptions options{.policy = policy, .micro_batches = 2, .max_norm = 1, .scaler = &scaler};
      Sink sink(model, options), steady(clean, options);
      EXPECT_EQ(read(engine, scruple_sink_loss_scale(sink)), 65536.0f);
      for (Sink* each : {&sink, &steady}) each->backward(1), each->backward(2);
      const Bytes before = model.bytes();
      const std::vector<float> bad = model.spoilt(3, 4, 1234, kInf);
      sink.backward_of(4, bad);
      sink.backward(4);
      EXPECT_TRUE(same_bytes(model.bytes(), before)) << format;
      const scruple_sink_report report = sink.read();
      EXPECT_EQ(report.found_inf, 1.0f);
      EXPECT_FALSE(std::isfinite(report.norm));
      EXPECT_EQ(report.steps, 1);
      EXPECT_EQ(report.skipped, 1);
      EXPECT_EQ(report.scaler.scale, 32768.0f);
      EXPECT_EQ(sink.steps()[0], 2);
      // The next step is that of a run without the overflow, taken up again with the smaller scale.
      scaler.scale = 32768;
      for (scruple_tensor& row : clean.rows) row.step = 2;
      Sink resumed(clean, options);
      for (Sink* each : {&sink, &resumed}) each->backward(5), each->backward(6);
      EXPECT_TRUE(same_bytes(model.bytes(), clean.bytes())) << format;
      EXPECT_EQ(sink.read().found_inf, 0.0f);
      EXPECT_EQ(sink.read().steps, 2);
      EXPECT_FALSE(same_bytes(model.bytes(), before));
    }
}

TEST_P(Sinks, AReleasedOverflowSkipsItsTensorAlone) {
  for (const bool pieces : {false, true}) {
    const Config config = config_of("adamw", "scruple");
    Model model(engine, config), want(engine, config);
    scruple_scaler scaler = scruple_scaler_dynamic();
    scaler.scale = 1024;
    SinkOptions options{.policy = SCRUPLE_RELEASED, .scaler = &scaler};
    Sink sink(model, options);
    EXPECT_EQ(scruple_sink_measures(sink), 1);
    const Bytes before = model.bytes(4, SCRUPLE_WEIGHT), moments = model.bytes(4, SCRUPLE_SLOT);
    const std::vector<float> bad = model.spoilt(1, 4, 2499, -kInf);
    if (pieces) {
      const scruple_piece all = model.whole(4, bad), low = Model::part_of(all, 0, 2432),
                          high = Model::part_of(all, 2432, 2500 - 2432);
      CHECK_OK(sink.measure(low));
      CHECK_OK(sink.measure(high));
      CHECK_OK(sink.add(low));
      CHECK_OK(sink.add(high));
    } else {
      CHECK_OK(sink.add(model.whole(4, bad)));
    }
    sink.backward_of(0, sink.model.values(1, 0));
    EXPECT_TRUE(same_bytes(model.bytes(4, SCRUPLE_WEIGHT), before));
    EXPECT_TRUE(same_bytes(model.bytes(4, SCRUPLE_SLOT), moments));
    want.step(1, 0, 1, 1.0f / 1024);
    EXPECT_TRUE(same_bytes(model.bytes(0, SCRUPLE_WEIGHT), want.bytes(0, SCRUPLE_WEIGHT)));
    const scruple_sink_report report = sink.read();
    EXPECT_EQ(report.skipped, 1);
    EXPECT_EQ(report.steps, 0);
    EXPECT_EQ(report.found_inf, 1.0f);
    EXPECT_EQ(report.scaler.scale, 512.0f);
    EXPECT_EQ(sink.steps(), (std::vector<std::int64_t>{2, 1, 1, 1, 1}));
    sink.backward(2);
    EXPECT_EQ(sink.read().found_inf, 0.0f);
    EXPECT_EQ(sink.read().scaler.scale, 512.0f);
    EXPECT_EQ(sink.steps(), (std::vector<std::int64_t>{3, 1, 2, 2, 2}));
    // Its first step is step 1, whenever it is taken.
    want.step(2, 4, 5, 1.0f / 512);
    EXPECT_TRUE(same_bytes(model.bytes(4, SCRUPLE_WEIGHT), want.bytes(4, SCRUPLE_WEIGHT)));
  }
}

// ---- Released, with no more than a guard ----

// Measures tensor 4 in two pieces, or not at all, and adds it.
void add_fourth(Sink& sink, const std::vector<float>& gradient, bool pieces) {
  const scruple_piece all = sink.model.whole(4, gradient);
  if (!pieces) {
    CHECK_OK(sink.add(all));
    return;
  }
  const scruple_piece low = Model::part_of(all, 0, 2432), high = Model::part_of(all, 2432, 2500 - 2432);
  for (const scruple_piece& piece : {low, high}) CHECK_OK(sink.measure(piece));
  for (const scruple_piece& piece : {low, high}) CHECK_OK(sink.add(piece));
}

TEST_P(Sinks, AGuardLeavesFiniteStepsAsTheyAre) {
  for (const bool pieces : {false, true}) {
    Model model(engine, config_of("adamw", "scruple")), plain(engine, config_of("adamw", "scruple"));
    const DeviceCell<float> skip(engine, 0.0f);
    Sink sink(model, SinkOptions{.policy = SCRUPLE_RELEASED, .skip = skip.at()});
    Sink unguarded(plain, SinkOptions{.policy = SCRUPLE_RELEASED});
    EXPECT_EQ(scruple_sink_measures(sink), 2);
    EXPECT_EQ(scruple_sink_measures(unguarded), 0);
    for (int n = 1; n < 4; ++n) {
      add_fourth(sink, model.values(n, 4), pieces);
      CHECK_OK(sink.end());
      unguarded.backward_of(4, plain.values(n, 4));
    }
    EXPECT_TRUE(same_bytes(model.bytes(), plain.bytes()));
    EXPECT_EQ(sink.read().skipped, 0);
    EXPECT_EQ(sink.read().steps, 3);
  }
}

TEST_P(Sinks, AGuardSkipsATensorThatIsNotFiniteAndAllThatItIsTold) {
  for (const bool pieces : {false, true})
    for (const float bad : {kInf, -kInf, float_from(0x7fc00000u)}) {
      Model model(engine, config_of("adamw", "scruple"));
      const DeviceCell<float> skip(engine, 0.0f), told(engine, 1.0f);
      Sink sink(model, SinkOptions{.policy = SCRUPLE_RELEASED, .skip = skip.at()});
      const Bytes before = model.bytes(4, SCRUPLE_WEIGHT), moments = model.bytes(4, SCRUPLE_SLOT);
      const Bytes other = model.bytes(0, SCRUPLE_WEIGHT);
      add_fourth(sink, model.spoilt(1, 4, 2499, bad), pieces);
      sink.backward_of(0, model.values(1, 0));
      EXPECT_TRUE(same_bytes(model.bytes(4, SCRUPLE_WEIGHT), before));
      EXPECT_TRUE(same_bytes(model.bytes(4, SCRUPLE_SLOT), moments));
      EXPECT_FALSE(same_bytes(model.bytes(0, SCRUPLE_WEIGHT), other));
      EXPECT_EQ(sink.read().skipped, 1);
      EXPECT_EQ(sink.read().found_inf, 1.0f);
      EXPECT_EQ(sink.steps(), (std::vector<std::int64_t>{2, 1, 1, 1, 1}));

      Sink halted(model, SinkOptions{.policy = SCRUPLE_RELEASED, .skip = told.at()});
      const Bytes all = model.bytes();
      for (int n = 2; n < 4; ++n) {
        add_fourth(halted, model.values(n, 4), pieces);
        CHECK_OK(halted.end());
      }
      halted.backward(3);
      EXPECT_TRUE(same_bytes(model.bytes(), all));
      EXPECT_EQ(halted.read().skipped, 2 + 4) << "an empty tensor takes no step";
    }
}

// Pieces that nobody has shown are judged as they come: from the first that is not finite on the tensor stays as it is.
TEST_P(Sinks, AGuardJudgesPiecesThatNobodyHasShown) {
  constexpr std::int64_t kLow = 1280, kMiddle = 1152;
  for (const std::int64_t bad : {-1, 700, 2000, 2499}) {
    Model model(engine, config_of("adamw", "fp32")), plain(engine, config_of("adamw", "fp32"));
    const DeviceCell<float> skip(engine, 0.0f);
    Sink sink(model, SinkOptions{.policy = SCRUPLE_RELEASED, .skip = skip.at()});
    const std::vector<float> before = model.decoded(4, SCRUPLE_WEIGHT), clean = model.values(1, 4);
    const scruple_piece all = model.whole(4, bad < 0 ? clean : model.spoilt(1, 4, bad, kInf));
    for (const auto& [first, size] :
         {std::pair{std::int64_t{0}, kLow}, {kLow, kMiddle}, {kLow + kMiddle, 2500 - kLow - kMiddle}})
      CHECK_OK(sink.add(Model::part_of(all, first, size)));
    CHECK_OK(sink.end());
    plain.step(1, 4, 5);
    const std::vector<float> moved = plain.decoded(4, SCRUPLE_WEIGHT),
                             after = model.decoded(4, SCRUPLE_WEIGHT);
    const std::int64_t end = bad < 0 ? 2500 : bad < kLow ? 0 : bad < kLow + kMiddle ? kLow : kLow + kMiddle;
    for (std::int64_t i = 0; i < 2500; ++i) {
      const auto at = static_cast<std::size_t>(i);
      ASSERT_EQ(after[at], i < end ? moved[at] : before[at]) << bad << ", " << i;
    }
    EXPECT_EQ(sink.read().skipped, bad < 0 ? 0 : 1);
    EXPECT_EQ(sink.steps()[4], bad < 0 ? 2 : 1);
    CHECK_OK(sink.add(model.whole(4, model.values(2, 4))));
    CHECK_OK(sink.end());
    EXPECT_EQ(sink.read().found_inf, 0.0f) << "the next step begins anew";
  }
  Model model(engine, config_of("adamw", "fp32"));
  const DeviceCell<float> skip(engine, 0.0f);
  Sink sink(model, SinkOptions{.policy = SCRUPLE_RELEASED, .skip = skip.at()});
  const scruple_piece all = model.whole(4, 1);
  CHECK_OK(sink.measure(Model::part_of(all, 0, kLow)));
  EXPECT_INVALID(sink.add(Model::part_of(all, 0, kLow)), "tensor 4", "1280");
}

// Whichever micro-batch it is in: the weight stays, the moments stay finite, and the next step is one as any other.
TEST_P(Sinks, AGuardHoldsOverMicroBatches) {
  const float nan = float_from(0x7fc00000u);
  for (int bad = 0; bad < 3; ++bad) {
    Model model(engine, config_of("adamw", "fp32"));
    const DeviceCell<float> skip(engine, 0.0f);
    Sink sink(model, SinkOptions{.policy = SCRUPLE_RELEASED,
                                 .micro_batches = 3,
                                 .accumulation = SCRUPLE_ACCUMULATE_ADAMA,
                                 .skip = skip.at()});
    const Bytes before = model.bytes(4, SCRUPLE_WEIGHT);
    for (int n = 0; n < 3; ++n)
      sink.backward_of(4, n == bad ? model.spoilt(n, 4, 700, nan) : model.values(n, 4));
    EXPECT_TRUE(same_bytes(model.bytes(4, SCRUPLE_WEIGHT), before)) << bad;
    EXPECT_EQ(sink.read().skipped, 1);
    EXPECT_EQ(sink.steps()[4], 1);
    for (int n = 0; n < 3; ++n) sink.backward_of(4, model.values(3 + n, 4));
    EXPECT_FALSE(same_bytes(model.bytes(4, SCRUPLE_WEIGHT), before));
    EXPECT_EQ(sink.steps()[4], 2);
    for (int array = SCRUPLE_WEIGHT; array <= SCRUPLE_SLOT + 1; ++array)
      for (const float value : model.decoded(4, array)) ASSERT_TRUE(std::isfinite(value)) << bad;
  }
}

// ---- Tensors that stay out ----

TEST_P(Sinks, ATensorWithoutGradientIsLeftAloneAndCountsNoStep) {
  for (const scruple_policy policy : kPolicies) {
    const GradientKind dithered = {"int8", SCRUPLE_DITHER};
    const Config config = with_gradient(config_of("adamw", "scruple"),
                                        policy == SCRUPLE_COMPRESSED ? dithered : kGradientKinds[0]);
    const std::vector<std::vector<std::int64_t>> present = {{0, 2, 4}, {0, 4}, {0, 2},
                                                            {2, 3},    {},     {0, 2, 3, 4}};
    Model model(engine, config), want(engine, config, kSizes, true);
    Sink sink(model, SinkOptions{.policy = policy});
    for (int t = 0; t < 6; ++t) {
      for (const std::int64_t i : present[static_cast<std::size_t>(t)]) {
        CHECK_OK(sink.add(model.whole(i, t)));
        // Alone, each at its own step.
        scruple_tensor& row = want.row(i);
        const scruple_array incoming = want.whole(i, t).gradient;
        row.folds = 0;
        CHECK_OK(scruple_fold(engine, &row, &incoming, 1, 1.0f, nullptr));
        row.folds = 1;
        CHECK_OK(scruple_step(engine, &row, 1, nullptr));
        ++row.step;
      }
      CHECK_OK(sink.end());
      EXPECT_TRUE(same_bytes(model.bytes(), want.bytes())) << "policy " << policy << ", step " << t;
    }
    EXPECT_EQ(sink.steps(), (std::vector<std::int64_t>{5, 1, 5, 3, 4}));
    EXPECT_EQ(sink.read().steps, 5);
  }
}

// Tensors that stayed out once have counts of their own, and still share one norm, one flag and one skip.
TEST_P(Sinks, TensorsAtDifferentStepsAreClippedAndSkippedTogether) {
  const Config config = with_gradient(config_of("adamw", "scruple"), {"int8", SCRUPLE_DITHER});
  Model model(engine, config);
  SinkOptions options{.policy = SCRUPLE_COMPRESSED, .max_norm = 1};
  Sink sink(model, options);
  sink.backward_of(0, sink.model.values(1, 0));
  sink.backward(2);
  double sum = 0;
  for (std::int64_t i = 0; i < model.count(); ++i)
    for (const float x : model.values(2, i)) sum += static_cast<double>(x) * static_cast<double>(x);
  EXPECT_NEAR(sink.read().norm, std::sqrt(sum), 0.01 * std::sqrt(sum));
  EXPECT_EQ(sink.read().clip, scruple_clip_factor(sink.read().norm, 1));
  EXPECT_EQ(sink.steps(), (std::vector<std::int64_t>{3, 1, 2, 2, 2}));
  for (const std::int64_t bad : {0, 4}) {
    const Bytes before = model.bytes();
    for (std::int64_t i = 0; i < model.count(); ++i) {
      std::vector<float> g = model.values(3, i);
      if (i == bad) g[7] = kInf;
      CHECK_OK(sink.add(model.whole(i, g)));
    }
    CHECK_OK(sink.end());
    EXPECT_TRUE(same_bytes(model.bytes(), before)) << bad;
    EXPECT_EQ(sink.steps(), (std::vector<std::int64_t>{3, 1, 2, 2, 2}));
  }
  EXPECT_EQ(sink.read().skipped, 2);
}

}  // namespace
}  // namespace scruple_tests
