// Tokenizers as Hugging Face's tokenizer.json describes them: byte-pair encodings of bytes (GPT-2, Llama 3, Qwen,
// SmolLM) and of characters with byte fallback (Llama 2, Mistral). The same tokens as its library `tokenizers`.
//
//   text -> added tokens cut out -> normalised -> cut into words -> tokens of each word
//
// What is not known here is refused by name. Problems are thrown as std::runtime_error.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "train/text/bpe.h"

namespace scruple::train {

class Tokenizer {
 public:
  // The text of a tokenizer.json; `path` names it in messages.
  Tokenizer(std::string_view json, const std::string& path);
  ~Tokenizer();
  Tokenizer(Tokenizer&&) noexcept;

  // What a text is part of. whole: with the tokens that the model expects around it, such as Llama's
  // <|begin_of_text|>. prompt: with those before it alone. completion: what goes on from a prompt, without the space
  // that some tokenizers put before a text. ending: the same, with the tokens after a text. bare: a text with nothing
  // around it.
  enum class Part { whole, prompt, completion, ending, bare };
  using Progress = std::function<void(std::size_t bytes)>;  // about how many of the text's are done
  struct Added {             // a token that a text names itself, such as <|im_end|>
    std::size_t begin, end;  // bytes of the text
    std::size_t place;       // among the tokens
  };
  // The tokens of `text`, which must be valid UTF-8 (train/text/utf8.h). Not for two threads at once.
  std::vector<Token> encode(std::string_view text, Part part, const Progress& progress = {},
                            std::vector<Added>* added = nullptr);
  // The bytes that these tokens stand for. A token may end within a character. Throws where there is no such token.
  std::string decode(std::span<const Token> tokens) const;

  std::int64_t size() const;  // one more than the last token's number
  bool has(Token token) const;
  std::optional<Token> find(std::string_view name) const;

 private:
  struct Parts;
  std::unique_ptr<Parts> parts_;
};

// The tokenizer of a model's folder, or the file itself.
Tokenizer read_tokenizer(const std::string& path);

}  // namespace scruple::train
