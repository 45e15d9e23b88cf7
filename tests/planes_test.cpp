// Table rows as planes of a checkpoint: every optimizer in every recipe, every format of a weight, sizes around the
// blocks; what is saved comes back to the bit, from one file and from several.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <set>

#include "tests/files.h"
#include "train/run/checkpoint.h"

namespace scruple_tests {
namespace {

using namespace scruple;
using namespace scruple::train;

const std::vector<std::vector<std::int64_t>> kShapes = {{3}, {2, 64}, {129}, {5, 1000}, {0, 3}, {}, {70, 70}};

std::int64_t size_of(const std::vector<std::int64_t>& shape) {
  std::int64_t size = 1;
  for (const std::int64_t n : shape) size *= n;
  return size;
}

// Values of every magnitude, in every array.
void fill(Tensor& tensor) {
  std::vector<float> values(static_cast<std::size_t>(tensor.size()));
  for (const int a : used_arrays(tensor.raw())) {
    if (a == SCRUPLE_GRADIENT) continue;
    for (std::size_t i = 0; i < values.size(); ++i) {
      const float x = std::sin(static_cast<float>(i * 7 + static_cast<std::size_t>(a)));
      values[i] = std::abs(x) * std::ldexp(1.0f, static_cast<int>(i % 20) - 15);
      if (a == SCRUPLE_WEIGHT) values[i] = std::copysign(values[i], x);
    }
    tensor.encode(a, values.data());
  }
}

class Planes : public Files {
 protected:
  Engine engine{"cpu", 1};

