// What formats/codec.h builds from other operations is what IEEE's own would give; strings of bits hold what was put
// into them.
#include "formats/codec.h"

#include <utility>

#include "engine/strings.h"
#include "formats/companded8.h"
#include "formats/linear8.h"
#include "formats/nf4.h"
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

// Whatever the coin: so a GPU finds a code from the levels, and then looks at one threshold.
TEST(Codec, ThresholdsOfNf4StandBetweenTheirLevels) {
  for (std::uint32_t coin = 0; coin < 0x10000u; ++coin)
    for (std::uint32_t i = 0; i < 15; ++i) {
      const float t = scruple::Nf4::threshold(i, 1.0f - scruple::coin_fraction(coin << 16));
      ASSERT_LE(scruple::Nf4::level(i), t) << i << ", coin " << coin;
      ASSERT_LE(t, scruple::Nf4::level(i + 1)) << i << ", coin " << coin;
    }
}

// What stands on a level of companded8 stays there, whatever the coin: an EMA that does not move is not moved by
// rounding, and a group's maximum does not creep.
template <class Format>
void levels_stay(const char* name, std::uint32_t first_code) {
  Random random(12);
  std::vector<float> maxima = {1e-30f, 1.0f, Format::top, 1e30f, float_from(0x3fffffffu)};
  for (int i = 0; i < 4000; ++i) maxima.push_back(static_cast<float>(random.lognormal(8)));
  std::uint64_t moved = 0;
  for (const float largest : maxima) {
    const float unit = Format::unit(Format::scale(largest)), gain = Format::gain(largest, unit);
    const float top = Format::decode(Format::encode(largest, gain, scruple::kHalf), unit);
    for (const std::uint32_t coin : {0u, 0xffffu, 0x10000u, scruple::kHalf, 0xffff0000u, 0xffffffffu}) {
      for (std::uint32_t code = first_code; code < 256; ++code)
        moved += Format::encode(Format::decode(code, unit), gain, coin) ==
                         (code == 0x80 && first_code == 0 ? 0 : code)
                     ? 0
                     : 1;
      moved += Format::decode(Format::encode(largest, gain, coin), unit) == top ? 0 : 1;
    }
  }
  EXPECT_EQ(moved, 0u) << name;
}
TEST(Codec, WhatStandsOnALevelOfCompanded8StaysWhateverTheCoin) {
  levels_stay<scruple::Companded8>("signed", 0);
  levels_stay<scruple::Companded8Nonneg>("non-negative", 1);
}

// The same of scaled integers, in any group that an encoder can have written; the group's unit stays too.
template <class Format>
void integers_stay(const char* name, std::int32_t lowest, std::int32_t top) {
  const std::uint32_t mask = (1u << Format::bits) - 1u;
  Random random(14);
  std::vector<float> maxima = {1e-30f, 1.0f, 1e30f, float_from(0x3fffffffu)};
  for (int i = 0; i < 4000; ++i) maxima.push_back(static_cast<float>(random.lognormal(8)));
  std::uint64_t moved = 0;
  for (const float largest : maxima) {
    const float unit = Format::scale(largest), gain = Format::gain(largest, unit);
    moved += Format::scale(static_cast<float>(top) * unit) == unit ? 0 : 1;
    for (const std::uint32_t coin : {0u, 1u, scruple::kHalf, 0xffff0000u, 0xffffffffu}) {
      moved += Format::encode(largest, gain, coin) == static_cast<std::uint32_t>(top) ? 0 : 1;
      for (std::int32_t k = lowest; k <= top; ++k) {
        const std::uint32_t code = static_cast<std::uint32_t>(k) & mask;
        moved += Format::encode(Format::decode(code, unit), gain, coin) == code ? 0 : 1;
      }
    }
  }
  EXPECT_EQ(moved, 0u) << name;
}
TEST(Codec, AScaledIntegerAtRestStaysWhateverTheCoin) {
  integers_stay<scruple::GroupLinear<8>>("int8", -127, 127);
  integers_stay<scruple::GroupLinear<9>>("int9", -255, 255);
  integers_stay<scruple::GroupLinear<10>>("int10", -511, 511);
  integers_stay<scruple::GroupLinear<11>>("int11", -1023, 1023);
  integers_stay<scruple::GroupLinear<12>>("int12", -2047, 2047);
  integers_stay<scruple::Linear8Nonneg>("linear8, non-negative", 0, 255);
}

