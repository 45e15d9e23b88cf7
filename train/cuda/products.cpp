#include "train/cuda/products.h"

#include <cublasLt.h>
#include <dlfcn.h>

#include <algorithm>
#include <array>
#include <stdexcept>
#include <string>

namespace scruple::train::cuda {
namespace {

constexpr std::int64_t kWorkspace = 32 << 20;  // what cuBLAS itself takes on Hopper

// ---- cuBLASLt, opened at run time ----

#define SCRUPLE_CUBLASLT(call)                                                                           \
  call(Create) call(Destroy) call(MatmulDescCreate) call(MatmulDescDestroy) call(MatmulDescSetAttribute) \
      call(MatrixLayoutCreate) call(MatrixLayoutDestroy) call(MatmulPreferenceCreate)                    \
          call(MatmulPreferenceDestroy) call(MatmulPreferenceSetAttribute) call(MatmulAlgoGetHeuristic)  \
              call(Matmul) call(GetStatusString)

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

// ---- Descriptions that free themselves ----

struct Layout {
  Layout(cudaDataType_t type, std::int64_t rows, std::int64_t columns, std::int64_t stride) {
    check_blas(library().MatrixLayoutCreate(&made, type, static_cast<std::uint64_t>(rows),
                                            static_cast<std::uint64_t>(columns), stride),
               "describing a matrix");
  }
  ~Layout() { library().MatrixLayoutDestroy(made); }
  Layout(const Layout&) = delete;
  cublasLtMatrixLayout_t made = nullptr;
};

struct Operation {
  Operation() {
    check_blas(library().MatmulDescCreate(&made, CUBLAS_COMPUTE_32F, CUDA_R_32F), "describing a product");
  }
  ~Operation() { library().MatmulDescDestroy(made); }
  Operation(const Operation&) = delete;
  template <class T>
  void set(cublasLtMatmulDescAttributes_t what, T value) {
    check_blas(library().MatmulDescSetAttribute(made, what, &value, sizeof value), "describing a product");
  }
  cublasLtMatmulDesc_t made = nullptr;
};

// What an algorithm should be like.
struct Wishes {
  Wishes() { check_blas(library().MatmulPreferenceCreate(&made), "describing a product"); }
  ~Wishes() { library().MatmulPreferenceDestroy(made); }
  Wishes(const Wishes&) = delete;
  template <class T>
  void set(cublasLtMatmulPreferenceAttributes_t what, T value) {
    check_blas(library().MatmulPreferenceSetAttribute(made, what, &value, sizeof value),
               "describing a product");
  }
  cublasLtMatmulPreference_t made = nullptr;
};

// Of an operand of `rows` x `columns` as cuBLAS sees it, which thinks in columns: what lies in rows is transposed to it.
Layout layout_of(const Operand& operand, cudaDataType_t type, std::int64_t rows, std::int64_t columns) {
  return operand.transposed ? Layout(type, rows, columns, operand.stride)
                            : Layout(type, columns, rows, operand.stride);
}

}  // namespace

// What cuBLASLt was told about products of one shape, and what it chose.
struct Products::Plans {
  struct Plan {
    Plan(const Product& p, Precision precision, cublasLtHandle_t handle);
    Operation operation;
    Layout a, b, d;
    cublasLtMatmulAlgo_t algorithm;
  };
  using Key = std::array<std::int64_t, 13>;

  Plans(Precision type, const Stream& on, Memory& memory, Ledger& ledger)
      : precision(type), stream(on), workspace(ledger, "workspace", kWorkspace, memory) {
    if (!ledger.only_counts()) check_blas(library().Create(&handle), "starting cuBLASLt");
  }
  ~Plans() {
    plans.clear();
    if (handle != nullptr) library().Destroy(handle);
  }
  Plan& find(const Product& p);

