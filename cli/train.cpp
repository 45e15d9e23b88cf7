// `scruple train`: a byte-level GPT, or a model of Hugging Face's, on any text.
#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <iostream>
#include <memory>
#include <new>
#include <utility>

#include "commands.h"
#include "io/checkpoint.h"
#include "io/crc32.h"
#include "io/file.h"
#include "names.h"
#include "page.h"
#include "text.h"
#include "train/model/model.h"
#include "train/run/checkpoint.h"
#include "train/run/folder.h"
#include "train/run/report.h"
#include "training.h"

namespace scruple::cli {
namespace {

using train::Data;
using train::Ledger;
using train::Metrics;
using train::Outcome;
using train::Record;
using train::RunFolder;
using train::Trainer;

constexpr const char* kFooter =
    "Writes into --out: metrics.jsonl (a line per step), report.html (curves and memory), and the weights as "
    "a\n"
    "Hugging Face folder (config.json, model.safetensors, the tokenizer): transformers loads it as it is, "
    "'scruple sample'\n"
    "continues a text with it. The last twentieth of the data (--validation SHARE) is kept for validation.\n"
    "\n"
    "--model is gpt, a folder of a gpt2, llama, mistral, qwen2 or qwen3 model to go on from, or a "
    "config.json to begin\n"
    "from. --data is a text, a folder of texts, *.jsonl with \"text\" or with \"prompt\" and \"completion\" "
    "(the loss is then\n"
    "on completions alone), or *.bin, tokens of 'scruple tokenize', llm.c or nanoGPT.\n"
    "\n"
    "Ctrl-C (SIGINT, SIGTERM, SIGHUP) ends after the current step, writes all of the above and a checkpoint, "
    "names the\n"
    "command that goes on, and exits with 128 + the signal's number. With --save-every there are "
    "checkpoints/ all along,\n"
    "against kills. --resume goes on from the last one and ends with the bits of a run that was left alone;\n"
    "'scruple checkpoint' looks into them. One process at a time trains into a folder.\n"
    "\n"
    "--resume DIR --steps N makes a run longer, also one that has ended, if it was trained with "
    "--save-every: without, it keeps\n"
    "no checkpoint to go on from. What followed from its first number of steps (warmup, validations) stays; "
    "a constant\n"
    "schedule goes on, cosine and linear then span N steps, so that the learning rate rises where it goes "
    "on.\n"
    "After standard input (--data -), --resume asks for --data with the same bytes.\n"
    "\n"
    "Examples:\n"
    "  scruple train --data book.txt --out run1\n"
    "  scruple train --model ./SmolLM2-135M --data notes.jsonl --out tuned --lr 1e-5\n"
    "  scruple train --model ./Llama-3.1-8B --data notes.jsonl --out tuned --device cuda "
    "--gradients released --recompute block --batch 4\n"
    "  scruple train --model config.json --data tokens.bin --out run\n"
    "  scruple train --data book.txt --out run1 --force --layers 6 --width 384 --heads 6 --context 256\n"
    "  cat *.txt | scruple train --data - --out run2\n"
    "  scruple train --data book.txt --out run3 --gradients compressed --accumulate 4 --clip 1\n"
    "  scruple train --data book.txt --out run4 --recipe lpmm --optimizer sgd --lr 0.3 --accumulate 4 "
    "--device cpu\n"
    "  scruple train --data book.txt --out run5 --weights fp16+8 --loss-scale dynamic\n"
    "  scruple train --data book.txt --out run6 --save-every 100 --keep 3\n"
    "  scruple train --resume run6\n"
    "  scruple train --resume run6 --steps 2000";

constexpr double kLr = 1e-3;

struct Options {
  Choice choice;
  ModelOptions model;
  GradientOptions gradients;
  CuttingOptions cutting;
  std::string data, out, activations, schedule = "cosine";
  double lr = 0, weight_decay = -1;  // lr 0: by default
  std::int64_t warmup = -1, validate_every = 0, save_every = 0, keep = 2;
  std::string resume;
  bool force = false;
  std::int64_t limit = kNoLimit;  // of memory
};

void add_options(CLI::App& command, Options& options);

train::Schedule schedule_of(const Options& options) {
  const std::int64_t steps = options.model.steps;
  const std::int64_t warmup = options.warmup >= 0 ? options.warmup : steps / 20;
  if (warmup > steps)
    throw UsageError("--warmup is " + std::to_string(warmup) + " and there are " + grouped(steps) +
                     " steps; it must not be larger");
  return {value_named<train::Annealing>(train::kAnnealings, options.schedule).value(), options.lr, warmup,
          steps};
}

const char* layout_name(train::Layout layout) { return train::kLayouts[static_cast<int>(layout)]; }

// What was not said, filled in.
Options completed(Options options) {
  Choice& choice = options.choice;
  if (choice.recipe.empty()) choice.recipe = "scruple";
  options.model.device = device_for(options.model.device);
  for (const std::string& hyper : choice.hypers)
    if (hyper.starts_with("lr="))
      throw UsageError("--set " + hyper + " would be lost to the schedule; use --lr");
  if (options.weight_decay >= 0)
    choice.hypers.insert(choice.hypers.begin(), "weight_decay=" + shortest(options.weight_decay, 17));
  return options;
}

// ---- Checkpoints ----

// What --resume leaves to the user; everything else is the run's own.
constexpr const char* kFree[] = {"--data",    "--out",     "--device",       "--recompute",
                                 "--offload", "--threads", "--memory-limit", "--save-every",
                                 "--keep",    "--force",   "--resume",       "--help"};

bool is_free(const std::string& name) {
  return std::find(std::begin(kFree), std::end(kFree), name) != std::end(kFree);
}

std::string long_name(const CLI::Option& option) {
  return option.get_lnames().empty() ? option.get_name() : "--" + option.get_lnames().front();
}

// What a run reads, so that it goes on with the same.
constexpr const char *kDataTokens = "data_tokens", *kDataChecksum = "data_crc32";

// Where a run is trained, and how; it may move, and what is computed again changes no bit.
void note_device(io::Metadata& notes, const Options& options) {
  notes["--device"] = options.model.device;
  notes["--recompute"] = options.model.recompute;
  notes["--activations"] = options.activations;
  notes.erase("--offload");
  if (options.model.offload) notes["--offload"] = "true";
}

io::Metadata data_notes(const std::string& path, const Data& data) {
  return {{"--data", path == Data::kStandardInput ? path : std::filesystem::absolute(path).string()},
          {kDataTokens, std::to_string(data.size())},
          {kDataChecksum, io::hex(data.crc32())}};
}

// The settings of a run, given or by default, and what it reads: enough to start it again.
io::Metadata notes_of(const CLI::App& command, const Options& options, const ChosenModel& model,
                      const Data& data) {
  io::Metadata notes = data_notes(options.data, data);
  notes["program"] = train::kProgram;
  if (options.save_every > 0) notes["--save-every"] = std::to_string(options.save_every);
  notes["--keep"] = std::to_string(options.keep);
  note_device(notes, options);
  for (const CLI::Option* option : command.get_options()) {
    if (is_free(long_name(*option))) continue;
    std::string values = option->count() == 0 ? option->get_default_str() : "";  // it may change one day
    if (option->count() > 0)
      for (const std::string& value : option->results()) values += (values.empty() ? "" : "\n") + value;
    if (!values.empty()) notes[long_name(*option)] = values;
  }
  notes["--context"] = std::to_string(model.config.shape.context);
  notes["--lr"] = shortest(options.lr, 17);
  if (options.model.is_gpt()) return notes;
  for (const SizeOption& option : kSizeOptions) notes.erase(option.name);
  notes["--model"] = std::filesystem::absolute(options.model.model).string();
  notes[train::kConfigNote] = model.config.text;
  return notes;
}

// A session of a run: a new one, or one that goes on from a checkpoint.
struct Session {
  Options options;
  ChosenModel model;
  io::Metadata notes;                 // for the checkpoints; empty until one is wanted
  std::unique_ptr<RunFolder> folder;  // locked
  std::unique_ptr<io::Checkpoint> from;
  std::string device;      // that it was trained on; "": it begins
  bool in_place = false;   // goes on in the folder that it was begun in
  std::int64_t first = 0;  // the steps that it had before it was made longer; 0: it was not

