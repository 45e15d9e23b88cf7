// GPT-2 (Radford et al., 2019): the model that the command line makes from sizes, and writes.
#pragma once

#include <cstdint>
#include <string>

#include "train/model/description.h"

namespace scruple::train {

// The sizes of a GPT-2 that one may choose.
struct GptShape {
  std::int64_t layers = 4, width = 128, heads = 4, context = 128, vocabulary = 256;
};
Description gpt2(const GptShape& shape);

// Its config.json, but for the type that weights are stored in.
std::string gpt2_config(const GptShape& shape);

}  // namespace scruple::train