  const Precision precision;
  const Stream& stream;
  const Block workspace;
  cublasLtHandle_t handle = nullptr;
  std::map<Key, Plan> plans;
};

// d^T = b^T a^T is what cuBLAS computes: to it, a matrix of rows is one of columns, transposed.
Products::Plans::Plan::Plan(const Product& p, Precision precision, cublasLtHandle_t handle)
    : a(layout_of(p.b, type_of(precision), p.depth, p.columns)),
      b(layout_of(p.a, type_of(precision), p.rows, p.depth)),
      d(p.wide ? CUDA_R_32F : type_of(precision), p.columns, p.rows, p.stride) {
  operation.set(CUBLASLT_MATMUL_DESC_TRANSA, p.b.transposed ? CUBLAS_OP_T : CUBLAS_OP_N);
  operation.set(CUBLASLT_MATMUL_DESC_TRANSB, p.a.transposed ? CUBLAS_OP_T : CUBLAS_OP_N);
  const bool bias = p.bias != nullptr;
  switch (p.finish) {
    case Finish::none: break;
    case Finish::bias: operation.set(CUBLASLT_MATMUL_DESC_EPILOGUE, CUBLASLT_EPILOGUE_BIAS); break;
    case Finish::gelu:
      operation.set(CUBLASLT_MATMUL_DESC_EPILOGUE,
                    bias ? CUBLASLT_EPILOGUE_GELU_AUX_BIAS : CUBLASLT_EPILOGUE_GELU_AUX);
      break;
    case Finish::gelu_backward: operation.set(CUBLASLT_MATMUL_DESC_EPILOGUE, CUBLASLT_EPILOGUE_DGELU); break;
  }
  if (bias) operation.set(CUBLASLT_MATMUL_DESC_BIAS_POINTER, p.bias);
  if (p.kept != nullptr) {
    operation.set(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, p.stride);
    operation.set(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, p.kept);
  }
  Wishes wishes;
  wishes.set(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, static_cast<std::uint64_t>(kWorkspace));
  // Parts of a sum are added up in fp32, too.
  wishes.set(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK,
             std::uint32_t{CUBLASLT_REDUCTION_SCHEME_NONE | CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE});
  wishes.set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, alignment_of(p.b.data));
  wishes.set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, alignment_of(p.a.data));
  wishes.set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, alignment_of(p.c == nullptr ? p.d : p.c));
  wishes.set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, alignment_of(p.d));
  cublasLtMatmulHeuristicResult_t found = {};
  int count = 0;
  const cublasStatus_t status = library().MatmulAlgoGetHeuristic(
      handle, operation.made, a.made, b.made, d.made, d.made, wishes.made, 1, &found, &count);
  if (status != CUBLAS_STATUS_SUCCESS || count == 0)
    throw std::runtime_error("cuBLASLt has no product of [" + std::to_string(p.rows) + ", " +
                             std::to_string(p.depth) + "] and [" + std::to_string(p.depth) + ", " +
                             std::to_string(p.columns) + "]: it says " + library().GetStatusString(status) +
                             "; sizes that are multiples of 8 always work");
  algorithm = found.algo;
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
                   static_cast<int>(p.finish),
                   p.bias != nullptr,
                   p.c != nullptr,
                   alignments};
  const auto found = plans.find(key);
  if (found != plans.end()) return found->second;
  return plans.try_emplace(key, p, precision, handle).first->second;
}

Products::Products(Precision precision, const Stream& stream, Memory& memory, Ledger& ledger)
    : plans_(std::make_unique<Plans>(precision, stream, memory, ledger)) {}
Products::~Products() = default;

void Products::run(const Product& p) {
  Plans::Plan& plan = plans_->find(p);
  if (p.bias != nullptr) plan.operation.set(CUBLASLT_MATMUL_DESC_BIAS_POINTER, p.bias);
  if (p.kept != nullptr) plan.operation.set(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, p.kept);
  const float one = 1, add = p.c == nullptr ? 0.0f : 1.0f;
  check_blas(library().Matmul(plans_->handle, plan.operation.made, &one, p.b.data, plan.a.made, p.a.data,
                              plan.b.made, &add, p.c == nullptr ? p.d : p.c, plan.d.made, p.d, plan.d.made,
                              &plan.algorithm, plans_->workspace.as<void>(),
                              static_cast<std::size_t>(kWorkspace), plans_->stream),
             "a matrix product");
}

}  // namespace scruple::train::cuda
