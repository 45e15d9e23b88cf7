#include "train/text/documents.h"

#include <algorithm>
#include <cstdio>
#include <filesystem>

#include "io/crc32.h"
#include "train/text/jsonl.h"
#include "train/text/utf8.h"
#include "train/text/vocabulary.h"

namespace scruple::train {
namespace {

std::string_view text_of(std::span<const std::byte> bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

std::vector<std::uint8_t> read_standard_input(std::int64_t limit) {
  constexpr std::size_t kPart = std::size_t{1} << 20;
  std::vector<std::uint8_t> bytes;
  std::size_t size = 0, got = 0;
  do {
    if (static_cast<std::int64_t>(size) > limit)
      io::fail("standard input has more than the ", limit >> 20,
               " MiB of memory that are free for it; put the text into a file, which is not read whole");
    bytes.resize(size + kPart);
    got = std::fread(bytes.data() + size, 1, kPart, stdin);
    size += got;
  } while (got > 0);
  if (std::ferror(stdin) != 0) io::fail("cannot read standard input to its end; give a file with --data");
  bytes.resize(size);
  return bytes;
}

// In capitals or not.
bool is_named(std::string_view path, std::string_view suffix) {
  return path.size() >= suffix.size() &&
         std::equal(
             suffix.begin(), suffix.end(), path.end() - static_cast<std::ptrdiff_t>(suffix.size()),
             [](char wanted, char c) { return wanted == (c >= 'A' && c <= 'Z' ? c + ('a' - 'A') : c); });
}

// What people have in place of a text, by its first bytes.
struct Container {
  std::string_view bytes;
  const char *name, *hint;
  std::size_t at = 0;  // where those bytes stand
};
constexpr const char *kRows = "write its rows as *.jsonl, one {\"text\": ...} per line",
                     *kUnpack = "unpack it first", *kTakeOut = "take its text out first";
constexpr Container kContainers[] = {{"PAR1", "a Parquet file", kRows},
                                     {"ARROW1", "an Arrow file", kRows},
                                     {"SQLite format 3", "an SQLite database", kRows},
                                     {"\x89HDF", "an HDF5 file", kRows},
                                     {"PK\x03\x04", "a zip archive", kUnpack},
                                     {"\x1F\x8B", "a gzip file", kUnpack},
                                     {"\xFD\x37zXZ", "an xz file", kUnpack},
                                     {"\x28\xB5\x2F\xFD", "a zstd file", kUnpack},
                                     {"1AY&SY", "a bzip2 file", kUnpack, 4},
                                     {"7z\xBC\xAF", "a 7z archive", kUnpack},
                                     {"%PDF-", "a PDF", kTakeOut},
                                     {"\x89PNG", "a picture", kTakeOut},
                                     {"\xFF\xD8\xFF", "a picture", kTakeOut}};

}  // namespace

std::vector<std::string> files_below(const std::string& folder) {
  std::vector<std::string> files;
  for (const auto& entry : std::filesystem::recursive_directory_iterator(folder)) {
    const std::string path = entry.path().generic_string();
    if (entry.is_regular_file() && (is_named(path, ".txt") || is_named(path, ".md") || is_json_lines(path)))
      files.push_back(path);
  }
  if (files.empty()) io::fail(folder, " has no *.txt, *.md, *.jsonl or *.ndjson file in it or below");
  std::sort(files.begin(), files.end());
  return files;
}

std::int64_t Stretch::size() const {
  return std::visit([](auto list) { return static_cast<std::int64_t>(list.size()); }, tokens);
}

void copy_tokens(std::span<const Stretch> stretches, std::int64_t begin, std::int64_t count,
                 std::int32_t* to) {
  const auto after = [](std::int64_t place, const Stretch& stretch) { return place < stretch.begin; };
  auto stretch = std::upper_bound(stretches.begin(), stretches.end(), begin, after) - 1;
  for (; count > 0; ++stretch) {
    const std::int64_t at = begin - stretch->begin, here = std::min(count, stretch->size() - at);
    std::visit([&](auto all) { std::copy_n(all.data() + at, here, to); }, stretch->tokens);
    for (std::int64_t i = 0; stretch->below > 0 && i < here; ++i)
      if (const auto token = static_cast<std::uint32_t>(to[i]); token >= stretch->below)
        io::fail(stretch->path, ": token ", at + i, " is number ", token, ", and the model's vocabulary has ",
                 stretch->below, "; the file was made for another model, or holds no tokens");
    begin += here, to += here, count -= here;
  }
}

bool is_token_file(const std::string& path) { return path.ends_with(".bin"); }

bool is_json_lines(std::string_view path) { return is_named(path, ".jsonl") || is_named(path, ".ndjson"); }

void check_is_text(std::string_view content, const std::string& path, bool bytes_are_tokens) {
  for (const Container& container : kContainers)
    if (content.substr(std::min(container.at, content.size())).starts_with(container.bytes))
      io::fail(path, " is ", container.name, ", and a text was expected; ", container.hint);
  if (is_named(path, ".csv") || is_named(path, ".tsv"))
    io::fail(path, " is a table, whose commas and quotes would be learnt as text; ", kRows,
             ", or call it *.txt if it is meant as text");
  if (is_named(path, ".arrow"))  // a stream begins with no name of its own
    io::fail(path, " is an Arrow stream, and a text was expected; ", kRows);
  if (const std::size_t first = content.find_first_not_of(" \t\r\n");
      is_named(path, ".json") && first != content.npos && (content[first] == '[' || content[first] == '{'))
    io::fail(path,
             " is JSON, whose brackets and names would be learnt as text; write its objects as *.jsonl, one "
             "{\"text\": ...} per line, or call it *.txt if it is meant as text");
  constexpr std::size_t kLooked = 8000;
  if (const std::size_t at = content.substr(0, kLooked).find('\0'); !bytes_are_tokens && at != content.npos)
    io::fail(path, " has a NUL byte at byte ", at,
             ", so it is no text in UTF-8; take its text out, or write it as UTF-8 if it is in UTF-16");
}

Documents::Documents(const Reading& reading) : reading_(reading) {
  if (reading.end && *reading.end >= reading.vocabulary)
    io::fail("the end token is number ", *reading.end, ", and the model's vocabulary has ",
             reading.vocabulary, "; the tokenizer belongs to another model");
  if (reading.vocabulary > (1 << 16))
    held_.emplace<2>();
  else if (reading.vocabulary > (1 << 8))
    held_.emplace<1>();
}

Documents::Documents(const std::vector<std::string>& paths, const Reading& reading) : Documents(reading) {
  const bool as_it_is = reading.tokenizer == nullptr && !reading.end;  // a text's bytes are the tokens
  std::vector<std::vector<std::string>> texts;                         // that are not mapped, of each path
  for (const std::string& path : paths) {
    texts.emplace_back();
    if (path == kStandardInput || is_token_file(path)) continue;
    if (std::filesystem::is_directory(path))
      texts.back() = files_below(path);
    else if (!as_it_is || is_json_lines(path))
      texts.back() = {path};
    std::error_code problem;  // whoever reads the file says what is wrong
    for (const std::string& file : texts.back())
      if (const std::uintmax_t size = std::filesystem::file_size(file, problem); !problem)
        bytes_ += static_cast<std::int64_t>(size);
  }
  std::vector<std::int64_t> first;  // of the held tokens of each source
  for (std::size_t i = 0; i < paths.size(); ++i) {
    const std::string& path = paths[i];
    first.push_back(held());
    if (is_token_file(path)) {
      map_tokens(path);
      continue;
    }
    if (reading.tokenizer == nullptr && reading.vocabulary < 256)
      io::fail("without a tokenizer each byte is a token, and the model's vocabulary has ",
               reading.vocabulary, "; it must have at least 256");
    if (path != kStandardInput && texts[i].empty()) {
      map_bytes(path);
      continue;
    }
    stretches_.push_back({path, {}, at(), {}});
    for (const std::string& file : texts[i]) read_file(file);
    if (path != kStandardInput) continue;
    std::vector<std::uint8_t> text = read_standard_input(reading.limit);
    bytes_ += static_cast<std::int64_t>(text.size());
    if (as_it_is && paths.size() == 1) {
      held_ = std::move(text);
      documents_ = {{0, held(), 0}};
    } else {
      add_text(text_of(std::as_bytes(std::span(text))), "standard input");
      bytes_done_ += static_cast<std::int64_t>(text.size());
      show_progress();
    }
  }
  for (std::size_t i = 0; i < paths.size(); ++i)
    if (const std::int64_t end = i + 1 < paths.size() ? first[i + 1] : held(); end > first[i])
      stretches_[i].tokens = std::visit(
          [&](const auto& list) -> TokenSpan {
            return std::span(list).subspan(static_cast<std::size_t>(first[i]),
                                           static_cast<std::size_t>(end - first[i]));
          },
          held_);
}

void Documents::read_file(const std::string& path) {
  const io::MappedFile file(path);
  const std::string_view content = text_of(file.bytes());
  const std::int64_t before = bytes_done_;
  check_is_text(content, path, reading_.tokenizer == nullptr);
  if (is_json_lines(path))
    add_lines(content, path);
  else
    add_text(content, path);
  bytes_done_ = before + static_cast<std::int64_t>(content.size());
  show_progress();
}

void Documents::add_text(std::string_view text, const std::string& place, bool begins, bool ends) {
  using Part = Tokenizer::Part;
  const std::int64_t begin = at();
  if (reading_.tokenizer != nullptr) {
    check_fits(text.size(), place);
    std::int64_t replaced = 0;
    const Part first = begins ? (reading_.bare ? Part::bare
                                 : ends        ? Part::whole
                                               : Part::prompt)
                              : (reading_.bare || !ends ? Part::completion : Part::ending);
    append(valid_utf8(text, replaced), first, place);
    replaced_ += replaced;
  } else {
    check_limit(text.size(), place);
    append(text, Part::whole, place);
  }
  if (text.empty())
    leave_out(begin);
  else if (ends)
    finish({begin, 0, begin}, place);
  else
    documents_.push_back({begin, at(), begin});
}

void Documents::add_lines(std::string_view content, const std::string& name, std::int64_t number) {
  JsonLines lines(content, name, number);
  const std::int64_t before = bytes_done_;
  while (lines.next()) {
    const std::string place = lines.place();
    check_fits(lines.line().size(), place);
    const JsonDocument document = lines.document();
    if (document.chat) {
      read_chat(*document.chat, place);
      bytes_done_ = before + static_cast<std::int64_t>(lines.bytes_read());
      show_progress();
      continue;
    }
    const std::int64_t begin = at();
    has_prompts_ |= document.prompt.has_value();
    if (document.prompt) append(*document.prompt, Tokenizer::Part::prompt, place);
    const std::int64_t counted = at();
    append(document.text, document.prompt ? Tokenizer::Part::completion : Tokenizer::Part::whole, place);
    if (!document.prompt && document.text.empty())
      leave_out(begin);
    else
      finish({begin, 0, reading_.train_on == TrainOn::all ? begin : counted}, place);
    bytes_done_ = before + static_cast<std::int64_t>(lines.bytes_read());
    show_progress();
  }
  replaced_ += lines.replaced();
}

void Documents::take(std::vector<Token>& tokens, std::vector<std::uint8_t>& flags) {
  std::visit(
      [&](auto& list) {
        tokens.assign(list.begin(), list.end());
        list.clear();
      },
      held_);
  flags.assign(tokens.size(), 0);
  for (const Document& document : documents_) {
    flags[static_cast<std::size_t>(document.begin)] |= kBegins;
    each_counted(document, gaps_, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t i = begin; i < end; ++i) flags[static_cast<std::size_t>(i)] |= kCounts;
    });
  }
  documents_.clear(), gaps_.clear();
  has_prompts_ = false;
}

