#include "train/utf8.h"

namespace scruple::train {
namespace {

// How many bytes at the front are one character; where they are none, how many begin one, and `valid` is false.
std::size_t measure(std::string_view text, bool& valid) {
  const auto byte = [&](std::size_t i) { return static_cast<unsigned char>(text[i]); };
  valid = true;
  const unsigned first = byte(0);
  if (first < 0x80) return 1;
  const std::size_t length = first >= 0xC2 && first < 0xE0   ? 2
                             : first >= 0xE0 && first < 0xF0 ? 3
                             : first >= 0xF0 && first < 0xF5 ? 4
                                                             : 0;
  for (std::size_t i = 1; i < length; ++i) {
    // The second byte's range is narrower where a character would be overlong, a surrogate, or past U+10FFFF.
    const unsigned low = i > 1 ? 0x80u : first == 0xE0 ? 0xA0u : first == 0xF0 ? 0x90u : 0x80u;
    const unsigned high = i > 1 ? 0xBFu : first == 0xED ? 0x9Fu : first == 0xF4 ? 0x8Fu : 0xBFu;
    if (i >= text.size() || byte(i) < low || byte(i) > high) {
      valid = false;
      return i;
    }
  }
  valid = length > 0;
  return valid ? length : 1;
}

}  // namespace

void append_character(char32_t point, std::string& out) {
  const auto put = [&](char32_t bits) { out += static_cast<char>(bits); };
  const auto follow = [&](int shift) { put(0x80 | (point >> shift & 0x3F)); };
  if (point < 0x80) {
    put(point);
  } else if (point < 0x800) {
    put(0xC0 | point >> 6), follow(0);
  } else if (point < 0x10000) {
    put(0xE0 | point >> 12), follow(6), follow(0);
  } else {
    put(0xF0 | point >> 18), follow(12), follow(6), follow(0);
  }
}

std::string valid_utf8(std::string_view text, std::int64_t* replaced) {
  std::string out;
  out.reserve(text.size());
  std::int64_t count = 0;
  for (std::size_t at = 0; at < text.size();) {
    std::size_t end = at;  // of a run of valid characters
    bool valid = true;
    std::size_t length = 0;
    while (end < text.size() && (length = measure(text.substr(end), valid), valid)) end += length;
    out += text.substr(at, end - at);
    at = end;
    if (at >= text.size()) break;
    append_character(U'\uFFFD', out);
    at += length;
    ++count;
  }
  if (replaced != nullptr) *replaced = count;
  return out;
}

}  // namespace scruple::train
