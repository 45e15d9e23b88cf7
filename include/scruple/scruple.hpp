// The C++ face of scruple.h: handles that free themselves, and exceptions in place of status codes.
// Everything here is a thin call into the C interface; raw() gives the C object for what this layer does not
// name.
#ifndef SCRUPLE_SCRUPLE_HPP
#define SCRUPLE_SCRUPLE_HPP

#if __cplusplus < 202002L
#error "scruple.hpp needs C++20: compile with -std=c++20"
#endif

#include <scruple/scruple.h>

#include <cstdint>
#include <initializer_list>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace scruple {

class Error : public std::runtime_error {
 public:
  Error(scruple_status status, const std::string& message) : std::runtime_error(message), status_(status) {}
  scruple_status status() const { return status_; }

 private:
  scruple_status status_;
};

inline void check(scruple_status status) {
  if (status != SCRUPLE_OK) throw Error(status, scruple_last_error());
}

inline const scruple_format* format_named(const char* name) {
  const scruple_format* found = scruple_format_find(name);
  if (found == nullptr) throw Error(SCRUPLE_INVALID, scruple_last_error());
  return found;
}

inline scruple_format_info info_of(const scruple_format* format) {
  scruple_format_info info;
  check(scruple_get_format_info(format, &info));
  return info;
}

// Of the two planes of an array.
struct PlaneBytes {
  std::int64_t codes = 0, aux = 0;
  std::int64_t total() const { return codes + aux; }
};
inline PlaneBytes plane_bytes(const scruple_format* format, std::int64_t size) {
  PlaneBytes bytes;
  check(scruple_format_bytes(format, size, &bytes.codes, &bytes.aux));
  return bytes;
}

// The scruple_rounding of this name; -1: there is none.
inline int find_rounding(const std::string& name) {
  int rounding = 0;
  while (scruple_rounding_name(rounding) != nullptr && name != scruple_rounding_name(rounding)) ++rounding;
  return scruple_rounding_name(rounding) == nullptr ? -1 : rounding;
}

// The arrays that the tensor's optimizer uses: indices into scruple_tensor::arrays.
inline std::vector<int> used_arrays(const scruple_tensor& tensor) {
  scruple_rule_info rule;
  check(scruple_rule_at(scruple_optimizer_rule(tensor.optimizer), &rule));
  std::vector<int> arrays = {SCRUPLE_WEIGHT};
  for (int a = SCRUPLE_SLOT; a < SCRUPLE_SLOT + rule.slots; ++a) {
    int used = 0;
    check(scruple_tensor_array(&tensor, a, nullptr, nullptr, &used));
    if (used != 0) arrays.push_back(a);
  }
  arrays.push_back(SCRUPLE_GRADIENT);
  return arrays;
}

class Engine {
 public:
  explicit Engine(const char* name = "cpu", int threads = 0) {
    scruple_engine* made = nullptr;
    check(scruple_engine_create(name, threads, &made));
    handle_.reset(made);
  }
  const char* name() const { return scruple_engine_name(raw()); }
  int threads() const { return scruple_engine_threads(raw()); }
  void set_stream(void* stream) { check(scruple_engine_set_stream(raw(), stream)); }
  void synchronize() { check(scruple_engine_synchronize(raw())); }
  scruple_engine* raw() const { return handle_.get(); }

 private:
  struct Destroy {
    void operator()(scruple_engine* engine) const { scruple_engine_destroy(engine); }
  };
  std::unique_ptr<scruple_engine, Destroy> handle_;
};

class Optimizer {
 public:
  explicit Optimizer(const char* rule, std::initializer_list<std::pair<const char*, double>> hypers = {}) {
    scruple_optimizer* made = nullptr;
    check(scruple_optimizer_create(rule, &made));
    handle_.reset(made);
    for (const auto& [name, value] : hypers) set(name, value);
  }
  void set(const char* name, double value) { check(scruple_optimizer_set(raw(), name, value)); }
  double get(const char* name) const {
    double value = 0;
    check(scruple_optimizer_get(raw(), name, &value));
    return value;
  }
  void set_seed(std::uint64_t seed) { check(scruple_optimizer_set_seed(raw(), seed)); }
  std::uint64_t seed() const { return scruple_optimizer_seed(raw()); }
  scruple_optimizer* raw() const { return handle_.get(); }

