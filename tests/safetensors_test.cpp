// Safetensors files: what is written is read back, what is half written is not there, what is hostile is refused.
#include "io/safetensors.h"

#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/stat.h>

#include <csignal>

#include "tests/allocations.h"
#include "tests/files.h"

namespace scruple_tests {
namespace {

using scruple::io::Dtype;
using scruple::io::Metadata;
using scruple::io::Safetensors;
using scruple::io::SafetensorsWriter;
using scruple::io::StoredTensor;
using scruple::io::TensorInfo;

constexpr int kDtypes = static_cast<int>(Dtype::u64) + 1;

std::string length_of(std::uint64_t length) {
  std::string text(8, '\0');
  for (std::size_t i = 0; i < 8; ++i) text[i] = static_cast<char>(length >> (8 * i) & 0xff);
  return text;
}
std::string file_of(const std::string& header, const std::string& data = "") {
  return length_of(header.size()) + header + data;
}
std::string entry(const std::string& dtype, const std::string& shape, const std::string& offsets) {
  return R"({"dtype":)" + dtype + R"(,"shape":)" + shape + R"(,"data_offsets":)" + offsets + "}";
}
// A file of one tensor "a".
std::string one(const std::string& dtype, const std::string& shape, const std::string& offsets,
                std::size_t bytes) {
  return file_of(R"({"a":)" + entry(dtype, shape, offsets) + "}", std::string(bytes, 'x'));
}

// Writes a file, the data of each tensor at once.
void write(const std::string& path, const std::vector<TensorInfo>& tensors,
           const std::vector<std::string>& data, const Metadata& metadata = {}) {
  SafetensorsWriter writer(path, tensors, metadata);
  for (std::size_t i = 0; i < data.size(); ++i) writer.write(i, bytes_of(data[i]));
  writer.finish();
}

// ---- What is written is read back ----

using SafetensorsWriting = Files;

TEST_F(SafetensorsWriting, EveryTypeComesBack) {
  std::vector<TensorInfo> tensors;
  std::vector<std::string> data;
  for (int i = 0; i < kDtypes; ++i) {
    const auto dtype = static_cast<Dtype>(i);
    tensors.push_back({std::string("t.") + name_of(dtype), dtype, {3, 5}});
    std::string values(static_cast<std::size_t>(tensors.back().bytes()), '\0');
    for (std::size_t k = 0; k < values.size(); ++k)
      values[k] = static_cast<char>(i * 31 + static_cast<int>(k) * 7);
    data.push_back(values);
  }
  const Metadata metadata = {{"format", "pt"}, {"quote\" and \n", "\\ \xc3\xa9"}, {"", ""}};
  SafetensorsWriter writer(path(), tensors, metadata);
  for (std::size_t i = tensors.size(); i-- > 0;)  // any order
    for (std::size_t k = 0; k < data[i].size(); k += 7)
      writer.write(i, bytes_of(std::string_view(data[i]).substr(k, 7)));
  writer.finish();

  const Safetensors file(path());
  EXPECT_EQ(file.metadata(), metadata);
  ASSERT_EQ(file.tensors().size(), tensors.size());
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const StoredTensor& stored = file.at(tensors[i].name);
    EXPECT_EQ(stored.dtype, tensors[i].dtype);
    EXPECT_EQ(stored.shape, tensors[i].shape);
    EXPECT_EQ(text_of(stored.data), data[i]);
    const auto element = static_cast<std::size_t>(bytes_of(stored.dtype));
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(stored.data.data()) % element, 0u)
        << stored.name << " is not aligned";
  }
  EXPECT_EQ(files(), 1u) << "nothing else is left";
}

TEST_F(SafetensorsWriting, DataBeginsAtAMultipleOf64WhateverTheNames) {
  for (std::size_t length = 0; length < 66; ++length) {
    write(path(), {{std::string(length, 'n'), Dtype::f64, {1}}}, {"12345678"});
    EXPECT_EQ(content().size() % 64, 8u);
    EXPECT_EQ(content()[8], '{');
    EXPECT_EQ(text_of(Safetensors(path()).at(std::string(length, 'n')).data), "12345678");
  }
}

