// A user's choice of formats and roundings by name: which arrays it reaches, which stay, and what is refused.
#include "tests/support.h"

namespace scruple_tests {
namespace {

std::string format_of(const scruple_array& array) { return info_of(array.format).name; }

struct Row {
  explicit Row(const Optimizer& optimizer, const char* recipe = "scruple")
      : row(row_of(optimizer, 100000, recipe)) {}

  scruple_status format(const char* which, const char* name) {
    return scruple_tensor_set_format(&row, which, name);
  }
  scruple_status rounding(const char* which, const char* name) {
    return scruple_tensor_set_rounding(&row, which, name);
  }
  // Of the weight and the first slots: "bf16+8 companded8 log4".
  std::string formats(int slots = 2) const {
    std::string text = format_of(row.arrays[SCRUPLE_WEIGHT]);
    for (int s = 0; s < slots; ++s) text += " " + format_of(row.arrays[SCRUPLE_SLOT + s]);
    return text;
  }
  std::string roundings(int slots = 2) const {
    std::string text = scruple_rounding_name(row.arrays[SCRUPLE_WEIGHT].rounding);
    for (int s = 0; s < slots; ++s)
      text += std::string(" ") + scruple_rounding_name(row.arrays[SCRUPLE_SLOT + s].rounding);
    return text;
  }

