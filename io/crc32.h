// CRC-32 as zlib, PNG and Ethernet have it (reflected polynomial 0xedb88320): Python's zlib.crc32.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

namespace scruple::io {

// Of the bytes so far (`before`, 0 at first) and these.
std::uint32_t crc32(std::span<const std::byte> bytes, std::uint32_t before = 0);
std::uint32_t crc32(std::string_view text, std::uint32_t before = 0);

// The same by tables alone, as on processors without an instruction for it: for the tests.
std::uint32_t crc32_by_tables(std::span<const std::byte> bytes, std::uint32_t before = 0);

std::string hex(std::uint32_t crc);  // eight digits, small letters

}  // namespace scruple::io
