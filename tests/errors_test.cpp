// What must be refused is refused: with the right status, a message that names the culprit, nothing written,
// and a library that works as before. What is legal though it looks odd is here too.
#include <functional>

#include "tests/support.h"

// An absurd allocation must come back as null, as it does without a sanitizer.
extern "C" {
__attribute__((visibility("default"))) const char* __asan_default_options(void);
__attribute__((visibility("default"))) const char* __tsan_default_options(void);
const char* __asan_default_options(void) { return "allocator_may_return_null=1"; }
const char* __tsan_default_options(void) { return "allocator_may_return_null=1"; }
}

namespace scruple_tests {
namespace {

constexpr std::int64_t kHuge = std::int64_t{1} << 50;

struct Errors : testing::Test {
  const Engine engine;
  const Optimizer adamw, sgd{"sgd"};
};

// ---- Versions, registry ----

TEST_F(Errors, VersionsAreThoseOfTheHeader) {
  EXPECT_STREQ(scruple_version(), SCRUPLE_VERSION);
  EXPECT_EQ(scruple_abi_version(), SCRUPLE_ABI_VERSION);
}

TEST_F(Errors, TheRegistryKnowsItsEnds) {
  scruple_recipe_info recipe{};
  scruple_rule_info rule{};
  scruple_slot_info slot{};
  scruple_hyper_info hyper{};
  scruple_engine_info info{};
  ASSERT_GT(scruple_format_count(), 0);
  for (const int index : {-1, scruple_format_count(), 1 << 30}) EXPECT_EQ(scruple_format_at(index), nullptr);
  for (const int index : {-1, 1 << 30}) {
    EXPECT_INVALID(scruple_recipe_at(index, &recipe), "recipe");
    EXPECT_INVALID(scruple_rule_at(index, &rule), "optimizer");
    EXPECT_INVALID(scruple_rule_slot(index, 0, &slot), "optimizer");
    EXPECT_INVALID(scruple_rule_slot(0, index, &slot), "slot");
    EXPECT_INVALID(scruple_rule_hyper(index, 0, &hyper), "optimizer");
    EXPECT_INVALID(scruple_rule_hyper(0, index, &hyper), "hyperparameter");
    EXPECT_INVALID(scruple_engine_at(index, &info), "engine");
  }
  EXPECT_INVALID(scruple_recipe_at(scruple_recipe_count(), &recipe), "recipe");
  EXPECT_INVALID(scruple_rule_at(scruple_rule_count(), &rule), "optimizer");
  EXPECT_INVALID(scruple_engine_at(scruple_engine_count(), &info), "engine");
  EXPECT_INVALID(scruple_recipe_at(0, nullptr), "out");
  EXPECT_INVALID(scruple_rule_at(0, nullptr), "out");
  EXPECT_INVALID(scruple_rule_slot(0, 0, nullptr), "out");
  EXPECT_INVALID(scruple_rule_hyper(0, 0, nullptr), "out");
  EXPECT_INVALID(scruple_engine_at(0, nullptr), "out");
}

// Programs may have stored these numbers: a new row of formats.def takes none of them.
TEST_F(Errors, FormatsAndRoundingsKeepTheirNumbers) {
  const std::pair<const char*, int> known[] = {
      {"fp32", 0},        {"bf16", 1},   {"bf16+fp32", 3}, {"bf16+8", 12}, {"fp16+8", 28},
      {"int8", 37},       {"root8", 42}, {"linear8", 43},  {"flash8", 44}, {"nf4", 46},
      {"companded8", 45}, {"log4", 47},  {"log5", 48}};
  for (const auto& [name, number] : known)
    EXPECT_EQ(scruple_format_find(name), scruple_format_at(number)) << name;
  const char* const roundings[] = {"nearest", "truncate", "stochastic", "dither", "wide"};
  for (int r = SCRUPLE_NEAREST; r <= SCRUPLE_WIDE; ++r) EXPECT_STREQ(scruple_rounding_name(r), roundings[r]);
  for (const int r : {-1, SCRUPLE_WIDE + 1, 1 << 30}) EXPECT_EQ(scruple_rounding_name(r), nullptr);
}

// What docs/checkpoint.md says of `rounding`.
TEST_F(Errors, CodesAreReadAlikeWhateverRoundedThemButInSplitWeights) {
  for (const scruple_format* format : formats()) {
    const std::string name = info_of(format).name;
    const bool split = name.find('+') != name.npos && name.find("fp32") == name.npos;
    for (int r = SCRUPLE_NEAREST; r <= SCRUPLE_WIDE; ++r)
      EXPECT_EQ(scruple_format_reads_as(format, r),
                split && (r == SCRUPLE_TRUNCATE || r == SCRUPLE_STOCHASTIC) ? r : int{SCRUPLE_NEAREST})
          << name << " " << r;
    EXPECT_EQ(scruple_format_reads_as(format, -1), -1);
  }
  EXPECT_EQ(scruple_format_reads_as(nullptr, 0), -1);
}

TEST_F(Errors, UnknownNamesAreToldTheKnownOnes) {
  EXPECT_EQ(scruple_format_find("bf17"), nullptr);
  expect_refused(SCRUPLE_INVALID, SCRUPLE_INVALID, {"bf17", "fp32", "bf16+8", "companded8"}, "a format");
  EXPECT_EQ(scruple_format_find(nullptr), nullptr);
  EXPECT_EQ(scruple_format_find(""), nullptr);
  for (const scruple_format* format : formats()) EXPECT_EQ(scruple_format_find(info_of(format).name), format);

  scruple_optimizer* optimizer = nullptr;
  EXPECT_INVALID(scruple_optimizer_create("adamx", &optimizer), "adamx", "sgd", "adamw", "lion");
  EXPECT_INVALID(scruple_optimizer_create(nullptr, &optimizer), "adamw");
  EXPECT_EQ(optimizer, nullptr);
  scruple_engine* made = nullptr;
  EXPECT_INVALID(scruple_engine_create("gpu", 1, &made), "gpu", "cpu", "cpu-baseline");
  EXPECT_EQ(made, nullptr);
}

TEST_F(Errors, FormatSizes) {
  const scruple_format* format = scruple_format_find("companded8");
  std::int64_t codes = -7, aux = -7;
  EXPECT_INVALID(scruple_format_bytes(format, -1, &codes, &aux), "-1");
  EXPECT_INVALID(scruple_format_bytes(format, std::numeric_limits<std::int64_t>::max(), &codes, &aux),
                 "size");
  EXPECT_INVALID(scruple_format_bytes(nullptr, 1, &codes, &aux), "format");
  EXPECT_INVALID(scruple_format_bytes(format, 1, nullptr, &aux), "codes");
  EXPECT_INVALID(scruple_format_bytes(format, 1, &codes, nullptr), "aux");
  EXPECT_EQ(codes, -7) << "a refused call wrote an output";
  EXPECT_EQ(aux, -7);
  scruple_format_info info{};
  EXPECT_INVALID(scruple_get_format_info(nullptr, &info), "format");
  EXPECT_INVALID(scruple_get_format_info(format, nullptr), "out");
  for (const scruple_format* each : formats()) {
    CHECK_OK(scruple_format_bytes(each, kHuge, &codes, &aux));
    EXPECT_GE(static_cast<double>(codes + aux) * 8 / static_cast<double>(kHuge), info_of(each).bits_per_value)
        << "64-bit sizes";
    CHECK_OK(scruple_format_bytes(each, 0, &codes, &aux));
    EXPECT_EQ(codes + aux, 0);
  }
}

// ---- Engines and optimizers ----

TEST_F(Errors, EnginesRefuseBadThreadsNamesAndOutputs) {
  scruple_engine* made = nullptr;
  EXPECT_INVALID(scruple_engine_create("cpu", -1, &made), "threads", "-1");
  EXPECT_INVALID(scruple_engine_create("cpu", 1 << 20, &made), "threads");
  EXPECT_INVALID(scruple_engine_create("cpu", 1, nullptr), "out");
  EXPECT_INVALID(scruple_engine_create("cpu", 3, nullptr), "out");
  EXPECT_EQ(made, nullptr);
  ASSERT_EQ(setenv("SCRUPLE_ENGINE", "cpu-imaginary", 1), 0);
  EXPECT_INVALID(scruple_engine_create("cpu", 1, &made), "cpu-imaginary");
  ASSERT_EQ(setenv("SCRUPLE_ENGINE", "", 1), 0);
  CHECK_OK(scruple_engine_create(nullptr, 0, &made));
  EXPECT_GE(scruple_engine_threads(made), 1);
  scruple_engine_destroy(made);
  ASSERT_EQ(unsetenv("SCRUPLE_ENGINE"), 0);
  for (const scruple_engine_info& info : engines()) {
    if (info.available != 0) continue;
    EXPECT_NE(std::string(info.reason), "");
    EXPECT_REFUSED(scruple_engine_create(info.name, 1, &made), SCRUPLE_UNAVAILABLE, info.name);
  }
  scruple_engine_destroy(nullptr);
  EXPECT_STREQ(scruple_engine_name(nullptr), "");
  EXPECT_EQ(scruple_engine_threads(nullptr), 0);
}

TEST_F(Errors, CopyRefusesNullAndNegativeSizes) {
  char from[4] = "abc", to[4] = "xyz";
  EXPECT_INVALID(scruple_copy(nullptr, to, from, 4), "engine");
  EXPECT_INVALID(scruple_copy(engine, nullptr, from, 4), "null");
  EXPECT_INVALID(scruple_copy(engine, to, nullptr, 4), "null");
  EXPECT_INVALID(scruple_copy(engine, to, from, -4), "-4");
  EXPECT_STREQ(to, "xyz");
  CHECK_OK(scruple_copy(engine, nullptr, nullptr, 0));
}

TEST_F(Errors, HyperparametersOutOfRangeAreRefusedAndTheOldValueStays) {
  for (const Rule& rule : rules()) {
    const Optimizer optimizer(rule.name);
    for (const scruple_hyper_info& hyper : rule.hypers) {
      std::vector<double> bad = {-0.5, -1e-300, kNaN, kInf, -kInf};
      if (hyper.flag != 0) bad.push_back(0.5), bad.push_back(2);
      const std::string name = hyper.name;
      if (name == "beta1" || name == "beta2" || name == "alpha") bad.push_back(1), bad.push_back(1.5);
      for (const double value : bad) {
        EXPECT_INVALID(scruple_optimizer_set(optimizer, hyper.name, value), rule.name, hyper.name);
        double now = -1;
        CHECK_OK(scruple_optimizer_get(optimizer, hyper.name, &now));
        EXPECT_EQ(now, hyper.value) << rule.name << " " << hyper.name;
      }
    }
  }
}

TEST_F(Errors, OptimizersRefuseNullAndUnknownNames) {
  double value = -7;
  EXPECT_INVALID(scruple_optimizer_create("sgd", nullptr), "out");
  EXPECT_INVALID(scruple_optimizer_set(nullptr, "lr", 1), "optimizer");
  EXPECT_INVALID(scruple_optimizer_set(adamw, nullptr, 1), "adamw", "lr");
  EXPECT_INVALID(scruple_optimizer_set(adamw, "momentum", 1), "momentum", "beta1", "maximize");
  EXPECT_INVALID(scruple_optimizer_get(nullptr, "lr", &value), "optimizer");
  EXPECT_INVALID(scruple_optimizer_get(adamw, "lr", nullptr), "out");
  EXPECT_INVALID(scruple_optimizer_get(adamw, "gamma", &value), "gamma", "weight_decay");
  EXPECT_EQ(value, -7);
  EXPECT_INVALID(scruple_optimizer_set_seed(nullptr, 1), "optimizer");
  EXPECT_EQ(scruple_optimizer_seed(nullptr), 0u);
  EXPECT_EQ(scruple_optimizer_rule(nullptr), -1);
  scruple_optimizer_destroy(nullptr);
}

// ---- Tensors ----

TEST_F(Errors, TensorUseChangesNothingWhenItFails) {
  const scruple_tensor good = row_of(adamw, 10);
  EXPECT_INVALID(scruple_tensor_use(nullptr, "fp32"), "tensor");
  const auto refuses = [&](const std::function<void(scruple_tensor&)>& spoil, const char* recipe,
                           const char* part) {
    scruple_tensor t = good;
    spoil(t);
    const scruple_tensor before = t;
    expect_refused(scruple_tensor_use(&t, recipe), SCRUPLE_INVALID, {part}, part);
    EXPECT_EQ(std::memcmp(&t, &before, sizeof t), 0) << part;
  };
  refuses([](scruple_tensor&) {}, "bf16", "scruple");
  refuses([](scruple_tensor&) {}, nullptr, "recipe");
  refuses([](scruple_tensor& t) { t.optimizer = nullptr; }, "fp32", "optimizer");
  refuses([](scruple_tensor& t) { t.size = -1; }, "fp32", "-1");
  refuses([](scruple_tensor& t) { t.size = kHuge + 1; }, "fp32", "size");
}

TEST_F(Errors, ArraysThatDoNotExist) {
  const Tensor tensor(sgd, 3, "fp32", engine);
  float values[3] = {7, 7, 7};
  int used = -7;
  for (const int array : {-1, SCRUPLE_SLOT + 1, SCRUPLE_SLOT + 2, SCRUPLE_GRADIENT + 1, 1 << 30}) {
    EXPECT_INVALID(scruple_tensor_array(&tensor.row, array, nullptr, nullptr, &used), "sgd", "array");
    EXPECT_INVALID(scruple_encode(engine, &tensor.row, array, values), "array");
    EXPECT_INVALID(scruple_decode(engine, &tensor.row, array, values), "array");
  }
  EXPECT_EQ(used, -7);
  EXPECT_EQ(values[0], 7.0f);
  EXPECT_INVALID(scruple_tensor_array(nullptr, 0, nullptr, nullptr, &used), "tensor");
  EXPECT_INVALID(scruple_decode(engine, &tensor.row, SCRUPLE_SLOT, values), "momentum_buffer", "codes");
}

TEST_F(Errors, EncodeAndDecodeRefuseWhatIsMissing) {
  Tensor tensor(adamw, 100, "scruple", engine);
  std::vector<float> values(100, 1.0f);
  const Bytes before = all_planes(tensor);
  EXPECT_INVALID(scruple_encode(nullptr, &tensor.row, 0, values.data()), "engine");
  EXPECT_INVALID(scruple_encode(engine, nullptr, 0, values.data()), "tensor");
  EXPECT_INVALID(scruple_encode(engine, &tensor.row, 0, nullptr), "values");
  EXPECT_INVALID(scruple_decode(nullptr, &tensor.row, 0, values.data()), "engine");
  EXPECT_INVALID(scruple_decode(engine, nullptr, 0, values.data()), "tensor");
  EXPECT_INVALID(scruple_decode(engine, &tensor.row, 0, nullptr), "values");
  for (const char* two_planes : {"int10", "bf16+8", "companded8"})
    EXPECT_INVALID(scruple_decode_as(engine, &tensor.row, 0, scruple_format_find(two_planes), values.data()),
                   two_planes, "fp32, bf16 or fp16");
  EXPECT_INVALID(scruple_decode_as(engine, &tensor.row, 0, nullptr, values.data()), "format");
  scruple_tensor row = tensor.row;
  row.arrays[SCRUPLE_SLOT].aux = nullptr;
  EXPECT_INVALID(scruple_encode(engine, &row, SCRUPLE_SLOT, values.data()), "exp_avg", "aux", "companded8");
  row.arrays[SCRUPLE_WEIGHT].codes = nullptr;
  EXPECT_INVALID(scruple_decode(engine, &row, SCRUPLE_WEIGHT, values.data()), "weight", "codes");
  row = tensor.row;
  row.arrays[SCRUPLE_WEIGHT].rounding = SCRUPLE_DITHER;
  EXPECT_REFUSED(scruple_encode(engine, &row, SCRUPLE_WEIGHT, values.data()), SCRUPLE_UNSUPPORTED, "dither",
                 "nearest");
  EXPECT_EQ(all_planes(tensor), before);
  EXPECT_EQ(values, std::vector<float>(100, 1.0f));
  scruple_tensor empty = tensor.row;
  empty.size = 0;
  for (scruple_array& array : empty.arrays) array.codes = array.aux = nullptr;
  CHECK_OK(scruple_encode(engine, &empty, SCRUPLE_WEIGHT, nullptr));
  CHECK_OK(scruple_decode(engine, &empty, SCRUPLE_WEIGHT, nullptr));
  CHECK_OK(scruple_tensor_reset(engine, &empty));
  CHECK_OK(scruple_step(engine, &empty, 1, nullptr));
}

TEST_F(Errors, ValuesAndCopiesMayNotOverlap) {
  Tensor tensor(sgd, 100, "fp32", engine);
  auto* codes = static_cast<float*>(tensor.row.arrays[SCRUPLE_WEIGHT].codes);
  EXPECT_INVALID(scruple_encode(engine, &tensor.row, SCRUPLE_WEIGHT, codes + 1), "overlap");
  EXPECT_INVALID(scruple_decode(engine, &tensor.row, SCRUPLE_WEIGHT, codes), "overlap");
  EXPECT_INVALID(
      scruple_decode_as(engine, &tensor.row, SCRUPLE_WEIGHT, scruple_format_find("bf16"), codes + 99),
      "overlap");
  EXPECT_INVALID(scruple_copy(engine, codes + 1, codes, 50), "overlap");
  CHECK_OK(scruple_copy(engine, codes + 50, codes, 200));
}

TEST_F(Errors, ViewsStayInsideAndOnGroups) {
  const Tensor tensor(adamw, 1000, "scruple", engine);
  scruple_tensor out{};
  const scruple_tensor untouched = out;
  const std::pair<std::int64_t, std::int64_t> bad[] = {
      {64, 10},  {1, 1},     {-128, 10}, {128, -1},
      {0, 1001}, {896, 105}, {1024, 0},  {0, std::int64_t{1} << 62},
      {0, 100},  {128, 129}};  // the last two would cut a group
  for (const auto& [first, size] : bad)
    EXPECT_INVALID(scruple_tensor_view(&tensor.row, first, size, &out), "view", "128");
  EXPECT_INVALID(scruple_tensor_view(nullptr, 0, 1, &out), "tensor");
  EXPECT_INVALID(scruple_tensor_view(&tensor.row, 0, 128, nullptr), "out");
  EXPECT_EQ(std::memcmp(&out, &untouched, sizeof out), 0);
  CHECK_OK(scruple_tensor_view(&tensor.row, 896, 104, &out));
  EXPECT_EQ(out.offset, 896);
  EXPECT_EQ(out.size, 104);
}

TEST_F(Errors, AnAbsurdAllocationSaysSoAndLeavesTheTensorAlone) {
  for (const char* recipe : {"fp32", "scruple", "scant"}) {
    scruple_tensor t = row_of(adamw, kHuge, recipe);
    const scruple_tensor before = t;
    EXPECT_REFUSED(scruple_tensor_alloc(engine, &t, ~0u), SCRUPLE_OUT_OF_MEMORY, "memory");
    EXPECT_EQ(std::memcmp(&t, &before, sizeof t), 0) << recipe;
    scruple_tensor_free(engine, &t);
    t.size = 1000;
    CHECK_OK(scruple_tensor_alloc(engine, &t, ~0u));
    scruple_tensor_free(engine, &t);
  }
}

TEST_F(Errors, AllocRefusesNullAndMissingFormats) {
  scruple_tensor t = row_of(adamw, 10);
  const scruple_tensor before = t;
  EXPECT_INVALID(scruple_tensor_alloc(engine, &t, 1u), "weight", "format");
  EXPECT_INVALID(scruple_tensor_alloc(nullptr, &t, 1u), "engine");
  EXPECT_INVALID(scruple_tensor_alloc(engine, nullptr, 1u), "tensor");
  EXPECT_INVALID(scruple_tensor_reset(engine, &t), "exp_avg");
  EXPECT_INVALID(scruple_tensor_reset(nullptr, &t), "engine");
  EXPECT_INVALID(scruple_tensor_reset(engine, nullptr), "tensor");
  EXPECT_EQ(std::memcmp(&t, &before, sizeof t), 0);
  scruple_tensor_free(nullptr, &t);
  scruple_tensor_free(engine, nullptr);
  scruple_tensor_free(engine, &t);
}

TEST_F(Errors, TheLibraryOwnsWhatItAllocatesAndNothingElse) {
  const Optimizer optimizer("adagrad", {{"initial_accumulator_value", 0.5}});
  std::vector<float> mine(1000, 3.0f), decoded(1000);
  scruple_tensor t = row_of(optimizer, 1000, "fp32");
  t.arrays[SCRUPLE_WEIGHT].codes = mine.data();
  CHECK_OK(
      scruple_tensor_alloc(engine, &t, 1u << SCRUPLE_WEIGHT | 1u << SCRUPLE_SLOT | 1u << SCRUPLE_GRADIENT));
  EXPECT_EQ(t.arrays[SCRUPLE_WEIGHT].codes, mine.data());
  EXPECT_EQ(t.arrays[SCRUPLE_WEIGHT].owned, 0);
  EXPECT_NE(t.arrays[SCRUPLE_SLOT].owned, 0);
  CHECK_OK(scruple_decode(engine, &t, SCRUPLE_SLOT, decoded.data()));
  EXPECT_EQ(decoded, std::vector<float>(1000, 0.5f));
  CHECK_OK(scruple_decode(engine, &t, SCRUPLE_GRADIENT, decoded.data()));
  EXPECT_EQ(decoded, std::vector<float>(1000, 0.0f));
  CHECK_OK(scruple_step(engine, &t, 1, nullptr));
  EXPECT_EQ(mine, std::vector<float>(1000, 3.0f)) << "a zero gradient moves nothing";
  scruple_tensor view{};
  CHECK_OK(scruple_tensor_view(&t, 128, 128, &view));
  scruple_tensor_free(engine, &view);  // a view owns nothing
  CHECK_OK(scruple_step(engine, &t, 1, nullptr));
  scruple_tensor_free(engine, &t);
  EXPECT_EQ(t.arrays[SCRUPLE_SLOT].codes, nullptr);
  EXPECT_EQ(t.arrays[SCRUPLE_WEIGHT].codes, mine.data());
  scruple_tensor_free(engine, &t);  // once more is harmless
}

// ---- The step ----

// Two good tensors; a case spoils the table and the step must refuse it, write nothing, and work again afterwards.
struct StepCase {
  StepCase() {
    for (const char* recipe : {"scruple", "fp32"}) {
      Tensor& tensor = tensors.emplace_back(optimizer, 300, recipe, engine);
      tensor.encode(engine, SCRUPLE_WEIGHT, Random(1).normals(300));
      tensor.encode(engine, SCRUPLE_GRADIENT, Random(2).normals(300));
    }
    table = rows_of(tensors);
  }
  scruple_status step(const scruple_step_options* options = nullptr) const {
    return scruple_step(engine, table.data(), 2, options);
  }
  Bytes bytes() const { return all_planes(tensors); }

