// The families of models, by the model_type of their config.json. A family is one file here: how its config
// makes a description, and what its tensors are called.
#pragma once

#include <cstdint>
#include <string>

#include "train/model/description.h"

namespace scruple::train {

class Config;

inline constexpr std::size_t kMaxConfig = 1 << 20;  // bytes of a config.json

// The model of the text of a config.json, which `place` names in messages, with the context that is asked for, or the
// longest of which every token is seen (0). Throws std::runtime_error where the family is unknown, or the trainer would compute something else.
Description describe(const std::string& config, const std::string& place, std::int64_t context = 0);

Description gpt2_family(const Config& config);
Description llama_family(const Config& config);
Description mistral_family(const Config& config);
Description qwen2_family(const Config& config);
Description qwen3_family(const Config& config);

}  // namespace scruple::train
