// Conversations, and the model's own chat template that makes a text of them (train/text/jinja.h): the same tokens as
// transformers' apply_chat_template, and which of them the assistant says.
#pragma once

#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "train/text/jinja.h"
#include "train/text/tokenizer.h"

namespace scruple::train {

// Which tokens of a conversation count as targets; of a prompt and its completion all, or the completion.
enum class TrainOn { all, assistant, last };  // last: the assistant's last turn
inline constexpr const char* kTrainOn[] = {"all", "assistant", "last"};

struct Conversation {
  jinja::Value messages, tools;  // objects with "role" and, but where there are tool calls, "content", a text
};
// Of a line's "messages", or of "conversations" with "from" and "value"; `tools`: undefined where there are none.
// `place` begins what is thrown.
Conversation conversation_of(const jinja::Value& messages, const jinja::Value& tools,
                             const std::string& place);
Conversation with_message(const Conversation& before, const std::string& role, const std::string& content);

// What a template raises, or is refused for.
struct TemplateError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

class ChatTemplate {
 public:
  struct Source {
    std::string text, path;
    std::vector<jinja::Member> names;  // bos_token, eos_token...
    std::string date = {};             // as 2026-11-19: what the template takes for today; "": it has no date
  };
  // Throws a TemplateError where the template has what is not known here, with its first lines and the way out.
  explicit ChatTemplate(Source source);

  // Up to where an answer begins. `place` begins a TemplateError, here and below.
  std::string prompt(const Conversation& chat, const std::string& place) const;
  struct Tokens {
    std::vector<Token> tokens;
    std::vector<jinja::Span> counted;  // of tokens, in order; none where the assistant says nothing
  };
  Tokens tokens(const Conversation& chat, Tokenizer& tokenizer, TrainOn train_on,
                const std::string& place) const;

 private:
  [[noreturn]] void refuse(const std::string& place, const std::string& why) const;
  jinja::Rendering render(const Conversation& chat, bool begins_answer, const std::string& place) const;
  struct Turn {
    jinja::Span span;  // bytes
    bool may_go_on;    // behind a tool's answer or another turn it may have no header
  };
  std::vector<Turn> turns_of(const Conversation& chat, const jinja::Rendering& rendering,
                             const std::string& place) const;
  jinja::Span spoken(const Turn& turn, const std::string& begins, std::string_view text,
                     const std::vector<Tokenizer::Added>& added, const std::string& place) const;
  std::string beginning_of(const Conversation& chat) const;
  std::string beginning(const Conversation& chat) const;

  Source source_;
  std::optional<jinja::Template> template_;
  std::optional<std::string> beginning_;  // of an answer; none: it differs from conversation to conversation
  bool turns_end_ = true;                 // in a token, or in white space alone
};

// Where the bytes `spans` of a text are among its tokens, which encode(text, bare) gave, with `added`: every token that
// has a byte of it.
void to_tokens(std::vector<jinja::Span>& spans, std::string_view text, const std::vector<Token>& tokens,
               const std::vector<Tokenizer::Added>& added, Tokenizer& tokenizer);

}  // namespace scruple::train
