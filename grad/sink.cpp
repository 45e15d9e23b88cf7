#include "grad/sink.h"

#include <cmath>
#include <limits>
#include <string>

#include "engine/failure.h"

using namespace scruple;

namespace scruple {

bool Coverage::overlaps(i64 first, i64 size) const {
  if (size == 0) return false;
  const auto after = spans_.lower_bound(first + size);  // the first span that begins beyond
  return after != spans_.begin() && std::prev(after)->second > first;
}

void Coverage::add(i64 first, i64 size) {
  if (size == 0) return;
  size_ += size;
  i64 end = first + size;
  const auto after = spans_.find(end);
  if (after != spans_.end()) {
    end = after->second;
    spans_.erase(after);
  }
  const auto next = spans_.lower_bound(first);
  if (next != spans_.begin() && std::prev(next)->second == first)
    std::prev(next)->second = end;
  else
    spans_.emplace(first, end);
}

}  // namespace scruple

namespace {

constexpr int kMostMicroBatches = 4096;  // what the random numbers tell apart

bool is_limit(double x) { return x >= 0 && std::isfinite(x); }

const char* name_of(scruple_policy policy) {
  return policy == SCRUPLE_STORED ? "stored" : policy == SCRUPLE_RELEASED ? "released" : "compressed";
}

void check_values(const scruple_sink_options& o) {
  if (o.policy < SCRUPLE_STORED || o.policy > SCRUPLE_COMPRESSED)
    fail(SCRUPLE_INVALID, "policy ", +o.policy, " does not exist; stored 0, released 1, compressed 2");
  if (o.accumulation < SCRUPLE_ACCUMULATE_GRADIENTS || o.accumulation > SCRUPLE_ACCUMULATE_ADAMA)
    fail(SCRUPLE_INVALID, "accumulation ", +o.accumulation,
         " does not exist; gradients 0, momentum 1, adama 2");
  if (o.micro_batches < 1 || o.micro_batches > kMostMicroBatches)
    fail(SCRUPLE_INVALID, "micro_batches is ", o.micro_batches, "; it must be 1 to ", kMostMicroBatches);
  if (!is_limit(o.max_norm) || !is_limit(o.tensor_norm) || !is_limit(o.adagc))
    fail(SCRUPLE_INVALID, "max_norm ", o.max_norm, ", tensor_norm ", o.tensor_norm, ", adagc ", o.adagc,
         ": each must be finite and at least 0 (0: off)");
  if ((o.memory.alloc == nullptr) != (o.memory.free == nullptr))
    fail(SCRUPLE_INVALID, "memory has only one of alloc and free; set both, or neither");
  if (o.scaler != nullptr && o.loss_scale != nullptr)
    fail(SCRUPLE_INVALID,
         "both scaler and loss_scale are set; set scaler for the sink to scale the loss, or "
         "loss_scale where the caller does");
  if (o.scaler != nullptr) check_scaler(*o.scaler);
}

bool scales(const scruple_sink_options& o) { return o.scaler != nullptr || o.loss_scale != nullptr; }

void check_released(const scruple_sink_options& o) {
  if (o.reduce.add != nullptr)
    fail(SCRUPLE_UNSUPPORTED,
         "policy released with reduce: no norm is taken of all gradients; leave it NULL, or "
         "use policy compressed");
  if (o.max_norm > 0)
    fail(SCRUPLE_UNSUPPORTED, "policy released with max_norm ", o.max_norm,
         ": tensors are stepped before the global norm is known; clip each by tensor_norm or adagc, or use "
         "policy "
         "compressed");
  if (o.micro_batches == 1) return;
  if (o.accumulation == SCRUPLE_ACCUMULATE_GRADIENTS)
    fail(SCRUPLE_UNSUPPORTED, "policy released with ", o.micro_batches,
         " micro-batches: no gradient is kept that they could be added to; set accumulation to momentum "
         "(sgd, sgdw) "
         "or adama (adam, adamw), or use policy compressed");
  if (o.tensor_norm > 0 || o.adagc > 0 || scales(o))
    fail(SCRUPLE_UNSUPPORTED, "policy released with ", o.micro_batches,
         " micro-batches and clipping or loss scaling: the earlier ones are in the moments before the whole "
         "is "
         "known; use policy compressed");
}

void check_kept(const scruple_sink_options& o) {
  if (o.skip != nullptr)
    fail(SCRUPLE_UNSUPPORTED, "policy ", name_of(o.policy),
         " with skip: it looks at all gradients before a step, and skips it where one is not finite; leave "
         "skip "
         "NULL, or use policy released");
  if (o.tensor_norm > 0 || o.adagc > 0)
    fail(SCRUPLE_UNSUPPORTED, "policy ", name_of(o.policy), " with tensor_norm ", o.tensor_norm,
         " and adagc ", o.adagc,
         ": these are for policy released; all gradients are there together, so use max_norm");
  if (o.accumulation != SCRUPLE_ACCUMULATE_GRADIENTS)
    fail(SCRUPLE_UNSUPPORTED, "policy ", name_of(o.policy), " with accumulation ", +o.accumulation,
         ": it adds up gradients, for any optimizer; use SCRUPLE_ACCUMULATE_GRADIENTS");
}

// That a released tensor's optimizer takes micro-batches in the way that was asked for, as it is set now.
void check_accumulates(const scruple_tensor& t, i64 index, const scruple_sink_options& o) {
  const bool momentum = o.accumulation == SCRUPLE_ACCUMULATE_MOMENTUM;
  const RuleInfo& rule = t.optimizer->rule();
  if (rule.accumulation != (momentum ? Accumulation::momentum : Accumulation::adama))
    fail(SCRUPLE_UNSUPPORTED, "tensor ", index, ": accumulation ", momentum ? "momentum" : "adama",
         " is not for ", rule.name,
         rule.accumulation == Accumulation::none ? ""
         : momentum                              ? ", which takes adama"
                                                 : ", which takes momentum",
         "; policy compressed is for any optimizer");
  check_parts(t, index);
}
}  // namespace

