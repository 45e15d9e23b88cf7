// `scruple eval`: how well a model predicts a text, over all of it.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <iostream>
#include <memory>
#include <nlohmann/json.hpp>
#include <numbers>

#include "commands.h"
#include "found.h"
#include "names.h"
#include "progress.h"
#include "text.h"
#include "train/pass/backend.h"
#include "train/run/batches.h"
#include "training.h"

namespace scruple::cli {
namespace {

constexpr const char* kFooter =
    R"(Every token of the data is predicted once, from those before it in its window: windows follow one
another, and of the last only what no other has counts. Of a prompt and its completion the completion
alone counts. Perplexity is e to the loss; bits per byte do not depend on the tokenizer.

Examples:
  scruple eval run1 --data held-out.txt
  scruple eval ./SmolLM2-135M --data notes.jsonl --context 1024
  scruple eval run1/checkpoints/step-00000500 --data held-out.txt --windows 100 --json)";

struct Options {
  std::vector<std::string> data;
  std::string folder, device = kDevices[0], activations;
  std::int64_t context = 0, batch = 16, windows = 0;
  CuttingOptions cutting;
  int threads = 0;
  bool ema = false, json = false;
};

// How many bytes of text each token stands for; empty: not known. End tokens are no text.
std::vector<std::int64_t> bytes_of_tokens(const std::string& folder, bool are_tokens,
                                          std::int64_t vocabulary) {
  const Vocabulary words = vocabulary_of(folder);
  const bool are_bytes = !are_tokens || train::tokens_are_bytes(vocabulary);
  if (!words.tokenizer) return std::vector<std::int64_t>(are_bytes ? 256 : 0, 1);
  std::vector<std::int64_t> bytes(static_cast<std::size_t>(vocabulary));
  for (std::size_t token = 0; token < bytes.size(); ++token) {
    const auto number = static_cast<train::Token>(token);
    if (!words.tokenizer->has(number)) continue;
    const train::Token once[] = {number}, twice[] = {number, number};  // a first one may lose its space
    bytes[token] = static_cast<std::int64_t>(words.tokenizer->decode(twice).size()) -
                   static_cast<std::int64_t>(words.tokenizer->decode(once).size());
  }
  if (words.end) bytes[*words.end] = 0;
  for (const train::Token stop : words.stops) bytes[stop] = 0;
  return bytes;
}

// A model, and what a batch of windows takes.
struct Evaluator {
  Evaluator(const Found& found, train::Backend& backend, const train::Setup& asked, bool isolates,
            train::Ledger& ledger)
      : weights(found.weights(backend, ledger)),
        setup(asked),
        network(backend.network(setup, weights.visible(), SCRUPLE_RELEASED, ledger)),
        batches(setup, isolates, ledger) {}

