// `scruple sample`: continues a text with a model that train has written.
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <iostream>
#include <limits>
#include <memory>
#include <numeric>
#include <optional>

#include "commands.h"
#include "found.h"
#include "memory.h"
#include "scruple/scruple.hpp"
#include "text.h"
#include "train/pass/backend.h"
#include "train/random.h"
#include "train/run/weights.h"
#include "train/text/utf8.h"
#include "train/text/vocabulary.h"
#include "training.h"

namespace scruple::cli {
namespace {

constexpr const char* kFooter =
    R"(Prints the prompt and its continuation, up to --length tokens or the model's end token. The same
seed gives the same text. With --chat it answers --prompt, or one by one the lines of standard
input, as the model's own chat template writes a conversation.

Examples:
  scruple sample run1 --prompt "Once upon a time"
  scruple sample run1/checkpoints/step-00000500 --length 400 --temperature 0.7 --top-k 20
  scruple sample ./SmolLM2-135M --prompt "The sea" --top-p 0.9
  scruple sample ./SmolLM2-135M-Instruct --chat --prompt "What is the sea?")";

struct Options {
  std::string folder, prompt = "\n", device = "auto", system, chat_date;
  bool chat = false, has_prompt = false;
  std::int64_t length = 200, context = 0;
  double temperature = 0.8, top_p = 1;
  int top_k = 0;
  std::uint64_t seed = 1;
  int threads = 0;
  bool ema = false;
};

// The likeliest token at temperature 0; otherwise drawn from softmax(logits / temperature), of the top_k best, and of
// those of the fewest that hold a share of top_p (Holtzman et al., 1904.09751).
int draw(const std::vector<float>& logits, const Options& options, std::uint64_t index) {
  std::vector<int> order(logits.size());
  std::iota(order.begin(), order.end(), 0);
  const auto comes_before = [&](int a, int b) {
    const float x = logits[static_cast<std::size_t>(a)], y = logits[static_cast<std::size_t>(b)];
    return x > y || (x == y && a < b);
  };
  std::size_t kept = options.temperature == 0 ? 1 : static_cast<std::size_t>(options.top_k);
  if (kept == 0 || kept > order.size()) kept = order.size();
  const auto end = order.begin() + static_cast<std::ptrdiff_t>(kept);
  if (kept < order.size()) std::nth_element(order.begin(), end, order.end(), comes_before);
  std::sort(order.begin(), end, comes_before);
  order.resize(kept);
  if (options.temperature == 0) return order.front();
  std::vector<double> sums;
  double sum = 0;
  for (const int token : order) {
    const double above =
        logits[static_cast<std::size_t>(token)] - logits[static_cast<std::size_t>(order.front())];
    sums.push_back(sum += std::exp(above / options.temperature));
  }
  if (options.top_p < 1) {
    const auto enough = std::lower_bound(sums.begin(), sums.end(), options.top_p * sum);
    sums.resize(std::min(static_cast<std::size_t>(enough - sums.begin()) + 1, sums.size()));
    sum = sums.back();
  }
  const double at = sum * train::random_uniform(options.seed, train::kSampleStream, index);
  const auto found = std::upper_bound(sums.begin(), sums.end(), at) - sums.begin();
  return order[std::min(static_cast<std::size_t>(found), sums.size() - 1)];
}

// Between texts and tokens: the tokenizer of a folder, or none where tokens are bytes.
class Words {
 public:
  Words(const std::string& folder, std::int64_t vocabulary) : words_(vocabulary_of(folder)) {
    if (!words_.tokenizer && !train::tokens_are_bytes(vocabulary)) {
      throw std::runtime_error(folder + " has no tokenizer.json, and its model has a vocabulary of " +
                               grouped(vocabulary) +
                               ", so its tokens are not bytes; put its tokenizer.json there");
    }
    for (std::int64_t number = 0; words_.tokenizer && number < vocabulary; ++number)
      if (!words_.tokenizer->has(static_cast<train::Token>(number)))
        unknown_.push_back(static_cast<std::size_t>(number));
  }
  // Of valid UTF-8.
  std::vector<std::int32_t> tokens_of(const std::string& text, train::Tokenizer::Part part) {
    std::vector<std::int32_t> tokens;
    if (!words_.tokenizer) {
      for (const char c : text) tokens.push_back(static_cast<unsigned char>(c));
      return tokens;
    }
    for (const train::Token token : words_.tokenizer->encode(text, part))
      tokens.push_back(static_cast<std::int32_t>(token));
    return tokens;
  }
  std::string text_of(const std::vector<std::int32_t>& tokens) const {
    if (words_.tokenizer)
      return words_.tokenizer->decode(std::vector<train::Token>(tokens.begin(), tokens.end()));
    std::string text;
    for (const std::int32_t token : tokens) text += static_cast<char>(token);
    return text;
  }
  // Models are often padded: numbers that are no token have logits too, and are never drawn.
  void leave_out_unknown(std::vector<float>& logits) const {
    for (const std::size_t number : unknown_) logits[number] = -std::numeric_limits<float>::infinity();
  }
  // What ends a turn may be another token than what ends a text.
  void end_at_turns(const train::ChatTemplate& chat) {
    const std::string answer = "Hello.";
    const train::Conversation said =
        train::with_message(train::with_message({}, "user", answer), "assistant", answer);
    train::ChatTemplate::Tokens written;
    try {
      written = chat.tokens(said, *words_.tokenizer, train::TrainOn::last, "--chat");
    } catch (const train::TemplateError&) {  // no turn's end is known; the folder's end tokens are left
    }
    if (written.counted.empty()) return;
    const train::Token last = written.tokens[written.counted.back().end - 1];
    const std::vector<train::Token> plain = words_.tokenizer->encode(answer, train::Tokenizer::Part::bare);
    if (std::find(plain.begin(), plain.end(), last) == plain.end()) words_.stops.push_back(last);
  }
  bool ends(std::int32_t token) const {
    return std::find(words_.stops.begin(), words_.stops.end(), static_cast<train::Token>(token)) !=
           words_.stops.end();
  }