  // Filled in when it trains.
  std::string tokenizer;  // the folder that has it
  train::Job job;
  Memory plan;  // of weights, moments and gradients
  Ledger ledger;
  std::string unsaved;  // why the last save failed, or ""
};

// More steps than the run was started with; what followed from their number stays.
void extend(Session& session, std::int64_t steps) {
  Options& options = session.options;
  if (steps < options.model.steps)
    throw UsageError("--steps is " + std::to_string(steps) + ", and the run has " +
                     grouped(options.model.steps) + "; --resume makes it longer, never shorter");
  if (steps == options.model.steps) return;
  options.warmup = schedule_of(options).warmup;
  options.validate_every = span_of(options.model.steps, options.validate_every).validate_every;
  session.first = std::exchange(options.model.steps, steps);
  session.notes["--steps"] = std::to_string(steps);
  session.notes["--warmup"] = std::to_string(options.warmup);
  session.notes["--validate-every"] = std::to_string(options.validate_every);
}

// The options that a checkpoint's notes give, but for those that the user gives.
Options options_of(const io::Metadata& notes, const CLI::App& command, const Options& given) {
  std::vector<std::string> words;
  for (const auto& [name, values] : notes) {
    if (!name.starts_with("--") || (is_free(name) && command.count(name) > 0)) continue;
    if (command.get_option(name)->get_expected_max() == 0) {  // a flag
      words.push_back(name + "=" + values);
      continue;
    }
    for (std::size_t begin = 0; begin <= values.size();) {
      const std::size_t end = std::min(values.find('\n', begin), values.size());
      words.insert(words.end(), {values.substr(begin, end - begin), name});
      begin = end + 1;
    }
  }
  Options options;
  CLI::App parser;
  add_options(parser, options);
  parser.parse(words);  // CLI11 takes them last to first
  if (command.count("--data") > 0) options.data = given.data;
  if (command.count("--save-every") > 0) options.save_every = given.save_every;
  if (command.count("--keep") > 0) options.keep = given.keep;
  if (command.count("--device") > 0) options.model.device = given.model.device;
  if (command.count("--recompute") > 0) options.model.recompute = given.model.recompute;
  if (command.count("--offload") > 0)
    options.model.offload = given.model.offload;
  else if (device_for(options.model.device) == "cpu")  // it has moved here
    options.model.offload = false;
  options.model.threads = given.model.threads;
  options.limit = given.limit;
  options.resume = given.resume;
  options.force = given.force;
  return options;
}

// A folder that has weights and nothing to go on from is refused in words of its own.
void check_has_checkpoint(const std::string& run) {
  const std::int64_t step = train::weights_step(run);
  if (step < 0 || std::filesystem::exists(run + "/manifest.json") ||
      !io::saved_steps(train::checkpoints_of(run)).empty())
    return;
  throw std::runtime_error(run + " has its weights after step " + grouped(step) +
                           " and no checkpoint to go on from: a run that ends keeps one only with "
                           "--save-every. Train it again with --save-every N to make it longer one day");
}

// The run's own settings, with what the user may change about it.
Session resumed(const CLI::App& command, const Options& given) {
  for (const CLI::Option* option : command.get_options())
    if (const std::string name = long_name(*option);
        option->count() > 0 && !is_free(name) && name != "--steps")
      throw UsageError("--resume takes " + name +
                       " from the run, so that it ends with the same bits; leave it out");
  if (std::error_code ignored; !std::filesystem::exists(given.resume, ignored))
    throw UsageError("--resume is '" + given.resume +
                     "', and there is no such folder; name the --out of a run, or one of its checkpoints");
  check_has_checkpoint(given.resume);
  Session session;
  session.in_place = io::find_checkpoint(given.resume) != given.resume;
  if (session.in_place && command.count("--out") > 0)
    throw UsageError(
        "--resume writes into the run's own folder; leave --out out, or resume a checkpoint of it");
  if (session.in_place && given.force)
    throw UsageError("--force replaces a run, and --resume goes on with it; leave one of them out");
  if (!session.in_place && command.count("--out") == 0)
    throw UsageError("--resume " + given.resume +
                     " is a single checkpoint; name a new folder with --out, or resume its run");
  if (session.in_place) session.folder = std::make_unique<RunFolder>(given.resume);
  // Under the lock: another process may have saved one more.
  session.from = std::make_unique<io::Checkpoint>(io::find_checkpoint(given.resume));
  session.notes = session.from->manifest().trainer;
  if (const auto program = session.notes.find("program");
      program == session.notes.end() || program->second != train::kProgram)
    throw std::runtime_error(session.from->folder() +
                             " was not saved by 'scruple train', which cannot go on with it");
  if (auto size = session.notes.extract("data_bytes")) {  // what older checkpoints call it
    size.key() = kDataTokens;
    session.notes.insert(std::move(size));
  }
  session.notes.try_emplace("--device", "cpu");  // older checkpoints know no other
  session.options = options_of(session.notes, command, given);
  session.options.out = session.in_place ? given.resume : given.out;
  session.device = session.notes.at("--device");
  session.model.config = train::config_of(*session.from);
  if (command.count("--steps") > 0) extend(session, given.model.steps);
  return session;
}

// The folder that has the tokenizer of the run's model.
std::string tokenizer_folder(const Session& session) {
  const Options& options = session.options;
  if (options.model.is_gpt()) return "";
  if (session.model.folder) return session.model.folder->folder();
  if (session.in_place && train::has_tokenizer(options.out)) return options.out;
  return folder_of_tokenizer(options.model.model);
}

train::Job job_of(const Options& options, const ChosenModel& model, const Data& data) {
  train::Job job = make_job(options.choice, options.choice.recipe, options.model, model, options.gradients,
                            options.activations);
  job.isolates = data.training().isolates();
  job.schedule = schedule_of(options);
  return job;
}

// What would take less memory: of a run that goes on, only what leaves its bits as they are.
std::string savings_of(const Session& session) {
  return session.from ? savings_of_passes(session.job) : savings(session.job, true);
}

// What a kill has left between saves.
void tidy(const Options& options) {
  for (const std::string& left : io::remove_partial(train::checkpoints_of(options.out), "step-"))
    std::cerr << "scruple: " << left
              << " was left as it is: whoever writes it may still be at work; remove it if nobody does\n";
  train::keep_last(options.out, options.keep);
}

// Whether a run that has taken these steps has also written all that it should.
bool is_complete(const Options& options, const Record& record) {
  const std::int64_t steps = options.model.steps;
  return record.steps.size() == static_cast<std::size_t>(steps) && !record.validations.empty() &&
         record.validations.back().first == steps && train::weights_step(options.out) == steps &&
         std::filesystem::exists(options.out + "/report.html");
}

void check_data(const io::Metadata& saved, const io::Metadata& now) {
  for (const char* key : {kDataTokens, kDataChecksum})
    if (const auto found = saved.find(key); found == saved.end() || found->second != now.at(key))
      throw std::runtime_error(now.at("--data") +
                               " is not the file that the run was started with: its length or checksum "
                               "differs; name the right one with --data");
}

void print_start(const Session& session, const Data& data, const std::string& device) {
  const Options& options = session.options;
  const train::Job& job = session.job;
  const train::Description& s = job.shape;
  std::cout << (options.model.is_gpt() ? kGpt : options.model.model + ", " + kind_words(session.model.config))
            << ": " << shape_words(s) << "; " << grouped(train::parameter_count(s)) << " parameters; "
            << device << '\n'
            << options.choice.optimizer << ", recipe " << options.choice.recipe << ", gradients "
            << options.gradients.policy << ", activations " << precision_name(job.activations)
            << gradient_words(job) << "; lr " << shortest(options.lr) << ' ' << options.schedule << ", seed "
            << job.seed << '\n'
            << plural(options.model.steps, "step") << " of " << grouped(tokens_per_step(job)) << ' '
            << token_word(s) << "s; " << name_of(options.data) << " has " << grouped(data.size());
  if (data.layout() == train::Layout::padded || data.documents() > 1)
    std::cout << " in " << plural(data.documents(), "document") << ", " << layout_name(data.layout())
              << (job.isolates ? " and isolated" : "");
  std::cout << "\n\n";
}

Record watch(const CLI::App& command, Session& session, Trainer& trainer, const Data& data, Metrics& metrics,
             Record before) {
  const Options& options = session.options;
  Progress progress(options.choice.recipe, session.job, trainer, session.ledger);
  train::Span span = span_of(options.model.steps, options.validate_every);
  span.save_every = options.save_every;
  span.save_last = session.in_place;  // it has a checkpoint, which shall not be older than its weights
  span.validating = [&](auto done, auto all) { progress.validating(done, all); };
  bool metrics_wait = false;
  const auto write_metrics = [&](const Record& record) {
    session.folder->begin();
    const bool written = metrics.write(record);
    if (!written && !metrics_wait)
      progress.warn("cannot write " + metrics.path() + ": make room; its lines wait, and the run goes on");
    metrics_wait = !written;
  };
  return train::run(
      trainer, data.training(), data.validation(), span,
      [&](const Record& record) {
        write_metrics(record);
        progress.show(record, train::seconds_left(record, span));
      },
      [&](const Record& record) {
        write_metrics(record);
        session.unsaved.clear();
        try {
          if (session.notes.empty()) session.notes = notes_of(command, options, session.model, data);
          train::save(trainer, options.choice.recipe, session.notes, options.out, options.keep);
          if (!session.tokenizer.empty()) train::copy_tokenizer(session.tokenizer, options.out);
        } catch (const std::exception& error) {  // hours of training are worth more than this file
          session.unsaved = error.what();
          if (span.go_on() && static_cast<std::int64_t>(record.steps.size()) < span.steps)
            progress.warn(session.unsaved + "; the run goes on, and the next save tries again");
        }
        return session.unsaved.empty();
      },
      std::move(before));
}

// What a run has left, and what it could not.
struct Ending {
  std::string weights;  // the folder that has them; "": none does
  bool metrics = false, report = false;
  std::vector<std::string> problems;

