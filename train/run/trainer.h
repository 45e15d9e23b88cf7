// One training run of a GPT: the model, its state, the sink that takes its gradients, the learning rate over
// time.
#pragma once

#include <cstdint>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <optional>
#include <vector>

#include "include/scruple/scruple.hpp"
#include "io/checkpoint.h"
#include "train/model/families/gpt2.h"
#include "train/pass/backend.h"
#include "train/run/average.h"
#include "train/run/batches.h"
#include "train/run/groups.h"
#include "train/run/outliers.h"
#include "train/run/schedule.h"
#include "train/run/state.h"
#include "train/text/data.h"

namespace scruple::train {

struct Job : Setup {
  Job() { shape = gpt2({}); }

  OpenBackend backend = cpu_backend;
  int threads = 0;
  bool isolates = false;  // documents of a window do not see each other
  std::function<Optimizer()> optimizer;
  Describe describe;
  Schedule schedule;
  std::vector<Override> overrides;  // of the schedule, and of the optimizer's weight decay
  double skip_outliers = 0;     // deviations above the running mean of losses or norms; 0: none is skipped
  bool offloads_state = false;  // a GPU's moments and extra bits wait in host memory; the bits are the same
  double ema = 0;               // the decay of an average of the weights; 0: none
  std::uint64_t seed = 1;
  Fill initial;  // the weights to begin with; none: drawn from the seed
  // The gradient policy; `memory` and `scaler` are filled in here.
  scruple_sink_options gradients = SCRUPLE_SINK_OPTIONS_INIT;
  scruple_scaler scaler = {};  // scale 0: none
};

// What a trainer of this job takes at its peaks, counted without taking it.
Ledger memory_of(const Job& job);
// How many windows a validation takes: as many as asked for, but no token twice.
std::int64_t validated_windows(std::int64_t asked, const Windows& data);

// Where a run stands, beside its planes: what a checkpoint keeps of it.
struct Position {
  std::vector<std::int64_t> steps;  // of each parameter: the step about to be taken
  std::vector<double> adagc_norms;  // of each parameter; 0: none
  scruple_scaler scaler = {};       // scale 0: none
};

struct Outcome {
  double loss, lr;
  double norm;  // of the gradient; NaN where the policy does not know it
  float loss_scale;
  bool skipped;              // released: whether a tensor was left as it was
  bool outlier = false;      // why it was skipped
  std::int64_t tensors = 0;  // released: how many were left as they were
  double time = 0;           // when it was taken, in seconds since 1970; 0: not known
  double epoch = std::numeric_limits<double>::quiet_NaN();  // after it; NaN: windows are drawn by chance
  // In its windows, each up to the last target that counts: padding is none. 0: all of the windows lie in prompts, and nothing
  // was to be learned; the loss is NaN.
  std::int64_t tokens = 0;
};

class Trainer {
 public:
  // `from`: goes on where the trainer that saved it stood, to the bit. Throws where the job is another one.
  Trainer(const Job& job, Ledger& ledger, const io::Checkpoint* from = nullptr);
  ~Trainer();
  // `goes_on`: the next step will be of the same data. Then its first batch is prepared while the device is still at
  // work; position() is that of the steps taken.
  Outcome step(const Windows& data, bool goes_on = false);
  // The mean loss over the targets of validated_windows(windows, data) windows, which are spread evenly over
  // the data. `go_on` is asked before each batch; NaN where it says no.
  double validate(
      const Windows& data, std::int64_t windows, const GoOn& go_on = [](auto, auto) { return true; });
  std::int64_t steps_taken() const { return taken_; }
  // Whether the state is that after steps_taken() steps, though an exception ended the next: it had moved nothing yet.
  bool is_whole() const { return whole_; }
  Position position() const;  // between steps
  State& state() { return *state_; }
  Engine& engine() { return backend_->engine(); }
  Memory& memory() { return backend_->memory(); }  // where the state's planes are
  // nullptr: none are made. Of planes in host memory they would take as much of it again.
  Copies* copies() { return job_.offloads_state ? nullptr : backend_->copies(); }
  const Backend& backend() const { return *backend_; }
  Ledger& ledger() const { return accumulators_.ledger; }
  const Groups& groups() const { return groups_; }
  const Outliers* outliers() const { return outliers_ ? &*outliers_ : nullptr; }
  const Average* average() const { return average_ ? &*average_ : nullptr; }

 private:
  // Counts the sink's accumulators.
  struct Accumulators {
    scruple_memory memory();
    Ledger& ledger;
    Memory& from;
    std::map<void*, Block> blocks;
  };
  Position take_up(const io::Checkpoint& from);
  Counted read_part(const Windows& data, std::int64_t step, std::int64_t part);
  void prepare(const Windows& data, std::int64_t step);
  Outcome taken(Outcome outcome, const Windows& data);
  double weight_of(std::int64_t targets, std::int64_t all) const;
  void set_guard(const io::Checkpoint* from);
  void look_at_guard(Outcome& outcome);
  void take_up_average(const io::Checkpoint& from, const std::vector<io::Group>& groups);
  Job job_;
  std::unique_ptr<Backend> backend_;
  Groups groups_;
  std::unique_ptr<State> state_;
  std::optional<Average> average_;
  std::optional<Outliers> outliers_;
  Block guard_;  // in the backend's memory; none where nothing is judged
  std::unique_ptr<Network> network_;
  Accumulators accumulators_;
  std::unique_ptr<Sink> sink_;  // gives its memory back to accumulators_
  std::optional<Batches> batches_;
  // What a step begins with: its first micro-batch, which lies in batches_ and with the network.
  struct Prepared {
    const Windows* data;
    std::int64_t step, all;  // steps before it; targets of all its micro-batches
    Counted first;
  };
  std::optional<Prepared> prepared_;
  std::int64_t taken_ = 0, tensors_skipped_ = 0;
  float loss_scale_ = 1;  // of the next step
  bool whole_ = true;
};

}  // namespace scruple::train
