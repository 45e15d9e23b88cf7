#include "train/text/utf8.h"

#include <utf8proc.h>

#include "io/utf8.h"

namespace scruple::train {

char32_t character_at(std::string_view text, std::size_t at) {
  utf8proc_int32_t point = 0;
  utf8proc_iterate(reinterpret_cast<const utf8proc_uint8_t*>(text.data()) + at,
                   static_cast<utf8proc_ssize_t>(text.size() - at), &point);
  return static_cast<char32_t>(point);
}

std::string valid_utf8(std::string_view text, std::int64_t& replaced) {
  std::string out;
  out.reserve(text.size());
  replaced = 0;
  std::size_t done = 0;  // copied up to here
  for (std::size_t at = 0; at < text.size();) {
    const io::Utf8 next = io::first_utf8(text.substr(at));
    if (!next.valid) {
      out += text.substr(done, at - done);
      out += "\uFFFD";
      done = at + next.length;
      ++replaced;
    }
    at += next.length;
  }
  return out += text.substr(done);
}

}  // namespace scruple::train
