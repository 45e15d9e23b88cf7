#include "train/cpu/loader.h"

#include <algorithm>

namespace scruple::train {
namespace {

Index widest_outputs(const Description& m) { return std::max({m.width, m.qkv_width(), m.expanded_width()}); }

// Both embeddings are wanted at once, and all matrices of one input.
Index largest_matrix(const Description& m) {
  return std::max((m.vocabulary + m.positions) * m.width, m.width * widest_outputs(m));
}

// A norm, the norms of heads, and the biases of all products of one input.
Index biases_at(const Description& m) { return 2 * m.width + (m.head_norms ? 2 * m.head_width : 0); }

const float* values(WeightValues& weights, int parameter, float* scratch) {
  return parameter < 0 ? nullptr : weights.values(parameter, scratch);
}

}  // namespace

Loader::Loader(const Description& model, Ledger& ledger)
    : model_(model),
      places_(places_of(model)),
      matrix_(ledger, "workspace", largest_matrix(model) * 4),
      vector_(ledger, "workspace", (biases_at(model) + widest_outputs(model)) * 4),
      rotation_(ledger, "workspace", rotation_floats(model) * 4) {
  if (model.rotary.base > 0 && !ledger.only_counts()) rotation_of(model, rotation_.as<float>());
}

void Loader::embed(const Workers& workers, WeightValues& weights, const std::int32_t* tokens,
                   const std::int32_t* positions, Index rows, Matrix& x, Statistics& statistics) {
  float* scratch = matrix_.as<float>();
  const float* token_table = weights.values(places_.tokens, scratch);
  const float* position_table =
      values(weights, places_.positions, scratch + model_.vocabulary * model_.width);
  train::embed(workers, tokens, positions, rows, token_table, position_table, x, statistics);
}

Norm Loader::norm(WeightValues& weights, const NormPlace& at) {
  float* scratch = vector_.as<float>();
  return {values(weights, at.weight, scratch), values(weights, at.bias, scratch + model_.width)};
}

std::vector<Linear> Loader::linear(WeightValues& weights, const LinearPlaces& places, bool biases) {
  std::vector<Linear> layers;
  float *matrix = matrix_.as<float>(), *vector = vector_.as<float>() + biases_at(model_);
  for (const LinearPlace& at : places) {
    layers.push_back({at.in, at.out, at.column, weights.values(at.weight, matrix),
                      biases ? values(weights, at.bias, vector) : nullptr, model_.outputs_first});
    matrix += at.in * at.out, vector += at.out;
  }
  return layers;
}
std::vector<Linear> Loader::linear(WeightValues& weights, const LinearPlaces& at) {
  return linear(weights, at, true);
}
std::vector<Linear> Loader::without_biases(WeightValues& weights, const LinearPlaces& at) {
  return linear(weights, at, false);
}

Attention Loader::attention(WeightValues& weights, const LayerPlaces& at, Index sequences, Index length,
                            const std::int32_t* positions) {
  float* scratch = vector_.as<float>() + 2 * model_.width;
  return {sequences,
          length,
          model_.heads,
          model_.kv_heads,
          model_.head_width,
          positions,
          model_.rotary.base > 0 ? rotation_.as<float>() : nullptr,
          values(weights, at.query_norm.weight, scratch),
          values(weights, at.key_norm.weight, scratch + model_.head_width),
          static_cast<float>(model_.epsilon)};
}

}  // namespace scruple::train
