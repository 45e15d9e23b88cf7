// The pass on a GPU: it queues kernels on one stream, and waits only to give losses or logits.
#pragma once

#include <memory>

#include "train/cuda/engine.h"
#include "train/pass/backend.h"

namespace scruple::train::cuda {

// Memory is taken here. Throws std::invalid_argument where there is no such model.
std::unique_ptr<Network> transformer(const Setup& setup, Visible weights, bool released,
                                     const StreamEngine& engine, const Stream& stream, Copies& copies,
                                     Memory& memory, Ledger& ledger);

// Goes on token by token, from a key-value cache in the type of the token table; in fp32 where that is coded.
std::unique_ptr<Generator> cached_transformer(const Description& model, Visible weights,
                                              const StreamEngine& engine, const Stream& stream,
                                              Memory& memory, Ledger& ledger);

}  // namespace scruple::train::cuda
