// Conversations: what is refused and in which words, which tokens count in windows, templates that are hostile, and files
// of tokens that say what counts. That tokens are those of transformers is tests/chats_test.py's.
#include "train/text/chat.h"

#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "files.h"
#include "train/text/data.h"
#include "train/text/tokens.h"
#include "train/text/vocabulary.h"

namespace scruple_tests {
namespace {

using namespace scruple::train;
using nlohmann::json;
namespace jinja = scruple::train::jinja;

constexpr const char* kChatMl =
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}|\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}";
constexpr const char* kMarked =
    "{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' %}{% generation %}{{ m.content }}|"
    "{% endgeneration %}{% else %}{{ m.content }}|{% endif %}{% endfor %}";

// Each ASCII character is a token, and so are the marks: <assistant> 1, <user> 2, <system> 3, <tool> 4, | 124.
std::string tokenizer_json() {
  json vocabulary, added;
  for (int c = 33; c < 127; ++c) vocabulary[std::string(1, static_cast<char>(c))] = c;
  vocabulary["\u010A"] = 10;
  vocabulary["\u0120"] = 32;
  int id = 1;
  for (const char* name : {"<assistant>", "<user>", "<system>", "<tool>"})
    added.push_back({{"id", id++}, {"content", name}, {"special", true}});
  added.push_back({{"id", 124}, {"content", "|"}, {"special", true}});
  const json bytes = {{"type", "ByteLevel"}, {"add_prefix_space", false}, {"use_regex", false}};
  return json{{"pre_tokenizer", bytes},
              {"decoder", bytes},
              {"model", {{"type", "BPE"}, {"vocab", vocabulary}, {"merges", json::array()}}},
              {"added_tokens", added}}
      .dump();
}

std::string turn(const std::string& role, const std::string& content) {
  return json{{"role", role}, {"content", content}}.dump();
}
std::string chat(const std::vector<std::string>& turns) {
  std::string all;
  for (const std::string& one : turns) all += (all.empty() ? "" : ", ") + one;
  return "{\"messages\": [" + all + "]}\n";
}

class ChatTest : public Files {
 protected:
  // A model's folder with this template.
  std::string folder(const std::string& text) {
    std::filesystem::create_directories(path("model"));
    put(tokenizer_json(), "model/tokenizer.json");
    put(json{{"chat_template", text}, {"eos_token", "|"}, {"bos_token", nullptr}}.dump(),
        "model/tokenizer_config.json");
    tokenizer_.emplace(read_tokenizer(path("model")));
    return path("model");
  }
  Reading reading(TrainOn train_on = TrainOn::assistant) {
    return {.tokenizer = &*tokenizer_,
            .end = 124,
            .vocabulary = 128,
            .train_on = train_on,
            .chat_folder = path("model")};
  }
  // The text of a document's tokens, with those that count in capitals.
  static std::string shown(const Documents& all, std::size_t which) {
    const Document& document = all.all().at(which);
    std::string text;
    for (std::int64_t at = document.begin; at < document.end; ++at) {
      std::int32_t token = 0;
      copy_tokens(all.sources(), at, 1, &token);
      text += token < 5 ? "?aust"[token] : token == 10 ? '_' : static_cast<char>(token);
    }
    each_counted(document, all.gaps(), [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t at = begin - document.begin; at < end - document.begin; ++at) {
        char& c = text[static_cast<std::size_t>(at)];
        c = c == '|' ? '!' : c >= 'a' && c <= 'z' ? static_cast<char>(c - 32) : c;
      }
    });
    return text;
  }
  std::string refused(const std::string& line) {
    return message_of([&] { Documents(put(turn_line() + line + "\n", "chats.jsonl"), reading()); });
  }
  static std::string turn_line() { return chat({turn("user", "a"), turn("assistant", "b")}); }

  std::optional<Tokenizer> tokenizer_;
};

// ---- Which tokens count ----

