#include "io/checkpoint.h"

#include <algorithm>
#include <charconv>
#include <cstdio>
#include <filesystem>
#include <memory>
#include <set>

#include "io/crc32.h"
#include "io/json.h"

namespace scruple::io {
namespace {

constexpr std::size_t kReadChunk = std::size_t{1} << 18;  // stays in the cache between copy and checksum

std::string manifest_path(const std::string& folder) { return folder + "/manifest.json"; }

}  // namespace

// ---- Reading ----

Checkpoint::Checkpoint(const std::string& folder) {
  try {
    open(folder);
  } catch (const Misuse&) {
    throw;
  } catch (const std::runtime_error& error) {
    fail(error.what(), advice_on_damage(folder));
  }
}

void Checkpoint::open(const std::string& folder) {
  folder_ = folder;
  {
    const MappedFile file(manifest_path(folder));
    if (file.bytes().size() > kMaxManifest)
      fail(manifest_path(folder), " has ", file.bytes().size(), " bytes, and at most ", kMaxManifest,
           " are read");
    manifest_ = parse_manifest({reinterpret_cast<const char*>(file.bytes().data()), file.bytes().size()},
                               manifest_path(folder));
  }
  for (std::size_t i = 0; i < manifest_.files.size(); ++i)
    files_.emplace_back(folder + "/" + file_name(i, manifest_.files.size()));
  check_files();
}

// Every tensor of every file is one piece of the manifest, and every piece is there.
void Checkpoint::check_files() const {
  std::vector<std::size_t> pieces(files_.size());
  for (std::size_t i = 0; i < files_.size(); ++i) {
    const Safetensors& file = files_[i];
    if (file.bytes() != manifest_.files[i].bytes)
      fail(file.path(), " has ", file.bytes(), " bytes, and the manifest says ", manifest_.files[i].bytes,
           "; it is damaged, or of another checkpoint");
    if (crc32(file.header()) != manifest_.files[i].header_crc)
      fail(file.path(),
           ": the checksum of its header is not the manifest's; it is damaged, or of another checkpoint");
  }
  for (const TensorState& tensor : manifest_.tensors)
    for (const Array& array : tensor.arrays)
      for (const Plane& plane : array.planes)
        for (const Piece& piece : plane.pieces) {
          const TensorInfo wanted = info_of(tensor, array, plane, piece);
          const StoredTensor& found = files_[piece.file].at(wanted.name);
          if (found.dtype != wanted.dtype || found.shape != wanted.shape)
            fail(files_[piece.file].path(), ": tensor ", shown(wanted.name), " is ", name_of(found.dtype),
                 " ", json_numbers(found.shape), ", and the manifest says ", name_of(wanted.dtype), " ",
                 json_numbers(wanted.shape));
          ++pieces[piece.file];
        }
  for (std::size_t i = 0; i < files_.size(); ++i)
    if (pieces[i] != files_[i].tensors().size())
      fail(files_[i].path(), " has ", files_[i].tensors().size(), " tensors, of which the manifest knows ",
           pieces[i]);
}

std::uint64_t Checkpoint::bytes() const {
  std::uint64_t sum = std::filesystem::file_size(manifest_path(folder_));
  for (const Safetensors& file : files_) sum += file.bytes();
  return sum;
}

void Checkpoint::read_range(const TensorState& tensor, const Array& array, const Plane& plane,
                            std::uint64_t first, std::span<std::byte> to) const {
  const std::string name = plane_name(tensor, array, plane);
  const auto bytes = static_cast<std::uint64_t>(plane.bytes());
  if (first > bytes || to.size() > bytes - first)
    misuse("plane ", shown(name), " has ", bytes, " bytes, and ", to.size(), " from ", first,
           " on were asked for");
  std::uint64_t begin = 0;
  for (const Piece& piece : plane.pieces) {
    const Safetensors& file = files_[piece.file];
    const StoredTensor& stored = file.at(name);
    const std::uint64_t end = begin + stored.data.size();
    if (first < end && !to.empty()) {
      const std::span<std::byte> part = to.first(std::min<std::uint64_t>(to.size(), end - first));
      file.read(stored, first - begin, part);
      first += part.size();
      to = to.subspan(part.size());
    }
    begin = end;
  }
}

void Checkpoint::read(const TensorState& tensor, const Array& array, const Plane& plane,
                      std::span<std::byte> to) const {
  if (to.size() != static_cast<std::size_t>(plane.bytes()))
    fail("plane ", shown(plane_name(tensor, array, plane)), " has ", plane.bytes(), " bytes, and ", to.size(),
         " were asked for");
  PlaneReader(*this, tensor, array, plane).read(to);
}

void Checkpoint::verify(const TensorState& tensor, const Array& array, const Plane& plane) const {
  const auto bytes = static_cast<std::uint64_t>(plane.bytes());
  std::vector<std::byte> memory(std::min<std::uint64_t>(kReadChunk, bytes));
  PlaneReader reader(*this, tensor, array, plane);
  do reader.read(std::span(memory).first(std::min<std::uint64_t>(memory.size(), bytes - reader.at())));
  while (reader.at() < bytes);
}

PlaneReader::PlaneReader(const Checkpoint& checkpoint, const TensorState& tensor, const Array& array,
                         const Plane& plane)
    : checkpoint_(checkpoint),
      tensor_(tensor),
      array_(array),
      plane_(plane),
      bytes_(static_cast<std::uint64_t>(plane.bytes())) {}

void PlaneReader::read(std::span<std::byte> to) {
  do {
    std::span<std::byte> part = to.first(std::min(kReadChunk, to.size()));
    if (piece_ < plane_.pieces.size()) {
      const auto end =
          static_cast<std::uint64_t>(bytes_before(plane_, plane_.pieces[piece_].end, tensor_.elements()));
      part = part.first(std::min<std::uint64_t>(part.size(), end - at_));
    }
    checkpoint_.read_range(tensor_, array_, plane_, at_, part);
    crc_ = crc32(part, crc_);
    at_ += part.size();
    to = to.subspan(part.size());
    compare_checksums();
  } while (!to.empty());
}

// Of the pieces that end here; those of a plane without elements end where they begin.
void PlaneReader::compare_checksums() {
  while (piece_ < plane_.pieces.size()) {
    const Piece& piece = plane_.pieces[piece_];
    if (at_ != static_cast<std::uint64_t>(bytes_before(plane_, piece.end, tensor_.elements()))) return;
    if (crc_ != piece.crc)
      fail(checkpoint_.files_[piece.file].path(), ": tensor ", shown(plane_name(tensor_, array_, plane_)),
           ": its checksum is ", hex(crc_), " and should be ", hex(piece.crc),
           "; its data is damaged: take another checkpoint, or another copy of this one");
    crc_ = 0;
    ++piece_;
  }
}

// ---- Writing ----

namespace {

// Cuts all tensors, laid end to end in blocks, into runs of equal length; a tensor without elements is one
// piece.
void cut(Manifest& manifest, std::size_t shards) {
  const auto blocks_of = [](const TensorState& tensor) {
    return tensor.elements() / kBlock + (tensor.elements() % kBlock != 0 ? 1 : 0);
  };
  std::int64_t blocks = 0;
  for (const TensorState& tensor : manifest.tensors) blocks += blocks_of(tensor);
  if (shards > 1 && static_cast<std::int64_t>(shards) > blocks)
    fail("cannot cut ", blocks, " blocks of 128 elements into ", shards, " shards; choose fewer");
  const auto parts = static_cast<std::int64_t>(shards);
  // Where shard s ends, without the product of two large numbers.
  const auto end_of = [&](std::int64_t s) { return blocks / parts * s + blocks % parts * s / parts; };
  std::int64_t at = 0, shard = 1;
  for (TensorState& tensor : manifest.tensors) {
    const std::int64_t elements = tensor.elements(), end = at + blocks_of(tensor);
    std::vector<Piece> pieces;
    std::int64_t first = 0;
    do {
      while (shard < parts && end_of(shard) <= at) ++shard;
      const std::int64_t stop = std::min(end, shard == parts ? end : end_of(shard));
      Piece piece;
      piece.file = static_cast<std::size_t>(shard - 1);
      piece.first = first;
      piece.end = stop == end ? elements : first + (stop - at) * kBlock;
      pieces.push_back(piece);
      first = piece.end;
      at = stop;
    } while (at < end);
    for (Array& array : tensor.arrays)
      for (Plane& plane : array.planes) plane.pieces = pieces;
  }
  manifest.files.assign(shards, {});
}

// For whoever opens one of the files alone: transformers wants to see "pt".
Metadata metadata_of(const Manifest& manifest, std::size_t file) {
  std::vector<JsonMember> ranges;
  for (const TensorState& tensor : manifest.tensors)
    for (const Piece& piece : tensor.arrays.front().planes.front().pieces)
      if (piece.file == file) ranges.push_back({tensor.name, json_numbers({piece.first, piece.end})});
  Metadata all = {{"format", "pt"},
                  {"scruple_checkpoint", std::to_string(kCheckpointVersion)},
                  {"library", manifest.library},
                  {"run", "{" + run_text(manifest) + "}"}};
  if (manifest.files.size() > 1) {
    all["shard"] = std::to_string(file + 1) + " of " + std::to_string(manifest.files.size());
    all["elements"] = json_object(ranges);
  }
  return all;
}

bool is_file_of_checkpoint(const std::string& name) {
  constexpr std::string_view kDigits = "0123456789";
  if (name == "manifest.json" || name == file_name(0, 1)) return true;
  std::string pattern = name;
  for (char& letter : pattern)
    if (kDigits.find(letter) != kDigits.npos) letter = '0';
  return pattern == "model-00000-of-00000.safetensors";
}

// What a save would remove must be a checkpoint and nothing else.
void check_replaced(const std::filesystem::path& folder) {
  if (folder.filename().string().find(kPartialName) != std::string::npos)
    misuse(folder.string(), " has '", kPartialName,
           "' in its name, which readers ignore; choose another name");
  std::error_code ignored;
  const std::filesystem::file_status status = std::filesystem::symlink_status(folder, ignored);
  if (!std::filesystem::exists(status)) return;
  if (!std::filesystem::is_directory(status))
    misuse(folder.string(), " is there and is not a folder; a checkpoint is one: choose another name");
  std::set<std::string> others;
  for (const auto& entry : std::filesystem::directory_iterator(folder))
    if (!is_file_of_checkpoint(entry.path().filename().string()))
      others.insert(entry.path().filename().string());
  if (!others.empty())
    misuse(
        folder.string(), " is there and has ", shown(*others.begin()),
        " in it, which a save would remove with the rest; choose another name, such as a folder inside it");
}

// Runs a part of a save; what fails in it says what became of the save.
template <class Part>
void saving(const std::string& folder, const Part& part) {
  try {
    part();
  } catch (const Misuse&) {
    throw;
  } catch (const std::runtime_error& error) {
    fail("the checkpoint ", folder, " was not saved, and those before it are as they were: ", error.what());
  }
}

}  // namespace

// How far a plane has come.
struct NewCheckpoint::Progress {
  std::uint64_t at = 0;
  std::size_t piece = 0;
  std::vector<std::size_t> places;  // of each piece among the tensors of its file
};

NewCheckpoint::NewCheckpoint(const std::string& folder, Manifest manifest, std::size_t shards)
    : manifest_(std::move(manifest)) {
  if (shards < 1 || shards > kMaxShards)
    misuse("a checkpoint has 1 to ", kMaxShards, " files, and ", shards, " were asked for");
  try {
    cut(manifest_, shards);
    check(manifest_, folder);
    to_text(manifest_);  // what no file can hold is found before anything is written
  } catch (const std::runtime_error& error) {
    misuse(error.what());
  }
  std::filesystem::path path = std::filesystem::weakly_canonical(std::filesystem::absolute(folder));
  if (path.filename().empty()) path = path.parent_path();  // it was given with a slash at its end
  check_replaced(path);
  path_ = path.string();
  saving(path_, [&] {
    std::filesystem::create_directories(path.parent_path());
    folder_ = std::make_unique<NewFolder>(path_);
    open_files();
  });
}

NewCheckpoint::~NewCheckpoint() = default;

void NewCheckpoint::open_files() {
  std::vector<std::vector<TensorInfo>> lists(manifest_.files.size());
  for (const TensorState& tensor : manifest_.tensors) {
    first_plane_.push_back(progress_.size());
    for (const Array& array : tensor.arrays)
      for (const Plane& plane : array.planes) {
        Progress& progress = progress_.emplace_back();
        for (const Piece& piece : plane.pieces) {
          progress.places.push_back(lists[piece.file].size());
          lists[piece.file].push_back(info_of(tensor, array, plane, piece));
        }
      }
  }
  for (std::size_t i = 0; i < lists.size(); ++i)
    writers_.push_back(std::make_unique<SafetensorsWriter>(
        folder_->partial() + "/" + file_name(i, lists.size()), lists[i], metadata_of(manifest_, i)));
}

NewCheckpoint::Progress& NewCheckpoint::progress_of(std::size_t tensor, std::size_t array,
                                                    std::size_t plane) {
  if (tensor >= manifest_.tensors.size() || array >= manifest_.tensors[tensor].arrays.size() ||
      plane >= manifest_.tensors[tensor].arrays[array].planes.size())
    misuse("there is no plane ", plane, " of array ", array, " of tensor ", tensor, "; numbers begin at 0");
  std::size_t number = first_plane_[tensor] + plane;
  for (std::size_t a = 0; a < array; ++a) number += manifest_.tensors[tensor].arrays[a].planes.size();
  return progress_[number];
}

void NewCheckpoint::write(std::size_t tensor, std::size_t array, std::size_t plane,
                          std::span<const std::byte> bytes) {
  constexpr std::size_t kChunk = std::size_t{1} << 20;  // stays in the cache between checksum and copy
  Progress& progress = progress_of(tensor, array, plane);
  const TensorState& of = manifest_.tensors[tensor];
  Plane& to = manifest_.tensors[tensor].arrays[array].planes[plane];
  const std::uint64_t missing = static_cast<std::uint64_t>(to.bytes()) - progress.at;
  if (bytes.size() > missing)
    misuse("plane ", shown(plane_name(of, of.arrays[array], to)), " takes ", to.bytes(), " bytes, of which ",
           missing, " are missing, and ", bytes.size(), " were given");
  saving(path_, [&] {
    while (!bytes.empty()) {
      Piece& piece = to.pieces[progress.piece];
      const auto end = static_cast<std::uint64_t>(bytes_before(to, piece.end, of.elements()));
      if (progress.at == end) {
        ++progress.piece;
        continue;
      }
      const std::span<const std::byte> chunk =
          bytes.first(std::min<std::uint64_t>({kChunk, bytes.size(), end - progress.at}));
      piece.crc = crc32(chunk, piece.crc);
      writers_[piece.file]->write(progress.places[progress.piece], chunk);
      progress.at += chunk.size();
      bytes = bytes.subspan(chunk.size());
    }
  });
}

void NewCheckpoint::check_complete() const {
  std::size_t number = 0;
  for (const TensorState& tensor : manifest_.tensors)
    for (const Array& array : tensor.arrays)
      for (const Plane& plane : array.planes) {
        const std::uint64_t written_bytes = progress_[number++].at;
        if (written_bytes != static_cast<std::uint64_t>(plane.bytes()))
          misuse("plane ", shown(plane_name(tensor, array, plane)), " lacks ",
                 static_cast<std::uint64_t>(plane.bytes()) - written_bytes, " of its ", plane.bytes(),
                 " bytes; write them before finishing");
      }
}

void NewCheckpoint::finish() {
  check_complete();
  saving(path_, [&] {
    for (std::size_t i = 0; i < writers_.size(); ++i) {
      manifest_.files[i] = {writers_[i]->bytes(), crc32(std::string_view(writers_[i]->header()))};
      writers_[i]->finish();
    }
    write_text(manifest_path(folder_->partial()), to_text(manifest_));
  });
  folder_->finish();
}

void write_checkpoint(const std::string& folder, Manifest manifest, std::size_t shards,
                      const PlaneBytes& bytes) {
  NewCheckpoint made(folder, manifest, shards);
  for (std::size_t t = 0; t < manifest.tensors.size(); ++t)
    for (std::size_t a = 0; a < manifest.tensors[t].arrays.size(); ++a)
      for (std::size_t p = 0; p < manifest.tensors[t].arrays[a].planes.size(); ++p)
        made.write(t, a, p, bytes(t, a, p));
  made.finish();
}

// ---- A run's folder of checkpoints ----

namespace {

constexpr std::string_view kStepPrefix = "step-";

std::optional<std::int64_t> step_of(std::string_view name) {
  if (!name.starts_with(kStepPrefix)) return std::nullopt;
  name.remove_prefix(kStepPrefix.size());
  std::int64_t step = 0;
  const auto [end, problem] = std::from_chars(name.data(), name.data() + name.size(), step);
  if (problem != std::errc() || end != name.data() + name.size() || step < 0) return std::nullopt;
  return step;
}

}  // namespace

std::string step_name(std::int64_t step) {
  char name[64];
  std::snprintf(name, sizeof name, "step-%08lld", static_cast<long long>(step));
  return name;
}

std::vector<std::int64_t> saved_steps(const std::string& folder) {
  std::vector<std::int64_t> steps;
  std::error_code ignored;
  for (const auto& entry : std::filesystem::directory_iterator(folder, ignored))
    if (const std::optional<std::int64_t> step = step_of(entry.path().filename().string()))
      if (entry.path().filename().string() == step_name(*step)) steps.push_back(*step);
  std::sort(steps.begin(), steps.end());
  return steps;
}

std::string advice_on_damage(const std::string& folder) {
  constexpr std::size_t kNamed = 5;
  std::filesystem::path path = std::filesystem::absolute(folder).lexically_normal();
  if (path.filename().empty()) path = path.parent_path();  // it was given with a slash at its end
  const std::filesystem::path run = path.parent_path();
  std::vector<std::int64_t> steps = saved_steps(run.string());
  std::vector<std::string> names;
  for (; !steps.empty() && names.size() < kNamed; steps.pop_back()) {
    const std::string name = step_name(steps.back());
    if (name == path.filename()) continue;
    try {
      Checkpoint().open((run / name).string());
      names.push_back(name);
    } catch (const std::runtime_error&) {  // it is damaged too
    }
  }
  if (names.empty())
    return "; no other checkpoint beside it can be opened: take another copy of this one. Its .safetensors "
           "files, where they are whole, open in any program that reads them";
  return "; of its run " + joined(names, ", ", [](const std::string& name) { return name; }) +
         " can be opened: check one with 'scruple checkpoint verify " + (run / names.front()).string() +
         "', and give its path in place of this one";
}

std::string find_checkpoint(const std::string& path) {
  std::filesystem::path above = std::filesystem::absolute(path).lexically_normal();
  if (above.filename().empty()) above = above.parent_path();  // it was given with a slash at its end
  const std::string name = above.filename().string();
  above = above.parent_path();
  if (name.find(kPartialName) != std::string::npos)
    misuse(path, " has the name of a save that did not end; it can be removed");
  std::error_code ignored;
  if (std::filesystem::exists(manifest_path(path), ignored)) return path;
  const std::string run = path + "/checkpoints";
  const std::vector<std::int64_t> steps = saved_steps(run);
  if (!steps.empty()) return run + "/" + step_name(steps.back());
  std::string begun;
  for (const auto& entry : std::filesystem::directory_iterator(above, ignored))
    if (const std::string other = entry.path().filename().string();
        other.starts_with(name + std::string(kPartialName)))
      begun = "; " + other + " beside it is a save that did not end, and can be removed";
  misuse(path,
         " is no checkpoint (it has no manifest.json), and no run that has a complete one; 'scruple train "
         "--save-every N' saves them",
         begun);
}

}  // namespace scruple::io
