// What the trainer computes for a model folder of any family, for a comparison with torch's.
// usage: gradients FOLDER CONTEXT TOKENS OUT
// TOKENS is a safetensors file with the I32 tensors `tokens`, `targets` and `starts`, [sequences, CONTEXT]. OUT becomes
// one with `loss`, `logits` after every prefix of the first sequence, the `losses` of 20 steps of AdamW on the
// first sequence (fp32, gradients released), and every gradient by its parameter's name.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>

#include "train/cpu/generate.h"
#include "train/families/families.h"
#include "train/model.h"
#include "train/trainer.h"

using namespace scruple;

namespace {

std::vector<std::int32_t> integers(const io::Safetensors& file, const char* name) {
  const io::StoredTensor& tensor = file.at(name);
  std::vector<std::int32_t> values(tensor.data.size() / sizeof(std::int32_t));
  std::memcpy(values.data(), tensor.data.data(), tensor.data.size());
  return values;
}

struct Store final : train::Weights {
  explicit Store(const train::Model& of) : model(of) {}
  const float* values(int parameter, float*) override {
    return model.parameters[static_cast<std::size_t>(parameter)].data();
  }
  const train::Model& model;
};

struct Keep final : train::Gradients {
  explicit Keep(const train::Description& model) : parameters(train::parameters_of(model)) {
    for (const train::Parameter& p : parameters) all.emplace_back(static_cast<std::size_t>(p.size()), -1.0f);
  }
  // In tiles of two rows, as a released gradient comes.
  void take(int parameter, const train::FillRows& fill) override {
    const train::Parameter& p = parameters[static_cast<std::size_t>(parameter)];
    const std::int64_t rows = p.shape[0], columns = p.size() / rows;
    for (std::int64_t first = 0; first < rows; first += 2)
      fill(first, std::min<std::int64_t>(2, rows - first),
           all[static_cast<std::size_t>(parameter)].data() + first * columns);
  }
  std::vector<train::Parameter> parameters;
  std::vector<std::vector<float>> all;
};

// The first sequence and its last target are the whole text, so that every window is the same.
std::vector<float> losses_of(const train::Model& model, const std::vector<std::int32_t>& tokens,
                             const std::vector<std::int32_t>& targets) {
  const auto context = static_cast<std::size_t>(model.shape.context);
  std::vector<std::uint8_t> text(tokens.begin(), tokens.begin() + model.shape.context);
  text.push_back(static_cast<std::uint8_t>(targets[context - 1]));
  train::Job job;
  job.shape = model.shape;
  job.batch = 2;
  job.threads = 2;
  job.optimizer = [] { return Optimizer("adamw", {{"weight_decay", 0.1}}); };
  job.describe = [](const Optimizer& optimizer, std::int64_t size) {
    scruple_tensor row = {};
    row.optimizer = optimizer.raw();
    row.size = size;
    check(scruple_tensor_use(&row, "fp32"));
    return row;
  };
  job.schedule = {train::Annealing::constant, 3e-3, 0, 20};
  job.gradients.policy = SCRUPLE_RELEASED;
  train::Ledger ledger;
  train::Trainer trainer(job, ledger);
  for (std::size_t p = 0; p < model.parameters.size(); ++p)
    trainer.state().set(static_cast<int>(p), model.parameters[p].data());
  std::vector<float> losses;
  for (int step = 0; step < 20; ++step)
    losses.push_back(static_cast<float>(trainer.step(train::Windows(text, model.shape.context)).loss));
  return losses;
}

void run(const std::string& folder, std::int64_t context, const std::string& from, const std::string& to) {
  const train::Model model = train::read_model(folder, context);
  Store weights(model);
  const io::Safetensors file(from);
  const std::vector<std::int32_t> tokens = integers(file, "tokens"), targets = integers(file, "targets"),
                                  starts = integers(file, "starts");
  train::Ledger ledger;
  Threads threads(2);
  const auto size = static_cast<std::int64_t>(tokens.size());
  train::Transformer network({.shape = model.shape, .batch = size / context}, threads, ledger);
  Keep keep(model.shape);
  const auto loss =
      static_cast<float>(network.forward(weights, {tokens.data(), targets.data(), starts.data()}));
  network.backward(weights, keep, 1);
  const std::int64_t vocabulary = model.shape.vocabulary;
  std::vector<float> logits(static_cast<std::size_t>(context * vocabulary));
  train::CachedTransformer generator(model.shape, threads, ledger);
  for (std::int64_t i = 0; i < context; ++i) {
    if (i % 3 == 0) generator.clear();  // then whole prefixes, else one token more
    const std::int64_t fed = generator.length();
    generator.feed(weights, tokens.data() + fed, i + 1 - fed, logits.data() + i * vocabulary);
  }

  std::vector<io::TensorInfo> list = {{"loss", io::Dtype::f32, {1}},
                                      {"logits", io::Dtype::f32, {context, vocabulary}},
                                      {"losses", io::Dtype::f32, {20}}};
  for (const train::Parameter& p : keep.parameters) list.push_back({p.name, io::Dtype::f32, p.shape});
  io::SafetensorsWriter writer(to, list, {});
  const auto write = [&](std::size_t i, const float* values) {
    writer.write(i, {reinterpret_cast<const std::byte*>(values), static_cast<std::size_t>(list[i].bytes())});
  };
  write(0, &loss), write(1, logits.data()), write(2, losses_of(model, tokens, targets).data());
  for (std::size_t i = 0; i < keep.all.size(); ++i) write(i + 3, keep.all[i].data());
  writer.finish();
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 5) return 2;
  try {
    run(argv[1], std::atoll(argv[2]), argv[3], argv[4]);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
