// The program `scruple`: reads the command line, runs one subcommand, and says on stderr what went wrong.
#include <iostream>
#include <string>

#include "commands.h"
#include "scruple/scruple.hpp"

namespace {

using namespace scruple;

constexpr int kFailure = 1;
constexpr int kUsage = 2;

constexpr const char* kHelp =
    "Scruple trains networks in 5 to 7 bytes per parameter.\n"
    "This program tells what the library has, what a choice of formats costs and how fast it runs here, "
    "compares\n"
    "recipes, trains small language models, and looks after their checkpoints.";

constexpr const char* kFooter =
    "Examples:\n"
    "  scruple list\n"
    "  scruple plan --params 8.03e9 --optimizer adamw\n"
    "  scruple plan config.json --recipe scruple --gradients compressed\n"
    "  scruple bench --recipe scruple --params 64M\n"
    "  scruple compare --recipes fp32,scruple\n"
    "  scruple train --data book.txt --out run1\n"
    "  scruple sample run1 --prompt \"Once upon a time\"\n"
    "  scruple checkpoint inspect run1\n"
    "\n"
    "Each command has its own --help. Exit code: 0 done, 1 failed, 2 the command line is wrong.";

int complain(const std::string& message, int code) {
  std::cerr << "scruple: " << message << '\n';
  return code;
}

int run(int argc, char** argv) {
  CLI::App program{kHelp, "scruple"};
  program.footer(kFooter);
  program.set_version_flag("--version", std::string("scruple ") + scruple_version());
  program.require_subcommand(0, 1);
  program.get_formatter()->column_width(34);
  cli::add_list(program);
  cli::add_plan(program);
  cli::add_bench(program);
#if defined(SCRUPLE_HAS_TRAIN)
  cli::add_compare(program);
  cli::add_train(program);
  cli::add_sample(program);
  cli::add_checkpoint(program);
#endif
  try {
    program.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    if (error.get_exit_code() == 0) return program.exit(error);  // --help and --version
    return complain(std::string(error.what()) + "; try --help", kUsage);
  }
  if (program.get_subcommands().empty()) return complain("no command given; try 'scruple --help'", kUsage);
  // A full disk or a closed pipe must not look like success.
  if (!std::cout.flush()) return complain("cannot write the output", kFailure);
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    return run(argc, argv);
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
