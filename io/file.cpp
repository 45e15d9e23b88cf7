#include "io/file.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#if defined(__linux__)
#include <linux/magic.h>
#include <sys/vfs.h>
#endif

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdio>
#include <filesystem>
#include <system_error>
#include <utility>

namespace scruple::io {
namespace {

std::string words_of(int error) { return std::generic_category().message(error); }

const char* hint_for(int error) {
  switch (error) {
    case ENOENT: return "; check the path";
    case EACCES:
    case EPERM:
    case EROFS: return "; check the permissions of the file and its folder";
    case ENOSPC:
    case EDQUOT: return "; make room on that disk, or choose another";
    case EFBIG: return "; raise the limit on file sizes (ulimit -f), or choose another file system";
    default: return "";
  }
}

struct Descriptor {
  int value;
  ~Descriptor() {
    if (value >= 0) ::close(value);
  }
};

std::string folder_of(const std::string& path) {
  const std::size_t slash = path.rfind('/');
  if (slash == std::string::npos) return ".";
  return slash == 0 ? "/" : path.substr(0, slash);
}

// Calls `make` with names beside `path` until one is free; 0, or the error that was not "there is one".
template <class Make>
int under_partial_name(const std::string& path, std::string& partial, const Make& make) {
  static std::atomic<unsigned> count{0};
  for (;;) {
    partial = path + std::string(kPartialName) + std::to_string(::getpid()) + "-" + std::to_string(count++);
    if (make(partial)) return 0;
    if (errno != EEXIST && errno != ENOTEMPTY) return errno;
  }
}

bool is_partial_name(std::string_view name, std::string_view prefix) {
  const auto take_number = [&name] {  // from the end
    const std::size_t digits = name.find_last_not_of("0123456789") + 1;
    const bool some = digits < name.size();
    name = name.substr(0, digits);
    return some;
  };
  if (!name.starts_with(prefix) || !take_number() || !name.ends_with('-')) return false;
  name.remove_suffix(1);
  return take_number() && name.ends_with(kPartialName) && name.size() > kPartialName.size() + prefix.size();
}

int open_folder(const std::string& path) {
  return ::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
}

// Whether a lock on this folder says all: on a network's file system, and through one that passes calls on, a
// writer on another machine holds a lock that is not seen here. What is not known is taken for such a one.
bool locks_are_seen(int folder) {
#if defined(__linux__)
  constexpr unsigned long kLocal[] = {
      EXT4_SUPER_MAGIC,       XFS_SUPER_MAGIC,  BTRFS_SUPER_MAGIC,  TMPFS_MAGIC,
      OVERLAYFS_SUPER_MAGIC,  F2FS_SUPER_MAGIC, /*ZFS*/ 0x2fc12fc1,
      /*bcachefs*/ 0xca451a4e};
  struct statfs system {};
  return ::fstatfs(folder, &system) == 0 &&
         std::find(std::begin(kLocal), std::end(kLocal), static_cast<unsigned long>(system.f_type)) !=
             std::end(kLocal);
#else
  (void)folder;
  return false;
#endif
}

// Makes the names in a folder last. Some file systems cannot do this, and a folder may be writable without
// being readable: what it names is safe all the same.
bool store_names(const std::string& folder) {
  const Descriptor opened{::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC)};
  return opened.value < 0 || ::fsync(opened.value) == 0 || errno == EINVAL;
}

// A large file goes to the disk while it is still being written, not all at once when it is finished. Only a
// hint: finish() flushes, and hears of what failed.
void start_storing(int file, std::uint64_t offset, std::uint64_t bytes) {
#if defined(SYNC_FILE_RANGE_WRITE)
  constexpr std::uint64_t kWorthIt = std::uint64_t{1} << 20;
  if (bytes >= kWorthIt)
    ::sync_file_range(file, static_cast<off_t>(offset), static_cast<off_t>(bytes), SYNC_FILE_RANGE_WRITE);
#else
  (void)file, (void)offset, (void)bytes;
#endif
}

// The names of two folders, exchanged in one step.
bool swap_names(const std::string& a, const std::string& b) {
#if defined(RENAME_EXCHANGE)
  return ::renameat2(AT_FDCWD, a.c_str(), AT_FDCWD, b.c_str(), RENAME_EXCHANGE) == 0;
#else
  errno = EINVAL;
  return false;
#endif
}

void read_at(int file, const std::string& path, std::uint64_t offset, std::span<std::byte> to) {
  while (!to.empty()) {
    const ssize_t done = ::pread(file, to.data(), to.size(), static_cast<off_t>(offset));
    if (done < 0 && errno == EINTR) continue;
    if (done < 0) fail("cannot read ", path, ": ", words_of(errno));
    if (done == 0) fail(path, " was shortened while it was read");
    to = to.subspan(static_cast<std::size_t>(done));
    offset += static_cast<std::uint64_t>(done);
  }
}

}  // namespace

