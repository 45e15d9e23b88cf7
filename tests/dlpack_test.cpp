// scruple_borrow_gradients over tensors of a framework that is played here: which it takes, where it ends.
#include "tests/support.h"

namespace scruple_tests {
namespace {

// DLPack's DLTensor and DLPackExchangeAPI.
struct View {
  void* data;
  int32_t device_type, device, dimensions;
  uint8_t code, bits;
  uint16_t lanes;
  const int64_t* shape;
  const int64_t* strides;
  uint64_t byte_offset;
};

struct Exchange {
  uint32_t major = 1, minor = 3;
  const void* others[4] = {};
  int (*view)(void*, View*) = [](void* object, View* out) {
    if (object == nullptr) return -1;
    *out = *static_cast<View*>(object);
    return 0;
  };
  const void* stream = nullptr;
};

struct Object {
  std::vector<int64_t> shape, strides;
  uint8_t code, bits;
  uint64_t byte_offset = 0;
  uint16_t lanes = 1;
  void* data = this;

  View view() const {
    return {data,           1,          0,     static_cast<int32_t>(shape.size()),
            code,           bits,       lanes, shape.data(),
            strides.data(), byte_offset};
  }
};

constexpr uint8_t kInteger = 0, kFloat = 2, kBfloat = 4;

void* item_of(void* objects, ptrdiff_t index) { return static_cast<void**>(objects)[index]; }

// Whether a gradient of `size` elements in this format is pointed at the object.
bool takes(const char* format, int64_t size, const Object& object, const Exchange& exchange = {}) {
  int old = 0;
  scruple_tensor row{};
  row.size = size;
  row.arrays[SCRUPLE_GRADIENT].format = format == nullptr ? nullptr : scruple_format_find(format);
  row.arrays[SCRUPLE_GRADIENT].codes = &old;
  View view = object.view();
  void* objects[] = {&view};
  const int64_t taken = scruple_borrow_gradients(&row, 1, objects, item_of, &exchange);
  const char* wanted = static_cast<char*>(object.data) + object.byte_offset;
  EXPECT_EQ(row.arrays[SCRUPLE_GRADIENT].codes, taken == 1 ? static_cast<const void*>(wanted) : &old);
  return taken == 1;
}

TEST(Dlpack, TakesOneRunInTheFormatOfTheRow) {
  EXPECT_TRUE(takes("fp32", 6, {{2, 3}, {3, 1}, kFloat, 32}));
  EXPECT_TRUE(takes("fp16", 6, {{2, 3}, {3, 1}, kFloat, 16}));
  EXPECT_TRUE(takes("bf16", 6, {{2, 3}, {3, 1}, kBfloat, 16}));
  EXPECT_TRUE(takes("bf16", 6, {{6}, {1}, kBfloat, 16, 64}));
  EXPECT_TRUE(takes("bf16", 1, {{}, {}, kBfloat, 16}));
  EXPECT_TRUE(takes("bf16", 6, {{2, 1, 3}, {3, 77, 1}, kBfloat, 16}))
      << "the stride of a single row says nothing";
  EXPECT_TRUE(takes("bf16", 0, {{4, 0}, {1, 4}, kBfloat, 16})) << "nor do those of no elements";
}

TEST(Dlpack, LeavesOtherFormats) {
  EXPECT_FALSE(takes("bf16", 6, {{6}, {1}, kFloat, 16}));
  EXPECT_FALSE(takes("fp16", 6, {{6}, {1}, kBfloat, 16}));
  EXPECT_FALSE(takes("fp32", 6, {{6}, {1}, kFloat, 16}));
  EXPECT_FALSE(takes("fp16", 6, {{6}, {1}, kFloat, 32}));
  EXPECT_FALSE(takes("fp32", 6, {{6}, {1}, kFloat, 64}));
  EXPECT_FALSE(takes("fp32", 6, {{6}, {1}, kInteger, 32}));
  EXPECT_FALSE(takes("fp32", 6, {{6}, {1}, kFloat, 32, 0, 2})) << "vectors of two";
  EXPECT_FALSE(takes("int8", 6, {{6}, {1}, kInteger, 8}));
  EXPECT_FALSE(takes(nullptr, 6, {{6}, {1}, kFloat, 32})) << "a row that has no gradient yet";
}

TEST(Dlpack, LeavesWhatIsNotOneRunOfTheRowsSize) {
  EXPECT_FALSE(takes("fp32", 6, {{2, 3}, {1, 2}, kFloat, 32})) << "transposed";
  EXPECT_FALSE(takes("fp32", 6, {{2, 3}, {0, 1}, kFloat, 32})) << "expanded";
  EXPECT_FALSE(takes("fp32", 6, {{2, 3}, {6, 2}, kFloat, 32})) << "every second column";
  EXPECT_FALSE(takes("fp32", 6, {{2, 2}, {2, 1}, kFloat, 32}));
  EXPECT_FALSE(takes("fp32", 6, {{7}, {1}, kFloat, 32}));
  EXPECT_FALSE(takes("fp32", 6, {{0}, {1}, kFloat, 32}));
}

TEST(Dlpack, LeavesATableThatItCannotRead) {
  const Object object{{6}, {1}, kFloat, 32};
  EXPECT_TRUE(takes("fp32", 6, object));
  Exchange other;
  other.major = 2;
  EXPECT_FALSE(takes("fp32", 6, object, other));
  other = {};
  other.view = nullptr;
  EXPECT_FALSE(takes("fp32", 6, object, other));
  EXPECT_EQ(scruple_borrow_gradients(nullptr, 1, nullptr, nullptr, nullptr), 0);
}

TEST(Dlpack, EndsAtTheFirstThatItLeaves) {
  const Object object{{6}, {1}, kFloat, 32};
  scruple_tensor rows[4]{};
  View view = object.view();
  void* objects[] = {&view, &view, nullptr, &view};  // the framework fails to show the third
  for (scruple_tensor& row : rows) {
    row.size = 6;
    row.arrays[SCRUPLE_GRADIENT].format = scruple_format_find("fp32");
  }
  const Exchange exchange;
  EXPECT_EQ(scruple_borrow_gradients(rows, 4, objects, item_of, &exchange), 2);
  EXPECT_EQ(rows[1].arrays[SCRUPLE_GRADIENT].codes, object.data);
  EXPECT_EQ(rows[2].arrays[SCRUPLE_GRADIENT].codes, nullptr);
  EXPECT_EQ(rows[3].arrays[SCRUPLE_GRADIENT].codes, nullptr);
}

}  // namespace
}  // namespace scruple_tests
