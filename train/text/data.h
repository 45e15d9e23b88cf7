// What is trained on, cut into windows for training and validation. Which ones a step sees follows from the seed and a
// count alone, so recipes, thread counts, splits into micro-batches and resumed runs all see the same.
//
// Sources follow each other as if they were one, or each argument of a mixture is a part with a weight: then each part has
// epochs and an order of its own, and the parts take turns as evenly as their weights allow.
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

  // Of an epoch: padded documents, packings, or packed windows that share no token; of all parts together.
  std::int64_t count() const;
  // How many there are that share no token.
  std::int64_t apart() const;
  std::int64_t context() const { return context_; }
  Layout layout() const { return layout_; }
  bool isolates() const { return isolates_; }
  bool has_epochs() const { return !by_chance_ || layout_ == Layout::padded; }
  // What names window `index` of an endless sequence to read(). In each `count()` of them every one comes once, in an order
  // of its own; where packed windows begin is drawn anew for each epoch. In a mixture that holds for each part.
  std::int64_t drawn(std::uint64_t seed, std::uint64_t index) const;
  // Window `index` of `of` that are spread evenly.
  std::int64_t even_start(std::int64_t index, std::int64_t of) const;
  // How many places packed windows can begin at; else as many as there are windows.
  std::int64_t places() const { return parts_.back().first_place + places(parts_.back()); }
  // `context` of each. A target that does not count is kNoTarget. `starts`, or null: for each token where in the window
  // its document begins, 0 before the window's begin and where documents are not isolated.
  void read(std::int64_t start, std::int32_t* tokens, std::int32_t* targets,
            std::int32_t* starts = nullptr) const;

  // Which part's turn window `index` of a mixture is, and how many that part has had before. After any
  // number of windows what a part had differs from its share by less than log2(parts), rounded up.
  struct Turn {
    std::size_t part;
    std::uint64_t number;
  };
  Turn turn(std::uint64_t seed, std::uint64_t index) const;

 private:
  friend class Data;
  struct Part {
    std::vector<Stretch> tokens = {};
    std::int64_t begin = 0, end = 0;  // packed: of the tokens that are these windows'
    std::vector<std::int64_t> starts = {};
    std::span<const Document> documents = {};     // packed: all of them, or none where every target counts
    std::span<const Packing::Piece> pieces = {};  // whole
    std::span<const std::int64_t> first = {};
    std::span<const Gap> gaps = {};
    double weight = 1;
    std::int64_t first_place = 0;  // after those of the parts before
  };
  Windows() = default;
  void add(Part part);
  std::int64_t count(const Part& part) const;
  std::int64_t places(const Part& part) const;
  std::int64_t drawn(const Part& part, std::uint64_t seed, std::uint64_t index) const;
  void read_packed(const Part& part, std::int64_t start, std::int32_t* tokens, std::int32_t* targets,
                   std::int32_t* starts) const;
  void read_padded(const Part& part, const Document& document, std::int32_t* tokens,
                   std::int32_t* targets) const;
  void read_whole(const Part& part, std::int64_t window, std::int32_t* tokens, std::int32_t* targets,
                  std::int32_t* starts) const;

  std::vector<Part> parts_;
  std::int64_t context_ = 0;
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

// What is read as if it were one. Several have a weight each.
struct Share {
  std::vector<std::string> paths;
  double weight = 1;
};
// Of arguments such as "a.bin", "texts/" or "shards/*.bin:0.7": patterns are expanded, and what has no weight is one share.
// Throws where a weight is no number above 0, where only some have one, and where nothing fits a pattern.
std::vector<Share> shares_of(const std::vector<std::string>& arguments);
bool are_tokens(const std::vector<Share>& shares);  // all of them

class Data {
 public:
  static constexpr const char* kStandardInput = Documents::kStandardInput;
  // Throws where training or validation would have no window. The tokenizer is not needed afterwards.
  Data(const std::vector<Share>& shares, const Cutting& cutting, const Reading& reading = {});
  Data(const std::string& path, const Cutting& cutting, const Reading& reading = {})
      : Data(std::vector{Share{{path}}}, cutting, reading) {}

  Windows training() const;
  Windows validation() const;  // where has_validation()
  bool has_validation() const { return cutting_.validation_share > 0; }
  Layout layout() const { return layout_; }

  std::int64_t size() const;  // tokens; bytes where there is no tokenizer
  // What a run that goes on compares. Of a file of bytes the CRC-32 is that of its bytes; of a large file of tokens that
  // of a sample, unless it is to be `whole`.
  struct Source {
    std::string path;
    std::int64_t tokens;
    std::uint32_t crc32;
    bool is_sample;
    std::size_t part;
    double weight;
  };
  std::vector<Source> sources(bool whole = false) const;
  std::uint32_t crc32() const;  // of all sources, whole; of several, that of theirs
  std::int64_t memory() const;  // bytes that are held, without what is mapped

  // For the user to know.
  std::int64_t documents() const;
  std::int64_t replaced() const;  // places that were no UTF-8, now U+FFFD
  std::int64_t cut() const {
    return cut_;
  }  // documents that are longer than the context, where they are not packed
  std::int64_t cut_tokens() const { return cut_tokens_; }  // of them that are in no window
  std::int64_t left_out() const { return left_out_; }  // documents without a text, or a target that counts

 private:
  struct Part {
    Documents documents;
    double weight;
    std::int64_t held_out = 0;     // tokens, or documents
    Packing training, validation;  // whole
  };
  Windows windows(bool of_training) const;
  void drop_what_is_unseen(Part& part);
  void hold_out(Part& part, const std::string& name, const char* token) const;
  Packing pack(const Documents& documents, std::int64_t begin, std::int64_t end) const;  // these documents
  bool is_packed() const { return layout_ == Layout::packed; }
  std::int64_t all(const Part& part) const;  // tokens, or documents

  std::vector<Part> parts_;
  Cutting cutting_;
  Layout layout_ = Layout::packed;
  std::int64_t cut_ = 0, cut_tokens_ = 0, left_out_ = 0;
};

}  // namespace scruple::train
