#include "text.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdio>
#include <ostream>

#include "commands.h"

namespace scruple::cli {
namespace {

double suffix_factor(char suffix) {
  switch (suffix) {
    case 'k':
    case 'K': return 1e3;
    case 'M': return 1e6;
    case 'B':
    case 'G': return 1e9;
    case 'T': return 1e12;
    default: return 0;
  }
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
  return text;
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

Unit unit_for(std::int64_t largest) {
  constexpr Unit kUnits[] = {{"B", 1}, {"KiB", 0x1p10}, {"MiB", 0x1p20}, {"GiB", 0x1p30}, {"TiB", 0x1p40}};
  Unit chosen = kUnits[0];
  for (const Unit& unit : kUnits)
    if (static_cast<double>(largest) >= 10 * unit.bytes) chosen = unit;
  return chosen;
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

}  // namespace scruple::cli
