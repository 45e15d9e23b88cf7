// Stochastic and wide rounding and dither, for every format and role that has them: unbiased, addressed by (seed,
// step, id, array, element) alone, and so independent of threads, views, chunks, shards and alignment.
#include <algorithm>

#include "engine/coins.h"
#include "formats/formats.def"
#include "tests/table.h"

namespace {

using namespace scruple_tests;

struct Stochastic : testing::Test {
  Stochastic() {
    for (const Case& c : all_cases())
      if (c.random()) cases.push_back(c);
    adamw.seed(0x0123456789abcdefu);
  }
  Tensor tensor(const Case& c, std::size_t n, std::size_t shift = 0) const {
    Tensor t(adamw, static_cast<std::int64_t>(n));
    t.use(c.array, c.format, c.rounding, shift, shift);
    t.row.id = 77;
    t.row.step = 5;
    return t;
  }

  std::vector<Case> cases;
  const Engine engine;
  Optimizer adamw;
};

bool is_half_of_a_split(const Case& c) { return c.info.code_bits == 16 && c.info.aux_bits > 0; }

// Values well inside the range: within a group they span a factor of 1,000, which every format resolves,
// below a maximum of 1, which every scale holds exactly.
std::vector<float> inside(const Case& c, std::size_t n, std::uint64_t seed) {
  Random random(seed);
  std::vector<float> values(n);
  for (float& x : values) {
    const double size = std::pow(10.0, -3 * random.uniform());
    x = static_cast<float>(!c.nonneg() && random.next32() % 2 == 0 ? -size : size);
  }
  for (std::size_t i = 0; i < n; i += std::max<std::size_t>(c.group(), 32)) values[i] = 1.0f;
  return values;
}

// ---- Mean and spread ----------------------------------------------------------------------------
// flash8 tosses its coin on the softsign of a value, or on its root, and is unbiased there only: its decoder is curved.
double where_the_coin_falls(const Case& c, double x) {
  if (std::string(c.info.name) != "flash8") return x;
  return c.nonneg() ? std::sqrt(x) : 2 * x / (1 + std::fabs(x));
}

// Sums over draws of the error at each element.
struct Errors {
  explicit Errors(std::size_t n) : sum(n), squares(n) {}
  void add(const Case& c, const std::vector<float>& out, const std::vector<float>& values) {
    for (std::size_t i = 0; i < values.size(); ++i) {
      const double error = where_the_coin_falls(c, out[i]) - where_the_coin_falls(c, values[i]);
      sum[i] += error;
      squares[i] += error * error;
    }
    ++draws;
  }
  // Within 5 standard errors at each element (`gap` bounds the distance of the two neighbours, and so the spread of a
  // coin that was never seen to fall the other way), and of the sum over all of them, plain and towards zero.
  void expect_unbiased(const std::vector<float>& values, const std::vector<double>& gap,
                       const std::string& what) const {
    double total = 0, outward = 0, variance = 0;
    for (std::size_t i = 0; i < values.size(); ++i) {
      const double mean = sum[i] / draws;
      EXPECT_LE(std::fabs(mean), 5 * gap[i] / 2 / std::sqrt(draws))
          << what << ": " << values[i] << " at " << i;
      const double share = gap[i] > 0 ? 1 / gap[i] : 0;
      total += mean * share;
      outward += std::copysign(mean * share, mean * values[i]);
      variance += squares[i] / draws * share * share / draws;
    }
    EXPECT_LE(std::fabs(total), 5 * std::sqrt(variance) + 1e-4) << what << ": all together";
    EXPECT_LE(std::fabs(outward), 5 * std::sqrt(variance) + 1e-4) << what << ": away from zero";
  }

