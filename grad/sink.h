// The sink takes gradients as backward produces them, piece by piece, and takes the optimizer step. The
// policy decides what happens to a gradient that arrives:
// - stored: it is added to an accumulator, which stays; the step comes at the end.
// - compressed: the same, but the accumulator's memory is freed after the step.
// - released: it is stepped with at once, and nothing of it is kept.
#pragma once

#include <map>
#include <mutex>
#include <set>
#include <vector>

#include "engine/engine.h"

namespace scruple {

// The elements of a tensor that have come in this micro-batch.
class Coverage {
 public:
  bool overlaps(i64 first, i64 size) const;
  void add(i64 first, i64 size);
  i64 size() const { return size_; }
  void clear() {
    spans_.clear();
    size_ = 0;
  }

 private:
  std::map<i64, i64> spans_;  // first -> end; those that touch are one
  i64 size_ = 0;
};

// Values in the engine's memory. While a sink works only the engine reads and writes them; the host has their
// addresses.
struct SinkCells {
  scruple_scaler scaler;
  float found_inf, clip;  // of the last step
  float any;              // released: 1 where a tensor of this step was skipped
  double norm, sum;
  i64 steps, skipped;
};
struct TensorCells {
  i64 steps;  // taken since the table was made: of this tensor, or of all that share it
  double sum, gamma;
  float found_inf, clip;
};

}  // namespace scruple

struct scruple_sink {
 public:
  scruple_sink(scruple_engine& engine, const scruple_tensor* tensors, scruple::i64 count,
               const scruple_sink_options& options);
  ~scruple_sink();
  scruple_sink(const scruple_sink&) = delete;
  scruple_sink& operator=(const scruple_sink&) = delete;

  bool measures() const { return measures_; }
  bool only_guards() const { return only_guards_; }
  const float* loss_scale() const {
    return options_.loss_scale != nullptr ? options_.loss_scale : &cells_->scaler.scale;
  }
  const float* found_inf() const { return &cells_->found_inf; }
  void measure(const scruple_piece* pieces, scruple::i64 count);
  void add(const scruple_piece* pieces, scruple::i64 count);
  void end();
  scruple_sink_report read();
  void read_tensors(scruple::i64* steps, double* adagc_norms);

 private:
  struct State {
    scruple::Coverage added;
    scruple::i64 measured = 0;  // elements shown, from the first on
    scruple::i64 counter = 0;   // the TensorCells whose steps are this tensor's
  };
  // Coverage of the tensors that a call touches, as it was before.
  using Before = std::map<scruple::i64, scruple::Coverage>;

  bool released() const { return options_.policy == SCRUPLE_RELEASED; }
  bool is_last() const { return micro_batch_ + 1 == options_.micro_batches; }
  State& state(scruple::i64 tensor) { return states_[static_cast<std::size_t>(tensor)]; }
  scruple_tensor& row(scruple::i64 tensor) { return rows_[static_cast<std::size_t>(tensor)]; }
  scruple::i64 count() const { return static_cast<scruple::i64>(rows_.size()); }

  scruple_tensor view(const scruple_piece& piece);
  void take(const scruple_piece& piece, Before& before);
  void fold(const scruple_piece* pieces, const std::vector<scruple_tensor>& views);
  void release(const scruple_piece* pieces, const std::vector<scruple_tensor>& views);
  void check_measured(const scruple_piece& piece);
  void measure_view(const scruple_tensor& view, scruple::i64 tensor);
  void step_view(const scruple_tensor& part, scruple::i64 tensor, scruple::u64 version);
  void check_complete();
  std::map<scruple::i64, std::vector<scruple_tensor>> tables_by_counter();
  void step_all();
  void end_released();

  void* alloc_plane(scruple::i64 bytes);
  void free_plane(void* plane, scruple::i64 bytes);
  void alloc_gradients(const std::set<scruple::i64>& tensors);
  void free_gradients();
  void free_all();

  scruple_engine& engine_;
  scruple_sink_options options_;
  std::vector<scruple_tensor> rows_;  // folds: micro-batches of this step that had something for the tensor
  std::vector<State> states_;
  int micro_batch_ = 0;
  bool measures_ = false, only_guards_ = false;
  std::mutex mutex_;  // hooks of one backward pass may run on several threads

  struct Block {  // of accumulators
    void* memory = nullptr;
    scruple::i64 bytes = 0;
    std::vector<void**> planes;  // those of rows_ that lie in it
  };
  std::vector<Block> blocks_;

  // In the engine's memory.
  void* memory_ = nullptr;
  scruple::SinkCells* cells_ = nullptr;
  scruple::TensorCells* tensors_ = nullptr;
};
