#include "train/text/tokenizer.h"

#include <utf8proc.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <unordered_map>
#include <utility>

#include "io/file.h"
#include "io/json.h"
#include "train/json_object.h"
#include "train/text/pattern.h"
#include "train/text/utf8.h"

namespace scruple::train {
namespace {

using Json = nlohmann::json;
using io::fail;
using io::shown;

constexpr Token kMostTokens = 1u << 24;
constexpr std::size_t kMostCuts = 16;           // each may double the pieces of a text
constexpr double kMostGrowth = 1024;            // of a text that is normalised
constexpr std::size_t kMostBytes = 256u << 20;  // of a tokenizer.json

// GPT-2's words: contractions, then letters, digits or anything else with one space before them, then white space
// (Radford et al., "Language Models are Unsupervised Multitask Learners", 2019, and its code).
constexpr const char* kGpt2Words =
    R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)";

// ---- The file ----

std::string brief(const Json& value) {
  const std::string text = value.dump(-1, ' ', /*ensure_ascii=*/true);
  return text.size() <= 160 ? text : text.substr(0, 160) + "...";
}

// A member of an object that may be hostile.
const Json& member(const Json& object, const char* key) {
  static const Json null;
  if (!object.is_object()) return null;
  const auto found = object.find(key);
  return found == object.end() ? null : *found;
}
std::string text_in(const Json& object, const char* key) {
  const Json& value = member(object, key);
  if (!value.is_string()) fail("\"", key, "\" of ", brief(object), " is no text");
  return value.get<std::string>();
}
bool flag_in(const Json& object, const char* key, bool otherwise = false) {
  const Json& value = member(object, key);
  if (!value.is_null() && !value.is_boolean()) fail("\"", key, "\" is neither true nor false");
  return value.is_null() ? otherwise : value.get<bool>();
}
Token token_in(const Json& value, const std::string& name) {
  if (!value.is_number_unsigned() || value.get<std::uint64_t>() >= kMostTokens)
    fail("the number of token ", shown(name), " is no whole number below ", kMostTokens);
  return value.get<Token>();
}
std::string type_of(const Json& object) { return object.is_null() ? "null" : text_in(object, "type"); }
[[noreturn]] void unknown(const char* what, const Json& object, const char* known) {
  fail(what, " ", brief(object), " is not known here; known are ", known);
}
// The parts of a "Sequence", or the one part that there is.
void each_part(const Json& object, const char* list, const std::function<void(const Json&)>& visit) {
  if (object.is_null()) return;
  if (type_of(object) != "Sequence") return visit(object);
  const Json& parts = member(object, list);
  if (!parts.is_array()) fail("a Sequence without its list \"", list, "\"");
  for (const Json& part : parts) each_part(part, list, visit);
}

// ---- Characters ----

utf8proc_category_t category_of(char32_t c) { return utf8proc_category(static_cast<utf8proc_int32_t>(c)); }
bool is_space(char32_t c) {
  const utf8proc_category_t kind = category_of(c);
  return (c >= 9 && c <= 13) || c == 0x85 || kind == UTF8PROC_CATEGORY_ZS || kind == UTF8PROC_CATEGORY_ZL ||
         kind == UTF8PROC_CATEGORY_ZP;
}
bool is_number(char32_t c) {
  const utf8proc_category_t kind = category_of(c);
  return kind == UTF8PROC_CATEGORY_ND || kind == UTF8PROC_CATEGORY_NL || kind == UTF8PROC_CATEGORY_NO;
}
bool is_of_word(char32_t c) {  // \w
  const utf8proc_category_t kind = category_of(c);
  return (kind >= UTF8PROC_CATEGORY_LU && kind <= UTF8PROC_CATEGORY_ME) || is_number(c) ||
         kind == UTF8PROC_CATEGORY_PC;
}
std::size_t before(std::string_view text, std::size_t at) {  // where the character before `at` begins
  do --at;
  while (!begins_character(text[at]));
  return at;
}

std::string composed(const std::string& text) {  // NFC
  if (std::all_of(text.begin(), text.end(), [](char c) { return static_cast<signed char>(c) >= 0; }))
    return text;
  utf8proc_uint8_t* result = nullptr;
  const auto length = utf8proc_map(reinterpret_cast<const utf8proc_uint8_t*>(text.data()),
                                   static_cast<utf8proc_ssize_t>(text.size()), &result,
                                   static_cast<utf8proc_option_t>(UTF8PROC_STABLE | UTF8PROC_COMPOSE));
  if (length < 0) fail("composing a text's characters: ", utf8proc_errmsg(length));
  const std::unique_ptr<utf8proc_uint8_t, decltype(&std::free)> owner(result, &std::free);
  return {reinterpret_cast<const char*>(result), static_cast<std::size_t>(length)};
}

// ---- Bytes as GPT-2 writes them ----
// Each byte has a visible character of its own: itself where it has one, the others from U+0100 on.

bool is_visible(int byte) { return (byte > 32 && byte < 127) || (byte > 160 && byte != 173); }

const std::unordered_map<char32_t, char>& bytes_of_characters() {
  static const auto table = [] {
    std::unordered_map<char32_t, char> out;
    char32_t next = 256;
    for (int byte = 0; byte < 256; ++byte)
      out[is_visible(byte) ? static_cast<char32_t>(byte) : next++] = static_cast<char>(byte);
    return out;
  }();
  return table;
}

// Nothing where a character stands for no byte.
std::optional<std::string> as_bytes(std::string_view name) {
  std::string out;
  for (std::size_t at = 0; at < name.size(); at += character_length(name[at])) {
    const auto found = bytes_of_characters().find(character_at(name, at));
    if (found == bytes_of_characters().end()) return {};
    out += found->second;
  }
  return out;
}

// The byte of "<0x0A>".
std::optional<char> fallback_byte(std::string_view name) {
  const auto is_digit = [](char c) { return (c >= '0' && c <= '9') || (c >= 'A' && c <= 'F'); };
  if (name.size() != 6 || !name.starts_with("<0x") || name[5] != '>' || !is_digit(name[3]) ||
      !is_digit(name[4]))
    return {};
  return static_cast<char>(std::strtol(std::string(name.substr(3, 2)).c_str(), nullptr, 16));
}

void replace_all(std::string& text, std::string_view from, std::string_view to) {
  if (from.empty() || text.find(from) == text.npos) return;
  std::string out;
  for (std::size_t at = 0;;) {
    const std::size_t found = text.find(from, at);
    out.append(text, at, found - at);
    if (found == text.npos) break;
    out += to;
    at = found + from.size();
  }
  text = std::move(out);
}

// ---- Added tokens ----

struct AddedToken {
  std::string text;
  Token token;
  bool single_word, takes_left, takes_right;  // takes: the white space there belongs to it
};

// Finds the leftmost of many texts, and of those that begin there the longest.
class AddedTokens {
 public:
  void add(AddedToken added) {
    if (added.text.empty()) return;
    auto& list = by_first_[static_cast<unsigned char>(added.text[0])];
    const auto longer = [&](const AddedToken& other) { return other.text.size() > added.text.size(); };
    list.insert(std::find_if_not(list.begin(), list.end(), longer), std::move(added));
    empty_ = false;
  }
  // Calls visit(piece, token) for each token and each piece between them that is not empty; token null: a piece.
  void split(std::string_view text, const std::function<void(std::string_view, const Token*)>& visit) const {
    std::size_t done = 0;
    for (std::size_t at = 0; at < text.size() && !empty_;) {
      const AddedToken* found = found_at(text, at);
      if (found == nullptr) {
        ++at;
        continue;
      }
      std::size_t begin = at, end = at + found->text.size();
      at = end;
      if (found->single_word && ((begin > 0 && is_of_word(character_at(text, before(text, begin)))) ||
                                 (end < text.size() && is_of_word(character_at(text, end)))))
        continue;
      if (found->takes_left)
        while (begin > done && is_space(character_at(text, before(text, begin)))) begin = before(text, begin);
      if (found->takes_right)
        while (end < text.size() && is_space(character_at(text, end))) end += character_length(text[end]);
      if (begin > done) visit(text.substr(done, begin - done), nullptr);
      visit(text.substr(begin, end - begin), &found->token);
      done = end;  // what the next match overlaps is said twice, as Hugging Face's library does
    }
    if (done < text.size()) visit(text.substr(done), nullptr);
  }

