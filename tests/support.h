// RAII over the C ABI for the tests: engine, optimizer, a tensor that owns its planes between canaries; what the registry
// lists; what a refusal says; and a small deterministic random generator.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <initializer_list>
#include <limits>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "scruple/scruple.h"

#define CHECK_OK(call) scruple_tests::expect_ok(call, #call, __FILE__, __LINE__)

namespace scruple_tests {

inline void expect_ok(scruple_status status, const char* call, const char* file, int line) {
  if (status != SCRUPLE_OK)
    ADD_FAILURE_AT(file, line) << call << " is " << status << ": " << scruple_last_error();
}

using Bytes = std::vector<unsigned char>;
using Hypers = std::vector<std::pair<std::string, double>>;

inline constexpr float kInf = std::numeric_limits<float>::infinity(),
                       kNaN = std::numeric_limits<float>::quiet_NaN();

std::int64_t length(const auto& list) { return static_cast<std::int64_t>(list.size()); }

// How much a loop over "every" pattern visits. Everyday runs take a prime stride that meets each pattern of low bits;
// SCRUPLE_TEST_WHOLE=1, which `make test-all` sets, takes them all. Builds at -O0 or under a sanitizer are slow and
// take few, whatever it says.
#if defined(__has_feature)
#define SCRUPLE_TEST_HAS(feature) __has_feature(feature)
#else
#define SCRUPLE_TEST_HAS(feature) 0
#endif
#if defined(__SANITIZE_THREAD__) || SCRUPLE_TEST_HAS(thread_sanitizer)
inline constexpr bool kThreadSanitizer = true;  // ten times slower; one rule shows it how threads meet
#else
inline constexpr bool kThreadSanitizer = false;
#endif
#if !defined(__OPTIMIZE__) || defined(__SANITIZE_ADDRESS__) || SCRUPLE_TEST_HAS(address_sanitizer)
inline constexpr bool kSlowBuild = true;
#else
inline constexpr bool kSlowBuild = kThreadSanitizer;
#endif
inline bool is_set(const char* variable) {
  const char* value = std::getenv(variable);
  return value != nullptr && *value != 0 && std::strcmp(value, "0") != 0;
}
inline const bool kWhole = !kSlowBuild && is_set("SCRUPLE_TEST_WHOLE");
inline const std::uint64_t kStride = kSlowBuild ? 61 : kWhole ? 1 : 13;

struct Engine {
  explicit Engine(int threads = 1, const std::string& name = "cpu") {
    CHECK_OK(scruple_engine_create(name.c_str(), threads, &handle));
  }
  ~Engine() { scruple_engine_destroy(handle); }
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;
  operator scruple_engine*() const { return handle; }

  scruple_engine* handle = nullptr;
};

inline std::vector<scruple_engine_info> engines() {
  std::vector<scruple_engine_info> all(static_cast<std::size_t>(scruple_engine_count()));
  for (std::size_t i = 0; i < all.size(); ++i) CHECK_OK(scruple_engine_at(static_cast<int>(i), &all[i]));
  return all;
}
// The CPU engines that this machine can run, the plainest first: those whose memory is the host's.
inline std::vector<std::string> cpu_engines() {
  std::vector<std::string> names;
  for (const scruple_engine_info& info : engines())
    if (info.available != 0 && std::string(info.name).starts_with("cpu")) names.emplace_back(info.name);
  return names;
}

struct Optimizer {
  explicit Optimizer(const std::string& rule = "adamw", const Hypers& hypers = {}) {
    CHECK_OK(scruple_optimizer_create(rule.c_str(), &handle));
    for (const auto& [name, value] : hypers) set(name, value);
  }
  ~Optimizer() { scruple_optimizer_destroy(handle); }
  Optimizer(const Optimizer&) = delete;
  Optimizer& operator=(const Optimizer&) = delete;
  operator scruple_optimizer*() const { return handle; }
  void set(const std::string& name, double value) {
    CHECK_OK(scruple_optimizer_set(handle, name.c_str(), value));
  }
  void seed(std::uint64_t value) { CHECK_OK(scruple_optimizer_set_seed(handle, value)); }

  scruple_optimizer* handle = nullptr;
};

// Memory between two canaries, its first byte `shift` bytes past an alignment of 16.
struct Plane {
  static constexpr unsigned char kCanary = 0xa5;
  static constexpr std::size_t kMargin = 64;

