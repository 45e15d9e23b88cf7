// JSON lines: one document per line, {"text": ...}, {"prompt": ..., "completion": ...} or {"messages": [...]}. Other
// members are passed over. The files may be hostile: nlohmann's parser is read event by event, so that of a line no tree
// is built but that of its messages, and problems are thrown as std::runtime_error with the file, the line and what was
// found.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "train/text/chat.h"

namespace scruple::train {

struct JsonDocument {
  std::optional<std::string> prompt;
  std::string text;                  // after a prompt: the completion
  std::optional<Conversation> chat;  // in place of a text
};

class JsonLines {
 public:
  // `name` names the file in messages, and `number` counts its lines before these. `content` must outlive this.
  JsonLines(std::string_view content, std::string name, std::int64_t number = 0);

  bool next();  // goes to the next line that is not blank; false: there are no more
  std::string_view line() const { return line_; }
  // Of this line. Bytes that are no UTF-8 become U+FFFD.
  JsonDocument document();
  std::string place() const;  // of this line: "notes.jsonl, line 17"
  std::size_t bytes_read() const { return at_; }
  std::int64_t replaced() const { return replaced_; }  // places that were no UTF-8, so far

 private:
  std::string_view content_, line_;
  std::string name_;
  std::size_t at_ = 0;
  std::int64_t number_, replaced_ = 0;
};

}  // namespace scruple::train
