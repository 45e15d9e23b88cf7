// What the commands of `scruple checkpoint` share.
#pragma once

#include <cmath>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "io/checkpoint.h"
#include "scruple/scruple.hpp"

namespace scruple::cli {

struct CheckpointOptions {
  std::string folder, other, out, recipe, to = "fp32";
  std::vector<std::string> histograms;
  std::int64_t shards = 0;
  bool json = false, ema = false;
};

void inspect(const CheckpointOptions& options);
void verify(const CheckpointOptions& options);
void convert(const CheckpointOptions& options);
void export_weights(const CheckpointOptions& options);
void reshard(const CheckpointOptions& options);
void diff(const CheckpointOptions& options);

void print_json(const nlohmann::ordered_json& object);

// A checkpoint whose tensors can be decoded, one at a time.
class Decoder {
 public:
  explicit Decoder(const io::Checkpoint& checkpoint);

  const Optimizer& optimizer(const io::TensorState& tensor) const { return optimizers_[tensor.group]; }
  Engine& engine() { return engine_; }
  Tensor load(const io::TensorState& tensor);

 private:
  const io::Checkpoint& checkpoint_;
  Engine engine_;
  std::vector<Optimizer> optimizers_;
};

std::vector<float> values_of(const Tensor& tensor, int array);
std::string shape_text(const std::vector<std::int64_t>& shape);
nlohmann::ordered_json groups_json(const io::Checkpoint& checkpoint);
nlohmann::ordered_json loss_scale_json(const io::Manifest& manifest);

// How far values are from others.
struct Deviation {
  double squares = 0, reference = 0, largest = 0;
  void add(const std::vector<float>& before, const std::vector<float>& after);
  double relative() const { return reference > 0 ? std::sqrt(squares / reference) : 0; }
};

// The entry of this name, made where there is none: lists keep the order in which names came.
template <class Value>
Value& entry_of(std::vector<std::pair<std::string, Value>>& list, const std::string& name) {
  for (auto& [known, value] : list)
    if (known == name) return value;
  return list.emplace_back(name, Value()).second;
}

}  // namespace scruple::cli
