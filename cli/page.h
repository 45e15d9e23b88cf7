// The page of one training run: loss, settings, speed, memory, gradient norm and learning rate.
#pragma once

#include <string>

#include "memory.h"
#include "train/report.h"
#include "train/run.h"

namespace scruple::cli {

// `data`: what was learned.
train::Report page_of(const std::string& data, const std::string& recipe, const train::Job& job,
                      const train::Record& record, const train::Ledger& ledger, const Memory& plan);

}  // namespace scruple::cli
