// What --data names: texts, JSON lines and files of tokens of any size, several of them, and the words of what is refused.
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <set>
#include <vector>

#include "io/crc32.h"
#include "tests/windows.h"
#include "train/text/data.h"
#include "train/text/jsonl.h"

namespace scruple_tests {
namespace {

namespace io = scruple::io;

// ---- Tokens ----

TEST_F(DataTest, FilesOfTokensStayMapped) {
  const std::vector<Token> tokens = {1, 2, 9, 3, 4, 5, 9, 6, 9, 7, 8, 1};
  for (const auto& [form, vocabulary] :
       {std::pair(TokenFile::llm_c, 10), {TokenFile::llm_c, 100'000}, {TokenFile::nanogpt, 10}}) {
    write_tokens(path("tokens.bin"), form, tokens, vocabulary);
    const Data data(path("tokens.bin"), isolated(4), {.end = 9, .vocabulary = 10});
    EXPECT_EQ(data.size(), 12);
    EXPECT_EQ(data.documents(), 4);  // the last has no end
    const Window window = read(data.training(), 1);
    EXPECT_EQ(window.tokens, (Numbers{2, 9, 3, 4}));
    EXPECT_EQ(window.targets, (Numbers{9, kNoTarget, 4, 5}));
    EXPECT_EQ(window.starts, (Numbers{0, 0, 2, 2}));
    EXPECT_LT(data.memory(), 500);
    expect_refused("no error", path("tokens.bin"), packed(4), {.vocabulary = 9 + 247});
    write_tokens(path("wide.bin"), form, {1, 2, 3, 300, 5}, vocabulary);
    expect_refused("wide.bin: token 3 is number 300, and the model's vocabulary has 256", path("wide.bin"),
                   packed(1));
  }
  expect_refused("no whole number of 16-bit tokens", put("abc", "odd.bin"), packed(1));
}

TEST_F(DataTest, ATokenizersTextIsTokensAndAnEnd) {
  Tokenizer tokenizer = marked(true);
  const Reading reading = {.tokenizer = &tokenizer, .end = 8, .vocabulary = 9};
  // <s> _a _b </s>; the end is there already
  const Data data(put("a b", "text"), packed(1), reading);
  EXPECT_EQ(data.size(), 4);
  EXPECT_EQ(read(data.training(), 0).tokens, Numbers{7});
  EXPECT_EQ(read(data.training(), 0).targets, Numbers{4});
  EXPECT_EQ(read(data.validation(), 0).targets, Numbers{8});
  // A prompt has what stands before a text, the completion goes on without a mark of its own.
  const std::string file = put(line("a", "b a") + line("a", " b</s>") + line("b"), "notes.jsonl");
  const Data notes(file, {.context = 6}, reading);
  EXPECT_EQ(read(notes.training(), 0).tokens, (Numbers{7, 4, 3, 4, 0, 0}));  // an end is predicted, not shown
  EXPECT_EQ(read(notes.training(), 0).targets, (Numbers{-1, 3, 4, 8, -1, -1}));
  EXPECT_EQ(read(notes.training(), 1).tokens, (Numbers{7, 4, 5, 0, 0, 0}));
  EXPECT_EQ(read(notes.training(), 1).targets, (Numbers{-1, 5, 8, -1, -1, -1}));
  EXPECT_EQ(read(notes.validation(), 0).targets, (Numbers{5, 8, -1, -1, -1, -1}));
  Reading small = reading;
  small.vocabulary = 5;
  expect_refused("the end token is number 8, and the model's vocabulary has 5", file, {.context = 6}, small);
  small.end = {};
  expect_refused("notes.jsonl, line 1: one of its tokens is number 7, and the model's vocabulary has 5", file,
                 {.context = 6}, small);
}

TEST_F(DataTest, TokensTakeAsManyBitsAsTheVocabulary) {
  Tokenizer tokenizer = marked();
  put(std::string(10'000, 'a'), "text");
  for (const auto& [vocabulary, bytes] : {std::pair(200, 1), {256, 1}, {257, 2}, {65'536, 2}, {65'537, 4}}) {
    const Data data(path("text"), packed(4), {.tokenizer = &tokenizer, .vocabulary = vocabulary});
    EXPECT_EQ(data.size(), 10'000);
    EXPECT_GE(data.memory(), 10'000 * bytes);
    EXPECT_LE(data.memory(), 20'000 * bytes + 100);
    EXPECT_EQ(read(data.training(), 0).tokens, (Numbers{4, 2, 2, 2}));
  }
}

TEST_F(DataTest, BrokenUtf8IsReplacedAndCounted) {
  Tokenizer tokenizer = marked();
  const Reading reading = {.tokenizer = &tokenizer, .vocabulary = 9};
  const Data text(put("a\xFF\xC3 a a a", "text"), packed(1), reading);
  EXPECT_EQ(text.replaced(), 2);
  EXPECT_EQ(read(text.training(), 0).targets, Numbers{6});
  const Data lines(put(line("a\xFF") + line("a a a\xC3"), "notes.jsonl"), packed(1), reading);
  EXPECT_EQ(lines.replaced(), 2);
  EXPECT_EQ(Data(put("\xFF\xFF\xFF\xFF", "bytes"), packed(1)).replaced(), 0);  // bytes may be any
}

TEST_F(DataTest, WhatIsNoTextIsRefused) {
  Tokenizer words = marked();
  const Reading with_words = {.tokenizer = &words, .vocabulary = 9};
  const std::string rest = std::string(4, '\0') + std::string(200, 'a');
  for (const std::string begin :
       {"PAR1", "ARROW1", "PK\x03\x04", "\x1F\x8B", "\xFD\x37zXZ", "\x28\xB5\x2F\xFD", "%PDF-", "BZh11AY&SY"})
    for (const Reading& reading : {Reading{}, with_words})
      expect_refused("data is a", put(begin + rest, "data"), packed(4), reading);
  expect_refused("is a Parquet file, and a text was expected; write its rows as *.jsonl",
                 put("PAR1" + rest, "data.parquet"), packed(4));
  expect_refused("is an Arrow stream", put("\xFF\xFF\xFF\xFF" + rest, "data.arrow"), packed(4));
  // Lines of JSON by each of their names, and a text that begins as they do.
  const std::string lines = line("aaaa") + line("bbbbbb");
  for (const char* const name : {"a.jsonl", "a.ndjson", "a.JSONL"})
    EXPECT_EQ(Data(put(lines, name), packed(4)).size(), 10) << name;
  // JSON in one piece, or lines of it under another name.
  for (const char* const text :
       {"\n [{\"text\": \"a\"}, {\"text\": \"b\"}]", "{\"text\": \"a\"}\n{\"text\": \"b\"}\n"}) {
    expect_refused("one {\"text\": ...} per line", put(text, "notes.json"), packed(4));
    EXPECT_NO_THROW(Data(put(text, "notes.txt"), packed(4)));
  }
  // Bytes are bytes; of a text a tokenizer's reader wants UTF-8.
  const std::string binary = put("aaaaaaaaa" + rest, "binary");
  EXPECT_NO_THROW(Data(binary, packed(4)));
  expect_refused("has a NUL byte at byte 9, so it is no text", binary, packed(4), with_words);
}

TEST_F(DataTest, LongTextsShowTheirProgress) {
  Tokenizer tokenizer = marked();
  std::string text, lines;
  while (text.size() < 1'000'000) text += "a b ";
  for (int i = 0; i < 3; ++i) lines += line(text);
  for (int i = 0; i < 1000; ++i) lines += line("a");
  std::filesystem::create_directory(path("texts"));
  put(text, "texts/a.txt");
  put(lines, "texts/b.jsonl");
  const auto size = static_cast<std::int64_t>(text.size() + lines.size());
  std::vector<std::int64_t> seen;
  const auto note = [&](std::int64_t done, std::int64_t all) {
    EXPECT_EQ(all, size);
    seen.push_back(done);
  };
  const Data data(path("texts"), packed(4), {.tokenizer = &tokenizer, .vocabulary = 9, .progress = note});
  EXPECT_GT(seen.size(), 12u);
  EXPECT_LT(seen.size(), 20u);
  EXPECT_TRUE(std::is_sorted(seen.begin(), seen.end()));
  EXPECT_EQ(seen.back(), size);
}

TEST_F(DataTest, WhatDoesNotFitIntoMemoryIsRefused) {
  Tokenizer tokenizer = marked();
  put(std::string(3 << 20, 'a'), "text");
  const Reading reading = {.tokenizer = &tokenizer, .vocabulary = 9, .limit = 4 << 20};
  expect_refused("a text of 3 MiB takes about 4 times that", path("text"), packed(4), reading);
  std::string lines;
  for (int i = 0; i < 3000; ++i) lines += line(std::string(1000, 'a'));
  put(lines, "notes.jsonl");
  expect_refused("what is read up to here takes more than the 1 MiB", path("notes.jsonl"), packed(4),
                 {.limit = 1 << 20});
  put("{\"text\": \"" + std::string(1 << 20, 'a') + "\"}", "notes.jsonl");
  expect_refused("notes.jsonl, line 1: a text of 1 MiB", path("notes.jsonl"), packed(4), {.limit = 2 << 20});
}

// ---- Several sources ----

// All windows of an epoch, in the order in which they are drawn.
std::vector<Numbers> drawn(const Windows& windows, std::uint64_t count, std::uint64_t seed = 3) {
  std::vector<Numbers> all;
  for (std::uint64_t i = 0; i < count; ++i) {
    const Window window = read(windows, windows.drawn(seed, i));
    all.push_back(window.tokens);
    all.back().insert(all.back().end(), window.targets.begin(), window.targets.end());
    all.back().insert(all.back().end(), window.starts.begin(), window.starts.end());
  }
  return all;
}

TEST_F(DataTest, SourcesFollowEachOtherAsIfTheyWereOne) {
  std::vector<Token> tokens;
  std::vector<std::uint8_t> flags;
  for (std::size_t document = 0; document < 60; ++document)
    for (std::size_t i = 0; i < 5 + document % 7; ++i) {
      tokens.push_back(static_cast<Token>(100 + document * 2 + i % 2));
      flags.push_back(static_cast<std::uint8_t>((i == 0 ? kBegins : 0) | (i > document % 3 ? kCounts : 0)));
    }
  const std::pair<TokenFile, Cutting> cases[] = {{TokenFile::nanogpt, packed(8)},
                                                 {TokenFile::llm_c, isolated(8)},
                                                 {TokenFile::scruple, packed(8)},
                                                 {TokenFile::scruple, {.context = 16}},
                                                 {TokenFile::scruple, padded(6)}};
  for (const auto& [form, cutting] : cases) {
    const bool has_flags = form == TokenFile::scruple;
    for (const std::int64_t shard : {0, 37, 64}) {
      TokenWriter writer({path("all.bin"), form, 300, shard});
      writer.write(tokens, flags);
      writer.finish();
      std::vector<std::string> paths = writer.paths();
      EXPECT_EQ(paths.size(), shard == 0 ? 1u : shard == 37 ? 14u : 8u);
      const Reading reading = {.end = {}, .vocabulary = 300};
      const Data whole(path("all.bin"), cutting, reading), parts({{paths}}, cutting, reading);
      EXPECT_EQ(parts.size(), static_cast<std::int64_t>(tokens.size()));
      EXPECT_EQ(parts.sources().size(), paths.size());
      if (has_flags) {
        EXPECT_EQ(parts.documents(), whole.documents());
      }
      if (has_flags || !cutting.isolate) {  // without an end token a file is one document
        EXPECT_EQ(drawn(parts.training(), 50), drawn(whole.training(), 50));
        EXPECT_EQ(drawn(parts.validation(), 5), drawn(whole.validation(), 5));
      }
      for (const std::string& path : paths)
        if (shard > 0) std::filesystem::remove(path);
    }
  }
  // A text between files of tokens, and standard input's place among them.
  write_tokens(path("a.bin"), TokenFile::nanogpt, {65, 66, 67}, 256);
  put("defg", "b.txt");
  put(line("hij") + line("k"), "c.jsonl");
  write_tokens(path("d.bin"), TokenFile::nanogpt, {76, 77}, 256);
  Cutting all = packed(11);
  all.validation_share = 0;
  const Data mixed({{{path("a.bin"), path("b.txt"), path("c.jsonl"), path("d.bin")}}}, all);
  EXPECT_EQ(shown(read(mixed.training(), 0).tokens) + shown(read(mixed.training(), 0).targets),
            "ABCdefghijkBCdefghijkL");
  EXPECT_EQ(mixed.documents(), 5);
  EXPECT_EQ(mixed.sources()[2].crc32, Data(path("c.jsonl"), {.context = 1}).crc32());
}

TEST_F(DataTest, AMixtureIsEvenAndSeesEachPartWhole) {
  std::vector<Share> shares;
  const double weights[] = {0.5, 0.3, 0.15, 0.0499, 0.0001};
  for (std::size_t i = 0; i < 5; ++i) {
    const std::string name = "part" + std::to_string(i) + ".jsonl";
    std::string lines;
    for (std::size_t d = 0; d < 20 + 10 * i; ++d)
      lines += line(std::string(1, static_cast<char>('a' + i)) + "xx");
    shares.push_back({{put(lines, name)}, weights[i]});
  }
  Cutting cutting = padded(4);
  cutting.validation_share = 0.1;
  const Data data(shares, cutting);
  const Windows windows = data.training();
  EXPECT_EQ(windows.count(), 18 + 27 + 36 + 45 + 54);  // an epoch is as many as all parts have
  EXPECT_EQ(data.validation().count(), 2 + 3 + 4 + 5 + 6);
  std::vector<std::uint64_t> had(5);
  std::vector<std::set<std::int64_t>> seen(5);
  const std::size_t sizes[] = {18, 27, 36, 45, 54};
  bool is_regular = true;
  for (std::uint64_t i = 0; i < 20'000; ++i) {
    const auto [part, number] = windows.turn(7, i);
    ASSERT_EQ(number, had[part]++);
    is_regular &= part == windows.turn(8, i).part;
    // Each part's epochs have all of its windows.
    const std::int64_t window = windows.drawn(7, i);
    ASSERT_EQ(read(windows, window).tokens[0], static_cast<std::int32_t>('a' + part));
    ASSERT_TRUE(seen[part].insert(window).second) << i;
    if (seen[part].size() == sizes[part]) seen[part].clear();
    for (std::size_t p = 0; p < 5; ++p)
      ASSERT_LT(std::abs(static_cast<double>(had[p]) - static_cast<double>(i + 1) * weights[p]), 3) << i;
  }
  EXPECT_FALSE(is_regular) << "the seed decides whose turn is first";
  EXPECT_EQ(windows.turn(7, std::uint64_t{1} << 62).number, windows.turn(7, std::uint64_t{1} << 62).number);
  // Two parts of the same file have orders of their own.
  const Data twice({shares[4], shares[4]}, cutting);
  std::vector<std::int64_t> orders[2];
  for (std::uint64_t i = 0; i < 108; ++i) {
    const std::int64_t window = twice.training().drawn(7, i);
    orders[window / 54].push_back(window % 54);
  }
  EXPECT_EQ(orders[0].size(), 54u);
  EXPECT_NE(orders[0], orders[1]);
}

TEST_F(DataTest, WhatDataNames) {
  for (const char* name : {"a-1.bin", "a-2.bin", "b:0.5", "c.txt"}) put("xxxxxxxx", name);
  const auto names = [&](const std::vector<std::string>& arguments) {
    std::string text;
    std::vector<std::string> whole;
    for (const std::string& argument : arguments) whole.push_back(path(argument));
    for (const Share& share : shares_of(whole)) {
      for (const std::string& file : share.paths)
        text += std::filesystem::path(file).filename().string() + " ";
      text += std::to_string(share.weight).substr(0, 4) + "; ";
    }
    return text;
  };
  EXPECT_EQ(names({"c.txt", "a-*.bin", "b:0.5"}), "c.txt a-1.bin a-2.bin b:0.5 1.00; ");
  EXPECT_EQ(names({"a-?.bin:3", "c.txt:0.25", "b:0.5:1e-1"}),
            "a-1.bin a-2.bin 3.00; c.txt 0.25; b:0.5 0.10; ");
  EXPECT_EQ(names({"missing"}), "missing 1.00; ");  // whoever reads it says so
  EXPECT_EQ(shares_of({"-"})[0].paths[0], "-");
  for (const char* weight : {"0", "-1", "0.5x", "", "nan", "inf", "1e999"})
    expect_words(
        message_of([&] {
          names({std::string("c.txt:") + weight, "a-1.bin:1"});
        }),
        std::string("c.txt:") + weight + ": there is no such file, and '" + weight + "' is no weight above 0",
        weight);
  expect_words(message_of([&] {
                 names({"c.txt:1", "a-1.bin"});
               }),
               "a-1.bin has no weight, and others have", "some");
  expect_words(message_of([&] { names({"z*.bin"}); }), "z*.bin: there is no such file; check the pattern",
               "pattern");
}

// ---- Large files ----

TEST_F(DataTest, AFileOfMoreThan4GiBOfTokensIsNotRead) {
  constexpr std::int64_t kCount = (std::int64_t{1} << 32) + 1000;
  const std::string name = path("large.bin");
  {
    std::ofstream file(name, std::ios::binary);
    const std::int32_t header[256] = {20261119, 2, static_cast<std::int32_t>(kCount & 0xFFFFFFFF),
                                      static_cast<std::int32_t>(kCount >> 32), 4};
    file.write(reinterpret_cast<const char*>(header), sizeof header);
  }
  std::filesystem::resize_file(name, 1024 + 4 * static_cast<std::uintmax_t>(kCount));
  const auto write = [&](std::int64_t at, std::uint32_t token) {
    std::fstream file(name, std::ios::binary | std::ios::in | std::ios::out);
    file.seekp(1024 + 4 * at);
    file.write(reinterpret_cast<const char*>(&token), sizeof token);
  };
  write(kCount - 1, 99'999);
  const Reading reading = {.end = 7, .vocabulary = 100'000};
  const Data data(name, packed(100), reading);
  EXPECT_EQ(data.size(), kCount);
  EXPECT_LT(data.memory(), 1000);
  EXPECT_EQ(data.validation().places(), kCount / 20 - 100);
  EXPECT_EQ(read(data.validation(), data.validation().places() - 1).targets.back(), 99'999);
  EXPECT_GT(data.training().drawn(1, 5), 0);
  const std::uint32_t crc = data.sources()[0].crc32;
  EXPECT_TRUE(data.sources()[0].is_sample);
  write(kCount - 2, 5);  // in the last block of the sample
  EXPECT_NE(Data(name, packed(100), reading).sources()[0].crc32, crc);
  rusage used{};
  getrusage(RUSAGE_SELF, &used);
  EXPECT_LT(used.ru_maxrss, 2'000'000) << "KiB";  // of 16 GiB
  // What is out of the vocabulary is found when it is read.
  write(kCount - 1, 100'000);
  expect_words(message_of([&] { read(data.validation(), data.validation().places() - 1); }),
               "large.bin: token 4294968295 is number 100000, and the model's vocabulary has 100000",
               "vocabulary");
  // Shortened, it is refused; as is a count that lies.
  std::filesystem::resize_file(name, 1024 + 4 * static_cast<std::uintmax_t>(kCount - 1));
  expect_refused("its header counts 4294968296 tokens of 4 bytes, and 17179873180 bytes follow", name,
                 packed(100), reading);
}

// ---- What a resumed run compares ----

TEST_F(DataTest, TheChecksumIsOfTokensAndMasks) {
  const auto crc = [&](const std::string& lines) {
    return Data(put(lines, "notes.jsonl"), packed(2), {.end = kEnd}).crc32();
  };
  const std::uint32_t one = crc(line("abcd") + line("efgh"));
  EXPECT_EQ(one, crc("{\"more\": 1, \"text\": \"\\u0061bcd\"}\r\n\n{\"text\": \"efgh\"}"));
  EXPECT_NE(one, crc(line("abcd") + line("efgi")));
  EXPECT_NE(one, crc(line("abcd|efgh")));                // documents
  EXPECT_NE(one, crc(line("ab", "cd") + line("efgh")));  // masks
  EXPECT_NE(crc(line("ab", "cdef")), crc(line("abc", "def")));
}

// ---- Hostile lines ----

TEST_F(DataTest, ALineThatIsNoDocumentIsNamed) {
  const std::pair<const char*, const char*> cases[] = {
      {R"({"prompt": "a", "completion": 17})", "\"completion\" is a number; it must be text"},
      {R"({"text": null})", "\"text\" is null; it must be text"},
      {R"({"text": ["a"]})", "\"text\" is a list; it must be text"},
      {R"({"text": {"text": "a"}})", "\"text\" is an object; it must be text"},
      {R"({"text": true})", "\"text\" is true or false; it must be text"},
      {R"({"text": "a", "text": "b"})", "\"text\" stands twice"},
      {R"({"text": "a", "prompt": "b"})", "it has \"text\" and \"prompt\"; one of them must go"},
      {R"({"text": "a", "completion": "b"})", "it has \"text\" and \"completion\""},
      {R"({"prompt": "a"})", "it has a \"prompt\" and no \"completion\""},
      {R"({"completion": "a"})", "it has a \"completion\" and no \"prompt\""},
      {R"({"messages": [], "id": 1})", "it has messages, and bytes have no chat template"},
      {R"({"tools": [], "id": 1})",
       "it has \"tools\", \"id\"; a line must be {\"text\": ...}, {\"prompt\": ..., \"completion\": ...} or "
       "{\"messages\""},
      {R"({"a":1,"b":1,"c":1,"d":1,"e":1,"f":1,"g":1})",
       "it has \"a\", \"b\", \"c\", \"d\", \"e\", ...; a line must be"},
      {R"({"aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaé": 1})",
       "it has \"aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa...\"; a "
       "line must be"},  // no character is cut
      {"{}", "it has no members"},
      {"[]", "it is a list; a line must be {\"text\""},
      {"17", "it is a number; a line must be"},
      {"\"text\"", "it is text; a line must be"},
      {"null", "it is null; a line must be"},
      {"{\"text\": \"a\"", "it is no JSON at byte 13, its end"},
      {"{\"text\": \"a\"} x", "it is no JSON at byte 15, 'x'; a line must be"},
      {"{\"text\": \"a\"}{\"text\": \"b\"}", "it is no JSON at byte 14"},
      {"{\"text\": \"a\x01\"}", "it is no JSON at byte 12"},
      {R"({"text": "a\ud800"})", "it has half of a surrogate pair (\\uD800 to \\uDFFF) at byte 18"},
      {R"({"id": "\udc00", "text": "a"})", "it has half of a surrogate pair"},
      {R"({"text": "surrogate U+D800" "})", "it is no JSON"},
      {"{\"text\": \"a\", \"n\": 1e999}", "it is no JSON"},
      {"\xFF", "it is no JSON"},
      {"text", "it is no JSON"},
  };
  for (const auto& [line, words] : cases)
    expect_words(refused_line(line), "notes.jsonl, line 3: " + std::string(words), line);
  expect_words(refused_line(std::string("{\"text\": \"a\0\"}", 14)), "notes.jsonl, line 3: it is no JSON",
               "NUL");
}

TEST_F(DataTest, HostileLinesCostNoMoreThanTheirLength) {
  const std::string deep(1'000'000, '[');
  expect_words(refused_line("{\"meta\": " + deep + "}"), "line 3: it is no JSON at byte 1000010", "deep");
  expect_words(refused_line("{\"text\": " + deep + "}"), "line 3: \"text\" is a list", "deep");
  expect_words(refused_line("{\"m\": " + deep + std::string(deep.size(), ']') + ", \"text\": 1}"),
               "line 3: \"text\" is a number", "deep and closed");
  // What a message repeats is short.
  EXPECT_LT(refused_line("{\"text\": \"" + std::string(100'000, 'x')).size(), 500u);
  EXPECT_LT(refused_line("{\"" + std::string(100'000, 'x') + "\": 1}").size(), 500u);
  const Data data(put("{\"text\": \"" + std::string(3'000'000, 'x') + "\"}", "notes.jsonl"), packed(8));
  EXPECT_EQ(data.size(), 3'000'000);
}

TEST(JsonLines, MarksBlanksAndTheLastLine) {
  const std::string content =
      "\xEF\xBB\xBF{\"text\": \"a\\u0000\\n\"}\r\n \t\r\n\n{\"prompt\":\"\",\"completion\":\"\xC3\xA9\"}";
  JsonLines lines(content, "x");
  ASSERT_TRUE(lines.next());
  const JsonDocument first = lines.document();
  EXPECT_EQ(first.text, std::string("a\0\n", 3));
  EXPECT_FALSE(first.prompt);
  EXPECT_EQ(lines.place(), "x, line 1");
  ASSERT_TRUE(lines.next());
  const JsonDocument second = lines.document();
  EXPECT_EQ(second.prompt, "");
  EXPECT_EQ(second.text, "\u00e9");
  EXPECT_EQ(lines.place(), "x, line 4");
  EXPECT_FALSE(lines.next());
  EXPECT_EQ(lines.bytes_read(), content.size());
  EXPECT_EQ(lines.replaced(), 0);
  for (const char* nothing : {"", "\n", "\xEF\xBB\xBF", "\r\n\r\n", " "})
    EXPECT_FALSE(JsonLines(nothing, "x").next());
}

}  // namespace
}  // namespace scruple_tests
