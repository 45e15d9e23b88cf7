// Golden values: the codes of chosen numbers in halves and groups, and what master copies keep.
#include "tests/formats.h"

namespace {

using namespace scruple_tests;

struct Golden {
  const char* format;
  int rounding;
  float in;
  unsigned code;
  const char* why;
};

constexpr Golden kGolden[] = {
    {"bf16", SCRUPLE_NEAREST, 1.0f, 0x3f80, "exact"},
    {"bf16", SCRUPLE_NEAREST, 0x1.01p0f, 0x3f80, "a tie goes to even: down"},
    {"bf16", SCRUPLE_NEAREST, 0x1.03p0f, 0x3f82, "a tie goes to even: up"},
    {"bf16", SCRUPLE_NEAREST, 0x1.010002p0f, 0x3f81, "just above a tie"},
    {"bf16", SCRUPLE_NEAREST, 0x1.02fffep0f, 0x3f81, "just below a tie"},
    {"bf16", SCRUPLE_NEAREST, -0x1.01p0f, 0xbf80, "ties are symmetric"},
    {"bf16", SCRUPLE_NEAREST, 0x1.ffp0f, 0x4000, "a tie, up into the next binade"},
    {"bf16", SCRUPLE_NEAREST, 0x1p-133f, 0x0001, "the smallest subnormal"},
    {"bf16", SCRUPLE_NEAREST, 0x1p-134f, 0x0000, "half of it: a tie, to even"},
    {"bf16", SCRUPLE_NEAREST, 0x1.000002p-134f, 0x0000,
     "2^-134 again: fp32 has no value that close above it"},
    {"bf16", SCRUPLE_NEAREST, 0x1.0002p-134f, 0x0001, "the next fp32 above half of it"},
    {"bf16", SCRUPLE_NEAREST, 0x1.fcp-127f, 0x007f, "the largest subnormal"},
    {"bf16", SCRUPLE_NEAREST, 0x1.fep127f, 0x7f7f, "the largest bf16"},
    {"bf16", SCRUPLE_NEAREST, 0x1.fefffep127f, 0x7f7f, "just below overflow"},
    {"bf16", SCRUPLE_NEAREST, 0x1.ffp127f, 0x7f80, "overflow: a tie whose even neighbour is infinity"},
    {"bf16", SCRUPLE_NEAREST, -INFINITY, 0xff80, "infinity"},
    {"bf16", SCRUPLE_NEAREST, -0.0f, 0x8000, "minus zero"},
    {"bf16", SCRUPLE_TRUNCATE, 0x1.01fffep0f, 0x3f80, "towards zero"},
    {"bf16", SCRUPLE_TRUNCATE, -0x1.01fffep0f, 0xbf80, "towards zero from below"},
    {"bf16", SCRUPLE_TRUNCATE, 0x1.fffffep127f, 0x7f7f, "never overflows"},
    {"fp16", SCRUPLE_NEAREST, 1.0f, 0x3c00, "exact"},
    {"fp16", SCRUPLE_NEAREST, 0x1.002p0f, 0x3c00, "a tie goes to even: down"},
    {"fp16", SCRUPLE_NEAREST, 0x1.006p0f, 0x3c02, "a tie goes to even: up"},
    {"fp16", SCRUPLE_NEAREST, 0x1.002002p0f, 0x3c01, "just above a tie"},
    {"fp16", SCRUPLE_NEAREST, 0x1.005ffep0f, 0x3c01, "just below a tie"},
    {"fp16", SCRUPLE_NEAREST, 0x1.ffep0f, 0x4000, "a tie, up into the next binade"},
    {"fp16", SCRUPLE_NEAREST, 0x1p-14f, 0x0400, "the smallest normal"},
    {"fp16", SCRUPLE_NEAREST, 0x1.ff8p-15f, 0x03ff, "the largest subnormal: 1023 of 2^-24"},
    {"fp16", SCRUPLE_NEAREST, 0x1.ffep-15f, 0x0400,
     "a tie between the largest subnormal and the smallest normal"},
    {"fp16", SCRUPLE_NEAREST, 0x1p-24f, 0x0001, "the smallest subnormal"},
    {"fp16", SCRUPLE_NEAREST, 0x1p-25f, 0x0000, "half of it: a tie, to even"},
    {"fp16", SCRUPLE_NEAREST, 0x1.000002p-25f, 0x0001, "just above half of it"},
    {"fp16", SCRUPLE_NEAREST, 0x1.8p-24f, 0x0002, "a tie between subnormals, to even"},
    {"fp16", SCRUPLE_NEAREST, -0x1p-149f, 0x8000, "the smallest fp32 keeps its sign"},
    {"fp16", SCRUPLE_NEAREST, 65504.0f, 0x7bff, "the largest half"},
    {"fp16", SCRUPLE_NEAREST, 65519.996f, 0x7bff, "below where IEEE overflows"},
    {"fp16", SCRUPLE_NEAREST, 65520.0f, 0x7bff, "where IEEE overflows: saturates"},
    {"fp16", SCRUPLE_NEAREST, -1e30f, 0xfbff, "saturates"},
    {"fp16", SCRUPLE_NEAREST, INFINITY, 0x7c00, "infinity stays infinity"},
    {"fp16", SCRUPLE_TRUNCATE, 0x1.003ffep0f, 0x3c00, "towards zero"},
    {"fp16", SCRUPLE_TRUNCATE, 0x1.fffffep-25f, 0x0000, "towards zero, subnormal"},
    {"fp16", SCRUPLE_TRUNCATE, -0x1.fffffep-24f, 0x8001, "towards zero, subnormal, from below"},
    {"fp16", SCRUPLE_TRUNCATE, 1e30f, 0x7bff, "saturates"},
};

TEST_F(Formats, golden_halves) {
  for (const Golden& g : kGolden) {
    Tensor t(adamw, 1);
    t.use(SCRUPLE_WEIGHT, g.format, g.rounding);
    t.encode(engine, SCRUPLE_WEIGHT, {g.in});
    EXPECT_EQ(bit_string_get(t.codes(SCRUPLE_WEIGHT).data(), 0, 16), g.code) << g.format << ": " << g.why;
  }
}

TEST_F(Formats, fp32_and_master_copies_keep_every_bit_but_those_of_a_nan) {
  Random random(41);
  std::vector<float> values;
  for (int i = 0; i < 5000; ++i) values.push_back(float_from(random.next32()));
  for (const Case& c : cases) {
    if (c.info.code_bits != 32 && c.info.aux_bits != 32) continue;
    if (is_scaled(c)) continue;
    const std::vector<float> out = round_trip(c, values);
    for (std::size_t i = 0; i < values.size(); ++i)
      ASSERT_EQ(bits(out[i]), std::isnan(values[i]) ? 0x7fc00000u : bits(values[i])) << c.name();
  }
}

// The model reads the visible half: of a master copy it is the master to nearest.
TEST_F(Formats, the_visible_half_of_a_master_copy_is_the_rounded_format) {
  const std::vector<float> values = Random(43).normals(3000, 100);
  for (const std::string half : {"bf16", "fp16"}) {
    Tensor t(adamw, 3000), plain(adamw, 3000);
    t.use(SCRUPLE_WEIGHT, (half + "+fp32").c_str());
    plain.use(SCRUPLE_WEIGHT, half.c_str());
    t.encode(engine, SCRUPLE_WEIGHT, values);
    plain.encode(engine, SCRUPLE_WEIGHT, values);
    EXPECT_TRUE(same_bytes(t.codes(SCRUPLE_WEIGHT).bytes(), plain.codes(SCRUPLE_WEIGHT).bytes())) << half;
  }
}

using Floats = std::vector<float>;
using Codes = std::vector<std::uint32_t>;

struct GoldenGroups : Formats {
  void expect_group(const char* format, int array, const Floats& in, const Codes& codes, float scale,
                    const char* why) const {
    Tensor t(adamw, length(in));
    t.use(array, format);
    t.encode(engine, array, in);
    const int width = info_of(t.row.arrays[array].format).code_bits;
    for (std::size_t i = 0; i < in.size(); ++i)
      EXPECT_EQ(bit_string_get(t.codes(array).data(), i, width), codes[i])
          << format << ": " << why << ", value " << in[i];
    float stored = 0;
    std::memcpy(&stored, t.aux(array).data(), 4);
    EXPECT_FLOAT_EQ(stored, scale) << format;
  }
};

TEST_F(GoldenGroups, golden_groups) {
  // Thresholds midway: 0.0398, 0.1203, -0.0455, -0.4600, -0.6106 (-1/2 lies above it), 0.5017, 0.8615 of 2.
  expect_group("nf4", 1, {2.0f, -2.0f, 0.0f, 1.0f, -1.0f, 0.16f, 0.07f, -0.08f, -0.1f, 1.7f, 1.74f},
               {15, 0, 7, 12, 2, 8, 7, 7, 6, 14, 15}, 2.0f, "the nearest of the 16 quantiles");
  expect_group("nf4", 1, {-3.0f, 3.0f}, {0, 15}, 3.0f, "absmax of either sign is exact");
  // Half way between two powers of two goes up.
  expect_group("log4", 2, {8.0f, 4.0f, 6.0f, 5.999f, 3.0f, 0x1p-12f, 0x1p-13f, 0.0f, 7.0f},
               {0, 1, 0, 1, 1, 15, 15, 15, 0}, 8.0f, "powers of two below the maximum; nothing is zero");
  expect_group("linear8", 1, {127.0f, -127.0f, 63.6f, -63.6f, 0.49f, -0.49f, 0.51f, -0.51f},
               {127, 129, 64, 192, 0, 0, 1, 255}, 1.0f, "integers in two's complement");
  expect_group("linear8", 2, {255.0f, 0.4f, 0.6f, 254.4f}, {255, 0, 1, 254}, 1.0f, "non-negative: 0..255");
  expect_group("int12", 0, {2047.0f, -2047.0f, 1.6f, -1.6f, 0.0f}, {2047, 2049, 2, 4094, 0}, 1.0f,
               "12 bits to a value");
  expect_group("int8", 4, {127.0f, -1.0f, 5.6f}, {127, 255, 6}, 1.0f, "the accumulator");
  // 1 + t as a float with 4 mantissa bits: 248 = 1.9375 2^7, 1.5, 2, 4, 101 = 1.578 2^6, 1.04, 1.03.
  expect_group("companded8", 1, {247.0f, -247.0f, 0.5f, -1.0f, 3.0f, 100.0f, 0.04f, 0.03f, 0.0f},
               {127, 255, 8, 144, 32, 105, 1, 0, 0}, 1.0f, "mu-law beside a sign");
  expect_group("companded8", 2, {63487.0f, 1.0f, 0.5f, 1e-20f, 16383.0f, 3.0f, 0.03f},
               {255, 16, 8, 1, 224, 32, 1}, 1.0f, "mu-law of 8 bits; above zero never becomes zero");
}

}  // namespace