TEST_F(ChatTest, TheAssistantsTurnsCountWithTheirEndsAndWithoutTheirHeaders) {
  const std::string line = chat({turn("system", "s"), turn("user", "hi"), turn("assistant", "ho"),
                                 turn("user", "x"), turn("assistant", "yes")});
  for (const char* form : {kChatMl, kMarked}) {
    folder(form);
    const std::string file = put(line, "chats.jsonl");
    const std::string newline = form == kChatMl ? "_" : "";
    const auto wanted = [&](const std::string& text) {
      std::string out;
      for (const char c : text) out += c == '_' ? newline : std::string(1, c);
      return out;
    };
    EXPECT_EQ(shown(Documents(file, reading()), 0), wanted("ss|_uhi|_aHO!_ux|_aYES!_"));
    EXPECT_EQ(shown(Documents(file, reading(TrainOn::last)), 0), wanted("ss|_uhi|_aho|_ux|_aYES!_"));
    const Documents all(file, reading(TrainOn::all));
    EXPECT_TRUE(all.gaps().empty());
    EXPECT_EQ(all.all().at(0).counted, 0);
  }
}

TEST_F(ChatTest, ConversationsWithoutAnAnswerAreLeftOutAndCounted) {
  folder(kChatMl);
  const std::string file =
      put(chat({turn("user", "a")}) + turn_line() + "{\"messages\": []}\n", "chats.jsonl");
  for (const TrainOn train_on : {TrainOn::all, TrainOn::assistant, TrainOn::last}) {
    const Documents documents(file, reading(train_on));
    EXPECT_EQ(documents.empty(), 2);
    ASSERT_EQ(documents.all().size(), 1u);
    EXPECT_EQ(shown(documents, 0), train_on == TrainOn::all ? "UA!_AB!_" : "ua|_aB!_");
  }
}

TEST_F(ChatTest, AnswersBehindTheContextAreLeftOutOrCutAndCounted) {
  folder(kMarked);
  const std::string long_question = chat({turn("user", "abcdef"), turn("assistant", "g")});
  const std::string file = put(long_question + turn_line() + chat({turn("user", "a")}) +
                                   chat({turn("user", "a"), turn("assistant", "bcdef")}),
                               "chats.jsonl");
  for (const Layout layout : {Layout::whole, Layout::padded}) {
    const Data data(file, {.context = 6, .layout = layout, .validation_share = 0}, reading());
    EXPECT_EQ(data.left_out(), 2) << "no answer, and none in the first six targets";
    EXPECT_EQ(data.cut(), 1);
    EXPECT_EQ(data.cut_tokens(), 3) << "ua|abcdef| has ten, of which seven are in the window";
  }
}

TEST_F(ChatTest, AnEmptyAnswerIsItsEndAndOneTurnAfterAnotherCounts) {
  folder(kChatMl);
  const std::string file =
      put(chat({turn("user", "a"), turn("assistant", ""), turn("assistant", " b")}), "chats.jsonl");
  EXPECT_EQ(shown(Documents(file, reading()), 0), "ua|_a!_a B!_");
}

// What the model is asked to begin an answer with is not learnt, in whatever way the turns before have it.
TEST_F(ChatTest, AHeaderThatAsksToThinkIsCutAtItsLastWholePart) {
  folder(
      "{% for m in messages %}<{{ m.role }}>{{ m.content }}|{% endfor %}{% if add_generation_prompt "
      "%}<assistant>{t}\n{% endif %}");
  const std::string file =
      put(chat({turn("user", "a"), turn("assistant", "{x}"), turn("user", "a"), turn("assistant", "{t}\ny")}),
          "chats.jsonl");
  EXPECT_EQ(shown(Documents(file, reading()), 0), "ua|a{X}!ua|a{t}_Y!");
}

TEST_F(ChatTest, ATemplateThatEndsAConversationIsNoHeader) {
  folder(
      "{% for m in messages %}<{{ m.role }}>{{ m.content }}|{% endfor %}{{ '<assistant>' if "
      "add_generation_prompt else eos_token }}");
  const std::string file = put(turn_line(), "chats.jsonl");
  EXPECT_EQ(shown(Documents(file, reading()), 0), "ua|aB!|");
}