 private:
  const AddedToken* found_at(std::string_view text, std::size_t at) const {
    for (const AddedToken& added : by_first_[static_cast<unsigned char>(text[at])])
      if (text.substr(at).starts_with(added.text)) return &added;
    return nullptr;
  }

  std::array<std::vector<AddedToken>, 256> by_first_;
  bool empty_ = true;
};

// ---- Steps of the pipeline ----

// A text is never kept as a list of its words: each goes through all steps before the next one is cut.
enum class Place {
  first,
  later,
  joined
};  // it begins the text; it does not; it goes on from a text before this one
struct Piece {
  std::string_view text;
  Place place;

  Piece part(std::size_t begin, std::size_t end) const {
    return {text.substr(begin, end - begin), begin == 0 ? place : Place::later};
  }
};
using Normalise = std::function<std::string(std::string, bool joined)>;
using Take = std::function<void(const Piece&)>;
using Cut = std::function<void(const Piece&, const Take&)>;  // of a piece that is not empty

Normalise normaliser_of(const Json& part) {
  const std::string type = type_of(part);
  if (type == "NFC") return [](const std::string& text, bool) { return composed(text); };
  if (type == "Prepend")
    return [before = text_in(part, "prepend")](const std::string& text, bool joined) {
      return text.empty() || joined ? text : before + text;
    };
  if (type == "Replace" && member(member(part, "pattern"), "String").is_string())
    return [from = text_in(member(part, "pattern"), "String"), to = text_in(part, "content")](
               std::string text, bool) {
      replace_all(text, from, to);
      return text;
    };
  unknown("the normalizer", part, "NFC, Prepend, Replace of a String, and a Sequence of them");
}

// How many times as long a text may become at most.
double growth_of(const Json& part) {
  const std::string type = type_of(part);
  if (type == "NFC") return 3;  // Unicode's annex 15
  if (type == "Prepend") return 1 + static_cast<double>(text_in(part, "prepend").size());
  const std::string from = text_in(member(part, "pattern"), "String"), to = text_in(part, "content");
  return from.empty() ? 1 : std::max(1.0, static_cast<double>(to.size()) / static_cast<double>(from.size()));
}

// Matches and what lies between them, each a piece of its own.
Cut cut_by(const std::string& expression) {
  auto pattern = std::make_shared<Pattern>(expression);
  return [pattern](const Piece& piece, const Take& take) {
    const std::string_view text = piece.text;
    const auto add = [&](std::size_t begin, std::size_t end) {
      if (end > begin) take(piece.part(begin, end));
    };
    std::size_t done = 0, from = 0;
    for (Match match{}; from < text.size() && pattern->find(text, from, match);) {
      add(done, match.begin);
      add(match.begin, match.end);
      done = match.end;
      from = match.end > match.begin
                 ? match.end
                 : match.end + (match.end < text.size() ? character_length(text[match.end]) : 1);
    }
    add(done, text.size());
  };
}

Cut cut_digits(bool each) {
  return [each](const Piece& piece, const Take& take) {
    const std::string_view text = piece.text;
    std::size_t begin = 0;
    bool was_number = false;
    for (std::size_t at = 0; at < text.size(); at += character_length(text[at])) {
      const bool number = is_number(character_at(text, at));
      if (at > begin && (number != was_number || (number && each))) {
        take(piece.part(begin, at));
        begin = at;
      }
      was_number = number;
    }
    take(piece.part(begin, text.size()));
  };
}

Cut cut_metaspace(const Json& part) {
  const std::string mark = text_in(part, "replacement");
  if (mark.empty() || mark.size() != character_length(mark[0]))
    fail("the replacement of a Metaspace is ", shown(mark), "; it must be one character");
  const Json& scheme = member(part, "prepend_scheme");
  const std::string prepend = scheme.is_string()                        ? scheme.get<std::string>()
                              : flag_in(part, "add_prefix_space", true) ? "always"
                                                                        : "never";
  const bool split = flag_in(part, "split", true);
  return [=](const Piece& piece, const Take& take) {
    std::string text(piece.text);
    replace_all(text, " ", mark);
    const bool prepends = prepend == "always" ? piece.place != Place::joined
                                              : prepend == "first" && piece.place == Place::first;
    if (prepends && !text.starts_with(mark)) text = mark + text;
    const Piece all{text, piece.place};
    if (!split) return take(all);
    for (std::size_t at = 0; at < text.size();) {
      const std::size_t end = std::min(text.find(mark, at + 1), text.size());
      take(all.part(at, end));
      at = end;
    }
  };
}

Cut with_prefix_space() {
  return [](const Piece& piece, const Take& take) {
    if (piece.text.starts_with(' ') || piece.place == Place::joined) return take(piece);
    take({" " + std::string(piece.text), piece.place});
  };
}

void add_cuts(const Json& part, std::vector<Cut>& cuts) {
  const std::string type = type_of(part);
  if (type == "ByteLevel") {
    if (flag_in(part, "add_prefix_space", true)) cuts.push_back(with_prefix_space());
    if (flag_in(part, "use_regex", true)) cuts.push_back(cut_by(kGpt2Words));
  } else if (type == "Digits") {
    cuts.push_back(cut_digits(flag_in(part, "individual_digits")));
  } else if (type == "Metaspace") {
    cuts.push_back(cut_metaspace(part));
  } else if (type == "Split" && text_in(part, "behavior") == "Isolated" && !flag_in(part, "invert") &&
             member(member(part, "pattern"), "Regex").is_string()) {
    cuts.push_back(cut_by(text_in(member(part, "pattern"), "Regex")));
  } else {
    unknown(
        "the pre_tokenizer", part,
        "ByteLevel, Digits, Metaspace, Split (of a Regex, Isolated, not inverted), and a Sequence of them");
  }
}

// ---- From tokens to text ----

struct Decoder {
  bool of_bytes = false, fallback = false;
  std::string mark;  // becomes a space
  bool drops_first_mark = false;
  bool strips = false;         // one space at the front of the whole text
  bool spaces_between = true;  // no decoder at all
};

Decoder decoder_of(const Json& json) {
  Decoder out;
  each_part(json, "decoders", [&](const Json& part) {
    const std::string type = type_of(part);
    out.spaces_between = false;
    if (type == "ByteLevel") {
      out.of_bytes = true;
    } else if (type == "ByteFallback") {
      out.fallback = true;
    } else if (type == "Metaspace") {
      out.mark = text_in(part, "replacement");
      const Json& scheme = member(part, "prepend_scheme");
      out.drops_first_mark = scheme.is_string() ? scheme != "never" : flag_in(part, "add_prefix_space", true);
    } else if (type == "Replace" && text_in(part, "content") == " " &&
               member(member(part, "pattern"), "String").is_string()) {
      out.mark = text_in(member(part, "pattern"), "String");
    } else if (type == "Strip" && text_in(part, "content") == " " && member(part, "start") == 1 &&
               member(part, "stop") == 0) {
      out.strips = true;
    } else if (type != "Fuse") {
      unknown("the decoder", part,
              "ByteLevel, ByteFallback, Fuse, Metaspace, Replace (of a String by a space), Strip (of one "
              "space at the "
              "start), and a Sequence of them");
    }
  });
  return out;
}

}  // namespace

