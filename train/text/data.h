// What is trained on, cut into windows for training and validation. Which ones a step sees follows from the seed and a
// count alone, so recipes, thread counts, splits into micro-batches and resumed runs all see the same.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "train/text/documents.h"

namespace scruple::train {

// packed: documents one after another, and a window is any `context` tokens of them and the one after.
// padded: a window is a document, cut at the context, or filled up with targets that count for nothing.
enum class Layout { packed, padded };
inline constexpr const char* kLayouts[] = {"packed", "padded"};  // their names

// A target that counts for nothing.
inline constexpr std::int32_t kNoTarget = -1;

class Windows {
 public:
  // Packed bytes. `starts`: where windows may begin; empty: anywhere. Throws where no window fits. `bytes` must outlive
  // this.
  Windows(std::span<const std::uint8_t> bytes, std::int64_t context, std::vector<std::int64_t> starts = {});

  std::int64_t count() const;
  // How many there are that share no token: documents that are padded, or what the text is long enough for.
  std::int64_t apart() const;
  std::int64_t context() const { return context_; }
  Layout layout() const { return layout_; }
  bool isolates() const { return isolates_; }
  // What names window `index` of an endless sequence to read(): packed, each is drawn by chance; padded, every
  // document comes once in each `count()` of them.
  std::int64_t random_start(std::uint64_t seed, std::uint64_t index) const;
  // Window `index` of `of` that are spread evenly.
  std::int64_t even_start(std::int64_t index, std::int64_t of) const;
  // `context` of each. A target that does not count is kNoTarget. `starts`, or null: for each token where in the window
  // its document begins, 0 before the window's begin and where documents are not isolated.
  void read(std::int64_t start, std::int32_t* tokens, std::int32_t* targets,
            std::int32_t* starts = nullptr) const;

 private:
  friend class Data;
  Windows() = default;
  std::int64_t start(std::int64_t window) const;
  void read_packed(std::int64_t start, std::int32_t* tokens, std::int32_t* targets,
                   std::int32_t* starts) const;
  void read_padded(const Document& document, std::int32_t* tokens, std::int32_t* targets) const;

  TokenSpan tokens_;
  std::int64_t begin_ = 0, end_ = 0;  // packed: of the tokens that are these windows'
  std::int64_t context_ = 0;
  std::vector<std::int64_t> starts_;
  std::span<const Document> documents_;  // packed: all of them, or none where every target counts
  Layout layout_ = Layout::packed;
  bool isolates_ = false;
};

// How documents become windows.
struct Cutting {
  std::int64_t context = 128;
  std::optional<Layout> layout = {};  // none: padded where there are prompts, packed otherwise
  bool isolate = false;               // packed: no token sees or predicts one of another document
  double validation_share = 0.05;     // the last tokens, or the last documents where they are padded; 0: none
};

class Data {
 public:
  static constexpr const char* kStandardInput = Documents::kStandardInput;
  // Throws where training or validation would have no window. The tokenizer is not needed afterwards.
  Data(const std::string& path, const Cutting& cutting, const Reading& reading = {});

  Windows training() const;
  Windows validation() const;  // where has_validation()
  bool has_validation() const { return held_out_ > 0; }
  Layout layout() const { return layout_; }

  std::int64_t size() const { return documents_.size(); }  // tokens; bytes where there is no tokenizer
  // What a run that goes on compares, with size(). Of a file of bytes: that of its bytes.
  std::uint32_t crc32() const { return documents_.crc32(); }
  std::int64_t memory() const { return documents_.memory(); }  // bytes that are held, without what is mapped

  // For the user to know.
  std::int64_t documents() const { return static_cast<std::int64_t>(documents_.all().size()); }
  std::int64_t replaced() const { return documents_.replaced(); }  // places that were no UTF-8, now U+FFFD
  std::int64_t cut() const { return cut_; }  // padded documents that are longer than the context
  std::int64_t cut_tokens() const { return cut_tokens_; }  // behind it
  std::int64_t left_out() const { return left_out_; }  // documents without a text, or a target that counts

 private:
  Windows windows(std::int64_t begin, std::int64_t end) const;  // tokens, or documents where they are padded
  std::int64_t all() const { return layout_ == Layout::padded ? documents() : size(); }

  Documents documents_;
  Cutting cutting_;
  Layout layout_;
  std::int64_t held_out_ = 0, cut_ = 0, cut_tokens_ = 0, left_out_ = 0;
};

}  // namespace scruple::train
