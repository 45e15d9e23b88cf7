// What tests of data share: windows as text, ways to cut, lines of JSON, a small tokenizer.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "tests/files.h"
#include "train/text/data.h"

namespace scruple_tests {

using namespace scruple::train;

using Numbers = std::vector<std::int32_t>;

struct Window {
  Numbers tokens, targets, starts;
};

inline Window read(const Windows& windows, std::int64_t start) {
  const Numbers empty(static_cast<std::size_t>(windows.context()), -7);
  Window window{empty, empty, empty};
  windows.read(start, window.tokens.data(), window.targets.data(), window.starts.data());
  Numbers tokens = empty, targets = empty;
  windows.read(start, tokens.data(), targets.data());  // starts are not asked for
  EXPECT_EQ(tokens, window.tokens);
  EXPECT_EQ(targets, window.targets);
  return window;
}

// Letters, and '.' for 0 or a target that does not count.
inline std::string shown(const Numbers& tokens) {
  std::string text;
  for (const std::int32_t token : tokens) text += token <= 0 ? '.' : static_cast<char>(token);
  return text;
}

inline constexpr Token kEnd = '|';

inline Cutting padded(std::int64_t context) { return {.context = context, .layout = Layout::padded}; }
inline Cutting packed(std::int64_t context) { return {.context = context, .layout = Layout::packed}; }
inline Cutting isolated(std::int64_t context) {
  return {.context = context, .layout = Layout::packed, .isolate = true};
}

// Lines of JSON.
inline std::string line(const std::string& text) { return R"({"text": ")" + text + "\"}\n"; }
inline std::string line(const std::string& prompt, const std::string& completion) {
  return R"({"prompt": ")" + prompt + R"(", "completion": ")" + completion + "\"}\n";
}

class DataTest : public Files {
 protected:
  static void expect_refused(const std::string& words, const std::string& path, const Cutting& cutting,
                             const Reading& reading = {}) {
    expect_words(message_of([&] { Data(path, cutting, reading); }), words, path);
  }
  std::string refused_line(const std::string& given) {
    return message_of([&] { Data(put(line("fine") + "\n" + given + "\n", "notes.jsonl"), padded(8)); });
  }
};

// A tokenizer of words that SentencePiece's mark begins, as Llama 2's: "a" and "b" with and without it.
inline Tokenizer marked(bool with_template = false) {
  nlohmann::json json = {
      {"normalizer",
       {{"type", "Sequence"},
        {"normalizers",
         {{{"type", "Prepend"}, {"prepend", "\u2581"}},
          {{"type", "Replace"}, {"pattern", {{"String", " "}}}, {"content", "\u2581"}}}}}},
      {"model",
       {{"type", "BPE"},
        {"unk_token", "?"},
        {"vocab",
         {{"?", 0}, {"\u2581", 1}, {"a", 2}, {"b", 3}, {"\u2581a", 4}, {"\u2581b", 5}, {"\uFFFD", 6}}},
        {"merges", {"\u2581 a", "\u2581 b"}}}},
      {"added_tokens",
       {{{"id", 7}, {"content", "<s>"}, {"special", true}},
        {{"id", 8}, {"content", "</s>"}, {"special", true}}}}};
  if (with_template)
    json["post_processor"] = {{"type", "TemplateProcessing"},
                              {"single",
                               {{{"SpecialToken", {{"id", "<s>"}}}},
                                {{"Sequence", {{"id", "A"}}}},
                                {{"SpecialToken", {{"id", "</s>"}}}}}},
                              {"special_tokens", {{"<s>", {{"ids", {7}}}}, {"</s>", {{"ids", {8}}}}}}};
  return {json.dump(), "tokenizer.json"};
}

}  // namespace scruple_tests
