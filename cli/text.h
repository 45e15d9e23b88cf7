// Text for people and numbers from people: aligned tables, readable numbers, counts such as 8.03e9 or 125M.
#pragma once

#include <cstdint>
#include <iosfwd>
#include <string>
#include <vector>

namespace scruple::cli {

// Rows of cells; the first column is flush left, the others flush right unless `left` names them.
struct Table {
  std::vector<std::vector<std::string>> rows;  // the first one is the header
  std::vector<std::size_t> left;
  void print(std::ostream& out) const;
};

std::string fixed(double value, int decimals);       // what rounds to zero has no sign
std::string shortest(double value, int digits = 6);  // 0.001, 1e-08
std::string grouped(std::int64_t value);             // 8,030,000,000
std::string plural(std::int64_t count, const std::string& noun);
// "2 places in the text were no UTF-8 and became U+FFFD"
std::string replaced_words(std::int64_t places);
std::string joined(const std::vector<std::string>& words, const char* between = ", ");
std::string either(std::vector<std::string> words);  // nearest, truncate or wide
// "; did you mean 'train'?" where a slip or two lead from one of `known` to `word`; "" where none is so near.
std::string did_you_mean(const std::string& word, const std::vector<std::string>& known);

// A unit of which `largest` bytes are at least `least`, for all sizes of one table.
struct Unit {
  const char* name;
  double bytes;
};
Unit unit_for(std::int64_t largest, double least = 10);
std::string size_words(std::int64_t bytes);  // 21.4 GiB
std::string need_words(std::int64_t bytes);  // rounded up, so that what does not fit reads so

inline constexpr std::int64_t kMaxCount = std::int64_t{1} << 50;  // what one tensor may hold

// 8030000000, 8.03e9, 8.03B or 125M (K, M, B or G, T) into a whole number of 1 to 2^50; `what` names it in
// errors.
std::int64_t parse_count(const std::string& text, const std::string& what);
// 48GB, 46GiB or 1.5TiB into bytes, at least 1; `what` names it in errors.
std::int64_t parse_size(const std::string& text, const std::string& what);
// A number with nothing after it.
double parse_number(const std::string& text, const std::string& what);

}  // namespace scruple::cli
