#include "memory.h"

#include <sstream>
#include <stdexcept>

#include "train/pass/ledger.h"
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
  text << what << " needs " << need_words(needed) << ", and " << there << "; " << advice;
  if (!parts.rows.empty()) parts.print(text << "\n\n");
  throw std::runtime_error(text.str());
}

std::int64_t free_memory() { return train::free_host_memory(); }

}  // namespace scruple::cli
