// The checkpoints of scruple.h: the manifest of io/ as structs of C, both ways.
#include "io/checkpoint.h"

#include <algorithm>
#include <array>
#include <optional>
#include <string>
#include <vector>

#include "capi/guard.h"
#include "engine/registry.h"
#include "optim/renamed.h"

namespace {

using namespace scruple;

// As guarded, for what touches files.
template <class Body>
scruple_status guarded_file(const Body& body) noexcept {
  return guarded([&] {
    try {
      body();
    } catch (const Failure&) {
      throw;
    } catch (const io::Misuse& error) {
      fail(SCRUPLE_INVALID, error.what());
    } catch (const std::runtime_error& error) {
      fail(SCRUPLE_FILE, error.what());
    }
  });
}

// The planes of an array in a format of the registry.
std::vector<io::Plane> planes_of(const scruple_format& format, const std::vector<std::int64_t>& shape,
                                 std::int64_t elements) {
  const Bytes whole = bytes_of(format, elements), block = bytes_of(format, io::kBlock);
  return io::planes_of({format.name, format.layout.aux_bits, format.aux_is_scale, whole.codes, whole.aux,
                        block.codes, block.aux},
                       shape);
}

bool fits(const io::TensorState& tensor, const io::Array& array) {
  const auto all = formats();
  const auto found =
      std::find_if(all.begin(), all.end(), [&](const scruple_format& f) { return array.format == f.name; });
  if (found == all.end() || tensor.elements() > kMaxElements) return false;
  if (array.name == "weight" && (found->roles & SCRUPLE_ROLE_WEIGHT) == 0) return false;
  const unsigned roundings = found->roundings[0] | found->roundings[1];
  int rounding = 0;
  while (rounding < kRoundings && array.rounding != rounding_name(rounding)) ++rounding;
  if ((roundings >> rounding & 1u) == 0) return false;
  const std::vector<io::Plane> planes = planes_of(*found, tensor.shape, tensor.elements());
  return std::equal(planes.begin(), planes.end(), array.planes.begin(), array.planes.end(), io::same_form);
}

std::int64_t count_of(const auto& list) { return static_cast<std::int64_t>(list.size()); }

// ---- Reading: structs that point into the manifest ----

struct Contents {
  std::vector<scruple_checkpoint_hyper> hypers;
  std::vector<scruple_checkpoint_group> groups;
  std::vector<scruple_checkpoint_note> notes;
  std::vector<scruple_checkpoint_plane> planes;
  std::vector<scruple_checkpoint_array> arrays;
  std::vector<scruple_checkpoint_tensor> tensors;
  scruple_checkpoint_contents all = {};

  explicit Contents(const io::Checkpoint& checkpoint) : folder(checkpoint.folder()) {
    const io::Manifest& from = checkpoint.manifest();
    reserve(from);
    current.reserve(from.groups.size());
    for (io::Group group : from.groups) {
      group.hyperparameters = with_current_names(group.hyperparameters, folder);
      add(current.emplace_back(std::move(group)));
    }
    for (const auto& [name, text] : from.trainer)
      notes.push_back({c_name(name), text.c_str(), count_of(text)});
    for (const io::TensorState& tensor : from.tensors) add(tensor);
    scruple_checkpoint_scale scale = {};
    if (const auto& found = from.loss_scale)
      scale = {found->scale, found->growth, found->backoff, found->interval, found->clean};
    all = {folder.c_str(), c_name(from.library), c_name(from.recipe),
           from.step,      groups.data(),        count_of(groups),
           scale,          notes.data(),         count_of(notes),
           tensors.data(), count_of(tensors)};
  }

 private:
  const std::string& folder;
  std::vector<io::Group> current;  // hyperparameters by their names of now

  const char* c_name(const std::string& name) const {
    if (name.find('\0') != std::string::npos)
      io::fail(folder, ": a name has a zero byte in it, which this interface cannot hand out");
    return name.c_str();
  }

  // Nothing moves once it is pointed to.
  void reserve(const io::Manifest& from) {
    std::size_t hyper_count = 0, array_count = 0, plane_count = 0;
    for (const io::Group& group : from.groups) hyper_count += group.hyperparameters.size();
    for (const io::TensorState& tensor : from.tensors) {
      array_count += tensor.arrays.size();
      for (const io::Array& array : tensor.arrays) plane_count += array.planes.size();
    }
    hypers.reserve(hyper_count);
    groups.reserve(from.groups.size());
    notes.reserve(from.trainer.size());
    planes.reserve(plane_count);
    arrays.reserve(array_count);
    tensors.reserve(from.tensors.size());
  }

  void add(const io::Group& group) {
    const scruple_checkpoint_hyper* const first = hypers.data() + hypers.size();
    for (const auto& [name, value] : group.hyperparameters) hypers.push_back({c_name(name), value});
    groups.push_back({c_name(group.optimizer), group.seed, first, count_of(group.hyperparameters)});
  }

