// Files of tokens, as llm.c writes them (a header of 256 numbers, then 16-bit tokens, or 32-bit ones where the
// vocabulary is larger), as nanoGPT does (16-bit tokens and nothing else), and our own, which say of each token whether
// it begins a document and whether it counts as a target.
//
// Ours: 256 32-bit numbers, little-endian: 20261119, 1, the count of tokens (its low and its high half), the bytes of a
// token (2 or 4), zeros; then the tokens; then a byte of flags for each.
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

enum class TokenFile { llm_c, nanogpt, scruple };
inline constexpr std::uint8_t kCounts = 1, kBegins = 2;  // flags

// `vocabulary`: how many there are to choose from; decides between 16 and 32 bits. `flags`: of each token, for our own
// form alone. Throws std::runtime_error.
void write_tokens(const std::string& path, TokenFile form, const std::vector<Token>& tokens,
                  std::int64_t vocabulary, std::span<const std::uint8_t> flags = {});
// The tokens within the bytes of a file, which must be mapped. Any form: a header tells. Throws where the file is cut
// or of another version; `path` names it.
TokenSpan tokens_in(std::span<const std::byte> file, const std::string& path);
// The flags, after tokens_in() has found the file to be right; none in other forms than ours.
std::span<const std::uint8_t> flags_in(std::span<const std::byte> file);
std::vector<Token> read_tokens(const std::string& path);

}  // namespace scruple::train
