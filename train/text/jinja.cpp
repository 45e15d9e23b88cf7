// The grammar of chat templates. A rule reads its part of the template and returns the closure that evaluates it, so there
// is no tree between them.
#include "train/text/jinja.h"

#include <algorithm>
#include <array>
#include <limits>
#include <optional>

#include "io/file.h"
#include "train/text/jinja_lex.h"
#include "train/text/jinja_run.h"

namespace scruple::train::jinja {
namespace {

using io::fail;

constexpr int kMostNested = 100;  // rules of the grammar that read themselves

class Parser {
 public:
  explicit Parser(std::vector<Lexeme> lexemes) : lexemes_(std::move(lexemes)) {}

  Statement read() {
    Statement all = read_block({});
    if (here().type != Type::nothing) refuse("\"", here().text, "\" ends nothing");
    return all;
  }
  bool marks_generation() const { return marks_generation_; }

 private:
  using Words = std::initializer_list<std::string_view>;
  using Rule = Expression (Parser::*)();

  // ---- Lexemes ----

  const Lexeme& here() const { return lexemes_[at_]; }
  const Lexeme& next() const { return lexemes_[std::min(at_ + 1, lexemes_.size() - 1)]; }
  template <class... Parts>
  [[noreturn]] void refuse(const Parts&... parts) const {
    fail_at(here().line, parts...);
  }
  std::string shown() const {
    return here().type == Type::end ? "the end of the mark" : "'" + here().text + "'";
  }
  void go() { at_ += at_ + 1 < lexemes_.size(); }

  bool is(Type type, Words words) const {
    return here().type == type && std::find(words.begin(), words.end(), here().text) != words.end();
  }
  bool is_sign(std::string_view sign) const { return is(Type::sign, {sign}); }
  bool is_name(std::string_view name) const { return is(Type::name, {name}); }
  bool is_not_in() const { return is_name("not") && next().type == Type::name && next().text == "in"; }
  bool takes(bool is_it) {
    if (is_it) go();
    return is_it;
  }
  bool takes_sign(std::string_view sign) { return takes(is_sign(sign)); }
  bool takes_name(std::string_view name) { return takes(is_name(name)); }

  void expect(std::string_view sign) {
    if (!takes_sign(sign)) refuse("'", sign, "' is missing before ", shown());
  }
  void expect_end() {
    if (!takes(here().type == Type::end)) refuse(shown(), " is not expected here");
  }
  std::string read_name() {
    if (here().type != Type::name) refuse("a name is missing before ", shown());
    std::string name = here().text;
    go();
    return name;
  }
  // What stands between commas, up to the sign `end`.
  template <class F>
  void read_list(std::string_view end, F read_one) {
    while (!is_sign(end)) {
      read_one();
      if (!takes_sign(",")) break;
    }
    expect(end);
  }

  struct Nested {  // where a rule reads itself
    explicit Nested(Parser& parser) : of(parser) {
      if (++of.nested_ > kMostNested) of.refuse("expressions or blocks are nested deeper than ", kMostNested);
    }
    ~Nested() { --of.nested_; }
    Nested(const Nested&) = delete;
    Nested& operator=(const Nested&) = delete;
    Parser& of;
  };

  // ---- Statements ----

  // Up to a statement with one of these names, which is the next lexeme then.
  Statement read_block(Words until) {
    const Nested nested(*this);
    std::vector<std::pair<int, Statement>> parts;  // with their lines
    for (;;) {
      const auto [type, text, value, line] = here();
      if (type == Type::nothing && until.size() > 0) refuse("a block has no {% ", *(until.end() - 1), " %}");
      if (type == Type::nothing) break;
      go();
      if (type == Type::block && is(Type::name, until)) break;
      parts.emplace_back(line, type == Type::data    ? read_data(text)
                               : type == Type::print ? read_print()
                                                     : read_statement());
    }
    return [=](Run& run) {
      for (const auto& [line, part] : parts) {
        run.line = line;
        part(run);
        if (run.flow != Flow::goes_on) return;
      }
    };
  }

