// Gradient policies: what goes into a sink comes out as the step that the plain calls would have taken, on
// every engine, in whatever pieces and order; and what a policy cannot do is refused with the way out. All
// memory is the engine's, so SCRUPLE_TEST_ENGINE=cuda runs the same tests there.
#include <algorithm>
#include <functional>
#include <limits>
#include <map>
#include <numeric>
#include <scruple/scruple.hpp>

#include "tests/configs.h"
#include "tests/device.h"

namespace scruple_tests {
namespace {

const float kInf = std::numeric_limits<float>::infinity();
const std::vector<std::int64_t> kSizes = {1000, 0, 5, 128, 2500};

std::vector<std::string> engines_to_test() {
  const char* named = std::getenv("SCRUPLE_TEST_ENGINE");
  if (named != nullptr && *named != 0) return {named};
  std::vector<std::string> names = cpu_engines();
  if (why_unavailable("cuda").empty()) names.emplace_back("cuda");
  return names;
}

// A small model in an engine's memory, and gradients for it. Two that are made alike are alike.
struct Model {
  explicit Model(scruple_engine* on, const Config& config, const std::vector<std::int64_t>& sizes = kSizes)
      : engine(on), optimizer(config.rule.c_str()), arriving(on) {
    for (const auto& [name, value] : config.hypers) optimizer.set(name.c_str(), value);
    optimizer.seed(5);
    std::size_t bytes = 4;
    for (const std::int64_t size : sizes) {
      scruple_tensor row = config.formats;
      row.optimizer = optimizer;
      row.size = size;
      row.step = 1;
      row.id = static_cast<std::uint32_t>(rows.size() + 1);
      CHECK_OK(scruple_tensor_alloc(engine, &row, SCRUPLE_STATE));
      const std::vector<float> weights = Random(rows.size() + 1).normals(static_cast<std::size_t>(size));
      if (size > 0) {
        CHECK_OK(scruple_encode(engine, &row, SCRUPLE_WEIGHT, weights.data()));
      }
      begins.push_back(bytes);
      bytes += 4 * static_cast<std::size_t>(size) + 64;
      rows.push_back(row);
    }
    arriving.reserve(bytes);
  }
  ~Model() {
    for (scruple_tensor& row : rows) scruple_tensor_free(engine, &row);
  }
  Model(const Model&) = delete;
  Model& operator=(const Model&) = delete;

  std::int64_t count() const { return static_cast<std::int64_t>(rows.size()); }
  scruple_tensor& row(std::int64_t i) { return rows[static_cast<std::size_t>(i)]; }

  // Gradient number n of tensor i.
  static std::vector<float> values(int n, std::int64_t i, std::int64_t size) {
    return Random(static_cast<std::uint64_t>(1000 * n + i)).normals(static_cast<std::size_t>(size), 0.5);
  }
  // In the engine's memory, as fp32.
  scruple_array upload(std::int64_t i, const std::vector<float>& gradient) {
    const std::size_t at = begins[static_cast<std::size_t>(i)];
    if (!gradient.empty()) arriving.write(gradient.data(), 4 * gradient.size(), at);
    scruple_array array{};
    array.format = scruple_format_find("fp32");
    array.codes = arriving.data() + at;
    return array;
  }
  scruple_piece whole(std::int64_t i, const std::vector<float>& gradient) {
    return {i, 0, row(i).size, upload(i, gradient)};
  }
  scruple_piece whole(std::int64_t i, int n) { return whole(i, values(n, i, row(i).size)); }

  Bytes plane_bytes(const scruple_array& array, std::int64_t size) const {
    std::int64_t codes = 0, aux = 0;
    CHECK_OK(scruple_format_bytes(array.format, size, &codes, &aux));
    Bytes all(static_cast<std::size_t>(codes + aux));
    if (codes > 0) {
      CHECK_OK(scruple_copy(engine, all.data(), array.codes, codes));
    }
    if (aux > 0) {
      CHECK_OK(scruple_copy(engine, all.data() + codes, array.aux, aux));
    }
    CHECK_OK(scruple_engine_synchronize(engine));
    return all;
  }
  Bytes bytes(std::int64_t i, int array) const {
    const scruple_tensor& t = rows[static_cast<std::size_t>(i)];
    int used = 0;
    if (scruple_tensor_array(&t, array, nullptr, nullptr, &used) != SCRUPLE_OK || used == 0) return {};
    return plane_bytes(t.arrays[array], t.size);
  }
  // Every weight and moment.
  Bytes bytes() const {
    Bytes all;
    for (std::int64_t i = 0; i < count(); ++i)
      for (int a = 0; a < SCRUPLE_GRADIENT; ++a) {
        const Bytes more = bytes(i, a);
        all.insert(all.end(), more.begin(), more.end());
      }
    return all;
  }
  std::vector<float> decoded(std::int64_t i, int array) {
    std::vector<float> out(static_cast<std::size_t>(row(i).size));
    if (!out.empty()) {
      CHECK_OK(scruple_decode(engine, &row(i), array, out.data()));
    }
    return out;
  }

  scruple_engine* engine;
  Optimizer optimizer;
  std::vector<scruple_tensor> rows;
  DeviceMemory arriving;
  std::vector<std::size_t> begins;
};

struct Sink {
  Sink(Model& of, const scruple_sink_options& options) : model(of) {
    status = scruple_sink_create(model.engine, model.rows.data(), model.count(), &options, &handle);
  }
  ~Sink() { scruple_sink_destroy(handle); }
  Sink(const Sink&) = delete;
  Sink& operator=(const Sink&) = delete;
  operator scruple_sink*() const { return handle; }

  scruple_status add(const scruple_piece& piece) { return scruple_sink_add(handle, &piece, 1); }
  scruple_status measure(const scruple_piece& piece) { return scruple_sink_measure(handle, &piece, 1); }
  scruple_status end() { return scruple_sink_end(handle); }
  // The whole micro-batch: gradient number n of every tensor, the last layer first, as backward does.
  void backward(int n) {
    for (std::int64_t i = model.count(); i-- > 0;) CHECK_OK(add(model.whole(i, n)));
    CHECK_OK(end());
  }
  // The same in pieces of 256 and fewer, out of order; measured before where the policy wants it.
  void backward_in_pieces(int n, std::int64_t tile = 256) {
    for (std::int64_t i = model.count(); i-- > 0;) {
      const scruple_piece all = model.whole(i, n);
      std::vector<scruple_piece> pieces;
      for (std::int64_t first = 0; first < all.size; first += tile) {
        pieces.push_back(all);
        pieces.back().first = first;
        pieces.back().size = std::min(tile, all.size - first);
        pieces.back().gradient.codes = static_cast<char*>(all.gradient.codes) + 4 * first;
      }
      const auto n_pieces = static_cast<std::int64_t>(pieces.size());
      if (scruple_sink_measures(handle) != 0) {
        CHECK_OK(scruple_sink_measure(handle, pieces.data(), n_pieces));
      }
      std::reverse(pieces.begin(), pieces.end());
      for (std::size_t p = 0; p + 1 < pieces.size(); p += 2) std::swap(pieces[p], pieces[p + 1]);
      for (std::size_t p = 0; p < pieces.size() / 2; ++p) CHECK_OK(add(pieces[p]));
      const std::int64_t done = n_pieces / 2;
      CHECK_OK(scruple_sink_add(handle, pieces.data() + done, n_pieces - done));
    }
    CHECK_OK(end());
  }
  scruple_sink_report read() const {
    scruple_sink_report report{};
    CHECK_OK(scruple_sink_read(handle, &report));
    return report;
  }
  std::vector<std::int64_t> steps() const {
    std::vector<std::int64_t> all(model.rows.size());
    CHECK_OK(scruple_sink_read_tensors(handle, all.data(), nullptr));
    return all;
  }