scruple_sink::scruple_sink(scruple_engine& engine, const scruple_tensor* tensors, i64 count,
                           const scruple_sink_options& options)
    : engine_(engine), options_(options) {
  check_values(options);
  released() ? check_released(options) : check_kept(options);
  check_state(tensors, count);
  rows_.assign(tensors, tensors + count);
  states_.resize(rows_.size());
  const bool needs_norms = options.tensor_norm > 0 || options.adagc > 0 || scales(options);
  measures_ = released() && (needs_norms || options.skip != nullptr);
  only_guards_ = measures_ && !needs_norms;

  SinkCells cells{};
  cells.scaler = options.scaler != nullptr ? *options.scaler : scruple_scaler{1, 1, 1, 1, 0};
  cells.clip = 1;
  cells.norm = released() ? std::numeric_limits<double>::quiet_NaN() : 0;
  std::vector<TensorCells> each(rows_.size());
  for (i64 i = 0; i < count; ++i) {
    scruple_tensor& t = row(i);
    t.folds = 0;
    if (released()) {
      t.arrays[SCRUPLE_GRADIENT] = {};
      state(i).counter = i;
      if (options.micro_batches > 1) check_accumulates(t, i, options);
    } else {
      t.arrays[SCRUPLE_GRADIENT].owned = 0;
      check_accumulator(t, i);
    }
    TensorCells& cell = each[static_cast<std::size_t>(i)];
    cell.clip = 1;
    if (options.adagc_norms == nullptr) continue;
    if (!is_limit(options.adagc_norms[i]))
      fail(SCRUPLE_INVALID, "adagc_norms[", i, "] is ", options.adagc_norms[i],
           "; it must be finite and at least 0 (0: no history)");
    cell.gamma = options.adagc_norms[i];
  }
  options_.scaler = nullptr;  // the caller's; copied
  options_.adagc_norms = nullptr;

  const i64 bytes = static_cast<i64>(each.size() * sizeof(TensorCells));
  memory_ = engine_.alloc(static_cast<i64>(sizeof(SinkCells)) + bytes);
  cells_ = static_cast<SinkCells*>(memory_);
  tensors_ = reinterpret_cast<TensorCells*>(cells_ + 1);
  try {
    engine_.copy(cells_, &cells, sizeof cells);
    if (bytes > 0) engine_.copy(tensors_, each.data(), bytes);
    if (options.policy == SCRUPLE_STORED)
      for (i64 i = 0; i < count; ++i) alloc_gradients({i});
    engine_.synchronize();  // the cells that were copied are on this function's stack
  } catch (...) {
    free_all();
    throw;
  }
}