 private:
  struct Destroy {
    void operator()(scruple_optimizer* optimizer) const { scruple_optimizer_destroy(optimizer); }
  };
  std::unique_ptr<scruple_optimizer, Destroy> handle_;
};

// One parameter tensor that owns its weight and moments; its gradient is the caller's memory, or an
// accumulator of its own. The engine and the optimizer must outlive it. `id` names it to the random numbers:
// give each tensor its own.
class Tensor {
 public:
  Tensor(Engine& engine, const Optimizer& optimizer, std::int64_t size, const char* recipe,
         std::uint32_t id = 0)
      : Tensor(engine, describe(optimizer, size, recipe, id)) {}

  // From a description whose formats are chosen one by one; planes that are still null are allocated.
  Tensor(Engine& engine, const scruple_tensor& description) : engine_(engine.raw()), tensor_(description) {
    for (scruple_array& array : tensor_.arrays) array.owned = 0;
    if (tensor_.step == 0) tensor_.step = 1;
    check(scruple_tensor_alloc(engine_, &tensor_, SCRUPLE_STATE));
  }
  Tensor(Tensor&& other) noexcept
      : engine_(std::exchange(other.engine_, nullptr)), tensor_(std::exchange(other.tensor_, {})) {}
  Tensor& operator=(Tensor&& other) noexcept {
    std::swap(engine_, other.engine_);
    std::swap(tensor_, other.tensor_);
    return *this;
  }
  ~Tensor() { scruple_tensor_free(engine_, &tensor_); }

  std::int64_t size() const { return tensor_.size; }
  void load(const float* values) { encode(SCRUPLE_WEIGHT, values); }
  void weights(float* values) const { decode(SCRUPLE_WEIGHT, values); }
  void encode(int array, const float* values) { check(scruple_encode(engine_, &tensor_, array, values)); }
  void decode(int array, float* values) const { check(scruple_decode(engine_, &tensor_, array, values)); }

  // Steps read the gradient from here, in the caller's memory; `aux` for formats that have scales.
  void gradient(const void* codes, const char* format, const void* aux = nullptr) {
    set_gradient(
        {format_named(format), const_cast<void*>(codes), const_cast<void*>(aux), SCRUPLE_NEAREST, 0});
  }
  // Steps read the gradient from an accumulator that the tensor owns; fold() adds to it.
  void accumulator(const char* format, scruple_rounding rounding) {
    set_gradient({format_named(format), nullptr, nullptr, rounding, 0});
    check(scruple_tensor_alloc(engine_, &tensor_, 1u << SCRUPLE_GRADIENT));
  }
  void fold(const void* codes, const char* format, float multiplier = 1) {
    const scruple_array incoming = {format_named(format), const_cast<void*>(codes), nullptr, SCRUPLE_NEAREST,
                                    0};
    check(scruple_fold(engine_, &tensor_, &incoming, 1, multiplier, nullptr));
    ++tensor_.folds;
  }

  scruple_tensor& raw() { return tensor_; }
  const scruple_tensor& raw() const { return tensor_; }

 private:
  static scruple_tensor describe(const Optimizer& optimizer, std::int64_t size, const char* recipe,
                                 std::uint32_t id) {
    scruple_tensor made = {};
    made.optimizer = optimizer.raw();
    made.size = size;
    made.id = id;
    check(scruple_tensor_use(&made, recipe));
    return made;
  }
  void set_gradient(const scruple_array& array) {
    scruple_tensor before = {};
    before.arrays[SCRUPLE_GRADIENT] = std::exchange(tensor_.arrays[SCRUPLE_GRADIENT], array);
    scruple_tensor_free(engine_, &before);
    tensor_.folds = 0;
  }