TEST_F(SafetensorsWriting, NoTensorsNoValuesOneValue) {
  SafetensorsWriter(path(), {}).finish();
  EXPECT_TRUE(Safetensors(path()).tensors().empty());
  EXPECT_TRUE(Safetensors(path()).metadata().empty());
  SafetensorsWriter writer(
      path(), {{"none", Dtype::f32, {4, 0, 2}}, {"one", Dtype::bf16, {}}, {"also none", Dtype::u8, {0}}});
  writer.write(1, bytes_of("ab"));
  writer.write(0, {});
  writer.finish();
  const Safetensors file(path());
  EXPECT_TRUE(file.at("none").data.empty());
  EXPECT_EQ(file.at("none").shape, (std::vector<std::int64_t>{4, 0, 2}));
  EXPECT_TRUE(file.at("one").shape.empty());
  EXPECT_EQ(text_of(file.at("one").data), "ab");
}

TEST_F(SafetensorsWriting, TheBytesAreThoseOfTheFormat) {
  write(path(), {{"b", Dtype::u8, {1}}, {"a", Dtype::f32, {}}}, {"!", "1234"}, {{"k", "v"}});
  std::string header = R"({"__metadata__":{"k":"v"},"a":{"dtype":"F32","shape":[],"data_offsets":[0,4]},)"
                       R"("b":{"dtype":"U8","shape":[1],"data_offsets":[4,5]}})";
  header.resize((header.size() + 8 + 63) / 64 * 64 - 8, ' ');
  EXPECT_EQ(content(), file_of(header, "1234!"));
}

TEST_F(SafetensorsWriting, TensorsAreFoundByName) {
  SafetensorsWriter(path(), {{"b", Dtype::u8, {0}}, {"a", Dtype::u8, {0}}, {"c", Dtype::u8, {0}}}).finish();
  const Safetensors file(path());
  EXPECT_EQ(file.find("b")->name, "b");
  EXPECT_EQ(file.find("bb"), nullptr);
  EXPECT_EQ(file.find(""), nullptr);
  EXPECT_EQ(file.find("d"), nullptr);
  expect_words(message_of([&] { file.at("d"); }), R"(has no tensor "d"; it has 3: "a", "b", "c")",
               "unknown name");
}

// ---- What is half written is not there ----

TEST_F(SafetensorsWriting, WithoutFinishNothingIsLeft) {
  put("older");
  {
    SafetensorsWriter writer(path(), {{"a", Dtype::u8, {3}}});
    writer.write(0, bytes_of("abc"));
    EXPECT_EQ(content(), "older");
    EXPECT_EQ(files(), 2u);
  }
  EXPECT_EQ(content(), "older");
  EXPECT_EQ(files(), 1u);
}

TEST_F(SafetensorsWriting, TooLittleAndTooMuchAreRefused) {
  SafetensorsWriter writer(path(), {{"a", Dtype::u8, {3}}, {"b", Dtype::u8, {2}}});
  writer.write(0, bytes_of("abc"));
  expect_words(message_of([&] { writer.write(0, bytes_of("d")); }),
               "\"a\" takes 3 bytes, of which 0 are missing", "more");
  expect_words(message_of([&] { writer.write(2, bytes_of("d")); }), "no tensor 2", "beyond the list");
  expect_words(message_of([&] { writer.finish(); }), "\"b\" lacks 2 of its 2 bytes", "unfinished");
  EXPECT_FALSE(std::filesystem::exists(path()));
  writer.write(1, bytes_of("de"));
  writer.finish();
  EXPECT_EQ(text_of(Safetensors(path()).at("b").data), "de");
  expect_words(message_of([&] { writer.finish(); }), "finished", "twice");
}

