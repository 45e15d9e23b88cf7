// The CUDA engine's host side: turns a table of tensors into a few launches. A call queues kernels on the
// caller's stream and returns; nothing is copied from pinned memory, so nothing has to stay alive and a call
// can be captured into a graph. The engine's own device memory (the workspace) grows when a table is larger
// than any before, and at no other time.
#include "engine/cuda.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <optional>
#include <span>
#include <unordered_map>

#include "engine/cuda_ring.h"
#include "engine/cuda_rows.h"

namespace scruple {
namespace {

class CudaEngine final : public scruple_engine {
 public:
  // In two parts: what the second has made is given back where it fails.
  explicit CudaEngine(int device) : CudaEngine(device, "cuda:" + std::to_string(device)) {
    const CurrentDevice current(device_);
    multiprocessors_ = attribute(cudaDevAttrMultiProcessorCount, device_);
    if (const char* most = std::getenv("SCRUPLE_CUDA_BLOCKS")) most_blocks_ = std::atoll(most);
    if (const char* bytes = std::getenv("SCRUPLE_CUDA_SLOT")) ring_.set_slot(std::atoll(bytes));
    shares_host_memory_ = attribute(cudaDevAttrPageableMemoryAccessUsesHostPageTables, device_) != 0;
    check(cudaEventCreateWithFlags(&last_use_, cudaEventDisableTiming), "creating an event");
    for (Workspace& workspace : workspaces_) {
      workspace_ = &workspace;
      reserve_table(kFirstTable);
    }
    constants_.reserve(kFirstConstants, false);
    sums_.reserve(kFirstSums, false);
  }
  ~CudaEngine() override {
    if (last_use_ != nullptr) cudaEventDestroy(last_use_);
  }

  const char* name() const override { return name_.c_str(); }
  int threads() const override { return 1; }

  void step(const scruple_tensor* tensors, i64 count, u64 version,
            const scruple_step_options& options) override {
    const Call call(*this);
    check_readable(options.found_inf, "found_inf");
    check_readable(options.clip, "clip");
    check_readable(options.loss_scale, "loss_scale");
    check_readable(options.steps, "steps");
    const auto is_away = [](const scruple_tensor& t) { return t.host != 0 && t.size > 0; };
    if (std::none_of(tensors, tensors + count, is_away)) return step_here(tensors, count, version, options);
    for (i64 i = 0; i < count; ++i)
      if (is_away(tensors[i])) check_away(tensors[i], i);
    ring_.begin();
    std::vector<scruple_tensor> here(tensors, tensors + count);  // the others, under their numbers
    for (scruple_tensor& t : here)
      if (is_away(t)) t.size = 0;
    step_here(here.data(), count, 0, options);
    for (i64 i = 0; i < count; ++i)
      if (is_away(tensors[i])) step_through_ring(tensors[i], options);
  }
  double sum_squares(const scruple_tensor* tensors, i64 count) override {
    const Call call(*this);
    scruple_measure_options options = SCRUPLE_MEASURE_OPTIONS_INIT;
    double* const sum = measure_into(tensors, count, options);
    double result = 0;
    check(cudaMemcpyAsync(&result, sum, sizeof result, cudaMemcpyDeviceToHost, stream_), "reading a norm");
    check(cudaStreamSynchronize(stream_), "reading a norm");
    return result;
  }

  void measure(const scruple_tensor* tensors, i64 count, const scruple_measure_options& options) override {
    const Call call(*this);
    measure_into(tensors, count, options);
  }

  void advance(const Advance& what) override {
    const Call call(*this);
    check_readable(what.found_inf, "found_inf");
    check_readable(what.scaler, "scaler");
    check_readable(what.steps, "steps");
    launch(gradient_kernels().advance, 1, 1, what);
  }

