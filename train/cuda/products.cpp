#include "train/cuda/products.h"

#include <cublasLt.h>
#include <dlfcn.h>

#include <algorithm>
#include <array>
#include <limits>
#include <map>
#include <stdexcept>
#include <string>
#include <vector>

#include "train/cuda/layers.h"

namespace scruple::train::cuda {
namespace {

constexpr std::int64_t kWorkspace = 32 << 20;  // what cuBLAS itself takes on Hopper

// How many algorithms are tried, and how often each is timed. Only large products are: timing pays there, and
// they have so many values that another order of summing shows. It changes about one bf16 in a thousand.
constexpr int kCandidates = 8, kRounds = 3;
constexpr std::int64_t kLeastValues = 1 << 18;
constexpr double kLeastFlops = 4e9;
constexpr float kLeastGain = 0.98f;  // of the first one's time

// ---- cuBLASLt, opened at run time ----

#define SCRUPLE_CUBLASLT(call)                                                                           \
  call(Create) call(Destroy) call(MatmulDescCreate) call(MatmulDescDestroy) call(MatmulDescSetAttribute) \
      call(MatrixLayoutCreate) call(MatrixLayoutDestroy) call(MatmulPreferenceCreate)                    \
          call(MatmulPreferenceDestroy) call(MatmulPreferenceSetAttribute) call(MatmulAlgoGetHeuristic)  \
              call(Matmul) call(GetStatusString) call(GetVersion)

struct Library {
#define SCRUPLE_MEMBER(name) decltype(&cublasLt##name) name;
  SCRUPLE_CUBLASLT(SCRUPLE_MEMBER)
#undef SCRUPLE_MEMBER
};

void* open_cublaslt() {
  const std::string name = "libcublasLt.so." + std::to_string(CUBLAS_VER_MAJOR);
  for (const std::string& path : {name, SCRUPLE_CUBLAS_FOLDER "/" + name})
    if (void* const found = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL); found != nullptr) return found;
  throw std::runtime_error("training on the GPU needs " + name + ", which was not found: " + dlerror() +
                           "; install CUDA " + std::to_string(CUBLAS_VER_MAJOR) +
                           "'s cuBLAS (Debian: libcublas, PyPI: nvidia-cublas) and put its folder into "
                           "LD_LIBRARY_PATH, or use --device cpu");
}

const Library& library() {
  static const Library opened = [] {
    void* const handle = open_cublaslt();
    Library calls;
#define SCRUPLE_FIND(name)                                                              \
  calls.name = reinterpret_cast<decltype(calls.name)>(dlsym(handle, "cublasLt" #name)); \
  if (calls.name == nullptr) throw std::runtime_error("libcublasLt has no cublasLt" #name);
    SCRUPLE_CUBLASLT(SCRUPLE_FIND)
#undef SCRUPLE_FIND
    return calls;
  }();
  return opened;
}

void check_blas(cublasStatus_t status, const char* doing) {
  if (status != CUBLAS_STATUS_SUCCESS)
    throw std::runtime_error(std::string(doing) + ": cuBLASLt says " + library().GetStatusString(status));
}

cudaDataType_t type_of(Precision precision) {
  switch (precision) {
    case Precision::bf16: return CUDA_R_16BF;
    case Precision::fp16: return CUDA_R_16F;
    case Precision::fp32: break;
  }
  return CUDA_R_32F;
}

std::uint32_t alignment_of(const void* address) {
  const auto bits = reinterpret_cast<std::uintptr_t>(address) | 256;
  return static_cast<std::uint32_t>(bits & (~bits + 1));
}

double flops_of(const Product& p) {
  return 2.0 * static_cast<double>(p.rows) * static_cast<double>(p.columns) * static_cast<double>(p.depth);
}

// ---- Descriptions that free themselves ----

// Made and destroyed by the library's calls of its kind.
template <class T, auto kCreate, auto kDestroy>
struct Described {
  template <class... Arguments>
  explicit Described(Arguments... arguments) {
    check_blas((library().*kCreate)(&made, arguments...), "describing a product");
  }
  ~Described() { (library().*kDestroy)(made); }
  Described(const Described&) = delete;
  T made = nullptr;
};
using Layout = Described<cublasLtMatrixLayout_t, &Library::MatrixLayoutCreate, &Library::MatrixLayoutDestroy>;
using Operation = Described<cublasLtMatmulDesc_t, &Library::MatmulDescCreate, &Library::MatmulDescDestroy>;
// What an algorithm should be like.
using Preference = Described<cublasLtMatmulPreference_t, &Library::MatmulPreferenceCreate,
                             &Library::MatmulPreferenceDestroy>;

template <class Value>
void set(const Operation& operation, cublasLtMatmulDescAttributes_t what, Value value) {
  check_blas(library().MatmulDescSetAttribute(operation.made, what, &value, sizeof value),
             "describing a product");
}
template <class Value>
void set(const Preference& preference, cublasLtMatmulPreferenceAttributes_t what, Value value) {
  check_blas(library().MatmulPreferenceSetAttribute(preference.made, what, &value, sizeof value),
             "describing a product");
}

Layout layout(cudaDataType_t type, std::int64_t rows, std::int64_t columns, std::int64_t stride) {
  return Layout(type, static_cast<std::uint64_t>(rows), static_cast<std::uint64_t>(columns), stride);
}
// Of an operand of `rows` x `columns` as cuBLAS sees it, which thinks in columns: what lies in rows is transposed to it.
Layout layout_of(const Operand& operand, cudaDataType_t type, std::int64_t rows, std::int64_t columns) {
  return operand.transposed ? layout(type, rows, columns, operand.stride)
                            : layout(type, columns, rows, operand.stride);
}

}  // namespace

// What cuBLASLt was told about products of one shape, and what it chose.
struct Products::Plans {
  struct Plan {
    Plan(const Product& p, Precision precision, cublasLtHandle_t handle);
    Operation operation;
    Layout a, b, d;
    std::vector<cublasLtMatmulAlgo_t> candidates;  // as cuBLASLt proposes them
    cublasLtMatmulAlgo_t algorithm;
  };
  using Key = std::array<std::int64_t, 13>;
  using Digest = std::array<unsigned long long, 2>;

  Plans(Precision type, bool tunes_them, const Stream& on, Memory& on_device, Ledger& ledger)
      : precision(type),
        tunes(tunes_them),
        stream(on),
        memory(on_device),
        workspace(ledger, "workspace", kWorkspace, memory),
        digest(ledger, "workspace", sizeof(Digest), memory) {
    if (!ledger.only_counts()) check_blas(library().Create(&handle), "starting cuBLASLt");
  }
  ~Plans() {
    plans.clear();
    if (handle != nullptr) library().Destroy(handle);
  }
  Plan& find(const Product& p);
  cublasStatus_t run(Plan& plan, const Product& p, const cublasLtMatmulAlgo_t& algorithm);
  bool is_worth_tuning(const Product& p) const;
  void tune(Plan& plan, const Product& p);
  Digest digest_of(const Product& p);

  const Precision precision;
  const bool tunes;
  const Stream& stream;
  Memory& memory;
  const Block workspace, digest;
  cublasLtHandle_t handle = nullptr;
  std::map<Key, Plan> plans;
};

// d^T = b^T a^T is what cuBLAS computes: to it, a matrix of rows is one of columns, transposed.
Products::Plans::Plan::Plan(const Product& p, Precision precision, cublasLtHandle_t handle)
    : operation(CUBLAS_COMPUTE_32F, CUDA_R_32F),
      a(layout_of(p.b, type_of(precision), p.depth, p.columns)),
      b(layout_of(p.a, type_of(precision), p.rows, p.depth)),
      d(layout(p.wide ? CUDA_R_32F : type_of(precision), p.columns, p.rows, p.stride)) {
  set(operation, CUBLASLT_MATMUL_DESC_TRANSA, p.b.transposed ? CUBLAS_OP_T : CUBLAS_OP_N);
  set(operation, CUBLASLT_MATMUL_DESC_TRANSB, p.a.transposed ? CUBLAS_OP_T : CUBLAS_OP_N);
  const bool bias = p.bias != nullptr;
  switch (p.epilogue) {
    case Epilogue::none: break;
    case Epilogue::bias: set(operation, CUBLASLT_MATMUL_DESC_EPILOGUE, CUBLASLT_EPILOGUE_BIAS); break;
    case Epilogue::gelu:
      set(operation, CUBLASLT_MATMUL_DESC_EPILOGUE,
          bias ? CUBLASLT_EPILOGUE_GELU_AUX_BIAS : CUBLASLT_EPILOGUE_GELU_AUX);
      break;
    case Epilogue::gelu_backward:
      set(operation, CUBLASLT_MATMUL_DESC_EPILOGUE, CUBLASLT_EPILOGUE_DGELU);
      break;
  }
  if (bias) set(operation, CUBLASLT_MATMUL_DESC_BIAS_POINTER, p.bias);
  if (p.kept != nullptr) {
    set(operation, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, p.stride);
    set(operation, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, p.kept);
  }
  Preference preference;
  set(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, static_cast<std::uint64_t>(kWorkspace));
  // Parts of a sum are added up in fp32, too.
  set(preference, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK,
      std::uint32_t{CUBLASLT_REDUCTION_SCHEME_NONE | CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE});
  set(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, alignment_of(p.b.data));
  set(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, alignment_of(p.a.data));
  set(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, alignment_of(p.c == nullptr ? p.d : p.c));
  set(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, alignment_of(p.d));
  std::array<cublasLtMatmulHeuristicResult_t, kCandidates> found = {};
  int count = 0;
  const cublasStatus_t status =
      library().MatmulAlgoGetHeuristic(handle, operation.made, a.made, b.made, d.made, d.made,
                                       preference.made, kCandidates, found.data(), &count);
  if (status != CUBLAS_STATUS_SUCCESS || count == 0)
    throw std::runtime_error("cuBLASLt has no product of [" + std::to_string(p.rows) + ", " +
                             std::to_string(p.depth) + "] and [" + std::to_string(p.depth) + ", " +
                             std::to_string(p.columns) + "]: it says " + library().GetStatusString(status) +
                             "; sizes that are multiples of 8 always work");
  for (int i = 0; i < count; ++i)
    if (found[static_cast<std::size_t>(i)].state == CUBLAS_STATUS_SUCCESS)
      candidates.push_back(found[static_cast<std::size_t>(i)].algo);
  algorithm = candidates.at(0);
}

bool Products::Plans::is_worth_tuning(const Product& p) const {
  if (!tunes || flops_of(p) < kLeastFlops || p.rows * p.columns < kLeastValues) return false;
  if (p.c == p.d) return false;  // computed again it is another
  cudaStreamCaptureStatus capturing = cudaStreamCaptureStatusNone;
  check(cudaStreamIsCapturing(stream, &capturing), "asking a stream");
  return capturing == cudaStreamCaptureStatusNone;
}

Products::Plans::Digest Products::Plans::digest_of(const Product& p) {
  const std::int64_t words = p.wide || precision == Precision::fp32 ? 2 : 1;
  check(cudaMemsetAsync(digest.as<void>(), 0, sizeof(Digest), stream), "a digest");
  add_digest(p.d, p.rows, words * p.columns, words * p.stride, digest.as<unsigned long long>(), stream);
  Digest found = {};
  memory.read(found.data(), digest.as<void>(), sizeof found);
  return found;
}

// Chooses the fastest algorithm among those with the first one's bits. They are timed in turns, not one after
// another, because a GPU slows down as it gets warm.
void Products::Plans::tune(Plan& plan, const Product& p) {
  check_blas(run(plan, p, plan.candidates[0]), "a matrix product");
  const Digest first = digest_of(p);
  if (2 * first[1] < static_cast<unsigned long long>(p.rows * p.columns)) return;  // zeros tell no order
  std::vector<float> least;
  for (const cublasLtMatmulAlgo_t& candidate : plan.candidates) {
    const bool same = run(plan, p, candidate) == CUBLAS_STATUS_SUCCESS && digest_of(p) == first;
    least.push_back(same ? std::numeric_limits<float>::max() : 0);
  }
  cudaEvent_t begin = nullptr, end = nullptr;
  check(cudaEventCreate(&begin), "making an event");
  const Event own_begin(begin);
  check(cudaEventCreate(&end), "making an event");
  const Event own_end(end);
  for (int round = 0; round < kRounds; ++round)
    for (std::size_t i = 0; i < least.size(); ++i) {
      if (least[i] == 0) continue;  // other bits
      check(cudaEventRecord(begin, stream), "timing a product");
      check_blas(run(plan, p, plan.candidates[i]), "a matrix product");
      check(cudaEventRecord(end, stream), "timing a product");
      stream.wait();
      float ms = 0;
      check(cudaEventElapsedTime(&ms, begin, end), "timing a product");
      least[i] = std::min(least[i], ms);
    }
  std::size_t best = 0;
  for (std::size_t i = 1; i < least.size(); ++i)
    if (least[i] != 0 && least[i] < least[best] && least[i] < kLeastGain * least[0]) best = i;
  plan.algorithm = plan.candidates[best];
}

Products::Plans::Plan& Products::Plans::find(const Product& p) {
  const auto alignments = std::int64_t{alignment_of(p.a.data)} << 48 |
                          std::int64_t{alignment_of(p.b.data)} << 32 | std::int64_t{alignment_of(p.d)} << 16 |
                          std::int64_t{alignment_of(p.c == nullptr ? p.d : p.c)};
  const Key key = {p.rows,
                   p.columns,
                   p.depth,
                   p.a.stride,
                   p.a.transposed,
                   p.b.stride,
                   p.b.transposed,
                   p.stride,
                   p.wide,
                   static_cast<int>(p.epilogue),
                   p.bias != nullptr,
                   p.c != nullptr,
                   alignments};
  const auto found = plans.find(key);
  if (found != plans.end()) return found->second;
  Plan& made = plans.try_emplace(key, p, precision, handle).first->second;
  if (is_worth_tuning(p)) tune(made, p);
  return made;
}

cublasStatus_t Products::Plans::run(Plan& plan, const Product& p, const cublasLtMatmulAlgo_t& algorithm) {
  if (p.bias != nullptr) set(plan.operation, CUBLASLT_MATMUL_DESC_BIAS_POINTER, p.bias);
  if (p.kept != nullptr) set(plan.operation, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, p.kept);
  const float one = 1, add = p.c == nullptr ? 0.0f : 1.0f;
  return library().Matmul(handle, plan.operation.made, &one, p.b.data, plan.a.made, p.a.data, plan.b.made,
                          &add, p.c == nullptr ? p.d : p.c, plan.d.made, p.d, plan.d.made, &algorithm,
                          workspace.as<void>(), static_cast<std::size_t>(kWorkspace), stream);
}

std::string products_version() {
  const std::size_t version = library().GetVersion();
  return std::to_string(version / 10000) + "." + std::to_string(version / 100 % 100) + "." +
         std::to_string(version % 100);
}

Products::Products(Precision precision, bool tunes, const Stream& stream, Memory& memory, Ledger& ledger)
    : plans_(std::make_unique<Plans>(precision, tunes, stream, memory, ledger)) {}
Products::~Products() = default;

void Products::run(const Product& p) {
  Plans::Plan& plan = plans_->find(p);
  check_blas(plans_->run(plan, p, plan.algorithm), "a matrix product");
}

}  // namespace scruple::train::cuda
