#include "train/text/data.h"

#include <glob.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <filesystem>
#include <map>
#include <stdexcept>
#include <string>
#include <tuple>

#include "io/crc32.h"
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
    : context_(context), by_chance_(true) {
  const auto end = static_cast<std::int64_t>(bytes.size());
  if (end <= context)
    throw std::runtime_error("there are " + std::to_string(end) + " bytes of text, and a window of context " +
                             std::to_string(context) + " takes " + std::to_string(context + 1) +
                             "; give more text or a smaller --context");
  const bool is_limited = !starts.empty();
  std::erase_if(starts, [&](std::int64_t at) { return at + context >= end; });
  if (is_limited && starts.empty())
    throw std::runtime_error("no window of this context fits behind any of the starts");
  add({.tokens = {{"", bytes, 0, {}}}, .end = end, .starts = std::move(starts)});
}

void Windows::add(Part part) {
  if (!parts_.empty()) part.first_place = places();
  parts_.push_back(std::move(part));
}

std::int64_t Windows::places(const Part& part) const {
  if (layout_ == Layout::padded) return static_cast<std::int64_t>(part.documents.size());
  if (layout_ == Layout::whole) return static_cast<std::int64_t>(part.first.size()) - 1;
  return part.starts.empty() ? part.end - part.begin - context_
                             : static_cast<std::int64_t>(part.starts.size());
}

// An epoch of packed windows: the tokens in stretches, each with kTogether windows and room for one more, in which the
// first begins anywhere. (Were there one stretch, all windows of an epoch would cut documents of equal length at the same
// place.) What is left behind the last stretch is a shorter one.
constexpr std::int64_t kTogether = 32;

std::int64_t Windows::count() const {
  std::int64_t all = 0;
  for (const Part& part : parts_) all += count(part);
  return all;
}

std::int64_t Windows::count(const Part& part) const {
  if (layout_ != Layout::packed || !part.starts.empty()) return places(part);
  const std::int64_t stretch = (kTogether + 1) * context_, all = part.end - part.begin - 1;
  const std::int64_t rest = std::max<std::int64_t>(all % stretch / context_ - 1, 0);
  return std::max<std::int64_t>(all / stretch * kTogether + rest, 1);
}

std::int64_t Windows::apart() const {
  std::int64_t all = 0;
  for (const Part& part : parts_)
    all += layout_ == Layout::packed ? std::min(places(part), (part.end - part.begin - 1) / context_)
                                     : places(part);
  return all;
}

__extension__ using Wide = unsigned __int128;

// The parts are halved until one is left. Of the turns of two halves the first gets those at which (n + 1) * share + begin
// passes a whole number, as a line is drawn on a grid; `begin` is drawn from the seed.
Windows::Turn Windows::turn(std::uint64_t seed, std::uint64_t index) const {
  const auto weight = [&](std::size_t begin, std::size_t end) {
    double sum = 0;
    for (std::size_t i = begin; i < end; ++i) sum += parts_[i].weight;
    return sum;
  };
  std::size_t begin = 0, end = parts_.size();
  while (end - begin > 1) {
    const std::size_t middle = (begin + end) / 2;
    const auto share = static_cast<std::uint64_t>(
        std::ldexp(std::min(weight(begin, middle) / weight(begin, end), 1 - 0x1p-53), 64));
    const std::uint64_t offset = random_bits(seed, kMixStream, begin << 32 | end);
    const auto before = [&](std::uint64_t turns) {  // of them, those of the first half
      return static_cast<std::uint64_t>((static_cast<Wide>(turns) * share + offset) >> 64);
    };
    const std::uint64_t first = before(index);
    if (before(index + 1) > first)
      end = middle, index = first;
    else
      begin = middle, index -= first;
  }
  return {begin, index};
}

std::int64_t Windows::drawn(std::uint64_t seed, std::uint64_t index) const {
  if (parts_.size() == 1) return drawn(parts_[0], seed, index);
  const auto [which, number] = turn(seed, index);
  return parts_[which].first_place +
         drawn(parts_[which], random_bits(seed, kMixStream, ~std::uint64_t{which}), number);
}

