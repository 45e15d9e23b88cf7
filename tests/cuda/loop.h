// A training loop that the host does not watch: measure, step, advance, from an engine's memory alone.
#pragma once

#include "tests/cuda/pair.h"

namespace scruple_tests {

// Everything that a loop keeps beside its tensors; no padding, so that memcmp compares it.
struct State {
  scruple_scaler scaler = {256.0f, 2.0f, 0.5f, 3, 0};
  float found_inf = -1, clip = -1, unused = 0;
  double norm = -1, lr = 0;
  std::int64_t steps = 0;
};
static_assert(sizeof(State) == 56);
inline bool same_state(const State& a, const State& b) { return std::memcmp(&a, &b, sizeof a) == 0; }

inline constexpr double kMaxNorm = 2.0;

// What one step queues once the gradients are there. `state` lies in the engine's memory.
inline void queue_step(scruple_engine* engine, const std::vector<scruple_tensor>& rows, State* state) {
  scruple_measure_options measure = SCRUPLE_MEASURE_OPTIONS_INIT;
  measure.max_norm = kMaxNorm;
  measure.loss_scale = &state->scaler.scale;
  measure.steps = &state->steps;
  measure.norm = &state->norm;
  measure.found_inf = &state->found_inf;
  measure.clip = &state->clip;
  CHECK_OK(scruple_measure(engine, rows.data(), length(rows), &measure));
  CHECK_OK(try_step(engine, rows,
                    {.found_inf = &state->found_inf,
                     .clip = &state->clip,
                     .loss_scale = &state->scaler.scale,
                     .steps = &state->steps}));
  CHECK_OK(scruple_advance(engine, &state->found_inf, &state->scaler, &state->steps));
}

// Steps whose gradients hold an infinity or a NaN.
inline bool is_bad(int t) { return t == 4 || t == 5 || t == 13 || t == 20; }

inline void spoil(DeviceGradients& gradients, int steps) {
  for (int t = 1; t <= steps; ++t)
    if (is_bad(t)) gradients.host(static_cast<std::size_t>(t), 2)[t * 11] = t == 5 ? kNaN : kInf;
  gradients.upload();
}

// The loop on the reference engine, whose memory can be watched: what a skipped step leaves alone.
inline void reference_loop(Pair& pair, DeviceGradients& gradients, int steps, State& state) {
  int skipped = 0;
  for (int t = 1; t <= steps; ++t) {
    pair.fold(t, gradients, On::kHost, &state.steps);
    std::vector<Bytes> before;
    for (const Tensor& tensor : pair.tensors) before.push_back(all_planes(tensor));
    const std::int64_t taken = state.steps;
    queue_step(pair.engine, pair.rows, &state);
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

// A config's pair and the state of its loop, on the host and in the memory of the engine under test.
struct Loop {
  Loop(Lab& lab, const Config& config, const Shape& shape)
      : name(config.name), pair(lab, config, shape), there(lab.device, here) {
    here.lr = 0.01;
    there.set(here);
    CHECK_OK(scruple_optimizer_read_lr(*pair.optimizers[0], &here.lr));
    CHECK_OK(scruple_optimizer_read_lr(*pair.device_optimizers[0], &there.at()->lr));
  }
  void queue(int set, DeviceGradients& gradients) {
    pair.fold(set, gradients, On::kDevice, &there.at()->steps);
    queue_step(pair.device, pair.twin->rows, there.at());
  }
  // What the device has computed is what the reference computes.
  void expect_same(DeviceGradients& gradients, int steps) {
    reference_loop(pair, gradients, steps, here);
    if (testing::Test::HasFatalFailure()) return;
    ASSERT_EQ(pair.difference(), "") << name;
    const State back = there.get();
    ASSERT_TRUE(same_state(here, back))
        << name << ": scale " << back.scaler.scale << " (want " << here.scaler.scale << "), clean "
        << back.scaler.clean << " (" << here.scaler.clean << "), steps " << back.steps << " (" << here.steps
        << "), norm " << back.norm << " (" << here.norm << "), clip " << back.clip << " (" << here.clip
        << ")";
    EXPECT_NE(here.scaler.scale, State().scaler.scale) << "the scaler was exercised";
  }

  std::string name;
  Pair pair;
  State here;
  DeviceCell<State> there;
};

inline std::vector<Config> loop_configs() {
  std::vector<Config> configs;
  std::size_t turn = 0;
  for (const Config& config : recipe_configs())
    configs.push_back(with_gradient(config, kGradientKinds[turn++ % 3]));
  for (const char* recipe : {"fp32", "lpmm"}) configs.push_back(busy_config("sgd", recipe));
  for (const int rounding : {SCRUPLE_NEAREST, SCRUPLE_STOCHASTIC, SCRUPLE_DITHER})
    configs.push_back(with_gradient(busy_config("adamw", "scruple"), {"int8", rounding}));
  return configs;
}

}  // namespace scruple_tests
