#include "train/trainer.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <map>
#include <numbers>
#include <numeric>
#include <stdexcept>
#include <string>

#include "train/blas.h"
#include "train/checkpoint.h"

namespace scruple::train {
namespace {

// No gradient buffer is larger, whatever the tensor.
constexpr std::int64_t kTileElements = (std::int64_t{1} << 20) / static_cast<std::int64_t>(sizeof(float));
constexpr std::int64_t kPieceElements = 128;  // pieces begin at multiples: scruple_tensor_view

// Rows of a tile: as many as fit, a whole number of pieces.
std::int64_t tile_rows(const Parameter& parameter) {
  const std::int64_t columns = parameter.shape.size() == 2 ? parameter.shape[1] : 1;
  const std::int64_t step = kPieceElements / std::gcd(kPieceElements, columns);
  const std::int64_t rows = kTileElements / columns / step * step;
  if (columns > kTileElements)
    throw std::runtime_error(parameter.name + " has rows of " + std::to_string(columns) +
                             " values, and a gradient tile of 1 MiB holds " + std::to_string(kTileElements) +
                             "; choose a smaller --width");
  if (rows == 0)
    throw std::runtime_error(parameter.name + " has rows of " + std::to_string(columns) + " values, and " +
                             std::to_string(step) +
                             " of them do not fit into a gradient tile of 1 MiB; choose a --width that is a "
                             "multiple of 128");
  return std::min(rows, parameter.shape[0]);
}

scruple_optimizer* with_rate(const Optimizer& optimizer, double lr) {
  check(scruple_optimizer_set(optimizer.raw(), "lr", lr));
  return optimizer.raw();
}

std::int64_t gradient_bytes(const std::vector<scruple_tensor>& table) {
  std::int64_t sum = 0;
  for (const scruple_tensor& row : table) {
    std::int64_t codes = 0, aux = 0;
    check(scruple_format_bytes(row.arrays[SCRUPLE_GRADIENT].format, row.size, &codes, &aux));
    sum += codes + aux;
  }
  return sum;
}

std::int64_t token_bytes(const Job& job) {
  return job.batch * job.shape.context * std::int64_t{sizeof(std::int32_t)};
}

// `optimizer` for what does not decay.
Optimizer without_decay(Optimizer optimizer) {
  double value = 0;
  if (scruple_optimizer_get(optimizer.raw(), "weight_decay", &value) == SCRUPLE_OK)
    optimizer.set("weight_decay", 0);
  return optimizer;
}

}  // namespace

double Schedule::at(std::int64_t step) const {
  if (step <= warmup) return peak * static_cast<double>(step) / static_cast<double>(warmup);
  const double done = static_cast<double>(step - warmup) / static_cast<double>(steps - warmup + 1);
  switch (annealing) {
    case Annealing::cosine: return peak * 0.5 * (1 + std::cos(std::numbers::pi * std::min(done, 1.0)));
    case Annealing::linear: return peak * std::max(1 - done, 0.0);
    case Annealing::constant: break;
  }
  return peak;
}

std::int64_t tile_bytes(const std::vector<Parameter>& parameters) {
  std::int64_t largest = 0;
  for (const Parameter& parameter : parameters)
    largest = std::max(largest, tile_rows(parameter) * (parameter.size() / parameter.shape[0]));
  return largest * static_cast<std::int64_t>(sizeof(float));
}

// Cuts gradients into row tiles and hands them to the sink.
class Trainer::Tiles final : public Gradients {
 public:
  Tiles(Engine& engine, const State& state, scruple_sink_options options, Ledger& ledger)
      : parameters_(state.parameters()), ledger_(ledger) {
    for (const Parameter& parameter : parameters_) rows_.push_back(tile_rows(parameter));
    const bool released = options.policy == SCRUPLE_RELEASED;
    tile_ = Block(ledger, released ? "gradients" : "workspace", tile_bytes(parameters_));
    options.memory = {this, &Tiles::allocate, &Tiles::free};
    sink_ = std::make_unique<Sink>(engine, state.table(), options);
  }

  float loss_scale() const { return *sink_->loss_scale(); }

  void take(int parameter, const FillRows& fill) override {
    const auto p = static_cast<std::size_t>(parameter);
    if (sink_->measures() && rows_[p] < parameters_[p].shape[0]) each_tile(parameter, fill, &Sink::measure);
    each_tile(parameter, fill, &Sink::add);
  }

  void end() { sink_->end(); }
  scruple_sink_report report() const { return sink_->read(); }
  void read_tensors(Position& position) const {
    position.steps.resize(parameters_.size());
    position.adagc_norms.resize(parameters_.size());
    check(scruple_sink_read_tensors(sink_->raw(), position.steps.data(), position.adagc_norms.data()));
  }

