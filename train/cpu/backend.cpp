// The CPU as a backend: planes and activations in host memory, weights decoded to fp32 a layer at a time, gradients
// handed over in tiles of rows.
#include "train/pass/backend.h"

#include <utility>

#include "train/cpu/blas.h"
#include "train/cpu/tiles.h"
#include "train/cpu/transformer.h"

namespace scruple::train {
namespace {

// The values of visible weights.
struct Decoded final : WeightValues {
  Decoded(Engine& on, Visible rows) : engine(on), weights(rows) {}
  const float* values(int parameter, float* scratch) override {
    return visible_values(engine, weights[static_cast<std::size_t>(parameter)], scratch);
  }
  Engine& engine;
  const Visible weights;
};

class CpuNetwork final : public Network {
 public:
  CpuNetwork(const Setup& setup, bool released, Engine& engine, Threads& threads, Ledger& ledger)
      : engine_(engine),
        model_(setup, threads, ledger),
        tiles_(parameters_of(setup.shape), released, ledger) {
    if (!ledger.only_counts()) reserve_buffers(threads.count());
  }
  void train(Visible weights, const Batch& batch, Sink& sink, float weight) override {
    Decoded decoded(engine_, weights);
    const double loss = model_.forward(decoded, batch);
    if (guard_ != nullptr) judge_loss(*guard_, loss * static_cast<double>(weight));
    tiles_.give_to(sink);
    model_.backward(decoded, tiles_, *sink.loss_scale() * weight);
    losses_.push_back(loss);
  }
  std::vector<double> losses() override { return std::exchange(losses_, {}); }
  void watch(Guard* guard) override { guard_ = guard; }
  void judge(double* sum_squares, const float* loss_scale) override {
    judge_step(*guard_, *sum_squares, *loss_scale);
  }
  double loss(Visible weights, const Batch& batch) override {
    Decoded decoded(engine_, weights);
    return model_.loss(decoded, batch);
  }

 private:
  Engine& engine_;
  Transformer model_;
  Tiles tiles_;
  Guard* guard_ = nullptr;
  std::vector<double> losses_;
};

class CpuGenerator final : public Generator {
 public:
  CpuGenerator(const Description& shape, Engine& engine, Threads& threads, Ledger& ledger)
      : engine_(engine), model_(shape, threads, ledger) {}
  void feed(Visible weights, const std::int32_t* tokens, std::int64_t count, float* logits) override {
    Decoded decoded(engine_, weights);
    model_.feed(decoded, tokens, count, logits);
  }
  std::int64_t length() const override { return model_.length(); }
  void clear() override { model_.clear(); }

 private:
  Engine& engine_;
  CachedTransformer model_;
};

class Cpu final : public Backend {
 public:
  explicit Cpu(int threads) : engine_("cpu", threads), threads_(engine_.threads()) {}
  Engine& engine() override { return engine_; }
  Memory& memory() override { return host_memory(); }
  std::int64_t released_bytes(const std::vector<Parameter>& parameters, Precision) const override {
    return tile_bytes(parameters);
  }
  std::unique_ptr<Network> network(const Setup& setup, Visible, scruple_policy policy,
                                   Ledger& ledger) override {
    return std::make_unique<CpuNetwork>(setup, policy == SCRUPLE_RELEASED, engine_, threads_, ledger);
  }
  std::unique_ptr<Generator> generator(const Description& shape, Visible, Ledger& ledger) override {
    return std::make_unique<CpuGenerator>(shape, engine_, threads_, ledger);
  }
  std::string arithmetic() const override { return products_by(); }
  std::string device() const override {
    const int count = threads_.count();
    return "CPU, " + std::to_string(count) + (count == 1 ? " thread" : " threads");
  }

 private:
  Engine engine_;
  Threads threads_;
};

}  // namespace

std::unique_ptr<Backend> cpu_backend(int threads) { return std::make_unique<Cpu>(threads); }

}  // namespace scruple::train
