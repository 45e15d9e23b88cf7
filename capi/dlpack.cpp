// Gradients that stand in another framework's tensors, seen through DLPack's exchange table.
#include <cstring>

#include "engine/registry.h"

namespace {

// What is read here of DLPack 1.
struct View {  // DLTensor
  char* data;
  int32_t device_type, device;
  int32_t dimensions;
  uint8_t code, bits;
  uint16_t lanes;
  const int64_t* shape;
  const int64_t* strides;
  uint64_t byte_offset;
};

struct Exchange {  // DLPackExchangeAPI
  uint32_t major, minor;
  const void* older;
  const void* managed[3];
  int (*view)(void* object, View* out);  // dltensor_from_py_object_no_sync; not every framework has it
};

const char* format_of(const View& view) {
  enum { kFloat = 2, kBfloat = 4 };
  if (view.lanes != 1) return "";
  if (view.code == kFloat) return view.bits == 32 ? "fp32" : view.bits == 16 ? "fp16" : "";
  return view.code == kBfloat && view.bits == 16 ? "bf16" : "";
}

// Whether the elements are `size` and lie one behind the other.
bool is_one_run(const View& view, int64_t size) {
  int64_t elements = 1;
  bool dense = true;
  for (int32_t d = view.dimensions - 1; d >= 0; --d) {
    dense = dense && (view.shape[d] == 1 || view.strides[d] == elements);
    elements *= view.shape[d];
  }
  return elements == size && (dense || size == 0);
}

}  // namespace

int64_t scruple_borrow_gradients(scruple_tensor* tensors, int64_t count, void* objects,
                                 scruple_item_function item, const void* exchange) {
  const auto* table = static_cast<const Exchange*>(exchange);
  if (tensors == nullptr || objects == nullptr || item == nullptr || table == nullptr || table->major != 1 ||
      table->view == nullptr)
    return 0;
  for (int64_t i = 0; i < count; ++i) {
    scruple_array& gradient = tensors[i].arrays[SCRUPLE_GRADIENT];
    View view;
    if (gradient.format == nullptr || table->view(item(objects, i), &view) != 0 ||
        std::strcmp(format_of(view), gradient.format->name) != 0 || !is_one_run(view, tensors[i].size))
      return i;
    gradient.codes = view.data + view.byte_offset;
  }
  return count;
}
