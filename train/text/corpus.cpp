#include "train/text/corpus.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <stdexcept>

#include "engine/philox.h"

namespace scruple::train {
namespace {

// ---- The language ----

enum class Fall { zipf, even };  // how probability falls from the first word of a class to its last

struct ClassRow {
  std::string_view name;
  int kept;  // how many of the candidates a seed keeps
  Fall fall;
  std::string_view candidates;  // "+two": plural
};

// Verbs take an s in the singular and nouns in the plural, so no word here may need more than that.
constexpr ClassRow kClasses[] = {
    {"name", 14, Fall::zipf, "al bo cy di ed flo gus hal ida jo kim lou may ned ora pam roy sue ted val"},
    {"beast", 14, Fall::zipf,
     "ant ape bat bee cat cow cub dog eel elk emu ewe goat hare hen jay mole newt owl pig"},
    {"kind", 10, Fall::zipf, "big coy dry fat icy mad new odd old pale red sad shy sly tame wee wet wild"},
    {"deal", 7, Fall::zipf, "buy find get hide keep lend lose rent sell want"},
    {"act", 7, Fall::zipf, "beg dig doze hop howl hum nap play purr rest run sing sit swim wait"},
    {"some", 6, Fall::zipf, "one this each +two +all +ten"},
    {"tell", 3, Fall::zipf, "add say shout think write vow"},
    {"syl", 28, Fall::even,
     "ba be bo da di do fa fe ga go ka ke ki la li lo ma me mu na no nu pa pe ra re ri ro sa se su ta te tu "
     "za zo"},
    {"0-9", 10, Fall::even, "0 1 2 3 4 5 6 7 8 9"},
    {"0-5", 6, Fall::even, "0 1 2 3 4 5"},
    {"1-9", 9, Fall::even, "1 2 3 4 5 6 7 8 9"},
};

struct SentenceRow {
  std::uint32_t weight;
  std::string_view pattern;
};

// {x} draws a word of class x, {=x} repeats the last one drawn, {X} has a capital; {+s} is an s if the last
// word of class "some" was plural, {-s} if it was singular.
constexpr SentenceRow kSentences[] = {
    {4, "{Name} {deal}s {1-9}{0-9} {kind} {beast}s in {Syl}{syl}{syl} for {1-9}{0-9}{0-9}, {tell}s {=Name}."},
    {3, "\"{Some} {kind} {beast}{+s} {act}{-s} in {Syl}{syl}{syl},\" {tell}s {Name}."},
    {2, "{Some} {kind} {beast}{+s} {deal}{-s} {1-9}{0-9} {beast}s in {Syl}{syl}{syl} for {1-9}{0-9}{0-9}."},
    {1, "{Name} {tell}s: \"{some} {kind} {beast}{+s} {act}{-s} at {1-9}:{0-5}{0-9}.\" So {=Name} {act}s."},
};

// ---- Choices ----

// Numbers from a counter (engine/philox.h); `stream` keeps the words of a seed apart from its lines.
class Dice {
 public:
  Dice(std::uint64_t seed, std::uint32_t stream)
      : key_{{static_cast<u32>(seed), static_cast<u32>(seed >> 32)}}, stream_(stream) {}

  // Uniform over [0, sides), exactly: numbers from the last, incomplete round of sides are thrown again.
  std::uint32_t below(std::uint32_t sides) {
    constexpr std::uint64_t kNumbers = std::uint64_t{1} << 32;
    const std::uint64_t whole = kNumbers / sides * sides;
    for (;;)
      if (const std::uint32_t number = next(); number < whole) return number % sides;
  }

 private:
  std::uint32_t next() {
    if (used_ == 4) {
      block_ = philox({{static_cast<u32>(counter_), static_cast<u32>(counter_ >> 32), stream_, 0}}, key_);
      ++counter_;
      used_ = 0;
    }
    return block_.x[used_++];
  }

