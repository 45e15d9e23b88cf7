// Files of tokens, as llm.c writes them (a header of 256 numbers, then 16-bit tokens, or 32-bit ones where the
// vocabulary is larger), as nanoGPT does (16-bit tokens and nothing else), and our own, which say of each token whether
// it begins a document and whether it counts as a target.
//
// Ours: 256 32-bit numbers, little-endian: 20261119, 1 or 2, the count of tokens (its low and its high half), the bytes
// of a token (2 or 4), zeros; then the tokens; then, of version 1, a byte of flags for each.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
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

// Writes tokens as they come, to one file or to shards: out-00000.bin, out-00001.bin ... A file has its name when it is
// complete; where finish() was not called the shards that had one are removed. Throws std::runtime_error.
class TokenWriter {
 public:
  struct Target {
    std::string path;
    // None: our own form in a file with prompts, else llm.c's, or ours without flags where that cannot count so far.
    std::optional<TokenFile> form;
    std::int64_t vocabulary = 0;    // how many there are to choose from; decides between 16 and 32 bits
    std::int64_t shard_tokens = 0;  // at most so many in a file; 0: all in one
    bool has_flags = true;          // what is written may have prompts
  };
  explicit TokenWriter(Target target);
  ~TokenWriter();

  // Whole documents, or a part of a long one. A shard ends before the document that it has no room for; one that is
  // itself longer than a shard is cut. `flags`: a byte for each token. `has_prompts`: they are needed even where every
  // token counts, as of chats, whose documents do not end in the end token.
  void write(std::span<const Token> tokens, std::span<const std::uint8_t> flags, bool has_prompts = false);
  void finish();
  const std::vector<std::string>& paths() const { return paths_; }  // of the files that are complete

 private:
  struct Shard;
  void append(std::span<const Token> tokens, std::span<const std::uint8_t> flags, bool has_prompts);
  Shard& shard();  // that is being written
  void finish_shard();
  std::string next_path() const;

  Target target_;
  std::unique_ptr<Shard> shard_;
  std::vector<std::string> paths_;
  bool done_ = false;
};

// `vocabulary`: how many there are to choose from. `flags`: of each token, for our own form alone. Throws std::runtime_error.
void write_tokens(const std::string& path, TokenFile form, const std::vector<Token>& tokens,
                  std::int64_t vocabulary, std::span<const std::uint8_t> flags = {});
// The tokens within the bytes of a file, which must be mapped. Any form: a header tells. Throws where the file is cut
// or of another version; `path` names it.
TokenSpan tokens_in(std::span<const std::byte> file, const std::string& path);
// The flags, after tokens_in() has found the file to be right; none in other forms than ours.
std::span<const std::uint8_t> flags_in(std::span<const std::byte> file);
std::vector<Token> read_tokens(const std::string& path);

}  // namespace scruple::train
