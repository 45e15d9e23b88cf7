// What tests of the CPU's transformer share: models of odd and of large sizes, their weights, batches, a pass over one with
// all of its gradients, and comparisons.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <set>
#include <span>
#include <vector>

#include "tests/descriptions.h"
#include "tests/gpt_reference.h"
#include "train/cpu/transformer.h"

namespace scruple::train {

using Values = std::vector<std::vector<float>>;
inline constexpr Precision kTypes[] = {Precision::fp32, Precision::bf16, Precision::fp16};

// ---- Models ----

inline const Description kOdd = gpt2({2, 12, 3, 7, 11});
inline const Description kSmallOnes[] = {kOdd, other_parts({2, 12, 6, 7, 11}, 3, 10)};
// More than one chunk of tokens, of queries and of gradient tiles.
inline const Description kLargeOnes[] = {gpt2({2, 160, 5, 150, 300}),
                                         other_parts({2, 160, 4, 150, 300}, 2, 34)};
// More words than logits are computed at a time.
inline const Description kWordyOnes[] = {gpt2({1, 12, 3, 150, 1100}),
                                         other_parts({1, 12, 6, 150, 2100}, 3, 10)};

inline std::vector<Description> with_many_words(std::span<const Description> shapes) {
  std::vector<Description> all(shapes.begin(), shapes.end());
  all.insert(all.end(), std::begin(kWordyOnes), std::end(kWordyOnes));
  return all;
}

// ---- A pass over one ----

// WeightValues in fp32. Handed out as copies in the caller's scratch, as a low-bit store would.
struct Store : WeightValues {
  explicit Store(const Description& shape, unsigned seed = 1) {
    std::mt19937 random(seed);
    for (const Parameter& p : parameters_of(shape)) {
      // Far from the initial values, so that every path matters: norms and biases too.
      const float deviation = p.shape.size() == 2 ? 1 / std::sqrt(static_cast<float>(shape.width)) : 0.2f;
      std::normal_distribution<float> normal(static_cast<float>(p.mean), deviation);
      std::vector<float>& v = values_of.emplace_back(static_cast<std::size_t>(p.size()));
      for (float& x : v) x = normal(random);
    }
  }
  const float* values(int parameter, float* scratch) override {
    const std::vector<float>& v = values_of[static_cast<std::size_t>(parameter)];
    if (direct) return v.data();
    std::copy(v.begin(), v.end(), scratch);
    return scratch;
  }
  Values values_of;
  bool direct = false;
};

// Keeps every gradient, asking for `tile_rows` rows at a time, and compares it with its bound.
struct Keep : Gradients {
  Keep(const Description& shape, std::int64_t rows) : list(parameters_of(shape)), tile_rows(rows) {
    for (const Parameter& p : list)
      all.emplace_back(static_cast<std::size_t>(p.size()), std::numeric_limits<float>::quiet_NaN());
  }
  void take(int parameter, const FillRows& fill, const Bound& bound) override {
    const double most =
        bound == nullptr || !is_bounded ? std::numeric_limits<double>::infinity() : 1.001 * bound();
    const Parameter& p = list[static_cast<std::size_t>(parameter)];
    EXPECT_TRUE(taken.insert(parameter).second) << p.name << " was handed over twice";
    const auto at = static_cast<std::size_t>(parameter);
    const std::int64_t rows = p.shape[0], width = p.size() / rows, step = tile_rows > 0 ? tile_rows : rows;
    for (std::int64_t first = 0; first < rows; first += step) {
      const std::int64_t count = std::min(step, rows - first);
      float* tile = all[at].data() + first * width;
      fill(first, count, tile);
      std::vector<float> again(static_cast<std::size_t>(count * width), -1.0f);
      fill(first, count, again.data());
      EXPECT_EQ(std::memcmp(again.data(), tile, again.size() * sizeof(float)), 0) << p.name;
      for (std::size_t i = 0; i < again.size() && std::isfinite(most); ++i)
        ASSERT_LE(std::abs(static_cast<double>(again[i])), most) << p.name;
      if (step_in != nullptr) std::fill_n(step_in->values_of[at].data() + first * width, count * width, 1e9f);
    }
  }
  std::vector<Parameter> list;
  std::int64_t tile_rows;
  Values all;
  std::set<int> taken;
  Store* step_in = nullptr;  // steps each tile as soon as it is there
  bool is_bounded = true;    // as the loss is finite
};

struct Examples {
  Examples(const Description& shape, std::int64_t sequences, unsigned seed = 7) : size(sequences) {
    std::mt19937 random(seed);
    std::uniform_int_distribution<std::int32_t> token(0, static_cast<std::int32_t>(shape.vocabulary) - 1);
    for (std::int64_t i = 0; i < sequences * shape.context; ++i)
      tokens.push_back(token(random)), targets.push_back(token(random));
  }
  Batch all() const { return {tokens.data(), targets.data(), starts.empty() ? nullptr : starts.data()}; }
  std::int64_t size;
  std::vector<std::int32_t> tokens, targets, starts;
};

struct Result {
  double loss;
  Values gradients;
};

struct How {
  Precision precision = Precision::fp32;
  float scale = 1;
  std::int64_t tile_rows = 0;  // whole gradients
  int threads = 2;
  Recompute recompute = Recompute::none;
  bool direct = false;       // the weights are read where they lie
  bool step_inside = false;  // and stepped as soon as their gradients are taken
};

struct Gpt {
  Gpt(const Description& description, std::int64_t batch, const How& asked = {})
      : shape(description),
        how(asked),
        pool(how.threads),
        model({shape, batch, how.precision, how.recompute}, pool, ledger),
        store(shape) {
    store.direct = how.direct;
  }
  double forward(const Examples& batch) { return loss = model.forward(store, batch.all()); }
  Values backward() {
    Keep keep(shape, how.tile_rows);
    if (how.step_inside) keep.step_in = &store;
    keep.is_bounded = std::isfinite(loss);
    model.backward(store, keep, how.scale);
    EXPECT_EQ(keep.taken.size(), keep.list.size());
    return keep.all;
  }
  Result pass(const Examples& batch) { return {forward(batch), backward()}; }

