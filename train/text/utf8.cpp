#include "train/text/utf8.h"

#include "io/utf8.h"

namespace scruple::train {

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
