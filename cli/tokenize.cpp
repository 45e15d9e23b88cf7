// `scruple tokenize`: texts into a file of tokens, by a model's tokenizer.json, and back.
#include <chrono>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <iterator>
#include <memory>

#include "commands.h"
#include "io/file.h"
#include "names.h"
#include "text.h"
#include "train/model/model.h"
#include "train/text/documents.h"
#include "train/text/tokenizer.h"
#include "train/text/tokens.h"
#include "train/text/utf8.h"

namespace scruple::cli {
namespace {

constexpr const char* kFooter =
    "The tokens are those of Hugging Face's library `tokenizers`. Each file is one document: the tokens "
    "that\n"
    "the model expects around a text are added to it (Llama's <|begin_of_text|>), and the end token after "
    "it.\n"
    "Bytes that are no UTF-8 become U+FFFD, as in Python. The file is llm.c's: 16-bit tokens, or 32-bit "
    "ones\n"
    "where the vocabulary is larger than 65,536; `--form nanogpt` leaves its header out.\n"
    "\n"
    "Examples:\n"
    "  scruple tokenize --model ./SmolLM2-135M book.txt --out tokens.bin\n"
    "  cat *.py | scruple tokenize --model ./gpt2 - --out code.bin --end none\n"
    "  scruple tokenize --model ./gpt2 --decode tokens.bin > book.txt";

constexpr const char* kForms[] = {"llm.c", "nanogpt"};  // of train::TokenFile

struct Options {
  std::string model, out, end, decode, form = kForms[0];
  std::vector<std::string> texts;
  bool bare = false;
};

std::string read_all(const std::string& path) {
  if (path != "-") {
    if (std::filesystem::is_directory(path))
      throw std::runtime_error(path + " is a folder; name the files in it");
    const io::MappedFile file(path);
    std::string text(reinterpret_cast<const char*>(file.bytes().data()), file.bytes().size());
    train::check_is_text(text, path, /*bytes_are_tokens=*/false);
    return text;
  }
  return {std::istreambuf_iterator<char>(std::cin), {}};
}

std::optional<train::Token> end_token(const Options& options, const train::Tokenizer& tokenizer) {
  if (options.end.empty()) return train::end_token(options.model, tokenizer);
  if (options.end == "none") return {};
  if (const auto token = tokenizer.find(options.end)) return token;
  throw UsageError("the tokenizer of " + options.model + " has no token " + options.end +
                   "; name another with --end, or leave it out with --end none");
}

// What would be lost, or not what it seems.
void refuse(const std::string& path, const std::string& out) {
  std::error_code ignored;
  if (std::filesystem::equivalent(path, out, ignored))
    throw UsageError("--out is " + path + ", which is to be read; name another file");
  if (train::is_json_lines(path))
    throw UsageError(path +
                     " is JSON lines, whose braces and names would become tokens; 'scruple train --data " +
                     path + "' reads it as it is");
}

void encode(const Options& options) {
  train::Tokenizer tokenizer = train::read_tokenizer(options.model);
  const auto end = end_token(options, tokenizer);
  std::vector<train::Token> tokens;
  std::int64_t bytes = 0, replaced = 0;
  const auto begin = std::chrono::steady_clock::now();
  for (const std::string& path : options.texts) {
    refuse(path, options.out);
    const std::string text = read_all(path);
    std::int64_t here = 0;
    const std::string valid = train::valid_utf8(text, here);
    const auto found = tokenizer.encode(valid, !options.bare);
    tokens.insert(tokens.end(), found.begin(), found.end());
    if (end) tokens.push_back(*end);
    bytes += static_cast<std::int64_t>(text.size());
    replaced += here;
    if (options.texts.size() > 1)
      std::cerr << path << ": " << grouped(static_cast<std::int64_t>(found.size())) << " tokens\n";
  }
  if (bytes == 0) throw std::runtime_error("there is no text in what was given; nothing was written");
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  train::write_tokens(options.out, value_named<train::TokenFile>(kForms, options.form).value(), tokens,
                      tokenizer.size());
  const auto count = static_cast<std::int64_t>(tokens.size());
  std::cout << "wrote " << options.out << ": " << grouped(count) << " tokens of " << grouped(bytes)
            << " bytes (" << fixed(static_cast<double>(bytes) / static_cast<double>(count), 2)
            << " bytes per token), vocabulary " << grouped(tokenizer.size()) << "; "
            << fixed(static_cast<double>(bytes) / 1e6 / seconds, 1) << " MB/s\n";
  if (replaced > 0) std::cerr << "scruple: " << replaced_words(replaced) << '\n';
}

void decode(const Options& options) {
  const train::Tokenizer tokenizer = train::read_tokenizer(options.model);
  const std::string text = tokenizer.decode(train::read_tokens(options.decode));
  if (options.out.empty())
    std::cout.write(text.data(), static_cast<std::streamsize>(text.size()));
  else
    io::write_text(options.out, text);
}

}  // namespace

void add_tokenize(CLI::App& program) {
  CLI::App* command = program.add_subcommand("tokenize", "Turn texts into tokens, and back");
  command->footer(kFooter);
  const auto options = std::make_shared<Options>();
  command->add_option("texts", options->texts, "the files to read; -: standard input")->type_name("FILE");
  command->add_option("--model", options->model, "a folder with a tokenizer.json, or that file")
      ->type_name("DIR")
      ->required();
  command->add_option("--out", options->out, "the file to write")->type_name("FILE");
  command
      ->add_option("--end", options->end,
                   "the token after each document; none: none (default: the eos_token that the folder names)")
      ->type_name("TOKEN");
  command->add_flag("--bare", options->bare, "without the tokens that the model expects around a text");
  command->add_option("--form", options->form, "llm.c or nanogpt")
      ->capture_default_str()
      ->check(one_of(kForms));
  command->add_option("--decode", options->decode, "a file of tokens to turn back into text")
      ->type_name("FILE");
  command->callback([options] {
    if (!options->decode.empty() && !options->texts.empty())
      throw UsageError("--decode reads tokens, and " + options->texts.front() +
                       " would be text; give one of them");
    if (!options->decode.empty()) return decode(*options);
    if (options->texts.empty() || options->out.empty())
      throw UsageError(
          "name the texts to read, and the file to write with --out; try 'scruple tokenize --help'");
    encode(*options);
  });
}

}  // namespace scruple::cli