 private:
  Vocabulary words_;
  std::vector<std::size_t> unknown_;
};

// Refuses a model that does not fit, before anything is read.
void check_memory(const Found& found, train::Backend& backend) {
  train::Ledger needed = train::Ledger::counter();
  const train::Weights weights = found.weights(backend, needed);
  const auto generator = backend.generator(weights.shape(), weights.visible(), needed);
  check_fits("sampling from this model", needed, backend, "choose a smaller --context");
}

// A model that continues texts, token by token.
class Speaker {
 public:
  Speaker(const Options& options, const Found& found, train::Backend& backend)
      : options_(options),
        weights_(found.weights(backend, ledger_)),
        words_(found.folder, weights_.shape().vocabulary),
        generator_(backend.generator(weights_.shape(), weights_.visible(), ledger_)) {}

  Words& words() { return words_; }
  // Prints what comes behind these tokens, and returns it. `before`: printed as soon as there is something to say.
  std::string continue_from(std::vector<std::int32_t> tokens, const std::string& before, bool prints_behind) {
    const std::int64_t context = weights_.shape().context;
    const std::size_t given = tokens.size();
    if (const auto more = static_cast<std::int64_t>(given) - context; more > 0)
      std::cerr << "scruple: the prompt is longer than the context of " << grouped(context)
                << " tokens; the model does not see its first " << grouped(more) << '\n';
    std::vector<float> logits(static_cast<std::size_t>(weights_.shape().vocabulary));
    const auto text_so_far = [&] {
      return words_.text_of(
          prints_behind
              ? tokens
              : std::vector<std::int32_t>(tokens.begin() + static_cast<std::ptrdiff_t>(given), tokens.end()));
    };
    std::string said = text_so_far(), answer;
    auto begin = std::max<std::int64_t>(static_cast<std::int64_t>(given) - context, 0);  // of what it sees
    generator_->clear();
    for (std::int64_t i = 0; i < options_.length; ++i) {
      const auto end = static_cast<std::int64_t>(tokens.size());
      if (end - begin >
          context) {  // every position moves: half of the context is read again, and half is free
        begin = end - (context + 1) / 2;
        generator_->clear();
      }
      const std::int64_t fed = end - begin - generator_->length();
      generator_->feed(weights_.visible(), tokens.data() + (end - fed), fed, logits.data());
      if (!std::isfinite(std::accumulate(logits.begin(), logits.end(), 0.0f)))
        throw std::runtime_error(
            "the model's logits are not finite: its training diverged; take an earlier "
            "checkpoint, or train again with a smaller --lr");
      words_.leave_out_unknown(logits);
      if (i == 0) std::cout << before;
      const int token = draw(logits, options_, drawn_++);
      if (words_.ends(token)) break;
      tokens.push_back(token);
      const std::string text = text_so_far(), more = text.substr(std::min(said.size(), text.size()));
      std::cout << more << std::flush;
      answer += more;
      said = text;
    }
    std::cout << '\n';
    return answer;
  }

