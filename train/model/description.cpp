#include "train/model/description.h"

#include <algorithm>
#include <cmath>
#include <initializer_list>
#include <numbers>

namespace scruple::train {
namespace {

using Index = std::int64_t;

std::string text(Index number) { return std::to_string(number); }

// Queries, keys and values are one product.
bool is_joined(const Description& model) { return model.names->qkv.size() == 1; }

// Lists the parameters and remembers where each stands.
struct Inventory {
  explicit Inventory(const Description& description);

  int matrix(const std::string& name, Index rows, Index columns, double deviation) {
    list.push_back({name + ".weight", {rows, columns}, true, deviation, 0});
    return static_cast<int>(list.size()) - 1;
  }
  int vector(const std::string& name, Index size, double mean) {
    list.push_back({name, {size}, false, 0, mean});
    return static_cast<int>(list.size()) - 1;
  }
  NormPlace norm(const std::string& name, NormKind kind, Index size) {
    const int weight = vector(name + ".weight", size, 1);
    return {weight, kind == NormKind::layer ? vector(name + ".bias", size, 0) : -1};
  }
  // Products of one input; `outs` are their widths.
  LinearPlaces linear(const std::string& prefix, const std::vector<const char*>& names, Index in,
                      const std::vector<Index>& outs, bool bias, double deviation) {
    LinearPlaces at;
    Index column = 0;
    for (std::size_t i = 0; i < names.size(); ++i) {
      const std::string name = prefix + names[i];
      const Index out = outs[i];
      const int weight =
          model.outputs_first ? matrix(name, out, in, deviation) : matrix(name, in, out, deviation);
      at.push_back({weight, bias ? vector(name + ".bias", out, 0) : -1, in, out, column});
      column += out;
    }
    return at;
  }
  LayerPlaces layer(const std::string& prefix);