  PhiloxKey key_;
  std::uint32_t stream_;
  std::uint64_t counter_ = 0;
  PhiloxBlock block_{};
  int used_ = 4;
};

constexpr std::uint32_t kWords = 1, kLines = 2;  // streams

// Zipf's law with Mandelbrot's shift, which keeps the commonest word from drowning the others.
std::uint32_t weight_of(Fall fall, std::size_t rank) {
  return fall == Fall::even ? 1 : 1000 / static_cast<std::uint32_t>(rank + 4);
}

std::vector<std::string_view> split(std::string_view words) {
  std::vector<std::string_view> result;
  while (!words.empty()) {
    const std::size_t end = std::min(words.find(' '), words.size());
    result.push_back(words.substr(0, end));
    words.remove_prefix(std::min(end + 1, words.size()));
  }
  return result;
}

Grammar::WordClass make_class(const ClassRow& row, Dice& dice) {
  std::vector<std::string_view> words = split(row.candidates);
  Grammar::WordClass made{std::string(row.name), {}, 0};
  for (std::size_t rank = 0; rank < static_cast<std::size_t>(row.kept); ++rank) {
    std::swap(words[rank], words[rank + dice.below(static_cast<std::uint32_t>(words.size() - rank))]);
    const bool plural = words[rank].front() == '+';
    const std::uint32_t weight = weight_of(row.fall, rank);
    made.words.push_back({std::string(words[rank].substr(plural ? 1 : 0)), weight, plural});
    made.total += weight;
  }
  return made;
}

// The first item whose share of the weights holds `ticket`; items have a member `weight`.
template <class Items>
std::size_t pick(const Items& items, std::uint32_t total, Dice& dice) {
  std::uint32_t ticket = dice.below(total);
  std::size_t i = 0;
  for (; ticket >= items[i].weight; ++i) ticket -= items[i].weight;
  return i;
}

double surprise_of(std::uint32_t weight, std::uint32_t total) {
  return std::log(static_cast<double>(total)) - std::log(static_cast<double>(weight));
}

template <class Items>
double mean_surprise(const Items& items, std::uint32_t total) {
  double sum = 0;
  for (const auto& item : items) sum += item.weight * surprise_of(item.weight, total);
  return sum / total;
}

char upper(char c) { return static_cast<char>(c >= 'a' && c <= 'z' ? c - 'a' + 'A' : c); }
char lower(char c) { return static_cast<char>(c >= 'A' && c <= 'Z' ? c - 'A' + 'a' : c); }

std::size_t class_named(std::string_view name, const std::vector<Grammar::WordClass>& classes) {
  for (std::size_t i = 0; i < classes.size(); ++i)
    if (classes[i].name == name) return i;
  throw std::logic_error("a sentence of the grammar asks for words of class \"" + std::string(name) +
                         "\", which has no row in kClasses");
}

using Drawn = std::array<std::size_t, std::size(kClasses)>;  // the last word drawn of each class

}  // namespace

// ---- The grammar ----

Grammar::Part Grammar::slot(std::string_view mark, const std::vector<WordClass>& classes) {
  if (mark == "+s") return {Part::if_plural, "s", class_named("some", classes)};
  if (mark == "-s") return {Part::if_singular, "s", class_named("some", classes)};
  const bool repeats = mark.front() == '=';
  std::string name(mark.substr(repeats ? 1 : 0));
  const bool capital = name.front() != lower(name.front());
  name.front() = lower(name.front());
  return {repeats ? Part::repeat : Part::draw, "", class_named(name, classes), capital};
}

Grammar::Sentence Grammar::compile(std::uint32_t weight, std::string_view pattern,
                                   const std::vector<WordClass>& classes) {
  Sentence sentence{weight, {}};
  while (!pattern.empty()) {
    const bool text = pattern.front() != '{';
    const std::size_t end = std::min(pattern.find(text ? '{' : '}'), pattern.size());
    if (text)
      sentence.parts.push_back({Part::text, std::string(pattern.substr(0, end))});
    else
      sentence.parts.push_back(slot(pattern.substr(1, end - 1), classes));
    pattern.remove_prefix(text ? end : end + 1);
  }
  return sentence;
}

Grammar::Grammar(std::uint64_t seed) {
  Dice dice(seed, kWords);
  for (const ClassRow& row : kClasses) classes_.push_back(make_class(row, dice));
  for (const SentenceRow& row : kSentences) {
    sentences_.push_back(compile(row.weight, row.pattern, classes_));
    total_ += row.weight;
  }
}

// What a part looks like when the word of its class is number `word`.
std::string Grammar::written(const Part& part, std::size_t word) const {
  const Word& chosen = classes_[part.word_class].words[word];
  switch (part.kind) {
    case Part::text: return part.literal;
    case Part::if_plural: return chosen.plural ? part.literal : "";
    case Part::if_singular: return chosen.plural ? "" : part.literal;
    default: break;
  }
  std::string text = chosen.text;
  if (part.capital) text.front() = upper(text.front());
  return text;
}

double Grammar::mean_length(const Part& part) const {
  const WordClass& words = classes_[part.word_class];
  double sum = 0;
  for (std::size_t i = 0; i < words.words.size(); ++i)
    sum += words.words[i].weight * static_cast<double>(written(part, i).size());
  return sum / words.total;
}

// Lines are independent and each tells its choices, so the entropy rate is H(choices) / E[bytes] of a line
// (Shannon, "A mathematical theory of communication", 1948, section 7; over many
// lines the mean per byte is the ratio of the means).
double Grammar::entropy() const {
  double nats = mean_surprise(sentences_, total_), bytes = 1;  // the '\n'
  for (const Sentence& sentence : sentences_) {
    const double share = static_cast<double>(sentence.weight) / total_;
    for (const Part& part : sentence.parts) {
      bytes += share * mean_length(part);
      const WordClass& words = classes_[part.word_class];
      if (part.kind == Part::draw) nats += share * mean_surprise(words.words, words.total);
    }
  }
  return nats / bytes;
}

Corpus Grammar::sample(std::int64_t bytes, std::uint64_t seed) const {
  Dice dice(seed, kLines);
  Corpus corpus{{'\n'}, {}, 0};
  Drawn drawn{};
  double nats = 0;
  while (static_cast<std::int64_t>(corpus.bytes.size()) < bytes) {
    corpus.line_starts.push_back(static_cast<std::int64_t>(corpus.bytes.size()) - 1);
    const Sentence& sentence = sentences_[pick(sentences_, total_, dice)];
    nats += surprise_of(sentence.weight, total_);
    for (const Part& part : sentence.parts) {
      const WordClass& words = classes_[part.word_class];
      std::size_t& last = drawn[part.word_class];
      if (part.kind == Part::draw) {
        last = pick(words.words, words.total, dice);
        nats += surprise_of(words.words[last].weight, words.total);
      }
      const std::string text = written(part, last);
      corpus.bytes.insert(corpus.bytes.end(), text.begin(), text.end());
    }
    corpus.bytes.push_back('\n');
  }
  const std::size_t counted = corpus.bytes.size() - 1;
  corpus.surprise = counted == 0 ? 0 : nats / static_cast<double>(counted);
  return corpus;
}

// Tries every word at every draw and keeps the ways that agree with the text as far as it goes.
struct Grammar::Reader {
  const Grammar& grammar;
  const Sentence& sentence;
  std::vector<double>& found;

