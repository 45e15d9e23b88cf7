// What a checkpoint holds, as manifest.json says it: tensors, their arrays and planes, and where each piece lies.
// docs/checkpoint.md is the specification. This room knows bytes, names and shapes; what a format means is the
// library's affair.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
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

// Bytes of elements [0, count) of a plane; count is a multiple of a block, or the end.
std::int64_t bytes_before(const Plane& plane, std::int64_t count, std::int64_t elements);
// A piece as the tensor that its file has of it: the plane's own shape where it is all of it, otherwise a flat one.
TensorInfo info_of(const TensorState& tensor, const Array& array, const Plane& plane, const Piece& piece);

inline constexpr std::size_t kMaxManifest = 100'000'000;  // bytes; as the headers of safetensors
inline constexpr std::size_t kMaxShards = 256;            // all are open at once

// Refuses what no checkpoint can be; `path` is for the message.
void check(const Manifest& manifest, const std::string& path);
// Members that are not about files and tensors, as JSON; the files' own metadata repeat them.
std::string run_text(const Manifest& manifest);
// manifest.json, as text; both check whatever can be checked without the files.
std::string to_text(const Manifest& manifest);
Manifest parse_manifest(std::string_view text, const std::string& path);
// Of a manifest's text, whatever eight digits stand in its place.
std::uint32_t manifest_crc(std::string_view text);

}  // namespace scruple::io
