// Safetensors files: named tensors behind a JSON header. Format: https://github.com/huggingface/safetensors
//
//   8 bytes    N, little endian
//   N bytes    {"__metadata__": {"key": "value"},
//               "name": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}}
//   the rest   the tensors, little endian, rows first, without holes
//
// The reader refuses whatever it cannot account for, byte by byte; the writer writes nothing that a strict
// reader could refuse. Problems are thrown as std::runtime_error.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "io/file.h"

namespace scruple::io {

// Every type of the format whose elements are whole bytes; F4, F6_E2M3 and F6_E3M2 are refused by name.
enum class Dtype : std::uint8_t {
  boolean,
  u8,
  i8,
  f8_e5m2,
  f8_e4m3,
  f8_e8m0,
  f8_e4m3fnuz,
  f8_e5m2fnuz,
  i16,
  u16,
  f16,
  bf16,
  i32,
  u32,
  f32,
  c64,
  f64,
  i64,
  u64
};

std::optional<Dtype> dtype_named(std::string_view name);
const char* name_of(Dtype dtype);  // as the format spells it: "F8_E4M3"
std::int64_t bytes_of(Dtype dtype);

struct TensorInfo {
  std::string name;
  Dtype dtype;
  std::vector<std::int64_t> shape;  // {}: one value; any 0: none

  std::int64_t bytes() const;  // throws where it does not fit 63 bits
};

struct StoredTensor : TensorInfo {
  // In the mapped file. Aligned to its element in files that the writer below or the official library
  // wrote; others may not be: copy, rather than cast.
  std::span<const std::byte> data;
};

using Metadata = std::map<std::string, std::string>;

class Safetensors {
 public:
  // Maps the file and checks all of its header; the data is not touched. With may_be_cut, for those who want the header
  // alone, data may be missing at the end: what lacks some has none.
  explicit Safetensors(const std::string& path, bool may_be_cut = false);

  const std::string& path() const { return path_; }
  std::size_t bytes() const { return file_.bytes().size(); }
  std::span<const std::byte> header() const { return header_; }  // its length included
  const Metadata& metadata() const { return metadata_; }
  const std::vector<StoredTensor>& tensors() const { return tensors_; }  // by name
  const StoredTensor* find(std::string_view name) const;                 // null where there is none
  const StoredTensor& at(std::string_view name) const;  // throws, and names some that are there
  // Copies from one of tensors(), as MappedFile::read does.
  void read(const StoredTensor& tensor, std::uint64_t first, std::span<std::byte> to) const {
    file_.read(static_cast<std::uint64_t>(tensor.data.data() - file_.bytes().data()) + first, to);
  }

 private:
  std::string path_;
  MappedFile file_;
  std::span<const std::byte> header_;
  Metadata metadata_;
  std::vector<StoredTensor> tensors_;
};

// Writes a file in pieces, with no memory of its own beyond the header. In the file the tensors stand by
// size of element, largest first, and else in the order given, so that each is aligned to its element; data
// begins at a multiple of 64. Callers may write the tensors in any order, each from its first byte to its
// last.
class SafetensorsWriter {
 public:
  SafetensorsWriter(const std::string& path, std::vector<TensorInfo> tensors, const Metadata& metadata = {});

  // The next bytes of tensors[tensor]; little endian.
  void write(std::size_t tensor, std::span<const std::byte> piece);
  // Refuses while a tensor lacks bytes. The file appears under its name here; without this call, never.
  void finish();

  const std::string& header() const { return header_; }  // its length included
  std::uint64_t bytes() const { return bytes_; }         // of the whole file

 private:
  std::vector<TensorInfo> tensors_;
  std::vector<std::uint64_t> next_,
      end_;  // where in the file each tensor's next byte goes, and where it ends
  std::string header_;
  std::uint64_t bytes_ = 0;
  NewFile file_;
};

}  // namespace scruple::io
