// Checkpoints: a folder with manifest.json and one or more safetensors files, in which every plane is a plain
// named tensor. docs/checkpoint.md is the specification. Problems are thrown as std::runtime_error that name the
// tensor.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "io/manifest.h"
#include "io/safetensors.h"

namespace scruple::io {

class Checkpoint {
 public:
  // Reads the manifest, maps the files and checks that they are what it says; the planes are not touched.
  explicit Checkpoint(const std::string& folder);

  const std::string& folder() const { return folder_; }
  const Manifest& manifest() const { return manifest_; }
  std::uint64_t bytes() const;  // of all files
  // The whole plane, whatever files it is in. Throws where a checksum does not fit.
  void read(const TensorState& tensor, const Array& array, const Plane& plane, std::span<std::byte> to) const;
  // The same without keeping it.
  void verify(const TensorState& tensor, const Array& array, const Plane& plane) const;
  // Bytes of a plane from `first` on; no checksum is of these alone, so none is compared.
  void read_range(const TensorState& tensor, const Array& array, const Plane& plane, std::uint64_t first,
                  std::span<std::byte> to) const;

 private:
  friend class PlaneReader;
  friend std::string advice_on_damage(const std::string& folder);
  Checkpoint() = default;
  void open(const std::string& folder);
  void check_files() const;

  std::string folder_;
  Manifest manifest_;
  std::vector<Safetensors> files_;
};

// A plane from its first byte to its last, in as many calls as the caller likes. Throws where the checksum of a
// piece does not fit, in the call that reaches the piece's end. What it reads of must outlive it.
class PlaneReader {
 public:
  PlaneReader(const Checkpoint& checkpoint, const TensorState& tensor, const Array& array,
              const Plane& plane);

  std::uint64_t at() const { return at_; }  // bytes read so far
  void read(std::span<std::byte> to);

 private:
  void compare_checksums();

  const Checkpoint& checkpoint_;
  const TensorState& tensor_;
  const Array& array_;
  const Plane& plane_;
  std::uint64_t at_ = 0, bytes_ = 0;
  std::size_t piece_ = 0;
  std::uint32_t crc_ = 0;
};

// A checkpoint that is there, with finish(), completely or not at all; one of that name is replaced in one step,
// and any other folder of that name is refused. `files` and `pieces` of the manifest are filled in here: `shards`
// files with about as many elements each.
class NewCheckpoint {
 public:
  NewCheckpoint(const std::string& folder, Manifest manifest, std::size_t shards);
  ~NewCheckpoint();

  // The next bytes of a plane of the manifest's tensors[tensor]. Planes may come in any order.
  void write(std::size_t tensor, std::size_t array, std::size_t plane, std::span<const std::byte> bytes);
  // Refuses while a plane lacks bytes.
  void finish();

 private:
  struct Progress;
  Progress& progress_of(std::size_t tensor, std::size_t array, std::size_t plane);
  void open_files();
  void check_complete() const;

  Manifest manifest_;
  std::unique_ptr<NewFolder> folder_;
  std::string path_;
  std::vector<std::unique_ptr<SafetensorsWriter>> writers_;  // closed before the folder goes
  std::vector<Progress> progress_;                           // of every plane
  std::vector<std::size_t> first_plane_;                     // of every tensor, in progress_
};

// Gives the bytes of a plane of manifest.tensors[tensor]; they are used before the next is asked for.
using PlaneBytes =
    std::function<std::span<const std::byte>(std::size_t tensor, std::size_t array, std::size_t plane)>;

// The same in one call.
void write_checkpoint(const std::string& folder, Manifest manifest, std::size_t shards,
                      const PlaneBytes& bytes);

// ---- A run's folder of checkpoints ----

std::string step_name(std::int64_t step);  // "step-00000100"
// The steps that have a checkpoint, in order; unfinished ones are not seen.
std::vector<std::int64_t> saved_steps(const std::string& folder);
// The checkpoint that a user means by a path: itself, or the last one of a run.
std::string find_checkpoint(const std::string& path);
// For the end of a message about a checkpoint that is damaged: which others of its run can be opened.
std::string advice_on_damage(const std::string& folder);

}  // namespace scruple::io