  void add(const io::TensorState& tensor) {
    const scruple_checkpoint_array* const first = arrays.data() + arrays.size();
    for (const io::Array& array : tensor.arrays) {
      const scruple_checkpoint_plane* const first_plane = planes.data() + planes.size();
      for (const io::Plane& plane : array.planes)
        planes.push_back({plane.kind.c_str(), io::name_of(plane.dtype), plane.shape.data(),
                          count_of(plane.shape), plane.bytes()});
      arrays.push_back({c_name(array.name), c_name(array.format), c_name(array.rounding),
                        fits(tensor, array) ? 1 : 0, first_plane, count_of(array.planes)});
    }
    tensors.push_back({c_name(tensor.name), tensor.shape.data(), count_of(tensor.shape),
                       static_cast<std::int64_t>(tensor.group), tensor.step, std::int64_t{tensor.id},
                       tensor.adagc_norm.value_or(0), first, count_of(tensor.arrays)});
  }
};

// ---- Writing: the manifest that the structs say ----

template <class T>
std::span<const T> listed(const T* list, std::int64_t count, const char* what) {
  if (count < 0 || (count > 0 && list == nullptr))
    fail(SCRUPLE_INVALID, "there are ", count, " ", what, " at ", list == nullptr ? "null" : "their address");
  return {list, static_cast<std::size_t>(count)};
}

std::string text_of(const char* text, const char* what) { return &required(text, what); }

io::Array array_of(const scruple_checkpoint_array& from, const io::TensorState& tensor) {
  io::Array array = {text_of(from.name, "an array's name"),
                     text_of(from.format, "an array's format"),
                     text_of(from.rounding, "an array's rounding"),
                     {}};
  const scruple_format& format = find_format(from.format);
  const std::int64_t elements = tensor.elements();
  if (elements > kMaxElements)
    fail(SCRUPLE_INVALID, "tensor \"", tensor.name, "\" has ", elements, " elements; the limit is 2^50");
  array.planes = planes_of(format, tensor.shape, elements);
  return array;
}

io::TensorState tensor_of(const scruple_checkpoint_tensor& from) {
  io::TensorState tensor;
  tensor.name = text_of(from.name, "a tensor's name");
  const std::span<const std::int64_t> shape = listed(from.shape, from.dimensions, "dimensions");
  tensor.shape.assign(shape.begin(), shape.end());
  if (from.group < 0 || from.id < 0 || from.id > std::int64_t{~std::uint32_t{0}})
    fail(SCRUPLE_INVALID, "tensor \"", tensor.name, "\" has id ", from.id, " and group ", from.group,
         "; an id has 32 bits, and groups count from 0");
  tensor.group = static_cast<std::size_t>(from.group);
  tensor.id = static_cast<std::uint32_t>(from.id);
  tensor.step = from.step;
  if (from.adagc_norm != 0) tensor.adagc_norm = from.adagc_norm;
  for (const scruple_checkpoint_array& array : listed(from.arrays, from.array_count, "arrays"))
    tensor.arrays.push_back(array_of(array, tensor));
  return tensor;
}

io::Manifest manifest_of(const scruple_checkpoint_contents& from) {
  io::Manifest manifest;
  manifest.library = SCRUPLE_VERSION;
  manifest.recipe = text_of(from.recipe, "recipe");
  if (from.step < 0) fail(SCRUPLE_INVALID, "step is ", from.step, "; it must be at least 0");
  manifest.step = from.step;
  for (const scruple_checkpoint_group& given : listed(from.groups, from.group_count, "groups")) {
    io::Group group = {text_of(given.optimizer, "a group's optimizer"), given.seed, {}};
    for (const auto& [name, value] : listed(given.hypers, given.hyper_count, "hyperparameters"))
      group.hyperparameters[text_of(name, "a hyperparameter's name")] = value;
    group.hyperparameters = with_current_names(group.hyperparameters, group.optimizer);
    manifest.groups.push_back(std::move(group));
  }
  if (const scruple_checkpoint_scale& scale = from.loss_scale; scale.scale != 0) {
    if (scale.interval < 0 || scale.clean < 0)
      fail(SCRUPLE_INVALID, "the loss scale has interval ", scale.interval, " and clean ", scale.clean,
           "; both must be at least 0");
    manifest.loss_scale = {scale.scale, scale.growth, scale.backoff, scale.interval, scale.clean};
  }
  for (const scruple_checkpoint_note& note : listed(from.notes, from.note_count, "notes")) {
    const std::span<const char> text = listed(note.text, note.bytes, "bytes of a note");
    manifest.trainer[text_of(note.name, "a note's name")] = std::string(text.begin(), text.end());
  }
  for (const scruple_checkpoint_tensor& tensor : listed(from.tensors, from.tensor_count, "tensors"))
    manifest.tensors.push_back(tensor_of(tensor));
  return manifest;
}

std::size_t index(std::int64_t number, std::size_t count, const char* what) {
  if (number < 0 || static_cast<std::uint64_t>(number) >= count)
    fail(SCRUPLE_INVALID, what, " ", number, " does not exist; there are ", count);
  return static_cast<std::size_t>(number);
}

// A negative number becomes one that no list has.
std::size_t unsigned_of(std::int64_t number) { return static_cast<std::size_t>(number); }

}  // namespace

