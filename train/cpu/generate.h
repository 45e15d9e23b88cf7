// Text goes on token by token: keys and values of what was fed are kept, so that a new token costs the work of
// one.
#pragma once

#include <cstdint>
#include <memory>

#include "train/cpu/transformer.h"

namespace scruple::train {

class CachedTransformer {
 public:
  // Takes its memory here: keys and values of a whole context, in fp32. Throws std::invalid_argument where
  // problem_with() finds one.
  CachedTransformer(const Description& model, Threads& threads, Ledger& ledger);
  ~CachedTransformer();

  // The logits (vocabulary of them) after all that was fed, the last of these `count` tokens included. Throws
  // std::invalid_argument beyond the context, and then nothing was fed.
  void feed(Weights& weights, const std::int32_t* tokens, std::int64_t count, float* logits);
  std::int64_t length() const;  // tokens fed
  void clear();                 // as if none had been

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace scruple::train