void Documents::map_bytes(const std::string& path) {
  const std::span<const std::byte> bytes = files_.emplace_back(path).bytes();
  check_is_text(text_of(bytes), path, /*bytes_are_tokens=*/true);
  const std::span tokens(reinterpret_cast<const std::uint8_t*>(bytes.data()), bytes.size());
  stretches_.push_back({path, tokens, at(), bytes});
  if (bytes.empty()) return leave_out(at());
  documents_.push_back({at(), at() + stretches_.back().size(), at()});
  mapped_ += stretches_.back().size();
}

void Documents::map_tokens(const std::string& path) {
  const std::span<const std::byte> bytes = files_.emplace_back(path).bytes();
  const bool is_large = bytes.size() > kLarge;
  stretches_.push_back({path, tokens_in(bytes, path), at(), bytes, is_large ? reading_.vocabulary : 0});
  const Stretch& source = stretches_.back();
  if (is_large && flags_in(bytes).empty())
    documents_.push_back({source.begin, source.begin + source.size(), source.begin});
  else
    find_documents(source);
  mapped_ += source.size();
}

void Documents::find_documents(const Stretch& source) {
  const std::span<const std::uint8_t> flags = flags_in(source.file);
  std::visit(
      [&](auto tokens) {
        for (std::size_t i = 0, begin = 0; i < tokens.size(); ++i) {
          if (source.below == 0 && tokens[i] >= reading_.vocabulary)
            io::fail(source.path, ": token ", i, " is number ", tokens[i],
                     ", and the model's vocabulary has ", reading_.vocabulary,
                     "; the file was made for another model, or holds no tokens");
          const bool is_last = i + 1 == tokens.size();
          if (!is_last && (flags.empty() ? reading_.end != Token{tokens[i]} : (flags[i + 1] & kBegins) == 0))
            continue;
          const auto first = source.begin + static_cast<std::int64_t>(begin);
          if (flags.empty())
            documents_.push_back({first, source.begin + static_cast<std::int64_t>(i + 1), first});
          else
            add_flagged(first, flags.subspan(begin, i + 1 - begin));
          begin = i + 1;
        }
      },
      source.tokens);
}