  train::Weights weights;
  train::Setup setup;
  std::unique_ptr<train::Network> network;
  train::Batches batches;
};

train::Setup setup_of(const Options& options, const Found& found, train::Backend& backend) {
  train::Ledger counter = train::Ledger::counter();
  const train::Weights weights = found.weights(backend, counter);
  train::Setup setup;
  setup.shape = weights.shape();
  setup.batch = options.batch;
  setup.recompute = train::Recompute::block;  // no backward pass will read what is kept
  const scruple_tensor& largest =
      *std::max_element(weights.visible().begin(), weights.visible().end(),
                        [](const auto& a, const auto& b) { return a.size < b.size; });
  const std::string format = info_of(largest.arrays[SCRUPLE_WEIGHT].format).name;
  const std::string usual = backend.memory().is_host() || format != "fp32" ? format : "bf16";
  setup.activations = value_named<train::Precision>(train::kPrecisions,
                                                    options.activations.empty() ? usual : options.activations)
                          .value();
  return setup;
}

struct Figures {
  train::Loss loss;
  std::int64_t bytes = 0;  // of the targets; 0: not known
  double seconds = 0;
  double bits_per_byte() const {
    return bytes == 0 ? std::nan("") : loss.sum / std::numbers::ln2 / static_cast<double>(bytes);
  }
};

Figures evaluate(Evaluator& on, const train::Windows& data, std::int64_t windows,
                 const std::vector<std::int64_t>& bytes) {
  using Clock = std::chrono::steady_clock;
  const auto begin = Clock::now();
  const auto passed = [&] { return std::chrono::duration<double>(Clock::now() - begin).count(); };
  const std::int64_t all = train::count_of_all(data);
  StatusLine status;
  Figures figures;
  const auto window = [&](std::int64_t index) { return train::window_of_all(data, index * all / windows); };
  const auto go_on = [&](std::int64_t done, std::int64_t batches) {
    if (done > 0 && status.is_due())
      status.put("eval  " + std::to_string(100 * done / batches) + " %  " +
                 duration(passed() * static_cast<double>(batches - done) / static_cast<double>(done)) +
                 " left");
    return !Interrupts::asked();
  };
  const auto seen = [&](const train::Batch& batch) {
    const std::int64_t rows = on.setup.batch * on.setup.shape.context;
    for (std::int64_t i = 0; i < rows && !bytes.empty(); ++i)
      if (batch.targets[i] >= 0) figures.bytes += bytes[static_cast<std::size_t>(batch.targets[i])];
  };
  figures.loss =
      train::loss_over(*on.network, on.weights.visible(), on.batches, data, windows, window, go_on, seen);
  figures.seconds = passed();
  return figures;
}

void print(const Figures& figures, std::int64_t all, const Evaluator& on) {
  const train::Loss& loss = figures.loss;
  const train::Description& shape = on.setup.shape;
  const double bits = figures.bits_per_byte();
  std::cout << "loss " << fixed(loss.mean(), 4) << ' ' << nats_per(shape) << ", perplexity "
            << shortest(std::exp(loss.mean())) << ", "
            << (std::isnan(bits) ? "bits per byte not known: no tokenizer says what the tokens stand for"
                                 : fixed(bits, 4) + " bits per byte")
            << '\n'
            << plural(loss.targets, token_word(shape)) << " predicted in "
            << (loss.windows < all ? grouped(loss.windows) + " of " : "") << plural(all, "window") << " of "
            << grouped(shape.context) << ", " << duration(figures.seconds) << '\n';
}

void print_json(const Options& options, const Figures& figures, std::int64_t all, const Evaluator& on,
                const std::string& device) {
  const train::Loss& loss = figures.loss;
  const double bits = figures.bits_per_byte();
  nlohmann::ordered_json object = {{"model", options.folder},
                                   {"ema", options.ema},
                                   {"data", joined(options.data, " ")},
                                   {"device", device},
                                   {"context", on.setup.shape.context},
                                   {"loss", loss.mean()},
                                   {"perplexity", std::exp(loss.mean())},
                                   {"bits_per_byte", nullptr},
                                   {"targets", loss.targets},
                                   {"bytes", nullptr},
                                   {"windows", loss.windows},
                                   {"windows_in_data", all},
                                   {"seconds", figures.seconds}};
  if (!std::isnan(bits)) object["bits_per_byte"] = bits, object["bytes"] = figures.bytes;
  std::cout << object.dump(2) << '\n';
}

void eval(const Options& options) {
  const Found found = find_model(options.folder, options.context, options.ema);
  const ChosenModel model = found.chosen();
  const std::int64_t context = model.config.shape.context;
  if (options.context > 0 && options.context != context)
    throw UsageError("--context is " + std::to_string(options.context) +
                     ", and the checkpoint's model sees " + grouped(context) + " tokens; leave it out");
  const std::string device = device_for(options.device);
  check_device(device);
  const auto open = device == "cuda" ? train::cuda_backend : train::cpu_backend;
  const std::unique_ptr<train::Backend> backend = open(options.threads);
  const std::string tokenizer = train::has_tokenizer(found.folder) ? found.folder : "";
  CuttingOptions cutting = options.cutting;
  cutting.validation = 0;  // all of it is read
  const std::vector<train::Share> shares = train::shares_of(options.data);
  if (shares.size() > 1 || shares[0].weight != 1)
    throw UsageError("eval reads all of --data once, and weights change nothing; leave them out");
  const train::Data data = open_data(options.data, cutting, model, tokenizer);
  const train::Windows windows = data.training();
  const train::Setup setup = setup_of(options, found, *backend);
  train::Ledger needed = train::Ledger::counter();
  { const Evaluator counted(found, *backend, setup, windows.isolates(), needed); }
  check_fits("evaluating this model", needed, *backend, "choose a smaller --batch or --context");

  const Interrupts interrupts;
  train::Ledger ledger;
  Evaluator on(found, *backend, setup, windows.isolates(), ledger);
  if (!options.json)
    std::cout << options.folder << ": " << shape_words(setup.shape) << "; "
              << grouped(train::parameter_count(setup.shape)) << " parameters; " << backend->device() << '\n'
              << name_of(options.data) << (options.data.size() > 1 ? " have " : " has ")
              << grouped(data.size()) << " " << token_word(setup.shape) << "s in "
              << plural(data.documents(), "document") << ", "
              << train::kLayouts[static_cast<int>(data.layout())]
              << (windows.isolates() ? " and isolated" : "") << std::endl;
  const std::int64_t all = train::count_of_all(windows);
  const std::int64_t asked = options.windows == 0 ? all : std::min(options.windows, all);
  const Figures figures = evaluate(
      on, windows, asked, bytes_of_tokens(tokenizer, train::are_tokens(shares), setup.shape.vocabulary));
  if (figures.loss.windows < asked) {
    std::cerr << "scruple: stopped by " << Interrupts::name() << " after "
              << plural(figures.loss.windows, "window") << " of " << grouped(asked)
              << ": they would not stand for all; --windows N takes fewer that do\n";
    throw Stopped{Interrupts::signal()};
  }
  if (figures.loss.targets == 0)
    throw std::runtime_error("nothing is to be predicted in " + plural(asked, "window") + " of " +
                             grouped(all) +
                             ": they hold prompts, or others' turns, alone; take more --windows");
  if (!std::isfinite(figures.loss.sum))
    throw std::runtime_error("the model's loss is not finite: its training diverged, or --activations " +
                             std::string(precision_name(setup.activations)) + " is too narrow for it");
  if (options.json)
    print_json(options, figures, all, on, device);
  else
    print(figures, all, on);
}

}  // namespace