// And what does not stand on one moves without bias: over all coins the mean of the
// codes is the value in units, up to half a step of the fixed point and the rounding of the value itself.
template <class Format>
void integers_are_fair(const char* name, std::int32_t lowest, std::int32_t top) {
  Random random(15);
  for (int i = 0; i < 200; ++i) {
    const float unit = Format::scale(static_cast<float>(random.lognormal(4))),
                gain = Format::gain(0.0f, unit);
    const double k = lowest + std::floor(random.uniform() * (top - lowest)),
                 step = std::pow(10.0, -4 * random.uniform());
    const float x = static_cast<float>((k + step) * unit);
    double sum = 0;
    for (std::uint32_t coin = 0; coin < 0x10000u; ++coin)
      sum += Format::decode(Format::encode(x, gain, coin << 16), 1.0f);
    ASSERT_NEAR(sum / 0x10000, static_cast<double>(x) / unit, (top + 1) * 0x1.8p-23)
        << name << ": " << k << " and " << step;
  }
}
TEST(Codec, AScaledIntegerIsRoundedFairly) {
  integers_are_fair<scruple::GroupLinear<8>>("int8", -127, 127);
  integers_are_fair<scruple::GroupLinear<10>>("int10", -511, 511);
  integers_are_fair<scruple::GroupLinear<12>>("int12", -2047, 2047);
  integers_are_fair<scruple::Linear8Nonneg>("linear8, non-negative", 0, 255);
}

// Bit by bit, at every length, with nothing written beside them; bits above K are dropped.
template <int K, class T>
void strings_hold() {
  Random random(13);
  for (int n = 0; n <= 130; ++n) {
    std::vector<T> values(static_cast<std::size_t>(n));
    for (T& value : values) value = static_cast<T>(random.next32() & ((1u << K) - 1u));
    std::vector<scruple::u8> expected(static_cast<std::size_t>((n * K + 7) / 8));
    for (int bit = 0; bit < n * K; ++bit)
      expected[static_cast<std::size_t>(bit / 8)] |=
          static_cast<scruple::u8>((values[static_cast<std::size_t>(bit / K)] >> bit % K & 1) << bit % 8);
    std::vector<scruple::u8> string(expected.size() + 1, 0xa5);
    std::vector<T> wide = values;
    for (T& value : wide) value = static_cast<T>(value | random.next32() << K);
    scruple::pack<K>(wide.data(), n, string.data());
    EXPECT_EQ(string.back(), 0xa5) << K << " bits, " << n;
    string.pop_back();
    ASSERT_EQ(string, expected) << K << " bits, " << n;
    string.shrink_to_fit();
    std::vector<T> back(static_cast<std::size_t>(n + 31) / 32 * 32);
    scruple::unpack<K>(string.data(), n, back.data());
    back.resize(values.size());
    ASSERT_EQ(back, values) << K << " bits, " << n;
  }
}
template <int... K>
void all_strings_hold(std::integer_sequence<int, K...>) {
  (strings_hold<K + 1, scruple::u8>(), ...);
  (strings_hold<K + 1, scruple::u16>(), ...);
  (strings_hold<K + 9, scruple::u16>(), ...);
}
TEST(Codec, StringsHoldEveryValueInItsPlace) { all_strings_hold(std::make_integer_sequence<int, 7>()); }

}  // namespace
}  // namespace scruple_tests
