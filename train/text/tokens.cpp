#include "train/text/tokens.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <span>

#include "io/file.h"

namespace scruple::train {
namespace {

static_assert(std::endian::native == std::endian::little);

using Header = std::array<std::int32_t, 256>;  // magic, version, tokens, zeros
constexpr std::int32_t kMagic16 = 20240520, kVersion16 = 1;
constexpr std::int32_t kMagic32 = 20240801, kVersion32 = 7;
constexpr std::int32_t kMagicFlags = 20261119, kVersionFlags = 1;
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

void write_tokens(const std::string& path, TokenFile form, const std::vector<Token>& tokens,
                  std::int64_t vocabulary, std::span<const std::uint8_t> flags) {
  const bool narrow = vocabulary <= kMost16;
  if (form == TokenFile::nanogpt && !narrow)
    io::fail(path, ": nanoGPT's files hold 16-bit tokens, and a vocabulary of ", vocabulary,
             " needs more; write llm.c's form");
  if (form == TokenFile::llm_c && tokens.size() > INT32_MAX)
    io::fail(path, ": llm.c's header counts to 2,147,483,647, and there are ", tokens.size(),
             " tokens; write several files");
  const bool is_ours = form == TokenFile::scruple;
  if (flags.size() != (is_ours ? tokens.size() : 0))
    io::fail(path, ": there are flags of ", flags.size(), " tokens");
  io::NewFile file(path);
  std::uint64_t at = 0;
  const auto write = [&](std::span<const std::byte> bytes) {
    file.write(at, bytes);
    at += bytes.size();
  };
  if (form == TokenFile::llm_c) {
    Header header{narrow ? kMagic16 : kMagic32, narrow ? kVersion16 : kVersion32,
                  static_cast<std::int32_t>(tokens.size())};
    write(bytes_of(header));
  }
  if (is_ours) {
    Header header{kMagicFlags, kVersionFlags};
    const std::uint64_t count = tokens.size();
    std::memcpy(&header[2], &count, sizeof count);
    header[4] = narrow ? 2 : 4;
    write(bytes_of(header));
  }
  if (narrow)
    write(bytes_of(std::vector<std::uint16_t>(tokens.begin(), tokens.end())));
  else
    write(bytes_of(tokens));
  write(bytes_of(flags));
  file.finish();
}

// Of our own form.
static TokenSpan flagged_tokens_in(const Header& header, std::span<const std::byte> body,
                                   const std::string& path) {
  if (header[1] != kVersionFlags || (header[4] != 2 && header[4] != 4))
    io::fail(path, ": its header says version ", header[1], " and ", header[4],
             " bytes per token, and version ", kVersionFlags,
             " with 2 or 4 is read; write it again with this 'scruple tokenize'");
  std::uint64_t count = 0;
  std::memcpy(&count, &header[2], sizeof count);
  const auto size = static_cast<std::uint64_t>(header[4]) + 1;
  if (count > body.size() / size || count * size != body.size())
    io::fail(path, ": its header counts ", count, " tokens of ", size, " bytes, and ", body.size(),
             " bytes follow; the file was cut or is still being written");
  const auto tokens = body.first(count * (size - 1));
  return header[4] == 2 ? span_of<std::uint16_t>(tokens) : span_of<std::uint32_t>(tokens);
}

std::span<const std::uint8_t> flags_in(std::span<const std::byte> bytes) {
  Header header{};
  if (bytes.size() < sizeof header) return {};
  std::memcpy(header.data(), bytes.data(), sizeof header);
  if (header[0] != kMagicFlags) return {};
  const std::size_t count = (bytes.size() - sizeof header) / static_cast<std::size_t>(header[4] + 1);
  const auto flags = bytes.last(count);
  return {reinterpret_cast<const std::uint8_t*>(flags.data()), flags.size()};
}

TokenSpan tokens_in(std::span<const std::byte> bytes, const std::string& path) {
  Header header{};
  if (bytes.size() >= sizeof header) std::memcpy(header.data(), bytes.data(), sizeof header);
  if (header[0] == kMagicFlags) return flagged_tokens_in(header, bytes.subspan(sizeof header), path);
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
