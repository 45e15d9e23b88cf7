// Byte-pair encoding (Sennrich et al., "Neural Machine Translation of Rare Words with Subword Units", 1508.07909):
// a word begins as single symbols, and the pair of neighbours that was learnt first is joined, until no neighbours
// are a pair. Symbols are bytes (GPT-2, Llama 3, Qwen) or characters (SentencePiece's, as in Llama 2).
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace scruple::train {

using Token = std::uint32_t;

class Bpe {
 public:
  struct Pair {
    std::string left, right;
  };
  struct Settings {
    bool of_bytes = true;
    bool whole_words = false;  // a word that is a token is that token, whatever pairs would make of it
    bool byte_fallback =
        false;  // a character that is no token becomes the tokens "<0x00>" to "<0xFF>" of its bytes
    bool fuse_unknown = false;     // neighbours that are no tokens become one unknown token
    std::optional<Token> unknown;  // none: what is no token disappears
  };
  // `pairs`: the first was learnt first. Throws std::runtime_error where a pair's parts or their union is no token.
  Bpe(std::unordered_map<std::string, Token> vocabulary, const std::vector<Pair>& pairs, Settings settings);

  const std::unordered_map<std::string, Token>& vocabulary() const { return vocabulary_; }
  // Appends the tokens of a word, which must be valid UTF-8 unless symbols are bytes. Words are remembered: not for
  // two threads at once.
  void encode(std::string_view word, std::vector<Token>& out);

 private:
  struct Union {
    std::uint32_t rank;
    Token token;
  };
  struct Symbol {
    Token token;
    int before, after;  // neighbours; -1: none
  };
  const Union* find(Token left, Token right) const;
  void add_symbols(std::string_view word);
  void add_symbol(Token token);
  void join_few();
  void join_many();

  std::unordered_map<std::string, Token> vocabulary_;
  std::unordered_map<std::uint64_t, Union> unions_;
  Settings settings_;
  std::array<std::optional<Token>, 256> of_byte_;
  std::vector<Symbol> symbols_;  // of the word at hand
  std::unordered_map<std::string, std::vector<Token>> remembered_;
};

}  // namespace scruple::train