  static Statement read_data(const std::string& text) {
    return [=](Run& run) { run.write(text); };
  }

  Statement read_print() {
    const Expression value = read_tuple();
    expect_end();
    return [=](Run& run) {
      const Value shown = value(run);
      run.write(shown.text() != nullptr ? *shown.text() : written(run, shown));
    };
  }

  Statement read_statement() {
    const std::string name = read_name();
    if (name == "if") return read_if();
    if (name == "for") return read_for();
    if (name == "set") return read_set();
    if (name == "macro") return read_macro();
    if (name == "generation") return read_generation();
    if (name == "filter") return read_filtered();
    if (name == "break") return read_leave(Flow::leaves);
    if (name == "continue") return read_leave(Flow::next);
    --at_;
    refuse("{% ", name,
           " %} is not known here; known are if, for, set, macro, generation, filter, break, continue");
  }

  Statement read_if() {
    std::vector<std::pair<Expression, Statement>> branches;
    do {
      const Expression condition = read_tuple();
      expect_end();
      branches.emplace_back(condition, read_block({"elif", "else", "endif"}));
    } while (takes_name("elif"));
    const Statement otherwise = read_else("endif");
    return [=](Run& run) {
      for (const auto& [condition, block] : branches)
        if (condition(run).is_true()) return block(run);
      if (otherwise) otherwise(run);
    };
  }

  Statement read_else(std::string_view end) {
    Statement block;
    if (takes_name("else")) {
      expect_end();
      block = read_block({end});
    }
    go();
    expect_end();
    return block;
  }

  Statement read_for() {
    const Target target = {read_names(), ""};
    if (!takes_name("in")) refuse("'in' is missing before ", shown());
    const Expression list = read_tuple(&Parser::read_any);
    const Expression condition = takes_name("if") ? read_expression() : Expression();
    if (is_name("recursive")) refuse("a recursive loop is not known here");
    expect_end();
    ++loops_;
    const Statement body = read_block({"else", "endfor"});
    --loops_;
    const Statement otherwise = read_else("endfor");
    return [=](Run& run) {
      const Value all = list(run);
      run.spend(all.text() != nullptr ? static_cast<std::int64_t>(all.text()->size()) : size_of(all));
      std::vector<Value> items = items_of(all);
      const auto is_left_out = [&](const Value& item) {
        bool is_kept = false;
        run.in_scope(run.scope, [&] {
          assign(run, target, item);
          is_kept = condition(run).is_true();
        });
        return !is_kept;
      };
      if (condition) std::erase_if(items, is_left_out);
      if (items.empty() && otherwise)
        run.in_scope(run.scope, [&] { otherwise(run); });
      else
        loop_over(run, items, target, body);
    };
  }

  Statement read_leave(Flow flow) {
    if (loops_ == 0)
      refuse("{% ", flow == Flow::leaves ? "break" : "continue", " %} stands outside of a loop");
    expect_end();
    return [=](Run& run) { run.flow = flow; };
  }

  std::vector<std::string> read_names() {
    const bool in_brackets = takes_sign("(");
    std::vector<std::string> names = {read_name()};
    while (takes_sign(",")) names.push_back(read_name());
    if (in_brackets) expect(")");
    return names;
  }

  Statement read_set() {
    Target target = {read_names(), ""};
    if (target.names.size() == 1 && takes_sign(".")) target.member = read_name();
    Expression value;
    if (takes_sign("=")) {
      value = read_tuple();
      expect_end();
    } else {
      if (is_sign("|")) refuse("{% set %} of a block with a filter is not known here");
      if (target.names.size() > 1) refuse("'=' is missing before ", shown());
      value = read_captured("endset");
    }
    return [=](Run& run) { assign(run, target, value(run)); };
  }

  Statement read_filtered() {
    const std::string name = read_name();
    if (is_sign("(")) refuse("a filter block with arguments is not known here");
    const Expression text = read_captured("endfilter");
    return [=](Run& run) { run.write(text_of(filter(name, text(run), {run, {}, {}}))); };
  }