struct Tokenizer::Parts {
  std::optional<Bpe> bpe;
  AddedTokens added, added_after;  // looked for before and after the text is normalised
  std::vector<Normalise> normalisers;
  std::vector<Cut> cuts;
  std::string boundary;  // no token has it after another character: a text may be cut before it; "": not so
  Decoder decoder;
  std::vector<Token> before, after;  // the template
  std::unordered_map<std::string, Token> names;
  std::unordered_map<Token, std::string>
      texts;  // what each stands for, or its name where that depends on its place

  std::string normalised(std::string text, bool joined = false) const {
    for (const Normalise& normalise : normalisers) text = normalise(std::move(text), joined);
    return text;
  }
  void read_model(const Json& json, bool of_bytes);
  void read_added(const Json& json);
  void read_template(const Json& json);
  void add_words(const Piece& piece, std::size_t cut);
  void add_word(std::string_view word);

  // Of the text at hand.
  std::vector<Token> out;
  std::size_t done = 0, told = 0;  // bytes
  Progress progress;
};

void Tokenizer::Parts::read_model(const Json& json, bool of_bytes) {
  if (const Json& type = member(json, "type"); !type.is_null() && type != "BPE")
    fail("its model is a ", brief(type), ", and only BPE is known here");
  for (const char* key : {"continuing_subword_prefix", "end_of_word_suffix"})
    if (const Json& value = member(json, key); !value.is_null() && value != "")
      fail("a ", key, " is not known here");
  if (const Json& dropout = member(json, "dropout"); !dropout.is_null() && dropout != 0)
    fail("it drops merges at random (\"dropout\"); set that to null");

  const Json& vocabulary = member(json, "vocab");
  if (!vocabulary.is_object() || vocabulary.empty()) fail("its model has no \"vocab\"");
  for (const auto& [name, value] : vocabulary.items()) names.emplace(name, token_in(value, name));
  const auto symbols_of = [&](const std::string& name) {
    return of_bytes ? as_bytes(name).value_or("") : name;
  };
  std::unordered_map<std::string, Token> symbols;
  for (const auto& [name, token] : names)
    if (std::string text = symbols_of(name); !text.empty()) symbols.emplace(std::move(text), token);

  const Json& merges = member(json, "merges");
  if (!merges.is_array()) fail("its model has no \"merges\"");
  std::vector<Bpe::Pair> pairs;
  pairs.reserve(merges.size());
  for (const Json& merge : merges) {
    std::string left, right;
    if (merge.is_string()) {
      const auto& text = merge.get_ref<const std::string&>();
      const std::size_t space = text.find(' ');
      left = text.substr(0, space);
      if (space != text.npos) right = text.substr(space + 1);
    } else if (merge.is_array() && merge.size() == 2 && merge[0].is_string() && merge[1].is_string()) {
      left = merge[0].get<std::string>();
      right = merge[1].get<std::string>();
    }
    if (left.empty() || right.empty()) fail("merge ", pairs.size(), " is not a pair of tokens");
    for (const std::string* part : {&left, &right})
      if (of_bytes && !as_bytes(*part))
        fail("merge ", pairs.size(), " has characters that stand for no byte");
    pairs.push_back({symbols_of(left), symbols_of(right)});
  }
  Bpe::Settings settings;
  settings.of_bytes = of_bytes;
  settings.whole_words = flag_in(json, "ignore_merges");
  settings.byte_fallback = flag_in(json, "byte_fallback");
  settings.fuse_unknown = flag_in(json, "fuse_unk");
  if (const Json& name = member(json, "unk_token"); name.is_string()) {
    const auto found = names.find(name.get<std::string>());
    if (found == names.end()) fail("its unk_token ", brief(name), " is not in the vocabulary");
    settings.unknown = found->second;
  }
  bpe.emplace(std::move(symbols), pairs, settings);
}