// A token counts if any of its bytes does.
TEST_F(ChatTest, TokensThatLieAcrossAnEndOfASpanCount) {
  json with_pairs = json::parse(tokenizer_json());
  with_pairs["model"]["vocab"]["ab"] = 5;
  with_pairs["model"]["merges"] = {"a b"};
  Tokenizer tokenizer(with_pairs.dump(), "tokenizer.json");
  const std::string text = "<user>xabyabz|";
  std::vector<Tokenizer::Added> added;
  const std::vector<Token> tokens = tokenizer.encode(text, Tokenizer::Part::bare, {}, &added);
  ASSERT_EQ(tokens, (std::vector<Token>{2, 'x', 5, 'y', 5, 'z', 124}));
  std::vector<jinja::Span> spans = {{8, 11}, {12, 14}};  // "bya" and "z|"
  to_tokens(spans, text, tokens, added, tokenizer);
  ASSERT_EQ(spans.size(), 1u);
  EXPECT_EQ(spans[0].begin, 2u);
  EXPECT_EQ(spans[0].end, 7u);
  spans = {{8, 11}};
  to_tokens(spans, text, tokens, added, tokenizer);
  EXPECT_EQ(spans[0].begin, 2u);
  EXPECT_EQ(spans[0].end, 5u);
}

TEST_F(ChatTest, WindowsOfBothLayoutsHaveTheTargets) {
  folder(kMarked);
  const std::string one =
      chat({turn("user", "a"), turn("assistant", "bc"), turn("user", "d"), turn("assistant", "e")});
  const std::string file = put(one + one + one, "chats.jsonl");
  const auto targets_of = [&](const Windows& windows, std::int64_t start) {
    std::vector<std::int32_t> tokens(static_cast<std::size_t>(windows.context())), targets = tokens;
    windows.read(start, tokens.data(), targets.data());
    std::string text;
    for (const std::int32_t target : targets) text += target == kNoTarget ? '.' : static_cast<char>(target);
    return text;
  };
  // ua|abc|ud|ae| thirteen tokens
  const Data padded(file, {.context = 16, .layout = Layout::padded}, reading());
  EXPECT_EQ(targets_of(padded.training(), 0), "...bc|....e|....");
  const Data cut(file, {.context = 6, .layout = Layout::padded}, reading());
  EXPECT_EQ(targets_of(cut.training(), 0), "...bc|");
  const Data packed(file, {.context = 14, .layout = Layout::packed, .validation_share = 0.3}, reading());
  EXPECT_EQ(targets_of(packed.training(), 0), "...bc|....e|..");
  EXPECT_EQ(targets_of(packed.training(), 4), "c|....e|....bc") << "from within a turn";
}

TEST_F(ChatTest, ResumedRunsCompareWhatCounts) {
  folder(kMarked);
  const std::string file =
      put(chat({turn("user", "a"), turn("assistant", "b"), turn("user", "a"), turn("assistant", "b")}),
          "chats.jsonl");
  const auto crc32 = [&](TrainOn train_on) {
    const Documents documents(file, reading(train_on));
    return documents.crc32(documents.sources()[0]);
  };
  EXPECT_EQ(crc32(TrainOn::assistant), crc32(TrainOn::assistant));
  EXPECT_NE(crc32(TrainOn::assistant), crc32(TrainOn::last));
  EXPECT_NE(crc32(TrainOn::assistant), crc32(TrainOn::all));
}

