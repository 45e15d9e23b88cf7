// Streams and graphs are the caller's, so these tests make their own.
#if defined(SCRUPLE_TEST_CUDA)

#include <cuda_runtime_api.h>

#include <chrono>
#include <functional>

#include "tests/cuda/loop.h"

namespace scruple_tests {
namespace {

#define CUDA_OK(call) EXPECT_EQ((call), cudaSuccess) << #call

// ---- Streams ----

// A stream that does not wait for the default one.
struct Stream {
  Stream() { CUDA_OK(cudaStreamCreateWithFlags(&handle, cudaStreamNonBlocking)); }
  ~Stream() { cudaStreamDestroy(handle); }
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;
  operator cudaStream_t() const { return handle; }
  // Whatever is queued next waits some milliseconds: work that is not ordered behind it runs too early.
  void delay() const {
    CUDA_OK(cudaLaunchHostFunc(
        handle, [](void*) { std::this_thread::sleep_for(std::chrono::milliseconds(5)); }, nullptr));
  }
  void copy(void* to, const void* from, std::size_t bytes) const {
    CUDA_OK(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, handle));
  }
  void wait() const { CUDA_OK(cudaStreamSynchronize(handle)); }

  cudaStream_t handle = nullptr;
};

// Host memory that copies do not wait for.
struct Pinned {
  explicit Pinned(std::size_t bytes) { CUDA_OK(cudaMallocHost(&data, bytes)); }
  ~Pinned() { cudaFreeHost(data); }
  Pinned(const Pinned&) = delete;
  Pinned& operator=(const Pinned&) = delete;
  template <class T>
  T* as() const {
    return static_cast<T*>(data);
  }
  void* data = nullptr;
};

// The gradients arrive by the caller's own copy on the stream, and the weights leave by one; nothing but the
// stream orders them with the step between.
TEST_F(CudaStream, WorkIsOrderedWithTheCallers) {
  constexpr std::size_t kSize = 300000;
  const Stream stream;
  const Shape shape{{kSize}};
  const int steps = steps_of(10);
  DeviceGradients gradients(lab().device, shape.sizes, steps + 1);
  Pair pair(lab(), with_gradient(busy_config("adamw", "scruple"), {"fp32", SCRUPLE_NEAREST}), shape);
  const Pinned arriving(gradients.bytes_per_set() * static_cast<std::size_t>(steps)), leaving(kSize * 2);
  CHECK_OK(scruple_engine_set_stream(lab().device, stream.handle));
  for (int t = 1; t <= steps; ++t) {
    const std::size_t n = static_cast<std::size_t>(t - 1);
    std::memcpy(arriving.as<char>() + n * kSize * 4, gradients.host(n, 0), kSize * 4);
    pair.each_row([&](scruple_tensor& row) { row.step = t; });
    CHECK_OK(scruple_encode(lab().host, pair.rows.data(), SCRUPLE_GRADIENT, gradients.host(n, 0)));
    pair.step(On::kHost);

    stream.delay();
    stream.copy(pair.twin->rows[0].arrays[SCRUPLE_GRADIENT].codes, arriving.as<char>() + n * kSize * 4,
                kSize * 4);
    pair.step(On::kDevice);
    stream.copy(leaving.data, pair.twin->rows[0].arrays[SCRUPLE_WEIGHT].codes, kSize * 2);
    if (t % 3 != 0 && t != steps) continue;  // else the queue grows
    stream.wait();
    ASSERT_EQ(std::memcmp(leaving.data, pair.tensors[0].codes(SCRUPLE_WEIGHT).data(), kSize * 2), 0)
        << "after step " << t;
  }
  CHECK_OK(scruple_engine_synchronize(lab().device));
  CHECK_OK(scruple_engine_set_stream(lab().device, nullptr));
  EXPECT_EQ(pair.difference(), "");
}

TEST_F(CudaStream, OrderIsKeptWhenTheStreamChanges) {
  const Stream streams[2];
  const Shape shape{{300000, 5, 1000}};
  const int steps = steps_of(10);
  DeviceGradients gradients(lab().device, shape.sizes, steps + 1);
  for (const Config& config : {busy_config("adamw", "scruple"), busy_config("sgd", "lpmm")}) {
    Pair pair(lab(), config, shape);
    CHECK_OK(scruple_engine_synchronize(lab().device));
    for (int t = 1; t <= steps; ++t) {
      const Stream& now = streams[t % 2];
      if (t % 4 < 2) now.delay();
      CHECK_OK(scruple_engine_set_stream(lab().device, t % 5 == 0 ? nullptr : now.handle));
      pair.walk(t, t, gradients, On::kDevice);
    }
    pair.walk(1, steps, gradients, On::kHost);
    CHECK_OK(scruple_engine_synchronize(lab().device));
    EXPECT_EQ(pair.difference(), "") << config.name;
    CHECK_OK(scruple_engine_set_stream(lab().device, nullptr));
  }
}

// Calls that hand values to the host wait for them, whatever the stream is still busy with.
TEST_F(CudaStream, HostResultsAreWaitedFor) {
  const Stream stream;
  const Shape shape{{70001}};
  DeviceGradients gradients(lab().device, shape.sizes, 3);
  Pair pair(lab(), busy_config("adamw", "scruple"), shape);
  CHECK_OK(scruple_engine_set_stream(lab().device, stream.handle));
  pair.take_gradients(1, gradients);
  stream.delay();
  const double got = norm_of(lab().device, pair.twin->rows);
  EXPECT_EQ(got, norm_of(lab().host, pair.rows));
  stream.delay();
  pair.step();
  std::vector<float> values(70001);
  CHECK_OK(scruple_decode(lab().device, pair.twin->rows.data(), SCRUPLE_WEIGHT, values.data()));
  EXPECT_TRUE(same_bytes(values, pair.tensors[0].decode(lab().host, SCRUPLE_WEIGHT)));
  stream.delay();
  pair.step();
  CHECK_OK(scruple_engine_synchronize(lab().device));
  EXPECT_EQ(cudaStreamQuery(stream), cudaSuccess) << "the step was still running";
  EXPECT_EQ(pair.difference(), "");
  CHECK_OK(scruple_engine_set_stream(lab().device, nullptr));
}

// ---- Graphs ----

// What `queue` puts on the stream, to be replayed.
struct Graph {
  Graph(const Stream& on, const std::function<void()>& queue) : stream(on) {
    CUDA_OK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
    queue();
    cudaGraph_t graph = nullptr;
    CUDA_OK(cudaStreamEndCapture(stream, &graph));
    CUDA_OK(cudaGraphInstantiateWithFlags(&handle, graph, 0));
    CUDA_OK(cudaGraphDestroy(graph));
  }
  ~Graph() { cudaGraphExecDestroy(handle); }
  Graph(const Graph&) = delete;
  Graph& operator=(const Graph&) = delete;
  void replay() const { CUDA_OK(cudaGraphLaunch(handle, stream)); }