std::int64_t Windows::drawn(const Part& part, std::uint64_t seed, std::uint64_t index) const {
  const auto start = [&](std::int64_t place) {
    return part.starts.empty() ? place : part.starts[static_cast<std::size_t>(place)];
  };
  if (by_chance_ && layout_ == Layout::packed)
    return start(static_cast<std::int64_t>(random_bits(seed, kDataStream, index) %
                                           static_cast<std::uint64_t>(places(part))));
  const std::int64_t all = count(part);
  const auto of = static_cast<std::uint64_t>(all);
  const std::uint64_t epoch = index / of;
  const std::int64_t window = shuffled(static_cast<std::int64_t>(index % of), all, seed, epoch);
  if (layout_ != Layout::packed || !part.starts.empty()) return start(window);
  const std::int64_t stretch = (kTogether + 1) * context_, number = window / kTogether;
  const std::int64_t windows = std::min(all - number * kTogether, kTogether);
  const std::int64_t tokens = std::min(part.end - part.begin - 1 - number * stretch, stretch);
  const std::int64_t shifts = tokens - windows * context_ + 1;
  const std::uint64_t place = epoch * of + static_cast<std::uint64_t>(number);
  const std::uint64_t shift = random_bits(seed, kDataStream, place) % static_cast<std::uint64_t>(shifts);
  return number * stretch + static_cast<std::int64_t>(shift) + window % kTogether * context_;
}

std::int64_t Windows::even_start(std::int64_t index, std::int64_t of) const {
  const std::int64_t place = index * (places() - 1) / std::max<std::int64_t>(of - 1, 1);
  const std::vector<std::int64_t>& starts = parts_[0].starts;
  return starts.empty() ? place : starts[static_cast<std::size_t>(place)];
}

void Windows::read(std::int64_t start, std::int32_t* tokens, std::int32_t* targets,
                   std::int32_t* starts) const {
  if (starts != nullptr) std::fill_n(starts, context_, 0);
  const auto after = [](std::int64_t place, const Part& part) { return place < part.first_place; };
  const Part& part = *(std::upper_bound(parts_.begin(), parts_.end(), start, after) - 1);
  start -= part.first_place;
  if (layout_ == Layout::padded)
    read_padded(part, part.documents[static_cast<std::size_t>(start)], tokens, targets);
  else if (layout_ == Layout::whole)
    read_whole(part, start, tokens, targets, starts);
  else
    read_packed(part, part.begin + start, tokens, targets, starts);
}

void Windows::read_packed(const Part& part, std::int64_t at, std::int32_t* tokens, std::int32_t* targets,
                          std::int32_t* starts) const {
  copy_tokens(part.tokens, at, context_, tokens);
  std::copy_n(tokens + 1, context_ - 1, targets);
  copy_tokens(part.tokens, at + context_, 1, targets + context_ - 1);
  if (part.documents.empty()) return;
  const auto after = [](std::int64_t place, const Document& document) { return place < document.begin; };
  auto of_token = std::upper_bound(part.documents.begin(), part.documents.end(), at, after) - 1;
  for (std::int64_t i = 0; i < context_; ++i) {
    const bool is_last = at + i + 1 == of_token->end;
    const auto of_target = is_last ? of_token + 1 : of_token;
    if (at + i + 1 < of_target->counted || (isolates_ && is_last)) targets[i] = kNoTarget;
    if (isolates_ && starts != nullptr)
      starts[i] = static_cast<std::int32_t>(std::max<std::int64_t>(of_token->begin - at, 0));
    of_token = of_target;
  }
  const auto ends_before = [](const Gap& gap, std::int64_t place) { return gap.end <= place; };
  auto gap = std::lower_bound(part.gaps.begin(), part.gaps.end(), at + 1, ends_before);
  for (; gap != part.gaps.end() && gap->begin <= at + context_; ++gap)
    std::fill(targets + std::max<std::int64_t>(gap->begin - at - 1, 0),
              targets + std::min(gap->end - at - 1, context_), kNoTarget);
}

