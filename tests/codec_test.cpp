// What formats/codec.h builds from other operations is what IEEE's own would give.
#include "formats/codec.h"

#include "tests/support.h"

namespace scruple_tests {
namespace {

using scruple::quotient;

// Every mantissa over the divisors that formats use, and over those that are hardest for this method:
// mantissas near all ones and near all zeros.
TEST(Codec, AQuotientFromTheReciprocalIsTheDivision) {
  std::vector<float> divisors = {7.0f,   127.0f,  255.0f,  247.0f, 63487.0f,
                                 511.0f, 1023.0f, 2047.0f, 1e-12f, 65504.0f};
  for (std::uint32_t i = 0; i < 8; ++i)
    for (const std::uint32_t base : {0x3f800000u, 0x3ffffff8u}) divisors.push_back(float_from(base + i));
  Random random(11);
  for (int i = 0; i < 8; ++i) divisors.push_back(static_cast<float>(random.lognormal(5)));
  for (const float b : divisors) {
    std::uint64_t wrong = 0;
    for (std::uint64_t mantissa = 0; mantissa < 0x800000u; mantissa += kStride) {
      const float a = float_from(0x3f800000u | static_cast<std::uint32_t>(mantissa));
      wrong += quotient(a, b, 1.0f / b) == a / b ? 0 : 1;
    }
    EXPECT_EQ(wrong, 0u) << "over " << b;
  }
}

}  // namespace
}  // namespace scruple_tests
