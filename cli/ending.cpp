// What a run of `scruple train` leaves and says at its end, however it ended.
#include <cerrno>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <iostream>
#include <stdexcept>
#include <utility>

#include "io/file.h"
#include "page.h"
#include "progress.h"
#include "room.h"
#include "session.h"
#include "train/run/checkpoint.h"
#include "train/run/report.h"

namespace scruple::cli {
namespace {

using train::Record;

bool attempt(Ending& ending, const std::function<void()>& write) {
  try {
    write();
    return true;
  } catch (const std::exception& error) {
    ending.problems.emplace_back(error.what());
    return false;
  }
}

// Into the run's folder; where that fails, into a new one elsewhere: all of the training is in them.
std::string write_weights_somewhere(Session& session, train::Trainer& trainer, Ending& ending) {
  const std::string& out = session.options.out;
  const auto into = [&](const std::string& folder) {
    return attempt(ending, [&] {
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

std::string resume_command(const TrainOptions& options) {
#if defined(__GLIBC__)
  const std::string program = quoted(program_invocation_name);
#else
  const std::string program = "scruple";
#endif
  return program + " train --resume " + quoted(options.out) +
         (reads_input(options.data) ? " --data FILE (the same bytes)" : "");
}

// Why a run that came to its end ended no better than it began; "": it did not, or its loss is not finite, which is told
// in other words.
std::string why_no_better(const Record& record) {
  if (const std::int64_t skipped = record.skipped(); 2 * skipped > record.taken())
    return grouped(skipped) + " of " + plural(record.taken(), "step") +
           (2 * record.outliers() > skipped
                ? " were skipped as outliers; choose a smaller --lr or a larger --skip-outliers"
                : " were skipped, because a gradient was not finite; choose a smaller --lr or --loss-scale");
  constexpr double kNoise = 1.01;  // runs of a few steps end 0.01 % above
  if (record.final_loss() > kNoise * record.first_loss())
    return "the validation loss ended above where it began, " + fixed(record.first_loss(), 4) + " -> " +
           fixed(record.final_loss(), 4) +
           ": the training diverged, or the model overfitted; choose a smaller --lr, a longer --warmup or "
           "fewer --steps";
  return "";
}

void print_end(const Session& session, const Record& record, const Ending& ending, double most_tokens) {
  const TrainOptions& options = session.options;
  const auto params = static_cast<double>(train::parameter_count(session.job.shape));
  const auto each = [&](std::int64_t bytes) { return fixed(static_cast<double>(bytes) / params, 3); };
  const auto tell = [&](std::int64_t skipped, const std::string& why) {
    if (skipped > 0)
      std::cout << grouped(skipped) << " of " << plural(record.taken(), "step")
                << (skipped == 1 ? " was" : " were") << " skipped: " << why << ".\n";
  };
  const std::int64_t left = record.tensors_skipped();
  tell(record.skipped() - record.outliers(),
       left == 0
           ? "a gradient was not finite"
           : "the loss was not finite, or the gradients of some tensors, which alone were left as they were");
  tell(record.outliers(), "the loss or the norm was more than " + shortest(options.skip_outliers) +
                              " deviations above its running mean");
  if (record.empty() > 0)
    std::cout
        << grouped(record.empty()) << " of " << plural(record.taken(), "step")
        << " had nothing to learn: their windows lie in prompts; --layout whole makes no such windows.\n";
  std::cout << validation_words(record, session.job)
            << (train::good_steps(record) < record.taken() ? " (not of the model that is written); " : "; ");
  if (record.steps.size() > record.resumed) {
    std::cout << fixed(record.ms_per_step(), 1) << " ms per step; ";
    if (most_tokens > 0) std::cout << "MFU " << mfu_words(record.tokens_per_second(), most_tokens) << "; ";
  }
  std::cout << "peak " << size_words(session.ledger.peak()) << '\n'
            << (session.job.ema > 0 ? "weights, moments, gradients and averages: "
                                    : "weights, moments and gradients: ")
            << each(session.plan.total()) << " bytes per parameter planned, "
            << each(measured_total(session.ledger)) << " measured\n";
  if (record.mean_unmoved() >= kUnmovedToTell)
    std::cout << "a step left " << share_words(record.mean_unmoved())
              << " of the weights as they were, mean of "
              << plural(static_cast<std::int64_t>(record.unmoved.size()), "step") << '\n';
  std::cout << "wrote " << options.out << "/:";
  const char* separator = " ";
  const auto list = [&](bool written, const char* name) {
    if (written) std::cout << std::exchange(separator, ", ") << name;
  };
  list(ending.weights == options.out, "model.safetensors, config.json");
  list(ending.weights == options.out && train::has_tokenizer(options.out), "the tokenizer's files");
  list(ending.metrics, "metrics.jsonl");
  list(ending.report, "report.html");
  list(session.saved > 0, "checkpoints/");
  std::cout << std::endl;
}

// A failure, or the problems of writing, and what there is in spite of them.
std::string told(const Session& session, const Record& record, const Ending& ending,
                 const std::string& failure) {
  const TrainOptions& options = session.options;
  std::string text = failure.empty() ? "" : failure + ".\n";
  for (const std::string& problem : ending.problems) text += problem + ".\n";
  if (failure.empty())
    text += "The weights after step " + grouped(record.taken()) +
            (ending.weights.empty()          ? " could not be written anywhere."
             : ending.weights == options.out ? " are in " + ending.weights + "."
                                             : " are in " + ending.weights + ", not in " + options.out + ".");
  else
    text += "The run ended after step " + grouped(record.taken()) +
            ", in the middle of the next: its weights are not written.";
  if (session.saved > 0)
    text += std::string(failure.empty() ? " Once there is room, '" : " '") + resume_command(options) +
            "' goes on after step " + grouped(session.saved) + ".";
  else if (!failure.empty())
    text += " It has no checkpoint to go on from; --save-every N saves some.";
  return text;
}

std::string failure_of(const Session& session, const std::exception_ptr& failure) {
  try {
    if (failure) std::rethrow_exception(failure);
  } catch (const std::exception& error) {
    return failure_words(error, session.job, savings_of(session));
  }
  return "";
}

// Where the weights of the best validation are.
std::string best_words(const TrainOptions& options, const Record& record) {
  const std::int64_t best = record.best().first;
  const std::string folder = train::checkpoints_of(options.out) + "/" + io::step_name(best);
  if (best == record.taken()) return ".";
  if (best == 0) return ": no step made it less.";
  return std::filesystem::exists(folder + "/manifest.json")
             ? "; its checkpoint is " + folder + "."
             : ", of which no checkpoint was kept: --save-every and --keep do.";
}

}  // namespace

Ending finish(Session& session, const Record& record, train::Trainer& trainer, train::Metrics& metrics,
              train::Layout layout, const std::exception_ptr& failure) {
  const TrainOptions& options = session.options;
  Ending ending;
  if (!session.unsaved.empty()) ending.problems.push_back(session.unsaved);
  ending.metrics = metrics.write(record);
  if (!ending.metrics) ending.problems.push_back("cannot write the end of " + metrics.path() + "; make room");
  ending.report = attempt(ending, [&] {
    const std::string kind = options.model.is_gpt() ? "GPT" : kind_words(session.model.config);
    io::write_text(options.out + "/report.html",
                   train::to_html(page_of({name_of(options.data), kind, options.choice.recipe, layout,
                                           session.job, record, trainer, session.plan})));
  });
  if (!failure) ending.weights = write_weights_somewhere(session, trainer, ending);
  return ending;
}

void conclude(const Session& session, const Record& record, const Ending& ending, double most_tokens,
              const std::exception_ptr& failure) {
  const TrainOptions& options = session.options;
  const std::int64_t good = train::good_steps(record);
  const bool diverged = good < record.taken();
  const std::string problem = failure || diverged ? "" : why_no_better(record);
  if (!problem.empty()) std::cerr << "scruple: " << problem << std::endl;
  print_end(session, record, ending, most_tokens);
  if (record.stopped && !diverged)
    std::cout << "Stopped by " << Interrupts::name() << " after step " << grouped(record.taken()) << " of "
              << grouped(options.model.steps)
              << (ending.problems.empty() ? ". To go on:\n  " + resume_command(options) : ".") << std::endl;
  if (record.settled && !diverged)
    std::cout << "Ended by --stop-when after step " << grouped(record.taken()) << " of "
              << grouped(options.model.steps) << ": the best validation loss, "
              << fixed(record.best().second, 4) << ", is that of step " << grouped(record.best().first)
              << best_words(options, record) << std::endl;
  if (failure || !ending.problems.empty())
    throw std::runtime_error(told(session, record, ending, failure_of(session, failure)));
  if (!record.validations.empty() && record.validations.front().first == 0 &&
      !std::isfinite(record.first_loss()))
    throw std::runtime_error("the loss was not finite before the first step: the weights of " +
                             options.model.model + " are not, or too large for --activations " +
                             precision_name(session.job.activations));
  if (diverged)
    throw std::runtime_error(
        "the training diverged: after step " + grouped(good + 1) +
        " its loss is not finite or above ten times the first, or its gradients are not "
        "finite. Choose a smaller --lr or a longer --warmup, and --force or another --out; "
        "the model in " +
        options.out + " is " +
        (session.saved == 0 ? "the one that the run began with"
                            : "that of its checkpoint of step " + grouped(session.saved) +
                                  ", and later ones are removed; --model " + options.out +
                                  " with a new --out trains on from it"));
  const bool ended_early = !record.stopped && !record.settled && record.taken() < options.model.steps;
  if (const std::int64_t outliers = train::outliers_lost(record); ended_early && outliers > 0)
    throw std::runtime_error("the last " + plural(outliers, "step") +
                             " were skipped as outliers, and the run ended: its "
                             "weights are from before them. Choose a smaller --lr, or '" +
                             resume_command(options) + " --skip-outliers Z' with a larger Z than " +
                             shortest(options.skip_outliers));
  if (const std::int64_t skipped = train::skipped_at_last(record); ended_early && skipped > 0)
    throw std::runtime_error(
        "the last " + plural(skipped, "step") +
        " were skipped because gradients were not finite, and the run ended: what they left "
        "as it was is from before them. Choose a smaller --lr, or another --loss-scale");
  if (record.stopped) throw Stopped{Interrupts::signal()};
  if (!problem.empty()) throw NoBetter{};
}

}  // namespace scruple::cli
