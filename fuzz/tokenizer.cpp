// Fuzzes tokenizers: a tokenizer.json, and behind its first zero byte a text that becomes tokens and text again. They may
// only throw std::runtime_error. fuzz/run.sh builds and runs it.
#include "train/text/tokenizer.h"

#include <cstdint>
#include <cstdlib>
#include <stdexcept>

#include "train/text/utf8.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using scruple::train::Tokenizer;
  const std::string_view input(reinterpret_cast<const char*>(data), size);
  const std::size_t end = std::min(input.find('\0'), size);
  std::int64_t replaced = 0;
  const std::string text = scruple::train::valid_utf8(input.substr(std::min(end + 1, size)), replaced);
  try {
    Tokenizer tokenizer(input.substr(0, end), "tokenizer.json");
    for (const auto part : {Tokenizer::Part::whole, Tokenizer::Part::completion}) {
      const auto tokens = tokenizer.encode(text, part);
      for (const auto token : tokens)
        if (token >= tokenizer.size()) std::abort();
      const std::string back = tokenizer.decode(tokens);
      if (tokenizer.encode(text, part) != tokens) std::abort();  // what was remembered changes nothing
    }
  } catch (const std::runtime_error&) {  // refused, with the reason
  }
  return 0;
}
