// Between table rows and checkpoints: which planes a row has, what they are called, and how they come back;
// and a trainer's whole state, saved and taken up again. Problems are thrown as std::runtime_error.
#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <vector>

#include "include/scruple/scruple.hpp"
#include "io/checkpoint.h"
#include "train/model.h"
#include "train/trainer.h"

namespace scruple::train {

// The row as a checkpoint describes it: its arrays but the gradient, each with its planes.
io::TensorState stored_form(std::string name, std::vector<std::int64_t> shape, const scruple_tensor& row);
// A row for such a tensor, in its formats, without memory. Throws where this library has no such format or
// the planes are not what it asks for.
scruple_tensor row_of(const io::TensorState& tensor, const scruple_optimizer* optimizer);
// The memory of arrays[array].planes[plane] of stored_form(row).
std::span<std::byte> plane_of(const scruple_tensor& row, const io::TensorState& tensor, std::size_t array,
                              std::size_t plane);
// Every plane of the tensor into the row's memory. Moments in another format are decoded and encoded: recipes have
// changed since 0.1. Throws where weights would be read differently, or sizes differ. `memory`: the row's.
void load(Engine& engine, const io::Checkpoint& checkpoint, const io::TensorState& tensor,
          const scruple_tensor& row, Memory& memory = host_memory());

// Who wrote a checkpoint, in the manifest's `trainer` under "program".
inline constexpr const char* kProgram = "scruple train";
// The config.json of a model that was not made of sizes, in the same place.
inline constexpr const char* kConfigNote = "config";

io::Group group_of(const Optimizer& optimizer);
// Throws where this library has no such optimizer or hyperparameter.
Optimizer optimizer_of(const io::Group& group);

// A run's checkpoints are in its folder, one folder for each step that was saved.
std::string checkpoints_of(const std::string& run);
// The checkpoint that a user means by a folder: itself, or the last one of a run.
std::string find_checkpoint(const std::string& folder);

// The model that a checkpoint of 'scruple train' is of, and with the weights that it computes with.
ModelConfig config_of(const io::Checkpoint& checkpoint);
Model model_of(Engine& engine, const io::Checkpoint& checkpoint);

// The weights as the model computes with them, for other programs: 16-bit halves as they are, low-bit ones decoded.
void write_weights(const std::string& folder, const ModelConfig& model, Trainer& trainer, Ledger& ledger);
// After how many steps write_weights() wrote the weights that are in the folder; -1: it did not.
std::int64_t weights_step(const std::string& folder);

// Of the run's checkpoints the last `keep` stay (0: all).
void keep_last(const std::string& run, std::int64_t keep);
// Saves the trainer into the run's folder, whose last `keep` checkpoints stay. `notes` come back in
// the manifest's `trainer`.
void save(Trainer& trainer, const std::string& recipe, const io::Metadata& notes, const std::string& run,
          std::int64_t keep);

}  // namespace scruple::train