  void fold(const scruple_tensor* tensors, const scruple_array* incoming, i64 count, float multiplier,
            const i64* steps) override {
    const Call call(*this);
    begin(workspaces_[kForFold]);
    check_readable(steps, "steps");
    for (i64 i = 0; i < count; ++i) {
      const scruple_tensor& t = tensors[i];
      if (t.size == 0) continue;
      DeviceRow row = row_of(t, constants_of(t));
      const scruple_array &arriving = incoming[i], &total = t.arrays[SCRUPLE_GRADIENT];
      row.arrays[0] = device_array(arriving, false);
      row.arrays[SCRUPLE_GRADIENT] = device_array(total, false);
      row.aligned = is_aligned(arriving) && is_aligned(total);
      const bool wide = arriving.format->layout.code_bits == 32 || total.format->layout.code_bits == 32;
      const FoldKernel& kernel = fold_kernel(total, wide ? kWideFoldLane : kFoldLane);
      table_for(kernel.kernel).add(row, i, i64{kernel.lane} * kBlock);
    }
    commit(tensors);
    prepare_coins(steps);
    for (const KernelTable& table : tables()) launch_over(table, multiplier);
  }

  void clear(const scruple_tensor* tensors, i64 count) override {
    const Call call(*this);
    for (i64 i = 0; i < count; ++i)
      for_planes(tensors[i].arrays[SCRUPLE_GRADIENT], tensors[i].size,
                 [&](void* plane, i64) { check_pointer(plane, "gradient", i); });
    for (i64 i = 0; i < count; ++i)
      for_planes(tensors[i].arrays[SCRUPLE_GRADIENT], tensors[i].size,
                 [&](void* plane, i64 bytes) { zero(plane, bytes); });
  }

  void encode(const scruple_tensor& t, int array, const float* values) override {
    const Call call(*this);
    see_host_memory();
    const float overflow = array == SCRUPLE_GRADIENT ? t.arrays[array].format->overflow : kNoOverflow;
    convert_values(t, array, fp32(), const_cast<float*>(values), true, overflow);
  }
  void decode(const scruple_tensor& t, int array, const scruple_format& to, void* values) override {
    const Call call(*this);
    see_host_memory();
    convert_values(t, array, to, values, false, to.overflow);
  }
  void fill(const scruple_tensor& t, int array, float value) override {
    const Call call(*this);
    see_host_memory();
    check_planes(t, array);
    convert({.to = part_of(t, array), .size = t.size, .otherwise = value});
  }

  void set_stream(void* stream) override {
    const std::lock_guard lock(mutex_);
    stream_ = static_cast<cudaStream_t>(stream);
    in_order_ = false;
  }
  void synchronize() override {
    const std::lock_guard lock(mutex_);
    const CurrentDevice current(device_);
    check(cudaEventSynchronize(last_use_), "waiting for the last call");  // it may be on another stream
    check(cudaStreamSynchronize(stream_), "waiting for the stream");
    ring_.wait();
  }

  void* alloc(i64 bytes) override {
    const Call call(*this);
    void* const memory = allocate(bytes);
    try {
      zero(memory, bytes);
    } catch (...) {
      cudaFree(memory);
      throw;
    }
    return memory;
  }
  void free(void* memory) override { cudaFree(memory); }
  void* alloc_host(i64 bytes) override {
    const std::lock_guard lock(mutex_);
    const CurrentDevice current(device_);
    ring_.begin();  // now: when steps need it, others may have taken what is left of the device
    return allocate_pinned(bytes);
  }
  void free_host(void* memory) override { cudaFreeHost(memory); }
  void copy(void* to, const void* from, i64 bytes) override {
    const Call call(*this);
    see_host_memory();
    check(cudaMemcpyAsync(to, from, static_cast<std::size_t>(bytes), cudaMemcpyDefault, stream_), "copying");
  }

 private:
  CudaEngine(int device, std::string name) : device_(device), name_(std::move(name)) {}

  static constexpr i64 kFirstTable = i64{1} << 20, kFirstConstants = 1 << 16, kFirstSums = 1 << 18;
  static constexpr i64 kStage = i64{1} << 20;  // values that travel to or from the host at a time
  static_assert(kStage % kChunk == 0);

