// Attention on the GPU against a reference in double precision. How far a result may be off is summed along
// with it: every rounding to 16 bits, and fp32 arithmetic, in proportion to what they round.
#include <algorithm>
#include <cmath>
#include <random>
#include <sstream>
#include <string>
#include <vector>

#include "tests/cuda/arrays.h"
#include "train/cuda/attention.h"

namespace scruple::train::cuda {
namespace {

constexpr int kWidths[] = {16, 40, 64, 80, 96, 128, 192};
constexpr int kLengths[] = {1, 7, 63, 64, 65, 127, 128, 129, 200, 257};

int size_of(Precision precision) { return precision == Precision::fp32 ? 4 : 2; }
// Half a unit in the last place of 1.
double rounding_of(Precision precision) {
  return precision == Precision::fp32 ? 0x1p-24 : precision == Precision::bf16 ? 0x1p-8 : 0x1p-11;
}
// Half of the smallest number.
double underflow_of(Precision precision) { return precision == Precision::fp16 ? 0x1p-25 : 0; }

enum class Documents { none, several, single };  // single: of one token each

struct Case {
  Precision precision;
  int sequences, length, heads, kv_heads, width;
  Documents documents = Documents::none;
  double size = 1;  // of inputs
  std::size_t rows() const { return static_cast<std::size_t>(sequences) * length; }
  std::size_t stride() const { return static_cast<std::size_t>(heads + 2 * kv_heads) * width; }
  std::size_t output_stride() const { return static_cast<std::size_t>(heads) * width; }
};

std::ostream& operator<<(std::ostream& out, const Case& c) {
  return out << "precision " << static_cast<int>(c.precision) << ", " << c.sequences << " x " << c.length
             << ", heads " << c.heads << "/" << c.kv_heads << " x " << c.width << ", documents "
             << static_cast<int>(c.documents);
}

// Lengths that put boundaries on and beside the edges of tiles; other ones in each sequence.
std::vector<std::int32_t> positions_of(const Case& c) {
  static constexpr int kDocuments[] = {1, 31, 32, 1, 1, 62, 70, 2, 57, 128, 5};
  std::vector<std::int32_t> positions;
  for (int sequence = 0; sequence < c.sequences; ++sequence) {
    std::size_t document = static_cast<std::size_t>(sequence) * 3;
    int position = 0;
    for (int i = 0; i < c.length; ++i) {
      positions.push_back(position++);
      const int length = kDocuments[document % std::size(kDocuments)];
      if (c.documents == Documents::single || (c.documents == Documents::several && position == length))
        position = 0, ++document;
    }
  }
  return positions;
}

struct Inputs {
  Bytes qkv, dy;
  std::vector<std::int32_t> positions;
  explicit Inputs(const Case& c)
      : qkv(c.rows() * c.stride() * size_of(c.precision)), positions(positions_of(c)) {
    dy.resize(c.rows() * c.output_stride() * size_of(c.precision));
    std::minstd_rand random(static_cast<unsigned>(c.length * 131 + c.width));
    std::uniform_real_distribution<double> number(-1.7, 1.7);
    for (std::size_t i = 0; i < c.rows() * c.stride(); ++i) set(qkv, c.precision, i, c.size * number(random));
    for (std::size_t i = 0; i < c.rows() * c.output_stride(); ++i) set(dy, c.precision, i, number(random));
  }
};

struct Outputs {
  Bytes y, log_sums, dqkv;
};

Outputs compute(const Case& c, const Inputs& inputs, int fill) {
  Attention shape{c.precision, c.sequences, c.length, c.heads, c.kv_heads, c.width, nullptr};
  EXPECT_EQ(problem_with(shape), nullptr);
  Bytes positions(inputs.positions.size() * sizeof(std::int32_t));
  std::memcpy(positions.data(), inputs.positions.data(), positions.size());
  const Array qkv(inputs.qkv), dy(inputs.dy), places(positions);
  if (c.documents != Documents::none) shape.positions = static_cast<const std::int32_t*>(places.data());
  const Array y(inputs.dy.size(), fill), dqkv(inputs.qkv.size(), fill);
  const Array log_sums(c.rows() * c.heads * sizeof(float), fill);
  const Array workspace(static_cast<std::size_t>(attend_backward_bytes(shape)), fill);
  attend(shape, qkv.data(), y.data(), static_cast<float*>(log_sums.data()), nullptr);
  attend_backward(shape, qkv.data(), y.data(), static_cast<const float*>(log_sums.data()), dy.data(),
                  dqkv.data(), workspace.data(), nullptr);
  must(cudaDeviceSynchronize());
  workspace.bytes();
  return {y.bytes(), log_sums.bytes(), dqkv.bytes()};
}

// A result and how far one may be off it.
struct Expected {
  Doubles value, bound;
  explicit Expected(std::size_t count) : value(count), bound(count) {}
  void add(std::size_t i, double x, double off) { value[i] += x, bound[i] += off; }
};

// Rows of one head, from numbers with `stride` values to a row.
Doubles head_of(const Bytes& from, const Case& c, int sequence, std::size_t stride, int slot) {
  Doubles rows;
  for (int i = 0; i < c.length; ++i)
    for (int d = 0; d < c.width; ++d)
      rows.push_back(get(from, c.precision,
                         (static_cast<std::size_t>(sequence) * c.length + i) * stride + slot * c.width + d));
  return rows;
}
double dot(const double* a, const double* b, int n) {
  double sum = 0;
  for (int i = 0; i < n; ++i) sum += a[i] * b[i];
  return sum;
}
double magnitude(const double* a, const double* b, int n) {
  double sum = 0;
  for (int i = 0; i < n; ++i) sum += std::abs(a[i] * b[i]);
  return sum;
}

struct Reference {
  Expected y, log_sums, dqkv;

