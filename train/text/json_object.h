// JSON files of a model's folder, which may be cut, hostile, or not what their names say.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

namespace scruple::train {

// Throws std::runtime_error with the byte and the line from which on it is no JSON.
[[noreturn]] void fail_as_no_json(const std::string& path, std::string_view text, std::size_t byte);
// The object that the file `path`, whose text is given, holds.
nlohmann::ordered_json json_object(const std::string& path, std::string_view text);

}  // namespace scruple::train
