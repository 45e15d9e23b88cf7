#include "train/gpt.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>

#include "train/layers.h"

namespace scruple::train {
namespace {

// Places of a layer's parameters, in Hugging Face's order.
enum Part {
  kNorm1Weight,
  kNorm1Bias,
  kAttentionWeight,
  kAttentionBias,
  kAttentionProjectionWeight,
  kAttentionProjectionBias,
  kNorm2Weight,
  kNorm2Bias,
  kExpansionWeight,
  kExpansionBias,
  kProjectionWeight,
  kProjectionBias,
  kParts
};
constexpr int kTokenTable = 0, kPositionTable = 1, kFirstLayer = 2;

int parameter(Index layer, Part part) { return static_cast<int>(kFirstLayer + layer * kParts + part); }
int final_norm(const GptShape& shape, Part part) { return parameter(shape.layers, part); }

std::string text(Index number) { return std::to_string(number); }

}  // namespace

std::int64_t Parameter::size() const {
  std::int64_t product = 1;
  for (const std::int64_t side : shape) product *= side;
  return product;
}

// Radford et al. (2019), section 2.3, and the code they published: normal(0, 0.02), positions normal(0,
// 0.01), and the projections into the residual stream smaller by the square root of their number.
std::vector<Parameter> parameters_of(const GptShape& shape) {
  const Index width = shape.width;
  const double deviation = 0.02, residual = 0.02 / std::sqrt(2.0 * static_cast<double>(shape.layers));
  std::vector<Parameter> list;
  const auto matrix = [&](const std::string& name, Index rows, Index columns, double sigma) {
    list.push_back({name, {rows, columns}, true, sigma, 0});
  };
  const auto vector = [&](const std::string& name, Index size, double mean) {
    list.push_back({name, {size}, false, 0, mean});
  };
  const auto norm = [&](const std::string& name) {
    vector(name + ".weight", width, 1);
    vector(name + ".bias", width, 0);
  };
  const auto linear_layer = [&](const std::string& name, Index in, Index out, double sigma) {
    matrix(name + ".weight", in, out, sigma);
    vector(name + ".bias", out, 0);
  };
  matrix("transformer.wte.weight", shape.vocabulary, width, deviation);
  matrix("transformer.wpe.weight", shape.context, width, 0.01);
  for (Index i = 0; i < shape.layers; ++i) {
    const std::string layer = "transformer.h." + text(i);
    norm(layer + ".ln_1");
    linear_layer(layer + ".attn.c_attn", width, 3 * width, deviation);
    linear_layer(layer + ".attn.c_proj", width, width, residual);
    norm(layer + ".ln_2");
    linear_layer(layer + ".mlp.c_fc", width, 4 * width, deviation);
    linear_layer(layer + ".mlp.c_proj", 4 * width, width, residual);
  }
  norm("transformer.ln_f");
  return list;
}

std::int64_t parameter_count(const GptShape& shape) {
  std::int64_t count = 0;
  for (const Parameter& parameter : parameters_of(shape)) count += parameter.size();
  return count;
}

std::string problem_with(const GptShape& shape) {
  struct Bound {
    const char* name;
    Index value, least, most;
  };
  // Together these keep every product of sizes within 64 bits, and every side of a matrix within BLAS's 32.
  const Bound bounds[] = {{"layers", shape.layers, 1, 1 << 14},
                          {"width", shape.width, 1, 1 << 17},
                          {"heads", shape.heads, 1, 1 << 17},
                          {"context", shape.context, 1, 1 << 20},
                          {"vocabulary", shape.vocabulary, 2, 1 << 24}};
  for (const Bound& b : bounds)
    if (b.value < b.least || b.value > b.most)
      return std::string("a model with ") + b.name + " = " + text(b.value) + " was asked for; choose " +
             b.name + " from " + text(b.least) + " to " + text(b.most);
  if (shape.width % shape.heads != 0)
    return "a width of " + text(shape.width) + " cannot be shared by " + text(shape.heads) +
           " heads; choose a width that is a multiple of the heads, such as " +
           text((shape.width / shape.heads + 1) * shape.heads);
  return "";
}

struct Gpt::State {
  // What one layer keeps from forward to backward. Norms, GELU and attention weights are computed again.
  struct Layer {
    Layer(Ledger& ledger, Precision precision, const GptShape& shape, Index rows)
        : x(ledger, precision, rows, shape.width),
          qkv(ledger, precision, rows, 3 * shape.width),
          attended(ledger, precision, rows, shape.width),
          middle(ledger, precision, rows, shape.width),
          expanded(ledger, precision, rows, 4 * shape.width),
          x_statistics(ledger, rows),
          middle_statistics(ledger, rows),
          log_sums(ledger, "activations", rows * shape.heads * static_cast<Index>(sizeof(float))) {}
    Matrix x, qkv, attended, middle, expanded;
    Statistics x_statistics, middle_statistics;
    Block log_sums;
  };

