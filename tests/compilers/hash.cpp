// Prints one hash for each optimizer in each recipe after ten steps, each format and rounding, and the norm
// and folds of gradients, on data made with integers alone. Exits with 1 if this machine's engines disagree.
// compare.sh compares the output of differently compiled libraries with each other and with golden.txt.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "scruple/scruple.h"

namespace {

void check(scruple_status status) {
  if (status == SCRUPLE_OK) return;
  std::fprintf(stderr, "%s\n", scruple_last_error());
  std::exit(2);
}

// FNV-1a, 64 bits.
struct Hash {
  std::uint64_t state = 0xcbf29ce484222325u;
  void add(const void* data, std::size_t bytes) {
    const auto* at = static_cast<const unsigned char*>(data);
    for (std::size_t i = 0; i < bytes; ++i) state = (state ^ at[i]) * 0x100000001b3u;
  }
};

// Floats of either sign with exponents from 2^-9 to 2^-1 and any mantissa, assembled from bits.
std::vector<float> values(std::size_t size, std::uint64_t seed) {
  std::vector<float> out(size);
  std::uint64_t state = seed * 0x9e3779b97f4a7c15u + 1;
  for (float& x : out) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    const auto r = static_cast<std::uint32_t>(state >> 32);
    const std::uint32_t bits = (r & 0x80000000u) | (118u + (r >> 23 & 0xffu) % 9u) << 23 | (r & 0x7fffffu);
    std::memcpy(&x, &bits, sizeof x);
  }
  return out;
}

struct Planes {
  std::vector<unsigned char> codes, aux;
};

// One tensor that owns the planes of its arrays.
struct Row {
  scruple_tensor tensor{};
  Planes planes[SCRUPLE_ARRAYS];

  void allocate(int array) {
    std::int64_t codes = 0, aux = 0;
    check(scruple_format_bytes(tensor.arrays[array].format, tensor.size, &codes, &aux));
    planes[array].codes.assign(static_cast<std::size_t>(codes), 0);
    planes[array].aux.assign(static_cast<std::size_t>(aux), 0);
    tensor.arrays[array].codes = planes[array].codes.data();
    tensor.arrays[array].aux = planes[array].aux.data();
  }
  void add_to(Hash& hash) const {
    for (const Planes& p : planes) {
      hash.add(p.codes.data(), p.codes.size());
      hash.add(p.aux.data(), p.aux.size());
    }
  }
};

constexpr std::int64_t kSizes[] = {1, 64, 1000, 5003};

// Every hyperparameter away from zero and every flag that the others allow.
void set_busy(scruple_engine* engine, scruple_optimizer* optimizer, int rule) {
  scruple_rule_info info{};
  check(scruple_rule_at(rule, &info));
  for (const int flags : {0, 1})
    for (int h = 0; h < info.hypers; ++h) {
      scruple_hyper_info hyper{};
      check(scruple_rule_hyper(rule, h, &hyper));
      if (hyper.flag != flags) continue;
      check(scruple_optimizer_set(optimizer, hyper.name,
                                  hyper.flag         ? 1.0
                                  : hyper.value == 0 ? 0.125
                                                     : hyper.value));
      scruple_tensor probe{};
      probe.optimizer = optimizer;
      probe.step = 1;
      check(scruple_tensor_use(&probe, "fp32"));
      if (scruple_step(engine, &probe, 1, nullptr) != SCRUPLE_OK)
        check(scruple_optimizer_set(optimizer, hyper.name, 0));
    }
}

// The hash of every plane after ten steps; false where the recipe does not serve the rule.
bool hash_recipe(scruple_engine* engine, int rule, const char* recipe, bool busy, Hash& hash) {
  scruple_rule_info info{};
  check(scruple_rule_at(rule, &info));
  scruple_optimizer* optimizer = nullptr;
  check(scruple_optimizer_create(info.name, &optimizer));
  if (busy) set_busy(engine, optimizer, rule);
  check(scruple_optimizer_set_seed(optimizer, 0x0123456789abcdefu));
  bool served = true;
  for (const std::int64_t size : kSizes) {
    Row row;
    row.tensor.optimizer = optimizer;
    row.tensor.size = std::int64_t{1} << 30;  // the recipe's formats, whatever the size
    served = scruple_tensor_use(&row.tensor, recipe) == SCRUPLE_OK;
    if (!served) break;
    row.tensor.size = size;
    row.tensor.id = static_cast<std::uint32_t>(size);
    for (int a = 0; a < SCRUPLE_ARRAYS; ++a) {
      int used = 0;
      if (scruple_tensor_array(&row.tensor, a, nullptr, nullptr, &used) == SCRUPLE_OK && used != 0)
        row.allocate(a);
    }
    check(scruple_tensor_reset(engine, &row.tensor));
    check(scruple_encode(engine, &row.tensor, SCRUPLE_WEIGHT,
                         values(static_cast<std::size_t>(size), 1).data()));
    for (int t = 1; t <= 10; ++t) {
      row.tensor.step = t;
      row.tensor.folds = 1;
      const std::vector<float> g =
          values(static_cast<std::size_t>(size), static_cast<std::uint64_t>(100 + t));
      check(scruple_encode(engine, &row.tensor, SCRUPLE_GRADIENT, g.data()));
      check(scruple_step(engine, &row.tensor, 1, nullptr));
    }
    row.add_to(hash);
  }
  scruple_optimizer_destroy(optimizer);
  return served;
}

