// UTF-8: how long its characters are, and what becomes of bytes that are none.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace scruple::train {

// Of the character that begins with this byte, in valid text.
inline std::size_t character_length(char first) {
  const auto byte = static_cast<unsigned char>(first);
  return byte < 0x80 ? 1 : byte < 0xE0 ? 2 : byte < 0xF0 ? 3 : 4;
}

// The code point of the character at `at`, in valid text.
inline char32_t character_at(std::string_view text, std::size_t at) {
  const auto byte = [&](std::size_t i) { return static_cast<unsigned char>(text[at + i]); };
  switch (character_length(text[at])) {
    case 1: return byte(0);
    case 2: return (byte(0) & 0x1Fu) << 6 | (byte(1) & 0x3Fu);
    case 3: return (byte(0) & 0x0Fu) << 12 | (byte(1) & 0x3Fu) << 6 | (byte(2) & 0x3Fu);
    default:
      return (byte(0) & 0x07u) << 18 | (byte(1) & 0x3Fu) << 12 | (byte(2) & 0x3Fu) << 6 | (byte(3) & 0x3Fu);
  }
}

void append_character(char32_t point, std::string& out);

// The text with U+FFFD for what is no UTF-8, one for each longest beginning of a character (Unicode 15, 3.9,
// "substitution of maximal subparts"), as Python and browsers do it. `replaced`, where given: how many.
std::string valid_utf8(std::string_view text, std::int64_t* replaced = nullptr);

}  // namespace scruple::train
