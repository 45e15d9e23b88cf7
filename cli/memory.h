// How many bytes a model's training state takes, part by part, as the library's formats say.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "choice.h"
#include "model.h"
#include "text.h"

namespace scruple::cli {

struct Memory {
  std::int64_t weights = 0, extra = 0, scales = 0, gradients = 0, ema = 0;
  std::vector<std::pair<std::string, std::int64_t>> slots;  // codes of each moment

  // Every part by name, in the order of the tables; they add up to total().
  std::vector<std::pair<std::string, std::int64_t>> parts() const;
  std::int64_t total() const;
  std::int64_t saved() const { return total() - gradients; }  // what a checkpoint keeps
};

inline constexpr const char* kPolicies[] = {"stored", "released", "compressed"};

// `policy`: stored takes the recipe's gradient format, released nothing, compressed what Choice::for_policy says.
Memory measure(const Choice& choice, const Optimizer& optimizer, const std::string& recipe,
               const Model& model, const std::string& policy);

// Of a moving average of the model's weights (--ema).
std::int64_t ema_bytes(const Model& model);

// Throws "WHAT needs 1.1 TiB, and 20.1 GiB are free; ADVICE", and where they would go.
[[noreturn]] void refuse_memory(const std::string& what, std::int64_t needed, const std::string& there,
                                const std::string& advice, const Table& parts = {});

std::int64_t free_memory();  // of the host

}  // namespace scruple::cli