// ---- Reading ----

MappedFile::MappedFile(const std::string& path) : path_(path) {
  // Without O_NONBLOCK, opening a pipe would wait for its writer.
  Descriptor file{::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK)};
  if (file.value < 0) {
    const int error = errno;
    fail("cannot open ", path, ": ", words_of(error), hint_for(error));
  }
  struct stat status {};
  if (::fstat(file.value, &status) != 0) fail("cannot ask for the size of ", path, ": ", words_of(errno));
  if (!S_ISREG(status.st_mode))
    fail(path, " is not a regular file; give the path of a file, not of a folder or device");
  size_ = static_cast<std::size_t>(status.st_size);
  if (size_ > 0) {  // an empty mapping is an error of its own
    void* const memory = ::mmap(nullptr, size_, PROT_READ, MAP_PRIVATE, file.value, 0);
    if (memory == MAP_FAILED)
      fail("cannot map ", path, " (", size_, " bytes) into memory: ", words_of(errno));
    memory_ = memory;
  }
  descriptor_ = std::exchange(file.value, -1);
}

MappedFile::~MappedFile() {
  if (memory_ != nullptr) ::munmap(memory_, size_);
  if (descriptor_ >= 0) ::close(descriptor_);
}

MappedFile::MappedFile(MappedFile&& other) noexcept
    : path_(std::move(other.path_)),
      descriptor_(std::exchange(other.descriptor_, -1)),
      memory_(std::exchange(other.memory_, nullptr)),
      size_(std::exchange(other.size_, 0)) {}

void MappedFile::read(std::uint64_t offset, std::span<std::byte> to) const {
  read_at(descriptor_, path_, offset, to);
}

// ---- Writing ----

NewFile::NewFile(const std::string& path) : path_(path) {
  constexpr mode_t kMode = 0666;  // less what the user's umask takes away
  const int error = under_partial_name(path, partial_, [&](const std::string& name) {
    descriptor_ = ::open(name.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, kMode);
    return descriptor_ >= 0;
  });
  if (error != 0) fail("cannot create ", path, ": ", words_of(error), hint_for(error));
}

NewFile::~NewFile() {
  if (descriptor_ < 0) return;
  ::close(descriptor_);
  ::unlink(partial_.c_str());
}

void NewFile::give_up(const char* doing, int error) {
  if (descriptor_ >= 0) ::close(descriptor_);
  descriptor_ = -1;
  ::unlink(partial_.c_str());
  fail("cannot ", doing, " ", path_, ": ", words_of(error), hint_for(error),
       "; nothing was left under that name");
}

void NewFile::write(std::uint64_t offset, std::span<const std::byte> bytes) {
  if (descriptor_ < 0) fail(path_, " is finished or has failed; make a new one to write again");
  while (!bytes.empty()) {
    const ssize_t done = ::pwrite(descriptor_, bytes.data(), bytes.size(), static_cast<off_t>(offset));
    if (done < 0 && errno == EINTR) continue;
    if (done < 0) give_up("write", errno);
    if (done == 0) give_up("write", ENOSPC);
    start_storing(descriptor_, offset, static_cast<std::uint64_t>(done));
    bytes = bytes.subspan(static_cast<std::size_t>(done));
    offset += static_cast<std::uint64_t>(done);
  }
}

void NewFile::read(std::uint64_t offset, std::span<std::byte> to) {
  read_at(descriptor_, partial_, offset, to);
}

void NewFile::finish() {
  if (descriptor_ < 0) fail(path_, " is finished or has failed; make a new one to write again");
  // Disks may report what they could not store only here. The name must not point to data that is not there
  // yet.
  if (::fsync(descriptor_) != 0) give_up("store", errno);
  if (::close(std::exchange(descriptor_, -1)) != 0) give_up("close", errno);
  if (::rename(partial_.c_str(), path_.c_str()) != 0) give_up("name", errno);
  if (!store_names(folder_of(path_)))
    fail("wrote ", path_, ", but its folder could not be stored: ", words_of(errno));
}