  std::vector<double> sum, squares;
  double draws = 0;
};

// The distance between two 16-bit neighbours of a normal x, at most.
double half_gap(const Case& c, float x) {
  return (std::string(c.info.name).starts_with("bf16") ? 0x1p-7 : 0x1p-10) * std::fabs(x);
}

// The distance between the two numbers that a value may become: at most twice the bound of nearest rounding.
// Of a split's K bits one records the direction.
std::vector<double> gaps(const Case& c, const std::vector<float>& values) {
  const scruple_bound bound = c.bound();
  std::vector<double> gap(values.size());
  for (std::size_t i = 0; i < values.size(); ++i) {
    const std::size_t first = i / c.group() * c.group(), last = std::min(first + c.group(), values.size());
    double largest = 0;
    for (std::size_t j = first; j < last; ++j)
      largest = std::max(largest, std::fabs(static_cast<double>(values[j])));
    gap[i] = 2 * (bound.relative * std::fabs(values[i]) + bound.group * largest + bound.absolute);
    if (std::string(c.info.name) == "flash8") gap[i] = c.nonneg() ? 1.0 / 255 : 1.0 / 127;
    if (is_half_of_a_split(c)) gap[i] = std::ldexp(half_gap(c, values[i]), 1 - c.info.aux_bits);
  }
  return gap;
}

TEST_F(Stochastic, the_mean_over_steps_and_ids_is_the_value) {
  constexpr std::size_t n = 256;
  for (const Case& c : cases) {
    const std::vector<float> values = inside(c, n, 3);
    Tensor t = tensor(c, n);
    Errors errors(n);
    for (int draw = 0; draw < 2048; ++draw) {
      t.row.step = 1 + draw / 2;
      t.row.id = static_cast<std::uint32_t>(draw % 2);
      t.encode(engine, c.array, values);
      errors.add(c, t.decode(engine, c.array), values);
    }
    errors.expect_unbiased(values, gaps(c, values), c.name());
  }
}

// The model computes with the visible half: it, too, is the weight on average, however few extra bits there are.
TEST_F(Stochastic, the_mean_of_the_visible_half_is_the_weight) {
  constexpr std::size_t n = 256;
  for (const Case& c : cases) {
    if (!is_half_of_a_split(c) || c.rounding != SCRUPLE_STOCHASTIC) continue;
    const bool bf16 = std::string(c.info.name).starts_with("bf16");
    const std::vector<float> values = inside(c, n, 5);
    std::vector<double> gap(n);
    for (std::size_t i = 0; i < n; ++i) gap[i] = half_gap(c, values[i]);
    Tensor t = tensor(c, n);
    Errors errors(n);
    std::vector<float> visible(n);
    for (int draw = 0; draw < 2048; ++draw) {
      t.row.step = 1 + draw;
      t.encode(engine, c.array, values);
      for (std::size_t i = 0; i < n; ++i) {
        const auto code = static_cast<std::uint16_t>(bit_string_get(t.codes(c.array).data(), i, 16));
        visible[i] = bf16 ? scruple::Bf16::decode(code) : scruple::Fp16::decode(code);
      }
      errors.add(c, visible, values);
    }
    errors.expect_unbiased(values, gap, c.name() + ", visible half");
  }
}

// What can be stored exactly is never moved.
TEST_F(Stochastic, exact_values_stay) {
  for (const Case& c : cases) {
    if (c.rounding == SCRUPLE_DITHER) continue;
    Tensor t = tensor(c, 512);
    const std::vector<float> values(512, 0.25f);  // in a group of equals each is the maximum, the top level
    for (t.row.step = 1; t.row.step <= 20; ++t.row.step) {
      t.encode(engine, c.array, values);
      for (const float x : t.decode(engine, c.array)) ASSERT_NEAR(x, 0.25, 1e-6) << c.name();
    }
  }
}

// Nor is what was stored once, step after step: rows of an embedding that no batch names. flash8, as published, cannot
// promise it: its curve, walked back and forth in fp32, ends beside a code, and a coin in a million falls between.
TEST_F(Stochastic, codes_at_rest_stay) {
  for (const Case& c : cases) {
    if (c.rounding == SCRUPLE_DITHER || std::string(c.info.name) == "flash8") continue;
    Tensor t = tensor(c, 4096);
    t.row.step = 1;
    t.encode(engine, c.array, inside(c, 4096, 17));
    const std::vector<float> at_rest = t.decode(engine, c.array);
    std::size_t moved = 0;
    for (t.row.step = 2; t.row.step <= 200; ++t.row.step) {
      t.encode(engine, c.array, at_rest);
      const std::vector<float> out = t.decode(engine, c.array);
      for (std::size_t i = 0; i < out.size(); ++i) moved += out[i] == at_rest[i] ? 0 : 1;
    }
    EXPECT_EQ(moved, 0u) << c.name();
  }
}

// The largest value of a group lands on the top level whichever way its coin falls, the first and the last
// included, and however absmax / top rounds: it must not spill into the sign or wrap around.
template <class Codec>
void expect_top_is_safe(bool nonneg, const char* name) {
  Random random(41);
  for (int i = 0; i < 20000; ++i) {
    const float absmax = float_from(bits(1e-4f) + random.next32() % (bits(1e4f) - bits(1e-4f)));
    const auto scale = Codec::scale(absmax);
    const float gain = Codec::gain(absmax, scale), unit = Codec::unit(scale);
    for (const std::uint32_t coin : {0x10000u, 0x80000000u, 0xffff0000u, 0xffffffffu})
      for (const float x : {absmax, -absmax}) {
        if (nonneg && x < 0) continue;
        const std::uint32_t code = Codec::encode(x, gain, coin);
        ASSERT_LT(code, 1u << Codec::bits) << name;
        // flash8's scale is off by 2^-11 after its rounding to fp16, and its square by twice that.
        ASSERT_NEAR(Codec::decode(code, unit) / x, 1, 0x1p-10 + 1.0 / 64)
            << name << " " << x << " coin " << coin;
        ASSERT_LE(std::fabs(Codec::decode(code, unit)), absmax * (1 + 0x1p-9)) << name << " " << x;
      }
  }
}

TEST_F(Stochastic, the_largest_value_never_leaves_the_codes) {
  expect_top_is_safe<scruple::Companded8>(false, "companded8");
  expect_top_is_safe<scruple::Companded8Nonneg>(true, "companded8, non-negative");
  expect_top_is_safe<scruple::GroupLinear<8>>(false, "int8");
  expect_top_is_safe<scruple::GroupLinear<9>>(false, "int9");
  expect_top_is_safe<scruple::GroupLinear<10>>(false, "int10");
  expect_top_is_safe<scruple::GroupLinear<11>>(false, "int11");
  expect_top_is_safe<scruple::GroupLinear<12>>(false, "int12");
  expect_top_is_safe<scruple::Linear8Nonneg>(true, "linear8, non-negative");
  expect_top_is_safe<scruple::Flash8>(false, "flash8");
  expect_top_is_safe<scruple::Flash8Nonneg>(true, "flash8, non-negative");
  expect_top_is_safe<scruple::Nf4>(false, "nf4");
  expect_top_is_safe<scruple::Log<4>>(true, "log4");
  expect_top_is_safe<scruple::Log<5>>(true, "log5");
}

// Subtractive dither: the error is uniform over one unit, whatever the value.
TEST_F(Stochastic, dither_is_uniform_over_one_unit) {
  constexpr std::size_t n = 64 * 64;
  std::size_t seen = 0;
  for (const Case& c : cases) {
    if (c.rounding != SCRUPLE_DITHER) continue;
    ++seen;
    Random random(7);
    std::vector<float> values = random.normals(n);
    for (std::size_t i = 0; i < n; i += 64) values[i] = i % 128 == 0 ? 4.0f : -4.0f;  // absmax of either sign
    values[1] = values[2] = 0.0f;
    const double unit = 4.0 / 127;
    Tensor t = tensor(c, n);
    double sum = 0, squares = 0, count = 0, with_value = 0, value_squares = 0;
    for (int draw = 0; draw < 100; ++draw) {
      t.row.step = 1 + draw;
      t.encode(engine, c.array, values);
      const std::vector<float> out = t.decode(engine, c.array);
      for (std::size_t i = 0; i < n; ++i) {
        const double error = (static_cast<double>(out[i]) - std::clamp(values[i], -4.0f, 4.0f)) / unit;
        if (std::fabs(values[i]) > 4.0f) continue;
        ASSERT_LE(std::fabs(error), 0.5 + 1e-4) << c.name() << ": " << values[i] << " became " << out[i];
        sum += error;
        squares += error * error;
        with_value += error * values[i];
        value_squares += static_cast<double>(values[i]) * values[i];
        ++count;
      }
    }
    const double deviation = std::sqrt(1.0 / 12);
    EXPECT_LE(std::fabs(sum / count), 5 * deviation / std::sqrt(count)) << c.name();
    EXPECT_NEAR(squares / count, 1.0 / 12, 5 * std::sqrt(1.0 / 180 / count))
        << c.name();  // variance of a square
    EXPECT_LE(std::fabs(with_value), 5 * deviation * std::sqrt(value_squares))
        << c.name() << ": depends on the value";
  }
  EXPECT_GT(seen, 0u) << "no format dithers any more";
}

// A dithered accumulator is written by folds and read between them: each fold has random numbers of its own.
TEST_F(Stochastic, dither_survives_folding) {
  constexpr std::size_t n = 4096;
  Random random(9);
  Tensor t(adamw, n);
  t.use(SCRUPLE_GRADIENT, "int8", SCRUPLE_DITHER);
  std::vector<double> exact(n);
  for (int folds = 1; folds <= 8; ++folds) {
    const std::vector<float> gradient = random.normals(n);
    fold(engine, t, gradient);
    for (std::size_t i = 0; i < n; ++i) exact[i] += gradient[i];
    const std::vector<float> out = t.decode(engine, SCRUPLE_GRADIENT);
    double mean = 0;
    for (std::size_t i = 0; i < n; ++i) {
      // One rounding a fold, each of at most half a unit of a group whose maximum stays under 20.
      ASSERT_LE(std::fabs(out[i] - exact[i]), folds * 0.5 * 20 / 127);
      mean += (out[i] - exact[i]) / n;
    }
    EXPECT_LE(std::fabs(mean), 5 * folds * 20 / 127.0 / std::sqrt(12.0 * n));
  }
}

// ---- Which coins --------------------------------------------------------------------------------
// bf16 adds the upper half of the coin to the pattern and drops the lower half: the engine's coins are those of
// engine/coins.h, at the element's place in the whole tensor.
TEST_F(Stochastic, element_e_uses_its_place_on_the_lattice) {
  const std::vector<float> values = Random(11).normals(3000);
  for (const std::int64_t offset : {std::int64_t{0}, std::int64_t{13}, (std::int64_t{1} << 40) + 3})
    for (const int array : {SCRUPLE_WEIGHT + 0, SCRUPLE_SLOT + 0, SCRUPLE_SLOT + 1, SCRUPLE_GRADIENT + 0}) {
      Tensor t(adamw, 3000);
      t.use(array, "bf16", SCRUPLE_STOCHASTIC);
      t.row.id = 0xdeadbeefu;
      t.row.step = 0xfffffffeLL;
      t.row.offset = offset;
      t.encode(engine, array, values);
      const scruple::Coins coins = scruple::draw_coins(
          {0x0123456789abcdefu, 0xfffffffeu, 0xdeadbeefu, static_cast<std::uint32_t>(array), 0});
      for (std::size_t i = 0; i < values.size(); ++i) {
        const std::uint32_t coin = coins.from(offset + static_cast<std::int64_t>(i)).first;
        ASSERT_EQ(bit_string_get(t.codes(array).data(), i, 16), (bits(values[i]) + (coin >> 16)) >> 16)
            << "element " << i << " of array " << array;
      }
    }
}

// Values half way between two numbers: of two independent draws half agree, at each element over the steps.
TEST_F(Stochastic, seed_id_and_array_each_change_every_coin) {
  constexpr std::size_t n = 8;
  constexpr std::int64_t kSteps = 5000;
  const std::vector<float> values(n, 0x1.01p0f);
  const auto draw = [&](std::uint64_t seed, std::int64_t first, std::uint32_t id, int array,
                        std::int64_t offset) {
    Optimizer optimizer;
    optimizer.seed(seed);
    Tensor t(optimizer, n);
    t.use(array, "bf16", SCRUPLE_STOCHASTIC);
    t.row.id = id;
    t.row.offset = offset;
    std::vector<float> all;
    for (t.row.step = first; t.row.step < first + kSteps; ++t.row.step) {
      t.encode(engine, array, values);
      const std::vector<float> out = t.decode(engine, array);
      all.insert(all.end(), out.begin(), out.end());
    }
    return all;
  };
  const std::vector<float> base = draw(1, 1, 1, 0, 0);
  const std::vector<std::pair<const char*, std::vector<float>>> others = {
      {"seed", draw(2, 1, 1, 0, 0)},
      {"upper half of the seed", draw((std::uint64_t{1} << 32) + 1, 1, 1, 0, 0)},
      {"step", draw(1, 2, 1, 0, 0)},
      {"id", draw(1, 1, 2, 0, 0)},
      {"array", draw(1, 1, 1, 1, 0)},
      {"another array", draw(1, 1, 1, 2, 0)},
      {"gradient array", draw(1, 1, 1, 4, 0)},
      {"element", draw(1, 1, 1, 0, 123457)},
      {"step and id", draw(1, 2, 2, 0, 0)},
  };
  EXPECT_EQ(base, draw(1, 1, 1, 0, 0));
  for (const auto& [what, other] : others)
    for (std::size_t e = 0; e < n; ++e) {
      double agree = 0;
      for (std::size_t i = e; i < base.size(); i += n) agree += base[i] == other[i] ? 1 : 0;
      EXPECT_NEAR(agree / kSteps, 0.5, 5 * 0.5 / std::sqrt(static_cast<double>(kSteps)))
          << what << ", element " << e;
    }
}

TEST_F(Stochastic, every_case_draws_anew_with_each_step) {
  for (const Case& c : cases) {
    if (c.info.code_bits == 32 || (c.rounding == SCRUPLE_WIDE && c.bound().relative == 0))
      continue;  // nothing to round
    Tensor t = tensor(c, 4096), next = tensor(c, 4096), other = tensor(c, 4096);
    const std::vector<float> values = inside(c, 4096, 13);
    next.row.step = t.row.step + 1;
    other.row.id = t.row.id + 1;
    for (Tensor* each : {&t, &next, &other}) each->encode(engine, c.array, values);
    EXPECT_FALSE(same_bytes(t.bytes(c.array), next.bytes(c.array))) << c.name();
    EXPECT_FALSE(same_bytes(t.bytes(c.array), other.bytes(c.array))) << c.name();
  }
}

// ---- Where the work runs ------------------------------------------------------------------------
TEST_F(Stochastic, threads_views_and_alignment_change_no_bit) {
  constexpr std::size_t n = 3 * 65536 + 1234;
  const Engine two(2), seven(7);
  for (const Case& c : cases) {
    const std::vector<float> values = inside(c, n, 17);
    Tensor whole = tensor(c, n), by_two = tensor(c, n), by_seven = tensor(c, n, 1), by_views = tensor(c, n);
    whole.encode(engine, c.array, values);
    by_two.encode(two, c.array, values);
    by_seven.encode(seven, c.array, values);
    // Views of uneven sizes, each beginning in the middle of a tile.
    for_views(by_views.row, [&](const scruple_tensor& view) {
      CHECK_OK(scruple_encode(engine, &view, c.array, values.data() + (view.offset - by_views.row.offset)));
    });
    const Bytes expected = whole.bytes(c.array);
    EXPECT_TRUE(same_bytes(by_two.bytes(c.array), expected)) << c.name() << ": two threads";
    EXPECT_TRUE(same_bytes(by_seven.bytes(c.array), expected)) << c.name() << ": seven threads, unaligned";
    EXPECT_TRUE(same_bytes(by_views.bytes(c.array), expected)) << c.name() << ": views";
    EXPECT_TRUE(whole.intact() && by_two.intact() && by_seven.intact() && by_views.intact()) << c.name();
    const std::vector<float> decoded = whole.decode(engine, c.array);
    EXPECT_TRUE(same_bytes(by_seven.decode(seven, c.array), decoded)) << c.name();
  }
}

// A shard with its offset draws what the whole tensor draws there. Formats without groups may be cut anywhere.
TEST_F(Stochastic, a_shard_equals_its_slice_of_the_whole) {
  constexpr std::size_t n = 5000;
  for (const Case& c : cases) {
    const std::vector<float> values = inside(c, n, 23);
    Tensor whole = tensor(c, n);
    whole.row.offset = 1000003;
    whole.encode(engine, c.array, values);
    const std::vector<float> expected = whole.decode(engine, c.array);
    for (const std::size_t cut : {1u, 3u, 8u, 13u, 100u, 1027u}) {
      const std::size_t first = cut * c.group();
      if (first >= n) continue;
      const std::vector<float> part(values.begin() + static_cast<std::ptrdiff_t>(first), values.end());
      Tensor shard = tensor(c, n - first);
      shard.row.offset = whole.row.offset + static_cast<std::int64_t>(first);
      shard.encode(engine, c.array, part);
      const std::vector<float> out = shard.decode(engine, c.array);
      for (std::size_t i = 0; i < out.size(); ++i) {
        ASSERT_EQ(bits(out[i]), bits(expected[first + i])) << c.name() << " cut at " << first;
        ASSERT_EQ(bit_string_get(shard.codes(c.array).data(), i, c.info.code_bits),
                  bit_string_get(whole.codes(c.array).data(), first + i, c.info.code_bits))
            << c.name() << " cut at " << first;
      }
    }
  }
}

// The same through the step, where the weight and both moments draw: whole, by threads, and in views.
TEST_F(Stochastic, steps_do_not_depend_on_threads_or_views) {
  constexpr std::size_t n = 2 * 65536 + 700;
  const Engine seven(7);
  const std::vector<float> weights = Random(29).normals(n), gradient = Random(31).normals(n, 1e-3);
  const auto fresh = [&] {
    Tensor t(adamw, static_cast<std::int64_t>(n));
    t.use(SCRUPLE_WEIGHT, "bf16+8", SCRUPLE_STOCHASTIC);
    t.use(SCRUPLE_SLOT, "companded8", SCRUPLE_STOCHASTIC);
    t.use(SCRUPLE_SLOT + 1, "log4", SCRUPLE_STOCHASTIC);
    t.use(SCRUPLE_GRADIENT, "bf16");
    t.encode(engine, SCRUPLE_WEIGHT, weights);
    t.encode(engine, SCRUPLE_GRADIENT, gradient);
    return t;
  };
  Tensor whole = fresh(), by_seven = fresh(), by_views = fresh();
  for (int i = 0; i < 3; ++i) {
    step(engine, whole);
    step(seven, by_seven);
    for_views(by_views.row,
              [&](const scruple_tensor& view) { CHECK_OK(scruple_step(engine, &view, 1, nullptr)); });
    for (Tensor* each : {&whole, &by_seven, &by_views}) ++each->row.step;
  }
  EXPECT_TRUE(same_bytes(all_planes(by_seven), all_planes(whole)));
  EXPECT_TRUE(same_bytes(all_planes(by_views), all_planes(whole)));
}

}  // namespace
