// Files of tokens, as llm.c writes them (a header of 256 numbers, then 16-bit tokens, or 32-bit ones where the
// vocabulary is larger) and as nanoGPT does (16-bit tokens and nothing else).
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "train/bpe.h"

namespace scruple::train {

enum class TokenFile { llm_c, nanogpt };

// `vocabulary`: how many there are to choose from; decides between 16 and 32 bits. Throws std::runtime_error.
void write_tokens(const std::string& path, TokenFile form, const std::vector<Token>& tokens,
                  std::int64_t vocabulary);
// Either form: a header tells. Throws where the file is cut or of another version.
std::vector<Token> read_tokens(const std::string& path);

}  // namespace scruple::train