struct scruple_checkpoint {
  explicit scruple_checkpoint(const std::string& path) : files(io::find_checkpoint(path)), contents(files) {}

  const io::TensorState& tensor(std::int64_t number) const {
    const auto& tensors = files.manifest().tensors;
    return tensors[index(number, tensors.size(), "tensor")];
  }

  io::Checkpoint files;
  Contents contents;
  // A plane that is being read from its beginning, so that its checksums can be compared.
  std::optional<io::PlaneReader> reader;
  const io::Plane* reading = nullptr;
};

struct scruple_checkpoint_writer {
  io::NewCheckpoint files;
};

extern "C" {

scruple_status scruple_checkpoint_open(const char* path, scruple_checkpoint** out) {
  return guarded_file([&] {
    scruple_checkpoint*& made = required(out, "out");
    made = std::make_unique<scruple_checkpoint>(text_of(path, "path")).release();
  });
}

void scruple_checkpoint_close(scruple_checkpoint* checkpoint) { delete checkpoint; }

const scruple_checkpoint_contents* scruple_checkpoint_manifest(const scruple_checkpoint* checkpoint) {
  return checkpoint == nullptr ? nullptr : &checkpoint->contents.all;
}

scruple_status scruple_checkpoint_verify(scruple_checkpoint* checkpoint, int64_t tensor) {
  return guarded_file([&] {
    const scruple_checkpoint& from = required(checkpoint, "checkpoint");
    const io::TensorState& of = from.tensor(tensor);
    for (const io::Array& array : of.arrays)
      for (const io::Plane& plane : array.planes) from.files.verify(of, array, plane);
  });
}

scruple_status scruple_checkpoint_read(scruple_checkpoint* checkpoint, int64_t tensor, int64_t array,
                                       int64_t plane, int64_t first, void* to, int64_t bytes) {
  return guarded_file([&] {
    scruple_checkpoint& from = required(checkpoint, "checkpoint");
    const io::TensorState& of = from.tensor(tensor);
    const io::Array& a = of.arrays[index(array, of.arrays.size(), "array")];
    const io::Plane& p = a.planes[index(plane, a.planes.size(), "plane")];
    if (first < 0 || bytes < 0 || bytes > p.bytes() - first)
      fail(SCRUPLE_INVALID, "bytes ", first, " to ", first, " + ", bytes, " of a plane that has ", p.bytes());
    if (bytes > 0) required(static_cast<std::byte*>(to), "to");
    const std::span memory(static_cast<std::byte*>(to), static_cast<std::size_t>(bytes));
    const auto begin = static_cast<std::uint64_t>(first);
    if (begin != 0 && (from.reading != &p || from.reader->at() != begin)) {
      from.files.read_range(of, a, p, begin, memory);
      return;
    }
    if (begin == 0) from.reader.emplace(from.files, of, a, p);
    from.reading = nullptr;  // where this call fails, the next begins anew
    from.reader->read(memory);
    from.reading = &p;
  });
}

scruple_status scruple_checkpoint_begin(const char* path, const scruple_checkpoint_contents* contents,
                                        int64_t files, scruple_checkpoint_writer** out) {
  return guarded_file([&] {
    scruple_checkpoint_writer*& made = required(out, "out");
    const std::string folder = text_of(path, "path");
    io::Manifest manifest;
    try {
      manifest = manifest_of(required(contents, "contents"));
    } catch (const Failure&) {
      throw;
    } catch (const std::runtime_error& error) {  // a shape that has no size
      fail(SCRUPLE_INVALID, error.what());
    }
    made = new scruple_checkpoint_writer{{folder, std::move(manifest), unsigned_of(files)}};
  });
}

scruple_status scruple_checkpoint_write(scruple_checkpoint_writer* writer, int64_t tensor, int64_t array,
                                        int64_t plane, const void* from, int64_t bytes) {
  return guarded_file([&] {
    if (bytes < 0) fail(SCRUPLE_INVALID, "bytes is ", bytes, "; it must be at least 0");
    if (bytes > 0) required(static_cast<const std::byte*>(from), "from");
    required(writer, "writer")
        .files.write(unsigned_of(tensor), unsigned_of(array), unsigned_of(plane),
                     {static_cast<const std::byte*>(from), static_cast<std::size_t>(bytes)});
  });
}

scruple_status scruple_checkpoint_commit(scruple_checkpoint_writer* writer) {
  return guarded_file([&] { required(writer, "writer").files.finish(); });
}

void scruple_checkpoint_abandon(scruple_checkpoint_writer* writer) { delete writer; }

}  // extern "C"
