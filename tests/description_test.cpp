// Descriptions of models: what cannot be computed is named, and GPT-2's parameters are those that were published.
#include "train/model/description.h"

#include <gtest/gtest.h>

#include <cmath>
#include <set>

#include "train/model/families/gpt2.h"

namespace scruple::train {
namespace {

TEST(GptShapes, ProblemsAreNamed) {
  EXPECT_EQ(problem_with(gpt2({})), "");
  EXPECT_EQ(problem_with(gpt2({2, 12, 3, 7, 11})), "");
  EXPECT_NE(problem_with(gpt2({0, 12, 3, 7, 11})).find("layers = 0"), std::string::npos);
  EXPECT_NE(problem_with(gpt2({1, -4, 3, 7, 11})).find("width = -4"), std::string::npos);
  EXPECT_NE(problem_with(gpt2({1, 12, 0, 7, 11})).find("heads = 0"), std::string::npos);
  EXPECT_NE(problem_with(gpt2({1, 12, 3, 0, 11})).find("context = 0"), std::string::npos);
  EXPECT_NE(problem_with(gpt2({1, 12, 3, 7, 1})).find("vocabulary = 1"), std::string::npos);
  EXPECT_NE(problem_with(gpt2({1, 13, 3, 7, 11})).find("multiple of the heads, such as 15"),
            std::string::npos);
  EXPECT_NE(problem_with(Description()).find("no names"), std::string::npos);
  const std::int64_t huge = std::int64_t{1} << 40;
  EXPECT_NE(problem_with(gpt2({huge, 12, 3, 7, 11})), "");
  EXPECT_NE(problem_with(gpt2({1, huge, 1, 7, 11})), "");
  EXPECT_NE(problem_with(gpt2({1, 12, 3, huge, 11})), "");
  EXPECT_NE(problem_with(gpt2({1, 12, 3, 7, huge})), "");
}

TEST(GptShapes, ParametersAreGpt2s) {
  std::int64_t size = 0;
  const std::vector<Parameter> list = parameters_of(gpt2({12, 768, 12, 1024, 50257}));
  std::set<std::string> names;
  for (const Parameter& p : list) {
    size += p.size();
    names.insert(p.name);
    EXPECT_EQ(p.decays, p.shape.size() == 2) << p.name;
    EXPECT_EQ(p.deviation == 0, p.shape.size() == 1) << p.name;
  }
  EXPECT_EQ(size, 124439808);  // of the published checkpoint
  EXPECT_EQ(list.size(), names.size());
  EXPECT_EQ(list[4].name, "transformer.h.0.attn.c_attn.weight");
  EXPECT_EQ(list[4].shape, (std::vector<std::int64_t>{768, 2304}));
  EXPECT_EQ(list[2].mean, 1);
  EXPECT_EQ(list[12].name, "transformer.h.0.mlp.c_proj.weight");
  EXPECT_NEAR(list[12].deviation, 0.02 / std::sqrt(24), 1e-12);
  EXPECT_EQ(list.back().name, "transformer.ln_f.bias");
}

}  // namespace
}  // namespace scruple::train
