// The CPU engine. It combines formats and optimizers at run time: a tile is decoded to fp32, updated and
// encoded. So no loop is compiled per pair of format and optimizer. Mixtures that recipes name have fused
// loops where those are faster (engine/fused.h).
#include "engine/cpu.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <new>

#include "engine/clip.h"
#include "engine/coins.h"
#include "engine/failure.h"
#include "engine/threads.h"
#include "formats/rows.h"

namespace scruple {
namespace {

// One array of one tensor, ready for the tile loop.
struct ArrayWork {
  Planes planes{};
  DecodeFn decode = nullptr;
  EncodeFn encode = nullptr;
  int k = 0;
  bool in_place = false;  // fp32: the update reads and writes the tensor's own memory
  Coins coins;            // of element 0 of this tensor, or shard, on
};

struct TensorWork {
  ArrayWork weight, gradient, slots[kMaxSlots];
  UpdateFn update;
  FusedFn fused;  // or null
  StepConstants step;
  float multiplier, spread;
  bool keep_weight;  // another part of this step follows
};

struct alignas(64) TileBuffers {
  float weight[kTile], gradient[kTile], slots[kMaxSlots][kTile];
};

// `later`: by how many folds. Every write has coins of its own, and only accumulators are written more than
// once in a step, so their coins depend on the number of folds.
ArrayWork array_work(const Unit& unit, const scruple_tensor& t, int which, int later = 0) {
  const scruple_array& array = t.arrays[which];
  const i64 write = which == SCRUPLE_GRADIENT ? t.folds + later : 0;
  ArrayWork work;
  const CodecFns& fns = unit.codecs[array.format->index][is_nonneg(t, which) ? 1 : 0];
  work.planes = {static_cast<u8*>(array.codes), static_cast<u8*>(array.aux)};
  work.decode = fns.decode[array.rounding];
  work.encode = fns.encode[array.rounding];
  work.k = array.format->k;
  work.in_place = array.format->layout.code_bits == 32;
  if (draws_coins(array.rounding))
    work.coins = draw_coins({t.optimizer->seed, static_cast<u32>(t.step), t.id, static_cast<u32>(which),
                             static_cast<u32>(write)})
                     .from(t.offset);
  return work;
}

// The fused loop for these formats, or null. The rounding of moments does not matter: nearest is the
// stochastic loop with the same coin, one half, for every element.
FusedFn fused_of(const Unit& unit, const scruple_tensor& t) {
  const scruple_array &weight = t.arrays[SCRUPLE_WEIGHT], &gradient = t.arrays[SCRUPLE_GRADIENT];
  for (int i = 0; i < kRecipeCount; ++i) {
    const RecipeRow& r = kRecipeRows[i];
    if (weight.rounding == r.weight_rounding && gradient.format->index == r.gradient &&
        gradient.rounding != kDither && has_formats(t, r.weight, r.moment, r.nonneg))
      return unit.fused[i][t.optimizer->rule().index][t.optimizer->active()];
  }
  return nullptr;
}

scruple_tensor at_step(scruple_tensor t, i64 steps) {
  t.step += steps;
  return t;
}

class CpuEngine final : public scruple_engine {
 public:
  CpuEngine(const CpuUnit& info, int threads) : info_(info), unit_(*info.unit), threads_(threads) {}

  const char* name() const override { return info_.name; }
  int threads() const override { return threads_.count(); }

  void step(const scruple_tensor* tensors, i64 count, u64, const scruple_step_options& options) override {
    if (value_or(options.found_inf, 0.0f) != 0) return;
    const float multiplier = gradient_multiplier(options.multiplier, value_or(options.clip, 1.0f),
                                                 value_or(options.loss_scale, 1.0f));
    const i64 steps = value_or(options.steps, i64{0});
    std::vector<TensorWork> work(static_cast<std::size_t>(count));
    for (i64 i = 0; i < count; ++i)
      work[static_cast<std::size_t>(i)] = tensor_work(at_step(tensors[i], steps), multiplier, options);
    for_chunks(tensors, count, [&](i64 tensor, i64, i64 first, i64 n) {
      step_chunk(work[static_cast<std::size_t>(tensor)], first, first + n);
    });
  }

