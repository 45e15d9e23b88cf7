// What is trained on, as tokens: texts, folders of texts, JSON lines and files of tokens, one after another.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <limits>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "io/file.h"
#include "train/text/chat.h"
#include "train/text/tokenizer.h"
#include "train/text/tokens.h"

namespace scruple::train {

// Tokens `begin` to `end`. As targets only those from `counted` on count: all of a text, the completion of a prompt.
struct Document {
  std::int64_t begin, end, counted;
};

// Tokens of a document behind its `counted` that do not count as targets: in a chat, what others say.
struct Gap {
  std::int64_t begin, end;
};

// Calls take(begin, end) for each run of tokens of a document that count as targets, in their order. `gaps`: those of all
// documents, in order (Documents::gaps).
template <class Take>
void each_counted(const Document& document, std::span<const Gap> gaps, Take&& take) {
  const auto ends_before = [](const Gap& gap, std::int64_t place) { return gap.end <= place; };
  std::int64_t at = document.counted;
  for (auto gap = std::lower_bound(gaps.begin(), gaps.end(), at, ends_before);
       gap != gaps.end() && gap->begin < document.end; at = gap++->end)
    if (at < gap->begin) take(at, gap->begin);
  if (at < document.end) take(at, document.end);
}

// The tokens of one source: a file, a folder, standard input. Sources follow each other as if they were one.
struct Stretch {
  std::string path;
  TokenSpan tokens;
  std::int64_t begin;               // of its tokens, among those of all
  std::span<const std::byte> file;  // of tokens, which is mapped
  std::int64_t below = 0;  // copy_tokens() checks that they are: of a large file, which nobody has read whole

  std::int64_t size() const;
};
// Tokens `begin` to `begin + count - 1`, out of as many stretches as they lie in.
void copy_tokens(std::span<const Stretch> stretches, std::int64_t begin, std::int64_t count,
                 std::int32_t* to);

// How what is read becomes tokens.
struct Reading {
  Tokenizer* tokenizer = nullptr;  // none: each byte is a token
  std::optional<Token> end = {};   // comes after each document that does not end in it already
  std::int64_t vocabulary = 256;   // of the model: every token must be below it
  bool bare = false;               // texts without the tokens that the model expects around them
  TrainOn train_on = TrainOn::assistant;
  std::string chat_folder = {};  // whose chat template messages are written by
  std::string chat_date = {};    // what that takes for today; "": it has no date
  std::int64_t limit = std::numeric_limits<std::int64_t>::max();           // bytes of memory
  std::function<void(std::int64_t done, std::int64_t all)> progress = {};  // in bytes read
};

bool is_json_lines(std::string_view path);    // by its name: *.jsonl, *.ndjson
bool is_token_file(const std::string& path);  // *.bin

// Throws where a file is known to be no text: a container (Parquet, zip...) by its first bytes, a *.json that is JSON, and,
// unless its bytes are the tokens, what has a NUL byte among its first, as git tells binary files from text.
void check_is_text(std::string_view content, const std::string& path, bool bytes_are_tokens);

class Documents {
 public:
  static constexpr const char* kStandardInput = "-";
  // A file of more bytes is not read whole before it is needed: its tokens are checked as they are taken, and crc32() is
  // that of a sample.
  static constexpr std::size_t kLarge = std::size_t{1} << 28;

  // Each path: a folder (every *.txt, *.md and file of JSON lines below it, in the order of their paths), JSON lines,
  // *.bin (tokens), "-" or any other file (a text). A text is one document; in a file of tokens what its flags say, or
  // what ends in the end token.
  // Bytes of files and tokens of files stay mapped. Throws std::runtime_error.
  Documents(const std::vector<std::string>& paths, const Reading& reading);
  Documents(const std::string& path, const Reading& reading) : Documents(std::vector{path}, reading) {}
  // None yet; they are added.
  explicit Documents(const Reading& reading);

  // `begins`, `ends`: the text has all of its document from there, or up to there. `number`: of the lines before.
  void add_text(std::string_view text, const std::string& place, bool begins = true, bool ends = true);
  void add_lines(std::string_view content, const std::string& name, std::int64_t number = 0);
  // The tokens that were added, and a byte of flags for each (train/text/tokens.h). None are left.
  void take(std::vector<Token>& tokens, std::vector<std::uint8_t>& flags);

  const std::vector<Stretch>& sources() const { return stretches_; }
  std::int64_t size() const;  // of all tokens
  const std::vector<Document>& all() const { return documents_; }
  const std::vector<Gap>& gaps() const { return gaps_; }  // sorted; none but in chats
  void remove_if(const std::function<bool(const Document&)>& is_gone);
  void split_large();  // finds the documents of large files that have no flags; each is one document before

  bool has_prompts() const { return has_prompts_; }
  std::int64_t empty() const { return empty_; }        // documents without a text: they were left out
  std::int64_t replaced() const { return replaced_; }  // places that were no UTF-8 and became U+FFFD
  std::int64_t memory() const;                         // bytes that are held, without what is mapped
  // Of a source's tokens as they are held, and of where documents and completions begin where there are any.
  std::uint32_t crc32(const Stretch& source) const;
  // Of 256 blocks of 1 MiB, evenly spread over a large file.
  static std::uint32_t crc32_of_sample(const Stretch& source);

 private:
  using Held =
      std::variant<std::vector<std::uint8_t>, std::vector<std::uint16_t>, std::vector<std::uint32_t>>;

  void read_file(const std::string& path);
  void read_chat(const Conversation& chat, const std::string& place);
  void map_tokens(const std::string& path);
  void map_bytes(const std::string& path);
  void find_documents(const Stretch& source);
  void add_flagged(std::int64_t begin, std::span<const std::uint8_t> flags);
  void append(std::string_view text, Tokenizer::Part part, const std::string& place);
  template <class Tokens>
  void append_tokens(const Tokens& tokens, const std::string& place);
  void finish(Document document, const std::string& place);  // its end is here
  void leave_out(std::int64_t begin);                        // all from there on: a document without a text
  void check_limit(std::size_t more, const std::string& place) const;
  void check_fits(std::size_t bytes, const std::string& place) const;
  void show_progress(std::size_t here = 0);  // `here`: bytes of the text that is being read
  std::int64_t held() const;
  std::int64_t at() const { return mapped_ + held(); }  // where the next token stands

  Reading reading_;
  std::vector<io::MappedFile> files_;
  std::int64_t mapped_ = 0;  // tokens
  Held held_;
  std::vector<Stretch> stretches_;
  std::vector<Document> documents_;
  std::vector<Gap> gaps_;
  std::optional<ChatTemplate> chat_template_;  // read with the first chat
  bool has_prompts_ = false;
  std::int64_t empty_ = 0, replaced_ = 0;
  std::int64_t bytes_ = 0, bytes_done_ = 0, bytes_told_ = 0;  // to be read; read; of which progress was shown
};

// By path, so that the order is the same on every file system.
std::vector<std::string> files_below(const std::string& folder);

}  // namespace scruple::train
