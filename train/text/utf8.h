// Text as UTF-8: its characters, and what becomes of bytes that are none.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace scruple::train {

inline constexpr std::string_view kSpaces = " \t\n\r\v\f";  // of ASCII

// Of the character that begins with this byte, in valid text.
inline std::size_t character_length(char first) {
  const auto byte = static_cast<unsigned char>(first);
  return byte < 0x80 ? 1 : byte < 0xE0 ? 2 : byte < 0xF0 ? 3 : 4;
}

inline bool begins_character(char c) { return (static_cast<unsigned char>(c) & 0xC0u) != 0x80u; }
// The one that begins at `at`, in valid text.
char32_t character_at(std::string_view text, std::size_t at = 0);

// The text with U+FFFD for what is no UTF-8, one for each longest beginning of a character (Unicode 15, 3.9,
// "substitution of maximal subparts"), as Python and browsers do it. `replaced`: how many.
std::string valid_utf8(std::string_view text, std::int64_t& replaced);

}  // namespace scruple::train
