// Checkpoints through scruple.h: the same bytes on disk as io/ writes, what is read back in any parts, and errors by
// status and message, whatever the caller or the files say.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>

#include "include/scruple/scruple.h"
#include "io/checkpoint.h"
#include "tests/checkpoints.h"

namespace scruple_tests {
namespace {

// The manifest as a caller of the ABI says it.
struct Given {
  std::vector<std::vector<scruple_checkpoint_hyper>> hypers;
  std::vector<scruple_checkpoint_group> groups;
  std::vector<scruple_checkpoint_note> notes;
  std::vector<std::vector<scruple_checkpoint_array>> arrays;
  std::vector<scruple_checkpoint_tensor> tensors;
  scruple_checkpoint_contents contents = {};

  const scruple_checkpoint_contents* get() const { return &contents; }

  explicit Given(const io::Manifest& manifest) {
    for (const io::Group& group : manifest.groups) {
      auto& list = hypers.emplace_back();
      for (const auto& [name, value] : group.hyperparameters) list.push_back({name.c_str(), value});
      groups.push_back({group.optimizer.c_str(), group.seed, list.data(), std::ssize(list)});
    }
    for (const auto& [name, text] : manifest.trainer)
      notes.push_back({name.c_str(), text.data(), std::ssize(text)});
    for (const io::TensorState& tensor : manifest.tensors) {
      auto& list = arrays.emplace_back();
      for (const io::Array& array : tensor.arrays)
        list.push_back({array.name.c_str(), array.format.c_str(), array.rounding.c_str(), 0, nullptr, 0});
      tensors.push_back({tensor.name.c_str(), tensor.shape.data(), std::ssize(tensor.shape),
                         static_cast<std::int64_t>(tensor.group), tensor.step, tensor.id,
                         tensor.adagc_norm.value_or(0), list.data(), std::ssize(list)});
    }
    contents.recipe = manifest.recipe.c_str();
    contents.step = manifest.step;
    contents.groups = groups.data();
    contents.group_count = std::ssize(groups);
    const io::LossScale scale = manifest.loss_scale.value_or(io::LossScale{});
    contents.loss_scale = {scale.scale, scale.growth, scale.backoff, scale.interval, scale.clean};
    contents.notes = notes.data();
    contents.note_count = std::ssize(notes);
    contents.tensors = tensors.data();
    contents.tensor_count = std::ssize(tensors);
  }
};

struct Closes {
  void operator()(scruple_checkpoint* checkpoint) const { scruple_checkpoint_close(checkpoint); }
  void operator()(scruple_checkpoint_writer* writer) const { scruple_checkpoint_abandon(writer); }
};
using Reader = std::unique_ptr<scruple_checkpoint, Closes>;
using Writer = std::unique_ptr<scruple_checkpoint_writer, Closes>;

class Checkpoints : public Files {
 protected:
  static void expect(scruple_status wanted, scruple_status found, const std::string& words) {
    EXPECT_EQ(found, wanted) << words;
    if (found != SCRUPLE_OK) expect_words(scruple_last_error(), words, "status " + std::to_string(found));
  }