void Documents::split_large() {
  for (Stretch& source : stretches_) {
    if (source.below == 0 || !flags_in(source.file).empty()) continue;
    std::erase_if(documents_, [&](const Document& document) { return document.begin == source.begin; });
    find_documents(source);
  }
  std::sort(documents_.begin(), documents_.end(),
            [](const Document& a, const Document& b) { return a.begin < b.begin; });
}

// A document that begins at `begin`, and whose tokens have these flags.
void Documents::add_flagged(std::int64_t begin, std::span<const std::uint8_t> flags) {
  const auto size = static_cast<std::int64_t>(flags.size());
  const auto counts = [&](std::int64_t i) { return (flags[static_cast<std::size_t>(i)] & kCounts) != 0; };
  std::int64_t counted = 0;
  while (counted < size && !counts(counted)) ++counted;
  has_prompts_ |= counted > 0;
  for (std::int64_t i = counted, from; i < size; ++i) {
    if (counts(i)) continue;
    for (from = i; i < size && !counts(i);) ++i;
    gaps_.push_back({begin + from, begin + i});
    has_prompts_ = true;
  }
  documents_.push_back({begin, begin + size, begin + counted});
}

// As the template writes it, without another end token: turns end in theirs.
void Documents::read_chat(const Conversation& chat, const std::string& place) {
  if (reading_.tokenizer == nullptr)
    io::fail(place,
             ": it has messages, and bytes have no chat template; train a chat model's folder with --model, "
             "or write "
             "the lines as {\"prompt\": ..., \"completion\": ...}");
  if (!chat_template_) chat_template_.emplace(chat_template(reading_.chat_folder, reading_.chat_date));
  has_prompts_ = true;
  const ChatTemplate::Tokens made =
      chat_template_->tokens(chat, *reading_.tokenizer, reading_.train_on, place);
  if (made.counted.empty()) return leave_out(at());
  const std::int64_t begin = at();
  append_tokens(made.tokens, place);
  std::int64_t counted = at(), done = -1;
  for (const jinja::Span& span : made.counted) {
    const auto first = begin + static_cast<std::int64_t>(span.begin);
    if (done < 0)
      counted = first;
    else
      gaps_.push_back({done, first});
    done = begin + static_cast<std::int64_t>(span.end);
  }
  if (done < at()) gaps_.push_back({done, at()});
  documents_.push_back({begin, at(), counted});
  check_limit(0, place);
}

