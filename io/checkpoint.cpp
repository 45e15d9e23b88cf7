#include "io/checkpoint.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <limits>
#include <memory>
#include <set>

#include "io/crc32.h"
#include "io/json.h"

namespace scruple::io {
namespace {

constexpr std::size_t kMaxManifest = 100'000'000;  // as the headers of safetensors
constexpr std::size_t kMaxDimensions = 64;
constexpr std::size_t kMaxEntries = 1024;  // of the small lists: hyperparameters, groups, a trainer's own
constexpr std::string_view kKinds[] = {"codes", "scale", "extra"};
constexpr std::string_view kCrcKey = "\"crc32\":\"";
constexpr std::size_t kCrcDigits = 8;
constexpr std::uint64_t kMaxInteger = std::numeric_limits<std::int64_t>::max();

std::string manifest_path(const std::string& folder) { return folder + "/manifest.json"; }

// ---- What holds of every manifest ----

// Bytes of elements [0, count) of a plane; count is a multiple of a block, or the end.
std::int64_t bytes_before(const Plane& plane, std::int64_t count, std::int64_t elements) {
  return count == elements ? plane.bytes() : count / kBlock * plane.block_bytes;
}

// As the tensor that the file has of it: its own shape where the piece is all of it, otherwise a flat one.
TensorInfo info_of(const TensorState& tensor, const Array& array, const Plane& plane, const Piece& piece) {
  TensorInfo info = {plane_name(tensor, array, plane), plane.dtype, plane.shape};
  const std::int64_t elements = tensor.elements();
  if (piece.first == 0 && piece.end == elements) return info;
  const std::int64_t begin = piece.first == 0 ? 0 : bytes_before(plane, piece.first, elements);
  info.shape = {(bytes_before(plane, piece.end, elements) - begin) / bytes_of(plane.dtype)};
  return info;
}

class Checker {
 public:
  Checker(const Manifest& manifest, const std::string& path) : manifest_(manifest), path_(path) {}

  void check() {
    if (manifest_.files.empty()) refuse("it names no file; there must be at least one");
    check_entries();
    check_names();
    for (const TensorState& tensor : manifest_.tensors) check_tensor(tensor);
  }

 private:
  template <class... Parts>
  [[noreturn]] void refuse(const Parts&... parts) const {
    fail(path_, ": ", parts...);
  }

  void check_entries() const {
    const auto limit = [&](const char* what, std::size_t size) {
      if (size > kMaxEntries) refuse(what, " has ", size, " entries, and the limit is ", kMaxEntries);
    };
    limit("groups", manifest_.groups.size());
    limit("trainer", manifest_.trainer.size());
    for (const Group& group : manifest_.groups) {
      limit("hyperparameters", group.hyperparameters.size());
      for (const auto& [name, value] : group.hyperparameters)
        if (!std::isfinite(value))
          refuse("hyperparameter ", shown(name), " is ", value, "; a checkpoint holds finite numbers");
    }
  }

  // Names of planes follow from those of tensors, so it is enough that none is also a tensor's. No name is
  // copied: a hostile file could ask for its longest one many times.
  void check_names() {
    for (const TensorState& tensor : manifest_.tensors) {
      if (tensor.name.empty()) refuse("a tensor has no name");
      if (tensor.name == "__metadata__") refuse("no tensor may be called __metadata__: safetensors keep it");
      names_.push_back(tensor.name);
    }
    std::sort(names_.begin(), names_.end());
    if (const auto twice = std::adjacent_find(names_.begin(), names_.end()); twice != names_.end())
      refuse("two tensors are called ", shown(*twice), "; each needs a name of its own");
  }

  // A number of bytes or elements that fits 63 bits.
  template <class Count>
  std::int64_t counted(const std::string& what, const Count& count) const {
    try {
      return count();
    } catch (const std::runtime_error& error) {
      refuse(what, error.what());
    }
  }

