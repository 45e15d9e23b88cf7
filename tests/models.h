// A model of Hugging Face's folder with all of its weights as fp32 vectors.
#pragma once

#include <string>
#include <vector>

#include "include/scruple/scruple.h"
#include "train/model/model.h"

namespace scruple::train {

struct Model {
  Description shape;
  std::vector<std::vector<float>> parameters;  // in the order of parameters_of(shape)

  // As a backend on the host wants them, while `parameters` stay.
  std::vector<scruple_tensor> visible() const {
    std::vector<scruple_tensor> rows;
    for (const std::vector<float>& values : parameters) {
      scruple_tensor& row = rows.emplace_back(scruple_tensor{});
      row.size = static_cast<std::int64_t>(values.size());
      row.arrays[SCRUPLE_WEIGHT].format = scruple_format_find("fp32");
      row.arrays[SCRUPLE_WEIGHT].codes = const_cast<float*>(values.data());  // the struct is for writers too
    }
    return rows;
  }
};

inline Model read_model(const std::string& folder, std::int64_t context = 0) {
  const ModelFolder from(folder, context);
  Model model = {from.config().shape, {}};
  for (const Parameter& parameter : parameters_of(model.shape)) {
    std::vector<float>& values = model.parameters.emplace_back(static_cast<std::size_t>(parameter.size()));
    from.read(static_cast<int>(model.parameters.size()) - 1, 0, parameter.size(), values.data());
  }
  return model;
}

}  // namespace scruple::train
