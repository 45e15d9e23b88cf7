#include "train/model/families/families.h"

#include <algorithm>

#include "io/file.h"
#include "train/model/families/config.h"

namespace scruple::train {
namespace {

constexpr const Family* kFamilies[] = {&kGpt2, &kLlama, &kMistral, &kQwen2, &kQwen3, &kGemma, &kGemma2};

bool is_planned(const Family&) { return true; }
bool is_trained(const Family& family) { return family.arithmetic != nullptr; }

std::string names_of(bool (*can)(const Family&)) {
  std::string names;
  for (const Family* family : kFamilies)
    if (can(*family)) names += (names.empty() ? "" : ", ") + std::string(family->model_type);
  return names;
}

const Family* family_of(const Config& config, bool (*can)(const Family&)) {
  const std::string type = config.string("model_type", "");
  for (const Family* family : kFamilies)
    if (type == family->model_type && can(*family)) return family;
  return nullptr;
}

Description checked(const Description& model, const std::string& place) {
  if (const std::string problem = problem_with(model); !problem.empty()) io::fail(place, ": ", problem);
  return model;
}

}  // namespace

Description describe(const std::string& text, const std::string& place, std::int64_t context) {
  const Config config(text, place);
  const Family* const family = family_of(config, is_trained);
  if (family == nullptr) config.refuse("model_type", "this trainer knows " + names_of(is_trained));
  Description model = family->tensors(config);
  family->arithmetic(config, model);
  if (context != 0 && context > model.context)
    io::fail(place, ": a context of ", context, " was asked for, and the model's is ", model.context,
             " at most; choose a shorter one");
  model.context = context != 0 ? context : std::min(model.context, kMaxContext);
  if (context == 0 && model.window > 0) model.context = std::min(model.context, model.window);
  return checked(model, place);
}

Description describe_tensors(const std::string& text, const std::string& place) {
  const Config config(text, place);
  const Family* const family = family_of(config, is_planned);
  if (family == nullptr)
    config.refuse("model_type", "known are " + planned_families() +
                                    "; for another model give its .safetensors files or --params");
  Description model = family->tensors(config);
  model.context = 1;  // no tensor depends on it
  return checked(model, place);
}

std::string planned_families() { return names_of(is_planned); }

}  // namespace scruple::train
