// A moment that is not finite costs its element alone: in a group it is stored as 0, and its neighbours are
// what they would be beside a 0. Every rule, every format of moments, every CPU engine; tests/cuda_test.cpp
// compares CUDA with them.
#include "tests/table.h"

namespace scruple_tests {
namespace {

constexpr std::size_t kSize = 1500;                            // tiles, spans, and a part of a group
constexpr std::size_t kPoisoned[] = {5, 700, 701, kSize - 1};  // alone, two in a group, in the last part
constexpr float kOverflows = 1e30f;                            // its square is infinite
const float kSpecials[] = {float_from(0x7fc00000u), float_from(0xffa00001u), kInf, -kInf, kOverflows};

bool is_group(const scruple_array& array) { return info_of(array.format).aux_is_scale != 0; }

// `tensor` with slot `a` in fp32: a step leaves there what the step of `tensor` encodes.
Tensor with_fp32(scruple_engine* engine, const Tensor& tensor, int a) {
  const std::vector<float> before = tensor.decode(engine, a);
  Tensor twin = tensor;
  twin.use(a, "fp32");
  twin.encode(engine, a, before);
  return twin;
}

struct Walk : Table {
  Walk(scruple_engine* on, scruple_engine* plain_engine, const Config& config)
      : Table(on, {config}, {{kSize}}), plain(plain_engine), tensor(tensors[0]) {
    begin();
    tensor.encode(engine, SCRUPLE_WEIGHT, Random(1).normals(kSize));
  }

  void step_and_compare(int t, float special) {
    tensor.row.step = t;
    std::vector<float> gradient = Random(static_cast<std::uint64_t>(t) + 10).normals(kSize);
    if (t == 2)
      for (const std::size_t i : kPoisoned) gradient[i] = special;
    tensor.encode(engine, SCRUPLE_GRADIENT, gradient);
    const Tensor before = tensor;
    scruple_tests::step(engine, tensor);
    const std::vector<float> after = tensor.decode(engine, SCRUPLE_WEIGHT);
    for (int a = SCRUPLE_SLOT; a < SCRUPLE_GRADIENT; ++a) {
      if (!tensor.used(a)) continue;
      const Tensor twin = with_fp32(engine, before, a);
      scruple_tests::step(engine, twin);
      const std::vector<float> twin_weights = twin.decode(engine, SCRUPLE_WEIGHT);
      for (std::size_t i = 0; i < kSize; ++i)
        ASSERT_EQ(std::isfinite(after[i]), std::isfinite(twin_weights[i])) << "weight " << i;
      std::vector<float> moments = twin.decode(engine, a);
      if (is_group(tensor.row.arrays[a]))
        for (float& x : moments) x = std::isfinite(x) ? x : 0.0f;
      Tensor want = before;
      want.encode(plain, a, moments);
      ASSERT_TRUE(same_bytes(want.bytes(a), tensor.bytes(a))) << "slot " << a - SCRUPLE_SLOT;
    }
    lost = 0;
    for (std::size_t i = 0; i < kSize; ++i) lost += std::isfinite(after[i]) ? 0 : 1;
  }

  scruple_engine* plain;
  Tensor& tensor;
  std::size_t lost = 0;  // weights that are not finite
};

TEST(NonFinite, AMomentIsStoredAsZeroAndItsNeighboursAsBesideAZero) {
  const Engine plain(1, cpu_engines()[0]);
  std::vector<Config> configs = moment_configs();
  for (const bool busy : {true, false})
    for (const Config& recipe : recipe_configs(busy)) configs.push_back(recipe);
  for (const Config& config : configs)
    for (const std::string& name : cpu_engines()) {
      const Engine engine(1, name);
      for (const float special : kSpecials) {
        SCOPED_TRACE(testing::Message() << config.name << ", engine " << name << ", gradient " << special);
        Walk walk(engine, plain, config);
        for (int t = 1; t <= 4; ++t) {
          walk.step_and_compare(t, special);
          if (HasFatalFailure()) return;
        }
        // Integers as weights or gradients have no other way to show one: their groups are lost.
        const scruple_array* const arrays = walk.tensor.row.arrays;
        if (is_group(arrays[SCRUPLE_WEIGHT]) || is_group(arrays[SCRUPLE_GRADIENT])) continue;
        if (std::isnan(special)) {
          EXPECT_EQ(walk.lost, std::size(kPoisoned));
        } else if (std::isinf(special)) {  // Lion takes its sign
          EXPECT_EQ(walk.lost, config.rule == "lion" ? 0u : std::size(kPoisoned));
        }
      }
    }
}

}  // namespace
}  // namespace scruple_tests