  const Stream& stream;
  cudaGraphExec_t handle = nullptr;
};

// One call of the same size that writes nothing, so that the engine has its memory.
void warm(const Pair& pair) {
  const DeviceCell<float> skip(pair.device, 1.0f);
  CHECK_OK(try_step(pair.device, pair.twin->rows, {.found_inf = skip.at()}));
  CHECK_OK(scruple_engine_synchronize(pair.device));
}

// A call that cannot be captured says so.
void expect_not_captured(const Stream& stream, const char* said,
                         const std::function<scruple_status()>& call) {
  CUDA_OK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
  EXPECT_NE(call(), SCRUPLE_OK);
  const std::string message = scruple_last_error();
  EXPECT_FALSE(message.empty());
  EXPECT_NE(message.find(said), message.npos) << message;
}
// Whether the capture went on in spite of it.
bool end_of_capture(const Stream& stream) {
  cudaGraph_t graph = nullptr;
  const bool whole = cudaStreamEndCapture(stream, &graph) == cudaSuccess;
  if (graph != nullptr) cudaGraphDestroy(graph);
  cudaGetLastError();
  return whole;
}

double lr_of(int t) { return 0.01 / (1 + 0.3 * t); }

Shape graph_shape() {
  Shape shape{{3, 128, 4000, 0, 70001}, {0, 1}};
  for (int i = 0; i < 200; ++i) shape.sizes.push_back(i * 37 % 301);
  return shape;
}

// Captured once, replayed ten times with learning rate and step changing in device memory; in between the
// same engine takes plain steps of other tensors, larger and smaller tables, norms and copies.
TEST_F(CudaGraph, AReplayedStepFollowsLearningRateAndStep) {
  const Stream stream;
  const Shape shape = graph_shape();
  const Shape plain_shape{many_sizes(), {0}};
  const int steps = steps_of(10);
  DeviceGradients gradients(lab().device, shape.sizes, steps + 1);
  DeviceGradients plain_gradients(lab().device, plain_shape.sizes, steps + 1);
  DeviceMemory other(lab().device);
  struct Cells {
    double lr;
    std::int64_t steps;
  };
  const DeviceCell<Cells> cells(lab().device);
  const Pinned schedule(sizeof(Cells) * static_cast<std::size_t>(steps + 1));
  for (int t = 1; t <= steps; ++t) schedule.as<Cells>()[t] = {lr_of(t), t - 1};
  for (const Config& recipe : recipe_configs())
    for (const bool busy_engine : {false, true}) {
      if (quick() && busy_engine) continue;
      Config config = recipe;
      set_rounding(config, SCRUPLE_STOCHASTIC);
      Pair pair(lab(), config, shape), plain(lab(), other, {busy_config("lion", "lpmm")}, plain_shape);
      CHECK_OK(scruple_engine_set_stream(lab().device, stream.handle));
      CHECK_OK(scruple_optimizer_read_lr(*pair.device_optimizers[0], &cells.at()->lr));
      pair.take_gradients(1, gradients, On::kDevice);  // step 1, and the device adds
      warm(pair);
      const std::vector<scruple_tensor> captured = pair.twin->rows;
      {
        const Graph graph(stream, [&] {
          const std::vector<scruple_tensor> table = captured;  // it need not outlive the call
          CHECK_OK(try_step(lab().device, table, {.steps = &cells.at()->steps}));
        });
        for (int t = 1; t <= steps; ++t) {
          pair.take_gradients(t, gradients, On::kDevice);
          if (busy_engine) plain.walk(t, t, plain_gradients, On::kDevice);
          stream.copy(cells.at(), &schedule.as<Cells>()[t], sizeof(Cells));
          graph.replay();
          if (busy_engine && t % 3 == 0) norm_of(lab().device, plain.twin->rows);
        }
        CHECK_OK(scruple_engine_synchronize(lab().device));
        stream.wait();
      }
      for (int t = 1; t <= steps; ++t) {
        pair.optimizers[0]->set("lr", lr_of(t));
        pair.walk(t, t, gradients, On::kHost);
      }
      ASSERT_EQ(pair.difference(), "") << config.name << (busy_engine ? ", with other calls in between" : "");
      if (busy_engine) {
        plain.walk(1, steps, plain_gradients, On::kHost);
        ASSERT_EQ(plain.difference(), "") << config.name << ": the plain steps in between";
      }
      CHECK_OK(scruple_engine_set_stream(lab().device, nullptr));
      expect_works(lab());
    }
}

// Fold, measure, step and advance in one graph: nothing but the incoming gradient comes from outside.
TEST_F(CudaGraph, AWholeLoopInAGraph) {
  const Stream stream;
  const Shape shape = graph_shape();
  const int steps = quick() ? 6 : 20;
  DeviceGradients gradients(lab().device, shape.sizes, steps + 2), incoming(lab().device, shape.sizes, 2);
  spoil(gradients, steps);
  for (const Config& config : loop_configs()) {
    Loop loop(lab(), config, shape);
    CHECK_OK(scruple_engine_set_stream(lab().device, stream.handle));
    // Once outside, on what is then put back: the engine has its memory.
    loop.queue(0, incoming);
    loop.pair.twin->upload(loop.pair.tensors);
    CHECK_OK(scruple_copy(lab().device, loop.there.at(), &loop.here, sizeof loop.here));
    CHECK_OK(scruple_engine_synchronize(lab().device));
    {
      const Graph graph(stream, [&] { loop.queue(0, incoming); });
      for (int t = 1; t <= steps; ++t) {
        stream.copy(incoming.on_device(0)[0].codes, gradients.on_device(t)[0].codes,
                    2 * gradients.bytes_per_set());
        graph.replay();
      }
      stream.wait();
    }
    CHECK_OK(scruple_engine_synchronize(lab().device));
    loop.expect_same(gradients, steps);
    if (HasFatalFailure()) return;
    CHECK_OK(scruple_engine_set_stream(lab().device, nullptr));
  }
}

// Two graphs of one engine, and one of another, replayed in turn.
TEST_F(CudaGraph, SeveralGraphsLiveSideBySide) {
  const Stream stream;
  const Shape shape = graph_shape();
  DeviceGradients gradients(lab().device, shape.sizes, 3);
  Lab rival(engine_under_test());
  DeviceMemory memory_b(lab().device), memory_c(lab().device);
  Pair a(lab(), busy_config("adamw", "scruple"), shape),
      b(lab(), memory_b, {busy_config("sgd", "lpmm")}, shape),
      c(rival, memory_c, {busy_config("adam", "flash")}, shape);
  Pair* const pairs[] = {&a, &b, &c};
  std::vector<std::unique_ptr<Graph>> graphs;
  for (Pair* pair : pairs) {
    CHECK_OK(scruple_engine_set_stream(pair->device, stream.handle));
    pair->take_gradients(1, gradients);
    warm(*pair);
  }
  for (Pair* pair : pairs)
    graphs.push_back(std::make_unique<Graph>(stream, [&] { pair->step(On::kDevice); }));
  for (const std::size_t which : {0u, 1u, 2u, 0u, 2u, 1u, 1u, 0u}) {
    graphs[which]->replay();
    pairs[which]->step(On::kHost);
  }
  stream.wait();
  for (Pair* pair : pairs) EXPECT_EQ(pair->difference(), "");
  graphs.clear();
  for (Pair* pair : pairs) CHECK_OK(scruple_engine_set_stream(pair->device, nullptr));
}

// A table larger than the engine has memory for cannot be captured: it says so, and everything goes on.
TEST_F(CudaGraph, ATableTooLargeToCaptureIsAClearError) {
  constexpr std::size_t kTensors = 20000, kBytes = 16;
  const Stream stream;
  Lab fresh(engine_under_test());
  const Optimizer sgd("sgd");
  DeviceMemory planes(fresh.device, kTensors * kBytes * 2);
  std::vector<float> ones(kTensors * kBytes * 2 / sizeof(float), 1.0f);
  planes.write(ones.data(), ones.size() * sizeof(float));
  std::vector<scruple_tensor> rows(kTensors, row_of(sgd, kBytes / sizeof(float)));
  for (std::size_t i = 0; i < kTensors; ++i) {
    rows[i].arrays[SCRUPLE_WEIGHT] = fp32_array(planes.data() + 2 * i * kBytes);
    rows[i].arrays[SCRUPLE_GRADIENT] = fp32_array(planes.data() + (2 * i + 1) * kBytes);
  }
  CHECK_OK(scruple_engine_set_stream(fresh.device, stream.handle));
  const auto step = [&] { return scruple_step(fresh.device, rows.data(), length(rows), nullptr); };
  expect_not_captured(stream, "captur", step);
  EXPECT_TRUE(end_of_capture(stream)) << "the refusal broke the capture";
  CHECK_OK(step());
  std::vector<float> back(ones.size());
  planes.read(back.data(), back.size() * sizeof(float));
  EXPECT_EQ(back[0], std::fma(-1e-3f, 1.0f, 1.0f));
  EXPECT_EQ(back[8 * (kTensors - 1) + 3], back[0]);
  EXPECT_EQ(back[8 * (kTensors - 1) + 4], 1.0f);
  {  // and now that it has its memory, it can be captured
    const Graph later(stream, [&] { CHECK_OK(step()); });
    later.replay();
    stream.wait();
    planes.read(back.data(), back.size() * sizeof(float));
    EXPECT_EQ(back[0], std::fma(-1e-3f, 1.0f, std::fma(-1e-3f, 1.0f, 1.0f)));
  }
  CHECK_OK(scruple_engine_set_stream(fresh.device, nullptr));
  expect_works(fresh);
}

// Decoding needs no memory of the engine's, so a new one can capture it; and steps stay what they were.
TEST_F(CudaGraph, DecodingIsOneKernel) {
  const Stream stream;
  DeviceGradients gradients(lab().device, {5000}, 4);
  Pair pair(lab(), busy_config("sgd", "lpmm"), {{5000}});
  DeviceMemory values(lab().device, 5000 * 4);
  CHECK_OK(scruple_engine_set_stream(lab().device, stream.handle));
  pair.walk(1, 1, gradients);
  CHECK_OK(scruple_decode_as(lab().device, &pair.twin->rows[0], SCRUPLE_WEIGHT, scruple_format_find("fp32"),
                             values.data()));
  Lab fresh(engine_under_test());
  CHECK_OK(scruple_engine_set_stream(fresh.device, stream.handle));
  for (scruple_engine* const engine : {fresh.device.handle, lab().device.handle}) {
    const Graph graph(stream, [&] {
      CHECK_OK(scruple_decode_as(engine, &pair.twin->rows[0], SCRUPLE_WEIGHT, scruple_format_find("bf16"),
                                 values.data()));
    });
    for (int t = 2; t <= 3; ++t) {
      pair.walk(t, t, gradients);
      graph.replay();
      stream.wait();
      std::vector<std::uint16_t> got(5000), want(5000);
      values.read(got.data(), got.size() * 2);
      CHECK_OK(scruple_decode_as(lab().host, &pair.rows[0], SCRUPLE_WEIGHT, scruple_format_find("bf16"),
                                 want.data()));
      EXPECT_EQ(got, want) << "step " << t;
    }
  }
  EXPECT_EQ(pair.difference(), "");
  CHECK_OK(scruple_engine_set_stream(lab().device, nullptr));
}

// Calls that must wait for the device cannot be captured; they say so instead of breaking the engine.
TEST_F(CudaGraph, HandingValuesToTheHostCannotBeCaptured) {
  const Stream stream;
  DeviceGradients gradients(lab().device, {100}, 2);
  Pair pair(lab(), busy_config("adamw", "scruple"), {{100}});
  pair.take_gradients(1, gradients);
  CHECK_OK(scruple_engine_synchronize(lab().device));
  CHECK_OK(scruple_engine_set_stream(lab().device, stream.handle));
  double norm = 0;
  expect_not_captured(stream, "",
                      [&] { return scruple_norm(lab().device, pair.twin->rows.data(), 1, &norm, nullptr); });
  end_of_capture(stream);
  CHECK_OK(scruple_engine_set_stream(lab().device, nullptr));
  expect_works(lab());
}

}  // namespace
}  // namespace scruple_tests

#endif
