#include "memory.h"

#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <limits>
#include <sstream>
#include <stdexcept>

#include "train/run/rows.h"

namespace scruple::cli {
namespace {

void add_tensor(Memory& memory, const scruple_tensor& tensor, std::int64_t count, bool gradients) {
  std::size_t slot = 0;
  for (const int a : used_arrays(tensor)) {
    const scruple_format* format = tensor.arrays[a].format;
    const PlaneBytes planes = plane_bytes(format, tensor.size);
    if (a == SCRUPLE_GRADIENT) {
      if (gradients) memory.gradients += count * planes.total();
      continue;
    }
    (info_of(format).aux_is_scale != 0 ? memory.scales : memory.extra) += count * planes.aux;
    if (a == SCRUPLE_WEIGHT) {
      memory.weights += count * planes.codes;
      continue;
    }
    if (slot == memory.slots.size()) memory.slots.emplace_back(array_name(tensor, a), 0);
    memory.slots[slot++].second += count * planes.codes;
  }
}

}  // namespace

std::vector<std::pair<std::string, std::int64_t>> Memory::parts() const {
  std::vector<std::pair<std::string, std::int64_t>> all = {{"weights", weights}, {"extra", extra}};
  all.insert(all.end(), slots.begin(), slots.end());
  all.insert(all.end(), {{"scales", scales}, {"gradients", gradients}});
  if (ema > 0) all.emplace_back("ema", ema);
  return all;
}

std::int64_t Memory::total() const {
  std::int64_t sum = 0;
  for (const auto& [name, bytes] : parts()) sum += bytes;
  return sum;
}

Memory measure(const Choice& choice, const Optimizer& optimizer, const std::string& recipe,
               const Model& model, const std::string& policy) {
  Memory memory;
  for (const auto& [size, count] : model.tensors)
    add_tensor(memory, choice.for_policy(policy, recipe, size).describe(optimizer, recipe, size), count,
               policy != "released");
  return memory;
}

std::int64_t ema_bytes(const Model& model) {
  std::int64_t bytes = 0;
  for (const auto& [size, count] : model.tensors)
    bytes += count * plane_bytes(format_named(train::kAverageFormat), size).total();
  return bytes;
}

void refuse_memory(const std::string& what, std::int64_t needed, const std::string& there,
                   const std::string& advice, const Table& parts) {
  std::ostringstream text;
  text << what << " needs " << size_words(needed) << ", and " << there << "; " << advice;
  if (!parts.rows.empty()) parts.print(text << "\n\n");
  throw std::runtime_error(text.str());
}

std::int64_t free_memory() {
  std::int64_t free = std::numeric_limits<std::int64_t>::max(), kilobytes = 0, limit = 0, used = 0;
  std::ifstream file("/proc/meminfo");
  std::string key, rest;
  while (file >> key >> kilobytes && std::getline(file, rest))
    if (key == "MemAvailable:") free = kilobytes * 1024;
  // A container may have less than its machine.
  std::ifstream("/sys/fs/cgroup/memory.current") >> used;
  if (std::ifstream("/sys/fs/cgroup/memory.max") >> limit)
    free = std::min(free, std::max<std::int64_t>(limit - used, 0));
  // So may a process (ulimit -v), which counts all its addresses.
  rlimit addresses{};
  std::int64_t pages = 0;
  if (getrlimit(RLIMIT_AS, &addresses) == 0 && addresses.rlim_cur != RLIM_INFINITY &&
      std::ifstream("/proc/self/statm") >> pages)
    free =
        std::min(free, std::max<std::int64_t>(
                           static_cast<std::int64_t>(addresses.rlim_cur) - pages * sysconf(_SC_PAGESIZE), 0));
  return free;
}

}  // namespace scruple::cli