// Codes and decoded values of a format, in the roles of weight, signed and non-negative moment or gradient.
void hash_format(scruple_engine* engine, const scruple_optimizer* adam, const scruple_format* format,
                 int rounding, Hash& hash) {
  for (const int array : {+SCRUPLE_WEIGHT, +SCRUPLE_SLOT, SCRUPLE_SLOT + 1, +SCRUPLE_GRADIENT}) {
    Row row;
    row.tensor.optimizer = adam;
    row.tensor.size = 5003;
    row.tensor.step = 3;
    row.tensor.arrays[array].format = format;
    row.tensor.arrays[array].rounding = rounding;
    row.allocate(array);
    std::vector<float> x = values(5003, 7);
    if (array == SCRUPLE_SLOT + 1)
      for (float& v : x) v = v < 0 ? -v : v;
    if (scruple_encode(engine, &row.tensor, array, x.data()) != SCRUPLE_OK) continue;  // not its role
    check(scruple_decode(engine, &row.tensor, array, x.data()));
    row.add_to(hash);
    hash.add(x.data(), x.size() * sizeof(float));
  }
}

// Norm and planes of an accumulator after three folds.
bool hash_fold(scruple_engine* engine, const scruple_optimizer* adam, const scruple_format* format,
               int rounding, Hash& hash) {
  Row row;
  row.tensor.optimizer = adam;
  row.tensor.size = 70001;
  row.tensor.step = 2;
  row.tensor.arrays[SCRUPLE_GRADIENT].format = format;
  row.tensor.arrays[SCRUPLE_GRADIENT].rounding = rounding;
  row.allocate(SCRUPLE_GRADIENT);
  for (; row.tensor.folds < 3; ++row.tensor.folds) {
    std::vector<float> g = values(70001, static_cast<std::uint64_t>(50 + row.tensor.folds));
    scruple_array incoming{};
    incoming.format = scruple_format_find("fp32");
    incoming.codes = g.data();
    if (scruple_fold(engine, &row.tensor, &incoming, 1, 0.3125f, nullptr) != SCRUPLE_OK)
      return false;  // not an accumulator
  }
  double norm = 0;
  check(scruple_norm(engine, &row.tensor, 1, &norm, nullptr));
  row.add_to(hash);
  hash.add(&norm, sizeof norm);
  return true;
}

void add_line(std::string& out, const std::string& what, const Hash& hash) {
  char hex[32];
  std::snprintf(hex, sizeof hex, " %016llx\n", static_cast<unsigned long long>(hash.state));
  out += what + hex;
}

std::string all_hashes(scruple_engine* engine) {
  std::string out;
  for (int rule = 0; rule < scruple_rule_count(); ++rule)
    for (int r = 0; r < scruple_recipe_count(); ++r) {
      scruple_rule_info info{};
      scruple_recipe_info recipe{};
      check(scruple_rule_at(rule, &info));
      check(scruple_recipe_at(r, &recipe));
      for (const bool busy : {true, false}) {
        Hash hash;
        if (hash_recipe(engine, rule, recipe.name, busy, hash))
          add_line(out, std::string(info.name) + (busy ? " " : " (defaults) ") + recipe.name, hash);
      }
    }
  scruple_optimizer* adam = nullptr;
  check(scruple_optimizer_create("adamw", &adam));
  for (int f = 0; f < scruple_format_count(); ++f) {
    scruple_format_info info{};
    check(scruple_get_format_info(scruple_format_at(f), &info));
    for (int rounding = 0; scruple_rounding_name(rounding) != nullptr; ++rounding) {
      if ((info.roundings >> rounding & 1u) == 0) continue;
      const std::string name = std::string(info.name) + " " + scruple_rounding_name(rounding);
      Hash format, fold;
      hash_format(engine, adam, scruple_format_at(f), rounding, format);
      add_line(out, "format " + name, format);
      if (hash_fold(engine, adam, scruple_format_at(f), rounding, fold)) add_line(out, "fold " + name, fold);
    }
  }
  scruple_optimizer_destroy(adam);
  return out;
}

}  // namespace

int main() {
  std::string first, first_name;
  for (int e = 0; e < scruple_engine_count(); ++e) {
    scruple_engine_info info{};
    check(scruple_engine_at(e, &info));
    if (info.available == 0 || std::string(info.name).rfind("cpu", 0) != 0)
      continue;  // planes are host memory
    scruple_engine* engine = nullptr;
    check(scruple_engine_create(info.name, 2, &engine));
    const std::string hashes = all_hashes(engine);
    scruple_engine_destroy(engine);
    if (first_name.empty()) {
      first = hashes;
      first_name = info.name;
    } else if (hashes != first) {
      std::fprintf(stderr, "engines %s and %s disagree:\n%s\n%s", first_name.c_str(), info.name,
                   first.c_str(), hashes.c_str());
      return 1;
    }
  }
  std::fputs(first.c_str(), stdout);
  return 0;
}
