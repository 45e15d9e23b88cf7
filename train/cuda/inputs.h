// A batch in the GPU's memory, and which of its rows read which row of a table, for the gradients of tables.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "train/cuda/device.h"
#include "train/cuda/layers.h"
#include "train/pass/backend.h"

namespace scruple::train::cuda {

class Inputs {
 public:
  Inputs(const Description& model, std::int64_t rows, const Stream& stream, Memory& memory, Ledger& ledger);
  ~Inputs();
  Inputs(const Inputs&) = delete;
  Inputs& operator=(const Inputs&) = delete;

  // Queues the copy; the batch itself is not read after the call. Throws where it makes no sense. How many targets count;
  // each has an equal share of `weight`.
  std::int64_t read(const Batch& batch, float weight);

  const std::int32_t* tokens() const { return part(0); }
  const std::int32_t* targets() const { return part(1); }
  const std::int32_t* positions() const { return part(2); }
  const float* share() const { return device_.as<float>() + kParts * stride_; }
  // Positions again, for attention: nullptr where every window is one document.
  const std::int32_t* documents() const { return isolated_ ? positions() : nullptr; }

  // Who read rows [first, first + rows) of the table of tokens, or of positions.
  Occurrences token_occurrences(std::int64_t first, std::int64_t rows) const {
    return occurrences(0, first, rows);
  }
  Occurrences position_occurrences(std::int64_t first, std::int64_t rows) const {
    return occurrences(1, first, rows);
  }

 private:
  static constexpr int kTables = 2, kParts = 3 + 3 * kTables, kCopies = 2;
  const std::int32_t* part(int index) const { return device_.as<std::int32_t>() + index * stride_; }
  void sort(const std::int32_t* read_from, std::int64_t table_rows, int table, std::int32_t* host);
  Occurrences occurrences(int table, std::int64_t first, std::int64_t rows) const;

  const Description model_;
  const std::int64_t rows_, stride_;
  const Stream& stream_;
  const Block device_;
  // Pinned, so that the copy is queued like everything else: while one is on its way the next batch goes into the other.
  struct Copy {
    Pinned<std::int32_t> host;
    cudaEvent_t done = nullptr;
  };
  std::array<Copy, kCopies> copies_;
  int turn_ = 0;
  bool isolated_ = false;
  std::array<std::vector<std::int32_t>, kTables> targets_;  // ascending: rows of each table that were read
  std::vector<std::int32_t> counts_;
};

}  // namespace scruple::train::cuda
