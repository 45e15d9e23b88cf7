// scruple.hpp: what it adds to the C interface, which is ownership, exceptions and the counting of steps and
// folds.
#include <gtest/gtest.h>

#include <cmath>
#include <scruple/scruple.hpp>
#include <string>
#include <vector>

namespace {

TEST(Hpp, FailuresAreExceptionsWithTheLibrarysMessage) {
  try {
    scruple::Optimizer optimizer("frob");
    FAIL();
  } catch (const scruple::Error& error) {
    EXPECT_EQ(error.status(), SCRUPLE_INVALID);
    EXPECT_NE(std::string(error.what()).find("adamw"), std::string::npos);
  }
  scruple::Engine engine("cpu", 1);
  scruple::Optimizer adamw("adamw");
  EXPECT_THROW(scruple::Engine("frob"), scruple::Error);
  EXPECT_THROW(engine.set_stream(&engine), scruple::Error);  // no CPU engine has streams
  engine.set_stream(nullptr);
  engine.synchronize();
  EXPECT_THROW(adamw.set("frob", 1), scruple::Error);
  EXPECT_THROW(adamw.set("beta1", -1), scruple::Error);
  EXPECT_THROW(scruple::Tensor(engine, adamw, 10, "lpmm"), scruple::Error);
  scruple::Tensor tensor(engine, adamw, 10, "scruple");
  EXPECT_THROW(tensor.gradient(nullptr, "frob"), scruple::Error);
  tensor.gradient(nullptr, "fp32");
  EXPECT_THROW(scruple::step(engine, tensor), scruple::Error);
  EXPECT_EQ(tensor.raw().step, 1);
}

TEST(Hpp, RoundingsAreFoundByName) {
  for (int r = 0; scruple_rounding_name(r) != nullptr; ++r)
    EXPECT_EQ(scruple::find_rounding(scruple_rounding_name(r)), r);
  EXPECT_EQ(scruple::find_rounding("wide"), SCRUPLE_WIDE);
  EXPECT_EQ(scruple::find_rounding("up"), -1);
}

TEST(Hpp, OptimizerKeepsWhatItIsTold) {
  scruple::Optimizer sgd("sgd", {{"lr", 0.5}, {"momentum", 0.25}});
  sgd.set("lr", 0.75);
  sgd.set_seed(7);
  const scruple::Optimizer moved = std::move(sgd);
  EXPECT_EQ(moved.get("lr"), 0.75);
  EXPECT_EQ(moved.get("momentum"), 0.25);
  EXPECT_EQ(moved.seed(), 7u);
}

TEST(Hpp, StepsAVectorOfTensorsAndMovesThem) {
  scruple::Engine engine("cpu", 2);
  scruple::Optimizer sgd("sgd", {{"lr", 0.5}});
  std::vector<float> values = {1, 2, 3}, gradient = {2, 4, 6};
  std::vector<scruple::Tensor> tensors;  // grows, so tensors move
  for (std::uint32_t id = 0; id < 5; ++id) {
    tensors.emplace_back(engine, sgd, 3, "fp32", id).load(values.data());
    tensors.back().gradient(gradient.data(), "fp32");
  }
  scruple::step(engine, tensors, 0.5f);
  for (const scruple::Tensor& tensor : tensors) {
    EXPECT_EQ(tensor.raw().step, 2);
    std::vector<float> after(3);
    tensor.weights(after.data());
    EXPECT_EQ(after, (std::vector<float>{0.5f, 1, 1.5f}));
  }
  std::swap(tensors[0], tensors[1]);
  EXPECT_EQ(tensors[0].raw().id, 1u);
}

TEST(Hpp, FoldsIntoItsOwnAccumulator) {
  scruple::Engine engine("cpu", 1);
  scruple::Optimizer sgd("sgd", {{"lr", 1}});
  const std::vector<float> zeros(4), gradient = {3, 0, 0, 4};
  std::vector<scruple::Tensor> tensors;
  tensors.emplace_back(engine, sgd, 4, "fp32").load(zeros.data());
  scruple::Tensor& tensor = tensors.front();
  tensor.accumulator("fp32", SCRUPLE_NEAREST);
  for (int round = 1; round <= 2; ++round) {
    tensor.fold(gradient.data(), "fp32", 0.5f);
    tensor.fold(gradient.data(), "fp32", 0.5f);
    EXPECT_EQ(tensor.raw().folds, 2);
    EXPECT_EQ(scruple::norm(engine, tensors).value, 5);  // the first fold of a round overwrites
    scruple::step(engine, tensors);
    EXPECT_EQ(tensor.raw().folds, 0);
    std::vector<float> after(4);
    tensor.weights(after.data());
    EXPECT_EQ(after[3], -4.0f * static_cast<float>(round));
  }
  const std::vector<float> infinite = {INFINITY, 0, 0, 0};
  tensor.gradient(infinite.data(), "fp32");  // gives the accumulator back
  EXPECT_FALSE(scruple::norm(engine, tensors).finite);
}

TEST(Hpp, TakesFormatsOneByOne) {
  scruple::Engine engine("cpu", 1);
  scruple::Optimizer adamw("adamw");
  scruple_tensor description = {};
  description.optimizer = adamw.raw();
  description.size = 100;
  scruple::check(scruple_tensor_use(&description, "scruple"));
  description.arrays[SCRUPLE_SLOT + 1].format = scruple::format_named("log4");
  const scruple::Tensor tensor(engine, description);
  EXPECT_EQ(tensor.raw().step, 1);
  EXPECT_NE(tensor.raw().arrays[SCRUPLE_SLOT + 1].codes, nullptr);
  EXPECT_EQ(tensor.raw().arrays[SCRUPLE_GRADIENT].codes, nullptr);
}

}  // namespace