  Statement read_generation() {
    marks_generation_ = true;
    const Statement body = read_body("endgeneration");
    return [=](Run& run) {
      if (run.out != &run.rendering.text)
        fail("{% generation %} inside a macro or a {% set %} is not known here");
      const std::size_t begin = run.out->size();
      run.in_scope(run.scope, [&] { body(run); });
      run.rendering.generated.push_back({begin, run.out->size()});
    };
  }

  Statement read_macro() {
    Macro macro = {read_name(), {}, {}};
    expect("(");
    read_list(")", [&] {
      const std::string name = read_name();
      macro.parameters.emplace_back(name, takes_sign("=") ? read_expression() : Expression());
    });
    macro.body = read_body("endmacro");
    const auto shared = std::make_shared<const Macro>(std::move(macro));
    return [=](Run& run) { run.scope->set(shared->name, shared); };
  }

  Expression read_captured(std::string_view end) {
    const Statement body = read_body(end);
    return [=](Run& run) { return run.captured([&] { run.in_scope(run.scope, [&] { body(run); }); }); };
  }

  // From the end of a mark up to {% end %}. A loop around it is not left from here.
  Statement read_body(std::string_view end) {
    expect_end();
    const int loops = std::exchange(loops_, 0);
    const Statement body = read_block({end});
    loops_ = loops;
    go();
    expect_end();
    return body;
  }

  // ---- Expressions, the loosest first ----

  Expression read_tuple(Rule rule = &Parser::read_expression) {
    std::vector<Expression> parts = {(this->*rule)()};
    if (!is_sign(",")) return parts[0];
    while (takes_sign(","))
      if (here().type != Type::end && !is_sign(")")) parts.push_back((this->*rule)());
    return list_of(parts, /*is_tuple=*/true);
  }

  static Expression list_of(const std::vector<Expression>& parts, bool is_tuple) {
    return [=](Run& run) {
      std::vector<Value> items;
      for (const Expression& part : parts) items.push_back(part(run));
      return Value::list(std::move(items), is_tuple);
    };
  }

  // value if condition else other
  Expression read_expression() {
    const Nested nested(*this);
    const Expression value = read_any();
    if (!takes_name("if")) return value;
    const Expression condition = read_any();
    const Expression otherwise = takes_name("else") ? read_expression() : Expression();
    return [=](Run& run) {
      if (condition(run).is_true()) return value(run);
      return otherwise ? otherwise(run) : Value(Undefined{"an if without else"});
    };
  }

  Expression read_any() { return read_logic("or", &Parser::read_all, true); }
  Expression read_all() { return read_logic("and", &Parser::read_not, false); }

  // The first part that is true, or false, and else the last one.
  Expression read_logic(std::string_view word, Rule rule, bool wanted) {
    std::vector<Expression> parts = {(this->*rule)()};
    while (takes_name(word)) parts.push_back((this->*rule)());
    if (parts.size() == 1) return parts[0];
    return [=](Run& run) {
      Value value = parts[0](run);
      for (std::size_t i = 1; i < parts.size() && value.is_true() != wanted; ++i) value = parts[i](run);
      return value;
    };
  }

  Expression read_not() {
    const Nested nested(*this);
    if (!is_name("not") || is_not_in()) return read_compare();
    go();
    const Expression value = read_not();
    return [=](Run& run) -> Value { return !value(run).is_true(); };
  }

  using Operands = std::vector<std::pair<std::string, Expression>>;  // with the signs before them

  Expression read_compare() {
    const Expression first = read_sum();
    Operands others;
    while (is_not_in() || is_name("in") || is(Type::sign, {"==", "!=", "<", "<=", ">", ">="})) {
      const std::string sign = is_not_in() ? "not in" : here().text;
      go();
      if (sign == "not in") go();
      others.emplace_back(sign, read_sum());
    }
    if (others.empty()) return first;
    return [=](Run& run) -> Value {
      Value left = first(run);
      for (const auto& [sign, other] : others) {
        Value right = other(run);
        if (!compare(run, sign, left, right)) return false;
        left = std::move(right);
      }
      return true;
    };
  }

