// `scruple train`: a byte-level GPT on any file.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iostream>
#include <memory>
#include <nlohmann/json.hpp>
#include <sstream>
#include <utility>

#include "commands.h"
#include "io/checkpoint.h"
#include "io/crc32.h"
#include "io/file.h"
#include "page.h"
#include "text.h"
#include "train/checkpoint.h"
#include "train/export.h"
#include "train/report.h"
#include "training.h"

namespace scruple::cli {
namespace {

using nlohmann::ordered_json;
using train::Ledger;
using train::Outcome;
using train::Record;
using train::Trainer;
using Data = train::TextFile;

constexpr const char* kFooter =
    "Writes into --out: metrics.jsonl (a line per step), report.html (curves and memory), and the weights "
    "as\n"
    "Hugging Face's GPT-2 (config.json, model.safetensors): transformers loads the folder as it is, 'scruple "
    "sample'\n"
    "continues a text with it. The last twentieth of the file is kept for validation. Ctrl-C ends after the "
    "current\n"
    "step and saves what there is. With --save-every there are also checkpoints/, from which --resume goes "
    "on "
    "to the\n"
    "same bits after any interruption; 'scruple checkpoint' looks into them.\n"
    "\n"
    "Examples:\n"
    "  scruple train --data book.txt --out run1\n"
    "  scruple train --data book.txt --out run2 --layers 6 --width 384 --heads 6 --context 256 --steps 2000\n"
    "  scruple train --data book.txt --out run3 --gradients compressed --accumulate 4 --clip 1\n"
    "  scruple train --data book.txt --out run4 --recipe lpmm --optimizer sgd --lr 0.3 --accumulate 4\n"
    "  scruple train --data book.txt --out run5 --weights fp16+8 --loss-scale dynamic\n"
    "  scruple train --data book.txt --out run6 --save-every 100 --keep 3\n"
    "  scruple train --resume run6";

struct Options {
  Choice choice;
  ModelOptions model;
  GradientOptions gradients;
  std::string data, out, activations, schedule = "cosine", kind = "gpt";
  double lr = 1e-3, weight_decay = -1;
  std::int64_t warmup = -1, validate_every = 0, save_every = 0, keep = 2;
  std::string resume;
};

void add_options(CLI::App& command, Options& options);

train::Schedule schedule_of(const Options& options) {
  const std::vector<std::string> names = {"cosine", "linear", "constant"};
  const auto at = std::find(names.begin(), names.end(), options.schedule) - names.begin();
  const std::int64_t steps = options.model.steps;
  const std::int64_t warmup = options.warmup >= 0 ? options.warmup : steps / 20;
  if (warmup > steps)
    throw UsageError("--warmup is " + std::to_string(warmup) + " and there are " + std::to_string(steps) +
                     " steps; it must not be larger");
  return {static_cast<train::Annealing>(at), options.lr, warmup, steps};
}

constexpr const char* kMetrics = "/metrics.jsonl";

// A step of an earlier session that left no trace but its checkpoint.
Outcome unknown() { return {std::nan(""), std::nan(""), std::nan(""), 1, false}; }
bool is_unknown(const Outcome& step) { return std::isnan(step.lr); }

// Fails before anything is trained if the results could not be written after.
void claim(const std::string& folder) {
  make_folder(folder);
  for (const char* name : {"metrics.jsonl", "report.html", "model.safetensors", "config.json", "checkpoints"})
    if (std::filesystem::exists(folder + "/" + name))
      throw std::runtime_error(folder + " has " + name +
                               " of an earlier run; choose another --out, or move it away");
}

// metrics.jsonl: a line per step and per validation, written after each step. Where the disk is full the lines wait.
class Metrics {
 public:
  // `before`: what earlier sessions saw. The file is made anew with it: they may have gone further, or been
  // killed in the middle of a line.
  Metrics(const std::string& folder, const Record& before) : path_(folder + kMetrics) {
    io::write_text(path_, next_lines(before));
    open();
    if (!file_) throw std::runtime_error("cannot write " + path_ + "; choose another --out, or make room");
  }

  ~Metrics() {  // a run that failed before its first step leaves its folder free for the next
    if (steps_ == 0) std::remove(path_.c_str());
  }
  Metrics(const Metrics&) = delete;
  Metrics& operator=(const Metrics&) = delete;

