// What a model is, as data: its sizes, which of the known parts it is made of, and what its tensors are
// called. One forward and backward pass reads it (train/transformer.h).
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace scruple::train {

// Hugging Face's names. Those of a layer follow `layers` and the layer's number.
struct Names {
  const char *tokens, *positions, *layers;
  const char *attention_norm, *attention_in, *attention_out;
  const char *mlp_norm, *mlp_in, *mlp_out;
  const char* last_norm;
};

struct Description {
  std::int64_t layers, width, heads, context, vocabulary;
  std::int64_t head_width;
  std::int64_t inner;  // width of the MLP
  double deviation;    // of the normal distribution that matrices start from
  double residual;     // the same, of the products that add to the residual stream
  const Names* names;

  std::int64_t attention_width() const { return heads * head_width; }  // of the heads together
};

// The sizes of a GPT-2 that one may choose.
struct GptShape {
  std::int64_t layers = 4, width = 128, heads = 4, context = 128, vocabulary = 256;
};
Description gpt2(const GptShape& shape);

// Why no model has this description, or "".
std::string problem_with(const Description& model);

struct Parameter {
  std::string name;                 // "transformer.h.0.attn.c_attn.weight"
  std::vector<std::int64_t> shape;  // {rows, columns}, or {size} for a bias or a norm
  bool decays;                      // weight decay is for matrices alone
  double deviation;  // of the normal distribution that it starts from; 0: every value is `mean`
  double mean;
  std::int64_t size() const;
};

// Every parameter once, in the order in which the forward pass comes to them.
std::vector<Parameter> parameters_of(const Description& model);
std::int64_t parameter_count(const Description& model);

// Where in that order the parts of a model stand.
struct NormPlace {
  int weight, bias;
};
struct LinearPlace {
  int weight, bias;
  std::int64_t in, out;
};
struct LayerPlaces {
  NormPlace attention_norm;
  LinearPlace attention_in, attention_out;
  NormPlace mlp_norm;
  LinearPlace mlp_in, mlp_out;
};
struct Places {
  int tokens, positions;
  std::vector<LayerPlaces> layers;
  NormPlace last_norm;
};
Places places_of(const Description& model);

}  // namespace scruple::train
