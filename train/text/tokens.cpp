#include "train/text/tokens.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <filesystem>
#include <span>

#include "io/file.h"

namespace scruple::train {
namespace {

static_assert(std::endian::native == std::endian::little);

using Header = std::array<std::int32_t, 256>;  // magic, version, tokens, zeros
constexpr std::int32_t kMagic16 = 20240520, kVersion16 = 1;
constexpr std::int32_t kMagic32 = 20240801, kVersion32 = 7;
constexpr std::int32_t kMagicFlags = 20261119, kVersionFlags = 1, kVersionPlain = 2;
constexpr std::int64_t kMost16 = 1 << 16;

template <class T>
std::span<const std::byte> bytes_of(const T& values) {
  return std::as_bytes(std::span(values));
}

template <class T>
TokenSpan span_of(std::span<const std::byte> bytes) {  // aligned: a header of 1,024 bytes, or none
  return std::span(reinterpret_cast<const T*>(bytes.data()), bytes.size() / sizeof(T));
}

}  // namespace

// ---- Writing ----

struct TokenWriter::Shard {
  explicit Shard(const std::string& name) : path(name), file(name) {}
  std::string path;
  io::NewFile file;
  std::optional<io::NewFile> flags;  // beside it, until all tokens are there
  std::uint64_t count = 0;
  bool has_prompts = false;
};

TokenWriter::TokenWriter(Target target) : target_(std::move(target)) {
  if (target_.form == TokenFile::nanogpt && target_.vocabulary > kMost16)
    io::fail(target_.path, ": nanoGPT's files hold 16-bit tokens, and a vocabulary of ", target_.vocabulary,
             " needs more; write llm.c's form");
  if (target_.form.value_or(TokenFile::scruple) != TokenFile::scruple) target_.has_flags = false;
  if (target_.form == TokenFile::scruple) target_.has_flags = true;
  if (target_.shard_tokens > 0 && std::filesystem::exists(next_path()))
    io::fail(next_path(),
             " is there already, and more shards may be, which would be taken for this one's; remove "
             "them, or choose another --out");
  shard();
}

TokenWriter::Shard& TokenWriter::shard() {
  if (!shard_) shard_ = std::make_unique<Shard>(next_path());
  return *shard_;
}

TokenWriter::~TokenWriter() {
  std::error_code ignored;
  if (!done_)
    for (const std::string& path : paths_) std::filesystem::remove(path, ignored);
}

std::string TokenWriter::next_path() const {
  if (target_.shard_tokens == 0) return target_.path;
  std::string number = std::to_string(paths_.size());
  number.insert(0, 5 - std::min<std::size_t>(number.size(), 5), '0');
  const bool has_ending = target_.path.ends_with(".bin");
  return target_.path.substr(0, target_.path.size() - (has_ending ? 4 : 0)) + "-" + number + ".bin";
}

void TokenWriter::write(std::span<const Token> tokens, std::span<const std::uint8_t> flags,
                        bool has_prompts) {
  const auto limit = static_cast<std::uint64_t>(target_.shard_tokens);
  while (limit > 0 && !tokens.empty()) {
    const bool begins = (flags[0] & kBegins) != 0;
    std::size_t end = 1;  // of this document
    while (end < flags.size() && (flags[end] & kBegins) == 0) ++end;
    if (begins && shard().count > 0 && shard().count + end > limit) finish_shard();
    if (shard().count == limit) finish_shard();
    const std::size_t here = std::min<std::size_t>(end, limit - shard().count);
    append(tokens.first(here), flags.first(here), has_prompts);
    tokens = tokens.subspan(here), flags = flags.subspan(here);
  }
  append(tokens, flags, has_prompts);
}

void TokenWriter::append(std::span<const Token> tokens, std::span<const std::uint8_t> flags,
                         bool has_prompts) {
  if (tokens.empty()) return;
  Shard& shard = this->shard();
  const bool narrow = target_.vocabulary <= kMost16;
  const std::uint64_t begin = target_.form == TokenFile::nanogpt ? 0 : sizeof(Header);
  const std::uint64_t size = narrow ? 2 : 4;
  if (target_.form == TokenFile::llm_c && shard.count + tokens.size() > INT32_MAX)
    io::fail(shard.path,
             ": llm.c's header counts to 2,147,483,647, and there are more tokens; write shards "
             "(--shard-tokens 100000000)");
  if (narrow)
    shard.file.write(begin + shard.count * size,
                     bytes_of(std::vector<std::uint16_t>(tokens.begin(), tokens.end())));
  else
    shard.file.write(begin + shard.count * size, std::as_bytes(tokens));
  if (target_.has_flags) {
    if (!shard.flags) shard.flags.emplace(shard.path + ".flags");
    shard.flags->write(shard.count, std::as_bytes(flags));
    shard.has_prompts |= has_prompts || std::any_of(flags.begin(), flags.end(),
                                                    [](auto flag) { return (flag & kCounts) == 0; });
  }
  shard.count += tokens.size();
}

void TokenWriter::finish_shard() {
  Shard& shard = *shard_;
  const bool narrow = target_.vocabulary <= kMost16;
  TokenFile form = target_.form.value_or(shard.has_prompts ? TokenFile::scruple : TokenFile::llm_c);
  const bool has_flags = form == TokenFile::scruple;
  if (form == TokenFile::llm_c && shard.count > INT32_MAX) form = TokenFile::scruple;
  Header header{narrow ? kMagic16 : kMagic32, narrow ? kVersion16 : kVersion32,
                static_cast<std::int32_t>(shard.count)};
  if (form == TokenFile::scruple) {
    header = {kMagicFlags, has_flags ? kVersionFlags : kVersionPlain};
    std::memcpy(&header[2], &shard.count, sizeof shard.count);
    header[4] = narrow ? 2 : 4;
  }
  if (form != TokenFile::nanogpt) shard.file.write(0, bytes_of(header));
  std::vector<std::byte> part(std::min<std::uint64_t>(shard.count, 1 << 20));
  const std::uint64_t tokens_end = sizeof header + shard.count * (narrow ? 2 : 4);
  for (std::uint64_t at = 0; has_flags && at < shard.count; at += part.size()) {
    part.resize(std::min<std::uint64_t>(part.size(), shard.count - at));
    shard.flags->read(at, part);
    shard.file.write(tokens_end + at, part);
  }
  shard.file.finish();
  paths_.push_back(shard.path);
  shard_.reset();
}

void TokenWriter::finish() {
  if (shard_ != nullptr) finish_shard();
  done_ = true;
}

void write_tokens(const std::string& path, TokenFile form, const std::vector<Token>& tokens,
                  std::int64_t vocabulary, std::span<const std::uint8_t> flags) {
  if (flags.size() != (form == TokenFile::scruple ? tokens.size() : 0))
    io::fail(path, ": there are flags of ", flags.size(), " tokens");
  TokenWriter writer({path, form, vocabulary});
  writer.write(tokens, flags);
  writer.finish();
}

// ---- Reading ----

// Of our own form.
static TokenSpan own_tokens_in(const Header& header, std::span<const std::byte> body,
                               const std::string& path) {
  const bool has_flags = header[1] == kVersionFlags;
  if ((!has_flags && header[1] != kVersionPlain) || (header[4] != 2 && header[4] != 4))
    io::fail(path, ": its header says version ", header[1], " and ", header[4],
             " bytes per token, and version ", kVersionFlags, " or ", kVersionPlain,
             " with 2 or 4 is read; write it again with this 'scruple tokenize'");
  std::uint64_t count = 0;
  std::memcpy(&count, &header[2], sizeof count);
  const auto size = static_cast<std::uint64_t>(header[4]) + (has_flags ? 1 : 0);
  if (count > body.size() / size || count * size != body.size())
    io::fail(path, ": its header counts ", count, " tokens of ", size, " bytes, and ", body.size(),
             " bytes follow; the file was cut or is still being written");
  const auto tokens = body.first(count * static_cast<std::uint64_t>(header[4]));
  return header[4] == 2 ? span_of<std::uint16_t>(tokens) : span_of<std::uint32_t>(tokens);
}

std::span<const std::uint8_t> flags_in(std::span<const std::byte> bytes) {
  Header header{};
  if (bytes.size() < sizeof header) return {};
  std::memcpy(header.data(), bytes.data(), sizeof header);
  if (header[0] != kMagicFlags || header[1] != kVersionFlags) return {};
  const std::size_t count = (bytes.size() - sizeof header) / static_cast<std::size_t>(header[4] + 1);
  const auto flags = bytes.last(count);
  return {reinterpret_cast<const std::uint8_t*>(flags.data()), flags.size()};
}

TokenSpan tokens_in(std::span<const std::byte> bytes, const std::string& path) {
  Header header{};
  if (bytes.size() >= sizeof header) std::memcpy(header.data(), bytes.data(), sizeof header);
  if (header[0] == kMagicFlags) return own_tokens_in(header, bytes.subspan(sizeof header), path);
  const bool narrow = header[0] == kMagic16;
  if (!narrow && header[0] != kMagic32) {
    if (bytes.size() % 2 != 0)
      io::fail(path, ": ", bytes.size(),
               " bytes are no whole number of 16-bit tokens, and llm.c's header is missing; write it with "
               "'scruple "
               "tokenize'");
    return span_of<std::uint16_t>(bytes);
  }
  if (header[1] != (narrow ? kVersion16 : kVersion32))
    io::fail(path, ": llm.c's header says version ", header[1], ", and ", narrow ? kVersion16 : kVersion32,
             " is read; write it with 'scruple tokenize'");
  const std::span<const std::byte> body = bytes.subspan(sizeof header);
  const std::int64_t size = narrow ? 2 : 4;
  if (header[2] < 0 || static_cast<std::int64_t>(body.size()) != header[2] * size)
    io::fail(path, ": its header counts ", header[2], " tokens of ", size, " bytes, and ", body.size(),
             " bytes follow; the file was cut or is still being written");
  return narrow ? span_of<std::uint16_t>(body) : span_of<std::uint32_t>(body);
}

std::vector<Token> read_tokens(const std::string& path) {
  const io::MappedFile file(path);
  return std::visit([](auto tokens) { return std::vector<Token>(tokens.begin(), tokens.end()); },
                    tokens_in(file.bytes(), path));
}

}  // namespace scruple::train
