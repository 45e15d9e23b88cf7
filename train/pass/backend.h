// What training asks of a device: memory for weights and moments, an engine that steps them, and a model's
// forward and backward pass. The loop, checkpoints and reports use a device through this file alone;
// activations stay behind it.
#pragma once

#include <cstdint>
#include <limits>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "include/scruple/scruple.hpp"
#include "train/model/description.h"
#include "train/pass/guard.h"
#include "train/pass/ledger.h"

namespace scruple::train {

// What activations and their gradients are stored in between layers, and between forward and backward
// (Micikevicius et al., 1710.03740). Products and reductions accumulate in fp32; softmax, the norms'
// statistics and the loss stay fp32.
enum class Precision { fp32, bf16, fp16 };
inline constexpr const char* kPrecisions[] = {"fp32", "bf16", "fp16"};  // their names, and their formats'

// Activation checkpointing (Chen et al., 1604.06174): what backward computes again instead of forward keeping
// it.
// - none: nothing.
// - norms: the outputs of norms.
// - mlp: the inside of each MLP.
// - keep_attention: the layer, but for its input and the output of attention.
// - block: the layer, but for its input.
// The bits are the same.
enum class Recompute { none, norms, mlp, keep_attention, block };
inline constexpr const char* kRecomputes[] = {"none", "norms", "mlp", "keep-attention",
                                              "block"};  // their names

// A model as it is trained.
struct Setup {
  Description shape;
  std::int64_t batch = 16;  // windows in a micro-batch
  Precision activations = Precision::fp32;
  Recompute recompute = Recompute::none;
  bool offloads = false;  // a GPU's residual stream waits in host memory; the bits are the same
  bool graphs = true;     // a GPU's kernels are recorded once and launched again; the bits are the same
};

// batch x context tokens, and what follows each; in host memory.
struct Batch {
  const std::int32_t *tokens, *targets;  // a target below 0 counts for nothing
  // Where in its window each token's document begins; nullptr: all at 0. A token sees nothing before it, and
  // its position is counted from it.
  const std::int32_t* starts = nullptr;
};

// Throws std::invalid_argument where no such model is, or no such batch.
void check_setup(const Setup& setup);
// The same where a token is outside the vocabulary.
void check_tokens(const Description& model, const std::int32_t* tokens, std::int64_t count);
// The same where these tokens cannot be fed after `length` others.
void check_feed(const Description& model, std::int64_t length, const std::int32_t* tokens,
                std::int64_t count);
// The same where a token, a target or a start of a batch of `rows` tokens cannot be. Writes each token's position in its
// document; returns how many targets count.
std::int64_t read_batch(const Description& model, std::int64_t rows, const Batch& batch,
                        std::int32_t* positions);

// The weights as the model computes with them, in the backend's memory: a row per parameter, in the order of
// parameters_of(shape). A weight that is kept as bf16+8 is bf16 here.
using Visible = std::span<const scruple_tensor>;
// Such a weight's fp32 values, where the host can read it: its own memory, or `scratch` filled with them.
const float* visible_values(Engine& engine, const scruple_tensor& weight, float* scratch);

// A model that can be trained. Its memory is taken when it is made. A call has read its batch when it
// returns, but the device may still be computing.
class Network {
 public:
  virtual ~Network() = default;
  // The next train() is of this batch, with this weight: what of it needs no weights may be done now, behind work that the
  // device is still at. loss() makes that vain.
  virtual void prepare(const Batch& /*batch*/, float /*weight*/) {}
  // A forward and a backward pass. The loss is the mean over the targets that count, in nats, times `weight`
  // times *sink.loss_scale(). Each parameter's gradient goes to the sink once, as soon as it is computed:
  // whole or in pieces, in any format, in the backend's memory. The sink may step the weight before train()
  // returns.
  virtual void train(Visible weights, const Batch& batch, Sink& sink, float weight) = 0;
  // The mean loss of each train() since the last call; 0 where no target counted. Waits for their work, so
  // call it after Sink::read(), which waits for the same.
  virtual std::vector<double> losses() = 0;
  // From now on each train() has its loss judged, before the first of its gradients goes to the sink. The guard
  // lies in the backend's memory, and outlives this.
  virtual void watch(Guard* guard) = 0;
  // judge_step(), in the order of the backend's work. Both lie in its memory.
  virtual void judge(double* sum_squares, const float* loss_scale) = 0;
  // The mean loss, for validation.
  virtual double loss(Visible weights, const Batch& batch) = 0;
};

// A model that goes on from tokens.
class Generator {
 public:
  virtual ~Generator() = default;
  // The logits (vocabulary of them, in host memory) after all that was fed, the last of these `count` tokens included.
  // Throws std::invalid_argument beyond the context, and then nothing was fed.
  virtual void feed(Visible weights, const std::int32_t* tokens, std::int64_t count, float* logits) = 0;
  virtual std::int64_t length() const = 0;  // tokens fed
  virtual void clear() = 0;                 // as if none had been
};

// Copies of a device's planes in host memory, made beside its other work.
class Copies {
 public:
  struct Plane {
    std::size_t tensor;  // a parameter's number, or one behind them all
    void* to;            // in memory()
    const void* from;
    std::int64_t bytes;
  };
  virtual ~Copies() = default;
  virtual Memory& memory() = 0;  // host memory that the device can copy to beside its work
  // Begins to copy the planes as they are now, in this order; those of a tensor stand together.
  virtual void take(std::span<const Plane> planes) = 0;
  // Until the copies are there; on any thread. Throws where they failed.
  virtual void wait() = 0;
  // What is queued from now on may write the planes of this tensor, or of all: it waits for their copies.
  virtual void before_step(std::size_t tensor) = 0;
  virtual void before_steps() = 0;
};

class Backend {
 public:
  virtual ~Backend() = default;
  virtual Engine& engine() = 0;
  virtual Memory& memory() = 0;  // where its planes and accumulators lie
  virtual Memory& offload_memory() {
    return memory();
  }  // the host's, if its engine steps moments that lie there
  // nullptr: it makes none. Planes in host memory would take that memory twice.
  virtual Copies* copies() { return nullptr; }
  // Bytes of gradients that exist at once where each is stepped as soon as it is there.
  virtual std::int64_t released_bytes(const std::vector<Parameter>& parameters,
                                      Precision activations) const = 0;
  // Throws std::invalid_argument where problem_with() finds one. `policy`: of the sink that takes its gradients.
  // `weights`: those that it will read, in their formats.
  virtual std::unique_ptr<Network> network(const Setup& setup, Visible weights, scruple_policy policy,
                                           Ledger& ledger) = 0;
  virtual std::unique_ptr<Generator> generator(const Description& shape, Visible weights, Ledger& ledger) = 0;

  virtual std::string device() const = 0;  // "NVIDIA H200"; "CPU, 2 threads"
  // What its bits depend on beside the code: "NVIDIA H200, cuBLAS 12.9.1", "OpenBLAS 0.3.21 for Zen"; "": nothing.
  virtual std::string arithmetic() const { return ""; }
  virtual double peak_flops() const {
    return 0;
  }  // of its products per second, as its maker says; 0: not known
  // What its memory can still give. Not asked where memory() is the host's.
  virtual std::int64_t free_bytes() { return std::numeric_limits<std::int64_t>::max(); }
};

// The backends there are. `threads`: 0, one for each core.
using OpenBackend = std::unique_ptr<Backend> (*)(int threads);
std::unique_ptr<Backend> cpu_backend(int threads);  // train/cpu/
// train/cuda/. Throws std::runtime_error where this build has none (train/pass/no_cuda.cpp). Where this
// machine has no GPU, engine() throws instead: to plan the memory of a run no GPU is needed.
std::unique_ptr<Backend> cuda_backend(int threads);
bool has_cuda();  // a GPU that it can run on

}  // namespace scruple::train
