// The same bits everywhere: every engine this machine can run, any number of threads, one call or many, whole tensors
// or views, any alignment and any floating-point mode of the caller give planes that memcmp cannot tell apart.
#include <sys/wait.h>
#include <unistd.h>

#include <cfenv>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <limits>
#include <memory>

#include "tests/configs.h"

namespace scruple_tests {
namespace {

constexpr int kSteps = 5;

// ---- What to run ----

enum class Calls { kTogether, kAlone, kViews };
struct Shape {
  std::vector<std::int64_t> sizes;
  std::size_t shift = 0;  // of every codes plane; aux planes lie one byte further
};

// Every length up to two groups of 64 and one more; everyday, those beside the edges of vectors and groups.
std::vector<std::int64_t> small_sizes() {
  std::vector<std::int64_t> sizes;
  for (std::int64_t n = 0; n <= 129; ++n)
    if (kSlowBuild ? n % 7 == 0 : kWhole || n <= 17 || (n + 1) % 32 <= 2 || n % 13 == 0) sizes.push_back(n);
  for (std::int64_t n = 1023; n <= 1025; ++n) sizes.push_back(n);
  return sizes;
}

// ---- Tensors that walk through a config ----

// Values of a tensor or gradient: a window into one long list, so that making data costs nothing.
std::vector<float> values_of(std::int64_t size, std::uint64_t which, Data data) {
  static const std::vector<float> kNormals = Random(5).normals(std::size_t{1} << 18);
  std::vector<float> out(static_cast<std::size_t>(size));
  const std::size_t from = static_cast<std::size_t>(which * 7919 % 20000);
  const float scale = data == Data::kSubnormal ? 0x1p-128f : 1.0f;
  for (std::size_t i = 0; i < out.size(); ++i) out[i] = kNormals[from + i] * scale;
  if (data == Data::kNonFinite && size > 0 && which % 3 != 2) {
    const float specials[] = {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity(),
                              -std::numeric_limits<float>::infinity(), float_from(0xffa00001u), 3e38f};
    for (std::size_t i = which % 61; i < out.size(); i += 173) out[i] = specials[(i + which) % 5];
  }
  return out;
}

struct Pack {
  Pack(scruple_engine* on, const Config& config, const Shape& shape, Data kind = Data::kNormal)
      : engine(on), optimizer(config.rule.c_str()), data(kind) {
    for (const auto& [name, value] : config.hypers) optimizer.set(name.c_str(), value);
    optimizer.seed(0x123456789abcdefu);
    for (std::size_t i = 0; i < shape.sizes.size(); ++i) {
      Tensor tensor(optimizer, shape.sizes[i]);
      tensor.row.id = static_cast<std::uint32_t>(3 + i);
      tensor.row.offset = static_cast<std::int64_t>(i % 3) * 5;
      for (int a = 0; a < SCRUPLE_ARRAYS; ++a)
        if (tensor.used(a))
          tensor.use(a, config.formats.arrays[a].format, config.formats.arrays[a].rounding, shape.shift,
                     shape.shift == 0 ? 0 : shape.shift + 1);
      tensors.push_back(std::move(tensor));
    }
    for (std::size_t i = 0; i < tensors.size(); ++i)
      weights.push_back(values_of(tensors[i].row.size, i, data == Data::kNonFinite ? Data::kNormal : data));
    accumulates = tensors.empty() || (info_of(config.formats.arrays[SCRUPLE_GRADIENT].format).roles &
                                      SCRUPLE_ROLE_ACCUMULATOR) != 0;
  }

