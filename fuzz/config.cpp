// Fuzzes what reads a model's config.json and the index of its weights, which may only throw std::runtime_error.
// fuzz/run.sh builds and runs it.
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <optional>
#include <stdexcept>

#include "train/model/families/families.h"
#include "train/model/files.h"

namespace {

using namespace scruple::train;

// Nothing where it is refused, with the file and in few words.
template <class Read>
auto read(const Read& reader) -> std::optional<decltype(reader())> {
  try {
    return reader();
  } catch (const std::runtime_error& error) {
    const std::string_view words = error.what();
    if (!words.starts_with("fuzz.json") || words.size() > 1000) std::abort();
    return {};
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::string text(reinterpret_cast<const char*>(data), size), path = "fuzz.json";
  const auto planned = read([&] { return describe_tensors(text, path); });
  const auto trained = read([&] { return describe(text, path); });
  if (trained && !planned) std::abort();
  if (planned && planned->layers <= 64) {  // what is listed grows with them, and not with the file
    const std::int64_t count = parameter_count(*planned);
    if (count < 1 || (trained && parameter_count(*trained) != count)) std::abort();
  }
  if (const auto shards = read([&] { return shards_in(text, path); }))
    for (const std::string& name : *shards)
      if (name.empty() || name.find('/') != name.npos) std::abort();
  return 0;
}
