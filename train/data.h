// A text, and windows of its bytes for training and validation. Which ones a step sees follows from the seed and a count
// alone, so recipes, thread counts and splits into micro-batches all see the same.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "io/file.h"

namespace scruple::train {

class Windows {
 public:
  // `starts`: where windows may begin; empty: anywhere. A window is `context` bytes and the one after them.
  // Throws where no window fits. `bytes` must outlive this.
  Windows(std::span<const std::uint8_t> bytes, std::int64_t context, std::vector<std::int64_t> starts = {});

  std::int64_t count() const;
  std::int64_t context() const { return context_; }
  // Where window `index` of an endless random sequence begins.
  std::int64_t random_start(std::uint64_t seed, std::uint64_t index) const;
  // Where window `index` of `of` that are spread evenly begins.
  std::int64_t even_start(std::int64_t index, std::int64_t of) const;
  void read(std::int64_t start, std::int32_t* tokens, std::int32_t* targets) const;

 private:
  std::int64_t start(std::int64_t window) const;

  std::span<const std::uint8_t> bytes_;
  std::int64_t context_;
  std::vector<std::int64_t> starts_;
};

// A text to learn: a file, or standard input. Its last twentieth is held out for validation.
class Text {
 public:
  static constexpr const char* kStandardInput = "-";
  // Throws where there is less than two windows, or where standard input has more than `limit` bytes.
  Text(const std::string& path, std::int64_t context, std::int64_t limit);

  std::span<const std::uint8_t> bytes() const { return bytes_; }
  Windows training() const { return {bytes_.first(bytes_.size() - held_out_), context_}; }
  Windows validation() const { return {bytes_.last(held_out_), context_}; }

 private:
  std::optional<io::MappedFile> file_;
  std::vector<std::uint8_t> read_;  // from standard input
  std::span<const std::uint8_t> bytes_;
  std::int64_t context_;
  std::size_t held_out_;
};

}  // namespace scruple::train
