#include "io/crc32.h"

#include <array>
#include <cstring>

#if defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#define SCRUPLE_CRC32_INSTRUCTION
#endif

namespace scruple::io {
namespace {

constexpr std::uint32_t kPolynomial = 0xedb88320u;
constexpr std::size_t kSlices = 16;

using Tables = std::array<std::array<std::uint32_t, 256>, kSlices>;

// tables[k][b]: what the byte b does to a CRC that k more bytes follow.
constexpr Tables make_tables() {
  Tables tables{};
  for (std::uint32_t b = 0; b < 256; ++b) {
    std::uint32_t crc = b;
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ ((crc & 1u) != 0 ? kPolynomial : 0u);
    tables[0][b] = crc;
  }
  for (std::size_t k = 1; k < kSlices; ++k)
    for (std::size_t b = 0; b < 256; ++b)
      tables[k][b] = (tables[k - 1][b] >> 8) ^ tables[0][tables[k - 1][b] & 0xffu];
  return tables;
}
constexpr Tables kTables = make_tables();

std::uint32_t four(std::uint32_t word, std::size_t after) {
  return kTables[after + 3][word & 0xffu] ^ kTables[after + 2][word >> 8 & 0xffu] ^
         kTables[after + 1][word >> 16 & 0xffu] ^ kTables[after][word >> 24];
}

#if defined(SCRUPLE_CRC32_INSTRUCTION)
#if defined(__clang__)
#define SCRUPLE_TARGET_CRC __attribute__((target("crc")))
#define SCRUPLE_CRC32_8 __builtin_arm_crc32d
#define SCRUPLE_CRC32_1 __builtin_arm_crc32b
#else
#define SCRUPLE_TARGET_CRC __attribute__((target("+crc")))
#define SCRUPLE_CRC32_8 __builtin_aarch64_crc32x
#define SCRUPLE_CRC32_1 __builtin_aarch64_crc32b
#endif

// Armv8's instruction has this very polynomial (x86's has another).
SCRUPLE_TARGET_CRC std::uint32_t crc32_by_instruction(std::span<const std::byte> bytes,
                                                      std::uint32_t before) {
  std::uint32_t crc = ~before;
  const std::byte* at = bytes.data();
  std::size_t left = bytes.size();
  for (; left >= sizeof(std::uint64_t); left -= sizeof(std::uint64_t), at += sizeof(std::uint64_t)) {
    std::uint64_t word = 0;
    std::memcpy(&word, at, sizeof word);
    crc = SCRUPLE_CRC32_8(crc, word);
  }
  for (; left > 0; --left, ++at) crc = SCRUPLE_CRC32_1(crc, std::to_integer<std::uint8_t>(*at));
  return ~crc;
}

bool has_instruction() {
  constexpr unsigned long kCrc32 = 1ul << 7;  // HWCAP_CRC32
  static const bool has = (getauxval(AT_HWCAP) & kCrc32) != 0;
  return has;
}
#endif

}  // namespace

// Sixteen bytes at a time: their table look-ups do not wait for each other.
std::uint32_t crc32_by_tables(std::span<const std::byte> bytes, std::uint32_t before) {
  std::uint32_t crc = ~before;
  const std::byte* at = bytes.data();
  std::size_t left = bytes.size();
  for (; left >= kSlices; left -= kSlices, at += kSlices) {
    std::array<std::uint32_t, 4> words{};
    std::memcpy(words.data(), at, kSlices);
    crc = four(words[0] ^ crc, 12) ^ four(words[1], 8) ^ four(words[2], 4) ^ four(words[3], 0);
  }
  for (; left > 0; --left, ++at)
    crc = (crc >> 8) ^ kTables[0][(crc ^ std::to_integer<std::uint32_t>(*at)) & 0xffu];
  return ~crc;
}

std::uint32_t crc32(std::span<const std::byte> bytes, std::uint32_t before) {
#if defined(SCRUPLE_CRC32_INSTRUCTION)
  if (has_instruction()) return crc32_by_instruction(bytes, before);
#endif
  return crc32_by_tables(bytes, before);
}

std::uint32_t crc32(std::string_view text, std::uint32_t before) {
  return crc32(std::as_bytes(std::span(text)), before);
}

std::string hex(std::uint32_t crc) {
  std::string text(8, '0');
  for (std::size_t i = 0; i < 8; ++i) text[i] = "0123456789abcdef"[crc >> (28 - 4 * i) & 0xfu];
  return text;
}

}  // namespace scruple::io
