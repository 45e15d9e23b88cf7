// `scruple tokenize`: texts into files of tokens, by a model's tokenizer.json, and back.
#include <algorithm>
#include <chrono>
#include <filesystem>
#include <iostream>
#include <memory>
#include <optional>
#include <span>
#include <thread>

#include "commands.h"
#include "io/file.h"
#include "memory.h"
#include "names.h"
#include "options.h"
#include "progress.h"
#include "text.h"
#include "train/model/model.h"
#include "train/text/stream.h"
#include "train/text/vocabulary.h"
#include "training.h"

namespace scruple::cli {
namespace {

constexpr const char* kFooter =
    R"(Each file is one document, and of a folder each text below. Its tokens are those of Hugging Face's
library `tokenizers`, with the ones that the model expects around a text and the end token. Bytes that
are no UTF-8 become U+FFFD. Texts may be of any size: they are never held whole.

A token takes 16 bits, or 32 where the vocabulary has more than 65,536. A line of JSON lines is a
document; where it has a prompt or messages, the file says which tokens count (--form scruple).

Examples:
  scruple tokenize --model ./SmolLM2-135M book.txt --out tokens.bin
  scruple tokenize --model ./SmolLM2-135M --decode tokens.bin > book.txt
  cat *.py | scruple tokenize --model ./SmolLM2-135M - --out code.bin --end none
  zstdcat web.jsonl.zst | scruple tokenize --model ./SmolLM2-135M --json - --out web --shard-tokens 100000000)";

constexpr const char* kForms[] = {"llm.c", "nanogpt", "scruple"};  // of train::TokenFile

struct Options {
  std::string model, out, end, decode, form;
  std::string train_on = train::kTrainOn[static_cast<int>(train::Reading().train_on)], chat_date;
  std::vector<std::string> texts;
  std::int64_t shard_tokens = 0;
  int threads = 0;
  bool bare = false, json = false;
};

// A model's tokenizer, and the token after each document.
struct Words {
  train::Tokenizer tokenizer;
  std::optional<train::Token> end;
};

Words words_of(const Options& options) {
  Words words = {train::read_tokenizer(options.model), {}};
  if (options.end == "none") return words;
  words.end = options.end.empty() ? train::end_token(train::folder_of_model(options.model), words.tokenizer)
                                  : words.tokenizer.find(options.end);
  if (!words.end && !options.end.empty())
    throw UsageError("the tokenizer of " + options.model + " has no token " + options.end +
                     "; name another with --end, or leave it out with --end none");
  return words;
}

// The files that are named; of folders those below. Throws where something would be lost, or is not what it seems.
std::vector<std::string> files_of(const Options& options) {
  std::vector<std::string> files;
  std::error_code ignored;
  for (const std::string& path : options.texts) {
    if (path != train::Documents::kStandardInput && std::filesystem::is_directory(path, ignored))
      for (std::string& file : train::files_below(path)) files.push_back(std::move(file));
    else
      files.push_back(path);
  }
  for (const std::string& path : files) {
    if (std::filesystem::equivalent(path, options.out, ignored))
      throw UsageError("--out is " + path + ", which is to be read; name another file");
    if (train::is_token_file(path))
      throw UsageError(path + " is a file of tokens by its name, not a text; read it with --decode");
    if (path != train::Documents::kStandardInput && !std::filesystem::exists(path, ignored))
      throw std::runtime_error("cannot open " + path + ": there is no such file; check the path");
  }
  return files;
}

void encode(const Options& options) {
  Words words = words_of(options);
  if (!words.end && options.end.empty())
    std::cerr << "scruple: nothing beside " << options.model
              << " names an end token, so no document gets one; name it with --end\n";
  const train::Reading reading = {
      .tokenizer = &words.tokenizer,
      .end = words.end,
      .vocabulary = words.tokenizer.size(),
      .bare = options.bare,
      .train_on = value_named<train::TrainOn>(train::kTrainOn, options.train_on).value(),
      .chat_folder = train::folder_of_model(options.model),
      .chat_date = options.chat_date,
      .limit = free_memory()};
  const std::vector<std::string> files = files_of(options);
  const std::optional<train::TokenFile> form = value_named<train::TokenFile>(kForms, options.form);
  train::TokenWriter writer(
      {.path = options.out,
       .form = form,
       .vocabulary = words.tokenizer.size(),
       .shard_tokens = options.shard_tokens,
       .has_flags = options.json || std::any_of(files.begin(), files.end(), train::is_json_lines)});
  using Clock = std::chrono::steady_clock;
  const auto begin = Clock::now();
  const auto speed = [&](const train::Encoded& encoded) {
    const double seconds = std::chrono::duration<double>(Clock::now() - begin).count();
    return fixed(static_cast<double>(encoded.bytes) / 1e6 / seconds, 1) + " MB/s, " +
           grouped(static_cast<std::int64_t>(static_cast<double>(encoded.tokens) / seconds)) + " tokens/s";
  };
  const Interrupts interrupts;
  StatusLine status;
  const train::Encoded encoded = train::encode_texts(
      files, options.json, reading, [&] { return train::read_tokenizer(options.model); },
      options.threads > 0 ? options.threads
                          : static_cast<int>(std::max(std::thread::hardware_concurrency(), 1u)),
      writer,
      [&](const train::Encoded& so_far) {
        if (Interrupts::asked()) throw Stopped{Interrupts::signal()};
        if (form.value_or(train::TokenFile::scruple) != train::TokenFile::scruple && so_far.has_prompts &&
            options.train_on != train::kTrainOn[0])
          throw UsageError("--form " + options.form +
                           " cannot say which tokens count, and there are prompts or messages; leave it "
                           "out, or add --train-on all");
        if (status.is_due())
          status.put("tokenize  " + grouped(so_far.tokens) + " tokens of " +
                     fixed(static_cast<double>(so_far.bytes) / 1e6, 0) + " MB  " + speed(so_far));
      });
  status.clear();
  if (encoded.tokens == 0) throw std::runtime_error("the files have no text; nothing was written");
  writer.finish();
  const std::vector<std::string>& paths = writer.paths();
  std::cout << "wrote " << paths.front() << (paths.size() > 1 ? " to " + paths.back() : "") << ": "
            << grouped(encoded.tokens) << " tokens of " << grouped(encoded.bytes) << " bytes ("
            << fixed(static_cast<double>(encoded.bytes) / static_cast<double>(encoded.tokens), 2)
            << " bytes per token), vocabulary " << grouped(words.tokenizer.size()) << "; " << speed(encoded)
            << '\n';
  if (!paths.front().ends_with(".bin"))
    std::cerr
        << "scruple: 'scruple train' knows a file of tokens by its name; give it one that ends in .bin\n";
  if (encoded.empty > 0)
    std::cerr << "scruple: " << plural(encoded.empty, "document") << " with nothing to learn: left out\n";
  if (encoded.replaced > 0) std::cerr << "scruple: " << replaced_words(encoded.replaced) << '\n';
}

// Without what encode() puts around a text, so that one document comes back as it was.
void decode(const Options& options) {
  Words words = words_of(options);
  const std::vector<train::Token> tokens = train::read_tokens(options.decode);
  using Part = train::Tokenizer::Part;
  const std::vector<train::Token> before =
      words.tokenizer.encode("", options.bare ? Part::bare : Part::prompt);
  std::vector<train::Token> after = words.tokenizer.encode("", options.bare ? Part::bare : Part::whole);
  after.erase(after.begin(), after.begin() + static_cast<std::ptrdiff_t>(before.size()));
  if (words.end && (after.empty() || after.back() != *words.end)) after.push_back(*words.end);
  std::span<const train::Token> text = tokens;
  if (text.size() >= after.size() && std::equal(after.rbegin(), after.rend(), text.rbegin()))
    text = text.first(text.size() - after.size());
  if (text.size() >= before.size() && std::equal(before.begin(), before.end(), text.begin()))
    text = text.subspan(before.size());
  const std::string out = words.tokenizer.decode(text);
  if (options.out.empty())
    std::cout.write(out.data(), static_cast<std::streamsize>(out.size()));
  else
    io::write_text(options.out, out);
}

void run(const Options& options) {
  if (!options.decode.empty() && !options.texts.empty())
    throw UsageError("--decode turns tokens into text; leave out " + options.texts.front());
  if (!options.decode.empty()) return decode(options);
  if (options.texts.empty() || options.out.empty())
    throw UsageError(
        "name the texts to read, and the file to write with --out; try 'scruple tokenize --help'");
  encode(options);
}

}  // namespace

