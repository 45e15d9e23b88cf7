// A run as one self-contained HTML file: curves, memory bars, tables. No script, style, font or picture from
// elsewhere.
#pragma once

#include <string>
#include <utility>
#include <vector>

namespace scruple::train {

struct Curve {
  std::string name;
  std::vector<double> x, y;  // x finite and never falling; a y that is not finite is drawn as a gap
  bool reference = false;    // drawn as the one the others are measured by
};

struct Chart {
  std::string title, note, x_label, y_label;
  std::vector<Curve> curves;
  std::vector<std::pair<std::string, double>> levels;  // horizontal lines, such as the best possible loss
  bool small = false;                                  // half as wide, and without the close view
  // Amounts, each on top of those before it: the curves have the same x, and their y are finite and never negative.
  bool stacked = false;
};

// One horizontal bar per row, split by kind.
struct Bars {
  std::string title, note, unit;  // "bytes per parameter"
  struct Row {
    std::string name;
    std::vector<std::pair<std::string, double>> parts;  // kind, amount; finite and never negative
  };
  std::vector<Row> rows;
};

struct Figures {
  std::string title, note;
  std::vector<std::vector<std::string>> rows;  // the first one is the header; the first column is flush left
};

// Drawn in this order: tables, then bars, then charts; any list may be empty.
struct Section {
  std::string title, text;
  std::vector<Figures> tables;
  std::vector<Bars> bars;
  std::vector<Chart> charts;
};

struct Report {
  std::string title, lead;
  std::vector<Section> sections;
};

// Names and texts may hold anything: they are shown as they are, never read as HTML. Every number stands in
// the file with all its digits, in the JSON of its element "data". Throws std::invalid_argument where a list
// does not fit its neighbour (a curve with more values than steps, a short table row) or breaks the above.
std::string to_html(const Report& report);

}  // namespace scruple::train
