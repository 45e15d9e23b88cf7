// Fuzzes chat templates and messages: a template, a NUL byte, a line of JSON. Only std::runtime_error may be thrown.
// fuzz/run.sh builds and runs it.
#include "train/text/chat.h"

#include <cstdint>
#include <cstdlib>
#include <stdexcept>

#include "io/utf8.h"
#include "train/text/jsonl.h"

namespace {

using namespace scruple::train;

void check_utf8(std::string_view text) {
  for (std::size_t at = 0; at < text.size();) {
    const auto [length, valid] = scruple::io::first_utf8(text.substr(at));
    if (!valid) std::abort();
    at += length;
  }
}

// Without a cut character, and in few words whatever the template is.
void check_message(const std::runtime_error& error) {
  const std::string_view words = error.what();
  check_utf8(words);
  if (words.empty() || words.size() > 20'000) std::abort();  // raise_exception() may say what it wants
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::string_view input(reinterpret_cast<const char*>(data), size);
  const std::size_t end = std::min(input.find('\0'), size);
  const std::string_view rest = input.substr(std::min(end + 1, size));
  try {
    const ChatTemplate chat(
        {std::string(input.substr(0, end)), "fuzz", {{"eos_token", jinja::Value("</s>")}}, "2026-11-19"});
    Conversation said = with_message(with_message({}, "user", "a"), "assistant", "b");
    JsonLines lines(rest, "fuzz.jsonl");
    if (lines.next())
      if (const auto document = lines.document(); document.chat) said = *document.chat;
    check_utf8(chat.prompt(said, "fuzz"));
  } catch (const std::runtime_error& error) {
    check_message(error);
  }
  return 0;
}
