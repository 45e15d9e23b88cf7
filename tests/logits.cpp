// Prints the logits after a text, as the trainer computes them. usage: logits FOLDER TEXT
#include <cstdio>

#include "tests/models.h"
#include "train/model/model.h"
#include "train/pass/backend.h"

using namespace scruple;

int main(int argc, char** argv) {
  if (argc != 3) return 2;
  const train::Model model = train::read_model(argv[1]);
  std::vector<std::int32_t> tokens;
  for (const char* c = argv[2]; *c != 0; ++c) tokens.push_back(static_cast<unsigned char>(*c));
  train::Ledger ledger;
  const auto backend = train::cpu_backend(1);
  std::vector<float> logits(static_cast<std::size_t>(model.shape.vocabulary));
  backend->generator(model.shape, model.visible(), ledger)
      ->feed(model.visible(), tokens.data(), static_cast<std::int64_t>(tokens.size()), logits.data());
  for (const float value : logits) std::printf("%.9g\n", static_cast<double>(value));
}
