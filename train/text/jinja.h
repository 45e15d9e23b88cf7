// Chat templates: the part of the language Jinja that they use, with the settings of transformers (blocks' lines are
// trimmed, `tojson` as Python's json, `generation` marks what the model says). What is not known here is refused by name
// with the template's line; a template may be hostile: its nesting, its work and what it writes are limited.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "train/text/jinja_value.h"

namespace scruple::train::jinja {

struct Span {
  std::size_t begin, end;  // bytes
};

struct Rendering {
  std::string text;
  std::vector<Span> generated;                        // what stands in {% generation %}
  std::vector<std::pair<const Dict*, Span>> written;  // by the rounds of loops over objects, if anything was
};

class Template {
 public:
  explicit Template(std::string_view source);  // throws with the template's line
  // Throws with the template's line. `names`: what the template can see.
  Rendering render(const std::vector<Member>& names) const;
  bool marks_generation() const;

 private:
  struct Program;
  std::shared_ptr<const Program> program_;
};

}  // namespace scruple::train::jinja