  scruple_engine* engine_;
  scruple_tensor tensor_;
};

inline std::vector<scruple_tensor> table_of(std::span<const Tensor> tensors) {
  std::vector<scruple_tensor> table;
  table.reserve(tensors.size());
  for (const Tensor& tensor : tensors) table.push_back(tensor.raw());
  return table;
}

// One step of all tensors in one call; then each counts one step further and its next fold starts afresh.
// `multiplier` scales every gradient: a clip factor, 1 / loss scale, or their product.
inline void step(Engine& engine, std::span<Tensor> tensors, float multiplier = 1) {
  const std::vector<scruple_tensor> table = table_of(tensors);
  scruple_step_options options = SCRUPLE_STEP_OPTIONS_INIT;
  options.multiplier = multiplier;
  check(scruple_step(engine.raw(), table.data(), static_cast<std::int64_t>(table.size()), &options));
  for (Tensor& tensor : tensors) {
    ++tensor.raw().step;
    tensor.raw().folds = 0;
  }
}
inline void step(Engine& engine, Tensor& tensor, float multiplier = 1) {
  step(engine, std::span<Tensor>(&tensor, 1), multiplier);
}

// A gradient policy over a table of tensors, which must outlive it with their engine. Gradients go in with
// add(), end() closes a micro-batch, and the last one of a step takes it.
class Sink {
 public:
  Sink(Engine& engine, std::span<const scruple_tensor> tensors, const scruple_sink_options& options) {
    scruple_sink* made = nullptr;
    check(scruple_sink_create(engine.raw(), tensors.data(), static_cast<std::int64_t>(tensors.size()),
                              &options, &made));
    handle_.reset(made);
  }
  Sink(Engine& engine, std::span<const Tensor> tensors, const scruple_sink_options& options)
      : Sink(engine, std::span<const scruple_tensor>(table_of(tensors)), options) {}

  bool measures() const { return scruple_sink_measures(raw()) != 0; }
  // Whether it measures only what is not known to be finite.
  bool only_guards() const { return scruple_sink_measures(raw()) == 2; }
  void measure(std::span<const scruple_piece> pieces) {
    check(scruple_sink_measure(raw(), pieces.data(), static_cast<std::int64_t>(pieces.size())));
  }
  void add(std::span<const scruple_piece> pieces) {
    check(scruple_sink_add(raw(), pieces.data(), static_cast<std::int64_t>(pieces.size())));
  }
  // `size` elements from `first` of one tensor's gradient.
  void add(std::int64_t tensor, std::int64_t first, std::int64_t size, const void* codes,
           const char* format) {
    const scruple_piece piece = {
        tensor, first, size, {format_named(format), const_cast<void*>(codes), nullptr, SCRUPLE_NEAREST, 0}};
    add(std::span(&piece, 1));
  }
  void end() { check(scruple_sink_end(raw())); }
  scruple_sink_report read() const {
    scruple_sink_report report = {};
    check(scruple_sink_read(raw(), &report));
    return report;
  }
  const float* loss_scale() const { return scruple_sink_loss_scale(raw()); }
  scruple_sink* raw() const { return handle_.get(); }

 private:
  struct Destroy {
    void operator()(scruple_sink* sink) const { scruple_sink_destroy(sink); }
  };
  std::unique_ptr<scruple_sink, Destroy> handle_;
};

struct Norm {
  double value;
  bool finite;  // false: do not take this step
};

inline Norm norm(Engine& engine, std::span<const Tensor> tensors) {
  const std::vector<scruple_tensor> table = table_of(tensors);
  double value = 0;
  float found_inf = 0;
  check(
      scruple_norm(engine.raw(), table.data(), static_cast<std::int64_t>(table.size()), &value, &found_inf));
  return {value, found_inf == 0};
}

}  // namespace scruple
#endif
