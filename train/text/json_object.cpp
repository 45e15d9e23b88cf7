#include "train/text/json_object.h"

#include <algorithm>

#include "io/file.h"
#include "io/json.h"

namespace scruple::train {

using nlohmann::ordered_json;

void fail_as_no_json(const std::string& path, std::string_view text, std::size_t byte) {
  const std::string_view before = text.substr(0, std::min(byte, text.size()));
  io::fail(path, " is no JSON from byte ", byte, " on (line ",
           std::count(before.begin(), before.end(), '\n') + 1, " of it",
           byte > text.size() ? ", where it ends" : "", "); was it cut, or not downloaded? Fetch it again");
}

ordered_json json_object(const std::string& path, std::string_view text) {
  const auto limit_depth = [&](int depth, ordered_json::parse_event_t, const ordered_json&) {
    if (depth > io::kMaxJsonDepth)
      io::fail(path, " is nested more than ", io::kMaxJsonDepth,
               " deep, as no model's file is; fetch it again");
    return true;
  };
  try {
    ordered_json json = ordered_json::parse(text, limit_depth);
    if (!json.is_object()) io::fail(path, " is not a JSON object; fetch it again");
    return json;
  } catch (const ordered_json::parse_error& error) {
    fail_as_no_json(path, text, error.byte);
  } catch (const ordered_json::out_of_range&) {  // nlohmann's own words repeat the number, however long it is
    io::fail(path, " has a number that is out of range");
  }
}

}  // namespace scruple::train
