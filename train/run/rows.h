// Between table rows and checkpoints: which planes a row has, what they are called, and how they come back. Stands on
// the library and io/ alone: 'scruple checkpoint' needs no trainer. Problems are thrown as std::runtime_error.
#pragma once

#include <cstddef>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "include/scruple/scruple.hpp"
#include "io/checkpoint.h"
#include "train/pass/ledger.h"

namespace scruple::train {

// All that a row uses but its gradient.
std::vector<int> stored_arrays(const scruple_tensor& row);
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
// A tensor's weight in its format; nothing else of it is read.
Tensor load_weight(Engine& engine, const io::Checkpoint& checkpoint, const io::TensorState& tensor);
// `bytes` of a device, where they lie or as copies of parts, in order.
void for_each_part(Memory& memory, std::span<const std::byte> bytes,
                   const std::function<void(std::span<const std::byte>)>& take);

// A run's moving averages are tensors of their own, behind all others, by the names of the weights after this.
inline constexpr const char *kAverage = "ema.", *kAverageFormat = "bf16+8";
bool is_average(const io::TensorState& tensor);
std::span<const io::TensorState> trained_of(const io::Manifest& manifest);   // all others
std::span<const io::TensorState> averages_of(const io::Manifest& manifest);  // may be none
// Throws where there is not one of each trained tensor.
void check_averages(const io::Checkpoint& checkpoint);

// What its trainer noted, under the keys of now: earlier versions noted options as they are typed (--steps).
io::Metadata notes_of(const io::Checkpoint& checkpoint);
// The checkpoint's, with hyperparameters by their names of now.
std::vector<io::Group> groups_of(const io::Checkpoint& checkpoint);
io::Group group_of(const Optimizer& optimizer);
// Throws where this library has no such optimizer or hyperparameter.
Optimizer optimizer_of(const io::Group& group);

}  // namespace scruple::train
