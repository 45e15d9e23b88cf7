// Checkpoints: what is saved comes back, in any number of files; no bit flips unnoticed; hostile manifests are
// refused; files of every version load.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "io/json.h"
#include "tests/allocations.h"
#include "tests/checkpoints.h"

namespace scruple_tests {
namespace {

using namespace io;

// As where a save fails for want of memory: the folder stays under its partial name, and the next removes it.
TEST_F(Files, AFolderIsLeftWhereNoMemoryIs) {
  {
    const NewFolder made(path("a"));
    std::ofstream(made.partial() + "/file") << "half";
    refuses_memory = true;
  }
  refuses_memory = false;
  EXPECT_FALSE(std::filesystem::exists(path("a")));
  EXPECT_TRUE(remove_partial(folder_).empty());
  EXPECT_TRUE(std::filesystem::is_empty(folder_));
}

// ---- Checksums and JSON ----

TEST(Crc32, IsThatOfZlib) {
  EXPECT_EQ(crc32(std::string_view("")), 0u);
  EXPECT_EQ(crc32_by_tables(bytes_of("123456789")), 0xcbf43926u);
  EXPECT_EQ(crc32(std::string_view("123456789")), 0xcbf43926u);  // the check value of its catalogue
  EXPECT_EQ(hex(crc32(std::string_view("a"))), "e8b7be43");
  EXPECT_EQ(hex(0x00335c18), "00335c18");
  std::string text;
  for (int i = 0; i < 1000; ++i) text.push_back(static_cast<char>(i * 37));
  const std::uint32_t whole = crc32(text);
  for (std::size_t cut = 0; cut < text.size(); ++cut) {
    const std::string_view part = std::string_view(text).substr(cut);
    ASSERT_EQ(crc32_by_tables(bytes_of(part), 17), crc32(part, 17)) << "whatever the processor has";
  }
  for (std::size_t cut = 0; cut < 100; ++cut)
    EXPECT_EQ(crc32(std::string_view(text).substr(cut), crc32(std::string_view(text).substr(0, cut))), whole);
}

TEST(Json, NumbersAndTextsComeBack) {
  const std::string path = "x";
  for (const double value :
       {0.0, -0.0, 1.0, 0.1, 1e-8, 5e-324, std::numeric_limits<double>::max(), -1.0 / 3}) {
    const std::string text = written(value);
    const double back = JsonReader(text, path).number("it");
    EXPECT_EQ(std::signbit(back), std::signbit(value));
    EXPECT_EQ(back, value) << text;
  }
  EXPECT_NE(message_of([] { written(std::nan("")); }), "no error");
  const std::string odd = "\"\\/\b\f\n\r\t\x01 \xc3\xa9 \xe2\x82\xac \xf0\x9f\x98\x80";
  const std::string text = json_text(odd);
  EXPECT_EQ(JsonReader(text, path).string("it"), odd);
  EXPECT_EQ(JsonReader(R"("\ud83d\ude00\u00e9\u20ac\/")", path).string("it"),
            "\xf0\x9f\x98\x80\xc3\xa9\xe2\x82\xac/");
  EXPECT_NE(message_of([] { json_text("\xc3"); }), "no error");
}

TEST(Json, WhatIsNotJsonIsRefused) {
  const std::string path = "x";
  for (const char* text : {"", "\"", "\"a", "\"\\\"", "\"\\x\"", "\"\\u12\"", "\"\\u12g4\"", "\"\\ud800\"",
                           "\"\\udc00\"", "\"\\ud800\\u0041\"", "\"\n\"", "\"\xff\"", "\"\xc0\x80\"",
                           "\"\xed\xa0\x80\"", "\"\xf5\x80\x80\x80\"", "'a'", "a", "null"})
    EXPECT_NE(message_of([&] { JsonReader(text, path).string("it"); }), "no error") << text;
  for (const char* text :
       {"", "-", "+1", "01", "1.", ".5", "1e", "1e+", "0x1", "nan", "Infinity", "1e999", "--1"})
    EXPECT_NE(message_of([&] {
                JsonReader json(text, path);
                json.number("it");
                json.end();
              }),
              "no error")
        << text;
  for (const char* text : {"-1", "1.0", "1e0", "18446744073709551616", "8"})
    EXPECT_NE(message_of([&] { JsonReader(text, path).unsigned_integer("it", 7); }), "no error") << text;
}

// ---- What is saved comes back ----

void expect_sample(const std::string& folder, const Manifest& want) {
  const Checkpoint checkpoint(folder);
  const Manifest& got = checkpoint.manifest();
  EXPECT_EQ(got.library, want.library);
  EXPECT_EQ(got.recipe, want.recipe);
  EXPECT_EQ(got.step, want.step);
  EXPECT_EQ(got.trainer, want.trainer);
  ASSERT_EQ(got.groups.size(), want.groups.size());
  for (std::size_t i = 0; i < want.groups.size(); ++i) {
    EXPECT_EQ(got.groups[i].optimizer, want.groups[i].optimizer);
    EXPECT_EQ(got.groups[i].seed, want.groups[i].seed);
    EXPECT_EQ(got.groups[i].hyperparameters, want.groups[i].hyperparameters);
  }
  ASSERT_EQ(got.loss_scale.has_value(), want.loss_scale.has_value());
  if (want.loss_scale) {
    EXPECT_EQ(got.loss_scale->clean, want.loss_scale->clean);
  }
  ASSERT_EQ(got.tensors.size(), want.tensors.size());
  for (std::size_t t = 0; t < want.tensors.size(); ++t) {
    const TensorState &tensor = got.tensors[t], &wanted = want.tensors[t];
    EXPECT_EQ(tensor.name, wanted.name);
    EXPECT_EQ(tensor.shape, wanted.shape);
    EXPECT_EQ(tensor.group, wanted.group);
    EXPECT_EQ(tensor.id, wanted.id);
    EXPECT_EQ(tensor.step, wanted.step);
    EXPECT_EQ(tensor.adagc_norm, wanted.adagc_norm);
    ASSERT_EQ(tensor.arrays.size(), wanted.arrays.size());
    for (const Array& array : tensor.arrays)
      for (const Plane& plane : array.planes) {
        std::string data(static_cast<std::size_t>(plane.bytes()), '\0');
        checkpoint.read(tensor, array, plane, std::as_writable_bytes(std::span(data)));
        EXPECT_EQ(data, data_of(tensor, array, plane)) << plane_name(tensor, array, plane);
      }
  }
}

using Checkpoints = Files;

TEST_F(Checkpoints, ComeBackFromAnyNumberOfFiles) {
  const Manifest manifest = sample();
  for (const std::size_t shards : {1u, 2u, 3u, 5u, 8u, 13u, 20u}) {
    SCOPED_TRACE(shards);
    const std::string folder = path("c" + std::to_string(shards));
    write_by_io(folder, manifest, shards);
    expect_sample(folder, manifest);
    EXPECT_EQ(Checkpoint(folder).manifest().files.size(), shards);
  }
  EXPECT_EQ(files(), 7u) << "nothing else is left";
  expect_words(message_of([&] { write_by_io(path("many"), manifest, 200); }), "choose fewer",
               "more shards than blocks");
  expect_words(message_of([&] { write_by_io(path("many"), manifest, 257); }), "1 to 256",
               "more shards than files");
  expect_words(message_of([&] { write_by_io(path("none"), manifest, 0); }), "1 to 256", "no shards");
}

TEST_F(Checkpoints, ShardsAreCutWhereNoGroupIs) {
  write_by_io(path("c"), sample(), 13);
  const Checkpoint checkpoint(path("c"));
  std::size_t cut = 0;
  for (const TensorState& tensor : checkpoint.manifest().tensors)
    for (const Array& array : tensor.arrays)
      for (const Plane& plane : array.planes) {
        cut += plane.pieces.size() > 1 ? 1 : 0;
        for (const Piece& piece : plane.pieces) EXPECT_EQ(piece.first % 128, 0);
      }
  EXPECT_GT(cut, 0u);
  const Safetensors shard(path("c/model-00002-of-00013.safetensors"));
  EXPECT_EQ(shard.metadata().at("shard"), "2 of 13");
  EXPECT_EQ(shard.metadata().at("elements"), R"({"t0":[128,384]})");
  EXPECT_EQ(shard.metadata().at("format"), "pt");
}

TEST_F(Checkpoints, EveryPlaneIsAPlainTensor) {
  write_by_io(path("c"), sample());
  const Safetensors file(path("c/model.safetensors"));
  EXPECT_EQ(file.at("t0").dtype, Dtype::bf16);
  EXPECT_EQ(file.at("t0").shape, (std::vector<std::int64_t>{5, 128}));
  for (const char* name : {"t0/extra", "t0/exp_avg", "t0/exp_avg/scale"})
    EXPECT_NE(file.find(name), nullptr) << name;
  EXPECT_NE(file.metadata().at("run").find("\"recipe\":"), std::string::npos);
}

TEST_F(Checkpoints, OneReplacesAnotherOfItsName) {
  Manifest manifest = sample();
  write_by_io(path("c"), manifest, 3);
  manifest.step = 99;
  write_by_io(path("c"), manifest);
  expect_sample(path("c"), manifest);
  EXPECT_EQ(files(), 1u);
}

TEST_F(Checkpoints, AreFoundByTheirStep) {
  for (const char* name : {"step-00000100", "step-00000009", "step-100", "step-", "step-0000000x", "other",
                           "step-00000200.partial-1-0", "step-123456789"})
    std::filesystem::create_directory(path(name));
  EXPECT_EQ(saved_steps(folder_), (std::vector<std::int64_t>{9, 100, 123456789}));
  EXPECT_TRUE(saved_steps(path("nowhere")).empty());
  remove_partial(folder_);
  EXPECT_EQ(files(), 7u);
  remove_folder(path("step-00000009"));
  EXPECT_EQ(files(), 6u);
}

// ---- No bit flips unnoticed ----

std::string damage(const std::string& folder) {
  return message_of([&] {
    const Checkpoint checkpoint(folder);
    for (const TensorState& tensor : checkpoint.manifest().tensors)
      for (const Array& array : tensor.arrays)
        for (const Plane& plane : array.planes) checkpoint.verify(tensor, array, plane);
  });
}

TEST_F(Checkpoints, AnyFlippedBitIsFound) {
  Manifest manifest = sample();
  manifest.tensors.resize(3);
  write_by_io(path("c"), manifest, 2);
  for (const char* name :
       {"c/manifest.json", "c/model-00001-of-00002.safetensors", "c/model-00002-of-00002.safetensors"}) {
    const std::string good = content(name);
    // In place: a file that is truncated and closed goes to the disk at once, and that takes its time.
    std::fstream file(path(name), std::ios::in | std::ios::out | std::ios::binary);
    const auto set = [&](std::size_t i, int byte) {
      file.seekp(static_cast<std::streamoff>(i)).put(static_cast<char>(byte)).flush();
    };
    for (std::size_t i = 0; i < good.size(); ++i)
      for (const int bit : {0, 1, 5, 7}) {
        set(i, good[i] ^ (1 << bit));
        ASSERT_NE(damage(path("c")), "no error") << name << " byte " << i << " bit " << bit;
        set(i, good[i]);
      }
  }
  EXPECT_EQ(damage(path("c")), "no error");
}

TEST_F(Checkpoints, TheDamagedTensorIsNamed) {
  write_by_io(path("c"), sample());
  std::string bad = content("c/model.safetensors");
  bad.back() = static_cast<char>(bad.back() ^ 1);
  put(bad, "c/model.safetensors");
  const Checkpoint checkpoint(path("c"));  // data is looked at when it is read
  const TensorState& last = checkpoint.manifest().tensors.back();
  std::string data(static_cast<std::size_t>(last.arrays[1].planes[0].bytes()), '\0');
  const std::string message = message_of([&] {
    checkpoint.read(last, last.arrays[1], last.arrays[1].planes[0], std::as_writable_bytes(std::span(data)));
  });
  expect_words(message, "tensor \"t6/exp_avg\": its checksum is", "flipped bit");
}

// Where one is damaged, the message says which others of the run are not.
TEST_F(Checkpoints, WhatElseARunHasIsSaid) {
  for (const int step : {1, 2, 3, 4}) write_by_io(path("run/" + step_name(step)), sample());
  const auto spoil = [&](int step) { put("{", ("run/" + step_name(step) + "/manifest.json").c_str()); };
  spoil(4);
  spoil(2);
  const std::string last = path("run/" + step_name(4)),
                    others = "of its run step-00000003, step-00000001 can be opened";
  for (const std::string& name : {last, last + "/"}) {
    const std::string message = message_of([&] { Checkpoint checkpoint(name); });
    expect_words(message, others, "two are whole");
    expect_words(message, "'scruple checkpoint verify " + path("run/" + step_name(3)) + "'",
                 "the later of them");
  }
  spoil(3);
  spoil(1);
  expect_words(message_of([&] { Checkpoint checkpoint(last); }), "take another copy", "none is whole");
}

TEST_F(Checkpoints, FilesThatAreCutLongerOrMissingAreRefused) {
  write_by_io(path("c"), sample());
  for (const char* name : {"c/manifest.json", "c/model.safetensors"}) {
    const std::string good = content(name);
    for (std::size_t size = good.size(); size-- > 0;) {
      std::filesystem::resize_file(path(name), size);
      ASSERT_NE(damage(path("c")), "no error") << name << " of " << size << " bytes";
    }
    put(good + " ", name);
    EXPECT_NE(damage(path("c")), "no error") << name << " with a byte more";
    std::filesystem::remove(path(name));
    expect_words(damage(path("c")), path(name), "missing");
    put(good, name);
  }
  write_by_io(path("d"), [] {
    Manifest other = sample();
    other.step = 13;
    return other;
  }());
  std::filesystem::copy_file(path("d/model.safetensors"), path("c/model.safetensors"),
                             std::filesystem::copy_options::overwrite_existing);
  expect_words(damage(path("c")), "of another checkpoint", "a file of another checkpoint");
}

// ---- Hostile manifests ----

// A small manifest, as text whose checksum is right.
const char* const kGood =
    R"({"scruple_checkpoint":1,"library":"0.1.0","crc32":"00000000",
"recipe":"r","step":1,"groups":[{"optimizer":"o","seed":1,"hyperparameters":{"lr":0.1}}],
"loss_scale":{"scale":1,"growth":1,"backoff":1,"interval":0,"clean":0},"trainer":{"k":"v"},
"files":[{"name":"model.safetensors","bytes":8,"header_crc32":"01234567"}],
"tensors":[{"name":"t","shape":[2,100],"group":0,"id":0,"step":1,"adagc_norm":null,"arrays":[{"name":"weight",
"format":"f","rounding":"n","planes":[{"kind":"codes","dtype":"F32","shape":[200],"block_bytes":512,"pieces":[[0,0,200,"89abcdef"]]}]}]}]}
)";