template <class Tokens>
void Documents::append_tokens(const Tokens& tokens, const std::string& place) {
  std::visit(
      [&](auto& list) {
        for (const auto token : tokens) {
          if (token >= reading_.vocabulary)
            io::fail(place, ": one of its tokens is number ", token, ", and the model's vocabulary has ",
                     reading_.vocabulary, "; the tokenizer belongs to another model");
          list.push_back(static_cast<typename std::decay_t<decltype(list)>::value_type>(token));
        }
      },
      held_);
}

void Documents::append(std::string_view text, Tokenizer::Part part, const std::string& place) {
  if (reading_.tokenizer == nullptr)
    append_tokens(std::span(reinterpret_cast<const std::uint8_t*>(text.data()), text.size()), place);
  else
    append_tokens(reading_.tokenizer->encode(text, part, [&](std::size_t bytes) { show_progress(bytes); }),
                  place);
}

void Documents::leave_out(std::int64_t begin) {
  std::visit([&](auto& list) { list.resize(static_cast<std::size_t>(begin - mapped_)); }, held_);
  ++empty_;
}

void Documents::finish(Document document, const std::string& place) {
  std::visit(
      [&](auto& list) {
        // What ends in a prompt is a completion without a text: its end token is all that it says.
        if (reading_.end && (at() == document.counted || list.back() != *reading_.end))
          list.push_back(static_cast<typename std::decay_t<decltype(list)>::value_type>(*reading_.end));
      },
      held_);
  document.end = at();
  if (document.end == document.begin) return leave_out(document.begin);
  documents_.push_back(document);
  check_limit(0, place);
}

