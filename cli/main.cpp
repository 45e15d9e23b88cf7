// The program `scruple`: reads the command line, runs one subcommand, and says on stderr what went wrong.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdlib>
#include <iostream>
#include <iterator>
#include <memory>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "commands.h"
#include "scruple/scruple.hpp"
#include "text.h"

namespace {

using namespace scruple;

constexpr int kFailure = 1;
constexpr int kUsage = 2;
constexpr int kNoBetter = 3;
constexpr int kSignal = 128;

using Words = std::vector<std::string>;

constexpr const char* kHelp =
    "Scruple trains networks in 5 to 7 bytes per parameter.\n"
#if !defined(SCRUPLE_HAS_TRAIN)
    "This build has no trainer: 'scruple train' says how to get it.\n"
#endif
    ;

constexpr const char* kFooter =
    "Examples:\n"
#if defined(SCRUPLE_HAS_TRAIN)
    "  scruple train --data book.txt --out run1\n"
    "  scruple sample run1 --prompt \"Once upon a time\"\n"
#endif
    "  scruple plan --params 8.03e9\n"
    "\n"
    "'scruple help COMMAND' says more of each.\n"
    "Exit code: 0 done, 1 failed, 2 the command line is wrong, 3 the training ended no better than it\n"
    "began, 128 + N stopped by signal N.";

// The help of one option: its name and what its value is called; then what it does and its default, on lines of at most
// 100 columns.
class Help : public CLI::Formatter {
 public:
  Help() {
    label("OPTIONS", "options");
    label("SUBCOMMAND", "command");
    label("Positionals", "Arguments");
    column_width(kColumn);
  }
  std::string make_option(const CLI::Option* option, bool is_positional) const override {
    const std::string type = option->get_type_size() == 0 ? "" : option->get_type_name();
    std::string name = make_option_name(option, is_positional);
    if (!is_positional && !type.empty()) name += " " + type.substr(0, type.find(':'));
    std::string text = option->get_description();
    Words notes;
    if (!is_positional && option->get_required()) notes.emplace_back("required");
    if (const std::string usual = option->get_default_str();
        !usual.empty() && usual != "\n" && option->get_expected_min() > 0)
      notes.push_back("default: " + usual);
    if (!option->get_envname().empty()) notes.push_back("or " + option->get_envname());
    if (!notes.empty()) text += " (" + cli::joined(notes, "; ") + ")";
    std::string all, line = "  " + name;
    const auto end_line = [&] { all += std::exchange(line, std::string(kColumn - 1, ' ')) + '\n'; };
    if (line.size() < kColumn)
      line.resize(kColumn - 1, ' ');
    else
      end_line();
    std::stringstream words(text);
    for (std::string word; words >> word; line += ' ' + word)
      if (line.size() + 1 + word.size() > kWidth) end_line();
    end_line();
    return all;
  }
  std::string make_help(const CLI::App* app, std::string name, CLI::AppFormatMode mode) const override {
    std::string text = CLI::Formatter::make_help(app, std::move(name), mode);
    for (std::size_t at; (at = text.find("\n\n\n")) != text.npos;) text.erase(at, 1);  // between groups
    return text;
  }