std::string sealed(std::string text) {
  const std::size_t digits = text.find("\"crc32\":\"");
  if (digits != text.npos && digits + 17 <= text.size()) text.replace(digits + 9, 8, hex(manifest_crc(text)));
  return text;
}

std::string with(const std::string& what, const std::string& by) {
  std::string text = kGood;
  const std::size_t at = text.find(what);
  EXPECT_NE(at, text.npos) << what;
  return sealed(text.replace(at, what.size(), by));
}

// The manifest's own step, spelled so.
std::string with_step(const std::string& by) { return with(R"("step":1,"groups")", by + R"("groups")"); }

struct Hostile {
  const char* what;
  std::string text;
  const char* words;  // of the message
};

const std::string kTensor = R"({"name":"t",)", kPiece = R"([[0,0,200,"89abcdef"]])",
                  kPlane = R"({"kind":"codes","dtype":"F32","shape":[200],"block_bytes":512,"pieces":)" +
                           kPiece + "}";

// The tensor of kGood once more.
std::string good_tensor() {
  const std::string whole = kGood, tensor = whole.substr(whole.find(kTensor));
  return tensor.substr(0, tensor.rfind("]}"));
}

std::vector<Hostile> hostile_texts() {
  const std::string whole = kGood;
  return {
      {"empty", "", "first line"},
      {"not JSON", "hello\n", "first line"},
      {"an array", "[]\n", "first line"},
      {"no line", R"({"scruple_checkpoint":1,"library":"0.1.0","crc32":"00000000",)", "first line"},
      {"a space too many", with("{\"scruple_checkpoint\":1", "{\"scruple_checkpoint\": 1"), "first line"},
      {"no version", with("{\"scruple_checkpoint\":1,", "{"), "first line"},
      {"version 0", with("checkpoint\":1", "checkpoint\":0"), "first line"},
      {"version -1", with("checkpoint\":1", "checkpoint\":-1"), "first line"},
      {"version 1.5", with("checkpoint\":1", "checkpoint\":1.5"), "first line"},
      {"version of 2^64", with("checkpoint\":1", "checkpoint\":18446744073709551616"), "first line"},
      {"a newer version", with("checkpoint\":1", "checkpoint\":2"), "version 2"},
      {"a far newer version", with("checkpoint\":1", "checkpoint\":18446744073709551615"),
       "use that Scruple or a newer"},
      {"a checksum of seven digits", with("\"crc32\":\"00000000\"", "\"crc32\":\"0000000\""), "first line"},
      {"a checksum in capitals",
       [] {
         std::string text = kGood;
         return text.replace(text.find("00000000"), 8, "ABCDEF01");
       }(),
       "first line"},
      {"a wrong checksum",
       [] {
         std::string text = kGood;
         return text.replace(text.find("00000000"), 8, "12345678");
       }(),
       "damaged"},
      {"a byte order mark", "\xef\xbb\xbf" + sealed(kGood), "first line"},
      {"nothing behind the first line",
       sealed("{\"scruple_checkpoint\":1,\"library\":\"\",\"crc32\":\"00000000\",\n"), "key"},
      {"JSON cut short", sealed(whole.substr(0, whole.size() - 10)), "must"},
      {"text behind the object", sealed(whole + "x"), "follows"},
      {"two objects", sealed(whole + "{}"), "follows"},
      {"a zero byte behind the object", sealed(whole + std::string(1, '\0')), "follows"},
      {"a comment", with_step("/**/\"step\":1,"), "key"},
      {"a comma too many", with("\"adagc_norm\":null,", "\"adagc_norm\":null,,"), "key"},
      {"an unknown field", with_step("\"stop\":1,\"step\":1,"), "\"stop\", which has no place"},
      {"a field twice", with_step("\"step\":1,\"step\":1,"), "\"step\" stands twice"},
      {"a field twice, spelled differently", with_step("\"step\":1,\"st\\u0065p\":1,"), "stands twice"},
      {"no step", with_step(""), "has no \"step\""},
      {"step is a string", with_step("\"step\":\"1\","), "a string was found"},
      {"step is negative", with_step("\"step\":-1,"), "-1"},
      {"step of 2^63", with_step("\"step\":9223372036854775808,"), "whole number"},
      {"recipe is null", with("\"recipe\":\"r\"", "\"recipe\":null"), "null was found"},
      {"recipe not UTF-8", with("\"recipe\":\"r\"", "\"recipe\":\"\xff\""), "not valid"},
      {"terminal codes in a name", with_step("\"\\u001b[2J\":1,"), "\"?[2J\""},
  };
}