scruple_sink::~scruple_sink() { free_all(); }

// ---- Memory ----

void* scruple_sink::alloc_plane(i64 bytes) {
  if (options_.memory.alloc == nullptr) return engine_.alloc(bytes);
  void* const plane = options_.memory.alloc(options_.memory.context, bytes);
  if (plane == nullptr)
    fail(SCRUPLE_OUT_OF_MEMORY, "the sink's memory.alloc returned NULL for ", bytes, " bytes of a gradient");
  return plane;
}

void scruple_sink::free_plane(void* plane, i64 bytes) {
  if (options_.memory.free == nullptr)
    engine_.free(plane);
  else
    options_.memory.free(options_.memory.context, plane, bytes);
}

// One block for all that have no memory yet: a call of the caller's allocator may take longer than a fold.
void scruple_sink::alloc_gradients(const std::set<i64>& tensors) {
  constexpr i64 kAligned = 16;
  i64 bytes = 0;
  std::vector<std::pair<void**, i64>> planes;  // and their places in the block
  for (const i64 tensor : tensors) {
    scruple_array& gradient = row(tensor).arrays[SCRUPLE_GRADIENT];
    const Bytes sizes = bytes_of(*gradient.format, row(tensor).size);
    for (const auto& [plane, size] : {std::pair{&gradient.codes, sizes.codes}, {&gradient.aux, sizes.aux}}) {
      if (*plane != nullptr || size == 0) continue;
      planes.emplace_back(plane, bytes);
      bytes += (size + kAligned - 1) / kAligned * kAligned;
    }
  }
  if (bytes == 0) return;
  Block& block = blocks_.emplace_back();
  block.bytes = bytes;
  block.memory = alloc_plane(bytes);
  for (const auto& [plane, place] : planes) {
    *plane = static_cast<u8*>(block.memory) + place;
    block.planes.push_back(plane);
  }
}

void scruple_sink::free_gradients() {
  for (const Block& block : blocks_) {
    for (void** plane : block.planes) *plane = nullptr;
    if (block.memory != nullptr) free_plane(block.memory, block.bytes);
  }
  blocks_.clear();
}

void scruple_sink::free_all() {
  free_gradients();
  if (memory_ != nullptr) engine_.free(memory_);
  memory_ = nullptr;
}

// ---- Pieces ----

// The piece as a tensor of its own: the weight and moments that belong to it, and the gradient that arrives.
scruple_tensor scruple_sink::view(const scruple_piece& piece) {
  if (piece.tensor < 0 || piece.tensor >= count())
    fail(SCRUPLE_INVALID, "a piece of tensor ", piece.tensor, "; the sink has ", count(),
         " tensors, counted from 0");
  scruple_tensor part = view_of(row(piece.tensor), piece.first, piece.size,
                                "tensor " + std::to_string(piece.tensor) + ": a piece");
  part.arrays[SCRUPLE_GRADIENT] = piece.gradient;
  part.arrays[SCRUPLE_GRADIENT].owned = 0;
  check_array(part, piece.tensor, SCRUPLE_GRADIENT, true);
  if (piece.gradient.rounding == kDither)
    fail(SCRUPLE_UNSUPPORTED, "tensor ", piece.tensor,
         ": a dithered gradient cannot be added to a sink; decode it first");
  return part;
}

void scruple_sink::take(const scruple_piece& piece, Before& before) {
  State& s = state(piece.tensor);
  if (s.added.overlaps(piece.first, piece.size))
    fail(SCRUPLE_INVALID, "tensor ", piece.tensor, ": elements from ", piece.first, " to ",
         piece.first + piece.size,
         " came already, in part or whole, in this micro-batch; add each once, and call scruple_sink_end "
         "between "
         "micro-batches");
  before.try_emplace(piece.tensor, s.added);
  s.added.add(piece.first, piece.size);
}

void scruple_sink::add(const scruple_piece* pieces, i64 n) {
  const std::lock_guard lock(mutex_);
  if (n < 0 || (n > 0 && pieces == nullptr)) fail(SCRUPLE_INVALID, n, " pieces at ", pieces);
  Before before;
  try {
    std::vector<scruple_tensor> views;
    for (i64 i = 0; i < n; ++i) {
      views.push_back(view(pieces[i]));
      take(pieces[i], before);
    }
    released() ? release(pieces, views) : fold(pieces, views);
  } catch (...) {
    for (auto& [tensor, coverage] : before) state(tensor).added = std::move(coverage);
    throw;
  }
}

