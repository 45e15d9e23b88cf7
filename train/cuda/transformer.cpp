#include "train/cuda/transformer.h"

#include <algorithm>
#include <cstddef>
#include <stdexcept>
#include <utility>

#include "train/cuda/attention.h"
#include "train/cuda/inputs.h"
#include "train/cuda/layers.h"
#include "train/cuda/outbox.h"
#include "train/cuda/products.h"
#include "train/cuda/recording.h"
#include "train/cuda/residuals.h"

namespace scruple::train::cuda {
namespace {

using Index = std::int64_t;

constexpr Index kLogitBytes = 512 << 20;  // of logits that exist at once
constexpr Index kRowStep = 128;           // tokens in a part of them
constexpr Index kLosses = 1024;           // that the host may not have taken yet

// Logits have columns that stay 0, so that products with them have sizes that tensor cores like: of GPT-2's 50,257 words
// they would run at a sixth of their speed.
Index logit_stride(const Description& m) { return (m.vocabulary + 63) / 64 * 64; }

// Rows whose logits exist at once. Where all of them take no more than the head's gradient would in fp32, parts would
// save nothing: they would have to be summed up in such a gradient.
Index logit_rows(const Description& m, Index rows, Precision precision) {
  const Index row = logit_stride(m) * bytes_of(precision);
  if (!m.tied && rows * row <= m.vocabulary * m.width * 4) return rows;
  return std::min(rows, std::max(kLogitBytes / row / kRowStep, Index{1}) * kRowStep);
}

}  // namespace

struct Transformer::State {
  // What forward keeps for backward. Of each row that a norm read:
  struct Statistics {
    Statistics(State& s) : rstd(s.floats("activations", s.rows)) {
      if (s.model.norm == NormKind::layer) mean = s.floats("activations", s.rows);
    }
    Block rstd, mean;
  };
  // Of the attention of every layer, or only of the one that is at work (Recompute::block).
  struct Inside {
    Inside(State& s)
        : normed(s.values("activations", s.rows * s.model.width)),
          qkv(s.values("activations", s.rows * s.model.qkv_width())),
          attended(s.values("activations", s.rows * s.model.query_width())),
          log_sums(s.floats("activations", s.rows * s.model.heads)),
          middle(s.values("activations", s.rows * s.model.width)),
          statistics(s) {}
    Block normed, qkv, attended, log_sums;
    Block middle;  // the residual stream between attention and MLP
    Statistics statistics;
  };
  // Of the MLP of every layer, or only of the one that is at work.
  struct Expansion {
    Expansion(State& s)
        : normed(s.values("activations", s.rows * s.model.width)),
          expanded(s.values("activations", s.rows * s.model.expanded_width())),
          activated(s.values("activations", s.rows * s.model.inner)) {}
    Block normed, expanded, activated;
  };

  State(const Setup& setup, Visible visible, bool released, const Stream& on, Memory& from, Ledger& counts);
  ~State();

  Block values(const char* kind, Index count) const {
    return Block(ledger, kind, count * bytes_of(precision), memory);
  }
  Block floats(const char* kind, Index count) const {
    return Block(ledger, kind, count * Index{sizeof(float)}, memory);
  }
  void* at(const Block& block, Index element) const {
    return block.as<std::byte>() + element * bytes_of(precision);
  }
  const Statistics& statistics_of(Index layer) const { return statistics[static_cast<std::size_t>(layer)]; }
  Inside& inside_of(Index layer) { return insides[static_cast<std::size_t>(layer) % insides.size()]; }
  Expansion& expansion_of(Index layer) {
    return expansions[static_cast<std::size_t>(layer) % expansions.size()];
  }
  const LayerPlaces& place_of(Index layer) const { return places.layers[static_cast<std::size_t>(layer)]; }
  bool fuses_gelu() const {
    return model.mlp == Mlp::gelu && precision != Precision::fp32 && model.inner % 8 == 0;
  }

  // ---- Weights ----

