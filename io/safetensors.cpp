#include "io/safetensors.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <numeric>
#include <optional>
#include <utility>

#include "io/json.h"

namespace scruple::io {
namespace {

constexpr std::uint64_t kLengthBytes = 8;
constexpr std::uint64_t kMaxHeader = 100'000'000;  // the official library's limit
constexpr std::uint64_t kAlignment = 64;           // of the data in files we write; the format asks for 8
constexpr std::size_t kMaxDimensions = 64;  // as numpy and torch; keeps a hostile header from costing memory
constexpr std::string_view kMetadataKey = "__metadata__";

struct DtypeRow {
  const char* name;
  std::int64_t bytes;
};

// In the order of Dtype.
constexpr DtypeRow kDtypes[] = {{"BOOL", 1},    {"U8", 1},      {"I8", 1},          {"F8_E5M2", 1},
                                {"F8_E4M3", 1}, {"F8_E8M0", 1}, {"F8_E4M3FNUZ", 1}, {"F8_E5M2FNUZ", 1},
                                {"I16", 2},     {"U16", 2},     {"F16", 2},         {"BF16", 2},
                                {"I32", 4},     {"U32", 4},     {"F32", 4},         {"C64", 8},
                                {"F64", 8},     {"I64", 8},     {"U64", 8}};
static_assert(std::size(kDtypes) == static_cast<std::size_t>(Dtype::u64) + 1);

const DtypeRow& row_of(Dtype dtype) { return kDtypes[static_cast<std::size_t>(dtype)]; }

std::string all_dtypes() {
  std::string names;
  for (const DtypeRow& row : kDtypes) names += (names.empty() ? "" : ", ") + std::string(row.name);
  return names;
}

// Zeros are left out of the product until its end: [0, huge, huge] is as wrong as [huge, huge, 0].
std::optional<std::int64_t> size_in_bytes(const TensorInfo& tensor) {
  std::int64_t bytes = bytes_of(tensor.dtype);
  bool empty = false;
  for (const std::int64_t n : tensor.shape) {
    if (n < 0) return std::nullopt;
    if (n == 0)
      empty = true;
    else if (__builtin_mul_overflow(bytes, n, &bytes))
      return std::nullopt;
  }
  return empty ? 0 : bytes;
}

}  // namespace

std::optional<Dtype> dtype_named(std::string_view name) {
  const auto* const row = std::find_if(std::begin(kDtypes), std::end(kDtypes),
                                       [&](const DtypeRow& known) { return name == known.name; });
  if (row == std::end(kDtypes)) return std::nullopt;
  return static_cast<Dtype>(row - std::begin(kDtypes));
}
const char* name_of(Dtype dtype) { return row_of(dtype).name; }
std::int64_t bytes_of(Dtype dtype) { return row_of(dtype).bytes; }

std::int64_t TensorInfo::bytes() const {
  const std::optional<std::int64_t> bytes = size_in_bytes(*this);
  if (!bytes)
    fail("tensor ", shown(name), ": ", name_of(dtype), " of shape ", json_numbers(shape),
         " has no size that fits 63 bits; every dimension must be at least 0 and their product smaller");
  return *bytes;
}

// ---- Reading ----

namespace {

struct Entry {
  TensorInfo info;
  std::uint64_t begin, end;  // in the data
};

// Keys that stand twice are seen, and nothing is kept that does not belong.
class HeaderReader {
 public:
  HeaderReader(std::string_view header, const std::string& path) : json_(header, path) {}

  std::vector<Entry> entries;
  Metadata metadata;

  void read() {
    bool has_metadata = false;
    json_.members("the header", [&](std::string name) {
      if (name != kMetadataKey) {
        entries.push_back(entry(std::move(name)));
        return;
      }
      if (std::exchange(has_metadata, true)) json_.refuse("__metadata__ stands twice in the header");
      json_.members("__metadata__", [&](std::string key) { read_metadata(std::move(key)); });
    });
    json_.end();
  }

