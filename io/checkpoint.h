// Checkpoints: a folder with manifest.json and one or more safetensors files, in which every plane is a plain
// named tensor. docs/checkpoint.md is the specification. This room knows bytes, names and shapes; what a
// format means is the library's affair. Problems are thrown as std::runtime_error that name the tensor.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "io/safetensors.h"

namespace scruple::io {

inline constexpr std::uint64_t kCheckpointVersion = 1;  // the newest that is read, and the one written
inline constexpr std::int64_t kBlock = 128;             // elements: where a plane may be cut into shards

// Elements [first, end) of a plane, in one of the files.
struct Piece {
  std::size_t file = 0;
  std::int64_t first = 0, end = 0;
  std::uint32_t crc = 0;
};

struct Plane {
  std::string kind;  // "codes", "scale" or "extra"
  Dtype dtype{};
  std::vector<std::int64_t> shape;
  std::int64_t block_bytes = 0;  // of 128 elements of the tensor; the last block may have fewer
  std::vector<Piece> pieces;     // in order, without holes

  std::int64_t bytes() const { return TensorInfo{kind, dtype, shape}.bytes(); }
};

struct Array {
  std::string name;  // "weight", or the slot's: "exp_avg"
  std::string format, rounding;
  std::vector<Plane> planes;  // codes, then what completes them
};

struct TensorState {
  std::string name;
  std::vector<std::int64_t> shape;
  std::size_t group = 0;
  std::uint32_t id = 0;
  std::int64_t step = 1;             // about to be taken
  std::optional<double> adagc_norm;  // what AdaGC remembers of it
  std::vector<Array> arrays;         // the weight first

  std::int64_t elements() const { return TensorInfo{name, Dtype::u8, shape}.bytes(); }
};

// Tensors that share an optimizer and its hyperparameters.
struct Group {
  std::string optimizer;
  std::uint64_t seed = 0;
  std::map<std::string, double> hyperparameters;  // as the file names them; optim/renamed.h knows old names
};

struct LossScale {
  double scale = 0, growth = 1, backoff = 1;
  std::int64_t interval = 0, clean = 0;
};

struct FileEntry {
  std::uint64_t bytes = 0;
  std::uint32_t header_crc = 0;
};

struct Manifest {
  std::string library;    // the version that wrote it
  std::string recipe;     // the name it was made with; the arrays' own formats rule
  std::int64_t step = 0;  // taken
  std::vector<Group> groups;
  std::optional<LossScale> loss_scale;
  Metadata trainer;  // what the writer needs to go on; nobody else reads it
  std::vector<FileEntry> files;
  std::vector<TensorState> tensors;
};

// What a format says of itself: scruple_format_info and scruple_format_bytes, of the whole tensor and of 128 elements.
struct StoredFormat {
  std::string name;
  int aux_bits = 0;
  bool aux_is_scale = false;
  std::int64_t codes = 0, aux = 0, block_codes = 0, block_aux = 0;
};
// The planes that an array in this format has in the files.
std::vector<Plane> planes_of(const StoredFormat& format, const std::vector<std::int64_t>& shape);
// Whether two planes are alike in everything but their pieces.
bool same_form(const Plane& a, const Plane& b);

// What the plane is called in the files: "layer.weight", "layer.weight/exp_avg/scale".
std::string plane_name(const TensorState& tensor, const Array& array, const Plane& plane);
// "model.safetensors", or "model-00002-of-00003.safetensors" for file 1 of 3.
std::string file_name(std::size_t file, std::size_t files);

// manifest.json, as text; both check whatever can be checked without the files.
std::string to_text(const Manifest& manifest);
Manifest parse_manifest(std::string_view text, const std::string& path);
// Of a manifest's text, whatever eight digits stand in its place.
std::uint32_t manifest_crc(std::string_view text);

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

inline constexpr std::size_t kMaxShards = 256;  // all are open at once

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
