#include "text.h"

#include <algorithm>
#include <cctype>
#include <charconv>
#include <cmath>
#include <cstdio>
#include <iterator>
#include <ostream>
#include <string_view>

#include "commands.h"

namespace scruple::cli {
namespace {

double suffix_factor(char suffix) {
  constexpr double kFactors[] = {1e3, 1e3, 1e6, 1e9, 1e9, 1e12};
  const std::size_t at = std::string_view("kKMBGT").find(suffix);
  return at < std::size(kFactors) ? kFactors[at] : 0;
}

std::string lower(std::string word) {
  for (char& c : word) c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  return word;
}

// Letters put in, left out, replaced, or swapped with their neighbour: the fewest that lead from one word
// to the other. Capitals are no slips.
std::size_t slips_between(const std::string& typed, const std::string& known) {
  const std::string a = lower(typed), b = lower(known);
  std::vector<std::vector<std::size_t>> d(a.size() + 1, std::vector<std::size_t>(b.size() + 1));
  for (std::size_t i = 0; i <= a.size(); ++i)
    for (std::size_t j = 0; j <= b.size(); ++j) {
      if (i == 0 || j == 0) {
        d[i][j] = i + j;
        continue;
      }
      const std::size_t same = a[i - 1] == b[j - 1] ? 0 : 1;
      d[i][j] = std::min({d[i - 1][j] + 1, d[i][j - 1] + 1, d[i - 1][j - 1] + same});
      if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1])
        d[i][j] = std::min(d[i][j], d[i - 2][j - 2] + 1);
    }
  return d[a.size()][b.size()];
}

}  // namespace

void Table::print(std::ostream& out) const {
  std::vector<std::size_t> widths;
  for (const auto& row : rows) {
    widths.resize(std::max(widths.size(), row.size()));
    for (std::size_t c = 0; c < row.size(); ++c) widths[c] = std::max(widths[c], row[c].size());
  }
  for (const auto& row : rows) {
    std::string line;
    for (std::size_t c = 0; c < row.size(); ++c) {
      const std::string padding(widths[c] - row[c].size(), ' ');
      const bool flush_left = c == 0 || std::find(left.begin(), left.end(), c) != left.end();
      line += (c == 0 ? "" : "  ") + (flush_left ? row[c] + padding : padding + row[c]);
    }
    line.erase(line.find_last_not_of(' ') + 1);
    out << line << '\n';
  }
}

std::string fixed(double value, int decimals) {
  char text[64];
  std::snprintf(text, sizeof text, "%.*f", decimals, value);
  const bool zero = std::abs(value) < 1 && std::string(text).find_first_of("123456789") == std::string::npos;
  return text[0] == '-' && (zero || std::isnan(value)) ? text + 1 : text;
}

std::string shortest(double value, int digits) {
  char text[64];
  std::snprintf(text, sizeof text, "%.*g", digits, value);
  return text;
}

std::string grouped(std::int64_t value) {
  std::string text = std::to_string(value);
  for (std::ptrdiff_t at = std::ptrdiff_t(text.size()) - 3; at > 0; at -= 3)
    text.insert(std::size_t(at), ",");
  return text;
}

std::string plural(std::int64_t count, const std::string& noun) {
  return grouped(count) + " " + noun + (count == 1 ? "" : "s");
}

std::string replaced_words(std::int64_t places) {
  return plural(places, "place") + " in the text " + (places == 1 ? "was" : "were") +
         " no UTF-8 and became U+FFFD";
}

std::string joined(const std::vector<std::string>& words, const char* between) {
  std::string text;
  for (const std::string& word : words) text += (text.empty() ? "" : between) + word;
  return text;
}

std::string either(std::vector<std::string> words) {
  if (words.size() < 2) return joined(words);
  const std::string last = words.back();
  words.pop_back();
  return joined(words) + " or " + last;
}

