// The report's data: every number comes back bit for bit, no name can leave its place, bad lists are refused.
// With SCRUPLE_REPORT_DIR set, the samples are also written there for tests/browser_test.py to open.
#include "train/run/report.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <limits>
#include <nlohmann/json.hpp>
#include <stdexcept>

namespace scruple::train {
namespace {

using Json = nlohmann::json;

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
constexpr double kInf = std::numeric_limits<double>::infinity();
constexpr const char* kDataOpens = "<script type=\"application/json\" id=\"data\">";

const char* const kRecipes[] = {"fp32", "bf16+16", "flash", "plain8", "scruple", "scant", "bf16", "lpmm"};

// Falls from 5.5 to about 1, with the noise of batches; runs that see the same batches share most of it.
double loss(int recipe, int step) {
  const double fall = 1.02 + 4.5 * std::exp(-step / 45.0) + 0.35 * std::exp(-step / 220.0);
  const double batch = 0.03 * std::sin(step * 1.7) * std::cos(step * 0.31);
  const double own = 0.006 * std::sin(step * (0.9 + 0.13 * recipe)) + 0.009 * recipe;
  return fall + batch + own;
}

Curve falling(int recipe, int points) {
  Curve curve{kRecipes[recipe], {}, {}, recipe == 0};
  for (int i = 1; i <= points; ++i) {
    curve.x.push_back(i);
    curve.y.push_back(loss(recipe, i));
  }
  return curve;
}

Chart losses(int points) {
  Chart chart{"Training loss",
              "Every run sees the same batches in the same order.",
              "step",
              "loss (nats per byte)",
              {},
              {}};
  chart.levels = {{"entropy of the corpus", 0.95}};
  for (int r = 0; r < 8; ++r) chart.curves.push_back(falling(r, points));
  return chart;
}

Bars memory() {
  Bars bars{"Where the bytes go", "AdamW, gradients stored.", "bytes per parameter", {}};
  const double parts[8][6] = {{4, 0, 4, 4, 0, 4},          {2, 2, 4, 4, 0, 2},
                              {2, 1, 1, 1, 0.125, 2},      {2, 1, 1, 1, 0.125, 2},
                              {2, 1, 1, 1, 0.125, 1.0625}, {2, 1, 1, 0.5, 0.09375, 1.0625},
                              {2, 0, 2, 2, 0, 2},          {1.25, 0, 1, 0, 0.1875, 1}};
  const char* const kinds[] = {"weights", "extra", "exp_avg", "exp_avg_sq", "scales", "gradients"};
  for (int r = 0; r < 8; ++r) {
    Bars::Row row{kRecipes[r], {}};
    for (int k = 0; k < 6; ++k) row.parts.emplace_back(kinds[k], parts[r][k]);
    bars.rows.push_back(row);
  }
  return bars;
}

// Of kinds that the bars have, one that they have not, and one that is not there all the time.
Chart held() {
  const std::vector<double> steps = {1, 250, 251, 400, 401, 500};
  Chart chart{"By kind", "", "step", "GiB", {}, {{"limit", 46}, {"out of sight", 140}}};
  chart.curves = {{"weights", steps, {2, 2, 2, 2, 2, 2}},
                  {"exp_avg", steps, {1, 1, 1, 1, 1, 1}},
                  {"gradients", steps, {1, 1, 0, 0, 1, 1}},
                  {"scales", steps, {0.0625, 0.0625, 0.0625, 0.0625, 0.0625, 0.0625}},
                  {"activations", steps, {36, 36, 30, 30, 36, 36}}};
  chart.stacked = true;
  return chart;
}

Figures results() {
  Figures table{"Results", "Loss on bytes that no run has seen; mean of the last evaluations.", {}};
  table.rows.push_back({"recipe", "weight", "exp_avg", "exp_avg_sq", "gradient", "bytes/param", "final loss",
                        "vs fp32", "steps/s"});
  for (int r = 0; r < 8; ++r) {
    table.rows.push_back(
        {kRecipes[r], r ? "bf16" : "fp32", r > 1 ? "companded8" : "fp32", r > 1 ? "companded8" : "fp32",
         r ? "bf16" : "fp32", std::to_string(16 - r), std::to_string(loss(r, 500)).substr(0, 6),
         "+" + std::to_string(loss(r, 500) - loss(0, 500)).substr(0, 6), std::to_string(31 + r)});
  }
  return table;
}

Report normal() {
  return {"Eight recipes, one model",
          "A byte-level GPT with 0.8 million parameters, trained for 500 steps in each recipe.",
          {{"Loss", "The reference keeps everything in fp32.", {results()}, {}, {losses(500)}},
           {"Memory", "", {}, {memory()}, {held()}}}};
}

const char* const kHostile[] = {"</script><script>alert(1)</script>",
                                "<!-- <script>",
                                "a & b &amp; c",
                                "\"quoted\" 'both' `ways`",
                                "<img src=x onerror=alert(1)>",
                                "line\nbreak\ttab",
                                "\u2028\u2029 \u00fc \u5b57 \U0001f642",
                                "not UTF-8: \xff\xfe",
                                "__proto__"};

Report hostile() {
  Report report{kHostile[0], kHostile[1], {}};
  Section section{kHostile[4], kHostile[2], {}, {}, {}};
  Chart chart{kHostile[0], kHostile[3], kHostile[2], kHostile[4], {}, {{kHostile[0], 1.5}}};
  Bars bars{kHostile[3], kHostile[0], kHostile[4], {}};
  Figures table{kHostile[1], kHostile[4], {{kHostile[0], kHostile[1]}}};
  for (const char* name : kHostile) {
    chart.curves.push_back({name, {1, 2, 3}, {2, 1.5, 1.0 + 0.1 * static_cast<double>(chart.curves.size())}});
    bars.rows.push_back({name, {{name, 1.0}, {kHostile[0], 2.0}}});
    table.rows.push_back({name, std::string(300, 'w') + name});
  }
  section.charts.push_back(chart);
  section.bars.push_back(bars);
  section.tables.push_back(table);
  report.sections.push_back(section);
  return report;
}

Curve diverging(const char* name, double last) {
  Curve curve = falling(6, 500);
  curve.name = name;
  for (size_t i = 250; i < 500; ++i) curve.y[i] = i < 300 ? 1.2 * std::exp(0.3 * double(i - 250)) : last;
  return curve;
}

Report diverged() {
  Chart chart = losses(500);
  chart.title = "Two runs that ran away, one that came back, one that never began";
  chart.curves.push_back(diverging("to NaN", kNan));
  chart.curves.push_back(diverging("to infinity", kInf));
  Curve back = falling(2, 500);
  back.name = "came back";
  for (size_t i = 380; i < 420; ++i) back.y[i] = i == 400 ? 1.2 : kNan;
  chart.curves.push_back(back);
  chart.curves.push_back({"never began", {1, 500}, {kNan, -kInf}});
  chart.levels.emplace_back("unknown", kNan);
  Curve stuck = falling(3, 500);
  stuck.name = "stuck";
  for (double& y : stuck.y) y = 5.5 + 0.01 * y;
  chart.curves[7] = stuck;  // in the frame of the whole run, out of the close view's
  return {"Diverged", "", {{"", "", {}, {}, {chart}}}};
}

Report sparse() {
  Report report{"", "", {}};
  report.sections.push_back({});
  Section section{"Little to draw", "", {{"no rows", "", {}}, {"only a header", "", {{"a", "b"}}}}, {}, {}};
  section.bars = {{"no bars", "", "", {}},
                  {"all zero", "", "bytes", {{"nothing", {{"weights", 0.0}}}, {"", {}}}}};
  section.charts = {
      {"no curves", "", "", "", {}, {}},
      {"only a level", "", "step", "loss", {}, {{"entropy", 2.0}}},
      {"an empty curve", "", "step", "loss", {{"empty", {}, {}}}, {}},
      {"one point", "", "step", "loss", {{"one", {7}, {3}}, {"empty", {}, {}, true}}, {}},
      {"constant", "", "step", "loss", {{"flat", {0, 1, 2, 3, 4, 5, 6}, {2, 2, 2, 2, 2, 2, 2}}}, {}},
      {"zero", "", "step", "loss", {{"zero", {0, 1, 2, 3}, {0, 0, 0, 0}}}, {}},
      {"extremes", "", "step", "loss", {{"wide", {0, 1, 2}, {-1.7e308, 0, 1.7e308}}}, {}},
      {"tiny", "", "step", "rate", {{"small", {0, 1, 2}, {1e-12, 2e-12, 5e-324}}}, {}},
      {"nothing in a stack", "", "step", "MiB", {{"none", {}, {}}}, {}, false, true},
      {"a stack of zeros",
       "",
       "step",
       "MiB",
       {{"a", {1, 2}, {0, 0}}, {"b", {1, 2}, {0, 0}}},
       {},
       false,
       true},
      {"a stack of one step", "", "step", "MiB", {{"one", {1}, {2}}, {"more", {1}, {3}}}, {}, false, true}};
  report.sections.push_back(section);
  return report;
}

// A run's own page: two small charts, a table of two columns, a gap far smaller than the others, and one that rounds
// to zero.
Report small() {
  Curve norm{"gradient norm", {}, {}}, rate{"lr", {}, {}};
  for (int i = 1; i <= 300; ++i) {
    norm.x.push_back(i), norm.y.push_back(0.4 + 2 / std::sqrt(i));
    rate.x.push_back(i), rate.y.push_back(1e-3 * (1 - i / 300.0));
  }
  const std::vector<std::pair<const char*, double>> ends = {
      {"fp32", 0.68435}, {"mixed", 0.67715}, {"flash", 0.683803}, {"split", 0.684349999}, {"far", 14.2}};
  Chart close{"Close", "", "step", "loss", {}, {{"floor", 0.62}, {"start", 5.5}}};
  for (const auto& [name, last] : ends) close.curves.push_back({name, {0, 400}, {5.6, last}});
  close.curves[0].reference = true;
  const Chart norms{"Gradient norm", "", "step", "norm", {norm}, {{"clipped above", 1}}, true};
  const Chart rates{"Learning rate", "", "step", "rate", {rate}, {}, true};
  const char* const formats =
      "weight bf16+8 stochastic, exp_avg companded8 stochastic, exp_avg_sq companded8 stochastic, gradient "
      "bf16";
  const Figures settings{"Settings", "", {{"setting", "value"}, {"formats", formats}, {"seed", "1"}}};
  return {"Small", "", {{"Loss", "", {settings}, {}, {close}}, {"Steps", "", {}, {}, {norms, rates}}}};
}

// Twelve curves, one of them with a lowest point that a pixel's column could swallow.
Report lengthy() {
  Chart chart{"A long run", "", "step", "loss", {}, {}};
  for (int r = 0; r < 12; ++r) {
    Curve curve{"run " + std::to_string(r), {}, {}, r == 0};
    const int points = r == 1 ? 100000 : 1000;
    for (int i = 0; i < points; ++i) {
      const double part = static_cast<double>(i) / points;
      curve.x.push_back(part * 1e6);
      curve.y.push_back(1.2 + 4.3 * std::exp(-12 * part) + 0.01 * r - (r == 1 && i == 77777 ? 0.7 : 0.0));
    }
    chart.curves.push_back(curve);
  }
  return {"Long", "", {{"", "", {}, {}, {chart}}}};
}

// What stands between the data element's tags, as a browser would cut it: up to the first "</script".
std::string data_of(const std::string& page) {
  const size_t open = page.find(kDataOpens) + std::string(kDataOpens).size();
  return page.substr(open, page.find("</script", open) - open);
}

void expect_same(const std::vector<double>& sent, const Json& found) {
  ASSERT_EQ(sent.size(), found.size());
  for (size_t i = 0; i < sent.size(); ++i) {
    if (std::isfinite(sent[i])) {
      ASSERT_EQ(sent[i], found[i].get<double>()) << "at index " << i;
    } else {
      ASSERT_TRUE(found[i].is_null()) << "at index " << i;
    }
  }
}

void expect_same(const Chart& sent, const Json& found) {
  ASSERT_EQ(sent.curves.size(), found["curves"].size());
  for (size_t c = 0; c < sent.curves.size(); ++c) {
    EXPECT_EQ(found["curves"][c]["name"], sent.curves[c].name);
    EXPECT_EQ(found["curves"][c]["reference"], sent.curves[c].reference);
    expect_same(sent.curves[c].x, found["curves"][c]["x"]);
    expect_same(sent.curves[c].y, found["curves"][c]["y"]);
  }
}

TEST(Report, EveryNumberComesBack) {
  const Report report = normal();
  const Json data = Json::parse(data_of(to_html(report)));
  EXPECT_EQ(data["title"], report.title);
  EXPECT_EQ(data["lead"], report.lead);
  expect_same(report.sections[0].charts[0], data["sections"][0]["charts"][0]);
  EXPECT_EQ(data["sections"][0]["charts"][0]["levels"][0]["value"], 0.95);
  EXPECT_EQ(data["sections"][0]["tables"][0]["rows"], Json(report.sections[0].tables[0].rows));
  EXPECT_EQ(data["sections"][0]["charts"][0]["stacked"], false);
  expect_same(report.sections[1].charts[0], data["sections"][1]["charts"][0]);
  EXPECT_EQ(data["sections"][1]["charts"][0]["stacked"], true);
  const Bars bars = memory();
  for (size_t r = 0; r < bars.rows.size(); ++r) {
    for (size_t p = 0; p < bars.rows[r].parts.size(); ++p) {
      const Json& part = data["sections"][1]["bars"][0]["rows"][r]["parts"][p];
      EXPECT_EQ(part["kind"], bars.rows[r].parts[p].first);
      EXPECT_EQ(part["amount"], bars.rows[r].parts[p].second);
    }
  }
}

TEST(Report, ADivergedRunIsNullNotABrokenFile) {
  const Report report = diverged();
  const Json data = Json::parse(data_of(to_html(report)));
  expect_same(report.sections[0].charts[0], data["sections"][0]["charts"][0]);
  EXPECT_TRUE(data["sections"][0]["charts"][0]["levels"][1]["value"].is_null());
}

TEST(Report, ExtremesAndEmptinessComeBack) {
  const Report report = sparse();
  const Json data = Json::parse(data_of(to_html(report)));
  for (size_t c = 0; c < report.sections[1].charts.size(); ++c) {
    expect_same(report.sections[1].charts[c], data["sections"][1]["charts"][c]);
  }
}

TEST(Report, NoNameLeavesItsPlace) {
  const std::string page = to_html(hostile());
  const std::string text = data_of(page);
  EXPECT_EQ(text.find('<'), std::string::npos);
  const Json data = Json::parse(text);
  const Json& curves = data["sections"][0]["charts"][0]["curves"];
  for (size_t i = 0; i < std::size(kHostile); ++i) {
    if (std::string(kHostile[i]).rfind("not UTF-8", 0) == 0) {
      EXPECT_EQ(curves[i]["name"], "not UTF-8: \ufffd\ufffd");
    } else {
      EXPECT_EQ(curves[i]["name"], kHostile[i]);
    }
  }
  EXPECT_NE(page.find("<title>&lt;/script&gt;&lt;script&gt;alert(1)&lt;/script&gt;</title>"),
            std::string::npos);
  size_t scripts = 0;
  for (size_t at = page.find("<script"); at != std::string::npos; at = page.find("<script", at + 1))
    ++scripts;
  EXPECT_EQ(scripts, 2u) << "the data and the page's own";
}

TEST(Report, RowsOfTwoCellsStayRows) {
  const std::string page = to_html({"t", "", {{"", "", {{"", "", {{"a", "b"}, {"c", "d"}}}}, {}, {}}}});
  const Json rows = Json::parse(data_of(page))["sections"][0]["tables"][0]["rows"];
  EXPECT_EQ(rows.dump(), R"([["a","b"],["c","d"]])");
}

TEST(Report, NothingComesFromElsewhere) {
  const std::string page = to_html(normal());
  for (const char* word : {"src=", "@import", "url(h", "fetch(", "XMLHttpRequest", "import("}) {
    EXPECT_EQ(page.find(word), std::string::npos) << word;
  }
}

std::string refusal(const Section& section) {
  try {
    to_html({"t", "", {section}});
  } catch (const std::invalid_argument& error) {
    return error.what();
  }
  return "not refused";
}

TEST(Report, ListsThatDoNotFitAreRefused) {
  Section section;
  section.charts = {{"", "", "", "", {{"a", {1, 2}, {1}}}, {}}};
  EXPECT_EQ(refusal(section), "report: curve 'a' has 2 steps and 1 value; give each value its step");
  section.charts = {{"", "", "", "", {{"a", {1, kNan}, {1, 1}}}, {}}};
  EXPECT_EQ(refusal(section),
            "report: curve 'a' has step nan at index 1; steps must be finite and may not fall");
  section.charts = {{"", "", "", "", {{"a", {2, 1}, {1, 1}}}, {}}};
  EXPECT_NE(refusal(section).find("may not fall"), std::string::npos);
  section.charts = {{"s", "", "", "", {{"a", {1, 2}, {1, 1}}, {"b", {1, 3}, {1, 1}}}, {}, false, true}};
  EXPECT_EQ(refusal(section),
            "report: curve 'b' of the stack 's' has other steps than the first; give all the same");
  for (const double amount : {-1.0, kNan, kInf}) {
    section.charts = {{"s", "", "", "", {{"a", {1}, {amount}}}, {}, false, true}};
    EXPECT_NE(refusal(section).find("must be finite and not negative"), std::string::npos) << amount;
  }
  section.charts.clear();
  for (const double amount : {-1.0, kNan, kInf}) {
    section.bars = {{"b", "", "", {{"row", {{"weights", amount}}}}}};
    EXPECT_NE(refusal(section).find("must be finite and not negative"), std::string::npos) << amount;
  }
  section.bars.clear();
  section.tables = {{"t", "", {{"a", "b"}, {"c"}}}};
  EXPECT_EQ(
      refusal(section),
      "report: row 1 of table 't' has 1 cell under 2 headings; give it a cell for each, empty ones too");
}

TEST(Report, SamplesForTheBrowser) {
  const char* folder = std::getenv("SCRUPLE_REPORT_DIR");
  if (!folder) GTEST_SKIP() << "SCRUPLE_REPORT_DIR is not set";
  std::filesystem::create_directories(folder);
  const std::pair<const char*, Report> samples[] = {{"normal", normal()},     {"hostile", hostile()},
                                                    {"diverged", diverged()}, {"sparse", sparse()},
                                                    {"small", small()},       {"lengthy", lengthy()}};
  for (const auto& [name, report] : samples) {
    std::ofstream file(std::filesystem::path(folder) / (std::string(name) + ".html"), std::ios::binary);
    file << to_html(report);
    EXPECT_TRUE(file.flush().good()) << name;
  }
}

}  // namespace
}  // namespace scruple::train