std::vector<Hostile> hostile_groups() {
  std::string many_keys, group = R"({"optimizer":"o","seed":1,"hyperparameters":{}})";
  for (int i = 0; i < 1025; ++i) many_keys += (i == 0 ? "\"k" : ",\"k") + std::to_string(i) + "\":0";
  return {
      {"groups is an object", with("\"groups\":[", "\"groups\":{"), "must be an array"},
      {"no groups", with(R"([{"optimizer":"o","seed":1,"hyperparameters":{"lr":0.1}}])", "[]"),
       "of group 0, and there are 0"},
      {"too many groups",
       with(R"({"optimizer":"o","seed":1,"hyperparameters":{"lr":0.1}})",
            group + repeated("," + group, 1024)),
       "more than 1024"},
      {"too many hyperparameters", with("\"lr\":0.1", many_keys), "more than 1024"},
      {"a hyperparameter twice", with("\"lr\":0.1", "\"lr\":0.1,\"lr\":0.1"), "\"lr\" stands twice"},
      {"a hyperparameter is NaN", with("\"lr\":0.1", "\"lr\":NaN"), "must be a number"},
      {"a hyperparameter is too large", with("\"lr\":0.1", "\"lr\":1e400"), "no double"},
      {"a seed of 2^64", with("\"seed\":1", "\"seed\":18446744073709551616"), "whole number"},
      {"the loss scale is a number", with("\"loss_scale\":{", "\"loss_scale\":1,\"x\":{"),
       "must be an object"},
      {"trainer with a number", with("\"k\":\"v\"", "\"k\":1"), "must be a string"},
      {"trainer with an object", with("\"k\":\"v\"", "\"k\":{}"), "must be a string"},
      {"trainer with a key twice", with("\"k\":\"v\"", "\"k\":\"v\",\"k\":\"v\""), "\"k\" stands twice"},
  };
}

