// What every engine can do, over the public table of tensors, and the checks that stand before all of them:
// an engine is only ever given a table that passed.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "engine/registry.h"
#include "engine/rule.h"
#include "include/scruple/scruple.h"

struct scruple_engine {
  virtual ~scruple_engine() = default;
  virtual const char* name() const = 0;
  virtual int threads() const = 0;

  virtual void step(const scruple_tensor* tensors, scruple::i64 count,
                    const scruple_step_options& options) = 0;
  virtual double sum_squares(const scruple_tensor* tensors,
                             scruple::i64 count) = 0;  // of the gradients as stored
  virtual void fold(const scruple_tensor* tensors, const scruple_array* incoming, scruple::i64 count,
                    float multiplier) = 0;
  virtual void encode(const scruple_tensor& tensor, int array, const float* values) = 0;
  virtual void decode(const scruple_tensor& tensor, int array, float* values) = 0;
  virtual void fill(const scruple_tensor& tensor, int array, float value) = 0;

  virtual void* alloc(scruple::i64 bytes) = 0;  // zeroed
  virtual void free(void* memory) = 0;
  virtual void zero(void* memory, scruple::i64 bytes) = 0;
  virtual void copy(void* to, const void* from, scruple::i64 bytes) = 0;
};

namespace scruple {

struct EngineInfo {
  std::string name, doc, reason;  // reason: why it is not available, or empty
};

const std::vector<EngineInfo>& engines();
std::unique_ptr<scruple_engine> make_engine(const char* name, int threads);

// ---- Checks: each throws a Failure that says what was asked, what was found, what to do ----

unsigned role_of(const scruple_tensor& tensor, int array);
const char* array_name(const scruple_tensor& tensor, int array);
bool is_used(const scruple_tensor& tensor, int array);

void check_tensor(const scruple_tensor& tensor, i64 index);
// Format, rounding and, with `memory`, planes of one array that is used.
void check_array(const scruple_tensor& tensor, i64 index, int array, bool memory);
void check_step(const scruple_tensor* tensors, i64 count);
void check_gradients(const scruple_tensor* tensors, i64 count);
void check_fold(const scruple_tensor* tensors, const scruple_array* incoming, i64 count, float multiplier);

}  // namespace scruple
