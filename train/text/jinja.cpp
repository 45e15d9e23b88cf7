// Renders the tree of a chat template.
#include "train/text/jinja.h"

#include <algorithm>
#include <cmath>
#include <ctime>
#include <iomanip>
#include <limits>
#include <optional>
#include <sstream>

#include "io/file.h"
#include "io/json.h"

namespace scruple::train::jinja {
namespace {

using io::fail;

constexpr int kMostDepth = 300;               // of expressions and blocks in macros in macros
constexpr std::int64_t kMostWork = 1 << 23;   // nodes, and 16 bytes of text each
constexpr std::int64_t kMostRange = 100'000;  // as in Jinja's sandbox

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

enum class Flow { goes_on, leaves, next };

class Run {
 public:
  Run(const std::vector<Member>& names, Rendering& rendering)
      : out_(&rendering.text), rendering_(rendering), globals_{nullptr, names}, scope_(&globals_) {}

  void render(const Node& root) {
    try {
      execute(root);
    } catch (const std::exception& error) {
      fail("line ", line_, ": ", error.what());
    }
  }

 private:
  // ---- Limits ----

  struct Nested {
    Nested(Run& run, int line) : of(run) {
      of.line_ = line;
      of.spend(1);
      if (++of.depth_ > kMostDepth) fail("blocks and macros call each other deeper than ", kMostDepth);
    }
    ~Nested() { --of.depth_; }
    Nested(const Nested&) = delete;
    Nested& operator=(const Nested&) = delete;
    Run& of;
  };
  void spend(std::int64_t work) {
    if ((work_ += work) > kMostWork) fail("it does not come to an end");
  }
  static std::int64_t size_of(const Value& value) {
    if (const std::string* text = value.text()) return static_cast<std::int64_t>(text->size()) / 16;
    if (const List* list = value.list()) return static_cast<std::int64_t>(list->items.size());
    if (const Dict* dict = value.dict()) return static_cast<std::int64_t>(dict->members.size());
    return 0;
  }
  Value costly(Value value) {
    spend(size_of(value));
    return value;
  }
  void write(std::string_view text) {
    spend(static_cast<std::int64_t>(text.size()) / 16);
    *out_ += text;
  }

  // ---- Scopes ----

  struct Inner {
    Inner(Run& run, Scope* outer) : of(run), before(run.scope_), scope{outer, {}} { of.scope_ = &scope; }
    ~Inner() { of.scope_ = before; }
    Inner(const Inner&) = delete;
    Inner& operator=(const Inner&) = delete;
    Run& of;
    Scope* before;
    Scope scope;
  };
  Value* find(std::string_view name) {
    for (Scope* scope = scope_; scope != nullptr; scope = scope->outer)
      if (Value* found = scope->find(name)) return found;
    return nullptr;
  }
  struct Captured {  // what is written goes elsewhere
    Captured(Run& run) : of(run), before(run.out_) { of.out_ = &text; }
    ~Captured() { of.out_ = before; }
    Captured(const Captured&) = delete;
    Captured& operator=(const Captured&) = delete;
    Run& of;
    std::string* before;
    std::string text;
  };

  // ---- Statements ----

  Flow execute(const Node& node) {
    const Nested nested(*this, node.line);
    switch (node.kind) {
      case Kind::block:
        for (const NodePtr& part : node.parts)
          if (const Flow flow = execute(*part); flow != Flow::goes_on) return flow;
        return Flow::goes_on;
      case Kind::text: write(*node.value.text()); return Flow::goes_on;
      case Kind::print: write(text_of(evaluate(*node.parts[0]))); return Flow::goes_on;
      case Kind::branch: return execute_branch(node);
      case Kind::loop: execute_loop(node); return Flow::goes_on;
      case Kind::assign: assign(node.names, node.name, evaluate(*node.parts[0])); return Flow::goes_on;
      case Kind::capture: assign(node.names, node.name, captured(*node.parts[0])); return Flow::goes_on;
      case Kind::macro: scope_->set(node.name, Value(&node)); return Flow::goes_on;
      case Kind::generation: execute_generation(node); return Flow::goes_on;
      case Kind::filtered:
        write(text_of(filter(node.names[0], captured(*node.parts[0]), {})));
        return Flow::goes_on;
      case Kind::leave: return Flow::leaves;
      case Kind::go_on: return Flow::next;
      default: fail("an expression where a statement is expected");
    }
  }

