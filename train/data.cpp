#include "train/data.h"

#include <algorithm>
#include <cstdio>
#include <stdexcept>
#include <string>

#include "train/random.h"

namespace scruple::train {
namespace {

std::vector<std::uint8_t> read_standard_input(std::int64_t limit) {
  constexpr std::size_t kPart = std::size_t{1} << 20;
  std::vector<std::uint8_t> bytes;
  std::size_t size = 0, got = 0;
  do {
    if (static_cast<std::int64_t>(size) > limit)
      io::fail("standard input has more than the ", limit >> 20,
               " MiB of memory that are free for it; put the text into a file, which is not read whole");
    bytes.resize(size + kPart);
    got = std::fread(bytes.data() + size, 1, kPart, stdin);
    size += got;
  } while (got > 0);
  if (std::ferror(stdin) != 0) io::fail("cannot read standard input to its end; give a file with --data");
  bytes.resize(size);
  return bytes;
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

Text::Text(const std::string& path, std::int64_t context, std::int64_t limit) : context_(context) {
  if (path == kStandardInput) {
    read_ = read_standard_input(limit);
    bytes_ = read_;
  } else {
    file_.emplace(path);
    bytes_ = {reinterpret_cast<const std::uint8_t*>(file_->bytes().data()), file_->bytes().size()};
  }
  const auto window = static_cast<std::size_t>(context) + 1;
  if (bytes_.size() < 2 * window)
    io::fail(path == kStandardInput ? "standard input" : path, " has ", bytes_.size(),
             bytes_.size() == 1 ? " byte" : " bytes", ", and training and validation take at least ",
             2 * window, " at --context ", context, "; give a longer text or a smaller context");
  held_out_ = std::max(bytes_.size() / 20, window);
}

}  // namespace scruple::train
