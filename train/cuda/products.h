// Matrix products by cuBLASLt, which is opened when the first is asked for: the library loads where there is none.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "train/cuda/device.h"
#include "train/pass/backend.h"

namespace scruple::train::cuda {

// A matrix whose rows are `stride` values apart. `transposed`: it lies as [columns, rows].
struct Operand {
  const void* data;
  std::int64_t stride;
  bool transposed = false;
};

// What is done to a product before it is written: bias is added along its columns; GELU keeps what it was applied to
// in `kept`; its backward multiplies by the derivative there.
enum class Epilogue { none, bias, gelu, gelu_backward };

struct Product {
  std::int64_t rows, columns, depth;
  Operand a, b;             // [rows, depth], [depth, columns]
  void* d;                  // [rows, columns]
  std::int64_t stride;      // of d
  const void* c = nullptr;  // is added; may be d; its rows lie as those of d
  bool wide = false;        // c and d are fp32, whatever a and b are
  Epilogue epilogue = Epilogue::none;
  const void* bias = nullptr;  // of the type of d; may be absent where `epilogue` is gelu
  void* kept = nullptr;        // rows as those of d
};

std::string products_version();  // of cuBLASLt: another may sum in another order

// Sums are fp32. The bits are those of the first algorithm that cuBLASLt proposes for a shape, so that runs repeat to the
// bit. `tunes`: a large product is computed by the fastest of a few that give the same bits; they are tried when its shape
// is first asked for, and then its operands must not change beside it.
class Products {
 public:
  Products(Precision precision, bool tunes, const Stream& stream, Memory& memory, Ledger& ledger);
  ~Products();
  void run(const Product& product);

 private:
  struct Plans;
  std::unique_ptr<Plans> plans_;
};

}  // namespace scruple::train::cuda