void Tokenizer::Parts::read_added(const Json& json) {
  if (json.is_null()) return;
  if (!json.is_array()) fail("\"added_tokens\" is no list");
  for (const Json& item : json) {
    AddedToken token{text_in(item, "content"), 0, flag_in(item, "single_word"), flag_in(item, "lstrip"),
                     flag_in(item, "rstrip")};
    token.token = token_in(member(item, "id"), token.text);
    names.insert_or_assign(token.text, token.token);
    const bool after_normalising = flag_in(item, "normalized", !flag_in(item, "special"));
    if (after_normalising) token.text = normalised(token.text);
    (after_normalising ? added_after : added).add(std::move(token));
  }
}

// What stands around one text. Only TemplateProcessing adds tokens; ByteLevel moves offsets alone.
void Tokenizer::Parts::read_template(const Json& json) {
  each_part(json, "processors", [&](const Json& part) {
    const std::string type = type_of(part);
    if (type == "ByteLevel") return;
    if (type != "TemplateProcessing")
      unknown("the post_processor", part, "ByteLevel, TemplateProcessing, and a Sequence of them");
    const Json& single = member(part, "single");
    if (!single.is_array()) fail("the post_processor has no template for a single text");
    bool seen = false;
    for (const Json& item : single) {
      if (item.contains("Sequence")) {
        seen = true;
        continue;
      }
      const std::string name = text_in(member(item, "SpecialToken"), "id");
      const Json& ids = member(member(member(part, "special_tokens"), name.c_str()), "ids");
      if (!ids.is_array()) fail("the post_processor does not say which tokens ", shown(name), " is");
      for (const Json& id : ids) (seen ? after : before).push_back(token_in(id, name));
    }
  });
}

