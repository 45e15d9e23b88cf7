// A small model in an engine's memory and gradients for it, a sink over it, and the engines to try them on.
#pragma once

#include <algorithm>
#include <map>

#include "tests/device.h"
#include "tests/table.h"

namespace scruple_tests {

inline const std::vector<std::int64_t> kSizes = {1000, 0, 5, 128, 2500};

inline std::vector<std::string> engines_to_test() {
  const char* named = std::getenv("SCRUPLE_TEST_ENGINE");
  if (named != nullptr && *named != 0) return {named};
  std::vector<std::string> names = cpu_engines();
  if (why_unavailable("cuda").empty()) names.emplace_back("cuda");
  return names;
}

// Two that are made alike are alike. Gradients have no planes, unless the caller owns the accumulators, so that they can be
// looked at after the step.
struct Model {
  explicit Model(scruple_engine* on, const Config& config, const std::vector<std::int64_t>& sizes = kSizes,
                 bool owns_accumulators = false)
      : engine(on), table(host, {config}, {sizes, {0}, {0}}), memory(on), arriving(on) {
    table.begin();
    std::size_t bytes = 4;
    for (std::size_t i = 0; i < sizes.size(); ++i) {
      Tensor& tensor = table.tensors[i];
      tensor.encode(host, SCRUPLE_WEIGHT, Random(i + 1).normals(static_cast<std::size_t>(sizes[i])));
      begins.push_back(bytes);
      bytes += 4 * static_cast<std::size_t>(sizes[i]) + 64;
    }
    arriving.reserve(bytes);
    twin = std::make_unique<Twin>(memory, table.tensors);
    rows = twin->rows;
    for (scruple_tensor& row : rows)
      if (!owns_accumulators) row.arrays[SCRUPLE_GRADIENT].codes = row.arrays[SCRUPLE_GRADIENT].aux = nullptr;
  }

  std::int64_t count() const { return length(rows); }
  scruple_tensor& row(std::int64_t i) { return rows[static_cast<std::size_t>(i)]; }
  Optimizer& optimizer() { return *table.optimizers[0]; }

  // Gradient number n of tensor i.
  static std::vector<float> values(int n, std::int64_t i, std::int64_t size) {
    return Random(static_cast<std::uint64_t>(1000 * n + i)).normals(static_cast<std::size_t>(size), 0.5);
  }
  std::vector<float> values(int n, std::int64_t i) { return values(n, i, row(i).size); }
  // The same with a value that is none of it.
  std::vector<float> spoilt(int n, std::int64_t i, std::size_t at, float value) {
    std::vector<float> gradient = values(n, i);
    gradient[at] = value;
    return gradient;
  }
  // In the engine's memory, as fp32.
  scruple_piece whole(std::int64_t i, const std::vector<float>& gradient) {
    const std::size_t at = begins[static_cast<std::size_t>(i)];
    if (!gradient.empty()) arriving.write(gradient.data(), 4 * gradient.size(), at);
    return {i, 0, row(i).size, fp32_array(arriving.data() + at)};
  }
  scruple_piece whole(std::int64_t i, int n) { return whole(i, values(n, i)); }
  // What of it is [first, first + size).
  static scruple_piece part_of(scruple_piece whole, std::int64_t first, std::int64_t size) {
    whole.first = first;
    whole.size = size;
    whole.gradient.codes = static_cast<char*>(whole.gradient.codes) + 4 * first;
    return whole;
  }
  // A plain step, from gradient number n, of tensors [first, last).
  void step(int n, std::int64_t first, std::int64_t last, float multiplier = 1) {
    std::vector<scruple_tensor> stepped;
    for (std::int64_t i = first; i < last; ++i) {
      stepped.push_back(row(i));
      stepped.back().arrays[SCRUPLE_GRADIENT] = whole(i, n).gradient;
    }
    CHECK_OK(try_step(engine, stepped, {.multiplier = multiplier}));
  }