void Windows::read_padded(const Part& part, const Document& document, std::int32_t* tokens,
                          std::int32_t* targets) const {
  std::fill_n(tokens, context_, 0);
  std::fill_n(targets, context_, kNoTarget);
  copy_tokens(part.tokens, document.begin, std::min(document.end - document.begin, context_), tokens);
  each_counted(document, part.gaps, [&](std::int64_t begin, std::int64_t end) {
    begin = std::max(begin, document.begin + 1);  // nothing comes before the first token
    end = std::min(end, document.begin + context_ + 1);
    if (begin < end) copy_tokens(part.tokens, begin, end - begin, targets + begin - document.begin - 1);
  });
}

void Windows::read_whole(const Part& part, std::int64_t window, std::int32_t* tokens, std::int32_t* targets,
                         std::int32_t* starts) const {
  std::fill_n(tokens, context_, 0);
  std::fill_n(targets, context_, kNoTarget);
  const auto begin = static_cast<std::size_t>(part.first[static_cast<std::size_t>(window)]);
  const auto end = static_cast<std::size_t>(part.first[static_cast<std::size_t>(window) + 1]);
  std::int64_t at = 0;
  for (const Packing::Piece& piece : part.pieces.subspan(begin, end - begin)) {
    copy_tokens(part.tokens, piece.begin, piece.size, tokens + at);
    const Document& document = part.documents[static_cast<std::size_t>(piece.document)];
    each_counted(document, part.gaps, [&](std::int64_t first, std::int64_t last) {
      first = std::max(first, piece.begin + 1), last = std::min(last, piece.begin + piece.size + 1);
      if (first < last) copy_tokens(part.tokens, first, last - first, targets + at + first - piece.begin - 1);
    });
    if (starts != nullptr) std::fill_n(starts + at, piece.size, static_cast<std::int32_t>(at));
    at += piece.size;
  }
  if (starts != nullptr) std::fill(starts + at, starts + context_, static_cast<std::int32_t>(at));  // padding
}

// ---- What --data names ----

namespace {

bool exists(const std::string& path) {
  std::error_code ignored;
  return path == Data::kStandardInput || std::filesystem::exists(path, ignored);
}

// What a pattern stands for, in the order of the paths; else the path itself.
std::vector<std::string> expanded(const std::string& path) {
  if (exists(path) || path.find_first_of("*?[") == path.npos) return {path};
  glob_t found{};
  std::vector<std::string> paths;
  if (::glob(path.c_str(), 0, nullptr, &found) == 0)
    paths.assign(found.gl_pathv, found.gl_pathv + found.gl_pathc);
  ::globfree(&found);
  if (paths.empty()) io::fail("--data ", path, ": there is no such file; check the pattern");
  std::sort(paths.begin(), paths.end());
  return paths;
}

}  // namespace

std::vector<Share> shares_of(const std::vector<std::string>& arguments) {
  std::vector<Share> shares;
  const std::string* bare = nullptr;  // an argument without a weight
  for (const std::string& argument : arguments) {
    const std::size_t colon = exists(argument) ? argument.npos : argument.rfind(':');
    if (colon == argument.npos || colon == 0) {
      bare = &argument;
      continue;
    }
    const char *const from = argument.data() + colon + 1, *const end = argument.data() + argument.size();
    double weight = 0;
    const auto [stop, problem] = std::from_chars(from, end, weight);
    if (problem != std::errc() || stop != end || !(weight > 0) || !std::isfinite(weight))
      io::fail("--data ", argument, ": there is no such file, and '", std::string(from, end),
               "' is no weight above 0 such as 0.7; check the path, or the weight");
    shares.push_back({expanded(argument.substr(0, colon)), weight});
  }
  if (bare != nullptr && !shares.empty())
    io::fail("--data ", *bare, " has no weight, and others have; give each one, such as ", *bare,
             ":0.5, or none");
  if (shares.empty()) shares.emplace_back();
  if (bare != nullptr)
    for (const std::string& argument : arguments)
      for (std::string& path : expanded(argument)) shares[0].paths.push_back(std::move(path));
  return shares;
}

