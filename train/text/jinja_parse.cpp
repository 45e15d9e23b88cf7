// The tree of a chat template.
#include <algorithm>
#include <array>
#include <charconv>
#include <utility>

#include "train/text/jinja.h"
#include "train/text/jinja_lex.h"

namespace scruple::train::jinja {
namespace {

constexpr int kMostDepth = 100;  // of a tree

class Parser {
 public:
  explicit Parser(std::vector<Lexeme> lexemes) : lexemes_(std::move(lexemes)) {}

  NodePtr read() {
    NodePtr all = read_block({});
    if (here().type != Type::nothing) fail("\"", here().text, "\" ends nothing");
    return all;
  }

 private:
  using Names = std::vector<std::string_view>;

  // ---- Lexemes ----

  const Lexeme& here() const { return lexemes_[at_]; }
  const Lexeme& next() const { return lexemes_[std::min(at_ + 1, lexemes_.size() - 1)]; }
  template <class... Parts>
  [[noreturn]] void fail(const Parts&... parts) const {
    fail_at(here().line, parts...);
  }
  void go() { at_ += at_ + 1 < lexemes_.size(); }
  bool is(Type type, std::string_view text) const { return here().type == type && here().text == text; }
  bool takes(Type type, std::string_view text) {
    if (!is(type, text)) return false;
    go();
    return true;
  }
  bool takes_sign(std::string_view sign) { return takes(Type::sign, sign); }
  bool takes_name(std::string_view name) { return takes(Type::name, name); }
  void expect(std::string_view sign) {
    if (!takes_sign(sign)) fail("'", sign, "' is missing before ", shown());
  }
  std::string shown() const {
    return here().type == Type::end ? "the end of the mark" : "'" + here().text + "'";
  }
  std::string read_name() {
    if (here().type != Type::name) fail("a name is missing before ", shown());
    std::string name = here().text;
    go();
    return name;
  }
  void expect_end() {
    if (here().type != Type::end) fail(shown(), " is not expected here");
    go();
  }

  // ---- Nodes ----

  NodePtr make(Kind kind, std::string name = "") const {
    return std::make_unique<Node>(Node{kind, here().line, 1, std::move(name), {}, {}, {}});
  }
  static void add(Node& node, NodePtr part) {
    if (part != nullptr) node.depth = std::max(node.depth, part->depth + 1);
    if (node.depth > kMostDepth)
      fail_at(node.line, "expressions or blocks are nested deeper than ", kMostDepth);
    node.parts.push_back(std::move(part));
  }
  NodePtr joined(Kind kind, std::string name, NodePtr left, NodePtr right) const {
    NodePtr node = make(kind, std::move(name));
    add(*node, std::move(left));
    add(*node, std::move(right));
    return node;
  }
  struct Nested {  // where the reader calls itself
    explicit Nested(Parser& parser) : of(parser) {
      if (++of.nested_ > kMostDepth) of.fail("expressions or blocks are nested deeper than ", kMostDepth);
    }
    ~Nested() { --of.nested_; }
    Nested(const Nested&) = delete;
    Nested& operator=(const Nested&) = delete;
    Parser& of;
  };

  // ---- Statements ----

  // Up to a block that begins with one of these names, which is the next lexeme then.
  NodePtr read_block(const Names& until) {
    const Nested nested(*this);
    NodePtr block = make(Kind::block);
    for (;;) {
      if (here().type == Type::nothing) {
        if (!until.empty()) fail("a block has no {% ", until.back(), " %}");
        return block;
      }
      if (here().type == Type::data) {
        NodePtr text = make(Kind::text);
        text->value = Value(here().text);
        go();
        add(*block, std::move(text));
      } else if (here().type == Type::print) {
        go();
        NodePtr print = make(Kind::print);
        add(*print, read_tuple());
        expect_end();
        add(*block, std::move(print));
      } else {
        go();
        if (std::find(until.begin(), until.end(), here().text) != until.end()) return block;
        add(*block, read_statement());
      }
    }
  }