std::vector<Hostile> hostile_tensors() {
  return {
      {"no files", with(R"([{"name":"model.safetensors","bytes":8,"header_crc32":"01234567"}])", "[]"),
       "names no file"},
      {"a file elsewhere", with("\"model.safetensors\"", "\"../model.safetensors\""),
       "must be called model.safetensors"},
      {"a file from the root", with("\"model.safetensors\"", "\"/etc/passwd\""), "must be called"},
      {"a shard's name alone", with("\"model.safetensors\"", "\"model-00001-of-00002.safetensors\""),
       "must be called"},
      {"too many files",
       with(R"({"name":"model.safetensors")",
            repeated(R"({"name":"","bytes":0,"header_crc32":"00000000"},)", 256) +
                R"({"name":"model.safetensors")"),
       "more than 256"},
      {"a tensor twice",
       [] {
         std::string text = kGood;
         return sealed(text.insert(text.find(kTensor), good_tensor() + ","));
       }(),
       "two tensors are called \"t\""},
      {"a tensor without a name", with("\"name\":\"t\"", "\"name\":\"\""), "no name"},
      {"a tensor of another group", with("\"group\":0", "\"group\":1"), "of group 1, and there are 1"},
      {"a tensor of a negative group", with("\"group\":0", "\"group\":-1"), "whole number"},
      {"an id of 2^32", with("\"id\":0", "\"id\":4294967296"), "whole number"},
      {"step 0 of a tensor", with("\"id\":0,\"step\":1", "\"id\":0,\"step\":0"), "the first is 1"},
      {"a norm that is a string", with("\"adagc_norm\":null", "\"adagc_norm\":\"1\""), "must be a number"},
      {"half a null", with("\"adagc_norm\":null", "\"adagc_norm\":nul"), "must be a number"},
  };
}