  Plane() = default;
  explicit Plane(std::size_t bytes, std::size_t shift = 0) : size(bytes), memory(bytes + 3 * kMargin) {
    const auto address = reinterpret_cast<std::uintptr_t>(memory.data());
    begin = kMargin + (16 - address % 16) % 16 + shift;
    std::memset(memory.data(), kCanary, begin);
    std::memset(memory.data() + begin + size, kCanary, memory.size() - begin - size);
  }
  Plane(Plane&&) noexcept = default;
  Plane& operator=(Plane&&) noexcept = default;
  Plane(const Plane& other) : Plane(other.size) {
    if (size > 0) std::memcpy(data(), other.data(), size);
  }
  Plane& operator=(const Plane& other) { return *this = Plane(other); }

  unsigned char* data() { return memory.data() + begin; }
  const unsigned char* data() const { return memory.data() + begin; }
  Bytes bytes() const { return {data(), data() + size}; }
  // Nothing outside the plane was written.
  bool intact() const {
    const auto is_canary = [](unsigned char byte) { return byte == kCanary; };
    return std::all_of(memory.data(), data(), is_canary) &&
           std::all_of(data() + size, memory.data() + memory.size(), is_canary);
  }

  std::size_t size = 0, begin = 0;
  std::vector<unsigned char> memory;
};

inline scruple_format_info info_of(const scruple_format* format) {
  scruple_format_info info{};
  CHECK_OK(scruple_get_format_info(format, &info));
  return info;
}

// ---- The registry ----

inline std::vector<const scruple_format*> formats() {
  std::vector<const scruple_format*> all;
  for (int i = 0; i < scruple_format_count(); ++i) all.push_back(scruple_format_at(i));
  return all;
}

inline std::vector<scruple_recipe_info> recipes() {
  std::vector<scruple_recipe_info> all(static_cast<std::size_t>(scruple_recipe_count()));
  for (std::size_t i = 0; i < all.size(); ++i) CHECK_OK(scruple_recipe_at(static_cast<int>(i), &all[i]));
  return all;
}

struct Rule {
  bool has(const std::string& hyper) const {
    for (const scruple_hyper_info& h : hypers)
      if (h.name == hyper) return true;
    return false;
  }

  int index = 0;
  std::string name;
  std::vector<scruple_hyper_info> hypers;
  std::vector<scruple_slot_info> slots;
};

inline std::vector<Rule> rules() {
  std::vector<Rule> all(static_cast<std::size_t>(scruple_rule_count()));
  for (std::size_t i = 0; i < all.size(); ++i) {
    Rule& rule = all[i];
    scruple_rule_info info{};
    rule.index = static_cast<int>(i);
    CHECK_OK(scruple_rule_at(rule.index, &info));
    rule.name = info.name;
    for (int h = 0; h < info.hypers; ++h)
      CHECK_OK(scruple_rule_hyper(rule.index, h, &rule.hypers.emplace_back()));
    for (int slot = 0; slot < info.slots; ++slot)
      CHECK_OK(scruple_rule_slot(rule.index, slot, &rule.slots.emplace_back()));
  }
  return all;
}

inline Rule rule_of(const scruple_optimizer* optimizer) {
  return rules()[static_cast<std::size_t>(scruple_optimizer_rule(optimizer))];
}

// A table row without planes, in a recipe's formats where one is named.
inline scruple_tensor row_of(const scruple_optimizer* optimizer, std::int64_t size,
                             const char* recipe = nullptr) {
  scruple_tensor row{};
  row.optimizer = optimizer;
  row.size = size;
  row.step = 1;
  if (recipe != nullptr) CHECK_OK(scruple_tensor_use(&row, recipe));
  return row;
}

inline bool serves(const scruple_optimizer* optimizer, std::int64_t size, const char* recipe) {
  scruple_tensor row = row_of(optimizer, size);
  return scruple_tensor_use(&row, recipe) == SCRUPLE_OK;
}

inline bool has_hyper(const scruple_optimizer* optimizer, const char* name) {
  double value = 0;
  return scruple_optimizer_get(optimizer, name, &value) == SCRUPLE_OK;
}

inline bool is_used(const scruple_tensor& row, int array) {
  int used = 0;
  return scruple_tensor_array(&row, array, nullptr, nullptr, &used) == SCRUPLE_OK && used != 0;
}

// The slots of a row that are in use.
struct SlotAt {
  int array;
  std::string name;
  int role;  // in a step
};
inline std::vector<SlotAt> slots_of(const scruple_tensor& row) {
  std::vector<SlotAt> slots;
  for (int a = SCRUPLE_SLOT; a < SCRUPLE_GRADIENT; ++a) {
    const char* name = nullptr;
    int role = 0, used = 0;
    if (scruple_tensor_array(&row, a, &name, &role, &used) == SCRUPLE_OK && used != 0)
      slots.push_back({a, name, role});
  }
  return slots;
}

inline bool is_fp32(const scruple_array& array) { return array.format == scruple_format_find("fp32"); }

// An array that others own, in fp32.
inline scruple_array fp32_array(const void* values) {
  return {scruple_format_find("fp32"), const_cast<void*>(values), nullptr, SCRUPLE_NEAREST, 0};
}

// One way to store one kind of array: every format x role x rounding that the registry offers, at an array of
// AdamW that has the role (accumulators are gradient arrays).
struct Case {
  const scruple_format* format;
  scruple_format_info info;
  int role, array, rounding;