  NodePtr read_statement() {
    const std::string name = read_name();
    if (name == "if") return read_if();
    if (name == "for") return read_for();
    if (name == "set") return read_set();
    if (name == "macro") return read_macro();
    if (name == "generation") return read_body(make(Kind::generation), "endgeneration");
    if (name == "filter") {
      NodePtr node = make(Kind::filtered);
      node->names.push_back(read_name());
      if (is(Type::sign, "(")) fail("a filter block with arguments is not known here");
      return read_body(std::move(node), "endfilter");
    }
    if (name == "break" || name == "continue") {
      if (loops_ == 0) fail("{% ", name, " %} stands outside of a loop");
      NodePtr node = make(name == "break" ? Kind::leave : Kind::go_on);
      expect_end();
      return node;
    }
    fail("{% ", name,
         " %} is not known here; known are if, for, set, macro, generation, filter, break, continue");
  }

  NodePtr read_body(NodePtr node, std::string_view end) {
    expect_end();
    add(*node, read_block({end}));
    go();
    expect_end();
    return node;
  }

  // parts: condition, block, condition, block..., and at last perhaps the block of else
  NodePtr read_if() {
    NodePtr node = make(Kind::branch);
    for (;;) {
      add(*node, read_tuple());
      expect_end();
      add(*node, read_block({"elif", "else", "endif"}));
      if (!takes_name("elif")) break;
    }
    if (takes_name("else")) {
      expect_end();
      add(*node, read_block({"endif"}));
    }
    go();
    expect_end();
    return node;
  }

  // names: of the items; parts: list, condition or null, body, block of else or null
  NodePtr read_for() {
    NodePtr node = make(Kind::loop);
    node->names = read_targets();
    if (!takes_name("in")) fail("'in' is missing before ", shown());
    add(*node, read_tuple(/*with_choice=*/false));
    add(*node, takes_name("if") ? read_expression() : nullptr);
    if (is(Type::name, "recursive")) fail("a recursive loop is not known here");
    expect_end();
    ++loops_;
    add(*node, read_block({"else", "endfor"}));
    --loops_;
    NodePtr otherwise;
    if (takes_name("else")) {
      expect_end();
      otherwise = read_block({"endfor"});
    }
    go();
    expect_end();
    add(*node, std::move(otherwise));
    return node;
  }

  std::vector<std::string> read_targets() {
    const bool in_brackets = takes_sign("(");
    std::vector<std::string> names = {read_name()};
    while (takes_sign(",")) names.push_back(read_name());
    if (in_brackets) expect(")");
    return names;
  }

  // names: what is set; name: the member of the namespace names[0], if it is one; parts: the value, or of a capture the
  // block
  NodePtr read_set() {
    NodePtr node = make(Kind::assign);
    node->names = read_targets();
    if (node->names.size() == 1 && takes_sign(".")) node->name = read_name();
    if (takes_sign("=")) {
      add(*node, read_tuple());
      expect_end();
      return node;
    }
    if (is(Type::sign, "|")) fail("{% set %} of a block with a filter is not known here");
    if (node->names.size() > 1) fail("'=' is missing before ", shown());
    node->kind = Kind::capture;
    return read_body(std::move(node), "endset");
  }

  // name; names: of the arguments; parts: the body, and for each argument its default or null
  NodePtr read_macro() {
    NodePtr node = make(Kind::macro, read_name());
    std::vector<NodePtr> defaults;
    expect("(");
    while (!is(Type::sign, ")")) {
      node->names.push_back(read_name());
      defaults.push_back(takes_sign("=") ? read_expression() : nullptr);
      if (!takes_sign(",")) break;
    }
    expect(")");
    const int loops = std::exchange(loops_, 0);
    node = read_body(std::move(node), "endmacro");
    loops_ = loops;
    for (NodePtr& value : defaults) add(*node, std::move(value));
    return node;
  }

  // ---- Expressions, the loosest first ----

  NodePtr read_tuple(bool with_choice = true) {
    NodePtr first = with_choice ? read_expression() : read_any();
    if (!is(Type::sign, ",")) return first;
    NodePtr node = make(Kind::tuple);
    add(*node, std::move(first));
    while (takes_sign(",")) {
      if (here().type == Type::end || is(Type::sign, ")")) break;
      add(*node, with_choice ? read_expression() : read_any());
    }
    return node;
  }

  // parts: value, condition, the other value or null
  NodePtr read_expression() {
    const Nested nested(*this);
    NodePtr value = read_any();
    while (takes_name("if")) {
      NodePtr condition = read_any();
      value = joined(Kind::choice, "", std::move(value), std::move(condition));
      add(*value, takes_name("else") ? read_expression() : nullptr);
    }
    return value;
  }

