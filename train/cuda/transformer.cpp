#include "train/cuda/transformer.h"

#include <algorithm>
#include <map>
#include <optional>
#include <utility>

#include "train/cuda/guard.h"
#include "train/cuda/operations.h"

namespace scruple::train::cuda {
namespace {

constexpr Index kLosses = 1024;  // that the host may not have taken yet
constexpr Index kAtOnce = 512;   // tokens that are fed together, at most

}  // namespace

// ---- Training ----

struct Transformer::State {
  State(const Setup& setup, Visible weights, bool released, const StreamEngine& engine,
        const Stream& on_stream, Copies& copies, Memory& memory, Ledger& ledger)
      : model(setup.shape),
        rows(setup.batch * model.context),
        records(setup.graphs && !setup.offloads),  // copies beside the layers are no part of a recording
        stream(on_stream),
        inputs(model, rows, stream, memory, ledger),
        recording(stream, released ? &copies : nullptr),
        outbox(parameters_of(model), setup.activations, released, recording, memory, ledger),
        on(setup, rows, weights, &inputs, &outbox, engine, stream, memory, ledger),
        pass(on, on.places(), setup.recompute),
        loss_sum(ledger, "activations", Index{sizeof(double)}, memory) {
    if (!ledger.only_counts()) host_sums = pinned<double>(kLosses);
  }
  ~State() {
    if (host_sums != nullptr) cudaStreamSynchronize(stream);
  }

  void run(Sink& sink);
  void run_recorded(Visible weights, Sink& sink);
  void record(Sink& sink);
  void sum_losses();
  void send_loss();
  void take_losses();

  const Description model;
  const Index rows;
  const bool records;
  const Stream& stream;
  Inputs inputs;
  Recording recording;
  Outbox outbox;
  Operations on;
  Pass<Operations> pass;
  Block loss_sum;
  Guard* guard = nullptr;
  // What the last successful pass of a shape was made with. A recording holds these pointers as kernel arguments, so it
  // can be replayed only while they are the same.
  struct RecordedWith {
    const scruple_tensor* weights = nullptr;
    const void* first_weight = nullptr;
    const float* loss_scale = nullptr;
    bool measures = false;
    const std::int32_t* documents = nullptr;
    const Guard* guard = nullptr;
    bool operator==(const RecordedWith&) const = default;
  };
  std::map<Index, RecordedWith> last;  // by rows of the head
  std::vector<Index> counted;          // targets, of the losses that the host has not taken yet
  std::optional<Index> prepared;       // the targets of the batch that is on its way for the next train()
  Pinned<double> host_sums;            // of these: each is copied there as soon as it is computed
  std::vector<double> taken;
};

// All but the gradients of the tables.
void Transformer::State::run(Sink& sink) {
  pass.forward();
  on.head(sink.loss_scale());
  sum_losses();
  if (guard != nullptr) judge_loss(guard, loss_sum.as<double>(), inputs.share(), stream);
  pass.backward();
  outbox.close();
}

// The first pass of a shape runs as it is: algorithms are chosen then, and missing memory is taken. The second is recorded
// as CUDA graphs, and later ones replay it.
void Transformer::State::run_recorded(Visible weights, Sink& sink) {
  const RecordedWith now = {weights.data(),     weights.front().arrays[SCRUPLE_WEIGHT].codes,
                            sink.loss_scale(),  sink.measures(),
                            inputs.documents(), guard};
  recording.choose(inputs.head_rows());
  RecordedWith& before = last[inputs.head_rows()];
  const bool again = now == std::exchange(before, {});  // one that fails is none
  if (again && recording.is_there()) {
    recording.replay(sink);
  } else {
    recording.clear();
    if (again && records)
      record(sink);
    else
      run(sink);
  }
  before = now;
}

void Transformer::State::record(Sink& sink) {
  try {
    recording.begin();
    run(sink);
    recording.finish();
  } catch (...) {
    recording.cancel();
    throw;
  }
}

void Transformer::State::sum_losses() {
  cuda::sum_losses(on.row_losses(), rows, loss_sum.as<double>(), stream);
}

// Queues the copy of this pass's loss to the host, behind the earlier ones. take_losses() waits for the
// copies, so it is called only when they are asked for or the buffer is full.
void Transformer::State::send_loss() {
  if (counted.size() == kLosses) take_losses();
  check(cudaMemcpyAsync(host_sums.get() + counted.size(), loss_sum.as<double>(), sizeof(double),
                        cudaMemcpyDeviceToHost, stream),
        "copying a loss from the GPU");
}

void Transformer::State::take_losses() {
  stream.wait();
  for (std::size_t i = 0; i < counted.size(); ++i)
    taken.push_back(host_sums[i] / static_cast<double>(std::max<Index>(counted[i], 1)));
  counted.clear();
}

Transformer::Transformer(const Setup& setup, Visible weights, bool released, const StreamEngine& engine,
                         const Stream& stream, Copies& copies, Memory& memory, Ledger& ledger) {
  check_setup(setup);
  state_ = std::make_unique<State>(setup, weights, released, engine, stream, copies, memory, ledger);
}

Transformer::~Transformer() = default;

void Transformer::prepare(const Batch& batch, float weight) {
  state_->prepared.reset();
  state_->prepared = state_->inputs.read(batch, weight);
}

void Transformer::train(Visible weights, const Batch& batch, Sink& sink, float weight) {
  State& s = *state_;
  s.on.start(weights, true);
  const std::optional<Index> prepared = std::exchange(s.prepared, std::nullopt);
  const Index counted = prepared ? *prepared : s.inputs.read(batch, weight);
  s.outbox.open(sink);
  s.run_recorded(weights, sink);
  s.on.take_embeddings();  // which rows of the tables were read is the batch's: it is not recorded
  s.outbox.close();
  s.send_loss();
  s.counted.push_back(counted);
}

std::vector<double> Transformer::losses() {
  state_->take_losses();
  return std::exchange(state_->taken, {});
}

void Transformer::watch(Guard* guard) { state_->guard = guard; }

void Transformer::judge(double* sum_squares, const float* loss_scale) {
  judge_step(state_->guard, sum_squares, loss_scale, state_->stream);
}

double Transformer::loss(Visible weights, const Batch& batch) {
  State& s = *state_;
  s.on.start(weights, false);
  s.prepared.reset();
  const Index counted = s.inputs.read(batch, 1);
  s.pass.forward();
  s.on.head(nullptr);
  s.sum_losses();
  s.send_loss();
  s.stream.wait();
  return s.host_sums[s.counted.size()] / static_cast<double>(std::max<Index>(counted, 1));
}

// ---- Generation ----

struct CachedTransformer::State : CachedPass<Operations> {
  using CachedPass::CachedPass;
};

CachedTransformer::CachedTransformer(const Description& model, Visible weights, const StreamEngine& engine,
                                     const Stream& stream, Memory& memory, Ledger& ledger) {
  Setup setup;
  setup.shape = model, setup.batch = 1;
  setup.activations = type_of(weights[0].arrays[SCRUPLE_WEIGHT].format).value_or(Precision::fp32);
  check_setup(setup);
  state_ = std::make_unique<State>(setup, kAtOnce, weights, nullptr, nullptr, engine, stream, memory, ledger);
}

CachedTransformer::~CachedTransformer() = default;

void CachedTransformer::feed(Visible weights, const std::int32_t* tokens, std::int64_t count, float* logits) {
  state_->feed(weights, tokens, count, logits);
}

std::int64_t CachedTransformer::length() const { return state_->length(); }

void CachedTransformer::clear() { state_->clear(); }

}  // namespace scruple::train::cuda