  State(const GptShape& s, Index batch, Precision precision, Threads& threads, Ledger& ledger)
      : shape(s),
        sequences(batch),
        rows(batch * s.context),
        x(ledger, precision, rows, s.width),
        hidden(ledger, precision, rows, s.width),
        logits(ledger, precision, rows, s.vocabulary),
        x_statistics(ledger, rows),
        log_sums(ledger, "activations", rows * 4),
        tokens(ledger, "activations", rows * 4),
        targets(ledger, "activations", rows * 4),
        g(ledger, precision, rows, s.width),
        g_attended(ledger, precision, rows, s.width),
        g_qkv(ledger, precision, rows, 3 * s.width),
        g_expanded(ledger, precision, rows, 4 * s.width),
        norm_sums(ledger, "workspace", chunks_of(rows) * 2 * s.width * 4),
        chunk_losses(ledger, "workspace", chunks_of(rows) * 8),
        matrix_scratch(ledger, "workspace", largest_matrix(s) * 4),
        vector_scratch(ledger, "workspace", 6 * s.width * 4),
        workspace(ledger, threads.count(), workspace_of(s)),
        crew{threads, workspace} {
    layers.reserve(static_cast<std::size_t>(s.layers));
    for (Index i = 0; i < s.layers; ++i) layers.emplace_back(ledger, precision, s, rows);
  }

  // Both embeddings are wanted at once, every other matrix alone.
  static Index largest_matrix(const GptShape& s) {
    return std::max((s.vocabulary + s.context) * s.width, 4 * s.width * s.width);
  }

  // ---- Weights, each asked for where it is needed ----
  Norm norm(Weights& weights, int weight) {
    float* scratch = vector_scratch.as<float>();
    return {weights.values(weight, scratch), weights.values(weight + 1, scratch + shape.width)};
  }
  Linear linear_at(Weights& weights, int weight, Index in, Index out) {
    return {in, out, weights.values(weight, matrix_scratch.as<float>()),
            weights.values(weight + 1, vector_scratch.as<float>() + 2 * shape.width)};
  }
  Linear without_bias(Weights& weights, int weight, Index in, Index out) {
    return {in, out, weights.values(weight, matrix_scratch.as<float>()), nullptr};
  }
  const float* token_table(Weights& weights) {
    return weights.values(kTokenTable, matrix_scratch.as<float>());
  }

  Matrix& output_of(Index layer) {
    return layer + 1 < shape.layers ? layers[static_cast<std::size_t>(layer + 1)].x : x;
  }
  Statistics& statistics_after(Index layer) {
    return layer + 1 < shape.layers ? layers[static_cast<std::size_t>(layer + 1)].x_statistics : x_statistics;
  }

  void run(Weights& weights, const std::int32_t* input, Index count, Index length);
  void run_layer(Weights& weights, Index index, const Attention& attention);
  void back_through_head(Weights& weights, Gradients& gradients, float scale);
  void back_through_mlp(Weights& weights, Gradients& gradients, Index index);
  void back_through_attention(Weights& weights, Gradients& gradients, Index index);
  void take_linear(Gradients& gradients, int weight, const Source& in, const Matrix& dy);
  void take_norm(Gradients& gradients, int weight);
  void take_embeddings(Gradients& gradients);
  void check(const std::int32_t* list, Index count, const char* what) const;

