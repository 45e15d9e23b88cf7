// The program `scruple`: reads the command line, runs one subcommand, and says on stderr what went wrong.
#include <algorithm>
#include <cstdlib>
#include <iostream>
#include <iterator>
#include <sstream>
#include <string>
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

constexpr const char* kHelp =
    "Scruple trains networks in 5 to 7 bytes per parameter.\n"
    "This program tells what the library has, what a choice of formats costs and how fast it runs here, "
#if defined(SCRUPLE_HAS_TRAIN)
    "compares\n"
    "recipes, trains small language models, and looks after their checkpoints.";
#else
    "and looks\n"
    "after checkpoints. This build has no trainer: 'scruple train' says how to get it.";
#endif

constexpr const char* kFooter =
    "Examples:\n"
    "  scruple list\n"
    "  scruple plan --params 8.03e9 --optimizer adamw\n"
    "  scruple plan config.json --recipe scruple --gradients compressed\n"
    "  scruple bench --recipe scruple --params 64M\n"
#if defined(SCRUPLE_HAS_TRAIN)
    "  scruple compare --recipes fp32,scruple\n"
    "  scruple train --data book.txt --out run1\n"
    "  scruple sample run1 --prompt \"Once upon a time\"\n"
    "  scruple tokenize --model ./SmolLM2-135M book.txt --out tokens.bin\n"
#endif
    "  scruple checkpoint inspect run1\n"
    "\n"
    "'scruple help COMMAND' says more of each.\n"
    "Exit code: 0 done, 1 failed, 2 the command line is wrong, 3 a training ended no better than it began,\n"
    "128 + N stopped by signal N.";

int complain(const std::string& message, int code) {
  std::cerr << "scruple: " << message << '\n';
  return code;
}

using Words = std::vector<std::string>;

#if !defined(SCRUPLE_HAS_TRAIN)
constexpr const char* kOfTrainer[] = {"compare", "train", "sample", "tokenize"};

constexpr const char* kNoTrainer =
    "' needs the trainer, which this build leaves out. Where Debian's libopenblas-pthread-dev, libpcre2-dev "
    "and libutf8proc-dev are installed, 'pip install .' and 'make build' in Scruple's source tree build it";
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
constexpr Elsewhere kElsewhere[] = {{"--learning-rate", "--lr"},
                                    {"--learning_rate", "--lr"},
                                    {"--epochs", "--steps", kSeen},
                                    {"--num-epochs", "--steps", kSeen},
                                    {"--num_train_epochs", "--steps", kSeen},
                                    {"--max-steps", "--steps"},
                                    {"--batch-size", "--batch"},
                                    {"--max-length", "--context"},
                                    {"--gradient-accumulation-steps", "--accumulate"},
                                    {"--max-grad-norm", "--clip"},
                                    {"--output-dir", "--out"}};

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

int run(int argc, char** argv) {
  CLI::App program{kHelp, "scruple"};
  program.footer(kFooter);
  program.set_version_flag("--version", std::string("scruple ") + scruple_version());
  program.require_subcommand(0, 1);
  program.get_formatter()->column_width(34);
  program.add_subcommand("help", "Show the help of a command, as its --help does");
  cli::add_list(program);
  cli::add_plan(program);
  cli::add_bench(program);
#if defined(SCRUPLE_HAS_TRAIN)
  cli::add_compare(program);
  cli::add_train(program);
  cli::add_sample(program);
  cli::add_tokenize(program);
#endif
  cli::add_checkpoint(program);
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
    std::string message = unknown_option(command, words);
    if (message.empty()) message = error.what();
    if (!message.ends_with("?")) message += "; try '" + full_name(command) + " --help'";
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
