// Gradient policies: what goes into a sink comes out as the step that the plain calls would have taken, on every engine, in
// whatever pieces and order. All memory is the engine's, so SCRUPLE_TEST_ENGINE=cuda runs the same tests there. What a
// policy cannot do is in sink_errors_test.cpp.
#include "tests/sink.h"

namespace scruple_tests {
namespace {

INSTANTIATE_TEST_SUITE_P(Engines, Sinks, testing::ValuesIn(engines_to_test()), engine_name);

// ---- Policies and pieces ----

// Three steps by scruple_step from whole fp32 gradients.
Bytes plain_steps(scruple_engine* engine, const Config& config, int steps = 3) {
  Model model(engine, config);
  for (int t = 1; t <= steps; ++t) {
    for (scruple_tensor& row : model.rows) row.step = t;
    model.step(t, 0, model.count());
  }
  return model.bytes();
}

TEST_P(Sinks, PoliciesAndPiecesGiveTheBitsOfPlainSteps) {
  for (Config config : recipe_configs()) {
    config = with_gradient(config, kGradientKinds[0]);
    if (!set_rounding(config, SCRUPLE_STOCHASTIC)) continue;  // the hardest: random numbers by element
    const Bytes want = plain_steps(engine, config);
    for (const scruple_policy policy : kPolicies)
      for (const bool pieces : {false, true}) {
        Model model(engine, config);
        Sink sink(model, SinkOptions{.policy = policy});
        ASSERT_EQ(sink.status, SCRUPLE_OK) << scruple_last_error();
        for (int t = 1; t <= 3; ++t) pieces ? sink.backward_in_pieces(t) : sink.backward(t);
        EXPECT_TRUE(same_bytes(model.bytes(), want))
            << config.name << ", policy " << policy << (pieces ? ", pieces" : ", whole");
        EXPECT_EQ(sink.read().steps, 3);
        EXPECT_EQ(sink.steps()[0], 4);
      }
  }
}

TEST_P(Sinks, TilesGiveTheBitsOfWholeInEveryAccumulator) {
  for (const GradientKind& kind : kGradientKinds) {
    if ((info_of(scruple_format_find(kind.format)).roles & SCRUPLE_ROLE_ACCUMULATOR) == 0) continue;
    Bytes want;
    for (const scruple_policy policy : {SCRUPLE_STORED, SCRUPLE_COMPRESSED})
      for (const bool pieces : {false, true}) {
        Model model(engine, with_gradient(config_of("adamw", "scruple"), kind));
        SinkOptions options{.policy = policy, .micro_batches = 3, .max_norm = 1};
        Sink sink(model, options);
        for (int n = 1; n <= 6; ++n) pieces ? sink.backward_in_pieces(n) : sink.backward(n);
        if (want.empty()) want = model.bytes();
        EXPECT_TRUE(same_bytes(model.bytes(), want)) << kind.format << " " << kind.rounding << " " << pieces;
        EXPECT_LT(sink.read().clip, 1.0f);
      }
  }
}

// The sign of a zero gradient decides that of a zero weight, so an accumulator must keep it.
TEST_P(Sinks, ZerosKeepTheirSign) {
  Bytes want;
  for (const scruple_policy policy : kPolicies) {
    Model model(engine, config_of("sgd", "fp32", {{"lr", 1}}), {256});
    const std::vector<float> minus(256, -0.0f);
    CHECK_OK(scruple_encode(engine, &model.row(0), SCRUPLE_WEIGHT, minus.data()));
    std::vector<float> g(256, -0.0f);
    std::fill_n(g.begin(), 128, 0.0f);
    Sink sink(model, SinkOptions{.policy = policy});
    sink.backward_of(0, g);
    if (want.empty()) want = model.bytes();
    EXPECT_TRUE(same_bytes(model.bytes(), want)) << policy;
  }
  EXPECT_NE(want[3], want[4 * 128 + 3]);
}

// ---- Accumulation in gradients ----

TEST_P(Sinks, FourMicroBatchesAreOneStepOfTheMean) {
  const Config config = config_of("adamw", "scruple");
  Model model(engine, config), want(engine, config);
  Sink sink(model, SinkOptions{.policy = SCRUPLE_STORED, .micro_batches = 4});
  for (int n = 0; n < 4; ++n) sink.backward(n);
  for (std::int64_t i = 0; i < want.count(); ++i) {
    std::vector<float> mean(static_cast<std::size_t>(want.row(i).size), 0.0f);
    for (int n = 0; n < 4; ++n) {
      const std::vector<float> g = want.values(n, i);
      for (std::size_t e = 0; e < mean.size(); ++e) mean[e] = std::fmaf(g[e], 0.25f, mean[e]);
    }
    want.row(i).arrays[SCRUPLE_GRADIENT] = want.whole(i, mean).gradient;
  }
  CHECK_OK(scruple_step(engine, want.rows.data(), want.count(), nullptr));
  EXPECT_TRUE(same_bytes(model.bytes(), want.bytes()));
}

TEST_P(Sinks, Int8AccumulatorsKeepTheirBound) {
  const Config config = with_gradient(config_of("sgd", "fp32", {{"lr", 0.0}}), {"int8", SCRUPLE_NEAREST});
  Model model(engine, config, kSizes, true);
  Sink sink(model, SinkOptions{.policy = SCRUPLE_COMPRESSED, .micro_batches = 4});
  for (int n = 0; n < 4; ++n) sink.backward(n);
  const scruple_format_info info = info_of(scruple_format_find("int8"));
  for (std::int64_t i = 0; i < model.count(); ++i) {
    model.row(i).folds = 4;
    const std::vector<float> got = model.decoded(i, SCRUPLE_GRADIENT);
    std::vector<double> mean(got.size());
    double largest = 0;  // of any group at any time
    for (int n = 0; n < 4; ++n) {
      const std::vector<float> g = model.values(n, i);
      for (std::size_t e = 0; e < mean.size(); ++e) {
        mean[e] += 0.25 * static_cast<double>(g[e]);
        largest = std::max(largest, std::abs(mean[e]));
      }
    }
    for (std::size_t e = 0; e < mean.size(); ++e)
      ASSERT_NEAR(static_cast<double>(got[e]), mean[e], 4 * 1.05 * info.bound.group * largest)
          << i << " " << e;
  }
}

// Accumulation, clipping and loss scaling together, against the plain calls.
TEST_P(Sinks, EverythingAtOnceEqualsThePlainCalls) {
  for (const int rounding : {SCRUPLE_NEAREST, SCRUPLE_STOCHASTIC, SCRUPLE_DITHER}) {
    const Config config = with_gradient(config_of("adamw", "scruple"), {"int8", rounding});
    Model model(engine, config, kSizes, true), plain(engine, config, kSizes, true);
    scruple_scaler scaler = scruple_scaler_dynamic();
    scaler.scale = 64;
    scaler.interval = 1;
    SinkOptions options{
        .policy = SCRUPLE_COMPRESSED, .micro_batches = 4, .max_norm = 0.01, .scaler = &scaler};
    Sink sink(model, options);
    for (int t = 1; t <= 3; ++t) {
      for (scruple_tensor& row : plain.rows) row.folds = 0, row.step = t;
      for (int n = 0; n < 4; ++n) {
        sink.backward(4 * t + n);
        for (std::int64_t i = 0; i < plain.count(); ++i) {
          const scruple_array incoming = plain.whole(i, 4 * t + n).gradient;
          CHECK_OK(scruple_fold(engine, &plain.row(i), &incoming, 1, 0.25f, nullptr));
          ++plain.row(i).folds;
        }
      }
      const double norm = norm_of(engine, plain.rows);
      const float scale = static_cast<float>(64 << (t - 1));
      const float clip = scruple_clip_factor(norm / static_cast<double>(scale), 0.01);
      CHECK_OK(try_step(engine, plain.rows, {.multiplier = clip / scale}));
      const scruple_sink_report report = sink.read();
      EXPECT_EQ(report.norm, norm / static_cast<double>(scale));
      EXPECT_EQ(report.clip, clip);
      EXPECT_LT(report.clip, 1.0f);
      EXPECT_EQ(report.scaler.scale, 2 * scale);
      EXPECT_EQ(report.steps, t);
      EXPECT_TRUE(same_bytes(model.bytes(), plain.bytes())) << rounding << ", step " << t;
    }
  }
}

// ---- Clipping tensor by tensor ----

TEST_P(Sinks, ReleasedClipsEachTensorByItsOwnNorm) {
  const Config config = config_of("sgd", "fp32", {{"lr", 0.5}});
  Model model(engine, config), want(engine, config);
  SinkOptions options{.policy = SCRUPLE_RELEASED, .tensor_norm = 2};
  Sink sink(model, options);
  sink.backward(1);
  for (std::int64_t i = 0; i < want.count(); ++i) {
    scruple_tensor row = want.row(i);
    row.arrays[SCRUPLE_GRADIENT] = want.whole(i, 1).gradient;
    const float clip = scruple_clip_factor(norm_of(engine, {row}), 2);
    EXPECT_EQ(clip < 1, (row.size > 100));
    want.step(1, i, i + 1, clip);
  }
  EXPECT_TRUE(same_bytes(model.bytes(), want.bytes()));
}

TEST_P(Sinks, AdaGcFollowsItsFormula) {
  const Config config = config_of("sgd", "fp32", {{"lr", 1.0}});
  Model model(engine, config, {300, 700});
  SinkOptions options{.policy = SCRUPLE_RELEASED, .adagc = 1.05};
  auto sink = std::make_unique<Sink>(model, options);
  std::vector<std::vector<double>> w;
  for (std::int64_t i = 0; i < 2; ++i) {
    const std::vector<float> start = model.decoded(i, SCRUPLE_WEIGHT);
    w.emplace_back(start.begin(), start.end());
  }
  double gamma[2] = {};
  int clipped_steps = 0;
  for (int t = 1; t <= 40; ++t) {
    for (std::int64_t i = 0; i < 2; ++i) {
      std::vector<float> g = model.values(t, i);
      if (t % 10 == 0)
        for (float& x : g) x *= 30;  // a spike
      double sum = 0;
      for (const float x : g) sum += static_cast<double>(x) * static_cast<double>(x);
      const double norm = std::sqrt(sum);
      // Wang et al., 2502.11034: h = min(1, lambda gamma / |g|), gamma from the clipped norm.
      const double h = gamma[i] > 0 ? std::min(1.0, 1.05 * gamma[i] / norm) : 1.0;
      gamma[i] = gamma[i] > 0 ? 0.98 * gamma[i] + 0.02 * h * norm : norm;
      clipped_steps += h < 1 ? 1 : 0;
      for (std::size_t e = 0; e < g.size(); ++e)
        w[static_cast<std::size_t>(i)][e] -= h * static_cast<double>(g[e]);
      CHECK_OK(sink->add(model.whole(i, g)));
    }
    CHECK_OK(sink->end());
    if (t != 20) continue;  // save, and go on in another sink
    std::vector<double> norms(2);
    CHECK_OK(scruple_sink_read_tensors(*sink, nullptr, norms.data()));
    SinkOptions resumed = options;
    resumed.adagc_norms = norms.data();
    sink = std::make_unique<Sink>(model, resumed);
  }
  EXPECT_GE(clipped_steps, 8);
  std::vector<double> norms(2);
  CHECK_OK(scruple_sink_read_tensors(*sink, nullptr, norms.data()));
  for (std::int64_t i = 0; i < 2; ++i) {
    EXPECT_NEAR(norms[static_cast<std::size_t>(i)], gamma[i], 1e-6 * gamma[i]);
    const std::vector<float> got = model.decoded(i, SCRUPLE_WEIGHT);
    for (std::size_t e = 0; e < got.size(); ++e)
      ASSERT_NEAR(static_cast<double>(got[e]), w[static_cast<std::size_t>(i)][e], 1e-4) << e;
  }
}

TEST_P(Sinks, AnOverflowLeavesNoTraceInAdaGc) {
  Model model(engine, config_of("adamw"), {300});
  SinkOptions options{.policy = SCRUPLE_RELEASED, .adagc = 1.05};
  Sink sink(model, options);
  sink.backward(1);
  double before = 0, after = 0;
  CHECK_OK(scruple_sink_read_tensors(sink, nullptr, &before));
  const Bytes bytes = model.bytes();
  const std::vector<float> bad = model.spoilt(2, 0, 0, kInf);
  sink.backward_of(0, bad);
  CHECK_OK(scruple_sink_read_tensors(sink, nullptr, &after));
  EXPECT_GT(before, 0.0);
  EXPECT_EQ(before, after);
  EXPECT_TRUE(same_bytes(model.bytes(), bytes));
}

// Norms of pieces at multiples of 65,536 are the whole's, and AdaGC's state is the whole's.
TEST_P(Sinks, MeasuredPiecesClipAsTheWhole) {
  const Config config = config_of("adamw", "scruple");
  Bytes want;
  for (const bool pieces : {false, true}) {
    Model model(engine, config, {200000, 70000});
    SinkOptions options{.policy = SCRUPLE_RELEASED, .tensor_norm = 100, .adagc = 1.05};
    Sink sink(model, options);
    for (int t = 1; t <= 3; ++t) pieces ? sink.backward_in_pieces(t, 65536) : sink.backward(t);
    if (!pieces) want = model.bytes();
    EXPECT_TRUE(same_bytes(model.bytes(), want));
  }
}

// ---- Accumulation in the moments ----

// Values of few bits, so that nothing is rounded: then folding into the momentum is the mean's step exactly.
TEST_P(Sinks, MomentumAccumulationIsTheStepOfTheMean) {
  for (const char* rule : {"sgd", "sgdw"}) {
    const Config config = config_of(rule, "fp32", {{"lr", 0.125}, {"momentum", 0.5}, {"weight_decay", 0.25}});
    Model model(engine, config, {300}), want(engine, config, {300});
    SinkOptions options{
        .policy = SCRUPLE_RELEASED, .micro_batches = 4, .accumulation = SCRUPLE_ACCUMULATE_MOMENTUM};
    const std::vector<float> start(300, 1.0f);
    for (Model* each : {&model, &want})
      CHECK_OK(scruple_encode(engine, &each->row(0), SCRUPLE_WEIGHT, start.data()));
    Sink sink(model, options);
    const auto small = [](int n) {
      std::vector<float> g(300);
      for (std::size_t e = 0; e < g.size(); ++e)
        g[e] = static_cast<float>(static_cast<int>((e * 7 + static_cast<std::size_t>(n) * 13) % 17) - 8);
      return g;
    };
    for (int t = 1; t <= 3; ++t) {
      std::vector<float> mean(300);
      for (int n = 0; n < 4; ++n) {
        const std::vector<float> g = small(4 * t + n);
        for (std::size_t e = 0; e < g.size(); ++e) mean[e] += g[e] / 4;
        sink.backward_of(0, g);
      }
      want.row(0).arrays[SCRUPLE_GRADIENT] = want.whole(0, mean).gradient;
      want.row(0).step = t;
      CHECK_OK(scruple_step(engine, want.rows.data(), 1, nullptr));
      EXPECT_TRUE(same_bytes(model.bytes(), want.bytes())) << rule << ", step " << t;
    }
    EXPECT_EQ(sink.steps()[0], 4);
    EXPECT_EQ(sink.read().steps, 3);
  }
}

TEST_P(Sinks, AdamAFollowsItsFormula) {
  for (const char* rule : {"adam", "adamw"}) {
    const double decay = rule[4] == 'w' ? 0.1 : 0;
    const Config config = config_of(rule, "fp32", {{"lr", 0.01}, {"weight_decay", decay}});
    Model model(engine, config, {500});
    SinkOptions options{
        .policy = SCRUPLE_RELEASED, .micro_batches = 4, .accumulation = SCRUPLE_ACCUMULATE_ADAMA};
    Sink sink(model, options);
    const std::vector<float> start = model.decoded(0, SCRUPLE_WEIGHT);
    std::vector<double> w(start.begin(), start.end()), m(500), v(500);
    for (int t = 1; t <= 5; ++t) {
      for (std::size_t e = 0; e < 500; ++e) m[e] *= 0.9, v[e] *= 0.999;
      for (int n = 0; n < 4; ++n) {
        const std::vector<float> g = model.values(4 * t + n, 0);
        for (std::size_t e = 0; e < 500; ++e) {
          const double scaled = static_cast<double>(g[e]) / 4;
          m[e] += 0.1 * scaled;
          v[e] += 0.001 * scaled * scaled;
        }
        sink.backward_of(0, g);
      }
      for (std::size_t e = 0; e < 500; ++e) {
        const double corrected = v[e] / (1 - std::pow(0.999, t));
        w[e] =
            w[e] * (1 - 0.01 * decay) - 0.01 / (1 - std::pow(0.9, t)) * m[e] / (std::sqrt(corrected) + 1e-8);
      }
    }
    const std::vector<float> got_w = model.decoded(0, SCRUPLE_WEIGHT), got_m = model.decoded(0, SCRUPLE_SLOT),
                             got_v = model.decoded(0, SCRUPLE_SLOT + 1);
    for (std::size_t e = 0; e < 500; ++e) {
      ASSERT_NEAR(static_cast<double>(got_m[e]), m[e], 1e-6) << rule;
      ASSERT_NEAR(static_cast<double>(got_v[e]), v[e], 1e-5 * v[e]) << rule;
      ASSERT_NEAR(static_cast<double>(got_w[e]), w[e], 1e-5) << rule;
    }
  }
}

// In every recipe that keeps moments in fp32, with random rounding, whole or in pieces, for tensors that miss micro-batches too.
TEST_P(Sinks, WeightsMoveWithTheLastMicroBatchAlone) {
  for (Config config : recipe_configs(false)) {
    if (mode_of(config.rule) == SCRUPLE_ACCUMULATE_GRADIENTS) continue;
    if (info_of(config.formats.arrays[SCRUPLE_SLOT].format).code_bits != 32)
      continue;  // refused: following_test
    if (config.rule.starts_with("sgd")) config.hypers = {{"momentum", 0.9}};
    set_rounding(config, SCRUPLE_STOCHASTIC);
    config = with_gradient(config, kGradientKinds[0]);
    SinkOptions options{.policy = SCRUPLE_RELEASED, .micro_batches = 3, .accumulation = mode_of(config.rule)};
    Model model(engine, config), tiled(engine, config);
    Sink sink(model, options), tiles(tiled, options);
    ASSERT_EQ(sink.status, SCRUPLE_OK) << config.name << ": " << scruple_last_error();
    for (int t = 0; t < 2; ++t)
      for (int n = 0; n < 3; ++n) {
        const Bytes before = model.bytes(4, SCRUPLE_WEIGHT), moments = model.bytes(4, SCRUPLE_SLOT);
        sink.backward(3 * t + n);
        tiles.backward_in_pieces(3 * t + n);
        EXPECT_EQ(same_bytes(model.bytes(4, SCRUPLE_WEIGHT), before), n < 2) << config.name << " " << n;
        EXPECT_FALSE(same_bytes(model.bytes(4, SCRUPLE_SLOT), moments)) << config.name << " " << n;
      }
    EXPECT_TRUE(same_bytes(model.bytes(), tiled.bytes())) << config.name;
    EXPECT_EQ(sink.steps()[4], 3);
  }
}

TEST_P(Sinks, AReleasedTensorMayMissMicroBatchesButNotTheLast) {
  const Config config = config_of("adamw", "fp32");
  Model model(engine, config, {300, 300});
  SinkOptions options{
      .policy = SCRUPLE_RELEASED, .micro_batches = 2, .accumulation = SCRUPLE_ACCUMULATE_ADAMA};
  Sink sink(model, options);
  sink.backward(8), sink.backward(9);
  const std::vector<float> before = model.decoded(1, SCRUPLE_SLOT);
  const Bytes weights = model.bytes(1, SCRUPLE_WEIGHT);
  sink.backward_of(0, sink.model.values(1, 0));
  CHECK_OK(sink.add(model.whole(1, 2)));
  EXPECT_INVALID(sink.end(), "tensor 0", "add zeros");
  CHECK_OK(sink.add(model.whole(0, std::vector<float>(300))));
  CHECK_OK(sink.end());
  EXPECT_EQ(sink.steps(), (std::vector<std::int64_t>{3, 3}));
  // Tensor 1 came once, halved, and last: its moments decayed and its weight moved all the same.
  EXPECT_FALSE(same_bytes(model.bytes(1, SCRUPLE_WEIGHT), weights));
  const std::vector<float> m = model.decoded(1, SCRUPLE_SLOT), g = model.values(2, 1);
  for (std::size_t e = 0; e < m.size(); ++e) ASSERT_NEAR(m[e], 0.9f * before[e] + 0.05f * g[e], 1e-7f);
}

// ---- Memory ----

TEST_P(Sinks, AccumulatorsLiveAsLongAsThePolicySays) {
  const Config config = with_gradient(config_of("adamw", "scruple"), {"int8", SCRUPLE_DITHER});
  // visit(model, ledger, sink); what was taken is given back.
  const auto with = [&](scruple_policy policy, int micro_batches, const auto& visit) {
    Model model(engine, config);
    Ledger ledger(engine);
    SinkOptions options{.policy = policy, .micro_batches = micro_batches, .memory = ledger.memory()};
    {
      Sink sink(model, options);
      visit(model, ledger, sink);
    }
    EXPECT_EQ(ledger.now, 0);
    EXPECT_TRUE(ledger.blocks.empty());
  };
  std::int64_t all = 0;
  with(SCRUPLE_STORED, 1, [&](Model&, Ledger& ledger, Sink& sink) {
    all = ledger.now;
    EXPECT_GT(all, 3633);
    sink.backward(1);
    EXPECT_EQ(ledger.now, all);
  });
  for (const int micro_batches : {1, 2})
    with(SCRUPLE_COMPRESSED, micro_batches, [&](Model& model, Ledger& ledger, Sink& sink) {
      EXPECT_EQ(ledger.now, 0);
      CHECK_OK(sink.add(model.whole(0, 1)));
      EXPECT_GT(ledger.now, 1000);
      EXPECT_LT(ledger.now, 1200);  // one tensor's
      CHECK_OK(sink.add(model.whole(4, 1)));
      CHECK_OK(sink.end());
      EXPECT_EQ(ledger.now == 0, micro_batches == 1);
      sink.backward(2);
      EXPECT_EQ(ledger.peak, all);
      EXPECT_EQ(ledger.now, micro_batches == 1 ? 0 : all);
    });
  with(SCRUPLE_RELEASED, 1, [&](Model&, Ledger& ledger, Sink& sink) {
    sink.backward(1);
    EXPECT_EQ(ledger.calls, 0);
  });
  with(SCRUPLE_COMPRESSED, 1, [&](Model& model, Ledger& ledger, Sink& sink) {
    ledger.limit = 500;  // no memory: said so, and nothing is lost
    EXPECT_REFUSED(sink.add(model.whole(0, 1)), SCRUPLE_OUT_OF_MEMORY, "bytes");
    ledger.limit = 1 << 20;
    sink.backward_of(0, model.values(1, 0));
    EXPECT_EQ(sink.steps()[0], 2);
  });
}

// ---- Where others decide or hold a part ----

TEST_P(Sinks, TakesALossScaleThatTheCallerKeeps) {
  for (const scruple_policy policy : {SCRUPLE_COMPRESSED, SCRUPLE_RELEASED}) {
    scruple_scaler fixed{};
    CHECK_OK(scruple_scaler_static(64, &fixed));
    SinkOptions own = SinkOptions{.policy = policy}, callers = own;
    own.scaler = &fixed;
    const DeviceCell<float> cell(engine, fixed.scale);
    callers.loss_scale = cell.at();

    Model want(engine, config_of("adamw", "scruple")), got(engine, config_of("adamw", "scruple"));
    Sink a(want, own), b(got, callers);
    EXPECT_EQ(scruple_sink_loss_scale(b), callers.loss_scale);
    const auto flag = [&] { return read(engine, scruple_sink_found_inf(b)); };
    for (Sink* sink : {&a, &b}) sink->backward(1);
    EXPECT_EQ(flag(), 0.0f);
    for (Sink* sink : {&a, &b}) sink->backward_of(0, sink->model.spoilt(2, 0, 7, kInf));
    EXPECT_EQ(flag(), 1.0f);
    for (Sink* sink : {&a, &b}) sink->backward(3);
    EXPECT_TRUE(same_bytes(want.bytes(), got.bytes())) << "policy " << policy;
  }
}

TEST_P(Sinks, AddsTheSquaresThatOtherProcessesHold) {
  Others others{engine};
  SinkOptions options{.policy = SCRUPLE_COMPRESSED, .max_norm = 1, .reduce = {&others, Others::add}};
  Model alone(engine, config_of("adamw")), shared(engine, config_of("adamw"));
  Sink a(alone, options), b(shared, options);
  a.backward(1);
  const double own = a.read().norm;
  others.squares = 3 * own * own;  // the whole norm is twice this process' own
  b.backward(1);
  EXPECT_NEAR(b.read().norm, 2 * own, 1e-12 * own);
  EXPECT_EQ(b.read().clip, scruple_clip_factor(b.read().norm, 1));

  others.calls = 0;
  CHECK_OK(b.end());  // no gradient here; others may have some
  EXPECT_EQ(others.calls, 1);

  others.squares = std::numeric_limits<double>::infinity();  // an overflow elsewhere skips the step here
  const Bytes before = shared.bytes();
  b.backward(2);
  EXPECT_EQ(b.read().found_inf, 1.0f);
  EXPECT_TRUE(same_bytes(shared.bytes(), before));

  others.fails = true;
  for (std::int64_t i = 0; i < shared.count(); ++i) CHECK_OK(b.add(shared.whole(i, 3)));
  EXPECT_INVALID(b.end(), "reduce.add failed");
  EXPECT_TRUE(same_bytes(shared.bytes(), before));
  others.fails = false;
  others.squares = 0;
  CHECK_OK(b.end());
  EXPECT_FALSE(same_bytes(shared.bytes(), before));
}

// Every rule is in one of the two lists, and each that cannot says so.
TEST_P(Sinks, AddsUpPiecesAndRemembersForAdaGc) {
  Model model(engine, config_of("sgd"), {200000});
  scruple_tensor whole = model.row(0), low{}, high{};
  whole.arrays[SCRUPLE_GRADIENT] = model.whole(0, 1).gradient;
  CHECK_OK(scruple_tensor_view(&whole, 0, 131072, &low));
  CHECK_OK(scruple_tensor_view(&whole, 131072, 200000 - 131072, &high));
  double norm = 0;
  CHECK_OK(scruple_norm(engine, &whole, 1, &norm, nullptr));
  struct Cells {
    double sum, norm, gamma;
    float clip;
  };
  DeviceCell<Cells> cells(engine, {7, 7, 1, 7});
  scruple_measure_options options = SCRUPLE_MEASURE_OPTIONS_INIT;
  options.sum = &cells.at()->sum;
  CHECK_OK(scruple_measure(engine, &low, 1, &options));
  options.sum_before = options.sum;
  options.norm = &cells.at()->norm;
  options.clip = &cells.at()->clip;
  options.adagc = 1.5;
  options.gamma = &cells.at()->gamma;
  CHECK_OK(scruple_measure(engine, &high, 1, &options));
  const Cells got = cells.get();
  EXPECT_EQ(got.norm, norm);
  EXPECT_NEAR(got.sum, norm * norm, 1e-9 * norm * norm);
  EXPECT_EQ(got.clip, static_cast<float>(1.5 / norm));
  EXPECT_NEAR(got.gamma, 0.98 + 0.02 * 1.5, 1e-7);
  for (const double bad : {0.0, -1.0, static_cast<double>(kInf)}) {
    options.adagc = bad;
    EXPECT_INVALID(scruple_measure(engine, &high, 1, &options), "adagc", "gamma");
  }
}

}  // namespace
}  // namespace scruple_tests
