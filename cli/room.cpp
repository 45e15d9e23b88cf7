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
  if (on_gpu(job) && !(job.offloads && job.offloads_state)) names.emplace_back("--offload auto");
  return names;
}

// In place of what the host has no memory for.
std::string what_fits(train::Job job, std::int64_t limit) {
  if (fit(job, true, true, std::min(free_memory(job), limit), free_memory()))
    return "--recompute " + recompute_name(job) + " --offload " + offload_words(job) + " would fit";
  return "no other --recompute and --offload would fit; free some, or use a host with more";
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

// Each choice takes more time than the one before. Activations leave while layers are computed: 1 % at 8 B. `block` is a third
// more arithmetic. State crosses the link both ways in every step, which made one of 4,096 tokens half as long again
// (bench/results/2026-11-19-h200.md), takes as much host memory, and lets training wait for saves.
bool fit(train::Job& job, bool any_recompute, bool any_offload, std::int64_t device, std::int64_t host) {
  using train::Recompute;
  const auto either = [&](bool is) { return any_offload ? std::vector{false, true} : std::vector{is}; };
  std::vector<Recompute> recomputes = {job.recompute};
  if (any_recompute) {
    recomputes.clear();
    for (std::size_t i = 0; i < std::size(train::kRecomputes); ++i)
      recomputes.push_back(static_cast<Recompute>(i));
  }
  const std::vector<bool> states = either(job.offloads_state), activations = either(job.offloads);
  for (const bool state : states)
    for (const Recompute recompute : recomputes)
      for (const bool residuals : activations) {
        job.offloads_state = state, job.recompute = recompute, job.offloads = residuals;
        const train::Ledger needed = train::memory_of(job);
        if (needed.peak() <= device && needed.host_peak() <= host) return true;
      }
  return false;
}

void fit(train::Job& job, const ModelOptions& options, std::int64_t limit) {
  const bool any_recompute = options.recompute == kAuto,
             any_offload = options.offload == kAuto && on_gpu(job);
  if (any_recompute || any_offload)
    fit(job, any_recompute, any_offload, std::min(free_memory(job), limit), free_memory());
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
  const std::int64_t free = free_memory(job), host = free_memory();
  if (needed.peak() > std::min(free, limit))
    refuse_memory(what, needed.peak(),
                  free < limit ? size_words(free) + " are free" + (on_gpu(job) ? " on the GPU" : "")
                               : "--memory-limit is " + size_words(limit),
                  advice, table);
  if (needed.host_peak() > host)
    refuse_memory(what + "'s --offload " + offload_words(job), needed.host_peak(),
                  size_words(host) + " of host memory are free", what_fits(job, limit), table);
  return table;
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