  double sum_squares(const scruple_tensor* tensors, i64 count) override {
    return sum_squares(tensors, count, 0, 0);
  }
  double sum_squares(const scruple_tensor* tensors, i64 count, i64 steps, double before) {
    std::vector<double> sums(static_cast<std::size_t>(chunk_begins(tensors, count).back()));
    for_chunks(tensors, count, [&](i64 tensor, i64 chunk, i64 first, i64 n) {
      const ArrayWork gradient = array_work(unit_, at_step(tensors[tensor], steps), SCRUPLE_GRADIENT);
      float values[kSegment];
      double sum = 0;
      in_pieces<kSegment>(first, n, [&](i64 segment, int in_segment) {
        in_pieces<kTile>(segment, in_segment, [&](i64 at, int in_tile) {
          decode_tile(gradient, at, in_tile, values + (at - segment));
        });
        sum += unit_.sum_squares(values, in_segment);
      });
      sums[static_cast<std::size_t>(chunk)] = sum;
    });
    double total = before;
    for (const double sum : sums) total += sum;
    return total;
  }

  void measure(const scruple_tensor* tensors, i64 count, const scruple_measure_options& options) override {
    const double before = value_or(options.sum_before, 0.0);
    write_measured(sum_squares(tensors, count, value_or(options.steps, i64{0}), before), options);
  }

  void advance(const Advance& what) override { advance_by(what); }

  void fold(const scruple_tensor* tensors, const scruple_array* incoming, i64 count, float multiplier,
            const i64* steps) override {
    for_chunks(tensors, count, [&](i64 tensor, i64, i64 first, i64 n) {
      scruple_tensor t = at_step(tensors[tensor], value_or(steps, i64{0}));
      const ArrayWork before = array_work(unit_, t, SCRUPLE_GRADIENT);
      const ArrayWork after = array_work(unit_, t, SCRUPLE_GRADIENT, 1);
      t.arrays[SCRUPLE_GRADIENT] = incoming[tensor];
      const ArrayWork arriving = array_work(unit_, t, SCRUPLE_GRADIENT);
      TileBuffers buffers;
      in_pieces<kTile>(first, n, [&](i64 at, int in_tile) {
        if (t.folds > 0)
          decode_tile(before, at, in_tile, buffers.weight);
        else
          std::fill_n(buffers.weight, in_tile, -0.0f);  // added to -0, every x stays x
        decode_tile(arriving, at, in_tile, buffers.gradient);
        unit_.add_scaled(buffers.weight, buffers.gradient, multiplier, in_tile);
        encode_tile(buffers.weight, after, at, in_tile);
      });
    });
  }

  void clear(const scruple_tensor* tensors, i64 count) override {
    for (i64 i = 0; i < count; ++i)
      for_planes(tensors[i].arrays[SCRUPLE_GRADIENT], tensors[i].size, [&](void* plane, i64 bytes) {
        in_blocks(bytes, [&](i64 at, std::size_t n) { std::memset(static_cast<u8*>(plane) + at, 0, n); });
      });
  }

  void encode(const scruple_tensor& t, int array, const float* values) override {
    const ArrayWork work = array_work(unit_, t, array);
    const float overflow = array == SCRUPLE_GRADIENT ? t.arrays[array].format->overflow : kNoOverflow;
    for_tiles(t, [&](i64 at, int n, float* tile) {
      std::memcpy(tile, reinterpret_cast<const u8*>(values) + at * static_cast<i64>(sizeof(float)),
                  static_cast<std::size_t>(n) * sizeof(float));
      for (int i = 0; i < n; ++i) tile[i] = overflowed(canonical(tile[i]), overflow);
      encode_tile(tile, work, at, n);
    });
  }

