#include "train/text/bpe.h"

#include <algorithm>
#include <cstdio>
#include <queue>
#include <tuple>

#include "io/json.h"
#include "train/text/utf8.h"

namespace scruple::train {
namespace {

constexpr std::size_t kFew = 24;              // symbols that are searched again for every join
constexpr std::size_t kLongWord = 64;         // bytes; longer ones hardly come again
constexpr std::size_t kRemembered = 1 << 16;  // words

std::uint64_t key_of(Token left, Token right) { return std::uint64_t{left} << 32 | right; }

}  // namespace

Bpe::Bpe(std::unordered_map<std::string, Token> vocabulary, const std::vector<Pair>& pairs, Settings settings)
    : vocabulary_(std::move(vocabulary)), settings_(settings) {
  const auto token_of = [&](const std::string& text, const Pair& pair) {
    const auto found = vocabulary_.find(text);
    if (found == vocabulary_.end())
      io::fail("merge of ", io::shown(pair.left), " and ", io::shown(pair.right), ": ", io::shown(text),
               " is not in the vocabulary");
    return found->second;
  };
  unions_.reserve(pairs.size());
  for (std::uint32_t rank = 0; rank < pairs.size(); ++rank) {
    const Pair& pair = pairs[rank];
    unions_.insert_or_assign(key_of(token_of(pair.left, pair), token_of(pair.right, pair)),
                             Union{rank, token_of(pair.left + pair.right, pair)});
  }
  for (int byte = 0; byte < 256; ++byte) {
    char name[8] = {static_cast<char>(byte), 0};
    if (!settings_.of_bytes) std::snprintf(name, sizeof name, "<0x%02X>", static_cast<unsigned>(byte));
    const auto found = vocabulary_.find(settings_.of_bytes ? std::string(name, 1) : name);
    if (found != vocabulary_.end()) of_byte_[static_cast<std::size_t>(byte)] = found->second;
  }
}

const Bpe::Union* Bpe::find(Token left, Token right) const {
  const auto found = unions_.find(key_of(left, right));
  return found == unions_.end() ? nullptr : &found->second;
}

void Bpe::add_symbol(Token token) {
  const int at = static_cast<int>(symbols_.size());
  symbols_.push_back({token, at - 1, at + 1});
}

void Bpe::add_symbols(std::string_view word) {
  symbols_.clear();
  bool fusing = false;
  const auto add_unknown = [&] {
    if (settings_.unknown && !(fusing && settings_.fuse_unknown)) add_symbol(*settings_.unknown);
    fusing = true;
  };
  const auto byte_token = [&](char byte) { return of_byte_[static_cast<unsigned char>(byte)]; };
  for (std::size_t at = 0; at < word.size();) {
    const std::string_view symbol = word.substr(at, settings_.of_bytes ? 1 : character_length(word[at]));
    at += symbol.size();
    if (settings_.of_bytes) {
      if (const auto token = byte_token(symbol[0]))
        add_symbol(*token), fusing = false;
      else
        add_unknown();
    } else if (const auto found = vocabulary_.find(std::string(symbol)); found != vocabulary_.end()) {
      add_symbol(found->second), fusing = false;
    } else if (settings_.byte_fallback && std::all_of(symbol.begin(), symbol.end(), byte_token)) {
      for (const char byte : symbol) add_symbol(*byte_token(byte));
      fusing = false;
    } else {
      add_unknown();
    }
  }
  if (!symbols_.empty()) symbols_.back().after = -1;
}

// Short words: searches all pairs for the best one again after every join.
void Bpe::join_few() {
  while (symbols_.size() > 1) {
    const Union* best = nullptr;
    std::size_t place = 0;
    for (std::size_t i = 0; i + 1 < symbols_.size(); ++i)
      if (const Union* pair = find(symbols_[i].token, symbols_[i + 1].token);
          pair != nullptr && (best == nullptr || pair->rank < best->rank))
        best = pair, place = i;
    if (best == nullptr) return;
    symbols_[place].token = best->token;
    symbols_.erase(symbols_.begin() + static_cast<std::ptrdiff_t>(place) + 1);
  }
}

// Long words: pairs are in a heap, the best first, and of equals the leftmost. A symbol that was joined to
// its left neighbour leaves the chain of symbols. Pairs in the heap whose symbols have changed since are
// skipped.
void Bpe::join_many() {
  using Waiting = std::tuple<std::uint32_t, int, Token>;  // rank, left symbol, union
  std::priority_queue<Waiting, std::vector<Waiting>, std::greater<>> heap;
  const auto propose = [&](int left) {
    if (left < 0 || symbols_[static_cast<std::size_t>(left)].after < 0) return;
    const Symbol& symbol = symbols_[static_cast<std::size_t>(left)];
    if (const Union* pair = find(symbol.token, symbols_[static_cast<std::size_t>(symbol.after)].token))
      heap.emplace(pair->rank, left, pair->token);
  };
  for (int i = 0; i < static_cast<int>(symbols_.size()); ++i) propose(i);
  std::vector<bool> gone(symbols_.size());
  while (!heap.empty()) {
    const auto [rank, left, token] = heap.top();
    heap.pop();
    if (gone[static_cast<std::size_t>(left)]) continue;
    Symbol& symbol = symbols_[static_cast<std::size_t>(left)];
    if (symbol.after < 0) continue;
    const Symbol& next = symbols_[static_cast<std::size_t>(symbol.after)];
    const Union* now = find(symbol.token, next.token);
    if (now == nullptr || now->rank != rank) continue;
    gone[static_cast<std::size_t>(symbol.after)] = true;
    symbol.token = token;
    symbol.after = next.after;
    if (symbol.after >= 0) symbols_[static_cast<std::size_t>(symbol.after)].before = left;
    propose(symbol.before);
    propose(left);
  }
  std::size_t kept = 0;
  for (std::size_t i = 0; i < symbols_.size(); ++i)
    if (!gone[i]) symbols_[kept++] = symbols_[i];
  symbols_.resize(kept);
}

void Bpe::encode(std::string_view word, std::vector<Token>& out) {
  const bool remember = word.size() <= kLongWord;
  std::string key(remember ? word : std::string_view());
  if (remember)
    if (const auto found = remembered_.find(key); found != remembered_.end()) {
      out.insert(out.end(), found->second.begin(), found->second.end());
      return;
    }
  const std::size_t begin = out.size();
  const auto whole = settings_.whole_words ? vocabulary_.find(std::string(word)) : vocabulary_.end();
  if (whole != vocabulary_.end()) {
    out.push_back(whole->second);
  } else {
    add_symbols(word);
    symbols_.size() <= kFew ? join_few() : join_many();
    for (const Symbol& symbol : symbols_) out.push_back(symbol.token);
  }
  if (!remember) return;
  if (remembered_.size() >= kRemembered) remembered_.clear();
  remembered_.emplace(std::move(key),
                      std::vector<Token>(out.begin() + static_cast<std::ptrdiff_t>(begin), out.end()));
}

}  // namespace scruple::train