TEST_F(SafetensorsWriting, WhatNoFileCanHoldIsRefused) {
  const auto refused = [&](std::vector<TensorInfo> tensors, const std::string& words,
                           const Metadata& metadata = {}) {
    expect_words(message_of([&] { SafetensorsWriter(path(), tensors, metadata); }), words, words);
    EXPECT_EQ(files(), 0u) << words;
  };
  refused({{"a", Dtype::u8, {1}}, {"b", Dtype::u8, {1}}, {"a", Dtype::u8, {1}}},
          "two tensors are called \"a\"");
  refused({{"__metadata__", Dtype::u8, {1}}}, "__metadata__");
  refused({{"a", Dtype::u8, {-1}}}, "at least 0");
  refused({{"a", Dtype::f64, {INT64_MAX, 2}}}, "63 bits");
  refused({{"a", Dtype::u8, {INT64_MAX}}, {"b", Dtype::u8, {INT64_MAX}}}, "larger than any file");
  refused({{"a", Dtype::u8, std::vector<std::int64_t>(65, 1)}}, "64 dimensions");
  refused({{"\xff", Dtype::u8, {1}}}, "UTF-8");
  refused({}, "UTF-8", {{"k", "\xc3"}});
  refused({}, "limit", {{"k", std::string(100'000'001, 'v')}});
}

TEST_F(SafetensorsWriting, AFullDiskIsReported) {
  // The nearest thing to a full disk that every machine has: a limit on the size of files.
  rlimit old{};
  getrlimit(RLIMIT_FSIZE, &old);
  const auto handler = std::signal(SIGXFSZ, SIG_IGN);
  const rlimit small{4096, old.rlim_max};
  std::string message;
  {
    SafetensorsWriter writer(path(), {{"a", Dtype::u8, {100000}}});
    setrlimit(RLIMIT_FSIZE, &small);
    message = message_of([&] { writer.write(0, bytes_of(std::string(100000, 'x'))); });
    setrlimit(RLIMIT_FSIZE, &old);
    EXPECT_EQ(files(), 0u) << "the part that fitted is gone at once";
    EXPECT_NE(message_of([&] { writer.finish(); }), "no error") << "and cannot be finished";
  }
  std::signal(SIGXFSZ, handler);
  expect_words(message, "cannot write " + path(), "full disk");
  EXPECT_EQ(files(), 0u);
}

TEST_F(SafetensorsWriting, PlacesThatCannotBeWrittenAreNamed) {
  expect_words(message_of([&] { SafetensorsWriter(path("no/such/folder"), {}); }),
               "No such file or directory; check the path", "no folder");
  std::filesystem::create_directory(path());
  SafetensorsWriter writer(path(), {});
  expect_words(message_of([&] { writer.finish(); }), "cannot name " + path(), "a folder is in the way");
  EXPECT_EQ(files(), 1u);
}

TEST_F(SafetensorsWriting, AReaderKeepsTheFileThatItOpened) {
  write(path(), {{"a", Dtype::u8, {3}}}, {"old"});
  const Safetensors old(path());
  write(path(), {{"a", Dtype::u8, {3}}}, {"new"});
  EXPECT_EQ(text_of(old.at("a").data), "old");
  EXPECT_EQ(text_of(Safetensors(path()).at("a").data), "new");
}

// ---- What is hostile is refused ----

struct Hostile {
  const char* what;
  std::string content, words;  // of the message
};

// Every kind of JSON value where another is wanted.
std::vector<Hostile> wrong_kinds() {
  const struct {
    const char *before, *after, *what, *wanted;
  } places[] = {
      {R"({"__metadata__":)", "}", "__metadata__", "an object"},
      {R"({"__metadata__":{"k":)", "}}", R"(__metadata__: "k")", "a string"},
      {R"({"a":)", "}", R"(tensor "a")", "an object"},
      {R"({"a":{"dtype":)", R"(,"shape":[2],"data_offsets":[0,8]}})", "dtype", "a string"},
      {R"({"a":{"dtype":"F32","shape":)", R"(,"data_offsets":[0,8]}})", "shape", "an array"},
      {R"({"a":{"dtype":"F32","shape":[)", R"(],"data_offsets":[0,8]}})", "a dimension", "a number"},
      {R"({"a":{"dtype":"F32","shape":[2],"data_offsets":)", "}}", "data_offsets", "an array"},
  };
  constexpr std::pair<const char*, const char*> kKinds[] = {{"null", "null"},       {"1", "a number"},
                                                            {R"("x")", "a string"}, {"[]", "an array"},
                                                            {"{}", "an object"},    {"true", "a boolean"}};
  std::vector<Hostile> all;
  for (const auto& [before, after, what, wanted] : places)
    for (const auto& [value, kind] : kKinds)
      if (std::string_view(kind) != wanted)
        all.push_back({what, file_of(std::string(before) + value + after, "12345678"),
                       std::string(what) + " must be " + wanted + ", and " + kind + " was found"});
  return all;
}