  static Writer begin(const std::string& folder, const io::Manifest& manifest, std::int64_t files = 1) {
    scruple_checkpoint_writer* writer = nullptr;
    expect(SCRUPLE_OK, scruple_checkpoint_begin(folder.c_str(), Given(manifest).get(), files, &writer), "");
    return Writer(writer);
  }
  // All planes, the last first, `part` bytes at a time.
  static void write_all(const Writer& writer, const io::Manifest& manifest, std::size_t part) {
    for (std::size_t t = manifest.tensors.size(); t-- > 0;)
      for (std::size_t a = manifest.tensors[t].arrays.size(); a-- > 0;)
        for (std::size_t p = manifest.tensors[t].arrays[a].planes.size(); p-- > 0;) {
          const io::TensorState& tensor = manifest.tensors[t];
          const std::string data = data_of(tensor, tensor.arrays[a], tensor.arrays[a].planes[p]);
          for (std::size_t at = 0; at < data.size(); at += part)
            ASSERT_EQ(scruple_checkpoint_write(writer.get(), static_cast<std::int64_t>(t),
                                               static_cast<std::int64_t>(a), static_cast<std::int64_t>(p),
                                               data.data() + at,
                                               static_cast<std::int64_t>(std::min(part, data.size() - at))),
                      SCRUPLE_OK)
                << scruple_last_error();
        }
  }
  static void save(const std::string& folder, const io::Manifest& manifest, std::int64_t files = 1,
                   std::size_t part = 77) {
    const Writer writer = begin(folder, manifest, files);
    write_all(writer, manifest, part);
    expect(SCRUPLE_OK, scruple_checkpoint_commit(writer.get()), "");
  }
  static Reader open(const std::string& folder) {
    scruple_checkpoint* checkpoint = nullptr;
    expect(SCRUPLE_OK, scruple_checkpoint_open(folder.c_str(), &checkpoint), "");
    return Reader(checkpoint);
  }
  static void refuse_open(const std::string& folder, scruple_status wanted, const std::string& words) {
    scruple_checkpoint* checkpoint = nullptr;
    expect(wanted, scruple_checkpoint_open(folder.c_str(), &checkpoint), words);
    EXPECT_EQ(checkpoint, nullptr);
  }
  void refuse_begin(const scruple_checkpoint_contents& contents, const std::string& words) const {
    scruple_checkpoint_writer* writer = nullptr;
    expect(SCRUPLE_INVALID, scruple_checkpoint_begin(path("refused").c_str(), &contents, 1, &writer), words);
    EXPECT_EQ(writer, nullptr);
    EXPECT_FALSE(std::filesystem::exists(path("refused")));
  }
};

TEST_F(Checkpoints, AreByteForByteThoseOfTheOtherDoor) {
  const io::Manifest manifest = sample(SCRUPLE_VERSION);
  for (const std::size_t files : {1u, 3u, 9u})
    for (const std::size_t part : {1u, 100u, 1u << 20}) {
      std::filesystem::remove_all(path("io"));
      write_by_io(path("io"), manifest, files);
      save(path("abi"), manifest, static_cast<std::int64_t>(files), part);
      std::size_t count = 0;
      for (const auto& entry : std::filesystem::directory_iterator(path("io"))) {
        const std::string name = entry.path().filename().string();
        EXPECT_TRUE(content("abi/" + name) == content("io/" + name)) << name;
        ++count;
      }
      EXPECT_EQ(count, files + 1);
      EXPECT_EQ(std::distance(std::filesystem::directory_iterator(path("abi")), {}),
                static_cast<std::ptrdiff_t>(count));
    }
}

// In 0.1.0 decay_lr was max_lr: who still says so writes what everyone reads, and what 0.1.0 wrote is read so.
TEST_F(Checkpoints, TakeAHyperparametersOldName) {
  io::Manifest manifest = sample(SCRUPLE_VERSION);
  manifest.groups[0].hyperparameters = {{"max_lr", 0.5}};
  save(path("now"), manifest);
  write_by_io(path("then"), manifest);
  for (const char* name : {"now", "then"}) {
    const Reader checkpoint = open(path(name));
    const scruple_checkpoint_group& group = scruple_checkpoint_manifest(checkpoint.get())->groups[0];
    ASSERT_EQ(group.hyper_count, 1);
    EXPECT_STREQ(group.hypers[0].name, "decay_lr") << name;
    EXPECT_EQ(group.hypers[0].value, 0.5);
  }
  EXPECT_EQ(content("now/manifest.json").find("max_lr"), std::string::npos);
  EXPECT_NE(content("then/manifest.json").find("max_lr"), std::string::npos);
}

TEST_F(Checkpoints, RefuseAHyperparameterByBothItsNames) {
  io::Manifest manifest = sample(SCRUPLE_VERSION);
  manifest.groups[0].hyperparameters = {{"decay_lr", 0.5}, {"max_lr", 0.5}};
  refuse_begin(*Given(manifest).get(), "\"decay_lr\" stands twice");
  write_by_io(path("c"), manifest);
  refuse_open(path("c"), SCRUPLE_FILE, path("c") + ": hyperparameter \"decay_lr\" stands twice");
}

TEST_F(Checkpoints, SayWhatIsInThem) {
  const io::Manifest manifest = sample(SCRUPLE_VERSION);
  save(path("run/checkpoints/step-00000012"), manifest, 2);
  const Reader checkpoint = open(path("run"));
  const scruple_checkpoint_contents& found = *scruple_checkpoint_manifest(checkpoint.get());
  EXPECT_EQ(found.folder, path("run/checkpoints/step-00000012"));
  EXPECT_STREQ(found.library, SCRUPLE_VERSION);
  EXPECT_EQ(found.recipe, manifest.recipe);
  EXPECT_EQ(found.step, 12);
  ASSERT_EQ(found.group_count, 2);
  EXPECT_STREQ(found.groups[0].optimizer, "adamw");
  EXPECT_EQ(found.groups[0].seed, ~std::uint64_t{0});
  ASSERT_EQ(found.groups[0].hyper_count, 2);
  EXPECT_STREQ(found.groups[0].hypers[1].name, "lr");
  EXPECT_EQ(found.groups[0].hypers[1].value, 1e-4);
  EXPECT_EQ(found.loss_scale.scale, 65536);
  EXPECT_EQ(found.loss_scale.clean, 17);
  ASSERT_EQ(found.note_count, 3);
  EXPECT_EQ(std::string(found.notes[1].text, static_cast<std::size_t>(found.notes[1].bytes)),
            std::string("a\0b", 3));
  ASSERT_EQ(found.tensor_count, std::ssize(manifest.tensors));
  for (std::size_t t = 0; t < manifest.tensors.size(); ++t) {
    const scruple_checkpoint_tensor& tensor = found.tensors[t];
    const io::TensorState& wanted = manifest.tensors[t];
    EXPECT_EQ(tensor.name, wanted.name);
    EXPECT_EQ(std::vector(tensor.shape, tensor.shape + tensor.dimensions), wanted.shape);
    EXPECT_EQ(tensor.group, static_cast<std::int64_t>(wanted.group));
    EXPECT_EQ(tensor.id, wanted.id);
    EXPECT_EQ(tensor.step, 13);
    EXPECT_EQ(tensor.adagc_norm, wanted.adagc_norm.value_or(0));
    ASSERT_EQ(tensor.array_count, 2);
    for (int a = 0; a < 2; ++a) {
      EXPECT_EQ(tensor.arrays[a].format, wanted.arrays[static_cast<std::size_t>(a)].format);
      EXPECT_EQ(tensor.arrays[a].rounding, wanted.arrays[static_cast<std::size_t>(a)].rounding);
      EXPECT_EQ(tensor.arrays[a].fits, 1);
      ASSERT_EQ(tensor.arrays[a].plane_count, 2);
    }
    EXPECT_STREQ(tensor.arrays[0].planes[0].dtype, "BF16");
    EXPECT_STREQ(tensor.arrays[1].planes[1].kind, "scale");
  }
  EXPECT_EQ(scruple_checkpoint_manifest(nullptr), nullptr);
}

TEST_F(Checkpoints, AreReadInAnyParts) {
  const io::Manifest manifest = sample(SCRUPLE_VERSION);
  save(path("c"), manifest, 3);
  const Reader checkpoint = open(path("c"));
  for (std::size_t t = 0; t < manifest.tensors.size(); ++t)
    for (std::size_t a = 0; a < 2; ++a)
      for (std::size_t p = 0; p < 2; ++p) {
        const io::TensorState& tensor = manifest.tensors[t];
        const std::string data = data_of(tensor, tensor.arrays[a], tensor.arrays[a].planes[p]);
        const auto read = [&](std::size_t first, std::size_t bytes) {
          std::string got(bytes, '\0');
          EXPECT_EQ(scruple_checkpoint_read(checkpoint.get(), static_cast<std::int64_t>(t),
                                            static_cast<std::int64_t>(a), static_cast<std::int64_t>(p),
                                            static_cast<std::int64_t>(first), got.data(),
                                            static_cast<std::int64_t>(bytes)),
                    SCRUPLE_OK)
              << scruple_last_error();
          return got;
        };
        EXPECT_EQ(read(0, data.size()), data);
        std::string parts;
        for (std::size_t at = 0; at < data.size(); at += 100)
          parts += read(at, std::min<std::size_t>(100, data.size() - at));
        EXPECT_EQ(parts, data);
        for (const std::size_t first : {data.size() / 3, data.size() - std::min<std::size_t>(1, data.size())})
          EXPECT_EQ(read(first, data.size() - first), data.substr(first));
      }
  char byte = 0;
  for (const std::int64_t first : {std::int64_t{-1}, std::int64_t{1280}, INT64_MAX})
    expect(SCRUPLE_INVALID, scruple_checkpoint_read(checkpoint.get(), 0, 0, 0, first, &byte, 1), "1280");
  expect(SCRUPLE_INVALID, scruple_checkpoint_read(checkpoint.get(), 0, 0, 0, 0, &byte, -1), "bytes");
  expect(SCRUPLE_INVALID, scruple_checkpoint_read(checkpoint.get(), 0, 0, 0, 0, nullptr, 1), "to is null");
  expect(SCRUPLE_INVALID, scruple_checkpoint_read(checkpoint.get(), -1, 0, 0, 0, &byte, 1), "tensor -1");
  expect(SCRUPLE_INVALID, scruple_checkpoint_read(checkpoint.get(), 7, 0, 0, 0, &byte, 1), "there are 7");
  expect(SCRUPLE_INVALID, scruple_checkpoint_read(checkpoint.get(), 0, 2, 0, 0, &byte, 1), "array 2");
  expect(SCRUPLE_INVALID, scruple_checkpoint_read(checkpoint.get(), 0, 0, 2, 0, &byte, 1), "plane 2");
  expect(SCRUPLE_INVALID, scruple_checkpoint_read(nullptr, 0, 0, 0, 0, &byte, 1), "checkpoint is null");
  expect(SCRUPLE_INVALID, scruple_checkpoint_verify(checkpoint.get(), 7), "tensor 7");
}

TEST_F(Checkpoints, DamageIsFoundWhereItIsReadInOrder) {
  const io::Manifest manifest = sample(SCRUPLE_VERSION);
  save(path("c"), manifest);
  std::string bad = content("c/model.safetensors");
  const std::size_t at = bad.find(
      data_of(manifest.tensors[0], manifest.tensors[0].arrays[0], manifest.tensors[0].arrays[0].planes[0]));
  ASSERT_NE(at, bad.npos);
  bad[at + 700] = static_cast<char>(bad[at + 700] ^ 4);
  put(bad, "c/model.safetensors");
  const Reader checkpoint = open(path("c"));
  std::string memory(1280, '\0');
  const auto read = [&](std::int64_t first, std::int64_t bytes) {
    return scruple_checkpoint_read(checkpoint.get(), 0, 0, 0, first, memory.data(), bytes);
  };
  expect(SCRUPLE_FILE, scruple_checkpoint_verify(checkpoint.get(), 0), "tensor \"t0\": its checksum is");
  expect(SCRUPLE_OK, scruple_checkpoint_verify(checkpoint.get(), 1), "");
  expect(SCRUPLE_FILE, read(0, 1280), "damaged");
  for (const std::int64_t first : {0, 500, 1000}) {
    if (first < 1000) {
      expect(SCRUPLE_OK, read(first, 500), "");
    } else {
      expect(SCRUPLE_FILE, read(first, 280), "damaged");
    }
  }
  expect(SCRUPLE_OK, read(1000, 280), "");  // alone: nothing says what it should be
}

TEST_F(Checkpoints, FilesThatAreCutWhileTheyAreReadAreAnError) {
  const io::Manifest manifest = sample(SCRUPLE_VERSION);
  save(path("c"), manifest);
  const Reader checkpoint = open(path("c"));
  std::filesystem::resize_file(path("c/model.safetensors"),
                               std::filesystem::file_size(path("c/model.safetensors")) / 2);
  expect(SCRUPLE_FILE, scruple_checkpoint_verify(checkpoint.get(), 6), "was shortened");
}

TEST_F(Checkpoints, WhatIsNoneIsRefused) {
  refuse_open(path("nowhere"), SCRUPLE_INVALID, "no manifest.json");
  refuse_open(path("c.partial-1-0"), SCRUPLE_INVALID, "did not end");
  std::filesystem::create_directory(path("c.partial-1-0"));
  refuse_open(path("c"), SCRUPLE_INVALID, "c.partial-1-0 beside it");
  save(path("c"), sample(SCRUPLE_VERSION));
  const std::string good = content("c/manifest.json");
  const auto with = [&](const std::string& what, const std::string& by) {
    std::string text = good;
    const std::size_t at = text.find(what);
    EXPECT_NE(at, text.npos) << what;
    text.replace(at, what.size(), by);
    const std::size_t digits = text.find("\"crc32\":\"") + 9;
    put(text.replace(digits, 8, io::hex(io::manifest_crc(text))), "c/manifest.json");
  };
  put("{", "c/manifest.json");
  refuse_open(path("c"), SCRUPLE_FILE, "first line");
  with("\"scruple_checkpoint\":1", "\"scruple_checkpoint\":2");
  refuse_open(path("c"), SCRUPLE_INVALID, "version 2");
  with("\"name\":\"t0\"", "\"name\":\"t1\"");
  refuse_open(path("c"), SCRUPLE_FILE, "two tensors");
  with("\"optimizer\":\"lion\"", "\"optimizer\":\"li\\u0000n\"");
  refuse_open(path("c"), SCRUPLE_FILE, "zero byte");
  const auto field = [](const std::string& name, const std::string& value) {
    return "\"" + name + "\":\"" + value + "\"";
  };
  for (const auto& [format, rounding] :
       std::vector<std::pair<std::string, std::string>>{{"bf16+7", "nearest"},
                                                        {"fp32", "nearest"},
                                                        {"nosuch", "nearest"},
                                                        {"bf16+8", "dither"},
                                                        {"bf16+8", "x"}}) {
    with(field("format", "bf16+8") + "," + field("rounding", "nearest"),
         field("format", format) + "," + field("rounding", rounding));
    const Reader checkpoint = open(path("c"));
    const scruple_checkpoint_contents& found = *scruple_checkpoint_manifest(checkpoint.get());
    EXPECT_EQ(found.tensors[0].arrays[0].fits, 0) << format;
    EXPECT_EQ(found.tensors[0].arrays[1].fits, 1) << format;
  }
  scruple_checkpoint* checkpoint = nullptr;
  expect(SCRUPLE_INVALID, scruple_checkpoint_open(nullptr, &checkpoint), "path is null");
  expect(SCRUPLE_INVALID, scruple_checkpoint_open(path("c").c_str(), nullptr), "out is null");
}

TEST_F(Checkpoints, WhatNoFileCanHoldIsRefusedBeforeAnythingIsWritten) {
  const io::Manifest good = sample(SCRUPLE_VERSION);
  const auto refuse = [&](const auto& change, const std::string& words) {
    io::Manifest manifest = good;
    change(manifest);
    refuse_begin(Given(manifest).contents, words);
  };
  refuse([](io::Manifest& m) { m.tensors[1].name = "t0"; }, "two tensors");
  refuse([](io::Manifest& m) { m.tensors[1].name = "t0/exp_avg"; }, "a tensor has that name too");
  refuse([](io::Manifest& m) { m.tensors[1].name = "__metadata__"; }, "__metadata__");
  refuse([](io::Manifest& m) { m.tensors[1].name = "\xff"; }, "UTF-8");
  refuse([](io::Manifest& m) { m.tensors[1].group = 2; }, "group 2");
  refuse([](io::Manifest& m) { m.tensors[1].step = 0; }, "next step is 0");
  refuse([](io::Manifest& m) { m.tensors[1].shape = {-1}; }, "63 bits");
  refuse([](io::Manifest& m) { m.tensors[1].shape = {1 << 30, 1 << 30}; }, "2^50");
  refuse([](io::Manifest& m) { m.tensors[1].shape.assign(65, 1); }, "64 dimensions");
  refuse([](io::Manifest& m) { m.tensors[1].arrays[0].format = "nosuch"; }, "nosuch");
  refuse([](io::Manifest& m) { m.tensors[1].arrays[0].name = "momentum"; }, "first array must be its weight");
  refuse([](io::Manifest& m) { m.tensors[1].arrays.clear(); }, "first array must be its weight");
  refuse([](io::Manifest& m) { m.groups[0].hyperparameters["lr"] = std::nan(""); }, "finite");
  refuse([](io::Manifest& m) { m.loss_scale->growth = INFINITY; }, "finite");
  refuse([](io::Manifest& m) { m.loss_scale->clean = -1; }, "clean -1");
  refuse([](io::Manifest& m) { m.tensors[0].adagc_norm = INFINITY; }, "finite");
  refuse([](io::Manifest& m) { m.groups.resize(1025); }, "1024");
  refuse([](io::Manifest& m) { m.trainer["long"].assign(100'000'000, 'x'); }, "shorten");
  refuse([](io::Manifest& m) { m.step = -1; }, "step is -1");
  const auto refuse_c = [&](const auto& change, const std::string& words) {
    Given given(good);
    change(given);
    refuse_begin(given.contents, words);
  };
  refuse_c([](Given& g) { g.contents.recipe = nullptr; }, "recipe is null");
  refuse_c([](Given& g) { g.contents.tensors = nullptr; }, "7 tensors at null");
  refuse_c([](Given& g) { g.contents.tensor_count = -1; }, "-1 tensors");
  refuse_c([](Given& g) { g.tensors[0].name = nullptr; }, "name is null");
  refuse_c([](Given& g) { g.tensors[0].shape = nullptr; }, "dimensions at null");
  refuse_c([](Given& g) { g.tensors[0].id = std::int64_t{1} << 32; }, "32 bits");
  refuse_c([](Given& g) { g.tensors[0].group = -1; }, "group -1");
  refuse_c([](Given& g) { g.arrays[0][0].rounding = nullptr; }, "rounding is null");
  refuse_c([](Given& g) { g.notes[0].text = nullptr; }, "bytes of a note at null");
  scruple_checkpoint_writer* writer = nullptr;
  for (const std::int64_t files : {-1, 0, 257})
    expect(SCRUPLE_INVALID, scruple_checkpoint_begin(path("x").c_str(), Given(good).get(), files, &writer),
           "1 to 256");
  expect(SCRUPLE_INVALID, scruple_checkpoint_begin(path("x").c_str(), nullptr, 1, &writer),
         "contents is null");
  expect(SCRUPLE_INVALID, scruple_checkpoint_begin(nullptr, Given(good).get(), 1, &writer), "path is null");
  EXPECT_EQ(files(), 0u);
}

TEST_F(Checkpoints, OnlyACheckpointIsReplaced) {
  const io::Manifest manifest = sample(SCRUPLE_VERSION);
  save(path("c"), manifest, 2);
  save(path("c/"), manifest, 1);
  EXPECT_EQ(files(), 1u);
  put("mine", "c/thesis.txt");
  scruple_checkpoint_writer* writer = nullptr;
  const auto refuse = [&](const std::string& name, const std::string& words) {
    expect(SCRUPLE_INVALID, scruple_checkpoint_begin(path(name).c_str(), Given(manifest).get(), 1, &writer),
           words);
  };
  refuse("c", "thesis.txt");
  refuse("c/thesis.txt", "is not a folder");
  refuse("d.partial-x", ".partial-");
  EXPECT_EQ(files(), 1u);
  std::filesystem::create_directory(path("empty"));
  save(path("empty"), manifest);
  std::filesystem::create_directory_symlink(path("empty"), path("link"));
  save(path("link"), manifest);
  EXPECT_TRUE(std::filesystem::is_symlink(path("link")));
  save(path("new/and/deeper"), manifest);
  open(path("new/and/deeper"));
  EXPECT_EQ(files(), 4u);
}

TEST_F(Checkpoints, AppearWithCommitAlone) {
  const io::Manifest manifest = sample(SCRUPLE_VERSION);
  {
    const Writer writer = begin(path("c"), manifest);
    write_all(writer, manifest, 1000);
    EXPECT_FALSE(std::filesystem::exists(path("c")));
    EXPECT_EQ(files(), 1u) << "the one that is begun";
  }
  EXPECT_EQ(files(), 0u) << "abandoned";
  const Writer writer = begin(path("c"), manifest);
  const std::string data(2000, 'x');
  const auto write = [&](std::int64_t tensor, std::int64_t array, std::int64_t plane, std::int64_t bytes) {
    return scruple_checkpoint_write(writer.get(), tensor, array, plane, data.data(), bytes);
  };
  expect(SCRUPLE_INVALID, scruple_checkpoint_commit(writer.get()), "\"t0\" lacks 1280 of its 1280 bytes");
  expect(SCRUPLE_OK, write(0, 0, 0, 1000), "");
  expect(SCRUPLE_INVALID, write(0, 0, 0, 281), "280 are missing, and 281 were given");
  expect(SCRUPLE_INVALID, scruple_checkpoint_commit(writer.get()), "lacks 280");
  expect(SCRUPLE_INVALID, write(7, 0, 0, 1), "no plane 0 of array 0 of tensor 7");
  for (const int index : {-1, 2}) {
    expect(SCRUPLE_INVALID, write(0, index, 0, 1), "there is no plane");
    expect(SCRUPLE_INVALID, write(0, 0, index, 1), "there is no plane");
  }
  expect(SCRUPLE_INVALID, write(0, 0, 0, -1), "bytes is -1");
  expect(SCRUPLE_INVALID, scruple_checkpoint_write(writer.get(), 0, 0, 0, nullptr, 1), "from is null");
  expect(SCRUPLE_INVALID, scruple_checkpoint_write(nullptr, 0, 0, 0, data.data(), 1), "writer is null");
  expect(SCRUPLE_INVALID, scruple_checkpoint_commit(nullptr), "writer is null");
  expect(SCRUPLE_OK, write(0, 0, 0, 280), "");
  io::Manifest rest = manifest;  // what is missing may still come
  for (std::size_t t = 0; t < rest.tensors.size(); ++t)
    for (std::size_t a = 0; a < 2; ++a)
      for (std::size_t p = 0; p < 2; ++p)
        if (t + a + p > 0) {
          const std::int64_t bytes = rest.tensors[t].arrays[a].planes[p].bytes();
          const std::string zeros(static_cast<std::size_t>(bytes), '\0');
          expect(SCRUPLE_OK,
                 scruple_checkpoint_write(writer.get(), static_cast<std::int64_t>(t),
                                          static_cast<std::int64_t>(a), static_cast<std::int64_t>(p),
                                          zeros.data(), bytes),
                 "");
        }
  expect(SCRUPLE_OK, scruple_checkpoint_commit(writer.get()), "");
  const Reader checkpoint = open(path("c"));
  for (std::int64_t t = 0; t < 6; ++t) expect(SCRUPLE_OK, scruple_checkpoint_verify(checkpoint.get(), t), "");
  expect(SCRUPLE_FILE, scruple_checkpoint_commit(writer.get()), "finished");
}

}  // namespace
}  // namespace scruple_tests
