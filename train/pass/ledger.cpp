#include "train/pass/ledger.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
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
