// Windows of bytes for training and validation, and a file cut into both. Which ones a step sees follows from the seed and a count
// alone, so recipes, thread counts and splits into micro-batches all see the same.
#pragma once

#include <cstdint>
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

// A file's windows: its last twentieth is held out for validation. Throws where it is too short.
struct TextFile {
  TextFile(const std::string& path, std::int64_t context);

  io::MappedFile file;
  std::span<const std::uint8_t> bytes;
  std::size_t held_out;
  Windows training, validation;
};

}  // namespace scruple::train
