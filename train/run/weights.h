// A model's weights alone, in a backend's memory: what sampling needs. 16-bit weights stay what they are.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "include/scruple/scruple.hpp"
#include "io/checkpoint.h"
#include "train/model/model.h"
#include "train/pass/backend.h"

namespace scruple::train {

class Weights {
 public:
  // Those of a folder; or of a checkpoint of 'scruple train', as its model computes with them, where formats that no
  // model is computed in are decoded to fp32. Reads nothing where the ledger only counts.
  Weights(const ModelFolder& folder, Backend& backend, Ledger& ledger);
  // `averages`: in place of the weights. Throws where it has none.
  Weights(const io::Checkpoint& checkpoint, Backend& backend, Ledger& ledger, bool averages = false);

  const Description& shape() const { return shape_; }
  Visible visible() const { return rows_; }

 private:
  // `codes`: of the parameter, in this format.
  void add(std::int64_t size, const char* format, const std::function<const void*()>& codes, Backend& backend,
           Ledger& ledger);

  Description shape_;
  Optimizer optimizer_{"sgd", {{"momentum", 0.0}}};  // rows have one; this one has no moments
  std::vector<scruple_tensor> rows_;
  std::vector<Block> planes_;
};

}  // namespace scruple::train
