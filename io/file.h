// Files as this library wants them: read through a mapping, written whole or not at all. Problems are
// thrown as std::runtime_error with the path, what was wrong and what to do.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <sstream>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

namespace scruple::io {

template <class... Parts>
[[noreturn]] void fail(const Parts&... parts) {
  std::ostringstream message;
  (message << ... << parts);
  throw std::runtime_error(message.str());
}

// The caller asked for what cannot be; whatever else is thrown here is of the files and the disk.
struct Misuse : std::runtime_error {
  using std::runtime_error::runtime_error;
};
template <class... Parts>
[[noreturn]] void misuse(const Parts&... parts) {
  std::ostringstream message;
  (message << ... << parts);
  throw Misuse(message.str());
}

// A file's bytes, read only, for as long as this lives. Pages are loaded when they are touched, so a large
// file costs nothing until then; but a file that another process shortens meanwhile kills the one that
// touches the lost end. Replacing the file (as NewFile does) is harmless: the mapping keeps the old one.
class MappedFile {
 public:
  explicit MappedFile(const std::string& path);
  ~MappedFile();
  MappedFile(MappedFile&& other) noexcept;
  MappedFile& operator=(MappedFile&&) = delete;

  std::span<const std::byte> bytes() const { return {static_cast<const std::byte*>(memory_), size_}; }
  // Copies bytes from `offset` on, past the mapping: what the disk cannot give, or another process has cut off,
  // is an error here and not the end of the process.
  void read(std::uint64_t offset, std::span<std::byte> to) const;

 private:
  std::string path_;
  int descriptor_ = -1;
  void* memory_ = nullptr;
  std::size_t size_ = 0;
};

// A file that appears under its name complete and on the disk, or not at all: it is written beside, under
// another name, and renamed by finish(). Without finish() nothing is left behind and an older file of that
// name stays as it was. (A process that is killed leaves NAME.partial-PID-N; it is safe to delete.)
class NewFile {
 public:
  explicit NewFile(const std::string& path);
  ~NewFile();
  NewFile(const NewFile&) = delete;
  NewFile& operator=(const NewFile&) = delete;

  void write(std::uint64_t offset, std::span<const std::byte> bytes);
  void read(std::uint64_t offset, std::span<std::byte> to);  // what was written
  void finish();

 private:
  [[noreturn]] void give_up(const char* doing, int error);

  std::string path_, partial_;
  int descriptor_ = -1;
};

// A folder that appears under its name complete and on the disk, or not at all: files are written into
// partial(), and finish() gives it its name. A folder that has the name already is there until then and is
// replaced in one step: at no moment is there neither. (A process that is killed leaves NAME.partial-PID-N;
// while it lives it holds a lock, flock, on that folder.)
class NewFolder {
 public:
  explicit NewFolder(const std::string& path);
  ~NewFolder();
  NewFolder(const NewFolder&) = delete;
  NewFolder& operator=(const NewFolder&) = delete;

  const std::string& partial() const { return partial_; }
  void finish();

 private:
  std::string path_, partial_;
  int lock_ = -1;
  bool done_ = false;
};

// A folder with all that is in it. It loses its name first, so that nobody takes a half for the whole.
void remove_folder(const std::string& path);
// What processes that were killed have left in `folder` of new folders whose names begin with `prefix`: those of
// the exact form NAME.partial-PID-N that nobody has locked, on a file system of this machine alone. The paths
// of the others of that form, whose writers may be at work, here or elsewhere.
std::vector<std::string> remove_partial(const std::string& folder, std::string_view prefix = "");

// In the name of whatever is not finished; readers leave it alone.
inline constexpr std::string_view kPartialName = ".partial-";

// A short text, in the same way.
void write_text(const std::string& path, std::string_view text);
// At most `limit` bytes; a longer file is refused.
std::string read_text(const std::string& path, std::size_t limit);

}  // namespace scruple::io
