// A trained model, wherever it is: a run, a checkpoint, a Hugging Face folder.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "io/checkpoint.h"
#include "train/model/model.h"
#include "train/run/weights.h"
#include "training.h"

namespace scruple::cli {

// What the weights come from, and the folder that may have their tokenizer.
struct Found {
  std::shared_ptr<const train::ModelFolder> model;
  std::unique_ptr<io::Checkpoint> checkpoint;
  std::string folder;
  bool averages = false;  // of the checkpoint

  ChosenModel chosen() const;
  train::Weights weights(train::Backend& backend, train::Ledger& ledger) const;
};

// The model that a run has written; where there is none, that of a checkpoint. `context`: tokens that it sees; 0: its own.
// `averages`: of the weights, from a checkpoint.
Found find_model(const std::string& folder, std::int64_t context, bool averages);

// The argument that names it.
Option model_option(std::string& folder);

// Throws where what the ledger has counted is more than the backend can give.
void check_fits(const std::string& what, const train::Ledger& needed, train::Backend& backend,
                const std::string& smaller);

}  // namespace scruple::cli