void add_eval(CLI::App& program) {
  const auto options = std::make_shared<Options>();
  OptionTable cutting = options->cutting.options();
  std::erase_if(cutting, [](const Option& row) { return row.name == "--validation"; });
  add_command(
      program, "eval", "Measure a trained model's loss over a text", "Train a model", kFooter,
      joined({{model_option(options->folder), required({kData, "--data", "", &options->data, "PATH",
                                                        "text, folder of texts, *.jsonl, *.bin (tokens), or "
                                                        "- for standard input; all of it is used"})},
              cutting,
              {{kData, "--windows", "", &options->windows, "N",
                "at most so many windows, spread evenly over the data (default: all)", whole_from(1)},
               {kModel, "--context", "", &options->context, "N",
                "tokens in a window (default: the model's own, at most " + grouped(kUsualContext) + ")",
                whole_from(1)},
               {kModel, "--ema", "", &options->ema, "",
                "the moving averages of a checkpoint's weights (train --ema)"},
               {kRun, "--batch", "", &options->batch, "N", "windows at a time", whole_from(1)},
               {kRun, "--activations", "", &options->activations, "TYPE",
                either(train::kPrecisions) + " (default: as the weights; on a GPU bf16 for fp32)",
                one_of(train::kPrecisions)},
               {kRun, "--device", "", &options->device, "DEVICE", "cpu, cuda, auto: a GPU if there is one",
                a_device(), false, kDeviceVariable},
               {kRun, "--threads", "", &options->threads, "N", "CPU threads; 0: one per core",
                whole_from(0, 1024)},
               {kRun, "--json", "", &options->json, "", "print one JSON object"}}}),
      [options](const CLI::App&) { eval(*options); });
}

}  // namespace scruple::cli