const std::string kEight(8, 'x'), kGoodEntry = entry("\"F32\"", "[2]", "[0,8]");

std::vector<Hostile> hostile_json() {
  std::string utf8 = R"({"a?":)" + kGoodEntry + "}";
  utf8[3] = '\xff';
  return {
      {"empty", "", "has 0 bytes"},
      {"seven bytes", std::string(7, '\0'), "has 7 bytes"},
      {"no header", length_of(0), "begin with '{'"},
      {"header over the limit", length_of(100'000'001) + "{}", "the limit is"},
      {"header of 2^64 - 1", length_of(~0ull) + "{}", "the limit is"},
      {"header of 2^63", length_of(1ull << 63) + "{}", "the limit is"},
      {"header over the file", length_of(3) + "{}", "only 2 follow"},
      {"header far over the file", length_of(100'000'000) + "{}", "only 2 follow"},
      {"begins with a space", file_of(" {}"), "begin with '{'"},
      {"begins with a byte order mark", file_of("\xef\xbb\xbf{}"), "begin with '{'"},
      {"is an array", file_of("[]"), "begin with '{'"},
      {"is a number", file_of("17"), "begin with '{'"},
      {"JSON cut short", file_of("{\"a\":"),
       "tensor \"a\" must be an object, and the end of the file was found"},
      {"JSON with a comma too many", file_of(R"({"a":)" + kGoodEntry + ",}", kEight),
       "a key must be a string, and the character \"}\" was found"},
      {"JSON with a comment", file_of("{/*x*/}"),
       "a key must be a string, and the character \"/\" was found"},
      {"two objects", file_of("{}{}"), "the JSON text has ended, and an object follows"},
      {"text behind the object", file_of("{}x"), "the JSON text has ended, and the character \"x\" follows"},
      {"zero byte behind the object", file_of(std::string("{}\0 hidden", 10)), "zero byte"},
      {"zero byte in a name", file_of(std::string("{\"\0\":1}", 8)),
       "a key has a byte that is not valid in a JSON string"},
      {"name not UTF-8", file_of(utf8, kEight), "a key has a byte that is not valid in a JSON string"},
      {"half a surrogate", file_of(R"({"\ud800":)" + kGoodEntry + "}", kEight),
       "a string has half a surrogate pair"},
      {"single quotes", file_of("{'a':1}"), "a key must be a string, and the character \"'\" was found"},
      {"NaN", file_of(R"({"a":NaN})"), "tensor \"a\" must be an object, and the character \"N\" was found"},
      {"deep arrays", file_of("{\"a\":" + std::string(1'000'000, '[')),
       "tensor \"a\" must be an object, and an array was found"},
      {"deep arrays in a shape", file_of(R"({"a":{"shape":)" + std::string(1'000'000, '[')),
       "a dimension must be a number, and an array was found"},
      {"deep objects", file_of(repeated("{\"a\":", 1'000'000)),
       "tensor \"a\" has a field \"a\", which has no place there"},
      {"a number of a million digits", one("\"U8\"", "[" + std::string(1'000'000, '9') + "]", "[0,8]", 8),
       "a dimension is 9999999999"},
      {"a name of a million letters", file_of("{\"" + std::string(1'000'000, 'n') + "\":1}"), "nnn..."},
      {"terminal codes in a name", file_of("{\"\\u001b[2J\":1}"), "\"?[2J\""},
  };
}