  // Calls share the workspaces. So they exclude each other on the host, and on the device the first one on a
  // stream waits for those before, which were on another. In a capture the graph gives the order instead.
  struct Call {
    explicit Call(CudaEngine& engine) : lock(engine.mutex_), current(engine.device_), self(engine) {
      cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
      check(cudaStreamIsCapturing(self.stream_, &status), "looking at the stream");
      self.capturing_ = status != cudaStreamCaptureStatusNone;
      if (self.capturing_ || self.in_order_) return;
      check(cudaStreamWaitEvent(self.stream_, self.last_use_), "ordering streams");
      self.in_order_ = true;
    }
    ~Call() {
      if (!self.capturing_) cudaEventRecord(self.last_use_, self.stream_);
    }
    std::lock_guard<std::mutex> lock;
    CurrentDevice current;
    CudaEngine& self;
  };

  // What steps have sent back is there for what is queued from now on, and the other way round.
  void see_host_memory() {
    if (!capturing_) ring_.join(stream_);
  }
  void zero(void* memory, i64 bytes) {
    check(cudaMemsetAsync(memory, 0, static_cast<std::size_t>(bytes), stream_), "clearing device memory");
  }

  // ---- The step ----

  void step_here(const scruple_tensor* tensors, i64 count, u64 version, const scruple_step_options& options) {
    if (!is_in_place(tensors, count, version, options.multiplier)) {
      begin(workspaces_[kForStep]);
      for (i64 i = 0; i < count; ++i) {
        const u32 constants = constants_of(tensors[i], options.multiplier);
        constants_of_last_.push_back(constants);
        if (tensors[i].size > 0) add_step_row(tensors[i], i, constants);
      }
      commit(tensors);
      workspace_->version = version;
      sources_of_last_ = sources_.size();
    }
    launch_step(options);
  }
  void launch_step(const scruple_step_options& options) {
    prepare(options);
    for (const KernelTable& table : tables()) launch_over(table, static_cast<const Constants*>(constants()));
  }

  void check_away(const scruple_tensor& t, i64 index) {
    if (capturing_)
      fail(SCRUPLE_UNSUPPORTED, "tensor ", index,
           " has its moments in host memory, and a step copies them beside the ",
           "stream, which is being captured; step it outside the capture, or keep its moments on the device");
    for (int a = 0; a < SCRUPLE_ARRAYS; ++a)
      if (is_used(t, a))
        for_planes(t.arrays[a], t.size,
                   [&](void* plane, i64) { check_pointer(plane, array_name(t, a), index); });
  }

  // A tensor whose moments lie in host memory.
  void step_through_ring(const scruple_tensor& t, const scruple_step_options& options) {
    const i64 each = ring_.elements(t);
    for (i64 first = 0; first < t.size; first += each) {
      scruple_tensor piece = scruple::view_of(t, first, std::min(each, t.size - first), "a piece");
      ring_.bring(piece, stream_);
      begin(workspaces_[kForPieces]);
      add_step_row(piece, 0, constants_of(piece, options.multiplier));
      commit(&piece);
      launch_step(options);
      ring_.send_back(stream_);
    }
  }

  // ---- The table of a call ----

  void begin(Workspace& workspace) {
    workspace_ = &workspace;
    workspace.used = 0;
    workspace.version = 0;
    was_captured_ = was_captured_ || capturing_;
    if (&workspace == &workspaces_[kForStep]) constants_of_last_.clear();
    begin_constants();
  }
  void begin_constants() {
    sources_.clear();
    source_keys_.clear();
  }

  // Whether only the constants are new: the workspace still holds this table, the tensors share constants as
  // they did, and no captured graph can have overwritten the workspace.
  bool is_in_place(const scruple_tensor* tensors, i64 count, u64 version, float multiplier) {
    if (capturing_ || was_captured_ || version == 0 || workspaces_[kForStep].version != version) return false;
    workspace_ = &workspaces_[kForStep];
    begin_constants();
    for (i64 i = 0; i < count; ++i)
      if (constants_of(tensors[i], multiplier) != constants_of_last_[static_cast<std::size_t>(i)])
        return false;
    return sources_.size() == sources_of_last_;
  }