  Flow execute_branch(const Node& node) {
    std::size_t part = 0;
    for (; part + 1 < node.parts.size(); part += 2)
      if (evaluate(*node.parts[part]).is_true()) return execute(*node.parts[part + 1]);
    return part < node.parts.size() ? execute(*node.parts[part]) : Flow::goes_on;
  }

  Value captured(const Node& block) {
    const Captured capture(*this);
    const Inner inner(*this, scope_);
    execute(block);
    return Value(capture.text);
  }

  void execute_generation(const Node& node) {
    if (out_ != &rendering_.text) fail("{% generation %} inside a macro or a {% set %} is not known here");
    const Inner inner(*this, scope_);
    const std::size_t begin = out_->size();
    execute(*node.parts[0]);
    rendering_.generated.push_back({begin, out_->size()});
  }

  void assign(const std::vector<std::string>& names, const std::string& member, Value value) {
    if (!member.empty()) {
      const Value* of = find(names[0]);
      if (of == nullptr || of->space() == nullptr)
        fail(names[0], " is no namespace, so its members cannot be set");
      return of->space()->set(member, std::move(value));
    }
    if (names.size() == 1) return scope_->set(names[0], std::move(value));
    const std::vector<Value> items = items_of(value);
    if (items.size() != names.size())
      fail(names.size(), " names are set, and there are ", items.size(), " values");
    for (std::size_t i = 0; i < names.size(); ++i) scope_->set(names[i], items[i]);
  }