  scruple_tensor row;
};

struct Choice : testing::Test {
  const Optimizer adamw, plain{"sgd"};
};

// ---- Formats

TEST_F(Choice, AFormatReachesWhatItsNameSays) {
  const struct {
    const char *which, *format, *formats;
  } cases[] = {
      {"weights", "bf16+4", "bf16+4 companded8 companded8"},
      {"moments", "bf16", "bf16+8 bf16 bf16"},
      {"moments", "log4", "bf16+8 companded8 log4"},  // the others cannot be
      {"moments", "nf4", "bf16+8 nf4 companded8"},
      {"second moments", "bf16", "bf16+8 companded8 bf16"},
      {"exp_avg", "bf16", "bf16+8 bf16 companded8"},
      {"exp_avg_sq", "flash8", "bf16+8 companded8 flash8"},
  };
  for (const auto& [which, format, formats] : cases) {
    Row row(adamw);
    CHECK_OK(row.format(which, format));
    EXPECT_EQ(row.formats(), formats) << which << " " << format;
    CHECK_OK(scruple_tensor_check(&row.row));
  }
  Row row(adamw);
  const std::string before = row.formats();
  CHECK_OK(row.format("gradient", "int8"));
  EXPECT_EQ(format_of(row.row.arrays[SCRUPLE_GRADIENT]), "int8");
  EXPECT_EQ(row.formats(), before);
}

// Maxima and small differences count in them.
TEST_F(Choice, AnExactSlotStaysInFp32) {
  const Optimizer amsgrad("adamw", {{"amsgrad", 1}}), centered("rmsprop", {{"centered", 1}});
  for (const char* which : {"moments", "second moments", "exp_avg_sq", "max_exp_avg_sq"}) {
    Row row(amsgrad);
    CHECK_OK(row.format(which, "bf16"));
    const bool reaches = std::string(which) == "moments";
    EXPECT_EQ(row.formats(3), reaches ? "bf16+8 bf16 fp32 fp32" : "bf16+8 companded8 fp32 fp32") << which;
  }
  // log4 serves those alone that must be exact: the first of the others gets it, and is what is wrong.
  Row row(amsgrad);
  CHECK_OK(row.format("moments", "log4"));
  EXPECT_EQ(row.formats(3), "bf16+8 log4 fp32 fp32");
  EXPECT_UNSUPPORTED(scruple_tensor_check(&row.row), "exp_avg", "log4", "companded8");
  Row none(centered);
  const std::string before = none.formats(3);
  CHECK_OK(none.format("moments", "bf16"));
  EXPECT_EQ(none.formats(3), before);  // all of its slots are exact
}

TEST_F(Choice, AFormatThatFitsNoMomentGoesToTheFirstSoThatTheCheckSaysWhatWould) {
  const Optimizer momentum("sgd", {{"momentum", 0.9}});
  const struct {
    const char *which, *format, *formats, *name;
  } cases[] = {
      {"moments", "int8", "bf16+8 int8 companded8", "exp_avg"},
      {"second moments", "nf4", "bf16+8 companded8 nf4", "exp_avg_sq"},
      {"exp_avg", "log4", "bf16+8 log4 companded8", "exp_avg"},
      {"weights", "linear8", "linear8 companded8 companded8", "weight"},
  };
  for (const auto& [which, format, formats, name] : cases) {
    Row row(adamw);
    CHECK_OK(row.format(which, format));
    EXPECT_EQ(row.formats(), formats);
    EXPECT_UNSUPPORTED(scruple_tensor_check(&row.row), name, format, "formats that can: fp32");
  }
  Row none(plain);  // its slot is not used
  const scruple_tensor before = none.row;
  CHECK_OK(none.format("moments", "int8"));
  CHECK_OK(none.format("second moments", "log4"));
  EXPECT_EQ(std::memcmp(&none.row, &before, sizeof before), 0);
  Row one(momentum);
  CHECK_OK(one.format("second moments", "log4"));  // its slot has signs
  EXPECT_EQ(one.formats(1), "bf16+8 companded8");
}

TEST_F(Choice, ARoundingStaysWhereTheNewFormatKnowsIt) {
  Row row(adamw);
  ASSERT_EQ(row.roundings(), "wide stochastic stochastic");
  CHECK_OK(row.format("weights", "bf16+16"));
  CHECK_OK(row.format("moments", "bf16"));
  EXPECT_EQ(row.roundings(), "wide stochastic stochastic");
  CHECK_OK(row.format("weights", "bf16"));  // has no second part
  CHECK_OK(row.format("exp_avg", "fp32"));
  EXPECT_EQ(row.roundings(), "nearest stochastic stochastic");
  CHECK_OK(scruple_tensor_check(&row.row));
  row.row.arrays[SCRUPLE_SLOT].rounding = 1 << 30;  // whatever stood there
  CHECK_OK(row.format("exp_avg", "bf16"));
  EXPECT_EQ(row.roundings(), "nearest nearest stochastic");
  CHECK_OK(row.format("gradient", "int8"));
  // int8 is dithered as a gradient alone, and root8 not at all.
  for (const int a : {SCRUPLE_WEIGHT, SCRUPLE_GRADIENT}) {
    row.row.arrays[a].rounding = SCRUPLE_DITHER;
    row.row.arrays[a].format = scruple_format_find("int8");
    CHECK_OK(row.format(a == SCRUPLE_WEIGHT ? "weights" : "gradient", "int8"));
    EXPECT_EQ(row.row.arrays[a].rounding, a == SCRUPLE_WEIGHT ? SCRUPLE_NEAREST : SCRUPLE_DITHER);
  }
  CHECK_OK(row.format("gradient", "root8"));
  EXPECT_EQ(row.row.arrays[SCRUPLE_GRADIENT].rounding, SCRUPLE_NEAREST);
}

TEST_F(Choice, WeightsThatBecomeCodesAreRoundedStochastically) {
  for (const char* recipe : {"fp32", "flash", "scruple"})
    for (const char* codes : {"int8", "int12"}) {
      Row row(adamw, recipe);
      CHECK_OK(row.format("weights", codes));
      EXPECT_EQ(row.row.arrays[SCRUPLE_WEIGHT].rounding, SCRUPLE_STOCHASTIC) << recipe << " " << codes;
      CHECK_OK(row.rounding("weights", "nearest"));
      CHECK_OK(row.format("weights", "int10"));  // of codes other codes: what was asked for stays
      EXPECT_EQ(row.row.arrays[SCRUPLE_WEIGHT].rounding, SCRUPLE_NEAREST) << recipe << " " << codes;
    }
  Row gradients(adamw, "flash");
  CHECK_OK(gradients.format("gradient", "int8"));
  EXPECT_EQ(gradients.row.arrays[SCRUPLE_GRADIENT].rounding, SCRUPLE_NEAREST);
}

// ---- Roundings

TEST_F(Choice, ARoundingReachesWhatItsNameSays) {
  const struct {
    const char *recipe, *which, *rounding, *roundings;
  } cases[] = {
      {"scruple", "", "nearest", "nearest nearest nearest"},
      {"scruple", nullptr, "truncate", "truncate stochastic stochastic"},  // the others cannot
      {"flash", "", "wide", "wide nearest nearest"},
      {"scruple", "weights", "truncate", "truncate stochastic stochastic"},
      {"scruple", "moments", "nearest", "wide nearest nearest"},
      {"scruple", "exp_avg_sq", "nearest", "wide stochastic nearest"},
      {"flash", "exp_avg", "stochastic", "nearest stochastic nearest"},
      // Nothing is rounded in fp32.
      {"fp32", "", "wide", "nearest nearest nearest"},
      {"fp32", "weights", "wide", "nearest nearest nearest"},
      {"fp32", "moments", "truncate", "nearest nearest nearest"},
      {"fp32", "exp_avg", "stochastic", "nearest nearest nearest"},
  };
  for (const auto& [recipe, which, rounding, roundings] : cases) {
    Row row(adamw, recipe);
    CHECK_OK(row.rounding(which, rounding));
    EXPECT_EQ(row.roundings(), roundings) << recipe << " " << (which == nullptr ? "" : which);
    CHECK_OK(scruple_tensor_check(&row.row));
  }
  Row mixed(adamw);
  CHECK_OK(mixed.format("exp_avg", "bf16"));
  CHECK_OK(mixed.rounding("moments", "truncate"));  // exp_avg_sq cannot
  EXPECT_EQ(mixed.roundings(), "wide truncate stochastic");
  CHECK_OK(mixed.rounding("moments", "nearest"));
  CHECK_OK(mixed.rounding("exp_avg_sq", "stochastic"));  // said later
  EXPECT_EQ(mixed.roundings(), "wide nearest stochastic");
  Row none(plain);
  CHECK_OK(none.rounding("moments", "truncate"));  // there is none that could not
}

TEST_F(Choice, ARoundingThatAnArrayCannotDoIsRefusedWithThoseThatItCan) {
  const struct {
    const char *which, *rounding, *name, *format, *can;
  } cases[] = {
      {"weights", "wide", "weights", "bf16", "rounded nearest, truncate, stochastic;"},
      {"moments", "truncate", "exp_avg ", "companded8", "rounded nearest, stochastic;"},
      {"exp_avg_sq", "wide", "exp_avg_sq ", "companded8", "rounded nearest, stochastic;"},
  };
  for (const auto& [which, rounding, name, format, can] : cases) {
    Row row(adamw);
    CHECK_OK(row.format("weights", "bf16"));
    const scruple_tensor before = row.row;
    const std::string asked = std::string("'") + rounding + "'";
    EXPECT_UNSUPPORTED(row.rounding(which, rounding), asked, name, format, can);
    EXPECT_EQ(std::memcmp(&row.row, &before, sizeof before), 0);
  }
  Row mixed(adamw);  // an array in fp32 is none that can
  CHECK_OK(mixed.format("exp_avg", "fp32"));
  EXPECT_UNSUPPORTED(mixed.rounding("moments", "truncate"), "exp_avg_sq", "companded8");
  Row wrong(adamw);  // a format that cannot be there is the better reason
  CHECK_OK(wrong.format("exp_avg", "log4"));
  EXPECT_UNSUPPORTED(wrong.rounding("exp_avg", "stochastic"), "log4 cannot hold a signed moment");
}

// ---- Names, and what is not there

TEST_F(Choice, UnknownNamesAreToldTheKnownOnes) {
  Row row(adamw), none(plain);
  const scruple_tensor before = row.row;
  const char* const formats = "'weights', 'moments', 'second moments', 'exp_avg', 'exp_avg_sq', 'gradient'";
  for (const char* which : {"weight", "", "max_exp_avg_sq", "momentum_buffer"})  // amsgrad is off
    EXPECT_INVALID(row.format(which, "bf16"), which, "it can be of ", formats);
  EXPECT_INVALID(row.format(nullptr, "bf16"), formats);
  for (const char* which : {"weight", "second moments", "gradient", "momentum_buffer"})
    EXPECT_INVALID(row.rounding(which, "nearest"), which,
                   "it can be of 'weights', 'moments', 'exp_avg', 'exp_avg_sq'");
  for (const char* which : {"moments", "exp_avg"}) {
    EXPECT_INVALID(row.format(which, "fp13"), "unknown format 'fp13'", "companded8");
    EXPECT_INVALID(row.format(which, nullptr), "format");
  }
  EXPECT_INVALID(none.format("moments", "fp13"), "unknown format 'fp13'");
  for (const char* which : {"", "weights", "moments", "exp_avg"}) {
    for (const char* rounding : {"up", "dither", ""})
      EXPECT_INVALID(row.rounding(which, rounding), std::string("'") + rounding + "'",
                     "it can be nearest, truncate, stochastic, wide, of 'weights', 'moments', 'exp_avg'");
    EXPECT_INVALID(row.rounding(which, nullptr), "nearest, truncate");
  }
  EXPECT_EQ(std::memcmp(&row.row, &before, sizeof before), 0);
}

TEST_F(Choice, NeedsATensorWithAnOptimizer) {
  scruple_tensor empty{};
  EXPECT_INVALID(scruple_tensor_set_format(nullptr, "weights", "bf16"), "tensor is null");
  EXPECT_INVALID(scruple_tensor_set_rounding(nullptr, "", "nearest"), "tensor is null");
  EXPECT_INVALID(scruple_tensor_check(nullptr), "tensor is null");
  EXPECT_INVALID(scruple_tensor_set_format(&empty, "weights", "bf16"), "optimizer");
  EXPECT_INVALID(scruple_tensor_set_rounding(&empty, "", "nearest"), "optimizer");
  EXPECT_INVALID(scruple_tensor_check(&empty), "optimizer");
}

TEST_F(Choice, PlanesOfAnotherLayoutAreFreedFirst) {
  const Engine engine;
  Row row(adamw);
  CHECK_OK(scruple_tensor_alloc(engine, &row.row, SCRUPLE_STATE));
  CHECK_OK(row.format("weights", "bf16+8"));  // as they are
  CHECK_OK(row.rounding("weights", "nearest"));
  EXPECT_INVALID(row.format("weights", "bf16"), "weight", "scruple_tensor_free");
  EXPECT_EQ(row.formats(), "bf16+8 companded8 companded8");
  scruple_tensor_free(engine, &row.row);
  CHECK_OK(row.format("weights", "bf16"));
}

TEST_F(Choice, TheCheckIsThatOfAnAllocation) {
  const Engine engine;
  const auto check = [&](const auto& spoil, const std::vector<std::string>& parts) {
    Row row(adamw);
    row.row.size = 0;
    spoil(row.row);
    expect_refused(scruple_tensor_check(&row.row), SCRUPLE_UNSUPPORTED, parts);
    const std::string said = scruple_last_error();
    expect_refused(scruple_tensor_alloc(engine, &row.row, ~0u), SCRUPLE_UNSUPPORTED, parts);
    EXPECT_EQ(said, scruple_last_error());
  };
  check([](scruple_tensor& t) { t.arrays[0].rounding = SCRUPLE_DITHER; }, {"weight", "dither"});
  check([](scruple_tensor& t) { t.arrays[2].rounding = SCRUPLE_WIDE; }, {"exp_avg_sq", "wide"});
  check([](scruple_tensor& t) { t.arrays[1].format = scruple_format_find("log5"); }, {"exp_avg", "log5"});
  check([](scruple_tensor& t) { t.arrays[4].format = scruple_format_find("nf4"); }, {"gradient", "nf4"});
  // What is not there: a gradient may come from elsewhere, a weight may not; unused slots are nobody's.
  Row row(adamw);
  row.row.arrays[SCRUPLE_GRADIENT] = row.row.arrays[SCRUPLE_SLOT + 2] = {};
  CHECK_OK(scruple_tensor_check(&row.row));
  row.row.arrays[SCRUPLE_WEIGHT] = {};
  CHECK_OK(row.rounding("", "nearest"));
  EXPECT_INVALID(row.rounding("weights", "nearest"), "weight", "no format is set");
  EXPECT_INVALID(scruple_tensor_check(&row.row), "weight", "no format is set");
}

}  // namespace
}  // namespace scruple_tests
