#include "train/text/vocabulary.h"

#include <filesystem>

#include "io/file.h"
#include "train/json_object.h"

namespace scruple::train {
namespace {

namespace fs = std::filesystem;
using io::fail;
using nlohmann::json;

constexpr std::size_t kMaxFile = std::size_t{1} << 28;  // bytes; as many as of a tokenizer.json

// A JSON object of the folder; empty where there is none.
json object_in(const std::string& folder, const char* name) {
  const fs::path path = fs::path(folder) / name;
  std::error_code ignored;
  if (!fs::exists(path, ignored)) return json::object();
  return json_object(path.string(), io::read_text(path.string(), kMaxFile));
}

// What the first file that has an eos_token_id gives: a number or several.
std::vector<Token> numbered_ends(const std::string& folder, const Tokenizer& tokenizer) {
  std::vector<Token> found;
  for (const char* name : {"generation_config.json", "config.json"}) {
    const json ids = object_in(folder, name).value("eos_token_id", json());
    for (const json& id : ids.is_array() ? ids : json::array({ids}))
      if (id.is_number_unsigned() && id.get<std::uint64_t>() < static_cast<std::uint64_t>(tokenizer.size()))
        found.push_back(static_cast<Token>(id.get<std::uint64_t>()));
    if (!found.empty()) break;
  }
  return found;
}

}  // namespace

void copy_tokenizer(const std::string& from, const std::string& to) {
  for (const char* name : kTokenizerFiles) {
    std::error_code error;
    const fs::path source = fs::path(from) / name, target = fs::path(to) / name;
    if (!fs::exists(source, error) || fs::exists(target, error)) continue;
    fs::copy_file(source, target, error);
    if (error) fail("cannot copy ", source.string(), " to ", target.string(), ": ", error.message());
  }
}

bool has_tokenizer(const std::string& folder) {
  std::error_code ignored;
  return fs::exists(fs::path(folder) / kTokenizerFiles[0], ignored);
}

std::optional<Token> end_token(const std::string& folder, const Tokenizer& tokenizer) {
  for (const char* name : {"tokenizer_config.json", "special_tokens_map.json"}) {
    const json root = object_in(folder, name);
    json token = root.value("eos_token", json());
    if (token.is_object()) token = json(token.value("content", json()));
    if (token.is_string())
      if (const auto found = tokenizer.find(token.get<std::string>())) return found;
  }
  const std::vector<Token> numbered = numbered_ends(folder, tokenizer);
  return numbered.empty() ? std::optional<Token>() : numbered.front();
}

std::vector<Token> stop_tokens(const std::string& folder, const Tokenizer& tokenizer) {
  std::vector<Token> stops = numbered_ends(folder, tokenizer);
  if (const auto end = end_token(folder, tokenizer)) stops.push_back(*end);
  return stops;
}

ChatTemplate chat_template(const std::string& folder, const std::string& date) {
  constexpr const char *kFile = "chat_template.jinja", *kConfig = "tokenizer_config.json";
  const json config = object_in(folder, kConfig);
  ChatTemplate::Source source = {"", (fs::path(folder) / kFile).string(), {}, date};
  std::error_code ignored;
  if (fs::exists(source.path, ignored)) {
    source.text = io::read_text(source.path, kMaxFile);
  } else {
    source.path = (fs::path(folder) / kConfig).string();
    json text = config.value("chat_template", json());
    if (text.is_array())  // several, by name
      for (const json& one : json(text))
        if (one.is_object() && one.value("name", json()) == "default") text = one.value("template", json());
    if (!text.is_string())
      fail(folder, " has no chat template (", kFile, ", or chat_template in ", kConfig,
           "): it may be a base model. Copy ", kFile,
           " of a chat model with the same tokens into it, or write the lines as {\"prompt\": ..., "
           "\"completion\": ...}");
    source.text = text.get<std::string>();
  }
  const json map = object_in(folder, "special_tokens_map.json");
  for (const char* name :
       {"bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"})
    for (const json* root : {&config, &map}) {
      json token = root->value(name, json());
      if (token.is_object()) token = json(token.value("content", json()));
      if (!token.is_string()) continue;
      source.names.emplace_back(name, jinja::Value(token.get<std::string>()));
      break;
    }
  return ChatTemplate(std::move(source));
}

}  // namespace scruple::train
