#include "io/file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <system_error>
#include <utility>

namespace scruple::io {
namespace {

std::string words_of(int error) { return std::generic_category().message(error); }

const char* hint_for(int error) {
  switch (error) {
    case ENOENT: return "; check the path: the file, or a folder in it, does not exist";
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

}  // namespace

// ---- Reading ----

MappedFile::MappedFile(const std::string& path) {
  // Without O_NONBLOCK, opening a pipe would wait for its writer.
  const Descriptor file{::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK)};
  if (file.value < 0) {
    const int error = errno;
    fail("cannot open ", path, ": ", words_of(error), hint_for(error));
  }
  struct stat status {};
  if (::fstat(file.value, &status) != 0) fail("cannot ask for the size of ", path, ": ", words_of(errno));
  if (!S_ISREG(status.st_mode))
    fail(path, " is not a regular file; give the path of a file, not of a folder or device");
  size_ = static_cast<std::size_t>(status.st_size);
  if (size_ == 0) return;  // an empty mapping is an error of its own
  void* const memory = ::mmap(nullptr, size_, PROT_READ, MAP_PRIVATE, file.value, 0);
  if (memory == MAP_FAILED) fail("cannot map ", path, " (", size_, " bytes) into memory: ", words_of(errno));
  memory_ = memory;
}

MappedFile::~MappedFile() {
  if (memory_ != nullptr) ::munmap(memory_, size_);
}

MappedFile::MappedFile(MappedFile&& other) noexcept
    : memory_(std::exchange(other.memory_, nullptr)), size_(std::exchange(other.size_, 0)) {}

// ---- Writing ----

NewFile::NewFile(const std::string& path) : path_(path) {
  static std::atomic<unsigned> count{0};
  constexpr mode_t kMode = 0666;  // less what the user's umask takes away
  do {
    partial_ = path + ".partial-" + std::to_string(::getpid()) + "-" + std::to_string(count++);
    descriptor_ = ::open(partial_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, kMode);
  } while (descriptor_ < 0 && errno == EEXIST);
  if (descriptor_ < 0) {
    const int error = errno;
    fail("cannot create ", path, ": ", words_of(error), hint_for(error));
  }
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
    bytes = bytes.subspan(static_cast<std::size_t>(done));
    offset += static_cast<std::uint64_t>(done);
  }
}

void NewFile::finish() {
  if (descriptor_ < 0) fail(path_, " is finished or has failed; make a new one to write again");
  // Disks may report what they could not store only here. The name must not point to data that is not there
  // yet.
  if (::fsync(descriptor_) != 0) give_up("store", errno);
  if (::close(std::exchange(descriptor_, -1)) != 0) give_up("close", errno);
  if (::rename(partial_.c_str(), path_.c_str()) != 0) give_up("name", errno);
  const Descriptor folder{::open(folder_of(path_).c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC)};
  // Some file systems cannot do this, and a folder may be writable without being readable: the file itself
  // is safe.
  if (folder.value >= 0 && ::fsync(folder.value) != 0 && errno != EINVAL)
    fail("wrote ", path_, ", but its folder could not be stored: ", words_of(errno));
}

void write_text(const std::string& path, std::string_view text) {
  NewFile file(path);
  file.write(0, std::as_bytes(std::span(text)));
  file.finish();
}

std::string read_text(const std::string& path, std::size_t limit) {
  const MappedFile file(path);
  const std::span<const std::byte> bytes = file.bytes();
  if (bytes.size() > limit) fail(path, " has ", bytes.size(), " bytes, where at most ", limit, " make sense");
  return bytes.empty() ? std::string()
                       : std::string(reinterpret_cast<const char*>(bytes.data()), bytes.size());
}

}  // namespace scruple::io
