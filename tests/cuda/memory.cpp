// What the engine under test does with memory, with very large tensors, with threads, and with mistakes.
#include "tests/cuda/pair.h"

namespace scruple_tests {
namespace {

TEST_F(CudaMemory, AllocatedTensorsBeginAsOnTheCpu) {
  for (const Config& recipe : recipe_configs()) {
    const Optimizer optimizer(recipe.rule, recipe.hypers);
    scruple_tensor there = recipe.formats;
    there.optimizer = optimizer;
    there.size = 5003;
    there.step = 1;
    scruple_tensor here = there;
    CHECK_OK(scruple_tensor_alloc(lab().device, &there, SCRUPLE_STATE | 1u << SCRUPLE_GRADIENT));
    CHECK_OK(scruple_tensor_alloc(lab().host, &here, SCRUPLE_STATE | 1u << SCRUPLE_GRADIENT));
    expect_same_planes(lab().device, there, here, recipe.name);
    scruple_tensor_free(lab().device, &there);
    scruple_tensor_free(lab().host, &here);
    EXPECT_EQ(there.arrays[SCRUPLE_WEIGHT].codes, nullptr);
  }
}

// Each plane ends where its memory ends: who reads beyond is stopped by compute-sanitizer, and, but for scales, which do
// not fill 256 bytes, by the emulator.
TEST_F(CudaMemory, WholeTilesReadNothingBeyondTheirPlanes) {
  constexpr std::int64_t kTile = 2048;
  const Optimizer adamw;
  const std::vector<float> values = values_of(kTile, 1);
  for (const Case& c : all_cases()) {
    Config config = config_of("adamw");
    put(config, c.array, c.format, c.rounding);
    scruple_tensor there = config.formats;
    there.optimizer = adamw;
    there.size = kTile;
    there.step = 1;
    scruple_tensor here = there;
    for (auto [engine, row] : {std::pair{lab().device.handle, &there}, {lab().host.handle, &here}}) {
      CHECK_OK(scruple_tensor_alloc(engine, row, SCRUPLE_STATE | 1u << SCRUPLE_GRADIENT));
      for (const int array : {SCRUPLE_WEIGHT, SCRUPLE_GRADIENT})
        CHECK_OK(scruple_encode(engine, row, array, values.data()));
      for (; row->step <= 3; ++row->step) CHECK_OK(scruple_step(engine, row, 1, nullptr));
    }
    expect_same_planes(lab().device, there, here, c.name());
    scruple_tensor_free(lab().device, &there);
    scruple_tensor_free(lab().host, &here);
  }
}

TEST_F(CudaMemory, CopiesBetweenAnyTwoPlaces) {
  for (const std::size_t n : {std::size_t{0}, std::size_t{1}, std::size_t{255}, (std::size_t{5} << 20) + 3}) {
    DeviceMemory first(lab().device, n + 8), second(lab().device, n + 8);
    Bytes from(n), host(n + 1, 0xee), back(n + 4, 0xee);
    Random random(n);
    for (unsigned char& byte : from) byte = static_cast<unsigned char>(random.next());
    const auto copy = [&](void* to, const void* source) {
      CHECK_OK(scruple_copy(lab().device, to, source, static_cast<std::int64_t>(n)));
    };
    copy(first.data() + 3, from.data());
    copy(second.data() + 1, first.data() + 3);
    copy(back.data() + 1, second.data() + 1);
    CHECK_OK(scruple_engine_synchronize(lab().device));
    copy(host.data(), back.data() + 1);
    CHECK_OK(scruple_engine_synchronize(lab().device));
    EXPECT_TRUE(n == 0 || std::memcmp(host.data(), from.data(), n) == 0) << n;
    EXPECT_EQ(host[n], 0xee);
    EXPECT_EQ(back[0], 0xee);
    EXPECT_EQ(back[n + 1], 0xee);
  }
}

// ---- More than 2^31 elements ----

// The fixed tree of a norm, of one chunk of at most 65536 values.
double chunk_sum(const float* x, std::size_t n) {
  double sum = 0;
  for (std::size_t at = 0; at < n; at += 2048) {
    double level[256] = {};
    for (std::size_t i = at; i < std::min(n, at + 2048); ++i)
      level[i % 256] += static_cast<double>(x[i]) * static_cast<double>(x[i]);
    for (std::size_t width = 128; width > 0; width /= 2)
      for (std::size_t i = 0; i < width; ++i) level[i] = level[2 * i] + level[2 * i + 1];
    sum += level[0];
  }
  return sum;
}

void copy(Lab& lab, void* to, const void* from, std::int64_t bytes) {
  CHECK_OK(scruple_copy(lab.device, to, from, bytes));
}

Tensor random_block(Lab& lab, const Optimizer& optimizer, std::int64_t size) {
  Tensor block(optimizer, size, "scruple", lab.host);
  for (int a = 0; a < SCRUPLE_ARRAYS; ++a) {
    if (!block.used(a)) continue;
    if (a != SCRUPLE_GRADIENT) block.row.arrays[a].rounding = SCRUPLE_STOCHASTIC;
    std::vector<float> values = values_of(size, static_cast<std::uint64_t>(a));
    if (a == SCRUPLE_SLOT + 1)
      for (float& x : values) x = x * x;
    block.encode(lab.host, a, values);
  }
  return block;
}

// Fills the planes of a tensor in the device's memory with those of the block, over and over.
void repeat(Lab& lab, Tensor& block, scruple_tensor& big) {
  for (int a = 0; a < SCRUPLE_ARRAYS; ++a) {
    if (!block.used(a)) continue;
    std::int64_t block_bytes[2], bytes[2];
    CHECK_OK(scruple_format_bytes(big.arrays[a].format, block.row.size, &block_bytes[0], &block_bytes[1]));
    CHECK_OK(scruple_format_bytes(big.arrays[a].format, big.size, &bytes[0], &bytes[1]));
    const scruple_array &from = block.row.arrays[a], &to = big.arrays[a];
    for (const bool aux : {false, true}) {
      auto* plane = static_cast<unsigned char*>(aux ? to.aux : to.codes);
      std::int64_t have = block_bytes[aux ? 1 : 0];
      copy(lab, plane, aux ? from.aux : from.codes, have);
      while (have > 0 && have < bytes[aux ? 1 : 0]) {
        const std::int64_t more = std::min(have, bytes[aux ? 1 : 0] - have);
        copy(lab, plane + have, plane, more);
        have += more;
      }
    }
  }
  CHECK_OK(scruple_engine_synchronize(lab.device));
}

// Of `elements` of repeated blocks and 1000 more: chunks repeat as the block does.
double norm_of_repeated(Lab& lab, const Tensor& block, std::int64_t elements) {
  std::vector<float> decoded = block.decode(lab.host, SCRUPLE_GRADIENT);
  std::vector<double> sums;
  for (std::size_t at = 0; at < decoded.size(); at += 65536) sums.push_back(chunk_sum(&decoded[at], 65536));
  double total = 0;
  for (std::int64_t chunk = 0; chunk < elements / 65536; ++chunk)
    total += sums[static_cast<std::size_t>(chunk) % sums.size()];
  return std::sqrt(total + chunk_sum(decoded.data(), 1000));
}

// The elements [first, first + n) of repeated blocks, before a step.
Tensor window_of(Tensor& block, const Optimizer& optimizer, std::uint32_t id, std::int64_t first,
                 std::int64_t n) {
  Tensor window(optimizer, n);
  window.row.id = id;
  window.row.offset = first;
  for (int a = 0; a < SCRUPLE_ARRAYS; ++a)
    if (block.used(a)) window.use(a, block.row.arrays[a].format, block.row.arrays[a].rounding);
  for (std::int64_t at = 0; at < n; at += 128) {
    const std::int64_t piece = std::min<std::int64_t>(128, n - at);
    scruple_tensor from{}, to{};
    CHECK_OK(scruple_tensor_view(&block.row, (first + at) % block.row.size, 128, &from));
    CHECK_OK(scruple_tensor_view(&window.row, at, piece, &to));
    for (int a = 0; a < SCRUPLE_ARRAYS; ++a) {
      if (!block.used(a)) continue;
      std::int64_t codes = 0, aux = 0;
      CHECK_OK(scruple_format_bytes(to.arrays[a].format, piece, &codes, &aux));
      std::memcpy(to.arrays[a].codes, from.arrays[a].codes, static_cast<std::size_t>(codes));
      if (aux > 0) std::memcpy(to.arrays[a].aux, from.arrays[a].aux, static_cast<std::size_t>(aux));
    }
  }
  return window;
}

void expect_window(Lab& lab, const scruple_tensor& big, Tensor& window) {
  const std::int64_t first = window.row.offset;
  scruple_tensor view{};
  CHECK_OK(scruple_tensor_view(&big, first, window.row.size, &view));
  for (int a = 0; a < SCRUPLE_ARRAYS; ++a) {
    if (!window.used(a)) continue;
    Bytes codes(window.codes(a).size), aux(window.aux(a).size);
    copy(lab, codes.data(), view.arrays[a].codes, length(codes));
    copy(lab, aux.data(), view.arrays[a].aux, length(aux));
    CHECK_OK(scruple_engine_synchronize(lab.device));
    EXPECT_TRUE(same_bytes(codes, window.codes(a).bytes())) << "array " << a << " codes, window at " << first;
    EXPECT_TRUE(same_bytes(aux, window.aux(a).bytes())) << "array " << a << " aux, window at " << first;
  }
}

// A block of planes is repeated to fill a tensor of 2^31 + 1000 elements (fewer for a CPU engine), two steps
// are taken, and windows of it are compared with the same window stepped on the CPU.
TEST_F(CudaBig, OverTwoToThe31Elements) {
  if (quick()) GTEST_SKIP() << "quick";
  const bool cuda = is_cuda(engine_under_test());
  const std::int64_t block_size = std::int64_t{1} << (cuda ? 24 : 19),
                     base = std::int64_t{1} << (cuda ? 31 : 22), size = base + 1000;
  const Optimizer optimizer;
  Tensor block = random_block(lab(), optimizer, block_size);
  scruple_tensor big = block.row;
  big.size = size;
  big.id = 5;
  for (scruple_array& array : big.arrays) array.codes = array.aux = nullptr;
  if (scruple_tensor_alloc(lab().device, &big, SCRUPLE_STATE | 1u << SCRUPLE_GRADIENT) != SCRUPLE_OK)
    GTEST_SKIP() << "no memory for " << size << " elements: " << scruple_last_error();
  repeat(lab(), block, big);
  EXPECT_EQ(norm_of(lab().device, {big}), norm_of_repeated(lab(), block, base));
  for (int t = 1; t <= 2; ++t) {
    big.step = t;
    CHECK_OK(scruple_step(lab().device, &big, 1, nullptr));
  }
  CHECK_OK(scruple_engine_synchronize(lab().device));

  std::vector<std::pair<std::int64_t, std::int64_t>> windows = {{base - 2048, 3048}};
  const std::int64_t last_of_a_grid = 65535 * (base >> 20) / 128 * 128;
  for (const std::int64_t mark : {std::int64_t{2048}, std::int64_t{65536}, block_size, base / 8, base / 4,
                                  base / 2, base / 4 * 3, base / 2 + 65536, last_of_a_grid})
    windows.emplace_back(mark - 2048, 4096);
  Random random(8);
  for (int i = 0; i < 64; ++i)
    windows.emplace_back(
        static_cast<std::int64_t>(random.next() % static_cast<std::uint64_t>(base / 128 - 32)) * 128, 4096);
  for (const auto& [first, n] : windows) {
    Tensor window = window_of(block, optimizer, big.id, first, n);
    for (int t = 1; t <= 2; ++t) {
      window.row.step = t;
      step(lab().host, window);
    }
    expect_window(lab(), big, window);
    if (HasFailure()) break;
  }
  scruple_tensor_free(lab().device, &big);
}

// ---- Threads ----

void expect_same_side_by_side(Lab& lab, Lab& other_lab, DeviceMemory& other_memory) {
  const Shape shape{{20000, 10, 70000, 129}};
  const int steps = steps_of(10);
  DeviceGradients gradients(lab.device, shape.sizes, steps + 1),
      more(other_lab.device, shape.sizes, steps + 1);
  Pair first(lab, busy_config("adamw", "scruple"), shape),
      second(other_lab, other_memory, {busy_config("lion", "lpmm")}, shape);
  std::thread thread([&] { second.walk(1, steps, more); });
  first.walk(1, steps, gradients);
  thread.join();
  EXPECT_EQ(first.difference(), "");
  EXPECT_EQ(second.difference(), "");
}

TEST_F(CudaThreads, TwoHostThreadsShareAnEngine) {
  DeviceMemory other(lab().device);
  expect_same_side_by_side(lab(), lab(), other);
}

TEST_F(CudaThreads, TwoEnginesSideBySide) {
  Lab rival(engine_under_test());
  expect_same_side_by_side(lab(), rival, rival.memory);
}

// ---- Errors ----

TEST(CudaErrorsAnywhere, AnUnavailableEngineSaysWhy) {
  const std::string reason = why_unavailable("cuda");
  if (reason.empty()) GTEST_SKIP() << "it is available here";
  bool listed = false;
  for (const scruple_engine_info& info : engines()) listed = listed || std::string(info.name) == "cuda";
  if (!listed) GTEST_SKIP() << reason;
  for (const char* name : {"cuda", "cuda:0"}) {
    scruple_engine* engine = nullptr;
    EXPECT_REFUSED(scruple_engine_create(name, 0, &engine), SCRUPLE_UNAVAILABLE, reason);
    EXPECT_EQ(engine, nullptr);
  }
}

TEST_F(CudaErrors, DevicesThatDoNotExist) {
  for (const char* name :
       {"cuda:99", "cuda:x", "cuda:", "cuda:-1", "cuda:0x", "cuda: 0", "cuda:99999999999999999999"}) {
    scruple_engine* engine = nullptr;
    const scruple_status status = scruple_engine_create(name, 0, &engine);
    expect_refused(status, status == SCRUPLE_INVALID ? SCRUPLE_INVALID : SCRUPLE_UNAVAILABLE, {name});
    EXPECT_EQ(engine, nullptr) << name;
    scruple_engine_destroy(engine);
  }
  const Engine first(0, "cuda:0");
  EXPECT_NE(first.handle, nullptr);
}

TEST_F(CudaErrors, HostPointersAreRefused) {
  DeviceGradients gradients(lab().device, {100, 5000}, 3);
  for (const Config& config : {busy_config("adamw", "scruple"), busy_config("adamw", "fp32")}) {
    Pair pair(lab(), config, {{100, 5000}});
    pair.take_gradients(1, gradients);
    const char* names[] = {"weight", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "gradient"};
    for (int a = 0; a < SCRUPLE_ARRAYS; ++a)
      for (const bool aux : {false, true}) {
        std::vector<scruple_tensor> rows = pair.twin->rows;
        scruple_array &array = rows[1].arrays[a], &host = pair.rows[1].arrays[a];
        if (aux && pair.tensors[1].aux(a).size == 0) continue;
        (aux ? array.aux : array.codes) = aux ? host.aux : host.codes;
        EXPECT_INVALID(scruple_step(lab().device, rows.data(), 2, nullptr), "tensor 1", names[a]);
      }
    // The other calls that take tables.
    std::vector<scruple_tensor> rows = pair.twin->rows;
    rows[1].arrays[SCRUPLE_GRADIENT].codes = pair.rows[1].arrays[SCRUPLE_GRADIENT].codes;
    double norm = 0;
    EXPECT_INVALID(scruple_norm(lab().device, rows.data(), 2, &norm, nullptr), "tensor 1", "gradient");
    EXPECT_INVALID(scruple_clear(lab().device, rows.data(), 2), "tensor 1", "gradient");
    EXPECT_INVALID(scruple_fold(lab().device, rows.data(), gradients.on_device(0).data(), 2, 1.0f, nullptr),
                   "tensor 1", "gradient");
    EXPECT_INVALID(
        scruple_fold(lab().device, pair.twin->rows.data(), gradients.on_host(0).data(), 2, 1.0f, nullptr),
        "tensor 0", "gradient");
    EXPECT_INVALID(scruple_encode(lab().device, &rows[1], SCRUPLE_GRADIENT, gradients.host(0, 1)),
                   "gradient");
    EXPECT_EQ(pair.difference(), "") << "a refused call wrote something";
    pair.step();
    EXPECT_EQ(pair.difference(), "") << config.name;
  }
  expect_works(lab());
}

TEST_F(CudaErrors, TooLargeAnAllocation) {
  const Optimizer optimizer;
  scruple_tensor tensor = row_of(optimizer, std::int64_t{1} << 49, "scruple");
  EXPECT_REFUSED(scruple_tensor_alloc(lab().device, &tensor, SCRUPLE_STATE), SCRUPLE_OUT_OF_MEMORY, "");
  for (const scruple_array& array : tensor.arrays) EXPECT_EQ(array.codes, nullptr);
  expect_works(lab());
  // A first plane that fits and a second that does not: the first is given back.
  tensor.size = 1 << 20;
  scruple_tensor small = tensor;
  CHECK_OK(scruple_tensor_alloc(lab().device, &small, SCRUPLE_STATE));
  scruple_tensor_free(lab().device, &small);
}

}  // namespace
}  // namespace scruple_tests
