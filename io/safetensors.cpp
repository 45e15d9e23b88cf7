#include "io/safetensors.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <nlohmann/json.hpp>
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

std::string written(const std::vector<std::int64_t>& shape) {
  std::string text;
  for (const std::int64_t n : shape) text += (text.empty() ? "" : ",") + std::to_string(n);
  return "[" + text + "]";
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
    fail("tensor ", shown(name), ": ", name_of(dtype), " of shape ", written(shape),
         " has no size that fits 63 bits; every dimension must be at least 0 and their product smaller");
  return *bytes;
}

// ---- Reading ----

namespace {

struct Entry {
  TensorInfo info;
  std::uint64_t begin, end;  // in the data
};

// Takes the header's JSON event by event, so that keys that stand twice are seen, nothing is kept that does
// not belong and nesting is refused at the third level.
class HeaderReader : public nlohmann::json_sax<nlohmann::json> {
 public:
  explicit HeaderReader(const std::string& path) : path_(path) {}

  std::vector<Entry> entries;
  Metadata metadata;

  bool null() override { wrong("null"); }
  bool boolean(bool) override { wrong("a boolean"); }
  bool number_integer(number_integer_t value) override {
    wrong("the negative number " + std::to_string(value));
  }
  bool number_float(number_float_t, const string_t& text) override {
    wrong("the number " + text.substr(0, 40));
  }
  bool binary(binary_t&) override { wrong("binary data"); }
  bool number_unsigned(number_unsigned_t value) override;
  bool string(string_t& value) override;
  bool start_object(std::size_t) override;
  bool key(string_t& value) override;
  bool end_object() override;
  bool start_array(std::size_t) override;
  bool end_array() override;
  bool parse_error(std::size_t position, const std::string&,
                   const nlohmann::detail::exception& error) override {
    refuse("the header is not valid JSON at its byte ", position, " (",
           std::string(error.what()).substr(0, 200), ")");
  }

 private:
  enum class Place { outside, top, metadata, entry, shape, offsets };
  enum Field { dtype, shape, data_offsets, kFields };
  static constexpr const char* kFieldNames[kFields] = {"dtype", "shape", "data_offsets"};

  template <class... Parts>
  [[noreturn]] void refuse(const Parts&... parts) const {
    fail(path_, ": ", parts...);
  }
  [[noreturn]] void wrong(const std::string& found) const;