 private:
  using Hand = void (Sink::*)(std::span<const scruple_piece>);

  void each_tile(int parameter, const FillRows& fill, Hand hand) {
    const Parameter& p = parameters_[static_cast<std::size_t>(parameter)];
    const std::int64_t step = rows_[static_cast<std::size_t>(parameter)], columns = p.size() / p.shape[0];
    for (std::int64_t first = 0; first < p.shape[0]; first += step) {
      const std::int64_t rows = std::min(step, p.shape[0] - first);
      fill(first, rows, tile_.as<float>());
      const scruple_piece piece = {parameter,
                                   first * columns,
                                   rows * columns,
                                   {format_named("fp32"), tile_.as<void>(), nullptr, SCRUPLE_NEAREST, 0}};
      (*sink_.*hand)({&piece, 1});
    }
  }

  static void* allocate(void* context, std::int64_t bytes) noexcept {
    auto& tiles = *static_cast<Tiles*>(context);
    try {
      Block block(tiles.ledger_, "gradients", bytes);
      void* memory = block.as<void>();
      tiles.blocks_.emplace(memory, std::move(block));
      return memory;
    } catch (...) {
      return nullptr;
    }
  }
  static void free(void* context, void* memory, std::int64_t) noexcept {
    static_cast<Tiles*>(context)->blocks_.erase(memory);
  }