std::vector<Hostile> hostile_fields() {
  return {
      {"a tensor twice", file_of(R"({"a":)" + kGoodEntry + R"(,"a":)" + kGoodEntry + "}", kEight),
       "\"a\" stands twice"},
      {"a tensor twice, spelled differently",
       file_of(R"({"a":)" + kGoodEntry + R"(,"\u0061":)" + kGoodEntry + "}", kEight), "\"a\" stands twice"},
      {"dtype twice",
       file_of(R"({"a":{"dtype":"F32","dtype":"F32","shape":[2],"data_offsets":[0,8]}})", kEight),
       "\"dtype\" stands twice"},
      {"shape twice",
       file_of(R"({"a":{"dtype":"F32","shape":[2],"shape":[2],"data_offsets":[0,8]}})", kEight),
       "\"shape\" stands twice"},
      {"offsets twice",
       file_of(R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8],"data_offsets":[0,8]}})", kEight),
       "\"data_offsets\" stands twice"},
      {"metadata twice", file_of(R"({"__metadata__":{},"__metadata__":{}})"), "__metadata__ stands twice"},
      {"a metadata key twice", file_of(R"({"__metadata__":{"k":"1","k":"2"}})"), "\"k\" stands twice"},
      {"a tensor is empty", file_of(R"({"a":{}})"), "tensor \"a\" has no \"dtype\""},
      {"no dtype", file_of(R"({"a":{"shape":[2],"data_offsets":[0,8]}})", kEight),
       "tensor \"a\" has no \"dtype\""},
      {"no shape", file_of(R"({"a":{"dtype":"F32","data_offsets":[0,8]}})", kEight),
       "tensor \"a\" has no \"shape\""},
      {"no offsets", file_of(R"({"a":{"dtype":"F32","shape":[2]}})", kEight),
       "tensor \"a\" has no \"data_offsets\""},
      {"a field more", file_of(R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8],"x":1}})", kEight),
       "has a field \"x\""},
  };
}

