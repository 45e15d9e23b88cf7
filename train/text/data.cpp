#include "train/text/data.h"

#include <algorithm>
#include <map>
#include <stdexcept>
#include <string>
#include <tuple>

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
      starts_(std::move(starts)),
      by_chance_(true) {
  if (end_ <= context)
    throw std::runtime_error("there are " + std::to_string(end_) +
                             " bytes of text, and a window of context " + std::to_string(context) +
                             " takes " + std::to_string(context + 1) +
                             "; give more text or a smaller --context");
  if (starts_.empty()) return;
  std::erase_if(starts_, [&](std::int64_t at) { return at + context >= end_; });
  if (starts_.empty()) throw std::runtime_error("no window of this context fits behind any of the starts");
}

std::int64_t Windows::places() const {
  if (layout_ == Layout::padded) return static_cast<std::int64_t>(documents_.size());
  if (layout_ == Layout::whole) return static_cast<std::int64_t>(first_.size()) - 1;
  return starts_.empty() ? end_ - begin_ - context_ : static_cast<std::int64_t>(starts_.size());
}

// An epoch of packed windows: the tokens in stretches, each with kTogether windows and room for one more, in which the
// first begins anywhere. (Were there one stretch, all windows of an epoch would cut documents of equal length at the same
// place.) What is left behind the last stretch is a shorter one.
constexpr std::int64_t kTogether = 32;

std::int64_t Windows::count() const {
  if (layout_ != Layout::packed || !starts_.empty()) return places();
  const std::int64_t stretch = (kTogether + 1) * context_, all = end_ - begin_ - 1;
  const std::int64_t rest = std::max<std::int64_t>(all % stretch / context_ - 1, 0);
  return std::max<std::int64_t>(all / stretch * kTogether + rest, 1);
}

std::int64_t Windows::apart() const {
  return layout_ == Layout::packed ? std::min(places(), (end_ - begin_ - 1) / context_) : places();
}

std::int64_t Windows::drawn(std::uint64_t seed, std::uint64_t index) const {
  const auto start = [&](std::int64_t place) {
    return starts_.empty() ? place : starts_[static_cast<std::size_t>(place)];
  };
  if (by_chance_ && layout_ == Layout::packed)
    return start(static_cast<std::int64_t>(random_bits(seed, kDataStream, index) %
                                           static_cast<std::uint64_t>(places())));
  const auto of = static_cast<std::uint64_t>(count());
  const std::uint64_t epoch = index / of;
  const std::int64_t window = shuffled(static_cast<std::int64_t>(index % of), count(), seed, epoch);
  if (layout_ != Layout::packed || !starts_.empty()) return start(window);
  const std::int64_t stretch = (kTogether + 1) * context_, number = window / kTogether;
  const std::int64_t windows = std::min(count() - number * kTogether, kTogether);
  const std::int64_t tokens = std::min(end_ - begin_ - 1 - number * stretch, stretch);
  const std::int64_t shifts = tokens - windows * context_ + 1;
  const std::uint64_t place =
      epoch * static_cast<std::uint64_t>(count()) + static_cast<std::uint64_t>(number);
  const std::uint64_t shift = random_bits(seed, kDataStream, place) % static_cast<std::uint64_t>(shifts);
  return number * stretch + static_cast<std::int64_t>(shift) + window % kTogether * context_;
}

std::int64_t Windows::even_start(std::int64_t index, std::int64_t of) const {
  const std::int64_t place = index * (places() - 1) / std::max<std::int64_t>(of - 1, 1);
  return starts_.empty() ? place : starts_[static_cast<std::size_t>(place)];
}

void Windows::read(std::int64_t start, std::int32_t* tokens, std::int32_t* targets,
                   std::int32_t* starts) const {
  if (starts != nullptr) std::fill_n(starts, context_, 0);
  if (layout_ == Layout::padded)
    read_padded(documents_[static_cast<std::size_t>(start)], tokens, targets);
  else if (layout_ == Layout::whole)
    read_whole(start, tokens, targets, starts);
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
  const auto ends_before = [](const Gap& gap, std::int64_t place) { return gap.end <= place; };
  auto gap = std::lower_bound(gaps_.begin(), gaps_.end(), at + 1, ends_before);
  for (; gap != gaps_.end() && gap->begin <= at + context_; ++gap)
    std::fill(targets + std::max<std::int64_t>(gap->begin - at - 1, 0),
              targets + std::min(gap->end - at - 1, context_), kNoTarget);
}

