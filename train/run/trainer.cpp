#include "train/run/trainer.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <string>
#include <utility>

#include "train/run/checkpoint.h"

namespace scruple::train {
namespace {

std::int64_t gradient_bytes(const std::vector<scruple_tensor>& table) {
  const auto aligned = [](std::int64_t bytes) { return (bytes + 15) / 16 * 16; };  // as the sink's blocks are
  std::int64_t sum = 0;
  for (const scruple_tensor& row : table) {
    const auto planes = plane_bytes(row.arrays[SCRUPLE_GRADIENT].format, row.size);
    sum += aligned(planes.codes) + aligned(planes.aux);
  }
  return sum;
}

bool is_guarded(const Job& job) { return job.gradients.policy == SCRUPLE_RELEASED || job.skip_outliers > 0; }

Block guard_block(const Job& job, Backend& backend, Ledger& ledger) {
  return is_guarded(job) ? Block(ledger, "workspace", sizeof(Guard), backend.memory()) : Block();
}

// What the job asks for is what the checkpoint was made with; the learning rate is the schedule's.
void check_group(io::Group saved, io::Group wanted) {
  saved.hyperparameters.erase("lr"), wanted.hyperparameters.erase("lr");
  if (saved.optimizer != wanted.optimizer || saved.seed != wanted.seed ||
      saved.hyperparameters != wanted.hyperparameters)
    io::fail("the checkpoint's optimizer is ", saved.optimizer, " with seed ", saved.seed,
             " and this run's is ", wanted.optimizer, " with seed ", wanted.seed,
             ", or their hyperparameters differ; resume with the settings that it was saved with");
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

scruple_memory Trainer::Accumulators::memory() {
  const auto alloc = [](void* context, std::int64_t bytes) noexcept -> void* {
    auto& all = *static_cast<Accumulators*>(context);
    try {
      Block block(all.ledger, "gradients", bytes, all.from);
      void* memory = block.as<void>();
      all.blocks.emplace(memory, std::move(block));
      return memory;
    } catch (...) {
      return nullptr;
    }
  };
  const auto free = [](void* context, void* memory, std::int64_t) noexcept {
    static_cast<Accumulators*>(context)->blocks.erase(memory);
  };
  return {this, alloc, free};
}

Trainer::Trainer(const Job& job, Ledger& ledger, const io::Checkpoint* from)
    : job_(job),
      backend_(job.backend(job.threads)),
      groups_(parameters_of(job.shape), job.optimizer, job.overrides, job.seed),
      accumulators_{ledger, backend_->memory(), {}} {
  if (const std::string problem = problem_with(job.shape); !problem.empty())
    throw std::runtime_error(problem);
  groups_.set_rate(job.schedule.peak);  // refused here, if at all
  state_ = std::make_unique<State>(
      *backend_, parameters_of(job.shape),
      [this](std::size_t p) -> const Optimizer& { return groups_.of(p); }, job.describe, ledger,
      job.offloads_state);
  if (job.ema > 0) average_.emplace(*backend_, *state_, job.ema, job.seed, ledger);
  Position position;
  if (from != nullptr) {
    position = take_up(*from);
    job_.scaler = position.scaler;
    job_.gradients.adagc_norms = position.adagc_norms.data();
  } else {
    state_->start(job.initial ? job.initial : random_values(state_->parameters(), job.seed, job.threads),
                  ledger);
  }
  if (job_.scaler.scale > 0) job_.gradients.scaler = &job_.scaler, loss_scale_ = job_.scaler.scale;
  if (is_guarded(job)) set_guard(from);
  job_.gradients.memory = accumulators_.memory();
  sink_ = std::make_unique<Sink>(engine(), state_->table(), job_.gradients);
  job_.gradients.adagc_norms = nullptr;  // copied
  batches_.emplace(job, job.isolates, ledger);
  network_ = backend_->network(job, state_->visible(), job.gradients.policy, ledger);
  if (is_guarded(job)) network_->watch(guard_.as<Guard>());
  if (job.gradients.policy == SCRUPLE_COMPRESSED)
    ledger.check_room("gradients", gradient_bytes(state_->table()));
}

Trainer::~Trainer() = default;

// Stored and compressed: the sink asks for the squares of other processes once it has its own, and before it steps. Then
// the step is judged.
void Trainer::set_guard(const io::Checkpoint* from) {
  const bool released = job_.gradients.policy == SCRUPLE_RELEASED;
  if (released && job_.skip_outliers > 0 && job_.gradients.micro_batches > 1)
    throw std::invalid_argument(
        "outliers are not skipped where released gradients have several micro-batches: the first are in the "
        "moments before the loss of the step is known");
  Guard guard;
  guard.released = released;
  guard.parts = job_.gradients.micro_batches;
  guard.limit = job_.skip_outliers;
  if (job_.skip_outliers > 0) {
    const io::Metadata notes = from == nullptr ? io::Metadata() : notes_of(*from);
    const auto noted = notes.find(kOutliersNote);
    outliers_.emplace(noted == notes.end() ? "" : noted->second);
    guard.losses = outliers_->losses, guard.norms = outliers_->norms;
  }
  guard_ = guard_block(job_, *backend_, accumulators_.ledger);
  memory().write(guard_.as<void>(), &guard, sizeof guard);
  if (released)
    job_.gradients.skip = &guard_.as<Guard>()->skip;
  else
    job_.gradients.reduce = {this, [](void* context, double* sum) noexcept {
                               auto& trainer = *static_cast<Trainer*>(context);
                               trainer.network_->judge(sum, trainer.sink_->loss_scale());
                               return 0;
                             }};
}

Ledger memory_of(const Job& job) {
  Ledger ledger = Ledger::counter();
  {
    const std::unique_ptr<Backend> backend = job.backend(job.threads);
    const std::vector<Parameter> parameters = parameters_of(job.shape);
    const Groups groups(parameters, job.optimizer, job.overrides, job.seed);
    const auto optimizer_of = [&](std::size_t p) -> const Optimizer& { return groups.of(p); };
    const State state(*backend, parameters, optimizer_of, job.describe, ledger, job.offloads_state);
    std::optional<Average> average;
    if (job.ema > 0) average.emplace(*backend, state, job.ema, job.seed, ledger);
    const std::unique_ptr<Network> network =
        backend->network(job, state.visible(), job.gradients.policy, ledger);
    const bool released = job.gradients.policy == SCRUPLE_RELEASED;
    const Block gradients(ledger, "gradients", released ? 0 : gradient_bytes(state.table()));
    const Batches batches(job, job.isolates, ledger);
    const Block guard = guard_block(job, *backend, ledger);
  }
  return ledger;
}

Position Trainer::take_up(const io::Checkpoint& from) {
  const io::Manifest& manifest = from.manifest();
  const std::vector<Parameter>& parameters = state_->parameters();
  check_tensors(from, parameters);
  const std::size_t wanted = groups_.size() + (average_ ? 1 : 0);
  if (manifest.groups.size() != wanted)
    io::fail(from.folder(), " has ", manifest.groups.size(), " groups of tensors, and its run has ", wanted);
  const std::vector<io::Group> groups = groups_of(from);
  for (std::size_t g = 0; g < groups_.size(); ++g) check_group(groups[g], group_of(groups_.at(g)));
  Position position;
  position.scaler = scaler_of(manifest.loss_scale);
  for (std::size_t p = 0; p < parameters.size(); ++p) {
    const io::TensorState& tensor = manifest.tensors[p];
    if (tensor.group != groups_.group_of(p) || tensor.id != p)
      io::fail(from.folder(), ": tensor \"", tensor.name, "\" is in another group, or has another number");
    load(engine(), from, tensor, state_->table()[p], memory());
    state_->set_step(static_cast<int>(p), tensor.step);
    position.adagc_norms.push_back(tensor.adagc_norm.value_or(0));
  }
  if (average_) take_up_average(from, groups);
  taken_ = manifest.step;
  return position;
}

void Trainer::take_up_average(const io::Checkpoint& from, const std::vector<io::Group>& groups) {
  check_group(groups.back(), group_of(average_->optimizer()));
  check_averages(from);
  const std::span<const io::TensorState> averages = averages_of(from.manifest());
  for (std::size_t p = 0; p < averages.size(); ++p)
    load(engine(), from, averages[p], average_->table()[p], memory());
}

Position Trainer::position() const {
  Position position;
  if (job_.scaler.scale > 0) position.scaler = sink_->read().scaler;
  position.steps.resize(state_->parameters().size());
  position.adagc_norms.resize(state_->parameters().size());
  check(scruple_sink_read_tensors(sink_->raw(), position.steps.data(), position.adagc_norms.data()));
  return position;
}

// `step`: how many are before it.
Counted Trainer::read_part(const Windows& data, std::int64_t step, std::int64_t part) {
  return batches_->read(data, [&](std::int64_t w) -> Window {
    const std::int64_t index = (step * job_.gradients.micro_batches + part) * job_.batch + w;
    return {data.drawn(job_.seed, static_cast<std::uint64_t>(index))};
  });
}

// Every target of the step counts the same, although micro-batches may have different numbers of them (padding,
// prompts). The sink averages over micro-batches, so each gets a weight in proportion to its targets.
double Trainer::weight_of(std::int64_t targets, std::int64_t all) const {
  const std::int64_t parts = job_.gradients.micro_batches;
  return all == 0 ? 1 : static_cast<double>(targets * parts) / static_cast<double>(all);
}

// The first micro-batch is read last, and stays.
void Trainer::prepare(const Windows& data, std::int64_t step) {
  prepared_.reset();
  Prepared next = {&data, step, 0, {}};
  for (std::int64_t part = job_.gradients.micro_batches; part-- > 0;) {
    next.first = read_part(data, step, part);
    next.all += next.first.targets;
  }
  network_->prepare(batches_->batch(), static_cast<float>(weight_of(next.first.targets, next.all)));
  prepared_ = next;
}

Outcome Trainer::step(const Windows& data, bool goes_on) {
  const std::int64_t parts = job_.gradients.micro_batches;
  Outcome outcome = {0, job_.schedule.at(taken_ + 1), 0, loss_scale_, false};
  groups_.set_rate(outcome.lr);
  if (!prepared_ || prepared_->data != &data || prepared_->step != taken_) prepare(data, taken_);
  const Prepared now = *std::exchange(prepared_, std::nullopt);
  if (now.all == 0) {
    outcome.loss = outcome.norm = std::nan("");
    return taken(outcome, data);
  }
  std::vector<double> weights;
  for (std::int64_t part = 0; part < parts; ++part) {
    const Counted counted = part == 0 ? now.first : read_part(data, taken_, part);
    outcome.tokens += counted.tokens;
    weights.push_back(weight_of(counted.targets, now.all));
    const bool last = part + 1 == parts;
    if (job_.gradients.policy == SCRUPLE_RELEASED) whole_ = false;
    network_->train(state_->visible(), batches_->batch(), *sink_, static_cast<float>(weights.back()));
    if (Copies* const copies = this->copies(); copies != nullptr && last) copies->before_steps();
    if (last) whole_ = false;
    sink_->end();
  }
  if (average_) average_->take(taken_ + 1);
  if (goes_on) try {
      prepare(data, taken_ + 1);
    } catch (...) {
      prepared_.reset();  // this step is taken; the next one reads again, and tells
    }
  const scruple_sink_report report = sink_->read();  // the step's only wait: the losses have come by then
  const std::vector<double> losses = network_->losses();
  for (std::size_t part = 0; part < weights.size(); ++part)
    outcome.loss += losses[part] * weights[part] / static_cast<double>(parts);
  if (job_.scaler.scale > 0) loss_scale_ = report.scaler.scale;
  outcome.norm = report.norm;
  outcome.skipped = report.found_inf != 0;
  if (job_.gradients.policy == SCRUPLE_RELEASED)
    outcome.tensors = report.skipped - std::exchange(tensors_skipped_, report.skipped);
  if (outliers_) look_at_guard(outcome);
  return taken(outcome, data);
}

Outcome Trainer::taken(Outcome outcome, const Windows& data) {
  ++taken_, whole_ = true;
  const std::int64_t windows = taken_ * job_.gradients.micro_batches * job_.batch;
  if (data.has_epochs()) outcome.epoch = static_cast<double>(windows) / static_cast<double>(data.count());
  return outcome;
}

void Trainer::look_at_guard(Outcome& outcome) {
  Guard guard;
  memory().read(&guard, guard_.as<void>(), sizeof guard);
  outcome.outlier = guard.outlier;
  if (!guard.released) outcome.norm = guard.norm;
  outliers_->losses = guard.losses, outliers_->norms = guard.norms;
}

std::int64_t validated_windows(std::int64_t asked, const Windows& data) {
  return std::min(asked, data.apart());
}

double Trainer::validate(const Windows& data, std::int64_t windows, const GoOn& go_on) {
  prepared_.reset();  // batches_ takes others
  const std::int64_t all = validated_windows(windows, data);
  const auto window = [&](std::int64_t index) -> Window { return {data.even_start(index, all)}; };
  const Loss loss = loss_over(*network_, state_->visible(), *batches_, data, all, window, go_on);
  return loss.windows < all ? std::nan("") : loss.mean();
}

}  // namespace scruple::train