 private:
  const Options& options_;
  train::Ledger ledger_;
  train::Weights weights_;
  Words words_;
  std::unique_ptr<train::Generator> generator_;
  std::uint64_t drawn_ = 0;
};

std::string valid(const std::string& text, const char* name) {
  std::int64_t replaced = 0;
  std::string out = train::valid_utf8(text, replaced);
  if (replaced > 0) std::cerr << "scruple: " << name << ": " << replaced_words(replaced) << '\n';
  return out;
}

// Answers the prompt, or each line of standard input after the ones before it.
void talk(const Options& options, Speaker& speaker, const train::ChatTemplate& chat) {
  train::Conversation said;
  speaker.words().end_at_turns(chat);
  if (!options.system.empty()) said = train::with_message(said, "system", valid(options.system, "--system"));
  const auto answer = [&](const std::string& line, const char* name) {
    said = train::with_message(said, "user", valid(line, name));
    const std::vector<std::int32_t> tokens =
        speaker.words().tokens_of(chat.prompt(said, name), train::Tokenizer::Part::bare);
    std::int64_t cut = 0;  // characters, where the answer is too long
    said = train::with_message(
        said, "assistant",
        train::valid_utf8(speaker.continue_from(tokens, "", /*prints_behind=*/false), cut));
  };
  if (options.has_prompt) return answer(options.prompt, "--prompt");
  const bool terminal = isatty(STDIN_FILENO) != 0;
  for (std::string line; std::cerr << (terminal ? "> " : "") << std::flush, std::getline(std::cin, line);)
    if (line.find_first_not_of(" \t\r") != line.npos) answer(line, "standard input");
}

void sample(const Options& options) {
  if (options.top_p > 1)
    throw UsageError("--top-p is " + shortest(options.top_p) + "; choose a share of at most 1");
  if (options.prompt.empty())
    throw UsageError("--prompt is empty; give at least one character, or leave it out");
  if (!options.chat && !(options.system.empty() && options.chat_date.empty()))
    throw UsageError("--system and --chat-date are for --chat; add it, or leave them out");
  const Found found = find_model(options.folder, options.context, options.ema);
  const bool is_chat = options.chat;
  if (is_chat && (found.folder.empty() || !train::has_tokenizer(found.folder)))
    throw std::runtime_error(options.folder +
                             " has no tokenizer.json, so its tokens are bytes, which have no chat "
                             "template; leave out --chat, and write the prompt as it was trained");
  std::optional<train::ChatTemplate> chat;
  if (is_chat) chat.emplace(train::chat_template(found.folder, options.chat_date));
  const std::string device = device_for(options.device);
  check_device(device);
  const auto open = device == "cuda" ? train::cuda_backend : train::cpu_backend;
  const std::unique_ptr<train::Backend> backend = open(options.threads);
  check_memory(found, *backend);
  Speaker speaker(options, found, *backend);
  if (chat) return talk(options, speaker, *chat);
  const bool of_tokens = !found.folder.empty() && train::has_tokenizer(found.folder);
  const std::string text = of_tokens ? valid(options.prompt, "--prompt") : options.prompt;
  speaker.continue_from(speaker.words().tokens_of(text, train::Tokenizer::Part::prompt), options.prompt,
                        /*prints_behind=*/true);
}

}  // namespace

void add_sample(CLI::App& program) {
  const auto options = std::make_shared<Options>();
  add_command(
      program, "sample", "Continue a text with a trained model", "Train a model", kFooter,
      {model_option(options->folder),
       {kNone, "--prompt", "", &options->prompt, "TEXT",
        "text to continue, or with --chat to answer (default: a new line; the lines of standard input)"},
       {kNone, "--chat", "", &options->chat, "", "answer as the model's chat template writes conversations"},
       {kNone, "--system", "", &options->system, "TEXT", "with --chat: the system's message"},
       {kNone, "--chat-date", "", &options->chat_date, "DATE",
        "with --chat: today, such as 2026-11-19, for templates that ask for it", a_date()},
       {kNone, "--length", "", &options->length, "N", "tokens to add, at most", whole_from(1)},
       {kNone, "--temperature", "", &options->temperature, "T", "0: always the likeliest token",
        not_negative()},
       {kNone, "--top-k,--top", "", &options->top_k, "N", "draw among the N likeliest tokens; 0: all",
        whole_from(0, std::numeric_limits<int>::max())},
       {kNone, "--top-p", "", &options->top_p, "SHARE",
        "draw among the likeliest that hold this share; 1: all", above_zero()},
       {kNone, "--context", "", &options->context, "N",
        "tokens that the model sees (default: its own, at most " + grouped(kUsualContext) + ")",
        whole_from(1)},
       {kNone, "--ema", "", &options->ema, "", "the moving averages of a checkpoint's weights (train --ema)"},
       {kNone, "--seed", "", &options->seed, "N", "of the draws", whole_from(0)},
       {kNone, "--device", "", &options->device, "DEVICE", "cpu, cuda, auto: a GPU if there is one",
        a_device(), false, kDeviceVariable},
       {kNone, "--threads", "", &options->threads, "N", "CPU threads; 0: one per core", whole_from(0, 1024)}},
      [options](const CLI::App& command) {
        options->has_prompt = is_given(command, "--prompt");
        sample(*options);
      });
}

}  // namespace scruple::cli