// ---- Stored and compressed: fold now, step at the end ----

void scruple_sink::fold(const scruple_piece* pieces, const std::vector<scruple_tensor>& views) {
  struct Table {
    std::vector<scruple_tensor> into;
    std::vector<scruple_array> incoming;
  };
  std::map<i64, Table> tables;  // by counter: dithered accumulators are written under their tensor's step
  const float multiplier = 1.0f / static_cast<float>(options_.micro_batches);
  std::set<i64> whole;
  for (std::size_t i = 0; i < views.size(); ++i) whole.insert(pieces[i].tensor);
  alloc_gradients(whole);
  for (std::size_t i = 0; i < views.size(); ++i) {
    Table& table = tables[state(pieces[i].tensor).counter];
    table.into.push_back(view_of(row(pieces[i].tensor), pieces[i].first, pieces[i].size, "a piece"));
    table.incoming.push_back(views[i].arrays[SCRUPLE_GRADIENT]);
  }
  for (const auto& [counter, table] : tables)
    check_fold(table.into.data(), table.incoming.data(), static_cast<i64>(table.into.size()), multiplier);
  for (const auto& [counter, table] : tables)
    engine_.fold(table.into.data(), table.incoming.data(), static_cast<i64>(table.into.size()), multiplier,
                 &tensors_[counter].steps);
}

// The tensors that got a gradient in this step, in one table for each step counter. A counter is a number in the
// engine's memory, since only the device knows whether a step is taken or skipped. All tensors begin with
// counter 0, so a step is one table and one launch. Where tensors 3 and 4 get no gradient in step 10, they move
// to a counter of their own, which stays at 9 while counter 0 goes on to 10.
std::map<i64, std::vector<scruple_tensor>> scruple_sink::tables_by_counter() {
  std::map<i64, std::vector<scruple_tensor>> tables;
  std::vector<bool> used(states_.size());
  for (i64 i = 0; i < count(); ++i) {
    used[static_cast<std::size_t>(state(i).counter)] = true;
    if (row(i).folds > 0) tables[state(i).counter].push_back(row(i));
  }
  std::map<i64, i64> left;  // counter -> the one for those that stay behind
  for (i64 i = 0; i < count(); ++i) {
    const i64 counter = state(i).counter;
    if (row(i).folds > 0 || !tables.contains(counter)) continue;
    if (!left.contains(counter)) {
      i64 fresh = 0;  // there is one: no more counters are in use than there are tensors
      while (used[static_cast<std::size_t>(fresh)]) ++fresh;
      used[static_cast<std::size_t>(fresh)] = true;
      engine_.copy(&tensors_[fresh].steps, &tensors_[counter].steps, sizeof(i64));
      left[counter] = fresh;
    }
    state(i).counter = left[counter];
  }
  return tables;
}

void scruple_sink::step_all() {
  const auto tables = tables_by_counter();
  if (tables.empty() && options_.reduce.add == nullptr) return;

  scruple_measure_options measure = SCRUPLE_MEASURE_OPTIONS_INIT;
  measure.max_norm = options_.max_norm;
  measure.loss_scale = loss_scale();
  measure.norm = &cells_->norm;
  measure.found_inf = &cells_->found_inf;
  measure.clip = &cells_->clip;
  measure.sum = &cells_->sum;
  for (const auto& [counter, table] : tables) {
    measure.steps = &tensors_[counter].steps;
    engine_.measure(table.data(), static_cast<i64>(table.size()), measure);
    measure.sum_before = &cells_->sum;
  }
  if (options_.reduce.add != nullptr) {
    measure.steps = nullptr;
    if (tables.empty()) engine_.measure(nullptr, 0, measure);  // zero
    if (options_.reduce.add(options_.reduce.context, &cells_->sum) != 0)
      fail(SCRUPLE_INVALID, "the sink's reduce.add failed; the step was not taken");
    measure.sum_before = &cells_->sum;
    engine_.measure(nullptr, 0, measure);
  }

  scruple_step_options step = SCRUPLE_STEP_OPTIONS_INIT;
  step.found_inf = &cells_->found_inf;
  step.clip = &cells_->clip;
  step.loss_scale = loss_scale();
  for (const auto& [counter, table] : tables) {
    const i64 n = static_cast<i64>(table.size());
    step.steps = &tensors_[counter].steps;
    engine_.step(table.data(), n, check_step(table.data(), n, engine_.checked), step);
  }

  for (const auto& [counter, table] : tables)
    engine_.advance({&cells_->found_inf, nullptr, &tensors_[counter].steps});
  engine_.advance({&cells_->found_inf, &cells_->scaler, &cells_->steps, &cells_->skipped});
  if (options_.policy == SCRUPLE_COMPRESSED && options_.micro_batches == 1) free_gradients();
}

