// The files that a model's weights are in: one, or shards that an index names.
#pragma once

#include <cstddef>
#include <set>
#include <string>
#include <string_view>
#include <vector>

namespace scruple::train {

inline constexpr const char *kWeightsName = "model.safetensors", *kIndexName = "model.safetensors.index.json";
inline constexpr std::size_t kMaxIndex = std::size_t{1} << 28;  // bytes; that of 400 B parameters has 200 KB

// The names of the shards in the text of an index, {"weight_map": {tensor: file}}, each once; all of them beside it.
// `path` names the index in messages. Throws std::runtime_error.
std::set<std::string> shards_in(std::string_view index, const std::string& path);

// The paths of a model's files: of the folder that it is in, or of its index. None: the folder has neither.
std::vector<std::string> weight_files(const std::string& path);

}  // namespace scruple::train
