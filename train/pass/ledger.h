// Where the trainer's memory goes: every allocation of model memory names its kind, and one ledger counts
// them all.
#pragma once

#include <cstdint>
#include <limits>
#include <memory>
#include <string>
#include <vector>

namespace scruple::train {

class Ledger {
 public:
  static constexpr std::int64_t kNoLimit = std::numeric_limits<std::int64_t>::max();
  struct Entry {
    std::string kind;  // "weights", "exp_avg", "gradients", "activations", "workspace"...
    std::int64_t now = 0, peak = 0;
    std::int64_t high = 0;  // the peak since mark()
  };
  // More than `limit` bytes at once are refused, before any is touched.
  explicit Ledger(std::int64_t limit = kNoLimit, std::int64_t host_limit = kNoLimit)
      : limit_(limit), host_limit_(host_limit) {}
  // One that only counts: its blocks have no memory to write to, and take none of a device.
  static Ledger counter();
  bool only_counts() const { return only_counts_; }
  void add(const std::string& kind, std::int64_t bytes);
  void give_back(const std::string& kind, std::int64_t bytes) noexcept;  // of what was added
  void check_room(const std::string& kind, std::int64_t bytes) const;    // throws where add() would
  const std::vector<Entry>& entries() const { return entries_; }  // in the order of their first allocation
  std::int64_t peak(const std::string& kind) const;
  std::int64_t peak() const { return peak_; }  // of the sum
  void mark();                                 // highs begin anew, with what there is now
  std::int64_t limit() const { return limit_; }
  // What lies in host memory beside a device's, counted apart: what is offloaded, and copies that saves are written from.
  Ledger& host();
  std::int64_t host_peak() const { return host_ == nullptr ? 0 : host_->peak(); }
  std::int64_t host_peak(const std::string& kind) const { return host_ == nullptr ? 0 : host_->peak(kind); }
  std::vector<Entry> host_entries() const {
    return host_ == nullptr ? std::vector<Entry>() : host_->entries();
  }

 private:
  std::vector<Entry> entries_;
  std::int64_t limit_, host_limit_, now_ = 0, peak_ = 0;
  bool only_counts_ = false;
  std::unique_ptr<Ledger> host_;
};

// Where blocks come from.
class Memory {
 public:
  virtual ~Memory() = default;
  virtual void* take(std::int64_t bytes) = 0;  // zeroed, at least one byte; nullptr: there is no more
  virtual void give_back(void* memory) noexcept = 0;
  // Whether the host can read and write it where it lies; if not, it is copied.
  virtual bool is_host() const { return true; }
  virtual void read(void* to_host, const void* from, std::int64_t bytes);
  virtual void write(void* to, const void* from_host, std::int64_t bytes);
};
Memory& host_memory();
// What this machine, its containers and the process's own limit can still give; without a limit where that cannot be read.
// Linux kills who takes more, without a word: ask first. `root`: of the file system that says so, for tests.
std::int64_t free_host_memory(const std::string& root = "");

// Zeroed memory of one kind, counted from construction to destruction. Throws where the ledger or the
// machine has no more.
class Block {
 public:
  Block() = default;
  Block(Ledger& ledger, std::string kind, std::int64_t bytes, Memory& from = host_memory());
  Block(Block&& other) noexcept;
  Block& operator=(Block&& other) noexcept;
  ~Block();

  template <class T>
  T* as() const {
    return static_cast<T*>(memory_);
  }
  std::int64_t bytes() const { return bytes_; }

 private:
  Ledger* ledger_ = nullptr;
  Memory* from_ = nullptr;
  std::string kind_;
  std::int64_t bytes_ = 0;
  void* memory_ = nullptr;
};

}  // namespace scruple::train
