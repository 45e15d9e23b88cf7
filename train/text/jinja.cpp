// The language of chat templates, in three parts: what a template's closures share while it is rendered, what operators,
// calls and loops do, and the grammar. A rule of the grammar reads its part of the template and returns the closure that
// evaluates it, so there is no tree between them.
#include "train/text/jinja.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <ctime>
#include <functional>
#include <iomanip>
#include <limits>
#include <optional>
#include <sstream>

#include "io/file.h"
#include "io/json.h"
#include "train/text/jinja_filters.h"
#include "train/text/jinja_lex.h"

namespace scruple::train::jinja {
namespace {

using io::fail;

constexpr int kMostNested = 100;              // rules of the grammar that read themselves
constexpr int kMostDepth = 300;               // closures that call each other, also by macros
constexpr std::int64_t kMostWork = 1 << 23;   // closures, and 16 bytes of text each
constexpr std::int64_t kMostRange = 100'000;  // as in Jinja's sandbox

// ---- What the closures share ----

struct Scope {
  Scope* outer;
  std::vector<Member> names;

  Value* find(std::string_view name) {
    for (auto& [known, value] : names)
      if (known == name) return &value;
    return nullptr;
  }
  void set(const std::string& name, Value value) {
    if (Value* old = find(name))
      *old = std::move(value);
    else
      names.emplace_back(name, std::move(value));
  }
};

enum class Flow { goes_on, leaves, next };  // leaves: the loop; next: to its next round

std::int64_t size_of(const Value& value) {
  if (const std::string* text = value.text()) return static_cast<std::int64_t>(text->size()) / 16;
  if (const List* list = value.list()) return static_cast<std::int64_t>(list->items.size());
  if (const Dict* dict = value.dict()) return static_cast<std::int64_t>(dict->members.size());
  return 0;
}

struct Run {
  void spend(std::int64_t more) {
    if ((work += more) > kMostWork) fail("it does not come to an end");
  }
  Value costly(Value value) {
    spend(size_of(value));
    return value;
  }

  void write(std::string_view text) {
    spend(static_cast<std::int64_t>(text.size()) / 16);
    *out += text;
  }
  // What `act` would write. An error ends the rendering, so nothing is put back after one; nor is it below.
  template <class F>
  Value captured(F act) {
    std::string text;
    std::string* const before = std::exchange(out, &text);
    act();
    out = before;
    return text;
  }

  Value* find(std::string_view name) const {
    for (Scope* at = scope; at != nullptr; at = at->outer)
      if (Value* found = at->find(name)) return found;
    return nullptr;
  }
  template <class F>
  void in_scope(Scope* outer, F act) {
    Scope inner{outer, {}};
    Scope* const before = std::exchange(scope, &inner);
    act();
    scope = before;
  }

  Rendering& rendering;
  Scope globals;
  std::string* out = &rendering.text;
  Scope* scope = &globals;
  Flow flow = Flow::goes_on;
  std::int64_t work = 0;
  int depth = 0, line = 1;
};

struct Entered {  // a closure
  explicit Entered(Run& of) : run(of) {
    run.spend(1);
    if (++run.depth > kMostDepth) fail("blocks and macros call each other deeper than ", kMostDepth);
  }
  ~Entered() { --run.depth; }
  Entered(const Entered&) = delete;
  Entered& operator=(const Entered&) = delete;
  Run& run;
};

// What a rule of the grammar returns. Copies share one function.
template <class Result, class... Given>
class Closure {
 public:
  Closure() = default;
  template <class F>
  requires std::is_invocable_r_v<Result, const F&, Run&, Given...> Closure(F f)
      : shared_(std::make_shared<const std::function<Result(Run&, Given...)>>(std::move(f))) {}
  explicit operator bool() const { return shared_ != nullptr; }

  Result operator()(Run& run, Given... given) const {
    const Entered entered(run);
    return (*shared_)(run, given...);
  }

 private:
  std::shared_ptr<const std::function<Result(Run&, Given...)>> shared_;
};

using Statement = Closure<void>;
using Expression = Closure<Value>;
using Step = Closure<Value, const Value&>;  // what stands behind a value: .name, [item], | filter

struct Given {  // to a function, a macro, a filter or a test
  int line;
  std::vector<std::pair<std::string, Expression>> all;  // with their names, or ""

