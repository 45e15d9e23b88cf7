// Where the CUDA engine cannot run, one sentence says why, and the CPU engines go on. tests/CMakeLists.txt runs this with
// drivers that tests/fake_driver.c plays, and with what the sentence has in SCRUPLE_TEST_REASON.
#include "tests/support.h"

namespace scruple_tests {
namespace {

TEST(Driver, AnEngineThatCannotRunSaysWhyAndTheCpuGoesOn) {
  const char* expected = std::getenv("SCRUPLE_TEST_REASON");
  bool found = false;
  for (int i = 0; i < scruple_engine_count(); ++i) {
    scruple_engine_info info{};
    CHECK_OK(scruple_engine_at(i, &info));
    if (std::string(info.name) == "cuda") found = true;
    if (info.available != 0) {
      EXPECT_TRUE(expected == nullptr || std::string(info.name) != "cuda") << "cuda is available";
      continue;
    }
    const std::string reason = info.reason;
    EXPECT_NE(reason, "") << info.name;
    EXPECT_EQ(reason.find('\n'), std::string::npos) << reason;
    if (expected != nullptr) EXPECT_NE(reason.find(expected), std::string::npos) << reason;
    scruple_engine* engine = nullptr;
    EXPECT_EQ(scruple_engine_create(info.name, 1, &engine), SCRUPLE_UNAVAILABLE);
    EXPECT_EQ(engine, nullptr);
    const std::string message = scruple_last_error();
    EXPECT_NE(message.find(reason + "; engine cpu runs everywhere"), std::string::npos) << message;
  }
  EXPECT_TRUE(found);

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
