// Regular expressions over UTF-8, by PCRE2.
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <string_view>

namespace scruple::train {

struct Match {
  std::size_t begin, end;
};

class Pattern {
 public:
  // Throws std::runtime_error where it is no regular expression.
  explicit Pattern(const std::string& expression);
  ~Pattern();
  Pattern(Pattern&&) noexcept;

  // The first match that begins at `from` or later, in valid UTF-8; false: there is none. Not for two threads at once.
  bool find(std::string_view text, std::size_t from, Match& match);

 private:
  struct Compiled;
  std::unique_ptr<Compiled> compiled_;
};

}  // namespace scruple::train