  // Saves the tensors, and expects them back in fresh ones.
  void round_trip(const Optimizer& optimizer, const std::vector<scruple_tensor>& rows,
                  const std::vector<std::vector<std::int64_t>>& shapes, std::size_t shards) {
    std::vector<Tensor> tensors;
    io::Manifest manifest;
    manifest.library = "test";
    manifest.groups = {group_of(optimizer)};
    for (std::size_t i = 0; i < rows.size(); ++i) {
      tensors.emplace_back(engine, rows[i]);
      fill(tensors.back());
      manifest.tensors.push_back(stored_form("t" + std::to_string(i), shapes[i], tensors.back().raw()));
    }
    io::write_checkpoint(path("c"), manifest, shards, [&](std::size_t t, std::size_t a, std::size_t p) {
      return plane_of(tensors[t].raw(), manifest.tensors[t], a, p);
    });
    const io::Checkpoint checkpoint(path("c"));
    const Optimizer again = optimizer_of(checkpoint.manifest().groups[0]);
    for (std::size_t i = 0; i < rows.size(); ++i) {
      const io::TensorState& stored = checkpoint.manifest().tensors[i];
      Tensor fresh(engine, row_of(stored, again.raw()));
      load(engine, checkpoint, stored, fresh.raw());
      EXPECT_EQ(fresh.raw().id, rows[i].id);
      for (std::size_t a = 0; a < stored.arrays.size(); ++a)
        for (std::size_t p = 0; p < stored.arrays[a].planes.size(); ++p) {
          const auto was = plane_of(tensors[i].raw(), stored, a, p), is = plane_of(fresh.raw(), stored, a, p);
          ASSERT_EQ(was.size(), is.size());
          EXPECT_TRUE(was.empty() || std::memcmp(was.data(), is.data(), was.size()) == 0)
              << io::plane_name(stored, stored.arrays[a], stored.arrays[a].planes[p]);
        }
    }
  }
};

scruple_tensor described(const Optimizer& optimizer, std::int64_t size, std::uint32_t id) {
  scruple_tensor row = {};
  row.optimizer = optimizer.raw();
  row.size = size;
  row.step = 1;
  row.id = id;
  return row;
}

// In 0.1.0 decay_lr was max_lr.
TEST_F(Planes, OfAnOlderNameOfAHyperparameter) {
  const Optimizer optimizer("adamw", {{"decay_lr", 0.5}});
  io::Manifest manifest;
  manifest.library = "0.1.0";
  manifest.groups = {group_of(optimizer)};
  const auto write = [&](const char* name) {
    io::write_checkpoint(path(name), manifest, 1, [](auto...) -> std::span<const std::byte> { return {}; });
    return io::Checkpoint(path(name));
  };
  std::map<std::string, double>& hypers = manifest.groups[0].hyperparameters;
  const std::map<std::string, double> current = hypers;
  hypers["max_lr"] = 0.5;
  expect_words(message_of([&] { groups_of(write("both")); }),
               path("both") + ": hyperparameter \"decay_lr\" stands twice", "both names");
  hypers.erase("decay_lr");
  const std::vector<io::Group> groups = groups_of(write("old"));
  EXPECT_EQ(groups.at(0).hyperparameters, current);
  EXPECT_EQ(optimizer_of(groups[0]).get("decay_lr"), 0.5);
}

// As 0.1 saved it: everything rounded to nearest, `scant` with 4 bits, AMSGrad's second moments in 8. Codes mean the
// same whatever rounded them; moments in a format that the recipe has left are decoded and encoded.
TEST_F(Planes, OfEarlierRecipesLoadIntoTodays) {
  struct Earlier {
    const char *recipe, *second;
    double amsgrad;
  };
  for (const Earlier& earlier :
       {Earlier{"scruple", "companded8", 0}, {"scant", "log4", 0}, {"scruple", "companded8", 1}}) {
    SCOPED_TRACE(std::string(earlier.recipe) + " with " + earlier.second);
    Optimizer adamw("adamw");
    adamw.set("amsgrad", earlier.amsgrad);
    scruple_tensor now = described(adamw, 5000, 1);
    check(scruple_tensor_use(&now, earlier.recipe));
    scruple_tensor then = now;
    for (const int a : {SCRUPLE_WEIGHT + 0, SCRUPLE_SLOT + 0, SCRUPLE_SLOT + 1, SCRUPLE_SLOT + 2}) {
      then.arrays[a].rounding = SCRUPLE_NEAREST;
      if (a > SCRUPLE_SLOT) then.arrays[a].format = format_named(earlier.second);
    }
    const auto saved_as = [&](int weight_rounding, const std::string& name) {
      then.arrays[SCRUPLE_WEIGHT].rounding = weight_rounding;
      Tensor tensor(engine, then);
      fill(tensor);
      io::Manifest manifest;
      manifest.library = "test";
      manifest.groups = {group_of(adamw)};
      manifest.tensors = {stored_form("t", {5000}, tensor.raw())};
      io::write_checkpoint(path(name), manifest, 1, [&](std::size_t, std::size_t a, std::size_t p) {
        return plane_of(tensor.raw(), manifest.tensors[0], a, p);
      });
      return tensor;
    };
    const std::string name =
        std::string(earlier.recipe) + earlier.second + (earlier.amsgrad != 0 ? "ams" : "");
    const Tensor before = saved_as(SCRUPLE_NEAREST, name);
    const io::Checkpoint checkpoint(path(name));
    const Tensor after(engine, now);
    load(engine, checkpoint, checkpoint.manifest().tensors[0], after.raw());
    for (const int a : used_arrays(now)) {
      if (a == SCRUPLE_GRADIENT) continue;
      std::vector<float> was(5000), is(5000);
      before.decode(a, was.data()), after.decode(a, is.data());
      const bool narrower = info_of(now.arrays[a].format).code_bits == 5;  // log5 rounds what log4 held
      for (std::size_t i = 0; i < was.size(); ++i)
        ASSERT_NEAR(is[i], was[i], narrower ? 0.34 * was[i] + 1e-4f : 0) << a << " at " << i;
    }
    saved_as(SCRUPLE_STOCHASTIC, name + "s");  // a split weight that is read differently
    const io::Checkpoint other(path(name + "s"));
    EXPECT_THROW(load(engine, other, other.manifest().tensors[0], after.raw()), std::runtime_error);
  }
}

TEST_F(Planes, OfEveryOptimizerInEveryRecipeComeBack) {
  int combinations = 0;
  for (int rule = 0; rule < scruple_rule_count(); ++rule)
    for (int recipe = 0; recipe < scruple_recipe_count(); ++recipe) {
      scruple_rule_info rule_info;
      scruple_recipe_info recipe_info;
      check(scruple_rule_at(rule, &rule_info));
      check(scruple_recipe_at(recipe, &recipe_info));
      SCOPED_TRACE(std::string(rule_info.name) + " " + recipe_info.name);
      const Optimizer optimizer(rule_info.name);
      std::vector<scruple_tensor> rows;
      bool fits = true;
      for (std::size_t i = 0; i < kShapes.size(); ++i) {
        rows.push_back(described(optimizer, size_of(kShapes[i]), static_cast<std::uint32_t>(i)));
        fits = scruple_tensor_use(&rows.back(), recipe_info.name) == SCRUPLE_OK && fits;
      }
      if (!fits) continue;
      ++combinations;
      round_trip(optimizer, rows, kShapes, combinations % 2 == 0 ? 1 : 4);
    }
  EXPECT_GT(combinations, 20);
}

TEST_F(Planes, OfEveryFormatOfAWeightComeBack) {
  const Optimizer sgd("sgd");
  std::set<std::string> dtypes;
  for (int f = 0; f < scruple_format_count(); ++f) {
    const scruple_format_info info = info_of(scruple_format_at(f));
    if ((info.roles & SCRUPLE_ROLE_WEIGHT) == 0) continue;
    SCOPED_TRACE(info.name);
    std::vector<scruple_tensor> rows;
    for (const auto& shape : kShapes) {
      rows.push_back(described(sgd, size_of(shape), 0));
      rows.back().arrays[SCRUPLE_WEIGHT].format = scruple_format_at(f);
    }
    round_trip(sgd, rows, kShapes, 3);
    const io::Safetensors file(path("c/model-00001-of-00003.safetensors"));
    dtypes.insert(std::string(info.name) + " " + io::name_of(file.at("t0").dtype));
  }
  for (const char* wanted : {"fp32 F32", "bf16 BF16", "fp16 F16", "bf16+8 BF16", "fp16+fp32 F16", "int12 U8"})
    EXPECT_TRUE(dtypes.contains(wanted)) << wanted;
}

TEST_F(Planes, OfAnotherFormatAreRefused) {
  const Optimizer adamw("adamw");
  scruple_tensor row = described(adamw, 100, 0);
  check(scruple_tensor_use(&row, "scruple"));
  const io::TensorState good = stored_form("t", {100}, row);
  EXPECT_EQ(message_of([&] { row_of(good, adamw.raw()); }), "no error");
  const auto refused = [&](const char* words, const auto& change) {
    io::TensorState bad = good;
    change(bad);
    expect_words(message_of([&] { row_of(bad, adamw.raw()); }), words, words);
  };
  refused("nosuch", [](io::TensorState& t) { t.arrays[0].format = "nosuch"; });
  refused("nosuch", [](io::TensorState& t) { t.arrays[0].rounding = "nosuch"; });
  refused("nosuch", [](io::TensorState& t) { t.arrays[1].name = "nosuch"; });
  refused("2 arrays", [](io::TensorState& t) { t.arrays.pop_back(); });
  refused("no exp_avg_sq", [](io::TensorState& t) { t.arrays[2].name = "exp_avg"; });
  refused("planes of weight", [](io::TensorState& t) { t.arrays[0].format = "bf16+9"; });
  refused("planes of weight", [](io::TensorState& t) { t.arrays[0].planes[0].dtype = io::Dtype::f16; });
  refused("planes of exp_avg", [](io::TensorState& t) { t.arrays[1].planes[1].shape = {3}; });
  refused("planes of exp_avg", [](io::TensorState& t) { t.arrays[1].planes.pop_back(); });
}

}  // namespace
}  // namespace scruple_tests
