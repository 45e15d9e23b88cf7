// `scruple train`: a byte-level GPT, or a model of Hugging Face's, on any text.
#include <chrono>
#include <filesystem>
#include <iostream>
#include <memory>
#include <optional>
#include <utility>

#include "commands.h"
#include "progress.h"
#include "room.h"
#include "session.h"
#include "train/model/model.h"
#include "train/run/checkpoint.h"
#include "train/run/saves.h"

namespace scruple::cli {
namespace {

using train::Data;
using train::Record;
using train::Trainer;

constexpr const char* kFooter =
    R"(A line of *.jsonl has "text"; or "prompt" and "completion", and the completions are learned; or
"messages", a chat, and the assistant's turns are learned.

--out gets metrics.jsonl (a line per step), report.html (curves, memory), and the model as a Hugging
Face folder, which transformers and 'scruple sample' load.

Ctrl-C ends after the current step, writes all of that and a checkpoint, and names the command that
goes on. --resume ends with the same bits as a run that was left alone.

Examples:
  scruple train --data book.txt --out run1
  scruple train --model ./SmolLM2-135M --data notes.jsonl --out tuned --save-every 100
  scruple train --resume tuned --steps 2000
  scruple train --model ./Qwen3-8B --data notes.jsonl --out run8 --device cuda --gradients released)";

// The folder that has the tokenizer of the run's model.
std::string tokenizer_folder(const Session& session) {
  const TrainOptions& options = session.options;
  if (options.model.is_gpt()) return "";
  if (session.model.folder) return session.model.folder->folder();
  if (session.in_place && train::has_tokenizer(options.out)) return options.out;
  return folder_of_tokenizer(options.model.model);
}

// What a kill has left between saves.
void tidy(const TrainOptions& options) {
  for (const std::string& left : io::remove_partial(train::checkpoints_of(options.out), "step-"))
    std::cerr << "scruple: " << left
              << " was left as it is: whoever writes it may still be at work; remove it if nobody does\n";
  train::keep_last(options.out, options.kept());
}

// Whether a run that has taken these steps has also written all that it should.
bool is_complete(const TrainOptions& options, const Record& record) {
  const std::int64_t taken = record.taken();
  const bool is_validated =
      !validates(options) || (!record.validations.empty() && record.validations.back().first == taken);
  return (taken == options.model.steps || train::has_settled(record, options.stop_when)) && is_validated &&
         train::weights_step(options.out) == taken && std::filesystem::exists(options.out + "/report.html");
}

void check_outliers(const train::Job& job) {
  if (job.skip_outliers == 0) return;
  if (job.gradients.policy == SCRUPLE_RELEASED && job.gradients.micro_batches > 1)
    throw UsageError(
        "--skip-outliers judges a step by its loss, which --accumulate " +
        std::to_string(job.gradients.micro_batches) +
        " makes known when --gradients released has taken most of it; use --gradients compressed");
  if (job.scaler.growth > 1 && job.scaler.scale > 0)
    throw UsageError(
        "--skip-outliers and a dynamic loss scale do not go together: each skipped step would halve the "
        "scale; use "
        "--loss-scale off or a number");
}

// Makes the job, reads the data, and plans. What does not go together is refused before data is read, which may take long.
Data prepare(Session& session) {
  TrainOptions& options = session.options;
  check_device(options.model.device);
  const Choice choice = options.chosen();
  train::Job& job = session.job;
  job = make_job(choice, choice.recipe, options.model, session.model, options.gradients, options.activations);
  job.overrides = options.rate.overrides(train::parameters_of(job.shape));
  job.ema = options.ema;
  job.skip_outliers = options.skip_outliers;
  check_outliers(job);
  if (options.epochs == 0) options.schedule();
  session.tokenizer = tokenizer_folder(session);
  Data data = open_data(options.data, options.cutting, session.model, session.tokenizer);
  if (!options.validation_data.empty())
    session.validation = std::make_unique<Data>(
        open_data({options.validation_data}, options.cutting, session.model, session.tokenizer));
  if (session.from) check_data(session, data);
  count_epochs(session, data.training());
  job.isolates = data.training().isolates() ||
                 (session.validation != nullptr && session.validation->training().isolates());
  job.schedule = options.schedule();
  fit(job, options.model, options.limit());
  options.activations = precision_name(job.activations);  // which the device decides, and a run may move
  session.plan = plan_of(choice, choice.recipe, job, options.gradients.policy);
  return data;
}

void print_start(const Session& session, const Data& data, const Trainer& trainer) {
  const TrainOptions& options = session.options;
  const train::Job& job = session.job;
  const train::Description& s = job.shape;
  std::cout << (options.model.is_gpt() ? kGpt : options.model.model + ", " + kind_words(session.model.config))
            << ": " << shape_words(s) << "; " << grouped(train::parameter_count(s)) << " parameters; "
            << trainer.backend().device() << '\n'
            << options.choice.optimizer << ", recipe " << options.choice.recipe << ", gradients "
            << options.gradients.policy << ", activations " << options.activations << memory_words(job)
            << gradient_words(job) << (job.ema > 0 ? ", ema " + shortest(job.ema) : "") << "; lr "
            << shortest(job.schedule.peak) << ' ' << schedule_words(job.schedule) << ", seed " << job.seed
            << '\n'
            << plural(options.model.steps, "step") << " of " << step_words(job, data.layout()) << "; "
            << name_of(options.data) << (options.data.size() > 1 ? " have " : " has ")
            << grouped(data.size());
  if (data.layout() == train::Layout::padded || data.documents() > 1)
    std::cout << " in " << plural(data.documents(), "document") << ", "
              << train::kLayouts[static_cast<int>(data.layout())] << (job.isolates ? " and isolated" : "");
  const std::int64_t windows = job.batch * job.gradients.micro_batches;
  std::cout << "; an epoch is " << plural((data.training().count() + windows - 1) / windows, "step");
  if (session.validation)
    std::cout << "; validation on " << options.validation_data << ", " << grouped(session.validation->size());
  if (!validates(options)) std::cout << "; no validation";
  std::cout << "\n\n";
}

// What is other than in the session before.
void print_resumed(const Session& session, const Trainer& trainer) {
  const TrainOptions& options = session.options;
  const std::int64_t taken = trainer.steps_taken();
  std::cout << "going on after step " << grouped(taken) << ", from " << session.from->folder() << '\n';
  if (const std::string moved = moved_words(session, trainer); !moved.empty())
    std::cout << moved
              << ": its losses are those of a run that had not moved within rounding, not to the bit\n";
  if (session.first > 0) {
    const train::Schedule& now = session.job.schedule;
    const train::Schedule before = options.rate.schedule(session.first);
    std::cout << "from " << plural(session.first, "step") << " to " << grouped(now.steps) << ": "
              << longer_words(now) << "; learning rate " << shortest(before.at(taken)) << " at step "
              << grouped(taken) << ", " << shortest(now.at(taken + 1)) << " at step " << grouped(taken + 1)
              << '\n';
  }
  std::cout << '\n';
}

train::Span span_for(const Session& session) {
  const TrainOptions& options = session.options;
  train::Span span = span_of(options.model.steps, options.validate_every);
  span.save_every = options.save_every;
  if (options.save_every == 0) span.save_seconds = 60 * kSaveMinutes;
  // It has a checkpoint, which shall not be older than its weights; or averages, which are nowhere else.
  span.save_last = session.in_place || session.job.ema > 0;
  span.validates = validates(options);
  span.patience = options.stop_when;
  return span;
}

// Whether this session has taken steps since the last save, and they are worth one.
bool is_unsaved(const Session& session, const Record& record) {
  return record.steps.size() > record.resumed && session.saved < record.taken() &&
         train::good_steps(record) == record.taken();
}

// The trainer anew, from the last good state: the run's last checkpoint from before its loss was lost, or the weights that
// it began with. Checkpoints of ruined weights are removed.
void go_back(Session& session, const Record& record, std::optional<Trainer>& trainer) {
  const std::string folder = train::checkpoints_of(session.options.out);
  std::unique_ptr<io::Checkpoint> from;
  for (const std::int64_t step : io::saved_steps(folder)) {
    const std::string path = folder + "/" + io::step_name(step);
    if (step <= train::good_steps(record))
      from = std::make_unique<io::Checkpoint>(path);
    else if (step > static_cast<std::int64_t>(record.resumed))
      io::remove_folder(path);
  }
  trainer.reset();
  trainer.emplace(session.job, session.ledger, from ? from.get() : session.from.get());
  session.saved = from ? trainer->steps_taken() : 0;
}

// Trains to the end, a stop, or what is returned: a failure after some steps, which leave something to write.
std::exception_ptr watch(Session& session, Trainer& trainer, const Data& data, train::Metrics& metrics,
                         Record& record) {
  const TrainOptions& options = session.options;
  Progress progress(options.choice.recipe, session.job, trainer);
  train::Span span = span_for(session);
  const train::Windows validation = session.validation ? session.validation->training() : data.validation();
  span.validating = [&](auto done, auto all) { progress.validating(done, all); };
  bool metrics_wait = false;
  const auto write_metrics = [&] {
    session.folder->begin();
    const bool written = metrics.write(record);
    if (!written && !metrics_wait)
      progress.warn("cannot write " + metrics.path() + ": make room; its lines wait, and the run goes on");
    metrics_wait = !written;
  };
  std::exception_ptr failure;
  const auto goes_on = [&] { return !failure && span.go_on() && record.taken() < span.steps; };
  train::Saves saves(trainer, options.choice.recipe, options.out, options.kept(),
                     [&](const std::string& message) { progress.warn(message); });
  // Hours of training are worth more than this file.
  const auto note_problem = [&](const std::string& problem) {
    session.unsaved = problem;
    if (goes_on()) progress.warn(problem + "; the run goes on, and the next save tries again");
  };
  const auto note_saved = [&](const train::Saved& saved) {
    session.saved = saved.step;
    session.unsaved.clear();
    record.saves.emplace_back(trainer.steps_taken(), saved);
    try {
      if (!session.tokenizer.empty()) train::copy_tokenizer(session.tokenizer, options.out);
    } catch (const std::exception& error) {
      note_problem(error.what());
    }
  };
  // Hears of the saves that have ended. Whether the last one succeeded.
  const auto take_saved = [&] {
    while (const std::optional<train::Saved> saved = saves.ended())
      saved->problem.empty() ? note_saved(*saved) : note_problem(saved->problem);
    return session.unsaved.empty();
  };
  const auto begun = std::chrono::steady_clock::now();
  const auto saves_soon = [&] {
    const std::chrono::duration<double> trained = std::chrono::steady_clock::now() - begun;
    return span.save_every > 0 ? span.save_every < span.steps : trained.count() > span.save_seconds / 2;
  };
  const auto show = [&](const Record&) {
    if (saves_soon()) saves.prepare();
    saves.add_step(record.seconds.back());
    take_saved();
    write_metrics();
    progress.show(record, train::seconds_left(record, span), saves.is_writing());
  };
  const auto save = [&](const Record&) {
    write_metrics();
    try {
      if (session.notes.empty()) session.notes = notes_for(session, data, trainer);
      saves.save(session.notes, goes_on());
    } catch (const std::exception& error) {
      note_problem(error.what());
    }
    return take_saved() || saves.is_writing();
  };
  span.saves_end = [&] {
    saves.wait();
    return take_saved();
  };
  try {
    train::run(record, trainer, data.training(), validation, span, show, save);
  } catch (...) {
    failure = std::current_exception();
    try {
      span.saves_end();
      if (trainer.is_whole() && is_unsaved(session, record)) save(record);
    } catch (const std::bad_alloc&) {  // the failure itself, perhaps; what follows tells which step is saved
    }
  }
  span.saves_end();
  if (failure && record.steps.size() == record.resumed) std::rethrow_exception(failure);
  return failure;
}

void train_on(Session& session, const Data& data, Record record) {
  const TrainOptions& options = session.options;
  const Table memory =
      checked_memory("the run", session.job, session.plan, savings_of(session), options.limit());
  session.ledger = train::Ledger(std::min(free_memory(session.job), options.limit()), free_memory());
  std::optional<Trainer> trainer(std::in_place, session.job, session.ledger, session.from.get());
  const bool makes_folder = !std::filesystem::exists(options.out);
  if (!session.in_place) {
    train::make_folder(options.out);
    session.folder = std::make_unique<train::RunFolder>(options.out);
    session.folder->claim(options.force);
  }
  if (session.from || options.save_every > 0) session.notes = notes_for(session, data, *trainer);

  const Interrupts interrupts;
  print_start(session, data, *trainer);
  if (session.from) print_resumed(session, *trainer);
  memory.print(std::cout);
  if (trainer->copies() != nullptr)
    std::cout << "\nsaves take " << size_words(session.plan.saved())
              << " of host memory, so that training goes on meanwhile\n";
  std::cout << std::endl;

  train::Metrics metrics(options.out);
  const std::exception_ptr failure = watch(session, *trainer, data, metrics, record);
  if (record.stopped && record.steps.size() == record.resumed) {
    std::cerr << "scruple: stopped by " << Interrupts::name()
              << " before a step was taken; nothing was written\n";
    std::error_code ignored;
    if (makes_folder) std::filesystem::remove(options.out, ignored);
    throw Stopped{Interrupts::signal()};
  }
  session.folder->begin();
  if (!failure && train::good_steps(record) < record.taken()) go_back(session, record, trainer);
  train::keep_last(options.out, train::doubtful(record) > 0 ? options.kept() : options.keep);
  const Ending ending = finish(session, record, *trainer, metrics, data.layout(), failure);
  conclude(session, record, ending, most_tokens(*trainer, session.job), failure);
}

void run(const CLI::App& command, const TrainOptions& given) {
  Session session = session_of(command, given);
  const TrainOptions& options = session.options;
  const std::int64_t taken = session.from ? session.from->manifest().step : 0;
  Record record = session.in_place ? train::read_metrics(options.out, taken) : train::unseen(taken);
  if (session.in_place) tidy(options);
  if (session.in_place && options.epochs == 0 && is_complete(options, record)) {
    const bool settled = taken < options.model.steps;
    std::cout << options.out << " is complete: it "
              << (settled ? "ended by --stop-when after " + plural(taken, "step")
                          : "has taken its " + plural(taken, "step"))
              << ", and nothing is left to do. "
              << (settled ? "A larger --stop-when goes on.\n" : "--steps N makes it longer.\n");
    return;
  }
  const Data data = prepare(session);
  try {
    train_on(session, data, std::move(record));
  } catch (const std::exception& error) {
    rethrow_shortage(error, session.job, savings_of(session));
  }
}

}  // namespace

void add_train(CLI::App& program) {
  const auto options = std::make_shared<TrainOptions>();
  add_command(program, "train", "Train a byte-level GPT, or a Hugging Face model, on your data",
              "Train a model", kFooter, options->options(),
              [options](const CLI::App& command) { run(command, *options); });
}

}  // namespace scruple::cli
