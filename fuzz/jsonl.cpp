// Fuzzes the reader of JSON lines, which may only throw std::runtime_error. fuzz/run.sh builds and runs it.
#include "train/text/jsonl.h"

#include <cstdint>
#include <cstdlib>
#include <stdexcept>

#include "io/utf8.h"

namespace {

void check_utf8(std::string_view text) {
  for (std::size_t at = 0; at < text.size();) {
    const auto [length, valid] = scruple::io::first_utf8(text.substr(at));
    if (!valid) std::abort();
    at += length;
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::string_view input(reinterpret_cast<const char*>(data), size);
  scruple::train::JsonLines lines(input, "fuzz.jsonl");
  while (lines.next()) {
    const std::size_t before = lines.bytes_read();
    if (before > size || lines.line().empty()) std::abort();
    try {
      const auto document = lines.document();
      check_utf8(document.text);
      if (document.prompt) check_utf8(*document.prompt);
    } catch (const std::runtime_error& error) {  // refused, with the place and in few words
      const std::string_view words = error.what();
      if (!words.starts_with(lines.place() + ": ") || words.size() > 1000) std::abort();
    }
  }
  if (lines.bytes_read() != size) std::abort();
  return 0;
}