  bool attempt(const std::function<void()>& write) {
    try {
      write();
      return true;
    } catch (const std::exception& error) {
      problems.emplace_back(error.what());
      return false;
    }
  }
};

// Into the run's folder; where that fails, into a new one elsewhere: all of the training is in them.
std::string write_weights_somewhere(Session& session, Trainer& trainer, Ending& ending) {
  const std::string& out = session.options.out;
  const auto into = [&](const std::string& folder) {
    return ending.attempt([&] {
      train::write_weights(folder, session.model.config, trainer, session.ledger);
      if (!session.tokenizer.empty()) train::copy_tokenizer(session.tokenizer, folder);
    });
  };
  if (into(out)) return out;
  std::error_code ignored;
  for (const std::filesystem::path& above :
       {std::filesystem::temp_directory_path(ignored), std::filesystem::current_path(ignored)}) {
    std::string folder = (above / "scruple-XXXXXX").string();
    if (mkdtemp(folder.data()) == nullptr) continue;
    if (into(folder)) return folder;
    std::filesystem::remove_all(folder, ignored);
  }
  return "";
}

// For a shell to read as one word.
std::string quoted(const std::string& word) {
  constexpr const char* kPlain = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_./,:=+@%-";
  if (!word.empty() && word.find_first_not_of(kPlain) == std::string::npos) return word;
  std::string text = "'";
  for (const char c : word) text += c == '\'' ? "'\\''" : std::string(1, c);
  return text + "'";
}

std::string resume_command(const Options& options) {
#if defined(__GLIBC__)
  const std::string program = quoted(program_invocation_name);
#else
  const std::string program = "scruple";
#endif
  return program + " train --resume " + quoted(options.out) +
         (options.data == Data::kStandardInput ? " --data FILE (the same bytes)" : "");
}

std::int64_t skipped_steps(const Record& record) {
  return std::count_if(record.steps.begin(), record.steps.end(),
                       [](const Outcome& step) { return step.skipped; });
}

// "": something was, or that the loss is not finite is told in other words.
std::string why_nothing_was_learnt(const Record& record) {
  const auto taken = static_cast<std::int64_t>(record.steps.size());
  if (const std::int64_t skipped = skipped_steps(record); 2 * skipped > taken)
    return grouped(skipped) + " of " + plural(taken, "step") +
           " were skipped, because a gradient was not finite; choose a smaller --lr or --loss-scale";
  constexpr double kNoise = 1.01;  // runs of a few steps end 0.01 % above
  if (record.final_loss() > kNoise * record.first_loss())
    return "nothing was learnt: the validation loss went from " + fixed(record.first_loss(), 4) + " to " +
           fixed(record.final_loss(), 4) + "; choose a smaller --lr, a longer --warmup or fewer --steps";
  return "";
}

void print_end(const Session& session, const Record& record, const Ending& ending, double most_tokens) {
  const Options& options = session.options;
  const auto params = static_cast<double>(train::parameter_count(session.job.shape));
  const auto each = [&](std::int64_t bytes) { return fixed(static_cast<double>(bytes) / params, 3); };
  const auto taken = static_cast<std::int64_t>(record.steps.size());
  if (const std::int64_t skipped = skipped_steps(record); skipped > 0)
    std::cout << grouped(skipped) << " of " << plural(taken, "step") << (skipped == 1 ? " was" : " were")
              << " skipped: a gradient was not finite.\n";
  std::cout << validation_words(record, session.job) << "; ";
  if (record.steps.size() > record.resumed) std::cout << fixed(record.ms_per_step(), 1) << " ms per step; ";
  if (record.steps.size() > record.resumed && most_tokens > 0)
    std::cout << "MFU " << mfu_words(tokens_per_second(record, tokens_per_step(session.job)), most_tokens)
              << "; ";
  std::cout << "peak " << size_words(session.ledger.peak()) << '\n'
            << "weights, moments and gradients: " << each(session.plan.total())
            << " bytes per parameter planned, " << each(measured_total(session.ledger)) << " measured\n"
            << "wrote " << options.out << "/:";
  const char* separator = " ";
  const auto list = [&](bool written, const char* name) {
    if (written) std::cout << std::exchange(separator, ", ") << name;
  };
  list(ending.weights == options.out, "model.safetensors, config.json");
  list(ending.weights == options.out && train::has_tokenizer(options.out), "the tokenizer's files");
  list(ending.metrics, "metrics.jsonl");
  list(ending.report, "report.html");
  list(!io::saved_steps(train::checkpoints_of(options.out)).empty(), "checkpoints/");
  std::cout << '\n';
  if (record.stopped && train::losses_lost(record) == 0)
    std::cout << "Stopped by " << Interrupts::name() << " after step " << grouped(taken) << " of "
              << grouped(options.model.steps) << (ending.problems.empty() ? ". To go on:\n  " : ".")
              << (ending.problems.empty() ? resume_command(options) : "") << '\n';
}

// The problems, and what there is in spite of them.
std::string told(const Options& options, const Record& record, const Ending& ending) {
  std::string text;
  for (const std::string& problem : ending.problems) text += problem + ".\n";
  text += "The weights after step " + grouped(static_cast<std::int64_t>(record.steps.size()));
  text += ending.weights.empty() ? " could not be written anywhere." : " are in " + ending.weights;
  if (!ending.weights.empty()) text += ending.weights == options.out ? "." : ", not in " + options.out + ".";
  if (const auto saved = io::saved_steps(train::checkpoints_of(options.out)); !saved.empty())
    text += " Once there is room, '" + resume_command(options) + "' goes on after step " +
            grouped(saved.back()) + ".";
  return text;
}

void print_extension(const Session& session, std::int64_t taken) {
  const train::Schedule& now = session.job.schedule;
  train::Schedule before = now;
  before.steps = session.first;
  std::cout << "from " << plural(session.first, "step") << " to " << grouped(now.steps) << ": the "
            << session.options.schedule << " schedule spans all of them; learning rate "
            << shortest(before.at(taken)) << " at step " << grouped(taken) << ", "
            << shortest(now.at(taken + 1)) << " at step " << grouped(taken + 1) << "\n";
}

// Everything that a run leaves, whatever fails; the weights last, so that their step is that of all.
Ending finish(Session& session, const Record& record, Trainer& trainer, Metrics& metrics) {
  const Options& options = session.options;
  Ending ending;
  if (!session.unsaved.empty()) ending.problems.push_back(session.unsaved);
  ending.metrics = metrics.write(record);
  if (!ending.metrics) ending.problems.push_back("cannot write the end of " + metrics.path() + "; make room");
  ending.report = ending.attempt([&] {
    io::write_text(
        options.out + "/report.html",
        train::to_html(
            page_of(name_of(options.data), options.model.is_gpt() ? "GPT" : kind_words(session.model.config),
                    options.choice.recipe, session.job, record, trainer, session.ledger, session.plan)));
  });
  ending.weights = write_weights_somewhere(session, trainer, ending);
  return ending;
}

void train_with(const CLI::App& command, Session& session) {
  const Options& options = session.options;
  Record before = session.in_place ? train::read_metrics(options.out, session.from->manifest().step)
                                   : train::unseen(session.from ? session.from->manifest().step : 0);
  if (session.in_place) {
    tidy(options);
    if (is_complete(options, before)) {
      std::cout << options.out << " is complete: it has taken its " << plural(options.model.steps, "step")
                << ", and nothing is left to do. --steps N makes it longer.\n";
      return;
    }
  }
  check_device(options.model.device);
  session.tokenizer = tokenizer_folder(session);
  const Data data = open_data(options.data, options.cutting.cutting(session.model.config.shape.context),
                              session.model, session.tokenizer);
  if (session.from) {
    const io::Metadata now = data_notes(options.data, data);
    check_data(session.notes, now);
    session.notes["--data"] = now.at("--data");
  }
  session.job = job_of(options, session.model, data);
  // The device decides what is not said, and a run may move to another.
  session.options.activations = precision_name(session.job.activations);
  if (session.from)
    note_device(session.notes, options);
  else if (options.save_every > 0)
    session.notes = notes_of(command, options, session.model, data);
  session.plan = plan_of(options.choice, options.choice.recipe, session.job, options.gradients.policy);
  const Table memory =
      checked_memory("the run", session.job, session.plan, savings_of(session), options.limit);
  session.ledger = Ledger(std::min(free_memory(session.job), options.limit));
  Trainer trainer(session.job, session.ledger, session.from.get());
  const bool makes_folder = !std::filesystem::exists(options.out);
  if (!session.in_place) {
    make_folder(options.out);
    session.folder = std::make_unique<RunFolder>(options.out);
    session.folder->claim(options.force);
  }

  const Interrupts interrupts;
  print_start(session, data, trainer.backend().device());
  if (session.from)
    std::cout << "going on after step " << grouped(trainer.steps_taken()) << ", from "
              << session.from->folder() << '\n';
  if (session.from && session.device != options.model.device)
    std::cout << "on " << options.model.device << " after " << session.device
              << ": its losses are those of a run that had not moved within rounding, not to the bit\n";
  if (session.first > 0) print_extension(session, trainer.steps_taken());
  if (session.from) std::cout << '\n';
  memory.print(std::cout);
  std::cout << std::endl;

  Metrics metrics(options.out);
  const Record record = watch(command, session, trainer, data, metrics, std::move(before));
  if (record.stopped && record.steps.size() == record.resumed) {
    std::cerr << "scruple: stopped by " << Interrupts::name()
              << " before a step was taken; nothing was written\n";
    std::error_code ignored;
    if (makes_folder) std::filesystem::remove(options.out, ignored);
    throw Stopped{Interrupts::signal()};
  }
  session.folder->begin();
  const Ending ending = finish(session, record, trainer, metrics);
  const std::string problem = why_nothing_was_learnt(record);
  if (!problem.empty()) std::cerr << "scruple: " << problem << std::endl;
  print_end(session, record, ending, most_tokens(trainer, session.job));
  if (!ending.problems.empty()) throw std::runtime_error(told(options, record, ending));
  if (!record.validations.empty() && record.validations.front().first == 0 &&
      !std::isfinite(record.first_loss()))
    throw std::runtime_error("the loss was not finite before the first step: the weights of " +
                             options.model.model + " are not, or too large for --activations " +
                             precision_name(session.job.activations));
  if (const std::int64_t lost = train::losses_lost(record); lost > 0) {
    const std::vector<std::int64_t> saved = io::saved_steps(train::checkpoints_of(options.out));
    throw std::runtime_error("the training diverged: its loss is not finite since step " +
                             grouped(static_cast<std::int64_t>(record.steps.size()) - lost + 1) +
                             ". Choose a smaller --lr, or a longer --warmup" +
                             (saved.empty() ? ""
                                            : "; the last checkpoint, of step " + grouped(saved.back()) +
                                                  ", is of a time when it was"));
  }
  if (record.stopped) throw Stopped{Interrupts::signal()};
  if (!problem.empty()) throw NotLearnt{};
}

void run(const CLI::App& command, const Options& given) {
  Session session;
  if (given.resume.empty())
    session.options = given;
  else
    session = resumed(command, given);
  session.options = completed(session.options);
  const Options& options = session.options;
  if (given.resume.empty()) refuse_sizes(options.model, command);
  if (options.data.empty() || options.out.empty())
    throw UsageError(std::string(options.data.empty() ? "--data" : "--out") +
                     " is required, unless a run goes on with --resume; try 'scruple train --help'");
  if (session.from && options.data == Data::kStandardInput && command.count("--data") == 0)
    throw UsageError(
        "the run has read standard input, which nothing keeps; give the same bytes again with --data FILE, "
        "or --data -");
  if (!session.from) session.model = choose_model(options.model);
  std::error_code ignored;
  if (session.model.folder &&
      std::filesystem::equivalent(options.out, session.model.folder->folder(), ignored))
    throw UsageError("--out is the folder of --model, which the run would replace; name another folder");
  if (options.lr == 0) session.options.lr = session.model.has_weights() ? kTuningLr : kLr;
  try {
    train_with(command, session);
  } catch (const std::bad_alloc&) {
    rethrow_shortage(session.job, savings_of(session));
  }
}

void add_options(CLI::App& command, Options& options) {
  command
      .add_option("--data", options.data,
                  "what to learn: a text, a folder of texts, *.jsonl (text, or prompt and completion), *.bin "
                  "(tokens); -: standard input")
      ->type_name("PATH");
  options.cutting.add_options(command);
  command.add_option("--out", options.out, "the folder to write")->type_name("DIR");
  command.add_flag("--force", options.force,
                   "replace the run that --out has, once the new one has taken a step; others' files stay");
  options.model.add_options(command, 0);  // 0 steps: the weights are written as they are
  options.choice.add_options(command);
  command.get_option("--recipe")->description("formats of weights, moments and gradients (default: scruple)");
  command
      .add_option("--lr", options.lr,
                  "peak learning rate (default: " + shortest(kLr) + ", of a folder's weights " +
                      shortest(kTuningLr) + ")")
      ->check(above_zero());
  command.add_option("--schedule", options.schedule, "cosine, linear (both down to 0) or constant")
      ->capture_default_str()
      ->check(one_of(train::kAnnealings));
  command.add_option("--warmup", options.warmup, "steps of linear rise (default: a twentieth)")
      ->type_name("N")
      ->check(whole_from(0));
  command.add_option("--weight-decay", options.weight_decay, "of matrices; norms and biases never decay")
      ->check(not_negative());
  options.gradients.add_options(command);
  command
      .add_option("--gradient-format", options.choice.gradient, "format of stored or compressed gradients")
      ->type_name("FORMAT");
  command
      .add_option("--activations", options.activations,
                  either(train::kPrecisions) +
                      " (default: as the weights are computed; on a GPU bf16 where that is fp32)")
      ->check(one_of(train::kPrecisions));
  command
      .add_option_function<std::string>(
          "--memory-limit",
          [&options](const std::string& text) { options.limit = parse_size(text, "--memory-limit"); },
          "a run that would take more is refused, whatever the device has: 46GiB, 48GB")
      ->type_name("SIZE");
  command
      .add_option("--validate-every", options.validate_every,
                  "steps between validations (default: a twentieth)")
      ->type_name("N")
      ->check(whole_from(1));
  command
      .add_option("--save-every", options.save_every,
                  "steps between checkpoints (default: only a stop saves one)")
      ->type_name("N")
      ->check(whole_from(1));
  command.add_option("--keep", options.keep, "how many checkpoints stay; 0: all")
      ->type_name("K")
      ->capture_default_str()
      ->check(whole_from(0));
  command
      .add_option("--resume", options.resume,
                  "go on with this run, from its last checkpoint, to the same bits; with --steps: to more")
      ->type_name("DIR");
}

}  // namespace

void add_train(CLI::App& program) {
  CLI::App* command =
      program.add_subcommand("train", "Train a byte-level GPT, or a Hugging Face model, on your data");
  command->footer(kFooter);
  const auto options = std::make_shared<Options>();
  add_options(*command, *options);
  command->callback([command, options] { run(*command, *options); });
}

}  // namespace scruple::cli
