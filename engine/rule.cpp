#include "engine/rule.h"

#include <cstring>
#include <limits>
#include <string>
#include <string_view>

#include "engine/failure.h"
#include "engine/unit.h"
#include "optim/optim.def"
#include "optim/renamed.h"

namespace scruple {
namespace {

constexpr const char* kMaximize = "maximize";

#define SCRUPLE_OPTIMIZER(number, Rule) | 1u << number
static_assert((0u
#include "optim/optim.def"
               ) == (1u << kRuleCount) - 1,
              "optim.def: a number stands twice, and another is missing");
#undef SCRUPLE_OPTIMIZER

template <class Rule>
RuleInfo describe(int index) {
  RuleInfo info{Rule::name, Rule::doc, index, Rule::slots, {}, Accumulation::none};
  if constexpr (requires { Rule::accumulation; }) info.accumulation = Rule::accumulation;
  typename Rule::Hyper defaults;
  Rule::visit(defaults, [&](const char* name, double& value, Range range, const char* doc) {
    info.hypers.push_back({name, doc, value, range});
  });
  info.hypers.push_back({kMaximize, "climb instead of descend", 0, Range::flag});
  return info;
}

void check_range(const char* rule, const char* name, double value, Range range) {
  const bool fits = range == Range::flag       ? value == 0 || value == 1
                    : range == Range::fraction ? value >= 0 && value < 1
                                               : value >= 0 && value <= std::numeric_limits<float>::max();
  const char* wanted = range == Range::flag       ? "0 or 1"
                       : range == Range::fraction ? "at least 0 and below 1"
                                                  : "at least 0 and finite as a float";
  if (!fits) fail(SCRUPLE_INVALID, rule, ": ", name, " must be ", wanted, ", not ", value);
}

template <class Rule>
struct OptimizerOf final : scruple_optimizer {
  explicit OptimizerOf(const RuleInfo& info) : info_(info) {}

  const RuleInfo& rule() const override { return info_; }

  void set(const char* name, double value) override {
    with_field(hyper_, maximize, name, [&](auto& field, Range range) {
      check_range(Rule::name, name, value, range);
      field = static_cast<std::remove_reference_t<decltype(field)>>(value);
    });
  }
  double get(const char* name) const override {
    double value = 0;
    with_field(hyper_, maximize, name, [&](auto& field, Range) { value = static_cast<double>(field); });
    return value;
  }
  unsigned active() const override { return Rule::active(hyper_); }
  unsigned exact() const override { return exact_slots<Rule>(active()); }
  const char* problem() const override { return Rule::problem(hyper_); }
  double initial(int slot) const override {
    if constexpr (requires { Rule::initial(hyper_, slot); }) return Rule::initial(hyper_, slot);
    return 0;
  }
  HyperBytes hyper() const override { return packed<HyperBytes>(hyper_); }
  StepConstants prepare(i64 step, bool first) const override {
    typename Rule::Hyper h = hyper_;
    if (lr_at != nullptr) h.lr = *lr_at;
    const typename Rule::Step whole = Rule::prepare(h, step);
    if constexpr (requires { Rule::continued(whole); })
      if (!first) return packed<StepConstants>(Rule::continued(whole));
    return packed<StepConstants>(whole);
  }
  const char* problem_with_parts() const override {
    if constexpr (requires { Rule::problem_with_parts(hyper_); }) return Rule::problem_with_parts(hyper_);
    return "its update needs the whole gradient at once";
  }

 private:
  template <class Bytes>
  static Bytes packed(const auto& value) {
    static_assert(sizeof value <= sizeof(Bytes));
    Bytes out{};
    std::memcpy(out.bytes, &value, sizeof value);
    return out;
  }
  void with_field(auto& hyper, auto& maximize_flag, const char* wanted, auto&& use) const {
    bool found = false;
    if (wanted != nullptr) {
      const std::string_view now = current_name(wanted);
      Rule::visit(hyper, [&](const char* name, auto& value, Range range, const char*) {
        if (name != now) return;
        found = true;
        use(value, range);
      });
      if (!found && kMaximize == now) {
        found = true;
        use(maximize_flag, Range::flag);
      }
    }
    if (found) return;
    fail(SCRUPLE_INVALID, Rule::name, " has no hyperparameter '", wanted == nullptr ? "(null)" : wanted,
         "'; it has: ", names_of(info_.hypers));
  }

  const RuleInfo& info_;
  typename Rule::Hyper hyper_;
};

}  // namespace

const std::vector<RuleInfo>& rules() {
  static const std::vector<RuleInfo> kRules = [] {
    std::vector<RuleInfo> list(kRuleCount);
#define SCRUPLE_OPTIMIZER(number, Rule) list[number] = describe<Rule>(number);
#include "optim/optim.def"
#undef SCRUPLE_OPTIMIZER
    return list;
  }();
  return kRules;
}

std::unique_ptr<scruple_optimizer> make_optimizer(const char* wanted) {
  const std::string_view name = wanted == nullptr ? "(null)" : wanted;
#define SCRUPLE_OPTIMIZER(number, Rule) \
  if (name == Rule::name) return std::make_unique<OptimizerOf<Rule>>(rules()[number]);
#include "optim/optim.def"
#undef SCRUPLE_OPTIMIZER
  fail(SCRUPLE_INVALID, "unknown optimizer '", name, "'; known: ", names_of(rules()));
}

}  // namespace scruple