NewFolder::NewFolder(const std::string& path) : path_(path) {
  while (path_.size() > 1 && path_.back() == '/') path_.pop_back();
  constexpr mode_t kMode = 0777;  // less what the user's umask takes away
  const int error = under_partial_name(path_, partial_, [&](const std::string& name) {
    if (::mkdir(name.c_str(), kMode) != 0) return false;
    // Without a lock, where the system has none, the folder is as good. But remove_partial() of another process
    // may have come between: then the next name.
    lock_ = open_folder(name);
    const bool contested = lock_ >= 0 && ::flock(lock_, LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK;
    if (!contested && ::access(name.c_str(), F_OK) == 0) return true;
    if (lock_ >= 0) ::close(std::exchange(lock_, -1));
    errno = EEXIST;
    return false;
  });
  if (error != 0) fail("cannot make the folder ", path_, ": ", words_of(error), hint_for(error));
}

NewFolder::~NewFolder() {
  try {
    std::error_code ignored;
    if (!done_) std::filesystem::remove_all(partial_, ignored);
  } catch (const std::bad_alloc&) {  // it stays, under a name that the next one removes
  }
  if (lock_ >= 0) ::close(lock_);
}

void NewFolder::finish() {
  if (done_) fail(path_, " is finished; make a new one to write again");
  if (!store_names(partial_)) fail("cannot store ", path_, ": ", words_of(errno), hint_for(errno));
  bool replaces = false;
  if (::rename(partial_.c_str(), path_.c_str()) != 0) {
    if (errno != EEXIST && errno != ENOTEMPTY)
      fail("cannot name ", path_, ": ", words_of(errno), hint_for(errno));
    if (!swap_names(partial_, path_))
      fail("cannot replace ", path_, " in one step: ", words_of(errno),
           "; choose another name, or remove it first");
    replaces = true;
  }
  done_ = true;
  // What was replaced goes only when the new name is known to last.
  if (!store_names(folder_of(path_)))
    fail("wrote ", path_, ", but its folder could not be stored: ", words_of(errno),
         replaces ? "; the one before is in " + partial_ : "");
  std::error_code ignored;
  if (replaces) std::filesystem::remove_all(partial_, ignored);
}

void remove_folder(const std::string& path) {
  std::string doomed;
  int error = under_partial_name(
      path, doomed, [&](const std::string& name) { return ::rename(path.c_str(), name.c_str()) == 0; });
  if (error == 0) {
    std::error_code problem;
    std::filesystem::remove_all(doomed, problem);
    error = problem.value();
  }
  if (error != 0) fail("cannot remove ", path, ": ", words_of(error), hint_for(error));
}

std::vector<std::string> remove_partial(const std::string& folder, std::string_view prefix) {
  std::vector<std::string> found, left;
  std::error_code ignored;
  for (const auto& entry : std::filesystem::directory_iterator(folder, ignored))
    if (is_partial_name(entry.path().filename().string(), prefix) &&
        entry.symlink_status(ignored).type() == std::filesystem::file_type::directory)
      found.push_back(entry.path().string());
  for (const std::string& path : found) {
    const Descriptor dead{open_folder(path)};  // with its lock until it is gone
    if (dead.value >= 0 && locks_are_seen(dead.value) && ::flock(dead.value, LOCK_EX | LOCK_NB) == 0)
      std::filesystem::remove_all(path, ignored);
    if (std::filesystem::exists(path, ignored)) left.push_back(path);
  }
  return left;
}

void write_text(const std::string& path, std::string_view text) {
  NewFile file(path);
  file.write(0, std::as_bytes(std::span(text)));
  file.finish();
}

std::string read_text(const std::string& path, std::size_t limit) {
  const MappedFile file(path);
  const std::span<const std::byte> bytes = file.bytes();
  if (bytes.size() > limit)
    fail(path, " has ", bytes.size(), " bytes, and at most ", limit, " are read; is it the right file?");
  return bytes.empty() ? std::string()
                       : std::string(reinterpret_cast<const char*>(bytes.data()), bytes.size());
}

}  // namespace scruple::io