  // A parameter in its own type; none: nullptr.
  Values stored(int parameter) const {
    if (parameter < 0) return {};
    const scruple_array& weight = weights[static_cast<std::size_t>(parameter)].arrays[SCRUPLE_WEIGHT];
    return {weight.codes, type_of(weight.format)};
  }
  // In the type of the activations, until the next that is converted.
  const void* in_type(int parameter, const Block& converted) const;
  void reserve(Block& converted, int parameter) const;  // for that
  const void* matrix(int parameter) const { return in_type(parameter, converted_matrix); }
  const void* bias(int parameter) const {
    return parameter < 0 ? nullptr : in_type(parameter, converted_bias);
  }
  Norm norm(const NormPlace& at) const {
    return {model.norm, static_cast<float>(model.epsilon), stored(at.weight), stored(at.bias)};
  }
  Attention attention() const {
    return {precision,
            sequences,
            model.context,
            static_cast<int>(model.heads),
            static_cast<int>(model.kv_heads),
            static_cast<int>(model.head_width),
            inputs.documents()};
  }
  Turning turning(const LayerPlaces& at) const {
    return {rows,
            static_cast<int>(model.heads),
            static_cast<int>(model.kv_heads),
            static_cast<int>(model.head_width),
            inputs.positions(),
            model.rotary.base > 0 ? rotation.as<float>() : nullptr,
            stored(at.query_norm.weight),
            stored(at.key_norm.weight),
            static_cast<float>(model.epsilon)};
  }
  bool turns() const { return model.rotary.base > 0 || model.head_norms; }

  // ---- Passes ----

  void linear(const LinearPlaces& places_at, const Block& x, void* y, Index stride, const void* residual);
  void expand(const LinearPlace& at, const Expansion& mlp);
  void linear_backward(const LinearPlaces& places_at, const void* dy, Index stride, const Block& dx);
  void take_linear(const LinearPlaces& places_at, const Block& x, const void* dy, Index stride);
  void back_through_norm(const NormPlace& norm_at, const void* x, const Statistics& of_x, bool adds);
  void take_head_norms(const LayerPlaces& at, Index parts);

  void pass(Sink& sink);
  void pass_recorded(Sink& sink);
  void record(Sink& sink);
  void run(bool for_backward);
  void normalise_in(const NormPlace& norm_at, const void* x, const Statistics& of_x, const Block& y);
  void attend_in(Index layer);
  void expand_in(Index layer);
  void compute_again(Index layer);
  const void* head_table();
  void head(bool for_backward);
  void sum_up();
  void back_through_head();
  void back_through_mlp(Index layer);
  void back_through_attention(Index layer);
  void take_embeddings();
  void take_losses();

  const Description model;
  const Precision precision;
  const Recompute recompute;
  const bool records;
  const Index sequences, rows, part_rows;
  const Stream& stream;
  Memory& memory;
  Ledger& ledger;
  const Places places;
  const std::vector<Parameter> parameters;
  Products products;
  Inputs inputs;
  Recording recording;
  Outbox outbox;
  Visible weights;  // of the pass that runs

