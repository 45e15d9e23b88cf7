// Gradients on their way to the sink. They are computed into one buffer, several small ones side by side, and handed over
// when it is full; a gradient that is larger than the buffer goes in pieces of whole rows. Where steps run beside the
// passes, what is there goes earlier, and the buffer is filled further meanwhile.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "train/backend.h"
#include "train/cuda/beside.h"
#include "train/cuda/layers.h"
#include "train/cuda/recording.h"

namespace scruple::train::cuda {

// Queues the computation of rows [first, first + rows) of a gradient; asked twice it gives the same bits.
using FillRows = std::function<void(std::int64_t first, std::int64_t rows, Values to)>;

// How a sink takes pieces: Sink::add, or Sink::measure.
using Hand = void (Sink::*)(std::span<const scruple_piece>);

class Outbox {
 public:
  // Hands over by way of `recording`, and of `beside`.
  Outbox(const std::vector<Parameter>& parameters, Precision type, bool released, Recording& recording,
         Beside& beside, Memory& memory, Ledger& ledger);
  // Bytes of the buffer for these parameters.
  static std::int64_t buffer_bytes(const std::vector<Parameter>& parameters, Precision type);

  void open(Sink& sink);
  // Where a gradient is taken, nothing may read its weight afterwards: the sink may step it from now on.
  void take(int parameter, const FillRows& fill);
  void take_whole(int parameter, Values gradient);  // which lies elsewhere, and stays until close()
  // Hands over what is left. What is queued from here on comes after the sink's work with all of it: gradients and weights
  // may be overwritten and read.
  void close();

 private:
  scruple_piece piece_of(int parameter, std::int64_t first, std::int64_t rows, Values gradient) const;
  void hand(Hand how, std::vector<scruple_piece> pieces, bool joins);
  void hand_waiting();
  void take_in_pieces(int parameter, const FillRows& fill, std::int64_t rows, Hand how);

  const std::vector<Parameter> parameters_;
  const Precision type_;
  Recording& recording_;
  Beside& beside_;
  const Block buffer_;
  const std::int64_t enough_;  // bytes that wait before they are handed over
  Sink* sink_ = nullptr;
  std::vector<scruple_piece> waiting_;
  std::int64_t used_ = 0, handed_ = 0;  // bytes; of these, handed over
};

}  // namespace scruple::train::cuda