  void check_tensor(const TensorState& tensor) const {
    const std::string what = "tensor " + shown(tensor.name) + ": ";
    if (tensor.shape.size() > kMaxDimensions) refuse(what, "its shape has more than 64 dimensions");
    const std::int64_t elements = counted(what, [&] { return tensor.elements(); });
    if (tensor.group >= manifest_.groups.size())
      refuse(what, "it is of group ", tensor.group, ", and there are ", manifest_.groups.size());
    if (tensor.step < 1) refuse(what, "its next step is 0; the first is 1");
    if (tensor.arrays.empty() || tensor.arrays.front().name != "weight")
      refuse(what, "its first array must be its weight");
    std::set<std::string_view> arrays(std::begin(kKinds), std::end(kKinds));  // would be taken for planes
    for (const Array& array : tensor.arrays) {
      if (array.name.empty() || array.name.find('/') != std::string::npos ||
          !arrays.insert(array.name).second)
        refuse(what, "it has an array called ", shown(array.name),
               "; a name stands once, is not that of a kind of plane, not empty and has no '/'");
      if (array.planes.empty() || array.planes.front().kind != "codes")
        refuse(what, "the first plane of ", shown(array.name), " must be its codes");
      if (array.planes.size() > 2 || array.planes.back().kind == (array.planes.size() == 2 ? "codes" : ""))
        refuse(what, shown(array.name), " has more planes than codes and a scale or extra bits");
      for (const Plane& plane : array.planes)
        check_plane(plane_name(tensor, array, plane), tensor, plane, elements);
    }
  }

  void check_plane(const std::string& name, const TensorState& tensor, const Plane& plane,
                   std::int64_t elements) const {
    const std::string what = "plane " + shown(name) + ": ";
    if (name != tensor.name && std::binary_search(names_.begin(), names_.end(), name))
      refuse(what, "a tensor has that name too");
    if (std::find(std::begin(kKinds), std::end(kKinds), plane.kind) == std::end(kKinds))
      refuse(what, "its kind is ", shown(plane.kind), "; known are codes, scale and extra");
    const std::int64_t full = elements / kBlock, bytes = counted(what, [&] { return plane.bytes(); });
    if (plane.block_bytes < 1 || plane.block_bytes % bytes_of(plane.dtype) != 0)
      refuse(what, "128 elements take ", plane.block_bytes, " bytes, which is no whole number of ",
             name_of(plane.dtype));
    // Divided, because the product of two numbers from a file may be anything.
    const bool whole = elements % kBlock == 0;
    if (whole ? bytes % plane.block_bytes != 0 || bytes / plane.block_bytes != full
              : bytes == 0 || (bytes - 1) / plane.block_bytes != full)
      refuse(what, name_of(plane.dtype), " of ", bytes, " bytes does not fit ", elements, " elements at ",
             plane.block_bytes, " bytes for each 128");
    check_pieces(plane, elements, what);
  }

  void check_pieces(const Plane& plane, std::int64_t elements, const std::string& what) const {
    std::int64_t covered = 0;
    std::set<std::size_t> used;
    for (const Piece& piece : plane.pieces) {
      if (piece.file >= manifest_.files.size())
        refuse(what, "a piece is in file ", piece.file, ", and there are ", manifest_.files.size());
      if (!used.insert(piece.file).second) refuse(what, "two of its pieces are in one file");
      if (piece.first != covered)
        refuse(what, "a piece begins at element ", piece.first, ", and the one before it ends at ", covered);
      if (piece.end > elements || (piece.end <= piece.first && elements > 0))
        refuse(what, "a piece ends at element ", piece.end, "; it must end after ", piece.first,
               " and not after ", elements);
      if (piece.end != elements && piece.end % kBlock != 0)
        refuse(what, "a piece ends at element ", piece.end, ", which is no multiple of 128");
      covered = piece.end;
    }
    if (plane.pieces.empty() || covered != elements)
      refuse(what, "its pieces end at element ", covered, " of ", elements);
  }