  Block hidden;  // the last layer's output, normalised
  Block logits, row_losses, loss_sum, factor;
  Block table_gradient;  // of the head, in fp32, where it is a sum; else none
  // Gradients: of the residual stream, of what is inside a layer, of what goes in or out of it.
  Block g, g_inner, g_outer;
  Block turned;  // queries and keys, where they are not turned in place
  Block rotation, norm_sums, bias_sums, head_norm_sums, attention_work;
  Block converted_matrix, converted_bias, padded_table;
  Residuals residuals;  // before each layer, and after the last
  std::vector<Statistics> statistics;
  std::vector<Inside> insides;
  std::vector<Expansion> expansions;
  // What the last pass that succeeded and its recording were made with: these pointers are in the kernels' arguments.
  struct Made {
    const scruple_tensor* weights = nullptr;
    const void* first_weight = nullptr;
    const float* loss_scale = nullptr;
    bool measures = false;
    const std::int32_t* documents = nullptr;
    bool operator==(const Made&) const = default;
  };
  Made made;
  std::vector<Index> counted;  // targets, of the losses that the host has not taken yet
  Pinned<double> host_sums;    // of these: each is copied there as soon as it is computed
  std::vector<double> taken;
};

Transformer::State::State(const Setup& setup, Visible visible, bool released, const Stream& on, Memory& from,
                          Ledger& counts)
    : model(setup.shape),
      precision(setup.activations),
      recompute(setup.recompute),
      records(setup.graphs && !setup.offloads),  // copies beside the layers are no part of a recording
      sequences(setup.batch),
      rows(setup.batch * setup.shape.context),
      part_rows(logit_rows(setup.shape, rows, precision)),
      stream(on),
      memory(from),
      ledger(counts),
      places(places_of(model)),
      parameters(parameters_of(model)),
      products(precision, stream, memory, ledger),
      inputs(model, rows, stream, memory, ledger),
      recording(stream),
      outbox(parameters, precision, released, recording, memory, ledger),
      weights(visible),
      hidden(values("activations", rows * model.width)),
      logits(values("activations", part_rows * logit_stride(model))),
      row_losses(floats("activations", rows)),
      loss_sum(ledger, "activations", Index{sizeof(double)}, memory),
      factor(floats("workspace", 1)),
      g(values("activations", rows * model.width)),
      g_inner(values("activations", rows * std::max(model.inner, model.qkv_width()))),
      g_outer(values("activations", rows * std::max(model.width, model.query_width()))),
      rotation(floats("workspace", rotation_floats(model))),
      norm_sums(floats("workspace", norm_parts(rows) * 2 * model.width)),
      bias_sums(floats("workspace", bias_parts(rows) *
                                        std::max({model.width, model.qkv_width(), model.expanded_width()}))),
      residuals(model.layers + 1, rows * model.width * bytes_of(precision), setup.offloads, stream, memory,
                ledger) {
  if (const char* const problem = cuda::problem_with(attention()); problem != nullptr)
    throw std::invalid_argument(problem);
  if (model.tied || part_rows < rows) table_gradient = floats("workspace", logit_stride(model) * model.width);
  if (logit_stride(model) > model.vocabulary)
    padded_table = values("workspace", logit_stride(model) * model.width);
  else
    reserve(converted_matrix, places.head);
  for (const LayerPlaces& layer : places.layers)
    for (const LinearPlaces* const places_at :
         {&layer.attention_in, &layer.attention_out, &layer.mlp_in, &layer.mlp_out})
      for (const LinearPlace& l : *places_at)
        reserve(converted_matrix, l.weight), reserve(converted_bias, l.bias);
  if (model.head_norms) {
    turned = values("activations", rows * model.qkv_width());
    head_norm_sums = floats("workspace", turn_parts(turning({})) * 2 * model.head_width);
  }
  attention_work = Block(ledger, "workspace", attend_backward_bytes(attention()), memory);
  for (Index i = 0; i <= model.layers; ++i) statistics.emplace_back(*this);
  for (Index i = 0; i < (recompute == Recompute::block ? 1 : model.layers); ++i) insides.emplace_back(*this);
  for (Index i = 0; i < (recompute == Recompute::none ? model.layers : 1); ++i)
    expansions.emplace_back(*this);
  if (model.rotary.base > 0 && !ledger.only_counts()) {
    std::vector<float> table(static_cast<std::size_t>(rotation_floats(model)));
    rotation_of(model, table.data());
    memory.write(rotation.as<void>(), table.data(), rotation.bytes());
  }
  if (!ledger.only_counts()) host_sums = pinned<double>(kLosses);
}

Transformer::State::~State() {
  if (host_sums != nullptr) cudaStreamSynchronize(stream);
}

void Transformer::State::reserve(Block& converted, int parameter) const {
  if (parameter < 0 || stored(parameter).type == precision) return;
  const Index count = parameters[static_cast<std::size_t>(parameter)].size();
  if (converted.bytes() >= count * bytes_of(precision)) return;
  converted = Block();
  converted = values("workspace", count);
}

const void* Transformer::State::in_type(int parameter, const Block& converted) const {
  const Values found = stored(parameter);
  if (found.type == precision) return found.data;
  convert(found, {converted.as<void>(), precision}, weights[static_cast<std::size_t>(parameter)].size,
          stream);
  return converted.as<void>();
}

// ---- Forward ----

// y = x w + b, for each of the products of x; a single one may have a residual added.
void Transformer::State::linear(const LinearPlaces& places_at, const Block& x, void* y, Index stride,
                                const void* residual) {
  for (const LinearPlace& l : places_at)
    products.run({.rows = rows,
                  .columns = l.out,
                  .depth = l.in,
                  .a = {x.as<void>(), l.in},
                  .b = {matrix(l.weight), model.outputs_first ? l.in : l.out, model.outputs_first},
                  .d = static_cast<std::byte*>(y) + l.column * bytes_of(precision),
                  .stride = stride,
                  .c = residual,
                  .finish = l.bias < 0 ? Finish::none : Finish::bias,
                  .bias = bias(l.bias)});
}

// The MLP's first product with GELU in one go.
void Transformer::State::expand(const LinearPlace& l, const Expansion& mlp) {
  products.run({.rows = rows,
                .columns = l.out,
                .depth = l.in,
                .a = {mlp.normed.as<void>(), l.in},
                .b = {matrix(l.weight), model.outputs_first ? l.in : l.out, model.outputs_first},
                .d = mlp.activated.as<void>(),
                .stride = l.out,
                .finish = Finish::gelu,
                .bias = bias(l.bias),
                .kept = mlp.expanded.as<void>()});
}

void Transformer::State::run(bool for_backward) {
  residuals.start();
  embed(precision, inputs.tokens(), inputs.positions(), rows, model.width, stored(places.tokens),
        stored(places.positions), residuals.at(0), stream);
  for (Index i = 0; i < model.layers; ++i) {
    if (for_backward) residuals.write(i + 1);
    attend_in(i);
    expand_in(i);
    linear(place_of(i).mlp_out, expansion_of(i).activated, residuals.at(i + 1), model.width,
           inside_of(i).middle.as<void>());
  }
  normalise_in(places.last_norm, residuals.at(model.layers), statistics.back(), hidden);
}

void Transformer::State::normalise_in(const NormPlace& norm_at, const void* x, const Statistics& of_x,
                                      const Block& y) {
  normalise(precision, norm(norm_at), x, rows, model.width, y.as<void>(), of_x.mean.as<float>(),
            of_x.rstd.as<float>(), stream);
}

// From the layer's input to its middle.
void Transformer::State::attend_in(Index layer) {
  Inside& inside = inside_of(layer);
  const LayerPlaces& places_at = place_of(layer);
  normalise_in(places_at.attention_norm, residuals.at(layer), statistics_of(layer), inside.normed);
  linear(places_at.attention_in, inside.normed, inside.qkv.as<void>(), model.qkv_width(), nullptr);
  const Block& seen = model.head_norms ? turned : inside.qkv;
  if (turns()) turn(precision, turning(places_at), inside.qkv.as<void>(), seen.as<void>(), stream);
  attend(attention(), seen.as<void>(), inside.attended.as<void>(), inside.log_sums.as<float>(), stream);
  linear(places_at.attention_out, inside.attended, inside.middle.as<void>(), model.width,
         residuals.at(layer));
}

void Transformer::State::expand_in(Index layer) {
  const Inside& inside = inside_of(layer);
  const Expansion& mlp = expansion_of(layer);
  const LayerPlaces& places_at = place_of(layer);
  normalise_in(places_at.mlp_norm, inside.middle.as<void>(), inside.statistics, mlp.normed);
  if (fuses_gelu()) return expand(places_at.mlp_in.front(), mlp);
  linear(places_at.mlp_in, mlp.normed, mlp.expanded.as<void>(), model.expanded_width(), nullptr);
  activate(precision, model.mlp, mlp.expanded.as<void>(), rows, model.inner, mlp.activated.as<void>(),
           stream);
}

// The last layer is the one that forward has left.
void Transformer::State::compute_again(Index layer) {
  if (recompute == Recompute::none || layer + 1 == model.layers) return;
  if (recompute == Recompute::block) attend_in(layer);
  expand_in(layer);
}

// The head's matrix with a row for every column of the logits.
const void* Transformer::State::head_table() {
  if (padded_table.bytes() == 0) return matrix(places.head);
  convert(stored(places.head), {padded_table.as<void>(), precision}, model.vocabulary * model.width, stream);
  return padded_table.as<void>();
}

// The losses of all rows and, for backward, the gradient of `hidden` in g_outer and that of the head.
void Transformer::State::head(bool for_backward) {
  const Index stride = logit_stride(model);
  const void* const table = head_table();
  for (Index first = 0; first < rows; first += part_rows) {
    const Index count = std::min(part_rows, rows - first);
    products.run({.rows = count,
                  .columns = stride,
                  .depth = model.width,
                  .a = {at(hidden, first * model.width), model.width},
                  .b = {table, model.width, true},
                  .d = logits.as<void>(),
                  .stride = stride});
    cross_entropy(precision, logits.as<void>(), count, model.vocabulary, stride, inputs.targets() + first,
                  for_backward ? factor.as<float>() : nullptr, row_losses.as<float>() + first, stream);
    if (!for_backward) continue;
    products.run({.rows = count,
                  .columns = model.width,
                  .depth = stride,
                  .a = {logits.as<void>(), stride},
                  .b = {table, model.width},
                  .d = at(g_outer, first * model.width),
                  .stride = model.width});
    if (table_gradient.bytes() > 0)
      products.run({.rows = stride,
                    .columns = model.width,
                    .depth = count,
                    .a = {logits.as<void>(), stride, true},
                    .b = {at(hidden, first * model.width), model.width},
                    .d = table_gradient.as<void>(),
                    .stride = model.width,
                    .c = first == 0 ? nullptr : table_gradient.as<void>(),
                    .wide = true});
  }
}

// Behind the losses that were not taken yet, which are taken where there is no more room. take_losses() waits.
void Transformer::State::sum_up() {
  if (counted.size() == kLosses) take_losses();
  sum_losses(row_losses.as<float>(), rows, loss_sum.as<double>(), stream);
  check(cudaMemcpyAsync(host_sums.get() + counted.size(), loss_sum.as<double>(), sizeof(double),
                        cudaMemcpyDeviceToHost, stream),
        "copying a loss from the GPU");
}

void Transformer::State::take_losses() {
  stream.wait();
  for (std::size_t i = 0; i < counted.size(); ++i)
    taken.push_back(host_sums[i] / static_cast<double>(std::max<Index>(counted[i], 1)));
  counted.clear();
}

// ---- Backward ----

// dx = the sum of dy w^T over the products of one input.
void Transformer::State::linear_backward(const LinearPlaces& places_at, const void* dy, Index stride,
                                         const Block& dx) {
  for (const LinearPlace& l : places_at)
    products.run({.rows = rows,
                  .columns = l.in,
                  .depth = l.out,
                  .a = {static_cast<const std::byte*>(dy) + l.column * bytes_of(precision), stride},
                  .b = {matrix(l.weight), model.outputs_first ? l.in : l.out, !model.outputs_first},
                  .d = dx.as<void>(),
                  .stride = l.in,
                  .c = l.column == 0 ? nullptr : dx.as<void>()});
}

// As the matrix lies: x^T dy, or dy^T x.
void Transformer::State::take_linear(const LinearPlaces& places_at, const Block& x, const void* dy,
                                     Index stride) {
  for (const LinearPlace& l : places_at) {
    const auto* const outputs = static_cast<const std::byte*>(dy) + l.column * bytes_of(precision);
    const Operand in = {x.as<void>(), l.in}, out = {outputs, stride};
    outbox.take(l.weight, [&](Index first, Index count, Values to) {
      Operand left = model.outputs_first ? out : in;
      left.data = static_cast<const std::byte*>(left.data) + first * bytes_of(precision);
      left.transposed = true;
      const Index columns = model.outputs_first ? l.in : l.out;
      products.run({.rows = count,
                    .columns = columns,
                    .depth = rows,
                    .a = left,
                    .b = model.outputs_first ? in : out,
                    .d = to.data,
                    .stride = columns});
    });
    if (l.bias < 0) continue;
    outbox.take(l.bias, [&](Index, Index, Values to) {
      bias_gradient(precision, outputs, rows, stride, l.out, bias_sums.as<float>(), to, stream);
    });
  }
}

// From g_outer, the gradient of the norm's output, to g.
void Transformer::State::back_through_norm(const NormPlace& norm_at, const void* x, const Statistics& of_x,
                                           bool adds) {
  normalise_backward(precision, norm(norm_at), g_outer.as<void>(), x, of_x.mean.as<float>(),
                     of_x.rstd.as<float>(), rows, model.width, adds, g.as<void>(), norm_sums.as<float>(),
                     stream);
  const auto half = [&](int parameter, Index column) {
    if (parameter < 0) return;
    outbox.take(parameter, [&](Index, Index, Values to) {
      sum_parts(norm_sums.as<float>() + column, norm_parts(rows), 2 * model.width, model.width, to, stream);
    });
  };
  half(norm_at.weight, 0);
  half(norm_at.bias, model.width);
}

void Transformer::State::take_head_norms(const LayerPlaces& places_at, Index parts) {
  const auto half = [&](int parameter, Index column) {
    outbox.take(parameter, [&](Index, Index, Values to) {
      sum_parts(head_norm_sums.as<float>() + column, parts, 2 * model.head_width, model.head_width, to,
                stream);
    });
  };
  half(places_at.query_norm.weight, 0);
  half(places_at.key_norm.weight, model.head_width);
}

// From g_outer, the gradient of `hidden`.
void Transformer::State::back_through_head() {
  residuals.read(model.layers);
  back_through_norm(places.last_norm, residuals.at(model.layers), statistics.back(), false);
  if (model.tied) return;
  if (table_gradient.bytes() > 0)
    return outbox.take_whole(places.head, {table_gradient.as<void>(), Precision::fp32});
  outbox.take(places.head, [&](Index first, Index count, Values to) {
    products.run({.rows = count,
                  .columns = model.width,
                  .depth = rows,
                  .a = {at(logits, first), logit_stride(model), true},
                  .b = {hidden.as<void>(), model.width},
                  .d = to.data,
                  .stride = model.width});
  });
}

// A weight may change when its gradient is taken: what reads it comes first.
void Transformer::State::back_through_mlp(Index layer) {
  const Expansion& mlp = expansion_of(layer);
  const LayerPlaces& places_at = place_of(layer);
  const LinearPlace& out = places_at.mlp_out.front();
  // What the MLP expanded is not needed after its own gradient.
  void* const dexpanded = model.mlp == Mlp::gelu ? g_inner.as<void>() : mlp.expanded.as<void>();
  if (fuses_gelu()) {
    products.run({.rows = rows,
                  .columns = out.in,
                  .depth = out.out,
                  .a = {g.as<void>(), model.width},
                  .b = {matrix(out.weight), model.outputs_first ? out.in : out.out, !model.outputs_first},
                  .d = g_inner.as<void>(),
                  .stride = out.in,
                  .finish = Finish::gelu_backward,
                  .kept = mlp.expanded.as<void>()});
  } else {
    linear_backward(places_at.mlp_out, g.as<void>(), model.width, g_inner);
    activate_backward(precision, model.mlp, g_inner.as<void>(), mlp.expanded.as<void>(), rows, model.inner,
                      dexpanded, stream);
  }
  take_linear(places_at.mlp_out, mlp.activated, g.as<void>(), model.width);
  linear_backward(places_at.mlp_in, dexpanded, model.expanded_width(), g_outer);
  take_linear(places_at.mlp_in, mlp.normed, dexpanded, model.expanded_width());
  const Inside& inside = inside_of(layer);
  back_through_norm(places_at.mlp_norm, inside.middle.as<void>(), inside.statistics, true);
}

void Transformer::State::back_through_attention(Index layer) {
  const Inside& inside = inside_of(layer);
  const LayerPlaces& places_at = place_of(layer);
  linear_backward(places_at.attention_out, g.as<void>(), model.width, g_outer);
  take_linear(places_at.attention_out, inside.attended, g.as<void>(), model.width);
  const Turning shape = turning(places_at);
  if (model.head_norms) turn(precision, shape, inside.qkv.as<void>(), turned.as<void>(), stream);
  const Block& seen = model.head_norms ? turned : inside.qkv;
  attend_backward(attention(), seen.as<void>(), inside.attended.as<void>(), inside.log_sums.as<float>(),
                  g_outer.as<void>(), g_inner.as<void>(), attention_work.as<void>(), stream);
  if (turns())
    turn_backward(precision, shape, inside.qkv.as<void>(), g_inner.as<void>(), head_norm_sums.as<float>(),
                  stream);
  if (model.head_norms) take_head_norms(places_at, turn_parts(shape));
  linear_backward(places_at.attention_in, g_inner.as<void>(), model.qkv_width(), g_outer);
  take_linear(places_at.attention_in, inside.normed, g_inner.as<void>(), model.qkv_width());
  back_through_norm(places_at.attention_norm, residuals.at(layer), statistics_of(layer), true);
}

// The gradient of a table that is the output head as well is the sum of both.
void Transformer::State::take_embeddings() {
  const auto clear = [&](Values to, Index count) {
    check(cudaMemsetAsync(to.data, 0, static_cast<std::size_t>(count * bytes_of(to.type)), stream),
          "clearing a gradient");
  };
  const auto add = [&](Readers readers, Index first, Values to) {
    embedding_gradient(precision, g.as<void>(), model.width, readers, first, to, stream);
  };
  if (places.positions >= 0)
    outbox.take(places.positions, [&](Index first, Index count, Values to) {
      clear(to, count * model.width);
      add(inputs.readers_of_positions(first, count), first, to);
    });
  if (model.tied) {
    const Values whole = {table_gradient.as<void>(), Precision::fp32};
    add(inputs.readers_of_tokens(0, model.vocabulary), 0, whole);
    return outbox.take_whole(places.tokens, whole);
  }
  outbox.take(places.tokens, [&](Index first, Index count, Values to) {
    clear(to, count * model.width);
    add(inputs.readers_of_tokens(first, count), first, to);
  });
}

// ---- The network ----

// All but the gradients of the tables.
void Transformer::State::pass(Sink& sink) {
  multiply(sink.loss_scale(), inputs.share(), factor.as<float>(), stream);
  run(true);
  head(true);
  back_through_head();
  for (Index i = model.layers - 1; i >= 0; --i) {
    residuals.read(i);
    compute_again(i);
    back_through_mlp(i);
    back_through_attention(i);
  }
  outbox.close();
}

// The first pass chooses algorithms and takes what memory it lacks, the second is recorded, later ones are that again.
void Transformer::State::pass_recorded(Sink& sink) {
  const Made now = {weights.data(), stored(0).data, sink.loss_scale(), sink.measures(), inputs.documents()};
  const bool again = now == std::exchange(made, {});  // one that fails is none
  if (again && recording.is_there()) {
    recording.replay(sink);
  } else {
    recording.clear();
    if (again && records)
      record(sink);
    else
      pass(sink);
  }
  made = now;
}

void Transformer::State::record(Sink& sink) {
  try {
    recording.begin();
    pass(sink);
    recording.finish();
  } catch (...) {
    recording.cancel();
    throw;
  }
}

Transformer::Transformer(const Setup& setup, Visible weights, bool released, const Stream& stream,
                         Memory& memory, Ledger& ledger) {
  check_setup(setup);
  state_ = std::make_unique<State>(setup, weights, released, stream, memory, ledger);
}

Transformer::~Transformer() = default;

void Transformer::train(Visible weights, const Batch& batch, Sink& sink, float weight) {
  State& s = *state_;
  s.weights = weights;
  const Index counted = s.inputs.read(batch, weight);
  s.outbox.open(sink);
  s.pass_recorded(sink);
  s.take_embeddings();  // which rows of the tables were read is the batch's: it is not recorded
  s.outbox.close();
  s.sum_up();
  s.counted.push_back(counted);
}

std::vector<double> Transformer::losses() {
  state_->take_losses();
  return std::exchange(state_->taken, {});
}

double Transformer::loss(Visible weights, const Batch& batch) {
  State& s = *state_;
  s.weights = weights;
  const Index counted = s.inputs.read(batch, 1);
  s.run(false);
  s.head(false);
  s.sum_up();
  s.stream.wait();
  return s.host_sums[s.counted.size()] / static_cast<double>(std::max<Index>(counted, 1));
}

}  // namespace scruple::train::cuda
