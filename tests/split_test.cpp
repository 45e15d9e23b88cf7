// bf16+K and fp16+K: every fp32 pattern is split and joined through the ABI and compared with arithmetic in
// double that knows nothing of bit patterns.
#include "tests/support.h"

namespace {

using namespace scruple_tests;

// What the formats promise, from their definition: 8 or 11 significant bits, gaps that end at the smallest subnormal.
struct HalfType {
  const char* name;
  int significand, least_exponent;  // 2^least_exponent is the smallest subnormal
  double largest;
  bool saturates;
};
constexpr HalfType kBf16{"bf16", 8, -133, 0x1.fep127, false};
constexpr HalfType kFp16{"fp16", 11, -24, 65504, true};

double gap_at(const HalfType& half, float x) {
  int exponent = 0;
  std::frexp(x, &exponent);
  return std::ldexp(1, std::max(exponent - half.significand, half.least_exponent));
}

// Bits of a half as a value: sign, exponent, fraction by ldexp.
double half_value(const HalfType& half, unsigned code) {
  const int fraction_bits = half.significand - 1, exponent_bits = 15 - fraction_bits;
  const int fraction = static_cast<int>(code & ((1u << fraction_bits) - 1u));
  const int exponent = static_cast<int>(code >> fraction_bits & ((1u << exponent_bits) - 1u));
  const double sign = (code & 0x8000u) != 0 ? -1 : 1;
  if (exponent == (1 << exponent_bits) - 1) return fraction != 0 ? NAN : sign * INFINITY;
  const int implied = exponent == 0 ? 0 : 1 << fraction_bits;
  return sign * std::ldexp(implied + fraction, half.least_exponent + std::max(exponent, 1) - 1);
}

struct Split {
  float in, out;
  double visible;
  unsigned extra;
};

// Everything a check wants to know about where it is; constant over the patterns that share their upper half.
struct Place {
  const HalfType& half;
  int k;
  double gap, inverse_gap, kept_step;
  double relative, absolute;
};

double magnitude(double x) { return x < 0 ? -x : x; }
bool is_nan(double x) { return x != x; }
double whole(double x) { return static_cast<double>(static_cast<std::int64_t>(x)); }  // floor, for x >= 0
bool all(int a, int b, int c = 1, int d = 1) { return (a & b & c & d) != 0; }
bool sign_kept(const Split& s) {
  const auto visible = __builtin_bit_cast(std::uint64_t, s.visible);
  return all(bits(s.in) >> 31 == bits(s.out) >> 31, visible >> 63 == bits(s.out) >> 31);
}

// The checks avoid branches, so that the loops over all patterns vectorise.

// The visible half is the wide value to nearest, ties away. At or above 0x1.ffp127 that is infinity.
bool nearest_ok(const Place& at, const Split& s) {
  const double in = magnitude(s.in), out = magnitude(s.out), visible = magnitude(s.visible);
  return all(magnitude(out - in) <= at.relative * in + at.absolute, sign_kept(s),
             visible == whole(out * at.inverse_gap + 0.5) * at.gap, (s.extra != 0) + (visible == out) != 0);
}

bool truncate_ok(const Place& at, const Split& s) {
  const double in = magnitude(s.in), out = magnitude(s.out), visible = magnitude(s.visible);
  return all(sign_kept(s), out <= in, in - out < at.kept_step,
             visible == whole(in * at.inverse_gap) * at.gap);
}

// K - 1 bits of the wide value; the visible half is one of its two neighbours, itself where it is one.
bool stochastic_ok(const Place& at, const Split& s) {
  const double in = magnitude(s.in), out = magnitude(s.out), visible = magnitude(s.visible);
  const double below = whole(out * at.inverse_gap) * at.gap, above = below < out ? below + at.gap : below;
  return all(sign_kept(s), magnitude(out - in) < 2 * at.kept_step,
             (visible == below) + (visible == above) != 0);
}

template <int R>
bool check(const Place& at, const Split& s) {
  if constexpr (R == SCRUPLE_NEAREST) return nearest_ok(at, s);
  if constexpr (R == SCRUPLE_TRUNCATE) return truncate_ok(at, s);
  return stochastic_ok(at, s);
}

// Where a half ends: NaN, infinity, saturation, and the last gap below 2^128, which may round up to infinity.
template <int R>
bool check_at_the_end(const Place& at, Split s) {
  if (is_nan(s.in)) return bits(s.out) == 0x7fc00000u && is_nan(s.visible);
  if (std::isinf(s.in)) return s.out == s.in && s.visible == static_cast<double>(s.in);
  if (at.half.saturates && magnitude(s.in) > at.half.largest)
    return s.out == std::copysign(static_cast<float>(at.half.largest), s.in) &&
           s.visible == static_cast<double>(s.out);
  // With K < 16 the last half of a kept step rounds up beyond fp32's range, as IEEE conversions do.
  const bool beyond = R == SCRUPLE_NEAREST && at.k < 16 && magnitude(s.in) >= 0x1p128 - at.kept_step / 2;
  if (R != SCRUPLE_STOCHASTIC && std::isinf(s.out) != beyond) return false;
  if (std::isinf(s.out)) return std::isinf(s.visible) && sign_kept(s);
  if (std::isinf(s.visible)) s.visible = std::copysign(0x1p128, s.visible);
  return check<R>(at, s);
}

// How far apart are the patterns to visit, of those whose upper half is given.
using Density = std::uint64_t (*)(const HalfType& half, std::uint64_t upper);

std::uint64_t all_patterns(const HalfType&, std::uint64_t) { return kStride; }
// All of one sign, 1 in 61 of the other, and of what a half flushes to zero or saturates.
std::uint64_t one_sign(const HalfType& half, std::uint64_t upper) {
  const double x = float_from(static_cast<std::uint32_t>(upper << 16 | 1u));
  const bool within = x < 4 * half.largest && x > std::ldexp(1, half.least_exponent - 18);
  return (upper < 0x8000u && within) || x != x ? kStride : 61;
}
std::uint64_t sparse(const HalfType&, std::uint64_t) { return 8191; }

// One array of consecutive patterns, split and joined through the ABI.
struct Sweep {
  Sweep(const HalfType& half, int k_bits, int rounding)
      : k(k_bits), t(adamw, 65536), in(65536), out(65536), visible(65536), extra(65536), value_of(65536) {
    t.use(SCRUPLE_WEIGHT, (half.name + std::string("+") + std::to_string(k)).c_str(), rounding);
    for (unsigned code = 0; code < 65536; ++code) value_of[code] = half_value(half, code);
  }
  void run(std::uint32_t base, std::uint64_t stride) {
    n = static_cast<std::size_t>(65536 / stride);
    t.row.size = static_cast<std::int64_t>(n);
    for (std::size_t i = 0; i < n; ++i) in[i] = float_from(base + static_cast<std::uint32_t>(i * stride));
    CHECK_OK(scruple_encode(engine, &t.row, SCRUPLE_WEIGHT, in.data()));
    CHECK_OK(scruple_decode(engine, &t.row, SCRUPLE_WEIGHT, out.data()));
    const unsigned char *codes = t.codes(SCRUPLE_WEIGHT).data(), *aux = t.aux(SCRUPLE_WEIGHT).data();
    for (std::size_t i = 0; i < n; ++i)
      visible[i] = value_of[codes[2 * i] | static_cast<unsigned>(codes[2 * i + 1]) << 8];
    if (k == 16)
      std::memcpy(extra.data(), aux, 2 * n);
    else
      for (std::size_t i = 0; i < n; ++i)
        extra[i] = k == 8 ? aux[i] : static_cast<std::uint16_t>(bit_string_get(aux, i, k));
  }
  Split at(std::size_t i) const { return {in[i], out[i], visible[i], extra[i]}; }