bool are_tokens(const std::vector<Share>& shares) {
  return std::all_of(shares.begin(), shares.end(), [](const Share& share) {
    return std::all_of(share.paths.begin(), share.paths.end(), is_token_file);
  });
}

// ---- Data ----

Data::Data(const std::vector<Share>& shares, const Cutting& cutting, const Reading& reading)
    : cutting_(cutting) {
  if (!(cutting.validation_share >= 0 && cutting.validation_share < 1))
    io::fail("a validation share of ", cutting.validation_share, " is not 0 or more and below 1");
  Reading rest = reading;  // memory is for all parts together
  for (const Share& share : shares) {
    parts_.push_back({Documents(share.paths, rest), share.weight, 0, {}, {}});
    rest.limit -= parts_.back().documents.memory();
    left_out_ += parts_.back().documents.empty();
  }
  const bool has_prompts = std::any_of(parts_.begin(), parts_.end(),
                                       [](const Part& part) { return part.documents.has_prompts(); });
  const Layout of_prompts = cutting.by_chance ? Layout::padded : Layout::whole;
  layout_ = cutting.layout.value_or(has_prompts ? of_prompts : Layout::packed);
  for (std::size_t i = 0; i < parts_.size(); ++i) {
    Part& part = parts_[i];
    if (!is_packed() || cutting.isolate) part.documents.split_large();
    if (!is_packed()) drop_what_is_unseen(part);
    std::string name = shares[i].paths[0] == kStandardInput ? "standard input" : shares[i].paths[0];
    if (shares[i].paths.size() > 1) name += " and " + std::to_string(shares[i].paths.size() - 1) + " more";
    hold_out(part, name, reading.tokenizer != nullptr ? "token" : "byte");
    if (layout_ != Layout::whole) continue;
    part.training = pack(part.documents, 0, all(part) - part.held_out);
    part.validation = pack(part.documents, all(part) - part.held_out, all(part));
  }
}

// Documents without a target in the context; and counts those that are cut there.
void Data::drop_what_is_unseen(Part& part) {
  Documents& documents = part.documents;
  const std::int64_t context = cutting_.context;
  const std::size_t read = documents.all().size();
  documents.remove_if([&](const Document& document) {
    bool is_gone = true;
    each_counted(document, documents.gaps(), [&](std::int64_t first, std::int64_t end) {
      is_gone &= std::max(first, document.begin + 1) >= std::min(end, document.begin + context + 1);
    });
    return is_gone;
  });
  left_out_ += static_cast<std::int64_t>(read - documents.all().size());
  for (const Document& document : documents.all()) {
    const bool is_cut =
        layout_ == Layout::padded || document.counted > document.begin;  // a text goes on in the next window
    const std::int64_t behind = document.end - document.begin - (context + 1);
    if (behind > 0 && is_cut) ++cut_, cut_tokens_ += behind;
  }
}

std::int64_t Data::all(const Part& part) const {
  return is_packed() ? part.documents.size() : static_cast<std::int64_t>(part.documents.all().size());
}

void Data::hold_out(Part& part, const std::string& name, const char* token) const {
  const std::int64_t context = cutting_.context, window = is_packed() ? context + 1 : 1;
  const bool holds_out = has_validation();
  const std::int64_t least = (holds_out ? 2 : 1) * window;
  const char* const takers = holds_out ? "training and validation take at least " : "it takes at least ";
  if (all(part) < least && !is_packed())
    io::fail(
        name, " has ", counted(all(part), "document"), " with something to learn at --context ", context,
        left_out_ > 0 ? " (" + std::to_string(left_out_) + " were left out)" : "", ", and ", takers,
        holds_out ? "one each" : "one",
        "; give more documents or a larger --context, or put them one after another with --layout packed");
  if (all(part) < least)
    io::fail(name, " has ", counted(all(part), token), ", and ", takers, least, " at --context ", context,
             "; give a longer text or a smaller --context");
  const auto share = static_cast<std::int64_t>(static_cast<double>(all(part)) * cutting_.validation_share);
  part.held_out = holds_out ? std::max(share, window) : 0;
  if (all(part) - part.held_out < window)
    io::fail("--validation ", cutting_.validation_share, " of ", name, " leaves ",
             counted(all(part) - part.held_out, is_packed() ? token : "document"),
             " to train on, and --context ", context, " takes at least ", window,
             "; give a smaller --validation");
}