std::vector<Hostile> hostile_arrays() {
  const std::string whole = kGood, huge = "9223372036854775807";
  return {
      {"a tensor without arrays",
       with(R"("arrays":[{"name":"weight")", R"("arrays":[],"x":[{"name":"weight")"), "\"x\""},
      {"no arrays at all", sealed(whole.substr(0, whole.find("[{\"name\":\"weight\"")) + "[]}]}\n"),
       "must be its weight"},
      {"an array first that is no weight", with("\"name\":\"weight\"", "\"name\":\"exp_avg\""),
       "must be its weight"},
      {"an array with a slash",
       with(R"({"name":"weight")",
            R"({"name":"a/b","format":"f","rounding":"n","planes":[]},{"name":"weight")"),
       "must be its weight"},
      {"no planes", sealed(whole.substr(0, whole.find("[{\"kind\"")) + "[]}]}]}\n"), "must be its codes"},
      {"scales first", with("\"kind\":\"codes\"", "\"kind\":\"scale\""), "must be its codes"},
      {"an unknown dtype", with("\"F32\"", "\"F33\""), "not known"},
      {"a dtype of half a byte", with("\"F32\"", "\"F4\""), "not known"},
      {"another dtype", with("\"F32\"", "\"U8\""), "does not fit"},
      {"a shape too small", with("\"shape\":[200]", "\"shape\":[128]"), "does not fit"},
      {"a shape too large", with("\"shape\":[200]", "\"shape\":[257]"), "does not fit"},
      {"a shape of nothing", with("\"shape\":[200]", "\"shape\":[0]"), "does not fit"},
      {"a product that overflows", with("\"shape\":[2,100]", "\"shape\":[" + huge + "," + huge + "]"),
       "63 bits"},
      {"a plane's product that overflows", with("\"shape\":[200]", "\"shape\":[" + huge + "]"), "63 bits"},
      {"a huge tensor", with("\"shape\":[2,100]", "\"shape\":[" + huge + "]"), "does not fit"},
      {"too many dimensions", with("\"shape\":[200]", "\"shape\":[200" + repeated(",1", 64) + "]"),
       "64 dimensions"},
      {"a dimension of 1.5", with("\"shape\":[200]", "\"shape\":[1.5]"), "whole number"},
      {"no bytes for a block", with("\"block_bytes\":512", "\"block_bytes\":0"), "no whole number"},
      {"bytes of a block that cut an element", with("\"block_bytes\":512", "\"block_bytes\":514"),
       "no whole number"},
      {"huge blocks", with("\"block_bytes\":512", "\"block_bytes\":9223372036854775804"), "does not fit"},
      {"a tensor called as another's plane",
       [] {
         std::string text = kGood, other = good_tensor(), extra = kPlane;
         other.replace(other.find("\"t\""), 3, "\"t/extra\"");
         extra.replace(extra.find("codes"), 5, "extra");
         text.insert(text.find(kPlane) + kPlane.size(), "," + extra);
         return sealed(text.insert(text.find(kTensor), other + ","));
       }(),
       "a tensor has that name too"},
      {"three planes", with(kPlane, kPlane + repeated("," + kPlane, 2)), "more planes"},
      {"codes twice", with(kPlane, kPlane + "," + kPlane), "more planes"},
      {"an array twice",
       with(R"("arrays":[)",
            R"("arrays":[{"name":"weight","format":"","rounding":"","planes":[)" + kPlane + "]},"),
       "stands once"},
      {"an array called as a kind of plane",
       with(kPlane + "]}", kPlane + R"(]},{"name":"extra","format":"f","rounding":"n","planes":[]})"),
       "not that of a kind"},
  };
}

