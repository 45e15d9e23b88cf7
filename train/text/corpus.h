// Text made by a seeded probabilistic grammar whose entropy is known: the loss that no model can beat.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace scruple::train {

struct Corpus {
  std::vector<std::uint8_t> bytes;        // lines that end in '\n'; begins with '\n'
  std::vector<std::int64_t> line_starts;  // index of the '\n' before each line
  // -log p of these bytes under the grammar, in nats per byte; the first '\n' is given and not counted.
  double surprise;
};

// A language of independent lines, such as
//   Roy buys 66 sly ants in Lolota for 520, vows Roy.
//   "This pale pig purrs in Lorozo," shouts Gus.
// The tables of words and sentences stand at the top of corpus.cpp. The choices behind a line can be read
// back from it in one way only, so the entropy of the text is the entropy of the choices.
class Grammar {
 public:
  struct Word {
    std::string text;
    std::uint32_t weight;  // its probability is weight / (sum of the class's weights)
    bool plural;           // what it stands before is plural
  };
  struct WordClass {
    std::string name;
    std::vector<Word> words;
    std::uint32_t total;  // of the weights
  };

  // The seed chooses the words and which of them are common. Integers alone decide: the same bytes
  // everywhere.
  explicit Grammar(std::uint64_t seed);
  // nats per byte, computed from the probabilities, not from a sample
  double entropy() const;
  // Whole lines, as many as it takes to have at least `bytes` bytes.
  Corpus sample(std::int64_t bytes, std::uint64_t seed) const;
  // -log p of a text that begins after a '\n', in nats; its last line may be cut anywhere. Infinite where it
  // breaks a rule. Nothing that knows the grammar can predict the text better on average.
  double surprise(std::string_view text) const;
  // -log p of each way to make this line (without its '\n'): one number, or none where the line breaks a
  // rule.
  std::vector<double> derivations(std::string_view line) const;
  const std::vector<WordClass>& lexicon() const { return classes_; }

 private:
  struct Part {
    enum Kind { text, draw, repeat, if_plural, if_singular } kind;
    std::string literal;  // of all kinds but draw and repeat
    std::size_t word_class = 0;
    bool capital = false;
  };
  struct Sentence {
    std::uint32_t weight;
    std::vector<Part> parts;
  };
  struct Reader;

  static Part slot(std::string_view mark, const std::vector<WordClass>& classes);
  static Sentence compile(std::uint32_t weight, std::string_view pattern,
                          const std::vector<WordClass>& classes);
  std::vector<double> ways(std::string_view beginning) const;
  std::string written(const Part& part, std::size_t word) const;
  double mean_length(const Part& part) const;

  std::vector<WordClass> classes_;
  std::vector<Sentence> sentences_;
  std::uint32_t total_ = 0;  // of the sentences' weights
};

}  // namespace scruple::train