 private:
  void read_metadata(std::string key) {
    if (metadata.contains(key)) json_.refuse("__metadata__: ", shown(key), " stands twice");
    std::string value = json_.string(("__metadata__: " + shown(key)).c_str());
    metadata.emplace(std::move(key), std::move(value));
  }

  Entry entry(std::string name) {
    const std::string what = "tensor " + shown(name);
    Entry made{};
    json_.fields(what.c_str(), {{"dtype", [&] { made.info.dtype = dtype(what); }},
                                {"shape", [&] { made.info.shape = shape(what); }},
                                {"data_offsets", [&] { read_offsets(what, made); }}});
    made.info.name = std::move(name);
    return made;
  }

  Dtype dtype(const std::string& what) {
    const std::string name = json_.string((what + ": dtype").c_str());
    const std::optional<Dtype> known = dtype_named(name);
    if (!known)
      json_.refuse(what, ": dtype ", shown(name), " is not known; known are ", all_dtypes(),
                   " (types of less than a byte, such as F4, are not)");
    return *known;
  }

  std::vector<std::int64_t> shape(const std::string& what) {
    std::vector<std::int64_t> sizes;
    json_.elements((what + ": shape").c_str(), [&] {
      if (sizes.size() == kMaxDimensions)
        json_.refuse(what, ": shape has more than ", kMaxDimensions, " dimensions");
      sizes.push_back(
          static_cast<std::int64_t>(json_.unsigned_integer((what + ": a dimension").c_str(), INT64_MAX)));
    });
    return sizes;
  }

  void read_offsets(const std::string& what, Entry& entry) {
    int count = 0;
    json_.elements((what + ": data_offsets").c_str(), [&] {
      if (count == 2) json_.refuse(what, ": data_offsets has more than two numbers");
      (count++ == 0 ? entry.begin : entry.end) =
          json_.unsigned_integer((what + ": an offset").c_str(), INT64_MAX);
    });
    if (count < 2) json_.refuse(what, ": data_offsets has ", count, " numbers; it must be [begin, end]");
  }

