// What the trainer computes on a device for models of any family, in fp32, for a comparison with torch's.
// usage: gradients cpu|cuda FOLDER...
// Each is a model's folder with a safetensors file `tokens` beside the weights: the I32 tensors `tokens`, `targets` and
// `starts`, [sequences, context]. It gets another, `computed`, with the `loss` of these sequences, every gradient by its
// parameter's name, the `losses` of 20 steps of AdamW on the first sequence and, on the CPU, the `logits` after every
// prefix of it. Gradients are released. Exits with 77 where there is no such device.
#include <cstdio>
#include <cstring>
#include <exception>

#include "tests/jobs.h"
#include "tests/models.h"
#include "train/model/model.h"

using namespace scruple;

namespace {

std::vector<std::int32_t> integers(const io::Safetensors& file, const char* name) {
  const io::StoredTensor& tensor = file.at(name);
  std::vector<std::int32_t> values(tensor.data.size() / sizeof(std::int32_t));
  std::memcpy(values.data(), tensor.data.data(), tensor.data.size());
  return values;
}

train::Job job_of(const train::Model& model, train::OpenBackend backend, std::int64_t batch) {
  train::Job job;
  job.shape = model.shape;
  job.batch = batch;
  job.backend = backend;
  job.threads = 2;
  job.optimizer = [] { return Optimizer("adamw", {{"weight_decay", 0.1}}); };
  job.describe = train::describe_by("fp32");
  job.schedule = {train::Annealing::constant, 3e-3, 0, 20};
  job.initial = [&model](int parameter, std::int64_t first, std::int64_t count, float* values) {
    std::copy_n(model.parameters[static_cast<std::size_t>(parameter)].data() + first, count, values);
  };
  job.gradients.policy = SCRUPLE_RELEASED;
  return job;
}

// The first sequence and its last target are the whole text, so that every window is the same.
std::vector<float> losses_of(const train::Job& job, const train::Batch& batch) {
  const std::int64_t context = job.shape.context;
  std::vector<std::uint8_t> text(batch.tokens, batch.tokens + context);
  text.push_back(static_cast<std::uint8_t>(batch.targets[context - 1]));
  train::Ledger ledger;
  train::Trainer trainer(job, ledger);
  std::vector<float> losses;
  for (std::int64_t step = 0; step < job.schedule.steps; ++step)
    losses.push_back(static_cast<float>(trainer.step(train::Windows(text, context)).loss));
  return losses;
}

std::vector<float> logits_of(const train::Model& model, const std::int32_t* tokens) {
  const std::int64_t context = model.shape.context, vocabulary = model.shape.vocabulary;
  const std::vector<scruple_tensor> weights = model.visible();
  train::Ledger ledger;
  const std::unique_ptr<train::Backend> backend = train::cpu_backend(2);
  const std::unique_ptr<train::Generator> generator = backend->generator(model.shape, weights, ledger);
  std::vector<float> logits(static_cast<std::size_t>(context * vocabulary));
  for (std::int64_t i = 0; i < context; ++i) {
    if (i % 3 == 0) generator->clear();  // then whole prefixes, else one token more
    const std::int64_t fed = generator->length();
    generator->feed(weights, tokens + fed, i + 1 - fed, logits.data() + i * vocabulary);
  }
  return logits;
}

void run(const std::string& folder, train::OpenBackend backend) {
  const io::Safetensors file(folder + "/tokens");
  const std::vector<std::int32_t> tokens = integers(file, "tokens"), targets = integers(file, "targets"),
                                  starts = integers(file, "starts");
  const train::Batch batch = {tokens.data(), targets.data(), starts.data()};
  const std::int64_t sequences = file.at("tokens").shape[0], context = file.at("tokens").shape[1];
  const train::Model model = train::read_model(folder, context);

  std::vector<io::TensorInfo> list;
  std::vector<std::vector<float>> values;
  const auto add = [&](const std::string& name, const std::vector<std::int64_t>& shape,
                       const std::vector<float>& of_it) {
    list.push_back({name, io::Dtype::f32, shape});
    values.push_back(of_it);
  };
  const train::Computed computed = train::computed_by(job_of(model, backend, sequences), batch);
  const std::vector<train::Parameter> parameters = train::parameters_of(model.shape);
  add("loss", {1}, {static_cast<float>(computed.loss)});
  for (std::size_t p = 0; p < parameters.size(); ++p)
    add(parameters[p].name, parameters[p].shape, computed.gradients[p]);
  add("losses", {20}, losses_of(job_of(model, backend, 2), batch));
  if (backend == train::cpu_backend)
    add("logits", {context, model.shape.vocabulary}, logits_of(model, batch.tokens));

  io::SafetensorsWriter writer(folder + "/computed", list, {});
  for (std::size_t i = 0; i < list.size(); ++i) writer.write(i, std::as_bytes(std::span(values[i])));
  writer.finish();
}

}  // namespace

int main(int argc, char** argv) {
  const std::string device = argc < 3 ? "" : argv[1];
  if (device != "cpu" && device != "cuda") return 2;
  if (device == "cuda" && !train::has_cuda()) return 77;
  const char* folder = nullptr;
  try {
    for (int i = 2; i < argc; ++i)
      run(folder = argv[i], device == "cuda" ? train::cuda_backend : train::cpu_backend);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s: %s\n", folder, error.what());
    return 1;
  }
}
