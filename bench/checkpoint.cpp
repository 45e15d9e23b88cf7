// Saving and loading a checkpoint of 1 GB against a plain copy of as many bytes on the same disk: write and flush,
// read, and both again with the page cache dropped where the system lets us.
// usage: checkpoint_bench FOLDER [MEBIBYTES [ROUNDS]]
#include "io/checkpoint.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <string>
#include <vector>

namespace {

using namespace scruple::io;

// Nothing else is on its way to the disk when it begins.
double seconds(const std::function<void()>& work) {
  sync();
  const auto before = std::chrono::steady_clock::now();
  work();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - before).count();
}

// The planes of AdamW in the recipe `scruple`, in tensors of 4 Mi elements.
Manifest manifest_of(std::int64_t bytes) {
  constexpr std::int64_t kElements = std::int64_t{1} << 22, kPerTensor = kElements * 5 + kElements / 64 * 8;
  Manifest manifest;
  manifest.library = "bench";
  manifest.groups = {{"adamw", 1, {}}};
  for (std::int64_t i = 0; i < std::max<std::int64_t>(bytes / kPerTensor, 1); ++i) {
    TensorState tensor;
    tensor.name = "layer." + std::to_string(i) + ".weight";
    tensor.shape = {kElements};
    const auto moment = [](const char* name) {
      return Array{
          name,
          "companded8",
          "nearest",
          {{"codes", Dtype::u8, {kElements}, 128, {}}, {"scale", Dtype::f32, {kElements / 64}, 8, {}}}};
    };
    tensor.arrays = {
        {"weight",
         "bf16+8",
         "nearest",
         {{"codes", Dtype::bf16, {kElements}, 256, {}}, {"extra", Dtype::u8, {kElements}, 128, {}}}},
        moment("exp_avg"),
        moment("exp_avg_sq")};
    manifest.tensors.push_back(tensor);
  }
  return manifest;
}

// The kernel forgets what it has of a file that is on the disk.
void forget(const std::string& path) {
  const int file = open(path.c_str(), O_RDONLY);
  if (file < 0) return;
  fsync(file);
  posix_fadvise(file, 0, 0, POSIX_FADV_DONTNEED);
  close(file);
}

void copy_and_flush(const std::string& from, const std::string& to) {
  if (std::system(("cp '" + from + "' '" + to + "' && sync '" + to + "'").c_str()) != 0) std::exit(1);
}

void load(const std::string& folder, std::vector<std::byte>& memory) {
  const Checkpoint checkpoint(folder);
  std::size_t at = 0;
  for (const TensorState& tensor : checkpoint.manifest().tensors)
    for (const Array& array : tensor.arrays)
      for (const Plane& plane : array.planes) {
        const auto bytes = static_cast<std::size_t>(plane.bytes());
        checkpoint.read(tensor, array, plane, std::span(memory).subspan(at, bytes));
        at += bytes;
      }
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 2) {
    std::fprintf(stderr, "usage: %s FOLDER [MEBIBYTES [ROUNDS]]\n", argv[0]);
    return 2;
  }
  const std::string folder = std::string(argv[1]) + "/checkpoint", copy = std::string(argv[1]) + "/copy";
  const std::string file = folder + "/model.safetensors";
  const std::int64_t bytes = (argc > 2 ? std::atoll(argv[2]) : 1024) << 20;
  const Manifest manifest = manifest_of(bytes);
  std::vector<std::byte> memory(static_cast<std::size_t>(bytes) + (1u << 23));
  for (std::size_t i = 0; i < memory.size(); ++i) memory[i] = static_cast<std::byte>(i * 2654435761u >> 13);
  std::printf("GB/s: copy, save, load | load and copy from the disk\n");
  for (int round = 0; round < (argc > 3 ? std::atoi(argv[3]) : 5); ++round) {
    std::filesystem::remove_all(folder);
    const double save = seconds([&] {
      write_checkpoint(folder, manifest, 1, [&](std::size_t t, std::size_t a, std::size_t p) {
        return std::span<const std::byte>(memory).first(
            static_cast<std::size_t>(manifest.tensors[t].arrays[a].planes[p].bytes()));
      });
    });
    const double size = static_cast<double>(std::filesystem::file_size(file)) * 1e-9;
    std::filesystem::remove(copy);
    const double plain = seconds([&] { copy_and_flush(file, copy); });
    const double warm = seconds([&] { load(folder, memory); });
    forget(file);
    const double cold = seconds([&] { load(folder, memory); });
    forget(file);
    std::filesystem::remove(copy);
    const double cold_copy = seconds([&] { copy_and_flush(file, copy); });
    std::printf("%.2f, %.2f (%.2f of copy), %.2f (%.2f) | %.2f (%.2f), %.2f\n", size / plain, size / save,
                plain / save, size / warm, plain / warm, size / cold, cold_copy / cold, size / cold_copy);
  }
  std::filesystem::remove_all(folder);
  std::filesystem::remove(copy);
}
