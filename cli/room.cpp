#include "room.h"

#include <algorithm>
#include <iterator>
#include <memory>
#include <new>
#include <stdexcept>

#include "train/model/model.h"

namespace scruple::cli {
namespace {

// Kinds that no plan of weights, moments and gradients counts.
bool is_state(const std::string& kind) {
  return kind != "activations" && kind != "workspace" && kind != "saves";
}

// The trainer's own memory, or the library's: its accumulators are the sink's to ask for.
bool is_shortage(const std::exception& error) {
  const auto* const of_library = dynamic_cast<const Error*>(&error);
  return dynamic_cast<const std::bad_alloc*>(&error) != nullptr ||
         (of_library != nullptr && of_library->status() == SCRUPLE_OUT_OF_MEMORY);
}

// What takes less memory in the passes, and the job does not have.
std::vector<std::string> options_of_passes(const train::Job& job) {
  std::vector<std::string> names;
  if (job.recompute != train::Recompute::block) names.emplace_back("--recompute block");
  if (on_gpu(job) && !(job.offloads && job.offloads_state))
    names.emplace_back(job.offloads || job.offloads_state ? "--offload activations,state"
                                                          : "--offload state, activations or both");
  return names;
}

}  // namespace

Memory plan_of(const Choice& choice, const std::string& recipe, const train::Job& job,
               const std::string& policy) {
  const std::vector<train::Parameter> parameters = train::parameters_of(job.shape);
  Model model;
  for (const train::Parameter& parameter : parameters) model.add(parameter.size());
  Memory memory = measure(choice, choice.make_optimizer(), recipe, model, policy);
  if (job.ema > 0) memory.ema = ema_bytes(model);
  if (policy == "released") memory.gradients = job.backend(1)->released_bytes(parameters, job.activations);
  return memory;
}

std::int64_t free_memory(const train::Job& job) { return free_memory(*job.backend(job.threads)); }

std::int64_t free_memory(train::Backend& backend) {
  return backend.memory().is_host() ? free_memory() : backend.free_bytes();
}

void fit_recompute(train::Job& job, const ModelOptions& options, std::int64_t limit) {
  if (options.recompute != kAutoRecompute) return;
  const std::int64_t room = std::min(free_memory(job), limit);
  for (std::size_t i = 0; i < std::size(train::kRecomputes); ++i) {
    job.recompute = static_cast<train::Recompute>(i);
    if (train::memory_of(job).peak() <= room) return;
  }
}

bool on_gpu(const train::Job& job) { return job.backend == train::cuda_backend; }

std::string savings(const train::Job& job, bool chooses_recipe) {
  std::vector<std::string> smaller = {"model"}, names = options_of_passes(job);
  if (job.batch > 1) smaller.emplace_back("--batch");
  smaller.emplace_back("--context");
  if (chooses_recipe) smaller.emplace_back("--recipe");
  if (job.gradients.policy == SCRUPLE_STORED) names.emplace_back("--gradients released or compressed");
  if (job.gradients.policy == SCRUPLE_COMPRESSED) names.emplace_back("--gradients released");
  return "choose a smaller " + either(smaller) + (names.empty() ? "" : ", or " + joined(names, ", or "));
}

std::string savings_of_passes(const train::Job& job) {
  std::vector<std::string> names = options_of_passes(job);
  names.emplace_back(on_gpu(job) ? "--device cpu, or a GPU with more memory" : "a machine with more memory");
  return "a run that goes on keeps its sizes and formats; choose " + joined(names, ", or ");
}

std::string failure_words(const std::exception& error, const train::Job& job, const std::string& advice) {
  if (!is_shortage(error)) return error.what();
  return std::string("out of memory") + (on_gpu(job) ? ", the GPU's or the host's; " : "; ") + advice;
}

void rethrow_shortage(const std::exception& error, const train::Job& job, const std::string& advice) {
  if (!is_shortage(error)) throw;
  throw std::runtime_error(failure_words(error, job, advice));
}

Table checked_memory(const std::string& what, const train::Job& job, const Memory& plan,
                     const std::string& advice, std::int64_t limit) {
  const train::Ledger needed = train::memory_of(job);
  const Unit unit = unit_for(needed.peak(), 1);
  const auto params = static_cast<double>(train::parameter_count(job.shape));
  Table table;
  table.rows = {{"memory", unit.name, "B/param"}};
  std::int64_t sum = 0;
  const auto add = [&](const std::string& name, std::int64_t bytes) {
    sum += bytes;
    const auto size = static_cast<double>(bytes);
    if (bytes > 0) table.rows.push_back({name, fixed(size / unit.bytes, 2), fixed(size / params, 3)});
  };
  for (const auto& [name, bytes] : plan.parts()) add(name, needed.peak(name));
  add("activations", needed.peak("activations"));
  add("workspace", needed.peak("workspace"));
  add("total", std::exchange(sum, 0));
  for (const train::Ledger::Entry& entry : needed.host_entries())
    add(entry.kind + ", in host memory", entry.peak);
  if (needed.host_peak() > free_memory())
    refuse_memory(what, needed.host_peak(), size_words(free_memory()) + " of host memory are free",
                  "use --offload none, or " + advice, table);
  const std::int64_t free = free_memory(job);
  if (needed.peak() <= std::min(free, limit)) return table;
  refuse_memory(what, needed.peak(),
                free < limit ? size_words(free) + " are free" + (on_gpu(job) ? " on the GPU" : "")
                             : "--memory-limit is " + size_words(limit),
                advice, table);
}

std::vector<std::pair<std::string, std::int64_t>> measured_parts(const train::Ledger& ledger,
                                                                 const Memory& plan) {
  std::vector<std::pair<std::string, std::int64_t>> parts;
  for (const auto& [name, bytes] : plan.parts())
    parts.emplace_back(name, ledger.peak(name) + ledger.host_peak(name));
  return parts;
}

std::int64_t measured_total(const train::Ledger& ledger) {
  std::int64_t sum = 0;
  for (const auto& entries : {ledger.entries(), ledger.host_entries()})
    for (const train::Ledger::Entry& entry : entries)
      if (is_state(entry.kind)) sum += entry.peak;
  return sum;
}

}  // namespace scruple::cli
