// Cuts gradients into tiles of rows and hands them to a sink.
#pragma once

#include <vector>

#include "include/scruple/scruple.hpp"
#include "train/cpu/transformer.h"

namespace scruple::train {

// Bytes of the largest tile, at most 1 MiB. Throws std::runtime_error where a parameter's rows are too long for one.
std::int64_t tile_bytes(const std::vector<Parameter>& parameters);

class Tiles final : public Gradients {
 public:
  // `released`: a tile is all there is of a gradient, and is counted as one.
  Tiles(const std::vector<Parameter>& parameters, bool released, Ledger& ledger);
  void take(int parameter, const FillRows& fill, const Bound& bound) override;
  void give_to(Sink& sink) { sink_ = &sink; }

 private:
  using SinkCall = void (Sink::*)(std::span<const scruple_piece>);
  void each_tile(int parameter, const FillRows& fill, SinkCall hand);

  const std::vector<Parameter> parameters_;
  std::vector<std::int64_t> rows_;  // of each parameter's tiles
  Block tile_;
  Sink* sink_ = nullptr;
};

}  // namespace scruple::train