  void add_step_row(const scruple_tensor& t, i64 index, u32 constants) {
    const unsigned active = t.optimizer->active();
    DeviceRow row = row_of(t, constants);
    row.active = static_cast<u16>(active);
    row.aligned = 1;
    row.spread = spread_of(t);
    for (int a = 0; a < SCRUPLE_ARRAYS; ++a) {
      if (!is_used(t, a)) continue;
      row.arrays[a] = device_array(t.arrays[a], is_nonneg(t, a));
      if (!is_aligned(t.arrays[a])) row.aligned = 0;
    }
    const Kernel kernel = kernel_of(t, active);
    table_for(kernel.entry).add(row, index, kernel.tile);
  }

  std::span<KernelTable> tables() { return {workspace_->tables.data(), workspace_->used}; }
  KernelTable& table_for(const void* kernel) {
    std::vector<KernelTable>& tables = workspace_->tables;
    std::size_t& used = workspace_->used;
    for (std::size_t i = used; i-- > 0;)
      if (tables[i].kernel == kernel) return tables[i];
    if (used == tables.size()) tables.emplace_back();
    KernelTable& table = tables[used++];
    table.clear();
    table.kernel = kernel;
    return table;
  }

  // The index of the constants that all tensors of one optimizer at one step share. Without a multiplier no
  // step is taken, and they serve to draw coins alone.
  u32 constants_of(const scruple_tensor& t, std::optional<float> multiplier = {}) {
    const SourceKey key{t.optimizer, t.step};
    if (!sources_.empty() && last_key_ == key) return last_source_;
    const auto [found, is_new] = source_keys_.try_emplace(key, static_cast<u32>(sources_.size()));
    if (is_new) {
      ConstantsSource source{};
      source.t = t.step;
      source.seed = t.optimizer->seed;
      source.rule = -1;
      if (multiplier) {
        source.hyper = t.optimizer->hyper();
        source.lr = t.optimizer->lr_at;
        check_readable(source.lr, "lr");
        source.rule = t.optimizer->rule().index;
        source.multiplier = t.optimizer->maximize ? -*multiplier : *multiplier;
      }
      sources_.push_back(source);
    }
    last_key_ = key;
    return last_source_ = found->second;
  }

  // Gives the tables their places, one after another, and uploads what the workspace does not hold yet.
  void commit(const scruple_tensor* tensors) {
    i64 end = 0;
    for (KernelTable& table : tables()) {
      table.at = end;
      end += round_up(table.bytes(), 16);
    }
    reserve_table(end);
    constants_.reserve(static_cast<i64>(sources_.size() * sizeof(Constants)), capturing_);
    for (const KernelTable& table : tables()) check_planes(table, tensors);
    for (const KernelTable& table : tables()) {
      upload(table.at, table.begins.data(), static_cast<i64>(table.begins.size() * sizeof(i64)));
      upload(table.at + table.begins_bytes(), table.rows.data(),
             static_cast<i64>(table.rows.size() * sizeof(DeviceRow)));
    }
  }

  void reserve_table(i64 bytes) {
    if (bytes <= workspace_->memory.size()) return;
    std::vector<u8> shadow(std::bit_ceil(static_cast<std::size_t>(bytes)), 0xff);  // no table looks like this
    workspace_->memory.reserve(bytes, capturing_);
    workspace_->shadow = std::move(shadow);
  }

