// JSON files of a model's folder, which may be cut, hostile, or not what their names say.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

namespace scruple::train {

// The object that the file `path`, whose text is given, holds. Throws std::runtime_error with the byte and the line
// from which on it is no JSON.
nlohmann::json json_object(const std::string& path, std::string_view text);

}  // namespace scruple::train
