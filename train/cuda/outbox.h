// Gradients on their way to the sink. They are computed into one buffer, several small ones side by side, and handed over
// when it is full; a gradient that is larger than the buffer goes in pieces of whole rows.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "train/cuda/layers.h"
#include "train/cuda/recording.h"
#include "train/pass/backend.h"

namespace scruple::train::cuda {

// Queues the computation of rows [first, first + rows) of a gradient; asked twice it gives the same bits.
using FillRows = std::function<void(std::int64_t first, std::int64_t rows, Values to)>;

class Outbox {
 public:
  // Hands over by way of `recording` while it runs.
  Outbox(const std::vector<Parameter>& parameters, Precision type, bool released, Recording& recording,
         Memory& memory, Ledger& ledger);
  // Rows of a piece of a gradient that goes through a buffer of so many bytes; all of them where they fit.
  static std::int64_t piece_rows(std::int64_t bytes, const Parameter& parameter, Precision type);
  // Bytes of the buffer for these parameters.
  static std::int64_t buffer_bytes(const std::vector<Parameter>& parameters, Precision type);

  void open(Sink& sink);
  // Where a gradient is taken, nothing may read its weight afterwards: the sink may step it from now on.
  void take(int parameter, const FillRows& fill);
  void take_whole(int parameter, Values gradient);  // which lies elsewhere, and stays until close()
  void close();                                     // hands over what is left

 private:
  scruple_piece piece_of(int parameter, std::int64_t first, std::int64_t rows, Values gradient) const;
  void hand(SinkCall how, std::span<const scruple_piece> pieces);
  void take_in_pieces(int parameter, const FillRows& fill, std::int64_t rows, SinkCall how);

  const std::vector<Parameter> parameters_;
  const Precision type_;
  Recording& recording_;
  const Block buffer_;
  Sink* sink_ = nullptr;
  std::vector<scruple_piece> waiting_;
  std::int64_t used_ = 0;  // bytes
};

}  // namespace scruple::train::cuda