  scruple_bound bound() const { return role == SCRUPLE_ROLE_NONNEG ? info.bound_nonneg : info.bound; }
  bool nonneg() const { return role == SCRUPLE_ROLE_NONNEG; }
  bool random() const { return rounding >= SCRUPLE_STOCHASTIC; }
  std::size_t group() const { return static_cast<std::size_t>(info.group_size); }
  std::string name() const {
    return std::string(info.name) + " in array " + std::to_string(array) + ", " +
           scruple_rounding_name(rounding);
  }
};

inline std::vector<Case> all_cases() {
  constexpr std::pair<int, int> kArrays[] = {{SCRUPLE_ROLE_WEIGHT, SCRUPLE_WEIGHT},
                                             {SCRUPLE_ROLE_SIGNED, SCRUPLE_SLOT},
                                             {SCRUPLE_ROLE_NONNEG, SCRUPLE_SLOT + 1},
                                             {SCRUPLE_ROLE_GRADIENT, SCRUPLE_GRADIENT}};
  const Engine engine;
  const Optimizer adamw;
  std::vector<Case> cases;
  for (const scruple_format* format : formats())
    for (const auto& [role, array] : kArrays)
      for (int rounding = SCRUPLE_NEAREST; rounding <= SCRUPLE_WIDE; ++rounding) {
        scruple_tensor empty = row_of(adamw, 0);
        empty.arrays[array].format = format;
        empty.arrays[array].rounding = rounding;
        if (scruple_encode(engine, &empty, array, nullptr) == SCRUPLE_OK)
          cases.push_back({format, info_of(format), role, array, rounding});
      }
  return cases;
}

// Value i of a little-endian string of k-bit values, read bit by bit.
inline std::uint32_t bit_string_get(const unsigned char* from, std::size_t i, int k) {
  std::uint32_t value = 0;
  for (std::size_t b = 0; b < static_cast<std::size_t>(k); ++b) {
    const std::size_t at = i * static_cast<std::size_t>(k) + b;
    value |= static_cast<std::uint32_t>(from[at / 8] >> (at % 8) & 1) << b;
  }
  return value;
}
inline void bit_string_set(unsigned char* to, std::size_t i, int k, std::uint32_t value) {
  for (std::size_t b = 0; b < static_cast<std::size_t>(k); ++b) {
    const std::size_t at = i * static_cast<std::size_t>(k) + b;
    const unsigned bit = 1u << (at % 8);
    to[at / 8] = static_cast<unsigned char>((value >> b & 1u) != 0 ? to[at / 8] | bit : to[at / 8] & ~bit);
  }
}

// A table row and the planes it points to, zeroed. `row` is what the ABI takes; its fields may be changed freely.
struct Tensor {
  Tensor(const scruple_optimizer* optimizer, std::int64_t size) : row(row_of(optimizer, size)) {}
  // All arrays in a recipe's formats, slots at their initial value.
  Tensor(const scruple_optimizer* optimizer, std::int64_t size, const char* recipe, scruple_engine* engine)
      : Tensor(optimizer, size) {
    CHECK_OK(scruple_tensor_use(&row, recipe));
    for (int a = 0; a < SCRUPLE_ARRAYS; ++a)
      if (used(a)) allocate(a);
    CHECK_OK(scruple_tensor_reset(engine, &row));
  }
  Tensor(Tensor&&) noexcept = default;
  Tensor& operator=(Tensor&&) noexcept = default;
  Tensor(const Tensor& other) : row(other.row), planes(other.planes) { point(); }
  Tensor& operator=(const Tensor& other) { return *this = Tensor(other); }