  JsonReader json_;
};

// The JSON text of a file's header.
std::string_view header_of(std::span<const std::byte> file, const std::string& path) {
  constexpr std::string_view kPointer = "version https://git-lfs";
  if (file.size() >= kPointer.size() && std::memcmp(file.data(), kPointer.data(), kPointer.size()) == 0)
    fail(path, " is a pointer of git-lfs, not the file itself; fetch it with 'git lfs pull'");
  if (file.size() < kLengthBytes)
    fail(path, " has ", file.size(),
         " bytes; a safetensors file begins with 8 that hold the length of its header");
  std::uint64_t length = 0;
  for (std::size_t i = 0; i < kLengthBytes; ++i) length |= std::to_integer<std::uint64_t>(file[i]) << (8 * i);
  if (length > kMaxHeader)
    fail(path, ": its first 8 bytes announce a header of ", length, " bytes, and the limit is ", kMaxHeader,
         "; this is hardly a safetensors file");
  if (length > file.size() - kLengthBytes)
    fail(path, ": its first 8 bytes announce a header of ", length, " bytes, but only ",
         file.size() - kLengthBytes, " follow; the file is cut short or not a safetensors file");
  const std::string_view header(reinterpret_cast<const char*>(file.data()) + kLengthBytes, length);
  if (header.empty() || header.front() != '{')
    fail(path, ": its header does not begin with '{'; this is not a safetensors file");
  return header;
}

void check_names(std::vector<Entry>& entries, const std::string& path) {
  std::sort(entries.begin(), entries.end(),
            [](const Entry& a, const Entry& b) { return a.info.name < b.info.name; });
  for (std::size_t i = 1; i < entries.size(); ++i)
    if (entries[i].info.name == entries[i - 1].info.name)
      fail(path, ": tensor ", shown(entries[i].info.name), " stands twice in the header");
}

void check_size(const Entry& entry, std::uint64_t data_bytes, bool may_be_cut, const std::string& path) {
  const auto refuse = [&](const auto&... parts) {
    fail(path, ": tensor ", shown(entry.info.name), ": ", parts...);
  };
  const std::optional<std::int64_t> bytes = size_in_bytes(entry.info);
  if (!bytes) refuse("its shape ", json_numbers(entry.info.shape), " asks for more than 2^63 bytes");
  if (entry.begin > entry.end)
    refuse("data_offsets begin at ", entry.begin, " and end before, at ", entry.end);
  if (entry.end - entry.begin != static_cast<std::uint64_t>(*bytes))
    refuse(name_of(entry.info.dtype), " of shape ", json_numbers(entry.info.shape), " takes ", *bytes,
           " bytes, but data_offsets [", entry.begin, ", ", entry.end, "] hold ", entry.end - entry.begin);
  if (entry.end > data_bytes && !may_be_cut)
    refuse("data_offsets end at ", entry.end, ", but the file has only ", data_bytes,
           " bytes of data; it is cut short: copy or download it again");
}

// Every byte of the data belongs to one tensor.
void check_cover(const std::vector<Entry>& entries, std::uint64_t data_bytes, bool may_be_cut,
                 const std::string& path) {
  std::vector<const Entry*> by_offset;
  by_offset.reserve(entries.size());
  for (const Entry& entry : entries) by_offset.push_back(&entry);
  std::sort(by_offset.begin(), by_offset.end(), [](const Entry* a, const Entry* b) {
    return std::pair(a->begin, a->end) < std::pair(b->begin, b->end);
  });
  std::uint64_t covered = 0;
  for (const Entry* entry : by_offset) {
    if (entry->begin < covered)
      fail(path, ": tensor ", shown(entry->info.name), " begins at byte ", entry->begin,
           " of the data, inside another that ends at ", covered, "; tensors may not overlap");
    if (entry->begin > covered)
      fail(path, ": bytes ", covered, " to ", entry->begin, " of the data, before tensor ",
           shown(entry->info.name), ", belong to no tensor; the format allows no holes");
    covered = entry->end;
  }
  if (covered != data_bytes && !(may_be_cut && covered > data_bytes))
    fail(path, ": ", data_bytes - covered, " bytes follow the last tensor; the format allows none");
}

}  // namespace

Safetensors::Safetensors(const std::string& path, bool may_be_cut) : path_(path), file_(path) {
  const std::span<const std::byte> file = file_.bytes();
  const std::string_view header = header_of(file, path);
  HeaderReader reader(header, path);
  reader.read();
  const std::span<const std::byte> data = file.subspan(kLengthBytes + header.size());
  check_names(reader.entries, path);
  for (const Entry& entry : reader.entries) check_size(entry, data.size(), may_be_cut, path);
  check_cover(reader.entries, data.size(), may_be_cut, path);
  header_ = file.first(kLengthBytes + header.size());
  metadata_ = std::move(reader.metadata);
  tensors_.reserve(reader.entries.size());
  for (Entry& entry : reader.entries)
    tensors_.push_back({std::move(entry.info), entry.end > data.size()
                                                   ? std::span<const std::byte>()
                                                   : data.subspan(entry.begin, entry.end - entry.begin)});
}

const StoredTensor* Safetensors::find(std::string_view name) const {
  const auto found =
      std::lower_bound(tensors_.begin(), tensors_.end(), name,
                       [](const StoredTensor& tensor, std::string_view key) { return tensor.name < key; });
  return found != tensors_.end() && found->name == name ? &*found : nullptr;
}

const StoredTensor& Safetensors::at(std::string_view name) const {
  if (const StoredTensor* const found = find(name)) return *found;
  constexpr std::size_t kNamed = 5;
  std::string some;
  for (std::size_t i = 0; i < std::min(kNamed, tensors_.size()); ++i)
    some += (i == 0 ? "" : ", ") + shown(tensors_[i].name);
  fail(path_, " has no tensor ", shown(name), "; it has ", tensors_.size(), some.empty() ? "" : ": ", some,
       tensors_.size() > kNamed ? ", ..." : "");
}

// ---- Writing ----

namespace {

std::vector<TensorInfo> checked(std::vector<TensorInfo> tensors) {
  std::vector<std::string_view> names;
  for (const TensorInfo& tensor : tensors) {
    tensor.bytes();
    if (tensor.shape.size() > kMaxDimensions)
      fail("tensor ", shown(tensor.name), ": shape has more than ", kMaxDimensions, " dimensions");
    if (tensor.name == kMetadataKey) fail("no tensor may be called __metadata__: the format keeps that name");
    names.push_back(tensor.name);
  }
  std::sort(names.begin(), names.end());
  if (const auto twice = std::adjacent_find(names.begin(), names.end()); twice != names.end())
    fail("two tensors are called ", shown(*twice), "; each needs a name of its own");
  return tensors;
}

// The largest elements first: every size is a power of two, so each tensor begins at a multiple of its own.
std::vector<std::size_t> aligned_order(const std::vector<TensorInfo>& tensors) {
  std::vector<std::size_t> order(tensors.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
    return bytes_of(tensors[a].dtype) > bytes_of(tensors[b].dtype);
  });
  return order;
}

std::string metadata_json(const Metadata& metadata) {
  std::vector<JsonMember> members;
  for (const auto& [key, value] : metadata) members.push_back({key, json_text(value)});
  return json_object(members);
}

}  // namespace