TEST_F(ChatTest, FilesOfTokensKeepWhatCounts) {
  folder(kMarked);
  const std::string line =
      chat({turn("user", "a"), turn("assistant", "b"), turn("user", "c"), turn("assistant", "d")});
  const std::vector<Token> tokens = {2, 'a', 124, 1, 'b', 124, 2, 'c', 124, 'x', 124};
  const std::vector<std::uint8_t> flags = {kBegins,           0,      0, 0, kCounts, kCounts, 0, 0, 0,
                                           kBegins | kCounts, kCounts};
  for (const std::int64_t vocabulary : {128, 70'000}) {
    const std::string file = path("chats.bin");
    write_tokens(file, TokenFile::scruple, tokens, vocabulary, flags);
    EXPECT_EQ(read_tokens(file), tokens);
    const Documents documents(file, {.end = 124, .vocabulary = vocabulary});
    ASSERT_EQ(documents.all().size(), 2u) << "turns end in the end token, which parts no documents here";
    EXPECT_TRUE(documents.has_prompts());
    EXPECT_EQ(shown(documents, 0), "ua|aB!uc|");
    EXPECT_EQ(shown(documents, 1), "X!");
    for (const auto& [place, flag] : {std::pair(8, kCounts), std::pair(9, kCounts)}) {
      std::vector<std::uint8_t> others = flags;  // the end of a question counts; two documents are one
      others[static_cast<std::size_t>(place)] = flag;
      write_tokens(path("others.bin"), TokenFile::scruple, tokens, vocabulary, others);
      const Documents other(path("others.bin"), {.end = 124, .vocabulary = vocabulary});
      EXPECT_NE(other.crc32(other.sources()[0]), documents.crc32(documents.sources()[0])) << place;
    }
    std::filesystem::resize_file(file, std::filesystem::file_size(file) - 1);
    expect_words(message_of([&] { read_tokens(file); }), "was cut", file);
  }
  EXPECT_NE(message_of([&] { write_tokens(path("x.bin"), TokenFile::llm_c, tokens, 128, flags); }), "");
  put(std::string("\x8F\x1E\x35\x01", 4) + std::string(1020, '\0'), "bad.bin");  // version 0
  EXPECT_NE(message_of([&] { read_tokens(path("bad.bin")); }), "");
}

// ---- What is refused ----

TEST_F(ChatTest, LinesAreRefusedWithTheirPlace) {
  folder(kChatMl);
  const auto expect = [&](const std::string& line, const std::string& words) {
    const std::string said = refused(line);
    EXPECT_NE(said.find("chats.jsonl, line 2: "), said.npos) << line << ": " << said;
    EXPECT_NE(said.find(words), said.npos) << line << ": " << said;
  };
  expect(R"({"messages": [{"role": "user"}]})", "message 1 (user) has no \"content\"");
  expect(R"({"messages": [{"role": "user", "content": null}]})", "has no \"content\"");
  expect(R"({"messages": [{"role": "assistant"}]})", "message 1 (assistant) has no \"content\"");
  expect(R"({"messages": [{"content": "a"}]})", "message 1 has no \"role\"");
  expect(R"({"messages": [{"role": 1, "content": "a"}]})", "\"role\" is a whole number");
  expect(R"({"messages": [{"role": "bot", "content": "a"}]})", "the role \"bot\"");
  expect(R"({"messages": [{"role": "user", "content": 1}]})", "\"content\" is a whole number");
  expect(R"({"messages": ["a"]})", "message 1 is text");
  expect(R"({"messages": {}})", "\"messages\" is an object");
  expect(R"({"messages": null})", "\"messages\" is none");
  expect(R"({"messages": [], "tools": "x"})", "\"tools\" is text");
  expect(R"({"messages": [], "text": "x"})", "\"messages\" and \"text\"");
  expect(R"({"messages": [], "conversations": []})", "\"messages\" and \"conversations\"");
  expect(R"({"messages": [], "messages": []})", "\"messages\" stands twice");
  expect(R"({"conversations": [{"from": "bing", "value": "a"}]})", "\"from\" \"bing\"");
  expect(R"({"messages": [{"role": "user", "content": [{"type": "image_url", "url": "x"}]}]})",
         "type \"image_url\"");
  expect(R"({"messages": [{"role": "user", "content": [{"type": "text"}]}]})", "without a \"text\"");
  expect(R"({"messages": [{"role": "user", "content": "a", "n": 123456789012345678901234567890}]})",
         "64 bits");
  expect(R"({"messages": )" + std::string(40, '[') + std::string(40, ']') + "}", "nested deeper than 32");
}

TEST_F(ChatTest, OtherFormsOfMessagesAreTheSame) {
  folder(kChatMl);
  const std::string file = put(
      R"({"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]})"
      "\n"
      R"({"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}, {"role": "assistant", "content": "b", "x": null}]})"
      "\n",
      "chats.jsonl");
  const Documents documents(file, reading());
  ASSERT_EQ(documents.all().size(), 2u);
  EXPECT_EQ(shown(documents, 0), "ua|_aB!_");
  EXPECT_EQ(shown(documents, 1), "ua|_aB!_");
}

