#include "train/cuda/operations.h"

#include <algorithm>
#include <cstddef>
#include <numeric>
#include <stdexcept>

namespace scruple::train::cuda {
namespace {

constexpr Index kLogitBytes = 512 << 20;  // of logits that exist at once
constexpr Index kRowStep = 128;           // tokens in a part of them

// Values to a row of logits: the vocabulary, rounded up to a multiple of 64 with columns of 0. With GPT-2's
// 50,257 columns as they are, products run at a sixth of their speed, because tensor cores want aligned rows.
Index logit_stride(const Description& m) { return (m.vocabulary + 63) / 64 * 64; }

// Of a norm's weight or bias where it is decoded, one after the other, aligned as kernels want it.
Index vector_stride(const Description& m) { return (std::max(m.width, m.head_width) + 127) / 128 * 128; }

// Rows whose logits exist at once. Parts of the rows need an fp32 gradient of the head to add up in. So where
// the logits of all rows are no larger than that gradient, parts would save nothing.
Index logit_rows(const Description& m, Index rows, Precision precision) {
  const Index row = logit_stride(m) * bytes_of(precision);
  if (!m.tied && rows * row <= m.vocabulary * m.width * 4) return rows;
  return std::min(rows, std::max(kLogitBytes / row / kRowStep, Index{1}) * kRowStep);
}

}  // namespace

Operations::Operations(const Setup& setup, Index rows, Visible weights, const Inputs* inputs, Outbox* outbox,
                       const StreamEngine& engine, const Stream& stream, Memory& memory, Ledger& ledger)
    : model_(setup.shape),
      precision_(setup.activations),
      most_rows_(rows),
      part_rows_(logit_rows(model_, rows, precision_)),
      engine_(engine),
      stream_(stream),
      memory_(memory),
      ledger_(ledger),
      places_(places_of(model_)),
      parameters_(parameters_of(model_)),
      sequences_(setup.batch),
      rows_(rows),
      products_(precision_, inputs != nullptr, stream, memory, ledger),
      inputs_(inputs),
      outbox_(outbox),
      weights_(weights),
      hidden_(tensor(model_.width)),
      rotation_(floats("workspace", rope_floats(model_))),
      residuals_(caches() ? 1 : model_.layers + 1, rows * model_.width * bytes_of(precision_), setup.offloads,
                 stream, memory, ledger) {
  if (const char* const problem = cuda::problem_with(attention()); problem != nullptr)
    throw std::invalid_argument(problem);
  for (Index i = 0; i <= (caches() ? 0 : model_.layers); ++i) {
    Tensor& residual = residual_tensors_.emplace_back();
    residual.data = residuals_.at(i), residual.width = model_.width;
    add_statistics(residual);
  }
  if (model_.head_norms) roped_ = values("activations", rows * model_.qkv_width());
  reserve_for_weights();
  if (caches()) {
    fed_ = Block(ledger, "activations", 2 * rows * Index{sizeof(std::int32_t)}, memory);
    logits_ = floats("activations", logit_stride(model_));
    cache_ = values("cache", 2 * model_.layers * model_.context * model_.key_width());
  } else {
    reserve_for_training();
  }
  if (model_.rotary.base > 0 && !ledger.only_counts()) {
    std::vector<float> table(static_cast<std::size_t>(rope_floats(model_)));
    rope_table(model_, table.data());
    memory.write(rotation_.as<void>(), table.data(), rotation_.bytes());
  }
}

// ---- Memory ----

Block Operations::values(const char* kind, Index count) const {
  return Block(ledger_, kind, count * bytes_of(precision_), memory_);
}

Block Operations::floats(const char* kind, Index count) const {
  return Block(ledger_, kind, count * Index{sizeof(float)}, memory_);
}

Operations::Tensor Operations::tensor(Index width) const {
  Tensor made;
  made.memory = values("activations", most_rows_ * width);
  made.data = made.memory.as<void>(), made.width = width;
  return made;
}

Operations::Tensor Operations::alias(const Block& memory, Index width) const {
  Tensor made;
  made.data = memory.as<void>(), made.width = width;
  return made;
}

void Operations::add_statistics(Tensor& residual) const {
  residual.rstd = floats("activations", most_rows_);
  if (model_.norm == NormKind::layer) residual.mean = floats("activations", most_rows_);
}

Operations::Tensor Operations::new_tensor(Activation activation) {
  switch (activation) {
    case Activation::qkv: return tensor(model_.qkv_width());
    case Activation::up: return tensor(model_.up_width());
    case Activation::activated: return tensor(model_.inner);
    case Activation::attended: {
      Tensor made = tensor(model_.query_width());
      if (!caches()) made.log_sums = floats("activations", most_rows_ * model_.heads);
      return made;
    }
    case Activation::middle: {
      Tensor made = tensor(model_.width);
      add_statistics(made);
      return made;
    }
    default: return tensor(model_.width);
  }
}

void Operations::reserve_for_weights() {
  if (logit_stride(model_) > model_.vocabulary)
    padded_table_ = values("workspace", logit_stride(model_) * model_.width);
  else
    reserve(converted_matrix_, places_.head);
  if (is_coded(places_.tokens) && padded_table_.bytes() == 0) reserve(converted_matrix_, places_.tokens);
  if (is_coded(places_.positions)) reserve(decoded_positions_, places_.positions);
  for (const LayerPlaces& layer : places_.layers) {
    for (const LinearPlaces* const all : {&layer.qkv, &layer.attention_out, &layer.mlp_up, &layer.mlp_down})
      for (const LinearPlace& l : *all)
        reserve(converted_matrix_, l.weight), reserve(converted_bias_, l.bias);
    for (const NormPlace& norm :
         {layer.attention_norm, layer.query_norm, layer.key_norm, layer.mlp_norm, places_.last_norm})
      if ((is_coded(norm.weight) || is_coded(norm.bias)) && decoded_norms_.bytes() == 0)
        decoded_norms_ = values("workspace", 2 * vector_stride(model_));
  }
}

void Operations::reserve_for_training() {
  const Description& m = model_;
  logits_ = values("activations", part_rows_ * logit_stride(m));
  row_losses_ = floats("activations", rows_);
  factor_ = floats("workspace", 1);
  g_ = tensor(m.width);
  inner_ = values("activations", rows_ * std::max({m.inner, m.qkv_width(), m.width}));
  outer_ = values("activations", rows_ * std::max(m.width, m.query_width()));
  dqkv_ = alias(inner_, m.qkv_width()), dactivated_ = alias(inner_, m.inner);
  dattended_ = alias(outer_, m.query_width()), dnormed_ = alias(outer_, m.width);
  dup_.width = m.up_width();
  norm_sums_ = floats("workspace", norm_parts(rows_) * 2 * m.width);
  bias_sums_ = floats("workspace", bias_parts(rows_) * std::max({m.width, m.qkv_width(), m.up_width()}));
  if (m.tied || part_rows_ < rows_) table_gradient_ = floats("workspace", logit_stride(m) * m.width);
  if (m.head_norms) head_norm_sums_ = floats("workspace", rope_parts(rope_of({})) * 2 * m.head_width);
  attention_work_ = Block(ledger_, "workspace", attend_backward_bytes(attention()), memory_);
}

// ---- Weights ----

const scruple_array& Operations::weight(int parameter) const {
  return weights_[static_cast<std::size_t>(parameter)].arrays[SCRUPLE_WEIGHT];
}

bool Operations::is_coded(int parameter) const {
  return parameter >= 0 && !type_of(weight(parameter).format);
}

void Operations::reserve(Block& scratch, int parameter) const {
  if (parameter < 0 || type_of(weight(parameter).format) == precision_) return;
  const Index count = parameters_[static_cast<std::size_t>(parameter)].size();
  if (scratch.bytes() >= count * bytes_of(precision_)) return;
  scratch = Block();
  scratch = values("workspace", count);
}

Values Operations::readable(int parameter, const Block& scratch, Index first) const {
  if (parameter < 0) return {};
  if (const auto type = type_of(weight(parameter).format)) return {weight(parameter).codes, *type};
  const Values to = {scratch.as<std::byte>() + first * bytes_of(precision_), precision_};
  scruple::check(scruple_decode_as((*engine_).raw(), &weights_[static_cast<std::size_t>(parameter)],
                                   SCRUPLE_WEIGHT, format_of(precision_), to.data));
  return to;
}

const void* Operations::in_type(int parameter, const Block& scratch) const {
  const Values found = readable(parameter, scratch);
  if (parameter < 0 || found.type == precision_) return found.data;
  convert(found, {scratch.as<void>(), precision_}, weights_[static_cast<std::size_t>(parameter)].size,
          stream_);
  return scratch.as<void>();
}

Values Operations::vector(int parameter, int which) const {
  return readable(parameter, decoded_norms_, which * vector_stride(model_));
}

Operand Operations::matrix_of(const LinearPlace& l, bool backward) const {
  return {matrix(l.weight), model_.outputs_first ? l.in : l.out, model_.outputs_first != backward};
}

Norm Operations::norm_of(const NormPlace& at) const {
  return {model_.norm, static_cast<float>(model_.epsilon), vector(at.weight, 0), vector(at.bias, 1)};
}

Attention Operations::attention() const {
  return {precision_,
          sequences_,
          rows_ / sequences_,
          static_cast<int>(model_.heads),
          static_cast<int>(model_.kv_heads),
          static_cast<int>(model_.head_width),
          caches() ? nullptr : inputs_->documents()};
}

RopeShape Operations::rope_of(const LayerPlaces& at) const {
  return {rows_,
          static_cast<int>(model_.heads),
          static_cast<int>(model_.kv_heads),
          static_cast<int>(model_.head_width),
          positions(),
          model_.rotary.base > 0 ? rotation_.as<float>() : nullptr,
          vector(at.query_norm.weight, 0),
          vector(at.key_norm.weight, 1),
          static_cast<float>(model_.epsilon)};
}

bool Operations::fuses_gelu() const {
  return model_.mlp == Mlp::gelu && precision_ != Precision::fp32 && model_.inner % 8 == 0;
}

// ---- Forward ----

const std::int32_t* Operations::tokens() const {
  return caches() ? fed_.as<std::int32_t>() : inputs_->tokens();
}
const std::int32_t* Operations::positions() const {
  return caches() ? fed_.as<std::int32_t>() + most_rows_ : inputs_->positions();
}

void Operations::feed(const std::int32_t* tokens, Index count) {
  rows_ = count;
  std::vector<std::int32_t> both(static_cast<std::size_t>(most_rows_ + count));
  std::copy_n(tokens, count, both.begin());
  std::iota(both.end() - count, both.end(), static_cast<std::int32_t>(length));
  memory_.write(fed_.as<void>(), both.data(), static_cast<Index>(both.size() * sizeof both[0]));
}

void Operations::embed(Tensor& x) {
  residuals_.start();
  const Block& table = padded_table_.bytes() > 0 ? padded_table_ : converted_matrix_;
  cuda::embed(precision_, tokens(), positions(), rows_, model_.width, readable(places_.tokens, table),
              readable(places_.positions, decoded_positions_), x.data, stream_);
}

void Operations::norm(const NormPlace& at, Tensor& x, Tensor& y) {
  norm_forward(precision_, norm_of(at), x.data, rows_, model_.width, y.data, x.mean.as<float>(),
               x.rstd.as<float>(), stream_);
}

// y = x w + b, for each of the products of x; a single one may have a residual added.
void Operations::product(const LinearPlaces& at, const Tensor& x, Tensor& y, const void* residual) {
  for (const LinearPlace& l : at)
    products_.run({.rows = rows_,
                   .columns = l.out,
                   .depth = l.in,
                   .a = {x.data, l.in},
                   .b = matrix_of(l, false),
                   .d = this->at(y, l.column),
                   .stride = y.width,
                   .c = residual,
                   .epilogue = l.bias < 0 ? Epilogue::none : Epilogue::bias,
                   .bias = bias(l.bias)});
}

void* Operations::at(const Tensor& x, Index element) const {
  return static_cast<std::byte*>(x.data) + element * bytes_of(precision_);
}

// With head norms, backward needs what rope read. So rope then writes to a buffer of its own, again for each
// pass.
void Operations::rope(const LayerPlaces& at, Tensor& qkv) {
  if (has_rope() && !model_.head_norms) cuda::rope(precision_, rope_of(at), qkv.data, qkv.data, stream_);
}

void Operations::attend(const LayerPlaces& at, std::size_t layer, const Tensor& qkv, Tensor& y) {
  if (model_.head_norms) cuda::rope(precision_, rope_of(at), qkv.data, roped_.as<void>(), stream_);
  const void* const seen = model_.head_norms ? roped_.as<void>() : qkv.data;
  if (!caches()) return cuda::attend(attention(), seen, y.data, y.log_sums.as<float>(), stream_);
  const Index floats = 2 * model_.context * model_.key_width();
  void* const cache = cache_.as<std::byte>() + static_cast<Index>(layer) * floats * bytes_of(precision_);
  attend_cached(attention(), seen, {cache, model_.context, length}, y.data, stream_);
}

void Operations::up(const LinearPlaces& at, const Tensor& x, Tensor& up, Tensor& activated) {
  if (!fuses_gelu()) {
    linear(at, x, up);
    return activate(precision_, model_.mlp, up.data, rows_, model_.inner, activated.data, stream_);
  }
  const LinearPlace& l = at.front();
  products_.run({.rows = rows_,
                 .columns = l.out,
                 .depth = l.in,
                 .a = {x.data, l.in},
                 .b = matrix_of(l, false),
                 .d = activated.data,
                 .stride = l.out,
                 .epilogue = Epilogue::gelu,
                 .bias = bias(l.bias),
                 .kept = up.data});
}

// ---- The head ----

// to[i] = from[which[i]], in rows of the model's width.
void Operations::gather(const void* from, const std::int32_t* which, Index rows, void* to) const {
  const Values table = {const_cast<void*>(from), precision_};
  cuda::embed(precision_, which, nullptr, rows, model_.width, table, {}, to, stream_);
}

void Operations::final_norm(const NormPlace& at, Tensor& x) {
  norm(at, x, gathers() ? dnormed_ : hidden_);
  if (gathers()) gather(dnormed_.data, inputs_->rows_of_head(), inputs_->head_rows(), hidden_.data);
}

// The head's matrix with a row for every column of the logits.
const void* Operations::head_table() {
  if (padded_table_.bytes() == 0) return matrix(places_.head);
  const Values found = readable(places_.head, padded_table_);
  if (found.data != padded_table_.as<void>())
    convert(found, {padded_table_.as<void>(), precision_}, model_.vocabulary * model_.width, stream_);
  return padded_table_.as<void>();
}

void Operations::head(const float* loss_scale) {
  if (loss_scale != nullptr) multiply(loss_scale, inputs_->share(), factor_.as<float>(), stream_);
  const Index stride = logit_stride(model_), rows = inputs_->head_rows();
  const void* const table = head_table();
  const Tensor dhidden = gathers() ? alias(inner_, model_.width) : alias(outer_, model_.width);
  for (Index first = 0; first < rows; first += part_rows_) {
    const Index count = std::min(part_rows_, rows - first);
    products_.run({.rows = count,
                   .columns = stride,
                   .depth = model_.width,
                   .a = {at(hidden_, first * model_.width), model_.width},
                   .b = {table, model_.width, true},
                   .d = logits_.as<void>(),
                   .stride = stride});
    cross_entropy(precision_, logits_.as<void>(), count, model_.vocabulary, stride,
                  inputs_->targets() + first, loss_scale == nullptr ? nullptr : factor_.as<float>(),
                  row_losses_.as<float>() + first, stream_);
    if (loss_scale == nullptr) continue;
    products_.run({.rows = count,
                   .columns = model_.width,
                   .depth = stride,
                   .a = {logits_.as<void>(), stride},
                   .b = {table, model_.width},
                   .d = at(dhidden, first * model_.width),
                   .stride = model_.width});
    if (table_gradient_.bytes() > 0)
      products_.run({.rows = stride,
                     .columns = model_.width,
                     .depth = count,
                     .a = {logits_.as<void>(), stride, true},
                     .b = {at(hidden_, first * model_.width), model_.width},
                     .d = table_gradient_.as<void>(),
                     .stride = model_.width,
                     .c = first == 0 ? nullptr : table_gradient_.as<void>(),
                     .wide = true});
  }
  if (!gathers()) return;
  const auto left_out = static_cast<std::size_t>(rows_ - rows) * sizeof(float);
  check(cudaMemsetAsync(row_losses_.as<float>() + rows, 0, left_out, stream_), "clearing losses");
  if (loss_scale != nullptr) gather(dhidden.data, inputs_->places_in_head(), rows_, dnormed_.data);
}

void Operations::logits(float* values) {
  const Index stride = logit_stride(model_);
  products_.run({.rows = 1,
                 .columns = stride,
                 .depth = model_.width,
                 .a = {at(hidden_, (rows_ - 1) * model_.width), model_.width},
                 .b = {head_table(), model_.width, true},
                 .d = logits_.as<void>(),
                 .stride = stride,
                 .wide = true});
  memory_.read(values, logits_.as<void>(), model_.vocabulary * Index{sizeof(float)});
}

void Operations::head_backward(const NormPlace& at, const Tensor& x) {
  residuals_.read(model_.layers);
  norm_backward(at, x, false);
}

void Operations::take_head() {
  if (table_gradient_.bytes() > 0)
    return outbox_->take_whole(places_.head, {table_gradient_.as<void>(), Precision::fp32});
  outbox_->take(places_.head, [&](Index first, Index count, Values to) {
    products_.run({.rows = count,
                   .columns = model_.width,
                   .depth = inputs_->head_rows(),
                   .a = {logits_.as<std::byte>() + first * bytes_of(precision_), logit_stride(model_), true},
                   .b = {hidden_.data, model_.width},
                   .d = to.data,
                   .stride = model_.width});
  });
}

// The gradient of a table that is the output head as well is the sum of both.
void Operations::take_embeddings() {
  const auto clear = [&](Values to, Index count) {
    check(cudaMemsetAsync(to.data, 0, static_cast<std::size_t>(count * bytes_of(to.type)), stream_),
          "clearing a gradient");
  };
  const auto add = [&](Occurrences occurrences, Index first, Values to) {
    embedding_gradient(precision_, g_.data, model_.width, occurrences, first, to, stream_);
  };
  if (places_.positions >= 0)
    outbox_->take(places_.positions, [&](Index first, Index count, Values to) {
      clear(to, count * model_.width);
      add(inputs_->position_occurrences(first, count), first, to);
    });
  if (model_.tied) {
    const Values whole = {table_gradient_.as<void>(), Precision::fp32};
    add(inputs_->token_occurrences(0, model_.vocabulary), 0, whole);
    return outbox_->take_whole(places_.tokens, whole);
  }
  outbox_->take(places_.tokens, [&](Index first, Index count, Values to) {
    clear(to, count * model_.width);
    add(inputs_->token_occurrences(first, count), first, to);
  });
}

// ---- Backward ----

// dx = the sum of dy w^T over the products of one input.
void Operations::product_backward(const LinearPlaces& at, const Tensor& dy, Tensor& dx) {
  for (const LinearPlace& l : at)
    products_.run({.rows = rows_,
                   .columns = l.in,
                   .depth = l.out,
                   .a = {this->at(dy, l.column), dy.width},
                   .b = matrix_of(l, true),
                   .d = dx.data,
                   .stride = l.in,
                   .c = l.column == 0 ? nullptr : dx.data});
}

// SwiGLU's input is not needed any more once its gradient is computed, so the gradient overwrites it.
Operations::Tensor& Operations::up_backward(const LinearPlaces& at, Tensor& up) {
  dup_.data = model_.mlp == Mlp::gelu ? inner_.as<void>() : up.data;
  if (!fuses_gelu()) {
    product_backward(at, g_, dactivated_);
    activate_backward(precision_, model_.mlp, dactivated_.data, up.data, rows_, model_.inner, dup_.data,
                      stream_);
    return dup_;
  }
  const LinearPlace& l = at.front();
  products_.run({.rows = rows_,
                 .columns = l.in,
                 .depth = l.out,
                 .a = {g_.data, model_.width},
                 .b = matrix_of(l, true),
                 .d = dup_.data,
                 .stride = l.in,
                 .epilogue = Epilogue::gelu_backward,
                 .kept = up.data});
  return dup_;
}

Operations::Tensor& Operations::attend_backward(const LayerPlaces& at, const Tensor& qkv,
                                                const Tensor& attended) {
  const RopeShape shape = rope_of(at);
  if (model_.head_norms) cuda::rope(precision_, shape, qkv.data, roped_.as<void>(), stream_);
  cuda::attend_backward(attention(), model_.head_norms ? roped_.as<void>() : qkv.data, attended.data,
                        attended.log_sums.as<float>(), dattended_.data, dqkv_.data,
                        attention_work_.as<void>(), stream_);
  if (has_rope())
    rope_backward(precision_, shape, qkv.data, dqkv_.data, head_norm_sums_.as<float>(), stream_);
  return dqkv_;
}

void Operations::norm_linear_backward(const NormPlace& norm, const LinearPlaces& at, const Tensor& dy,
                                      const Tensor& x) {
  product_backward(at, dy, dnormed_);
  norm_backward(norm, x, true);
}

// From the gradient of the norm's output to g.
void Operations::norm_backward(const NormPlace& at, const Tensor& x, bool adds) {
  cuda::norm_backward(precision_, norm_of(at), dnormed_.data, x.data, x.mean.as<float>(), x.rstd.as<float>(),
                      rows_, model_.width, adds, g_.data, norm_sums_.as<float>(), stream_);
}

// ---- Gradients of parameters ----

// As the matrix lies: x^T dy, or dy^T x.
void Operations::take_linear(const LinearPlaces& at, const Tensor& x, const Tensor& dy) {
  for (const LinearPlace& l : at) {
    const void* const outputs = this->at(dy, l.column);
    const Operand in = {x.data, l.in}, out = {outputs, dy.width};
    outbox_->take(l.weight, [&](Index first, Index count, Values to) {
      Operand left = model_.outputs_first ? out : in;
      left.data = static_cast<const std::byte*>(left.data) + first * bytes_of(precision_);
      left.transposed = true;
      const Index columns = model_.outputs_first ? l.in : l.out;
      products_.run({.rows = count,
                     .columns = columns,
                     .depth = rows_,
                     .a = left,
                     .b = model_.outputs_first ? in : out,
                     .d = to.data,
                     .stride = columns});
    });
    if (l.bias < 0) continue;
    outbox_->take(l.bias, [&](Index, Index, Values to) {
      bias_gradient(precision_, outputs, rows_, dy.width, l.out, bias_sums_.as<float>(), to, stream_);
    });
  }
}

// Of two rows of sums: a norm's weight and bias, or the norms of queries and keys.
void Operations::take_sums(int parameter, const Block& sums, Index parts, Index width, Index column) {
  if (parameter < 0) return;
  outbox_->take(parameter, [&](Index, Index, Values to) {
    sum_parts(sums.as<float>() + column, parts, 2 * width, width, to, stream_);
  });
}

void Operations::take_norm(const NormPlace& at) {
  take_sums(at.weight, norm_sums_, norm_parts(rows_), model_.width, 0);
  take_sums(at.bias, norm_sums_, norm_parts(rows_), model_.width, model_.width);
}

void Operations::take_head_norms(const LayerPlaces& at) {
  if (!model_.head_norms) return;
  const Index parts = rope_parts(rope_of({}));
  take_sums(at.query_norm.weight, head_norm_sums_, parts, model_.head_width, 0);
  take_sums(at.key_norm.weight, head_norm_sums_, parts, model_.head_width, model_.head_width);
}

}  // namespace scruple::train::cuda