// Best fit, the longest first: each goes where the least room is left. Among equals chance decides, so that neighbours
// in the file do not share a window for being neighbours.
Packing Data::pack(const Documents& documents, std::int64_t begin, std::int64_t end) const {
  const std::int64_t context = cutting_.context;
  struct Waiting {
    Packing::Piece piece;
    std::uint64_t lot;
    std::int64_t window = 0;
  };
  std::vector<Waiting> waiting;
  for (std::int64_t d = begin; d < end; ++d) {
    const Document& document = documents.all()[static_cast<std::size_t>(d)];
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

Windows Data::training() const { return windows(true); }
Windows Data::validation() const { return windows(false); }

Windows Data::windows(bool of_training) const {
  Windows windows;
  windows.context_ = cutting_.context;
  windows.layout_ = layout_;
  windows.by_chance_ = cutting_.by_chance;
  windows.isolates_ = layout_ == Layout::whole || (is_packed() && cutting_.isolate);
  for (const Part& from : parts_) {
    const std::int64_t middle = all(from) - from.held_out;
    const std::int64_t begin = of_training ? 0 : middle, end = of_training ? middle : all(from);
    Windows::Part part{
        .tokens = from.documents.sources(), .gaps = from.documents.gaps(), .weight = from.weight};
    if (layout_ == Layout::padded) {
      part.documents = std::span(from.documents.all())
                           .subspan(static_cast<std::size_t>(begin), static_cast<std::size_t>(end - begin));
    } else {
      const Packing& packing = of_training ? from.training : from.validation;
      part.pieces = packing.pieces, part.first = packing.first;
      part.begin = begin, part.end = end;
      if (windows.isolates_ || from.documents.has_prompts()) part.documents = from.documents.all();
    }
    windows.add(std::move(part));
  }
  return windows;
}

std::int64_t Data::memory() const {
  std::int64_t bytes = 0;
  for (const Part& part : parts_) {
    bytes += part.documents.memory();
    for (const Packing* packing : {&part.training, &part.validation})
      bytes += static_cast<std::int64_t>(packing->pieces.size() * sizeof(Packing::Piece) +
                                         packing->first.size() * sizeof(std::int64_t));
  }
  return bytes;
}

std::int64_t Data::size() const {
  std::int64_t tokens = 0;
  for (const Part& part : parts_) tokens += part.documents.size();
  return tokens;
}

std::int64_t Data::documents() const {
  std::int64_t documents = 0;
  for (const Part& part : parts_) documents += static_cast<std::int64_t>(part.documents.all().size());
  return documents;
}

std::int64_t Data::replaced() const {
  std::int64_t places = 0;
  for (const Part& part : parts_) places += part.documents.replaced();
  return places;
}

std::vector<Data::Source> Data::sources(bool whole) const {
  std::vector<Source> found;
  for (std::size_t i = 0; i < parts_.size(); ++i)
    for (const Stretch& source : parts_[i].documents.sources()) {
      const bool is_sample = source.below > 0 && !whole;
      const std::uint32_t crc =
          is_sample ? Documents::crc32_of_sample(source) : parts_[i].documents.crc32(source);
      found.push_back({source.path, source.size(), crc, is_sample, i, parts_[i].weight});
    }
  return found;
}

std::uint32_t Data::crc32() const {
  const std::vector<Source> all = sources(/*whole=*/true);
  std::uint32_t crc = 0;
  for (const Source& source : all) crc = io::crc32(std::as_bytes(std::span(&source.crc32, 1)), crc);
  return all.size() == 1 ? all[0].crc32 : crc;
}

}  // namespace scruple::train
