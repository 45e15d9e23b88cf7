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

// ---- Training ----

class Transformer final : public Network {
 public:
  Transformer(const Setup& setup, Visible weights, bool released, const StreamEngine& engine,
              const Stream& on_stream, Copies& copies, Memory& memory, Ledger& ledger)
      : rows_(setup.batch * setup.shape.context),
        records_(setup.graphs && !setup.offloads),  // copies beside the layers are no part of a recording
        stream_(on_stream),
        inputs_(setup.shape, rows_, stream_, memory, ledger),
        recording_(stream_, released ? &copies : nullptr),
        outbox_(parameters_of(setup.shape), setup.activations, released, recording_, memory, ledger),
        on_(setup, rows_, weights, &inputs_, &outbox_, engine, stream_, memory, ledger),
        pass_(on_, on_.places(), setup.recompute),
        loss_sum_(ledger, "activations", Index{sizeof(double)}, memory) {
    if (!ledger.only_counts()) host_sums_ = pinned<double>(kLosses);
  }
  ~Transformer() override {
    if (host_sums_ != nullptr) cudaStreamSynchronize(stream_);
  }

  void prepare(const Batch& batch, float weight) override;
  void train(Visible weights, const Batch& batch, Sink& sink, float weight) override;
  std::vector<double> losses() override;
  void watch(Guard* guard) override { guard_ = guard; }
  void judge(double* sum_squares, const float* loss_scale) override {
    judge_step(guard_, sum_squares, loss_scale, stream_);
  }
  double loss(Visible weights, const Batch& batch) override;

 private:
  void run(Sink& sink);
  void run_recorded(Visible weights, Sink& sink);
  void record(Sink& sink);
  void sum_losses();
  void send_loss();
  void take_losses();

  const Index rows_;
  const bool records_;
  const Stream& stream_;
  Inputs inputs_;
  Recording recording_;
  Outbox outbox_;
  Operations on_;
  Pass<Operations> pass_;
  Block loss_sum_;
  Guard* guard_ = nullptr;
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
  std::map<Index, RecordedWith> last_;  // by rows of the head
  std::vector<Index> counted_;          // targets, of the losses that the host has not taken yet
  std::optional<Index> prepared_;       // the targets of the batch that is on its way for the next train()
  Pinned<double> host_sums_;            // of these: each is copied there as soon as it is computed
  std::vector<double> taken_;
};

// All but the gradients of the tables.
void Transformer::run(Sink& sink) {
  pass_.forward();
  on_.head(sink.loss_scale());
  sum_losses();
  if (guard_ != nullptr) judge_loss(guard_, loss_sum_.as<double>(), inputs_.share(), stream_);
  pass_.backward();
  outbox_.close();
}

// The first pass of a shape runs as it is: algorithms are chosen then, and missing memory is taken. The second is recorded
// as CUDA graphs, and later ones replay it.
void Transformer::run_recorded(Visible weights, Sink& sink) {
  const RecordedWith now = {weights.data(),      weights.front().arrays[SCRUPLE_WEIGHT].codes,
                            sink.loss_scale(),   sink.measures(),
                            inputs_.documents(), guard_};
  recording_.choose(inputs_.head_rows());
  RecordedWith& before = last_[inputs_.head_rows()];
  const bool again = now == std::exchange(before, {});  // one that fails is none
  if (again && recording_.is_there()) {
    recording_.replay(sink);
  } else {
    recording_.clear();
    if (again && records_)
      record(sink);
    else
      run(sink);
  }
  before = now;
}

void Transformer::record(Sink& sink) {
  try {
    recording_.begin();
    run(sink);
    recording_.finish();
  } catch (...) {
    recording_.cancel();
    throw;
  }
}

void Transformer::sum_losses() { cuda::sum_losses(on_.row_losses(), rows_, loss_sum_.as<double>(), stream_); }

// Queues the copy of this pass's loss to the host, behind the earlier ones. take_losses() waits for the
// copies, so it is called only when they are asked for or the buffer is full.
void Transformer::send_loss() {
  if (counted_.size() == kLosses) take_losses();
  check(cudaMemcpyAsync(host_sums_.get() + counted_.size(), loss_sum_.as<double>(), sizeof(double),
                        cudaMemcpyDeviceToHost, stream_),
        "copying a loss from the GPU");
}

void Transformer::take_losses() {
  stream_.wait();
  for (std::size_t i = 0; i < counted_.size(); ++i)
    taken_.push_back(host_sums_[i] / static_cast<double>(std::max<Index>(counted_[i], 1)));
  counted_.clear();
}

void Transformer::prepare(const Batch& batch, float weight) {
  prepared_.reset();
  prepared_ = inputs_.read(batch, weight);
}

void Transformer::train(Visible weights, const Batch& batch, Sink& sink, float weight) {
  on_.start(weights, true);
  const std::optional<Index> prepared = std::exchange(prepared_, std::nullopt);
  const Index counted = prepared ? *prepared : inputs_.read(batch, weight);
  outbox_.open(sink);
  run_recorded(weights, sink);
  on_.take_embeddings();  // which rows of the tables were read is the batch's: it is not recorded
  outbox_.close();
  send_loss();
  counted_.push_back(counted);
}

std::vector<double> Transformer::losses() {
  take_losses();
  return std::exchange(taken_, {});
}

double Transformer::loss(Visible weights, const Batch& batch) {
  on_.start(weights, false);
  prepared_.reset();
  const Index counted = inputs_.read(batch, 1);
  pass_.forward();
  on_.head(nullptr);
  sum_losses();
  send_loss();
  stream_.wait();
  return host_sums_[counted_.size()] / static_cast<double>(std::max<Index>(counted, 1));
}

// ---- Generation ----

struct CachedTransformer final : Generator, CachedPass<Operations> {
  using Cached = CachedPass<Operations>;
  using Cached::Cached;
  void feed(Visible weights, const std::int32_t* tokens, std::int64_t count, float* logits) override {
    Cached::feed(weights, tokens, count, logits);
  }
  std::int64_t length() const override { return Cached::length(); }
  void clear() override { Cached::clear(); }
};

}  // namespace

std::unique_ptr<Network> transformer(const Setup& setup, Visible weights, bool released,
                                     const StreamEngine& engine, const Stream& stream, Copies& copies,
                                     Memory& memory, Ledger& ledger) {
  check_setup(setup);
  return std::make_unique<Transformer>(setup, weights, released, engine, stream, copies, memory, ledger);
}

std::unique_ptr<Generator> cached_transformer(const Description& model, Visible weights,
                                              const StreamEngine& engine, const Stream& stream,
                                              Memory& memory, Ledger& ledger) {
  Setup setup;
  setup.shape = model, setup.batch = 1;
  setup.activations = type_of(weights[0].arrays[SCRUPLE_WEIGHT].format).value_or(Precision::fp32);
  check_setup(setup);
  return std::make_unique<CachedTransformer>(setup, kAtOnce, weights, nullptr, nullptr, engine, stream,
                                             memory, ledger);
}

}  // namespace scruple::train::cuda