  Engine engine;
  Optimizer optimizer;
  std::vector<Tensor> tensors;
  std::vector<scruple_tensor> table;
};

void expect_step_refused(scruple_status want, const std::vector<std::string>& parts,
                         const std::function<void(StepCase&)>& spoil) {
  StepCase c;
  spoil(c);
  const Bytes before = c.bytes();
  expect_refused(c.step(), want, parts, parts[0]);
  EXPECT_EQ(c.bytes(), before) << parts[0] << ": a refused step wrote something";
  StepCase good;
  const Bytes at_first = good.bytes();
  CHECK_OK(good.step());
  EXPECT_NE(good.bytes(), at_first);
}

TEST_F(Errors, TheGoodTableIsGood) {
  StepCase c;
  CHECK_OK(c.step());
  CHECK_OK(scruple_step(c.engine, nullptr, 0, nullptr));
}

TEST_F(Errors, StepRefusesBadTables) {
  StepCase c;
  EXPECT_INVALID(scruple_step(nullptr, c.table.data(), 2, nullptr), "engine");
  EXPECT_INVALID(scruple_step(c.engine, nullptr, 2, nullptr), "null", "2");
  EXPECT_INVALID(scruple_step(c.engine, c.table.data(), -1, nullptr), "-1");
  const auto refused = [](const std::vector<std::string>& parts,
                          const std::function<void(scruple_tensor&)>& spoil) {
    expect_step_refused(SCRUPLE_INVALID, parts, [&](StepCase& s) { spoil(s.table[1]); });
  };
  refused({"tensor 1", "optimizer"}, [](scruple_tensor& t) { t.optimizer = nullptr; });
  refused({"tensor 1", "size", "-300"}, [](scruple_tensor& t) { t.size = -300; });
  refused({"tensor 1", "size"}, [](scruple_tensor& t) { t.size = kHuge + 1; });
  refused({"tensor 1", "step is 0"}, [](scruple_tensor& t) { t.step = 0; });
  refused({"tensor 1", "step is -3"}, [](scruple_tensor& t) { t.step = -3; });
  refused({"tensor 1", "step"}, [](scruple_tensor& t) { t.step = std::int64_t{1} << 32; });
  refused({"tensor 1", "offset"}, [](scruple_tensor& t) { t.offset = -1; });
  refused({"tensor 1", "offset"}, [](scruple_tensor& t) { t.offset = kHuge; });
  refused({"tensor 1", "folds"}, [](scruple_tensor& t) { t.folds = -1; });
}

TEST_F(Errors, StepRefusesMissingPlanesAndFormats) {
  for (int array = 0; array < SCRUPLE_ARRAYS; ++array) {
    if (array == SCRUPLE_SLOT + 2) continue;  // amsgrad is off
    StepCase names;
    const char* name = nullptr;
    CHECK_OK(scruple_tensor_array(&names.table[0], array, &name, nullptr, nullptr));
    expect_step_refused(SCRUPLE_INVALID, {"tensor 0", name, "format"},
                        [&](StepCase& s) { s.table[0].arrays[array].format = nullptr; });
    expect_step_refused(SCRUPLE_INVALID, {"tensor 0", name, "codes"},
                        [&](StepCase& s) { s.table[0].arrays[array].codes = nullptr; });
    if (info_of(names.table[0].arrays[array].format).aux_bits > 0)
      expect_step_refused(SCRUPLE_INVALID, {"tensor 0", name, "aux"},
                          [&](StepCase& s) { s.table[0].arrays[array].aux = nullptr; });
    for (const int rounding : {-1, 5, 7, 1 << 30})
      expect_step_refused(SCRUPLE_UNSUPPORTED, {"tensor 0", name, "nearest"},
                          [&](StepCase& s) { s.table[0].arrays[array].rounding = rounding; });
  }
  expect_step_refused(SCRUPLE_UNSUPPORTED, {"exp_avg", "truncate", "companded8", "stochastic"},
                      [](StepCase& s) { s.table[0].arrays[SCRUPLE_SLOT].rounding = SCRUPLE_TRUNCATE; });
  expect_step_refused(SCRUPLE_UNSUPPORTED, {"exp_avg_sq", "companded8", "amsgrad", "fp32"},
                      [](StepCase& s) { s.optimizer.set("amsgrad", 1); });
}

TEST_F(Errors, DitherIsForGradientAccumulatorsOnly) {
  const Optimizer optimizer("lion");
  const std::pair<int, const char*> cases[] = {{SCRUPLE_WEIGHT, "int8"}, {SCRUPLE_SLOT, "linear8"}};
  for (const auto& [array, format] : cases) {
    Tensor tensor(optimizer, 100, "fp32", engine);
    tensor.use(array, format, SCRUPLE_DITHER);
    const Bytes before = all_planes(tensor);
    EXPECT_REFUSED(scruple_step(engine, &tensor.row, 1, nullptr), SCRUPLE_UNSUPPORTED, "dither", format);
    EXPECT_EQ(all_planes(tensor), before);
  }
  Tensor tensor(optimizer, 100, "fp32", engine);
  tensor.use(SCRUPLE_GRADIENT, "int8", SCRUPLE_DITHER);
  CHECK_OK(scruple_step(engine, &tensor.row, 1, nullptr));
}

TEST_F(Errors, HyperparametersThatContradictEachOther) {
  for (const char* rule : {"sgd", "sgdw"}) {
    Optimizer optimizer(rule);
    optimizer.set("nesterov", 1);
    Tensor tensor(optimizer, 10, "fp32", engine);
    const Bytes before = all_planes(tensor);
    EXPECT_INVALID(scruple_step(engine, &tensor.row, 1, nullptr), rule, "nesterov", "momentum");
    EXPECT_EQ(all_planes(tensor), before);
    optimizer.set("momentum", 0.9);
    optimizer.set("dampening", 0.1);
    tensor.use(SCRUPLE_SLOT, "fp32");
    EXPECT_INVALID(scruple_step(engine, &tensor.row, 1, nullptr), rule, "nesterov", "dampening");
    optimizer.set("dampening", 0);
    CHECK_OK(scruple_step(engine, &tensor.row, 1, nullptr));
  }
}

TEST_F(Errors, StepOptions) {
  StepCase c;
  const Bytes before = c.bytes();
  scruple_step_options options{};
  EXPECT_INVALID(c.step(&options), "SCRUPLE_STEP_OPTIONS_INIT");
  options = SCRUPLE_STEP_OPTIONS_INIT;
  options.struct_size = sizeof options + 8;
  EXPECT_INVALID(c.step(&options), "options", "bytes");
  for (const float bad : {0.0f, kNaN, kInf, -kInf}) {
    options = SCRUPLE_STEP_OPTIONS_INIT;
    options.multiplier = bad;
    EXPECT_INVALID(c.step(&options), "multiplier");
  }
  EXPECT_EQ(c.bytes(), before);
  options = SCRUPLE_STEP_OPTIONS_INIT;
  CHECK_OK(c.step(&options));
}

// A skipped step is still a checked one: a wrong table is an error whatever the flag says.
TEST_F(Errors, FoundInfDoesNotHideAWrongTable) {
  StepCase c;
  const float flag = 1;
  scruple_step_options options = SCRUPLE_STEP_OPTIONS_INIT;
  options.found_inf = &flag;
  c.table[1].arrays[SCRUPLE_WEIGHT].codes = nullptr;
  EXPECT_INVALID(c.step(&options), "tensor 1", "weight");
}

// ---- Overlap ----

TEST_F(Errors, PlanesThatAreWrittenMayNotOverlap) {
  const auto overlaps = [](const char* first, const char* second,
                           const std::function<void(StepCase&)>& spoil) {
    expect_step_refused(SCRUPLE_INVALID, {"overlap", first, second}, spoil);
  };
  Bytes arena(4096);
  // A tied weight, listed twice.
  overlaps("tensor 0", "tensor 1", [](StepCase& s) { s.table[1] = s.table[0]; });
  overlaps("exp_avg", "exp_avg_sq", [](StepCase& s) {
    s.table[1].arrays[SCRUPLE_SLOT + 1].codes = s.table[1].arrays[SCRUPLE_SLOT].codes;
  });
  overlaps("weight", "gradient", [](StepCase& s) {
    s.table[1].arrays[SCRUPLE_GRADIENT].codes = s.table[1].arrays[SCRUPLE_WEIGHT].codes;
  });
  overlaps("tensor 1 (weight)", "tensor 0 (gradient)", [](StepCase& s) {
    s.table[0].arrays[SCRUPLE_GRADIENT].codes = s.table[1].arrays[SCRUPLE_WEIGHT].codes;
  });
  // The extra bits begin on the last byte of the codes.
  overlaps("tensor 0 (weight)", "tensor 0 (weight)", [&](StepCase& s) {
    s.table[0].arrays[SCRUPLE_WEIGHT].codes = arena.data();
    s.table[0].arrays[SCRUPLE_WEIGHT].aux = arena.data() + 2 * 300 - 1;
  });
  // The last byte of one is the first of another.
  overlaps("tensor 0 (exp_avg)", "tensor 1 (weight)", [&](StepCase& s) {
    s.table[0].arrays[SCRUPLE_SLOT].codes = arena.data();
    s.table[1].arrays[SCRUPLE_WEIGHT].codes = arena.data() + 300 - 1;
  });
  // One inside the other.
  overlaps("tensor 1 (weight)", "tensor 0 (exp_avg)", [&](StepCase& s) {
    s.table[1].arrays[SCRUPLE_WEIGHT].codes = arena.data();
    s.table[0].arrays[SCRUPLE_SLOT].codes = arena.data() + 400;
  });
}

TEST_F(Errors, NeighboursAndSharedGradientsAreNoOverlap) {
  // weight | weight | gradient, edge to edge in one piece of memory.
  std::vector<float> memory(300, 1.0f);
  scruple_tensor table[2]{};
  for (std::size_t i = 0; i < 2; ++i) {
    table[i] = row_of(sgd, 100, "fp32");
    table[i].arrays[SCRUPLE_WEIGHT].codes = memory.data() + 100 * i;
    table[i].arrays[SCRUPLE_GRADIENT].codes = memory.data() + 200;
  }
  CHECK_OK(scruple_step(engine, table, 2, nullptr));
  EXPECT_EQ(memory[0], memory[199]);
  EXPECT_LT(memory[0], 1.0f);
  EXPECT_EQ(memory[200], 1.0f);
  // Gradients that are only read may even overlap in part.
  table[1].arrays[SCRUPLE_GRADIENT].codes = memory.data() + 200;
  table[0].size = 50;
  table[0].arrays[SCRUPLE_GRADIENT].codes = memory.data() + 250;
  CHECK_OK(scruple_step(engine, table, 2, nullptr));
  // An empty tensor overlaps nothing.
  table[0].size = 0;
  table[0].arrays[SCRUPLE_WEIGHT].codes = memory.data() + 150;
  CHECK_OK(scruple_step(engine, table, 2, nullptr));
}

// ---- Norms, folds ----

TEST_F(Errors, NormsRefuseBadTables) {
  StepCase c;
  double norm = -7;
  float found = -7;
  EXPECT_INVALID(scruple_norm(nullptr, c.table.data(), 2, &norm, &found), "engine");
  EXPECT_INVALID(scruple_norm(c.engine, nullptr, 2, &norm, &found), "null");
  EXPECT_INVALID(scruple_norm(c.engine, c.table.data(), -2, &norm, &found), "-2");
  c.table[1].arrays[SCRUPLE_GRADIENT].codes = nullptr;
  EXPECT_INVALID(scruple_norm(c.engine, c.table.data(), 2, &norm, &found), "tensor 1", "gradient");
  EXPECT_INVALID(scruple_clear(c.engine, c.table.data(), 2), "tensor 1", "gradient");
  EXPECT_EQ(norm, -7);
  EXPECT_EQ(found, -7);
  EXPECT_INVALID(scruple_clear(nullptr, c.table.data(), 2), "engine");
  EXPECT_INVALID(scruple_clear(c.engine, nullptr, 2), "null");
}

TEST_F(Errors, FoldsRefuseWhatCannotBeFolded) {
  Tensor into(sgd, 100), from(sgd, 100);
  into.use(SCRUPLE_GRADIENT, "int8", SCRUPLE_DITHER);
  from.use(SCRUPLE_GRADIENT, "fp32");
  const scruple_array good = from.row.arrays[SCRUPLE_GRADIENT];
  const Bytes before = into.bytes(SCRUPLE_GRADIENT);
  EXPECT_INVALID(scruple_fold(nullptr, &into.row, &good, 1, 1, nullptr), "engine");
  EXPECT_INVALID(scruple_fold(engine, nullptr, &good, 1, 1, nullptr), "null");
  EXPECT_INVALID(scruple_fold(engine, &into.row, nullptr, 1, 1, nullptr), "null");
  EXPECT_INVALID(scruple_fold(engine, &into.row, &good, -1, 1, nullptr), "-1");
  for (const float bad : {kNaN, kInf})
    EXPECT_INVALID(scruple_fold(engine, &into.row, &good, 1, bad, nullptr), "multiplier");
  scruple_array spoiled = good;
  spoiled.codes = nullptr;
  EXPECT_INVALID(scruple_fold(engine, &into.row, &spoiled, 1, 1, nullptr), "incoming", "codes");
  spoiled = good;
  spoiled.format = nullptr;
  EXPECT_INVALID(scruple_fold(engine, &into.row, &spoiled, 1, 1, nullptr), "incoming", "format");
  spoiled.format = scruple_format_find("companded8");
  EXPECT_REFUSED(scruple_fold(engine, &into.row, &spoiled, 1, 1, nullptr), SCRUPLE_UNSUPPORTED, "companded8",
                 "fp32, bf16");
  Tensor dithered(sgd, 100);
  dithered.use(SCRUPLE_GRADIENT, "int8", SCRUPLE_DITHER);
  EXPECT_REFUSED(scruple_fold(engine, &into.row, &dithered.row.arrays[SCRUPLE_GRADIENT], 1, 1, nullptr),
                 SCRUPLE_UNSUPPORTED, "dither");
  scruple_array overlapping = good;
  overlapping.codes = into.row.arrays[SCRUPLE_GRADIENT].codes;
  EXPECT_INVALID(scruple_fold(engine, &into.row, &overlapping, 1, 1, nullptr), "overlap");
  Tensor half(sgd, 100);
  half.use(SCRUPLE_GRADIENT, "fp16");
  EXPECT_REFUSED(scruple_fold(engine, &half.row, &good, 1, 1, nullptr), SCRUPLE_UNSUPPORTED, "fp16",
                 "accumulator", "fp32, bf16, int8");
  const scruple_tensor twice[2] = {into.row, into.row};
  const scruple_array both[2] = {good, good};
  EXPECT_INVALID(scruple_fold(engine, twice, both, 2, 1, nullptr), "overlap");
  EXPECT_EQ(into.bytes(SCRUPLE_GRADIENT), before);
  CHECK_OK(scruple_fold(engine, &into.row, &good, 1, 1, nullptr));
}

// ---- Messages ----

TEST_F(Errors, TheLastErrorBelongsToItsThread) {
  EXPECT_EQ(scruple_format_find("mine"), nullptr);
  std::string before_any, theirs;
  std::thread other([&] {
    before_any = scruple_last_error();
    (void)scruple_format_find("theirs");
    theirs = scruple_last_error();
  });
  other.join();
  EXPECT_EQ(before_any, "");
  EXPECT_NE(theirs.find("theirs"), std::string::npos);
  EXPECT_NE(std::string(scruple_last_error()).find("mine"), std::string::npos);
}

// The engine remembers the last table that passed; whatever changes in it is seen all the same.
TEST_F(Errors, ATableThatPassedIsCheckedAgainWhenItChanges) {
  Optimizer momentum("sgd");
  std::vector<float> weights(100), gradients(100);
  std::vector<scruple_tensor> rows(2);
  for (std::size_t i = 0; i < 2; ++i) {
    rows[i] = row_of(momentum, 50, "fp32");
    rows[i].arrays[SCRUPLE_SLOT] = {};
    rows[i].arrays[SCRUPLE_WEIGHT].codes = &weights[50 * i];
    rows[i].arrays[SCRUPLE_GRADIENT].codes = &gradients[50 * i];
  }
  const auto step = [&](const std::vector<scruple_tensor>& table) {
    return scruple_step(engine, table.data(), 2, nullptr);
  };
  const auto spoil = [&](const auto& change, const char* part) {
    CHECK_OK(step(rows));
    std::vector<scruple_tensor> spoiled = rows;
    change(spoiled);
    EXPECT_INVALID(step(spoiled), part);
  };
  spoil([](auto& t) { t[1].arrays[SCRUPLE_WEIGHT].codes = nullptr; }, "codes is null");
  spoil([&](auto& t) { t[1].arrays[SCRUPLE_GRADIENT].codes = weights.data(); }, "overlap");
  spoil([](auto& t) { t[0].size = 51; }, "overlap");
  spoil([](auto& t) { t[1].step = 0; }, "step is 0");
  spoil([](auto& t) { t[1].offset = -1; }, "offset");
  spoil([&](auto&) { momentum.set("nesterov", 1); }, "nesterov");
  momentum.set("nesterov", 0);
  spoil([&](auto&) { momentum.set("momentum", 0.9); }, "no format is set");  // a slot that is used now
  momentum.set("momentum", 0);
  CHECK_OK(step(rows));
}

}  // namespace
}  // namespace scruple_tests
