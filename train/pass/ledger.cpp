#include "train/pass/ledger.h"

#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <new>
#include <stdexcept>
#include <utility>

namespace scruple::train {

Ledger Ledger::counter() {
  Ledger ledger;
  ledger.only_counts_ = true;
  return ledger;
}

Ledger& Ledger::host() {
  if (host_ == nullptr) host_ = std::make_unique<Ledger>(only_counts_ ? counter() : Ledger(host_limit_));
  return *host_;
}

void Ledger::check_room(const std::string& kind, std::int64_t bytes) const {
  if (bytes > limit_ - now_)
    throw std::runtime_error("the run needs at least " + std::to_string((now_ + bytes) >> 20) + " MiB, " +
                             std::to_string(bytes >> 20) + " of them for " + kind + ", and " +
                             std::to_string(limit_ >> 20) +
                             " MiB are free; choose a smaller model, batch or context, or a smaller recipe");
}

void Ledger::add(const std::string& kind, std::int64_t bytes) {
  check_room(kind, bytes);
  auto entry = std::find_if(entries_.begin(), entries_.end(), [&](const Entry& e) { return e.kind == kind; });
  if (entry == entries_.end()) entry = entries_.insert(entry, {kind, 0, 0, 0});
  entry->now += bytes;
  entry->peak = std::max(entry->peak, entry->now);
  entry->high = std::max(entry->high, entry->now);
  now_ += bytes;
  peak_ = std::max(peak_, now_);
}

void Ledger::mark() {
  for (Entry& entry : entries_) entry.high = entry.now;
}

void Ledger::give_back(const std::string& kind, std::int64_t bytes) noexcept {
  for (Entry& entry : entries_)
    if (entry.kind == kind) entry.now -= bytes;
  now_ -= bytes;
}

std::int64_t Ledger::peak(const std::string& kind) const {
  for (const Entry& entry : entries_)
    if (entry.kind == kind) return entry.peak;
  return 0;
}

void Memory::read(void* to_host, const void* from, std::int64_t bytes) {
  std::memcpy(to_host, from, static_cast<std::size_t>(bytes));
}
void Memory::write(void* to, const void* from_host, std::int64_t bytes) {
  std::memcpy(to, from_host, static_cast<std::size_t>(bytes));
}

namespace {

class HostMemory final : public Memory {
  void* take(std::int64_t bytes) override {
    void* const memory = std::calloc(1, static_cast<std::size_t>(bytes));
#ifdef MADV_HUGEPAGE
    // Asks for pages of 2 MiB: most of the cost of new memory is the kernel's work per page. Without them it
    // only is slower.
    constexpr std::uintptr_t kPage = 2 << 20;
    const auto begin = reinterpret_cast<std::uintptr_t>(memory),
               end = begin + static_cast<std::uintptr_t>(bytes);
    const std::uintptr_t first = (begin + kPage - 1) / kPage * kPage, last = end / kPage * kPage;
    if (memory != nullptr && first < last)
      madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);
#endif
    return memory;
  }
  void give_back(void* memory) noexcept override { std::free(memory); }
};

}  // namespace

Memory& host_memory() {
  static HostMemory memory;
  return memory;
}

namespace {

// What control groups (version 2, and 1) leave of the machine. A group's limit holds for all in it, so those above count
// too: a container may not know that it is in one. Page cache counts as used, and is given back when it is asked for.
std::int64_t free_in_groups(const std::string& root) {
  struct Version {
    std::string line, folder, limit, used, cache;
  };
  const Version versions[] = {{"0::", "/sys/fs/cgroup", "/memory.max", "/memory.current", "inactive_file"},
                              {":memory:", "/sys/fs/cgroup/memory", "/memory.limit_in_bytes",
                               "/memory.usage_in_bytes", "total_inactive_file"}};
  std::int64_t free = Ledger::kNoLimit;
  for (const Version& version : versions) {
    std::ifstream groups(root + "/proc/self/cgroup");
    std::string path;
    for (std::string line; std::getline(groups, line);)
      if (const std::size_t at = line.find(version.line); at != line.npos)
        path = line.substr(at + version.line.size());
    for (bool is_root = false; !is_root; path.resize(std::min(path.rfind('/'), path.size()))) {
      is_root = path.find('/') == path.npos;
      const std::string group = root + version.folder + (is_root ? "" : path);
      std::int64_t limit = 0, used = 0, bytes = 0;
      if (!(std::ifstream(group + version.limit) >> limit)) continue;
      std::ifstream(group + version.used) >> used;
      std::ifstream kinds(group + "/memory.stat");
      for (std::string kind; kinds >> kind >> bytes;)
        if (kind == version.cache) used -= bytes;
      free = std::min(free, std::max<std::int64_t>(limit - used, 0));
    }
  }
  return free;
}

}  // namespace

std::int64_t free_host_memory(const std::string& root) {
  std::int64_t free = free_in_groups(root), kilobytes = 0, pages = 0;
  std::ifstream file(root + "/proc/meminfo");
  std::string key, rest;
  while (file >> key >> kilobytes && std::getline(file, rest))
    if (key == "MemAvailable:") free = std::min(free, kilobytes * 1024);
  // A process may have a limit (ulimit -v), which counts all its addresses.
  rlimit addresses{};
  if (getrlimit(RLIMIT_AS, &addresses) == 0 && addresses.rlim_cur != RLIM_INFINITY &&
      std::ifstream("/proc/self/statm") >> pages)
    free =
        std::min(free, std::max<std::int64_t>(
                           static_cast<std::int64_t>(addresses.rlim_cur) - pages * sysconf(_SC_PAGESIZE), 0));
  return free;
}

Block::Block(Ledger& ledger, std::string kind, std::int64_t bytes, Memory& from)
    : Block() {  // made, so that what throws below gives back what it took
  if (bytes < 0) throw std::bad_alloc();
  ledger.add(kind, bytes);
  ledger_ = &ledger;
  from_ = ledger.only_counts() ? &host_memory() : &from;
  kind_ = std::move(kind);
  bytes_ = bytes;
  memory_ = from_->take(ledger.only_counts() ? 1 : std::max<std::int64_t>(bytes, 1));
  if (memory_ == nullptr) throw std::bad_alloc();
}

Block::Block(Block&& other) noexcept
    : ledger_(std::exchange(other.ledger_, nullptr)),
      from_(other.from_),
      kind_(std::move(other.kind_)),
      bytes_(std::exchange(other.bytes_, 0)),
      memory_(std::exchange(other.memory_, nullptr)) {}

Block& Block::operator=(Block&& other) noexcept {
  std::swap(ledger_, other.ledger_);
  std::swap(from_, other.from_);
  std::swap(kind_, other.kind_);
  std::swap(bytes_, other.bytes_);
  std::swap(memory_, other.memory_);
  return *this;
}

Block::~Block() {
  if (memory_ != nullptr) from_->give_back(memory_);
  if (ledger_ != nullptr) ledger_->give_back(kind_, bytes_);
}

}  // namespace scruple::train
