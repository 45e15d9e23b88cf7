// The same bits everywhere: every engine this machine can run, any number of threads, one call or many, whole tensors
// or views, any alignment and any floating-point mode of the caller give planes that memcmp cannot tell apart.
#include <sys/wait.h>
#include <unistd.h>

#include <cfenv>
#include <functional>

#include "tests/table.h"

namespace scruple_tests {
namespace {

constexpr int kSteps = 5;

// ---- What to run ----

enum class Calls { kTogether, kAlone, kViews };

// Every length up to two groups of 64 and one more; everyday, those beside the edges of vectors and groups.
std::vector<std::int64_t> small_sizes() {
  std::vector<std::int64_t> sizes;
  for (std::int64_t n = 0; n <= 129; ++n)
    if (kSlowBuild ? n % 7 == 0 : kWhole || n <= 17 || (n + 1) % 32 <= 2 || n % 13 == 0) sizes.push_back(n);
  for (std::int64_t n = 1023; n <= 1025; ++n) sizes.push_back(n);
  return sizes;
}

// ---- Tables that walk through a config ----

void advance(Table& table, Calls calls) {
  if (calls == Calls::kTogether) return table.step();
  const auto step = [&](const scruple_tensor& row) {
    CHECK_OK(scruple_step(table.engine, &row, 1, nullptr));
  };
  for (const scruple_tensor& row : table.rows) calls == Calls::kAlone ? step(row) : for_views(row, step);
}

void walk(Table& table, const Gradients& gradients, int steps, Calls calls = Calls::kTogether) {
  table.begin();
  for (int t = 1; t <= steps; ++t) {
    table.at_step(t);
    table.take(t, gradients);
    advance(table, calls);
  }
}
Bytes walk(scruple_engine* engine, const Config& config, const Shape& shape, const Gradients& gradients,
           Calls calls, Data data, int steps) {
  Table table(engine, {config}, shape, data);
  walk(table, gradients, steps, calls);
  return table.bytes();
}
Bytes walk(scruple_engine* engine, const Config& config, const Shape& shape, Calls calls = Calls::kTogether,
           Data data = Data::kNormal, int steps = kSteps) {
  return walk(engine, config, shape, Gradients(shape.sizes, steps + 2, data), calls, data, steps);
}
// One that has taken its first gradients.
Table begun(scruple_engine* engine, const Config& config, const Shape& shape) {
  Table table(engine, {config}, shape);
  table.begin();
  table.take(1, Gradients(shape.sizes, 3));
  return table;
}

struct Worker {
  Worker(const std::string& name, int threads)
      : engine(threads, name), label(name + " with " + std::to_string(threads) + " threads") {}
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
  if (testing::Test::HasFatalFailure()) return;  // one is enough
  const Gradients gradients(shape.sizes, steps + 2, data);
  const Bytes want = walk(all[0]->engine, config, shape, gradients, Calls::kTogether, data, steps);
  for (std::size_t i = 0; i < all.size(); ++i) {
    // The calls that a thread count is tried with: all of them on one thread, one table on several.
    const bool alone = scruple_engine_threads(all[i]->engine) == 1;
    const std::vector<Calls> ways =
        alone ? std::vector{Calls::kTogether, Calls::kAlone, Calls::kViews} : std::vector{Calls::kTogether};
    for (const Calls calls : ways) {
      if (i == 0 && calls == Calls::kTogether) continue;
      ASSERT_TRUE(same_bytes(want, walk(all[i]->engine, config, shape, gradients, calls, data, steps)))
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
        expect_parity(all, with_gradient(config, kind), {small_sizes()}, Data::kNormal, 2);
      }
}

TEST(Parity, TenStepsOfEveryRuleAndRecipe) {
  const auto all = workers();
  for (const Config& recipe : recipe_configs())
    expect_parity(all, recipe, {{3, 64, 127, 1025, 5000}}, Data::kNormal, 10);
}

TEST(Parity, EveryRuleAndRecipeAroundTheChunkSize) {
  const auto all = workers();
  for (const Config& recipe : recipe_configs())
    expect_parity(all, recipe, {{65535, 65536, 65537}}, Data::kNormal, kWhole ? 3 : 1);
}

TEST(Parity, OddAddressesGiveTheBitsOfAlignedOnes) {
  const auto all = workers();
  for (const Config& recipe : recipe_configs()) {
    for (const GradientKind& kind : gradient_kinds()) {
      const Config config = with_gradient(recipe, kind);
      const std::vector<std::int64_t> sizes = {1, 7, 33, 64, 127, 128, 129, 1025, 2049};
      const Bytes want = walk(all[0]->engine, config, {sizes}, Calls::kTogether, Data::kNormal, 3);
      for (const std::size_t shift : {1u, 3u, 6u}) {
        for (const auto& worker : all)
          ASSERT_TRUE(same_bytes(
              want, walk(worker->engine, config, {sizes, {shift}}, Calls::kTogether, Data::kNormal, 3)))
              << config.name << ", shift " << shift << ": " << worker->label;
      }
    }
  }
}

TEST(Parity, NonFiniteGradientsGiveTheSameBits) {
  const auto all = workers();
  for (const Config& recipe : recipe_configs())
    for (const GradientKind& kind : gradient_kinds())
      expect_parity(all, with_gradient(recipe, kind), {{1, 5, 63, 64, 65, 200, 1025, 3000}}, Data::kNonFinite,
                    4);
}

TEST(Parity, SubnormalWeightsAndGradientsGiveTheSameBits) {
  const auto all = workers();
  for (const Config& recipe : recipe_configs())
    expect_parity(all, recipe, {{1, 63, 64, 65, 200, 1025, 3000}}, Data::kSubnormal, 4);
}

TEST(Parity, EveryFormatInEveryRoleAndRounding) {
  const auto all = workers();
  const Shape shape{{1, 2, 7, 8, 31, 32, 33, 63, 64, 65, 100, 127, 128, 129, 1023, 1024, 1025, 2500}};
  const std::vector<Case> cases = all_cases();
  for (const scruple_format* format : formats())
    for (int rounding = SCRUPLE_NEAREST; rounding <= SCRUPLE_WIDE; ++rounding) {
      Config config = config_of("adamw");
      for (const Case& c : cases)
        if (c.format == format && c.rounding == rounding) {
          put(config, c.array, format, rounding);
          config.name += ", " + c.name();
        }
      if (config.name != config_of("adamw").name) expect_parity(all, config, shape, Data::kNormal, 4);
    }
}

// ---- Fused steps ----

// Every rule in every recipe with the moments that recipes can hold in few bits: the defaults, and every
// hyperparameter that is not a flag away from zero.
std::vector<Config> plain_configs() {
  std::vector<Config> list = recipe_configs(false);
  for (const Config& config :
       recipe_configs("no flags", [](const Rule& rule) { return busy_hypers(rule, false); }))
    list.push_back(config);
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
  Table table(engine, {config}, shape, data);
  const Gradients gradients(shape.sizes, 5, data);
  table.begin();
  for (int t = 1; t <= 3; ++t) {
    table.at_step(t);
    table.take(t, gradients);
    for (Tensor& tensor : table.tensors) disturb(tensor, t);
    table.step({.multiplier = multiplier});
  }
  return table.bytes();
}

// The first engine, cpu-baseline, has no fused loops: it is the tiles that every other one is compared with.
TEST(Parity, FusedStepsGiveTheBitsOfTiles) {
  const auto all = workers();
  ASSERT_STREQ(scruple_engine_name(all[0]->engine), "cpu-baseline");
  for (const Config& config : plain_configs())
    for (const Data data : {Data::kNormal, Data::kSubnormal, Data::kNonFinite})
      for (const auto& [shift, multiplier] :
           {std::pair{std::size_t{0}, 1.0f}, {std::size_t{3}, 0.75f}, {std::size_t{0}, 3.0f}}) {
        const Shape shape{{127, 128, 129, 300, 1025, 2500}, {shift}};
        const Bytes want = rough_walk(all[0]->engine, config, shape, data, multiplier);
        for (const auto& worker : all)
          ASSERT_TRUE(same_bytes(want, rough_walk(worker->engine, config, shape, data, multiplier)))
              << config.name << ", data " << static_cast<int>(data) << ", multiplier " << multiplier
              << ", shift " << shift << ": " << worker->label;
      }
}

TEST(Parity, FusedStepsOfLongTensorsInPieces) {
  const auto all = workers();
  for (const Config& config : plain_configs())
    expect_parity(all, config, {{65536 + 300, 5000}}, Data::kNormal, 2);
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
          const Shape shape{{129, 1025, 3000}};
          const Bytes want = walk(engine, recipe, shape, Calls::kTogether, data, 3);
          Table table(engine, {recipe}, shape, data);
          const Gradients gradients(shape.sizes, 5, data);
          const bool restored = in_mode(set_mode, [&] { walk(table, gradients, 3); });
          ASSERT_TRUE(restored) << recipe.name << ": " << mode << " was not restored";
          ASSERT_TRUE(same_bytes(want, table.bytes()))
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
    const double want = norm_of(engine, tensor);
    for (const auto& [mode, set_mode] : modes()) {
      double got = 0;
      EXPECT_TRUE(in_mode(set_mode, [&] { got = norm_of(engine, tensor); })) << mode;
      EXPECT_EQ(got, want) << mode;
    }
  }
}

// ---- Processes and threads ----

TEST(Parity, AForkedChildCanStepWithItsParentsEngine) {
  const Engine engine(3);
  const Config config = recipe_configs().front();
  const Shape shape{{200000, 70000}};
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
  const Shape shape{{200000, 10, 70000}};
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
      EXPECT_EQ(scruple_engine_name(Engine(1, other)), other) << "an engine asked for by name is that engine";
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
  const Shape shape{{1, 100, 70000}};
  for (const Config& recipe : recipe_configs()) {
    Table table = begun(engine, recipe, shape), plain = begun(engine, recipe, shape);
    const Bytes before = table.bytes();
    for (const float flag : {1.0f, kNaN}) {
      table.step({.found_inf = &flag});
      ASSERT_TRUE(same_bytes(before, table.bytes())) << recipe.name << ", flag " << flag;
    }
    const float clear = 0;
    table.step({.found_inf = &clear});
    ASSERT_FALSE(same_bytes(before, table.bytes())) << recipe.name;
    plain.step();
    EXPECT_TRUE(same_bytes(table.bytes(), plain.bytes())) << recipe.name << ": a flag of 0 is no flag";
  }
}

TEST(Parity, AMultiplierIsTheGradientsMultipliedBeforehand) {
  const Engine engine;
  const Shape shape{{100, 1025}};
  const Gradients gradients(shape.sizes, 4);
  for (Config config : recipe_configs())
    for (const char* format : {"fp32", "bf16"})
      for (const float multiplier : {0.25f, -2.0f, 0x1p-16f}) {
        config = with_gradient(config, {format, SCRUPLE_NEAREST});
        Gradients multiplied = gradients;
        for (float& x : multiplied.values) x *= multiplier;
        Table a(engine, {config}, shape), b(engine, {config}, shape);
        for (Table* table : {&a, &b}) {
          table->accumulates = false;
          table->begin();
          for (int t = 1; t <= 3; ++t) {
            table->at_step(t);
            table->take(t, table == &a ? gradients : multiplied);
            table->step({.multiplier = table == &a ? multiplier : 1.0f});
          }
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
  const Bytes want = walk(engine, config, {{100}}, Calls::kTogether, Data::kNormal, 1);
  Table table = begun(engine, config, {{100}});
  scruple_step_options options = SCRUPLE_STEP_OPTIONS_INIT;
  const float flag = 1;
  options.struct_size = offsetof(scruple_step_options, found_inf);
  options.found_inf = &flag;  // beyond struct_size: not there
  CHECK_OK(scruple_step(engine, table.rows.data(), 1, &options));
  EXPECT_TRUE(same_bytes(want, table.bytes()));
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
