// What the vectors of every instruction set share: their width, types and operators. engine/lanes.h is what
// others include.
#pragma once

#include <type_traits>

#include "formats/codec.h"

#if defined(SCRUPLE_PLAIN)
#define SCRUPLE_LANES 0
#elif defined(__AVX512BW__)
#define SCRUPLE_LANES 16
#elif defined(__AVX2__) && defined(__FMA__)
#define SCRUPLE_LANES 8
#elif defined(__aarch64__)
#define SCRUPLE_LANES 4
#else
#define SCRUPLE_LANES 0
#endif

#if defined(__clang__)
#define SCRUPLE_UNROLL _Pragma("clang loop unroll(full)")
#else
#define SCRUPLE_UNROLL _Pragma("GCC unroll 16")
#endif

#if SCRUPLE_LANES
namespace scruple {
inline namespace SCRUPLE_UNIT {

inline constexpr int kLanes = SCRUPLE_LANES;
// Codes are read and written 16 elements at a time: kParts vectors.
inline constexpr int kBlock = 16, kParts = kBlock / kLanes;

// The vector types of intrinsics (__m256i, float32x4_t and so on): Words and Floats convert from and to them.
template <class V>
concept Register = sizeof(V) == 4 * kLanes && !std::is_class_v<V> && requires(V v) {
  v[0];
};

struct Words {
  typedef u32 Native __attribute__((vector_size(4 * kLanes)));
  Native v;

  Words() = default;
  SCRUPLE_HD Words(u32 x) : v(Native{} + x) {}
  template <Register V>
  SCRUPLE_HD Words(V x) : v(Native(x)) {}
  template <Register V>
  SCRUPLE_HD operator V() const {
    return V(v);
  }

  friend SCRUPLE_HD Words operator+(Words a, Words b) { return a.v + b.v; }
  friend SCRUPLE_HD Words operator-(Words a, Words b) { return a.v - b.v; }
  friend SCRUPLE_HD Words operator*(Words a, Words b) { return a.v * b.v; }
  friend SCRUPLE_HD Words operator&(Words a, Words b) { return a.v & b.v; }
  friend SCRUPLE_HD Words operator|(Words a, Words b) { return a.v | b.v; }
  friend SCRUPLE_HD Words operator^(Words a, Words b) { return a.v ^ b.v; }
  friend SCRUPLE_HD Words operator~(Words a) { return ~a.v; }
  friend SCRUPLE_HD Words operator<<(Words a, int n) { return a.v << n; }
  friend SCRUPLE_HD Words operator>>(Words a, int n) { return a.v >> n; }
  // All bits set where it holds.
  friend SCRUPLE_HD Words operator<(Words a, Words b) { return a.v < b.v; }
  friend SCRUPLE_HD Words operator>=(Words a, Words b) { return a.v >= b.v; }
};

struct Floats {
  typedef float Native __attribute__((vector_size(4 * kLanes)));
  Native v;

  Floats() = default;
  SCRUPLE_HD Floats(float x) : v(Native(Words(bits_of(x)).v)) {}
  template <Register V>
  SCRUPLE_HD Floats(V x) : v(Native(x)) {}
  template <Register V>
  SCRUPLE_HD operator V() const {
    return V(v);
  }

  friend SCRUPLE_HD Floats operator+(Floats a, Floats b) { return a.v + b.v; }
  friend SCRUPLE_HD Floats operator-(Floats a, Floats b) { return a.v - b.v; }
  friend SCRUPLE_HD Floats operator*(Floats a, Floats b) { return a.v * b.v; }
  friend SCRUPLE_HD Floats operator/(Floats a, Floats b) { return a.v / b.v; }
  friend SCRUPLE_HD Floats operator-(Floats a) { return -a.v; }
  friend SCRUPLE_HD Words operator>(Floats a, Floats b) { return a.v > b.v; }
};

SCRUPLE_HD Words bits_of(Floats x) { return x.v; }
SCRUPLE_HD Floats float_of(Words x) { return x.v; }
SCRUPLE_HD Words magnitude_bits(Floats x) { return bits_of(x) & 0x7fffffffu; }
SCRUPLE_HD Floats magnitude(Floats x) { return float_of(magnitude_bits(x)); }
SCRUPLE_HD Words shifted_down_signed(Words a, int n) {
  typedef i32 Signed __attribute__((vector_size(4 * kLanes)));
  return Words::Native(Signed(a.v) >> n);
}
SCRUPLE_HD Words select(Words condition, Words yes, Words no) {
  return (condition & yes) | (no & ~condition);
}
SCRUPLE_HD Floats select(Words condition, Floats yes, Floats no) {
  return float_of(select(condition, bits_of(yes), bits_of(no)));
}
SCRUPLE_HD Floats with_sign_of(Floats sign, Floats x) {
  return float_of(select(Words(0x80000000u), bits_of(sign), bits_of(x)));
}

// 0, 1, 2 ...
SCRUPLE_HD Words lane_numbers() {
  Words::Native v{};
  for (int i = 0; i < kLanes; ++i) v[i] = static_cast<u32>(i);
  return v;
}

SCRUPLE_HD Floats load_floats(const float* from) {
  Floats::Native v;
  __builtin_memcpy(&v, from, sizeof v);
  return v;
}
SCRUPLE_HD void store(Floats x, float* to) { __builtin_memcpy(to, &x.v, sizeof x.v); }

}  // namespace SCRUPLE_UNIT
}  // namespace scruple
#endif