void Windows::read_padded(const Document& document, std::int32_t* tokens, std::int32_t* targets) const {
  const std::int64_t there = std::min(document.end - document.begin, context_);
  std::fill_n(tokens, context_, 0);
  std::fill_n(targets, context_, kNoTarget);
  std::visit(
      [&](auto all) {
        const auto* const from = all.data() + document.begin;
        std::copy_n(from, there, tokens);
        each_counted(document, gaps_, [&](std::int64_t begin, std::int64_t end) {
          begin = std::max<std::int64_t>(begin - document.begin, 1);  // nothing comes before the first token
          end = std::min(end - document.begin, context_ + 1);
          if (begin < end) std::copy(from + begin, from + end, targets + begin - 1);
        });
      },
      tokens_);
}

void Windows::read_whole(std::int64_t window, std::int32_t* tokens, std::int32_t* targets,
                         std::int32_t* starts) const {
  std::fill_n(tokens, context_, 0);
  std::fill_n(targets, context_, kNoTarget);
  const auto begin = static_cast<std::size_t>(first_[static_cast<std::size_t>(window)]);
  const auto end = static_cast<std::size_t>(first_[static_cast<std::size_t>(window) + 1]);
  std::int64_t at = 0;
  for (const Packing::Piece& piece : pieces_.subspan(begin, end - begin)) {
    const Document& document = documents_[static_cast<std::size_t>(piece.document)];
    std::visit(
        [&](auto all) {
          std::copy_n(all.data() + piece.begin, piece.size, tokens + at);
          each_counted(document, gaps_, [&](std::int64_t first, std::int64_t last) {
            first = std::max(first, piece.begin + 1), last = std::min(last, piece.begin + piece.size + 1);
            if (first < last)
              std::copy(all.data() + first, all.data() + last, targets + at + first - piece.begin - 1);
          });
        },
        tokens_);
    if (starts != nullptr) std::fill_n(starts + at, piece.size, static_cast<std::int32_t>(at));
    at += piece.size;
  }
  if (starts != nullptr) std::fill(starts + at, starts + context_, static_cast<std::int32_t>(at));  // padding
}

// ---- Data ----

Data::Data(const std::string& path, const Cutting& cutting, const Reading& reading)
    : documents_(path, reading), cutting_(cutting), left_out_(documents_.empty()) {
  const Layout of_prompts = cutting.by_chance ? Layout::padded : Layout::whole;
  layout_ = cutting.layout.value_or(documents_.has_prompts() ? of_prompts : Layout::packed);
  if (!(cutting.validation_share >= 0 && cutting.validation_share < 1))
    io::fail("a validation share of ", cutting.validation_share, " is not 0 or more and below 1");
  const std::int64_t context = cutting.context;
  const auto is_cut = [&](const Document& document) {
    return layout_ == Layout::padded ||
           document.counted > document.begin;  // a text goes on in the next window
  };
  if (!is_packed()) {
    const std::int64_t read = documents();
    documents_.remove_if([&](const Document& document) {
      bool is_gone = true;
      each_counted(document, documents_.gaps(), [&](std::int64_t first, std::int64_t end) {
        is_gone &= std::max(first, document.begin + 1) >= std::min(end, document.begin + context + 1);
      });
      return is_gone;
    });
    left_out_ += read - documents();
    for (const Document& document : documents_.all()) {
      const std::int64_t behind = document.end - document.begin - (context + 1);
      if (behind > 0 && is_cut(document)) ++cut_, cut_tokens_ += behind;
    }
  }
  hold_out(path == kStandardInput ? "standard input" : path, reading.tokenizer != nullptr ? "token" : "byte");
  if (layout_ != Layout::whole) return;
  training_ = pack(0, all() - held_out_);
  validation_ = pack(all() - held_out_, all());
}