void add_tokenize(CLI::App& program) {
  const auto options = std::make_shared<Options>();
  add_command(
      program, "tokenize", "Turn texts into tokens, and back", "Train a model", kFooter,
      {{kNone, "texts", "", &options->texts, "PATH", "files and folders to read; -: standard input",
        anything(), false, nullptr, /*takes_many=*/true},
       required({kNone, "--model", "", &options->model, "DIR", "folder with a tokenizer.json, or that file"}),
       {kNone, "--out", "", &options->out, "FILE",
        "file to write; its name ends in .bin, by which train knows it"},
       {kNone, "--end", "", &options->end, "TOKEN",
        "token after each document, or none (default: the folder's eos_token)"},
       {kNone, "--bare", "", &options->bare, "", "without the tokens that the model expects around a text"},
       {kNone, "--form", "", &options->form, "FORM",
        "llm.c, nanogpt (without a header) or scruple (with a mask; default of prompts and messages)",
        one_of(kForms)},
       {kNone, "--train-on", "", &options->train_on, "WHAT",
        "what counts: all, the assistant's turns, or its last one", one_of(train::kTrainOn)},
       {kNone, "--chat-date", "", &options->chat_date, "DATE",
        "today, such as 2026-11-19, for chat templates that ask for it", a_date()},
       {kNone, "--json", "", &options->json, "", "what is read are JSON lines, whatever its name"},
       {kNone, "--shard-tokens", "", &options->shard_tokens, "N",
        "write OUT-00000.bin, OUT-00001.bin ..., each of at most so many tokens", whole_from(1)},
       {kNone, "--threads", "", &options->threads, "N",
        "CPU threads; 0: one per core; the files are the same", whole_from(0, 1024)},
       {kNone, "--decode", "", &options->decode, "FILE", "file of tokens to turn back into text"}},
      [options](const CLI::App&) { run(*options); });
}

}  // namespace scruple::cli