  NodePtr read_any() {
    NodePtr left = read_all();
    while (takes_name("or")) left = joined(Kind::any_of, "", std::move(left), read_all());
    return left;
  }

  NodePtr read_all() {
    NodePtr left = read_not();
    while (takes_name("and")) left = joined(Kind::all_of, "", std::move(left), read_not());
    return left;
  }

  NodePtr read_not() {
    const Nested nested(*this);
    if (!is(Type::name, "not") || (next().type == Type::name && next().text == "in")) return read_compare();
    NodePtr node = make(Kind::negation);
    go();
    add(*node, read_not());
    return node;
  }

  // parts: the values; names: what is between them
  NodePtr read_compare() {
    NodePtr first = read_sum();
    NodePtr node = make(Kind::compare);
    add(*node, std::move(first));
    for (;;) {
      std::string sign;
      for (const char* known : {"==", "!=", "<", "<=", ">", ">="})
        if (is(Type::sign, known)) sign = known;
      if (is(Type::name, "in")) sign = "in";
      if (is(Type::name, "not") && next().type == Type::name && next().text == "in") sign = "not in";
      if (sign.empty()) break;
      go();
      if (sign == "not in") go();
      node->names.push_back(sign);
      add(*node, read_sum());
    }
    return node->names.empty() ? std::move(node->parts[0]) : std::move(node);
  }

  NodePtr read_sum() {
    NodePtr left = read_join();
    while (is(Type::sign, "+") || is(Type::sign, "-")) {
      std::string sign = here().text;
      go();
      left = joined(Kind::arithmetic, std::move(sign), std::move(left), read_join());
    }
    return left;
  }

  NodePtr read_join() {
    NodePtr left = read_product();
    while (takes_sign("~")) left = joined(Kind::join, "", std::move(left), read_product());
    return left;
  }

  NodePtr read_product() {
    NodePtr left = read_sign();
    while (is(Type::sign, "*") || is(Type::sign, "/") || is(Type::sign, "//") || is(Type::sign, "%")) {
      std::string sign = here().text;
      go();
      left = joined(Kind::arithmetic, std::move(sign), std::move(left), read_sign());
    }
    return left;
  }

  NodePtr read_sign(bool with_filters = true) {
    const Nested nested(*this);
    if (is(Type::sign, "-") || is(Type::sign, "+")) {
      NodePtr node = make(is(Type::sign, "-") ? Kind::minus : Kind::plus);
      go();
      add(*node, read_sign(/*with_filters=*/false));
      return with_filters ? read_filters(std::move(node)) : std::move(node);
    }
    NodePtr value = read_parts(read_first());
    if (is(Type::sign, "**")) fail("'**' is not known here");
    return with_filters ? read_filters(std::move(value)) : std::move(value);
  }

  NodePtr read_first() {
    NodePtr node = make(Kind::constant);
    const Lexeme first = here();
    go();
    const std::string& word = first.text;
    if (first.type == Type::text) {
      std::string text = word;
      for (; here().type == Type::text; go()) text += here().text;
      node->value = Value(std::move(text));
    } else if (first.type == Type::integer) {
      std::int64_t number = 0;
      if (std::from_chars(word.data(), word.data() + word.size(), number).ec != std::errc())
        fail("the number ", word, " is too large");
      node->value = Value(number);
    } else if (first.type == Type::real) {
      double number = 0;
      if (std::from_chars(word.data(), word.data() + word.size(), number).ec != std::errc())
        fail("the number ", word, " is out of range");
      node->value = Value(number);
    } else if (first.type == Type::name &&
               (word == "true" || word == "True" || word == "false" || word == "False")) {
      node->value = Value(word == "true" || word == "True");
    } else if (first.type == Type::name && (word == "none" || word == "None")) {
      node->value = Value(None{});
    } else if (first.type == Type::name) {
      node->kind = Kind::name;
      node->name = word;
    } else if (first.type == Type::sign && word == "(") {
      if (takes_sign(")"))
        node->kind = Kind::tuple;
      else {
        node = read_tuple();
        expect(")");
      }
    } else if (first.type == Type::sign && word == "[") {
      node->kind = Kind::list;
      while (!is(Type::sign, "]")) {
        add(*node, read_expression());
        if (!takes_sign(",")) break;
      }
      expect("]");
    } else if (first.type == Type::sign && word == "{") {
      node->kind = Kind::dict;  // parts: key, value, key, value...
      while (!is(Type::sign, "}")) {
        add(*node, read_expression());
        expect(":");
        add(*node, read_expression());
        if (!takes_sign(",")) break;
      }
      expect("}");
    } else {
      at_ -= at_ > 0 && first.type != Type::nothing;
      fail("a value is missing before ", shown());
    }
    return node;
  }

