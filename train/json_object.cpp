#include "train/json_object.h"

#include <algorithm>

#include "io/file.h"
#include "io/json.h"

namespace scruple::train {

using nlohmann::json;

// Not ordered_json: that looks at every key before it adds one, which takes minutes where a hostile file has many.
json json_object(const std::string& path, std::string_view text) {
  const auto limit_depth = [&](int depth, json::parse_event_t, const json&) {
    if (depth > io::kMaxJsonDepth)
      io::fail(path, " is nested more than ", io::kMaxJsonDepth,
               " deep, as no model's file is; fetch it again");
    return true;
  };
  try {
    json root = json::parse(text, limit_depth);
    if (!root.is_object()) io::fail(path, " is not a JSON object; fetch it again");
    return root;
  } catch (const json::parse_error& error) {
    const std::string_view before = text.substr(0, std::min(error.byte, text.size()));
    io::fail(path, " is no JSON from byte ", error.byte, " on (line ",
             std::count(before.begin(), before.end(), '\n') + 1, " of it",
             error.byte > text.size() ? ", where it ends" : "",
             "); was it cut, or not downloaded? Fetch it again");
  } catch (const json::out_of_range&) {  // nlohmann's own words repeat the number, however long it is
    io::fail(path, " has a number that is out of range");
  }
}

}  // namespace scruple::train