  const Description& model;
  std::vector<Parameter> list;
  Places places;
};

Inventory::Inventory(const Description& description) : model(description) {
  const Names& names = *model.names;
  places.tokens = matrix(names.tokens, model.vocabulary, model.width, model.deviation);
  places.positions =
      model.positions > 0 ? matrix(names.positions, model.positions, model.width, 0.5 * model.deviation) : -1;
  for (Index i = 0; i < model.layers; ++i) places.layers.push_back(layer(names.layers + text(i) + "."));
  places.last_norm = norm(names.last_norm, model.norm, model.width);
  places.head =
      model.tied ? places.tokens : matrix(names.head, model.vocabulary, model.width, model.deviation);
}

LayerPlaces Inventory::layer(const std::string& prefix) {
  const Names& names = *model.names;
  const Index width = model.width, queries = model.query_width(), keys = model.key_width();
  const std::vector<Index> joined = {model.qkv_width()}, apart = {queries, keys, keys};
  LayerPlaces at;
  at.attention_norm = norm(prefix + names.attention_norm, model.norm, width);
  at.qkv =
      linear(prefix, names.qkv, width, is_joined(model) ? joined : apart, model.qkv_bias, model.deviation);
  if (model.head_norms) {
    at.query_norm = norm(prefix + names.query_norm, NormKind::rms, model.head_width);
    at.key_norm = norm(prefix + names.key_norm, NormKind::rms, model.head_width);
  }
  at.attention_out =
      linear(prefix, {names.attention_out}, queries, {width}, model.attention_out_bias, model.residual);
  if (names.attention_out_norm != nullptr) norm(prefix + names.attention_out_norm, model.norm, width);
  at.mlp_norm = norm(prefix + names.mlp_norm, model.norm, width);
  at.mlp_up =
      linear(prefix, names.mlp_up, width, {model.inner, model.inner}, model.mlp_bias, model.deviation);
  at.mlp_down = linear(prefix, {names.mlp_down}, model.inner, {width}, model.mlp_bias, model.residual);
  if (names.mlp_out_norm != nullptr) norm(prefix + names.mlp_out_norm, model.norm, width);
  return at;
}

struct Bound {
  const char* name;
  Index value, least, most;
};

std::string beyond(std::initializer_list<Bound> bounds) {
  for (const Bound& b : bounds)
    if (b.value < b.least || b.value > b.most)
      return std::string("a model with ") + b.name + " = " + text(b.value) + " was asked for; choose " +
             b.name + " from " + text(b.least) + " to " + text(b.most);
  return "";
}

}  // namespace

std::int64_t Parameter::size() const {
  std::int64_t product = 1;
  for (const std::int64_t side : shape) product *= side;
  return product;
}

std::vector<Parameter> parameters_of(const Description& model) { return Inventory(model).list; }

Places places_of(const Description& model) { return Inventory(model).places; }

std::int64_t parameter_count(const Description& model) {
  std::int64_t count = 0;
  for (const Parameter& parameter : parameters_of(model)) count += parameter.size();
  return count;
}

double flops_per_token(const Description& model) {
  const Inventory all(model);
  Index weights = 0;
  for (const Parameter& parameter : all.list)
    if (parameter.shape.size() == 2) weights += parameter.size();
  // Tables of which rows are only read.
  if (all.places.head != all.places.tokens) weights -= model.vocabulary * model.width;
  weights -= model.positions * model.width;
  return 6 * (static_cast<double>(weights) +
              static_cast<double>(model.layers * model.query_width()) * static_cast<double>(model.context));
}

std::string problem_with(const Description& model) {
  if (model.names == nullptr)
    return "a model whose tensors have no names was asked for; gpt2() or describe() makes one that has";
  // Together these keep every product of sizes within 64 bits, and every side of a matrix within BLAS's 32.
  if (const std::string problem = beyond({{"layers", model.layers, 1, 1 << 14},
                                          {"width", model.width, 1, 1 << 17},
                                          {"heads", model.heads, 1, 1 << 17},
                                          {"context", model.context, 1, kMaxContext},
                                          {"vocabulary", model.vocabulary, 2, 1 << 24}});
      !problem.empty())
    return problem;
  if (is_joined(model) && model.qkv_width() != 3 * model.width)
    return "a width of " + text(model.width) + " cannot be shared by " + text(model.heads) +
           " heads; choose a width that is a multiple of the heads, such as " +
           text((model.width / model.heads + 1) * model.heads);
  if (const std::string problem = beyond({{"key-value heads", model.kv_heads, 1, model.heads},
                                          {"head width", model.head_width, 1, (1 << 19) / model.heads},
                                          {"MLP width", model.inner, 1, 1 << 19}});
      !problem.empty())
    return problem;
  if (model.heads % model.kv_heads != 0)
    return text(model.heads) + " heads cannot share " + text(model.kv_heads) +
           " key-value heads; choose heads that are a multiple of the key-value heads";
  if (model.rotary.base > 0 && model.head_width % 2 != 0)
    return "rotary positions turn pairs of values, and a head is " + text(model.head_width) +
           " wide; choose an even head width";
  if (model.positions > 0 && model.context > model.positions)
    return "a context of " + text(model.context) + " was asked for, and the model has " +
           text(model.positions) + " positions; choose a context up to that";
  if (model.window > 0 && model.context > model.window)
    return "a context of " + text(model.context) +
           " was asked for, and a token of this model sees the last " + text(model.window) +
           " (its sliding window); choose a context up to that";
  return "";
}

Index rope_floats(const Description& model) {
  return model.rotary.base > 0 ? model.context * model.head_width : 0;
}

// The angle of position p and pair i is p base^(-2i/d) (Su et al., 2104.09864, eq. 15), in fp32 as everyone
// trains with. Llama 3's stretch is that of its published code.
void rope_table(const Description& model, float* table) {
  const Rotary& rotary = model.rotary;
  const Index pairs = model.head_width / 2;
  for (Index i = 0; i < pairs; ++i) {
    double frequency = std::pow(rotary.base, -static_cast<double>(i) / static_cast<double>(pairs));
    if (rotary.factor != 1) {
      const double turns = static_cast<double>(rotary.first_context) * frequency / (2 * std::numbers::pi);
      const double stay = std::clamp((turns - rotary.slow) / (rotary.fast - rotary.slow), 0.0, 1.0);
      frequency *= stay + (1 - stay) / rotary.factor;
    }
    for (Index p = 0; p < model.context; ++p) {
      const double angle = static_cast<double>(static_cast<float>(p) * static_cast<float>(frequency));
      table[2 * p * pairs + i] = static_cast<float>(std::cos(angle));
      table[(2 * p + 1) * pairs + i] = static_cast<float>(std::sin(angle));
    }
  }
}

}  // namespace scruple::train
