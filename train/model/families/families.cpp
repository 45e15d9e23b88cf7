#include "train/model/families/families.h"

#include <algorithm>

#include "io/file.h"
#include "train/model/families/config.h"

namespace scruple::train {
namespace {

struct Family {
  const char* model_type;
  Description (*describe)(const Config& config);
};
constexpr Family kFamilies[] = {{"gpt2", gpt2_family},
                                {"llama", llama_family},
                                {"mistral", mistral_family},
                                {"qwen2", qwen2_family},
                                {"qwen3", qwen3_family}};

const Family& family_of(const Config& config) {
  const std::string type = config.string("model_type", "");
  std::string known;
  for (const Family& family : kFamilies) {
    if (type == family.model_type) return family;
    known += (known.empty() ? "" : ", ") + std::string(family.model_type);
  }
  config.refuse("model_type", "this trainer knows " + known);
}

}  // namespace

Description describe(const std::string& text, const std::string& place, std::int64_t context) {
  const Config config(text, place);
  Description model = family_of(config).describe(config);
  if (context != 0 && context > model.context)
    io::fail(place, ": a context of ", context, " was asked for, and the model's is ", model.context,
             " at most; choose a shorter one");
  model.context = context != 0 ? context : std::min(model.context, kMaxContext);
  if (context == 0 && model.window > 0) model.context = std::min(model.context, model.window);
  if (const std::string problem = problem_with(model); !problem.empty()) io::fail(place, ": ", problem);
  return model;
}

}  // namespace scruple::train
