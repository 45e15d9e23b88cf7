// `scruple checkpoint diff`: two checkpoints, setting by setting and array by array.
#include <algorithm>
#include <bit>
#include <iostream>
#include <map>

#include "checkpoint.h"
#include "text.h"
#include "train/run/rows.h"

namespace scruple::cli {
namespace {

using io::Checkpoint;
using io::TensorState;
using nlohmann::ordered_json;

// Two checkpoints, array by array.
class Difference {
 public:
  Difference(const Checkpoint& a, const Checkpoint& b) : decode_a_(a), decode_b_(b) {
    setting("step", a.manifest().step, b.manifest().step);
    setting("recipe", a.manifest().recipe, b.manifest().recipe);
    setting("groups", groups_json(a), groups_json(b));
    setting("loss_scale", loss_scale_json(a.manifest()), loss_scale_json(b.manifest()));
    for (const TensorState& tensor : a.manifest().tensors) {
      const TensorState* const other = find(b, tensor.name);
      if (other == nullptr)
        note(tensor.name, "only in the first");
      else
        compare(tensor, *other);
    }
    for (const TensorState& tensor : b.manifest().tensors)
      if (find(a, tensor.name) == nullptr) note(tensor.name, "only in the second");
  }

  ordered_json settings = ordered_json::array(), tensors = ordered_json::array();
  std::map<std::string, std::vector<std::string>>
      notes;                                 // "step 41 -> 61", and the tensors of which it is true
  std::int64_t compared = 0, differing = 0;  // arrays; differing: in their values
  bool same() const { return settings.empty() && tensors.empty(); }

 private:
  static const TensorState* find(const Checkpoint& checkpoint, const std::string& name) {
    for (const TensorState& tensor : checkpoint.manifest().tensors)
      if (tensor.name == name) return &tensor;
    return nullptr;
  }
  void setting(const char* name, const ordered_json& a, const ordered_json& b) {
    if (a != b) settings.push_back({{"name", name}, {"first", a}, {"second", b}});
  }
  void note(const std::string& tensor, const std::string& what) {
    tensors.push_back({{"tensor", tensor}, {"difference", what}});
    notes[what].push_back(tensor);
  }
  template <class T>
  void field(const std::string& tensor, const char* name, const T& a, const T& b) {
    if (a != b) note(tensor, name + (" " + ordered_json(a).dump()) + " -> " + ordered_json(b).dump());
  }

  void compare(const TensorState& a, const TensorState& b) {
    if (a.shape != b.shape)
      return note(a.name, "shape " + shape_text(a.shape) + " -> " + shape_text(b.shape));
    field(a.name, "step", a.step, b.step);
    field(a.name, "id", a.id, b.id);
    field(a.name, "group", a.group, b.group);
    field(a.name, "AdaGC's norm", a.adagc_norm.value_or(0), b.adagc_norm.value_or(0));
    const Tensor first = decode_a_.load(a), second = decode_b_.load(b);
    for (std::size_t i = 0; i < std::max(a.arrays.size(), b.arrays.size()); ++i) {
      if (i >= a.arrays.size() || i >= b.arrays.size() || a.arrays[i].name != b.arrays[i].name)
        return note(a.name, "its optimizer's arrays");
      compare_arrays(a, b, i, first, second);
    }
  }