void Tokenizer::Parts::add_word(std::string_view word) {
  constexpr std::size_t kEvery = 1 << 18;
  bpe->encode(word, out);
  done += word.size();
  if (!progress || done < told + kEvery) return;
  told = done;
  progress(done);
}

// A stretch between added tokens, normalised, as words and their tokens: through the cuts from number `cut` on.
void Tokenizer::Parts::add_words(const Piece& piece, std::size_t cut) {
  if (piece.text.empty()) return;
  if (cut < cuts.size())
    return cuts[cut](piece, [this, next = cut + 1](const Piece& part) { add_words(part, next); });
  std::string_view rest = piece.text;
  if (!boundary.empty())
    for (std::size_t at = 1; (at = rest.find(boundary, at)) != rest.npos;) {
      if (rest.substr(0, at).ends_with(boundary)) {
        at += boundary.size();
        continue;
      }
      add_word(rest.substr(0, at));
      rest.remove_prefix(at);
      at = 1;
    }
  add_word(rest);
}

Tokenizer::Tokenizer(std::string_view text, const std::string& path) : parts_(std::make_unique<Parts>()) {
  const Json json = json_object(path, text);
  try {
    bool of_bytes = false;
    const Json& cutting = member(json, "pre_tokenizer");
    each_part(cutting, "pretokenizers", [&](const Json& part) {
      if (of_bytes) fail("its pre_tokenizer goes on after ByteLevel, which is not known here");
      add_cuts(part, parts_->cuts);
      of_bytes = type_of(part) == "ByteLevel";
      if (parts_->cuts.size() > kMostCuts) fail("its pre_tokenizer has more than ", kMostCuts, " parts");
    });
    double growth = 1;
    each_part(member(json, "normalizer"), "normalizers", [&](const Json& part) {
      parts_->normalisers.push_back(normaliser_of(part));
      growth *= growth_of(part);
      if (growth > kMostGrowth)
        fail("its normalizer could make a text more than ", kMostGrowth, " times as long");
    });
    parts_->read_model(member(json, "model"), of_bytes);
    parts_->read_added(member(json, "added_tokens"));
    parts_->read_template(member(json, "post_processor"));
    parts_->decoder = decoder_of(member(json, "decoder"));
  } catch (const std::exception& error) {
    fail(path, ": ", error.what());
  }
  // To SentencePiece a whole text is one long word, in which every word begins with this mark. If no token
  // has the mark after another character, no join crosses it, and the text may be cut there.
  const std::string mark = "\u2581";
  const auto crosses = [&](const auto& entry) {
    for (std::size_t at = 1; (at = entry.first.find(mark, at)) != std::string::npos; at += mark.size())
      if (!std::string_view(entry.first).substr(0, at).ends_with(mark)) return true;
    return false;
  };
  const auto& vocabulary = parts_->bpe->vocabulary();
  if (vocabulary.contains(mark) && std::none_of(vocabulary.begin(), vocabulary.end(), crosses))
    parts_->boundary = mark;

  const Decoder& decoder = parts_->decoder;
  for (const auto& [name, token] : parts_->names)
    parts_->texts[token] = decoder.of_bytes ? as_bytes(name).value_or(name) : name;
  for (const auto* around : {&parts_->before, &parts_->after})
    for (const Token token : *around)
      if (!parts_->texts.contains(token))
        fail(path, ": the post_processor adds token ", token, ", which is not in the vocabulary");
}
Tokenizer::~Tokenizer() = default;
Tokenizer::Tokenizer(Tokenizer&&) noexcept = default;

