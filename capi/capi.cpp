// scruple.h implemented over the rooms below, but for checkpoints: checks, then one call. This room alone catches.
#include <cmath>
#include <cstddef>
#include <cstring>
#include <string>

#include "capi/guard.h"
#include "engine/clip.h"
#include "engine/engine.h"
#include "engine/scaler.h"
#include "grad/sink.h"

namespace {

thread_local std::string last_error;

}  // namespace

scruple_status scruple::failed(scruple_status status, const char* message) noexcept {
  try {
    last_error = message;
  } catch (...) {
    last_error.clear();  // no memory for the message: the status must do
  }
  return status;
}

namespace {

using namespace scruple;

// Whether two ranges of bytes share one.
bool overlap(const void* a, int64_t a_bytes, const void* b, int64_t b_bytes) {
  const auto *first = static_cast<const char*>(a), *second = static_cast<const char*>(b);
  return a_bytes > 0 && b_bytes > 0 && first < second + b_bytes && second < first + a_bytes;
}

void check_values(const scruple_tensor& t, int array, const scruple_format& format, const void* values) {
  if (t.size > 0 && values == nullptr) fail(SCRUPLE_INVALID, "values is null");
  const scruple_array& planes = t.arrays[array];
  const Bytes bytes = bytes_of(*planes.format, t.size);
  const int64_t value_bytes = bytes_of(format, t.size).codes;
  if (overlap(values, value_bytes, planes.codes, bytes.codes) ||
      overlap(values, value_bytes, planes.aux, bytes.aux))
    fail(SCRUPLE_INVALID, "values overlaps the planes of ", array_name(t, array),
         "; give it memory of its own");
}

// Options as far as the caller's version of the struct goes, over the defaults; `least` bytes must be there.
template <class Options>
Options read_options(const Options* given, Options all, std::size_t least, const char* what,
                     const char* init) {
  if (given == nullptr) return all;
  if (given->struct_size < least || given->struct_size > sizeof all)
    fail(SCRUPLE_INVALID, what, " options of ", given->struct_size, " bytes, this library knows ", sizeof all,
         "; start from ", init);
  std::memcpy(&all, given, given->struct_size);
  return all;
}

template <class List>
const auto& entry(const List& list, int index, const char* what) {
  if (index < 0 || static_cast<std::size_t>(index) >= std::size(list))
    fail(SCRUPLE_INVALID, what, " ", index, " does not exist; there are ", std::size(list));
  return list[static_cast<std::size_t>(index)];
}

scruple_bound public_bound(const Bound& b) { return {b.relative, b.group, b.absolute}; }

const char* or_null(const char* name) { return *name == 0 ? nullptr : name; }

void check_array_index(const scruple_tensor& t, int array) {
  check_tensor(t, 0);
  const bool slot_exists = array >= SCRUPLE_SLOT && array < SCRUPLE_GRADIENT &&
                           static_cast<std::size_t>(array - SCRUPLE_SLOT) < t.optimizer->rule().slots.size();
  if (array != SCRUPLE_WEIGHT && array != SCRUPLE_GRADIENT && !slot_exists)
    fail(SCRUPLE_INVALID, t.optimizer->rule().name, " has no array ", array, "; it has weight (0), ",
         t.optimizer->rule().slots.size(), " slots (from 1) and gradient (", +SCRUPLE_GRADIENT, ")");
}

void use_format(scruple_array& array, const char* format, Rounding rounding) {
  array.format = &find_format(format);
  array.rounding = rounding;
}

void reset_slots(scruple_engine& engine, const scruple_tensor& t, uint32_t mask) {
  for (int s = 0; s < SCRUPLE_MAX_SLOTS; ++s)
    if ((mask >> (SCRUPLE_SLOT + s) & 1u) != 0 && is_used(t, SCRUPLE_SLOT + s))
      engine.fill(t, SCRUPLE_SLOT + s, static_cast<float>(t.optimizer->initial(s)));
}

void release(scruple_engine& engine, scruple_tensor& t) {
  for (int a = 0; a < SCRUPLE_ARRAYS; ++a) {
    scruple_array& array = t.arrays[a];
    const auto free = [&](void*& plane, bool aux) {
      is_on_host(t, a, aux) ? engine.free_host(plane) : engine.free(plane);
      plane = nullptr;
    };
    if ((array.owned & 1) != 0) free(array.codes, false);
    if ((array.owned & 2) != 0) free(array.aux, true);
    array.owned = 0;
  }
}

void allocate(scruple_engine& engine, scruple_tensor& t, uint32_t mask) {
  for (int a = 0; a < SCRUPLE_ARRAYS; ++a) {
    if ((mask >> a & 1u) == 0 || !is_used(t, a)) continue;
    scruple_array& array = t.arrays[a];
    const Bytes bytes = bytes_of(*array.format, t.size);
    const auto alloc = [&](i64 size, bool aux) {
      return is_on_host(t, a, aux) ? engine.alloc_host(size) : engine.alloc(size);
    };
    if (array.codes == nullptr) array.codes = alloc(bytes.codes, false), array.owned |= 1;
    if (array.aux == nullptr && bytes.aux > 0) array.aux = alloc(bytes.aux, true), array.owned |= 2;
    if ((array.owned & 1) == 0) mask &= ~(1u << a);  // it may hold state already
  }
  reset_slots(engine, t, mask);
}

}  // namespace