  Expression read_sum() { return read_chain({"+", "-"}, &Parser::read_join); }
  Expression read_join() { return read_chain({"~"}, &Parser::read_product); }
  Expression read_product() { return read_chain({"*", "/", "//", "%"}, &Parser::read_filtered_value); }

  // Operands with signs between them, from left to right.
  Expression read_chain(Words signs, Rule rule) {
    const Expression first = (this->*rule)();
    Operands others;
    while (is(Type::sign, signs)) {
      const std::string sign = here().text;
      go();
      others.emplace_back(sign, (this->*rule)());
    }
    if (others.empty()) return first;
    return [=](Run& run) {
      Value value = first(run);
      for (const auto& [sign, other] : others) value = arithmetic(run, sign, value, other(run));
      return value;
    };
  }

  // value | filter, value | filter(arguments), value is test; a sign belongs to the value
  Expression read_filtered_value() {
    const Expression value = read_signed();
    std::vector<Step> steps;
    for (;;)
      if (takes_sign("|"))
        steps.push_back(read_filter());
      else if (takes_name("is"))
        steps.push_back(read_test());
      else
        return followed(value, steps);
  }

  Expression read_signed() {
    const Nested nested(*this);
    const bool is_negative = is_sign("-");
    if (takes(is(Type::sign, {"-", "+"}))) {
      const Expression value = read_signed();
      return [=](Run& run) { return signed_number(value(run), is_negative); };
    }
    return read_item_of_value();
  }

  // value.name, value.method(arguments), value[item], value[from:to:step]
  Expression read_item_of_value() {
    const Expression value = read_value();
    std::vector<Step> steps;
    for (;;)
      if (takes_sign("."))
        steps.push_back(read_member());
      else if (takes_sign("["))
        steps.push_back(read_item());
      else
        break;
    if (is_sign("(")) refuse("a call of what has no name is not known here");
    if (is_sign("**")) refuse("'**' is not known here");
    return followed(value, steps);
  }

  static Expression followed(const Expression& first, const std::vector<Step>& steps) {
    if (steps.empty()) return first;
    return [=](Run& run) {
      Value value = first(run);
      for (const Step& step : steps) value = step(run, value);
      return value;
    };
  }

  Expression read_value() {
    if (here().type == Type::constant) return read_constant();
    if (here().type == Type::name) return read_named();
    if (takes_sign("(")) {
      if (takes_sign(")")) return list_of({}, /*is_tuple=*/true);
      const Expression value = read_tuple();
      expect(")");
      return value;
    }
    if (takes_sign("[")) {
      std::vector<Expression> items;
      read_list("]", [&] { items.push_back(read_expression()); });
      return list_of(items, /*is_tuple=*/false);
    }
    if (takes_sign("{")) return read_dict();
    refuse("a value is missing before ", shown());
  }

  static Expression constant(const Value& value) {
    return [=](Run&) { return value; };
  }

  Expression read_constant() {
    Value value = here().value;
    for (go(); value.text() != nullptr && here().value.text() != nullptr; go())  // 'a' 'b' is 'ab'
      value = *value.text() + *here().value.text();
    return constant(value);
  }

  Expression read_named() {
    const int line = here().line;
    const std::string name = read_name();
    if (name == "true" || name == "True") return constant(true);
    if (name == "false" || name == "False") return constant(false);
    if (name == "none" || name == "None") return constant(None{});
    if (is_sign("(")) {
      const Given given = read_arguments();
      return [=](Run& run) { return call(run, name, given.evaluated(run)); };
    }
    return [=](Run& run) {
      run.line = line;
      const Value* found = run.find(name);
      return found != nullptr ? *found : Value(Undefined{name});
    };
  }

