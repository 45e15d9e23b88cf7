// The families of models, by the model_type of their config.json. A family is one file here: what tensors its config
// asks for, what they are called, and, where the trainer knows it, how it computes.
#pragma once

#include <cstdint>
#include <string>

#include "train/model/description.h"

namespace scruple::train {

class Config;

struct Family {
  const char* model_type;
  // All that decides the number, the names and the sizes of its tensors.
  Description (*tensors)(const Config& config);
  // All else that the trainer computes with; refuses what it would compute differently. None: it is planned only.
  void (*arithmetic)(const Config& config, Description& model);
};
extern const Family kGpt2, kLlama, kMistral, kQwen2, kQwen3, kGemma, kGemma2;

inline constexpr std::size_t kMaxConfig = 1 << 20;  // bytes of a config.json

// The model of the text of a config.json, which `place` names in messages, with the context that is asked for, or the
// longest of which every token is seen (0). Throws std::runtime_error where the family is unknown, or the trainer would compute something else.
Description describe(const std::string& config, const std::string& place, std::int64_t context = 0);
// The same for its parameters alone, also of what the trainer does not compute with.
Description describe_tensors(const std::string& config, const std::string& place);

std::string planned_families();  // "gpt2, llama, ..."

}  // namespace scruple::train