  const Manifest& manifest_;
  const std::string& path_;
  std::vector<std::string_view> names_;  // of the tensors, in order
};

// ---- Writing a manifest ----

std::string crc_text(std::uint32_t crc) { return json_text(hex(crc)); }

std::string text_of(const Piece& piece) {
  const std::string values[] = {std::to_string(piece.file), std::to_string(piece.first),
                                std::to_string(piece.end), crc_text(piece.crc)};
  return json_array(values, [](const std::string& value) { return value; });
}

std::string text_of(const Plane& plane) {
  return json_object(
      {{"kind", json_text(plane.kind)},
       {"dtype", json_text(name_of(plane.dtype))},
       {"shape", json_numbers(plane.shape)},
       {"block_bytes", std::to_string(plane.block_bytes)},
       {"pieces", json_array(plane.pieces, [](const Piece& piece) { return text_of(piece); })}});
}

std::string text_of(const Array& array) {
  return json_object(
      {{"name", json_text(array.name)},
       {"format", json_text(array.format)},
       {"rounding", json_text(array.rounding)},
       {"planes", json_array(array.planes, [](const Plane& plane) { return text_of(plane); })}});
}

std::string text_of(const TensorState& tensor) {
  const auto of_array = [](const Array& array) { return text_of(array); };
  return json_object({{"name", json_text(tensor.name)},
                      {"shape", json_numbers(tensor.shape)},
                      {"group", std::to_string(tensor.group)},
                      {"id", std::to_string(tensor.id)},
                      {"step", std::to_string(tensor.step)},
                      {"adagc_norm", tensor.adagc_norm ? written(*tensor.adagc_norm) : "null"},
                      {"arrays", json_array(tensor.arrays, of_array, ",\n ")}});
}

std::string text_of(const Group& group) {
  std::vector<JsonMember> hypers;
  for (const auto& [name, value] : group.hyperparameters) hypers.push_back({name, written(value)});
  return json_object({{"optimizer", json_text(group.optimizer)},
                      {"seed", std::to_string(group.seed)},
                      {"hyperparameters", json_object(hypers)}});
}

std::string text_of(const std::optional<LossScale>& loss_scale) {
  if (!loss_scale) return "null";
  return json_object({{"scale", written(loss_scale->scale)},
                      {"growth", written(loss_scale->growth)},
                      {"backoff", written(loss_scale->backoff)},
                      {"interval", std::to_string(loss_scale->interval)},
                      {"clean", std::to_string(loss_scale->clean)}});
}

std::string text_of(const FileEntry& file, const std::string& name) {
  return json_object({{"name", json_text(name)},
                      {"bytes", std::to_string(file.bytes)},
                      {"header_crc32", crc_text(file.header_crc)}});
}

// What is not about files and tensors; the files' own metadata repeat it.
std::string run_text(const Manifest& manifest) {
  std::vector<JsonMember> trainer;
  for (const auto& [name, value] : manifest.trainer) trainer.push_back({name, json_text(value)});
  const auto of_group = [](const Group& group) { return text_of(group); };
  return json_members({{"recipe", json_text(manifest.recipe)},
                       {"step", std::to_string(manifest.step)},
                       {"groups", json_array(manifest.groups, of_group, ",\n ")},
                       {"loss_scale", text_of(manifest.loss_scale)},
                       {"trainer", json_object(trainer, ",\n ")}},
                      ",\n");
}

// ---- Reading a manifest ----

// The first line is the same in every version: {"scruple_checkpoint":1,"library":"0.1.0","crc32":"89abcdef",
struct FirstLine {
  std::uint64_t version = 0;
  std::string library;
  std::uint32_t crc = 0;
  std::size_t digits = 0;  // where those of the crc stand
};

bool parse_hex(std::string_view text, std::uint32_t& value) {
  if (text.size() != kCrcDigits || text.find_first_not_of("0123456789abcdef") != text.npos) return false;
  std::from_chars(text.data(), text.data() + text.size(), value, 16);
  return true;
}

FirstLine first_line(std::string_view text, const std::string& path) {
  constexpr std::string_view kBegin = "{\"scruple_checkpoint\":", kLibrary = ",\"library\":\"";
  const auto refuse = [&] {
    fail(path,
         ": its first line is not that of a Scruple checkpoint ({\"scruple_checkpoint\":1,...); it is "
         "damaged or something else");
  };
  FirstLine line;
  const std::string_view first = text.substr(0, text.find('\n'));
  if (!first.starts_with(kBegin) || first.size() == text.size()) refuse();
  const char* const end = first.data() + first.size();
  const auto [stop, problem] = std::from_chars(first.data() + kBegin.size(), end, line.version);
  std::string_view rest(stop, static_cast<std::size_t>(end - stop));
  if (problem != std::errc() || !rest.starts_with(kLibrary)) refuse();
  rest.remove_prefix(kLibrary.size());
  line.library = rest.substr(0, std::min<std::size_t>(rest.find('"'), 40));
  rest.remove_prefix(line.library.size());
  // Only then: what else a newer version has in this line is its affair.
  if (line.version == 0) refuse();
  if (line.version > kCheckpointVersion)
    misuse(path, " is of version ", line.version, " of the checkpoint format, written by Scruple ",
           shown(line.library), "; this one reads versions up to ", kCheckpointVersion,
           ": use that Scruple or a newer one");
  const std::string between = "\"," + std::string(kCrcKey);
  if (!rest.starts_with(between)) refuse();
  rest.remove_prefix(between.size());
  line.digits = static_cast<std::size_t>(rest.data() - text.data());
  if (!parse_hex(rest.substr(0, kCrcDigits), line.crc) || rest.substr(kCrcDigits) != "\",") refuse();
  return line;
}

std::uint32_t crc_without(std::string_view text, std::size_t digits) {
  const std::uint32_t before = crc32(text.substr(0, digits));
  return crc32(text.substr(digits + kCrcDigits), crc32(std::string_view("00000000"), before));
}

class ManifestReader {
 public:
  ManifestReader(std::string_view text, const std::string& path) : json_(text, path) {}