  Model& model;
  scruple_sink* handle = nullptr;
  scruple_status status;
};

scruple_sink_options options_of(scruple_policy policy, int micro_batches = 1) {
  scruple_sink_options options = SCRUPLE_SINK_OPTIONS_INIT;
  options.policy = policy;
  options.micro_batches = micro_batches;
  return options;
}

Config with_gradient_format(Config config, const char* format, int rounding = SCRUPLE_NEAREST) {
  put(config, SCRUPLE_GRADIENT, scruple_format_find(format), rounding);
  return config;
}
Config config_of(const char* rule, const char* recipe = "fp32",
                 std::vector<std::pair<std::string, double>> hypers = {}) {
  const Optimizer optimizer(rule);
  Config config;
  config.rule = rule;
  config.formats.optimizer = optimizer;
  config.formats.size = std::int64_t{1} << 30;
  CHECK_OK(scruple_tensor_use(&config.formats, recipe));
  config.hypers = std::move(hypers);
  config.name = std::string(rule) + " in " + recipe;
  return with_gradient_format(config, "fp32");
}

void for_engines(const std::function<void(scruple_engine*)>& body) {
  for (const std::string& name : engines_to_test()) {
    const Engine engine(2, name.c_str());
    if (engine.handle != nullptr) body(engine);
  }
}

// ---- Policies and pieces ----

// Three steps by scruple_step from whole fp32 gradients.
Bytes plain_steps(scruple_engine* engine, const Config& config, int steps = 3) {
  Model model(engine, config);
  for (int t = 1; t <= steps; ++t) {
    for (std::int64_t i = 0; i < model.count(); ++i) {
      model.row(i).arrays[SCRUPLE_GRADIENT] = model.whole(i, t).gradient;
      model.row(i).step = t;
    }
    CHECK_OK(scruple_step(engine, model.rows.data(), model.count(), nullptr));
    for (scruple_tensor& row : model.rows)
      row.arrays[SCRUPLE_GRADIENT] = config.formats.arrays[SCRUPLE_GRADIENT];
  }
  return model.bytes();
}

TEST(Sink, PoliciesAndPiecesGiveTheBitsOfPlainSteps) {
  for_engines([](scruple_engine* engine) {
    for (Config config : recipe_configs()) {
      config = with_gradient_format(config, "fp32");
      if (!set_rounding(config, SCRUPLE_STOCHASTIC)) continue;  // the hardest: random numbers by element
      const Bytes want = plain_steps(engine, config);
      for (const scruple_policy policy : {SCRUPLE_STORED, SCRUPLE_RELEASED, SCRUPLE_COMPRESSED})
        for (const bool pieces : {false, true}) {
          Model model(engine, config);
          Sink sink(model, options_of(policy));
          ASSERT_EQ(sink.status, SCRUPLE_OK) << scruple_last_error();
          for (int t = 1; t <= 3; ++t) pieces ? sink.backward_in_pieces(t) : sink.backward(t);
          EXPECT_TRUE(same_bytes(model.bytes(), want))
              << config.name << ", policy " << policy << (pieces ? ", pieces" : ", whole");
          EXPECT_EQ(sink.read().steps, 3);
          EXPECT_EQ(sink.steps()[0], 4);
        }
    }
  });
}

TEST(Sink, TilesGiveTheBitsOfWholeInEveryAccumulator) {
  for_engines([](scruple_engine* engine) {
    for (const GradientKind& kind : kGradientKinds) {
      if ((info_of(scruple_format_find(kind.format)).roles & SCRUPLE_ROLE_ACCUMULATOR) == 0) continue;
      Bytes want;
      for (const scruple_policy policy : {SCRUPLE_STORED, SCRUPLE_COMPRESSED})
        for (const bool pieces : {false, true}) {
          Model model(engine,
                      with_gradient_format(config_of("adamw", "scruple"), kind.format, kind.rounding));
          scruple_sink_options options = options_of(policy, 3);
          options.max_norm = 1;
          Sink sink(model, options);
          for (int n = 1; n <= 6; ++n) pieces ? sink.backward_in_pieces(n) : sink.backward(n);
          if (want.empty()) want = model.bytes();
          EXPECT_TRUE(same_bytes(model.bytes(), want))
              << kind.format << " " << kind.rounding << " " << pieces;
          EXPECT_LT(sink.read().clip, 1.0f);
        }
    }
  });
}

// The sign of a zero gradient decides that of a zero weight, so an accumulator must keep it.
TEST(Sink, ZerosKeepTheirSign) {
  for_engines([](scruple_engine* engine) {
    Bytes want;
    for (const scruple_policy policy : {SCRUPLE_RELEASED, SCRUPLE_STORED, SCRUPLE_COMPRESSED}) {
      Model model(engine, config_of("sgd", "fp32", {{"lr", 1}}), {256});
      const std::vector<float> minus(256, -0.0f);
      CHECK_OK(scruple_encode(engine, &model.row(0), SCRUPLE_WEIGHT, minus.data()));
      std::vector<float> g(256, -0.0f);
      std::fill_n(g.begin(), 128, 0.0f);
      Sink sink(model, options_of(policy));
      CHECK_OK(sink.add(model.whole(0, g)));
      CHECK_OK(sink.end());
      if (want.empty()) want = model.bytes();
      EXPECT_TRUE(same_bytes(model.bytes(), want)) << policy;
    }
    EXPECT_NE(want[3], want[4 * 128 + 3]);
  });
}

// ---- Accumulation in gradients ----

TEST(Sink, FourMicroBatchesAreOneStepOfTheMean) {
  for_engines([](scruple_engine* engine) {
    const Config config = config_of("adamw", "scruple");
    Model model(engine, config), want(engine, config);
    Sink sink(model, options_of(SCRUPLE_STORED, 4));
    for (int n = 0; n < 4; ++n) sink.backward(n);
    for (std::int64_t i = 0; i < want.count(); ++i) {
      std::vector<float> mean(static_cast<std::size_t>(want.row(i).size), 0.0f);
      for (int n = 0; n < 4; ++n) {
        const std::vector<float> g = Model::values(n, i, want.row(i).size);
        for (std::size_t e = 0; e < mean.size(); ++e) mean[e] = std::fmaf(g[e], 0.25f, mean[e]);
      }
      want.row(i).arrays[SCRUPLE_GRADIENT] = want.whole(i, mean).gradient;
    }
    CHECK_OK(scruple_step(engine, want.rows.data(), want.count(), nullptr));
    EXPECT_TRUE(same_bytes(model.bytes(), want.bytes()));
  });
}

// Accumulators that the caller owns, so that they can be looked at after the step.
struct OwnAccumulators {
  explicit OwnAccumulators(Model& model) {
    for (scruple_tensor& row : model.rows) {
      std::int64_t codes = 0, aux = 0;
      scruple_array& array = row.arrays[SCRUPLE_GRADIENT];
      CHECK_OK(scruple_format_bytes(array.format, row.size, &codes, &aux));
      planes.push_back(
          std::make_unique<DeviceMemory>(model.engine, static_cast<std::size_t>(codes + aux) + 64));
      array.codes = planes.back()->data();
      array.aux = planes.back()->data() + (codes + 15) / 16 * 16;
    }
  }
  std::vector<std::unique_ptr<DeviceMemory>> planes;
};

TEST(Sink, Int8AccumulatorsKeepTheirBound) {
  for_engines([](scruple_engine* engine) {
    const Config config =
        with_gradient_format(config_of("sgd", "fp32", {{"lr", 0.0}}), "int8", SCRUPLE_NEAREST);
    Model model(engine, config);
    const OwnAccumulators own(model);
    Sink sink(model, options_of(SCRUPLE_COMPRESSED, 4));
    for (int n = 0; n < 4; ++n) sink.backward(n);
    const scruple_format_info info = info_of(scruple_format_find("int8"));
    for (std::int64_t i = 0; i < model.count(); ++i) {
      model.row(i).folds = 4;
      const std::vector<float> got = model.decoded(i, SCRUPLE_GRADIENT);
      std::vector<double> mean(got.size());
      double largest = 0;  // of any group at any time
      for (int n = 0; n < 4; ++n) {
        const std::vector<float> g = Model::values(n, i, model.row(i).size);
        for (std::size_t e = 0; e < mean.size(); ++e) {
          mean[e] += 0.25 * static_cast<double>(g[e]);
          largest = std::max(largest, std::abs(mean[e]));
        }
      }
      for (std::size_t e = 0; e < mean.size(); ++e)
        ASSERT_NEAR(static_cast<double>(got[e]), mean[e], 4 * 1.05 * info.bound.group * largest)
            << i << " " << e;
    }
  });
}

// Accumulation, clipping and loss scaling together, against the plain calls.
TEST(Sink, EverythingAtOnceEqualsThePlainCalls) {
  for_engines([](scruple_engine* engine) {
    for (const int rounding : {SCRUPLE_NEAREST, SCRUPLE_STOCHASTIC, SCRUPLE_DITHER}) {
      const Config config = with_gradient_format(config_of("adamw", "scruple"), "int8", rounding);
      Model model(engine, config), plain(engine, config);
      const OwnAccumulators own(model), plain_own(plain);
      scruple_scaler scaler = scruple_scaler_dynamic();
      scaler.scale = 64;
      scaler.interval = 1;
      scruple_sink_options options = options_of(SCRUPLE_COMPRESSED, 4);
      options.max_norm = 0.01;
      options.scaler = &scaler;
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
        double norm = 0;
        CHECK_OK(scruple_norm(engine, plain.rows.data(), plain.count(), &norm, nullptr));
        const float scale = static_cast<float>(64 << (t - 1));
        const float clip = scruple_clip_factor(norm / static_cast<double>(scale), 0.01);
        scruple_step_options step = SCRUPLE_STEP_OPTIONS_INIT;
        step.multiplier = clip / scale;
        CHECK_OK(scruple_step(engine, plain.rows.data(), plain.count(), &step));
        const scruple_sink_report report = sink.read();
        EXPECT_EQ(report.norm, norm / static_cast<double>(scale));
        EXPECT_EQ(report.clip, clip);
        EXPECT_LT(report.clip, 1.0f);
        EXPECT_EQ(report.scaler.scale, 2 * scale);
        EXPECT_EQ(report.steps, t);
        EXPECT_TRUE(same_bytes(model.bytes(), plain.bytes())) << rounding << ", step " << t;
      }
    }
  });
}

// ---- Overflow ----

TEST(Sink, AnOverflowSkipsTheWholeStepAndNothingElse) {
  for_engines([](scruple_engine* engine) {
    for (const scruple_policy policy : {SCRUPLE_STORED, SCRUPLE_COMPRESSED})
      for (const char* format : {"fp32", "int8"}) {
        const Config config = with_gradient_format(config_of("adamw", "scruple"), format);
        Model model(engine, config), clean(engine, config);
        scruple_scaler scaler = scruple_scaler_dynamic();
        scruple_sink_options options = options_of(policy, 2);
        options.max_norm = 1;
        options.scaler = &scaler;
        Sink sink(model, options), steady(clean, options);
        float scale = 0;
        CHECK_OK(scruple_copy(engine, &scale, scruple_sink_loss_scale(sink), sizeof scale));
        CHECK_OK(scruple_engine_synchronize(engine));
        EXPECT_EQ(scale, 65536.0f);
        for (Sink* each : {&sink, &steady}) each->backward(1), each->backward(2);
        const Bytes before = model.bytes();
        std::vector<float> bad = Model::values(3, 4, 2500);
        bad[1234] = kInf;
        CHECK_OK(sink.add(model.whole(4, bad)));
        CHECK_OK(sink.end());
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
  });
}

TEST(Sink, AReleasedOverflowSkipsItsTensorAlone) {
  for_engines([](scruple_engine* engine) {
    for (const bool pieces : {false, true}) {
      const Config config = config_of("adamw", "scruple");
      Model model(engine, config), want(engine, config);
      scruple_scaler scaler = scruple_scaler_dynamic();
      scaler.scale = 1024;
      scruple_sink_options options = options_of(SCRUPLE_RELEASED);
      options.scaler = &scaler;
      Sink sink(model, options);
      EXPECT_EQ(scruple_sink_measures(sink), 1);
      const Bytes before = model.bytes(4, SCRUPLE_WEIGHT), moments = model.bytes(4, SCRUPLE_SLOT);
      std::vector<float> bad = Model::values(1, 4, 2500);
      bad[2499] = -kInf;
      if (pieces) {
        scruple_piece all = model.whole(4, bad), low = all, high = all;
        low.size = high.first = 2432;
        high.size = 2500 - 2432;
        high.gradient.codes = static_cast<char*>(all.gradient.codes) + 4 * 2432;
        CHECK_OK(sink.measure(low));
        CHECK_OK(sink.measure(high));
        CHECK_OK(sink.add(low));
        CHECK_OK(sink.add(high));
      } else {
        CHECK_OK(sink.add(model.whole(4, bad)));
      }
      CHECK_OK(sink.add(model.whole(0, 1)));
      CHECK_OK(sink.end());
      EXPECT_TRUE(same_bytes(model.bytes(4, SCRUPLE_WEIGHT), before));
      EXPECT_TRUE(same_bytes(model.bytes(4, SCRUPLE_SLOT), moments));
      want.row(0).arrays[SCRUPLE_GRADIENT] = want.whole(0, 1).gradient;
      scruple_step_options step = SCRUPLE_STEP_OPTIONS_INIT;
      step.multiplier = 1.0f / 1024;
      CHECK_OK(scruple_step(engine, want.rows.data(), 1, &step));
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
      want.row(4).arrays[SCRUPLE_GRADIENT] = want.whole(4, 2).gradient;
      step.multiplier = 1.0f / 512;
      CHECK_OK(scruple_step(engine, &want.row(4), 1, &step));
      EXPECT_TRUE(same_bytes(model.bytes(4, SCRUPLE_WEIGHT), want.bytes(4, SCRUPLE_WEIGHT)));
    }
  });
}

// ---- Tensors that stay out ----

TEST(Sink, ATensorWithoutGradientIsLeftAloneAndCountsNoStep) {
  for_engines([](scruple_engine* engine) {
    for (const scruple_policy policy : {SCRUPLE_STORED, SCRUPLE_RELEASED, SCRUPLE_COMPRESSED}) {
      const Config config =
          with_gradient_format(config_of("adamw", "scruple"), policy == SCRUPLE_COMPRESSED ? "int8" : "fp32",
                               policy == SCRUPLE_COMPRESSED ? SCRUPLE_DITHER : SCRUPLE_NEAREST);
      const std::vector<std::vector<std::int64_t>> present = {{0, 2, 4}, {0, 4}, {0, 2},
                                                              {2, 3},    {},     {0, 2, 3, 4}};
      Model model(engine, config), want(engine, config);
      const OwnAccumulators own(want);
      Sink sink(model, options_of(policy));
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
  });
}

// Tensors that stayed out once have counts of their own, and still share one norm, one flag and one skip.
TEST(Sink, TensorsAtDifferentStepsAreClippedAndSkippedTogether) {
  for_engines([](scruple_engine* engine) {
    const Config config = with_gradient_format(config_of("adamw", "scruple"), "int8", SCRUPLE_DITHER);
    Model model(engine, config);
    scruple_sink_options options = options_of(SCRUPLE_COMPRESSED);
    options.max_norm = 1;
    Sink sink(model, options);
    CHECK_OK(sink.add(model.whole(0, 1)));
    CHECK_OK(sink.end());
    sink.backward(2);
    double sum = 0;
    for (std::int64_t i = 0; i < model.count(); ++i)
      for (const float x : Model::values(2, i, model.row(i).size))
        sum += static_cast<double>(x) * static_cast<double>(x);
    EXPECT_NEAR(sink.read().norm, std::sqrt(sum), 0.01 * std::sqrt(sum));
    EXPECT_EQ(sink.read().clip, scruple_clip_factor(sink.read().norm, 1));
    EXPECT_EQ(sink.steps(), (std::vector<std::int64_t>{3, 1, 2, 2, 2}));
    for (const std::int64_t bad : {0, 4}) {
      const Bytes before = model.bytes();
      for (std::int64_t i = 0; i < model.count(); ++i) {
        std::vector<float> g = Model::values(3, i, model.row(i).size);
        if (i == bad) g[7] = kInf;
        CHECK_OK(sink.add(model.whole(i, g)));
      }
      CHECK_OK(sink.end());
      EXPECT_TRUE(same_bytes(model.bytes(), before)) << bad;
      EXPECT_EQ(sink.steps(), (std::vector<std::int64_t>{3, 1, 2, 2, 2}));
    }
    EXPECT_EQ(sink.read().skipped, 2);
  });
}

// ---- Clipping tensor by tensor ----

TEST(Sink, ReleasedClipsEachTensorByItsOwnNorm) {
  for_engines([](scruple_engine* engine) {
    const Config config = config_of("sgd", "fp32", {{"lr", 0.5}});
    Model model(engine, config), want(engine, config);
    scruple_sink_options options = options_of(SCRUPLE_RELEASED);
    options.tensor_norm = 2;
    Sink sink(model, options);
    sink.backward(1);
    for (std::int64_t i = 0; i < want.count(); ++i) {
      want.row(i).arrays[SCRUPLE_GRADIENT] = want.whole(i, 1).gradient;
      double norm = 0;
      CHECK_OK(scruple_norm(engine, &want.row(i), 1, &norm, nullptr));
      scruple_step_options step = SCRUPLE_STEP_OPTIONS_INIT;
      step.multiplier = scruple_clip_factor(norm, 2);
      EXPECT_EQ(step.multiplier < 1, (want.row(i).size > 100));
      CHECK_OK(scruple_step(engine, &want.row(i), 1, &step));
    }
    EXPECT_TRUE(same_bytes(model.bytes(), want.bytes()));
  });
}

TEST(Sink, AdaGcFollowsItsFormula) {
  for_engines([](scruple_engine* engine) {
    const Config config = config_of("sgd", "fp32", {{"lr", 1.0}});
    Model model(engine, config, {300, 700});
    scruple_sink_options options = options_of(SCRUPLE_RELEASED);
    options.adagc = 1.05;
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
        std::vector<float> g = Model::values(t, i, model.row(i).size);
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
      scruple_sink_options resumed = options;
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
  });
}

TEST(Sink, AnOverflowLeavesNoTraceInAdaGc) {
  for_engines([](scruple_engine* engine) {
    Model model(engine, config_of("adamw"), {300});
    scruple_sink_options options = options_of(SCRUPLE_RELEASED);
    options.adagc = 1.05;
    Sink sink(model, options);
    sink.backward(1);
    double before = 0, after = 0;
    CHECK_OK(scruple_sink_read_tensors(sink, nullptr, &before));
    const Bytes bytes = model.bytes();
    std::vector<float> bad = Model::values(2, 0, 300);
    bad[0] = kInf;
    CHECK_OK(sink.add(model.whole(0, bad)));
    CHECK_OK(sink.end());
    CHECK_OK(scruple_sink_read_tensors(sink, nullptr, &after));
    EXPECT_GT(before, 0.0);
    EXPECT_EQ(before, after);
    EXPECT_TRUE(same_bytes(model.bytes(), bytes));
  });
}

// Norms of pieces at multiples of 65,536 are the whole's, and AdaGC's state is the whole's.
TEST(Sink, MeasuredPiecesClipAsTheWhole) {
  for_engines([](scruple_engine* engine) {
    const Config config = config_of("adamw", "scruple");
    Bytes want;
    for (const bool pieces : {false, true}) {
      Model model(engine, config, {200000, 70000});
      scruple_sink_options options = options_of(SCRUPLE_RELEASED);
      options.tensor_norm = 100;
      options.adagc = 1.05;
      Sink sink(model, options);
      for (int t = 1; t <= 3; ++t) pieces ? sink.backward_in_pieces(t, 65536) : sink.backward(t);
      if (!pieces) want = model.bytes();
      EXPECT_TRUE(same_bytes(model.bytes(), want));
    }
  });
}

// ---- Accumulation in the moments ----

// Values of few bits, so that nothing is rounded: then folding into the momentum is the mean's step exactly.
TEST(Sink, MomentumAccumulationIsTheStepOfTheMean) {
  for_engines([](scruple_engine* engine) {
    for (const char* rule : {"sgd", "sgdw"}) {
      const Config config =
          config_of(rule, "fp32", {{"lr", 0.125}, {"momentum", 0.5}, {"weight_decay", 0.25}});
      Model model(engine, config, {300}), want(engine, config, {300});
      scruple_sink_options options = options_of(SCRUPLE_RELEASED, 4);
      options.accumulation = SCRUPLE_ACCUMULATE_MOMENTUM;
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
          CHECK_OK(sink.add(model.whole(0, g)));
          CHECK_OK(sink.end());
        }
        want.row(0).arrays[SCRUPLE_GRADIENT] = want.whole(0, mean).gradient;
        want.row(0).step = t;
        CHECK_OK(scruple_step(engine, want.rows.data(), 1, nullptr));
        EXPECT_TRUE(same_bytes(model.bytes(), want.bytes())) << rule << ", step " << t;
      }
      EXPECT_EQ(sink.steps()[0], 4);
      EXPECT_EQ(sink.read().steps, 3);
    }
  });
}

TEST(Sink, AdamAFollowsItsFormula) {
  for_engines([](scruple_engine* engine) {
    for (const char* rule : {"adam", "adamw"}) {
      const double decay = rule[4] == 'w' ? 0.1 : 0;
      const Config config = config_of(rule, "fp32", {{"lr", 0.01}, {"weight_decay", decay}});
      Model model(engine, config, {500});
      scruple_sink_options options = options_of(SCRUPLE_RELEASED, 4);
      options.accumulation = SCRUPLE_ACCUMULATE_ADAMA;
      Sink sink(model, options);
      const std::vector<float> start = model.decoded(0, SCRUPLE_WEIGHT);
      std::vector<double> w(start.begin(), start.end()), m(500), v(500);
      for (int t = 1; t <= 5; ++t) {
        for (std::size_t e = 0; e < 500; ++e) m[e] *= 0.9, v[e] *= 0.999;
        for (int n = 0; n < 4; ++n) {
          const std::vector<float> g = Model::values(4 * t + n, 0, 500);
          for (std::size_t e = 0; e < 500; ++e) {
            const double scaled = static_cast<double>(g[e]) / 4;
            m[e] += 0.1 * scaled;
            v[e] += 0.001 * scaled * scaled;
          }
          CHECK_OK(sink.add(model.whole(0, g)));
          CHECK_OK(sink.end());
        }
        for (std::size_t e = 0; e < 500; ++e) {
          const double corrected = v[e] / (1 - std::pow(0.999, t));
          w[e] = w[e] * (1 - 0.01 * decay) -
                 0.01 / (1 - std::pow(0.9, t)) * m[e] / (std::sqrt(corrected) + 1e-8);
        }
      }
      const std::vector<float> got_w = model.decoded(0, SCRUPLE_WEIGHT),
                               got_m = model.decoded(0, SCRUPLE_SLOT),
                               got_v = model.decoded(0, SCRUPLE_SLOT + 1);
      for (std::size_t e = 0; e < 500; ++e) {
        ASSERT_NEAR(static_cast<double>(got_m[e]), m[e], 1e-6) << rule;
        ASSERT_NEAR(static_cast<double>(got_v[e]), v[e], 1e-5 * v[e]) << rule;
        ASSERT_NEAR(static_cast<double>(got_w[e]), w[e], 1e-5) << rule;
      }
    }
  });
}

scruple_accumulation mode_of(const std::string& rule) {
  if (rule.starts_with("sgd")) return SCRUPLE_ACCUMULATE_MOMENTUM;
  return rule.starts_with("adam") ? SCRUPLE_ACCUMULATE_ADAMA : SCRUPLE_ACCUMULATE_GRADIENTS;
}

// In every recipe that keeps moments in fp32, with random rounding, whole or in pieces, for tensors that miss micro-batches too.
TEST(Sink, WeightsMoveWithTheLastMicroBatchAlone) {
  for_engines([](scruple_engine* engine) {
    for (Config config : recipe_configs(false)) {
      if (mode_of(config.rule) == SCRUPLE_ACCUMULATE_GRADIENTS) continue;
      if (info_of(config.formats.arrays[SCRUPLE_SLOT].format).code_bits != 32)
        continue;  // refused: following_test
      if (config.rule.starts_with("sgd")) config.hypers = {{"momentum", 0.9}};
      set_rounding(config, SCRUPLE_STOCHASTIC);
      config = with_gradient_format(config, "fp32");
      scruple_sink_options options = options_of(SCRUPLE_RELEASED, 3);
      options.accumulation = mode_of(config.rule);
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
  });
}

TEST(Sink, AReleasedTensorMayMissMicroBatchesButNotTheLast) {
  for_engines([](scruple_engine* engine) {
    const Config config = config_of("adamw", "fp32");
    Model model(engine, config, {300, 300});
    scruple_sink_options options = options_of(SCRUPLE_RELEASED, 2);
    options.accumulation = SCRUPLE_ACCUMULATE_ADAMA;
    Sink sink(model, options);
    sink.backward(8), sink.backward(9);
    const std::vector<float> before = model.decoded(1, SCRUPLE_SLOT);
    const Bytes weights = model.bytes(1, SCRUPLE_WEIGHT);
    CHECK_OK(sink.add(model.whole(0, 1)));
    CHECK_OK(sink.end());
    CHECK_OK(sink.add(model.whole(1, 2)));
    EXPECT_EQ(sink.end(), SCRUPLE_INVALID);
    EXPECT_NE(std::string(scruple_last_error()).find("tensor 0"), std::string::npos) << scruple_last_error();
    EXPECT_NE(std::string(scruple_last_error()).find("add zeros"), std::string::npos) << scruple_last_error();
    CHECK_OK(sink.add(model.whole(0, std::vector<float>(300))));
    CHECK_OK(sink.end());
    EXPECT_EQ(sink.steps(), (std::vector<std::int64_t>{3, 3}));
    // Tensor 1 came once, halved, and last: its moments decayed and its weight moved all the same.
    EXPECT_FALSE(same_bytes(model.bytes(1, SCRUPLE_WEIGHT), weights));
    const std::vector<float> m = model.decoded(1, SCRUPLE_SLOT), g = Model::values(2, 1, 300);
    for (std::size_t e = 0; e < m.size(); ++e) ASSERT_NEAR(m[e], 0.9f * before[e] + 0.05f * g[e], 1e-7f);
  });
}

// ---- Memory ----

struct Ledger {
  explicit Ledger(scruple_engine* on) : engine(on) {}
  scruple_memory memory() { return {this, &Ledger::alloc, &Ledger::free}; }
  static void* alloc(void* context, std::int64_t bytes) {
    auto* self = static_cast<Ledger*>(context);
    if (self->now + bytes > self->limit) return nullptr;
    auto block = std::make_unique<DeviceMemory>(self->engine, static_cast<std::size_t>(bytes));
    void* const at = block->data();
    self->blocks[at] = {std::move(block), bytes};
    self->now += bytes;
    self->peak = std::max(self->peak, self->now);
    ++self->calls;
    return at;
  }
  static void free(void* context, void* memory, std::int64_t bytes) {
    auto* self = static_cast<Ledger*>(context);
    const auto found = self->blocks.find(memory);
    ASSERT_NE(found, self->blocks.end()) << "freed twice, or never allocated";
    EXPECT_EQ(found->second.second, bytes);
    CHECK_OK(scruple_engine_synchronize(self->engine));
    self->blocks.erase(found);
    self->now -= bytes;
  }
  scruple_engine* engine;
  std::map<void*, std::pair<std::unique_ptr<DeviceMemory>, std::int64_t>> blocks;
  std::int64_t now = 0, peak = 0, calls = 0, limit = std::int64_t{1} << 40;
};

TEST(Sink, AccumulatorsLiveAsLongAsThePolicySays) {
  for_engines([](scruple_engine* engine) {
    const Config config = with_gradient_format(config_of("adamw", "scruple"), "int8", SCRUPLE_DITHER);
    std::int64_t all = 0;
    {
      Model model(engine, config);
      Ledger ledger(engine);
      scruple_sink_options options = options_of(SCRUPLE_STORED);
      options.memory = ledger.memory();
      {
        Sink sink(model, options);
        all = ledger.now;
        EXPECT_GT(all, 3633);
        sink.backward(1);
        EXPECT_EQ(ledger.now, all);
      }
      EXPECT_EQ(ledger.now, 0);
    }
    for (const int micro_batches : {1, 2}) {
      Model model(engine, config);
      Ledger ledger(engine);
      scruple_sink_options options = options_of(SCRUPLE_COMPRESSED, micro_batches);
      options.memory = ledger.memory();
      {
        Sink sink(model, options);
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
      }
      EXPECT_EQ(ledger.now, 0);
      EXPECT_TRUE(ledger.blocks.empty());
    }
    {
      Model model(engine, config);
      Ledger ledger(engine);
      scruple_sink_options options = options_of(SCRUPLE_RELEASED);
      options.memory = ledger.memory();
      Sink sink(model, options);
      sink.backward(1);
      EXPECT_EQ(ledger.calls, 0);
    }
    {  // No memory: said so, and nothing is lost.
      Model model(engine, config);
      Ledger ledger(engine);
      scruple_sink_options options = options_of(SCRUPLE_COMPRESSED);
      options.memory = ledger.memory();
      Sink sink(model, options);
      ledger.limit = 500;
      EXPECT_EQ(sink.add(model.whole(0, 1)), SCRUPLE_OUT_OF_MEMORY);
      EXPECT_NE(std::string(scruple_last_error()).find("bytes"), std::string::npos) << scruple_last_error();
      ledger.limit = 1 << 20;
      CHECK_OK(sink.add(model.whole(0, 1)));
      CHECK_OK(sink.end());
      EXPECT_EQ(sink.steps()[0], 2);
    }
  });
}

// ---- Refusals ----

void expect_refused(scruple_status got, scruple_status want, std::initializer_list<const char*> parts) {
  EXPECT_EQ(got, want) << scruple_last_error();
  for (const char* part : parts)
    EXPECT_NE(std::string(scruple_last_error()).find(part), std::string::npos)
        << part << " in: " << scruple_last_error();
}

TEST(SinkErrors, WhatAPolicyCannotDoIsRefusedWithTheWayOut) {
  const Engine engine;
  Model model(engine, config_of("adamw"));
  const auto refused = [&](const scruple_sink_options& options, std::initializer_list<const char*> parts) {
    const Sink sink(model, options);
    expect_refused(sink.status, SCRUPLE_UNSUPPORTED, parts);
    EXPECT_EQ(sink.handle, nullptr);
  };
  scruple_sink_options options = options_of(SCRUPLE_RELEASED);
  options.max_norm = 1;
  refused(options, {"released", "max_norm", "tensor_norm", "adagc", "compressed"});
  for (const scruple_policy policy : {SCRUPLE_STORED, SCRUPLE_COMPRESSED}) {
    options = options_of(policy);
    options.tensor_norm = 1;
    refused(options, {"tensor_norm", "max_norm"});
    options = options_of(policy);
    options.adagc = 1.05;
    refused(options, {"adagc", "max_norm"});
    options = options_of(policy, 2);
    options.accumulation = SCRUPLE_ACCUMULATE_ADAMA;
    refused(options, {"accumulation", "SCRUPLE_ACCUMULATE_GRADIENTS"});
  }
  refused(options_of(SCRUPLE_RELEASED, 4), {"4 micro-batches", "momentum", "adama", "compressed"});
  options = options_of(SCRUPLE_RELEASED, 4);
  options.accumulation = SCRUPLE_ACCUMULATE_MOMENTUM;
  refused(options, {"tensor 0", "momentum", "adamw", "adama", "compressed"});
  options.accumulation = SCRUPLE_ACCUMULATE_ADAMA;
  options.adagc = 1.05;
  refused(options, {"clipping", "compressed"});
  options.adagc = 0;
  const scruple_scaler scaler = scruple_scaler_dynamic();
  options.scaler = &scaler;
  refused(options, {"loss scaling", "compressed"});
}

// ---- Where others decide or hold a part ----

TEST(Sink, TakesALossScaleThatTheCallerKeeps) {
  for_engines([](scruple_engine* engine) {
    for (const scruple_policy policy : {SCRUPLE_COMPRESSED, SCRUPLE_RELEASED}) {
      scruple_scaler fixed{};
      CHECK_OK(scruple_scaler_static(64, &fixed));
      scruple_sink_options own = options_of(policy), callers = own;
      own.scaler = &fixed;
      DeviceMemory cell(engine);
      cell.reserve(sizeof(float));
      cell.write(&fixed.scale, sizeof(float), 0);
      callers.loss_scale = reinterpret_cast<const float*>(cell.data());

      Model want(engine, config_of("adamw", "scruple")), got(engine, config_of("adamw", "scruple"));
      Sink a(want, own), b(got, callers);
      EXPECT_EQ(scruple_sink_loss_scale(b), callers.loss_scale);
      const auto flag = [&] {
        float value = -1;
        CHECK_OK(scruple_copy(engine, &value, scruple_sink_found_inf(b), sizeof value));
        CHECK_OK(scruple_engine_synchronize(engine));
        return value;
      };
      for (Sink* sink : {&a, &b}) sink->backward(1);
      EXPECT_EQ(flag(), 0.0f);
      for (Sink* sink : {&a, &b}) {
        std::vector<float> bad = Model::values(2, 0, 1000);
        bad[7] = kInf;
        CHECK_OK(sink->add(sink->model.whole(0, bad)));
        CHECK_OK(sink->end());
      }
      EXPECT_EQ(flag(), 1.0f);
      for (Sink* sink : {&a, &b}) sink->backward(3);
      EXPECT_TRUE(same_bytes(want.bytes(), got.bytes())) << "policy " << policy;
    }
  });
}

// Stands for the other processes: adds a number to the sum, or fails.
struct Others {
  scruple_engine* engine;
  double squares = 0;
  int calls = 0;
  bool fails = false;

  static int add(void* context, double* sum) {
    auto& self = *static_cast<Others*>(context);
    ++self.calls;
    if (self.fails) return 1;
    double value = 0;
    CHECK_OK(scruple_copy(self.engine, &value, sum, sizeof value));
    CHECK_OK(scruple_engine_synchronize(self.engine));
    value += self.squares;
    CHECK_OK(scruple_copy(self.engine, sum, &value, sizeof value));
    CHECK_OK(scruple_engine_synchronize(self.engine));
    return 0;
  }
};

TEST(Sink, AddsTheSquaresThatOtherProcessesHold) {
  for_engines([](scruple_engine* engine) {
    Others others{engine};
    scruple_sink_options options = options_of(SCRUPLE_COMPRESSED);
    options.max_norm = 1;
    options.reduce = {&others, Others::add};
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
    expect_refused(b.end(), SCRUPLE_INVALID, {"reduce.add failed"});
    EXPECT_TRUE(same_bytes(shared.bytes(), before));
    others.fails = false;
    others.squares = 0;
    CHECK_OK(b.end());
    EXPECT_FALSE(same_bytes(shared.bytes(), before));
  });
}

// Every rule is in one of the two lists, and each that cannot says so.
TEST(SinkErrors, OptimizersThatCannotAccumulateInTheirMoments) {
  const Engine engine;
  using Hypers = std::vector<std::pair<std::string, double>>;
  const auto status = [&](const char* rule, const Hypers& hypers) {
    Model model(engine, config_of(rule, "fp32", hypers));
    scruple_sink_options options = options_of(SCRUPLE_RELEASED, 2);
    options.accumulation =
        std::string(rule).starts_with("sgd") ? SCRUPLE_ACCUMULATE_MOMENTUM : SCRUPLE_ACCUMULATE_ADAMA;
    return Sink(model, options).status;
  };
  for (int rule = 0; rule < scruple_rule_count(); ++rule) {
    const std::string name = rule_name(rule);
    if (mode_of(name) != SCRUPLE_ACCUMULATE_GRADIENTS) continue;
    expect_refused(status(name.c_str(), {}), SCRUPLE_UNSUPPORTED, {name.c_str(), "compressed"});
  }
  for (const char* rule : {"sgd", "sgdw"}) {
    CHECK_OK(status(rule, {{"momentum", 0.9}, {"weight_decay", 0.1}}));
    expect_refused(status(rule, {}), SCRUPLE_UNSUPPORTED, {"without momentum", "compressed"});
    expect_refused(status(rule, {{"momentum", 0.9}, {"nesterov", 1}}), SCRUPLE_UNSUPPORTED, {"nesterov"});
    expect_refused(status(rule, {{"momentum", 0.9}, {"dampening", 0.1}}), SCRUPLE_UNSUPPORTED, {"dampening"});
  }
  CHECK_OK(status("adam", {}));
  CHECK_OK(status("adamw", {{"weight_decay", 0.1}}));
  expect_refused(status("adam", {{"weight_decay", 0.1}}), SCRUPLE_UNSUPPORTED, {"coupled", "adamw"});
  expect_refused(status("adam", {{"amsgrad", 1}}), SCRUPLE_UNSUPPORTED, {"amsgrad"});
  expect_refused(status("adamw", {{"amsgrad", 1}}), SCRUPLE_UNSUPPORTED, {"amsgrad"});
}

TEST(SinkErrors, HyperparametersAreLookedAtAgainWhenAPartArrives) {
  const Engine engine;
  Model model(engine, config_of("sgd", "fp32", {{"momentum", 0.9}}));
  scruple_sink_options options = options_of(SCRUPLE_RELEASED, 2);
  options.accumulation = SCRUPLE_ACCUMULATE_MOMENTUM;
  Sink sink(model, options);
  model.optimizer.set("nesterov", 1);
  const Bytes before = model.bytes();
  expect_refused(sink.add(model.whole(0, 1)), SCRUPLE_UNSUPPORTED, {"nesterov"});
  EXPECT_TRUE(same_bytes(model.bytes(), before));
}

TEST(SinkErrors, Options) {
  const Engine engine;
  Model model(engine, config_of("adamw"));
  const auto refused = [&](const std::function<void(scruple_sink_options&)>& change, const char* part) {
    scruple_sink_options options = SCRUPLE_SINK_OPTIONS_INIT;
    change(options);
    expect_refused(Sink(model, options).status, SCRUPLE_INVALID, {part});
  };
  refused([](auto& o) { o.struct_size = 8; }, "SCRUPLE_SINK_OPTIONS_INIT");
  refused([](auto& o) { o.struct_size = sizeof o + 8; }, "SCRUPLE_SINK_OPTIONS_INIT");
  refused([](auto& o) { o.policy = static_cast<scruple_policy>(3); }, "policy 3");
  static const scruple_scaler kScaler = scruple_scaler_dynamic();
  refused([](auto& o) { o.scaler = &kScaler, o.loss_scale = &kScaler.scale; }, "both scaler and loss_scale");
  refused([](auto& o) { o.accumulation = static_cast<scruple_accumulation>(3); }, "accumulation 3");
  refused([](auto& o) { o.micro_batches = 0; }, "micro_batches is 0");
  refused([](auto& o) { o.micro_batches = 4097; }, "4096");
  refused([](auto& o) { o.max_norm = -1; }, "max_norm -1");
  refused([](auto& o) { o.tensor_norm = static_cast<double>(kInf); }, "tensor_norm inf");
  refused([](auto& o) { o.memory.alloc = &Ledger::alloc; }, "alloc and free");
  scruple_scaler scaler = scruple_scaler_dynamic();
  scaler.scale = 0;
  refused([&](auto& o) { o.scaler = &scaler; }, "scaler");
  const double norms[5] = {0, 0, -1, 0, 0};
  refused([&](auto& o) { o.adagc_norms = norms; }, "adagc_norms[2]");

  scruple_sink* made = nullptr;
  expect_refused(scruple_sink_create(nullptr, nullptr, 0, nullptr, &made), SCRUPLE_INVALID, {"engine"});
  expect_refused(scruple_sink_create(engine, nullptr, 1, nullptr, &made), SCRUPLE_INVALID, {"null"});
  expect_refused(scruple_sink_create(engine, nullptr, 0, nullptr, nullptr), SCRUPLE_INVALID, {"out"});
  EXPECT_EQ(made, nullptr);
  expect_refused(scruple_sink_end(nullptr), SCRUPLE_INVALID, {"sink"});
  expect_refused(scruple_sink_add(nullptr, nullptr, 0), SCRUPLE_INVALID, {"sink"});
  EXPECT_EQ(scruple_sink_loss_scale(nullptr), nullptr);
  EXPECT_EQ(scruple_sink_measures(nullptr), 0);
  scruple_sink_destroy(nullptr);
  CHECK_OK(scruple_sink_create(engine, nullptr, 0, nullptr, &made));  // no tensors, no options: legal
  CHECK_OK(scruple_sink_end(made));
  scruple_sink_destroy(made);
}

TEST(SinkErrors, Tables) {
  const Engine engine;
  Model model(engine, config_of("adamw", "scruple"));
  std::vector<scruple_tensor> rows = model.rows;
  scruple_sink* made = nullptr;
  const auto create = [&] { return scruple_sink_create(engine, rows.data(), 5, nullptr, &made); };
  rows[2].step = 0;
  expect_refused(create(), SCRUPLE_INVALID, {"tensor 2", "step"});
  rows = model.rows;
  rows[3].arrays[SCRUPLE_WEIGHT].codes = nullptr;
  expect_refused(create(), SCRUPLE_INVALID, {"tensor 3", "weight"});
  rows = model.rows;
  rows[3].arrays[SCRUPLE_WEIGHT] = rows[4].arrays[SCRUPLE_WEIGHT];
  expect_refused(create(), SCRUPLE_INVALID, {"overlap"});
  rows = model.rows;
  rows[1].arrays[SCRUPLE_GRADIENT].format = scruple_format_find("nf4");
  expect_refused(create(), SCRUPLE_UNSUPPORTED, {"tensor 1", "gradient"});
  EXPECT_EQ(made, nullptr);
}

TEST(SinkErrors, PiecesThatAreWrongChangeNothing) {
  const Engine engine;
  for (const scruple_policy policy : {SCRUPLE_STORED, SCRUPLE_RELEASED, SCRUPLE_COMPRESSED}) {
    const Config config = config_of("adamw", "scruple");
    Model model(engine, config), want(engine, config);
    Sink sink(model, options_of(policy)), steady(want, options_of(policy));
    const scruple_piece all = model.whole(4, 1);
    const auto piece = [&](std::int64_t first, std::int64_t size) {
      scruple_piece part = all;
      part.first = first;
      part.size = size;
      part.gradient.codes = static_cast<char*>(all.gradient.codes) + 4 * first;
      return part;
    };
    scruple_piece bad = all;
    bad.tensor = 5;
    expect_refused(sink.add(bad), SCRUPLE_INVALID, {"tensor 5", "5 tensors"});
    bad.tensor = -1;
    expect_refused(sink.add(bad), SCRUPLE_INVALID, {"tensor -1"});
    expect_refused(sink.add(piece(64, 128)), SCRUPLE_INVALID, {"tensor 4", "multiple of 128"});
    expect_refused(sink.add(piece(128, 100)), SCRUPLE_INVALID, {"tensor 4", "multiple of 128"});
    expect_refused(sink.add(piece(2432, 128)), SCRUPLE_INVALID, {"tensor 4", "2500"});
    bad = all;
    bad.gradient.format = nullptr;
    expect_refused(sink.add(bad), SCRUPLE_INVALID, {"tensor 4", "format"});
    bad = all;
    bad.gradient.codes = nullptr;
    expect_refused(sink.add(bad), SCRUPLE_INVALID, {"tensor 4", "null"});
    bad = all;
    bad.gradient = {scruple_format_find("int8"), all.gradient.codes, all.gradient.codes, SCRUPLE_DITHER, 0};
    expect_refused(sink.add(bad), SCRUPLE_UNSUPPORTED, {"tensor 4", "dither"});
    expect_refused(scruple_sink_add(sink, nullptr, 1), SCRUPLE_INVALID, {"pieces"});
    expect_refused(sink.measure(all), SCRUPLE_INVALID, {"scruple_sink_measures"});

    const scruple_piece twice[] = {piece(0, 256), piece(128, 256)};
    expect_refused(scruple_sink_add(sink, twice, 2), SCRUPLE_INVALID, {"tensor 4", "already", "128"});
    CHECK_OK(sink.add(piece(256, 512)));  // nothing of the refused call was taken
    expect_refused(sink.add(piece(640, 128)), SCRUPLE_INVALID, {"already"});
    expect_refused(sink.add(all), SCRUPLE_INVALID, {"already"});
    expect_refused(sink.end(), SCRUPLE_INVALID, {"tensor 4", "512", "2500", "add the rest"});
    CHECK_OK(sink.add(piece(0, 256)));
    CHECK_OK(sink.add(piece(768, 2500 - 768)));
    CHECK_OK(sink.end());
    CHECK_OK(steady.add(want.whole(4, 1)));
    CHECK_OK(steady.end());
    EXPECT_TRUE(same_bytes(model.bytes(), want.bytes())) << policy;
    EXPECT_EQ(sink.steps(), steady.steps());
  }
}

TEST(SinkErrors, AnEndThatFailsCanBeTakenAgain) {
  const Engine engine;
  const Config config =
      with_gradient_format(config_of("sgd", "fp32", {{"momentum", 0.9}}), "int8", SCRUPLE_DITHER);
  Model model(engine, config), want(engine, config);
  Sink sink(model, options_of(SCRUPLE_STORED, 2)), steady(want, options_of(SCRUPLE_STORED, 2));
  for (Sink* each : {&sink, &steady}) {
    each->backward(1);
    for (std::int64_t i = 0; i < 5; ++i) CHECK_OK(each->add(each->model.whole(i, 2)));
  }
  model.optimizer.set("dampening", 0.5);
  model.optimizer.set("nesterov", 1);  // these contradict each other
  const Bytes before = model.bytes();
  expect_refused(sink.end(), SCRUPLE_INVALID, {"nesterov"});
  EXPECT_TRUE(same_bytes(model.bytes(), before));
  model.optimizer.set("dampening", 0);
  model.optimizer.set("nesterov", 0);
  CHECK_OK(sink.end());
  CHECK_OK(steady.end());
  EXPECT_TRUE(same_bytes(model.bytes(), want.bytes()));
}

TEST(SinkErrors, MeasuringInPieces) {
  const Engine engine;
  Model model(engine, config_of("adamw"));
  scruple_sink_options options = options_of(SCRUPLE_RELEASED);
  options.tensor_norm = 1;
  Sink sink(model, options);
  const scruple_piece all = model.whole(4, 1);
  scruple_piece low = all, high = all;
  low.size = high.first = 1280;
  high.size = 2500 - 1280;
  high.gradient.codes = static_cast<char*>(all.gradient.codes) + 4 * 1280;
  const Bytes before = model.bytes();
  expect_refused(sink.add(low), SCRUPLE_INVALID, {"tensor 4", "scruple_sink_measure"});
  expect_refused(sink.measure(high), SCRUPLE_INVALID, {"tensor 4", "in order"});
  CHECK_OK(sink.measure(low));
  expect_refused(sink.measure(low), SCRUPLE_INVALID, {"tensor 4", "once"});
  expect_refused(sink.add(low), SCRUPLE_INVALID, {"1280"});
  expect_refused(sink.add(all), SCRUPLE_INVALID, {"1280"});
  expect_refused(sink.end(), SCRUPLE_INVALID, {"tensor 4", "1280 were measured"});
  CHECK_OK(sink.measure(high));
  EXPECT_TRUE(same_bytes(model.bytes(), before));
  CHECK_OK(sink.add(high));
  expect_refused(sink.measure(low), SCRUPLE_INVALID, {"have been added"});
  CHECK_OK(sink.add(low));
  CHECK_OK(sink.end());
  EXPECT_FALSE(same_bytes(model.bytes(), before));
}

TEST(Measure, AddsUpPiecesAndRemembersForAdaGc) {
  for_engines([](scruple_engine* engine) {
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
      expect_refused(scruple_measure(engine, &high, 1, &options), SCRUPLE_INVALID, {"adagc", "gamma"});
    }
  });
}

TEST(StepParts, AreCheckedByThePlainStepToo) {
  const Engine engine;
  Model model(engine, config_of("lion"));
  for (scruple_tensor& row : model.rows)
    row.arrays[SCRUPLE_GRADIENT] = model.whole(&row - model.rows.data(), 1).gradient;
  scruple_step_options step = SCRUPLE_STEP_OPTIONS_INIT;
  step.parts = 2;
  expect_refused(scruple_step(engine, model.rows.data(), 5, &step), SCRUPLE_UNSUPPORTED, {"lion", "parts"});
  for (const auto& [part, parts] : {std::pair{2, 2}, {-1, 2}, {0, 0}, {0, -1}}) {
    step.part = part;
    step.parts = parts;
    expect_refused(scruple_step(engine, model.rows.data(), 5, &step), SCRUPLE_INVALID, {"part "});
  }
}

// ---- C++ ----

TEST(Sink, FromCpp) {
  scruple::Engine engine("cpu", 1);
  scruple::Optimizer adamw("adamw");
  std::vector<scruple::Tensor> tensors;
  tensors.emplace_back(engine, adamw, 1000, "scruple", 1);
  tensors[0].raw().arrays[SCRUPLE_GRADIENT] = {scruple::format_named("int8"), nullptr, nullptr,
                                               SCRUPLE_DITHER, 0};
  scruple_sink_options options = SCRUPLE_SINK_OPTIONS_INIT;
  options.policy = SCRUPLE_COMPRESSED;
  options.max_norm = 1;
  scruple::Sink sink(engine, tensors, options);
  const std::vector<float> g(1000, 0.5f);
  sink.add(0, 0, 512, g.data(), "fp32");
  EXPECT_THROW(sink.end(), scruple::Error);
  sink.add(0, 512, 488, g.data() + 512, "fp32");
  sink.end();
  EXPECT_FALSE(sink.measures());
  EXPECT_EQ(*sink.loss_scale(), 1.0f);
  EXPECT_EQ(sink.read().steps, 1);
  EXPECT_NEAR(sink.read().norm, 0.5 * std::sqrt(1000.0), 0.1);
  std::vector<float> w(1000);
  tensors[0].weights(w.data());
  for (const float x : w)
    ASSERT_NEAR(x, -1e-3f, 2e-5f);  // 1 % for the noise of second moments (formats/log.h)
}

}  // namespace
}  // namespace scruple_tests
