#include "train/data.h"

#include <algorithm>
#include <stdexcept>
#include <string>

#include "train/random.h"

namespace scruple::train {
namespace {

std::size_t held_out_of(std::size_t bytes, const std::string& path, std::int64_t context) {
  const auto window = static_cast<std::size_t>(context) + 1;
  if (bytes < 2 * window)
    throw std::runtime_error(path + " has " + std::to_string(bytes) + (bytes == 1 ? " byte" : " bytes") +
                             ", and training and validation take at least " + std::to_string(2 * window) +
                             " at --context " + std::to_string(context) +
                             "; give a longer file or a smaller context");
  return std::max(bytes / 20, window);
}

}  // namespace

Windows::Windows(std::span<const std::uint8_t> bytes, std::int64_t context, std::vector<std::int64_t> starts)
    : bytes_(bytes), context_(context), starts_(std::move(starts)) {
  const auto size = static_cast<std::int64_t>(bytes.size());
  if (size <= context)
    throw std::runtime_error("there are " + std::to_string(size) +
                             " bytes of text, and a window of context " + std::to_string(context) +
                             " takes " + std::to_string(context + 1) +
                             "; give more text or a smaller --context");
  if (starts_.empty()) return;
  std::erase_if(starts_, [&](std::int64_t at) { return at + context >= size; });
  if (starts_.empty()) throw std::runtime_error("no window of this context fits behind any of the starts");
}

std::int64_t Windows::count() const {
  return static_cast<std::int64_t>(starts_.empty() ? bytes_.size() - static_cast<std::size_t>(context_)
                                                   : starts_.size());
}

std::int64_t Windows::start(std::int64_t window) const {
  return starts_.empty() ? window : starts_[static_cast<std::size_t>(window)];
}

std::int64_t Windows::random_start(std::uint64_t seed, std::uint64_t index) const {
  return start(
      static_cast<std::int64_t>(random_bits(seed, kDataStream, index) % static_cast<std::uint64_t>(count())));
}

std::int64_t Windows::even_start(std::int64_t index, std::int64_t of) const {
  return start(index * (count() - 1) / std::max<std::int64_t>(of - 1, 1));
}

void Windows::read(std::int64_t start, std::int32_t* tokens, std::int32_t* targets) const {
  const std::uint8_t* from = bytes_.data() + start;
  std::copy_n(from, context_, tokens);
  std::copy_n(from + 1, context_, targets);
}

TextFile::TextFile(const std::string& path, std::int64_t context)
    : file(path),
      bytes(reinterpret_cast<const std::uint8_t*>(file.bytes().data()), file.bytes().size()),
      held_out(held_out_of(bytes.size(), path, context)),
      training(bytes.first(bytes.size() - held_out), context),
      validation(bytes.last(held_out), context) {}

}  // namespace scruple::train
