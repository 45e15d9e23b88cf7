// Hyperparameters that had another name once: programs and checkpoints of then still say it.
#pragma once

#include <map>
#include <stdexcept>
#include <string>
#include <string_view>

namespace scruple {

// What a hyperparameter is called now. In 0.1.0 decay_lr was max_lr, which is also what torch's OneCycleLR calls a value
// of its own.
constexpr std::string_view current_name(std::string_view hyper) {
  return hyper == "max_lr" ? "decay_lr" : hyper;
}

// What a checkpoint says, by the names of now. Throws where one stands by both; `where` names the checkpoint.
inline std::map<std::string, double> with_current_names(const std::map<std::string, double>& hypers,
                                                        const std::string& where) {
  std::map<std::string, double> current;
  for (const auto& [name, value] : hypers)
    if (const std::string now(current_name(name)); !current.emplace(now, value).second)
      throw std::runtime_error(where + ": hyperparameter \"" + now + "\" stands twice, once by an old name");
  return current;
}

}  // namespace scruple