std::vector<Hostile> hostile_pieces() {
  return {
      {"no pieces", with(kPiece, "[]"), "end at element 0 of 200"},
      {"a piece of three", with(kPiece, "[[0,0,200]]"), "has 3 values"},
      {"a piece of five", with(kPiece, R"([[0,0,200,"89abcdef",0]])"), "more than four"},
      {"a piece that is a number", with(kPiece, "[0]"), "must be an array"},
      {"a piece in a file that is not there", with(kPiece, R"([[1,0,200,"89abcdef"]])"),
       "in file 1, and there are 1"},
      {"a piece that begins late", with(kPiece, R"([[0,128,200,"89abcdef"]])"), "ends at 0"},
      {"a piece that ends early", with(kPiece, R"([[0,0,128,"89abcdef"]])"), "of 200"},
      {"a piece that ends late", with(kPiece, R"([[0,0,201,"89abcdef"]])"), "not after 200"},
      {"a piece of nothing", with(kPiece, R"([[0,0,0,"89abcdef"]])"), "must end after"},
      {"a piece that cuts a block", with(kPiece, R"([[0,0,100,"89abcdef"],[0,100,200,"89abcdef"]])"),
       "multiple of 128"},
      {"two pieces in one file", with(kPiece, R"([[0,0,128,"89abcdef"],[0,128,200,"89abcdef"]])"),
       "in one file"},
      {"a piece's checksum is a number", with(kPiece, "[[0,0,200,1]]"), "must be a string"},
      {"a piece's checksum is not hex", with(kPiece, R"([[0,0,200,"89abcdeg"]])"), "eight digits"},
  };
}

std::vector<Hostile> hostile_sizes() {
  return {
      {"deep arrays", with("\"shape\":[200]", "\"shape\":" + std::string(1'000'000, '[')),
       "must be a number"},
      {"deep objects", with("\"trainer\":{\"k\":\"v\"}", "\"trainer\":" + repeated("{\"k\":", 1'000'000)),
       "must be a string"},
      {"a name of a million letters", with("\"codes\"", "\"" + std::string(1'000'000, 'n') + "\""),
       "must be its codes"},
      {"a number of a million digits",
       with("\"block_bytes\":512", "\"block_bytes\":" + std::string(1'000'000, '9')), "whole number"},
      {"a million empty pieces", with(kPiece, "[" + repeated("[],", 1'000'000) + "[]]"), "has 0 values"},
      {"a million pieces",
       with(kPiece, "[" + repeated(R"([0,0,0,"00000000"],)", 1'000'000) + R"([0,0,0,"00000000"]])"),
       "must end after"},
  };
}

std::vector<Hostile> hostile_manifests() {
  std::vector<Hostile> all;
  for (const auto& some : {hostile_texts(), hostile_groups(), hostile_tensors(), hostile_arrays(),
                           hostile_pieces(), hostile_sizes()})
    all.insert(all.end(), some.begin(), some.end());
  return all;
}

TEST(HostileManifests, AreRefusedWithTheReason) {
  const std::vector<Hostile> all = hostile_manifests();
  EXPECT_GE(all.size(), 40u);
  EXPECT_EQ(message_of([] { parse_manifest(sealed(kGood), "good"); }), "no error");
  for (const Hostile& hostile : all) {
    const Allocations allocations;
    const std::string message = message_of([&] { parse_manifest(hostile.text, "dir/manifest.json"); });
    // A short entry of a map takes ten times its text; what is kept of a piece, five times while its vector grows.
    EXPECT_LE(allocations.most(), 12 * hostile.text.size() + 20000) << hostile.what;
    expect_words(message, hostile.words, hostile.what);
    expect_words(message, "dir/manifest.json", hostile.what);
    EXPECT_LT(message.size(), 1000u) << hostile.what;
  }
}

