// Which engines this library has, which of them this machine can run, and the choice between them.
#include <algorithm>
#include <charconv>
#include <cstdlib>
#include <cstring>
#include <thread>

#include "engine/cpu.h"
#include "engine/failure.h"
#if SCRUPLE_HAS_CUDA
#include "engine/cuda.h"
#endif

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

#if !SCRUPLE_HAS_CUDA
EngineInfo cuda_info() {
  return {
      "cuda", "an NVIDIA GPU",
      "this library was built without CUDA; build it with make build CUDA=ON, or cmake -DSCRUPLE_CUDA=ON"};
}
std::unique_ptr<scruple_engine> make_cuda_engine(int) { return nullptr; }
#endif

// "cuda" or "cuda:N".
bool is_cuda(const std::string& name) { return name == "cuda" || name.rfind("cuda:", 0) == 0; }

std::unique_ptr<scruple_engine> make_cuda(const std::string& name) {
  int device = -1;
  if (name != "cuda") {
    const char *first = name.data() + 5, *last = name.data() + name.size();
    const auto [end, error] = std::from_chars(first, last, device);
    if (error != std::errc() || end != last || device < 0)
      fail(SCRUPLE_INVALID, "engine ", name,
           ": what follows cuda: must be a device's number, such as cuda:0");
  }
  if (const EngineInfo info = cuda_info(); !info.reason.empty())
    fail(SCRUPLE_UNAVAILABLE, "engine ", name, ": ", info.reason, "; engine cpu runs everywhere");
  return make_cuda_engine(device);
}

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
    list.push_back(cuda_info());
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
  if (is_cuda(wanted) && *source == 0) return make_cuda(wanted);

  const CpuUnit* best = nullptr;
  std::string known = "cpu";
  for (const CpuUnit& unit : cpu_units()) {
    known += std::string(", ") + unit.name;
    if (wanted == unit.name && !unit.available())
      fail(SCRUPLE_UNAVAILABLE, "engine ", wanted, source, ": this processor lacks ", unit.doc,
           "; use cpu, the best it has");
    if ((wanted == "cpu" || wanted == unit.name) && unit.available()) best = &unit;
  }
  if (best == nullptr)
    fail(SCRUPLE_INVALID, "unknown engine '", wanted, "'", source, "; known: ", known,
         *source == 0 ? ", cuda, cuda:N" : "; it names the unit that cpu means");
  return make_cpu_engine(*best, threads);
}

}  // namespace scruple