  // A kernel that reads host memory fails, and the process cannot use the device any more. So each plane's
  // address is checked first; only of rows that the workspace does not hold, because a check is a call to
  // CUDA.
  void check_planes(const KernelTable& table, const scruple_tensor* tensors) {
    for (std::size_t i = 0; i < table.rows.size(); ++i) {
      const DeviceRow& row = table.rows[i];
      const i64 at = table.at + table.begins_bytes() + static_cast<i64>(i * sizeof(DeviceRow));
      if (std::memcmp(workspace_->shadow.data() + at, &row, sizeof row) == 0) continue;
      for (int a = 0; a < SCRUPLE_ARRAYS; ++a)
        for (const void* plane : {row.arrays[a].codes, row.arrays[a].aux})
          if (plane != nullptr) check_pointer(plane, name_in(table, tensors, i, a), table.tensors[i]);
    }
  }
  const char* name_in(const KernelTable& table, const scruple_tensor* tensors, std::size_t row,
                      int array) const {
    const bool folds = workspace_ == &workspaces_[kForFold];
    return folds && array == 0 ? "incoming gradient" : array_name(tensors[table.tensors[row]], array);
  }
  void check_readable(const void* pointer, const char* what) const {
    if (pointer != nullptr) check_pointer(pointer, what, -1);
  }
  // `tensor`: -1 for what belongs to none.
  void check_pointer(const void* pointer, const char* what, i64 tensor) const {
    check_place(place_of(pointer), pointer, what, tensor);
  }
  static cudaPointerAttributes place_of(const void* pointer) {
    cudaPointerAttributes found{};
    check(cudaPointerGetAttributes(&found, pointer), "looking at a pointer");
    return found;
  }
  void check_place(const cudaPointerAttributes& found, const void* pointer, const char* what,
                   i64 tensor) const {
    const bool not_here = found.type == cudaMemoryTypeDevice && found.device != device_;
    const bool not_device = found.type == cudaMemoryTypeUnregistered && !shares_host_memory_;
    if (!not_here && !not_device) return;
    const std::string name = (tensor < 0 ? "" : "tensor " + std::to_string(tensor) + ", ") + what;
    if (not_here)
      fail(SCRUPLE_INVALID, name, ": ", pointer, " lies on device ", found.device, ", but engine ", name_,
           " runs on device ", device_, "; create engine cuda:", found.device);
    fail(SCRUPLE_INVALID, name, ": ", pointer, " is not device memory (host memory, or freed), which engine ",
         name_, " cannot use; allocate it there (scruple_tensor_alloc, cudaMalloc), or create engine cpu");
  }

  // In pieces that fit into one launch. Skips a piece that the workspace holds already, unless a captured
  // graph may have overwritten it.
  void upload(i64 at, const void* data, i64 bytes) {
    const auto* from = static_cast<const u8*>(data);
    for (i64 done = 0; done < bytes; done += kUploadBytes) {
      const i64 n = std::min<i64>(kUploadBytes, bytes - done);
      u8* const shadow = workspace_->shadow.data() + at + done;
      if (!was_captured_ && std::memcmp(shadow, from + done, static_cast<std::size_t>(n)) == 0) continue;
      upload_.to = workspace_->memory.at<u8>(at + done);
      upload_.bytes = round_up(n, 16);
      std::memcpy(upload_.data, from + done, static_cast<std::size_t>(n));
      launch(gradient_kernels().upload, 1, 512, upload_);
      std::memcpy(shadow, from + done, static_cast<std::size_t>(n));
    }
  }

  // The constants of a step, on the device; and the coins of every row from them.
  void prepare(const scruple_step_options& options) {
    prepare_.part = static_cast<u32>(options.part);
    prepare_.keep_weight = options.part + 1 < options.parts ? 1 : 0;
    prepare_.found_inf = options.found_inf;
    prepare_.clip = options.clip;
    prepare_.loss_scale = options.loss_scale;
    prepare_.steps = options.steps;
    for (std::size_t first = 0; first < sources_.size(); first += kPreparedAtOnce) {
      const std::size_t n = std::min<std::size_t>(kPreparedAtOnce, sources_.size() - first);
      prepare_.to = constants() + first;
      prepare_.count = static_cast<int>(n);
      std::copy_n(sources_.begin() + static_cast<std::ptrdiff_t>(first), n, prepare_.sources);
      launch(gradient_kernels().prepare, 1, kPreparedAtOnce, prepare_);
    }
    for (const KernelTable& table : tables()) draw(table);
  }
  void prepare_coins(const i64* steps) {
    scruple_step_options options = SCRUPLE_STEP_OPTIONS_INIT;
    options.steps = steps;
    prepare(options);
  }

