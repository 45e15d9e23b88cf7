// Tokens of a chat template's text.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "io/file.h"
#include "train/text/jinja_value.h"

namespace scruple::train::jinja {

enum class Type { data, print, block, end, name, constant, sign, nothing };
struct Lexeme {
  Type type;
  std::string text;
  Value value;  // of a constant: a text or a number
  int line;
};

// data: a text between marks, without the white space that they take away. print and block: "{{" and "{%"; end: what
// closes them. nothing: the end of the template, which is always the last. Throws with the line.
std::vector<Lexeme> lexemes_of(std::string_view source);

template <class... Parts>
[[noreturn]] void fail_at(int line, const Parts&... parts) {
  io::fail("line ", line, ": ", parts...);
}

}  // namespace scruple::train::jinja