  // .name, [item], [from:to:step] and (arguments)
  NodePtr read_parts(NodePtr value) {
    for (;;) {
      if (takes_sign(".")) {
        NodePtr node = make(Kind::attribute);
        if (here().type != Type::name) fail("a name is missing behind '.'");
        node->name = read_name();
        add(*node, std::move(value));
        value = std::move(node);
      } else if (takes_sign("[")) {
        value = read_item(std::move(value));
      } else if (is(Type::sign, "(")) {
        value = read_call(make(Kind::call), std::move(value));
      } else {
        return value;
      }
    }
  }

  NodePtr read_item(NodePtr value) {
    NodePtr node = make(Kind::slice);
    add(*node, std::move(value));
    bool is_slice = false;
    for (std::size_t part = 0; part < 3; ++part) {
      add(*node, is(Type::sign, ":") || is(Type::sign, "]") ? nullptr : read_expression());
      if (!takes_sign(":")) break;
      is_slice = true;
    }
    expect("]");
    if (is_slice) {
      while (node->parts.size() < 4) node->parts.push_back(nullptr);
    } else {
      if (node->parts[1] == nullptr) fail("an item in '[]' is missing");
      node->kind = Kind::item;
    }
    return node;
  }

  // parts: the value, then the arguments; names: of the arguments, empty where they have none
  NodePtr read_call(NodePtr node, NodePtr value) {
    add(*node, std::move(value));
    if (!takes_sign("(")) return node;
    while (!is(Type::sign, ")")) {
      if (is(Type::sign, "*") || is(Type::sign, "**"))
        fail("'", here().text, "' before an argument is not known here");
      std::string name;
      if (here().type == Type::name && next().type == Type::sign && next().text == "=") {
        name = read_name();
        go();
      }
      node->names.push_back(std::move(name));
      add(*node, read_expression());
      if (!takes_sign(",")) break;
    }
    expect(")");
    return node;
  }

  NodePtr read_filters(NodePtr value) {
    for (;;) {
      if (takes_sign("|")) {
        NodePtr node = make(Kind::filter);
        node->name = read_name();
        value = read_call(std::move(node), std::move(value));
      } else if (takes_name("is")) {
        value = read_test(std::move(value));
      } else if (is(Type::sign, "(")) {
        value = read_call(make(Kind::call), std::move(value));
      } else {
        return value;
      }
    }
  }

  NodePtr read_test(NodePtr value) {
    const bool is_not = takes_name("not");
    NodePtr node = make(Kind::test, read_name());
    const bool is_word = here().type == Type::name;
    constexpr std::array<std::string_view, 6> kAfter = {"else", "or", "and", "is", "if", "not"};
    if (is(Type::sign, "(")) {
      node = read_call(std::move(node), std::move(value));
    } else {
      add(*node, std::move(value));
      const bool has_more =
          (is_word && std::find(kAfter.begin(), kAfter.end(), here().text) == kAfter.end()) ||
          here().type == Type::text || here().type == Type::integer || here().type == Type::real ||
          is(Type::sign, "[") || is(Type::sign, "{");
      if (has_more && !is(Type::name, "in")) {
        node->names.emplace_back();
        add(*node, read_parts(read_first()));
      }
    }
    if (!is_not) return node;
    NodePtr negation = make(Kind::negation);
    add(*negation, std::move(node));
    return negation;
  }

  std::vector<Lexeme> lexemes_;
  std::size_t at_ = 0;
  int nested_ = 0, loops_ = 0;
};

}  // namespace

NodePtr parse(std::string_view source) { return Parser(lexemes_of(source)).read(); }

}  // namespace scruple::train::jinja
