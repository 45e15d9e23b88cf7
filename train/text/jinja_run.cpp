#include "train/text/jinja_run.h"

#include <algorithm>
#include <cmath>
#include <ctime>
#include <iomanip>
#include <limits>
#include <sstream>

#include "io/json.h"

namespace scruple::train::jinja {

using io::fail;

void spend(Run& run, std::int64_t work) { run.spend(work); }

// ---- Operators ----

std::string described(const Value& value) {
  const auto* none = std::get_if<Undefined>(&value.data);
  return none == nullptr ? value.kind() : io::shown(none->name) + " (it is not defined)";
}

std::string written(Run& run, const Value& value) {
  run.spend(weight_of(value));
  return text_of(value);
}

Value signed_number(const Value& value, bool is_negative) {
  if (!value.is_number()) fail("a sign before ", value.kind());
  if (std::holds_alternative<double>(value.data)) return is_negative ? -value.number() : value.number();
  return is_negative ? -value.integer() : value.integer();  // no constant and no count is the least number
}

static Value whole_arithmetic(char sign, std::int64_t a, std::int64_t b) {
  std::int64_t out = 0;
  const bool fits = sign == '+'   ? !__builtin_add_overflow(a, b, &out)
                    : sign == '-' ? !__builtin_sub_overflow(a, b, &out)
                                  : !__builtin_mul_overflow(a, b, &out);
  if (!fits || out == std::numeric_limits<std::int64_t>::min()) fail("a number is too large");
  return out;
}

Value arithmetic(Run& run, const std::string& sign, const Value& a, const Value& b) {
  if (sign == "~") return run.costly(written(run, a) + written(run, b));
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
  if (sign == "not in") return !compare(run, "in", a, b);
  if (sign == "==" || sign == "!=" || sign == "in") return test(sign, a, {run, {b}, {}});
  run.spend(std::min(weight_of(a), weight_of(b)));
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
  const auto item = [&](const auto& items) -> Value {
    const auto size = static_cast<std::int64_t>(items.size());
    const std::int64_t at = key.integer() < 0 ? key.integer() + size : key.integer();
    if (at < 0 || at >= size) return Undefined{"an item"};
    const auto& found = items[static_cast<std::size_t>(at)];
    if constexpr (std::is_same_v<decltype(found), const Value&>)
      return found;
    else
      return std::string(found);
  };
  if (of.list() != nullptr) return item(of.list()->items);
  run.spend(size_of(of));
  return item(characters_of(*of.text()));
}

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

static Value call_macro(Run& run, const Macro& macro, const Arguments& given) {
  const auto& parameters = macro.parameters;
  run.spend(static_cast<std::int64_t>(parameters.size() * given.size()) / 16);
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
static Value date(const std::string& day, const Arguments& given) {
  const Value* form = given.find(0, "format");
  if (form == nullptr || form->text() == nullptr || form->text()->size() > 100)
    fail("strftime_now() needs a text such as \"%d %b %Y\"");
  std::tm time{};
  std::istringstream(day) >> std::get_time(&time, "%Y-%m-%d");
  std::mktime(&time);  // the day of the week
  char out[1000];
  return std::string(out, std::strftime(out, sizeof out, form->text()->c_str(), &time));
}

static Value range(Run& run, const Arguments& given) {
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

void assign(Run& run, const Target& target, Value value) {
  const auto& [names, member] = target;
  run.spend(static_cast<std::int64_t>(run.scope->names.size()) / 16);
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

}  // namespace scruple::train::jinja
