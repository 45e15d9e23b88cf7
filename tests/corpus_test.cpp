// The grammar: that its entropy is what samples show, that lines tell their choices, that seeds decide everything.
#include "train/text/corpus.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <numeric>
#include <set>
#include <string>
#include <string_view>
#include <vector>

namespace scruple_tests {
namespace {

using scruple::train::Corpus;
using scruple::train::Grammar;

constexpr std::uint64_t kSeeds[] = {0, 1, 2, 17, 0xffffffffffffffff};

// Lines without their '\n'.
std::vector<std::string> lines_of(const Corpus& corpus) {
  std::vector<std::string> lines;
  for (std::size_t i = 0; i < corpus.line_starts.size(); ++i) {
    const auto begin = static_cast<std::size_t>(corpus.line_starts[i]) + 1;
    const std::size_t end = i + 1 < corpus.line_starts.size()
                                ? static_cast<std::size_t>(corpus.line_starts[i + 1])
                                : corpus.bytes.size() - 1;
    lines.emplace_back(corpus.bytes.begin() + static_cast<std::ptrdiff_t>(begin),
                       corpus.bytes.begin() + static_cast<std::ptrdiff_t>(end));
  }
  return lines;
}

std::string capitalised(std::string word) {
  word[0] = static_cast<char>(word[0] - 'a' + 'A');
  return word;
}

std::uint64_t fnv1a(const std::vector<std::uint8_t>& bytes) {
  std::uint64_t hash = 0xcbf29ce484222325;
  for (const std::uint8_t byte : bytes) hash = (hash ^ byte) * 0x100000001b3;
  return hash;
}

TEST(Corpus, IsLinesBetweenLineFeeds) {
  for (const std::uint64_t seed : kSeeds) {
    const Corpus corpus = Grammar(seed).sample(20000, 1);
    ASSERT_GE(corpus.bytes.size(), 20000u);
    EXPECT_LT(corpus.bytes.size(), 20080u) << "no more than a line too long";
    EXPECT_EQ(corpus.bytes.front(), '\n');
    EXPECT_EQ(corpus.bytes.back(), '\n');
    std::vector<std::int64_t> feeds;
    for (std::size_t i = 0; i + 1 < corpus.bytes.size(); ++i)
      if (corpus.bytes[i] == '\n') feeds.push_back(static_cast<std::int64_t>(i));
    EXPECT_EQ(feeds, corpus.line_starts);
    for (const std::string& line : lines_of(corpus)) {
      EXPECT_GE(line.size(), 30u) << line;
      EXPECT_LE(line.size(), 70u) << line;
      EXPECT_TRUE(std::all_of(line.begin(), line.end(), [](char c) { return c >= ' ' && c <= '~'; })) << line;
    }
  }
}

TEST(Corpus, OfNoBytesHasNoLines) {
  for (const std::int64_t bytes : {-5, 0, 1}) {
    const Corpus corpus = Grammar(3).sample(bytes, 1);
    EXPECT_EQ(corpus.bytes, std::vector<std::uint8_t>{'\n'});
    EXPECT_TRUE(corpus.line_starts.empty());
    EXPECT_EQ(corpus.surprise, 0);
  }
}

// If the choices can be read back in one way, the probability of a text is the probability of its choices.
TEST(Corpus, LinesTellTheirChoicesInOneWay) {
  for (const std::uint64_t seed : kSeeds) {
    const Grammar grammar(seed);
    const Corpus corpus = grammar.sample(300000, 5);
    double nats = 0;
    for (const std::string& line : lines_of(corpus)) {
      const std::vector<double> ways = grammar.derivations(line);
      ASSERT_EQ(ways.size(), 1u) << line;
      nats += ways[0];
    }
    EXPECT_NEAR(nats / static_cast<double>(corpus.bytes.size() - 1), corpus.surprise, 1e-12);
  }
}

// Why that holds for every line, drawn or not: words of a class differ, and stay different with an s behind them.
TEST(Corpus, WordsOfAClassCannotBeMistaken) {
  for (const std::uint64_t seed : kSeeds) {
    const Grammar grammar(seed);
    for (const Grammar::WordClass& words : grammar.lexicon()) {
      std::set<std::string> forms;
      const bool fixed =
          words.words[0].text.size() <= 2 && words.name != "name";  // digits, syllables: nothing follows
      for (const Grammar::Word& word : words.words) {
        EXPECT_TRUE(forms.insert(word.text).second) << word.text;
        if (fixed) {
          EXPECT_EQ(word.text.size(), words.words[0].text.size()) << word.text;
        } else {
          EXPECT_TRUE(forms.insert(word.text + "s").second) << word.text;
        }
        EXPECT_GT(word.weight, 0u);
      }
      const auto add = [](std::uint32_t sum, const Grammar::Word& word) { return sum + word.weight; };
      EXPECT_EQ(std::accumulate(words.words.begin(), words.words.end(), 0u, add), words.total);
    }
  }
}

// The sample's ratio of sums against the exact ratio of means. Its standard error, by the delta method: the deviation
// of (nats - entropy * bytes) over lines, over the square root of their number and the mean length.
TEST(Corpus, SurpriseConvergesToEntropy) {
  for (const std::uint64_t seed : kSeeds) {
    const Grammar grammar(seed);
    const double entropy = grammar.entropy();
    double last_error = 0;
    for (const std::int64_t bytes : {10000, 100000, 1000000}) {
      const Corpus corpus = grammar.sample(bytes, seed + 99);
      const std::vector<std::string> lines = lines_of(corpus);
      double squares = 0, length = 0;
      for (const std::string& line : lines) {
        const double size = static_cast<double>(line.size() + 1);
        const double apart = grammar.derivations(line).at(0) - entropy * size;
        squares += apart * apart;
        length += size;
      }
      const double count = static_cast<double>(lines.size());
      const double error = std::sqrt(squares / count) / std::sqrt(count) / (length / count);
      EXPECT_NEAR(corpus.surprise, entropy, 4 * error) << "seed " << seed << ", " << bytes << " bytes";
      if (last_error > 0) {
        EXPECT_LT(error, last_error / 2.5) << "the error falls with the root of the size";
      }
      last_error = error;
    }
    EXPECT_LT(last_error, 0.001);
  }
}

TEST(Corpus, EntropyIsThatOfAText) {
  for (std::uint64_t seed = 0; seed < 50; ++seed) {
    const double entropy = Grammar(seed).entropy();
    EXPECT_GT(entropy, 0.58) << seed;
    EXPECT_LT(entropy, 1.1) << seed;
  }
}

std::string text_of(const Corpus& corpus) {  // what follows the first '\n'
  return {corpus.bytes.begin() + 1, corpus.bytes.end()};
}

TEST(Corpus, ATextHasTheSurpriseOfItsChoices) {
  for (const std::uint64_t seed : kSeeds) {
    const Grammar grammar(seed);
    const Corpus corpus = grammar.sample(20000, 7);
    const std::string text = text_of(corpus);
    EXPECT_NEAR(grammar.surprise(text), corpus.surprise * static_cast<double>(text.size()), 1e-6);
    EXPECT_EQ(grammar.surprise(""), 0);
    EXPECT_EQ(grammar.surprise(text.substr(1)), std::numeric_limits<double>::infinity());
    EXPECT_EQ(grammar.surprise(text + "\n"), std::numeric_limits<double>::infinity());
  }
}

// A text cut anywhere: the probabilities of all bytes that may come next add up to its own.
TEST(Corpus, TheNextByteIsOneOfAll) {
  const Grammar grammar(1);
  const std::string text = text_of(grammar.sample(150, 11));
  for (std::size_t cut = 0; cut < text.size(); ++cut) {
    const std::string before = text.substr(0, cut);
    const double known = grammar.surprise(before);
    double sum = 0;
    for (const char next :
         std::string_view("\n \",.:0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"))
      sum += std::exp(known - grammar.surprise(before + next));
    EXPECT_NEAR(sum, 1, 1e-9) << before;
  }
}

// The windows of a validation begin with a line and end in one. The beginning of a line tells most of it, so
// the best loss on them is above the entropy, which counts whole lines alone.
TEST(Corpus, AWindowThatCutsALineIsHarderThanTheText) {
  const Grammar grammar(1);
  const Corpus corpus = grammar.sample(1 << 18, 2);
  const std::string text = text_of(corpus);
  constexpr std::size_t kContext = 128;
  double sum = 0, count = 0;
  for (const std::int64_t start : corpus.line_starts) {
    const auto at = static_cast<std::size_t>(start);
    if (at + kContext > text.size()) break;
    sum += grammar.surprise(std::string_view(text).substr(at, kContext)) / kContext;
    ++count;
  }
  EXPECT_NEAR(sum / count, 0.621, 0.001);
  EXPECT_NEAR(grammar.entropy(), 0.6088, 0.0001);
}

// Frequencies of words in the text against their weights: the sampler draws what entropy() counts.
TEST(Corpus, WordsComeAsOftenAsTheirWeightsSay) {
  const Grammar grammar(1);
  std::map<std::string, int> counts;
  int lines = 0;
  for (const std::string& line : lines_of(grammar.sample(2000000, 3)))
    if (line[0] != '"' && line.find(" for ") != line.npos &&
        line.find(',') != line.npos) {  // "Name deals..."
      ++counts[line.substr(0, line.find(' '))];
      ++lines;
    }
  for (const Grammar::WordClass& words : grammar.lexicon())
    if (words.name == "name")
      for (const Grammar::Word& word : words.words) {
        const std::string name = capitalised(word.text);
        const double p = static_cast<double>(word.weight) / words.total, n = lines;
        EXPECT_NEAR(counts[name] / n, p, 4.5 * std::sqrt(p * (1 - p) / n)) << name;
      }
}

TEST(Corpus, ALineThatBreaksARuleIsNotOfTheLanguage) {
  const Grammar grammar(1);
  for (const std::string& line : lines_of(grammar.sample(3000, 8))) {
    ASSERT_EQ(grammar.derivations(line).size(), 1u) << line;
    for (std::size_t i = 0; i < line.size(); ++i) {
      std::string broken = line;
      broken[i] = '#';
      EXPECT_TRUE(grammar.derivations(broken).empty()) << broken;
    }
    EXPECT_TRUE(grammar.derivations(line + ".").empty());
    EXPECT_TRUE(grammar.derivations(line + "\n").empty());
    EXPECT_TRUE(grammar.derivations(line.substr(1)).empty());
    EXPECT_TRUE(grammar.derivations(line.substr(0, line.size() - 1)).empty());
  }
  EXPECT_TRUE(grammar.derivations("").empty());
}

// Long-range rules: the name that begins a line ends it, the verb has the subject's number, quotes close.
TEST(Corpus, PartsOfALineAgree) {
  const Grammar grammar(2);
  std::vector<std::string> names;
  for (const Grammar::Word& word : grammar.lexicon()[0].words) names.push_back(capitalised(word.text));
  int returns = 0, numbers = 0, quotes = 0;
  for (const std::string& line : lines_of(grammar.sample(100000, 4))) {
    const std::string name = line.substr(0, line.find(' '));
    if (const std::size_t again = line.rfind(" " + name + "."); again != line.npos) {
      std::string other = line;
      other.replace(again + 1, name.size(), name == names[0] ? names[1] : names[0]);
      EXPECT_TRUE(grammar.derivations(other).empty()) << other;
      ++returns;
    }
    for (const auto& [from, to] :
         {std::pair("Two ", "One "), std::pair("One ", "Two "), std::pair("\"Two ", "\"One ")})
      if (line.starts_with(from)) {
        const std::string other = to + line.substr(std::string_view(from).size());
        EXPECT_TRUE(grammar.derivations(other).empty()) << other;
        ++numbers;
      }
    EXPECT_EQ(std::count(line.begin(), line.end(), '"') % 2, 0) << line;
    quotes += line.find('"') != line.npos ? 1 : 0;
  }
  EXPECT_GT(returns, 500);
  EXPECT_GT(numbers, 100);
  EXPECT_GT(quotes, 500);
}

TEST(Corpus, TheSeedDecidesEveryByte) {
  EXPECT_EQ(Grammar(9).sample(5000, 4).bytes, Grammar(9).sample(5000, 4).bytes);
  EXPECT_NE(Grammar(9).sample(5000, 4).bytes, Grammar(9).sample(5000, 5).bytes);
  std::set<std::vector<std::string>> lexicons;
  for (std::uint64_t seed = 0; seed < 20; ++seed) {
    const Grammar grammar(seed);
    std::vector<std::string> all;
    for (const Grammar::WordClass& words : grammar.lexicon())
      for (const Grammar::Word& word : words.words) all.push_back(word.text);
    EXPECT_LE(all.size(), 120u);
    std::sort(all.begin(), all.end());
    EXPECT_TRUE(lexicons.insert(all).second) << "seed " << seed << " has the words of another";
  }
}

TEST(Corpus, ALongerSampleBeginsWithTheShorter) {
  const Grammar grammar(6);
  const std::vector<std::uint8_t> few = grammar.sample(1000, 2).bytes, many = grammar.sample(9000, 2).bytes;
  EXPECT_TRUE(std::equal(few.begin(), few.end(), many.begin()));
}

// Golden: any machine, any compiler. Changing the grammar changes them, and every published loss with it.
TEST(Corpus, HasTheSameBytesEverywhere) {
  EXPECT_EQ(fnv1a(Grammar(1).sample(100000, 1).bytes), 14149366307064896446u);
  EXPECT_EQ(fnv1a(Grammar(0xdeadbeefcafe).sample(100000, 0x123456789abcdef).bytes), 7236255166424464679u);
}

}  // namespace
}  // namespace scruple_tests