  const GptShape shape;
  const Index sequences, rows;
  Matrix x, hidden,
      logits;  // the last layer's output, the same normalised, and what backward turns into gradients
  Statistics x_statistics;
  Block log_sums, tokens, targets;
  Matrix g, g_attended, g_qkv, g_expanded;  // gradients; g is that of the residual stream
  Block norm_sums, chunk_losses, matrix_scratch, vector_scratch;
  Workspace workspace;
  Crew crew;
  std::vector<Layer> layers;
  bool ready = false;  // for backward
};

// ---- Forward ----

void Gpt::State::run(Weights& weights, const std::int32_t* input, Index count, Index length) {
  Layer& first = layers.front();
  const float* tokens_at = token_table(weights);
  const float* positions_at =
      weights.values(kPositionTable, matrix_scratch.as<float>() + shape.vocabulary * shape.width);
  embed(crew, input, count * length, length, tokens_at, positions_at, first.x, first.x_statistics);
  for (Index i = 0; i < shape.layers; ++i) run_layer(weights, i, {count, length, shape.heads, shape.width});
  const Norm last = norm(weights, final_norm(shape, kNorm1Weight));
  normalise(crew, Normed(x, x_statistics, last), count * length, hidden);
}

void Gpt::State::run_layer(Weights& weights, Index index, const Attention& attention) {
  Layer& layer = layers[static_cast<std::size_t>(index)];
  const Index width = shape.width, count = attention.sequences * attention.length;
  const auto at = [&](Part part) { return parameter(index, part); };
  const Norm first = norm(weights, at(kNorm1Weight));
  linear(crew, Normed(layer.x, layer.x_statistics, first),
         linear_at(weights, at(kAttentionWeight), width, 3 * width), count, layer.qkv);
  attend(crew, attention, layer.qkv, layer.attended, layer.log_sums.as<float>());
  linear_residual(crew, Stored(layer.attended),
                  linear_at(weights, at(kAttentionProjectionWeight), width, width), count, layer.x,
                  layer.middle, layer.middle_statistics);
  const Norm second = norm(weights, at(kNorm2Weight));
  linear(crew, Normed(layer.middle, layer.middle_statistics, second),
         linear_at(weights, at(kExpansionWeight), width, 4 * width), count, layer.expanded);
  linear_residual(crew, Activated(layer.expanded),
                  linear_at(weights, at(kProjectionWeight), 4 * width, width), count, layer.middle,
                  output_of(index), statistics_after(index));
}

void Gpt::State::check(const std::int32_t* list, Index count, const char* what) const {
  for (Index i = 0; i < count; ++i)
    if (list[i] < 0 || list[i] >= shape.vocabulary)
      throw std::invalid_argument(std::string(what) + " " + text(i) + " is " + text(list[i]) +
                                  "; the model's vocabulary is 0 to " + text(shape.vocabulary - 1));
}

// ---- Backward ----

void Gpt::State::take_linear(Gradients& gradients, int weight, const Source& in, const Matrix& dy) {
  gradients.take(weight, [&](Index first, Index count, float* tile) {
    weight_gradient(crew, in, dy, rows, first, count, tile);
  });
  gradients.take(weight + 1, [&](Index first, Index count, float* tile) {
    bias_gradient(crew, dy, rows, first, count, tile);
  });
}

void Gpt::State::take_norm(Gradients& gradients, int weight) {
  for (const bool bias : {false, true})
    gradients.take(weight + (bias ? 1 : 0), [&](Index first, Index count, float* tile) {
      norm_gradient(norm_sums.as<float>(), rows, shape.width, bias, first, count, tile);
    });
}

void Gpt::State::back_through_head(Weights& weights, Gradients& gradients, float scale) {
  const int weight = final_norm(shape, kNorm1Weight);
  const Normed in(x, x_statistics, norm(weights, weight));
  head_backward(crew, token_table(weights), targets.as<std::int32_t>(), rows,
                scale / static_cast<float>(rows), log_sums.as<float>(), logits, in, g, norm_sums.as<float>());
  take_norm(gradients, weight);
}

// A weight may change when its gradient is taken: what reads it comes first. A norm's weight is read for
// the gradient of the linear layer after it.
void Gpt::State::back_through_mlp(Weights& weights, Gradients& gradients, Index index) {
  Layer& layer = layers[static_cast<std::size_t>(index)];
  const auto at = [&](Part part) { return parameter(index, part); };
  const Index width = shape.width;
  activated_backward(crew, g, without_bias(weights, at(kProjectionWeight), 4 * width, width), rows,
                     layer.expanded, g_expanded);
  take_linear(gradients, at(kProjectionWeight), Activated(layer.expanded), g);
  const Normed in(layer.middle, layer.middle_statistics, norm(weights, at(kNorm2Weight)));
  normed_backward(crew, g_expanded, without_bias(weights, at(kExpansionWeight), width, 4 * width), rows, in,
                  g, norm_sums.as<float>());
  take_linear(gradients, at(kExpansionWeight), in, g_expanded);
  take_norm(gradients, at(kNorm2Weight));
}

void Gpt::State::back_through_attention(Weights& weights, Gradients& gradients, Index index) {
  Layer& layer = layers[static_cast<std::size_t>(index)];
  const auto at = [&](Part part) { return parameter(index, part); };
  const Index width = shape.width;
  linear_backward(crew, g, without_bias(weights, at(kAttentionProjectionWeight), width, width), rows,
                  g_attended);
  take_linear(gradients, at(kAttentionProjectionWeight), Stored(layer.attended), g);
  attend_backward(crew, {sequences, shape.context, shape.heads, width}, layer.qkv, layer.attended,
                  layer.log_sums.as<float>(), g_attended, g_qkv);
  const Normed in(layer.x, layer.x_statistics, norm(weights, at(kNorm1Weight)));
  normed_backward(crew, g_qkv, without_bias(weights, at(kAttentionWeight), width, 3 * width), rows, in, g,
                  norm_sums.as<float>());
  take_linear(gradients, at(kAttentionWeight), in, g_qkv);
  take_norm(gradients, at(kNorm1Weight));
}

// The token table is the output head as well (Press & Wolf, 1608.05859): its gradient is the sum of both.
void Gpt::State::take_embeddings(Gradients& gradients) {
  gradients.take(kPositionTable, [&](Index first, Index count, float* tile) {
    position_gradient(crew, g, sequences, shape.context, first, count, tile);
  });
  gradients.take(kTokenTable, [&](Index first, Index count, float* tile) {
    weight_gradient(crew, Stored(logits), hidden, rows, first, count, tile);
    token_gradient(crew, g, tokens.as<std::int32_t>(), rows, first, count, tile);
  });
}

// ---- The model ----

Gpt::Gpt(const GptShape& shape, std::int64_t batch, Precision activations, Threads& threads, Ledger& ledger) {
  if (const std::string problem = problem_with(shape); !problem.empty()) throw std::invalid_argument(problem);
  const Index most = (Index{1} << 31) / shape.context;
  if (batch < 1 || batch > most)
    throw std::invalid_argument("a batch of " + text(batch) + " sequences was asked for; with a context of " +
                                text(shape.context) + " choose from 1 to " + text(most));
  state_ = std::make_unique<State>(shape, batch, activations, threads, ledger);
}

Gpt::~Gpt() = default;

double Gpt::forward(Weights& weights, const std::int32_t* tokens, const std::int32_t* targets) {
  State& s = *state_;
  s.ready = false;
  s.check(tokens, s.rows, "token");
  s.check(targets, s.rows, "target");
  std::copy_n(tokens, s.rows, s.tokens.as<std::int32_t>());
  std::copy_n(targets, s.rows, s.targets.as<std::int32_t>());
  s.run(weights, tokens, s.sequences, s.shape.context);
  const double loss = head(s.crew, s.hidden, s.token_table(weights), targets, s.rows, s.logits,
                           s.log_sums.as<float>(), s.chunk_losses.as<double>());
  s.ready = true;
  return loss / static_cast<double>(s.rows);
}

void Gpt::backward(Weights& weights, Gradients& gradients, float scale) {
  State& s = *state_;
  if (!s.ready)
    throw std::logic_error(
        "backward was called without a forward pass before it; each forward serves one "
        "backward, and next() uses the same memory: call forward first");
  s.ready = false;
  s.back_through_head(weights, gradients, scale);
  for (Index i = s.shape.layers - 1; i >= 0; --i) {
    s.back_through_mlp(weights, gradients, i);
    s.back_through_attention(weights, gradients, i);
  }
  s.take_embeddings(gradients);
}

void Gpt::next(Weights& weights, const std::int32_t* tokens, std::int64_t count, float* logits) {
  State& s = *state_;
  s.ready = false;
  if (count < 1 || count > s.shape.context)
    throw std::invalid_argument("the logits after " + text(count) +
                                " tokens were asked for; the context is 1 to " + text(s.shape.context) +
                                ": pass the last ones");
  s.check(tokens, count, "token");
  s.run(weights, tokens, 1, count);
  const Index width = s.shape.width;
  Lease lease(s.workspace);
  const View last = s.hidden.read(count - 1, 1, 0, width, lease.floats(width));
  const float* table = s.token_table(weights);
  product(1, s.shape.vocabulary, width, 1, last, transposed({table, width}), 0, {logits, s.shape.vocabulary});
}

}  // namespace scruple::train