// Each is one step from one that is refused above.
TEST(HostileManifests, UnusualButLegalOnesAreRead) {
  const std::string loss = R"({"scale":1,"growth":1,"backoff":1,"interval":0,"clean":0})";
  for (const std::string& text :
       {with(loss, "null"), with("\"k\":\"v\"", ""), with("\"lr\":0.1", ""),
        with("\"adagc_norm\":null", "\"adagc_norm\":1e-300"),
        with("\"recipe\":\"r\"", "  \"recipe\"\t:\r\n\"\\u0072\" "),
        with("\"seed\":1", "\"seed\":18446744073709551615"), with("\"shape\":[200]", "\"shape\":[129]"),
        with("\"shape\":[200]", "\"shape\":[256]"), with("\"id\":0", "\"id\":4294967295"),
        sealed(std::string(kGood) + "  \n\n")})
    EXPECT_EQ(message_of([&] { parse_manifest(text, "x"); }), "no error") << text;
}

// ---- Every version loads ----

// Version 1, frozen: what the first Scruple that had checkpoints wrote. A later version adds its own beside it.
const char* const kVersion1Manifest = R"({"scruple_checkpoint":1,"library":"0.1.0","crc32":"b4f2fd85",
"recipe":"scruple",
"step":3,
"groups":[{"optimizer":"adamw","seed":7,"hyperparameters":{"beta1":0.9,"eps":1e-08,"lr":0.001}}],
"loss_scale":{"scale":65536,"growth":2,"backoff":0.5,"interval":2000,"clean":3},
"trainer":{"program":"a test"},
"files":[{"name":"model.safetensors","bytes":1316,"header_crc32":"f6417225"}],
"tensors":[{"name":"layer.weight","shape":[3,50],"group":0,"id":0,"step":4,"adagc_norm":0.25,"arrays":[{"name":"weight","format":"bf16+8","rounding":"nearest","planes":[{"kind":"codes","dtype":"BF16","shape":[3,50],"block_bytes":256,"pieces":[[0,0,150,"3970902e"]]},{"kind":"extra","dtype":"U8","shape":[150],"block_bytes":128,"pieces":[[0,0,150,"657790b7"]]}]},
 {"name":"exp_avg","format":"companded8","rounding":"stochastic","planes":[{"kind":"codes","dtype":"U8","shape":[150],"block_bytes":128,"pieces":[[0,0,150,"3ea100ad"]]},{"kind":"scale","dtype":"F32","shape":[3],"block_bytes":8,"pieces":[[0,0,150,"952e0465"]]}]}]}]}
)";
const char* const kVersion1File =
    "b8020000000000007b225f5f6d657461646174615f5f223a7b22666f726d6174223a227074222c226c69627261727922"
    "3a22302e312e30222c2272756e223a227b5c227265636970655c223a5c2273637275706c655c222c5c75303030615c22"
    "737465705c223a332c5c75303030615c2267726f7570735c223a5b7b5c226f7074696d697a65725c223a5c226164616d"
    "775c222c5c22736565645c223a372c5c226879706572706172616d65746572735c223a7b5c2262657461315c223a302e"
    "392c5c226570735c223a31652d30382c5c226c725c223a302e3030317d7d5d2c5c75303030615c226c6f73735f736361"
    "6c655c223a7b5c227363616c655c223a36353533362c5c2267726f7774685c223a322c5c226261636b6f66665c223a30"
    "2e352c5c22696e74657276616c5c223a323030302c5c22636c65616e5c223a337d2c5c75303030615c22747261696e65"
    "725c223a7b5c2270726f6772616d5c223a5c226120746573745c227d7d222c2273637275706c655f636865636b706f69"
    "6e74223a2231227d2c226c617965722e7765696768742f6578705f6176672f7363616c65223a7b226474797065223a22"
    "463332222c227368617065223a5b335d2c22646174615f6f666673657473223a5b302c31325d7d2c226c617965722e77"
    "6569676874223a7b226474797065223a2242463136222c227368617065223a5b332c35305d2c22646174615f6f666673"
    "657473223a5b31322c3331325d7d2c226c617965722e7765696768742f6578747261223a7b226474797065223a225538"
    "222c227368617065223a5b3135305d2c22646174615f6f666673657473223a5b3331322c3436325d7d2c226c61796572"
    "2e7765696768742f6578705f617667223a7b226474797065223a225538222c227368617065223a5b3135305d2c226461"
    "74615f6f666673657473223a5b3436322c3631325d7d7d2020202020202020205e9ab713c8d28b683cac9fff2259a419"
    "bff83787734172ea5569d4daf73bd093f868dff36e01ea66fa38e18555c79564b2b21ce84536638bc110bb71a78570bc"
    "b0c3ce65b88f0d31dd581a6cd80f3280ad79b9a731d4cd3320ee8546a61ecfe4a5ba5bb816f519fd49402467f09d2ef4"
    "2c7eb9021319be2053558d5e04b6fa25bbe12fdd6eb0b8ddc8e3956ff4e270e8ff353f1d5785fbb70f5a2125e3fe3138"
    "2b1065a736c64804b9f9f5e15354122a4859e1fdff1efb7ddad8846b79aeea7e83608ccf7bbddccc4effc17f8c69632d"
    "7ee6a78ca06eeb1e126dec621280cdfba331a8f2dca238b18d33686e349ee7066d1c0e9a6583aa68e77b83a30b32b756"
    "c026308f8d03d655509c4f37f375546f348109d70cedcc4d5c286828d886badc65260f0a55f4e67b46ffcec8887296c5"
    "46dffddbe5c399e6e3560f7ee74b8e351be1fb6da5e5801b4d4b738b3d2d4572426934e6527ea3a575d5514b618ff15e"
    "5a82bb50310f09dd72e11b6c13d5885338940020ec996356ceb555301943c8628da730ea1ac552665480e97f118a8b66"
    "b5f8876c1271bb2fe5ee78f34059111287839ea2bc4110b843b4a7ec63f055012799bad25e32a8f4e421709d7da95dc4"
    "d16b1ea16c2409dac3ad711da98f59d93537cb856aeeabcf30d4e1ec234fd2d3cd5882a047d34c45fa9e2ce7aa57c78a"
    "0e15aaf08baa6fd6f81bc7e3636c880441ea500191885680d1136ad5cb335a3e988e2c766b84ddc1f7539dd48198c738"
    "fe88ed1bba47cea17d3f0d241965ee06e2be8df3799c33c3e562d34ce9ccd4e10c049c4dce019f7af2fcce23dcf8b236"
    "6baa98cada3585d17394eadf3da247b6e711357a";

