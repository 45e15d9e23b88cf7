// Properties that every format owes, checked through the ABI for every format x role x rounding in the registry: codes
// survive a round trip, stated bounds hold, layouts are what they say, lengths and alignments change nothing.
#include "formats/formats.def"

#include <algorithm>

#include "tests/formats.h"

namespace {

using namespace scruple_tests;

bool is_split(const Case& c) {
  return c.info.group_size == 1 && c.info.aux_bits > 0 && c.info.aux_bits <= 16;
}
bool is_moment(const Case& c) { return c.role == SCRUPLE_ROLE_SIGNED || c.nonneg(); }
bool named(const Case& c, const char* start) { return std::string(c.info.name).starts_with(start); }

// The largest magnitude a format can hold: fp16 and flash8, whose scale is fp16, end at 65504; bf16 rounds to infinity.
double range(const Case& c) {
  if (named(c, "flash8")) return c.nonneg() ? 65504.0 * 65504.0 : 65504.0;
  return named(c, "fp16") ? 65504.0 : named(c, "bf16") ? 0x1.fep127 : 3.4e38;
}

// Values as the role allows them: magnitudes where nothing may be negative.
std::vector<float> fit(const Case& c, std::vector<float> values) {
  for (float& x : values) x = c.nonneg() ? std::fabs(x) : x;
  return values;
}

std::vector<float> ordinary(const Case& c, std::size_t n, std::uint64_t seed) {
  return fit(c, Random(seed).normals(n));
}

void set_scales(Tensor& t, const Case& c, float scale) {
  Plane& aux = t.aux(c.array);
  for (std::size_t at = 0; at < aux.size; at += static_cast<std::size_t>(c.info.aux_bits) / 8) {
    const std::uint16_t half = scruple::Fp16::ieee(scale);
    if (c.info.aux_bits == 16)
      std::memcpy(aux.data() + at, &half, 2);
    else
      std::memcpy(aux.data() + at, &scale, 4);
  }
}

// ---- The registry -------------------------------------------------------------------------------
TEST_F(Formats, registry_rows_are_consistent) {
  ASSERT_GE(cases.size(), static_cast<std::size_t>(scruple_format_count()));
  for (const scruple_format* format : formats()) {
    const scruple_format_info info = info_of(format);
    EXPECT_EQ(scruple_format_find(info.name), format);
    EXPECT_NE(info.roles, 0u) << info.name;
    EXPECT_NE(info.roundings & 1u << SCRUPLE_NEAREST, 0u) << info.name << " must round to nearest";
    EXPECT_DOUBLE_EQ(info.bits_per_value,
                     info.code_bits + static_cast<double>(info.aux_bits) / info.group_size);
    const bool served =
        std::any_of(cases.begin(), cases.end(), [&](const Case& c) { return c.format == format; });
    EXPECT_TRUE(served) << info.name << " serves no array";
    for (std::int64_t n : {0, 1, 31, 32, 33, 1000}) {
      std::int64_t codes = -1, aux = -1;
      CHECK_OK(scruple_format_bytes(format, n, &codes, &aux));
      const std::int64_t groups = (n + info.group_size - 1) / info.group_size;
      EXPECT_EQ(codes, (n * info.code_bits + 7) / 8) << info.name;
      EXPECT_EQ(aux, (groups * info.aux_bits + 7) / 8) << info.name;
    }
  }
}

// ---- Codes --------------------------------------------------------------------------------------
TEST_F(Formats, every_16_bit_code_returns) {
  for (const Case& c : cases) {
    if (c.info.code_bits != 16 || c.info.aux_bits != 0) continue;
    Tensor t = tensor(c, 65536);
    std::vector<std::uint16_t> codes(65536), again(65536);
    for (std::size_t i = 0; i < 65536; ++i) codes[i] = static_cast<std::uint16_t>(i);
    std::memcpy(t.codes(c.array).data(), codes.data(), 2 * 65536);
    const std::vector<float> values = t.decode(engine, c.array);
    t.encode(engine, c.array, values);
    std::memcpy(again.data(), t.codes(c.array).data(), 2 * 65536);
    const int fraction_bits = named(c, "fp16") ? 10 : 7;
    for (std::size_t i = 0; i < 65536; ++i) {
      const unsigned exponent = codes[i] >> fraction_bits & ((1u << (15 - fraction_bits)) - 1u);
      const unsigned fraction = codes[i] & ((1u << fraction_bits) - 1u);
      const bool top = exponent == (1u << (15 - fraction_bits)) - 1u;
      if (top && fraction != 0) {
        EXPECT_TRUE(std::isnan(values[i])) << c.name() << " code " << i;
        EXPECT_EQ(again[i], fraction_bits == 10 ? 0x7e00 : 0x7fc0) << c.name() << " code " << i;
        continue;
      }
      const int bias = (1 << (14 - fraction_bits)) - 1;
      const double significand = exponent == 0 ? fraction : fraction + (1u << fraction_bits);
      const double value =
          std::ldexp(significand, std::max(static_cast<int>(exponent), 1) - bias - fraction_bits);
      EXPECT_EQ(std::fabs(values[i]), top ? static_cast<double>(INFINITY) : value)
          << c.name() << " code " << i;
      EXPECT_EQ(std::signbit(values[i]), i >= 32768);
      EXPECT_EQ(again[i], codes[i]) << c.name();
    }
  }
}

// Every visible half with a spread of extra bits: what decodes to a finite number in range comes back the same.
TEST_F(Formats, every_visible_half_returns_with_its_extra_bits) {
  for (const Case& c : cases) {
    if (!is_split(c)) continue;
    const int k = c.info.aux_bits;
    Tensor t = tensor(c, 65536);
    for (std::uint32_t salt = 0; salt < 3; ++salt) {
      Random random(salt);
      for (std::size_t i = 0; i < 65536; ++i) {
        const auto visible = static_cast<std::uint16_t>(i);
        std::memcpy(t.codes(c.array).data() + 2 * i, &visible, 2);
        bit_string_set(t.aux(c.array).data(), i, k, salt == 0 ? 0 : random.next32() & ((1u << k) - 1u));
      }
      const std::vector<float> values = t.decode(engine, c.array), again = round_trip(c, values);
      std::size_t compared = 0;
      for (std::size_t i = 0; i < 65536; ++i) {
        if (!(std::fabs(values[i]) <= range(c))) continue;
        ++compared;
        ASSERT_EQ(bits(values[i]), bits(again[i])) << c.name() << " visible " << i << " value " << values[i];
      }
      EXPECT_GT(compared, 60000u) << c.name();
    }
  }
}

// The code that stands for zero in planes that were never written, where the format itself writes no zero.
bool zero_of_fresh_planes(const Case& c, std::uint32_t code) {
  return named(c, "companded8") && c.nonneg() && code == 0;
}

// The codes of a group format whose magnitude exceeds the top level: the most negative number of two's complement.
std::vector<bool> beyond_top(const std::vector<float>& levels) {
  const std::size_t half = levels.size() / 2;
  std::vector<bool> beyond(levels.size());
  float top = 0;
  for (std::size_t code = 0; code < levels.size(); ++code)
    if (levels[code] > top) top = levels[code];
  for (std::size_t code = half; code < levels.size(); ++code) beyond[code] = std::fabs(levels[code]) > top;
  return beyond;
}

struct Scaled : Formats {
  // The value of each code at a given scale, one element at a time.
  std::vector<float> levels(const Case& c, float scale) const {
    std::vector<float> values;
    Tensor t = tensor(c, 1);
    set_scales(t, c, scale);
    for (std::uint32_t code = 0; code < 1u << c.info.code_bits; ++code) {
      bit_string_set(t.codes(c.array).data(), 0, c.info.code_bits, code);
      values.push_back(t.decode(engine, c.array)[0]);
    }
    return values;
  }
  // Groups that together hold every code that is ever written, each with the code of the largest value in front.
  Tensor every_code(const Case& c, float scale) const {
    const std::vector<float> level = levels(c, scale);
    const std::vector<bool> beyond = beyond_top(level);
    std::vector<std::uint32_t> usable;
    std::uint32_t top = 0;
    for (std::uint32_t code = 0; code < level.size(); ++code) {
      if (beyond[code] || zero_of_fresh_planes(c, code)) continue;
      usable.push_back(code);
      if (level[code] > level[top]) top = code;
    }
    const std::size_t groups = (usable.size() + c.group() - 2) / (c.group() - 1);
    Tensor t = tensor(c, groups * c.group());
    set_scales(t, c, scale);
    for (std::size_t i = 0, next = 0; i < groups * c.group(); ++i)
      bit_string_set(t.codes(c.array).data(), i, c.info.code_bits,
                     i % c.group() == 0 ? top : usable[next++ % usable.size()]);
    return t;
  }
};

// Groups that hold every code in turn beside the one of the largest magnitude, so that the scale comes back: the codes
// are the same bits after decoding and encoding, the values the same within the rounding of the scale.
TEST_F(Scaled, every_code_returns) {
  for (const Case& c : cases) {
    if (!is_scaled(c) || c.rounding == SCRUPLE_DITHER) continue;
    for (const float scale : {1.0f, 0.37f, 3e-5f, 1000.0f}) {
      Tensor t = every_code(c, scale);
      const Bytes codes = t.codes(c.array).bytes();
      const std::vector<float> values = t.decode(engine, c.array);
      t.encode(engine, c.array, values);
      const std::vector<float> again = t.decode(engine, c.array);
      std::size_t moved = 0;
      for (std::size_t i = 0; i < values.size(); ++i)
        moved += std::fabs(again[i] - values[i]) > 0x1p-20 * std::fabs(values[i]) ? 1 : 0;
      // A stochastic coin may move a value that the scale's rounding put off its level, 1 time in 1,000 or so.
      EXPECT_LE(moved, c.rounding == SCRUPLE_NEAREST ? 0 : 1 + values.size() / 200)
          << c.name() << " scale " << scale;
      Bytes expected = codes;
      if (c.info.code_bits == 8)  // a sign beside a magnitude of zero is not kept
        for (std::size_t i = 0; i < values.size(); ++i)
          if (values[i] == 0) expected[i] = 0;
      EXPECT_TRUE(c.rounding != SCRUPLE_NEAREST || same_bytes(t.codes(c.array).bytes(), expected))
          << c.name() << " scale " << scale;
    }
  }
}

// What is decoded and encoded at every step may not grow or shrink by itself: at most by an ulp of the scale each time.
TEST_F(Scaled, re_encoding_does_not_drift) {
  constexpr int kPasses = 1000;
  for (const Case& c : cases) {
    if (!is_scaled(c) || c.rounding != SCRUPLE_NEAREST) continue;
    for (const float scale : {1.0f, 0.37f, 0.0123f}) {
      Tensor t = every_code(c, scale);
      const std::vector<float> values = t.decode(engine, c.array);
      for (int pass = 0; pass < kPasses; ++pass) t.encode(engine, c.array, t.decode(engine, c.array));
      const std::vector<float> again = t.decode(engine, c.array);
      double drift = 0;
      for (std::size_t i = 0; i < values.size(); ++i)
        if (values[i] != 0) drift = std::max(drift, std::fabs(static_cast<double>(again[i]) / values[i] - 1));
      EXPECT_LE(drift, kPasses * 0x1p-24) << c.name() << " scale " << scale;
    }
  }
}

TEST_F(Scaled, the_most_negative_code_is_never_written) {
  for (const Case& c : cases) {
    if (!is_scaled(c) || c.rounding == SCRUPLE_DITHER) continue;  // a dithered level depends on its coin
    const std::vector<bool> beyond = beyond_top(levels(c, 1.0f));
    if (std::find(beyond.begin(), beyond.end(), true) == beyond.end()) continue;
    std::vector<float> values = ordinary(c, 20 * c.group(), 5);
    for (std::size_t i = 0; i < values.size(); i += c.group()) {
      values[i] = -7.5f;  // the largest magnitude, at the end where two's complement has one code more
      values[i + 1] = -7.499999f;
    }
    Tensor t = tensor(c, values.size());
    for (t.row.step = 1; t.row.step <= 50; ++t.row.step) {
      t.encode(engine, c.array, values);
      for (std::size_t i = 0; i < values.size(); ++i)
        ASSERT_FALSE(beyond[bit_string_get(t.codes(c.array).data(), i, c.info.code_bits)])
            << c.name() << " at " << i;
    }
  }
}

TEST_F(Formats, zero_filled_planes_decode_to_zero) {
  for (const Case& c : cases)
    for (const float x : tensor(c, 300).decode(engine, c.array)) ASSERT_EQ(x, 0.0f) << c.name();
}

TEST_F(Formats, zeros_stay_zero) {
  for (const Case& c : cases) {
    if (c.rounding == SCRUPLE_DITHER) continue;
    for (const float x : round_trip(c, std::vector<float>(300, 0.0f))) ASSERT_EQ(x, 0.0f) << c.name();
    std::vector<float> half_zero = ordinary(c, 300, 3);  // groups of zeros between groups that are not
    std::fill(half_zero.begin() + 128, half_zero.begin() + 256, 0.0f);
    const std::vector<float> out = round_trip(c, half_zero);
    for (std::size_t i = 128; i < 256; ++i) ASSERT_EQ(out[i], 0.0f) << c.name();
  }
}

// Of a whole tile that a reset need not encode, and of those it must.
TEST_F(Formats, a_reset_gives_the_bytes_of_zeros) {
  for (const Case& c : cases) {
    if (c.role != SCRUPLE_ROLE_SIGNED && c.role != SCRUPLE_ROLE_NONNEG) continue;
    for (const std::size_t n : {std::size_t{1023}, std::size_t{1024}, std::size_t{65536 + 3 * 1024 + 77}}) {
      Tensor encoded = tensor(c, n, 1, 1), reset = tensor(c, n, 1, 1);
      encoded.encode(engine, c.array, std::vector<float>(n, 0.0f));
      const int other = c.array == SCRUPLE_SLOT ? SCRUPLE_SLOT + 1 : SCRUPLE_SLOT;
      reset.use(other, "fp32");
      for (Plane* plane : {&reset.codes(c.array), &reset.aux(c.array)})
        if (plane->size > 0) std::memset(plane->data(), 0xaa, plane->size);
      CHECK_OK(scruple_tensor_reset(engine, &reset.row));
      ASSERT_TRUE(same_bytes(reset.bytes(c.array), encoded.bytes(c.array))) << c.name() << ", " << n;
      ASSERT_TRUE(reset.intact());
    }
  }
}

// ---- The stated bounds --------------------------------------------------------------------------
struct Bounds : Scaled {
  void expect_bound(const Case& c, const std::vector<float>& values, const char* what) const {
    const scruple_bound bound = c.bound();
    const std::vector<float> out = round_trip(c, values);
    for (std::size_t first = 0; first < values.size(); first += c.group()) {
      const std::size_t last = std::min(first + c.group(), values.size());
      double largest = 0;
      for (std::size_t i = first; i < last; ++i)
        largest = std::max(largest, std::fabs(static_cast<double>(values[i])));
      if (largest > range(c)) continue;
      for (std::size_t i = first; i < last; ++i) {
        const double x = values[i], error = std::fabs(static_cast<double>(out[i]) - x);
        ASSERT_LE(error, bound.relative * std::fabs(x) + bound.group * largest + bound.absolute)
            << c.name() << ", " << what << ": " << x << " became " << out[i] << " beside " << largest;
      }
    }
  }
};

TEST_F(Bounds, hold_for_random_data_of_any_magnitude) {
  for (const Case& c : cases) {
    if (c.rounding != SCRUPLE_NEAREST) continue;
    Random random(11);
    for (int decade = -44; decade <= 38; decade += 2) {
      const double scale = std::pow(10.0, decade);
      std::vector<float> normal(1000), wide(1000);
      for (float& x : normal) x = static_cast<float>(std::clamp(scale * random.normal(), -3.4e38, 3.4e38));
      for (float& x : wide)
        x = static_cast<float>(std::clamp(scale * random.normal() * random.lognormal(2), -3.4e38, 3.4e38));
      expect_bound(c, fit(c, normal), "normal");
      expect_bound(c, fit(c, wide), "lognormal");
    }
    std::vector<float> any;  // all exponents beside each other
    for (int i = 0; i < 4000; ++i)
      any.push_back(float_from(random.next32() % 0x7f800000u | random.next32() << 31));
    expect_bound(c, fit(c, any), "any pattern");
  }
}

// The worst cases: within a few ulps of the middle between two levels, and just above zero.
TEST_F(Bounds, hold_between_levels) {
  for (const Case& c : cases) {
    if (!is_scaled(c) || c.rounding != SCRUPLE_NEAREST) continue;
    for (const float scale : {1.0f, 0.7310586f, 1.234e-3f}) {
      std::vector<float> level = levels(c, scale);
      std::erase_if(level,
                    [&](float x) { return std::fabs(x) > *std::max_element(level.begin(), level.end()); });
      std::sort(level.begin(), level.end());
      const float top = level.back();
      std::vector<float> values;
      const auto add = [&](float x) {
        if (values.size() % c.group() == 0) values.push_back(top);
        if (std::fabs(x) <= top && !(c.nonneg() && x < 0)) values.push_back(x);
      };
      for (std::size_t i = 0; i + 1 < level.size(); ++i) {
        const float middle = 0.5f * (level[i] + level[i + 1]);
        float below = middle, above = middle;
        for (int ulps = 0; ulps < 4;
             ++ulps, below = std::nextafter(below, -top), above = std::nextafter(above, top)) {
          add(below);
          add(above);
        }
      }
      for (const float share : {1e-3f, 1e-6f, 1e-12f, 1e-30f}) {
        add(share * top);
        add(-share * top);
      }
      expect_bound(c, values, "between levels");
    }
  }
}

// flash8's scales become subnormal below 6e-5: every scale there, at its worst rounding.
TEST_F(Bounds, hold_where_half_precision_scales_are_subnormal) {
  for (const Case& c : cases) {
    if (!is_scaled(c) || c.rounding != SCRUPLE_NEAREST) continue;
    Random random(13);
    for (int step = 0; step < 2000; ++step) {
      const double largest = (step + 0.4999) * 0x1p-24;
      const std::vector<float> values = [&] {
        std::vector<float> group(c.group());
        for (float& x : group) {
          const double share = 2 * random.uniform() - 1;
          x = static_cast<float>(c.nonneg() ? largest * largest * share * share : largest * share);
        }
        group[0] = static_cast<float>(c.nonneg() ? largest * largest : largest);
        return group;
      }();
      expect_bound(c, values, "small scale");
      if (HasFatalFailure()) break;
    }
  }
}

// ---- Layout -------------------------------------------------------------------------------------
// A string of random codes, written bit by bit, decodes to what each code means alone. (every_code_returns
// compares the bytes that encoding writes.)
TEST_F(Scaled, codes_are_packed_as_one_bit_string) {
  for (const Case& c : cases) {
    if (!is_scaled(c) || c.rounding != SCRUPLE_NEAREST) continue;
    const int width = c.info.code_bits;
    const std::vector<float> level = levels(c, 1.0f);
    Random random(17);
    Tensor t = tensor(c, 3001);
    set_scales(t, c, 1.0f);
    std::vector<std::uint32_t> codes(3001);
    for (std::size_t i = 0; i < codes.size(); ++i) {
      codes[i] = random.next32() & ((1u << width) - 1u);
      bit_string_set(t.codes(c.array).data(), i, width, codes[i]);
    }
    const std::vector<float> values = t.decode(engine, c.array);
    for (std::size_t i = 0; i < codes.size(); ++i)
      ASSERT_EQ(values[i], level[codes[i]]) << c.name() << " at " << i;
  }
}

template <class Half>
float joined(int rounding, std::uint32_t visible, std::uint32_t extra, int k) {
  switch (rounding) {
    case SCRUPLE_NEAREST:
    case SCRUPLE_WIDE: return Half::value(scruple::join<scruple::kNearest>(visible, extra, k));
    case SCRUPLE_TRUNCATE: return Half::value(scruple::join<scruple::kTruncate>(visible, extra, k));
    default: return Half::value(scruple::join<scruple::kStochastic>(visible, extra, k));
  }
}

TEST_F(Formats, extra_bits_are_packed_as_one_bit_string) {
  for (const Case& c : cases) {
    if (!is_split(c)) continue;
    const int k = c.info.aux_bits;
    const std::vector<float> values = ordinary(c, 3001, 19);
    Tensor t = tensor(c, values.size());
    t.encode(engine, c.array, values);
    const std::vector<float> out = t.decode(engine, c.array);
    bool varied = false;
    for (std::size_t i = 0; i < values.size(); ++i) {
      const std::uint32_t visible = bit_string_get(t.codes(c.array).data(), i, 16);
      const std::uint32_t extra = bit_string_get(t.aux(c.array).data(), i, k);
      const float wide = named(c, "bf16") ? joined<scruple::Bf16>(c.rounding, visible, extra, k)
                                          : joined<scruple::Fp16>(c.rounding, visible, extra, k);
      ASSERT_EQ(bits(wide), bits(out[i])) << c.name() << " at " << i;
      const double gap = std::max((named(c, "bf16") ? 0x1p-7 : 0x1p-10) * std::fabs(values[i]), 0x1p-24);
      ASSERT_NEAR(wide, values[i], std::ldexp(gap, 1 - k)) << c.name() << " at " << i;
      varied = varied || extra != 0;
    }
    // One stochastic bit records the direction, and a value without a rest has none.
    EXPECT_TRUE(varied || (c.rounding == SCRUPLE_STOCHASTIC && k == 1)) << c.name();
  }
}

struct Shapes : Formats {
  // What an array of n values must hold: the codes and scales of the same values padded with zeros, and zero
  // bits after the last code.
  void expect_same_as_padded(const Case& c, const Tensor& t, const Tensor& padded, std::size_t n) const {
    const auto expect_same = [&](const Plane& plane, const Plane& of_padded, int bits_each) {
      const std::size_t bits = n * static_cast<std::size_t>(bits_each), whole = bits / 8;
      ASSERT_TRUE(whole == 0 || std::memcmp(plane.data(), of_padded.data(), whole) == 0) << c.name() << n;
      if (whole < plane.size) {
        ASSERT_EQ(plane.data()[whole], of_padded.data()[whole] & ((1 << bits % 8) - 1))
            << c.name() << " length " << n;
      }
    };
    expect_same(t.codes(c.array), padded.codes(c.array), c.info.code_bits);
    const Plane& aux = t.aux(c.array);
    if (!is_scaled(c)) return expect_same(aux, padded.aux(c.array), c.info.aux_bits);
    ASSERT_TRUE(aux.size == 0 || std::memcmp(aux.data(), padded.aux(c.array).data(), aux.size) == 0)
        << c.name() << n;
  }
  // Encodes and decodes n values with the planes, the source and the target at given distances from alignment.
  void expect_shape(const Case& c, const std::vector<float>& data, std::size_t n, std::size_t codes_shift,
                    std::size_t aux_shift, std::size_t source_shift) const {
    const std::size_t padded_size = (n + 127) / 128 * 128 + 128;
    std::vector<float> with_zeros(padded_size);
    std::copy_n(data.begin(), n, with_zeros.begin());
    Tensor padded = tensor(c, padded_size);
    padded.encode(engine, c.array, with_zeros);

    Plane source(4 * n, source_shift), target(4 * n, source_shift);
    if (n > 0) std::memcpy(source.data(), data.data(), 4 * n);
    Tensor t = tensor(c, n, codes_shift, aux_shift);
    CHECK_OK(scruple_encode(engine, &t.row, c.array, reinterpret_cast<const float*>(source.data())));
    CHECK_OK(scruple_decode(engine, &t.row, c.array, reinterpret_cast<float*>(target.data())));
    ASSERT_TRUE(t.intact() && target.intact() && source.intact()) << c.name() << " length " << n;
    expect_same_as_padded(c, t, padded, n);
    const std::vector<float> expected = padded.decode(engine, c.array);
    ASSERT_TRUE(n == 0 || std::memcmp(target.data(), expected.data(), 4 * n) == 0)
        << c.name() << " length " << n;
  }
};

TEST_F(Shapes, every_short_length_equals_the_same_values_padded_with_zeros) {
  for (const Case& c : cases) {
    const std::size_t most = std::max<std::size_t>(2 * c.group() + 1, 67);
    const std::vector<float> data = ordinary(c, most, 23);
    for (std::size_t n = 0; n <= most && !HasFatalFailure(); ++n)
      expect_shape(c, data, n, n % 4, n / 4 % 4, n / 16 % 4);
  }
}

TEST_F(Shapes, tile_and_chunk_edges_leave_no_trace) {
  for (const Case& c : cases) {
    const std::vector<float> data = ordinary(c, 65536 + 1100, 29);
    for (const std::size_t edge :
         {std::size_t{1024}, std::size_t{2048}, std::size_t{65536}, std::size_t{66560}})
      for (const std::size_t n : {edge - 1, edge, edge + 1}) {
        if (HasFatalFailure()) return;
        expect_shape(c, data, n, n % 3, n % 2, 0);
      }
  }
}

TEST_F(Shapes, every_alignment_gives_the_same_bytes_and_writes_nothing_beside_them) {
  for (const Case& c : cases) {
    const std::vector<float> data = ordinary(c, 1100, 31);
    for (const std::size_t n : {std::size_t{1}, std::size_t{77}, std::size_t{1061}})
      for (std::size_t shifts = 0; shifts < 64 && !HasFatalFailure(); ++shifts)
        expect_shape(c, data, n, shifts % 4, shifts / 4 % 4, shifts / 16);
  }
}

// ---- Values of 16 bits ----

// As torch casts: to nearest, ties to even, infinite beyond the largest; every NaN is one.
std::uint16_t cast(const std::string& to, float x) {
  if (std::isnan(x)) return to == "bf16" ? 0x7fc0 : 0x7e00;
  return to == "bf16" ? scruple::Bf16::nearest(x) : scruple::Fp16::ieee(x);
}

TEST_F(Shapes, decoding_as_another_type_rounds_what_is_decoded) {
  for (const Case& c : cases) {
    std::vector<float> values = ordinary(c, 66000, 41);
    for (std::size_t i = 0; i < values.size(); i += 3)
      values[i] *= std::ldexp(1.0f, static_cast<int>(i % 40) - 20);
    values[64] = 7e4f;  // more than fp16 has
    if (!is_moment(c)) values[700] = NAN, values[1500] = INFINITY;
    for (const std::size_t n :
         {std::size_t{0}, std::size_t{1}, std::size_t{77}, std::size_t{1061}, values.size()})
      for (const std::size_t shift : {0, 2, 3}) {
        Tensor t = tensor(c, n, shift);
        t.encode(engine, c.array, {values.begin(), values.begin() + static_cast<std::ptrdiff_t>(n)});
        const std::vector<float> wide = t.decode(engine, c.array);
        for (const char* to : {"fp32", "bf16", "fp16"}) {
          const std::size_t each = std::string(to) == "fp32" ? 4 : 2;
          Plane got(each * n, shift);
          CHECK_OK(scruple_decode_as(engine, &t.row, c.array, scruple_format_find(to), got.data()));
          ASSERT_TRUE(got.intact()) << c.name() << " as " << to;
          if (each == 4) {
            ASSERT_TRUE(n == 0 || std::memcmp(got.data(), wide.data(), 4 * n) == 0) << c.name();
            continue;
          }
          for (std::size_t i = 0; i < n; ++i) {
            std::uint16_t half = 0;
            std::memcpy(&half, got.data() + 2 * i, 2);
            ASSERT_EQ(half, cast(to, wide[i])) << c.name() << " as " << to << ": " << wide[i] << " at " << i;
          }
        }
      }
  }
}

// ---- NaN and infinity ---------------------------------------------------------------------------
const float kNotFinite[] = {NAN, -NAN, float_from(0x7f800001u), float_from(0xffffffffu), INFINITY, -INFINITY};

TEST_F(Formats, a_value_that_is_not_finite_stays_visible_but_in_a_group_of_moments) {
  for (const Case& c : cases)
    for (const float bad : kNotFinite) {
      if ((c.nonneg() && bad < 0) || (is_moment(c) && is_scaled(c))) continue;
      const std::size_t n = 3 * c.group() + 5, where = c.group() + c.group() / 2;
      std::vector<float> values = ordinary(c, n, 37);
      const std::vector<float> clean = round_trip(c, values);
      values[where] = bad;
      Tensor t = tensor(c, n), again = tensor(c, n);
      t.encode(engine, c.array, values);
      again.encode(engine, c.array, values);
      EXPECT_TRUE(same_bytes(all_planes(t), all_planes(again))) << c.name();
      const std::vector<float> out = t.decode(engine, c.array);
      for (std::size_t i = 0; i < n; ++i) {
        const bool same_group = i / c.group() == where / c.group();
        if (!same_group) {
          ASSERT_EQ(bits(out[i]), bits(clean[i])) << c.name() << ": " << bad << " reached another group";
        } else if (!is_scaled(c)) {
          ASSERT_EQ(bits(out[i]), bits(std::isnan(bad) ? float_from(0x7fc00000u) : bad)) << c.name();
        } else {
          ASSERT_TRUE(std::isnan(out[i])) << c.name() << ": " << bad << " became " << out[i] << " at " << i;
        }
        // Processors disagree about the bits of a NaN; ours has one pattern.
        ASSERT_TRUE(!std::isnan(out[i]) || bits(out[i]) == 0x7fc00000u) << c.name() << ": " << bits(out[i]);
      }
    }
}

TEST_F(Formats, a_moment_that_is_not_finite_is_stored_as_zero_in_its_group) {
  for (const Case& c : cases) {
    if (!is_moment(c) || !is_scaled(c)) continue;
    for (const float bad : kNotFinite)
      for (const std::size_t where : {std::size_t{0}, c.group() + 7, 3 * c.group() + 4}) {
        std::vector<float> values = ordinary(c, 3 * c.group() + 5, 37);
        Tensor want = tensor(c, values.size()), got = tensor(c, values.size());
        values[where] = 0;
        want.encode(engine, c.array, values);
        values[where] = bad;
        got.encode(engine, c.array, values);
        EXPECT_TRUE(same_bytes(all_planes(want), all_planes(got))) << c.name() << ": " << bad;
      }
  }
}

}  // namespace
