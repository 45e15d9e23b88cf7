// An option of a command is a row of a table: what the command line, the help, checkpoints and --resume know of it
// stands there, once.
#pragma once

#include <cstdint>
#include <functional>
#include <initializer_list>
#include <limits>
#include <map>
#include <string>
#include <variant>
#include <vector>

#include "commands.h"

namespace scruple::cli {

// What a person wants of a run; the help shows options by it, in this order.
enum Topic { kData, kModel, kMemory, kOptimizer, kRun, kNone };

struct Option {
  Topic topic;
  std::string name;  // as it is typed: --steps; without dashes: the place tells
  // In a checkpoint's notes, and never another, whatever the name becomes; "": it is not noted, and each session's own.
  std::string key;
  // Where the value goes. What is there before is the default; it is shown and noted where it could be given, too: 0, -1
  // and "" are often none.
  std::variant<bool*, int*, std::int64_t*, std::uint64_t*, double*, std::string*, std::vector<std::string>*>
      value;
  std::string type;  // what the help calls the value: N, PATH; "": by its C++ type
  std::string help;
  Check check = {};
  bool may_change = false;         // from session to session of a run
  const char* variable = nullptr;  // of the environment, that may have the value
  bool takes_many = false;         // values behind one name
  const char* implied = nullptr;   // the value of the name alone
  bool is_required = false;
};
using OptionTable = std::vector<Option>;
inline constexpr bool kMayChange = true;
using Notes = std::map<std::string, std::string>;

OptionTable joined(std::initializer_list<OptionTable> tables);
Option& row_named(OptionTable& table, const std::string& name);
Option required(Option row);

// `group`: of commands, in the help. `run` is called when the command was asked for.
CLI::App& add_command(CLI::App& program, const std::string& name, const std::string& help,
                      const std::string& group, const std::string& footer, const OptionTable& table,
                      const std::function<void(const CLI::App&)>& run);
bool is_given(const CLI::App& command, const std::string& option);

// Key and value of all that have both. Several values of one option have '\n' between them.
Notes notes_of(const OptionTable& table);
// The values that such notes give, into the table. Throws CLI::ParseError where one cannot be.
void take_notes(const OptionTable& table, const Notes& notes);
// A row of the same option, from other options of the same type.
void copy_value(const Option& from, const Option& to);

inline Check anything() { return {}; }
// CLI11's own ranges let NaN through, print 309 digits, and take the nearest whole number that there is.
Check above_zero();
Check not_negative();
Check a_share();          // above 0, below 1
Check a_share_or_none();  // the same, or 0
Check whole_from(std::int64_t fewest, std::int64_t most = std::numeric_limits<std::int64_t>::max());

}  // namespace scruple::cli