  Arguments evaluated(Run& run) const {
    Arguments out;
    for (const auto& [name, value] : all)
      if (name.empty())
        out.values.push_back(value(run));
      else
        out.named.emplace_back(name, value(run));
    run.line = line;
    return out;
  }
};

}  // namespace

struct Macro {
  std::string name;
  std::vector<std::pair<std::string, Expression>> parameters;  // with their defaults, or none
  Statement body;
};

namespace {

// ---- Operators ----

std::string described(const Value& value) {
  const auto* none = std::get_if<Undefined>(&value.data);
  return none == nullptr ? value.kind() : io::shown(none->name) + " (it is not defined)";
}

Value signed_number(const Value& value, bool is_negative) {
  if (!value.is_number()) fail("a sign before ", value.kind());
  if (std::holds_alternative<double>(value.data)) return is_negative ? -value.number() : value.number();
  return is_negative ? -value.integer() : value.integer();  // no constant and no count is the least number
}

Value whole_arithmetic(char sign, std::int64_t a, std::int64_t b) {
  std::int64_t out = 0;
  const bool fits = sign == '+'   ? !__builtin_add_overflow(a, b, &out)
                    : sign == '-' ? !__builtin_sub_overflow(a, b, &out)
                                  : !__builtin_mul_overflow(a, b, &out);
  if (!fits || out == std::numeric_limits<std::int64_t>::min()) fail("a number is too large");
  return out;
}

Value arithmetic(Run& run, const std::string& sign, const Value& a, const Value& b) {
  if (sign == "~") return run.costly(text_of(a) + text_of(b));
  if (a.is_safe || b.is_safe) fail("'", sign, "' behind 'safe' is not known here; it would escape HTML");
  if (sign == "+" && a.text() != nullptr && b.text() != nullptr) return run.costly(*a.text() + *b.text());
  if (sign == "+" && a.list() != nullptr && b.list() != nullptr && a.list()->is_tuple == b.list()->is_tuple) {
    std::vector<Value> items = a.list()->items;
    items.insert(items.end(), b.list()->items.begin(), b.list()->items.end());
    return run.costly(Value::list(std::move(items), a.list()->is_tuple));
  }
  if (!a.is_number() || !b.is_number()) fail("'", sign, "' between ", described(a), " and ", described(b));
  const bool whole = (a.is_integer() || a.boolean()) && (b.is_integer() || b.boolean());
  if ((sign == "/" || sign == "//" || sign == "%") && b.number() == 0) fail("a division by zero");
  if (whole && sign != "/") {
    const std::int64_t x = a.integer(), y = b.integer();
    if (sign != "//" && sign != "%") return whole_arithmetic(sign[0], x, y);
    const std::int64_t rest = x % y, correction = rest != 0 && (rest < 0) != (y < 0) ? 1 : 0;
    return sign == "%" ? rest + correction * y : x / y - correction;
  }
  const double x = a.number(), y = b.number();
  if (sign == "+") return x + y;
  if (sign == "-") return x - y;
  if (sign == "*") return x * y;
  if (sign == "/") return x / y;
  fail("'", sign, "' between numbers that are not whole is not known here");
}

bool compare(Run& run, const std::string& sign, const Value& a, const Value& b) {
  run.spend(size_of(a) + size_of(b));
  if (sign == "==") return equal(a, b);
  if (sign == "!=") return !equal(a, b);
  if (sign == "in") return test("in", a, {{b}, {}});
  if (sign == "not in") return !test("in", a, {{b}, {}});
  if (sign == "<") return less(a, b);
  if (sign == ">") return less(b, a);
  return sign == "<=" ? !less(b, a) : !less(a, b);
}

Value item_of(Run& run, const Value& of, const Value& key) {
  if (key.text() != nullptr && (of.dict() != nullptr || of.space() != nullptr || of.is_undefined())) {
    if (of.dict() == nullptr) return member_of(of, *key.text());
    const Value* found = of.dict()->find(*key.text());
    return found != nullptr ? *found : Value(Undefined{*key.text()});
  }
  if (of.is_undefined()) fail(described(of), ", and an item of it is asked for");
  if (!key.is_integer() || (of.text() == nullptr && of.list() == nullptr)) return Undefined{"an item"};
  if (of.text() != nullptr) run.spend(size_of(of));
  const std::vector<Value> characters = of.text() != nullptr ? items_of(of) : std::vector<Value>();
  const std::vector<Value>& items = of.text() != nullptr ? characters : of.list()->items;
  const auto size = static_cast<std::int64_t>(items.size());
  const std::int64_t at = key.integer() < 0 ? key.integer() + size : key.integer();
  return at < 0 || at >= size ? Value(Undefined{"an item"}) : items[static_cast<std::size_t>(at)];
}

// What stands between the colons of [from:to:step], or none.
using Bound = std::optional<std::int64_t>;

Value slice_of(Run& run, const Value& of, Bound from, Bound to, Bound by) {
  if (of.text() == nullptr && of.list() == nullptr) fail("a part of ", described(of), " is asked for");
  run.spend(size_of(of));
  const std::vector<Value> items = items_of(of);
  const auto size = static_cast<std::int64_t>(items.size());
  const std::int64_t step = by.value_or(1);
  if (step == 0 || step < -kMostRange || step > kMostRange) fail("a slice with steps of ", step);
  const std::int64_t low = step > 0 ? 0 : -1, high = step > 0 ? size : size - 1;
  const auto place = [&](Bound at, std::int64_t otherwise) {
    return at ? std::clamp(*at < 0 ? *at + size : *at, low, high) : otherwise;
  };
  std::vector<Value> out;
  const std::int64_t end = place(to, step > 0 ? high : low);
  for (std::int64_t at = place(from, step > 0 ? low : high); step > 0 ? at < end : at > end; at += step)
    out.push_back(items[static_cast<std::size_t>(at)]);
  if (of.list() != nullptr) return run.costly(Value::list(std::move(out), of.list()->is_tuple));
  std::string text;
  for (const Value& character : out) text += *character.text();
  return run.costly(std::move(text));
}

// ---- Calls ----

Value call_macro(Run& run, const Macro& macro, const Arguments& given) {
  const auto& parameters = macro.parameters;
  if (given.values.size() > parameters.size()) fail(macro.name, "() is given too many arguments");
  for (const auto& argument : given.named)
    if (std::none_of(parameters.begin(), parameters.end(),
                     [&](const auto& parameter) { return parameter.first == argument.first; }))
      fail(macro.name, "() has no argument ", io::shown(argument.first));
  const auto body = [&] {
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      const auto& [name, otherwise] = parameters[i];
      const Value* value = given.find(i, name);
      run.scope->set(name, value != nullptr ? *value : otherwise ? otherwise(run) : Undefined{name});
    }
    macro.body(run);
  };
  return run.captured([&] { run.in_scope(&run.globals, body); });
}

// As Python's strftime.
Value date(const std::string& day, const Arguments& given) {
  const Value* form = given.find(0, "format");
  if (form == nullptr || form->text() == nullptr || form->text()->size() > 100)
    fail("strftime_now() needs a text such as \"%d %b %Y\"");
  std::tm time{};
  std::istringstream(day) >> std::get_time(&time, "%Y-%m-%d");
  std::mktime(&time);  // the day of the week
  char out[1000];
  return std::string(out, std::strftime(out, sizeof out, form->text()->c_str(), &time));
}

Value range(Run& run, const Arguments& given) {
  if (given.values.empty()) fail("range() without a number");
  const bool one = given.values.size() == 1;
  const std::int64_t begin = one ? 0 : given.values[0].integer(), end = given.values[one ? 0 : 1].integer();
  const std::int64_t step = given.integer(2, "step", 1);
  if (std::abs(static_cast<double>(end) - static_cast<double>(begin)) > kMostRange || step == 0 ||
      std::abs(static_cast<double>(step)) > kMostRange)
    fail("range() of more than ", kMostRange, " numbers");
  std::vector<Value> numbers;
  for (std::int64_t at = begin; step > 0 ? at < end : at > end; at += step) numbers.emplace_back(at);
  return run.costly(Value::list(std::move(numbers)));
}

Value call(Run& run, const std::string& name, const Arguments& given) {
  if (const Value* found = run.find(name)) {
    if (name == "strftime_now" && found->text() != nullptr) return date(*found->text(), given);
    if (found->macro() == nullptr) fail(name, " is ", found->kind(), ", and cannot be called");
    const Value macro = *found;  // the name may get another value meanwhile
    return call_macro(run, *macro.macro(), given);
  }
  if (name == "raise_exception") {
    const Value* why = given.find(0, "message");
    fail("the template refuses it: ", why == nullptr ? "" : text_of(*why));
  }
  if (name == "namespace" || name == "dict") {
    if (!given.values.empty()) fail(name, "() of a value without a name is not known here");
    if (name == "dict") return Value::dict(given.named);
    const auto made = std::make_shared<Space>();
    for (const auto& [key, value] : given.named) made->set(key, value);
    return made;
  }
  if (name == "range") return range(run, given);
  if (name == "strftime_now")
    fail("it asks for today's date, and tomorrow the tokens would be others; give a date with --chat-date");
  fail(name, "() is not known here");
}

// ---- Loops and {% set %} ----

struct Target {
  std::vector<std::string> names;
  std::string member;  // of the namespace names[0]; "": the names themselves
};

void assign(Run& run, const Target& target, Value value) {
  const auto& [names, member] = target;
  if (!member.empty()) {
    const Value* of = run.find(names[0]);
    if (of == nullptr || of->space() == nullptr)
      fail(names[0], " is no namespace, so its members cannot be set");
    return of->space()->set(member, std::move(value));
  }
  if (names.size() == 1) return run.scope->set(names[0], std::move(value));
  const std::vector<Value> items = items_of(value);
  if (items.size() != names.size())
    fail(names.size(), " names are set, and there are ", items.size(), " values");
  for (std::size_t i = 0; i < names.size(); ++i) run.scope->set(names[i], items[i]);
}

// The variable `loop` of a round.
Value loop_value(const std::vector<Value>& items, std::size_t at) {
  const auto index = static_cast<std::int64_t>(at), size = static_cast<std::int64_t>(items.size());
  std::vector<Member> members = {{"index0", index},
                                 {"index", index + 1},
                                 {"revindex0", size - 1 - index},
                                 {"revindex", size - index},
                                 {"first", at == 0},
                                 {"last", index + 1 == size},
                                 {"length", size}};
  if (at > 0) members.emplace_back("previtem", items[at - 1]);
  if (index + 1 < size) members.emplace_back("nextitem", items[at + 1]);
  return Value::dict(std::move(members));
}

void loop_over(Run& run, const std::vector<Value>& items, const Target& target, const Statement& body) {
  for (std::size_t at = 0; at < items.size() && run.flow != Flow::leaves; ++at) {
    run.flow = Flow::goes_on;
    run.spend(8);  // of the loop's own values
    const std::size_t begin = run.out->size();
    run.in_scope(run.scope, [&] {
      assign(run, target, items[at]);
      run.scope->set("loop", loop_value(items, at));
      body(run);
    });
    if (items[at].dict() != nullptr && run.out == &run.rendering.text && run.out->size() > begin)
      run.rendering.written.push_back({items[at].dict(), {begin, run.out->size()}});
  }
  run.flow = Flow::goes_on;
}

// ---- The grammar ----

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
    return [=](Run& run) { run.write(text_of(value(run))); };
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
      std::vector<Value> items = items_of(list(run));
      run.spend(static_cast<std::int64_t>(items.size()));
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
    return [=](Run& run) { run.write(text_of(filter(name, text(run), {}))); };
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
    return [=](Run& run, const Value& value) {
      run.spend(size_of(value));
      return run.costly(method(name, value, given.evaluated(run)));
    };
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
    const bool looks_at_all = name != "length" && name != "default";
    return [=](Run& run, const Value& value) {
      if (looks_at_all || value.text() != nullptr) run.spend(size_of(value));
      return run.costly(filter(name, value, given.evaluated(run)));
    };
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
  } catch (const std::exception& error) {
    fail("line ", run.line, ": ", error.what());
  }
  return rendering;
}

}  // namespace scruple::train::jinja
