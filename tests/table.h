// A table of tensors in host memory, of one config or several, and gradients for it. Two that are made alike are alike.
#pragma once

#include <memory>

#include "tests/configs.h"

namespace scruple_tests {

enum class Data { kNormal, kSubnormal, kNonFinite, kManyScales };

// A window into one long list, so that making data costs nothing: normal numbers with groups of zeros, a few outliers and
// a few tiny ones.
inline void values_of(float* out, std::size_t size, std::uint64_t which, Data data) {
  static const std::vector<float> kNormals = [] {
    std::vector<float> list = Random(5).normals(std::size_t{1} << 18);
    for (std::size_t i = 0; i < list.size(); ++i) {
      if (i / 160 % 11 == 5) list[i] = i % 2 == 0 ? 0.0f : -0.0f;
      if (i % 97 == 0) list[i] *= 1e4f;
      if (i % 89 == 0) list[i] *= 1e-6f;
    }
    return list;
  }();
  std::size_t at = static_cast<std::size_t>(which * 7919 % 20000);
  for (std::size_t i = 0, count = 0; i < size; i += count, at = 0) {
    count = std::min(size - i, kNormals.size() - at);
    std::copy_n(&kNormals[at], count, out + i);
  }
  if (data == Data::kSubnormal)
    for (std::size_t i = 0; i < size; ++i) out[i] *= 0x1p-128f;
  if (data == Data::kManyScales)  // down to 2^-75, whose square is at the end of fp32
    for (std::size_t i = 0; i < size; ++i)
      out[i] = std::ldexp(out[i], -static_cast<int>((i / 16 * 7 + which) % 76));
  if (data != Data::kNonFinite || which % 3 == 2) return;
  const float specials[] = {kNaN, kInf, -kInf, float_from(0xffa00001u), 3e38f};
  for (std::size_t i = which % 61; i < size; i += 173) out[i] = specials[(i + which) % 5];
}
inline std::vector<float> values_of(std::int64_t size, std::uint64_t which, Data data = Data::kNormal) {
  std::vector<float> values(static_cast<std::size_t>(size));
  values_of(values.data(), values.size(), which, data);
  return values;
}

// fp32 gradients for every tensor of a table and every step, made once per table.
class Gradients {
 public:
  Gradients(const std::vector<std::int64_t>& sizes, int sets, Data data = Data::kNormal) {
    for (const std::int64_t size : sizes) {
      begins_.push_back(per_set_);
      per_set_ += static_cast<std::size_t>(size);
    }
    values.resize(per_set_ * static_cast<std::size_t>(sets) + 1);
    for (std::size_t s = 0; s < static_cast<std::size_t>(sets); ++s)
      for (std::size_t i = 0; i < sizes.size(); ++i)
        values_of(&values[s * per_set_ + begins_[i]], static_cast<std::size_t>(sizes[i]), 1000 * s + i, data);
  }
  float* host(std::size_t set, std::size_t tensor) { return &values[set * per_set_ + begins_[tensor]]; }
  std::vector<scruple_array> on_host(int set) const { return arrays(values.data(), set); }
  std::size_t bytes_per_set() const { return per_set_ * sizeof(float); }

  std::vector<float> values;

 protected:
  std::vector<scruple_array> arrays(const void* from, int set) const {
    std::vector<scruple_array> list;
    const std::size_t first = static_cast<std::size_t>(set) * per_set_;
    for (const std::size_t begin : begins_)
      list.push_back(fp32_array(static_cast<const unsigned char*>(from) + (first + begin) * sizeof(float)));
    return list;
  }