  Reference(const Case& c, const Inputs& inputs)
      : y(c.rows() * c.output_stride()), log_sums(c.rows() * c.heads), dqkv(c.rows() * c.stride()) {
    for (int sequence = 0; sequence < c.sequences; ++sequence)
      for (int head = 0; head < c.heads; ++head) attend_head(c, inputs, sequence, head);
    const double rounding = rounding_of(c.precision), underflow = underflow_of(c.precision);
    for (Expected* e : {&y, &dqkv})  // the result is rounded too
      for (std::size_t i = 0; i < e->value.size(); ++i)
        e->bound[i] = 1.25 * (e->bound[i] + rounding * std::abs(e->value[i]) + underflow) + 1e-30;
  }

 private:
  // fp32 arithmetic: a few units for sums, and for the exponential of a score
  static constexpr double kFine = 3e-6;

  void attend_head(const Case& c, const Inputs& inputs, int sequence, int head) {
    const int width = c.width, kv_head = head / (c.heads / c.kv_heads);
    const int key_slot = c.heads + kv_head, value_slot = key_slot + c.kv_heads;
    const Doubles queries = head_of(inputs.qkv, c, sequence, c.stride(), head);
    const Doubles keys = head_of(inputs.qkv, c, sequence, c.stride(), key_slot);
    const Doubles values = head_of(inputs.qkv, c, sequence, c.stride(), value_slot);
    const Doubles gradients = head_of(inputs.dy, c, sequence, c.output_stride(), head);
    const double scale = 1 / std::sqrt(width);
    const double rounding = (c.precision == Precision::fp32 ? 0 : rounding_of(c.precision)) + kFine;
    const double underflow = underflow_of(c.precision);
    for (int i = 0; i < c.length; ++i) {
      const std::size_t row = static_cast<std::size_t>(sequence) * c.length + i;
      const int start = c.documents == Documents::none ? 0 : i - inputs.positions[row];
      const double *query = &queries[i * width], *dy = &gradients[i * width];
      Doubles weights(i + 1);
      double maximum = -INFINITY, sum = 0;
      for (int j = start; j <= i; ++j)
        maximum = std::max(maximum, weights[j] = scale * dot(query, &keys[j * width], width));
      for (int j = start; j <= i; ++j) sum += weights[j] = std::exp(weights[j] - maximum);
      const std::size_t at = (static_cast<std::size_t>(sequence) * c.heads + head) * c.length + i;
      log_sums.add(at, maximum + std::log(sum), kFine * (4 + std::abs(maximum)));
      const std::size_t output = row * c.output_stride() + head * width;
      for (int j = start; j <= i; ++j) {
        weights[j] /= sum;
        for (int d = 0; d < width; ++d) {
          const double v = values[j * width + d];
          y.add(output + d, weights[j] * v, (weights[j] * rounding + underflow) * std::abs(v));
        }
      }
      const double delta = dot(dy, &y.value[output], width);
      const double delta_off = (rounding_of(c.precision) + kFine) * magnitude(dy, &y.value[output], width);
      const std::size_t of_row = row * c.stride();
      for (int j = start; j <= i; ++j) {
        const std::size_t of_key = (static_cast<std::size_t>(sequence) * c.length + j) * c.stride();
        const double *key = &keys[j * width], *value = &values[j * width];
        const double gradient = weights[j] * (dot(dy, value, width) - delta);
        const double off =
            rounding * std::abs(gradient) + underflow +
            weights[j] * (delta_off * 1.25 + kFine * magnitude(dy, value, width) + underflow * width);
        for (int d = 0; d < width; ++d) {
          const std::size_t k = of_key + key_slot * width + d, v = of_key + value_slot * width + d;
          dqkv.add(of_row + head * width + d, scale * gradient * key[d], scale * off * std::abs(key[d]));
          dqkv.add(k, scale * gradient * query[d], scale * off * std::abs(query[d]));
          dqkv.add(v, weights[j] * dy[d], (weights[j] * rounding + underflow) * std::abs(dy[d]));
        }
      }
    }
  }
};

// The index of the first number that is off, or -1.
std::ptrdiff_t first_off(const Bytes& found, Precision precision, const Expected& expected) {
  for (std::size_t i = 0; i < expected.value.size(); ++i)
    if (!(std::abs(get(found, precision, i) - expected.value[i]) <= expected.bound[i]))
      return static_cast<std::ptrdiff_t>(i);
  return -1;
}
void expect_close(const char* what, const Bytes& found, Precision precision, const Expected& expected) {
  const std::ptrdiff_t i = first_off(found, precision, expected);
  if (i < 0) return;
  const auto at = static_cast<std::size_t>(i);
  ADD_FAILURE() << what << "[" << at << "] is " << get(found, precision, at) << ", not " << expected.value[at]
                << " within " << expected.bound[at];
}

void expect_right(const Case& c) {
  std::ostringstream name;
  name << c;
  SCOPED_TRACE(name.str());
  const Inputs inputs(c);
  const Outputs outputs = compute(c, inputs, 0xff);
  const Reference reference(c, inputs);
  expect_close("y", outputs.y, c.precision, reference.y);
  expect_close("log_sums", outputs.log_sums, Precision::fp32, reference.log_sums);
  expect_close("dqkv", outputs.dqkv, c.precision, reference.dqkv);
}

class AttentionTest : public NeedsGpu {};

// Every width and length; sequences, groups and documents take turns.
TEST_F(AttentionTest, MatchesReference) {
  struct Heads {
    int sequences, heads, kv_heads;
  };
  constexpr Heads kHeads[] = {{2, 1, 1}, {1, 2, 1}, {1, 4, 1}, {3, 2, 2}, {1, 4, 2}};
  int turn = 0;
  for (const Precision precision : kTypes)
    for (const int width : kWidths)
      for (const int length : kLengths) {
        const Heads heads = kHeads[turn % 5];
        const auto documents = static_cast<Documents>(turn % 7 == 6 ? 2 : turn % 2);
        ++turn;
        expect_right({precision, heads.sequences, length, heads.heads, heads.kv_heads, width, documents});
      }
}

// Every group with every kind of documents, where rows go over several tiles.
TEST_F(AttentionTest, GroupsAndDocuments) {
  for (const Precision precision : kTypes)
    for (const int width : {40, 64, 80, 128})
      for (const auto documents : {Documents::none, Documents::several, Documents::single})
        for (const int kv_heads : {1, 2, 4}) expect_right({precision, 2, 200, 4, kv_heads, width, documents});
}

// More (sequence, head) pairs than a section of blocks has.
TEST_F(AttentionTest, ManyPairs) {
  for (const Precision precision : kTypes)
    for (const int kv_heads : {14, 2, 1})
      expect_right({precision, 5, 140, 14, kv_heads, 64, Documents::several});
}

TEST_F(AttentionTest, SameBytesTwice) {
  for (const Precision precision : kTypes)
    for (const int width : kWidths) {
      const Case c{precision, 2, 200, 4, 2, width, Documents::several};
      const Inputs inputs(c);
      const Outputs once = compute(c, inputs, 0xff), again = compute(c, inputs, 0);
      EXPECT_EQ(once.y, again.y) << c;
      EXPECT_EQ(once.log_sums, again.log_sums) << c;
      EXPECT_EQ(once.dqkv, again.dqkv) << c;
    }
}

TEST_F(AttentionTest, LargeScoresStayFinite) {
  for (const Precision precision : kTypes)
    for (const int width : kWidths) {
      const Case c{precision, 1, 129, 2, 1, width, Documents::several, 30};
      const Outputs outputs = compute(c, Inputs(c), 0xff);
      for (std::size_t i = 0; i < c.rows() * c.output_stride(); ++i)
        ASSERT_TRUE(std::isfinite(get(outputs.y, precision, i))) << c;
      for (std::size_t i = 0; i < c.rows() * c.stride(); ++i)
        ASSERT_TRUE(std::isfinite(get(outputs.dqkv, precision, i))) << c;
    }
}

TEST_F(AttentionTest, NothingToDo) {
  for (const Precision precision : kTypes) {
    attend({precision, 0, 64, 2, 2, 64, nullptr}, nullptr, nullptr, nullptr, nullptr);
    attend({precision, 3, 0, 2, 2, 64, nullptr}, nullptr, nullptr, nullptr, nullptr);
    attend_backward({precision, 0, 64, 2, 2, 64, nullptr}, nullptr, nullptr, nullptr, nullptr, nullptr,
                    nullptr, nullptr);
  }
}

TEST(AttentionShape, Problems) {
  const Attention fine{Precision::bf16, 4, 1024, 32, 8, 128, nullptr};
  EXPECT_EQ(problem_with(fine), nullptr);
  EXPECT_EQ(attend_backward_bytes(fine), 4 * 32 * 1024 * 8);
  Attention grouped = fine;
  grouped.heads = 28, grouped.kv_heads = 4;  // in parts of two heads, whose sums are added up
  EXPECT_EQ(attend_backward_bytes(grouped), 4 * 28 * 1024 * 8 + 4 * (2 * 4 * 4 * 1024 * 128) * 4);
  const auto with = [&](auto change) {
    Attention shape = fine;
    change(shape);
    const char* problem = problem_with(shape);
    return std::string(problem ? problem : "");
  };
  EXPECT_NE(with([](Attention& a) { a.head_width = 257; }).find("257"), std::string::npos);
  EXPECT_NE(with([](Attention& a) { a.head_width = 0; }), "");
  EXPECT_NE(with([](Attention& a) { a.kv_heads = 5; }).find("32 heads cannot share 5"), std::string::npos);
  EXPECT_NE(with([](Attention& a) { a.kv_heads = 0; }), "");
  EXPECT_NE(with([](Attention& a) { a.heads = 0; }), "");
  EXPECT_NE(with([](Attention& a) { a.length = std::int64_t{1} << 31; }), "");
  EXPECT_NE(with([](Attention& a) { a.sequences = std::int64_t{1} << 31; }), "");
  EXPECT_NE(with([](Attention& a) { a.sequences = -1; }), "");
  EXPECT_EQ(with([](Attention& a) { a.head_width = 256; }), "");
}

}  // namespace
}  // namespace scruple::train::cuda