  // Whether all is written that there was up to now.
  bool write(const Record& record) {
    waiting_ += next_lines(record);
    if (!(file_ << waiting_ << std::flush)) {  // less whatever got through, so that no line is there twice
      file_.close();
      std::error_code ignored;
      std::filesystem::resize_file(path_, written_, ignored);
      open();
      return false;
    }
    written_ += waiting_.size();
    waiting_.clear();
    return true;
  }
  const std::string& path() const { return path_; }

 private:
  // Steps and validations in the order in which they came; unknown() steps have no line.
  std::string next_lines(const Record& record) {
    std::ostringstream lines;
    for (;;) {
      if (validations_ < record.validations.size() &&
          record.validations[validations_].first <= static_cast<std::int64_t>(steps_)) {
        const auto& [step, loss] = record.validations[validations_++];
        lines << ordered_json{{"step", step}, {"val_loss", loss}} << '\n';
      } else if (steps_ < record.steps.size()) {
        const Outcome& step = record.steps[steps_++];
        if (is_unknown(step)) continue;
        lines << ordered_json{{"step", steps_},
                              {"loss", step.loss},
                              {"lr", step.lr},
                              {"norm", step.norm},
                              {"loss_scale", step.loss_scale},
                              {"skipped", step.skipped}}
              << '\n';
      } else {
        return lines.str();
      }
    }
  }
  void open() {
    file_ = std::ofstream(path_, std::ios::app);
    std::error_code ignored;
    written_ = std::filesystem::file_size(path_, ignored);
  }
  std::string path_, waiting_;
  std::ofstream file_;
  std::uintmax_t written_ = 0;
  std::size_t steps_ = 0, validations_ = 0;
};

// Where every byte goes, before the first is trained.
void print_memory(const Memory& plan, const Ledger& ledger, std::int64_t params) {
  Table table;
  table.rows = {{"memory", "MiB", "B/param"}};
  std::int64_t sum = 0;
  const auto add = [&](const std::string& name, std::int64_t bytes) {
    sum += bytes;
    if (bytes > 0)
      table.rows.push_back({name, fixed(static_cast<double>(bytes) * 0x1p-20, 2),
                            fixed(static_cast<double>(bytes) / static_cast<double>(params), 3)});
  };
  for (const auto& [name, bytes] : plan.parts()) add(name, bytes);
  add("activations", ledger.peak("activations"));
  add("workspace", ledger.peak("workspace"));
  std::int64_t total = sum;
  sum = 0;
  add("total", total);
  table.print(std::cout);
  std::cout << std::endl;
}

// Clipping, accumulation and loss scaling, where there are any.
std::string settings_of(const train::Job& job) {
  const scruple_sink_options& options = job.gradients;
  std::string text;
  if (options.max_norm > 0) text += ", clip " + shortest(options.max_norm);
  if (options.tensor_norm > 0) text += ", clip of each tensor " + shortest(options.tensor_norm);
  if (options.adagc > 0) text += ", AdaGC " + shortest(options.adagc);
  if (options.micro_batches > 1) text += ", " + std::to_string(options.micro_batches) + " micro-batches";
  if (job.scaler.scale > 0)
    text += std::string(job.scaler.growth > 1 ? ", dynamic" : ", static") + " loss scale " +
            shortest(job.scaler.scale);
  return text;
}

void print_start(const Options& options, const train::Job& job, std::int64_t params, std::int64_t bytes) {
  const train::GptShape& s = job.shape;
  std::cout << "gpt: " << plural(s.layers, "layer") << ", width " << s.width << ", "
            << plural(s.heads, "head") << ", context " << s.context << "; " << grouped(params)
            << " parameters\n"
            << options.choice.optimizer << ", recipe " << options.choice.recipe << ", gradients "
            << options.gradients.policy << ", activations " << precision_name(job.activations)
            << settings_of(job) << "; lr " << shortest(options.lr) << ' ' << options.schedule << ", seed "
            << job.seed << '\n'
            << plural(options.model.steps, "step") << " of "
            << grouped(job.batch * job.gradients.micro_batches * s.context) << " bytes; " << options.data
            << " has " << grouped(bytes) << "\n\n";
}

// The weights as the model computes with them: 16-bit halves as they are, low-bit ones decoded.
void write_weights(const std::string& folder, const train::GptShape& shape, train::State& state,
                   Ledger& ledger) {
  std::vector<train::ParameterData> data;
  train::Block decoded;
  for (int p = 0; p < static_cast<int>(state.parameters().size()); ++p) {
    const scruple_array& weight = state.visible(p);
    const std::string format = info_of(weight.format).name;
    if (format == "bf16" || format == "fp16") {
      data.push_back(
          {format == "bf16" ? io::Dtype::bf16 : io::Dtype::f16, [&weight] { return weight.codes; }});
      continue;
    }
    data.push_back({io::Dtype::f32, [&state, &decoded, &ledger, p] {
                      const std::int64_t size = state.parameters()[static_cast<std::size_t>(p)].size();
                      decoded = train::Block();
                      if (info_of(state.visible(p).format).name != std::string("fp32"))
                        decoded = train::Block(ledger, "workspace", size * std::int64_t{sizeof(float)});
                      return state.values(p, decoded.as<float>());
                    }});
  }
  train::write_model(folder, shape, data);
}

// What was not said, filled in.
Options completed(Options options) {
  Choice& choice = options.choice;
  if (choice.recipe.empty()) choice.recipe = "scruple";
  for (const std::string& hyper : choice.hypers)
    if (hyper.starts_with("lr="))
      throw UsageError("--set " + hyper + " would be lost to the schedule; use --lr");
  if (options.weight_decay >= 0)
    choice.hypers.insert(choice.hypers.begin(), "weight_decay=" + shortest(options.weight_decay, 17));

  return options;
}

// ---- Checkpoints ----

// What --resume leaves to the user; everything else is the run's own.
constexpr const char* kFree[] = {"--data", "--out",    "--threads", "--save-every",
                                 "--keep", "--resume", "--help"};

bool is_free(const std::string& name) {
  return std::find(std::begin(kFree), std::end(kFree), name) != std::end(kFree);
}

std::string long_name(const CLI::Option& option) {
  return option.get_lnames().empty() ? option.get_name() : "--" + option.get_lnames().front();
}

io::Metadata data_notes(const std::string& path, const io::MappedFile& data) {
  return {{"--data", std::filesystem::absolute(path).string()},
          {"data_bytes", std::to_string(data.bytes().size())},
          {"data_crc32", io::hex(io::crc32(data.bytes()))}};
}

// The settings of a run, given or by default, and what it reads: enough to start it again.
io::Metadata notes_of(const CLI::App& command, const Options& options, const io::MappedFile& data) {
  io::Metadata notes = data_notes(options.data, data);
  notes["program"] = "scruple train";
  notes["--save-every"] = std::to_string(options.save_every);
  notes["--keep"] = std::to_string(options.keep);
  for (const CLI::Option* option : command.get_options()) {
    if (is_free(long_name(*option))) continue;
    std::string values = option->count() == 0 ? option->get_default_str() : "";  // it may change one day
    if (option->count() > 0)
      for (const std::string& value : option->results()) values += (values.empty() ? "" : "\n") + value;
    if (!values.empty()) notes[long_name(*option)] = values;
  }
  return notes;
}

// A session of a run: a new one, or one that goes on from a checkpoint.
struct Session {
  Options options;
  io::Metadata notes;  // for the checkpoints; without those of the data
  std::unique_ptr<io::Checkpoint> from;
};

// The run's own settings, with what the user may change about it.
Session resumed(const CLI::App& command, const Options& given) {
  for (const CLI::Option* option : command.get_options())
    if (option->count() > 0 && !is_free(long_name(*option)))
      throw UsageError("--resume takes " + long_name(*option) +
                       " from the run, so that it ends with the same bits; leave it out");
  Session session;
  session.from = std::make_unique<io::Checkpoint>(train::find_checkpoint(given.resume));
  const io::Metadata& notes = session.from->manifest().trainer;
  const bool whole_run = session.from->folder() != given.resume;
  if (whole_run && command.count("--out") > 0)
    throw UsageError(
        "--resume writes into the run's own folder; leave --out out, or resume a checkpoint of it");
  if (!whole_run && command.count("--out") == 0)
    throw UsageError("--resume " + given.resume +
                     " is a single checkpoint; name a new folder with --out, or resume its run");
  if (!notes.contains("program") || notes.at("program") != "scruple train")
    throw std::runtime_error(session.from->folder() +
                             " was not saved by 'scruple train', which cannot go on with it");
  std::vector<std::string> words;
  for (const auto& [name, values] : notes) {
    if (!name.starts_with("--") || (is_free(name) && command.count(name) > 0)) continue;
    for (std::size_t begin = 0; begin <= values.size();) {
      const std::size_t end = std::min(values.find('\n', begin), values.size());
      words.insert(words.end(), {values.substr(begin, end - begin), name});
      begin = end + 1;
    }
  }
  CLI::App parser;
  add_options(parser, session.options);
  parser.parse(words);  // CLI11 takes them last to first
  if (command.count("--data") > 0) session.options.data = given.data;
  if (command.count("--save-every") > 0) session.options.save_every = given.save_every;
  if (command.count("--keep") > 0) session.options.keep = given.keep;
  session.options.model.threads = given.model.threads;
  session.options.out = whole_run ? given.resume : given.out;
  session.options.resume = given.resume;
  session.notes = notes;
  return session;
}

void check_data(const io::Metadata& saved, const io::Metadata& now) {
  for (const char* key : {"data_bytes", "data_crc32"})
    if (const auto found = saved.find(key); found == saved.end() || found->second != now.at(key))
      throw std::runtime_error(
          now.at("--data") +
          " is not the file that the run was started with: its length or checksum differs; "
          "name the right one with --data");
}

double number_or_nan(const nlohmann::json& row, const char* key) {
  const auto found = row.find(key);
  return found != row.end() && found->is_number() ? found->get<double>() : std::nan("");
}

// What the sessions before saw, up to the checkpoint; what they did after it will be done again.
Record read_metrics(const std::string& path, std::int64_t steps) {
  Record record;
  record.steps.resize(static_cast<std::size_t>(steps), unknown());
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    const nlohmann::json row = nlohmann::json::parse(line, nullptr, /*allow_exceptions=*/false);
    const double number = row.is_object() ? number_or_nan(row, "step") : std::nan("");
    if (!(number >= 0 && number <= static_cast<double>(steps))) continue;
    const auto step = static_cast<std::int64_t>(number);
    if (row.contains("val_loss"))
      record.validations.emplace_back(step, number_or_nan(row, "val_loss"));
    else if (step > 0)
      record.steps[static_cast<std::size_t>(step - 1)] = {
          number_or_nan(row, "loss"), number_or_nan(row, "lr"), number_or_nan(row, "norm"),
          static_cast<float>(number_or_nan(row, "loss_scale")), row.value("skipped", false)};
  }
  return record;
}

// `unsaved`: why the last save failed, or "".
Record watch(const Session& session, const train::Job& job, Trainer& trainer, const Data& data,
             const Ledger& ledger, Metrics& metrics, Record before, std::string& unsaved) {
  const Options& options = session.options;
  const Interrupts interrupts;
  Progress progress(options.choice.recipe, options.model.steps,
                    job.batch * job.gradients.micro_batches * job.shape.context, ledger);
  train::Span span = span_of(options.model.steps, options.validate_every);
  span.save_every = options.save_every;
  bool metrics_wait = false;
  const auto write_metrics = [&](const Record& record) {
    const bool written = metrics.write(record);
    if (!written && !metrics_wait)
      progress.warn("cannot write " + metrics.path() + ": make room; its lines wait, and the run goes on");
    metrics_wait = !written;
  };
  return train::run(
      trainer, data.training, data.validation, span,
      [&](const Record& record) {
        write_metrics(record);
        progress.show(record);
      },
      [&](const Record& record) {
        write_metrics(record);
        unsaved.clear();
        try {
          train::save(trainer, options.choice.recipe, session.notes, options.out, options.keep);
        } catch (const std::exception& error) {  // hours of training are worth more than this file
          unsaved = error.what();
          if (span.go_on() && static_cast<std::int64_t>(record.steps.size()) < span.steps)
            progress.warn(unsaved + "; the run goes on, and the next save tries again");
        }
        return unsaved.empty();
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
std::string write_weights_somewhere(const Options& options, train::State& state, Ledger& ledger,
                                    Ending& ending) {
  const auto into = [&](const std::string& folder) {
    return ending.attempt([&] { write_weights(folder, options.model.shape, state, ledger); });
  };
  if (into(options.out)) return options.out;
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

void print_end(const Options& options, const Record& record, const Memory& plan, const Ledger& ledger,
               std::int64_t params, const Ending& ending) {
  const auto each = [&](std::int64_t bytes) {
    return fixed(static_cast<double>(bytes) / static_cast<double>(params), 3);
  };
  if (record.stopped)
    std::cout << "Stopped by Ctrl-C or a signal after step " << record.steps.size() << " of "
              << options.model.steps << (ending.problems.empty() ? "; what there is was saved.\n" : ".\n");
  if (const auto skipped = std::count_if(record.steps.begin(), record.steps.end(),
                                         [](const Outcome& step) { return step.skipped; });
      skipped > 0)
    std::cout << skipped << " of " << record.steps.size()
              << " steps were skipped: a gradient was not finite.\n";
  if (record.steps.size() > record.resumed && !std::isfinite(record.steps.back().loss))
    std::cout
        << "The training diverged: its loss is not finite. Choose a smaller --lr, or a longer --warmup.\n";
  std::cout << "validation loss " << fixed(record.first_loss(), 4) << " -> " << fixed(record.final_loss(), 4)
            << " nats per byte; " << fixed(record.ms_per_step(), 1) << " ms per step; peak "
            << mebibytes(ledger.peak()) << '\n'
            << "weights, moments and gradients: " << each(plan.total()) << " bytes per parameter planned, "
            << each(measured_total(ledger)) << " measured\n"
            << "wrote " << options.out << "/:";
  const char* separator = " ";
  const auto list = [&](bool written, const char* name) {
    if (written) std::cout << std::exchange(separator, ", ") << name;
  };
  list(ending.weights == options.out, "model.safetensors, config.json");
  list(ending.metrics, "metrics.jsonl");
  list(ending.report, "report.html");
  list(options.save_every > 0 && !io::saved_steps(train::checkpoints_of(options.out)).empty(),
       "checkpoints/");
  std::cout << '\n';
}

// The problems, and what there is in spite of them.
std::string told(const Options& options, const Record& record, const Ending& ending) {
  std::string text;
  for (const std::string& problem : ending.problems) text += problem + ".\n";
  text += "The weights after step " + std::to_string(record.steps.size());
  text += ending.weights.empty() ? " could not be written anywhere." : " are in " + ending.weights;
  if (!ending.weights.empty()) text += ending.weights == options.out ? "." : ", not in " + options.out + ".";
  if (const auto saved = io::saved_steps(train::checkpoints_of(options.out)); !saved.empty())
    text += " Once there is room, 'scruple train --resume " + options.out + "' goes on after step " +
            std::to_string(saved.back()) + ".";
  return text;
}

// A run with a checkpoint of its own goes on in its folder; any other begins a folder.
Record open_folder(const Session& session) {
  const Options& options = session.options;
  if (!session.from) {
    claim(options.out);
    return {};
  }
  if (options.out != options.resume) {
    claim(options.out);
  } else {
    for (const std::string& left : io::remove_partial(train::checkpoints_of(options.out), "step-"))
      std::cerr << "scruple: " << left
                << " was left as it is: whoever writes it may still be at work; remove it if nobody does\n";
    train::keep_last(options.out, options.keep);  // a kill may have come between a save and this
  }
  return read_metrics(options.out + kMetrics, session.from->manifest().step);
}

void run(const CLI::App& command, const Options& given) {
  Session session;
  if (given.resume.empty())
    session.options = given;
  else
    session = resumed(command, given);
  session.options = completed(session.options);
  const Options& options = session.options;
  if (options.data.empty() || options.out.empty())
    throw UsageError("--data and --out are required, unless a run goes on with --resume; try --help");
  if (const std::string problem = problem_with(options.model.shape); !problem.empty())
    throw UsageError(problem);
  const Data data(options.data, options.model.shape.context);
  if (session.from)
    check_data(session.notes, data_notes(options.data, data.file));
  else if (options.save_every > 0)
    session.notes = notes_of(command, options, data.file);
  train::Job job =
      make_job(options.choice, options.choice.recipe, options.model, options.gradients, options.activations);
  job.schedule = schedule_of(options);
  const Memory plan = plan_of(options.choice, options.choice.recipe, job.shape, options.gradients.policy);
  Ledger ledger(free_memory());
  Trainer trainer(job, ledger, session.from.get());
  const std::int64_t params = trainer.state().size();
  Record before = open_folder(session);
  Metrics metrics(options.out, before);

  print_start(options, job, params, static_cast<std::int64_t>(data.bytes.size()));
  if (session.from)
    std::cout << "going on after step " << trainer.steps_taken() << ", from " << session.from->folder()
              << "\n\n";
  print_memory(plan, ledger, params);
  std::string unsaved;
  const Record record = watch(session, job, trainer, data, ledger, metrics, std::move(before), unsaved);
  if (record.steps.empty()) throw std::runtime_error("stopped before the first step; nothing was saved");
  Ending ending;
  if (!unsaved.empty()) ending.problems.push_back(unsaved);
  ending.weights = write_weights_somewhere(options, trainer.state(), ledger, ending);
  ending.metrics = metrics.write(record);
  if (!ending.metrics) ending.problems.push_back("cannot write the end of " + metrics.path() + "; make room");
  ending.report = ending.attempt([&] {
    io::write_text(options.out + "/report.html",
                   train::to_html(page_of(options.data, options.choice.recipe, job, record, ledger, plan)));
  });
  print_end(options, record, plan, ledger, params, ending);
  if (!ending.problems.empty()) throw std::runtime_error(told(options, record, ending));
}

void add_options(CLI::App& command, Options& options) {
  options.model.shape = {4, 128, 4, 128, 256};
  command.add_option("--data", options.data, "the file to learn")->type_name("FILE");
  command.add_option("--out", options.out, "the folder to write")->type_name("DIR");
  command.add_option("--model", options.kind, "architecture")
      ->capture_default_str()
      ->check(CLI::IsMember({"gpt"}));
  options.model.add_options(command);
  options.choice.add_options(command);
  command.get_option("--recipe")->description("formats of weights, moments and gradients (default: scruple)");
  command.add_option("--lr", options.lr, "peak learning rate")->capture_default_str()->check(above_zero());
  command.add_option("--schedule", options.schedule, "cosine, linear (both down to 0) or constant")
      ->capture_default_str()
      ->check(CLI::IsMember({"cosine", "linear", "constant"}));
  command.add_option("--warmup", options.warmup, "steps of linear rise (default: a twentieth)")
      ->check(not_negative());
  command.add_option("--weight-decay", options.weight_decay, "of matrices; norms and biases never decay")
      ->check(not_negative());
  options.gradients.add_options(command);
  command
      .add_option("--gradient-format", options.choice.gradient, "format of stored or compressed gradients")
      ->type_name("FORMAT");
  command
      .add_option("--activations", options.activations,
                  "fp32, bf16 or fp16 (default: as the weights are computed)")
      ->check(CLI::IsMember({"fp32", "bf16", "fp16"}));
  command
      .add_option("--validate-every", options.validate_every,
                  "steps between validations (default: a twentieth)")
      ->check(above_zero());
  command
      .add_option("--save-every", options.save_every, "steps between checkpoints (default: none are saved)")
      ->type_name("N")
      ->check(above_zero());
  command.add_option("--keep", options.keep, "how many checkpoints stay; 0: all")
      ->type_name("K")
      ->capture_default_str()
      ->check(not_negative());
  command
      .add_option("--resume", options.resume,
                  "go on with this run, from its last checkpoint, to the same bits")
      ->type_name("DIR");
}

}  // namespace

void add_train(CLI::App& program) {
  CLI::App* command = program.add_subcommand("train", "Train a byte-level GPT on a file");
  command->footer(kFooter);
  const auto options = std::make_shared<Options>();
  add_options(*command, *options);
  command->callback([command, options] { run(*command, *options); });
}

}  // namespace scruple::cli