  // Everything that the library computes happens here. `begin` and `advance` may run in any floating-point mode.
  void begin() {
    for (std::size_t i = 0; i < tensors.size(); ++i) {
      CHECK_OK(scruple_tensor_reset(engine, &tensors[i].row));
      CHECK_OK(scruple_encode(engine, &tensors[i].row, SCRUPLE_WEIGHT, weights[i].data()));
    }
  }
  void take_gradients(int t, const std::vector<std::vector<float>>& gradients) {
    std::vector<scruple_tensor> table = rows();
    std::vector<scruple_array> incoming(table.size());
    for (std::size_t i = 0; i < table.size(); ++i) {
      table[i].step = tensors[i].row.step = t;
      table[i].folds = tensors[i].row.folds = 0;
      incoming[i].format = scruple_format_find("fp32");
      incoming[i].codes = const_cast<float*>(gradients[i].data());
    }
    if (!accumulates) {
      for (std::size_t i = 0; i < table.size(); ++i)
        CHECK_OK(scruple_encode(engine, &table[i], SCRUPLE_GRADIENT, gradients[i].data()));
      return;
    }
    for (int fold = 0; fold < 2; ++fold) {
      CHECK_OK(scruple_fold(engine, table.data(), incoming.data(), static_cast<std::int64_t>(table.size()),
                            0.375f, nullptr));
      for (std::size_t i = 0; i < table.size(); ++i) table[i].folds = tensors[i].row.folds = fold + 1;
    }
  }
  void advance(Calls calls) {
    if (calls == Calls::kTogether) {
      const std::vector<scruple_tensor> table = rows();
      CHECK_OK(scruple_step(engine, table.data(), static_cast<std::int64_t>(table.size()), nullptr));
      return;
    }
    for (const Tensor& tensor : tensors) {
      if (calls == Calls::kAlone) {
        CHECK_OK(scruple_step(engine, &tensor.row, 1, nullptr));
        continue;
      }
      std::int64_t first = 0, width = 128;
      do {
        scruple_tensor view{};
        const std::int64_t n = std::min(width, tensor.row.size - first);
        CHECK_OK(scruple_tensor_view(&tensor.row, first, n, &view));
        CHECK_OK(scruple_step(engine, &view, 1, nullptr));
        first += n;
        width = width == 128 ? 384 : width == 384 ? 1152 : 128 * 77;
      } while (first < tensor.row.size);
    }
  }
  std::vector<std::vector<float>> gradients_of(int t) const {
    std::vector<std::vector<float>> gradients;
    for (std::size_t i = 0; i < tensors.size(); ++i)
      gradients.push_back(values_of(tensors[i].row.size, 1000 * static_cast<std::uint64_t>(t) + i, data));
    return gradients;
  }
  std::vector<scruple_tensor> rows() const {
    std::vector<scruple_tensor> table;
    for (const Tensor& tensor : tensors) table.push_back(tensor.row);
    return table;
  }
  Bytes bytes() const {
    Bytes all;
    for (const Tensor& tensor : tensors) {
      EXPECT_TRUE(tensor.intact()) << "a tensor of " << tensor.row.size
                                   << " elements was written outside its planes";
      const Bytes planes = all_planes(tensor);
      all.insert(all.end(), planes.begin(), planes.end());
    }
    return all;
  }

