// Which engines this library has, which of them this machine can run, and the choice between them.
#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <thread>

#include "engine/cpu.h"
#include "engine/failure.h"

namespace scruple {

#define SCRUPLE_DECLARE_UNIT(unit) \
  namespace unit {                 \
  extern const Unit kUnit;         \
  }
SCRUPLE_DECLARE_UNIT(baseline)
#if defined(__x86_64__)
SCRUPLE_DECLARE_UNIT(x86_64_v3)
SCRUPLE_DECLARE_UNIT(x86_64_v4)
#elif defined(__aarch64__)
SCRUPLE_DECLARE_UNIT(neon)
#endif

namespace {

bool always() { return true; }

#if defined(__x86_64__)
bool has_v3() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi") &&
         __builtin_cpu_supports("bmi2");
}
bool has_v4() {
  return has_v3() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") &&
         __builtin_cpu_supports("avx512vl");
}
#endif

constexpr int kMaxThreads = 1024;

}  // namespace

const std::vector<CpuUnit>& cpu_units() {
  static const std::vector<CpuUnit> kUnits = {
    {"cpu-baseline", "any processor of this architecture", &baseline::kUnit, always},
#if defined(__x86_64__)
    {"cpu-x86-64-v3", "AVX2 and FMA", &x86_64_v3::kUnit, has_v3},
    {"cpu-x86-64-v4", "AVX-512", &x86_64_v4::kUnit, has_v4},
#elif defined(__aarch64__)
    {"cpu-neon", "NEON", &neon::kUnit, always},
#endif
  };
  return kUnits;
}

const std::vector<EngineInfo>& engines() {
  static const std::vector<EngineInfo> kEngines = [] {
    std::vector<EngineInfo> list;
    for (const CpuUnit& unit : cpu_units())
      list.push_back(
          {unit.name, unit.doc, unit.available() ? "" : "this processor lacks " + std::string(unit.doc)});
    return list;
  }();
  return kEngines;
}

std::unique_ptr<scruple_engine> make_engine(const char* name, int threads) {
  if (threads < 0 || threads > kMaxThreads)
    fail(SCRUPLE_INVALID, "threads is ", threads, "; it must be 0 (one per core) to ", kMaxThreads);
  if (threads == 0) threads = std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
  std::string wanted = name == nullptr ? "cpu" : name;
  const char* source = "";
  if (const char* forced = std::getenv("SCRUPLE_ENGINE");
      wanted == "cpu" && forced != nullptr && *forced != 0) {
    wanted = forced;
    source = " (from SCRUPLE_ENGINE)";
  }

  const CpuUnit* best = nullptr;
  std::string known = "cpu";
  for (const CpuUnit& unit : cpu_units()) {
    known += std::string(", ") + unit.name;
    if (wanted == unit.name && !unit.available())
      fail(SCRUPLE_UNAVAILABLE, "engine ", wanted, source, ": this processor lacks ", unit.doc,
           "; use cpu, the best it has");
    if ((wanted == "cpu" || wanted == unit.name) && unit.available()) best = &unit;
  }
  if (best == nullptr) fail(SCRUPLE_INVALID, "unknown engine '", wanted, "'", source, "; known: ", known);
  return make_cpu_engine(*best, threads);
}

}  // namespace scruple
