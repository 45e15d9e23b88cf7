// Moments and extra bits in host memory: steps through a ring of device memory, to the bits of those on the device.
#include "tests/cuda/pair.h"

namespace scruple_tests {
namespace {

// A ring of small slots, so that a tensor goes through it in many pieces, and every slot is used several times.
class CudaHost : public Cuda {
 protected:
  void SetUp() override {
    setenv("SCRUPLE_CUDA_SLOT", "131072", 1);
    Cuda::SetUp();
    unsetenv("SCRUPLE_CUDA_SLOT");
  }
  static std::vector<std::int64_t> sizes() {
    return quick() ? std::vector<std::int64_t>{1, 4097, 0, 70001}
                   : std::vector<std::int64_t>{1, 128, 4097, 0, 70001, 1200003, 65};
  }
};

// Every second tensor is away, so that one table has both.
void send_away(std::vector<scruple_tensor>& rows, std::size_t from) {
  for (std::size_t i = from; i < rows.size(); i += 2) rows[i].host = SCRUPLE_HOST_STATE;
}

TEST_F(CudaHost, EveryRuleAndRecipe) {
  Course course(lab(), {sizes(), {0, 3}}, 4);
  std::size_t turn = 0;
  for (const Config& recipe : recipe_configs()) {
    Config config = with_gradient(recipe, kGradientKinds[turn % std::size(kGradientKinds)]);
    Pair pair(lab(), config, course.shape);
    send_away(pair.twin->rows, turn++ % 2);
    pair.walk(1, course.steps, course.gradients);
    ASSERT_EQ(pair.difference(), "") << config.name;
  }
}

// Planes that the library allocates in pinned memory, and what reads and writes them beside steps.
TEST_F(CudaHost, AllocatedEncodedSteppedAndDecoded) {
  constexpr std::int64_t kSize = 200003;
  const std::vector<float> values = values_of(kSize, 1), gradient = values_of(kSize, 2);
  for (const char* recipe : {"fp32", "scruple", "scant", "flash"}) {
    const Optimizer optimizer("adamw");
    std::vector<scruple_tensor> rows;
    for (auto [engine, host] : {std::pair{lab().host.handle, 0u},
                                {lab().device.handle, 0u},
                                {lab().device.handle, SCRUPLE_HOST_STATE}}) {
      scruple_tensor row = {};
      row.optimizer = optimizer;
      row.size = kSize;
      row.step = 1;
      CHECK_OK(scruple_tensor_use(&row, recipe));
      row.host = host;
      CHECK_OK(scruple_tensor_alloc(engine, &row, SCRUPLE_STATE | 1u << SCRUPLE_GRADIENT));
      CHECK_OK(scruple_encode(engine, &row, SCRUPLE_WEIGHT, values.data()));
      CHECK_OK(scruple_encode(engine, &row, SCRUPLE_GRADIENT, gradient.data()));
      // A view is stepped as its whole; what a step left is read, written anew, and stepped again.
      for (; row.step <= 3; ++row.step) {
        if (row.step == 2) {
          scruple_tensor view = {};
          CHECK_OK(scruple_tensor_view(&row, 0, 128 * 1000, &view));
          CHECK_OK(scruple_step(engine, &view, 1, nullptr));
          CHECK_OK(scruple_tensor_view(&row, 128 * 1000, kSize - 128 * 1000, &view));
          CHECK_OK(scruple_step(engine, &view, 1, nullptr));
        } else {
          CHECK_OK(scruple_step(engine, &row, 1, nullptr));
        }
        std::vector<float> moment(kSize);
        CHECK_OK(scruple_decode(engine, &row, SCRUPLE_SLOT, moment.data()));
        for (float& x : moment) x *= 0.75f;
        CHECK_OK(scruple_encode(engine, &row, SCRUPLE_SLOT, moment.data()));
      }
      rows.push_back(row);
    }
    for (std::size_t i : {1, 2}) expect_same_planes(lab().device, rows[i], rows[0], recipe);
    scruple_tensor_free(lab().host, &rows[0]);
    for (std::size_t i : {1, 2}) scruple_tensor_free(lab().device, &rows[i]);
  }
}

TEST_F(CudaHost, FoundInfWritesNothing) {
  const Shape shape{{70001, 5}};
  DeviceGradients gradients(lab().device, shape.sizes, 3);
  Pair pair(lab(), busy_config("adamw", "scruple"), shape);
  send_away(pair.twin->rows, 0);
  pair.walk(1, 1, gradients);
  const DeviceCell<float> found_inf(lab().device, 1);
  scruple_step_options options = SCRUPLE_STEP_OPTIONS_INIT;
  options.found_inf = found_inf.at();
  CHECK_OK(scruple_step(lab().device, pair.twin->rows.data(), length(pair.rows), &options));
  EXPECT_EQ(pair.difference(), "");
}

// A ring that the device has no memory for: tensors whose state lies there have not been stepped either.
TEST_F(CudaHost, WithoutMemoryForTheRingNothingIsWritten) {
  setenv("SCRUPLE_CUDA_SLOT", "1099511627776", 1);
  Lab small(engine_under_test());
  unsetenv("SCRUPLE_CUDA_SLOT");
  const Shape shape{{70001, 5}};
  DeviceGradients gradients(small.device, shape.sizes, 3);
  Pair pair(small, busy_config("adamw", "scruple"), shape);
  send_away(pair.twin->rows, 0);
  pair.take_gradients(1, gradients);
  EXPECT_EQ(scruple_step(small.device, pair.twin->rows.data(), length(pair.rows), nullptr),
            SCRUPLE_OUT_OF_MEMORY);
  EXPECT_EQ(pair.difference(), "");
}

TEST_F(CudaHost, OtherWordsAreRefused) {
  Pair pair(lab(), busy_config("adamw", "scruple"), {{100}});
  pair.twin->rows[0].host = 2;
  EXPECT_EQ(scruple_step(lab().device, pair.twin->rows.data(), 1, nullptr), SCRUPLE_INVALID);
  EXPECT_NE(std::string(scruple_last_error()).find("host is 2; it must be 0 or SCRUPLE_HOST_STATE"),
            std::string::npos);
}

}  // namespace
}  // namespace scruple_tests
