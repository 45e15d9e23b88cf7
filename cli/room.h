// What a run will take and has taken, against the plan and what is free; and what would take less.
#pragma once

#include <cstdint>
#include <exception>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "memory.h"
#include "text.h"
#include "train/run/trainer.h"
#include "training.h"

namespace scruple::cli {

inline constexpr std::int64_t kNoLimit = train::Ledger::kNoLimit;

// What weights, moments and gradients will take: as `scruple plan` says it, and the tile that released gradients
// pass through.
Memory plan_of(const Choice& choice, const std::string& recipe, const train::Job& job,
               const std::string& policy);
// What the job's device can still give, or this one.
std::int64_t free_memory(const train::Job& job);
std::int64_t free_memory(train::Backend& backend);
// Of --recompute and --offload those that are open: what takes least time of all that fits into so much of the device and of
// its host. Whether anything does; if not, the last stays, which takes least. The bits are the same.
bool fit(train::Job& job, bool any_recompute, bool any_offload, std::int64_t device, std::int64_t host);
// The same where the options say auto, into what is free, and into `limit`.
void fit(train::Job& job, const ModelOptions& options, std::int64_t limit = kNoLimit);
bool on_gpu(const train::Job& job);
// What would take less memory, in options that the job does not have: "choose a smaller model, --batch or --context, or
// --recompute block, or --offload".
std::string savings(const train::Job& job, bool chooses_recipe);
// The same of what changes no bit, for a run that goes on.
std::string savings_of_passes(const train::Job& job);
// What went wrong; where memory ran out, with the advice.
std::string failure_words(const std::exception& error, const train::Job& job, const std::string& advice);
// In a handler: throws what says more where memory ran out, and the same again elsewhere.
[[noreturn]] void rethrow_shortage(const std::exception& error, const train::Job& job,
                                   const std::string& advice);
// Where every byte of a run will go, counted before any is taken. Where it is more than is free, or than `limit`, throws:
// "WHAT needs 1.1 TiB, and 20.1 GiB are free; ADVICE".
Table checked_memory(const std::string& what, const train::Job& job, const Memory& plan,
                     const std::string& advice, std::int64_t limit = kNoLimit);
// What the ledger saw of weights, moments and gradients at their peaks, in the plan's order.
std::vector<std::pair<std::string, std::int64_t>> measured_parts(const train::Ledger& ledger,
                                                                 const Memory& plan);
std::int64_t measured_total(const train::Ledger& ledger);

}  // namespace scruple::cli
