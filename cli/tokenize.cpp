// `scruple tokenize`: texts into a file of tokens, by a model's tokenizer.json, and back.
#include <algorithm>
#include <chrono>
#include <filesystem>
#include <iostream>
#include <memory>
#include <span>

#include "commands.h"
#include "io/file.h"
#include "memory.h"
#include "names.h"
#include "options.h"
#include "text.h"
#include "train/model/model.h"
#include "train/text/documents.h"
#include "train/text/vocabulary.h"
#include "training.h"

namespace scruple::cli {
namespace {

constexpr const char* kFooter =
    R"(Each file is one document. Its tokens are those of Hugging Face's library `tokenizers`, with the
ones that the model expects around a text and the end token. Bytes that are no UTF-8 become U+FFFD.
A token takes 16 bits, or 32 where the vocabulary has more than 65,536. A line of JSON lines is a
document; where it has a prompt or messages, the file says which tokens count (--form scruple).

Examples:
  scruple tokenize --model ./SmolLM2-135M book.txt --out tokens.bin
  scruple tokenize --model ./SmolLM2-135M --decode tokens.bin > book.txt
  cat *.py | scruple tokenize --model ./SmolLM2-135M - --out code.bin --end none)";

constexpr const char* kForms[] = {"llm.c", "nanogpt", "scruple"};  // of train::TokenFile

struct Options {
  std::string model, out, end, decode, form;
  std::string train_on = train::kTrainOn[static_cast<int>(train::Reading().train_on)], chat_date;
  std::vector<std::string> texts;
  bool bare = false;
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

// What would be lost, or not what it seems.
void refuse(const std::string& path, const std::string& out) {
  std::error_code ignored;
  if (std::filesystem::is_directory(path, ignored))
    throw std::runtime_error(path + " is a folder; name the files in it");
  if (std::filesystem::equivalent(path, out, ignored))
    throw UsageError("--out is " + path + ", which is to be read; name another file");
  if (path.ends_with(".bin"))
    throw UsageError(path + " is a file of tokens by its name, not a text; read it with --decode");
}

// Of a document's tokens: which of them count, and which begin one.
void add_flags(const train::Documents& documents, std::span<std::uint8_t> flags) {
  for (const train::Document& document : documents.all()) {
    flags[static_cast<std::size_t>(document.begin)] |= train::kBegins;
    train::each_counted(document, documents.gaps(), [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t at = begin; at < end; ++at) flags[static_cast<std::size_t>(at)] |= train::kCounts;
    });
  }
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
  std::vector<train::Token> tokens;
  std::vector<std::uint8_t> flags;
  bool has_prompts = false;
  std::int64_t bytes = 0, replaced = 0, left_out = 0;
  const auto begin = std::chrono::steady_clock::now();
  for (const std::string& path : options.texts) {
    refuse(path, options.out);
    const train::Documents document(path, reading);  // as 'scruple train' reads it
    std::visit([&](auto list) { tokens.insert(tokens.end(), list.begin(), list.end()); }, document.tokens());
    flags.resize(tokens.size());
    add_flags(document, std::span(flags).last(static_cast<std::size_t>(document.size())));
    has_prompts |= document.has_prompts();
    left_out += document.empty();
    bytes += document.bytes();
    replaced += document.replaced();
    if (options.texts.size() > 1) std::cerr << path << ": " << grouped(document.size()) << " tokens\n";
  }
  if (bytes == 0) throw std::runtime_error("the files have no text; nothing was written");
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  const train::TokenFile usual = has_prompts ? train::TokenFile::scruple : train::TokenFile::llm_c;
  const train::TokenFile form = value_named<train::TokenFile>(kForms, options.form).value_or(usual);
  if (form != train::TokenFile::scruple && has_prompts && options.train_on != train::kTrainOn[0])
    throw UsageError("--form " + options.form +
                     " cannot say which tokens count, and there are prompts or messages; leave it "
                     "out, or add --train-on all");
  if (form != train::TokenFile::scruple) flags.clear();
  train::write_tokens(options.out, form, tokens, words.tokenizer.size(), flags);
  const auto count = static_cast<std::int64_t>(tokens.size());
  std::cout << "wrote " << options.out << ": " << grouped(count) << " tokens of " << grouped(bytes)
            << " bytes (" << fixed(static_cast<double>(bytes) / static_cast<double>(count), 2)
            << " bytes per token), vocabulary " << grouped(words.tokenizer.size()) << "; "
            << fixed(static_cast<double>(bytes) / 1e6 / seconds, 1) << " MB/s\n";
  if (left_out > 0)
    std::cerr << "scruple: " << plural(left_out, "document") << " with nothing to learn: left out\n";
  if (replaced > 0) std::cerr << "scruple: " << replaced_words(replaced) << '\n';
}

// Without what encode() puts around a text, so that one document comes back as it was.
void decode(const Options& options) {
  Words words = words_of(options);
  const std::vector<train::Token> tokens = train::read_tokens(options.decode);
  const auto part = options.bare ? train::Tokenizer::Part::bare : train::Tokenizer::Part::prompt;
  const std::vector<train::Token> before = words.tokenizer.encode("", part);
  std::vector<train::Token> after = words.tokenizer.encode("", !options.bare);
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

}  // namespace

void add_tokenize(CLI::App& program) {
  CLI::App* command = program.add_subcommand("tokenize", "Turn texts into tokens, and back");
  command->group("Train a model");
  command->footer(kFooter);
  const auto options = std::make_shared<Options>();
  command->add_option("texts", options->texts, "the files to read; -: standard input")->type_name("FILE");
  add_options(
      *command,
      {{kNone, "--model", "", &options->model, "DIR", "folder with a tokenizer.json, or that file"},
       {kNone, "--out", "", &options->out, "FILE", "file to write"},
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
       {kNone, "--decode", "", &options->decode, "FILE", "file of tokens to turn back into text"}});
  command->get_option("--model")->required();
  command->callback([options] {
    if (!options->decode.empty() && !options->texts.empty())
      throw UsageError("--decode turns tokens into text; leave out " + options->texts.front());
    if (!options->decode.empty()) return decode(*options);
    if (options->texts.empty() || options->out.empty())
      throw UsageError(
          "name the texts to read, and the file to write with --out; try 'scruple tokenize --help'");
    encode(*options);
  });
}

}  // namespace scruple::cli