  int k;
  std::size_t n = 0;
  Engine engine;
  Optimizer adamw;
  Tensor t;
  std::vector<float> in, out;
  std::vector<double> visible;
  std::vector<std::uint16_t> extra;
  std::vector<double> value_of;
};

template <int R>
bool holds(const HalfType& half, int k, Density density, std::uint64_t first, std::uint64_t last) {
  Sweep sweep(half, k, R);
  const scruple_bound bound = info_of(sweep.t.row.arrays[SCRUPLE_WEIGHT].format).bound;
  for (std::uint64_t upper = first; upper < last; ++upper) {
    const std::uint64_t stride = density(half, upper);
    const auto base = static_cast<std::uint32_t>(upper << 16 | (stride == 1 ? 0 : upper % stride));
    sweep.run(base, stride);
    const double gap = gap_at(half, float_from(base | 1u));
    const Place at{half, k, gap, 1 / gap, std::ldexp(gap, -k), bound.relative, bound.absolute};
    const bool end = !(magnitude(float_from(base | 0xffffu)) < half.largest);
    unsigned wrong = 0;
    if (end)
      for (std::size_t i = 0; i < sweep.n; ++i) wrong += check_at_the_end<R>(at, sweep.at(i)) ? 0 : 1;
    else
      for (std::size_t i = 0; i < sweep.n; ++i) wrong += check<R>(at, sweep.at(i)) ? 0 : 1;
    if (wrong == 0) continue;
    std::size_t i = 0;
    while (end ? check_at_the_end<R>(at, sweep.at(i)) : check<R>(at, sweep.at(i))) ++i;
    const Split s = sweep.at(i);
    ADD_FAILURE() << half.name << "+" << k << " rounding " << R << ": " << std::hexfloat << s.in << " (0x"
                  << std::hex << bits(s.in) << ") became " << s.out << ", visible " << s.visible
                  << ", extra 0x" << s.extra;
    return false;
  }
  return true;
}

template <int R>
bool holds_for(Density density, const HalfType& half, int k) {
  return in_two_threads(65536, [&](std::uint64_t first, std::uint64_t last) {
    // Neighbouring blocks of both signs go to each thread: the density differs between them.
    return holds<R>(half, k, density, first / 2, last / 2) &&
           holds<R>(half, k, density, 32768 + first / 2, 32768 + last / 2);
  });
}

// The stated bound of bf16+16 is 0, so `nearest_ok` demands every bit.
TEST(Split, bf16_16_returns_every_pattern_and_shows_the_nearest_bf16) {
  const scruple_bound bound = info_of(scruple_format_find("bf16+16")).bound;
  EXPECT_EQ(bound.relative + bound.group + bound.absolute, 0);
  EXPECT_TRUE(holds_for<SCRUPLE_NEAREST>(all_patterns, kBf16, 16));
}

TEST(Split, bf16_16_truncated_returns_every_pattern) {
  EXPECT_TRUE(holds_for<SCRUPLE_TRUNCATE>(one_sign, kBf16, 16));
}

TEST(Split, bf16_8_keeps_its_bound_for_every_pattern) {
  EXPECT_TRUE(holds_for<SCRUPLE_NEAREST>(one_sign, kBf16, 8));
}
TEST(Split, fp16_8_keeps_its_bound_for_every_pattern) {
  EXPECT_TRUE(holds_for<SCRUPLE_NEAREST>(one_sign, kFp16, 8));
}
TEST(Split, fp16_16_keeps_its_bound_for_every_pattern) {
  EXPECT_TRUE(holds_for<SCRUPLE_NEAREST>(one_sign, kFp16, 16));
}

TEST(Split, every_k_and_rounding_keeps_its_promise_on_a_sample) {
  for (const HalfType* half : {&kBf16, &kFp16})
    for (int k = 1; k <= 16; ++k) {
      EXPECT_TRUE(holds_for<SCRUPLE_NEAREST>(sparse, *half, k)) << half->name << "+" << k;
      EXPECT_TRUE(holds_for<SCRUPLE_TRUNCATE>(sparse, *half, k)) << half->name << "+" << k;
      EXPECT_TRUE(holds_for<SCRUPLE_STOCHASTIC>(sparse, *half, k)) << half->name << "+" << k;
    }
}

// fp16 has 13 fraction bits fewer than fp32: from K = 13 nothing of a normal half is lost.
TEST(Split, fp16_from_13_extra_bits_is_exact_for_normal_halves) {
  const Engine engine;
  const Optimizer adamw;
  std::vector<float> values;
  for (std::uint32_t b = bits(0x1p-14f); b <= bits(65504.0f); b += 997) {
    values.push_back(float_from(b));
    values.push_back(-float_from(b));
  }
  values.push_back(65504.0f);
  for (int k = 13; k <= 16; ++k)
    for (const int rounding : {SCRUPLE_NEAREST, SCRUPLE_TRUNCATE}) {
      Tensor t(adamw, static_cast<std::int64_t>(values.size()));
      t.use(SCRUPLE_WEIGHT, ("fp16+" + std::to_string(k)).c_str(), rounding);
      t.encode(engine, SCRUPLE_WEIGHT, values);
      EXPECT_TRUE(same_bytes(t.decode(engine, SCRUPLE_WEIGHT), values)) << k << " rounding " << rounding;
    }
}

struct Golden {
  const char* format;
  int rounding;
  std::uint32_t in;
  unsigned visible, extra;
  std::uint32_t out;
  const char* why;
};

constexpr Golden kGolden[] = {
    {"bf16+16", 0, 0x3f800000, 0x3f80, 0x0000, 0x3f800000, "a bf16 number: extra bits are zero"},
    {"bf16+16", 0, 0x3f807fff, 0x3f80, 0x7fff, 0x3f807fff, "just under the middle: down, the largest rest"},
    {"bf16+16", 0, 0x3f808000, 0x3f81, 0x8000, 0x3f808000, "a tie goes away from zero, its rest is -1/2"},
    {"bf16+16", 0, 0xbf808000, 0xbf81, 0x8000, 0xbf808000, "the same below zero"},
    {"bf16+16", 0, 0x3fffffff, 0x4000, 0xffff, 0x3fffffff, "up into the next binade, rest -1"},
    {"bf16+16", 0, 0x00000001, 0x0000, 0x0001, 0x00000001, "the smallest subnormal fp32"},
    {"bf16+16", 0, 0x80000000, 0x8000, 0x0000, 0x80000000, "minus zero"},
    {"bf16+16", 0, 0x7f7f7fff, 0x7f7f, 0x7fff, 0x7f7f7fff, "the last value whose visible half is finite"},
    {"bf16+16", 0, 0x7f7f8000, 0x7f80, 0x8000, 0x7f7f8000, "0x1.ffp127: visible infinity, wide finite"},
    {"bf16+16", 0, 0x7f7fffff, 0x7f80, 0xffff, 0x7f7fffff, "the largest fp32"},
    {"bf16+16", 0, 0xff800000, 0xff80, 0x0000, 0xff800000, "minus infinity"},
    {"bf16+16", 0, 0x7fffffff, 0x7fc0, 0x0000, 0x7fc00000, "a NaN of all ones does not wrap to -0"},
    {"bf16+16", 0, 0xff800001, 0x7fc0, 0x0000, 0x7fc00000, "a signalling NaN is stored as the quiet one"},
    {"bf16+16", 1, 0x3f80ffff, 0x3f80, 0xffff, 0x3f80ffff, "truncation: the next bf16 towards zero"},
    {"bf16+16", 1, 0x7f7fffff, 0x7f7f, 0xffff, 0x7f7fffff, "truncation never reaches infinity"},
    {"bf16+8", 0, 0x3f80007f, 0x3f80, 0x00, 0x3f800000, "under half a kept step: lost"},
    {"bf16+8", 0, 0x3f800080, 0x3f80, 0x00, 0x3f800000, "half a kept step: a tie, to even: down"},
    {"bf16+8", 0, 0x3f800081, 0x3f80, 0x01, 0x3f800100, "just above it: up"},
    {"bf16+8", 0, 0x3f800180, 0x3f80, 0x02, 0x3f800200, "a tie, to even: up"},
    {"bf16+8", 0, 0x3f807f80, 0x3f81, 0x80, 0x3f808000, "rounds to the middle first, which then goes up"},
    {"bf16+8", 1, 0x3f8012ff, 0x3f80, 0x12, 0x3f801200, "truncation keeps the top of the rest"},
    {"bf16+1", 0, 0x3f804001, 0x3f81, 0x1, 0x3f808000, "one bit: above a quarter is the middle, -1/2"},
    {"bf16+1", 0, 0x3f804000, 0x3f80, 0x0, 0x3f800000, "one bit: a quarter is a tie, to even"},
    {"bf16+1", 0, 0x3f803fff, 0x3f80, 0x0, 0x3f800000, "one bit: under a quarter is lost"},
    {"fp16+16", 0, 0x3f801000, 0x3c01, 0x8000, 0x3f801000, "1 + 2^-11, a tie: away from zero"},
    {"fp16+16", 0, 0x3f800001, 0x3c00, 0x0008, 0x3f800001, "one fp32 ulp above 1 is 8 / 2^16 of a gap"},
    {"fp16+16", 0, 0x477fe000, 0x7bff, 0x0000, 0x477fe000, "65504, the largest half"},
    {"fp16+16", 0, 0x477fe001, 0x7bff, 0x0000, 0x477fe000, "beyond it: saturates"},
    {"fp16+16", 0, 0x7f7fffff, 0x7bff, 0x0000, 0x477fe000, "the largest fp32: saturates"},
    {"fp16+16", 0, 0x7f800000, 0x7c00, 0x0000, 0x7f800000, "infinity stays infinity"},
    {"fp16+16", 0, 0xffc00000, 0x7e00, 0x0000, 0x7fc00000, "NaN stays NaN, without its sign"},
    {"fp16+16", 0, 0x33000000, 0x0001, 0x8000, 0x33000000, "2^-25, half the smallest subnormal: a tie, up"},
    {"fp16+16", 0, 0x32ffffff, 0x0000, 0x7fff, 0x32fffe00,
     "just under it: down; bits under 2^-40 are dropped"},
    {"fp16+16", 0, 0x2b800000, 0x0000, 0x0001, 0x2b800000, "2^-40, the smallest that is kept"},
    {"fp16+16", 0, 0x2b7fffff, 0x0000, 0x0000, 0x00000000, "under it: zero"},
    {"fp16+16", 0, 0x387fffff, 0x0400, 0xfffc, 0x387fffff,
     "under the smallest normal: up to it, rest -2^-38"},
};

// A weight that somebody sets to zero keeps the extra bits it had, whatever they were: they may not point
// below zero, where there is no magnitude.
TEST(Split, a_zero_from_outside_beside_any_extra_bits_stays_near_zero) {
  for (const std::string& name : cpu_engines()) {
    const Engine engine(1, name.c_str());
    for (const HalfType& half : {kBf16, kFp16})
      for (int k = 1; k <= 16; ++k)
        for (const int rounding : {SCRUPLE_NEAREST, SCRUPLE_TRUNCATE, SCRUPLE_STOCHASTIC}) {
          const std::int64_t size = std::int64_t{1} << k;
          std::vector<std::uint16_t> visible(static_cast<std::size_t>(size));
          std::vector<std::uint8_t> extra(static_cast<std::size_t>(size * k + 7) / 8);
          for (std::int64_t i = 0; i < size; ++i) {
            visible[static_cast<std::size_t>(i)] = static_cast<std::uint16_t>((i & 1) << 15);
            for (int b = 0; b < k; ++b)
              extra[static_cast<std::size_t>(i * k + b) / 8] |=
                  static_cast<std::uint8_t>((i >> b & 1) << ((i * k + b) % 8));
          }
          const Optimizer optimizer("sgd");
          scruple_tensor tensor{};
          tensor.optimizer = optimizer;
          tensor.size = size;
          scruple_array& weight = tensor.arrays[SCRUPLE_WEIGHT];
          weight.format = scruple_format_find((half.name + ("+" + std::to_string(k))).c_str());
          weight.codes = visible.data();
          weight.aux = extra.data();
          weight.rounding = rounding;
          std::vector<float> values(static_cast<std::size_t>(size));
          CHECK_OK(scruple_decode(engine, &tensor, SCRUPLE_WEIGHT, values.data()));
          const double gap = std::ldexp(1, half.least_exponent);
          for (const float value : values)
            ASSERT_LT(magnitude(static_cast<double>(value)), gap)
                << half.name << "+" << k << ", " << rounding;
        }
  }
}

TEST(Split, golden_values) {
  const Engine engine;
  const Optimizer adamw;
  for (const Golden& g : kGolden) {
    Tensor t(adamw, 1);
    t.use(SCRUPLE_WEIGHT, g.format, g.rounding);
    t.encode(engine, SCRUPLE_WEIGHT, {float_from(g.in)});
    const unsigned char* codes = t.codes(SCRUPLE_WEIGHT).data();
    const int k = info_of(t.row.arrays[SCRUPLE_WEIGHT].format).aux_bits;
    EXPECT_EQ(codes[0] | static_cast<unsigned>(codes[1]) << 8, g.visible) << g.format << ": " << g.why;
    EXPECT_EQ(bit_string_get(t.aux(SCRUPLE_WEIGHT).data(), 0, k), g.extra) << g.format << ": " << g.why;
    EXPECT_EQ(bits(t.decode(engine, SCRUPLE_WEIGHT)[0]), g.out) << g.format << ": " << g.why;
  }
}

}  // namespace