  Manifest read() {
    Manifest manifest;
    std::vector<FileEntry>& files = manifest.files;
    json_.fields("the manifest",
                 {{"scruple_checkpoint", [&] { integer("the version"); }},
                  {"library", [&] { manifest.library = json_.string("library"); }},
                  {"crc32", [&] { crc("crc32"); }},
                  {"recipe", [&] { manifest.recipe = json_.string("recipe"); }},
                  {"step", [&] { manifest.step = integer("step"); }},
                  {"groups", [&] { groups(manifest.groups); }},
                  {"loss_scale", [&] { manifest.loss_scale = loss_scale(); }},
                  {"trainer", [&] { trainer(manifest.trainer); }},
                  {"files", [&] { list("files", files, [&] { return file(files.size()); }); }},
                  {"tensors", [&] { list("tensors", manifest.tensors, [&] { return tensor(); }); }}});
    json_.end();
    for (std::size_t i = 0; i < names_.size(); ++i)
      if (names_[i] != file_name(i, names_.size()))
        json_.refuse("file ", i, " is called ", shown(names_[i]), " and must be called ",
                     file_name(i, names_.size()));
    return manifest;
  }

 private:
  template <class T, class Read>
  void list(const char* what, std::vector<T>& into, const Read& read) {
    json_.elements(what, [&] { into.push_back(read()); });
    into.shrink_to_fit();
  }

  std::int64_t integer(const char* what) {
    return static_cast<std::int64_t>(json_.unsigned_integer(what, kMaxInteger));
  }
  std::uint32_t crc(const char* what) {
    std::uint32_t value = 0;
    const std::string text = json_.string(what);
    if (!parse_hex(text, value))
      json_.refuse(what, " is ", shown(text), "; it must be eight digits of 0-9a-f");
    return value;
  }

  void limit(const char* what, std::size_t size) const {
    if (size >= kMaxEntries) json_.refuse(what, " has more than ", kMaxEntries, " entries");
  }

  void groups(std::vector<Group>& groups) {
    list("groups", groups, [&] {
      limit("groups", groups.size());
      Group group;
      json_.fields("a group",
                   {{"optimizer", [&] { group.optimizer = json_.string("optimizer"); }},
                    {"seed", [&] { group.seed = json_.unsigned_integer("seed", ~std::uint64_t{0}); }},
                    {"hyperparameters", [&] {
                       json_.members("hyperparameters", [&](const std::string& name) {
                         limit("hyperparameters", group.hyperparameters.size());
                         const double value = json_.number("a hyperparameter");
                         const auto [at, fresh] = group.hyperparameters.emplace(name, value);
                         if (!fresh) json_.refuse("hyperparameter ", shown(at->first), " stands twice");
                       });
                     }}});
      return group;
    });
  }

