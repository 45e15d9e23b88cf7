// Philox4x32-10 against the known answers of its authors (Random123, kat_vectors).
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

}  // namespace
