// How fast a model folder becomes a trainer's planes, beside a copy of the same bytes in the same run.
// usage: loading [GB] [THREADS]     writes a Llama of that size in bf16 into a temporary folder, and removes it
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <vector>

#include "train/model/families/families.h"
#include "train/model/model.h"
#include "train/run/state.h"

using namespace scruple;

namespace {

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

train::ModelConfig config_of(double gb) {
  // 12 layers of width 1,024 and MLPs of 4,096 take 12 * 16.8 M parameters, and the vocabulary the rest.
  const double rest = gb * 1e9 / 2 - 12 * 16.8e6;
  const auto words = static_cast<std::int64_t>(std::max(rest / 1024, 256.0));
  const std::string text = R"({"model_type": "llama", "hidden_size": 1024, "intermediate_size": 4096,
      "num_hidden_layers": 12, "num_attention_heads": 16, "num_key_value_heads": 16, "rms_norm_eps": 1e-5,
      "max_position_embeddings": 512, "tie_word_embeddings": true, "vocab_size": )" +
                           std::to_string(words) + "}";
  return {train::describe(text, "config.json"), text};
}

}  // namespace

int main(int argc, char** argv) {
  const double gb = argc > 1 ? std::atof(argv[1]) : 1;
  const int threads = argc > 2 ? std::atoi(argv[2]) : 0;
  const std::string folder = std::filesystem::temp_directory_path() / "scruple-loading";
  const train::ModelConfig config = config_of(gb);
  const std::vector<train::Parameter> parameters = train::parameters_of(config.shape);
  std::int64_t largest = 0, all = 0;
  for (const train::Parameter& p : parameters) largest = std::max(largest, p.size()), all += p.size();
  std::vector<std::uint16_t> values(static_cast<std::size_t>(largest));
  for (std::size_t i = 0; i < values.size(); ++i) values[i] = static_cast<std::uint16_t>(0x3c00 + i % 509);
  train::write_model(folder, config, {parameters.size(), {io::Dtype::bf16, [&] { return values.data(); }}});

  const auto backend = train::cpu_backend(threads);
  const Optimizer optimizer("adamw");
  const auto describe = [](const Optimizer& with, std::int64_t size) {
    scruple_tensor row = {};
    row.optimizer = with.raw();
    row.size = size;
    check(scruple_tensor_use(&row, "scruple"));
    return row;
  };
  double load = 1e9, copy = 1e9;
  for (int round = 0; round < 3; ++round) {
    train::Ledger ledger;
    const double begin = now();
    const train::ModelFolder from(folder);
    train::State state(
        *backend, parameters, [&](auto) -> const Optimizer& { return optimizer; }, describe, ledger);
    state.start(
        [&](int p, std::int64_t first, std::int64_t count, float* to) { from.read(p, first, count, to); },
        ledger);
    load = std::min(load, now() - begin);
  }
  std::filesystem::remove_all(folder);
  // As much memory as the file has, to memory that is new, as a loader's is.
  const std::vector<char> source(static_cast<std::size_t>(2 * all), 1);
  for (int round = 0; round < 3; ++round) {
    const double begin = now();
    void* const to = std::malloc(source.size());
    std::memcpy(to, source.data(), source.size());
    copy = std::min(copy, now() - begin);
    std::printf("%s", static_cast<char*>(to)[source.size() / 2] == 1 ? "" : "?");
    std::free(to);
  }
  const double bytes = 2 * static_cast<double>(all) / 1e9;
  std::printf(
      "%.2f GB of bf16: loaded in %.3f s (%.2f GB/s, %d threads), copied in %.3f s (%.2f GB/s); %.2f of it\n",
      bytes, load, bytes / load, backend->engine().threads(), copy, bytes / copy, copy / load);
}