TEST_F(ChatTest, ATemplateThatDoesNotEndIsRefusedWithItsLineAndTheWayOut) {
  for (const char* text :
       {"{% macro f() %}{{ g() }}{% endmacro %}\n{% macro g() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{% macro f(m) %}{% for x in m %}{{ f(m) }}{% endfor %}{% endmacro %}{{ f(messages) }}"}) {
    folder(text);
    const std::string said = refused("");
    EXPECT_NE(said.find("chats.jsonl, line 1: the chat template, line "), said.npos) << said;
    EXPECT_NE(said.find("deeper than 300"), said.npos) << said;
    EXPECT_NE(said.find("examples/chats.py"), said.npos) << said;
  }
}

TEST_F(ChatTest, BytesAndBaseModelsHaveNoTemplate) {
  folder(kChatMl);
  put("{}", "model/tokenizer_config.json");
  expect_words(refused(turn_line()), "has no chat template", path("model"));
  const std::string file = put(turn_line(), "chats.jsonl");
  expect_words(message_of([&] { Documents(file, {}); }), "bytes have no chat template", file);
}

TEST_F(ChatTest, ATemplateThatIsNotKnownIsShownWithTheWayOut) {
  folder("\n{{ messages }}\n{% include 'x' %}\n");
  const std::string said = refused(turn_line());
  EXPECT_NE(said.find("line 3: {% include %} is not known here"), said.npos) << said;
  EXPECT_NE(said.find("examples/chats.py"), said.npos) << said;
  put("{{ '\xFF' }} \xC3", "model/chat_template.jinja");
  EXPECT_NE(refused(turn_line()).find("it is no UTF-8"), said.npos);
  EXPECT_EQ(refused(turn_line()).find('\xFF'), said.npos) << "nor are the words";
  EXPECT_NE(said.find("begins\n  {{ messages }}\n  {% include 'x' %}"), said.npos) << said;
}

TEST_F(ChatTest, WhatTheAssistantSaysMustBeKnown) {
  folder("{% set a = messages[1] %}{{ a.content }}");  // no loop
  EXPECT_NE(refused("").find("outside of a loop"), std::string::npos);
  folder("{% set all %}{% for m in messages %}{{ m.content }}{% endfor %}{% endset %}{{ all }}");
  EXPECT_NE(refused("").find("outside of a loop"), std::string::npos);
  folder(
      "{% for m in messages %}{{ m.content }}{% endfor %}{% for m in messages %}{{ m.content }}{% endfor %}");
  EXPECT_NE(refused("").find("twice"), std::string::npos);
  folder(
      "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{% if add_generation_prompt %}Now "
      "you: {% endif %}");
  EXPECT_NE(refused("").find("in another way than an answer"), std::string::npos);
}

