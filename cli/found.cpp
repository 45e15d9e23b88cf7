#include "found.h"

#include <filesystem>
#include <stdexcept>

#include "room.h"
#include "text.h"
#include "train/run/checkpoint.h"
#include "train/text/vocabulary.h"

namespace scruple::cli {

ChosenModel Found::chosen() const {
  return model != nullptr ? ChosenModel{model->config(), model}
                          : ChosenModel{train::config_of(*checkpoint), nullptr};
}

train::Weights Found::weights(train::Backend& backend, train::Ledger& ledger) const {
  return model != nullptr ? train::Weights(*model, backend, ledger)
                          : train::Weights(*checkpoint, backend, ledger, averages);
}

Found find_model(const std::string& folder, std::int64_t context, bool averages) {
  std::error_code ignored;
  if (!averages && std::filesystem::exists(folder + "/config.json", ignored)) {
    ModelOptions chosen;
    chosen.model = folder, chosen.context = context;
    const std::int64_t sees = choose_model(chosen).config.shape.context;
    return {std::make_shared<const train::ModelFolder>(folder, sees), nullptr, folder};
  }
  if (!std::filesystem::is_directory(folder, ignored))
    throw std::runtime_error((std::filesystem::exists(folder, ignored) ? folder + " is no folder"
                                                                       : "there is nothing at " + folder) +
                             "; give the folder of a run, one of its checkpoints, or a Hugging Face folder");
  std::string path;
  try {
    path = io::find_checkpoint(folder);
  } catch (const std::exception&) {
    if (averages)
      throw std::runtime_error(
          folder +
          " has no complete checkpoint, where the averages of --ema are; give a run that has "
          "one, or a checkpoint");
    throw std::runtime_error(folder +
                             " has neither config.json nor a complete checkpoint; give the folder of a run, "
                             "or of one of its checkpoints");
  }
  Found found = {nullptr, std::make_unique<io::Checkpoint>(path), folder, averages};
  if (averages) train::check_averages(*found.checkpoint);
  const io::Metadata notes = train::notes_of(*found.checkpoint);
  const auto from = notes.find("model");
  const std::string run = std::filesystem::path(path).parent_path().parent_path().string();
  const std::string noted = from == notes.end() ? "" : folder_of_tokenizer(from->second);
  for (const std::string& place : {noted, run, folder})
    if (!place.empty() && train::has_tokenizer(place)) found.folder = place;
  return found;
}

Option model_option(std::string& folder) {
  return required({kData, "model", "", &folder, "DIR",
                   "a run of 'scruple train', a checkpoint of one, or a Hugging Face folder"});
}

void check_fits(const std::string& what, const train::Ledger& needed, train::Backend& backend,
                const std::string& smaller) {
  const bool on_host = backend.memory().is_host();
  const std::int64_t free = free_memory(backend);
  if (needed.peak() <= free) return;
  const Unit unit = unit_for(needed.peak(), 1);
  Table table;
  table.rows = {{"memory", unit.name}};
  for (const train::Ledger::Entry& entry : needed.entries())
    table.rows.push_back({entry.kind, fixed(static_cast<double>(entry.peak) / unit.bytes, 2)});
  refuse_memory(what, needed.peak(), size_words(free) + " are free" + (on_host ? "" : " on the GPU"),
                smaller + (on_host ? "" : ", or --device cpu"), table);
}

}  // namespace scruple::cli