std::vector<Hostile> hostile_layouts() {
  const std::string huge = "9223372036854775807";
  return {
      {"unknown dtype", one("\"F33\"", "[2]", "[0,8]", 8), "dtype \"F33\" is not known"},
      {"dtype in small letters", one("\"f32\"", "[2]", "[0,8]", 8), "not known"},
      {"dtype of half a byte", one("\"F4\"", "[16]", "[0,8]", 8), "dtype \"F4\" is not known"},
      {"shape negative", one("\"F32\"", "[-2]", "[0,8]", 8),
       "a dimension is -2; it must be a whole number from 0"},
      {"shape with both negative", one("\"F32\"", "[-1,-2]", "[0,8]", 8),
       "a dimension is -1; it must be a whole number from 0"},
      {"shape with a fraction", one("\"F32\"", "[2.0]", "[0,8]", 8),
       "a dimension is 2.0; it must be a whole number from 0"},
      {"shape with an exponent", one("\"F32\"", "[2e0]", "[0,8]", 8),
       "a dimension is 2e0; it must be a whole number from 0"},
      {"shape of 2^63", one("\"U8\"", "[9223372036854775808]", "[0,8]", 8),
       "a dimension is 9223372036854775808; it must be a whole number from 0"},
      {"shape of 2^64", one("\"U8\"", "[18446744073709551616]", "[0,8]", 8),
       "a dimension is 18446744073709551616; it must be a whole number from 0"},
      {"product overflows to 8", one("\"U8\"", "[4294967296,4294967296,8]", "[0,8]", 8), "more than 2^63"},
      {"product overflows by the type", one("\"F64\"", "[" + huge + "]", "[0,8]", 8), "more than 2^63"},
      {"product overflows, then a zero", one("\"U8\"", "[" + huge + "," + huge + ",0]", "[0,0]", 0),
       "more than 2^63"},
      {"a zero, then the product overflows", one("\"U8\"", "[0," + huge + "," + huge + "]", "[0,0]", 0),
       "more than 2^63"},
      {"too many dimensions", one("\"U8\"", "[1" + repeated(",1", 64) + "]", "[0,1]", 1), "64 dimensions"},
      {"offsets empty", one("\"F32\"", "[2]", "[]", 8), "has 0 numbers"},
      {"one offset", one("\"F32\"", "[2]", "[0]", 8), "has 1 numbers"},
      {"three offsets", one("\"F32\"", "[2]", "[0,8,8]", 8), "more than two"},
      {"offsets negative", one("\"F32\"", "[2]", "[-8,0]", 8),
       "an offset is -8; it must be a whole number from 0"},
      {"offsets with a fraction", one("\"F32\"", "[2]", "[0,8.5]", 8),
       "an offset is 8.5; it must be a whole number from 0"},
      {"offsets backwards", one("\"F32\"", "[2]", "[8,0]", 8), "end before"},
      {"offsets wrap around", one("\"F32\"", "[2]", "[18446744073709551608,0]", 8),
       "an offset is 18446744073709551608; it must be a whole number from 0"},
      {"offsets beyond the file", one("\"F32\"", "[2]", "[0,8]", 7), "cut short"},
      {"offsets far beyond the file", one("\"U8\"", "[" + huge + "]", "[0," + huge + "]", 8), "cut short"},
      {"size too small for the shape", one("\"F32\"", "[3]", "[0,8]", 8), "takes 12 bytes"},
      {"size too large for the shape", one("\"F32\"", "[1]", "[0,8]", 8), "takes 4 bytes"},
      {"one value without its bytes", one("\"F32\"", "[]", "[0,0]", 0), "takes 4 bytes"},
      {"overlap",
       file_of(R"({"a":)" + kGoodEntry + R"(,"b":)" + entry("\"F32\"", "[2]", "[4,12]") + "}",
               std::string(12, 'x')),
       "may not overlap"},
      {"the same bytes twice", file_of(R"({"a":)" + kGoodEntry + R"(,"b":)" + kGoodEntry + "}", kEight),
       "may not overlap"},
      {"an empty tensor inside another",
       file_of(R"({"a":)" + kGoodEntry + R"(,"b":)" + entry("\"F32\"", "[0]", "[4,4]") + "}", kEight),
       "may not overlap"},
      {"hole in the middle",
       file_of(R"({"a":)" + kGoodEntry + R"(,"b":)" + entry("\"F32\"", "[2]", "[9,17]") + "}",
               std::string(17, 'x')),
       "belong to no tensor"},
      {"hole at the beginning", one("\"F32\"", "[2]", "[4,12]", 12), "belong to no tensor"},
      {"bytes at the end", one("\"F32\"", "[2]", "[0,8]", 9), "1 bytes follow the last tensor"},
      {"bytes and no tensor", file_of("{}", "x"), "1 bytes follow"},
  };
}

std::vector<Hostile> hostile_files() {
  std::vector<Hostile> all;
  for (const auto& some : {hostile_json(), hostile_fields(), hostile_layouts(), wrong_kinds()})
    all.insert(all.end(), some.begin(), some.end());
  return all;
}

using SafetensorsReading = Files;

TEST_F(SafetensorsReading, HostileFilesAreRefusedWithTheReason) {
  const std::vector<Hostile> all = hostile_files();
  EXPECT_GE(all.size(), 40u);
  for (const Hostile& hostile : all) {
    put(hostile.content);
    const Allocations allocations;
    const std::string message = message_of([&] { const Safetensors file(path()); });
    // Names are kept as they are read, in strings that double as they grow.
    EXPECT_LE(allocations.most(), 4 * hostile.content.size() + 20000) << hostile.what;
    expect_words(message, hostile.words, hostile.what);
    expect_words(message, path(), hostile.what);
    EXPECT_LT(message.size(), 1000u) << hostile.what;
  }
}

