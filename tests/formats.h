// Every format x role x rounding in the registry, and what encodes and decodes them.
#pragma once

#include "tests/support.h"

namespace scruple_tests {

struct Formats : testing::Test {
  const std::vector<Case> cases = all_cases();
  const Engine engine;
  const Optimizer adamw;

  Tensor tensor(const Case& c, std::size_t n, std::size_t codes_shift = 0, std::size_t aux_shift = 0) const {
    Tensor t(adamw, static_cast<std::int64_t>(n));
    t.use(c.array, c.format, c.rounding, codes_shift, aux_shift);
    return t;
  }
  std::vector<float> round_trip(const Case& c, const std::vector<float>& values) const {
    Tensor t = tensor(c, values.size());
    t.encode(engine, c.array, values);
    return t.decode(engine, c.array);
  }
};

inline bool is_scaled(const Case& c) { return c.info.aux_is_scale != 0; }

}  // namespace scruple_tests