  std::optional<LossScale> loss_scale() {
    if (json_.null()) return std::nullopt;
    LossScale scale;
    json_.fields("loss_scale", {{"scale", [&] { scale.scale = json_.number("scale"); }},
                                {"growth", [&] { scale.growth = json_.number("growth"); }},
                                {"backoff", [&] { scale.backoff = json_.number("backoff"); }},
                                {"interval", [&] { scale.interval = integer("interval"); }},
                                {"clean", [&] { scale.clean = integer("clean"); }}});
    return scale;
  }

  void trainer(Metadata& entries) {
    json_.members("trainer", [&](std::string key) {
      limit("trainer", entries.size());
      std::string value = json_.string("a value of trainer");
      const auto [at, fresh] = entries.emplace(std::move(key), std::move(value));
      if (!fresh) json_.refuse("trainer: ", shown(at->first), " stands twice");
    });
  }

  FileEntry file(std::size_t so_far) {
    if (so_far >= kMaxShards) json_.refuse("there are more than ", kMaxShards, " files");
    FileEntry entry;
    json_.fields("a file", {{"name", [&] { names_.push_back(json_.string("a file's name")); }},
                            {"bytes", [&] { entry.bytes = json_.unsigned_integer("bytes", kMaxInteger); }},
                            {"header_crc32", [&] { entry.header_crc = crc("header_crc32"); }}});
    return entry;
  }

  std::vector<std::int64_t> shape() {
    std::vector<std::int64_t> sizes;
    json_.elements("shape", [&] {
      if (sizes.size() == kMaxDimensions) json_.refuse("a shape has more than 64 dimensions");
      sizes.push_back(integer("a dimension"));
    });
    return sizes;
  }

  TensorState tensor() {
    TensorState made;
    json_.fields(
        "a tensor",
        {{"name", [&] { made.name = json_.string("a tensor's name"); }},
         {"shape", [&] { made.shape = shape(); }},
         {"group", [&] { made.group = json_.unsigned_integer("group", kMaxEntries); }},
         {"id",
          [&] { made.id = static_cast<std::uint32_t>(json_.unsigned_integer("id", ~std::uint32_t{0})); }},
         {"step", [&] { made.step = integer("step"); }},
         {"adagc_norm",
          [&] { made.adagc_norm = json_.null() ? std::nullopt : std::optional(json_.number("adagc_norm")); }},
         {"arrays", [&] { list("arrays", made.arrays, [&] { return array(); }); }}});
    return made;
  }

  Array array() {
    Array made;
    json_.fields("an array", {{"name", [&] { made.name = json_.string("an array's name"); }},
                              {"format", [&] { made.format = json_.string("format"); }},
                              {"rounding", [&] { made.rounding = json_.string("rounding"); }},
                              {"planes", [&] { list("planes", made.planes, [&] { return plane(); }); }}});
    return made;
  }

  Plane plane() {
    Plane made;
    json_.fields("a plane", {{"kind", [&] { made.kind = json_.string("kind"); }},
                             {"dtype", [&] { made.dtype = dtype(); }},
                             {"shape", [&] { made.shape = shape(); }},
                             {"block_bytes", [&] { made.block_bytes = integer("block_bytes"); }},
                             {"pieces", [&] { list("pieces", made.pieces, [&] { return piece(); }); }}});
    return made;
  }

  Dtype dtype() {
    const std::string name = json_.string("dtype");
    const std::optional<Dtype> known = dtype_named(name);
    if (!known) json_.refuse("dtype ", shown(name), " is not known");
    return *known;
  }

  Piece piece() {
    Piece made;
    int at = 0;
    json_.elements("a piece", [&] {
      switch (at++) {
        case 0: made.file = json_.unsigned_integer("a piece's file", kMaxShards); break;
        case 1: made.first = integer("a piece's first element"); break;
        case 2: made.end = integer("a piece's end"); break;
        case 3: made.crc = crc("a piece's crc32"); break;
        default: json_.refuse("a piece has more than four values");
      }
    });
    if (at < 4) json_.refuse("a piece has ", at, " values; it must be [file, first, end, crc32]");
    return made;
  }