  Bytes bytes(std::int64_t i, int array) {
    twin->download(table.tensors);
    return table.tensors[static_cast<std::size_t>(i)].bytes(array);
  }
  // Every weight and moment.
  Bytes bytes() {
    twin->download(table.tensors);
    Bytes all;
    for (const Tensor& tensor : table.tensors)
      for (int a = 0; a < SCRUPLE_GRADIENT; ++a) {
        const Bytes more = tensor.bytes(a);
        all.insert(all.end(), more.begin(), more.end());
      }
    return all;
  }
  std::vector<float> decoded(std::int64_t i, int array) {
    std::vector<float> out(static_cast<std::size_t>(row(i).size));
    if (!out.empty()) CHECK_OK(scruple_decode(engine, &row(i), array, out.data()));
    return out;
  }

  const Engine host;
  scruple_engine* engine;
  Table table;
  DeviceMemory memory, arriving;
  std::unique_ptr<Twin> twin;
  std::vector<scruple_tensor> rows;
  std::vector<std::size_t> begins;
};

struct SinkOptions {
  scruple_policy policy = SCRUPLE_STORED;
  int micro_batches = 1;
  scruple_accumulation accumulation = SCRUPLE_ACCUMULATE_GRADIENTS;
  double max_norm = 0, tensor_norm = 0, adagc = 0;
  const double* adagc_norms = nullptr;
  const scruple_scaler* scaler = nullptr;
  const float* loss_scale = nullptr;
  scruple_memory memory = {};
  scruple_reduce reduce = {};
  const float* skip = nullptr;

  scruple_sink_options raw() const {
    scruple_sink_options options = SCRUPLE_SINK_OPTIONS_INIT;
    options.policy = policy;
    options.micro_batches = micro_batches;
    options.accumulation = accumulation;
    options.max_norm = max_norm;
    options.tensor_norm = tensor_norm;
    options.adagc = adagc;
    options.adagc_norms = adagc_norms;
    options.scaler = scaler;
    options.loss_scale = loss_scale;
    options.memory = memory;
    options.reduce = reduce;
    options.skip = skip;
    return options;
  }
};

struct Sink {
  Sink(Model& of, const SinkOptions& options) : Sink(of, options.raw()) {}
  Sink(Model& of, const scruple_sink_options& options) : model(of) {
    status = scruple_sink_create(model.engine, model.rows.data(), model.count(), &options, &handle);
  }
  ~Sink() { scruple_sink_destroy(handle); }
  Sink(const Sink&) = delete;
  Sink& operator=(const Sink&) = delete;
  operator scruple_sink*() const { return handle; }

  scruple_status add(const scruple_piece& piece) { return scruple_sink_add(handle, &piece, 1); }
  scruple_status measure(const scruple_piece& piece) { return scruple_sink_measure(handle, &piece, 1); }
  scruple_status end() { return scruple_sink_end(handle); }
  // A micro-batch of one tensor.
  void backward_of(std::int64_t i, const std::vector<float>& gradient) {
    CHECK_OK(add(model.whole(i, gradient)));
    CHECK_OK(end());
  }
  // The whole micro-batch: gradient number n of every tensor, the last layer first, as backward does.
  void backward(int n) {
    for (std::int64_t i = model.count(); i-- > 0;) CHECK_OK(add(model.whole(i, n)));
    CHECK_OK(end());
  }
  // The same in pieces of 256 and fewer, out of order; measured before where the policy wants it.
  void backward_in_pieces(int n, std::int64_t tile = 256) {
    for (std::int64_t i = model.count(); i-- > 0;) {
      const scruple_piece all = model.whole(i, n);
      std::vector<scruple_piece> pieces;
      for (std::int64_t first = 0; first < all.size; first += tile)
        pieces.push_back(Model::part_of(all, first, std::min(tile, all.size - first)));
      const std::int64_t n_pieces = length(pieces);
      if (scruple_sink_measures(handle) != 0) CHECK_OK(scruple_sink_measure(handle, pieces.data(), n_pieces));
      std::reverse(pieces.begin(), pieces.end());
      for (std::size_t p = 0; p + 1 < pieces.size(); p += 2) std::swap(pieces[p], pieces[p + 1]);
      for (std::size_t p = 0; p < pieces.size() / 2; ++p) CHECK_OK(add(pieces[p]));
      const std::int64_t done = n_pieces / 2;
      CHECK_OK(scruple_sink_add(handle, pieces.data() + done, n_pieces - done));
    }
    CHECK_OK(end());
  }
  scruple_sink_report read() const {
    scruple_sink_report report{};
    CHECK_OK(scruple_sink_read(handle, &report));
    return report;
  }
  std::vector<std::int64_t> steps() const {
    std::vector<std::int64_t> all(model.rows.size());
    CHECK_OK(scruple_sink_read_tensors(handle, all.data(), nullptr));
    return all;
  }