  const Description shape;
  const How how;
  Threads pool;
  Ledger ledger;
  Transformer model;
  Store store;
  double loss = 0;  // of the last forward pass
};

inline Result run(const Description& shape, const Examples& batch, const How& how = {}) {
  return Gpt(shape, batch.size, how).pass(batch);
}

// ---- Comparisons ----

inline std::vector<float> flat(const Values& values) {
  std::vector<float> all;
  for (const std::vector<float>& v : values) all.insert(all.end(), v.begin(), v.end());
  return all;
}

inline bool same_bits(const Result& a, const Result& b) {
  const std::vector<float> x = flat(a.gradients), y = flat(b.gradients);
  return std::memcmp(&a.loss, &b.loss, sizeof a.loss) == 0 && x.size() == y.size() &&
         std::memcmp(x.data(), y.data(), x.size() * sizeof(float)) == 0;
}

template <class A, class B>
double relative_error(const std::vector<A>& got, const std::vector<B>& want) {
  double difference = 0, norm = 0;
  for (std::size_t i = 0; i < got.size(); ++i) {
    difference += std::pow(static_cast<double>(got[i]) - static_cast<double>(want[i]), 2);
    norm += std::pow(static_cast<double>(want[i]), 2);
  }
  return std::sqrt(difference / std::max(norm, 1e-300));
}

// The reference's shape and parameters.
inline gpt_reference::Shape plain(const Description& s) {
  return {static_cast<int>(s.layers), static_cast<int>(s.width), static_cast<int>(s.heads),
          static_cast<int>(s.context), static_cast<int>(s.vocabulary)};
}

inline gpt_reference::Parameters<double> in_double(const Store& store) {
  gpt_reference::Parameters<double> p;
  for (const std::vector<float>& v : store.values_of) p.emplace_back(v.begin(), v.end());
  return p;
}

}  // namespace scruple::train
