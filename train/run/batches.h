// Windows in batches, as a network takes them: for training and for measuring losses.
#pragma once

#include <cstdint>
#include <functional>

#include "train/pass/backend.h"
#include "train/text/data.h"

namespace scruple::train {

// A window by what names it to Windows::read(); none where `start` is below 0.
struct Window {
  std::int64_t start = -1;
  std::int64_t skipped = 0;  // of its targets, from its begin: they do not count
};

// Of a batch that was read: targets that count, and tokens up to the last of them in each window.
struct Counted {
  std::int64_t targets = 0, tokens = 0;
};

// The memory of one batch, on the host.
class Batches {
 public:
  Batches(const Setup& setup, bool isolates, Ledger& ledger);

  // Throws where the data's documents are isolated and this was not made for it.
  Counted read(const Windows& data, const std::function<Window(std::int64_t)>& window);
  Batch batch() const;  // the last that was read
  std::int64_t windows() const { return windows_; }

 private:
  std::int64_t windows_, context_;
  Block tokens_, targets_, starts_;  // starts_: where documents are isolated
  bool isolates_;
};

// A loss over many windows: every target weighs the same.
struct Loss {
  double sum = 0;  // in nats
  std::int64_t targets = 0, windows = 0;
  double mean() const { return sum / static_cast<double>(targets > 0 ? targets : 1); }
};

// Asked before each batch; where it says no, the loss is of the batches before.
using GoOn = std::function<bool(std::int64_t batches_done, std::int64_t batches)>;

// Over windows 0 to `count` - 1 of `window`. `seen` is called with each batch that was read.
Loss loss_over(
    Network& network, Visible weights, Batches& batches, const Windows& data, std::int64_t count,
    const std::function<Window(std::int64_t)>& window, const GoOn& go_on,
    const std::function<void(const Batch&)>& seen = [](const Batch&) {});

// Every token of the data once: windows one after another; of the last, which ends with the text, only what no other has
// counts.
std::int64_t count_of_all(const Windows& data);
Window window_of_all(const Windows& data, std::int64_t index);

}  // namespace scruple::train
