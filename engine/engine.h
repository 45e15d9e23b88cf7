// What every engine can do, over the public table of tensors, and the checks that stand before all of them:
// an engine is only ever given a table that passed.
#pragma once

#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "engine/clip.h"
#include "engine/registry.h"
#include "engine/rule.h"
#include "include/scruple/scruple.h"

namespace scruple {

// The last table that check_step passed. Most steps come with the planes of the step before, and comparing
// them costs a tenth of checking them.
struct CheckedTable {
  std::mutex mutex;
  struct Rule {
    const RuleInfo* info;  // an address may come back as another optimizer's
    unsigned active;
    bool operator==(const Rule&) const = default;
  };
  std::vector<scruple_tensor> rows;
  std::vector<Rule> rules;  // of each row
  u64 version = 0;
};

}  // namespace scruple

struct scruple_engine {
  virtual ~scruple_engine() = default;
  virtual const char* name() const = 0;
  virtual int threads() const = 0;

  // `version`: two calls with the same version have the same table, but for step counts. 0: unknown.
  virtual void step(const scruple_tensor* tensors, scruple::i64 count, scruple::u64 version,
                    const scruple_step_options& options) = 0;
  virtual double sum_squares(const scruple_tensor* tensors,
                             scruple::i64 count) = 0;  // of the gradients as stored, on the host
  virtual void measure(const scruple_tensor* tensors, scruple::i64 count,
                       const scruple_measure_options& options) = 0;
  virtual void advance(const scruple::Advance& what) = 0;
  virtual void fold(const scruple_tensor* tensors, const scruple_array* incoming, scruple::i64 count,
                    float multiplier, const scruple::i64* steps) = 0;
  virtual void clear(const scruple_tensor* tensors, scruple::i64 count) = 0;  // gradients
  virtual void encode(const scruple_tensor& tensor, int array, const float* values) = 0;
  // To values of fp32, bf16 or fp16.
  virtual void decode(const scruple_tensor& tensor, int array, const scruple_format& to, void* values) = 0;
  virtual void fill(const scruple_tensor& tensor, int array, float value) = 0;

  virtual void set_stream(void* stream) = 0;
  virtual void synchronize() = 0;
  virtual void* alloc(scruple::i64 bytes) = 0;  // zeroed
  virtual void free(void* memory) = 0;
  // Host memory that the engine copies to and from beside its work.
  virtual void* alloc_host(scruple::i64 bytes) { return alloc(bytes); }
  virtual void free_host(void* memory) { free(memory); }
  virtual void copy(void* to, const void* from, scruple::i64 bytes) = 0;

  scruple::CheckedTable checked;
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
bool is_nonneg(const scruple_tensor& tensor, int array);
bool is_on_host(const scruple_tensor& tensor, int array, bool aux);  // SCRUPLE_HOST_STATE
// Whether the weight and the moments in use have these formats, by their numbers.
bool has_formats(const scruple_tensor& tensor, int weight, int moment, int nonneg);
unsigned role_in_step(const scruple_tensor& tensor, int array);  // as role_of, or SCRUPLE_ROLE_EXACT
// What roots are multiplied by (optim/optimizer.h): the spread of the moment that the step divides by.
float spread_of(const scruple_tensor& tensor);

void check_tensor(const scruple_tensor& tensor, i64 index);
// Format, rounding and, with `memory`, planes of one array that is used.
void check_array(const scruple_tensor& tensor, i64 index, int array, bool memory);
u64 check_step(const scruple_tensor* tensors, i64 count, CheckedTable& last);  // the table's version
// Weights and moments as check_step would, gradients not.
void check_state(const scruple_tensor* tensors, i64 count);
// That tensor `index` can take a step in parts: its optimizer can, and its moments are fp32.
void check_parts(const scruple_tensor& tensor, i64 index);
void check_gradients(const scruple_tensor* tensors, i64 count);
void check_fold(const scruple_tensor* tensors, const scruple_array* incoming, i64 count, float multiplier);
void check_accumulator(const scruple_tensor& tensor, i64 index);  // the format alone
void check_scaler(const scruple_scaler& scaler);

// Elements `first` to `first + size` as a tensor of their own. `what` is asked for, in messages.
scruple_tensor view_of(const scruple_tensor& tensor, i64 first, i64 size, const std::string& what);

}  // namespace scruple
