#include "train/text/data.h"

#include <algorithm>
#include <stdexcept>
#include <string>

#include "train/random.h"

namespace scruple::train {
namespace {

// The place of `index` in a random permutation of 0 ... count - 1, which (seed, epoch) decides. It needs no
// list of all indices, so any place can be computed by itself: each round pairs all places up and swaps each
// pair or not (Hoang, Morris, Rogaway, "An Enciphering Scheme Based on a Card Shuffle", 1208.1176, figure 1).
std::int64_t shuffled(std::int64_t index, std::int64_t count, std::uint64_t seed, std::uint64_t epoch) {
  constexpr std::uint64_t kRounds = 128;  // a few times log2(count)
  const std::uint64_t key = random_bits(seed, kOrderStream, epoch);
  for (std::uint64_t round = 0; round < kRounds; ++round) {
    const auto sum = static_cast<std::int64_t>(random_bits(key, kOrderStream, 2 * round) %
                                               static_cast<std::uint64_t>(count));
    const std::int64_t other = (sum - index + count) % count;
    const std::uint64_t pair_key = random_bits(key, kOrderStream, 2 * round + 1);
    const auto pair = static_cast<std::uint64_t>(std::max(index, other));
    if ((random_bits(pair_key, kOrderStream, pair) & 1u) != 0) index = other;
  }
  return index;
}

std::string counted(std::int64_t count, const std::string& noun) {
  return std::to_string(count) + " " + noun + (count == 1 ? "" : "s");
}

}  // namespace

// ---- Windows ----

Windows::Windows(std::span<const std::uint8_t> bytes, std::int64_t context, std::vector<std::int64_t> starts)
    : tokens_(bytes),
      end_(static_cast<std::int64_t>(bytes.size())),
      context_(context),
      starts_(std::move(starts)) {
  if (end_ <= context)
    throw std::runtime_error("there are " + std::to_string(end_) +
                             " bytes of text, and a window of context " + std::to_string(context) +
                             " takes " + std::to_string(context + 1) +
                             "; give more text or a smaller --context");
  if (starts_.empty()) return;
  std::erase_if(starts_, [&](std::int64_t at) { return at + context >= end_; });
  if (starts_.empty()) throw std::runtime_error("no window of this context fits behind any of the starts");
}

std::int64_t Windows::count() const {
  if (layout_ == Layout::padded) return static_cast<std::int64_t>(documents_.size());
  return starts_.empty() ? end_ - begin_ - context_ : static_cast<std::int64_t>(starts_.size());
}

std::int64_t Windows::apart() const {
  return layout_ == Layout::padded ? count() : std::min(count(), (end_ - begin_ - 1) / context_);
}

std::int64_t Windows::start(std::int64_t window) const {
  return starts_.empty() ? window : starts_[static_cast<std::size_t>(window)];
}

std::int64_t Windows::random_start(std::uint64_t seed, std::uint64_t index) const {
  const auto of = static_cast<std::uint64_t>(count());
  if (layout_ == Layout::padded)
    return shuffled(static_cast<std::int64_t>(index % of), count(), seed, index / of);
  return start(static_cast<std::int64_t>(random_bits(seed, kDataStream, index) % of));
}

std::int64_t Windows::even_start(std::int64_t index, std::int64_t of) const {
  return start(index * (count() - 1) / std::max<std::int64_t>(of - 1, 1));
}

void Windows::read(std::int64_t start, std::int32_t* tokens, std::int32_t* targets,
                   std::int32_t* starts) const {
  if (starts != nullptr) std::fill_n(starts, context_, 0);
  if (layout_ == Layout::padded)
    read_padded(documents_[static_cast<std::size_t>(start)], tokens, targets);
  else
    read_packed(begin_ + start, tokens, targets, starts);
}

void Windows::read_packed(std::int64_t at, std::int32_t* tokens, std::int32_t* targets,
                          std::int32_t* starts) const {
  std::visit(
      [&](auto all) {
        std::copy_n(all.data() + at, context_, tokens);
        std::copy_n(all.data() + at + 1, context_, targets);
      },
      tokens_);
  if (documents_.empty()) return;
  const auto after = [](std::int64_t place, const Document& document) { return place < document.begin; };
  auto of_token = std::upper_bound(documents_.begin(), documents_.end(), at, after) - 1;
  for (std::int64_t i = 0; i < context_; ++i) {
    const bool is_last = at + i + 1 == of_token->end;
    const auto of_target = is_last ? of_token + 1 : of_token;
    if (at + i + 1 < of_target->counted || (isolates_ && is_last)) targets[i] = kNoTarget;
    if (isolates_ && starts != nullptr)
      starts[i] = static_cast<std::int32_t>(std::max<std::int64_t>(of_token->begin - at, 0));
    of_token = of_target;
  }
}

void Windows::read_padded(const Document& document, std::int32_t* tokens, std::int32_t* targets) const {
  const std::int64_t there = std::min(document.end - document.begin, context_);
  const std::int64_t before = std::max<std::int64_t>(document.counted - document.begin - 1, 0);
  const std::int64_t last = std::min(document.end - document.begin - 1, context_);
  std::fill_n(tokens, context_, 0);
  std::fill_n(targets, context_, kNoTarget);
  std::visit(
      [&](auto all) {
        const auto* const from = all.data() + document.begin;
        std::copy_n(from, there, tokens);
        if (before < last) std::copy(from + before + 1, from + last + 1, targets + before);
      },
      tokens_);
}

// ---- Data ----

Data::Data(const std::string& path, const Cutting& cutting, const Reading& reading)
    : documents_(path, reading),
      cutting_(cutting),
      layout_(cutting.layout.value_or(documents_.has_prompts() ? Layout::padded : Layout::packed)),
      left_out_(documents_.empty()) {
  const std::string name = path == kStandardInput ? "standard input" : path;
  const std::int64_t context = cutting.context;
  if (!(cutting.validation_share >= 0 && cutting.validation_share < 1))
    io::fail("a validation share of ", cutting.validation_share, " is not 0 or more and below 1");
  const bool is_padded = layout_ == Layout::padded;
  if (is_padded) {
    const std::int64_t read = documents();
    documents_.remove_if([&](const Document& document) {
      const std::int64_t first = std::max(document.counted, document.begin + 1);
      return first >= std::min(document.end, document.begin + context + 1);
    });
    left_out_ += read - documents();
    for (const Document& document : documents_.all()) {
      const std::int64_t behind = document.end - document.begin - (context + 1);
      if (behind > 0) ++cut_, cut_tokens_ += behind;
    }
  }
  const std::int64_t window = is_padded ? 1 : context + 1;
  const bool holds_out = cutting.validation_share > 0;
  const std::int64_t least = (holds_out ? 2 : 1) * window;
  const char* const takers = holds_out ? "training and validation take at least " : "it takes at least ";
  if (all() < least && is_padded)
    io::fail(name, " has ", counted(documents(), "document"), " with something to learn at --context ",
             context, left_out_ > 0 ? " (" + std::to_string(left_out_) + " were left out)" : "", ", and ",
             takers, holds_out ? "one each" : "one",
             "; give more documents, or put them one after another with --layout packed");
  if (all() < least)
    io::fail(name, " has ", counted(size(), reading.tokenizer != nullptr ? "token" : "byte"), ", and ",
             takers, least, " at --context ", context, "; give a longer text or a smaller --context");
  const auto share = static_cast<std::int64_t>(static_cast<double>(all()) * cutting.validation_share);
  held_out_ = holds_out ? std::max(share, window) : 0;
  if (all() - held_out_ < window)
    io::fail("--validation ", cutting.validation_share, " of ", name, " leaves ",
             counted(all() - held_out_, is_padded ? "document" : "token"), " to train on, and --context ",
             context, " takes at least ", window, "; give a smaller --validation");
}

Windows Data::training() const { return windows(0, all() - held_out_); }
Windows Data::validation() const { return windows(all() - held_out_, all()); }

Windows Data::windows(std::int64_t begin, std::int64_t end) const {
  Windows windows;
  windows.tokens_ = documents_.tokens();
  windows.context_ = cutting_.context;
  windows.layout_ = layout_;
  if (layout_ == Layout::padded) {
    windows.documents_ = std::span(documents_.all())
                             .subspan(static_cast<std::size_t>(begin), static_cast<std::size_t>(end - begin));
    return windows;
  }
  windows.begin_ = begin;
  windows.end_ = end;
  windows.isolates_ = cutting_.isolate;
  if (cutting_.isolate || documents_.has_prompts()) windows.documents_ = documents_.all();
  return windows;
}

}  // namespace scruple::train