  const std::vector<Parameter>& parameters_;
  Ledger& ledger_;
  std::vector<std::int64_t> rows_;  // of each parameter's tiles
  Block tile_;
  std::map<void*, Block> blocks_;
  std::unique_ptr<Sink> sink_;  // gives its memory back to blocks_
};

Trainer::Trainer(const Job& job, Ledger& ledger, const io::Checkpoint* from)
    : job_(job),
      engine_("cpu", job.threads),
      threads_(engine_.threads()),
      decaying_(job.optimizer()),
      undecayed_(without_decay(job.optimizer())) {
  if (const std::string problem = problem_with(job.shape); !problem.empty())
    throw std::runtime_error(problem);
  with_rate(decaying_, job.schedule.peak);  // refused here, if at all
  decaying_.set_seed(job.seed);
  undecayed_.set_seed(job.seed);
  state_ =
      std::make_unique<State>(engine_, parameters_of(job.shape), decaying_, undecayed_, job.describe, ledger);
  Position position;
  if (from != nullptr)
    position = take_up(*from);
  else
    state_->start(job.initial ? job.initial : random_values(state_->parameters(), job.seed), ledger);
  model_ =
      std::make_unique<Transformer>(job.shape, job.batch, job.activations, threads_, ledger, job.recompute);
  if (from != nullptr) job_.scaler = position.scaler;
  if (job_.scaler.scale > 0) job_.gradients.scaler = &job_.scaler;
  if (from != nullptr) job_.gradients.adagc_norms = position.adagc_norms.data();
  tiles_ = std::make_unique<Tiles>(engine_, *state_, job_.gradients, ledger);
  job_.gradients.adagc_norms = nullptr;  // copied
  tokens_ = Block(ledger, "activations", token_bytes(job));
  targets_ = Block(ledger, "activations", token_bytes(job));
  if (job.isolates) starts_ = Block(ledger, "activations", token_bytes(job));
  if (job.gradients.policy == SCRUPLE_COMPRESSED)
    ledger.check_room("gradients", gradient_bytes(state_->table()));
  reserve_buffers(threads_.count());
}

Trainer::~Trainer() = default;

Ledger memory_of(const Job& job) {
  Ledger ledger = Ledger::counter();
  {
    Engine engine("cpu", job.threads);
    Threads threads(engine.threads());
    const Optimizer decaying = job.optimizer(), undecayed = without_decay(job.optimizer());
    const State state(engine, parameters_of(job.shape), decaying, undecayed, job.describe, ledger);
    const Transformer model(job.shape, job.batch, job.activations, threads, ledger, job.recompute);
    const bool released = job.gradients.policy == SCRUPLE_RELEASED;
    const Block tile(ledger, released ? "gradients" : "workspace", tile_bytes(state.parameters()));
    const Block gradients(ledger, "gradients", released ? 0 : gradient_bytes(state.table()));
    const Block tokens(ledger, "activations", (job.isolates ? 3 : 2) * token_bytes(job));
  }
  return ledger;
}

namespace {

// What the job asks for is what the checkpoint was made with; the learning rate is the schedule's.
void check_group(io::Group saved, io::Group wanted) {
  saved.hyperparameters.erase("lr"), wanted.hyperparameters.erase("lr");
  if (saved.optimizer != wanted.optimizer || saved.seed != wanted.seed ||
      saved.hyperparameters != wanted.hyperparameters)
    io::fail("the checkpoint is of ", saved.optimizer, " with seed ", saved.seed,
             ", or with other hyperparameters than this run's ", wanted.optimizer, " with seed ",
             wanted.seed);
}

scruple_scaler scaler_of(const std::optional<io::LossScale>& saved) {
  if (!saved) return {};
  scruple_scaler scaler = {static_cast<float>(saved->scale), static_cast<float>(saved->growth),
                           static_cast<float>(saved->backoff), static_cast<std::int32_t>(saved->interval),
                           static_cast<std::int32_t>(saved->clean)};
  scruple_scaler probe = scaler;
  check(scruple_scaler_update(&probe, 0));  // refuses what no scaler can be
  return scaler;
}

}  // namespace

Position Trainer::take_up(const io::Checkpoint& from) {
  const io::Manifest& manifest = from.manifest();
  const std::vector<Parameter>& parameters = state_->parameters();
  if (manifest.groups.size() != 2 || manifest.tensors.size() != parameters.size())
    io::fail(from.folder(), " has ", manifest.tensors.size(), " tensors in ", manifest.groups.size(),
             " groups, and a model of this shape has ", parameters.size(), " in 2");
  check_group(manifest.groups[0], group_of(decaying_));
  check_group(manifest.groups[1], group_of(undecayed_));
  Position position = {manifest.step, {}, {}, scaler_of(manifest.loss_scale)};
  for (std::size_t p = 0; p < parameters.size(); ++p) {
    const io::TensorState& tensor = manifest.tensors[p];
    if (tensor.name != parameters[p].name || tensor.shape != parameters[p].shape ||
        tensor.group != (parameters[p].decays ? 0u : 1u) || tensor.id != p)
      io::fail(from.folder(), ": tensor ", p, " is \"", tensor.name, "\", and this model has \"",
               parameters[p].name, "\" there, or of another shape");
    load(engine_, from, tensor, state_->table()[p]);
    state_->set_step(static_cast<int>(p), tensor.step);
    position.adagc_norms.push_back(tensor.adagc_norm.value_or(0));
  }
  taken_ = position.taken;
  return position;
}

Position Trainer::position() const {
  Position position;
  position.taken = taken_;
  if (job_.scaler.scale > 0) position.scaler = tiles_->report().scaler;
  tiles_->read_tensors(position);
  return position;
}

Outcome Trainer::step(const Windows& data) {
  const std::int64_t parts = job_.gradients.micro_batches;
  Outcome outcome = {0, job_.schedule.at(taken_ + 1), 0, tiles_->loss_scale(), false};
  with_rate(decaying_, outcome.lr), with_rate(undecayed_, outcome.lr);
  for (std::int64_t part = 0; part < parts; ++part) {
    read(data, [&](std::int64_t w) {
      return data.random_start(job_.seed,
                               static_cast<std::uint64_t>((taken_ * parts + part) * job_.batch + w));
    });
    outcome.loss += model_->forward(*state_, batch()) / static_cast<double>(parts);
    model_->backward(*state_, *tiles_, outcome.loss_scale);
    tiles_->end();
  }
  const scruple_sink_report report = tiles_->report();
  outcome.norm = report.norm;
  outcome.skipped = report.found_inf != 0;
  ++taken_;
  return outcome;
}

std::int64_t validated_windows(std::int64_t asked, std::int64_t batch) {
  return std::max<std::int64_t>((asked + batch - 1) / batch, 1) * batch;
}

double Trainer::validate(const Windows& data, std::int64_t windows, const std::function<bool()>& go_on) {
  const std::int64_t all = validated_windows(windows, job_.batch), batches = all / job_.batch;
  double sum = 0;
  for (std::int64_t b = 0; b < batches; ++b) {
    if (!go_on()) return std::nan("");
    read(data, [&](std::int64_t w) { return data.even_start(b * job_.batch + w, all); });
    sum += model_->loss(*state_, {tokens_.as<std::int32_t>(), targets_.as<std::int32_t>()});
  }
  return sum / static_cast<double>(batches);
}

void Trainer::read(const Windows& data, const std::function<std::int64_t(std::int64_t)>& start) {
  if (data.isolates() && !job_.isolates)
    throw std::invalid_argument("the data's documents are isolated; the job must say so too (Job::isolates)");
  for (std::int64_t w = 0; w < job_.batch; ++w) {
    const std::int64_t at = w * job_.shape.context;
    data.read(start(w), tokens_.as<std::int32_t>() + at, targets_.as<std::int32_t>() + at,
              job_.isolates ? starts_.as<std::int32_t>() + at : nullptr);
  }
}

Batch Trainer::batch() const {
  return {tokens_.as<std::int32_t>(), targets_.as<std::int32_t>(),
          job_.isolates ? starts_.as<std::int32_t>() : nullptr};
}

}  // namespace scruple::train
