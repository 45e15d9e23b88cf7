#include "options.h"

#include <CLI/CLI.hpp>
#include <algorithm>
#include <charconv>
#include <cmath>
#include <sstream>
#include <type_traits>

#include "text.h"

namespace scruple::cli {
namespace {

std::string text_of(bool value) { return value ? "true" : ""; }
std::string text_of(const std::string& value) { return value; }
std::string text_of(const std::vector<std::string>& values) { return joined(values, "\n"); }
template <class Number>
std::string text_of(const Number& value) {  // of a double the fewest digits that read back as the same
  char text[64];
  return {text, std::to_chars(std::begin(text), std::end(text), value).ptr};
}

// "": none that could be given.
std::string value_of(const Option& row) {
  const std::string text = std::visit([](const auto* value) { return text_of(*value); }, row.value);
  return row.check.problem(text).empty() ? text : "";
}

Check a_number(bool (*serves)(double), const std::string& wanted) {
  return {[=](const std::string& text) {
    try {
      if (serves(parse_number(text, ""))) return std::string();
    } catch (const UsageError&) {  // what follows says it with the option's name
    }
    return "'" + text + "' is not a " + wanted;
  }};
}

void add_options(CLI::App& command, OptionTable table) {
  constexpr const char* kTopics[] = {"Data", "Model", "Memory", "Optimizer", "Run", "Options"};
  std::stable_sort(table.begin(), table.end(),
                   [](const Option& a, const Option& b) { return a.topic < b.topic; });
  for (const Option& row : table)
    std::visit(
        [&]<class Value>(Value* value) {
          const char* const group = kTopics[row.topic];
          if constexpr (std::is_same_v<Value, bool>) {
            command.add_flag(row.name, *value, row.help)->group(group);
          } else {
            CLI::Option* const option = command.add_option(row.name, *value, row.help);
            option->check(CLI::Validator(row.check.problem, row.check.values));
            option->group(group)->required(row.is_required);
            option->default_str(value_of(row));
            if (!row.type.empty()) option->type_name(row.type);
            if (row.implied != nullptr)
              option->expected(0, 1)->default_str(row.implied)->option_text(row.type);
            if (row.variable != nullptr) option->envname(row.variable);
            if constexpr (std::is_same_v<Value, std::vector<std::string>>)
              option->allow_extra_args(row.takes_many);
          }
        },
        row.value);
}

}  // namespace

OptionTable joined(std::initializer_list<OptionTable> tables) {
  OptionTable all;
  for (const OptionTable& table : tables) all.insert(all.end(), table.begin(), table.end());
  return all;
}

Option& row_named(OptionTable& table, const std::string& name) {
  return *std::find_if(table.begin(), table.end(), [&](const Option& row) { return row.name == name; });
}

Option required(Option row) {
  row.is_required = true;
  return row;
}

CLI::App& add_command(CLI::App& program, const std::string& name, const std::string& help,
                      const std::string& group, const std::string& footer, const OptionTable& table,
                      const std::function<void(const CLI::App&)>& run) {
  CLI::App& command = *program.add_subcommand(name, help);
  command.group(group)->footer(footer);
  add_options(command, table);
  command.callback([&command, run] { run(command); });
  return command;
}

bool is_given(const CLI::App& command, const std::string& option) { return command.count(option) > 0; }

Notes notes_of(const OptionTable& table) {
  Notes notes;
  for (const Option& row : table)
    if (const std::string value = value_of(row); !row.key.empty() && !value.empty()) notes[row.key] = value;
  return notes;
}

void take_notes(const OptionTable& table, const Notes& notes) {
  CLI::App parser;
  add_options(parser, table);
  std::vector<std::string> words;
  for (const Option& row : table) {
    const auto note = notes.find(row.key);
    if (note == notes.end()) continue;
    std::stringstream values(note->second);
    for (std::string value; std::getline(values, value);) words.push_back(row.name + "=" + value);
  }
  parser.parse(std::vector<std::string>(words.rbegin(), words.rend()));  // CLI11 takes them from the end
}

void copy_value(const Option& from, const Option& to) {
  std::visit([&]<class Value>(Value* value) { *value = *std::get<Value*>(from.value); }, to.value);
}

Check above_zero() {
  return a_number([](double value) { return value > 0 && std::isfinite(value); }, "finite number above 0");
}

Check not_negative() {
  return a_number([](double value) { return value >= 0 && std::isfinite(value); },
                  "finite number of 0 or more");
}

Check a_share() {
  return a_number([](double value) { return value > 0 && value < 1; }, "number above 0 and below 1");
}

Check a_share_or_none() {
  return a_number([](double value) { return value >= 0 && value < 1; }, "number of 0 or more, and below 1");
}

Check whole_from(std::int64_t fewest, std::int64_t most) {
  return {[=](const std::string& text) {
    std::int64_t value = 0;
    const char* const end = text.data() + text.size();
    const auto [stop, problem] = std::from_chars(text.data(), end, value);
    if (problem == std::errc() && stop == end && value >= fewest && value <= most) return std::string();
    const bool is_limited = most < std::numeric_limits<std::int64_t>::max();
    return "'" + text + "' is not a whole number from " + std::to_string(fewest) + " to " +
           (is_limited ? std::to_string(most) : "2^63 - 1") + ", in digits";
  }};
}

}  // namespace scruple::cli
