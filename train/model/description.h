// What a model is, as data: its sizes, which of the known parts it is made of, and what its tensors are
// called. A device's forward and backward pass reads it (train/pass/backend.h).
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace scruple::train {

// Hugging Face's names. Those of a layer follow `layers` and the layer's number.
struct Names {
  const char *tokens, *positions, *layers;
  const char* attention_norm;
  std::vector<const char*> qkv;  // one product for queries, keys and values, or one for each
  const char *query_norm, *key_norm, *attention_out;
  const char* mlp_norm;
  std::vector<const char*> mlp_up;  // one product, or the gate and what it lets through
  const char* mlp_down;
  const char *last_norm, *head;
  const char *attention_out_norm = nullptr,
             *mlp_out_norm = nullptr;  // of what is added to the residual stream
};

// Ba et al., 1607.06450; Zhang & Sennrich, 1910.07467, which has no bias
enum class NormKind { layer, rms };

// The tanh form of GELU (Hendrycks & Gimpel, 1606.08415); SwiGLU (Shazeer, 2002.05202)
enum class Mlp { gelu, swiglu };
inline constexpr float kGeluSlope = 0.79788456f, kGeluCubic = 0.044715f;  // sqrt(2 / pi), and of x^3

// Rotary positions (Su et al., 2104.09864), and how Llama 3 stretches them beyond the context that it was
// first trained with: slow rotations are slowed by `factor`, fast ones stay, those between are mixed.
struct Rotary {
  double base = 0;            // 0: none
  double factor = 1;          // 1: not stretched
  double slow = 1, fast = 4;  // turns within first_context, below and above which a rotation is so called
  std::int64_t first_context = 8192;
};

// Whether a model of so many tokens has one for each byte, and so needs no tokenizer.
constexpr bool tokens_are_bytes(std::int64_t vocabulary) { return vocabulary == 256; }

inline constexpr std::int64_t kMaxContext = 1 << 20;  // that is trained with; models may know more positions

struct Description {
  std::int64_t layers = 0, width = 0, heads = 0, context = 0, vocabulary = 0;
  std::int64_t kv_heads = 0;  // each serves heads / kv_heads heads of queries (Ainslie et al., 2305.13245)
  std::int64_t head_width = 0;
  std::int64_t inner = 0;  // width of the MLP
  NormKind norm = NormKind::layer;
  double epsilon = 1e-5;       // of the norms
  std::int64_t positions = 0;  // rows of the table of learned positions; 0: none
  Rotary rotary;
  std::int64_t window = 0;  // tokens that a token sees, itself among them; 0: all before it
  bool head_norms = false;  // queries and keys are RMS-normed, each head by itself
  Mlp mlp = Mlp::gelu;
  bool qkv_bias = false, attention_out_bias = false, mlp_bias = false;
  bool tied = true;           // the output head is the token table (Press & Wolf, 1608.05859)
  bool outputs_first = true;  // matrices lie [out, in], as torch's Linear; else [in, out], as GPT-2's Conv1D
  double deviation = 0.02;    // of the normal distribution that matrices start from
  double residual = 0.02;     // the same, of the products that add to the residual stream
  const Names* names = nullptr;

  std::int64_t query_width() const { return heads * head_width; }
  std::int64_t key_width() const { return kv_heads * head_width; }  // and that of the values
  std::int64_t qkv_width() const { return query_width() + 2 * key_width(); }
  std::int64_t up_width() const { return mlp == Mlp::swiglu ? 2 * inner : inner; }
};

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

// Of a training step, per token, without what is computed again: 6 for each weight of a matrix product (the forward pass,
// and two products of the backward pass), and 6 x layers x queries' width x context for attention, half of what Chowdhery
// et al. count (2204.02311, appendix B) because it is causal.
double flops_per_token(const Description& model);

// Where in that order the parts of a model stand; -1: it has no such part.
struct NormPlace {
  int weight = -1, bias = -1;
};
struct LinearPlace {
  int weight, bias;
  std::int64_t in, out;
  std::int64_t column;  // of its first output among those of all products of the same input
};
using LinearPlaces = std::vector<LinearPlace>;  // products of one input
struct LayerPlaces {
  NormPlace attention_norm;
  LinearPlaces qkv;
  NormPlace query_norm, key_norm;
  LinearPlaces attention_out;
  NormPlace mlp_norm;
  LinearPlaces mlp_up, mlp_down;
};
struct Places {
  int tokens, positions, head;  // a tied head is where the tokens are
  std::vector<LayerPlaces> layers;
  NormPlace last_norm;
};
Places places_of(const Description& model);

// For each position of the context, cosines and then sines of head_width / 2 angles; what it takes, and its values.
std::int64_t rope_floats(const Description& model);
void rope_table(const Description& model, float* table);

}  // namespace scruple::train