void Data::hold_out(const std::string& name, const char* token) {
  const std::int64_t context = cutting_.context, window = is_packed() ? context + 1 : 1;
  const bool holds_out = cutting_.validation_share > 0;
  const std::int64_t least = (holds_out ? 2 : 1) * window;
  const char* const takers = holds_out ? "training and validation take at least " : "it takes at least ";
  if (all() < least && !is_packed())
    io::fail(name, " has ", counted(documents(), "document"), " with something to learn at --context ",
             context, left_out_ > 0 ? " (" + std::to_string(left_out_) + " were left out)" : "", ", and ",
             takers, holds_out ? "one each" : "one",
             "; give more documents, or put them one after another with --layout packed");
  if (all() < least)
    io::fail(name, " has ", counted(size(), token), ", and ", takers, least, " at --context ", context,
             "; give a longer text or a smaller --context");
  const auto share = static_cast<std::int64_t>(static_cast<double>(all()) * cutting_.validation_share);
  held_out_ = holds_out ? std::max(share, window) : 0;
  if (all() - held_out_ < window)
    io::fail("--validation ", cutting_.validation_share, " of ", name, " leaves ",
             counted(all() - held_out_, is_packed() ? token : "document"), " to train on, and --context ",
             context, " takes at least ", window, "; give a smaller --validation");
}

// Best fit, the longest first: each goes where the least room is left. Among equals chance decides, so that neighbours
// in the file do not share a window for being neighbours.
Packing Data::pack(std::int64_t begin, std::int64_t end) const {
  const std::int64_t context = cutting_.context;
  struct Waiting {
    Packing::Piece piece;
    std::uint64_t lot;
    std::int64_t window = 0;
  };
  std::vector<Waiting> waiting;
  for (std::int64_t d = begin; d < end; ++d) {
    const Document& document = documents_.all()[static_cast<std::size_t>(d)];
    const std::int64_t last = document.end - 1, whole = document.counted == document.begin ? last : 0;
    std::int64_t at = document.begin;
    do {
      const std::int64_t size = std::min(last - at, context);
      waiting.push_back({{at, size, d}, random_bits(0, kOrderStream, static_cast<std::uint64_t>(at))});
      at += size;
    } while (at < whole);
  }
  std::sort(waiting.begin(), waiting.end(), [](const Waiting& a, const Waiting& b) {
    return std::tuple(-a.piece.size, a.lot, a.piece.begin) < std::tuple(-b.piece.size, b.lot, b.piece.begin);
  });
  std::map<std::int64_t, std::vector<std::int64_t>> open;  // windows, by the room that is left
  std::vector<std::int64_t> sizes;                         // in pieces, of each window
  for (Waiting& next : waiting) {
    std::int64_t room = context;
    if (const auto best = open.lower_bound(next.piece.size); best != open.end()) {
      room = best->first, next.window = best->second.back();
      best->second.pop_back();
      if (best->second.empty()) open.erase(best);
    } else {
      next.window = static_cast<std::int64_t>(sizes.size());
      sizes.push_back(0);
    }
    ++sizes[static_cast<std::size_t>(next.window)];
    if (room > next.piece.size) open[room - next.piece.size].push_back(next.window);
  }
  Packing packing{std::vector<Packing::Piece>(waiting.size()), {0}};
  for (const std::int64_t size : sizes) packing.first.push_back(packing.first.back() + size);
  std::vector<std::int64_t> next(packing.first.begin(), packing.first.end() - 1);
  for (const Waiting& placed : waiting)
    packing.pieces[static_cast<std::size_t>(next[static_cast<std::size_t>(placed.window)]++)] = placed.piece;
  return packing;
}

Windows Data::training() const { return windows(0, all() - held_out_, training_); }
Windows Data::validation() const { return windows(all() - held_out_, all(), validation_); }

std::int64_t Data::memory() const {
  const std::size_t pieces = training_.pieces.size() + validation_.pieces.size();
  const std::size_t windows = training_.first.size() + validation_.first.size();
  return documents_.memory() +
         static_cast<std::int64_t>(pieces * sizeof(Packing::Piece) + windows * sizeof(std::int64_t));
}

Windows Data::windows(std::int64_t begin, std::int64_t end, const Packing& packing) const {
  Windows windows;
  windows.tokens_ = documents_.tokens();
  windows.context_ = cutting_.context;
  windows.gaps_ = documents_.gaps();
  windows.layout_ = layout_;
  windows.by_chance_ = cutting_.by_chance;
  windows.isolates_ = layout_ == Layout::whole || (is_packed() && cutting_.isolate);
  if (layout_ == Layout::padded) {
    windows.documents_ = std::span(documents_.all())
                             .subspan(static_cast<std::size_t>(begin), static_cast<std::size_t>(end - begin));
    return windows;
  }
  windows.pieces_ = packing.pieces;
  windows.first_ = packing.first;
  windows.begin_ = begin;
  windows.end_ = end;
  if (windows.isolates_ || documents_.has_prompts()) windows.documents_ = documents_.all();
  return windows;
}

}  // namespace scruple::train