  scruple_engine* engine;
  Optimizer optimizer;
  Data data;
  bool accumulates = false;
  std::vector<Tensor> tensors;
  std::vector<std::vector<float>> weights;
};

Bytes walk(scruple_engine* engine, const Config& config, const Shape& shape, Calls calls = Calls::kTogether,
           Data data = Data::kNormal, int steps = kSteps) {
  Pack pack(engine, config, shape, data);
  pack.begin();
  for (int t = 1; t <= steps; ++t) {
    pack.take_gradients(t, pack.gradients_of(t));
    pack.advance(calls);
  }
  return pack.bytes();
}

struct Worker {
  Worker(const std::string& name, int threads)
      : engine(threads, name.c_str()), label(name + " with " + std::to_string(threads) + " threads") {}
  Engine engine;
  std::string label;
};

// The plainest engine on one thread, then every engine with 1, 2 and 7.
std::vector<std::unique_ptr<Worker>> workers() {
  std::vector<std::unique_ptr<Worker>> all;
  for (const std::string& name : cpu_engines())
    for (const int threads : {1, 2, 7}) all.push_back(std::make_unique<Worker>(name, threads));
  return all;
}

void expect_parity(const std::vector<std::unique_ptr<Worker>>& all, const Config& config, const Shape& shape,
                   Data data = Data::kNormal, int steps = kSteps) {
  const Bytes want = walk(all[0]->engine, config, shape, Calls::kTogether, data, steps);
  for (std::size_t i = 0; i < all.size(); ++i) {
    // The calls that a thread count is tried with: all of them on one thread, one table on several.
    const bool alone = scruple_engine_threads(all[i]->engine) == 1;
    const std::vector<Calls> ways =
        alone ? std::vector{Calls::kTogether, Calls::kAlone, Calls::kViews} : std::vector{Calls::kTogether};
    for (const Calls calls : ways) {
      if (i == 0 && calls == Calls::kTogether) continue;
      ASSERT_TRUE(same_bytes(want, walk(all[i]->engine, config, shape, calls, data, steps)))
          << config.name << ": " << all[i]->label
          << (calls == Calls::kAlone   ? ", one call per tensor"
              : calls == Calls::kViews ? ", views"
                                       : "");
    }
  }
}

// All of them; under sanitizers, where the walk of one is slow, two.
std::vector<GradientKind> gradient_kinds() {
  if (kSlowBuild) return {kGradientKinds[1], kGradientKinds[6]};
  return {std::begin(kGradientKinds), std::end(kGradientKinds)};
}

// ---- The properties ----

TEST(Parity, EveryRuleRecipeRoundingAndGradientFormatAtEveryShortLength) {
  const auto all = workers();
  for (const Config& recipe : recipe_configs())
    for (const int rounding : {SCRUPLE_NEAREST, SCRUPLE_STOCHASTIC})
      for (const GradientKind& kind : gradient_kinds()) {
        Config config = recipe;
        set_rounding(config, rounding);
        config = with_gradient(config, kind);
        expect_parity(all, config, {small_sizes(), 0}, Data::kNormal, 2);
        if (HasFatalFailure()) return;
      }
}

TEST(Parity, TenStepsOfEveryRuleAndRecipe) {
  const auto all = workers();
  for (const Config& recipe : recipe_configs()) {
    expect_parity(all, recipe, {{3, 64, 127, 1025, 5000}, 0}, Data::kNormal, 10);
    if (HasFatalFailure()) return;
  }
}

TEST(Parity, EveryRuleAndRecipeAroundTheChunkSize) {
  const auto all = workers();
  for (const Config& recipe : recipe_configs()) {
    expect_parity(all, recipe, {{65535, 65536, 65537}, 0}, Data::kNormal, kWhole ? 3 : 1);
    if (HasFatalFailure()) return;
  }
}

TEST(Parity, OddAddressesGiveTheBitsOfAlignedOnes) {
  const auto all = workers();
  for (const Config& recipe : recipe_configs()) {
    for (const GradientKind& kind : gradient_kinds()) {
      Config config = recipe;
      config = with_gradient(config, kind);
      const std::vector<std::int64_t> sizes = {1, 7, 33, 64, 127, 128, 129, 1025, 2049};
      const Bytes want = walk(all[0]->engine, config, {sizes, 0}, Calls::kTogether, Data::kNormal, 3);
      for (const std::size_t shift : {1u, 3u, 6u}) {
        for (const auto& worker : all)
          ASSERT_TRUE(same_bytes(
              want, walk(worker->engine, config, {sizes, shift}, Calls::kTogether, Data::kNormal, 3)))
              << config.name << ", shift " << shift << ": " << worker->label;
      }
    }
  }
}

TEST(Parity, NonFiniteGradientsGiveTheSameBits) {
  const auto all = workers();
  for (const Config& recipe : recipe_configs())
    for (const GradientKind& kind : gradient_kinds()) {
      Config config = recipe;
      config = with_gradient(config, kind);
      expect_parity(all, config, {{1, 5, 63, 64, 65, 200, 1025, 3000}, 0}, Data::kNonFinite, 4);
      if (HasFatalFailure()) return;
    }
}

TEST(Parity, SubnormalWeightsAndGradientsGiveTheSameBits) {
  const auto all = workers();
  for (const Config& recipe : recipe_configs()) {
    expect_parity(all, recipe, {{1, 63, 64, 65, 200, 1025, 3000}, 0}, Data::kSubnormal, 4);
    if (HasFatalFailure()) return;
  }
}

TEST(Parity, EveryFormatInEveryRoleAndRounding) {
  const auto all = workers();
  const Shape shape{{1, 2, 7, 8, 31, 32, 33, 63, 64, 65, 100, 127, 128, 129, 1023, 1024, 1025, 2500}, 0};
  for (int f = 0; f < scruple_format_count(); ++f) {
    const scruple_format* format = scruple_format_at(f);
    const scruple_format_info info = info_of(format);
    for (int rounding = SCRUPLE_NEAREST; rounding <= SCRUPLE_WIDE; ++rounding) {
      if ((info.roundings >> rounding & 1u) == 0) continue;
      Config config;
      const Optimizer optimizer("adamw");
      scruple_tensor row{};
      row.optimizer = optimizer;
      row.size = 1;
      CHECK_OK(scruple_tensor_use(&row, "fp32"));
      const auto put = [&](int array) {
        row.arrays[array].format = format;
        row.arrays[array].rounding = rounding;
      };
      if (rounding != SCRUPLE_DITHER && (info.roles & SCRUPLE_ROLE_WEIGHT) != 0) put(SCRUPLE_WEIGHT);
      if (rounding != SCRUPLE_DITHER && (info.roles & SCRUPLE_ROLE_SIGNED) != 0) put(SCRUPLE_SLOT);
      if (rounding != SCRUPLE_DITHER && (info.roles & SCRUPLE_ROLE_NONNEG) != 0) put(SCRUPLE_SLOT + 1);
      if ((info.roles & SCRUPLE_ROLE_GRADIENT) != 0) put(SCRUPLE_GRADIENT);
      config.formats = row;
      config.name = std::string("adamw with ") + info.name + " rounding " + std::to_string(rounding);
      expect_parity(all, config, shape, Data::kNormal, 4);
      if (HasFatalFailure()) return;
    }
  }
}

// ---- Fused steps ----

// Every rule in every recipe with the moments that recipes can hold in few bits: the defaults, and every
// hyperparameter that is not a flag away from zero.
std::vector<Config> plain_configs() {
  std::vector<Config> list = recipe_configs(false);
  for (Config config : recipe_configs(false)) {
    for (int rule = 0; rule < scruple_rule_count(); ++rule) {
      scruple_rule_info info{};
      CHECK_OK(scruple_rule_at(rule, &info));
      if (info.name != config.rule) continue;
      for (const auto& [name, value] : busy_hypers(rule))
        for (int h = 0; h < info.hypers; ++h) {
          scruple_hyper_info hyper{};
          CHECK_OK(scruple_rule_hyper(rule, h, &hyper));
          if (name == hyper.name && hyper.flag == 0) config.hypers.emplace_back(name, value);
        }
    }
    // The recipe's formats again, for the slots that are in use now.
    Optimizer optimizer(config.rule.c_str());
    for (const auto& [name, value] : config.hypers) optimizer.set(name.c_str(), value);
    scruple_tensor row{};
    row.optimizer = optimizer;
    row.size = std::int64_t{1} << 30;
    const std::string recipe = config.name.substr(config.name.rfind("), ") + 3);
    if (scruple_tensor_use(&row, recipe.c_str()) != SCRUPLE_OK) continue;  // "..., fp32 weights" is none
    config.formats = row;
    config.name += ", no flags";
    list.push_back(config);
  }
  return list;
}

// What others have written: weights that are zero, and scales that no encoder leaves.
void disturb(Tensor& tensor, int t) {
  for (int a = 0; a < SCRUPLE_ARRAYS; ++a) {
    if (!tensor.used(a)) continue;
    const scruple_array& array = tensor.row.arrays[a];
    const scruple_format_info info = info_of(array.format);
    if (a == SCRUPLE_WEIGHT && info.code_bits == 16)
      for (std::int64_t i = 5 * t; i < tensor.row.size; i += 517) {
        auto* code = static_cast<unsigned char*>(array.codes) + 2 * i;
        code[0] = 0;
        code[1] = i % 2 == 0 ? 0 : 0x80;
      }
    if (info.aux_is_scale == 0 || info.aux_bits != 32) continue;
    constexpr float kScales[] = {1e-40f, INFINITY, NAN, 1e30f};
    const std::int64_t groups = (tensor.row.size + info.group_size - 1) / info.group_size;
    for (std::int64_t g = 0; g < groups; ++g) {
      const bool zeros = g / 4 % 5 == t;  // in every array, for a whole span
      if (!zeros && g % 11 != 2 * a + t) continue;
      const float scale = zeros ? 0.0f : kScales[g % 4];
      std::memcpy(static_cast<unsigned char*>(array.aux) + 4 * g, &scale, 4);
    }
  }
}

// Steps by a multiplier, along or against the gradient, over what others have disturbed.
Bytes rough_walk(scruple_engine* engine, Config config, const Shape& shape, Data data, float multiplier) {
  if (multiplier > 1) config.hypers.emplace_back("maximize", 1);
  Pack pack(engine, config, shape, data);
  pack.begin();
  for (int t = 1; t <= 3; ++t) {
    pack.take_gradients(t, pack.gradients_of(t));
    for (Tensor& tensor : pack.tensors) disturb(tensor, t);
    scruple_step_options options = SCRUPLE_STEP_OPTIONS_INIT;
    options.multiplier = multiplier;
    const std::vector<scruple_tensor> table = pack.rows();
    CHECK_OK(scruple_step(engine, table.data(), static_cast<std::int64_t>(table.size()), &options));
  }
  return pack.bytes();
}

// The first engine, cpu-baseline, has no fused loops: it is the tiles that every other one is compared with.
TEST(Parity, FusedStepsGiveTheBitsOfTiles) {
  const auto all = workers();
  ASSERT_STREQ(scruple_engine_name(all[0]->engine), "cpu-baseline");
  for (const Config& config : plain_configs())
    for (const Data data : {Data::kNormal, Data::kSubnormal, Data::kNonFinite})
      for (const auto& [shift, multiplier] :
           {std::pair{std::size_t{0}, 1.0f}, {std::size_t{3}, 0.75f}, {std::size_t{0}, 3.0f}}) {
        const Shape shape{{127, 128, 129, 300, 1025, 2500}, shift};
        const Bytes want = rough_walk(all[0]->engine, config, shape, data, multiplier);
        for (const auto& worker : all)
          ASSERT_TRUE(same_bytes(want, rough_walk(worker->engine, config, shape, data, multiplier)))
              << config.name << ", data " << static_cast<int>(data) << ", multiplier " << multiplier
              << ", shift " << shift << ": " << worker->label;
      }
}

TEST(Parity, FusedStepsOfLongTensorsInPieces) {
  const auto all = workers();
  for (const Config& config : plain_configs()) {
    expect_parity(all, config, {{65536 + 300, 5000}, 0}, Data::kNormal, 2);
    if (HasFatalFailure()) return;
  }
}

TEST(Parity, TwelveHundredSmallTensorsInOneCallEqualOneByOne) {
  const Engine one(1), many(7);
  Shape shape;
  for (int i = 0; i < 1200; ++i) shape.sizes.push_back(1 + i * 37 % 301);
  for (const Config& recipe : recipe_configs()) {
    if (recipe.rule != "adamw" && recipe.rule != "sgd") continue;
    const Bytes want = walk(one, recipe, shape, Calls::kAlone, Data::kNormal, 2);
    ASSERT_TRUE(same_bytes(want, walk(many, recipe, shape, Calls::kTogether, Data::kNormal, 2)))
        << recipe.name;
  }
}

// ---- The caller's floating-point mode ----

#if defined(__x86_64__)
constexpr unsigned kFlush = 0x8040;  // flush to zero, denormals are zero
unsigned control() { return __builtin_ia32_stmxcsr() & ~0x3fu; }
void set_flush() { __builtin_ia32_ldmxcsr(__builtin_ia32_stmxcsr() | kFlush); }
#elif defined(__aarch64__)
std::uint64_t control() {
  std::uint64_t value = 0;
  __asm__ volatile("mrs %0, fpcr" : "=r"(value));
  return value;
}
void set_flush() { __asm__ volatile("msr fpcr, %0" : : "r"(control() | std::uint64_t{1} << 24)); }
#else
int control() { return std::fegetround(); }
void set_flush() {}
#endif

// Runs body in a floating-point mode of the caller's choice; true if the mode was still the same afterwards.
bool in_mode(const std::function<void()>& set_mode, const std::function<void()>& body) {
  std::fenv_t saved;
  std::fegetenv(&saved);
  set_mode();
  const auto before = control();
  body();
  const auto after = control();
  std::fesetenv(&saved);
  return before == after;
}

const std::vector<std::pair<const char*, std::function<void()>>>& modes() {
  static const std::vector<std::pair<const char*, std::function<void()>>> kModes = {
      {"towards zero", [] { std::fesetround(FE_TOWARDZERO); }},
      {"upward", [] { std::fesetround(FE_UPWARD); }},
      {"flush to zero", set_flush}};
  return kModes;
}

TEST(Parity, TheCallersFloatingPointModeChangesNothingAndIsRestored) {
  for (const int threads : {1, 2}) {
    const Engine engine(threads);
    for (const Config& recipe : recipe_configs())
      for (const Data data : {Data::kNormal, Data::kSubnormal})
        for (const auto& [mode, set_mode] : modes()) {
          const Shape shape{{129, 1025, 3000}, 0};
          const Bytes want = walk(engine, recipe, shape, Calls::kTogether, data, 3);
          Pack pack(engine, recipe, shape, data);
          std::vector<std::vector<std::vector<float>>> gradients;
          for (int t = 1; t <= 3; ++t) gradients.push_back(pack.gradients_of(t));
          const bool restored = in_mode(set_mode, [&] {
            pack.begin();
            for (int t = 1; t <= 3; ++t) {
              pack.take_gradients(t, gradients[static_cast<std::size_t>(t - 1)]);
              pack.advance(Calls::kTogether);
            }
          });
          ASSERT_TRUE(restored) << recipe.name << ": " << mode << " was not restored";
          ASSERT_TRUE(same_bytes(want, pack.bytes()))
              << recipe.name << ": rounding " << mode << ", " << threads << " threads, data "
              << static_cast<int>(data);
        }
  }
}

TEST(Parity, NormsDoNotDependOnTheCallersFloatingPointMode) {
  const Engine engine(2);
  const Optimizer optimizer("sgd");
  Tensor tensor(optimizer, 200001, "fp32", engine);
  for (const float scale : {1.0f, 0x1p-130f}) {
    std::vector<float> g = Random(3).normals(200001, static_cast<double>(scale));
    tensor.encode(engine, SCRUPLE_GRADIENT, g);
    double want = 0;
    CHECK_OK(scruple_norm(engine, &tensor.row, 1, &want, nullptr));
    for (const auto& [mode, set_mode] : modes()) {
      double got = 0;
      EXPECT_TRUE(in_mode(set_mode, [&] { CHECK_OK(scruple_norm(engine, &tensor.row, 1, &got, nullptr)); }))
          << mode;
      EXPECT_EQ(got, want) << mode;
    }
  }
}

// ---- Processes and threads ----

TEST(Parity, AForkedChildCanStepWithItsParentsEngine) {
  const Engine engine(3);
  const Config config = recipe_configs().front();
  const Shape shape{{200000, 70000}, 0};
  const Bytes want = walk(engine, config, shape, Calls::kTogether, Data::kNormal, 2);
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    const bool same = same_bytes(want, walk(engine, config, shape, Calls::kTogether, Data::kNormal, 2));
    _exit(same ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << "status " << status;
  EXPECT_TRUE(same_bytes(want, walk(engine, config, shape, Calls::kTogether, Data::kNormal, 2)))
      << "in the parent";
}

TEST(Parity, TwoThreadsMayShareAnEngine) {
  const Engine engine(3);
  const Config first = recipe_configs().front(), last = recipe_configs().back();
  const Shape shape{{200000, 10, 70000}, 0};
  const Bytes want_last = walk(engine, last, shape), want_first = walk(engine, first, shape);
  Bytes got_last, got_first;
  std::thread other([&] { got_last = walk(engine, last, shape); });
  got_first = walk(engine, first, shape);
  other.join();
  EXPECT_TRUE(same_bytes(want_last, got_last)) << last.name;
  EXPECT_TRUE(same_bytes(want_first, got_first)) << first.name;
}

TEST(Parity, TheEnvironmentForcesAUnitByName) {
  for (const std::string& name : cpu_engines()) {
    ASSERT_EQ(setenv("SCRUPLE_ENGINE", name.c_str(), 1), 0);
    const Engine forced(1, "cpu");
    EXPECT_EQ(scruple_engine_name(forced), name);
    for (const std::string& other : cpu_engines())
      EXPECT_EQ(scruple_engine_name(Engine(1, other.c_str())), other)
          << "an engine asked for by name is that engine";
  }
  ASSERT_EQ(unsetenv("SCRUPLE_ENGINE"), 0);
}

// ---- Random numbers ----

TEST(Parity, StochasticRoundingFollowsSeedIdStepAndOffset) {
  const Engine engine;
  const auto encoded = [&](std::uint64_t seed, std::uint32_t id, std::int64_t at_step, std::int64_t offset) {
    Optimizer optimizer("sgd");
    optimizer.seed(seed);
    Tensor tensor(optimizer, 1000);
    tensor.use(SCRUPLE_WEIGHT, "bf16", SCRUPLE_STOCHASTIC);
    tensor.row.id = id;
    tensor.row.step = at_step;
    tensor.row.offset = offset;
    tensor.encode(engine, SCRUPLE_WEIGHT, std::vector<float>(1000, 1.00390625f * 0.999f));
    return tensor.bytes(SCRUPLE_WEIGHT);
  };
  const Bytes base = encoded(1, 2, 3, 0);
  EXPECT_EQ(base, encoded(1, 2, 3, 0));
  EXPECT_NE(base, encoded(2, 2, 3, 0)) << "another seed";
  EXPECT_NE(base, encoded(std::uint64_t{1} << 32 | 1, 2, 3, 0)) << "another upper half of the seed";
  EXPECT_NE(base, encoded(1, 3, 3, 0)) << "another tensor";
  EXPECT_NE(base, encoded(1, 2, 4, 0)) << "another step";
  EXPECT_NE(base, encoded(1, 2, 3, (std::int64_t{1} << 40) + 5)) << "another shard";
  // Shard or whole, an element has its own random number: 16 values earlier or later, the rest is the same.
  const Bytes shard = encoded(1, 2, 3, 16);
  EXPECT_TRUE(std::equal(base.begin() + 32, base.end(), shard.begin(), shard.end() - 32));
}

// ---- Options of a call ----

TEST(Parity, FoundInfSkipsTheWholeCallAndWritesNothing) {
  const Engine engine(2);
  for (const Config& recipe : recipe_configs()) {
    Pack pack(engine, recipe, {{1, 100, 70000}, 0});
    pack.begin();
    pack.take_gradients(1, pack.gradients_of(1));
    const Bytes before = pack.bytes();
    const std::vector<scruple_tensor> table = pack.rows();
    for (const float flag : {1.0f, std::numeric_limits<float>::quiet_NaN()}) {
      scruple_step_options options = SCRUPLE_STEP_OPTIONS_INIT;
      options.found_inf = &flag;
      CHECK_OK(scruple_step(engine, table.data(), 3, &options));
      ASSERT_TRUE(same_bytes(before, pack.bytes())) << recipe.name << ", flag " << flag;
    }
    const float clear = 0;
    scruple_step_options options = SCRUPLE_STEP_OPTIONS_INIT;
    options.found_inf = &clear;
    CHECK_OK(scruple_step(engine, table.data(), 3, &options));
    const Bytes after = pack.bytes();
    ASSERT_FALSE(same_bytes(before, after)) << recipe.name;
    Pack plain(engine, recipe, {{1, 100, 70000}, 0});
    plain.begin();
    plain.take_gradients(1, plain.gradients_of(1));
    plain.advance(Calls::kTogether);
    EXPECT_TRUE(same_bytes(after, plain.bytes())) << recipe.name << ": a flag of 0 is no flag";
  }
}

TEST(Parity, AMultiplierIsTheGradientsMultipliedBeforehand) {
  const Engine engine;
  for (Config config : recipe_configs())
    for (const char* format : {"fp32", "bf16"})
      for (const float multiplier : {0.25f, -2.0f, 0x1p-16f}) {
        config = with_gradient(config, {format, SCRUPLE_NEAREST});
        const Shape shape{{100, 1025}, 0};
        Pack a(engine, config, shape), b(engine, config, shape);
        a.accumulates = b.accumulates = false;
        a.begin(), b.begin();
        for (int t = 1; t <= 3; ++t) {
          std::vector<std::vector<float>> g = a.gradients_of(t);
          a.take_gradients(t, g);
          for (auto& values : g)
            for (float& x : values) x *= multiplier;
          b.take_gradients(t, g);
          scruple_step_options options = SCRUPLE_STEP_OPTIONS_INIT;
          options.multiplier = multiplier;
          CHECK_OK(scruple_step(engine, a.rows().data(), 2, &options));
          b.advance(Calls::kTogether);
        }
        for (std::size_t i = 0; i < 2; ++i)
          for (int array = SCRUPLE_WEIGHT; array < SCRUPLE_GRADIENT; ++array)
            ASSERT_EQ(a.tensors[i].bytes(array), b.tensors[i].bytes(array))
                << config.name << " x " << multiplier;
      }
}

TEST(Parity, OptionsOfAnOlderCallerAreReadAsFarAsTheyGo) {
  const Engine engine;
  const Config config = recipe_configs().front();
  const Shape shape{{100}, 0};
  const Bytes want = walk(engine, config, shape, Calls::kTogether, Data::kNormal, 1);
  Pack pack(engine, config, shape);
  pack.begin();
  pack.take_gradients(1, pack.gradients_of(1));
  scruple_step_options options = SCRUPLE_STEP_OPTIONS_INIT;
  const float flag = 1;
  options.struct_size = offsetof(scruple_step_options, found_inf);
  options.found_inf = &flag;  // beyond struct_size: not there
  CHECK_OK(scruple_step(engine, pack.rows().data(), 1, &options));
  EXPECT_TRUE(same_bytes(want, pack.bytes()));
}

TEST(Parity, CopyCopies) {
  for (const int threads : {1, 3}) {
    const Engine engine(threads);
    for (const std::size_t n :
         {std::size_t{0}, std::size_t{1}, std::size_t{1} << 20, (std::size_t{5} << 20) + 3}) {
      Bytes from(n), to(n + 1, 0xee);
      Random random(n);
      for (unsigned char& byte : from) byte = static_cast<unsigned char>(random.next());
      CHECK_OK(scruple_copy(engine, to.data(), from.data(), static_cast<std::int64_t>(n)));
      EXPECT_TRUE(n == 0 || std::memcmp(to.data(), from.data(), n) == 0);
      EXPECT_EQ(to[n], 0xee);
    }
  }
}

}  // namespace
}  // namespace scruple_tests
