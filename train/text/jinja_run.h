// What the closures of a chat template share while it is rendered, and what its operators, calls and loops do.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "io/file.h"
#include "train/text/jinja.h"
#include "train/text/jinja_filters.h"

namespace scruple::train::jinja {

inline constexpr int kMostDepth = 300;               // closures that call each other, also by macros
inline constexpr std::int64_t kMostWork = 1 << 23;   // closures, and 16 bytes of text each
inline constexpr std::int64_t kMostRange = 100'000;  // as in Jinja's sandbox

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

struct Run {
  void spend(std::int64_t more) {
    if ((work += more) > kMostWork) io::fail("it does not come to an end");
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

  Value* find(std::string_view name) {
    for (Scope* at = scope; at != nullptr; at = at->outer) {
      spend(static_cast<std::int64_t>(at->names.size()) / 16);
      if (Value* found = at->find(name)) return found;
    }
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
    if (++run.depth > kMostDepth) io::fail("blocks and macros call each other deeper than ", kMostDepth);
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
    Arguments out{run, {}, {}};
    for (const auto& [name, value] : all)
      if (name.empty())
        out.values.push_back(value(run));
      else
        out.named.emplace_back(name, value(run));
    run.line = line;
    return out;
  }
};

struct Macro {
  std::string name;
  std::vector<std::pair<std::string, Expression>> parameters;  // with their defaults, or none
  Statement body;
};

// ---- Operators ----

std::string described(const Value& value);
std::string written(Run& run, const Value& value);  // str()
Value signed_number(const Value& value, bool is_negative);
Value arithmetic(Run& run, const std::string& sign, const Value& a, const Value& b);
bool compare(Run& run, const std::string& sign, const Value& a, const Value& b);
Value item_of(Run& run, const Value& of, const Value& key);

// What stands between the colons of [from:to:step], or none.
using Bound = std::optional<std::int64_t>;
Value slice_of(Run& run, const Value& of, Bound from, Bound to, Bound by);

// ---- Calls, loops and {% set %} ----

Value call(Run& run, const std::string& name, const Arguments& given);

struct Target {
  std::vector<std::string> names;
  std::string member;  // of the namespace names[0]; "": the names themselves
};

void assign(Run& run, const Target& target, Value value);
void loop_over(Run& run, const std::vector<Value>& items, const Target& target, const Statement& body);

}  // namespace scruple::train::jinja
