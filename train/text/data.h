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
// whole: a window has as many documents as fit, none of them cut, and they do not see each other.
enum class Layout { packed, padded, whole };
inline constexpr const char* kLayouts[] = {"packed", "padded", "whole"};  // their names

// A target that counts for nothing.
inline constexpr std::int32_t kNoTarget = -1;

// Whole documents, or what is left of them, packed into windows.
struct Packing {
  struct Piece {
    std::int64_t begin, size,
        document;  // shows tokens `begin` to `begin + size - 1`, and predicts those one further
  };
  std::vector<Piece> pieces;
  std::vector<std::int64_t> first;  // of each window, and one more
};

class Windows {
 public:
  // Packed bytes. `starts`: where windows may begin; empty: anywhere. Each is drawn by chance, so that no epoch ends: of a
  // text that a grammar writes there is always more. Throws where no window fits. `bytes` must outlive this.
  Windows(std::span<const std::uint8_t> bytes, std::int64_t context, std::vector<std::int64_t> starts = {});

  // Of an epoch: padded documents, packings, or packed windows that share no token.
  std::int64_t count() const;
  // How many there are that share no token.
  std::int64_t apart() const;
  std::int64_t context() const { return context_; }
  Layout layout() const { return layout_; }
  bool isolates() const { return isolates_; }
  bool has_epochs() const { return !by_chance_ || layout_ == Layout::padded; }
  // What names window `index` of an endless sequence to read(). In each `count()` of them every one comes once, in an order
  // of its own; where packed windows begin is drawn anew for each epoch.
  std::int64_t drawn(std::uint64_t seed, std::uint64_t index) const;
  // Window `index` of `of` that are spread evenly.
  std::int64_t even_start(std::int64_t index, std::int64_t of) const;
  // How many places packed windows can begin at; else as many as there are windows.
  std::int64_t places() const;
  // `context` of each. A target that does not count is kNoTarget. `starts`, or null: for each token where in the window
  // its document begins, 0 before the window's begin and where documents are not isolated.
  void read(std::int64_t start, std::int32_t* tokens, std::int32_t* targets,
            std::int32_t* starts = nullptr) const;

 private:
  friend class Data;
  Windows() = default;
  void read_packed(std::int64_t start, std::int32_t* tokens, std::int32_t* targets,
                   std::int32_t* starts) const;
  void read_padded(const Document& document, std::int32_t* tokens, std::int32_t* targets) const;
  void read_whole(std::int64_t window, std::int32_t* tokens, std::int32_t* targets,
                  std::int32_t* starts) const;

  TokenSpan tokens_;
  std::int64_t begin_ = 0, end_ = 0;  // packed: of the tokens that are these windows'
  std::int64_t context_ = 0;
  std::vector<std::int64_t> starts_;
  std::span<const Document> documents_;     // packed: all of them, or none where every target counts
  std::span<const Packing::Piece> pieces_;  // whole
  std::span<const std::int64_t> first_;
  std::span<const Gap> gaps_;
  Layout layout_ = Layout::packed;
  bool isolates_ = false, by_chance_ = false;
};

// How documents become windows.
struct Cutting {
  std::int64_t context = 128;
  std::optional<Layout> layout = {};  // none: whole where there are prompts, packed otherwise
  bool isolate = false;               // packed: no token sees or predicts one of another document
  double validation_share =
      0.05;  // the last tokens, or the last documents where they are not packed; 0: none
  // As runs of earlier versions go on: each packed window begins anywhere, and prompts are padded.
  bool by_chance = false;
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
  std::int64_t memory() const;  // bytes that are held, without what is mapped

  // For the user to know.
  std::int64_t documents() const { return static_cast<std::int64_t>(documents_.all().size()); }
  std::int64_t replaced() const { return documents_.replaced(); }  // places that were no UTF-8, now U+FFFD
  std::int64_t cut() const {
    return cut_;
  }  // documents that are longer than the context, where they are not packed
  std::int64_t cut_tokens() const { return cut_tokens_; }  // of them that are in no window
  std::int64_t left_out() const { return left_out_; }  // documents without a text, or a target that counts

 private:
  Windows windows(std::int64_t begin, std::int64_t end,
                  const Packing& packing) const;  // tokens, or documents
  void hold_out(const std::string& name, const char* token);
  Packing pack(std::int64_t begin, std::int64_t end) const;  // these documents
  bool is_packed() const { return layout_ == Layout::packed; }
  std::int64_t all() const { return is_packed() ? size() : documents(); }

  Documents documents_;
  Cutting cutting_;
  Layout layout_;
  Packing training_, validation_;  // whole
  std::int64_t held_out_ = 0, cut_ = 0, cut_tokens_ = 0, left_out_ = 0;
};

}  // namespace scruple::train