  Expression read_dict() {
    std::vector<std::pair<Expression, Expression>> members;
    read_list("}", [&] {
      const Expression key = read_expression();
      expect(":");
      members.emplace_back(key, read_expression());
    });
    return [=](Run& run) {
      Space out;
      for (const auto& [key_of, value] : members) {
        const Value key = key_of(run);
        if (key.text() == nullptr) fail("a key that is ", key.kind(), " is not known here");
        out.set(*key.text(), value(run));
      }
      return Value::dict(std::move(out.members));
    };
  }

  // ---- What stands behind a value ----

  Step read_member() {
    if (here().type != Type::name) refuse("a name is missing behind '.'");
    const std::string name = read_name();
    if (!is_sign("(")) return [=](Run&, const Value& value) { return member_of(value, name); };
    const Given given = read_arguments();
    return [=](Run& run, const Value& value) { return method(name, value, given.evaluated(run)); };
  }

  Step read_item() {
    std::array<Expression, 3> parts;
    bool is_slice = false;
    for (Expression& part : parts) {
      if (!is(Type::sign, {":", "]"})) part = read_expression();
      if (!takes_sign(":")) break;
      is_slice = true;
    }
    expect("]");
    if (!is_slice && !parts[0]) refuse("an item in '[]' is missing");
    if (!is_slice) return [=](Run& run, const Value& value) { return item_of(run, value, parts[0](run)); };
    return [=](Run& run, const Value& value) {
      std::array<Bound, 3> bounds;
      for (std::size_t i = 0; i < 3; ++i)
        if (const Value at = parts[i] ? parts[i](run) : None{}; !at.is_none()) bounds[i] = at.integer();
      return slice_of(run, value, bounds[0], bounds[1], bounds[2]);
    };
  }

  Step read_filter() {
    const std::string name = read_name();
    const Given given = read_arguments();
    return [=](Run& run, const Value& value) { return filter(name, value, given.evaluated(run)); };
  }

  // is name, is not name, is name(argument), is name argument
  Step read_test() {
    const bool is_not = takes_name("not");
    const std::string name = read_name();
    Given given = read_arguments();
    const bool has_argument =
        is(Type::sign, {"[", "{"}) || here().type == Type::constant ||
        (here().type == Type::name && !is(Type::name, {"else", "or", "and", "is", "if", "not", "in"}));
    if (given.all.empty() && has_argument) given.all.emplace_back("", read_item_of_value());
    return [=](Run& run, const Value& value) -> Value {
      return test(name, value, given.evaluated(run)) != is_not;
    };
  }

  // (value, name=value), or nothing
  Given read_arguments() {
    Given given = {lexemes_[at_ - 1].line, {}};  // of the name before them
    if (!takes_sign("(")) return given;
    read_list(")", [&] {
      if (is(Type::sign, {"*", "**"})) refuse("'", here().text, "' before an argument is not known here");
      std::string name;
      if (here().type == Type::name && next().type == Type::sign && next().text == "=") {
        name = read_name();
        go();
      }
      given.all.emplace_back(name, read_expression());
    });
    return given;
  }

  std::vector<Lexeme> lexemes_;
  std::size_t at_ = 0;
  int nested_ = 0, loops_ = 0;
  bool marks_generation_ = false;
};

}  // namespace

// ---- The template ----

struct Template::Program {
  Statement all;
  bool marks_generation;
};

Template::Template(std::string_view source) {
  Parser parser(lexemes_of(source));
  Statement all = parser.read();
  program_ = std::make_shared<const Program>(Program{std::move(all), parser.marks_generation()});
}

bool Template::marks_generation() const { return program_->marks_generation; }

Rendering Template::render(const std::vector<Member>& names) const {
  Rendering rendering;
  Run run{rendering, {nullptr, names}};
  try {
    program_->all(run);
  } catch (const std::runtime_error& error) {
    fail("line ", run.line, ": ", error.what());
  }
  return rendering;
}

}  // namespace scruple::train::jinja