Manifest version1() {
  Manifest manifest;
  manifest.library = "0.1.0";
  manifest.recipe = "scruple";
  manifest.step = 3;
  manifest.groups = {{"adamw", 7, {{"beta1", 0.9}, {"eps", 1e-8}, {"lr", 0.001}}}};
  manifest.loss_scale = LossScale{65536, 2, 0.5, 2000, 3};
  manifest.trainer = {{"program", "a test"}};
  TensorState tensor;
  tensor.name = "layer.weight";
  tensor.shape = {3, 50};
  tensor.step = 4;
  tensor.adagc_norm = 0.25;
  tensor.arrays = {{"weight",
                    "bf16+8",
                    "nearest",
                    {{"codes", Dtype::bf16, {3, 50}, 256, {}}, {"extra", Dtype::u8, {150}, 128, {}}}},
                   {"exp_avg",
                    "companded8",
                    "stochastic",
                    {{"codes", Dtype::u8, {150}, 128, {}}, {"scale", Dtype::f32, {3}, 8, {}}}}};
  manifest.tensors = {tensor};
  return manifest;
}

std::string from_hex(std::string_view text) {
  std::string bytes;
  for (std::size_t i = 0; i + 1 < text.size(); i += 2)
    bytes.push_back(static_cast<char>(std::stoi(std::string(text.substr(i, 2)), nullptr, 16)));
  return bytes;
}

using Versions = Files;

TEST_F(Versions, TheFirstLoads) {
  std::filesystem::create_directory(path("v1"));
  put(kVersion1Manifest, "v1/manifest.json");
  put(from_hex(kVersion1File), "v1/model.safetensors");
  expect_sample(path("v1"), version1());
}

// max_lr was decay_lr's name in 0.1.0; those who ask for a hyperparameter know that.
TEST_F(Versions, AHyperparametersNameIsHandedOnAsItStands) {
  const Manifest manifest = parse_manifest(with("\"lr\":0.1", "\"lr\":0.1,\"max_lr\":0.5"), "x");
  EXPECT_EQ(manifest.groups[0].hyperparameters,
            (std::map<std::string, double>{{"lr", 0.1}, {"max_lr", 0.5}}));
}

// While version 1 is the one that is written, it is written like this to the byte.
TEST_F(Versions, TheFirstIsWritten) {
  ASSERT_EQ(kCheckpointVersion, 1u) << "keep TheFirstLoads, and freeze the new version beside it";
  write_by_io(path("v1"), version1());
  EXPECT_EQ(content("v1/manifest.json"), kVersion1Manifest);
  EXPECT_EQ(content("v1/model.safetensors"), from_hex(kVersion1File));
}

TEST_F(Versions, ANewerOneIsRefusedWithWhatItNeeds) {
  write_by_io(path("c"), version1());
  std::string text = content("c/manifest.json");
  text.replace(text.find(":1,\"library\":\"0.1.0\""), 20, ":2,\"library\":\"7.8.9\"");
  put(text.substr(0, text.find("\"crc32\"")) + "\"blake9\":1,\nwhatever", "c/manifest.json");
  const std::string message = message_of([&] { const Checkpoint checkpoint(path("c")); });
  expect_words(message, "version 2 of the checkpoint format, written by Scruple \"7.8.9\"", "newer");
  expect_words(message, "reads versions up to 1", "newer");
}

}  // namespace
}  // namespace scruple_tests
