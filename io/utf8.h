// UTF-8, one sequence at a time (Unicode 15, table 3-7).
#pragma once

#include <cstddef>
#include <string_view>

namespace scruple::io {

struct Utf8 {
  std::size_t length;
  bool
      valid;  // else `length` bytes begin a sequence and nothing completes it; at least 1 where there is text
};

// What `text` begins with.
inline Utf8 first_utf8(std::string_view text) {
  if (text.empty()) return {0, false};
  const auto byte = [&](std::size_t i) { return static_cast<unsigned char>(text[i]); };
  const unsigned lead = byte(0);
  if (lead < 0x80) return {1, true};
  if (lead < 0xc2 || lead > 0xf4) return {1, false};
  const std::size_t length = lead < 0xe0 ? 2 : lead < 0xf0 ? 3 : 4;
  // The second byte has a narrower range where a sequence would be overlong, a surrogate, or past U+10FFFF.
  unsigned low = lead == 0xe0 ? 0xa0 : lead == 0xf0 ? 0x90 : 0x80;
  unsigned high = lead == 0xed ? 0x9f : lead == 0xf4 ? 0x8f : 0xbf;
  for (std::size_t i = 1; i < length; ++i, low = 0x80, high = 0xbf)
    if (i >= text.size() || byte(i) < low || byte(i) > high) return {i, false};
  return {length, true};
}

}  // namespace scruple::io
