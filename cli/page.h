// The page of one training run: loss, settings, speed, memory, gradient norm and learning rate.
#pragma once

#include <cstdint>
#include <string>

#include "memory.h"
#include "train/run/report.h"
#include "train/run/run.h"

namespace scruple::cli {

// The first and the last validation loss, each with its step unless the run of so many steps begins or ends with it.
std::string validation_words(const train::Record& record, const train::Job& job);

// `data`: what was learned; `kind`: of model.
train::Report page_of(const std::string& data, const std::string& kind, const std::string& recipe,
                      const train::Job& job, const train::Record& record, const train::Trainer& trainer,
                      const train::Ledger& ledger, const Memory& plan);

}  // namespace scruple::cli