  bool used(int array) const { return is_used(row, array); }
  // Gives an array a format and fresh zeroed planes.
  void use(int array, const scruple_format* format, int rounding = SCRUPLE_NEAREST,
           std::size_t codes_shift = 0, std::size_t aux_shift = 0) {
    row.arrays[array].format = format;
    row.arrays[array].rounding = rounding;
    allocate(array, codes_shift, aux_shift);
  }
  void use(int array, const char* format, int rounding = SCRUPLE_NEAREST) {
    const scruple_format* found = scruple_format_find(format);
    ASSERT_NE(found, nullptr) << scruple_last_error();
    use(array, found, rounding);
  }
  void allocate(int array, std::size_t codes_shift = 0, std::size_t aux_shift = 0) {
    std::int64_t codes_bytes = 0, aux_bytes = 0;
    CHECK_OK(scruple_format_bytes(row.arrays[array].format, row.size, &codes_bytes, &aux_bytes));
    planes[slot(array)][0] = Plane(static_cast<std::size_t>(codes_bytes), codes_shift);
    planes[slot(array)][1] = Plane(static_cast<std::size_t>(aux_bytes), aux_shift);
    point();
  }
  void point() {
    for (int a = 0; a < SCRUPLE_ARRAYS; ++a) {
      if (row.arrays[a].format == nullptr) continue;
      row.arrays[a].codes = codes(a).data();
      row.arrays[a].aux = aux(a).data();
    }
  }

  Plane& codes(int array) { return planes[slot(array)][0]; }
  Plane& aux(int array) { return planes[slot(array)][1]; }
  const Plane& codes(int array) const { return planes[slot(array)][0]; }
  const Plane& aux(int array) const { return planes[slot(array)][1]; }
  // An array's codes followed by its scales or extra bits.
  Bytes bytes(int array) const {
    Bytes all = codes(array).bytes();
    const Bytes more = aux(array).bytes();
    all.insert(all.end(), more.begin(), more.end());
    return all;
  }
  bool intact() const {
    for (const auto& pair : planes)
      for (const Plane& plane : pair)
        if (!plane.intact()) return false;
    return true;
  }

  void encode(scruple_engine* engine, int array, const std::vector<float>& values) {
    ASSERT_EQ(static_cast<std::int64_t>(values.size()), row.size);
    CHECK_OK(scruple_encode(engine, &row, array, values.data()));
  }
  std::vector<float> decode(scruple_engine* engine, int array) const {
    std::vector<float> values(static_cast<std::size_t>(row.size));
    CHECK_OK(scruple_decode(engine, &row, array, values.data()));
    return values;
  }

  scruple_tensor row{};
  std::array<std::array<Plane, 2>, SCRUPLE_ARRAYS> planes;