  JsonReader json_;
  std::vector<std::string> names_;
};

}  // namespace

std::vector<Plane> planes_of(const StoredFormat& format, const std::vector<std::int64_t>& shape) {
  constexpr int kFloat = 32, kHalf = 16;
  const std::int64_t elements = TensorInfo{format.name, Dtype::u8, shape}.bytes();
  const auto plane = [&](const char* kind, Dtype dtype, std::int64_t bytes, std::int64_t block_bytes) {
    // One element for each of the tensor's: its shape. Otherwise flat.
    const std::int64_t count = bytes / bytes_of(dtype);
    const bool shaped = dtype != Dtype::u8 && count == elements;
    return Plane{kind, dtype, shaped ? shape : std::vector{count}, block_bytes, {}};
  };
  // Codes that are plain numbers are stored as such, all others as bytes.
  const std::string_view visible = std::string_view(format.name).substr(0, format.name.find('+'));
  const Dtype codes = visible == "fp32"   ? Dtype::f32
                      : visible == "bf16" ? Dtype::bf16
                      : visible == "fp16" ? Dtype::f16
                                          : Dtype::u8;
  const Dtype aux = format.aux_bits == kFloat ? Dtype::f32  // a scale, or a master copy
                    : format.aux_is_scale && format.aux_bits == kHalf ? Dtype::f16
                                                                      : Dtype::u8;
  std::vector<Plane> planes = {plane("codes", codes, format.codes, format.block_codes)};
  if (format.block_aux > 0)
    planes.push_back(plane(format.aux_is_scale ? "scale" : "extra", aux, format.aux, format.block_aux));
  return planes;
}

bool same_form(const Plane& a, const Plane& b) {
  return a.kind == b.kind && a.dtype == b.dtype && a.shape == b.shape && a.block_bytes == b.block_bytes;
}

std::string plane_name(const TensorState& tensor, const Array& array, const Plane& plane) {
  return tensor.name + (array.name == "weight" ? "" : "/" + array.name) +
         (plane.kind == "codes" ? "" : "/" + plane.kind);
}

std::string file_name(std::size_t file, std::size_t files) {
  if (files == 1) return "model.safetensors";
  char name[64];
  std::snprintf(name, sizeof name, "model-%05zu-of-%05zu.safetensors", file + 1, files);
  return name;
}

std::uint32_t manifest_crc(std::string_view text) {
  const std::size_t key = text.find(kCrcKey);
  if (key == text.npos || text.size() - key < kCrcKey.size() + kCrcDigits) return 0;
  return crc_without(text, key + kCrcKey.size());
}

std::string to_text(const Manifest& manifest) {
  Checker(manifest, "the checkpoint").check();
  std::vector<std::string> files;
  for (const FileEntry& file : manifest.files)
    files.push_back(text_of(file, file_name(files.size(), manifest.files.size())));
  const auto as_it_is = [](const std::string& file) { return file; };
  const auto of_tensor = [](const TensorState& tensor) { return text_of(tensor); };
  std::string text = "{" +
                     json_members({{"scruple_checkpoint", std::to_string(kCheckpointVersion)},
                                   {"library", json_text(manifest.library)},
                                   {"crc32", crc_text(0)}}) +
                     ",\n" + run_text(manifest) + ",\n" +
                     json_members({{"files", json_array(files, as_it_is, ",\n ")},
                                   {"tensors", json_array(manifest.tensors, of_tensor, ",\n")}},
                                  ",\n") +
                     "}\n";
  if (text.size() > kMaxManifest)
    fail("the manifest would take ", text.size(), " bytes, and the limit is ", kMaxManifest,
         "; shorten what goes into trainer");
  text.replace(text.find(kCrcKey) + kCrcKey.size(), kCrcDigits, hex(manifest_crc(text)));
  return text;
}

Manifest parse_manifest(std::string_view text, const std::string& path) {
  const FirstLine line = first_line(text, path);
  if (crc_without(text, line.digits) != line.crc)
    fail(path, ": its checksum is ", hex(crc_without(text, line.digits)), " and should be ", hex(line.crc),
         "; the manifest is damaged");
  Manifest manifest = ManifestReader(text, path).read();
  Checker(manifest, path).check();
  return manifest;
}

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

namespace {

constexpr std::size_t kReadChunk = std::size_t{1} << 18;  // stays in the cache between copy and checksum

}  // namespace

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
    Checker(manifest_, folder).check();
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
