// The page of one training run: loss, settings, speed, memory, gradient norm and learning rate.
#pragma once

#include <cstdint>
#include <string>

#include "memory.h"
#include "train/run/report.h"
#include "train/run/run.h"
#include "train/text/data.h"

namespace scruple::cli {

// The first and the last validation loss, each with its step unless the run of so many steps begins or ends with it.
std::string validation_words(const train::Record& record, const train::Job& job);

// A run that has ended, or been stopped.
struct Trained {
  std::string data, kind, recipe;  // what was learned; of model
  train::Layout layout;
  const train::Job& job;
  const train::Record& record;
  const train::Trainer& trainer;
  const Memory& plan;
};
train::Report page_of(const Trained& run);

}  // namespace scruple::cli