std::vector<Token> Tokenizer::encode(std::string_view text, Part part, const Progress& progress,
                                     std::vector<Added>* all_added) {
  Parts& parts = *parts_;
  const bool begins = part == Part::whole || part == Part::prompt;
  parts.out = begins ? parts.before : std::vector<Token>();
  parts.done = parts.told = 0;
  parts.progress = progress;
  parts.added.split(text, [&](std::string_view stretch, const Token* token) {
    if (token != nullptr) {
      const auto at = static_cast<std::size_t>(stretch.data() - text.data());
      if (all_added != nullptr) all_added->push_back({at, at + stretch.size(), parts.out.size()});
      return parts.out.push_back(*token);
    }
    const bool goes_on = part == Part::completion || part == Part::ending;
    Place place = stretch.data() != text.data() ? Place::later : goes_on ? Place::joined : Place::first;
    parts.added_after.split(parts.normalised(std::string(stretch), place == Place::joined),
                            [&](std::string_view piece, const Token* added) {
                              if (added != nullptr)
                                parts.out.push_back(*added);
                              else
                                parts.add_words({piece, place}, 0);
                              place = Place::later;
                            });
  });
  if (part == Part::whole || part == Part::ending)
    parts.out.insert(parts.out.end(), parts.after.begin(), parts.after.end());
  return std::exchange(parts.out, {});
}

