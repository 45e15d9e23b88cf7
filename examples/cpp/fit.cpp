// Fits y = A x + b to samples of a known A and b: two tensors, stepped in one call, clipped by their global norm.
// Prints the squared error on the way, and what each parameter of A costs in memory.
#include <cstdio>
#include <random>
#include <scruple/scruple.hpp>
#include <vector>

constexpr int kIn = 64, kOut = 32, kBatch = 16, kSteps = 600;

int main() try {
  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  std::vector<float> true_a(kOut * kIn), true_b(kOut);
  for (float& value : true_a) value = normal(random) / 8;
  for (float& value : true_b) value = normal(random);
  std::vector<float> a(kOut * kIn), b(kOut), grad_a(kOut * kIn), grad_b(kOut), x(kIn);

  scruple::Engine engine;
  scruple::Optimizer decayed("adamw", {{"lr", 0.01}, {"weight_decay", 1e-4}});
  scruple::Optimizer undecayed("adamw", {{"lr", 0.01}, {"weight_decay", 0}});
  std::vector<scruple::Tensor> layers;
  layers.emplace_back(engine, decayed, kOut * kIn, "scruple", 0);  // the last argument is its id
  layers.emplace_back(engine, undecayed, kOut, "scruple", 1);
  layers[0].load(a.data());  // the first weights
  layers[1].load(b.data());
  layers[0].gradient(grad_a.data(), "fp32");  // where each step will find the gradient
  layers[1].gradient(grad_b.data(), "fp32");

  for (int step = 0; step <= kSteps; ++step) {
    layers[0].weights(a.data());
    layers[1].weights(b.data());
    grad_a.assign(grad_a.size(), 0);
    grad_b.assign(grad_b.size(), 0);
    double loss = 0;
    for (int sample = 0; sample < kBatch; ++sample) {
      for (float& value : x) value = normal(random);
      for (int i = 0; i < kOut; ++i) {
        float error = b[i] - true_b[i];
        for (int j = 0; j < kIn; ++j) error += (a[i * kIn + j] - true_a[i * kIn + j]) * x[j];
        loss += error * error / kBatch;
        for (int j = 0; j < kIn; ++j) grad_a[i * kIn + j] += 2 * error * x[j] / kBatch;
        grad_b[i] += 2 * error / kBatch;
      }
    }
    if (step % 200 == 0) std::printf("step %3d: squared error %.2f\n", step, loss);
    for (scruple::Optimizer* optimizer : {&decayed, &undecayed})
      optimizer->set("lr", 0.01 * (1 - 1.0 * step / (kSteps + 1)));
    const scruple::Norm norm = scruple::norm(engine, layers);
    if (norm.finite) scruple::step(engine, layers, scruple_clip_factor(norm.value, 10));
  }

  std::int64_t bytes = 0;
  for (const int array : scruple::used_arrays(layers[0].raw()))
    if (array != SCRUPLE_GRADIENT)
      bytes += scruple::plane_bytes(layers[0].raw().arrays[array].format, kOut * kIn).total();
  std::printf("%s: %.3f bytes per parameter\n", engine.name(), static_cast<double>(bytes) / (kOut * kIn));
} catch (const scruple::Error& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}
