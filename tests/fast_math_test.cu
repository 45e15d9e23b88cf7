// The operations that the device does in its own way, against the ones that IEEE defines: every float where
// there is one operand, many pairs where there are two.
#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include "engine/cuda_update.cuh"
#include "formats/formats.def"

namespace scruple {
namespace {

__device__ bool same(float a, float b) { return bits_of(a) == bits_of(b); }

// Pairs from a counter; exponents from -40 to 40, and mantissas that are often all ones or all zeros.
__device__ float number(u32 bits, u32 extra, int low, int high) {
  u32 mantissa = bits & 0x7fffffu;
  if ((extra & 7u) == 0) mantissa |= 0x7fff00u;
  if ((extra & 7u) == 1) mantissa &= 0xffu;
  const u32 exponent = static_cast<u32>(low + 127) + (extra >> 3) % static_cast<u32>(high - low + 1);
  return float_of(exponent << 23 | mantissa);
}

struct Root {
  static __device__ bool right(u64 i) {
    const float x = float_of(static_cast<u32>(i));
    return same(tame_root(x), __fsqrt_rn(x));
  }
};
struct WholeRoot {
  static __device__ bool right(u64 i) {
    const float x = float_of(static_cast<u32>(i));
    return same(whole_root(x), floorf(__fsqrt_rn(x)));
  }
};
struct Reciprocal {
  static __device__ bool right(u64 i) {
    const float x = float_of(static_cast<u32>(i));
    return x < 0x1p-126f || x > 0x1p125f || same(tame_reciprocal(x), __frcp_rn(x));
  }
};
struct Quotients {
  static __device__ bool right(u64 i) {
    const PhiloxBlock r = philox({{static_cast<u32>(i), static_cast<u32>(i >> 32), 0, 0}}, {{1, 2}});
    const float a = number(r.x[0], r.x[1], -40, 40), b = number(r.x[2], r.x[3], -40, 40);
    const float one_to_two = number(r.x[2], r.x[3], 0, 0), small = number(r.x[0], r.x[1], -40, 0);
    return same(quotient(a, b, __frcp_rn(b)), __fdiv_rn(a, b)) &&
           same(tame_quotient(small, one_to_two), __fdiv_rn(small, one_to_two));
  }
};
// Whatever the operands, a result that is called tame is the right one.
template <bool Anything>
struct OverRoot {
  static __device__ bool right(u64 i) {
    const PhiloxBlock r = philox({{static_cast<u32>(i), static_cast<u32>(i >> 32), 0, 0}}, {{3, 4}});
    const float a =
        Anything ? float_of(r.x[0]) : number(r.x[0], r.x[1], -60, 40) * ((r.x[1] >> 31) != 0 ? -1.0f : 1.0f);
    const float x = Anything ? float_of(r.x[1]) : number(r.x[2], r.x[3], -95, 80);
    const float eps = (r.x[3] & 1u) != 0 ? 1e-8f : 0.0f,
                scale = 1.0f + 0x1p-23f * static_cast<float>(r.x[2] & 0xffffffu);
    FastMath fast;
    const float got = fast.over_root(a, x, scale, eps), want = IeeeMath().over_root(a, x, scale, eps);
    const bool trusted = fast.tame() && got == got;
    return trusted ? same(got, want) : Anything;
  }
};

// fp16 by shifts, products and the hardware's conversion, against what formats/fp16.h says of the host.
struct HalfPosition {
  static __device__ bool right(u64 i) {
    const float x = float_of(static_cast<u32>(i));
    const u32 a = magnitude_bits(x), sign = bits_of(x) & 0x80000000u;
    const u32 normal = (min(a, Fp16::kMax) - Fp16::kRebias) << 3;
    const u32 finite =
        (a < Fp16::kMinNormal ? static_cast<u32>(static_cast<i32>(magnitude(x) * 0x1p40f)) : normal) | sign;
    const u32 want = a < 0x7f800000u ? finite : a == 0x7f800000u ? Fp16::kInfinity | sign : Fp16::kNaN | sign;
    return Fp16::position(x) == want && (a >= 0x7f800000u || Fp16::position<true>(x) == want);
  }
};
struct HalfValue {
  static __device__ bool right(u64 i) {
    const u32 p = static_cast<u32>(i) & 0x7fffffffu, sign = static_cast<u32>(i) & 0x80000000u;
    const float tiny = static_cast<float>(static_cast<i32>(p)) * 0x1p-40f;
    const u32 finite = p < Fp16::kFirstNormal ? bits_of(tiny) : (p >> 3) + Fp16::kRebias;
    const u32 want = p < Fp16::kInfinity              ? finite | sign
                     : p < Fp16::kInfinity + 0x10000u ? 0x7f800000u | sign
                                                      : kNaNBits | sign;
    const u32 hasty = p < Fp16::kInfinity ? finite | sign : kNaNBits | sign;
    const u32 position = static_cast<u32>(i);
    const bool few_bits = (p & 7u) != 0 || (bits_of(Fp16::value(position, 13)) == want &&
                                            bits_of(Fp16::value<false>(position, 13)) == hasty);
    return few_bits && bits_of(Fp16::value(position)) == want;
  }
};
struct HalfDecode {
  static __device__ bool right(u64 i) {
    const float got = Fp16::decode(static_cast<u16>(i)), want = Fp16::value(static_cast<u32>(i) << 16);
    return want == want ? same(got, want) : got != got;
  }
};

// nf4 by halving, against passing all thresholds; a coin for each float.
struct Nf4Code {
  static __device__ bool right(u64 i) {
    const float y = float_of(static_cast<u32>(i));
    const u32 coin = static_cast<u32>(i) * 0x9e3779b1u;
    u32 want = 0;
    for (u32 t = 0; t < 15; ++t) want += y >= Nf4::threshold(t, 1.0f - coin_fraction(coin & 0xffff0000u));
    return Nf4::encode(y, 1.0f, coin) == want;
  }
};

template <class Property>
__global__ void count_wrong(u64 count, unsigned long long* wrong) {
  const u64 stride = static_cast<u64>(gridDim.x) * blockDim.x;
  for (u64 i = static_cast<u64>(blockIdx.x) * blockDim.x + threadIdx.x; i < count; i += stride)
    if (!Property::right(i)) atomicAdd(wrong, 1ull);
}

template <class Property>
void expect_right(u64 count) {
  int devices = 0;
  if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) GTEST_SKIP() << "no CUDA device";
  unsigned long long *wrong = nullptr, result = 1;
  ASSERT_EQ(cudaMalloc(&wrong, sizeof *wrong), cudaSuccess);
  ASSERT_EQ(cudaMemset(wrong, 0, sizeof *wrong), cudaSuccess);
  count_wrong<Property><<<1024, 256>>>(count, wrong);
  ASSERT_EQ(cudaMemcpy(&result, wrong, sizeof result, cudaMemcpyDeviceToHost), cudaSuccess)
      << cudaGetErrorString(cudaGetLastError());
  EXPECT_EQ(result, 0u) << "of " << count;
  cudaFree(wrong);
}

constexpr u64 kInfinity = 0x7f800000u, kPairs = u64{1} << 33;

TEST(FastMath, RootOfEveryFloat) { expect_right<Root>(kInfinity); }
TEST(FastMath, WholeRootOfEveryFloat) { expect_right<WholeRoot>(0x4a800000u + 1); }  // up to 2^22
TEST(FastMath, ReciprocalOfEveryFloat) { expect_right<Reciprocal>(kInfinity); }
TEST(FastMath, Quotients) { expect_right<Quotients>(kPairs); }
TEST(FastMath, OverRootInTheUsualRange) { expect_right<OverRoot<false>>(kPairs); }
TEST(FastMath, HalfPositionOfEveryFloat) { expect_right<HalfPosition>(u64{1} << 32); }
TEST(FastMath, ValueOfEveryHalfPosition) { expect_right<HalfValue>(u64{1} << 32); }
TEST(FastMath, EveryHalf) { expect_right<HalfDecode>(1 << 16); }
TEST(FastMath, Nf4OfEveryFloat) { expect_right<Nf4Code>(u64{1} << 32); }
TEST(FastMath, OverRootOfAnything) { expect_right<OverRoot<true>>(kPairs); }

}  // namespace
}  // namespace scruple