  const std::string& path_;
  Place place_ = Place::outside;
  std::string name_, key_;  // of the entry; within the metadata
  bool has_metadata_ = false;
  Field field_ = kFields;
  std::array<bool, kFields> seen_{};
  TensorInfo info_{};
  std::vector<std::uint64_t> offsets_;
};

// A value of a kind that has no business where it stands.
void HeaderReader::wrong(const std::string& found) const {
  switch (place_) {
    case Place::outside: refuse("the header is ", found, ", not an object");
    case Place::top:
      if (name_ == kMetadataKey) refuse("__metadata__ is ", found, "; it must be an object of strings");
      refuse("tensor ", shown(name_), " is ", found,
             "; it must be an object with dtype, shape and data_offsets");
    case Place::metadata:
      refuse("__metadata__: ", shown(key_), " is ", found, "; only strings are allowed there");
    case Place::entry:
      refuse("tensor ", shown(name_), ": ", kFieldNames[field_], " is ", found, "; it must be ",
             field_ == dtype ? "a string" : "an array of integers");
    case Place::shape:
    case Place::offsets:
      refuse("tensor ", shown(name_), ": ", kFieldNames[field_], " holds ", found,
             "; only integers from 0 to 2^63 - 1 are allowed there");
  }
  refuse("the header is broken");
}

bool HeaderReader::number_unsigned(number_unsigned_t value) {
  if (place_ != Place::shape && place_ != Place::offsets) wrong("the number " + std::to_string(value));
  if (value > INT64_MAX) wrong("the number " + std::to_string(value));
  if (place_ == Place::shape) {
    if (info_.shape.size() == kMaxDimensions)
      refuse("tensor ", shown(name_), ": shape has more than ", kMaxDimensions, " dimensions");
    info_.shape.push_back(static_cast<std::int64_t>(value));
  } else {
    if (offsets_.size() == 2) refuse("tensor ", shown(name_), ": data_offsets has more than two numbers");
    offsets_.push_back(value);
  }
  return true;
}

bool HeaderReader::string(string_t& value) {
  if (place_ == Place::metadata) {
    metadata.emplace(std::move(key_), std::move(value));
    return true;
  }
  if (place_ != Place::entry || field_ != dtype) wrong("the string " + shown(value));
  const std::optional<Dtype> known = dtype_named(value);
  if (!known)
    refuse("tensor ", shown(name_), ": dtype ", shown(value), " is not known; known are ", all_dtypes(),
           " (types of less than a byte, such as F4, are not)");
  info_.dtype = *known;
  return true;
}

bool HeaderReader::start_object(std::size_t) {
  if (place_ == Place::outside) {
    place_ = Place::top;
  } else if (place_ != Place::top) {
    wrong("an object");
  } else if (name_ == kMetadataKey) {
    if (std::exchange(has_metadata_, true)) refuse("__metadata__ stands twice in the header");
    place_ = Place::metadata;
  } else {
    place_ = Place::entry;
    seen_ = {};
    info_ = {};
    offsets_.clear();
  }
  return true;
}

bool HeaderReader::key(string_t& value) {
  if (place_ == Place::top) {
    name_ = std::move(value);
  } else if (place_ == Place::metadata) {
    key_ = std::move(value);
    if (metadata.contains(key_)) refuse("__metadata__: ", shown(key_), " stands twice");
  } else {
    const auto* const known = std::find(std::begin(kFieldNames), std::end(kFieldNames), value);
    if (known == std::end(kFieldNames))
      refuse("tensor ", shown(name_), " has a field ", shown(value),
             "; only dtype, shape and data_offsets are allowed");
    field_ = static_cast<Field>(known - std::begin(kFieldNames));
    if (std::exchange(seen_[field_], true)) refuse("tensor ", shown(name_), ": ", value, " stands twice");
  }
  return true;
}

bool HeaderReader::end_object() {
  if (place_ != Place::entry) {
    place_ = place_ == Place::metadata ? Place::top : Place::outside;
    return true;
  }
  for (int field = 0; field < kFields; ++field)
    if (!seen_[static_cast<std::size_t>(field)])
      refuse("tensor ", shown(name_), " has no ", kFieldNames[field],
             "; each needs dtype, shape and data_offsets");
  info_.name = std::move(name_);
  entries.push_back({std::move(info_), offsets_[0], offsets_[1]});
  place_ = Place::top;
  return true;
}

bool HeaderReader::start_array(std::size_t) {
  if (place_ != Place::entry || field_ == dtype) wrong("an array");
  place_ = field_ == shape ? Place::shape : Place::offsets;
  return true;
}

bool HeaderReader::end_array() {
  if (place_ == Place::offsets && offsets_.size() != 2)
    refuse("tensor ", shown(name_), ": data_offsets has ", offsets_.size(),
           " numbers; it must be [begin, end]");
  place_ = Place::entry;
  return true;
}

// The JSON text of a file's header.
std::string_view header_of(std::span<const std::byte> file, const std::string& path) {
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
  // The JSON parser takes a zero byte for the end of its input and would not look at what follows.
  if (const std::size_t zero = header.find('\0'); zero != header.npos)
    fail(path, ": the header has a zero byte at its byte ", zero, "; the file is damaged");
  return header;
}

void check_names(std::vector<Entry>& entries, const std::string& path) {
  std::sort(entries.begin(), entries.end(),
            [](const Entry& a, const Entry& b) { return a.info.name < b.info.name; });
  for (std::size_t i = 1; i < entries.size(); ++i)
    if (entries[i].info.name == entries[i - 1].info.name)
      fail(path, ": tensor ", shown(entries[i].info.name), " stands twice in the header");
}

void check_size(const Entry& entry, std::uint64_t data_bytes, const std::string& path) {
  const auto refuse = [&](const auto&... parts) {
    fail(path, ": tensor ", shown(entry.info.name), ": ", parts...);
  };
  const std::optional<std::int64_t> bytes = size_in_bytes(entry.info);
  if (!bytes) refuse("its shape ", written(entry.info.shape), " asks for more than 2^63 bytes");
  if (entry.begin > entry.end)
    refuse("data_offsets begin at ", entry.begin, " and end before, at ", entry.end);
  if (entry.end - entry.begin != static_cast<std::uint64_t>(*bytes))
    refuse(name_of(entry.info.dtype), " of shape ", written(entry.info.shape), " takes ", *bytes,
           " bytes, but data_offsets [", entry.begin, ", ", entry.end, "] hold ", entry.end - entry.begin);
  if (entry.end > data_bytes)
    refuse("data_offsets end at ", entry.end, ", but the file has only ", data_bytes,
           " bytes of data; it is cut short: copy or download it again");
}

// Every byte of the data belongs to one tensor.
void check_cover(const std::vector<Entry>& entries, std::uint64_t data_bytes, const std::string& path) {
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
  if (covered != data_bytes)
    fail(path, ": ", data_bytes - covered, " bytes follow the last tensor; the format allows none");
}

}  // namespace