  // Draws the coins of the table's rows for this call. They lie inside the rows, but the device writes them,
  // so upload() leaves them out when it looks for changes.
  void draw(const KernelTable& table) {
    const int rows = static_cast<int>(table.rows.size());
    if (rows == 0) return;
    launch(gradient_kernels().draw, tiles_of(i64{rows} * (SCRUPLE_ARRAYS + 1), kBlock), kBlock,
           workspace_->memory.at<DeviceRow>(table.at + table.begins_bytes()), rows,
           static_cast<const Constants*>(constants()));
  }

  double* measure_into(const scruple_tensor* tensors, i64 count, const scruple_measure_options& options) {
    begin(workspaces_[kForMeasure]);
    check_readable(options.loss_scale, "loss_scale");
    check_readable(options.steps, "steps");
    check_readable(options.norm, "norm");
    check_readable(options.found_inf, "found_inf");
    check_readable(options.clip, "clip");
    check_readable(options.sum_before, "sum_before");
    check_readable(options.sum, "sum");
    check_readable(options.gamma, "gamma");
    check_readable(options.skip, "skip");
    KernelTable& table = table_for(gradient_kernels().sum_squares);
    for (i64 i = 0; i < count; ++i) {
      const scruple_tensor& t = tensors[i];
      if (t.size == 0) continue;
      DeviceRow row = row_of(t, constants_of(t));
      row.arrays[SCRUPLE_GRADIENT] = device_array(t.arrays[SCRUPLE_GRADIENT], false);
      row.aligned = is_aligned(t.arrays[SCRUPLE_GRADIENT]);
      table.add(row, i, kChunk);
    }
    const i64 chunks = table.begins.back();
    sums_.reserve((chunks + 1) * static_cast<i64>(sizeof(double)), capturing_);
    commit(tensors);
    auto* const sums = sums_.at<double>(0);
    prepare_coins(options.steps);
    launch_over(table, sums + 1);
    launch(gradient_kernels().finish_norm, 1, kBlock, NormOutput{sums + 1, chunks, sums, options});
    return sums;
  }

  // ---- One array ----

  static const scruple_format& fp32() {
    static const scruple_format& format = find_format("fp32");
    return format;
  }

  // All that the kernel needs travels with its launch, so that decoding can be captured into a graph, and leaves
  // the tables of a step where they are.
  static ArrayPart part_of(const scruple_tensor& t, int which) {
    const scruple_array& array = t.arrays[which];
    ArrayPart part{.array = device_array(array, is_nonneg(t, which)), .aligned = is_aligned(array)};
    if (draws_coins(array.rounding)) {
      const u32 write = which == SCRUPLE_GRADIENT ? static_cast<u32>(t.folds) : 0;
      part.coins =
          draw_coins({t.optimizer->seed, static_cast<u32>(t.step), t.id, static_cast<u32>(which), write})
              .from(t.offset);
    }
    return part;
  }
  static ArrayPart part_of(const scruple_format& format, void* values) {
    const scruple_array array{&format, values, nullptr, kNearest, 0};
    return {.array = device_array(array, false), .aligned = is_aligned(array)};
  }
  void check_planes(const scruple_tensor& t, int array) const {
    for_planes(t.arrays[array], t.size,
               [&](void* plane, i64) { check_pointer(plane, array_name(t, array), 0); });
  }
  void convert(const ArrayWork& work) {
    if (work.size > 0) launch(array_kernel(), tiles_of(work.size, kBlockTile), kBlock, work);
  }

