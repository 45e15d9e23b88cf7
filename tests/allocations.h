// Counts what a test's program asks for: hostile files may not buy memory with numbers. Or refuses it. Replaces operator
// new, so one file of a program may include it.
#pragma once

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <new>

namespace {

std::atomic<std::size_t> allocated{0}, most_allocated{0};
std::atomic<bool> refuses_memory{false};

}  // namespace

void* operator new(std::size_t bytes, const std::nothrow_t&) noexcept {
  void* const memory = refuses_memory ? nullptr : std::malloc(bytes + 16);
  if (memory == nullptr) return nullptr;
  std::memcpy(memory, &bytes, sizeof bytes);
  const std::size_t now = allocated += bytes;
  if (now > most_allocated) most_allocated = now;
  return static_cast<char*>(memory) + 16;
}
void* operator new(std::size_t bytes) {
  void* const memory = operator new(bytes, std::nothrow);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}
void operator delete(void* memory) noexcept {
  if (memory == nullptr) return;
  std::size_t bytes = 0;
  std::memcpy(&bytes, static_cast<char*>(memory) - 16, sizeof bytes);
  allocated -= bytes;
  std::free(static_cast<char*>(memory) - 16);
}
void operator delete(void* memory, std::size_t) noexcept { operator delete(memory); }

namespace scruple_tests {

// The most that was allocated at once since this was made.
struct Allocations {
  std::size_t before = most_allocated = allocated.load();
  std::size_t most() const { return most_allocated - before; }
};

}  // namespace scruple_tests
