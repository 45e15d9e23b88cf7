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

  // The head computes with the rows that have a target, one after the other, and at least one row that counts for nothing;
  // with all rows where that is about as many. A multiple of an eighth of them: there are few shapes of products.
  static std::int64_t head_rows(std::int64_t rows, std::int64_t counted);
  std::int64_t head_rows() const { return head_rows_; }

  const std::int32_t* tokens() const { return part(0); }
  const std::int32_t* targets() const { return part(1); }  // of the rows of the head
  const std::int32_t* positions() const { return part(2); }
  // Where the head has not all rows: which row each of its rows is, and which of its rows each row is. Those without a
  // target are one that counts for nothing.
  const std::int32_t* rows_of_head() const { return part(3); }
  const std::int32_t* places_in_head() const { return part(4); }
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
  static constexpr int kTables = 2, kFirstTable = 5, kParts = kFirstTable + 3 * kTables, kCopies = 2;
  const std::int32_t* part(int index) const { return device_.as<std::int32_t>() + index * stride_; }
  void gather(const std::int32_t* targets, std::int64_t counted, std::int32_t* host);
  void sort(const std::int32_t* read_from, std::int64_t table_rows, int table, std::int32_t* host);
  Occurrences occurrences(int table, std::int64_t first, std::int64_t rows) const;

  const Description model_;
  const std::int64_t rows_, stride_;
  const Stream& stream_;
  const Block device_;
  // Pinned, so that the copy is queued like everything else: while one is on its way the next batch goes into the other.
  struct Copy {
    Pinned<std::int32_t> host;
    Event done;
  };
  std::array<Copy, kCopies> copies_;
  int turn_ = 0;
  std::int64_t head_rows_ = 0;
  bool isolated_ = false;
  std::array<std::vector<std::int32_t>, kTables> targets_;  // ascending: rows of each table that were read
  std::vector<std::int32_t> counts_;
};

}  // namespace scruple::train::cuda
