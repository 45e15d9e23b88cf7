// A checkpoint to be written and read: its manifest, and planes whose bytes follow from their names.
#pragma once

#include <string>
#include <vector>

#include "io/checkpoint.h"
#include "io/crc32.h"
#include "tests/files.h"

namespace scruple_tests {

namespace io = scruple::io;

// Sizes around blocks; packed codes, scales, extra bits, no elements. The planes are written out here, so that what
// the library makes of a format's name is compared with them.
inline io::Manifest sample(const char* library = "0.1.0") {
  io::Manifest manifest;
  manifest.library = library;
  manifest.recipe = "a \"recipe\"";
  manifest.step = 12;
  manifest.groups = {{"adamw", ~std::uint64_t{0}, {{"lr", 1e-4}, {"eps", 1e-8}}}, {"lion", 0, {}}};
  manifest.loss_scale = io::LossScale{65536, 2, 0.5, 2000, 17};
  manifest.trainer = {{"--set", "a=1\nb=2"}, {"\xc3\xa9", ""}, {"zeros", std::string("a\0b", 3)}};
  std::uint32_t id = 0;
  for (const std::vector<std::int64_t>& shape :
       std::vector<std::vector<std::int64_t>>{{5, 128}, {3}, {}, {0, 4}, {129}, {2, 64}, {4, 100, 3}}) {
    io::TensorState tensor;
    tensor.name = "t" + std::to_string(id);
    tensor.shape = shape;
    tensor.group = id % 2;
    tensor.id = id++;
    tensor.step = 13;
    if (id == 2) tensor.adagc_norm = 0.1;
    const std::int64_t n = tensor.elements(), packed = (n * 12 + 7) / 8;
    const std::int64_t groups = (n + 63) / 64;
    tensor.arrays = {{"weight",
                      "bf16+8",
                      "nearest",
                      {{"codes", io::Dtype::bf16, shape, 256, {}}, {"extra", io::Dtype::u8, {n}, 128, {}}}},
                     {"exp_avg",
                      "int12",
                      "stochastic",
                      {{"codes", io::Dtype::u8, {packed}, 192, {}},
                       {"scale", io::Dtype::f32, n <= 1 ? shape : std::vector{groups}, 8, {}}}}};
    manifest.tensors.push_back(tensor);
  }
  return manifest;
}

// Bytes that follow from the name.
inline std::string data_of(const io::TensorState& tensor, const io::Array& array, const io::Plane& plane) {
  std::string data(static_cast<std::size_t>(plane.bytes()), '\0');
  std::uint32_t state = io::crc32(io::plane_name(tensor, array, plane));
  for (char& byte : data) byte = static_cast<char>((state = state * 1664525u + 1013904223u) >> 24);
  return data;
}

inline void write_by_io(const std::string& folder, const io::Manifest& manifest, std::size_t files = 1) {
  std::string data;
  io::write_checkpoint(folder, manifest, files, [&](std::size_t t, std::size_t a, std::size_t p) {
    const io::TensorState& tensor = manifest.tensors[t];
    data = data_of(tensor, tensor.arrays[a], tensor.arrays[a].planes[p]);
    return bytes_of(data);
  });
}

}  // namespace scruple_tests
