// Where the CUDA engine cannot run, one sentence says why, and the CPU engines go on. tests/CMakeLists.txt runs this with
// drivers that tests/fake_driver.c plays, and with what the sentence has in SCRUPLE_TEST_REASON.
#include "tests/support.h"

namespace scruple_tests {
namespace {

TEST(Driver, WhereCudaCannotRunOneSentenceSaysWhyAndTheCpuGoesOn) {
  const char* expected = std::getenv("SCRUPLE_TEST_REASON");
  scruple_engine_info info{};
  for (int i = 0; i < scruple_engine_count() && std::string(info.name == nullptr ? "" : info.name) != "cuda";
       ++i)
    CHECK_OK(scruple_engine_at(i, &info));
  ASSERT_STREQ(info.name, "cuda");
  if (expected == nullptr && info.available != 0) GTEST_SKIP() << "cuda runs here";
  ASSERT_EQ(info.available, 0);
  const std::string reason = info.reason;
  EXPECT_NE(reason.find(expected == nullptr ? " " : expected), std::string::npos) << reason;
  EXPECT_EQ(reason.find('\n'), std::string::npos) << reason;
  scruple_engine* engine = nullptr;
  EXPECT_EQ(scruple_engine_create("cuda", 1, &engine), SCRUPLE_UNAVAILABLE);
  EXPECT_EQ(engine, nullptr);
  EXPECT_EQ(scruple_last_error(), "engine cuda: " + reason + "; engine cpu runs everywhere");

  const Engine cpu;
  const Optimizer adamw;
  Tensor tensor(adamw, 100, "scruple", cpu);
  const std::vector<float> ones(100, 1.0f);
  tensor.encode(cpu, SCRUPLE_GRADIENT, ones);
  CHECK_OK(scruple_step(cpu, &tensor.row, 1, nullptr));
  EXPECT_LT(tensor.decode(cpu, SCRUPLE_WEIGHT)[0], 0);
}

}  // namespace
}  // namespace scruple_tests
