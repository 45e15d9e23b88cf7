// The checks that stand before every engine.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <ostream>

#include "engine/engine.h"
#include "engine/failure.h"
#include "engine/unit.h"

namespace scruple {
namespace {

bool is_slot_of(unsigned mask, int array) {
  return array >= SCRUPLE_SLOT && array < SCRUPLE_GRADIENT && (mask >> (array - SCRUPLE_SLOT) & 1u) != 0;
}

struct Interval {  // small: thousands are sorted at every step
  const unsigned char *begin, *end;
  u32 tensor;
  u16 array;
  bool written;
};

void add_planes(std::vector<Interval>& intervals, const scruple_array& array, i64 size, bool written,
                i64 tensor, int which) {
  for_planes(array, size, [&](const void* plane, i64 bytes) {
    const auto* begin = static_cast<const unsigned char*>(plane);
    intervals.push_back({begin, begin + bytes, static_cast<u32>(tensor), static_cast<u16>(which), written});
  });
}

// A plane that is written may not share a byte with any other plane; planes that are only read may.
void check_overlap(std::vector<Interval>& intervals, const scruple_tensor* tensors) {
  std::sort(intervals.begin(), intervals.end(),
            [](const Interval& a, const Interval& b) { return a.begin < b.begin; });
  const Interval *read = nullptr, *written = nullptr;  // of those seen, the ones that reach furthest
  for (const Interval& now : intervals) {
    const Interval* other = nullptr;
    if (written != nullptr && now.begin < written->end) other = written;
    if (now.written && read != nullptr && now.begin < read->end) other = read;
    if (other != nullptr)
      fail(SCRUPLE_INVALID, "tensor ", other->tensor, " (", array_name(tensors[other->tensor], other->array),
           ") and tensor ", now.tensor, " (", array_name(tensors[now.tensor], now.array),
           ") overlap in memory; give each plane its own, and list a tied weight once");
    const Interval*& furthest = now.written ? written : read;
    if (furthest == nullptr || now.end > furthest->end) furthest = &now;
  }
}

void check_table(const void* tensors, i64 count) {
  if (count < 0) fail(SCRUPLE_INVALID, "count is ", count, "; it must be at least 0");
  if (tensors == nullptr && count > 0)
    fail(SCRUPLE_INVALID, "the table of tensors is null but count is ", count);
}

// Which array of which tensor; a message only when something is wrong with it.
struct Where {
  i64 tensor;
  const char* array;
};
std::ostream& operator<<(std::ostream& out, const Where& where) {
  return out << "tensor " << where.tensor << ", " << where.array;
}

void check_format(const scruple_array& array, unsigned role, i64 size, bool memory, const Where& where) {
  if (array.format == nullptr)
    fail(SCRUPLE_INVALID, where, ": no format is set; call scruple_tensor_use, or choose one of ",
         formats_for(role));
  const scruple_format& format = *array.format;
  if ((format.roles & role) == 0)
    fail(SCRUPLE_UNSUPPORTED, where, ": format ", format.name, " cannot hold ", role_name(role),
         "; formats that can: ", formats_for(role));
  if (!can_round(format, role, array.rounding))
    fail(SCRUPLE_UNSUPPORTED, where, ": format ", format.name, " does not round by ",
         rounding_name(array.rounding), " (", array.rounding,
         "); it can: ", rounding_names(roundings_for(format, role)));
  if (!memory || size == 0) return;
  if (array.codes == nullptr) fail(SCRUPLE_INVALID, where, ": codes is null");
  if (format.layout.aux_bits > 0 && array.aux == nullptr)
    fail(SCRUPLE_INVALID, where, ": aux is null, but format ", format.name, " keeps ",
         format.aux_is_scale ? "scales" : "extra bits", " there");
}

void check_steppable(const scruple_tensor& t, i64 index) {
  check_tensor(t, index);
  if (t.step < 1)
    fail(SCRUPLE_INVALID, "tensor ", index, ": step is ", t.step,
         "; it counts from 1, the step about to be taken");
  if (const char* problem = t.optimizer->problem())
    fail(SCRUPLE_INVALID, "tensor ", index, ": ", t.optimizer->rule().name, ": ", problem);
}

bool same_but_for_step(const scruple_tensor& a, const scruple_tensor& b) {
  return a.optimizer == b.optimizer && a.size == b.size && a.offset == b.offset && a.folds == b.folds &&
         a.id == b.id && a.host == b.host && std::memcmp(a.arrays, b.arrays, sizeof a.arrays) == 0;
}

CheckedTable::Rule rule_of(const scruple_tensor& t) { return {&t.optimizer->rule(), t.optimizer->active()}; }

// Whether this table is the last checked one, but for step counts and for hyperparameters that use the same
// slots.
bool is_last(const scruple_tensor* tensors, i64 count, const CheckedTable& last) {
  if (static_cast<std::size_t>(count) != last.rows.size()) return false;
  for (std::size_t i = 0; i < last.rows.size(); ++i) {
    if (!same_but_for_step(tensors[i], last.rows[i])) return false;
    check_steppable(tensors[i], static_cast<i64>(i));
    if (rule_of(tensors[i]) != last.rules[i]) return false;
  }
  return true;
}

// The first `arrays` arrays of every tensor: all, or all but the gradient.
void check_arrays(const scruple_tensor* tensors, i64 count, int arrays) {
  std::vector<Interval> intervals;
  intervals.reserve(static_cast<std::size_t>(count) * 7);
  for (i64 i = 0; i < count; ++i) {
    const scruple_tensor& t = tensors[i];
    check_steppable(t, i);
    for (int a = 0; a < arrays; ++a) {
      if (!is_used(t, a)) continue;
      check_format(t.arrays[a], role_in_step(t, a), t.size, true, Where{i, array_name(t, a)});
      add_planes(intervals, t.arrays[a], t.size, a != SCRUPLE_GRADIENT, i, a);
    }
  }
  check_overlap(intervals, tensors);
}

}  // namespace

unsigned role_of(const scruple_tensor& tensor, int array) {
  if (array == SCRUPLE_WEIGHT) return SCRUPLE_ROLE_WEIGHT;
  if (array == SCRUPLE_GRADIENT) return SCRUPLE_ROLE_GRADIENT;
  const Slot& slot = tensor.optimizer->rule().slots[static_cast<std::size_t>(array - SCRUPLE_SLOT)];
  return slot.sign == Sign::nonneg ? SCRUPLE_ROLE_NONNEG : SCRUPLE_ROLE_SIGNED;
}

const char* array_name(const scruple_tensor& tensor, int array) {
  if (array == SCRUPLE_WEIGHT) return "weight";
  if (array == SCRUPLE_GRADIENT) return "gradient";
  return tensor.optimizer->rule().slots[static_cast<std::size_t>(array - SCRUPLE_SLOT)].name;
}

bool is_used(const scruple_tensor& tensor, int array) {
  return array == SCRUPLE_WEIGHT || array == SCRUPLE_GRADIENT ||
         is_slot_of(tensor.optimizer->active(), array);
}

unsigned role_in_step(const scruple_tensor& tensor, int array) {
  return is_slot_of(tensor.optimizer->exact(), array) ? unsigned{SCRUPLE_ROLE_EXACT} : role_of(tensor, array);
}

bool is_nonneg(const scruple_tensor& tensor, int array) {
  return role_of(tensor, array) == SCRUPLE_ROLE_NONNEG;
}

bool is_on_host(const scruple_tensor& tensor, int array, bool aux) {
  if (tensor.host == 0 || array == SCRUPLE_GRADIENT) return false;
  return array != SCRUPLE_WEIGHT || (aux && !tensor.arrays[array].format->aux_is_scale);
}

bool has_formats(const scruple_tensor& tensor, int weight, int moment, int nonneg) {
  if (tensor.arrays[SCRUPLE_WEIGHT].format->index != weight) return false;
  for (int a = SCRUPLE_SLOT; a < SCRUPLE_GRADIENT; ++a)
    if (is_used(tensor, a) && tensor.arrays[a].format->index != (is_nonneg(tensor, a) ? nonneg : moment))
      return false;
  return true;
}

float spread_of(const scruple_tensor& tensor) {
  for (int a = SCRUPLE_SLOT; a < SCRUPLE_GRADIENT; ++a)
    if (is_used(tensor, a) && is_nonneg(tensor, a) && tensor.arrays[a].rounding == kStochastic)
      return tensor.arrays[a].format->spread;
  return 1;
}

void check_tensor(const scruple_tensor& t, i64 index) {
  if (t.optimizer == nullptr) fail(SCRUPLE_INVALID, "tensor ", index, ": optimizer is null");
  if (t.size < 0 || t.size > kMaxElements)
    fail(SCRUPLE_INVALID, "tensor ", index, ": size is ", t.size, "; it must be 0 to 2^50");
  if (t.offset < 0 || t.offset > kMaxElements - t.size)
    fail(SCRUPLE_INVALID, "tensor ", index, ": offset is ", t.offset, "; offset + size must be 0 to 2^50");
  if (t.folds < 0 || t.folds > 0xffffffffLL)
    fail(SCRUPLE_INVALID, "tensor ", index, ": folds is ", t.folds, "; it must be 0 to 2^32 - 1");
  if (t.step < 0 || t.step > 0xffffffffLL)
    fail(SCRUPLE_INVALID, "tensor ", index, ": step is ", t.step, "; it must be 0 to 2^32 - 1");
  if (t.host > SCRUPLE_HOST_STATE)
    fail(SCRUPLE_INVALID, "tensor ", index, ": host is ", t.host, "; it must be 0 or SCRUPLE_HOST_STATE");
}

void check_array(const scruple_tensor& t, i64 index, int array, bool memory) {
  check_format(t.arrays[array], role_of(t, array), t.size, memory, Where{index, array_name(t, array)});
}

u64 check_step(const scruple_tensor* tensors, i64 count, CheckedTable& last) {
  check_table(tensors, count);
  const std::lock_guard lock(last.mutex);
  if (is_last(tensors, count, last)) return last.version;
  check_arrays(tensors, count, SCRUPLE_ARRAYS);
  std::vector<scruple_tensor> rows(tensors, tensors + count);
  std::vector<CheckedTable::Rule> rules;
  rules.reserve(rows.size());
  for (const scruple_tensor& t : rows) rules.push_back(rule_of(t));
  last.rows = std::move(rows);
  last.rules = std::move(rules);
  return ++last.version;
}

void check_state(const scruple_tensor* tensors, i64 count) {
  check_table(tensors, count);
  check_arrays(tensors, count, SCRUPLE_GRADIENT);
}

void check_parts(const scruple_tensor& t, i64 index) {
  if (const char* problem = t.optimizer->problem_with_parts())
    fail(SCRUPLE_UNSUPPORTED, "tensor ", index, ": ", t.optimizer->rule().name,
         " cannot take a step in parts: ", problem,
         "; fold the micro-batches into an accumulator first (policy compressed or stored)");
  for (int a = SCRUPLE_SLOT; a < SCRUPLE_GRADIENT; ++a) {
    if (!is_used(t, a) || t.arrays[a].format == nullptr || t.arrays[a].format->layout.code_bits == 32)
      continue;
    fail(SCRUPLE_UNSUPPORTED, Where{index, array_name(t, a)},
         ": parts of a step would be lost in the rounding of ", t.arrays[a].format->name,
         ", since each is far smaller than a code; keep the moments in fp32, or fold the micro-batches "
         "into an accumulator first (policy compressed or stored)");
  }
}

void check_gradients(const scruple_tensor* tensors, i64 count) {
  check_table(tensors, count);
  for (i64 i = 0; i < count; ++i) {
    check_tensor(tensors[i], i);
    check_array(tensors[i], i, SCRUPLE_GRADIENT, true);
  }
}

void check_accumulator(const scruple_tensor& t, i64 index) {
  check_format(t.arrays[SCRUPLE_GRADIENT], SCRUPLE_ROLE_ACCUMULATOR, t.size, false, Where{index, "gradient"});
}

void check_fold(const scruple_tensor* tensors, const scruple_array* incoming, i64 count, float multiplier) {
  check_gradients(tensors, count);
  check_table(incoming, count);
  if (!std::isfinite(multiplier)) fail(SCRUPLE_INVALID, "multiplier is ", multiplier, "; it must be finite");
  std::vector<Interval> intervals;
  for (i64 i = 0; i < count; ++i) {
    const scruple_tensor& t = tensors[i];
    const scruple_array& into = t.arrays[SCRUPLE_GRADIENT];
    check_accumulator(t, i);
    const Where where{i, "incoming gradient"};
    check_format(incoming[i], SCRUPLE_ROLE_GRADIENT, t.size, true, where);
    if (incoming[i].rounding == kDither)
      fail(SCRUPLE_UNSUPPORTED, where,
           ": a dithered accumulator cannot be folded into another; decode it first");
    add_planes(intervals, into, t.size, true, i, SCRUPLE_GRADIENT);
    add_planes(intervals, incoming[i], t.size, false, i, SCRUPLE_GRADIENT);
  }
  check_overlap(intervals, tensors);
}

void check_scaler(const scruple_scaler& s) {
  if (!(s.scale >= kSmallestScale && s.scale <= kLargestScale) ||
      !(s.growth >= 1 && std::isfinite(s.growth)) || !(s.backoff > 0 && s.backoff <= 1) || s.interval < 1 ||
      s.clean < 0 || s.clean >= s.interval)
    fail(SCRUPLE_INVALID, "loss scaler {scale ", s.scale, ", growth ", s.growth, ", backoff ", s.backoff,
         ", interval ", s.interval, ", clean ", s.clean,
         "}: needs scale in [2^-126, 2^127], growth >= 1, backoff in (0, 1], interval >= 1, 0 <= clean < "
         "interval");
}

scruple_tensor view_of(const scruple_tensor& t, i64 first, i64 size, const std::string& what) {
  const bool inside = first >= 0 && size >= 0 && first <= t.size && size <= t.size - first;
  if (!inside || first % kAlign != 0 || (size % kAlign != 0 && first + size != t.size))
    fail(SCRUPLE_INVALID, what, " of ", size, " elements from ", first, " of a tensor of ", t.size,
         ": it must lie inside, begin at a multiple of ", kAlign, " and end at one or at the tensor's end");
  scruple_tensor view = t;
  view.size = size;
  view.offset += first;
  for (scruple_array& array : view.arrays) {
    array.owned = 0;
    if (array.format == nullptr) continue;
    const Bytes skip = bytes_of(*array.format, first);
    if (array.codes != nullptr) array.codes = static_cast<char*>(array.codes) + skip.codes;
    if (array.aux != nullptr) array.aux = static_cast<char*>(array.aux) + skip.aux;
  }
  return view;
}

}  // namespace scruple
