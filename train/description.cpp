#include "train/description.h"

#include <cmath>

namespace scruple::train {
namespace {

using Index = std::int64_t;

std::string text(Index number) { return std::to_string(number); }

// Lists the parameters and remembers where each stands.
struct Inventory {
  explicit Inventory(const Description& model);

  int matrix(const std::string& name, Index rows, Index columns, double deviation) {
    list.push_back({name + ".weight", {rows, columns}, true, deviation, 0});
    return static_cast<int>(list.size()) - 1;
  }
  int vector(const std::string& name, Index size, double mean) {
    list.push_back({name, {size}, false, 0, mean});
    return static_cast<int>(list.size()) - 1;
  }
  NormPlace norm(const std::string& name, Index size) {
    const int weight = vector(name + ".weight", size, 1);
    return {weight, vector(name + ".bias", size, 0)};
  }
  LinearPlace linear(const std::string& name, Index in, Index out, double deviation) {
    const int weight = matrix(name, in, out, deviation);
    return {weight, vector(name + ".bias", out, 0), in, out};
  }
  LayerPlaces layer(const Description& model, const std::string& prefix);

  std::vector<Parameter> list;
  Places places;
};

Inventory::Inventory(const Description& model) {
  const Names& names = *model.names;
  places.tokens = matrix(names.tokens, model.vocabulary, model.width, model.deviation);
  places.positions = matrix(names.positions, model.context, model.width, 0.5 * model.deviation);
  for (Index i = 0; i < model.layers; ++i)
    places.layers.push_back(layer(model, names.layers + text(i) + "."));
  places.last_norm = norm(names.last_norm, model.width);
}

LayerPlaces Inventory::layer(const Description& model, const std::string& prefix) {
  const Names& names = *model.names;
  const Index width = model.width, heads = model.attention_width();
  LayerPlaces at;
  at.attention_norm = norm(prefix + names.attention_norm, width);
  at.attention_in = linear(prefix + names.attention_in, width, 3 * heads, model.deviation);
  at.attention_out = linear(prefix + names.attention_out, heads, width, model.residual);
  at.mlp_norm = norm(prefix + names.mlp_norm, width);
  at.mlp_in = linear(prefix + names.mlp_in, width, model.inner, model.deviation);
  at.mlp_out = linear(prefix + names.mlp_out, model.inner, width, model.residual);
  return at;
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

std::string problem_with(const Description& model) {
  struct Bound {
    const char* name;
    Index value, least, most;
  };
  // Together these keep every product of sizes within 64 bits, and every side of a matrix within BLAS's 32.
  const Bound bounds[] = {{"layers", model.layers, 1, 1 << 14},
                          {"width", model.width, 1, 1 << 17},
                          {"heads", model.heads, 1, 1 << 17},
                          {"context", model.context, 1, 1 << 20},
                          {"vocabulary", model.vocabulary, 2, 1 << 24}};
  for (const Bound& b : bounds)
    if (b.value < b.least || b.value > b.most)
      return std::string("a model with ") + b.name + " = " + text(b.value) + " was asked for; choose " +
             b.name + " from " + text(b.least) + " to " + text(b.most);
  if (model.attention_width() != model.width)
    return "a width of " + text(model.width) + " cannot be shared by " + text(model.heads) +
           " heads; choose a width that is a multiple of the heads, such as " +
           text((model.width / model.heads + 1) * model.heads);
  return "";
}

// Radford et al. (2019), section 2.3, and the code they published: normal(0, 0.02), positions normal(0,
// 0.01), and the projections into the residual stream smaller by the square root of their number.
Description gpt2(const GptShape& shape) {
  static constexpr Names kNames = {"transformer.wte", "transformer.wpe", "transformer.h.", "ln_1",
                                   "attn.c_attn",     "attn.c_proj",     "ln_2",           "mlp.c_fc",
                                   "mlp.c_proj",      "transformer.ln_f"};
  Description model{};
  model.layers = shape.layers, model.width = shape.width, model.heads = shape.heads;
  model.context = shape.context, model.vocabulary = shape.vocabulary;
  model.head_width = shape.heads > 0 ? shape.width / shape.heads : 0;  // problem_with() finds the rest
  model.inner = 4 * shape.width;
  model.deviation = 0.02;
  model.residual = 0.02 / std::sqrt(2.0 * static_cast<double>(shape.layers));
  model.names = &kNames;
  return model;
}

}  // namespace scruple::train