// ---- Released: step now ----

void scruple_sink::check_measured(const scruple_piece& piece) {
  const State& s = state(piece.tensor);
  const i64 size = row(piece.tensor).size, shown = s.measured;
  const bool whole = piece.size == size && shown == 0;
  const bool is_judged_alone = only_guards_ && shown <= s.added.size() - piece.size;
  if (measures_ && !whole && !is_judged_alone && shown < size)
    fail(SCRUPLE_INVALID, "tensor ", piece.tensor, ": a piece of ", piece.size, " of its ", size,
         " elements was added, but its norm is of ", shown,
         "; show every piece to scruple_sink_measure first, or add the tensor whole");
}

void scruple_sink::release(const scruple_piece* pieces, const std::vector<scruple_tensor>& views) {
  for (std::size_t i = 0; i < views.size(); ++i) {
    check_measured(pieces[i]);
    if (options_.micro_batches > 1) check_accumulates(views[i], pieces[i].tensor, options_);
  }
  const i64 n = static_cast<i64>(views.size());
  const u64 version = check_step(views.data(), n, engine_.checked);  // all, before any is written
  for (std::size_t i = 0; i < views.size(); ++i) {
    const i64 tensor = pieces[i].tensor;
    if (views[i].size == 0) continue;
    const i64 shown = state(tensor).measured;
    if (measures_ && (only_guards_ ? shown < row(tensor).size : shown == 0)) measure_view(views[i], tensor);
    step_view(views[i], tensor, n == 1 ? version : 0);
  }
  // Once a tensor is whole its step is over; not before, since every piece reads the same count.
  std::set<i64> whole;
  for (std::size_t i = 0; i < views.size(); ++i)
    if (views[i].size > 0 && state(pieces[i].tensor).added.size() == row(pieces[i].tensor).size)
      whole.insert(pieces[i].tensor);
  for (const i64 tensor : whole) {
    if (!is_last()) break;
    TensorCells& cells = tensors_[tensor];
    engine_.advance(
        {measures_ ? &cells.found_inf : nullptr, nullptr, &cells.steps, &cells_->skipped, &cells_->any});
  }
}

void scruple_sink::step_view(const scruple_tensor& part, i64 tensor, u64 version) {
  TensorCells& cells = tensors_[tensor];
  scruple_step_options step = SCRUPLE_STEP_OPTIONS_INIT;
  step.multiplier = 1.0f / static_cast<float>(options_.micro_batches);
  step.loss_scale = loss_scale();
  step.steps = &cells.steps;
  // The tensor's own first part decays its moments, the step's last micro-batch moves the weight.
  step.part = static_cast<int>(row(tensor).folds);
  step.parts = is_last() ? step.part + 1 : options_.micro_batches;
  if (measures_) {
    step.found_inf = &cells.found_inf;
    step.clip = &cells.clip;
  }
  engine_.step(&part, 1, version, step);
}

// Adds to the tensor's sum of squares; with its last piece, norm, flag and factor are known. Micro-batches are only
// guarded: their sums add up, so that one that is not finite holds until the step's end.
void scruple_sink::measure_view(const scruple_tensor& part, i64 tensor) {
  TensorCells& cells = tensors_[tensor];
  i64& shown = state(tensor).measured;
  scruple_measure_options measure = SCRUPLE_MEASURE_OPTIONS_INIT;
  measure.loss_scale = loss_scale();
  measure.sum = &cells.sum;
  measure.skip = options_.skip;
  if (shown > 0 || row(tensor).folds > 0) measure.sum_before = &cells.sum;
  if (only_guards_ || shown + part.size == row(tensor).size) {
    measure.max_norm = options_.tensor_norm;
    measure.found_inf = &cells.found_inf;
    measure.clip = &cells.clip;
    measure.adagc = options_.adagc;
    if (options_.adagc > 0) measure.gamma = &cells.gamma;
  }
  engine_.measure(&part, 1, measure);
  shown += part.size;
}