std::string Tokenizer::decode(std::span<const Token> tokens) const {
  const Decoder& decoder = parts_->decoder;
  std::string out;
  for (std::size_t i = 0; i < tokens.size(); ++i) {
    const auto found = parts_->texts.find(tokens[i]);
    if (found == parts_->texts.end())
      fail("there is no token ", tokens[i], "; the vocabulary has ", size(), " numbers");
    if (i > 0 && decoder.spaces_between) out += ' ';
    if (const auto byte = decoder.fallback ? fallback_byte(found->second) : std::nullopt) {
      out += *byte;
      continue;
    }
    std::string text = found->second;
    if (i == 0 && decoder.drops_first_mark && text.starts_with(decoder.mark))
      text.erase(0, decoder.mark.size());
    replace_all(text, decoder.mark, " ");
    out += text;
  }
  if (decoder.strips && out.starts_with(' ')) out.erase(0, 1);
  return out;
}

std::int64_t Tokenizer::size() const {
  Token last = 0;
  for (const auto& [token, text] : parts_->texts) last = std::max(last, token);
  return std::int64_t{last} + 1;
}

bool Tokenizer::has(Token token) const { return parts_->texts.contains(token); }

std::optional<Token> Tokenizer::find(std::string_view name) const {
  const auto found = parts_->names.find(std::string(name));
  return found == parts_->names.end() ? std::nullopt : std::optional(found->second);
}

Tokenizer read_tokenizer(const std::string& path) {
  const bool is_folder = std::filesystem::is_directory(path);
  const std::string file = is_folder ? path + "/tokenizer.json" : path;
  if (is_folder && !std::filesystem::exists(file))
    fail(path, " has no tokenizer.json; save the tokenizer there with transformers' save_pretrained");
  return Tokenizer(io::read_text(file, kMostBytes), file);
}

}  // namespace scruple::train