  void fill(const scruple_tensor& t, int array, float value) override {
    const ArrayWork work = array_work(unit_, t, array);
    const Bytes whole = bytes_of(*t.arrays[array].format, kTile);
    const auto again = [&](u8* plane, i64 at, i64 bytes) {
      u8* const to = plane + at / kTile * bytes;
      if (bytes > 0) std::memcpy(to, to - bytes, static_cast<std::size_t>(bytes));
    };
    for_tiles(t, [&](i64 at, int n, float* tile) {
      // reset_slots: every format of moments stores 0 as the same bytes, whatever the coins. So a whole tile
      // of zeros is a copy of the tile before it.
      if (value == 0 && n == kTile && at % kChunk != 0) {
        again(work.planes.codes, at, whole.codes);
        again(work.planes.aux, at, whole.aux);
        return;
      }
      std::fill_n(tile, n, value);
      encode_tile(tile, work, at, n);
    });
  }

  void decode(const scruple_tensor& t, int array, const scruple_format& to, void* values) override {
    const ArrayWork work = array_work(unit_, t, array);
    ArrayWork plain;
    plain.planes = {static_cast<u8*>(values), nullptr};
    plain.encode = unit_.codecs[to.index][0].encode[kNearest];
    for_tiles(t, [&](i64 at, int n, float* tile) {
      decode_tile(work, at, n, tile);
      for (int i = 0; i < n; ++i) tile[i] = overflowed(canonical(tile[i]), to.overflow);
      encode_tile(tile, plain, at, n);
    });
  }

  void set_stream(void* stream) override {
    if (stream != nullptr)
      fail(SCRUPLE_INVALID, "engine ", name(), " has no streams; pass NULL, or create engine cuda");
  }
  void synchronize() override {}  // every call returns when its work is done

  void* alloc(i64 bytes) override {
    void* memory = std::calloc(static_cast<std::size_t>(std::max<i64>(bytes, 1)), 1);
    if (memory == nullptr) throw std::bad_alloc();
    return memory;
  }
  void free(void* memory) override { std::free(memory); }
  void copy(void* to, const void* from, i64 bytes) override {
    in_blocks(bytes, [&](i64 at, std::size_t n) {
      std::memcpy(static_cast<u8*>(to) + at, static_cast<const u8*>(from) + at, n);
    });
  }

 private:
  // One long block per thread, because only then does the C library's copy bypass the caches: benchmarks
  // measure a step against this copy.
  void in_blocks(i64 bytes, const auto& work) {
    const i64 block = std::max(i64{1} << 20, (bytes + threads() - 1) / threads());
    threads_.run((bytes + block - 1) / block, [&](i64 i) {
      work(i * block, static_cast<std::size_t>(std::min(block, bytes - i * block)));
    });
  }

  // The first chunk of each tensor, and the number of all.
  static std::vector<i64> chunk_begins(const scruple_tensor* tensors, i64 count) {
    std::vector<i64> begins{0};
    for (i64 i = 0; i < count; ++i) begins.push_back(begins.back() + (tensors[i].size + kChunk - 1) / kChunk);
    return begins;
  }

  // visit(tensor, chunk, first element, elements) for every chunk of every tensor, shared among the threads.
  void for_chunks(const scruple_tensor* tensors, i64 count, const auto& visit) {
    const std::vector<i64> begins = chunk_begins(tensors, count);
    threads_.run(begins.back(), [&](i64 chunk) {
      const i64 tensor = std::upper_bound(begins.begin(), begins.end(), chunk) - begins.begin() - 1;
      const i64 first = (chunk - begins[static_cast<std::size_t>(tensor)]) * kChunk;
      visit(tensor, chunk, first, std::min(kChunk, tensors[tensor].size - first));
    });
  }

  // visit(first element, elements) for each piece of n elements, in order.
  template <int Piece>
  static void in_pieces(i64 first, i64 n, const auto& visit) {
    for (i64 at = first; at < first + n; at += Piece)
      visit(at, static_cast<int>(std::min<i64>(Piece, first + n - at)));
  }

