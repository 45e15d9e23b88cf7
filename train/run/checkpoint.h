// A trainer's whole state as checkpoints, saved and taken up again. Problems are thrown as std::runtime_error.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "include/scruple/scruple.hpp"
#include "io/checkpoint.h"
#include "train/model/model.h"
#include "train/run/rows.h"
#include "train/run/trainer.h"

namespace scruple::train {

// Who wrote a checkpoint, in the manifest's `trainer` under "program".
inline constexpr const char* kProgram = "scruple train";
// The config.json of a model that was not made of sizes, in the same place.
inline constexpr const char* kConfigNote = "config";

// What Outliers::state() says, there too.
inline constexpr const char* kOutliersNote = "outliers";

// A run's checkpoints are in its folder, one folder for each step that was saved.
std::string checkpoints_of(const std::string& run);

// Throws where the tensors of a checkpoint are not these.
void check_tensors(const io::Checkpoint& checkpoint, const std::vector<Parameter>& parameters);
// The model that a checkpoint of 'scruple train' is of.
ModelConfig config_of(const io::Checkpoint& checkpoint);

// The weights as the model computes with them, for other programs: 16-bit halves as they are, low-bit ones decoded.
void write_weights(const std::string& folder, const ModelConfig& model, Trainer& trainer, Ledger& ledger);
// After how many steps write_weights() wrote the weights that are in the folder; -1: it did not.
std::int64_t weights_step(const std::string& folder);

// Of the run's checkpoints the last `keep` stay (0: all).
void keep_last(const std::string& run, std::int64_t keep);
// What a checkpoint of the trainer has: for each tensor of its manifest a row with the planes.
struct Contents {
  io::Manifest manifest;
  std::vector<scruple_tensor> rows;
};
// `notes` come back in the manifest's `trainer`.
Contents contents_of(Trainer& trainer, const std::string& recipe, const io::Metadata& notes);
// Into the run's folder, whose last `keep` checkpoints stay. `memory`: where the planes are.
void write(const Contents& contents, Memory& memory, const std::string& run, std::int64_t keep);
// Both: saves the trainer as it is.
void save(Trainer& trainer, const std::string& recipe, const io::Metadata& notes, const std::string& run,
          std::int64_t keep);

}  // namespace scruple::train
