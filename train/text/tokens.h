// Files of tokens, as llm.c writes them (a header of 256 numbers, then 16-bit tokens, or 32-bit ones where the
// vocabulary is larger) and as nanoGPT does (16-bit tokens and nothing else).
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <variant>
#include <vector>

#include "train/text/bpe.h"

namespace scruple::train {

// Tokens in as many bits as their vocabulary takes.
using TokenSpan = std::variant<std::span<const std::uint8_t>, std::span<const std::uint16_t>,
                               std::span<const std::uint32_t>>;

enum class TokenFile { llm_c, nanogpt };

// `vocabulary`: how many there are to choose from; decides between 16 and 32 bits. Throws std::runtime_error.
void write_tokens(const std::string& path, TokenFile form, const std::vector<Token>& tokens,
                  std::int64_t vocabulary);
// The tokens within the bytes of a file, which must be mapped. Either form: a header tells. Throws where the file is cut
// or of another version; `path` names it.
TokenSpan tokens_in(std::span<const std::byte> file, const std::string& path);
std::vector<Token> read_tokens(const std::string& path);

}  // namespace scruple::train
