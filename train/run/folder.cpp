#include "train/run/folder.h"

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <cerrno>
#include <cmath>
#include <filesystem>
#include <iterator>
#include <nlohmann/json.hpp>
#include <sstream>
#include <utility>
#include <vector>

#include "io/checkpoint.h"
#include "io/file.h"
#include "io/json.h"
#include "train/run/checkpoint.h"
#include "train/text/vocabulary.h"

namespace scruple::train {
namespace {

namespace fs = std::filesystem;
using io::fail;
using nlohmann::ordered_json;

// All that a run writes, beside its checkpoints.
std::vector<std::string> files_of_run() {
  std::vector<std::string> files = {"metrics.jsonl", "report.html", "model.safetensors", "config.json"};
  files.insert(files.end(), std::begin(kTokenizerFiles), std::end(kTokenizerFiles));
  return files;
}

nlohmann::json parsed(const std::string& line) {
  const auto is_shallow = [](int depth, auto, const auto&) { return depth <= io::kMaxJsonDepth; };
  return nlohmann::json::parse(line, is_shallow, /*allow_exceptions=*/false);
}

// What a line has under the key, or `other` where that is of another type: a line that was damaged keeps no run from going
// on.
template <class Value>
Value value_of(const nlohmann::json& row, const char* key, const Value& other) {
  const auto found = row.find(key);
  return found != row.end() && found->type() == nlohmann::json(other).type() ? found->get<Value>() : other;
}

double number_or_nan(const nlohmann::json& row, const char* key) {
  const auto found = row.find(key);
  return found != row.end() && found->is_number() ? found->get<double>() : std::nan("");
}

std::int64_t count_of(const nlohmann::json& row, const char* key) {
  const double number = number_or_nan(row, key);
  return number >= 0 && number < 0x1p53 ? static_cast<std::int64_t>(number) : 0;
}

// Every run has one, and no other program's file begins so by accident. A run that was killed early has an empty one.
bool has_metrics(const std::string& run) {
  std::ifstream file(metrics_path(run));
  std::string line;
  if (!file) return false;
  if (!std::getline(file, line)) return true;
  const nlohmann::json row = parsed(line);
  return row.is_object() && row.contains("step");
}

// What of a checkpoint's folder is not a checkpoint's, or "".
std::string foreign_in(const fs::path& checkpoint) {
  if (fs::symlink_status(checkpoint).type() != fs::file_type::directory) return checkpoint.string();
  for (const auto& entry : fs::directory_iterator(checkpoint)) {
    const fs::path& path = entry.path();
    if (path.filename() != "manifest.json" && path.extension() != ".safetensors") return path.string();
    if (!entry.is_regular_file()) return path.string();
  }
  return "";
}

// What stands where a run's files would be and is not a run's, or "".
std::string foreign_to_run(const std::string& run) {
  for (const std::string& name : files_of_run())
    if (const std::string path = run + "/" + name; fs::exists(path) && !fs::is_regular_file(path))
      return path;
  const std::string folder = checkpoints_of(run);
  if (fs::exists(folder) && !fs::is_directory(folder)) return folder;
  for (const std::int64_t step : io::saved_steps(folder))
    if (const std::string foreign = foreign_in(folder + "/" + io::step_name(step)); !foreign.empty())
      return foreign;
  return "";
}

std::string found_of_run(const std::string& run) {
  for (const std::string& name : files_of_run())
    if (fs::exists(fs::symlink_status(run + "/" + name))) return name;
  return fs::exists(fs::symlink_status(checkpoints_of(run))) ? "checkpoints" : "";
}

// A line of a step; `tokens` so far, which it moves on.
Outcome step_of(const nlohmann::json& row, double& tokens) {
  Outcome step = {number_or_nan(row, "loss"), number_or_nan(row, "lr"), number_or_nan(row, "norm"),
                  static_cast<float>(number_or_nan(row, "loss_scale")), value_of(row, "skipped", false)};
  step.outlier = value_of(row, "outlier", false);
  step.tensors = count_of(row, "skipped_tensors");
  step.epoch = number_or_nan(row, "epoch");
  if (const double time = number_or_nan(row, "time"); time > 0) step.time = time;
  const double before = std::exchange(tokens, number_or_nan(row, "tokens")), taken = tokens - before;
  step.tokens = taken >= 0 && taken < 0x1p53 ? static_cast<std::int64_t>(taken) : -1;
  return step;
}

Saved saved_of(const nlohmann::json& row) {
  return {count_of(row, "saved_step"), number_or_nan(row, "save_waited"), number_or_nan(row, "save_seconds"),
          count_of(row, "save_bytes"), ""};
}

}  // namespace

RunFolder::RunFolder(const std::string& path) : path_(path) {
  lock_ = ::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (lock_ >= 0 && ::flock(lock_, LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK) {
    ::close(lock_);
    fail("another process is training into ", path, "; wait for its end, or choose another folder");
  }
}

RunFolder::~RunFolder() {
  if (lock_ >= 0) ::close(lock_);
}

void RunFolder::claim(bool replace) {
  const std::string found = found_of_run(path_);
  if (!found.empty() && !has_metrics(path_))
    fail(path_, " has ", found,
         " and no metrics.jsonl of a run, so another program may have written it, and --force does not "
         "replace "
         "it; choose another --out, or move it away");
  if (!found.empty() && !replace)
    fail(path_, " has ", found, " of an earlier run; choose another --out, or replace that run with --force");
  if (const std::string foreign = foreign_to_run(path_); !found.empty() && !foreign.empty())
    fail(foreign, " is not what a run writes, so --force leaves it; choose another --out, or move it away");
  const io::NewFile possible(metrics_path(path_));
  replaces_ = !found.empty();
}

// The checkpoints go first and the metrics last, which the new run's replace: a kill in between leaves a run that is
// shorter, never one with another's checkpoints.
void RunFolder::begin() {
  if (!replaces_) return;
  const std::string folder = checkpoints_of(path_);
  const std::vector<std::int64_t> steps = io::saved_steps(folder);
  for (auto step = steps.rbegin(); step != steps.rend(); ++step)
    io::remove_folder(folder + "/" + io::step_name(*step));
  io::remove_partial(folder, "step-");
  std::error_code ignored;
  if (!fs::is_symlink(folder, ignored)) fs::remove(folder, ignored);  // others' files may be in it
  for (const std::string& name : files_of_run())
    if (path_ + "/" + name != metrics_path(path_)) fs::remove(path_ + "/" + name);
  replaces_ = false;  // not before: what could not be removed once is tried, and told, again
}

void make_folder(const std::string& path) {
  std::error_code error;
  fs::create_directories(path, error);
  if (error) fail("cannot make the folder ", path, ": ", error.message());
}

std::string metrics_path(const std::string& run) { return run + "/metrics.jsonl"; }

// Steps, validations and saves in the order in which they came; steps without a trace have no line.
std::string Metrics::next_lines(const Record& record) {
  std::ostringstream lines;
  for (;;) {
    if (validations_ < record.validations.size() &&
        record.validations[validations_].first <= static_cast<std::int64_t>(steps_)) {
      const auto& [step, loss] = record.validations[validations_++];
      lines << ordered_json{{"step", step}, {"val_loss", loss}} << '\n';
    } else if (saves_ < record.saves.size() &&
               record.saves[saves_].first <= static_cast<std::int64_t>(steps_)) {
      const auto& [step, saved] = record.saves[saves_++];
      lines << ordered_json{{"step", step},
                            {"saved_step", saved.step},
                            {"save_waited", saved.waited},
                            {"save_seconds", saved.seconds},
                            {"save_bytes", saved.bytes}}
            << '\n';
    } else if (steps_ < record.steps.size()) {
      const Outcome& step = record.steps[steps_++];
      if (std::isnan(step.lr)) {
        tokens_ = -1;
        continue;
      }
      ordered_json line = {{"step", steps_},
                           {"loss", step.loss},
                           {"lr", step.lr},
                           {"norm", step.norm},
                           {"loss_scale", step.loss_scale},
                           {"skipped", step.skipped}};
      if (step.outlier) line["outlier"] = true;
      if (step.tensors > 0) line["skipped_tensors"] = step.tensors;
      skipped_ += step.skipped ? 1 : 0;
      tokens_ = step.tokens < 0 || tokens_ < 0 ? -1 : tokens_ + step.tokens;
      line["skipped_steps"] = skipped_;
      line["tokens"] = tokens_ < 0 ? ordered_json() : ordered_json(tokens_);
      if (!std::isnan(step.epoch)) line["epoch"] = step.epoch;
      line["time"] = step.time > 0 ? ordered_json(step.time) : ordered_json();
      if (unmoved_ < record.unmoved.size() &&
          record.unmoved[unmoved_].first == static_cast<std::int64_t>(steps_)) {
        const Unmoved& found = record.unmoved[unmoved_++].second;
        line["unmoved"] = found.share, line["unmoved_most"] = found.most;
        line["unmoved_tensor"] = found.tensor;
      }
      lines << line << '\n';
    } else {
      return lines.str();
    }
  }
}

bool Metrics::write(const Record& record) {
  waiting_ += next_lines(record);
  try {
    if (!made_) io::write_text(path_, waiting_);
  } catch (const std::exception&) {
    return false;
  }
  if (std::exchange(made_, true)) {
    if (!file_.is_open()) file_ = std::ofstream(path_, std::ios::app);
    if (!(file_ << waiting_ << std::flush)) {  // less whatever got through, so that no line is there twice
      file_ = std::ofstream();
      std::error_code ignored;
      fs::resize_file(path_, written_, ignored);
      return false;
    }
  }
  written_ += waiting_.size();
  waiting_.clear();
  return true;
}

Record unseen(std::int64_t steps) {
  const double unknown = std::nan("");
  Record record;
  Outcome step = {unknown, unknown, unknown, 1, false};
  step.tokens = -1;
  record.steps.resize(static_cast<std::size_t>(steps), step);
  return record;
}

Record read_metrics(const std::string& run, std::int64_t steps) {
  Record record = unseen(steps);
  double tokens = 0;  // so far; NaN: not known
  std::ifstream file(metrics_path(run));
  for (std::string line; std::getline(file, line);) {
    const nlohmann::json row = parsed(line);
    const double number = row.is_object() ? number_or_nan(row, "step") : std::nan("");
    if (!(number >= 0 && number <= static_cast<double>(steps))) continue;
    const auto step = static_cast<std::int64_t>(number);
    if (row.contains("val_loss"))
      record.validations.emplace_back(step, number_or_nan(row, "val_loss"));
    else if (row.contains("saved_step"))
      record.saves.emplace_back(step, saved_of(row));
    else if (step > 0)
      record.steps[static_cast<std::size_t>(step - 1)] = step_of(row, tokens);
    if (row.contains("unmoved"))
      record.unmoved.push_back({step,
                                {number_or_nan(row, "unmoved"), number_or_nan(row, "unmoved_most"),
                                 value_of(row, "unmoved_tensor", std::string())}});
  }
  return record;
}

}  // namespace scruple::train
