#include "train/text/jinja_lex.h"

#include <utf8proc.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cstdint>
#include <utility>

#include "io/json.h"
#include "train/text/utf8.h"

namespace scruple::train::jinja {
namespace {

constexpr std::size_t kMostSource = 1 << 20;  // bytes

bool is_letter(char c) { return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_'; }
bool is_digit(char c) { return c >= '0' && c <= '9'; }

// Cuts a template into lexemes.
class Lexer {
 public:
  explicit Lexer(std::string_view source) {
    std::int64_t wrong = 0;
    if (source.size() > kMostSource)
      io::fail("it has ", source.size(), " bytes; no chat template has more than ", kMostSource);
    const std::string valid = valid_utf8(source, wrong);
    if (wrong > 0) io::fail("it is no UTF-8");
    for (std::size_t i = 0; i < valid.size(); ++i)  // every end of a line is "\n"
      if (valid[i] != '\r')
        text_ += valid[i];
      else if (i + 1 == valid.size() || valid[i + 1] != '\n')
        text_ += '\n';
    if (text_.ends_with('\n')) text_.pop_back();
  }
  std::vector<Lexeme> lexemes() {
    while (at_ < text_.size()) read_data();
    add(Type::nothing, "");
    return std::move(out_);
  }

 private:
  void add(Type type, std::string text, Value value = {}) {
    out_.push_back({type, std::move(text), std::move(value), line_});
  }
  char here(std::size_t ahead = 0) const { return at_ + ahead < text_.size() ? text_[at_ + ahead] : '\0'; }
  bool begins(std::string_view with) const { return std::string_view(text_).substr(at_).starts_with(with); }
  void go(std::size_t bytes) {
    for (; bytes > 0 && at_ < text_.size(); --bytes) line_ += text_[at_++] == '\n';
  }
  void skip_spaces() {
    while (at_ < text_.size() && kSpaces.find(text_[at_]) != kSpaces.npos) go(1);
  }

  // Text up to the next mark, without the white space that the mark takes away.
  void read_data() {
    std::size_t mark = at_;
    while (
        (mark = text_.find('{', mark)) != text_.npos &&
        (mark + 1 == text_.size() || std::string_view("{%#").find(text_[mark + 1]) == std::string_view::npos))
      ++mark;
    if (mark == text_.npos) mark = text_.size();
    std::string data = text_.substr(at_, mark - at_);
    const bool begins_line = at_ == 0 || text_[at_ - 1] == '\n';
    const char kind = mark < text_.size() ? text_[mark + 1] : '\0';
    const char sign = mark + 2 < text_.size() ? text_[mark + 2] : '\0';
    if (kind != '\0' && sign == '-') {
      data.erase(data.find_last_not_of(kSpaces) + 1);
    } else if (kind != '\0' && sign != '+' && kind != '{') {
      const std::size_t line = data.rfind('\n') + 1;  // 0 where there is none
      if ((line > 0 || begins_line) && data.find_first_not_of(" \t", line) == data.npos) data.erase(line);
    }
    if (!data.empty()) add(Type::data, std::move(data));
    go(mark - at_);
    if (kind == '\0') return;
    go(sign == '-' || (sign == '+' && kind != '{') ? 3 : 2);
    if (kind == '#') return skip_comment();
    add(kind == '{' ? Type::print : Type::block, "");
    read_code(kind == '{' ? "}}" : "%}");
  }

  // Behind the end of a mark: "-" takes all white space, and blocks and comments the end of their line.
  bool ends(std::string_view mark) {
    const bool trims = here() == '-', keeps = here() == '+' && mark != "}}";
    if (!std::string_view(text_)
             .substr(std::min(at_ + (trims || keeps ? 1 : 0), text_.size()))
             .starts_with(mark))
      return false;
    go(trims || keeps ? 3 : 2);
    if (trims)
      skip_spaces();
    else if (!keeps && mark != "}}" && here() == '\n')
      go(1);
    return true;
  }

  void skip_comment() {
    const int begin = line_;
    while (at_ < text_.size())
      if (ends("#}"))
        return;
      else
        go(1);
    fail_at(begin, "the comment has no end");
  }

  void read_code(std::string_view mark) {
    const int begin = line_;
    std::string open;
    for (;;) {
      skip_spaces();
      if (at_ >= text_.size()) fail_at(begin, "'", mark == "}}" ? "{{" : "{%", "' has no '", mark, "'");
      if (open.empty() && ends(mark)) return add(Type::end, "");
      const char c = here();
      if (is_letter(c))
        read_name();
      else if (is_digit(c))
        read_number();
      else if (c == '"' || c == '\'')
        read_text(c);
      else
        read_sign(open);
    }
  }

  void read_name() {
    std::size_t size = 1;
    while (is_letter(here(size)) || is_digit(here(size))) ++size;
    add(Type::name, text_.substr(at_, size));
    go(size);
  }

  void read_number() {
    std::string digits;
    const auto take = [&] {
      for (; is_digit(here()) || (here() == '_' && is_digit(here(1))); go(1))
        if (here() != '_') digits += here();
    };
    take();
    bool is_real = here() == '.' && is_digit(here(1));
    if (is_real) {
      digits += '.';
      go(1);
      take();
    }
    const bool is_signed = here(1) == '+' || here(1) == '-';
    if ((here() == 'e' || here() == 'E') && is_digit(here(is_signed ? 2 : 1))) {
      is_real = true;
      digits += is_signed ? std::string("e") + here(1) : "e";
      go(is_signed ? 2 : 1);
      take();
    }
    if (is_letter(here())) fail_at(line_, "the number ", digits, " goes on with '", here(), "'");
    if (is_real)
      add_number<double>(digits);
    else
      add_number<std::int64_t>(digits);
  }

  template <class Number>
  void add_number(const std::string& digits) {
    Number number = 0;
    if (std::from_chars(digits.data(), digits.data() + digits.size(), number).ec != std::errc())
      fail_at(line_, "the number ", digits, " is too large");
    add(Type::constant, digits, number);
  }

  // With Python's escapes.
  void read_text(char quote) {
    const int begin = line_;
    std::string out;
    for (go(1); here() != quote || at_ >= text_.size();) {
      if (at_ >= text_.size()) fail_at(begin, "the text has no closing ", quote);
      if (here() != '\\') {
        out += here();
        go(1);
        continue;
      }
      const char c = here(1);
      constexpr std::string_view kFrom = "nrtabfv\\'\"", kTo = "\n\r\t\a\b\f\v\\'\"";
      if (const std::size_t found = kFrom.find(c); found != kFrom.npos && c != '\0') {
        out += kTo[found];
        go(2);
      } else if (c == 'x' || c == 'u' || c == 'U') {
        read_escape(c == 'x' ? 2 : c == 'u' ? 4 : 8, out);
      } else if (is_digit(c) || c == 'N' || c == '\n') {
        fail_at(line_, "the escape \\", c == '\n' ? 'n' : c, " is not known here");
      } else {
        out += '\\';
        go(1);
      }
    }
    go(1);
    add(Type::constant, out, out);
  }

  void read_escape(std::size_t digits, std::string& out) {
    std::uint32_t number = 0;
    const std::string hex = text_.substr(std::min(at_ + 2, text_.size()), digits);
    const auto [end, problem] = std::from_chars(hex.data(), hex.data() + hex.size(), number, 16);
    if (problem != std::errc() || end != hex.data() + digits || number > 0x10FFFF ||
        (number >= 0xD800 && number < 0xE000))
      fail_at(line_, "an escape that is no character");
    utf8proc_uint8_t bytes[4];
    out.append(reinterpret_cast<const char*>(bytes),
               static_cast<std::size_t>(utf8proc_encode_char(static_cast<utf8proc_int32_t>(number), bytes)));
    go(2 + digits);
  }

  void read_sign(std::string& open) {
    constexpr std::array<std::string_view, 6> kLong = {"//", "**", "==", "!=", ">=", "<="};
    constexpr std::string_view kShort = "+-*/%~()[]{}.,:|=<>";
    std::string sign(1, here());
    for (const std::string_view longer : kLong)
      if (begins(longer)) sign = longer;
    if (kShort.find(here()) == kShort.npos && sign.size() == 1)
      fail_at(line_, io::shown(text_.substr(at_, character_length(here()))), " is no part of an expression");
    constexpr std::string_view kOpen = "([{", kClose = ")]}";
    if (kOpen.find(here()) != kOpen.npos) open += kClose[kOpen.find(here())];
    if (kClose.find(here()) != kClose.npos) {
      if (open.empty() || open.back() != here()) fail_at(line_, "'", sign, "' closes nothing");
      open.pop_back();
    }
    add(Type::sign, sign);
    go(sign.size());
  }

  std::string text_;
  std::size_t at_ = 0;
  int line_ = 1;
  std::vector<Lexeme> out_;
};

}  // namespace

std::vector<Lexeme> lexemes_of(std::string_view source) { return Lexer(source).lexemes(); }

}  // namespace scruple::train::jinja