 private:
  static std::size_t slot(int array) { return static_cast<std::size_t>(array); }
};

// Every byte of every plane, in order: what memcmp compares.
inline Bytes all_planes(const Tensor& tensor) {
  Bytes all;
  for (int a = 0; a < SCRUPLE_ARRAYS; ++a) {
    for (const Plane* plane : {&tensor.codes(a), &tensor.aux(a)})
      all.insert(all.end(), plane->data(), plane->data() + plane->size);
  }
  return all;
}

// The fields of scruple_step_options, to be named where they are not the defaults.
struct StepOptions {
  float multiplier = 1;
  const float *found_inf = nullptr, *clip = nullptr, *loss_scale = nullptr;
  const std::int64_t* steps = nullptr;
  int part = 0, parts = 1;
};
inline scruple_status try_step(scruple_engine* engine, const std::vector<scruple_tensor>& rows,
                               const StepOptions& o = {}) {
  const scruple_step_options options = {sizeof options, o.multiplier, o.found_inf, o.clip,
                                        o.loss_scale,   o.steps,      o.part,      o.parts};
  return scruple_step(engine, rows.data(), length(rows), &options);
}

inline void step(scruple_engine* engine, const Tensor& tensor) {
  CHECK_OK(scruple_step(engine, &tensor.row, 1, nullptr));
}
// tensor's gradient += multiplier g, in its own format. `steps` as in scruple_fold.
inline void fold(scruple_engine* engine, Tensor& tensor, const std::vector<float>& g, float multiplier = 1,
                 const std::int64_t* steps = nullptr) {
  const scruple_array incoming = fp32_array(g.data());
  CHECK_OK(scruple_fold(engine, &tensor.row, &incoming, 1, multiplier, steps));
  ++tensor.row.folds;
}

inline std::vector<scruple_tensor> rows_of(const std::vector<Tensor>& tensors) {
  std::vector<scruple_tensor> rows;
  for (const Tensor& tensor : tensors) rows.push_back(tensor.row);
  return rows;
}
// Every byte of a table's planes; nothing was written beside them.
inline Bytes all_planes(const std::vector<Tensor>& tensors) {
  Bytes all;
  for (const Tensor& tensor : tensors) {
    EXPECT_TRUE(tensor.intact()) << "a tensor of " << tensor.row.size
                                 << " elements was written outside its planes";
    const Bytes planes = all_planes(tensor);
    all.insert(all.end(), planes.begin(), planes.end());
  }
  return all;
}

inline double norm_of(scruple_engine* engine, const std::vector<scruple_tensor>& rows,
                      float* found_inf = nullptr) {
  double norm = -1;
  CHECK_OK(scruple_norm(engine, rows.data(), length(rows), &norm, found_inf));
  return norm;
}
inline double norm_of(scruple_engine* engine, const Tensor& tensor) { return norm_of(engine, {tensor.row}); }

// ---- What is refused ----

// With this status, and a message that has every part.
inline void expect_refused(scruple_status got, scruple_status want, const std::vector<std::string>& parts,
                           const std::string& what = "") {
  const std::string message = scruple_last_error();
  EXPECT_EQ(got, want) << what << ": " << message;
  EXPECT_FALSE(message.empty()) << what;
  for (const std::string& part : parts)
    EXPECT_NE(message.find(part), std::string::npos) << what << ": " << part << " in: " << message;
}
#define EXPECT_REFUSED(call, status, ...) expect_refused(call, status, {__VA_ARGS__}, #call)
#define EXPECT_INVALID(call, ...) EXPECT_REFUSED(call, SCRUPLE_INVALID, __VA_ARGS__)
#define EXPECT_UNSUPPORTED(call, ...) EXPECT_REFUSED(call, SCRUPLE_UNSUPPORTED, __VA_ARGS__)

// ---- Numbers ----

// What a test measured, in its properties (--gtest_output=xml), whose names have letters, digits and underscores.
inline void record(std::string name, double value) {
  for (char& c : name)
    if (std::isalnum(static_cast<unsigned char>(c)) == 0) c = '_';
  testing::Test::RecordProperty(name, std::to_string(value));
}

// |got - want| over |want|.
template <class A, class B>
double relative_l2(const std::vector<A>& got, const std::vector<B>& want) {
  double error = 0, square = 0;
  for (std::size_t i = 0; i < got.size(); ++i) {
    error += std::pow(static_cast<double>(got[i]) - static_cast<double>(want[i]), 2);
    square += std::pow(static_cast<double>(want[i]), 2);
  }
  return std::sqrt(error / square);
}

inline std::uint32_t bits(float x) { return __builtin_bit_cast(std::uint32_t, x); }
inline float float_from(std::uint32_t b) { return __builtin_bit_cast(float, b); }

template <class T>
bool same_bytes(const std::vector<T>& a, const std::vector<T>& b) {
  return a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0);
}

// SplitMix64 (Steele et al., OOPSLA 2014): the same numbers on every machine, unlike <random>'s distributions.
struct Random {
  explicit Random(std::uint64_t seed) : state(seed) {}
  std::uint64_t next() {
    std::uint64_t z = state += 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
  }
  std::uint32_t next32() { return static_cast<std::uint32_t>(next() >> 32); }
  double uniform() { return (static_cast<double>(next() >> 11) + 0.5) * 0x1p-53; }  // in (0, 1)
  double normal() {
    const double radius = std::sqrt(-2 * std::log(uniform()));
    return radius * std::cos(6.283185307179586 * uniform());
  }
  double lognormal(double sigma) { return std::exp(sigma * normal()); }
  std::vector<float> normals(std::size_t n, double scale = 1) {
    std::vector<float> values(n);
    for (float& x : values) x = static_cast<float>(scale * normal());
    return values;
  }

  std::uint64_t state;
};

// visit(first, last) on two threads over [0, count); true where both say true.
template <class Visit>
bool in_two_threads(std::uint64_t count, const Visit& visit) {
  bool lower = false, upper = false;
  std::thread other([&] { lower = visit(std::uint64_t{0}, count / 2); });
  upper = visit(count / 2, count);
  other.join();
  return lower && upper;
}

}  // namespace scruple_tests
