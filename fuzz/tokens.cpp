// Fuzzes the readers of token files, which may only throw std::runtime_error. fuzz/run.sh builds and runs it.
#include "train/text/tokens.h"

#include <cstdint>
#include <cstdlib>
#include <stdexcept>
#include <string>
#include <vector>

// Good files to start from, one of each form: SCRUPLE_FUZZ_SEEDS=FOLDER writes them there and ends.
extern "C" int LLVMFuzzerInitialize(int*, char***) {
  using namespace scruple::train;
  const char* const to = std::getenv("SCRUPLE_FUZZ_SEEDS");
  if (to == nullptr) return 0;
  const std::string folder(to);
  for (const std::int64_t vocabulary : {300, 100'000}) {
    const std::string bits = vocabulary == 300 ? "16" : "32";
    write_tokens(folder + "/llm.c" + bits, TokenFile::llm_c, {1, 2, 3}, vocabulary);
    const std::uint8_t flags[] = {2, 1, 3};
    write_tokens(folder + "/scruple" + bits, TokenFile::scruple, {1, 2, 3}, vocabulary, flags);
  }
  write_tokens(folder + "/nanogpt", TokenFile::nanogpt, {1, 2, 3}, 300);
  std::exit(0);
}

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  // As a mapping is: aligned, and nothing behind it.
  const std::vector<std::uint8_t> copy(data, data + size);
  const auto file = std::as_bytes(std::span(copy));
  try {
    const scruple::train::TokenSpan tokens = scruple::train::tokens_in(file, "fuzz.bin");
    const auto flags = scruple::train::flags_in(file);
    std::size_t count = 0, sum = 0;
    std::visit(
        [&](auto list) {
          count = list.size();
          for (const auto token : list) sum += token;
        },
        tokens);
    for (const std::uint8_t flag : flags) sum += flag;
    if ((!flags.empty() && flags.size() != count) || count * 2 > size) std::abort();
    static volatile std::size_t used;
    used = sum;
  } catch (const std::runtime_error& error) {  // refused, with the file and in few words
    const std::string_view words = error.what();
    if (!words.starts_with("fuzz.bin") || words.size() > 1000) std::abort();
  }
  return 0;
}