void Documents::check_limit(std::size_t more, const std::string& place) const {
  if (memory() + static_cast<std::int64_t>(more) > reading_.limit)
    io::fail(place, ": what is read up to here takes more than the ", reading_.limit >> 20,
             " MiB of memory that are free for it; give one file of bytes, or of tokens ('scruple "
             "tokenize'), which "
             "is not read whole");
}

// A text is read whole: beside it there are its characters made valid, normalised, and their tokens.
void Documents::check_fits(std::size_t bytes, const std::string& place) const {
  constexpr std::int64_t kCopies = 4;
  if (static_cast<std::int64_t>(bytes) > reading_.limit / kCopies)
    io::fail(place, ": a text of ", bytes >> 20, " MiB takes about ", kCopies,
             " times that while it becomes tokens, and ", reading_.limit >> 20,
             " MiB are free; cut it into several files of one folder");
}

void Documents::show_progress(std::size_t here) {
  constexpr std::int64_t kEvery = 1 << 18;
  const std::int64_t done = std::min(bytes_done_ + static_cast<std::int64_t>(here), bytes_);
  if (!reading_.progress || (done < bytes_told_ + kEvery && done < bytes_)) return;
  bytes_told_ = done;
  reading_.progress(done, bytes_);
}

std::int64_t Documents::held() const {
  return std::visit([](const auto& list) { return static_cast<std::int64_t>(list.size()); }, held_);
}

std::int64_t Documents::size() const { return at(); }

std::int64_t Documents::memory() const {
  const auto bytes_of = [](const auto& list) {
    return static_cast<std::int64_t>(list.capacity() * sizeof(*list.data()));
  };
  return std::visit(bytes_of, held_) + bytes_of(documents_) + bytes_of(gaps_);
}

void Documents::remove_if(const std::function<bool(const Document&)>& is_gone) {
  std::erase_if(documents_, is_gone);
}

std::uint32_t Documents::crc32(const Stretch& source) const {
  std::uint32_t crc = std::visit([](auto list) { return io::crc32(std::as_bytes(list)); }, source.tokens);
  const auto inside = [&]<class Item>(const std::vector<Item>& items) {
    const auto starts_before = [](const Item& item, std::int64_t place) { return item.begin < place; };
    const auto first = std::lower_bound(items.begin(), items.end(), source.begin, starts_before);
    return std::span(first,
                     std::lower_bound(first, items.end(), source.begin + source.size(), starts_before));
  };
  const std::span<const Document> documents = inside(documents_);
  const std::span<const Gap> gaps = inside(gaps_);
  if (documents.size() == 1 && documents[0].counted == source.begin && gaps.empty()) return crc;
  const auto add = [&](const auto& item) { crc = io::crc32(std::as_bytes(std::span(&item, 1)), crc); };
  // Places count from the source's begin, so that what stands before it changes nothing.
  for (const auto& [begin, end, counted] : documents)
    add(Document{begin - source.begin, end - source.begin, counted - source.begin});
  for (const auto& [begin, end] : gaps) add(Gap{begin - source.begin, end - source.begin});
  return crc;
}

std::uint32_t Documents::crc32_of_sample(const Stretch& source) {
  constexpr std::size_t kBlocks = 256, kBlock = std::size_t{1} << 20;
  std::uint32_t crc = 0;
  for (std::size_t i = 0; i < kBlocks; ++i)
    crc = io::crc32(source.file.subspan((source.file.size() - kBlock) * i / (kBlocks - 1), kBlock), crc);
  return crc;
}

}  // namespace scruple::train