  // Host values go through a buffer, piece by piece.
  void convert_values(const scruple_tensor& t, int array, const scruple_format& plain, void* values,
                      bool encoding, float overflow) {
    if (t.size == 0) return;
    check_planes(t, array);
    ArrayPart codes = part_of(t, array);
    const auto run = [&](i64 first, i64 n, void* at) {
      codes.first = first;
      const ArrayPart there = part_of(plain, at);
      convert({.from = encoding ? there : codes,
               .to = encoding ? codes : there,
               .size = n,
               .to_plain = !encoding,
               .overflow = overflow});
    };
    const cudaPointerAttributes found = place_of(values);
    if (found.type != cudaMemoryTypeUnregistered) {
      check_place(found, values, "values", -1);
      run(0, t.size, values);
      if (found.type != cudaMemoryTypeDevice)  // the host sees it too, and may look at once
        check(cudaStreamSynchronize(stream_), "waiting for values");
      return;
    }
    const i64 each = plain.layout.code_bits / 8;
    stage_.reserve(kStage * each, capturing_);
    auto* const stage = stage_.at<u8>(0);
    for (i64 first = 0; first < t.size; first += kStage) {
      const i64 n = std::min(kStage, t.size - first);
      u8* const host = static_cast<u8*>(values) + first * each;
      const auto bytes = static_cast<std::size_t>(n * each);
      if (encoding)
        check(cudaMemcpyAsync(stage, host, bytes, cudaMemcpyHostToDevice, stream_), "copying values");
      run(first, n, stage);
      if (!encoding)
        check(cudaMemcpyAsync(host, stage, bytes, cudaMemcpyDeviceToHost, stream_), "copying values");
    }
    check(cudaStreamSynchronize(stream_), "waiting for values");
  }

  // ---- Memory and launches ----

  Constants* constants() { return constants_.at<Constants>(0); }
  DeviceTable view_of(const KernelTable& table) {
    return {workspace_->memory.at<const i64>(table.at),
            workspace_->memory.at<const DeviceRow>(table.at + table.begins_bytes()),
            static_cast<int>(table.rows.size()), table.begins.back()};
  }

  template <class... Arguments>
  void launch(const void* kernel, i64 blocks, int threads, const Arguments&... arguments) {
    const void* pointers[] = {&arguments...};
    check(cudaLaunchKernel(kernel, dim3(static_cast<unsigned>(blocks)), dim3(static_cast<unsigned>(threads)),
                           const_cast<void**>(pointers), 0, stream_),
          "launching a kernel");
  }
  // As many blocks as fit at once, several times over.
  template <class... Arguments>
  void launch_tiles(const KernelTable& table, DeviceTable view, const Arguments&... arguments) {
    if (view.tiles == 0) return;
    int& resident = resident_[table.kernel];
    if (resident == 0)
      check(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&resident, table.kernel, kBlock, 0),
            "sizing a launch");
    const i64 several = static_cast<i64>(resident) * multiprocessors_ * kWaves;
    view.each = tiles_of(view.tiles, std::max<i64>(1, std::min(several, most_blocks_)));
    launch(table.kernel, tiles_of(view.tiles, view.each), kBlock, view, arguments...);
  }
  template <class... Arguments>
  void launch_over(const KernelTable& table, const Arguments&... arguments) {
    launch_tiles(table, view_of(table), arguments...);
  }
  static constexpr i64 kWaves = 128;  // 256 were measured against 16 in bench/results/2026-11-15-h200.md

  struct SourceKey {
    const scruple_optimizer* optimizer;
    i64 step;
    bool operator==(const SourceKey&) const = default;
  };
  struct SourceHash {
    std::size_t operator()(const SourceKey& key) const {
      return std::hash<const void*>()(key.optimizer) ^ std::hash<i64>()(key.step) * 0x9e3779b97f4a7c15u;
    }
  };

  const int device_;
  const std::string name_;
  int multiprocessors_ = 0;
  i64 most_blocks_ = i64{1} << 30;  // of a launch; a test sets few, so that each has many tiles of many rows
  bool shares_host_memory_ = false;
  std::mutex mutex_;
  cudaStream_t stream_ = nullptr;
  cudaEvent_t last_use_ = nullptr;
  bool capturing_ = false, was_captured_ = false;
  bool in_order_ = false;  // the stream has waited for the calls on others