  // visit(first element, elements, room for their values) for every tile of a tensor, shared among the threads. The
  // tiles of a chunk come in order.
  void for_tiles(const scruple_tensor& t, const auto& visit) {
    for_chunks(&t, 1, [&](i64, i64, i64 first, i64 n) {
      alignas(64) float tile[kTile];
      in_pieces<kTile>(first, n, [&](i64 at, int in_tile) { visit(at, in_tile, tile); });
    });
  }

  TensorWork tensor_work(const scruple_tensor& t, float multiplier,
                         const scruple_step_options& options) const {
    TensorWork work{};
    work.weight = array_work(unit_, t, SCRUPLE_WEIGHT);
    work.gradient = array_work(unit_, t, SCRUPLE_GRADIENT);
    for (int s = 0; s < kMaxSlots; ++s)
      if (is_used(t, SCRUPLE_SLOT + s)) work.slots[s] = array_work(unit_, t, SCRUPLE_SLOT + s);
    work.update = unit_.update[t.optimizer->rule().index][t.optimizer->active()];
    work.step = t.optimizer->prepare(t.step, options.part == 0);
    work.keep_weight = options.part + 1 < options.parts;
    work.fused = work.keep_weight ? nullptr : fused_of(unit_, t);
    work.weight.in_place = work.weight.in_place && !work.keep_weight;
    work.multiplier = t.optimizer->maximize ? -multiplier : multiplier;
    work.spread = spread_of(t);
    return work;
  }

  static void decode_tile(const ArrayWork& work, i64 at, int n, float* out) {
    work.decode(work.planes, at, n, work.k, out, work.coins.from(at));
  }
  static void encode_tile(const float* in, const ArrayWork& work, i64 at, int n) {
    work.encode(in, work.planes, at, n, work.k, work.coins.from(at));
  }

  // Where the update finds an array: in its own memory, or decoded into a buffer.
  static float* open(const ArrayWork& work, i64 at, int n, float* buffer) {
    if (work.in_place)
      return reinterpret_cast<float*>(work.planes.codes + at * static_cast<i64>(sizeof(float)));
    decode_tile(work, at, n, buffer);
    return buffer;
  }

  // Whole spans by the fused loop, where there is one; what it leaves, and all else, by tiles.
  static void step_chunk(const TensorWork& work, i64 at, i64 last) {
    TileBuffers buffers;
    const FusedStep step = fused_step(work);
    for (int n = 0; at < last; at += n) {
      if (work.fused != nullptr) at = work.fused(step, at, last);
      n = static_cast<int>(std::min<i64>(work.fused != nullptr ? kSpan : kTile, last - at));
      if (n > 0) step_tile(work, at, n, buffers);
    }
  }
  static FusedStep fused_step(const TensorWork& work) {
    const auto array = [](const ArrayWork& a) { return FusedArray{a.planes, a.coins}; };
    FusedStep step{array(work.weight), array(work.gradient), {},
                   work.step.bytes,    work.multiplier,      work.spread};
    for (int s = 0; s < kMaxSlots; ++s) step.slots[s] = array(work.slots[s]);
    return step;
  }

  static void step_tile(const TensorWork& work, i64 at, int n, TileBuffers& buffers) {
    float* const weight = open(work.weight, at, n, buffers.weight);
    const float* const gradient = open(work.gradient, at, n, buffers.gradient);
    float* slots[kMaxSlots] = {};
    for (int s = 0; s < kMaxSlots; ++s)
      if (work.slots[s].decode != nullptr) slots[s] = open(work.slots[s], at, n, buffers.slots[s]);

    work.update(weight, slots, gradient, n, work.step.bytes, work.multiplier, work.spread);

    if (!work.weight.in_place && !work.keep_weight) encode_tile(weight, work.weight, at, n);
    for (int s = 0; s < kMaxSlots; ++s)
      if (slots[s] != nullptr && !work.slots[s].in_place) encode_tile(slots[s], work.slots[s], at, n);
  }

  const CpuUnit& info_;
  const Unit& unit_;
  Threads threads_;
};

}  // namespace

std::unique_ptr<scruple_engine> make_cpu_engine(const CpuUnit& unit, int threads) {
  return std::make_unique<CpuEngine>(unit, threads);
}

}  // namespace scruple
