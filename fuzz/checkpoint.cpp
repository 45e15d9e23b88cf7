// Fuzzes whatever reads files that others may have made: safetensors files, manifests, and whole checkpoints. They
// may only throw std::runtime_error. fuzz/run.sh builds and runs it.
#include "io/checkpoint.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <stdexcept>

#include "io/crc32.h"
#include "io/file.h"

namespace {

using namespace scruple::io;

// A file in memory: tens of thousands a second are read.
class MemoryFile {
 public:
  explicit MemoryFile(std::string_view content) : descriptor_(memfd_create("fuzz", 0)) {
    if (descriptor_ < 0 ||
        write(descriptor_, content.data(), content.size()) != static_cast<ssize_t>(content.size()))
      std::abort();
  }
  ~MemoryFile() { close(descriptor_); }
  MemoryFile(const MemoryFile&) = delete;
  MemoryFile& operator=(const MemoryFile&) = delete;
  std::string path() const { return "/proc/self/fd/" + std::to_string(descriptor_); }

 private:
  int descriptor_;
};

// A name, a dtype and a number that the reader vouches for can be used.
void use(const Safetensors& file) {
  std::size_t sum = 0;
  for (const StoredTensor& tensor : file.tensors()) {
    if (static_cast<std::int64_t>(tensor.data.size()) != tensor.bytes()) std::abort();
    if (file.find(tensor.name) != &tensor) std::abort();
    sum += tensor.data.size();
  }
  if (sum + file.header().size() != file.bytes()) std::abort();
}

// The checksum is made right, so that what is behind it is reached.
std::string sealed(std::string text) {
  constexpr std::string_view kKey = "\"crc32\":\"";
  const std::size_t key = text.find(kKey);
  if (key != text.npos && text.size() - key >= kKey.size() + 8)
    text.replace(key + kKey.size(), 8, hex(manifest_crc(text)));
  return text;
}

void read_manifest(const std::string& text) {
  const Manifest manifest = parse_manifest(text, "manifest.json");
  // What was accepted is written and accepted again.
  const std::string again = to_text(manifest);
  if (to_text(parse_manifest(again, "again")) != again) std::abort();
}

// A manifest and a file of one folder: the lengths and checksums that tie them together are made right where the
// manifest has them in their places.
void read_checkpoint(std::string manifest, std::string_view file) {
  static const std::string folder = [] {
    std::string name = std::filesystem::temp_directory_path() / "scruple-fuzz-XXXXXX";
    if (mkdtemp(name.data()) == nullptr) std::abort();
    return name;
  }();
  std::uint64_t length = 0;
  for (std::size_t i = 0; i < 8 && i < file.size(); ++i)
    length |= static_cast<std::uint64_t>(static_cast<unsigned char>(file[i])) << (8 * i);
  constexpr std::string_view kFile = "\"bytes\":", kHeader = "\"header_crc32\":\"";
  const std::size_t at = manifest.find(kFile), crc = manifest.find(kHeader);
  if (crc != manifest.npos && manifest.size() - crc >= kHeader.size() + 8 && length <= file.size())
    manifest.replace(crc + kHeader.size(), 8, hex(crc32(file.substr(0, 8 + length))));
  if (at != manifest.npos) {
    const std::size_t begin = at + kFile.size(), end = manifest.find_first_not_of("0123456789", begin);
    if (end != manifest.npos) manifest.replace(begin, end - begin, std::to_string(file.size()));
  }
  const MemoryFile model(file), text(sealed(manifest));
  for (const auto& [name, target] :
       {std::pair("/manifest.json", text.path()), {"/model.safetensors", model.path()}}) {
    unlink((folder + name).c_str());
    if (symlink(target.c_str(), (folder + name).c_str()) != 0) std::abort();
  }
  const Checkpoint checkpoint(folder);
  for (const TensorState& tensor : checkpoint.manifest().tensors)
    for (const Array& array : tensor.arrays)
      for (const Plane& plane : array.planes) {
        try {
          checkpoint.verify(tensor, array, plane);
        } catch (const std::runtime_error&) {  // a checksum
        }
        std::string memory(static_cast<std::size_t>(plane.bytes()), '\0');
        try {
          checkpoint.read(tensor, array, plane, std::as_writable_bytes(std::span(memory)));
        } catch (const std::runtime_error&) {
        }
      }
}

}  // namespace

// Good files to start from, small ones: SCRUPLE_FUZZ_SEEDS=FOLDER writes them there and ends.
extern "C" int LLVMFuzzerInitialize(int*, char***) {
  const char* const to = std::getenv("SCRUPLE_FUZZ_SEEDS");
  if (to == nullptr) return 0;
  Manifest manifest;
  manifest.library = "0.1.0";
  manifest.recipe = "scruple";
  manifest.groups = {{"adamw", 1, {{"lr", 0.1}}}};
  manifest.loss_scale = LossScale{65536, 2, 0.5, 2000, 0};
  manifest.trainer = {{"k", "v"}};
  TensorState tensor;
  tensor.name = "w";
  tensor.shape = {3, 50};
  tensor.adagc_norm = 0.5;
  tensor.arrays = {
      {"weight",
       "bf16+8",
       "nearest",
       {{"codes", Dtype::bf16, {3, 50}, 256, {}}, {"extra", Dtype::u8, {150}, 128, {}}}},
      {"exp_avg", "nf4", "nearest", {{"codes", Dtype::u8, {75}, 64, {}}, {"scale", Dtype::f32, {3}, 8, {}}}}};
  manifest.tensors = {tensor};
  const std::string folder = to, memory(300, 'x');
  write_checkpoint(folder + "/seed", manifest, 1, [&](std::size_t, std::size_t a, std::size_t p) {
    const auto bytes = static_cast<std::size_t>(tensor.arrays[a].planes[p].bytes());
    return std::as_bytes(std::span(memory)).first(bytes);
  });
  const std::string text = read_text(folder + "/seed/manifest.json", 1 << 20);
  const std::string file = read_text(folder + "/seed/model.safetensors", 1 << 20);
  write_text(folder + "/file", std::string(1, '\0') + file);
  write_text(folder + "/manifest", "\1" + text);
  write_text(folder + "/sealed", "\2" + text);
  write_text(folder + "/checkpoint", "\3" + text + std::string(1, '\0') + file);
  remove_folder(folder + "/seed");
  std::exit(0);
}

// The first byte chooses the reader. For checkpoints the manifest ends at the first zero byte.
extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  if (size == 0) return 0;
  const std::string_view input(reinterpret_cast<const char*>(data) + 1, size - 1);
  try {
    switch (data[0] % 4) {
      case 0: use(Safetensors(MemoryFile(input).path())); break;
      case 1: read_manifest(std::string(input)); break;
      case 2: read_manifest(sealed(std::string(input))); break;
      default: {
        const std::size_t end = input.find('\0');
        if (end == input.npos) return 0;
        read_checkpoint(std::string(input.substr(0, end)), input.substr(end + 1));
      }
    }
  } catch (const std::runtime_error&) {  // refused, with the reason
  }
  return 0;
}
