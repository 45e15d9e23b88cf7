// The subcommands, one file each: adds itself to the program, and what it does runs when it was asked for.
#pragma once

#include <functional>
#include <stdexcept>
#include <string>
#include <vector>

namespace CLI {
class App;  // its header takes seconds to compile
}

namespace scruple::cli {

// The command line itself is wrong: exit code 2, where other failures exit with 1.
struct UsageError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// A signal ended the work early, and what there was is saved: exit code 128 + signal, as shells count.
struct Stopped {
  int signal;
};

// A run came to its end no better than it began, as was said: exit code 3.
struct NoBetter {};

// Of an option's value.
struct Check {
  // What is wrong with it, or "".
  std::function<std::string(const std::string&)> problem = [](const std::string&) { return ""; };
  std::string values = "";  // all that it may be, where they have names: {a,b}
};
// Checks that a value is one of these; says which was perhaps meant where it is not.
Check one_of(const std::vector<std::string>& known);

void add_list(CLI::App& program);
void add_plan(CLI::App& program);
void add_bench(CLI::App& program);
void add_checkpoint(CLI::App& program);
// Built with the trainer alone.
void add_compare(CLI::App& program);
void add_train(CLI::App& program);
void add_sample(CLI::App& program);
void add_eval(CLI::App& program);
void add_tokenize(CLI::App& program);

}  // namespace scruple::cli