Safetensors::Safetensors(const std::string& path) : path_(path), file_(path) {
  const std::span<const std::byte> file = file_.bytes();
  const std::string_view header = header_of(file, path);
  HeaderReader reader(path);
  nlohmann::json::sax_parse(header, &reader);
  const std::span<const std::byte> data = file.subspan(kLengthBytes + header.size());
  check_names(reader.entries, path);
  for (const Entry& entry : reader.entries) check_size(entry, data.size(), path);
  check_cover(reader.entries, data.size(), path);
  header_ = file.first(kLengthBytes + header.size());
  metadata_ = std::move(reader.metadata);
  tensors_.reserve(reader.entries.size());
  for (Entry& entry : reader.entries)
    tensors_.push_back({std::move(entry.info), data.subspan(entry.begin, entry.end - entry.begin)});
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
  std::string text;
  for (const auto& [key, value] : metadata)
    text += (text.empty() ? "" : ",") + json_text(key) + ":" + json_text(value);
  return json_text(kMetadataKey) + ":{" + text + "}";
}

}  // namespace

SafetensorsWriter::SafetensorsWriter(const std::string& path, std::vector<TensorInfo> tensors,
                                     const Metadata& metadata)
    : tensors_(checked(std::move(tensors))), next_(tensors_.size()), end_(tensors_.size()), file_(path) {
  std::string header = "{" + (metadata.empty() ? std::string() : metadata_json(metadata));
  std::uint64_t offset = 0;
  for (const std::size_t i : aligned_order(tensors_)) {
    const TensorInfo& tensor = tensors_[i];
    next_[i] = offset;
    if (__builtin_add_overflow(offset, static_cast<std::uint64_t>(tensor.bytes()), &offset) ||
        offset > INT64_MAX / 2)
      fail("the tensors of ", path, " together are larger than any file can be");
    end_[i] = offset;
    header += (header.size() == 1 ? "" : ",") + json_text(tensor.name) + ":{\"dtype\":\"" +
              name_of(tensor.dtype) + "\",\"shape\":" + written(tensor.shape) + ",\"data_offsets\":[" +
              std::to_string(next_[i]) + "," + std::to_string(end_[i]) + "]}";
  }
  header += "}";
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
