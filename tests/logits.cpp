// Prints the logits after a text, as the trainer computes them. usage: logits FOLDER TEXT
#include <cstdio>

#include "train/export.h"

namespace {

using namespace scruple;

struct Loaded final : train::Weights {
  explicit Loaded(train::Model given) : model(std::move(given)) {}
  const float* values(int parameter, float*) override {
    return model.parameters[static_cast<std::size_t>(parameter)].data();
  }
  train::Model model;
};

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) return 2;
  Loaded weights(train::read_model(argv[1]));
  std::vector<std::int32_t> tokens;
  for (const char* c = argv[2]; *c != 0; ++c) tokens.push_back(static_cast<unsigned char>(*c));
  train::Ledger ledger;
  Threads threads(1);
  train::Gpt gpt(weights.model.shape, 1, train::Precision::fp32, threads, ledger);
  std::vector<float> logits(static_cast<std::size_t>(weights.model.shape.vocabulary));
  gpt.next(weights, tokens.data(), static_cast<std::int64_t>(tokens.size()), logits.data());
  for (const float value : logits) std::printf("%.9g\n", static_cast<double>(value));
}
