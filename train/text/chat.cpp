#include "train/text/chat.h"

#include <algorithm>
#include <array>
#include <utility>

#include "io/file.h"
#include "io/json.h"
#include "train/text/utf8.h"

namespace scruple::train {
namespace {

using io::fail;
using io::shown;
using jinja::Dict;
using jinja::Member;
using jinja::Rendering;
using jinja::Span;
using jinja::Value;

// What "from" says in place of a role.
constexpr std::pair<std::string_view, const char*> kSpeakers[] = {
    {"human", "user"}, {"gpt", "assistant"},       {"tool", "tool"},        {"system", "system"},
    {"user", "user"},  {"assistant", "assistant"}, {"observation", "tool"}, {"chatgpt", "assistant"}};
constexpr const char* kRoles[] = {"system", "developer", "user", "assistant", "tool", "ipython", "function"};

const Value* find(const Dict& object, std::string_view key) {
  const Value* found = object.find(key);
  return found == nullptr || found->is_none() ? nullptr : found;
}

std::string role_of(const Dict& message, const std::string& place) {
  const Value *role = find(message, "role"), *from = find(message, "from");
  if (role == nullptr && from == nullptr)
    fail(place, " has no \"role\"; a message is {\"role\": \"user\", \"content\": ...}");
  const Value& said = role != nullptr ? *role : *from;
  if (said.text() == nullptr) fail(place, ": its \"role\" is ", said.kind(), "; it must be text");
  if (role != nullptr) {
    if (std::find(std::begin(kRoles), std::end(kRoles), *said.text()) == std::end(kRoles))
      fail(place, " has the role ", shown(*said.text()),
           "; known are system, developer, user, assistant and tool");
    return *said.text();
  }
  for (const auto& [name, known] : kSpeakers)
    if (*said.text() == name) return known;
  fail(place, " is \"from\" ", shown(*said.text()),
       "; known are human, gpt, system and tool. Write it as {\"role\": ..., \"content\": ...}");
}

// A text, or a list of parts that are texts.
std::string content_of(const Value& content, const std::string& place) {
  if (const std::string* text = content.text()) return *text;
  if (content.list() == nullptr) fail(place, ": its \"content\" is ", content.kind(), "; it must be text");
  std::string out;
  for (const Value& part : content.list()->items) {
    const Value* text = part.dict() == nullptr ? &part : find(*part.dict(), "text");
    const Value* type = part.dict() == nullptr ? nullptr : find(*part.dict(), "type");
    if (type != nullptr && jinja::text_of(*type) != "text")
      fail(place, ": its content has a part of type ", shown(jinja::text_of(*type)),
           ", and models here read text alone; leave the line out");
    if (text == nullptr || text->text() == nullptr)
      fail(place, ": its content has a part without a \"text\"");
    out += *text->text();
  }
  return out;
}

Value message_of(const Dict& message, const std::string& role, const std::string& place) {
  jinja::Space out;  // as transformers does: what is null is not there, and reasoning has several names
  bool has_content = false;
  const Value* reasoning = nullptr;
  for (const char* name : {"reasoning_content", "thinking", "reasoning"})
    if (reasoning == nullptr) reasoning = find(message, name);
  if (reasoning != nullptr) out.set("thinking", *reasoning);
  for (const auto& [key, value] : message.members) {
    if (value.is_none()) continue;
    const bool is_content = key == "content" || (key == "value" && find(message, "content") == nullptr);
    has_content |= is_content;
    if (is_content)
      out.set("content", Value(content_of(value, place)));
    else
      out.set(key == "from" ? "role" : key, key == "from" || key == "role" ? Value(role) : value);
  }
  if (reasoning != nullptr) out.set("reasoning_content", *reasoning);
  if (!has_content && (role != "assistant" || find(message, "tool_calls") == nullptr))
    fail(place, " has no \"content\"; leave the message out, or give it one (\"\" for none)");
  return Value::dict(std::move(out.members));
}

bool is_assistant(const Value& message) { return *message.dict()->find("role")->text() == "assistant"; }

bool is_blank(std::string_view text) { return text.find_first_not_of(kSpaces) == text.npos; }

// The template's first lines that say anything, cut.
std::string first_lines(std::string_view text) {
  constexpr std::size_t kLines = 2, kWidth = 100;
  std::string out;
  for (std::size_t lines = 0; lines < kLines && !text.empty();) {
    const std::size_t end = std::min(text.find('\n'), text.size());
    if (const std::string_view line = text.substr(0, end); !is_blank(line)) {
      std::size_t size = std::min(line.size(), kWidth);
      while (size < line.size() && !begins_character(line[size])) --size;
      out += "\n  " + std::string(line.substr(0, size)) + (size < line.size() ? "..." : "");
      ++lines;
    }
    text.remove_prefix(std::min(end + 1, text.size()));
  }
  return out;
}

}  // namespace

// ---- Conversations ----

Conversation conversation_of(const Value& messages, const Value& tools, const std::string& place) {
  if (messages.list() == nullptr) fail(place, ": \"messages\" is ", messages.kind(), "; it must be a list");
  if (!tools.is_undefined() && !tools.is_none() && tools.list() == nullptr)
    fail(place, ": \"tools\" is ", tools.kind(), "; it must be a list");
  std::vector<Value> out;
  for (const Value& message : messages.list()->items) {
    const std::string where = place + ": message " + std::to_string(out.size() + 1);
    if (message.dict() == nullptr)
      fail(where, " is ", message.kind(), "; it must be {\"role\": ..., \"content\": ...}");
    const std::string role = role_of(*message.dict(), where);
    out.push_back(message_of(*message.dict(), role, where + " (" + role + ")"));
  }
  return {Value::list(std::move(out)), tools.list() == nullptr ? Value(jinja::None{}) : tools};
}

Conversation with_message(const Conversation& before, const std::string& role, const std::string& content) {
  std::vector<Value> messages;
  if (before.messages.list() != nullptr) messages = before.messages.list()->items;
  messages.push_back(Value::dict({{"role", Value(role)}, {"content", Value(content)}}));
  return {Value::list(std::move(messages)),
          before.tools.list() == nullptr ? Value(jinja::None{}) : before.tools};
}

// ---- Templates ----

ChatTemplate::ChatTemplate(Source source) : source_(std::move(source)) {
  try {
    template_.emplace(source_.text);
  } catch (const std::runtime_error& error) {
    refuse(source_.path, std::string("the chat template, ") + error.what());
  }
  const std::string said = "Hello.";
  const Conversation question = with_message({}, "user", said);
  try {
    beginning_ = beginning_of(question);
    const Rendering whole = render(with_message(question, "assistant", said), false, "");
    const std::size_t end = whole.text.rfind(said);
    turns_end_ = end == whole.text.npos || !is_blank(std::string_view(whole.text).substr(end + said.size()));
  } catch (const TemplateError&) {  // it wants other messages; what is wrong is said of the first line
  }
}

void ChatTemplate::refuse(const std::string& place, const std::string& why) const {
  std::int64_t wrong = 0;
  throw TemplateError(place + ": " + why +
                      ". Render the file by transformers: examples/chats.py, and give its *.bin as --data. " +
                      source_.path + " begins" + first_lines(valid_utf8(source_.text, wrong)));
}

Rendering ChatTemplate::render(const Conversation& chat, bool begins_answer, const std::string& place) const {
  std::vector<Member> names = source_.names;
  names.emplace_back("messages", chat.messages);
  names.emplace_back("tools", chat.tools);
  names.emplace_back("documents", jinja::None{});
  names.emplace_back("add_generation_prompt", begins_answer);
  if (!source_.date.empty()) names.emplace_back("strftime_now", Value(source_.date));
  try {
    return template_->render(names);
  } catch (const std::runtime_error& error) {
    refuse(place, std::string("the chat template, ") + error.what());
  }
}

std::string ChatTemplate::prompt(const Conversation& chat, const std::string& place) const {
  return render(chat, true, place).text;
}

// What the template writes behind a conversation for a model to go on from. Behind the last message it may write an end
// where there is nothing to come.
std::string ChatTemplate::beginning_of(const Conversation& chat) const {
  const Rendering without = render(chat, false, ""), with = render(chat, true, "");
  std::size_t end = without.text.size();
  if (!with.text.starts_with(without.text)) {
    end = 0;
    for (const auto& [message, span] : without.written) end = std::max(end, span.end);
  }
  return with.text.starts_with(without.text.substr(0, end)) ? with.text.substr(end) : "";
}

// The same, of what comes before the first answer, where a single message does not tell.
std::string ChatTemplate::beginning(const Conversation& chat) const {
  if (beginning_) return *beginning_;
  std::vector<Value> before;
  for (const Value& message : chat.messages.list()->items) {
    if (is_assistant(message)) break;
    before.push_back(message);
  }
  try {
    return beginning_of({Value::list(std::move(before)), chat.tools});
  } catch (const TemplateError&) {
    return "";
  }
}

// What the assistant's messages write, each in its round of the template's loop.
std::vector<ChatTemplate::Turn> ChatTemplate::turns_of(const Conversation& chat, const Rendering& rendering,
                                                       const std::string& place) const {
  std::vector<Turn> turns;
  std::string before;
  bool is_missing = false;
  for (const Value& message : chat.messages.list()->items) {
    const std::string spoke_before = std::exchange(before, *message.dict()->find("role")->text());
    if (!is_assistant(message)) continue;
    const auto wrote = [&](const auto& entry) { return entry.first == message.dict(); };
    const auto& all = rendering.written;
    const auto found = std::find_if(all.begin(), all.end(), wrote);
    const Value* content = message.dict()->find("content");
    if (found == all.end()) {
      is_missing |= content != nullptr && !is_blank(*content->text());
      continue;
    }
    if (std::find_if(found + 1, all.end(), wrote) != all.end())
      refuse(place, "the chat template writes a message twice, so what the assistant says cannot be told");
    turns.push_back({found->second, spoke_before != "user" && spoke_before != "system"});
  }
  if (turns.empty() && is_missing)
    refuse(place,
           "the chat template writes messages outside of a loop over them, so what the assistant says cannot "
           "be told");
  return turns;
}

// A turn without the header that the template gives a model to begin an answer with, and without the white space behind
// its end.
Span ChatTemplate::spoken(const Turn& turn, const std::string& begins, std::string_view text,
                          const std::vector<Tokenizer::Added>& added, const std::string& place) const {
  Span span = turn.span;
  const std::string_view said = text.substr(span.begin, span.end - span.begin);
  std::size_t header = 0;
  while (header < std::min(said.size(), begins.size()) && said[header] == begins[header]) ++header;
  if (header < begins.size()) {  // such as one that asks to think: its last whole part
    const std::size_t end = said.substr(0, header).find_last_of("\n>]");
    header = end == said.npos ? 0 : end + 1;
  }
  if (header == 0 && !begins.empty() && !turn.may_go_on && !text.substr(0, span.begin).ends_with(begins))
    refuse(place,
           "the chat template begins a turn of the assistant in another way than an answer, so what the "
           "assistant "
           "says cannot be told");
  span.begin += header;
  for (const Tokenizer::Added& token : added)
    if (turns_end_ && token.begin >= span.begin && token.end <= span.end &&
        is_blank(text.substr(token.end, span.end - token.end))) {
      span.end = token.end;
      break;
    }
  return span;
}

ChatTemplate::Tokens ChatTemplate::tokens(const Conversation& chat, Tokenizer& tokenizer, TrainOn train_on,
                                          const std::string& place) const {
  const auto& messages = chat.messages.list()->items;
  if (std::none_of(messages.begin(), messages.end(), is_assistant)) return {};
  const Rendering rendering = render(chat, false, place);
  Tokens out;
  std::vector<Tokenizer::Added> added;
  out.tokens = tokenizer.encode(rendering.text, Tokenizer::Part::bare, {}, &added);
  if (train_on == TrainOn::all) {
    out.counted = {{0, out.tokens.size()}};
    return out;
  }
  const bool is_marked = template_->marks_generation();
  std::vector<Turn> turns;
  if (!is_marked || train_on == TrainOn::last) turns = turns_of(chat, rendering, place);
  if (train_on == TrainOn::last && turns.size() > 1) turns = {turns.back()};
  if (is_marked) {
    out.counted = rendering.generated;
    if (train_on == TrainOn::last)
      std::erase_if(out.counted,
                    [&](const Span& span) { return turns.empty() || span.begin < turns[0].span.begin; });
  } else {
    const std::string begins = beginning(chat);
    for (const Turn& turn : turns) out.counted.push_back(spoken(turn, begins, rendering.text, added, place));
  }
  to_tokens(out.counted, rendering.text, out.tokens, added, tokenizer);
  return out;
}

// ---- From bytes to tokens ----

namespace {

// How many bytes a token stands for within a text.
std::size_t size_of(const Tokenizer& tokenizer, Token token) {
  const std::array<Token, 2> twice = {token, token};
  return tokenizer.decode(twice).size() - tokenizer.decode(std::span(twice).first(1)).size();
}

// The tokens before byte `at` of the text: whole ones, and with the one that `at` lies within.
struct Boundary {
  std::size_t whole, touched;
};
Boundary boundary_at(std::size_t at, std::string_view text, const std::vector<Token>& tokens,
                     const std::vector<Tokenizer::Added>& added, Tokenizer& tokenizer) {
  const auto begins_behind = [](std::size_t place, const Tokenizer::Added& token) {
    return place < token.begin;
  };
  const auto next = std::upper_bound(added.begin(), added.end(), at, begins_behind);
  if (next == added.begin() && at == 0) return {0, 0};
  std::size_t from = 0, first = 0;  // the text behind an added token, and its first token
  if (next != added.begin()) {
    const Tokenizer::Added& last = *(next - 1);
    if (at == last.begin) return {last.place, last.place};
    if (at < last.end) return {last.place, last.place + 1};
    if (at == last.end) return {last.place + 1, last.place + 1};
    from = last.begin, first = last.place;
  }
  // White space, and signs that compose, may be other bytes in tokens than in the text: what is before `at` by itself
  // has their number, but perhaps other tokens.
  const std::vector<Token> before = tokenizer.encode(text.substr(from, at - from), Tokenizer::Part::bare);
  std::size_t size = 0, sum = 0, place = first;
  for (const Token token : before) size += size_of(tokenizer, token);
  const std::size_t end = next == added.end() ? tokens.size() : next->place;
  for (; place < end; ++place) {
    const std::size_t more = size_of(tokenizer, tokens[place]);
    if (sum + more > size) break;
    sum += more;
  }
  return {place, sum < size ? std::min(place + 1, end) : place};
}

}  // namespace

void to_tokens(std::vector<Span>& spans, std::string_view text, const std::vector<Token>& tokens,
               const std::vector<Tokenizer::Added>& added, Tokenizer& tokenizer) {
  std::vector<Span> out;
  for (const Span& span : spans) {
    if (span.begin >= span.end) continue;
    const std::size_t begin = boundary_at(span.begin, text, tokens, added, tokenizer).whole;
    const std::size_t end = boundary_at(span.end, text, tokens, added, tokenizer).touched;
    if (!out.empty() && begin <= out.back().end)
      out.back().end = std::max(out.back().end, end);
    else if (begin < end)
      out.push_back({begin, end});
  }
  spans = std::move(out);
}

}  // namespace scruple::train
