// What the trainer makes of conversations, for a comparison with transformers.
// usage: chats FOLDER DATE < LINES
// FOLDER has a tokenizer and a chat template; DATE is what that takes for today, or "". Of each line a line: {"prompt":
// the text up to an answer, "tokens": [...], "assistant": [[begin, end]...], "last": ...}, or {"error": ...}.
#include <cstdio>
#include <exception>
#include <iostream>
#include <iterator>
#include <nlohmann/json.hpp>

#include "train/text/jsonl.h"
#include "train/text/vocabulary.h"

using namespace scruple::train;
using nlohmann::json;

namespace {

json spans_of(const ChatTemplate::Tokens& made) {
  json out = json::array();
  for (const jinja::Span& span : made.counted) out.push_back({span.begin, span.end});
  return out;
}

}  // namespace

int main(int count, char** words) {
  if (count != 3) return 2;
  try {
    Tokenizer tokenizer = read_tokenizer(words[1]);
    const ChatTemplate chat = chat_template(words[1], words[2]);
    const std::string text{std::istreambuf_iterator<char>(std::cin), {}};
    for (JsonLines lines(text, "chats.jsonl"); lines.next();) {
      json out;
      try {
        const Conversation said = lines.document().chat.value();
        const auto made = chat.tokens(said, tokenizer, TrainOn::assistant, lines.place());
        out = {{"prompt", chat.prompt(said, lines.place())},
               {"tokens", made.tokens},
               {"assistant", spans_of(made)},
               {"last", spans_of(chat.tokens(said, tokenizer, TrainOn::last, lines.place()))}};
      } catch (const std::exception& error) {
        out = {{"error", error.what()}};
      }
      std::cout << out.dump() << '\n';
    }
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
  return 0;
}
