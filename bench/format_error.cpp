// How far each moment format is from fp32 on moments of even and uneven groups, after one encoding with
// nearest rounding. Groups are runs of elements whose gradient scales are lognormal(sigma). Prints the tables
// of docs/formats.md.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <string>
#include <vector>

#include "scruple/scruple.h"

namespace {

constexpr int64_t kSize = 1 << 19;
constexpr double kSigmas[] = {0, 0.5, 1, 2};

void check(scruple_status status) {
  if (status == SCRUPLE_OK) return;
  std::fprintf(stderr, "format_error: %s\n", scruple_last_error());
  std::exit(1);
}

// exp_avg and exp_avg_sq as after many steps of AdamW: m is normal, v the mean of 50 squares.
struct Moments {
  std::vector<float> m = std::vector<float>(kSize), v = std::vector<float>(kSize);

  explicit Moments(double sigma) {
    std::mt19937_64 random(1);
    std::normal_distribution<double> normal;
    std::chi_squared_distribution<double> squares(50);
    for (std::size_t i = 0; i < m.size(); ++i) {
      const double scale = 1e-4 * std::exp(sigma * normal(random));
      m[i] = static_cast<float>(scale * normal(random));
      v[i] = static_cast<float>(scale * scale * squares(random) / 50);
    }
  }
};

std::vector<float> round_trip(scruple_engine* engine, scruple_tensor tensor, int array,
                              const scruple_format* format, const std::vector<float>& values) {
  tensor.arrays[array] = {};
  tensor.arrays[array].format = format;
  check(scruple_tensor_alloc(engine, &tensor, 1u << array));
  check(scruple_encode(engine, &tensor, array, values.data()));
  std::vector<float> back(values.size());
  check(scruple_decode(engine, &tensor, array, back.data()));
  scruple_tensor_free(engine, &tensor);
  return back;
}

// Of exp_avg: root mean square error over root mean square, and the share of elements off by half or more.
std::string signed_error(const std::vector<float>& m, const std::vector<float>& back) {
  double error = 0, total = 0, lost = 0;
  for (std::size_t i = 0; i < m.size(); ++i) {
    const double off = static_cast<double>(back[i]) - m[i];
    error += off * off;
    total += static_cast<double>(m[i]) * m[i];
    lost += std::fabs(off) >= 0.5 * std::fabs(m[i]) ? 1 : 0;
  }
  char text[64];
  std::snprintf(text, sizeof text, "%.4f, %.2f %%", std::sqrt(error / total),
                100 * lost / static_cast<double>(m.size()));
  return text;
}

// Of exp_avg_sq: root mean square of the error of ln(1 / sqrt(v)), and the share of elements that became
// zero.
std::string nonneg_error(const std::vector<float>& v, const std::vector<float>& back) {
  double error = 0, counted = 0;
  for (std::size_t i = 0; i < v.size(); ++i) {
    if (back[i] <= 0) continue;
    const double off = 0.5 * std::log(static_cast<double>(back[i]) / v[i]);
    error += off * off;
    counted += 1;
  }
  char text[64];
  std::snprintf(text, sizeof text, "%.3f, %.1f %%", std::sqrt(error / counted),
                100 - 100 * counted / static_cast<double>(v.size()));
  return text;
}

void table(scruple_engine* engine, const scruple_tensor& tensor, int array, unsigned role,
           const char* title) {
  std::printf("\n%s\n| format |", title);
  for (const double sigma : kSigmas) std::printf(" sigma %g |", sigma);
  std::printf("\n| --- | --- | --- | --- | --- |\n");
  for (int i = 0; i < scruple_format_count(); ++i) {
    scruple_format_info info;
    check(scruple_get_format_info(scruple_format_at(i), &info));
    if ((info.roles & role) == 0) continue;
    std::printf("| `%s` |", info.name);
    for (const double sigma : kSigmas) {
      const Moments moments(sigma);
      const std::vector<float>& values = role == SCRUPLE_ROLE_SIGNED ? moments.m : moments.v;
      const std::vector<float> back = round_trip(engine, tensor, array, scruple_format_at(i), values);
      std::printf(" %s |", (role == SCRUPLE_ROLE_SIGNED ? signed_error : nonneg_error)(values, back).c_str());
    }
    std::printf("\n");
  }
}

}  // namespace

int main() {
  scruple_engine* engine = nullptr;
  check(scruple_engine_create("cpu", 0, &engine));
  scruple_optimizer* adamw = nullptr;
  check(scruple_optimizer_create("adamw", &adamw));
  scruple_tensor tensor = {};
  tensor.optimizer = adamw;
  tensor.size = kSize;
  table(engine, tensor, SCRUPLE_SLOT, SCRUPLE_ROLE_SIGNED,
        "exp_avg: relative RMS error, share of elements off by half or more");
  table(engine, tensor, SCRUPLE_SLOT + 1, SCRUPLE_ROLE_NONNEG,
        "exp_avg_sq: RMS error of ln(1 / sqrt(v)), share of elements that became zero");
  scruple_optimizer_destroy(adamw);
  scruple_engine_destroy(engine);
  return 0;
}