void scruple_sink::measure(const scruple_piece* pieces, i64 n) {
  const std::lock_guard lock(mutex_);
  if (n < 0 || (n > 0 && pieces == nullptr)) fail(SCRUPLE_INVALID, n, " pieces at ", pieces);
  if (!measures_)
    fail(SCRUPLE_INVALID,
         "this sink measures nothing piece by piece; call scruple_sink_measure only where "
         "scruple_sink_measures says 1");
  std::vector<scruple_tensor> views;
  std::map<i64, i64> shown;
  for (i64 i = 0; i < n; ++i) {
    const scruple_piece& piece = pieces[i];
    views.push_back(view(piece));
    i64& so_far = shown.try_emplace(piece.tensor, state(piece.tensor).measured).first->second;
    if (piece.first != so_far || state(piece.tensor).added.size() > 0)
      fail(SCRUPLE_INVALID, "tensor ", piece.tensor, ": a piece from ", piece.first, " was shown after ",
           so_far, " elements, of which ", state(piece.tensor).added.size(),
           " have been added; show all pieces of a tensor once, in order, and then add them");
    so_far += piece.size;
  }
  for (i64 i = 0; i < n; ++i)
    if (pieces[i].size > 0) measure_view(views[static_cast<std::size_t>(i)], pieces[i].tensor);
}

// ---- The end of a micro-batch ----

void scruple_sink::check_complete() {
  for (i64 i = 0; i < count(); ++i) {
    const i64 size = row(i).size, came = state(i).added.size();
    if (came != size && (came > 0 || state(i).measured > 0))
      fail(SCRUPLE_INVALID, "tensor ", i, " got ", came, " of its ", size, " elements in this micro-batch (",
           state(i).measured,
           " were measured); add the rest and end it again, or leave a tensor out altogether");
    if (released() && is_last() && came == 0 && row(i).folds > 0)
      fail(SCRUPLE_INVALID, "tensor ", i,
           " came in an earlier micro-batch of this step but not in the last, with "
           "which its weight moves; add zeros for it and end again, or use policy compressed");
  }
}

void scruple_sink::end() {
  const std::lock_guard lock(mutex_);
  check_complete();
  std::vector<i64*> folded;
  for (i64 i = 0; i < count(); ++i)
    if (state(i).added.size() > 0) folded.push_back(&row(i).folds);
  for (i64* folds : folded) ++*folds;
  if (is_last()) {
    try {
      released() ? end_released() : step_all();
    } catch (...) {
      for (i64* folds : folded) --*folds;
      throw;
    }
    for (scruple_tensor& t : rows_) t.folds = 0;
  }
  for (State& s : states_) {
    s.added.clear();
    s.measured = 0;
  }
  micro_batch_ = is_last() ? 0 : micro_batch_ + 1;
}

void scruple_sink::end_released() {
  bool came = false;
  for (const scruple_tensor& t : rows_) came = came || t.folds > 0;
  if (!came) return;
  engine_.copy(&cells_->found_inf, &cells_->any, sizeof(float));
  engine_.advance({&cells_->any, &cells_->scaler, &cells_->steps, nullptr, nullptr, &cells_->any});
}

// ---- What the host may see ----

scruple_sink_report scruple_sink::read() {
  const std::lock_guard lock(mutex_);
  SinkCells cells{};
  engine_.copy(&cells, cells_, sizeof cells);
  engine_.synchronize();
  return {cells.norm, cells.found_inf, cells.clip, cells.steps, cells.skipped, cells.scaler};
}

void scruple_sink::read_tensors(i64* steps, double* adagc_norms) {
  const std::lock_guard lock(mutex_);
  std::vector<TensorCells> cells(rows_.size());
  engine_.copy(cells.data(), tensors_, static_cast<i64>(cells.size() * sizeof(TensorCells)));
  engine_.synchronize();
  for (std::size_t i = 0; i < cells.size(); ++i) {
    if (steps != nullptr)
      steps[i] = rows_[i].step + cells.at(static_cast<std::size_t>(states_[i].counter)).steps;
    if (adagc_norms != nullptr) adagc_norms[i] = cells[i].gamma;
  }
}
