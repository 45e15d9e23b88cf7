// `scruple sample`: continues a text with a model that train has written.
#include <algorithm>
#include <cmath>
#include <filesystem>
#include <iostream>
#include <memory>
#include <numeric>

#include "commands.h"
#include "scruple/scruple.hpp"
#include "text.h"
#include "train/checkpoint.h"
#include "train/export.h"
#include "train/random.h"
#include "train/transformer.h"
#include "training.h"

namespace scruple::cli {
namespace {

constexpr const char* kFooter =
    "Prints the prompt and what the model makes of it, byte by byte. The same seed gives the same text.\n"
    "Where the folder has no config.json, the model is that of the checkpoint, or of the run's last one.\n"
    "\n"
    "Examples:\n"
    "  scruple sample run1 --prompt \"Once upon a time\"\n"
    "  scruple sample run1 --length 400 --temperature 0.7 --top 20 --seed 3\n"
    "  scruple sample run1/checkpoints/step-00000500";

struct Options {
  std::string folder, prompt = "\n";
  std::int64_t length = 200;
  double temperature = 0.8;
  int top = 0;
  std::uint64_t seed = 1;
  int threads = 0;
};

// The likeliest byte at temperature 0; otherwise drawn from softmax(logits / temperature) of the `top` best.
int draw(std::vector<float>& logits, const Options& options, std::uint64_t index) {
  std::vector<int> order(logits.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int a, int b) {
    return logits[static_cast<std::size_t>(a)] > logits[static_cast<std::size_t>(b)];
  });
  if (options.temperature == 0) return order.front();
  if (options.top > 0 && static_cast<std::size_t>(options.top) < order.size())
    order.resize(static_cast<std::size_t>(options.top));
  std::vector<double> sums;
  double sum = 0;
  for (const int token : order) {
    const double above =
        logits[static_cast<std::size_t>(token)] - logits[static_cast<std::size_t>(order.front())];
    sums.push_back(sum += std::exp(above / options.temperature));
  }
  const double at = sum * train::random_uniform(options.seed, train::kSampleStream, index);
  const auto found = std::upper_bound(sums.begin(), sums.end(), at) - sums.begin();
  return order[std::min(static_cast<std::size_t>(found), order.size() - 1)];
}

// The model that a run has written; where there is none, that of a checkpoint.
train::Model find_model(const std::string& folder) {
  std::error_code ignored;
  if (std::filesystem::exists(folder + "/config.json", ignored)) return train::read_model(folder);
  std::string checkpoint;
  try {
    checkpoint = train::find_checkpoint(folder);
  } catch (const std::exception&) {
    throw std::runtime_error(
        folder +
        " has neither config.json nor a complete checkpoint; give the folder of a run, or of "
        "one of its checkpoints");
  }
  Engine engine;
  return train::model_of(engine, io::Checkpoint(checkpoint));
}

void sample(const Options& options) {
  train::Model model = find_model(options.folder);
  if (model.shape.vocabulary != 256)
    throw std::runtime_error(
        options.folder + " has a vocabulary of " + std::to_string(model.shape.vocabulary) +
        ", and sample speaks bytes, of which there are 256; use a model that 'scruple train' wrote");
  if (options.prompt.empty())
    throw UsageError("--prompt is empty; the model needs at least one byte to continue");
  train::Ledger ledger;
  Threads threads(options.threads > 0 ? options.threads : Engine().threads());
  train::Transformer network(model.shape, 1, train::Precision::fp32, threads, ledger);
  std::vector<std::int32_t> tokens;
  for (const char c : options.prompt) tokens.push_back(static_cast<unsigned char>(c));
  std::vector<float> logits(256);
  for (std::int64_t i = 0; i < options.length; ++i) {
    const auto seen = std::min<std::int64_t>(static_cast<std::int64_t>(tokens.size()), model.shape.context);
    network.next(model, &tokens[tokens.size() - static_cast<std::size_t>(seen)], seen, logits.data());
    if (!std::isfinite(std::accumulate(logits.begin(), logits.end(), 0.0f)))
      throw std::runtime_error("the model's logits are not finite: its training diverged");
    if (i == 0) std::cout << options.prompt;
    tokens.push_back(draw(logits, options, static_cast<std::uint64_t>(i)));
    std::cout << static_cast<char>(tokens.back()) << std::flush;
  }
  std::cout << '\n';
}

}  // namespace

void add_sample(CLI::App& program) {
  CLI::App* command = program.add_subcommand("sample", "Continue a text with a trained model");
  command->footer(kFooter);
  const auto options = std::make_shared<Options>();
  command->add_option("model", options->folder, "a run of 'scruple train', or a checkpoint of one")
      ->type_name("DIR")
      ->required();
  command->add_option("--prompt", options->prompt, "the text to continue (default: a new line)")
      ->type_name("TEXT");
  command->add_option("--length", options->length, "bytes to add")
      ->capture_default_str()
      ->check(not_negative());
  command->add_option("--temperature", options->temperature, "0: always the likeliest byte")
      ->capture_default_str()
      ->check(not_negative());
  command->add_option("--top", options->top, "draw among the N likeliest bytes; 0: all")
      ->check(not_negative());
  command->add_option("--seed", options->seed, "of the draws")->capture_default_str();
  command->add_option("--threads", options->threads, "0: one per core")->check(CLI::Range(0, 1024));
  command->callback([options] { sample(*options); });
}

}  // namespace scruple::cli
