#include "session.h"

#include <cmath>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <utility>

#include "io/crc32.h"
#include "names.h"
#include "progress.h"
#include "room.h"
#include "train/run/checkpoint.h"
#include "train/run/rows.h"

namespace scruple::cli {
namespace {

// Notes that are no option's. Old checkpoints have no kArithmetic.
constexpr const char *kProgramNote = "program", *kDataTokens = "data_tokens", *kDataChecksum = "data_crc32",
                     *kDataSources = "data_sources",  // where there are several, or a large one
                         *kArithmetic = "arithmetic", *kValidationChecksum = "validation_crc32",
                     *kOrder =
                         "order";  // of windows; older runs, which have no such note, drew them by chance
constexpr const char* kByEpochs = "epochs";

std::string absolute(const std::string& path) {
  return path == train::Data::kStandardInput ? path : std::filesystem::absolute(path).string();
}

// Of each: its path, tokens, checksum, and the part of the mixture that it is in, with its weight.
nlohmann::json sources_of(const train::Data& data) {
  nlohmann::json list = nlohmann::json::array();
  for (const train::Data::Source& source : data.sources())
    list.push_back({absolute(source.path), source.tokens,
                    (source.is_sample ? "sample " : "") + io::hex(source.crc32), source.part, source.weight});
  return list;
}

io::Metadata data_notes(const std::vector<std::string>& arguments, const train::Data& data) {
  std::vector<std::string> paths;
  for (const std::string& path : arguments) paths.push_back(absolute(path));
  io::Metadata notes = {{"data", joined(paths, "\n")}, {kDataTokens, std::to_string(data.size())}};
  const std::vector<train::Data::Source> sources = data.sources();
  if (sources.size() == 1 && !sources[0].is_sample)
    notes[kDataChecksum] = io::hex(sources[0].crc32);
  else
    notes[kDataSources] =
        sources_of(data).dump(-1, ' ', /*ensure_ascii=*/true, nlohmann::json::error_handler_t::replace);
  return notes;
}

// A run that began with several files, or large ones: names the first that is another now.
void check_sources(const std::string& noted, const train::Data& data) {
  const nlohmann::json before = nlohmann::json::parse(noted, nullptr, /*allow_exceptions=*/false);
  const nlohmann::json now = sources_of(data);
  const auto words = [](const nlohmann::json& source) {
    return grouped(source.at(1).get<std::int64_t>()) + " tokens, CRC-32 " + source.at(2).get<std::string>() +
           ", weight " + shortest(source.at(4).get<double>());
  };
  const auto is_among = [](const nlohmann::json& source, const nlohmann::json& list) {
    return std::any_of(list.begin(), list.end(), [&](const nlohmann::json& other) {
      return other.at(1) == source.at(1) && other.at(2) == source.at(2);
    });
  };
  try {
    if (before.size() != now.size()) {
      const bool is_less = now.size() < before.size();
      for (const nlohmann::json& source : is_less ? before : now)
        if (!is_among(source, is_less ? now : before))
          throw std::runtime_error(
              source.at(0).get<std::string>() + " (" + words(source) + ") " +
              (is_less ? "is missing in --data, and the run was started with it; put it back, or "
                         "name all files with --data"
                       : "is new in --data, and the run was started without it; take it out, or "
                         "name the right files with --data"));
      throw std::runtime_error("--data names " + plural(static_cast<std::int64_t>(now.size()), "file") +
                               ", and the run was started with " +
                               grouped(static_cast<std::int64_t>(before.size())) + "; name the same ones");
    }
    for (std::size_t i = 0; i < now.size(); ++i) {
      const nlohmann::json &was = before.at(i), &is = now.at(i);
      if (std::equal(was.begin() + 1, was.end(), is.begin() + 1, is.end())) continue;
      throw std::runtime_error(is.at(0).get<std::string>() + " (" + words(is) +
                               ") is not what the run was started with: there was " +
                               was.at(0).get<std::string>() + " (" + words(was) +
                               "); put it back as it was, or name the right files with --data");
    }
  } catch (const nlohmann::json::exception&) {
    throw std::runtime_error(std::string("the checkpoint's note '") + kDataSources +
                             "' is no list of files; was it changed by hand?");
  }
}

// What was not said, filled in.
void complete(TrainOptions& options) {
  Choice& choice = options.choice;
  if (choice.recipe.empty()) choice.recipe = "scruple";
  options.model.device = device_for(options.model.device);
  if (!options.validation_data.empty()) {
    if (options.validation_data == train::Data::kStandardInput)
      throw UsageError("--validation-data cannot be standard input; give a file");
    options.cutting.validation = 0;
  }
  if (options.stop_when > 0 && !validates(options))
    throw UsageError("--stop-when counts validations, and --validation is 0; leave one of them out");
  for (const std::string& hyper : choice.hypers)
    if (hyper.starts_with("lr="))
      throw UsageError("--set " + hyper + " has no effect: the schedule sets the rate; use --lr");
}

// The options that the run's last session noted, but for those that are each session's own.
TrainOptions changed(TrainOptions noted, const CLI::App& command, TrainOptions given) {
  const OptionTable table = noted.options(), others = given.options();
  for (std::size_t i = 0; i < table.size(); ++i)
    if (table[i].key.empty() || (table[i].may_change && is_given(command, table[i].name)))
      copy_value(others[i], table[i]);
  if (!is_given(command, "--offload") && device_for(noted.model.device) == "cpu")  // it has moved here
    noted.model.offload.clear();
  return noted;
}

// Throws where something is noted that would be lost.
void check_known(const Session& session, const OptionTable& table) {
  io::Metadata unknown = session.before;
  for (const Option& option : table) unknown.erase(option.key);
  for (const char* key : {kProgramNote, kDataTokens, kDataChecksum, kDataSources, kValidationChecksum,
                          kArithmetic, kOrder, train::kConfigNote, train::kOutliersNote})
    unknown.erase(key);
  if (!unknown.empty())
    throw std::runtime_error(session.from->folder() + " has a setting '" + unknown.begin()->first +
                             "' that this version does not know; resume with the version that saved it");
}

// More steps than the run was started with; what followed from their number stays.
void extend(Session& session, std::int64_t steps) {
  TrainOptions& options = session.options;
  const std::int64_t wanted = std::exchange(options.model.steps, steps);
  if (wanted < steps)
    throw UsageError((options.epochs > 0 ? "--epochs makes " : "--steps is ") + std::to_string(wanted) +
                     ", and the run has " + grouped(steps) + "; --resume makes it longer, never shorter");
  if (wanted == steps) return;
  options.rate.warmup = options.schedule().warmup;
  options.validate_every = span_of(steps, options.validate_every).validate_every;
  options.model.steps = wanted;
  session.first = steps;
}

// A folder that has weights and nothing to go on from is refused in words of its own.
void check_has_checkpoint(const std::string& run) {
  const std::int64_t step = train::weights_step(run);
  if (step < 0 || std::filesystem::exists(run + "/manifest.json") ||
      !io::saved_steps(train::checkpoints_of(run)).empty())
    return;
  throw std::runtime_error(run + " has its weights after step " + grouped(step) +
                           " and no checkpoint to go on from: --save-every N keeps them. '--model " + run +
                           "' with a new --out trains on from these weights");
}

void check_resume(const CLI::App& command, TrainOptions given) {
  for (const Option& option : given.options())
    if (!option.key.empty() && !option.may_change && is_given(command, option.name))
      throw UsageError("--resume takes " + option.name +
                       " from the run, so that it ends with the same bits; leave it out");
  if (std::error_code ignored; !std::filesystem::exists(given.resume, ignored))
    throw UsageError("--resume is '" + given.resume +
                     "', and there is no such folder; name the --out of a run, or one of its checkpoints");
  check_has_checkpoint(given.resume);
  const bool in_place = io::find_checkpoint(given.resume) != given.resume;
  if (in_place && !given.out.empty())
    throw UsageError(
        "--resume writes into the run's own folder; leave out --out, or resume a single checkpoint of it");
  if (in_place && given.force)
    throw UsageError("--force replaces a run, and --resume goes on with it; leave one of them out");
  if (!in_place && given.out.empty())
    throw UsageError("--resume " + given.resume +
                     " is a single checkpoint; name a new folder with --out, or resume its run");
}

// The run's own settings, with what the user may change about it.
Session resumed(const CLI::App& command, const TrainOptions& given) {
  check_resume(command, given);
  Session session;
  session.in_place = given.out.empty();
  if (session.in_place) session.folder = std::make_unique<train::RunFolder>(given.resume);
  // Under the lock: another process may have saved one more.
  session.from = std::make_unique<io::Checkpoint>(io::find_checkpoint(given.resume));
  session.before = train::notes_of(*session.from);
  session.before.try_emplace("device", "cpu");  // older checkpoints know no other
  session.model.config = train::config_of(*session.from);
  TrainOptions noted;
  check_known(session, noted.options());
  take_notes(noted.options(), session.before);
  session.options = changed(noted, command, given);
  session.options.cutting.by_chance = !session.before.contains(kOrder);
  if (is_given(command, "--validation-data") && noted.validation_data.empty())
    throw UsageError(
        "--validation-data names where that file of the run is now, and the run validates on a share of its "
        "--data; leave it out");
  if (session.in_place) session.options.out = given.resume, session.saved = session.from->manifest().step;
  if (is_given(command, "--steps")) extend(session, noted.model.steps);
  if (reads_input(session.options.data) && !is_given(command, "--data"))
    throw UsageError(
        "the run has read standard input, which is gone; give the same bytes again with --data FILE or "
        "--data -");
  complete(session.options);
  return session;
}

}  // namespace

OptionTable TrainOptions::options() {
  OptionTable formats = choice.options();
  row_named(formats, "--recipe").help = "formats of weights, moments and gradients (default: scruple)";
  return joined(
      {{{kData, "--data", "data", &data, "PATH ...",
         "texts, folders of texts, *.jsonl, *.bin (tokens), patterns, - for standard input; with PATH:WEIGHT "
         "each "
         "is mixed in by its weight",
         anything(), kMayChange, nullptr, /*takes_many=*/true}},
       cutting.options(),
       {{kData, "--validation-data", "validation-data", &validation_data, "PATH",
         "validate on this, and train on all of --data", anything(), kMayChange}},
       {{kRun, "--out", "", &out, "DIR", "folder to write"},
        {kRun, "--force", "", &force, "", "replace the run in --out, after the first step"},
        {kRun, "--resume", "", &resume, "DIR",
         "go on from this run's last checkpoint; with --steps or --epochs: to more of them"},
        {kRun, "--epochs", "", &epochs, "N",
         "how often every window is seen, in place of --steps; 0.5 is half of them", above_zero()}},
       formats,
       rate.options(),
       {{kOptimizer, "--ema", "ema", &ema, "DECAY",
         "keep a moving average of the weights, such as 0.999, in 3 bytes each, for sample --ema and eval "
         "--ema",
         a_share()},
        {kOptimizer, "--skip-outliers", "skip-outliers", &skip_outliers, "Z",
         "skip a step whose loss or gradient norm is more than Z standard deviations above its running mean, "
         "such as 6; released: by the loss alone",
         above_zero(), kMayChange}},
       gradients.options(),
       model.options(0),  // 0 steps: the weights are written as they are
       choice.format_options(),
       {{kMemory, "--gradient-format", "gradient-format", &choice.gradient, "FORMAT",
         "format of stored or compressed gradients"},
        {kMemory, "--activations", "activations", &activations, "TYPE",
         either(train::kPrecisions) + " (default: as the weights; on a GPU bf16 for fp32)",
         one_of(train::kPrecisions)},
        {kMemory, "--memory-limit", "", &memory_limit, "SIZE",
         "refuse a run that needs more than this: 46GiB, 48GB"},
        {kRun, "--validate-every", "validate-every", &validate_every, "N",
         "steps between validations (default: a twentieth of --steps)", whole_from(1)},
        {kRun, "--stop-when", "stop-when", &stop_when, "N",
         "end the run when N validations in a row were no better than the best before them", whole_from(1),
         kMayChange},
        {kRun, "--save-every", "save-every", &save_every, "N",
         "steps between checkpoints (default: " + std::to_string(kSaveMinutes) +
             " minutes; Ctrl-C saves one too)",
         whole_from(1), kMayChange},
        {kRun, "--keep", "keep", &keep, "N", "checkpoints that stay; 0: all", whole_from(0), kMayChange}}});
}

Choice TrainOptions::chosen() const {
  Choice made = choice;
  if (rate.weight_decay >= 0)
    made.hypers.insert(made.hypers.begin(), "weight_decay=" + shortest(rate.weight_decay, 17));
  return made;
}

std::int64_t TrainOptions::limit() const {
  return memory_limit.empty() ? kNoLimit : parse_size(memory_limit, "--memory-limit");
}

Session session_of(const CLI::App& command, const TrainOptions& given) {
  if (given.epochs > 0 && is_given(command, "--steps"))
    throw UsageError("--epochs and --steps both say how long the run is; leave one of them out");
  if (is_given(command, "--memory-limit")) parse_size(given.memory_limit, "--memory-limit");  // "" is none
  if (!given.resume.empty()) return resumed(command, given);
  Session session;
  session.options = given;
  TrainOptions& options = session.options;
  complete(options);
  refuse_sizes(options.model, command);
  if (!options.validation_data.empty() && is_given(command, "--validation") && given.cutting.validation > 0)
    throw UsageError(
        "--validation is a share of --data, and --validation-data a file of its own; leave one of them out");
  if (options.data.empty() || options.out.empty())
    throw UsageError(std::string(options.data.empty() ? "--data" : "--out") +
                     " is required, unless --resume goes on with a run; try 'scruple train --help'");
  session.model = choose_model(options.model);
  if (std::error_code ignored;
      session.model.folder &&
      std::filesystem::equivalent(options.out, session.model.folder->folder(), ignored))
    throw UsageError("--out is the folder of --model, which the run would replace; name another folder");
  options.model.context = session.model.config.shape.context;
  if (options.rate.lr == 0) options.rate.lr = session.model.has_weights() ? kTuningLr : kLr;
  options.rate.complete();
  return session;
}

io::Metadata notes_for(const Session& session, const train::Data& data, const train::Trainer& trainer) {
  TrainOptions options = session.options;
  const bool is_gpt = options.model.is_gpt();
  if (!is_gpt) {
    options.model.model = absolute(options.model.model);
    options.model.shape = {0, 0, 0};  // its config has them
  }
  if (!options.validation_data.empty()) options.validation_data = absolute(options.validation_data);
  io::Metadata notes = data_notes(options.data, data);
  if (session.validation) notes[kValidationChecksum] = io::hex(session.validation->crc32());
  notes.merge(notes_of(options.options()));
  notes[kProgramNote] = train::kProgram;
  if (!options.cutting.by_chance) notes[kOrder] = kByEpochs;
  if (!is_gpt) notes[train::kConfigNote] = session.model.config.text;
  if (const std::string arithmetic = trainer.backend().arithmetic(); !arithmetic.empty())
    notes[kArithmetic] = arithmetic;
  return notes;
}

void count_epochs(Session& session, const train::Windows& data) {
  TrainOptions& options = session.options;
  if (options.epochs == 0) return;
  const double windows = options.epochs * static_cast<double>(data.count());
  const double of_step = static_cast<double>(options.model.batch) * options.gradients.accumulate;
  const double steps = std::ceil(windows / of_step);
  if (!(steps <= 1e15)) throw UsageError("--epochs is " + shortest(options.epochs) + ", which no run ends");
  const std::int64_t before = std::exchange(options.model.steps, static_cast<std::int64_t>(steps));
  if (session.from) extend(session, before);
}

void check_data(const Session& session, const train::Data& data) {
  if (const auto sources = session.before.find(kDataSources); sources != session.before.end()) {
    check_sources(sources->second, data);
  } else {
    const auto is_noted = [&](const char* key, const std::string& value) {
      const auto found = session.before.find(key);
      return found != session.before.end() && found->second == value;
    };
    if (!is_noted(kDataTokens, std::to_string(data.size())) ||
        !is_noted(kDataChecksum, io::hex(data.crc32())))
      throw std::runtime_error(name_of(session.options.data) +
                               " is not the file that the run was started with: its length or checksum "
                               "differs; name the right one with --data");
  }
  const auto validated = session.before.find(kValidationChecksum);
  if (session.validation && validated != session.before.end() &&
      validated->second != io::hex(session.validation->crc32()))
    throw std::runtime_error(session.options.validation_data +
                             " is not the file that the run was validated with: its checksum differs; name "
                             "the right one with --validation-data");
}

bool validates(const TrainOptions& options) {
  return options.cutting.validation > 0 || !options.validation_data.empty();
}

std::string moved_words(const Session& session, const train::Trainer& trainer) {
  const auto noted = session.before.find(kArithmetic);
  const std::string &now = session.options.model.device, &before = session.before.at("device"),
                    arithmetic = trainer.backend().arithmetic();
  if (now != before) return "on " + now + " after " + before;
  if (noted == session.before.end() || noted->second == arithmetic) return "";
  return "on " + arithmetic + " after " + noted->second;
}

std::string savings_of(const Session& session) {
  return session.from ? savings_of_passes(session.job) : savings(session.job, true);
}

}  // namespace scruple::cli