SafetensorsWriter::SafetensorsWriter(const std::string& path, std::vector<TensorInfo> tensors,
                                     const Metadata& metadata)
    : tensors_(checked(std::move(tensors))), next_(tensors_.size()), end_(tensors_.size()), file_(path) {
  std::vector<JsonMember> entries;
  if (!metadata.empty()) entries.push_back({kMetadataKey, metadata_json(metadata)});
  std::uint64_t offset = 0;
  for (const std::size_t i : aligned_order(tensors_)) {
    const TensorInfo& tensor = tensors_[i];
    next_[i] = offset;
    if (__builtin_add_overflow(offset, static_cast<std::uint64_t>(tensor.bytes()), &offset) ||
        offset > INT64_MAX / 2)
      fail("the tensors of ", path, " together are larger than any file can be");
    end_[i] = offset;
    entries.push_back(
        {tensor.name, json_object({{"dtype", json_text(name_of(tensor.dtype))},
                                   {"shape", json_numbers(tensor.shape)},
                                   {"data_offsets", json_numbers({static_cast<std::int64_t>(next_[i]),
                                                                  static_cast<std::int64_t>(end_[i])})}})});
  }
  std::string header = json_object(entries);
  header.append((kAlignment - (kLengthBytes + header.size()) % kAlignment) % kAlignment, ' ');
  if (header.size() > kMaxHeader)
    fail("the header of ", path, " would take ", header.size(), " bytes, and the format's limit is ",
         kMaxHeader, "; write several files");
  for (std::size_t i = 0; i < kLengthBytes; ++i)
    header_.push_back(static_cast<char>(header.size() >> (8 * i) & 0xff));
  header_ += header;
  file_.write(0, std::as_bytes(std::span(header_)));
  for (std::size_t i = 0; i < tensors_.size(); ++i) {
    next_[i] += header_.size();
    end_[i] += header_.size();
  }
  bytes_ = header_.size() + offset;
}

void SafetensorsWriter::write(std::size_t tensor, std::span<const std::byte> piece) {
  if (tensor >= tensors_.size()) fail("there is no tensor ", tensor, " in this file of ", tensors_.size());
  if (piece.size() > end_[tensor] - next_[tensor])
    fail("tensor ", shown(tensors_[tensor].name), " takes ", tensors_[tensor].bytes(), " bytes, of which ",
         end_[tensor] - next_[tensor], " are missing, but ", piece.size(), " more were given");
  file_.write(next_[tensor], piece);
  next_[tensor] += piece.size();
}

void SafetensorsWriter::finish() {
  for (std::size_t i = 0; i < tensors_.size(); ++i)
    if (next_[i] != end_[i])
      fail("tensor ", shown(tensors_[i].name), " lacks ", end_[i] - next_[i], " of its ", tensors_[i].bytes(),
           " bytes; write them before finishing");
  file_.finish();
}

}  // namespace scruple::io