std::string did_you_mean(const std::string& word, const std::vector<std::string>& known) {
  constexpr std::size_t kLongest = 100;  // no name is longer
  if (word.size() > kLongest) return "";
  std::vector<std::string> nearest;
  std::size_t fewest = std::max<std::size_t>(1, word.size() / 3);
  for (const std::string& name : known) {
    const std::size_t slips = slips_between(word, name);
    if (slips > fewest) continue;
    if (slips < fewest) nearest.clear();
    fewest = slips;
    nearest.push_back("'" + name + "'");
  }
  return nearest.empty() ? "" : "; did you mean " + joined(nearest, " or ") + "?";
}

Check one_of(const std::vector<std::string>& known) {
  return {[known](const std::string& value) {
            if (std::find(known.begin(), known.end(), value) != known.end()) return std::string();
            return "'" + value + "' is none of " + joined(known) + did_you_mean(value, known);
          },
          "{" + joined(known, ",") + "}"};
}

Unit unit_for(std::int64_t largest, double least) {
  constexpr Unit kUnits[] = {{"B", 1}, {"KiB", 0x1p10}, {"MiB", 0x1p20}, {"GiB", 0x1p30}, {"TiB", 0x1p40}};
  Unit chosen = kUnits[0];
  for (const Unit& unit : kUnits)
    if (static_cast<double>(largest) >= least * unit.bytes) chosen = unit;
  return chosen;
}

std::string size_words(std::int64_t bytes) {
  const Unit unit = unit_for(bytes, 1);
  return fixed(static_cast<double>(bytes) / unit.bytes, 1) + " " + unit.name;
}

std::string need_words(std::int64_t bytes) {
  const double tenth = unit_for(bytes, 1).bytes / 10, tenths = std::ceil(static_cast<double>(bytes) / tenth);
  return size_words(static_cast<std::int64_t>(std::ceil(tenths * tenth)));
}

double parse_number(const std::string& text, const std::string& what) {
  double value = 0;
  const char* end = text.data() + text.size();
  const auto [stop, problem] = std::from_chars(text.data(), end, value);
  if (problem != std::errc() || stop != end)
    throw UsageError(what + " is '" + text + "'; it must be a number");
  return value;
}

std::int64_t parse_count(const std::string& text, const std::string& what) {
  const auto refuse = [&](const char* wanted) -> UsageError {
    return UsageError(what + " is '" + text + "'; " + wanted);
  };
  double value = 0;
  const char* end = text.data() + text.size();
  const auto [stop, problem] = std::from_chars(text.data(), end, value);
  if (problem == std::errc::result_out_of_range) throw refuse("it must be 1 to 2^50");
  double factor = 1;
  if (end - stop == 1) factor = suffix_factor(*stop);
  if (problem != std::errc() || end - stop > 1 || factor == 0)
    throw refuse("it must be a number such as 8030000000, 8.03e9, 8.03B or 125M");
  value *= factor;
  if (!(value >= 1 && value <= static_cast<double>(kMaxCount))) throw refuse("it must be 1 to 2^50");
  // 8.03 * 1e9 need not be whole in binary; half a parameter is a slip.
  const double whole = std::round(value);
  if (std::abs(value - whole) > 1e-9 * whole) throw refuse("it must be a whole number");
  return static_cast<std::int64_t>(whole);
}

std::int64_t parse_size(const std::string& text, const std::string& what) {
  double value = 0;
  const char* const end = text.data() + text.size();
  const auto [stop, problem] = std::from_chars(text.data(), end, value);
  const std::string_view unit(stop, static_cast<std::size_t>(end - stop));
  const std::size_t power = std::string_view("BKMGT").find(unit.substr(0, 1));
  const std::string_view rest = unit.substr(std::min<std::size_t>(1, unit.size()));
  const bool is_unit =
      !unit.empty() && power < 5 && (power == 0 ? rest.empty() : rest == "B" || rest == "iB");
  double factor = 1;  // std::pow would ask for a later glibc than the library in a wheel does
  for (std::size_t i = 0; is_unit && i < power; ++i) factor *= rest == "iB" ? 1024 : 1000;
  const double bytes = std::round(value * factor);
  if (problem != std::errc() || !is_unit || !(bytes >= 1 && bytes <= static_cast<double>(kMaxCount)))
    throw UsageError(what + " is '" + text + "'; it must be a size such as 46GiB, 48GB or 500MiB");
  return static_cast<std::int64_t>(bytes);
}

}  // namespace scruple::cli
