#include "train/pass/backend.h"

#include <stdexcept>
#include <string>

#include "train/pass/pass.h"

namespace scruple::train {
namespace {

std::string text(std::int64_t number) { return std::to_string(number); }

}  // namespace

bool keeps(Recompute recompute, Activation activation) {
  const bool is_norm = activation == Activation::attention_normed || activation == Activation::mlp_normed;
  switch (recompute) {
    case Recompute::none: return true;
    case Recompute::norms: return !is_norm;
    case Recompute::mlp: return activation < Activation::mlp_normed;
    case Recompute::keep_attention: return activation == Activation::attended;
    case Recompute::block: return false;
  }
  return true;
}

void check_setup(const Setup& setup) {
  if (const std::string problem = problem_with(setup.shape); !problem.empty())
    throw std::invalid_argument(problem);
  const std::int64_t context = setup.shape.context, most = ((std::int64_t{1} << 31) - 1) / context;
  if (setup.batch < 1 || setup.batch > most)
    throw std::invalid_argument("a batch of " + text(setup.batch) +
                                " sequences was asked for; with a context of " + text(context) +
                                " choose from 1 to " + text(most));
}

void check_tokens(const Description& model, const std::int32_t* tokens, std::int64_t count) {
  for (std::int64_t i = 0; i < count; ++i)
    if (tokens[i] < 0 || tokens[i] >= model.vocabulary)
      throw std::invalid_argument("token " + text(i) + " is " + text(tokens[i]) +
                                  "; the model's vocabulary is 0 to " + text(model.vocabulary - 1));
}

void check_feed(const Description& model, std::int64_t length, const std::int32_t* tokens,
                std::int64_t count) {
  if (count < 1 || count > model.context - length)
    throw std::invalid_argument("feeding " + text(count) + " tokens after " + text(length) +
                                " was asked for; the context is " + text(model.context) +
                                ": feed at least 1, and beyond the context clear, then feed the last ones");
  check_tokens(model, tokens, count);
}

std::int64_t read_batch(const Description& model, std::int64_t rows, const Batch& batch,
                        std::int32_t* positions) {
  check_tokens(model, batch.tokens, rows);
  std::int64_t counted = 0;
  for (std::int64_t i = 0; i < rows; ++i) {
    if (batch.targets[i] < 0) continue;
    ++counted;
    if (batch.targets[i] >= model.vocabulary)
      throw std::invalid_argument("target " + text(i) + " is " + text(batch.targets[i]) +
                                  "; the model's vocabulary is 0 to " + text(model.vocabulary - 1) +
                                  ", and a target below 0 counts for nothing");
  }
  const std::int32_t* const starts = batch.starts;
  for (std::int64_t i = 0; i < rows; ++i) {
    const std::int64_t here = i % model.context, before = here == 0 || starts == nullptr ? 0 : starts[i - 1];
    const std::int64_t start = starts == nullptr ? 0 : starts[i];
    if (start != before && start != here)
      throw std::invalid_argument("start " + text(i) + " is " + text(start) + ", of token " + text(here) +
                                  " of its window; give " + text(before) +
                                  ", where the document of the token before begins, or " + text(here) +
                                  " where another begins");
    positions[i] = static_cast<std::int32_t>(here - start);
  }
  return counted;
}

const float* visible_values(Engine& engine, const scruple_tensor& weight, float* scratch) {
  static const scruple_format* const fp32 = format_named("fp32");
  const scruple_array& array = weight.arrays[SCRUPLE_WEIGHT];
  if (array.format == fp32) return static_cast<const float*>(array.codes);
  check(scruple_decode(engine.raw(), &weight, SCRUPLE_WEIGHT, scratch));
  return scratch;
}

}  // namespace scruple::train
