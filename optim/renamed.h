// Hyperparameters that had another name once: programs and checkpoints of then still say it.
#pragma once

#include <string_view>

namespace scruple {

// What a hyperparameter is called now. In 0.1.0 decay_lr was max_lr, which is also what torch's OneCycleLR calls a value
// of its own.
constexpr std::string_view current_name(std::string_view hyper) {
  return hyper == "max_lr" ? "decay_lr" : hyper;
}

}  // namespace scruple
