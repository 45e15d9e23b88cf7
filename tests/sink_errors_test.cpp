// What a sink refuses, with the way out, and that nothing has changed then; and the sink of scruple.hpp.
#include <functional>
#include <scruple/scruple.hpp>

#include "tests/sink.h"

namespace scruple_tests {
namespace {

TEST(SinkErrors, WhatAPolicyCannotDoIsRefusedWithTheWayOut) {
  const Engine engine;
  Model model(engine, config_of("adamw"));
  const auto refused = [&](const SinkOptions& options, const std::vector<std::string>& parts) {
    const Sink sink(model, options);
    expect_refused(sink.status, SCRUPLE_UNSUPPORTED, parts);
    EXPECT_EQ(sink.handle, nullptr);
  };
  SinkOptions options{.policy = SCRUPLE_RELEASED, .max_norm = 1};
  refused(options, {"released", "max_norm", "tensor_norm", "adagc", "compressed"});
  for (const scruple_policy policy : {SCRUPLE_STORED, SCRUPLE_COMPRESSED}) {
    options = {.policy = policy, .tensor_norm = 1};
    refused(options, {"tensor_norm", "max_norm"});
    options = {.policy = policy, .adagc = 1.05};
    refused(options, {"adagc", "max_norm"});
    options = {.policy = policy, .micro_batches = 2, .accumulation = SCRUPLE_ACCUMULATE_ADAMA};
    refused(options, {"accumulation", "SCRUPLE_ACCUMULATE_GRADIENTS"});
  }
  refused(SinkOptions{.policy = SCRUPLE_RELEASED, .micro_batches = 4},
          {"4 micro-batches", "momentum", "adama", "compressed"});
  options = {.policy = SCRUPLE_RELEASED, .micro_batches = 4, .accumulation = SCRUPLE_ACCUMULATE_MOMENTUM};
  refused(options, {"tensor 0", "momentum", "adamw", "adama", "compressed"});
  options.accumulation = SCRUPLE_ACCUMULATE_ADAMA;
  options.adagc = 1.05;
  refused(options, {"clipping", "compressed"});
  options.adagc = 0;
  const scruple_scaler scaler = scruple_scaler_dynamic();
  options.scaler = &scaler;
  refused(options, {"loss scaling", "compressed"});
  const float skip = 0;
  for (const scruple_policy policy : {SCRUPLE_STORED, SCRUPLE_COMPRESSED})
    refused(SinkOptions{.policy = policy, .skip = &skip}, {"skip", "released"});
}

TEST(SinkErrors, OptimizersThatCannotAccumulateInTheirMoments) {
  const Engine engine;
  const auto status = [&](const std::string& rule, const Hypers& hypers) {
    Model model(engine, config_of(rule, "fp32", hypers));
    SinkOptions options{
        .policy = SCRUPLE_RELEASED,
        .micro_batches = 2,
        .accumulation = rule.starts_with("sgd") ? SCRUPLE_ACCUMULATE_MOMENTUM : SCRUPLE_ACCUMULATE_ADAMA};
    return Sink(model, options).status;
  };
  for (const Rule& rule : rules())
    if (mode_of(rule.name) == SCRUPLE_ACCUMULATE_GRADIENTS)
      EXPECT_UNSUPPORTED(status(rule.name, {}), rule.name, "compressed");
  for (const char* rule : {"sgd", "sgdw"}) {
    CHECK_OK(status(rule, {{"momentum", 0.9}, {"weight_decay", 0.1}}));
    EXPECT_UNSUPPORTED(status(rule, {}), "without momentum", "compressed");
    EXPECT_UNSUPPORTED(status(rule, {{"momentum", 0.9}, {"nesterov", 1}}), "nesterov");
    EXPECT_UNSUPPORTED(status(rule, {{"momentum", 0.9}, {"dampening", 0.1}}), "dampening");
  }
  CHECK_OK(status("adam", {}));
  CHECK_OK(status("adamw", {{"weight_decay", 0.1}}));
  EXPECT_UNSUPPORTED(status("adam", {{"weight_decay", 0.1}}), "coupled", "adamw");
  EXPECT_UNSUPPORTED(status("adam", {{"amsgrad", 1}}), "amsgrad");
  EXPECT_UNSUPPORTED(status("adamw", {{"amsgrad", 1}}), "amsgrad");
}

TEST(SinkErrors, HyperparametersAreLookedAtAgainWhenAPartArrives) {
  const Engine engine;
  Model model(engine, config_of("sgd", "fp32", {{"momentum", 0.9}}));
  SinkOptions options{
      .policy = SCRUPLE_RELEASED, .micro_batches = 2, .accumulation = SCRUPLE_ACCUMULATE_MOMENTUM};
  Sink sink(model, options);
  model.optimizer().set("nesterov", 1);
  const Bytes before = model.bytes();
  EXPECT_UNSUPPORTED(sink.add(model.whole(0, 1)), "nesterov");
  EXPECT_TRUE(same_bytes(model.bytes(), before));
}

TEST(SinkErrors, Options) {
  const Engine engine;
  Model model(engine, config_of("adamw"));
  const auto refused = [&](const std::function<void(scruple_sink_options&)>& change, const char* part) {
    scruple_sink_options options = SCRUPLE_SINK_OPTIONS_INIT;
    change(options);
    EXPECT_INVALID(Sink(model, options).status, part);
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
  EXPECT_INVALID(scruple_sink_create(nullptr, nullptr, 0, nullptr, &made), "engine");
  EXPECT_INVALID(scruple_sink_create(engine, nullptr, 1, nullptr, &made), "null");
  EXPECT_INVALID(scruple_sink_create(engine, nullptr, 0, nullptr, nullptr), "out");
  EXPECT_EQ(made, nullptr);
  EXPECT_INVALID(scruple_sink_end(nullptr), "sink");
  EXPECT_INVALID(scruple_sink_add(nullptr, nullptr, 0), "sink");
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
  EXPECT_INVALID(create(), "tensor 2", "step");
  rows = model.rows;
  rows[3].arrays[SCRUPLE_WEIGHT].codes = nullptr;
  EXPECT_INVALID(create(), "tensor 3", "weight");
  rows = model.rows;
  rows[3].arrays[SCRUPLE_WEIGHT] = rows[4].arrays[SCRUPLE_WEIGHT];
  EXPECT_INVALID(create(), "overlap");
  rows = model.rows;
  rows[1].arrays[SCRUPLE_GRADIENT].format = scruple_format_find("nf4");
  EXPECT_UNSUPPORTED(create(), "tensor 1", "gradient");
  EXPECT_EQ(made, nullptr);
}

TEST(SinkErrors, PiecesThatAreWrongChangeNothing) {
  const Engine engine;
  for (const scruple_policy policy : kPolicies) {
    const Config config = config_of("adamw", "scruple");
    Model model(engine, config), want(engine, config);
    Sink sink(model, SinkOptions{.policy = policy}), steady(want, SinkOptions{.policy = policy});
    const scruple_piece all = model.whole(4, 1);
    const auto piece = [&](std::int64_t first, std::int64_t size) {
      return Model::part_of(all, first, size);
    };
    scruple_piece bad = all;
    bad.tensor = 5;
    EXPECT_INVALID(sink.add(bad), "tensor 5", "5 tensors");
    bad.tensor = -1;
    EXPECT_INVALID(sink.add(bad), "tensor -1");
    EXPECT_INVALID(sink.add(piece(64, 128)), "tensor 4", "multiple of 128");
    EXPECT_INVALID(sink.add(piece(128, 100)), "tensor 4", "multiple of 128");
    EXPECT_INVALID(sink.add(piece(2432, 128)), "tensor 4", "2500");
    bad = all;
    bad.gradient.format = nullptr;
    EXPECT_INVALID(sink.add(bad), "tensor 4", "format");
    bad = all;
    bad.gradient.codes = nullptr;
    EXPECT_INVALID(sink.add(bad), "tensor 4", "null");
    bad = all;
    bad.gradient = {scruple_format_find("int8"), all.gradient.codes, all.gradient.codes, SCRUPLE_DITHER, 0};
    EXPECT_UNSUPPORTED(sink.add(bad), "tensor 4", "dither");
    EXPECT_INVALID(scruple_sink_add(sink, nullptr, 1), "pieces");
    EXPECT_INVALID(sink.measure(all), "scruple_sink_measures");

    const scruple_piece twice[] = {piece(0, 256), piece(128, 256)};
    EXPECT_INVALID(scruple_sink_add(sink, twice, 2), "tensor 4", "already", "128");
    CHECK_OK(sink.add(piece(256, 512)));  // nothing of the refused call was taken
    EXPECT_INVALID(sink.add(piece(640, 128)), "already");
    EXPECT_INVALID(sink.add(all), "already");
    EXPECT_INVALID(sink.end(), "tensor 4", "512", "2500", "add the rest");
    CHECK_OK(sink.add(piece(0, 256)));
    CHECK_OK(sink.add(piece(768, 2500 - 768)));
    CHECK_OK(sink.end());
    steady.backward_of(4, steady.model.values(1, 4));
    EXPECT_TRUE(same_bytes(model.bytes(), want.bytes())) << policy;
    EXPECT_EQ(sink.steps(), steady.steps());
  }
}

TEST(SinkErrors, AnEndThatFailsCanBeTakenAgain) {
  const Engine engine;
  const Config config =
      with_gradient(config_of("sgd", "fp32", {{"momentum", 0.9}}), {"int8", SCRUPLE_DITHER});
  Model model(engine, config), want(engine, config);
  Sink sink(model, SinkOptions{.policy = SCRUPLE_STORED, .micro_batches = 2}),
      steady(want, SinkOptions{.policy = SCRUPLE_STORED, .micro_batches = 2});
  for (Sink* each : {&sink, &steady}) {
    each->backward(1);
    for (std::int64_t i = 0; i < 5; ++i) CHECK_OK(each->add(each->model.whole(i, 2)));
  }
  model.optimizer().set("dampening", 0.5);
  model.optimizer().set("nesterov", 1);  // these contradict each other
  const Bytes before = model.bytes();
  EXPECT_INVALID(sink.end(), "nesterov");
  EXPECT_TRUE(same_bytes(model.bytes(), before));
  model.optimizer().set("dampening", 0);
  model.optimizer().set("nesterov", 0);
  CHECK_OK(sink.end());
  CHECK_OK(steady.end());
  EXPECT_TRUE(same_bytes(model.bytes(), want.bytes()));
}

TEST(SinkErrors, MeasuringInPieces) {
  const Engine engine;
  Model model(engine, config_of("adamw"));
  SinkOptions options{.policy = SCRUPLE_RELEASED, .tensor_norm = 1};
  Sink sink(model, options);
  const scruple_piece all = model.whole(4, 1), low = Model::part_of(all, 0, 1280),
                      high = Model::part_of(all, 1280, 2500 - 1280);
  const Bytes before = model.bytes();
  EXPECT_INVALID(sink.add(low), "tensor 4", "scruple_sink_measure");
  EXPECT_INVALID(sink.measure(high), "tensor 4", "in order");
  CHECK_OK(sink.measure(low));
  EXPECT_INVALID(sink.measure(low), "tensor 4", "once");
  EXPECT_INVALID(sink.add(low), "1280");
  EXPECT_INVALID(sink.add(all), "1280");
  EXPECT_INVALID(sink.end(), "tensor 4", "1280 were measured");
  CHECK_OK(sink.measure(high));
  EXPECT_TRUE(same_bytes(model.bytes(), before));
  CHECK_OK(sink.add(high));
  EXPECT_INVALID(sink.measure(low), "have been added");
  CHECK_OK(sink.add(low));
  CHECK_OK(sink.end());
  EXPECT_FALSE(same_bytes(model.bytes(), before));
}

TEST(SinkErrors, APieceHasAGradientWhereverItIsShown) {
  const Engine engine;
  Model model(engine, config_of("adamw"));
  const float cell = 0;
  for (const double tensor_norm : {0.0, 1.0}) {
    Sink sink(model, SinkOptions{.policy = SCRUPLE_RELEASED, .tensor_norm = tensor_norm, .skip = &cell});
    scruple_piece none = model.whole(4, 1);
    none.gradient = {};
    EXPECT_INVALID(sink.add(none), "tensor 4", "gradient");
    EXPECT_INVALID(sink.measure(none), "tensor 4", "gradient");
    none.tensor = 99;
    EXPECT_INVALID(sink.measure(none), "tensor 99");
  }
}

TEST(StepParts, AreCheckedByThePlainStepToo) {
  const Engine engine;
  Model model(engine, config_of("lion"));
  for (scruple_tensor& row : model.rows)
    row.arrays[SCRUPLE_GRADIENT] = model.whole(&row - model.rows.data(), 1).gradient;
  scruple_step_options step = SCRUPLE_STEP_OPTIONS_INIT;
  step.parts = 2;
  EXPECT_UNSUPPORTED(scruple_step(engine, model.rows.data(), 5, &step), "lion", "parts");
  for (const auto& [part, parts] : {std::pair{2, 2}, {-1, 2}, {0, 0}, {0, -1}}) {
    step.part = part;
    step.parts = parts;
    EXPECT_INVALID(scruple_step(engine, model.rows.data(), 5, &step), "part ");
  }
}

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
