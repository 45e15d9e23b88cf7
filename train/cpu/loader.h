// A model's weights as its layers want them, each asked for where it is needed.
#pragma once

#include <vector>

#include "train/cpu/layers.h"

namespace scruple::train {

// What it returns stays until the same is asked of another layer. Has scratch for weights that are not kept in
// fp32.
class Loader {
 public:
  Loader(const Description& model, Ledger& ledger);

  // x, of tokens and their positions.
  void embed(const Workers& workers, WeightValues& weights, const std::int32_t* tokens,
             const std::int32_t* positions, Index rows, Matrix& x, Statistics& statistics);
  Norm norm(WeightValues& weights, const NormPlace& at);
  std::vector<Linear> linear(WeightValues& weights, const LinearPlaces& at);
  std::vector<Linear> without_biases(WeightValues& weights, const LinearPlaces& at);
  // Of sequences of `length` rows.
  Attention attention(WeightValues& weights, const LayerPlaces& at, Index sequences, Index length,
                      const std::int32_t* positions);
  const float* head(WeightValues& weights) { return weights.values(places_.head, matrix_.as<float>()); }
  const Places& places() const { return places_; }

 private:
  std::vector<Linear> linear(WeightValues& weights, const LinearPlaces& at, bool biases);

  const Description model_;
  const Places places_;
  Block matrix_, vector_, rotation_;
};

}  // namespace scruple::train