  static Value loop_value(const std::vector<Value>& items, std::size_t at) {
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

  void execute_loop(const Node& node) {
    std::vector<Value> items = items_of(evaluate(*node.parts[0]));
    spend(static_cast<std::int64_t>(items.size()));
    if (node.parts[1] != nullptr) {
      std::vector<Value> kept;
      for (Value& item : items) {
        const Inner inner(*this, scope_);
        assign(node.names, "", item);
        if (evaluate(*node.parts[1]).is_true()) kept.push_back(std::move(item));
      }
      items = std::move(kept);
    }
    if (items.empty() && node.parts[3] != nullptr) {
      const Inner inner(*this, scope_);
      execute(*node.parts[3]);
    }
    for (std::size_t at = 0; at < items.size(); ++at) {
      const Inner inner(*this, scope_);
      spend(8);  // of the loop's own values
      assign(node.names, "", items[at]);
      scope_->set("loop", loop_value(items, at));
      const std::size_t begin = out_->size();
      const Flow flow = execute(*node.parts[2]);
      if (const Dict* object = items[at].dict(); object && out_ == &rendering_.text && out_->size() > begin)
        rendering_.written.push_back({object, {begin, out_->size()}});
      if (flow == Flow::leaves) return;
    }
  }

  // ---- Expressions ----

  Value evaluate(const Node& node) {
    const Nested nested(*this, node.line);
    const auto part = [&](std::size_t i) { return evaluate(*node.parts[i]); };
    switch (node.kind) {
      case Kind::constant: return node.value;
      case Kind::name: {
        const Value* found = find(node.name);
        return found != nullptr ? *found : Value(Undefined{node.name});
      }
      case Kind::list:
      case Kind::tuple: return evaluate_list(node);
      case Kind::dict: return evaluate_dict(node);
      case Kind::negation: return !part(0).is_true();
      case Kind::minus:
      case Kind::plus: return signed_number(part(0), node.kind == Kind::minus);
      case Kind::arithmetic: return arithmetic(node.name, part(0), part(1));
      case Kind::join: return costly(text_of(part(0)) + text_of(part(1)));
      case Kind::all_of: {
        Value left = part(0);
        return left.is_true() ? part(1) : left;
      }
      case Kind::any_of: {
        Value left = part(0);
        return left.is_true() ? left : part(1);
      }
      case Kind::compare: return compare(node);
      case Kind::choice:
        return part(1).is_true()          ? part(0)
               : node.parts[2] != nullptr ? part(2)
                                          : Value(Undefined{"an if without else"});
      case Kind::attribute: return member_of(part(0), node.name);
      case Kind::item: return item(part(0), part(1));
      case Kind::slice: return evaluate_slice(node);
      case Kind::call: return call(node);
      case Kind::filter: {
        const Value value = part(0);
        const bool looks_at_all = node.name != "length" && node.name != "default";
        if (looks_at_all || value.text() != nullptr) spend(size_of(value));
        return costly(filter(node.name, value, arguments_of(node)));
      }
      case Kind::test: {
        const Value value = part(0);
        return test(node.name, value, arguments_of(node));
      }
      default: fail("a statement where an expression is expected");
    }
  }

  Value evaluate_list(const Node& node) {
    std::vector<Value> items;
    for (const NodePtr& part : node.parts) items.push_back(evaluate(*part));
    return Value::list(std::move(items), node.kind == Kind::tuple);
  }

  Value evaluate_dict(const Node& node) {
    Space members;
    for (std::size_t i = 0; i < node.parts.size(); i += 2) {
      const Value key = evaluate(*node.parts[i]);
      if (key.text() == nullptr) fail("a key that is ", key.kind(), " is not known here");
      members.set(*key.text(), evaluate(*node.parts[i + 1]));
    }
    return Value::dict(std::move(members.members));
  }

  static Value signed_number(const Value& value, bool negative) {
    if (!value.is_number()) fail("a sign before ", value.kind());
    if (std::holds_alternative<double>(value.data)) return negative ? -value.number() : value.number();
    return negative ? -value.integer() : value.integer();  // no constant and no count is the least number
  }

  static Value whole_arithmetic(char sign, std::int64_t a, std::int64_t b) {
    std::int64_t out = 0;
    const bool fits = sign == '+'   ? !__builtin_add_overflow(a, b, &out)
                      : sign == '-' ? !__builtin_sub_overflow(a, b, &out)
                                    : !__builtin_mul_overflow(a, b, &out);
    if (!fits || out == std::numeric_limits<std::int64_t>::min()) fail("a number is too large");
    return out;
  }

  Value arithmetic(const std::string& sign, const Value& a, const Value& b) {
    if (a.is_safe || b.is_safe) fail("'", sign, "' behind 'safe' is not known here; it would escape HTML");
    if (sign == "+" && a.text() != nullptr && b.text() != nullptr) return costly(*a.text() + *b.text());
    if (sign == "+" && a.list() != nullptr && b.list() != nullptr &&
        a.list()->is_tuple == b.list()->is_tuple) {
      std::vector<Value> items = a.list()->items;
      items.insert(items.end(), b.list()->items.begin(), b.list()->items.end());
      return costly(Value::list(std::move(items), a.list()->is_tuple));
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

  static std::string described(const Value& value) {
    const auto* none = std::get_if<Undefined>(&value.data);
    return none == nullptr ? value.kind() : io::shown(none->name) + " (it is not defined)";
  }

  Value compare(const Node& node) {
    Value left = evaluate(*node.parts[0]);
    for (std::size_t i = 0; i < node.names.size(); ++i) {
      const std::string& sign = node.names[i];
      Value right = evaluate(*node.parts[i + 1]);
      spend(size_of(left) + size_of(right));
      const bool is_so = sign == "=="       ? equal(left, right)
                         : sign == "!="     ? !equal(left, right)
                         : sign == "in"     ? test("in", left, {{right}, {}})
                         : sign == "not in" ? !test("in", left, {{right}, {}})
                         : sign == "<"      ? less(left, right)
                         : sign == ">"      ? less(right, left)
                         : sign == "<="     ? !less(right, left)
                                            : !less(left, right);
      if (!is_so) return false;
      left = std::move(right);
    }
    return true;
  }

  Value item(const Value& of, const Value& key) {
    if (key.text() != nullptr && (of.dict() != nullptr || of.space() != nullptr || of.is_undefined())) {
      if (of.dict() == nullptr) return member_of(of, *key.text());
      const Value* found = of.dict()->find(*key.text());
      return found != nullptr ? *found : Value(Undefined{*key.text()});
    }
    if (of.is_undefined()) fail(described(of), ", and an item of it is asked for");
    if (!key.is_integer()) return Undefined{"an item"};
    std::int64_t at = key.integer();
    if (const std::string* text = of.text()) {
      const auto all = characters_of(*text);
      spend(size_of(of));
      if (at < 0) at += static_cast<std::int64_t>(all.size());
      if (at < 0 || at >= static_cast<std::int64_t>(all.size())) return Undefined{"a character"};
      return std::string(all[static_cast<std::size_t>(at)]);
    }
    if (of.list() == nullptr) return Undefined{"an item"};
    const std::vector<Value>& items = of.list()->items;
    if (at < 0) at += static_cast<std::int64_t>(items.size());
    if (at < 0 || at >= static_cast<std::int64_t>(items.size())) return Undefined{"an item"};
    return items[static_cast<std::size_t>(at)];
  }

  Value evaluate_slice(const Node& node) {
    const Value of = evaluate(*node.parts[0]);
    const std::string* text = of.text();
    if (text == nullptr && of.list() == nullptr) fail("a part of ", described(of), " is asked for");
    spend(size_of(of));
    const std::vector<std::string_view> characters =
        text != nullptr ? characters_of(*text) : std::vector<std::string_view>();
    const auto size =
        static_cast<std::int64_t>(text != nullptr ? characters.size() : of.list()->items.size());
    const auto given = [&](std::size_t part) -> std::optional<std::int64_t> {
      if (node.parts[part] == nullptr) return {};
      const Value value = evaluate(*node.parts[part]);
      return value.is_none() ? std::optional<std::int64_t>() : value.integer();
    };
    const std::int64_t step = given(3).value_or(1);
    if (step == 0 || step < -kMostRange || step > kMostRange) fail("a slice with steps of ", step);
    const std::int64_t low = step > 0 ? 0 : -1, high = step > 0 ? size : size - 1;
    const auto bound = [&](std::size_t part, std::int64_t otherwise) {
      const std::optional<std::int64_t> at = given(part);
      return at ? std::clamp(*at < 0 ? *at + size : *at, low, high) : otherwise;
    };
    std::int64_t at = bound(1, step > 0 ? low : high);
    const std::int64_t end = bound(2, step > 0 ? high : low);
    std::string out;
    std::vector<Value> items;
    for (; step > 0 ? at < end : at > end; at += step) {
      if (text != nullptr)
        out += characters[static_cast<std::size_t>(at)];
      else
        items.push_back(of.list()->items[static_cast<std::size_t>(at)]);
    }
    return text != nullptr ? costly(std::move(out))
                           : costly(Value::list(std::move(items), of.list()->is_tuple));
  }

  // ---- Calls ----

  Arguments arguments_of(const Node& node) {
    Arguments out;
    for (std::size_t i = 0; i < node.names.size(); ++i) {
      Value value = evaluate(*node.parts[i + 1]);
      if (node.names[i].empty())
        out.values.push_back(std::move(value));
      else
        out.named.emplace_back(node.names[i], std::move(value));
    }
    return out;
  }

  Value call(const Node& node) {
    const Node& callee = *node.parts[0];
    if (callee.kind == Kind::attribute) {
      const Value value = evaluate(*callee.parts[0]);
      spend(size_of(value));
      const Arguments arguments = arguments_of(node);
      line_ = node.line;
      return costly(method(callee.name, value, arguments));
    }
    if (callee.kind != Kind::name) fail("a call of what has no name is not known here");
    const Arguments arguments = arguments_of(node);
    line_ = node.line;
    if (const Value* found = find(callee.name)) {
      if (callee.name == "strftime_now" && found->text() != nullptr) return date(*found->text(), arguments);
      if (found->macro() == nullptr) fail(callee.name, " is ", found->kind(), ", and cannot be called");
      return call_macro(*found->macro(), arguments);
    }
    return call_function(callee.name, arguments);
  }

  Value call_macro(const Node& macro, const Arguments& arguments) {
    if (arguments.values.size() > macro.names.size()) fail(macro.name, "() is given too many arguments");
    const Captured capture(*this);
    const Inner inner(*this, &globals_);
    for (const auto& [name, value] : arguments.named)
      if (std::find(macro.names.begin(), macro.names.end(), name) == macro.names.end())
        fail(macro.name, "() has no argument ", io::shown(name));
    for (std::size_t i = 0; i < macro.names.size(); ++i) {
      const Value* given = arguments.find(i, macro.names[i]);
      const Node* otherwise = macro.parts[i + 1].get();
      scope_->set(macro.names[i], given != nullptr       ? *given
                                  : otherwise != nullptr ? evaluate(*otherwise)
                                                         : Value(Undefined{macro.names[i]}));
    }
    execute(*macro.parts[0]);
    return Value(capture.text);
  }

  Value call_function(const std::string& name, const Arguments& arguments) {
    if (name == "raise_exception") {
      const Value* why = arguments.find(0, "message");
      fail("the template refuses it: ", why == nullptr ? "" : text_of(*why));
    }
    if (name == "namespace" || name == "dict") {
      if (!arguments.values.empty()) fail(name, "() of a value without a name is not known here");
      if (name == "dict") return Value::dict(arguments.named);
      const auto made = std::make_shared<Space>();
      for (const auto& [key, value] : arguments.named) made->set(key, value);
      return Value(made);
    }
    if (name == "range") return range(arguments);
    if (name == "strftime_now")
      fail("it asks for today's date, and tomorrow the tokens would be others; give a date with --chat-date");
    fail(name, "() is not known here");
  }

  static Value date(const std::string& day, const Arguments& arguments) {
    const Value* form = arguments.find(0, "format");
    if (form == nullptr || form->text() == nullptr || form->text()->size() > 100)
      fail("strftime_now() needs a text such as \"%d %b %Y\"");
    std::tm time{};
    std::istringstream(day) >> std::get_time(&time, "%Y-%m-%d");
    std::mktime(&time);  // the day of the week
    char out[1000];
    return std::string(out, std::strftime(out, sizeof out, form->text()->c_str(), &time));
  }

  Value range(const Arguments& arguments) {
    if (arguments.values.empty()) fail("range() without a number");
    const bool one = arguments.values.size() == 1;
    const std::int64_t begin = one ? 0 : arguments.values[0].integer();
    const std::int64_t end = arguments.values[one ? 0 : 1].integer(), step = arguments.integer(2, "step", 1);
    if (std::abs(static_cast<double>(end) - static_cast<double>(begin)) > kMostRange || step == 0 ||
        std::abs(static_cast<double>(step)) > kMostRange)
      fail("range() of more than ", kMostRange, " numbers");
    std::vector<Value> numbers;
    for (std::int64_t at = begin; step > 0 ? at < end : at > end; at += step) numbers.emplace_back(at);
    return costly(Value::list(std::move(numbers)));
  }

  std::string* out_;
  Rendering& rendering_;
  Scope globals_;
  Scope* scope_;
  std::int64_t work_ = 0;
  int depth_ = 0, line_ = 1;
};

bool has_generation(const Node& node) {
  return node.kind == Kind::generation ||
         std::any_of(node.parts.begin(), node.parts.end(),
                     [](const NodePtr& part) { return part != nullptr && has_generation(*part); });
}

}  // namespace

Template::Template(std::string_view source)
    : root_(parse(source)), marks_generation_(has_generation(*root_)) {}

Rendering Template::render(const std::vector<Member>& names) const {
  Rendering rendering;
  Run(names, rendering).render(*root_);
  return rendering;
}

}  // namespace scruple::train::jinja
