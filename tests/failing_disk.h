// A disk that fails when a test wants it to: the calls by which the library touches it come here, since a program's symbols
// go before those of libc. For a test that is one file: it defines those symbols.
#pragma once

#include <fcntl.h>
#include <linux/magic.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <cerrno>
#include <cstdarg>
#include <functional>
#include <map>
#include <string>
#include <vector>

namespace {

// What the calls below do while a test looks on: the `target`th one fails.
enum class Failure { none, error, short_write, short_then_full, kill_before, kill_after };
struct Plan {
  bool armed = false;
  Failure failure = Failure::none;
  int error = 0;
  int target = 0, calls = 0;
  std::vector<std::string> trace;
  std::function<void()> before_write = {};  // which a slow disk may make wait
};
Plan plan;

constexpr int kKilled = 77;

bool fails() {
  if (!plan.armed || plan.calls++ != plan.target) return false;
  if (plan.failure == Failure::kill_before) _exit(kKilled);
  return plan.failure == Failure::error || plan.failure == Failure::short_then_full;
}

// The call itself, with what the plan has for it.
template <class Call>
long planned(const std::string& what, const Call& call) {
  const int number = plan.calls;
  if (plan.armed) plan.trace.push_back(what);
  if (fails()) {
    errno = plan.error;
    return -1;
  }
  const long result = call();
  if (plan.armed && plan.failure == Failure::kill_after && number == plan.target) _exit(kKilled);
  return result;
}

std::map<int, std::string> paths;
bool on_a_network = false;

}  // namespace

// Nothing is flushed in fact, because nobody pulls the plug: the tests look at the order of the calls.
#pragma GCC visibility push(default)
extern "C" {

int open(const char* path, int flags, ...) {
  va_list arguments;
  va_start(arguments, flags);
  const mode_t mode = (flags & O_CREAT) != 0 ? static_cast<mode_t>(va_arg(arguments, int)) : 0;
  va_end(arguments);
  const auto call = [&] { return syscall(SYS_openat, AT_FDCWD, path, flags, mode); };
  if (!plan.armed) return static_cast<int>(call());
  const int made = static_cast<int>(planned("open " + std::string(path), call));
  if (made >= 0) paths[made] = path;
  return made;
}
ssize_t pwrite(int file, const void* bytes, size_t count, off_t offset) {
  if (plan.armed && plan.before_write) plan.before_write();
  const bool is_short = plan.failure == Failure::short_write || plan.failure == Failure::short_then_full;
  if (plan.armed && is_short && plan.calls == plan.target && count > 1) {
    if (plan.failure == Failure::short_then_full) ++plan.target;  // the rest finds the disk full
    ++plan.calls;
    plan.trace.push_back("write " + paths[file]);
    return syscall(SYS_pwrite64, file, bytes, count / 2, offset);
  }
  return planned("write " + paths[file], [&] { return syscall(SYS_pwrite64, file, bytes, count, offset); });
}
int fsync(int file) {
  return static_cast<int>(planned("fsync " + paths[file], [] { return 0L; }));
}
int close(int file) {
  if (!plan.armed || !paths.contains(file)) return static_cast<int>(syscall(SYS_close, file));
  const std::string path = paths[file];
  const bool refused = planned("close " + path, [] { return 0L; }) != 0;
  const int error = errno;
  syscall(SYS_close, file);  // Linux lets go of it even where it reports a failure
  paths.erase(file);
  errno = error;
  return refused ? -1 : 0;
}
int mkdir(const char* path, mode_t mode) {
  return static_cast<int>(
      planned("mkdir " + std::string(path), [&] { return syscall(SYS_mkdirat, AT_FDCWD, path, mode); }));
}
int rename(const char* from, const char* to) noexcept {
  return static_cast<int>(planned("rename " + std::string(from) + " " + to,
                                  [&] { return syscall(SYS_renameat2, AT_FDCWD, from, AT_FDCWD, to, 0); }));
}
int renameat2(int from_folder, const char* from, int to_folder, const char* to, unsigned flags) noexcept {
  return static_cast<int>(planned("exchange " + std::string(from) + " " + to, [&] {
    return syscall(SYS_renameat2, from_folder, from, to_folder, to, flags);
  }));
}
int unlinkat(int folder, const char* path, int flags) noexcept {  // std::filesystem's
  return static_cast<int>(
      planned("unlink " + std::string(path), [&] { return syscall(SYS_unlinkat, folder, path, flags); }));
}
int unlink(const char* path) noexcept { return unlinkat(AT_FDCWD, path, 0); }
int fstatfs(int file, struct statfs* system) noexcept {
  const auto result = static_cast<int>(syscall(SYS_fstatfs, file, system));
  system->f_type = on_a_network ? NFS_SUPER_MAGIC : EXT4_SUPER_MAGIC;
  return result;
}
}
#pragma GCC visibility pop
