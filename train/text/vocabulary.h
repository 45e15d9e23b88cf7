// A model's vocabulary as its folder keeps it: the files of its tokenizer, and the tokens that end a text.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "train/text/chat.h"
#include "train/text/tokenizer.h"

namespace scruple::train {

// What a tokenizer needs, and what transformers keeps beside it.
inline constexpr const char* kTokenizerFiles[] = {"tokenizer.json",
                                                  "tokenizer_config.json",
                                                  "special_tokens_map.json",
                                                  "added_tokens.json",
                                                  "vocab.json",
                                                  "merges.txt",
                                                  "tokenizer.model",
                                                  "chat_template.jinja",
                                                  "generation_config.json"};
// Those of them that are in the folder `from` and not in `to`.
void copy_tokenizer(const std::string& from, const std::string& to);
bool has_tokenizer(const std::string& folder);
// The token after a document: what tokenizer_config.json or special_tokens_map.json calls eos_token, or else the
// eos_token_id of generation_config.json or config.json.
std::optional<Token> end_token(const std::string& folder, const Tokenizer& tokenizer);
// Those that end an answer: that one, and every eos_token_id, of which chat models have several.
std::vector<Token> stop_tokens(const std::string& folder, const Tokenizer& tokenizer);
// The folder's chat template: chat_template.jinja, or "chat_template" of tokenizer_config.json. `date`: what it takes
// for today. Throws where there is none, or one that is not known here.
ChatTemplate chat_template(const std::string& folder, const std::string& date = "");

}  // namespace scruple::train