  void compare_arrays(const TensorState& a, const TensorState& b, std::size_t i, const Tensor& first,
                      const Tensor& second) {
    const io::Array &x = a.arrays[i], &y = b.arrays[i];
    ++compared;
    bool equal = x.format == y.format && x.rounding == y.rounding;
    if (!equal) notes[x.name + " " + form_of(x) + " -> " + form_of(y)].push_back(a.name);
    for (std::size_t p = 0; equal && p < x.planes.size(); ++p) {
      const auto left = train::plane_of(first.raw(), a, i, p), right = train::plane_of(second.raw(), b, i, p);
      equal = left.size() == right.size() && std::equal(left.begin(), left.end(), right.begin());
    }
    if (equal) return;
    const std::vector<float> u = values_of(first, train::stored_arrays(first.raw())[i]),
                             v = values_of(second, train::stored_arrays(second.raw())[i]);
    std::int64_t count = 0;
    for (std::size_t k = 0; k < u.size(); ++k)
      count += std::bit_cast<std::uint32_t>(u[k]) != std::bit_cast<std::uint32_t>(v[k]) ? 1 : 0;
    differing += count > 0 ? 1 : 0;
    Deviation deviation;
    deviation.add(u, v);
    tensors.push_back({{"tensor", a.name},
                       {"array", x.name},
                       {"formats", {x.format, y.format}},
                       {"roundings", {x.rounding, y.rounding}},
                       {"values", u.size()},
                       {"differing", count},
                       {"relative_rms", deviation.relative()},
                       {"largest", deviation.largest}});
  }
  static std::string form_of(const io::Array& array) { return array.format + " (" + array.rounding + ")"; }

  Decoder decode_a_, decode_b_;
};

// A setting as people read it.
std::string text_of(const ordered_json& value, bool exactly) {
  if (value.is_number_float() && !exactly) return shortest(value);
  return value.is_string() ? value.get<std::string>() : value.is_null() ? "none" : value.dump();
}

// What of a setting differs, field by field: "group 1 lr: 0.001 -> 0.002".
void print_setting(const std::string& name, const ordered_json& first, const ordered_json& second) {
  if (first == second) return;
  if (!first.is_structured() && !second.is_structured()) {
    const bool exactly = text_of(first, false) == text_of(second, false);
    std::cout << name << ": " << text_of(first, exactly) << " -> " << text_of(second, exactly) << '\n';
    return;
  }
  const auto fields_of = [](const ordered_json& x) {
    return x.is_structured() ? x.flatten() : ordered_json::object();
  };
  const ordered_json fields = fields_of(first), others = fields_of(second);
  ordered_json all = fields;
  all.update(others);
  for (const auto& [path, value] : all.items()) {
    std::string words = path;  // "/1/hyperparameters/lr"
    if (const std::size_t at = words.find("/hyperparameters"); at != words.npos)
      words.erase(at, words.find('/', at + 1) - at);
    std::replace(words.begin(), words.end(), '/', ' ');
    print_setting(name + words, fields.value(path, ordered_json()), others.value(path, ordered_json()));
  }
}

void print_difference(const Difference& difference) {
  for (const ordered_json& setting : difference.settings)
    print_setting(setting["name"] == "groups" ? "group" : setting["name"], setting["first"],
                  setting["second"]);
  for (const auto& [note, tensors] : difference.notes)
    std::cout << (tensors.size() == 1 ? tensors.front()
                                      : grouped(static_cast<std::int64_t>(tensors.size())) + " tensors")
              << ": " << note << '\n';
  Table table;
  table.rows = {{"tensor", "array", "differing", "relative RMS", "largest"}};
  table.left = {1};
  for (const ordered_json& row : difference.tensors)
    if (row.value("differing", std::int64_t{0}) > 0)
      table.rows.push_back({row["tensor"], row["array"],
                            grouped(row["differing"]) + " of " + grouped(row["values"]),
                            shortest(row["relative_rms"], 3), shortest(row["largest"], 3)});
  if (table.rows.size() > 1) {
    std::cout << '\n';
    table.print(std::cout);
  }
  std::cout << '\n'
            << grouped(difference.differing) << " of " << plural(difference.compared, "array")
            << (difference.differing == 1 ? " differs in its values\n" : " differ in their values\n");
}

}  // namespace

void diff(const CheckpointOptions& options) {
  const Checkpoint first(io::find_checkpoint(options.folder)), second(io::find_checkpoint(options.other));
  const Difference difference(first, second);
  if (options.json)
    print_json({{"first", first.folder()},
                {"second", second.folder()},
                {"same", difference.same()},
                {"settings", difference.settings},
                {"tensors", difference.tensors}});
  else if (difference.same())
    std::cout << "the same, to the bit\n";
  else
    print_difference(difference);
  if (!difference.same()) throw std::runtime_error("the two checkpoints differ");
}

}  // namespace scruple::cli
