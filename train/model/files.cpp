#include "train/model/files.h"

#include <filesystem>

#include "io/file.h"
#include "io/json.h"
#include "train/json_object.h"

namespace scruple::train {

namespace fs = std::filesystem;
using io::fail;

std::set<std::string> shards_in(std::string_view index, const std::string& path) {
  const nlohmann::json root = json_object(path, index);
  const auto map = root.find("weight_map");
  if (map == root.end() || !map->is_object() || map->empty())
    fail(path, " has no \"weight_map\", an object that names the file of each tensor");
  std::set<std::string> files;
  for (const auto& [name, file] : map->items()) {
    const std::string found = file.is_string() ? file.get<std::string>() : "";
    if (found.empty() || found.find('/') != std::string::npos || found.starts_with("."))
      fail(path, ": ", io::shown(name), " is in ", file.dump().substr(0, 80),
           "; it must be the name of a file in the same folder");
    files.insert(found);
  }
  return files;
}

std::vector<std::string> weight_files(const std::string& path) {
  std::error_code ignored;
  const bool is_folder = fs::is_directory(path, ignored);
  const std::string folder = is_folder ? path : fs::path(path).parent_path().string();
  const auto beside = [&](const std::string& name) { return folder.empty() ? name : folder + "/" + name; };
  if (is_folder && fs::exists(beside(kWeightsName), ignored)) return {beside(kWeightsName)};
  const std::string index = is_folder ? beside(kIndexName) : path;
  if (is_folder && !fs::exists(index, ignored)) return {};
  std::vector<std::string> files;
  for (const std::string& name : shards_in(io::read_text(index, kMaxIndex), index)) {
    if (!fs::exists(beside(name), ignored))
      fail(index, " names ", name, ", which is not there; fetch that file too");
    files.push_back(beside(name));
  }
  return files;
}

}  // namespace scruple::train