  void read(std::size_t at, std::string_view rest, double nats, Drawn drawn) const {
    if (rest.empty()) return found.push_back(nats);  // whatever follows: its probabilities add up to 1
    const Part end{Part::text, "\n"};
    const bool ends = at == sentence.parts.size();
    const Part& part = ends ? end : sentence.parts[at];
    const auto go_on = [&](double more) {
      const std::string text = grammar.written(part, drawn[part.word_class]);
      const std::size_t shared = std::min(text.size(), rest.size());
      if (rest.substr(0, shared) != std::string_view(text).substr(0, shared)) return;
      if (ends && rest.size() > text.size()) return;
      read(at + 1, rest.substr(shared), nats + more, drawn);
    };
    if (part.kind != Part::draw) return go_on(0);
    const WordClass& words = grammar.classes_[part.word_class];
    for (std::size_t i = 0; i < words.words.size(); ++i) {
      drawn[part.word_class] = i;
      go_on(surprise_of(words.words[i].weight, words.total));
    }
  }
};

// -log p of each way in which a line and its '\n' can begin so.
std::vector<double> Grammar::ways(std::string_view beginning) const {
  std::vector<double> found;
  for (const Sentence& sentence : sentences_)
    Reader{*this, sentence, found}.read(0, beginning, surprise_of(sentence.weight, total_), {});
  return found;
}

std::vector<double> Grammar::derivations(std::string_view line) const {
  return ways(std::string(line) + '\n');
}

// Lines are independent, so their surprises add up; a line that is cut has the probability of all lines that
// begin so.
double Grammar::surprise(std::string_view text) const {
  double nats = 0;
  while (!text.empty()) {
    const std::size_t end = std::min(text.find('\n'), text.size() - 1) + 1;
    double probability = 0;
    for (const double way : ways(text.substr(0, end))) probability += std::exp(-way);
    nats -= std::log(probability);
    text.remove_prefix(end);
  }
  return nats;
}

}  // namespace scruple::train