extern "C" {

const char* scruple_version(void) { return SCRUPLE_VERSION; }
int scruple_abi_version(void) { return SCRUPLE_ABI_VERSION; }
const char* scruple_last_error(void) { return last_error.c_str(); }

// ---- Registry ----

int scruple_format_count(void) { return static_cast<int>(formats().size()); }

const scruple_format* scruple_format_at(int index) {
  const scruple_format* found = nullptr;
  guarded([&] { found = &entry(formats(), index, "format"); });
  return found;
}

const char* scruple_rounding_name(int rounding) {
  return rounding >= 0 && rounding < kRoundings ? rounding_name(rounding) : nullptr;
}

int scruple_format_reads_as(const scruple_format* format, int rounding) {
  return format == nullptr || scruple_rounding_name(rounding) == nullptr ? -1 : reads_as(*format, rounding);
}

const scruple_format* scruple_format_find(const char* name) {
  const scruple_format* found = nullptr;
  guarded([&] { found = &find_format(name); });
  return found;
}

scruple_status scruple_get_format_info(const scruple_format* format, scruple_format_info* out) {
  return guarded([&] {
    const scruple_format& f = required(format, "format");
    const unsigned roundings = f.roundings[0] | f.roundings[1];
    const double bits = f.layout.code_bits + static_cast<double>(f.layout.aux_bits) / f.layout.group;
    required(out, "out") = {f.name,
                            f.doc,
                            f.roles,
                            roundings,
                            f.layout.group,
                            f.layout.code_bits,
                            f.layout.aux_bits,
                            f.aux_is_scale,
                            bits,
                            public_bound(f.bound[0]),
                            public_bound(f.bound[1])};
  });
}

scruple_status scruple_format_bytes(const scruple_format* format, int64_t size, int64_t* codes,
                                    int64_t* aux) {
  return guarded([&] {
    if (size < 0 || size > kMaxElements) fail(SCRUPLE_INVALID, "size is ", size, "; it must be 0 to 2^50");
    const Bytes bytes = bytes_of(required(format, "format"), size);
    int64_t &codes_out = required(codes, "codes"), &aux_out = required(aux, "aux");
    codes_out = bytes.codes;
    aux_out = bytes.aux;
  });
}

int scruple_recipe_count(void) { return static_cast<int>(recipes().size()); }

scruple_status scruple_recipe_at(int index, scruple_recipe_info* out) {
  return guarded([&] {
    const Recipe& r = entry(recipes(), index, "recipe");
    required(out, "out") = {r.name,
                            r.doc,
                            r.weight,
                            r.moment,
                            or_null(r.nonneg),
                            r.gradient,
                            static_cast<scruple_rounding>(r.weight_rounding),
                            static_cast<scruple_rounding>(r.moment_rounding),
                            static_cast<scruple_rounding>(r.nonneg_rounding),
                            static_cast<scruple_rounding>(r.gradient_rounding),
                            r.small};
  });
}

int scruple_rule_count(void) {
  int count = 0;
  guarded([&] { count = static_cast<int>(rules().size()); });
  return count;
}

scruple_status scruple_rule_at(int rule, scruple_rule_info* out) {
  return guarded([&] {
    const RuleInfo& r = entry(rules(), rule, "optimizer");
    required(out, "out") = {r.name, r.doc, static_cast<int32_t>(r.slots.size()),
                            static_cast<int32_t>(r.hypers.size())};
  });
}

scruple_status scruple_rule_slot(int rule, int slot, scruple_slot_info* out) {
  return guarded([&] {
    const Slot& s = entry(entry(rules(), rule, "optimizer").slots, slot, "slot");
    required(out, "out") = {s.name, s.sign == Sign::nonneg ? SCRUPLE_ROLE_NONNEG : SCRUPLE_ROLE_SIGNED,
                            s.optional};
  });
}

scruple_status scruple_rule_hyper(int rule, int hyper, scruple_hyper_info* out) {
  return guarded([&] {
    const HyperField& h = entry(entry(rules(), rule, "optimizer").hypers, hyper, "hyperparameter");
    required(out, "out") = {h.name, h.doc, h.value, h.range == Range::flag};
  });
}

int scruple_engine_count(void) {
  int count = 0;
  guarded([&] { count = static_cast<int>(engines().size()); });
  return count;
}

scruple_status scruple_engine_at(int index, scruple_engine_info* out) {
  return guarded([&] {
    const EngineInfo& e = entry(engines(), index, "engine");
    required(out, "out") = {e.name.c_str(), e.doc.c_str(), e.reason.empty(), e.reason.c_str()};
  });
}

// ---- Engines and optimizers ----

scruple_status scruple_engine_create(const char* name, int threads, scruple_engine** out) {
  return guarded([&] {
    scruple_engine*& made = required(out, "out");  // before anything is made that could leak
    made = make_engine(name, threads).release();
  });
}
void scruple_engine_destroy(scruple_engine* engine) { delete engine; }
const char* scruple_engine_name(const scruple_engine* engine) {
  return engine == nullptr ? "" : engine->name();
}
int scruple_engine_threads(const scruple_engine* engine) { return engine == nullptr ? 0 : engine->threads(); }

scruple_status scruple_engine_set_stream(scruple_engine* engine, void* stream) {
  return guarded([&] { required(engine, "engine").set_stream(stream); });
}
scruple_status scruple_engine_synchronize(scruple_engine* engine) {
  return guarded([&] { required(engine, "engine").synchronize(); });
}

scruple_status scruple_copy(scruple_engine* engine, void* to, const void* from, int64_t bytes) {
  return guarded([&] {
    if (bytes < 0) fail(SCRUPLE_INVALID, "bytes is ", bytes, "; it must be at least 0");
    if (bytes > 0 && (to == nullptr || from == nullptr)) fail(SCRUPLE_INVALID, "cannot copy to or from null");
    if (overlap(to, bytes, from, bytes)) fail(SCRUPLE_INVALID, "cannot copy between ranges that overlap");
    required(engine, "engine").copy(to, from, bytes);
  });
}

scruple_status scruple_optimizer_create(const char* rule, scruple_optimizer** out) {
  return guarded([&] {
    scruple_optimizer*& made = required(out, "out");
    made = make_optimizer(rule).release();
  });
}
void scruple_optimizer_destroy(scruple_optimizer* optimizer) { delete optimizer; }
int scruple_optimizer_rule(const scruple_optimizer* optimizer) {
  return optimizer == nullptr ? -1 : optimizer->rule().index;
}
scruple_status scruple_optimizer_set(scruple_optimizer* optimizer, const char* name, double value) {
  return guarded([&] { required(optimizer, "optimizer").set(name, value); });
}
scruple_status scruple_optimizer_get(const scruple_optimizer* optimizer, const char* name, double* out) {
  return guarded([&] { required(out, "out") = required(optimizer, "optimizer").get(name); });
}
scruple_status scruple_optimizer_read_lr(scruple_optimizer* optimizer, const double* lr) {
  return guarded([&] { required(optimizer, "optimizer").lr_at = lr; });
}
scruple_status scruple_optimizer_set_seed(scruple_optimizer* optimizer, uint64_t seed) {
  return guarded([&] { required(optimizer, "optimizer").seed = seed; });
}
uint64_t scruple_optimizer_seed(const scruple_optimizer* optimizer) {
  return optimizer == nullptr ? 0 : optimizer->seed;
}

// ---- Tensors ----

scruple_status scruple_tensor_use(scruple_tensor* tensor, const char* recipe) {
  return guarded([&] {
    scruple_tensor t = required(tensor, "tensor");
    check_tensor(t, 0);
    for (const scruple_array& array : t.arrays)
      if (array.owned != 0)
        fail(SCRUPLE_INVALID, "this tensor owns planes of another layout; call scruple_tensor_free first");
    const Recipe& wanted = find_recipe(recipe);
    const Recipe& r = t.size <= wanted.small ? find_recipe("fp32") : wanted;
    use_format(t.arrays[SCRUPLE_WEIGHT], r.weight, r.weight_rounding);
    use_format(t.arrays[SCRUPLE_GRADIENT], r.gradient, r.gradient_rounding);
    const RuleInfo& rule = t.optimizer->rule();
    for (std::size_t s = 0; s < rule.slots.size(); ++s) {
      const bool nonneg = rule.slots[s].sign == Sign::nonneg;
      const char* format = nonneg ? wanted.nonneg : wanted.moment;
      if (*format == 0) {
        std::string suited;
        for (const RuleInfo& other : rules()) {
          bool fits = true;
          for (const Slot& slot : other.slots) fits = fits && slot.sign != Sign::nonneg;
          if (fits) suited += (suited.empty() ? "" : ", ") + std::string(other.name);
        }
        fail(SCRUPLE_UNSUPPORTED, "recipe ", wanted.name, " has no format for ", rule.slots[s].name, " of ",
             rule.name, ", ", role_name(SCRUPLE_ROLE_NONNEG), "; it serves: ", suited, "; with ", rule.name,
             " choose recipe scruple and weights in int12");
      }
      scruple_array& slot = t.arrays[SCRUPLE_SLOT + s];
      if (role_in_step(t, static_cast<int>(SCRUPLE_SLOT + s)) == SCRUPLE_ROLE_EXACT)
        use_format(slot, "fp32", kNearest);
      else if (nonneg)
        use_format(slot, r.nonneg, r.nonneg_rounding);
      else
        use_format(slot, r.moment, r.moment_rounding);
    }
    *tensor = t;
  });
}

scruple_status scruple_tensor_array(const scruple_tensor* tensor, int array, const char** name, int* role,
                                    int* used) {
  return guarded([&] {
    const scruple_tensor& t = required(tensor, "tensor");
    check_array_index(t, array);
    if (name != nullptr) *name = array_name(t, array);
    if (role != nullptr) *role = static_cast<int>(role_in_step(t, array));
    if (used != nullptr) *used = is_used(t, array);
  });
}

int scruple_tensor_on_host(const scruple_tensor* tensor, int array, int aux) {
  int found = 0;
  guarded([&] {
    const scruple_tensor& t = required(tensor, "tensor");
    check_array_index(t, array);
    found = t.arrays[array].format != nullptr && is_on_host(t, array, aux != 0) ? 1 : 0;
  });
  return found;
}

scruple_status scruple_tensor_alloc(scruple_engine* engine, scruple_tensor* tensor, uint32_t mask) {
  return guarded([&] {
    scruple_engine& e = required(engine, "engine");
    scruple_tensor t = required(tensor, "tensor");
    check_tensor(t, 0);
    for (int a = 0; a < SCRUPLE_ARRAYS; ++a)
      if ((mask >> a & 1u) != 0 && is_used(t, a)) check_array(t, 0, a, false);
    scruple_tensor fresh = t;  // owns only what this call allocates, so that a failure gives back just that
    for (scruple_array& array : fresh.arrays) array.owned = 0;
    try {
      allocate(e, fresh, mask);
    } catch (...) {
      release(e, fresh);
      throw;
    }
    for (int a = 0; a < SCRUPLE_ARRAYS; ++a) fresh.arrays[a].owned |= t.arrays[a].owned;
    *tensor = fresh;
  });
}

void scruple_tensor_free(scruple_engine* engine, scruple_tensor* tensor) {
  if (engine != nullptr && tensor != nullptr) release(*engine, *tensor);
}

scruple_status scruple_tensor_reset(scruple_engine* engine, const scruple_tensor* tensor) {
  return guarded([&] {
    const scruple_tensor& t = required(tensor, "tensor");
    scruple_engine& e = required(engine, "engine");
    check_tensor(t, 0);
    for (int s = SCRUPLE_SLOT; s < SCRUPLE_SLOT + SCRUPLE_MAX_SLOTS; ++s)
      if (is_used(t, s)) check_array(t, 0, s, true);
    reset_slots(e, t, ~0u);
  });
}

scruple_status scruple_tensor_view(const scruple_tensor* tensor, int64_t first, int64_t size,
                                   scruple_tensor* out) {
  return guarded([&] {
    const scruple_tensor& t = required(tensor, "tensor");
    check_tensor(t, 0);
    required(out, "out") = view_of(t, first, size, "a view");
  });
}

scruple_status scruple_encode(scruple_engine* engine, const scruple_tensor* tensor, int array,
                              const float* values) {
  return guarded([&] {
    const scruple_tensor& t = required(tensor, "tensor");
    check_array_index(t, array);
    check_array(t, 0, array, true);
    check_values(t, array, find_format("fp32"), values);
    required(engine, "engine").encode(t, array, values);
  });
}

scruple_status scruple_decode(scruple_engine* engine, const scruple_tensor* tensor, int array,
                              float* values) {
  return scruple_decode_as(engine, tensor, array, scruple_format_find("fp32"), values);
}

scruple_status scruple_decode_as(scruple_engine* engine, const scruple_tensor* tensor, int array,
                                 const scruple_format* format, void* values) {
  return guarded([&] {
    const scruple_tensor& t = required(tensor, "tensor");
    check_array_index(t, array);
    check_array(t, 0, array, true);
    const scruple_format& to = required(format, "format");
    if (to.layout.group > 1 || to.layout.aux_bits > 0)
      fail(SCRUPLE_INVALID, "decoding ", array_name(t, array), " to ", to.name,
           ", which has two planes; decode to fp32, bf16 or fp16");
    check_values(t, array, to, values);
    required(engine, "engine").decode(t, array, to, values);
  });
}

// ---- The step and its gradients ----

scruple_status scruple_step(scruple_engine* engine, const scruple_tensor* tensors, int64_t count,
                            const scruple_step_options* options) {
  return guarded([&] {
    scruple_engine& e = required(engine, "engine");
    const scruple_step_options all = read_options<scruple_step_options>(
        options, SCRUPLE_STEP_OPTIONS_INIT, offsetof(scruple_step_options, found_inf), "step",
        "SCRUPLE_STEP_OPTIONS_INIT");
    if (!std::isfinite(all.multiplier) || all.multiplier == 0)
      fail(SCRUPLE_INVALID, "multiplier is ", all.multiplier,
           "; it must be finite and not 0 (start from SCRUPLE_STEP_OPTIONS_INIT)");
    if (all.parts < 1 || all.part < 0 || all.part >= all.parts)
      fail(SCRUPLE_INVALID, "part ", all.part, " of ", all.parts, "; parts count from 0 to parts - 1");
    const u64 version = check_step(tensors, count, e.checked);
    for (int64_t i = 0; i < count && all.parts > 1; ++i) check_parts(tensors[i], i);
    e.step(tensors, count, version, all);
  });
}

scruple_status scruple_norm(scruple_engine* engine, const scruple_tensor* tensors, int64_t count,
                            double* norm, float* found_inf) {
  return guarded([&] {
    scruple_engine& e = required(engine, "engine");
    check_gradients(tensors, count);
    const Measured all = measured(e.sum_squares(tensors, count), 1, 0);
    if (norm != nullptr) *norm = all.norm;
    if (found_inf != nullptr) *found_inf = all.found_inf;
  });
}

scruple_status scruple_measure(scruple_engine* engine, const scruple_tensor* tensors, int64_t count,
                               const scruple_measure_options* options) {
  return guarded([&] {
    scruple_engine& e = required(engine, "engine");
    const scruple_measure_options all = read_options<scruple_measure_options>(
        &required(options, "options"), SCRUPLE_MEASURE_OPTIONS_INIT,
        offsetof(scruple_measure_options, loss_scale), "measure", "SCRUPLE_MEASURE_OPTIONS_INIT");
    if (!(all.max_norm >= 0 && std::isfinite(all.max_norm)))
      fail(SCRUPLE_INVALID, "max_norm is ", all.max_norm, "; it must be finite and at least 0 (0: no limit)");
    if (all.gamma != nullptr && !(all.adagc > 0 && std::isfinite(all.adagc)))
      fail(SCRUPLE_INVALID, "adagc is ", all.adagc,
           "; with gamma it must be finite and above 0 (such as 1.05)");
    check_gradients(tensors, count);
    e.measure(tensors, count, all);
  });
}

float scruple_clip_factor(double norm, double max_norm) { return clip_factor(norm, max_norm); }

scruple_status scruple_fold(scruple_engine* engine, const scruple_tensor* tensors,
                            const scruple_array* incoming, int64_t count, float multiplier,
                            const int64_t* steps) {
  return guarded([&] {
    scruple_engine& e = required(engine, "engine");
    check_fold(tensors, incoming, count, multiplier);
    e.fold(tensors, incoming, count, multiplier, steps);
  });
}

scruple_status scruple_clear(scruple_engine* engine, const scruple_tensor* tensors, int64_t count) {
  return guarded([&] {
    scruple_engine& e = required(engine, "engine");
    check_gradients(tensors, count);
    e.clear(tensors, count);
  });
}

// ---- Loss scaling ----

scruple_scaler scruple_scaler_dynamic(void) { return kDynamicScaler; }

scruple_status scruple_scaler_static(float scale, scruple_scaler* out) {
  return guarded([&] {
    const scruple_scaler made{scale, 1.0f, 1.0f, kDynamicScaler.interval, 0};
    check_scaler(made);
    required(out, "out") = made;
  });
}

scruple_status scruple_scaler_update(scruple_scaler* scaler, float found_inf) {
  return guarded([&] {
    scruple_scaler& s = required(scaler, "scaler");
    check_scaler(s);
    s = updated(s, found_inf != 0);
  });
}

scruple_status scruple_advance(scruple_engine* engine, const float* found_inf, scruple_scaler* scaler,
                               int64_t* steps) {
  return guarded([&] { required(engine, "engine").advance({found_inf, scaler, steps}); });
}

// ---- Gradient policies ----

scruple_status scruple_sink_create(scruple_engine* engine, const scruple_tensor* tensors, int64_t count,
                                   const scruple_sink_options* options, scruple_sink** out) {
  return guarded([&] {
    scruple_sink*& made = required(out, "out");
    scruple_engine& e = required(engine, "engine");
    const scruple_sink_options all = read_options<scruple_sink_options>(
        options, SCRUPLE_SINK_OPTIONS_INIT, offsetof(scruple_sink_options, max_norm), "sink",
        "SCRUPLE_SINK_OPTIONS_INIT");
    made = std::make_unique<scruple_sink>(e, tensors, count, all).release();
  });
}
void scruple_sink_destroy(scruple_sink* sink) { delete sink; }
int scruple_sink_measures(const scruple_sink* sink) {
  if (sink == nullptr || !sink->measures()) return 0;
  return sink->only_guards() ? 2 : 1;
}

scruple_status scruple_sink_measure(scruple_sink* sink, const scruple_piece* pieces, int64_t count) {
  return guarded([&] { required(sink, "sink").measure(pieces, count); });
}
scruple_status scruple_sink_add(scruple_sink* sink, const scruple_piece* pieces, int64_t count) {
  return guarded([&] { required(sink, "sink").add(pieces, count); });
}
scruple_status scruple_sink_end(scruple_sink* sink) {
  return guarded([&] { required(sink, "sink").end(); });
}
scruple_status scruple_sink_read(scruple_sink* sink, scruple_sink_report* out) {
  return guarded([&] {
    scruple_sink_report& report = required(out, "out");
    report = required(sink, "sink").read();
  });
}
scruple_status scruple_sink_read_tensors(scruple_sink* sink, int64_t* steps, double* adagc_norms) {
  return guarded([&] { required(sink, "sink").read_tensors(steps, adagc_norms); });
}
const float* scruple_sink_loss_scale(const scruple_sink* sink) {
  return sink == nullptr ? nullptr : sink->loss_scale();
}
const float* scruple_sink_found_inf(const scruple_sink* sink) {
  return sink == nullptr ? nullptr : sink->found_inf();
}

}  // extern "C"