 private:
  static constexpr std::size_t kColumn = 27, kWidth = 100;
};

// Last, where CLI11 has it first.
void move_help(CLI::App& app) {
  app.set_help_flag();
  const std::vector<std::string> groups = app.get_groups();
  app.set_help_flag("-h,--help", "show this help")->group(groups.empty() ? "Options" : groups.back());
  for (CLI::App* command : app.get_subcommands({})) move_help(*command);
}

int complain(const std::string& message, int code) {
  std::cerr << "scruple: " << message << '\n';
  return code;
}

#if !defined(SCRUPLE_HAS_TRAIN)
constexpr const char* kOfTrainer[] = {"compare", "train", "sample", "eval", "tokenize"};

constexpr const char* kNoTrainer =
    "' needs the trainer, which this build leaves out. Install libopenblas-pthread-dev, libpcre2-dev and "
    "libutf8proc-dev (as Debian calls them), then run 'make build' or 'pip install .' in Scruple's source "
    "tree";
#endif

bool is_option(const std::string& word) { return word.starts_with("-"); }

std::string full_name(const CLI::App& command) {
  const CLI::App* const above = command.get_parent();
  return above == nullptr ? command.get_name() : full_name(*above) + " " + command.get_name();
}

std::string help_of(const CLI::App& command) {
  const CLI::App* const above = command.get_parent();
  return command.help(above == nullptr ? "" : full_name(*above));
}

// What else is spelled so: a command of a command, or an option that one command alone has. "": nothing is.
std::string meant_elsewhere(const std::string& word, const std::vector<CLI::App*>& commands) {
  Words options;
  for (const CLI::App* command : commands) {
    for (const CLI::App* below : command->get_subcommands({}))
      if (below->get_name() == word) return command->get_name() + " " + word;
    if (command->get_option_no_throw("--" + word) != nullptr)
      options.push_back(command->get_name() + " --" + word);
  }
  return options.size() == 1 ? options.front() : "";
}

// The command that the words lead to. Where one should stand, another word is refused.
CLI::App& find_command(CLI::App& program, const Words& words) {
  CLI::App* at = &program;
  for (const std::string& word : words) {
    const std::vector<CLI::App*> below = at->get_subcommands({});
    if (below.empty()) break;
    if (is_option(word)) continue;
    Words names;
    for (const CLI::App* command : below) names.push_back(command->get_name());
    const auto found = std::find(names.begin(), names.end(), word);
    if (found == names.end()) {
#if !defined(SCRUPLE_HAS_TRAIN)
      if (at == &program &&
          std::find(std::begin(kOfTrainer), std::end(kOfTrainer), word) != std::end(kOfTrainer))
        throw cli::UsageError("'scruple " + word + kNoTrainer);
#endif
      const std::string meant = meant_elsewhere(word, below);
      throw cli::UsageError(
          "'" + word + "' is no command of " + full_name(*at) + "; there are: " + cli::joined(names) +
          (meant.empty() ? cli::did_you_mean(word, names) : "; did you mean '" + meant + "'?"));
    }
    at = below[static_cast<std::size_t>(found - names.begin())];
  }
  return *at;
}

// The values that an option lets one choose from, which its type names: "FORMAT:{fp32,bf16}".
Words values_of(const CLI::Option& option) {
  const std::string type = option.get_type_name();
  const std::size_t begin = type.find('{'), end = type.find('}');
  Words values;
  if (end == std::string::npos) return values;
  std::stringstream list(type.substr(begin + 1, end - begin - 1));
  for (std::string value; std::getline(list, value, ',');) values.push_back(value);
  return values;
}

// What other trainers call an option, and its name here.
struct Elsewhere {
  const char *name, *here, *what = "";
};
constexpr const char* kSeen = " N, of which each sees --batch x --accumulate windows of --context tokens";
constexpr Elsewhere kElsewhere[] = {
    {"--learning-rate", "--lr"},         {"--learning_rate", "--lr"},
    {"--epochs", "--steps", kSeen},  // compare has none
    {"--num-epochs", "--epochs"},        {"--num_train_epochs", "--epochs"},
    {"--max-steps", "--steps"},          {"--batch-size", "--batch"},
    {"--max-length", "--context"},       {"--gradient-accumulation-steps", "--accumulate"},
    {"--max-grad-norm", "--clip"},       {"--output-dir", "--out"},
    {"--patience", "--stop-when"},       {"--early-stopping-patience", "--stop-when"},
    {"--eval-data", "--validation-data"}};

// The first option that the command does not have, and which one was perhaps meant; "" where it has all.
std::string unknown_option(const CLI::App& command, const Words& words) {
  for (std::size_t i = 0; i < words.size(); ++i) {
    const std::string name = words[i].substr(0, words[i].find('='));
    if (!name.starts_with("--")) continue;
    if (const CLI::Option* known = command.get_option_no_throw(name)) {
      if (name == words[i] && known->get_items_expected_min() > 0) ++i;  // its value
      continue;
    }
    Words names;
    for (const CLI::Option* option : command.get_options()) {
      for (const std::string& known : option->get_lnames()) names.push_back("--" + known);
      const Words values = values_of(*option);
      if (std::find(values.begin(), values.end(), name.substr(2)) != values.end())
        return full_name(command) + " has no option " + name + "; did you mean '" + option->get_name() + " " +
               name.substr(2) + "'?";
    }
    for (const auto& [elsewhere, here, what] : kElsewhere)
      if (name == elsewhere && command.get_option_no_throw(here) != nullptr)
        return full_name(command) + " has no option " + name + "; use " + here + what;
    return full_name(command) + " has no option " + name + cli::did_you_mean(name, names);
  }
  return "";
}

bool is(const CLI::ParseError& error, CLI::ExitCodes code) {
  return error.get_exit_code() == static_cast<int>(code);
}

// CLI11's own words, but where they say little: "--out: 1 required DIR missing".
std::string words_of(const CLI::ParseError& error, const CLI::App& command) {
  std::string said = error.what();
  const std::string name = said.substr(0, said.find(':'));
  const CLI::Option* const option = command.get_option_no_throw(name);
  if (is(error, CLI::ExitCodes::ExtrasError))
    return full_name(command) + " takes no argument" + said.substr(name.size() + 1);
  if (!is(error, CLI::ExitCodes::ArgumentMismatch) || option == nullptr) return said;
  const std::size_t times = option->count();
  return name + (times > 1 ? " is given " + std::to_string(times) + " times" : " needs a value");
}

int run(int argc, char** argv) {
  CLI::App program{kHelp, "scruple"};
  program.footer(kFooter);
  program.formatter(std::make_shared<Help>());
  program.set_version_flag("--version", std::string("scruple ") + scruple_version(), "show the version");
  program.require_subcommand(0, 1);
#if defined(SCRUPLE_HAS_TRAIN)
  cli::add_train(program);
  cli::add_sample(program);
  cli::add_eval(program);
  cli::add_tokenize(program);
#endif
  cli::add_plan(program);
  cli::add_list(program);
#if defined(SCRUPLE_HAS_TRAIN)
  cli::add_compare(program);
#endif
  cli::add_bench(program);
  cli::add_checkpoint(program);
  program.add_subcommand("help", "Show the help of a command, as its --help does")->group("Help");
  move_help(program);
  Words words(argv + std::min(1, argc), argv + argc);
  if (!words.empty() && words.front() == "help") {
    words.erase(words.begin());
    words.emplace_back("--help");
  }
  const CLI::App& command = find_command(program, words);
  // As git does: no command is a question, and still no success.
  if (!command.get_subcommands({}).empty() && std::none_of(words.begin(), words.end(), is_option)) {
    std::cout << help_of(command);
    return kUsage;
  }
  try {
    program.parse(Words(words.rbegin(), words.rend()));  // CLI11 takes them from the end
  } catch (const CLI::ParseError& error) {
    if (error.get_exit_code() == 0) return program.exit(error);  // --help and --version
    const std::string unknown = unknown_option(command, words);
    std::string message = unknown.empty() ? words_of(error, command) : unknown;
    if (!message.ends_with("?") && !is(error, CLI::ExitCodes::ValidationError))  // which says what to do
      message += "; try '" + full_name(command) + " --help'";
    return complain(message, kUsage);
  }
  // A full disk or a closed pipe must not look like success.
  if (!std::cout.flush()) return complain("cannot write the output", kFailure);
  return 0;
}

int guarded(int argc, char** argv) {
  try {
    return run(argc, argv);
  } catch (const cli::Stopped& stopped) {
    return kSignal + stopped.signal;
  } catch (const cli::NoBetter&) {
    return kNoBetter;
  } catch (const cli::UsageError& error) {
    return complain(error.what(), kUsage);
  } catch (const Error& error) {
    const bool usage = error.status() == SCRUPLE_INVALID || error.status() == SCRUPLE_UNSUPPORTED;
    return complain(error.what(), usage ? kUsage : kFailure);
  } catch (const std::bad_alloc&) {
    return complain("out of memory", kFailure);
  } catch (const std::exception& error) {
    return complain(error.what(), kFailure);
  }
}

}  // namespace

int main(int argc, char** argv) {
  const int status = guarded(argc, argv);
  if (status == 0) return 0;
  // Where memory is short (ulimit -v), OpenBLAS's threads ask for theirs for ever, and an ordinary end waits for them.
  std::cout.flush();
  std::_Exit(status);
}