// What a template raises can be told from what a tokenizer does: `sample --chat` does without the former.
TEST_F(ChatTest, ATokenizerThatFailsIsNoTemplateError) {
  const Conversation said = with_message(with_message({}, "user", "hi"), "assistant", "ho");
  const auto tokens = [&](const std::string& text) {
    return chat_template(folder(text), "").tokens(said, *tokenizer_, TrainOn::last, "here");
  };
  EXPECT_THROW(tokens("{{ raise_exception('no') }}"), TemplateError);
  EXPECT_THROW(tokens("{{ messages[1].content }}"), TemplateError);

  const std::string text = std::string(kChatMl) + std::string(64, 'a') + "c";
  EXPECT_NO_THROW(tokens(text));
  json slow = json::parse(tokenizer_json());
  const json split = {{"type", "Split"},
                      {"pattern", {{"Regex", "(?:a+)+[bd]"}}},  // which tries all ways to cut many of them
                      {"behavior", "Isolated"},
                      {"invert", false}};
  slow["pre_tokenizer"] = {{"type", "Sequence"}, {"pretokenizers", {split, slow["pre_tokenizer"]}}};
  put(slow.dump(), "model/tokenizer.json");
  tokenizer_.emplace(read_tokenizer(path("model")));
  const ChatTemplate chat = chat_template(path("model"), "");
  try {
    chat.tokens(said, *tokenizer_, TrainOn::last, "here");
    FAIL() << "no regular expression is tried for ever";
  } catch (const TemplateError& error) {
    FAIL() << error.what();
  } catch (const std::runtime_error& error) {
    EXPECT_NE(std::string(error.what()).find("splitting a text"), std::string::npos) << error.what();
  }
}

// ---- Templates ----

std::string rendered(const std::string& source) {
  return jinja::Template(source)
      .render({{"text", "t"}, {"items", jinja::Value::list({jinja::Value(std::int64_t{1})})}})
      .text;
}