  Model& model;
  scruple_sink* handle = nullptr;
  scruple_status status;
};

// Memory that knows what was taken of it, and has a limit.
struct Ledger {
  explicit Ledger(scruple_engine* on) : engine(on) {}
  scruple_memory memory() { return {this, &Ledger::alloc, &Ledger::free}; }
  static void* alloc(void* context, std::int64_t bytes) {
    auto* self = static_cast<Ledger*>(context);
    if (self->now + bytes > self->limit) return nullptr;
    auto block = std::make_unique<DeviceMemory>(self->engine, static_cast<std::size_t>(bytes));
    void* const at = block->data();
    self->blocks[at] = {std::move(block), bytes};
    self->now += bytes;
    self->peak = std::max(self->peak, self->now);
    ++self->calls;
    return at;
  }
  static void free(void* context, void* memory, std::int64_t bytes) {
    auto* self = static_cast<Ledger*>(context);
    const auto found = self->blocks.find(memory);
    ASSERT_NE(found, self->blocks.end()) << "freed twice, or never allocated";
    EXPECT_EQ(found->second.second, bytes);
    CHECK_OK(scruple_engine_synchronize(self->engine));
    self->blocks.erase(found);
    self->now -= bytes;
  }
  scruple_engine* engine;
  std::map<void*, std::pair<std::unique_ptr<DeviceMemory>, std::int64_t>> blocks;
  std::int64_t now = 0, peak = 0, calls = 0, limit = std::int64_t{1} << 40;
};

// One value from the engine's memory.
template <class T>
inline T read(scruple_engine* engine, const T* from) {
  T value{};
  CHECK_OK(scruple_copy(engine, &value, from, sizeof value));
  CHECK_OK(scruple_engine_synchronize(engine));
  return value;
}

// Stands for the other processes: adds a number to the sum, or fails.
struct Others {
  scruple_engine* engine;
  double squares = 0;
  int calls = 0;
  bool fails = false;

  static int add(void* context, double* sum) {
    auto& self = *static_cast<Others*>(context);
    ++self.calls;
    if (self.fails) return 1;
    const double value = read(self.engine, sum) + self.squares;
    CHECK_OK(scruple_copy(self.engine, sum, &value, sizeof value));
    CHECK_OK(scruple_engine_synchronize(self.engine));
    return 0;
  }
};

// How a rule accumulates in its moments.
inline scruple_accumulation mode_of(const std::string& rule) {
  if (rule.starts_with("sgd")) return SCRUPLE_ACCUMULATE_MOMENTUM;
  return rule.starts_with("adam") ? SCRUPLE_ACCUMULATE_ADAMA : SCRUPLE_ACCUMULATE_GRADIENTS;
}

inline constexpr scruple_policy kPolicies[] = {SCRUPLE_STORED, SCRUPLE_RELEASED, SCRUPLE_COMPRESSED};

class Sinks : public testing::TestWithParam<std::string> {
 protected:
  void SetUp() override {
    if (engine.handle == nullptr) GTEST_SKIP() << GetParam() << ": " << scruple_last_error();
  }
  const Engine engine{2, GetParam()};
};

// The engines to test on, as GoogleTest names them.
inline std::string engine_name(const testing::TestParamInfo<std::string>& engine) {
  std::string name = engine.param;
  for (char& c : name)
    if (std::isalnum(static_cast<unsigned char>(c)) == 0) c = '_';
  return name;
}

}  // namespace scruple_tests
