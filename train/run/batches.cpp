#include "train/run/batches.h"

#include <algorithm>
#include <stdexcept>

namespace scruple::train {
namespace {

std::int64_t row_bytes(const Setup& setup) {
  return setup.batch * setup.shape.context * std::int64_t{sizeof(std::int32_t)};
}

}  // namespace

Batches::Batches(const Setup& setup, bool isolates, Ledger& ledger)
    : windows_(setup.batch),
      context_(setup.shape.context),
      tokens_(ledger, "activations", row_bytes(setup)),
      targets_(ledger, "activations", row_bytes(setup)),
      isolates_(isolates) {
  if (isolates) starts_ = Block(ledger, "activations", row_bytes(setup));
}

Counted Batches::read(const Windows& data, const std::function<Window(std::int64_t)>& window) {
  if (data.isolates() && !isolates_)
    throw std::invalid_argument("the data's documents are isolated; the job must say so too (Job::isolates)");
  std::int32_t *const tokens = tokens_.as<std::int32_t>(), *const targets = targets_.as<std::int32_t>();
  std::int32_t* const starts = isolates_ ? starts_.as<std::int32_t>() : nullptr;
  Counted counted;
  for (std::int64_t w = 0; w < windows_; ++w) {
    const std::int64_t at = w * context_;
    const Window from = window(w);
    if (from.start < 0) {
      std::fill_n(tokens + at, context_, 0);
      std::fill_n(targets + at, context_, kNoTarget);
      if (starts != nullptr) std::fill_n(starts + at, context_, 0);
      continue;
    }
    data.read(from.start, tokens + at, targets + at, starts == nullptr ? nullptr : starts + at);
    std::fill_n(targets + at, from.skipped, kNoTarget);
    std::int64_t last = -1;
    for (std::int64_t i = 0; i < context_; ++i)
      if (targets[at + i] >= 0) ++counted.targets, last = i;
    counted.tokens += last + 1;
  }
  return counted;
}

Batch Batches::batch() const {
  return {tokens_.as<std::int32_t>(), targets_.as<std::int32_t>(),
          isolates_ ? starts_.as<std::int32_t>() : nullptr};
}

Loss loss_over(Network& network, Visible weights, Batches& batches, const Windows& data, std::int64_t count,
               const std::function<Window(std::int64_t)>& window, const GoOn& go_on,
               const std::function<void(const Batch&)>& seen) {
  Loss loss;
  const std::int64_t in_batch = batches.windows();
  const std::int64_t all = (count + in_batch - 1) / in_batch;
  for (std::int64_t b = 0; b < all; ++b) {
    if (!go_on(b, all)) return loss;
    const std::int64_t targets = batches
                                     .read(data,
                                           [&](std::int64_t w) {
                                             const std::int64_t index = b * in_batch + w;
                                             return index < count ? window(index) : Window();
                                           })
                                     .targets;
    seen(batches.batch());
    loss.sum += network.loss(weights, batches.batch()) * static_cast<double>(targets);
    loss.targets += targets;
    loss.windows += std::min(in_batch, count - b * in_batch);
  }
  return loss;
}

std::int64_t count_of_all(const Windows& data) {
  if (data.layout() != Layout::packed) return data.count();
  const std::int64_t targets = data.places() + data.context() - 1;
  return (targets + data.context() - 1) / data.context();
}

Window window_of_all(const Windows& data, std::int64_t index) {
  if (data.layout() != Layout::packed) return {index, 0};
  const std::int64_t wanted = index * data.context(), start = std::min(wanted, data.places() - 1);
  return {start, wanted - start};
}

}  // namespace scruple::train
