// Writes a report as one HTML file: the page of train/run/page/, its style and script inside, with the data as
// JSON. The C++ side only checks and embeds; what the reader sees is made by report.js from the data alone.
#include "train/run/report.h"

#include <report_page.h>  // made by cmake/embed.cmake

#include <cmath>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <string_view>

namespace scruple::train {
namespace {

using Json = nlohmann::ordered_json;

[[noreturn]] void refuse(const std::string& what) { throw std::invalid_argument("report: " + what); }

std::string count(size_t n, const char* of) { return std::to_string(n) + " " + of + (n == 1 ? "" : "s"); }

void check(const Curve& curve) {
  const std::string name = "curve '" + curve.name + "' has ";
  if (curve.x.size() != curve.y.size()) {
    refuse(name + count(curve.x.size(), "step") + " and " + count(curve.y.size(), "value") +
           "; give each value its step");
  }
  for (size_t i = 0; i < curve.x.size(); ++i) {
    if (!std::isfinite(curve.x[i]) || (i > 0 && curve.x[i] < curve.x[i - 1])) {
      refuse(name + "step " + std::to_string(curve.x[i]) + " at index " + std::to_string(i) +
             "; steps must be finite and may not fall");
    }
  }
}

void check(const Bars& bars) {
  for (const Bars::Row& row : bars.rows) {
    for (const auto& [kind, amount] : row.parts) {
      if (!std::isfinite(amount) || amount < 0) {
        refuse("bar '" + row.name + "' of '" + bars.title + "' has " + std::to_string(amount) + " of '" +
               kind + "'; an amount must be finite and not negative");
      }
    }
  }
}

void check(const Figures& table) {
  for (size_t i = 1; i < table.rows.size(); ++i) {
    if (table.rows[i].size() != table.rows[0].size()) {
      refuse("row " + std::to_string(i) + " of table '" + table.title + "' has " +
             count(table.rows[i].size(), "cell") + " under " + count(table.rows[0].size(), "heading") +
             "; give it a cell for each, empty ones too");
    }
  }
}

template <class T>
Json array(const std::vector<T>& list, Json (*one)(const T&)) {
  Json out = Json::array();
  for (const T& item : list) out.push_back(one(item));
  return out;
}

Json curve_data(const Curve& curve) {
  check(curve);
  return {{"name", curve.name}, {"reference", curve.reference}, {"x", curve.x}, {"y", curve.y}};
}

Json level_data(const std::pair<std::string, double>& level) {
  return {{"name", level.first}, {"value", level.second}};
}

void check_stack(const Chart& chart) {
  for (const Curve& curve : chart.curves) {
    const std::string name = "curve '" + curve.name + "' of the stack '" + chart.title + "' has ";
    if (curve.x != chart.curves[0].x) refuse(name + "other steps than the first; give all the same");
    for (const double y : curve.y) {
      if (!std::isfinite(y) || y < 0)
        refuse(name + std::to_string(y) + "; an amount must be finite and not negative");
    }
  }
}

Json chart_data(const Chart& chart) {
  if (chart.stacked) check_stack(chart);
  return {{"title", chart.title},
          {"note", chart.note},
          {"x_label", chart.x_label},
          {"y_label", chart.y_label},
          {"small", chart.small},
          {"stacked", chart.stacked},
          {"curves", array(chart.curves, curve_data)},
          {"levels", array(chart.levels, level_data)}};
}

Json part_data(const std::pair<std::string, double>& part) {
  return {{"kind", part.first}, {"amount", part.second}};
}

Json row_data(const Bars::Row& row) { return {{"name", row.name}, {"parts", array(row.parts, part_data)}}; }

Json bars_data(const Bars& bars) {
  check(bars);
  return {
      {"title", bars.title}, {"note", bars.note}, {"unit", bars.unit}, {"rows", array(bars.rows, row_data)}};
}

Json table_data(const Figures& table) {
  check(table);
  Json rows = Json::array();  // not from an initializer list: rows of two cells would become an object
  for (const auto& row : table.rows) rows.push_back(Json(row));
  return {{"title", table.title}, {"note", table.note}, {"rows", rows}};
}

Json section_data(const Section& section) {
  return {{"title", section.title},
          {"text", section.text},
          {"tables", array(section.tables, table_data)},
          {"bars", array(section.bars, bars_data)},
          {"charts", array(section.charts, chart_data)}};
}

// In an HTML script element only '<' can end the data early or open a comment; JSON has another spelling for
// it. Doubles keep all their digits, and what is not finite becomes null, by the JSON library's own rule.
// Bytes that are not UTF-8 become U+FFFD.
std::string embedded(const Json& data) {
  const std::string text = data.dump(-1, ' ', false, Json::error_handler_t::replace);
  std::string out;
  out.reserve(text.size());
  for (const char c : text) {
    if (c == '<') {
      out += "\\u003c";
    } else {
      out += c;
    }
  }
  return out;
}

std::string escaped(const std::string& text) {
  std::string out;
  for (const char c : text) {
    switch (c) {
      case '&': out += "&amp;"; break;
      case '<': out += "&lt;"; break;
      case '>': out += "&gt;"; break;
      case '"': out += "&quot;"; break;
      default: out += c;
    }
  }
  return out;
}

}  // namespace

std::string to_html(const Report& report) {
  const Json data = {
      {"title", report.title}, {"lead", report.lead}, {"sections", array(report.sections, section_data)}};
  const std::string_view page = kPage, title = "{{title}}", json = "{{data}}";
  const size_t title_at = page.find(title), after_title = title_at + title.size();
  const size_t data_at = page.find(json, after_title), after_data = data_at + json.size();
  std::string out(page.substr(0, title_at));
  out += escaped(report.title.empty() ? "Report" : report.title);
  out += page.substr(after_title, data_at - after_title);
  out += embedded(data);
  out += page.substr(after_data);
  return out;
}

}  // namespace scruple::train