// Each is one step from one that is refused above.
TEST_F(SafetensorsReading, UnusualButLegalFilesAreRead) {
  const std::string good = entry("\"F32\"", "[2]", "[0,8]"), eight(8, 'x');
  for (const std::string& content :
       {file_of("{}"), file_of("{}  \n\t "), file_of("{ }"), file_of(R"({"__metadata__":{}})"),
        file_of(R"({"":)" + good + "}", eight), file_of(R"({"\ud83d\ude00":)" + good + "}", eight),
        file_of(R"({"a":{"data_offsets":[0,8],"shape":[2],"dtype":"F32"}})", eight),
        one("\"U8\"", "[0,9223372036854775807]", "[0,0]", 0), one("\"F64\"", "[]", "[0,8]", 8),
        one("\"C64\"", "[1,1,1]", "[0,8]", 8),
        file_of(R"({"z":)" + good + R"(,"e":)" + entry("\"F32\"", "[0]", "[8,8]") + R"(,"a":)" +
                    entry("\"U8\"", "[3]", "[8,11]") + "}",
                eight + "abc")})
    EXPECT_EQ(message_of([&] { const Safetensors file(put(content)); }), "no error") << content;
}

TEST_F(SafetensorsReading, AFileCutAnywhereIsRefused) {
  write(path(), {{"a", Dtype::f32, {3}}, {"b", Dtype::u8, {5}}}, {"0123456789ab", "cdefg"}, {{"k", "v"}});
  const std::string whole = content();
  for (std::size_t size = 0; size < whole.size(); ++size)
    EXPECT_NE(message_of([&] { const Safetensors file(put(whole.substr(0, size))); }), "no error") << size;
}

// No byte of a header can be changed so that reading it does worse than throw. The sanitizers watch.
TEST_F(SafetensorsReading, AnyByteMayBeAnything) {
  const std::string good = file_of(R"({"__metadata__":{"k":"v"},"a":)" + entry("\"F32\"", "[2,1]", "[0,8]") +
                                       R"(,"b":)" + entry("\"U8\"", "[3]", "[8,11]") + "}",
                                   std::string(11, 'x'));
  for (std::size_t i = 0; i < good.size() - 11; ++i)
    for (const char byte : {'\0', '0', '9', '-', '"', '{', '}', '[', ']', ',', ' ', '\x7f', '\x80', '\xff'}) {
      std::string changed = good;
      changed[i] = byte;
      put(changed);
      message_of([&] {
        const Safetensors file(path());
        for (const StoredTensor& tensor : file.tensors())
          EXPECT_EQ(static_cast<std::int64_t>(tensor.data.size()), tensor.bytes());
      });
    }
}

TEST_F(SafetensorsReading, ManyTensorsCostAFewTimesTheirHeader) {
  std::string header = "{";
  for (int i = 0; i < 50000; ++i)
    header += (i == 0 ? "\"" : ",\"") + std::to_string(i) + "\":" + entry("\"U8\"", "[0]", "[0,0]");
  put(file_of(header + "}"));
  const Allocations allocations;
  const Safetensors file(path());
  EXPECT_EQ(file.tensors().size(), 50000u);
  EXPECT_LE(allocations.most(), 8 * header.size());
}

TEST_F(SafetensorsReading, OnlyFilesAreFiles) {
  expect_words(message_of([&] { Safetensors(path("none")); }), "No such file or directory; check the path",
               "no such file");
  expect_words(message_of([&] { Safetensors{folder_}; }), "not a regular file", "a folder");
  ASSERT_EQ(mkfifo(path("pipe").c_str(), 0600), 0);
  expect_words(message_of([&] { Safetensors(path("pipe")); }), "not a regular file", "a pipe");
}

// tests/safetensors_interop_test.py runs this one: what the official library wrote is read and written again.
TEST(SafetensorsInterop, CopiesAFile) {
  const char *from = std::getenv("SCRUPLE_COPY_FROM"), *to = std::getenv("SCRUPLE_COPY_TO");
  if (from == nullptr || to == nullptr) GTEST_SKIP() << "runs from safetensors_interop_test.py";
  const Safetensors file(from);
  SafetensorsWriter writer(to, {file.tensors().begin(), file.tensors().end()}, file.metadata());
  for (std::size_t i = 0; i < file.tensors().size(); ++i) writer.write(i, file.tensors()[i].data);
  writer.finish();
}

}  // namespace
}  // namespace scruple_tests
