#include "train/cuda/outbox.h"

#include <algorithm>
#include <stdexcept>

namespace scruple::train::cuda {
namespace {

constexpr std::int64_t kMostBytes = 128 << 20;  // of a gradient that goes whole
constexpr std::int64_t kFewBytes = 16 << 20;    // that small ones fill before they go
constexpr std::int64_t kAlignment = 256;
// A piece has a multiple of so many rows. Then it begins where scruple_tensor_view allows it whatever its
// width, and its product is aligned for every kernel of cuBLAS. Unaligned, cuBLAS chose kernels for Ampere:
// of a [18,944, 3,584] weight in bf16, pieces of 18,724 and 220 rows ran at 381 and 202 TFLOP/s (H200,
// 2026-11-18).
constexpr std::int64_t kPieceRows = 128;

std::int64_t aligned(std::int64_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }
std::int64_t columns_of(const Parameter& parameter) { return parameter.size() / parameter.shape[0]; }

}  // namespace

// The fewest pieces, of about the same size.
std::int64_t Outbox::piece_rows(std::int64_t bytes, const Parameter& parameter, Precision type) {
  const std::int64_t rows = parameter.shape[0], row = columns_of(parameter) * bytes_of(type);
  if (rows * row <= bytes) return rows;
  const std::int64_t most = std::max<std::int64_t>(bytes / row / kPieceRows, 1) * kPieceRows;
  const std::int64_t pieces = (rows + most - 1) / most, share = (rows + pieces - 1) / pieces;
  return std::min(rows, (share + kPieceRows - 1) / kPieceRows * kPieceRows);
}

std::int64_t Outbox::buffer_bytes(const std::vector<Parameter>& parameters, Precision type) {
  std::int64_t all = 0, largest = 0;
  for (const Parameter& parameter : parameters) {
    all += aligned(parameter.size() * bytes_of(type));
    largest = std::max(
        largest, aligned(piece_rows(kMostBytes, parameter, type) * columns_of(parameter) * bytes_of(type)));
  }
  return std::max(largest, std::min(all, kFewBytes));
}

Outbox::Outbox(const std::vector<Parameter>& parameters, Precision type, bool released, Recording& recording,
               Memory& memory, Ledger& ledger)
    : parameters_(parameters),
      type_(type),
      recording_(recording),
      buffer_(ledger, released ? "gradients" : "workspace", buffer_bytes(parameters, type), memory) {}

void Outbox::open(Sink& sink) {
  sink_ = &sink;
  waiting_.clear();  // of a pass that an exception ended
  used_ = 0;
}

scruple_piece Outbox::piece_of(int parameter, std::int64_t first, std::int64_t rows, Values gradient) const {
  const std::int64_t columns = columns_of(parameters_[static_cast<std::size_t>(parameter)]);
  return {parameter,
          first * columns,
          rows * columns,
          {format_of(gradient.type), gradient.data, nullptr, SCRUPLE_NEAREST, 0}};
}

void Outbox::take(int parameter, const FillRows& fill) {
  const Parameter& p = parameters_[static_cast<std::size_t>(parameter)];
  const std::int64_t bytes = aligned(p.size() * bytes_of(type_));
  if (used_ + bytes > buffer_.bytes()) close();
  if (bytes > buffer_.bytes()) {
    const std::int64_t rows = piece_rows(buffer_.bytes(), p, type_);
    // Computed twice where its norm is needed. A guard judges each piece alone: twice were a fifth more arithmetic for a
    // Qwen2.5 7B, whose MLPs have 130 MiB.
    if (sink_->measures() && !sink_->only_guards()) take_in_pieces(parameter, fill, rows, &Sink::measure);
    take_in_pieces(parameter, fill, rows, &Sink::add);
    return;
  }
  const Values to = {buffer_.as<std::byte>() + used_, type_};
  fill(0, p.shape[0], to);
  used_ += bytes;
  take_whole(parameter, to);
}

void Outbox::hand(SinkCall how, std::span<const scruple_piece> pieces) {
  if (recording_.is_running())
    recording_.hand(*sink_, how, pieces);
  else
    recording_.deliver(*sink_, how, pieces);
}

void Outbox::take_in_pieces(int parameter, const FillRows& fill, std::int64_t rows, SinkCall how) {
  const std::int64_t all = parameters_[static_cast<std::size_t>(parameter)].shape[0];
  for (std::int64_t first = 0; first < all; first += rows) {
    const std::int64_t count = std::min(rows, all - first);
    const Values to = {buffer_.as<void>(), type_};
    fill(first, count, to);
    const scruple_piece piece = piece_of(parameter, first, count, to);
    hand(how, {&piece, 1});
  }
}

void Outbox::take_whole(int parameter, Values gradient) {
  waiting_.push_back(
      piece_of(parameter, 0, parameters_[static_cast<std::size_t>(parameter)].shape[0], gradient));
}

void Outbox::close() {
  if (!waiting_.empty()) hand(&Sink::add, waiting_);
  waiting_.clear();
  used_ = 0;
}

}  // namespace scruple::train::cuda