TEST(Jinja, HostileTemplatesEnd) {
  const auto refused = [](const std::string& source, const std::string& words) {
    const std::string said = message_of([&] { rendered(source); });
    EXPECT_NE(said.find(words), said.npos) << source.substr(0, 80) << ": " << said;
    EXPECT_NE(said.find("line "), said.npos) << said;
    EXPECT_LT(said.size(), 1000u);
  };
  refused("{% macro f(n) %}{{ f(n) }}{% endmacro %}{{ f(1) }}", "deeper than");
  refused("{% set ns = namespace(x='aa') %}{% for i in range(99) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
          "come to an end");
  refused("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", "come to an end");
  refused("{% for i in range(10**9) %}{% endfor %}", "not known");
  refused("{% for i in range(1000000) %}{% endfor %}", "range() of more than");
  refused("{% set ns = namespace(x=[]) %}{% for i in range(9999) %}{% set ns.x = [ns.x] %}{% endfor %}",
          "deeper than");
  refused("{% set ns = namespace() %}{% set ns.x = ns %}", "a namespace inside");
  EXPECT_EQ(rendered("{{ " + repeated("(", 30) + "1" + repeated(")", 30) + " }}"), "1");
  refused("{{ " + repeated("(", 100'000) + repeated(")", 100'000) + " }}", "deeper than");
  refused("{{ " + repeated("not ", 100'000) + "x }}", "deeper than");
  EXPECT_EQ(rendered("{{ 1" + repeated(" + 1", 100'000) + " }}"), "100001") << "it is long, not deep";
  refused("{{ x" + repeated(".a", 100'000) + " }}", "is not defined");
  refused(repeated("{% if x %}", 10'000), "deeper than");
  refused("{{ 9223372036854775807 + 1 }}", "too large");
  refused("{{ 99999999999999999999 }}", "too large");
  refused("{{ 1 // 0 }}", "division by zero");
  refused("{{ 'a'[::0] }}", "steps of 0");
  EXPECT_EQ(rendered("{{ 'abc'[-99999999999:99999999999] }}"), "abc");
}

// A list that has one text many times is small; what is made of it is not.
TEST(Jinja, WhatATemplateLooksAtIsLimited) {
  const std::string doubled =
      "{% set ns = namespace(x='0123456789abcde ', all=[], deep=['a'], more=['a']) %}"
      "{% for i in range(16) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}"
      "{% for i in range(13) %}{% set ns.all = (ns.all or [ns.x]) + ns.all %}{% endfor %}"
      "{% for i in range(45) %}{% set ns.deep = [ns.deep, ns.deep] %}{% set ns.more = [ns.more, ns.more] %}"
      "{% endfor %}";
  EXPECT_EQ(rendered(doubled + "{{ ns.x | length }} {{ ns.deep | length }} {{ ns.all is string }}"),
            "1048576 2 False");
  for (const char* last :
       {"ns.all", "ns.deep", "ns.deep ~ 'x'", "ns.deep | string", "ns.deep | tojson", "ns.deep == ns.more",
        "ns.deep in [ns.more]", "ns.all | join", "ns.all | tojson", "ns.all | map('upper') | list",
        "ns.all | select('in', ns.x ~ 'b') | list", "ns.all | sort", "ns.all | unique", "ns.x | join(ns.x)",
        "ns.x.join(ns.x)", "ns.x.replace('a', ns.x)", "ns.x.strip(ns.x[:-1] ~ 'é')",
        "ns.x.replace('a', '\\n') | indent(ns.x)", "ns.x is in ns.x"}) {
    const std::string said = message_of([&] { rendered(doubled + "{{ " + last + " }}"); });
    EXPECT_EQ(said, "line 1: it does not come to an end") << last;
  }
}

TEST(Jinja, ManyMembersCostNoMoreThanTheirNumber) {
  std::string all;
  for (int i = 0; i < 60'000; ++i) all += "'k" + std::to_string(i) + "': " + std::to_string(i) + ", ";
  EXPECT_EQ(rendered("{% set d = {" + all +
                     "'k7': 'seven', 'last': 1} %}{{ d | length }} {{ d.k7 }} {{ d['k59999'] }} "
                     "{{ d.k60000 is defined }}{% set ns = namespace(n=0) %}{% for key in d %}"
                     "{% set ns.n = ns.n + (1 if d[key] else 0) %}{% endfor %} {{ ns.n }}"),
            "60001 seven 59999 False 60000");
}

TEST(Jinja, ABreakInAnElseLeavesTheLoopAroundIt) {
  EXPECT_EQ(rendered("{% for i in [1, 2, 3] %}{{ i }}{% for j in [] %}{% else %}{% if i == 2 %}{% break %}"
                     "{% endif %}{% endfor %}{% endfor %}."),
            "12.");
}

TEST(Jinja, WhatIsNotKnownIsNamedWithItsLine) {
  const auto refused = [](const std::string& source, const std::string& words) {
    const std::string said = message_of([&] { rendered("\n" + source); });
    EXPECT_EQ(said.find("line 2: "), 0u) << source << ": " << said;
    EXPECT_NE(said.find(words), said.npos) << source << ": " << said;
  };
  refused("{{ text | frobnicate }}", "the filter 'frobnicate'");
  refused("{{ text is frobnicated }}", "'is frobnicated'");
  refused("{{ text.frobnicate() }}", "the method 'frobnicate'");
  refused("{{ frobnicate() }}", "frobnicate()");
  refused("{% frobnicate %}", "{% frobnicate %}");
  refused("{% import 'os' as os %}", "{% import %}");
  refused("{{ text.__class__ }}{{ text.__class__.x }}", "\"__class__\" is not defined");
  refused("{{ items + text }}", "'+' between a list and text");
  refused("{{ nothing + text }}", "\"nothing\" (it is not defined)");
  refused("{{ nothing.more }}", "\"nothing\" is not defined");
  refused("{{ ('<' | safe) + text }}", "escape HTML");
  refused("{{ 'é' | upper }}", "beyond ASCII");
  refused("{{ text", "'{{' has no '}}'");
  refused("{% if text %}", "{% endif %}");
  refused("{% endif %}", "{% endif %}");
  refused("{# text", "the comment has no end");
  refused("{{ 'text }}", "no closing '");
  refused("{{ text ! }}", "\"!\" is no part of an expression");
  refused("{{ text \u07DA }}", "\"\u07DA\" is no part of an expression");
  refused("{{ raise_exception('no ' + text) }}", "refuses it: no t");
  refused("{{ frobnicate(text,\n text) }}", "frobnicate()");
  refused("{% set x %}{% generation %}a{% endgeneration %}{% endset %}", "inside a macro or a {% set %}");
  refused("{% break %}", "outside of a loop");
  refused("{% for i in items %}{% set x %}{% break %}{% endset %}{% endfor %}", "outside of a loop");
}

}  // namespace
}  // namespace scruple_tests