 private:
  std::size_t per_set_ = 0;
  std::vector<std::size_t> begins_;
};

// Two micro-batches.
inline void fold_two(scruple_engine* engine, std::vector<scruple_tensor>& rows,
                     const std::vector<scruple_array>& first, const std::vector<scruple_array>& second,
                     const std::int64_t* steps = nullptr) {
  for (scruple_tensor& row : rows) row.folds = 0;
  for (const auto* incoming : {&first, &second}) {
    CHECK_OK(scruple_fold(engine, rows.data(), incoming->data(), length(rows), 0.375f, steps));
    for (scruple_tensor& row : rows) ++row.folds;
  }
}

// Configs, shifts and offsets are dealt out to the tensors in turn.
struct Shape {
  std::vector<std::int64_t> sizes;
  std::vector<std::size_t> shifts =
      {0};  // of codes planes; aux planes lie one byte further where not 0, so that 16 is
            // odd for them alone
  std::vector<std::int64_t> offsets = {0, 5, 10};
};

// One for each config.
inline std::vector<std::unique_ptr<Optimizer>> optimizers_of(const std::vector<Config>& configs) {
  std::vector<std::unique_ptr<Optimizer>> all;
  for (const Config& config : configs) {
    all.push_back(std::make_unique<Optimizer>(config.rule, config.hypers));
    all.back()->seed(0x123456789abcdefu);
  }
  return all;
}

struct Table {
  Table(scruple_engine* on, const std::vector<Config>& configs, const Shape& shape, Data kind = Data::kNormal)
      : engine(on), data(kind), optimizers(optimizers_of(configs)) {
    for (const Config& config : configs) {
      const scruple_format* gradient = config.formats.arrays[SCRUPLE_GRADIENT].format;
      accumulates = accumulates && (info_of(gradient).roles & SCRUPLE_ROLE_ACCUMULATOR) != 0;
    }
    for (std::size_t i = 0; i < shape.sizes.size(); ++i) {
      Tensor tensor(*optimizers[i % configs.size()], shape.sizes[i]);
      tensor.row.id = static_cast<std::uint32_t>(3 + i);
      tensor.row.offset = shape.offsets[i % shape.offsets.size()];
      const std::size_t shift = shape.shifts[i % shape.shifts.size()];
      for (int a = 0; a < SCRUPLE_ARRAYS; ++a) {
        const scruple_array& array = configs[i % configs.size()].formats.arrays[a];
        if (tensor.used(a)) tensor.use(a, array.format, array.rounding, shift, shift == 0 ? 0 : shift + 1);
      }
      weights.push_back(values_of(shape.sizes[i], i, data == Data::kNonFinite ? Data::kNormal : data));
      tensors.push_back(std::move(tensor));
    }
    rows = rows_of(tensors);
  }

  // What the library computes happens in these, which may run in any floating-point mode.
  void begin() {
    for (std::size_t i = 0; i < rows.size(); ++i) {
      CHECK_OK(scruple_tensor_reset(engine, &rows[i]));
      CHECK_OK(scruple_encode(engine, &rows[i], SCRUPLE_WEIGHT, weights[i].data()));
    }
  }
  // Micro-batches `set` and the next are folded; where a format does not accumulate, the first is encoded.
  void take(int set, const Gradients& gradients, const std::int64_t* steps = nullptr) {
    const std::vector<scruple_array> first = gradients.on_host(set);
    if (accumulates) return fold_two(engine, rows, first, gradients.on_host(set + 1), steps);
    for (std::size_t i = 0; i < rows.size(); ++i)
      CHECK_OK(scruple_encode(engine, &rows[i], SCRUPLE_GRADIENT, static_cast<float*>(first[i].codes)));
  }
  void step(const StepOptions& options = {}) { CHECK_OK(try_step(engine, rows, options)); }

  void at_step(std::int64_t t) {
    for (scruple_tensor& row : rows) row.step = t;
  }
  Bytes bytes() const { return all_planes(tensors); }

  scruple_engine* engine;
  Data data;
  std::vector<std::unique_ptr<Optimizer>> optimizers;
  bool accumulates = true;
  std::vector<Tensor> tensors;
  std::vector<scruple_tensor> rows;  // of the tensors: what is changed in between is changed here
  std::vector<std::vector<float>> weights;
};

// visit(view) over all of a row in views of several widths.
inline void for_views(const scruple_tensor& row, const auto& visit) {
  std::int64_t first = 0, width = 128;
  do {
    scruple_tensor view{};
    const std::int64_t n = std::min(width, row.size - first);
    CHECK_OK(scruple_tensor_view(&row, first, n, &view));
    visit(view);
    first += n;
    width = width == 128 ? 384 : width == 384 ? 1152 : 128 * 77;
  } while (first < row.size);
}

}  // namespace scruple_tests
