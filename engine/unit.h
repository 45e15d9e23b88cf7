// What an instruction-set unit offers: the leaf loops of the CPU engine over one tile of values, as function
// tables. engine/unit.cpp is compiled once per instruction set; engine/cpu.cpp joins the leaves, tile by
// tile, at run time.
#pragma once

#include "formats/codec.h"

namespace scruple {

// Values decoded, updated and encoded at a time; they stay in the first-level cache. A multiple of every
// group size.
inline constexpr int kTile = 1024;
// Views begin at multiples of it: no group and no byte is cut there.
inline constexpr int kAlign = 128;
// Work is handed to threads in chunks; the reduction tree of norms is built on them too.
inline constexpr i64 kChunk = 1 << 16;
inline constexpr int kMaxSlots = 3;

inline constexpr int kFormatCount = 0
#define SCRUPLE_FORMAT(...) +1
#include "formats/formats.def"
#undef SCRUPLE_FORMAT
    ;
inline constexpr int kRuleCount = 0
#define SCRUPLE_OPTIMIZER(...) +1
#include "optim/optim.def"
#undef SCRUPLE_OPTIMIZER
    ;
inline constexpr int kRecipeCount = 0
#define SCRUPLE_RECIPE(...) +1
#include "formats/recipes.def"
#undef SCRUPLE_RECIPE
    ;

// A plane pointer at an array's first element. Pointers may have any alignment.
struct Planes {
  u8* codes;
  u8* aux;
};

// `first` is a multiple of kSpan, 0 < n <= kTile; coins[0] is the coin of element `first`. Reading needs them
// for dither alone.
using DecodeFn = void (*)(Planes planes, i64 first, int n, int k, float* out, Coins coins);
using EncodeFn = void (*)(const float* in, Planes planes, i64 first, int n, int k, Coins coins);

struct CodecFns {
  DecodeFn decode[kRoundings];
  EncodeFn encode[kRoundings];
};

// w, slots and g at any alignment; `step` is the rule's Step; g is multiplied by `multiplier` first, roots by
// `spread`.
using UpdateFn = void (*)(float* w, float* const* slots, const float* g, int n, const void* step,
                          float multiplier, float spread);

// A whole step over the spans of [first, last), `first` a multiple of kSpan. Returns how far it came: to the
// last whole span, or to one that it left as it was, for the tiles to take.
inline constexpr int kSpan = 128;
struct FusedArray {
  Planes planes;
  Coins coins;  // of element 0
};
struct FusedStep {
  FusedArray weight, gradient, slots[kMaxSlots];
  const void* step;  // the rule's Step
  float multiplier, spread;
};
using FusedFn = i64 (*)(const FusedStep& work, i64 first, i64 last);

struct Unit {
  CodecFns codecs[kFormatCount][2];                         // [format][0 signed, 1 non-negative]
  UpdateFn update[kRuleCount][1 << kMaxSlots];              // [rule][active slots]
  FusedFn fused[kRecipeCount][kRuleCount][1 << kMaxSlots];  // null: by tiles
  double (*sum_squares)(const float* x, int n);             // n <= kSegment
  void (*add_scaled)(float* total, const float* x, float multiplier, int n);  // total += multiplier x
};

// Norms: within a segment of 2048 values, 256 lanes of 8 rows each, then adjacent pairs of lanes.
inline constexpr int kSegment = 2048;

}  // namespace scruple
