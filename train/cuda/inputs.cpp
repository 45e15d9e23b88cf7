#include "train/cuda/inputs.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace scruple::train::cuda {

Inputs::Inputs(const Description& model, std::int64_t rows, const Stream& stream, Memory& memory,
               Ledger& ledger)
    : model_(model),
      rows_(rows),
      stride_(rows + 1),  // occurrences begin at one more place than there are
      stream_(stream),
      device_(ledger, "activations", (kParts * stride_ + 1) * std::int64_t{sizeof(std::int32_t)}, memory) {}

std::int64_t Inputs::head_rows(std::int64_t rows, std::int64_t counted) {
  constexpr std::int64_t kShapes = 8, kAligned = 8;  // as cuBLAS wants it
  const std::int64_t step = (rows + kShapes * kAligned - 1) / (kShapes * kAligned) * kAligned;
  return std::min(rows, (counted / step + 1) * step);
}

Inputs::~Inputs() {
  for (const Copy& copy : copies_)
    if (copy.done != nullptr) cudaEventSynchronize(copy.done.get());
}

std::int64_t Inputs::read(const Batch& batch, float weight) {
  Copy& copy = copies_[static_cast<std::size_t>(turn_)];
  if (copy.host == nullptr)
    copy.host = pinned<std::int32_t>(device_.bytes() / std::int64_t{sizeof(std::int32_t)});
  if (copy.done == nullptr) copy.done = new_event();
  check(cudaEventSynchronize(copy.done.get()), "waiting for a batch");
  std::int32_t *const tokens = copy.host.get(), *const positions = tokens + 2 * stride_;
  const std::int64_t counted = read_batch(model_, rows_, batch, positions);
  std::copy_n(batch.tokens, rows_, tokens);
  gather(batch.targets, counted, tokens);
  const float share = weight / static_cast<float>(std::max<std::int64_t>(counted, 1));
  std::memcpy(tokens + kParts * stride_, &share, sizeof share);
  isolated_ = batch.starts != nullptr;
  sort(tokens, model_.vocabulary, 0, tokens);
  if (model_.positions > 0) sort(positions, model_.positions, 1, tokens);
  check(cudaMemcpyAsync(device_.as<void>(), tokens, static_cast<std::size_t>(device_.bytes()),
                        cudaMemcpyHostToDevice, stream_),
        "copying a batch to the GPU");
  check(cudaEventRecord(copy.done.get(), stream_), "copying a batch to the GPU");
  turn_ = (turn_ + 1) % kCopies;
  return counted;
}

void Inputs::gather(const std::int32_t* from, std::int64_t counted, std::int32_t* host) {
  std::int32_t *const targets = host + stride_, *const rows = host + 3 * stride_,
                      *const places = rows + stride_;
  head_rows_ = head_rows(rows_, counted);
  if (head_rows_ == rows_) {
    std::copy_n(from, rows_, targets);
    return;
  }
  std::int32_t next = 0;
  for (std::int64_t row = 0; row < rows_; ++row) {
    places[row] = static_cast<std::int32_t>(from[row] < 0 ? counted : next);
    if (from[row] < 0) continue;
    targets[next] = from[row];
    rows[next++] = static_cast<std::int32_t>(row);
  }
  std::fill(targets + next, targets + head_rows_, -1);
  std::fill(rows + next, rows + head_rows_, next > 0 ? rows[0] : 0);
}

// Rows in the order of what they read, those that read the same in their own order.
void Inputs::sort(const std::int32_t* read_from, std::int64_t table_rows, int table, std::int32_t* host) {
  std::int32_t* const target = host + (kFirstTable + 3 * table) * stride_;
  std::int32_t *const begin = target + stride_, *const order = begin + stride_;
  counts_.assign(static_cast<std::size_t>(table_rows), 0);
  for (std::int64_t i = 0; i < rows_; ++i) ++counts_[static_cast<std::size_t>(read_from[i])];
  std::vector<std::int32_t>& targets = targets_[static_cast<std::size_t>(table)];
  targets.clear();
  std::int32_t next = 0;
  for (std::size_t row = 0; row < counts_.size(); ++row) {
    if (counts_[row] == 0) continue;
    begin[targets.size()] = next;
    target[targets.size()] = static_cast<std::int32_t>(row);
    targets.push_back(static_cast<std::int32_t>(row));
    next += std::exchange(counts_[row], next);
  }
  begin[targets.size()] = next;
  for (std::int64_t i = 0; i < rows_; ++i)
    order[counts_[static_cast<std::size_t>(read_from[i])]++] = static_cast<std::int32_t>(i);
}

Occurrences Inputs::occurrences(int table, std::int64_t first, std::int64_t rows) const {
  const std::vector<std::int32_t>& all = targets_[static_cast<std::size_t>(table)];
  const auto from = std::lower_bound(all.begin(), all.end(), first);
  const auto to = std::lower_bound(from, all.end(), first + rows);
  const std::int64_t skipped = from - all.begin();
  const int target = kFirstTable + 3 * table;
  return {part(target) + skipped, part(target + 1) + skipped, part(target + 2), to - from};
}

}  // namespace scruple::train::cuda
