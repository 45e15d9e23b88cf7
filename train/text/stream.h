// Texts of any size into tokens: read in parts of about a MiB, which threads encode and which are written in their order.
// The tokens are those of whole texts, and the same for any number of threads; memory is that of a few parts per thread.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "train/text/documents.h"
#include "train/text/tokens.h"

namespace scruple::train {

struct Encoded {  // so far
  std::int64_t bytes = 0, tokens = 0;
  std::int64_t empty = 0, replaced = 0;  // as in Documents
  bool has_prompts = false;
};

// `paths`: files, or "-" for standard input. `are_lines`: all of them are JSON lines, whatever their names.
// `reading`: its tokenizer is that of the first thread, and the others have one from `another`. `written` is called after
// each part and may throw, which ends all. Throws std::runtime_error where an input cannot be read to its end.
Encoded encode_texts(const std::vector<std::string>& paths, bool are_lines, const Reading& reading,
                     const std::function<Tokenizer()>& another, int threads, TokenWriter& writer,
                     const std::function<void(const Encoded&)>& written);

}  // namespace scruple::train
