// Philox4x32-10 against the known answers of its authors (Random123, kat_vectors), and how random bits are
// addressed.
#include "engine/philox.h"

#include "tests/support.h"

namespace {

using scruple::PhiloxBlock;

void expect_block(PhiloxBlock counter, std::uint32_t key0, std::uint32_t key1, PhiloxBlock expected) {
  const PhiloxBlock got = scruple::philox(counter, {{key0, key1}});
  for (int i = 0; i < 4; ++i) EXPECT_EQ(got.x[i], expected.x[i]) << "word " << i;
}

TEST(Philox, known_answers) {
  expect_block({{0, 0, 0, 0}}, 0, 0, {{0x6627e8d5u, 0xe169c58du, 0xbc57ac4cu, 0x9b00dbd8u}});
  expect_block({{~0u, ~0u, ~0u, ~0u}}, ~0u, ~0u, {{0x408f276du, 0x41c83b0eu, 0xa20bc7c6u, 0x6d5451fdu}});
  expect_block({{0x243f6a88u, 0x85a308d3u, 0x13198a2eu, 0x03707344u}}, 0xa4093822u, 0x299f31d0u,
               {{0xd16cfe09u, 0x94fdccebu, 0x5001e420u, 0x24126ea1u}});
}

TEST(Philox, counters_differ_in_every_field) {
  const scruple::RandomKey base{7, 5, 3, 1, 2};
  std::vector<std::array<std::uint32_t, 4>> seen;
  const auto add = [&](const scruple::RandomKey& key, std::uint64_t block) {
    const PhiloxBlock c = scruple::random_counter(key, block);
    const std::array<std::uint32_t, 4> words{c.x[0], c.x[1], c.x[2], c.x[3]};
    for (const auto& other : seen) EXPECT_NE(words, other);
    seen.push_back(words);
  };
  add(base, 9);
  add(base, 10);
  add(base, (std::uint64_t{1} << 32) + 9);  // a tensor of more than 2^35 elements
  add(base, (std::uint64_t{1} << 47) + 9);  // the last block of the largest tensor, 2^50 elements
  for (std::uint32_t array = 2; array < 5; ++array) add({7, 5, 3, array, 2}, 9);
  for (std::uint32_t folds = 3; folds < 40; ++folds) add({7, 5, 3, 1, folds}, 9);
  for (std::uint32_t step : {0u, 6u, 0x80000000u, ~0u}) add({7, step, 3, 1, 2}, 9);
  for (std::uint32_t id : {0u, 4u, 0x80000000u, ~0u}) add({7, 5, id, 1, 2}, 9);
}

}  // namespace