  enum { kForStep, kForPieces, kForMeasure, kForFold, kWorkspaces };
  Workspace workspaces_[kWorkspaces];
  Workspace* workspace_ = nullptr;                 // of the call under way
  DeviceBuffer constants_, sums_;                  // of any call: written anew by each
  Ring ring_;                                      // for moments in host memory
  DeviceBuffer stage_;                             // for values that travel to or from the host
  std::unordered_map<const void*, int> resident_;  // blocks per multiprocessor

  std::vector<ConstantsSource> sources_;
  std::unordered_map<SourceKey, u32, SourceHash> source_keys_;
  std::vector<u32> constants_of_last_;  // of each tensor in the last step
  std::size_t sources_of_last_ = 0;
  SourceKey last_key_{};
  u32 last_source_ = 0;
  Upload upload_{};
  PrepareInput prepare_{};
};

}  // namespace

// Compressed kernels want CUDA 12.4, and a runtime the driver of its major version.
constexpr int kLeastDriver = CUDART_VERSION < 13000 ? 12040 : 13000;

EngineInfo cuda_info() {
  EngineInfo info{"cuda", "an NVIDIA GPU", ""};
  const auto version = [](int number) {
    return std::to_string(number / 1000) + "." + std::to_string(number % 100 / 10);
  };
  int driver = 0, count = 0, device = 0;
  if (cudaDriverGetVersion(&driver) != cudaSuccess || driver == 0) {
    info.reason = "this machine has no NVIDIA driver";
  } else if (driver < kLeastDriver) {
    info.reason =
        "the NVIDIA driver supports CUDA " + version(driver) + "; " + version(kLeastDriver) + " is needed";
  } else if (const cudaError_t error = cudaGetDeviceCount(&count); error != cudaSuccess || count == 0) {
    info.reason = "CUDA finds no device";
    if (error != cudaSuccess) info.reason += std::string(": ") + cudaGetErrorString(error);
  } else if (cudaDeviceProp found{}; cudaGetDevice(&device) == cudaSuccess &&
                                     cudaGetDeviceProperties(&found, device) == cudaSuccess) {
    const int capability = 10 * found.major + found.minor;
    info.doc = std::string(found.name) + ", compute capability " + std::to_string(found.major) + "." +
               std::to_string(found.minor);
    if (capability < least_architecture() / 10)
      info.reason = info.doc + ": this library has code for " + std::to_string(least_architecture() / 100) +
                    "." + std::to_string(least_architecture() / 10 % 10) +
                    " and later; build it with CMAKE_CUDA_ARCHITECTURES=native";
  }
  cudaGetLastError();
  return info;
}

std::unique_ptr<scruple_engine> make_cuda_engine(int device) {
  int count = 0;
  check(cudaGetDeviceCount(&count), "counting devices");
  if (device < 0) check(cudaGetDevice(&device), "reading the current device");
  if (device >= count)
    fail(SCRUPLE_INVALID, "engine cuda:", device, ": there are ", count, " CUDA devices, numbered from 0");
  // A kernel for this device, or one that the driver can compile for it.
  const CurrentDevice current(device);
  cudaFuncAttributes attributes{};
  const cudaError_t found = cudaFuncGetAttributes(&attributes, gradient_kernels().advance);
  if (found == cudaErrorNoKernelImageForDevice || found == cudaErrorInvalidDeviceFunction ||
      found == cudaErrorUnsupportedPtxVersion) {
    cudaGetLastError();
    fail(SCRUPLE_UNAVAILABLE, "engine cuda:", device,
         ": this library has no code for that device: CUDA says ", cudaGetErrorString(found),
         "; build it with CMAKE_CUDA_ARCHITECTURES=native");
  }
  check(found, "starting on the GPU, whose memory other programs may hold");
  return std::make_unique<CudaEngine>(device);
}

}  // namespace scruple
