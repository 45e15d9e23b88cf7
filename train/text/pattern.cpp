#define PCRE2_CODE_UNIT_WIDTH 8
#include "train/text/pattern.h"

#include <pcre2.h>

#include <stdexcept>

namespace scruple::train {
namespace {

constexpr std::size_t kStackBytes = 8u << 20;  // compiled expressions run on this one, not on the thread's

[[noreturn]] void fail(const std::string& doing, int error) {
  PCRE2_UCHAR words[256] = {};
  pcre2_get_error_message(error, words, sizeof words);
  throw std::runtime_error(doing + ": " + reinterpret_cast<const char*>(words));
}

// White space as Unicode defines it. PCRE2's \s has U+180E too, which is none since Unicode 6.3.
std::string with_unicode_space(const std::string& expression) {
  const std::string space = "\\t-\\r\\x{85}\\p{Z}";
  std::string out;
  bool in_class = false;
  for (std::size_t i = 0; i < expression.size(); ++i) {
    const char c = expression[i];
    if (c == '\\' && i + 1 < expression.size()) {
      const char escaped = expression[++i];
      if (escaped == 's')
        out += in_class ? space : "[" + space + "]";
      else if (escaped == 'S' && !in_class)
        out += "[^" + space + "]";
      else
        out += {c, escaped};
      continue;
    }
    if (c == '[') in_class = true;
    if (c == ']') in_class = false;
    out += c;
  }
  return out;
}

}  // namespace

struct Pattern::Compiled {
  pcre2_code* code = nullptr;
  pcre2_match_data* match = nullptr;
  pcre2_match_context* context = nullptr;
  pcre2_jit_stack* stack = nullptr;
  ~Compiled() {
    pcre2_match_data_free(match);
    pcre2_match_context_free(context);
    pcre2_jit_stack_free(stack);
    pcre2_code_free(code);
  }
};

Pattern::Pattern(const std::string& expression) : compiled_(std::make_unique<Compiled>()) {
  const std::string text = with_unicode_space(expression);
  int error = 0;
  PCRE2_SIZE at = 0;
  Compiled& c = *compiled_;
  c.code = pcre2_compile(reinterpret_cast<PCRE2_SPTR>(text.data()), text.size(),
                         PCRE2_UTF | PCRE2_UCP | PCRE2_NEVER_BACKSLASH_C,  // which would cut characters
                         &error, &at, nullptr);
  if (c.code == nullptr) fail("the regular expression " + expression, error);
  c.match = pcre2_match_data_create_from_pattern(c.code, nullptr);
  c.context = pcre2_match_context_create(nullptr);
  if (c.match == nullptr || c.context == nullptr) throw std::bad_alloc();
  if (pcre2_jit_compile(c.code, PCRE2_JIT_COMPLETE) == 0) {  // else it is interpreted
    c.stack = pcre2_jit_stack_create(32 << 10, kStackBytes, nullptr);
    pcre2_jit_stack_assign(c.context, nullptr, c.stack);
  }
}
Pattern::~Pattern() = default;
Pattern::Pattern(Pattern&&) noexcept = default;

bool Pattern::find(std::string_view text, std::size_t from, Match& match) {
  const auto search = [&](std::uint32_t options) {
    return pcre2_match(compiled_->code, reinterpret_cast<PCRE2_SPTR>(text.data()), text.size(), from,
                       PCRE2_NO_UTF_CHECK | options, compiled_->match, compiled_->context);
  };
  int found = search(0);
  if (found == PCRE2_ERROR_JIT_STACKLIMIT) found = search(PCRE2_NO_JIT);
  if (found == PCRE2_ERROR_NOMATCH) return false;
  if (found < 0) fail("splitting a text by its regular expression", found);
  const PCRE2_SIZE* range = pcre2_get_ovector_pointer(compiled_->match);
  match = {range[0], range[1]};
  return true;
}

}  // namespace scruple::train
