/* Scruple's whole C interface: number formats, optimizers, the fused step over raw pointers, checkpoints.
 *
 * The model in four sentences. A `scruple_tensor` is a table row: one parameter tensor with the arrays that
 * belong to it (weight, moments, gradient), each array in a format of its own, in memory that the caller or
 * the library owns. A `scruple_optimizer` is an update rule with its hyperparameters; several tensors may
 * share one, or each have its own (that is how learning rate, decay and every other hyperparameter are set
 * per tensor). A `scruple_engine` is where the work runs. Every call that does work takes an engine and a
 * table of tensors.
 *
 * Conventions
 * - Functions return a `scruple_status`; on failure `scruple_last_error()` of the same thread says what was
 *   asked, what was found and what to do, and nothing has been written (except with SCRUPLE_DEVICE and
 *   SCRUPLE_FILE, where CUDA or a disk failed on the way).
 * - The library never prints, aborts or exits. Names are UTF-8 and live as long as the library.
 * - Engines never change the bits: same inputs, same outputs on every instruction set, thread count and
 *   device.
 * - Pointers may have any alignment; sizes are 64-bit; a tensor of size 0 is legal and does nothing.
 * - An engine may be used from several threads; calls on one engine run one after another.
 * - A table, options and hyperparameters are read before a call returns; only what lies in the engine's
 *   memory is read later.
 * - "In the engine's memory" means an address that the engine's processor can read: any for a CPU engine,
 *   device memory (or pinned or managed host memory) for a CUDA one; plain host memory is refused there. All
 *   planes lie there. A CUDA engine queues its work on the caller's stream and returns; calls that take
 *   values from the host's memory or hand values to it wait until they are done with them.
 */
#ifndef SCRUPLE_SCRUPLE_H
#define SCRUPLE_SCRUPLE_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#if defined(__GNUC__)
#define SCRUPLE_API __attribute__((visibility("default")))
#else
#define SCRUPLE_API
#endif

#define SCRUPLE_VERSION "0.2.0"
#define SCRUPLE_ABI_VERSION 2

/* ---- Status and version ---- */

typedef enum scruple_status {
  SCRUPLE_OK = 0,
  SCRUPLE_INVALID = 1,     /* an argument is wrong; the message says which */
  SCRUPLE_UNSUPPORTED = 2, /* a combination that does not exist; the message lists those that do */
  SCRUPLE_OUT_OF_MEMORY = 3,
  SCRUPLE_UNAVAILABLE = 4, /* this machine cannot run that engine; the message says why */
  SCRUPLE_INTERNAL = 5,
  SCRUPLE_DEVICE = 6, /* CUDA reported an error; the message has its words */
  SCRUPLE_FILE = 7    /* a file is damaged, or cannot be read or written; the message names it */
} scruple_status;

SCRUPLE_API const char* scruple_version(void);
SCRUPLE_API int scruple_abi_version(void);
/* The message of this thread's last failed call; "" before the first. Valid until the next call on this
 * thread. */
SCRUPLE_API const char* scruple_last_error(void);

/* ---- Registry: what this library knows ---- */

/* How the bits below a format's last kept bit are decided. */
typedef enum scruple_rounding {
  SCRUPLE_NEAREST = 0,
  SCRUPLE_TRUNCATE = 1,   /* fp16, bf16 and their +K splits */
  SCRUPLE_STOCHASTIC = 2, /* unbiased; coins come from (seed, step, id, element), never from threads */
  SCRUPLE_DITHER = 3,     /* int8 accumulators: stochastic, and the reader subtracts the coin again */
  SCRUPLE_WIDE =
      4 /* bf16+K, fp16+K: the wide value is rounded stochastically, so that the smallest steps add up;
                             the visible half is the nearest 16-bit number. Read as SCRUPLE_NEAREST */
} scruple_rounding;
/* "nearest", "truncate"...: its name in recipes and checkpoints; NULL after the last one and out of range. */
SCRUPLE_API const char* scruple_rounding_name(int rounding);

/* What an array is for; a format serves one or more roles. */
enum {
  SCRUPLE_ROLE_WEIGHT = 1,
  SCRUPLE_ROLE_SIGNED = 2,       /* a moment of either sign, such as exp_avg */
  SCRUPLE_ROLE_NONNEG = 4,       /* a moment that is never negative, such as exp_avg_sq */
  SCRUPLE_ROLE_GRADIENT = 8,     /* what a step can read */
  SCRUPLE_ROLE_ACCUMULATOR = 16, /* what gradients can be folded into */
  SCRUPLE_ROLE_EXACT =
      32 /* a moment of which maxima or small differences count (amsgrad, centered): fp32 alone */
};

typedef struct scruple_format scruple_format;

/* With nearest rounding |decode(encode(x)) - x| <= relative * |x| + group * (largest |x| of its group) +
 * absolute. */
typedef struct scruple_bound {
  double relative, group, absolute;
} scruple_bound;

typedef struct scruple_format_info {
  const char* name;
  const char* doc;
  uint32_t roles;             /* SCRUPLE_ROLE_* bits */
  uint32_t roundings;         /* bit r: rounding r is supported (dither: as a gradient only) */
  int32_t group_size;         /* values that share a scale; 1: none */
  int32_t code_bits;          /* per value */
  int32_t aux_bits;           /* per group: its scale; per value where group_size is 1: the extra bits */
  int32_t aux_is_scale;       /* 1: scales; 0: extra bits of a weight */
  double bits_per_value;      /* code_bits + aux_bits / group_size */
  scruple_bound bound;        /* as a weight or gradient or signed moment, whichever it serves */
  scruple_bound bound_nonneg; /* as a non-negative moment */
} scruple_format_info;

SCRUPLE_API int scruple_format_count(void);
SCRUPLE_API const scruple_format* scruple_format_at(int index);          /* NULL out of range */
SCRUPLE_API const scruple_format* scruple_format_find(const char* name); /* NULL and a message if unknown */
/* The first rounding whose codes mean the same in this format: a split weight that was truncated or rounded
 * stochastically is read in a way of its own, all else as SCRUPLE_NEAREST. -1: there is no such format or rounding. */
SCRUPLE_API int scruple_format_reads_as(const scruple_format* format, int rounding);
SCRUPLE_API scruple_status scruple_get_format_info(const scruple_format* format, scruple_format_info* out);
/* Bytes of the two planes of an array of `size` values. */
SCRUPLE_API scruple_status scruple_format_bytes(const scruple_format* format, int64_t size, int64_t* codes,
                                                int64_t* aux);

typedef struct scruple_recipe_info {
  const char* name;
  const char* doc;
  const char* weight; /* format names; NULL where the recipe has no format for that kind of slot */
  const char* moment; /* signed slots */
  const char* nonneg; /* non-negative slots */
  const char* gradient;
  scruple_rounding weight_rounding, moment_rounding, nonneg_rounding, gradient_rounding;
  int64_t small; /* tensors of at most this many elements stay fp32 */
} scruple_recipe_info;

SCRUPLE_API int scruple_recipe_count(void);
SCRUPLE_API scruple_status scruple_recipe_at(int index, scruple_recipe_info* out);

typedef struct scruple_rule_info {
  const char* name;
  const char* doc;
  int32_t slots;
  int32_t hypers;
} scruple_rule_info;

typedef struct scruple_slot_info {
  const char* name;
  int32_t role;     /* SCRUPLE_ROLE_SIGNED or SCRUPLE_ROLE_NONNEG, whatever the hyperparameters */
  int32_t optional; /* 1: present only when a hyperparameter asks for it */
} scruple_slot_info;

typedef struct scruple_hyper_info {
  const char* name;
  const char* doc;
  double value; /* the default */
  int32_t flag; /* 1: 0 or 1 */
} scruple_hyper_info;

SCRUPLE_API int scruple_rule_count(void);
SCRUPLE_API scruple_status scruple_rule_at(int rule, scruple_rule_info* out);
SCRUPLE_API scruple_status scruple_rule_slot(int rule, int slot, scruple_slot_info* out);
SCRUPLE_API scruple_status scruple_rule_hyper(int rule, int hyper, scruple_hyper_info* out);

typedef struct scruple_engine_info {
  const char* name;
  const char* doc;
  int32_t available;
  const char* reason; /* why not, where it is not available */
} scruple_engine_info;

SCRUPLE_API int scruple_engine_count(void);
SCRUPLE_API scruple_status scruple_engine_at(int index, scruple_engine_info* out);

/* ---- Engines ---- */

typedef struct scruple_engine scruple_engine;

/* `name`: "cpu" (the best unit this machine has, or the one SCRUPLE_ENGINE names), any name in the registry,
 * or "cuda:N" for device N ("cuda": the device that is current). `threads`: 0 for one per core; a CUDA engine
 * ignores it. */
SCRUPLE_API scruple_status scruple_engine_create(const char* name, int threads, scruple_engine** out);
SCRUPLE_API void scruple_engine_destroy(scruple_engine* engine);
SCRUPLE_API const char* scruple_engine_name(const scruple_engine* engine);
SCRUPLE_API int scruple_engine_threads(const scruple_engine* engine);
/* CUDA: the cudaStream_t that later calls queue their work on, of the engine's device; NULL, as at first: the
 * default stream. Work queued through one engine keeps its order when the stream changes. A stream that is
 * being captured into a graph is legal: take one step of the same size outside the capture first, so that the
 * engine has its memory, and give the graph an engine of its own if it may run beside other calls. */
SCRUPLE_API scruple_status scruple_engine_set_stream(scruple_engine* engine, void* stream);
/* Waits for everything the engine has queued, and reports what failed in it. */
SCRUPLE_API scruple_status scruple_engine_synchronize(scruple_engine* engine);
/* Copies with all of the engine's threads: the yardstick of `scruple bench`. The two may not overlap. With
 * CUDA either may be host memory, and the copy is queued: touch pinned host memory, and read what was copied
 * to the host, only after scruple_engine_synchronize. */
SCRUPLE_API scruple_status scruple_copy(scruple_engine* engine, void* to, const void* from, int64_t bytes);

/* ---- Optimizers ---- */

typedef struct scruple_optimizer scruple_optimizer;

SCRUPLE_API scruple_status scruple_optimizer_create(const char* rule, scruple_optimizer** out);
SCRUPLE_API void scruple_optimizer_destroy(scruple_optimizer* optimizer);
SCRUPLE_API int scruple_optimizer_rule(const scruple_optimizer* optimizer); /* its index in the registry */
/* Hyperparameters by name. A value out of range is refused at once; values that contradict each other, at the
 * step. max_lr, the name of decay_lr in 0.1.0, is still taken. */
SCRUPLE_API scruple_status scruple_optimizer_set(scruple_optimizer* optimizer, const char* name,
                                                 double value);
SCRUPLE_API scruple_status scruple_optimizer_get(const scruple_optimizer* optimizer, const char* name,
                                                 double* out);
/* The learning rate is read from `lr`, in the engine's memory, when a step runs, and lr as set above is
 * ignored; NULL: as set above again. */
SCRUPLE_API scruple_status scruple_optimizer_read_lr(scruple_optimizer* optimizer, const double* lr);
/* The seed of every random number drawn for this optimizer's tensors; 0 unless set. */
SCRUPLE_API scruple_status scruple_optimizer_set_seed(scruple_optimizer* optimizer, uint64_t seed);
SCRUPLE_API uint64_t scruple_optimizer_seed(const scruple_optimizer* optimizer);

/* ---- Tensors ---- */

enum {
  SCRUPLE_WEIGHT = 0,
  SCRUPLE_SLOT = 1, /* the first of up to SCRUPLE_MAX_SLOTS, in the rule's order */
  SCRUPLE_MAX_SLOTS = 3,
  SCRUPLE_GRADIENT = 4,
  SCRUPLE_ARRAYS = 5,
  SCRUPLE_STATE = 0xf /* the bits of weight and slots, for scruple_tensor_alloc */
};

/* One encoded array: its codes and, for formats that have them, its scales or extra bits. Layouts:
 * docs/formats.md. */
typedef struct scruple_array {
  const scruple_format* format; /* NULL: absent */
  void* codes;
  void* aux;
  int32_t
      rounding;  /* scruple_rounding, each array its own; also how it is read: a split weight and a dithered
                       accumulator differ by it */
  int32_t owned; /* written by scruple_tensor_alloc, read by scruple_tensor_free; leave 0 */
} scruple_array;

typedef struct scruple_tensor {
  const scruple_optimizer* optimizer;
  int64_t size;
  int64_t step;   /* the step about to be taken: 1 for the first */
  int64_t offset; /* index of the first element in the whole tensor, for shards: random numbers follow it */
  int64_t folds;  /* gradients folded into arrays[SCRUPLE_GRADIENT] so far; 0: the next fold overwrites */
  uint32_t id;    /* names this tensor to the random numbers; give each parameter its own */
  uint32_t host;  /* what of its state lies in host memory: 0, nothing, or SCRUPLE_HOST_STATE */
  scruple_array arrays[SCRUPLE_ARRAYS]; /* weight, slots in the rule's order, gradient */
} scruple_tensor;

/* For scruple_tensor.host: the slots, their scales, and a weight's extra bits lie in pinned host memory, where
 * scruple_tensor_alloc puts them too. A CUDA engine steps such a tensor piece by piece, by copies that run beside
 * the stream, to the same bits; look at what a step left there after scruple_engine_synchronize. For it the
 * engine takes SCRUPLE_HOST_RING_BYTES of device memory with the first such plane or step; a stream that is being
 * captured is refused. Other engines see no difference. */
#define SCRUPLE_HOST_STATE 1u
#define SCRUPLE_HOST_RING_BYTES ((int64_t)512 << 20)

/* Fills in format and rounding of every array that the tensor's optimizer has, optional slots too, by a
 * recipe's name; scruple_tensor_array says which are used. A slot that the hyperparameters ask to be exact
 * (amsgrad's second moments, those of a centered mean square) gets fp32 in every recipe. tensor->optimizer and
 * tensor->size must be set, and planes that the library owns freed. Arrays may be changed one by one afterwards, as below or by hand. */
SCRUPLE_API scruple_status scruple_tensor_use(scruple_tensor* tensor, const char* recipe);
/* A format, by its name, in place of the recipe's; planes that the library owns must be freed. `which`: "weights";
 * "moments", every used slot that the format can hold, or "second moments", those that are never negative; one used
 * slot, by its name; "gradient". A slot that must be exact stays in fp32. Where the format can hold none of the others,
 * the first gets it all the same: scruple_tensor_check then says what would fit. Weights that become scaled integers (int8
 * to int12) are rounded stochastically. Other roundings stay where the new format can round so, and else become nearest. */
SCRUPLE_API scruple_status scruple_tensor_set_format(scruple_tensor* tensor, const char* which,
                                                     const char* format);
/* A rounding, by its name. `which`: "" or NULL, the weights and every used slot that can round so; "weights";
 * "moments", every used slot that can, of which there must be one; one used slot, by its name. fp32 rounds nothing,
 * whatever is said of it. */
SCRUPLE_API scruple_status scruple_tensor_set_rounding(scruple_tensor* tensor, const char* which,
                                                       const char* rounding);
/* What scruple_tensor_alloc checks of formats and roundings, of all that is used; of the gradient where it has a
 * format. */
SCRUPLE_API scruple_status scruple_tensor_check(const scruple_tensor* tensor);
/* What `array` holds: its name ("weight", "exp_avg", "gradient") and its role in a step; *used is 0 for a slot that the
 * optimizer's hyperparameters do not ask for. Any of the outputs may be NULL. */
SCRUPLE_API scruple_status scruple_tensor_array(const scruple_tensor* tensor, int array, const char** name,
                                                int* role, int* used);
/* Whether the codes (`aux` 0) or the aux plane (1) of `array` lie in host memory, by tensor->host. */
SCRUPLE_API int scruple_tensor_on_host(const scruple_tensor* tensor, int array, int aux);
/* Allocates, zeroes and then owns the planes that are still NULL of the arrays in `mask` (bit i: arrays[i];
 * SCRUPLE_STATE: all but the gradient); slots whose codes it allocates get their initial value. */
SCRUPLE_API scruple_status scruple_tensor_alloc(scruple_engine* engine, scruple_tensor* tensor,
                                                uint32_t mask);
SCRUPLE_API void scruple_tensor_free(scruple_engine* engine, scruple_tensor* tensor);
/* Writes the initial value of every slot, for memory that the caller owns. */
SCRUPLE_API scruple_status scruple_tensor_reset(scruple_engine* engine, const scruple_tensor* tensor);
/* A view of `size` elements from `first` in the same memory and with the same random numbers. `first` must be
 * a multiple of 128, and so must `size` unless the view reaches the tensor's end: no group is cut. */
SCRUPLE_API scruple_status scruple_tensor_view(const scruple_tensor* tensor, int64_t first, int64_t size,
                                               scruple_tensor* out);
/* Every plane to and from fp32; `values` may not overlap the planes, and may lie in host memory or in the
 * engine's. Encoding draws its coins from the tensor's step. A gradient that fp16 cannot hold becomes infinite. */
SCRUPLE_API scruple_status scruple_encode(scruple_engine* engine, const scruple_tensor* tensor, int array,
                                          const float* values);
SCRUPLE_API scruple_status scruple_decode(scruple_engine* engine, const scruple_tensor* tensor, int array,
                                          float* values);
/* scruple_decode to values of another type: those of the format fp32, bf16 or fp16, to nearest with ties to even. What
 * fp16 cannot hold becomes infinite. On a GPU it is one kernel that needs no memory of the engine's. */
SCRUPLE_API scruple_status scruple_decode_as(scruple_engine* engine, const scruple_tensor* tensor, int array,
                                             const scruple_format* format, void* values);

/* ---- The step ---- */

/* Every gradient is multiplied by multiplier * clip / loss_scale, in fp32 and in this order. */
typedef struct scruple_step_options {
  size_t struct_size; /* sizeof(scruple_step_options): lets this struct grow */
  float multiplier;
  /* In the engine's memory, read when the step runs; NULL: no flag, 1, 1, 0. */
  const float* found_inf;  /* where not 0, the call writes nothing */
  const float* clip;       /* such as scruple_measure writes */
  const float* loss_scale; /* such as the first field of a scruple_scaler */
  const int64_t* steps;    /* added to every tensor's step: the steps taken since the table was made; the sum
                              must stay below 2^32 */
  /* Above 1: these gradients are number `part` (from 0) of `parts` that make one step. The moments decay with
   * the first, the weight moves with the last and is not touched before. Only for optimizers that can, with
   * moments in fp32 (docs/gradients.md); the mean is taken by a multiplier of 1 / parts. */
  int32_t part, parts;
} scruple_step_options;

#define SCRUPLE_STEP_OPTIONS_INIT \
  { sizeof(scruple_step_options), 1.0f, NULL, NULL, NULL, NULL, 0, 1 }

/* One optimizer step of all tensors. `options` NULL: the defaults. Planes that the step writes may not
 * overlap. A NaN in a gradient is not an error: it makes that weight NaN, visibly, and its moments 0
 * (docs/formats.md); pass found_inf from scruple_measure to skip such a step. */
SCRUPLE_API scruple_status scruple_step(scruple_engine* engine, const scruple_tensor* tensors, int64_t count,
                                        const scruple_step_options* options);

/* ---- Gradients ---- */

/* Points the gradient of tensors[i] at the memory of item(objects, i), a tensor of a framework that shows its own
 * by DLPack's exchange table, version 1; nothing is copied. Returns for how many it did: it ends at the first
 * that is not one run of as many elements, in the format that this gradient has already (fp32, bf16 or fp16).
 * From Python, `objects` is a tuple and `item` PyTuple_GetItem. That wants the GIL held, and a tensor that cannot
 * be shown leaves an exception set. */
typedef void* (*scruple_item_function)(void* objects, ptrdiff_t index);
SCRUPLE_API int64_t scruple_borrow_gradients(scruple_tensor* tensors, int64_t count, void* objects,
                                             scruple_item_function item, const void* exchange);

/* The 2-norm of all gradients as stored, in double, by a fixed reduction tree, handed to the host; *found_inf
 * is 1 if any is not finite, else 0. Either output may be NULL. Where `steps` is in use and gradients are
 * dithered, take scruple_measure, which knows them. */
SCRUPLE_API scruple_status scruple_norm(scruple_engine* engine, const scruple_tensor* tensors, int64_t count,
                                        double* norm, float* found_inf);
/* min(1, max_norm / (norm + 1e-6)), as torch clips; 1 where norm is not finite or max_norm not above 0. */
SCRUPLE_API float scruple_clip_factor(double norm, double max_norm);

/* All pointers in the engine's memory; any may be NULL. */
typedef struct scruple_measure_options {
  size_t struct_size;
  double max_norm;         /* what `clip` keeps the norm under; 0: no limit */
  const float* loss_scale; /* the gradients are this many times too large; NULL: 1 */
  const int64_t* steps;    /* as in scruple_step_options: dithered accumulators need it */
  double* norm;            /* out: the norm over loss_scale */
  float* found_inf;        /* out: 1 if any gradient is not finite, else 0 */
  float* clip;             /* out: scruple_clip_factor(*norm, max_norm) */
  /* For gradients that are measured piece by piece: the squares so far, to which these are added. */
  const double* sum_before;
  double* sum; /* out: the sum of squares, not divided by loss_scale; may be sum_before */
  /* AdaGC (2502.11034) for the gradients of this table as one: *clip is at most adagc * *gamma / *norm. */
  double adagc;
  double* gamma; /* in and out: the moving average of the clipped norm; 0: no history yet. NULL: no AdaGC */
  /* Where it is not 0, what is measured counts as not finite, whatever it is; NULL: 0. */
  const float* skip;
} scruple_measure_options;

#define SCRUPLE_MEASURE_OPTIONS_INIT \
  { sizeof(scruple_measure_options), 0.0, NULL, NULL, NULL, NULL, NULL, NULL, NULL, 0.0, NULL, NULL }

/* What scruple_norm computes, left in the engine's memory for scruple_step to read: no trip to the host. */
SCRUPLE_API scruple_status scruple_measure(scruple_engine* engine, const scruple_tensor* tensors,
                                           int64_t count, const scruple_measure_options* options);
/* tensors[i]'s gradient += multiplier * incoming[i]. With folds == 0 it is overwritten, so clearing is
 * optional. The caller adds 1 to `folds` after each call. `steps` as in scruple_step_options, or NULL. */
SCRUPLE_API scruple_status scruple_fold(scruple_engine* engine, const scruple_tensor* tensors,
                                        const scruple_array* incoming, int64_t count, float multiplier,
                                        const int64_t* steps);
/* Zeroes the gradient arrays. The caller sets `folds` to 0. */
SCRUPLE_API scruple_status scruple_clear(scruple_engine* engine, const scruple_tensor* tensors,
                                         int64_t count);

/* Loss scaling (Micikevicius et al., 1710.03740, section 3.2). The struct is its whole state: save it,
 * restore it. */
typedef struct scruple_scaler {
  float scale;
  float growth;  /* factor after `interval` clean steps; 1: static */
  float backoff; /* factor after an overflow; 1: static */
  int32_t interval;
  int32_t clean; /* clean steps since the last change, below interval */
} scruple_scaler;

SCRUPLE_API scruple_scaler
scruple_scaler_dynamic(void); /* 2^16, x2 after 2,000 clean steps, x0.5 on overflow */
SCRUPLE_API scruple_status scruple_scaler_static(float scale, scruple_scaler* out);
/* Call after each step with the flag that decided it. */
SCRUPLE_API scruple_status scruple_scaler_update(scruple_scaler* scaler, float found_inf);
/* The end of a step whose flag stays in the engine's memory, and so do these: updates *scaler as above, and
 * adds 1 to *steps unless *found_inf says that the step was skipped. Any may be NULL. A scaler that was
 * copied there must be one that scruple_scaler_update accepts. */
SCRUPLE_API scruple_status scruple_advance(scruple_engine* engine, const float* found_inf,
                                           scruple_scaler* scaler, int64_t* steps);

/* ---- Gradient policies ---- */

/* A sink takes gradients as backward produces them, whole tensors or pieces, and takes the step: clipping,
 * loss scaling and accumulation over micro-batches included, with nothing read back by the host. What becomes
 * of a gradient on the way is the policy. docs/gradients.md compares them. */
typedef enum scruple_policy {
  SCRUPLE_STORED = 0,    /* kept from the first piece to the next step, in memory that the sink keeps */
  SCRUPLE_RELEASED = 1,  /* stepped on arrival and never kept: no memory; no global norm */
  SCRUPLE_COMPRESSED = 2 /* as stored, but with one micro-batch memory is taken at a tensor's first piece and
                            given back after the step */
} scruple_policy;

/* How several micro-batches make one step. */
typedef enum scruple_accumulation {
  SCRUPLE_ACCUMULATE_GRADIENTS = 0, /* stored, compressed: the mean gradient */
  SCRUPLE_ACCUMULATE_MOMENTUM = 1,  /* released; sgd and sgdw with momentum: the same step as the mean's */
  SCRUPLE_ACCUMULATE_ADAMA = 2 /* released; adam and adamw, by AdamA (2305.19982): the first moment is the
                                       mean's, the second up to micro_batches times smaller */
} scruple_accumulation;

/* Where accumulators come from. `free` is called when the work that uses the memory has been queued, not when
 * it is done: with a CUDA engine the memory must be ordered by the engine's stream. NULL from `alloc`: out of
 * memory. Neither may call the sink. */
typedef struct scruple_memory {
  void* context;
  void* (*alloc)(void* context, int64_t bytes);
  void (*free)(void* context, void* memory, int64_t bytes);
} scruple_memory;

/* Called in the last scruple_sink_end of a step: adds to *sum, the squares of this process' gradients in the
 * engine's memory, those of the others, in the engine's order of work. Not 0: it failed, and the step is not
 * taken. It is called in every step, also where no gradient came, so that no process waits in vain. */
typedef struct scruple_reduce {
  void* context;
  int (*add)(void* context, double* sum);
} scruple_reduce;

typedef struct scruple_sink_options {
  size_t struct_size;
  scruple_policy policy;
  scruple_accumulation accumulation;
  int32_t micro_batches; /* scruple_sink_end calls to a step */
  double max_norm;       /* stored, compressed: limit of the global norm; 0: none */
  double tensor_norm;    /* released: limit of every tensor's own norm; 0: none */
  double adagc;          /* released: lambda of AdaGC, such as 1.05; 0: off. With both, the smaller factor */
  const scruple_scaler* scaler; /* copied; NULL: no loss scaling */
  const double* adagc_norms;    /* copied, one for each tensor: AdaGC goes on from here; NULL: afresh */
  scruple_memory memory;        /* all NULL: the engine's own */
  const float* loss_scale; /* in the engine's memory, read when the work runs: gradients are of the loss times
                              this, and the caller decides it, by scruple_sink_found_inf; NULL: scaler's */
  scruple_reduce reduce;   /* stored, compressed: where other processes hold parts of the gradient */
  /* Released: a tensor whose gradient is not finite does not move in this step, nor does one that comes while
   * *skip is not 0, such as after a loss that is not finite. In the engine's memory, read when the work runs.
   * Of micro-batches the first that is not finite is the tensor's last in this step; what came before it stays in
   * the moments. NULL: gradients are only looked at where clipping or loss scaling measures them. */
  const float* skip;
} scruple_sink_options;

#define SCRUPLE_SINK_OPTIONS_INIT                                                                       \
  {                                                                                                     \
    sizeof(scruple_sink_options), SCRUPLE_STORED, SCRUPLE_ACCUMULATE_GRADIENTS, 1, 0.0, 0.0, 0.0, NULL, \
        NULL, {NULL, NULL, NULL}, NULL, {NULL, NULL}, NULL                                              \
  }

/* A part of one tensor's gradient: `size` elements from `first`, bounded as in scruple_tensor_view. Any
 * format that a step can read, undithered. */
typedef struct scruple_piece {
  int64_t tensor, first, size;
  scruple_array gradient;
} scruple_piece;

typedef struct scruple_sink_report {
  double norm;     /* of the last step's gradient over the loss scale; released: NaN, it is never known */
  float found_inf; /* 1: the last step was skipped (released: of a tensor) */
  float clip;      /* the last step's factor; released: 1, each tensor has its own */
  int64_t steps;   /* taken; released: without a skipped tensor */
  int64_t skipped; /* steps skipped; released: tensors skipped, over all steps */
  scruple_scaler scaler;
} scruple_sink_report;

typedef struct scruple_sink scruple_sink;

/* The table is copied; its planes, its optimizers and the engine must outlive the sink. step is that of the
 * first step to be taken; the sink counts on from it, for each tensor. Stored and compressed:
 * arrays[SCRUPLE_GRADIENT] says how gradients are kept (such as root8 with SCRUPLE_STOCHASTIC, or fp32), planes
 * that are set there are used and the others allocated. Released: that array is ignored. */
SCRUPLE_API scruple_status scruple_sink_create(scruple_engine* engine, const scruple_tensor* tensors,
                                               int64_t count, const scruple_sink_options* options,
                                               scruple_sink** out);
SCRUPLE_API void scruple_sink_destroy(scruple_sink* sink);
/* 1: a tensor that comes in pieces must be shown whole with scruple_sink_measure, in the order of `first`,
 * before its first piece is added: released with clipping or loss scaling. A tensor added in one piece need
 * not be. 2: released with `skip` alone. Then a tensor may be shown so. Pieces that are added without having
 * been shown are judged as they come: from the first that is not finite on, the tensor stays as it is. */
SCRUPLE_API int scruple_sink_measures(const scruple_sink* sink);
SCRUPLE_API scruple_status scruple_sink_measure(scruple_sink* sink, const scruple_piece* pieces,
                                                int64_t count);
/* Takes these pieces of the micro-batch's gradient, of the loss times *scruple_sink_loss_scale. Every element
 * of a tensor comes once in a micro-batch, in any order of pieces; a tensor that gets none in a whole step is
 * left alone. The pieces' memory is read in the engine's order of work, as by scruple_fold. */
SCRUPLE_API scruple_status scruple_sink_add(scruple_sink* sink, const scruple_piece* pieces, int64_t count);
/* After the backward pass of each micro-batch; the last of a step takes it. Where a tensor has not come
 * whole, says so and changes nothing: add the rest, and call it again. */
SCRUPLE_API scruple_status scruple_sink_end(scruple_sink* sink);
/* What the host may want to know; waits for the engine. */
SCRUPLE_API scruple_status scruple_sink_read(scruple_sink* sink, scruple_sink_report* out);
/* For a checkpoint, one value for each tensor: the step about to be taken, and what AdaGC remembers. Either
 * may be NULL. Waits for the engine. */
SCRUPLE_API scruple_status scruple_sink_read_tensors(scruple_sink* sink, int64_t* steps, double* adagc_norms);
/* What to multiply the loss by, in the engine's memory; 1 without a scaler. */
SCRUPLE_API const float* scruple_sink_loss_scale(const scruple_sink* sink);
/* Where the last step's flag stands in the engine's memory, as found_inf in scruple_sink_report. */
SCRUPLE_API const float* scruple_sink_found_inf(const scruple_sink* sink);

/* ---- Checkpoints ---- */

/* A checkpoint is a folder of safetensors files with a manifest; docs/checkpoint.md is the specification. The
 * structs below say what is in one: given to scruple_checkpoint_begin, and handed out by
 * scruple_checkpoint_manifest. Names are UTF-8 without a zero byte. "out": filled in when reading, ignored when
 * writing. */

typedef struct scruple_checkpoint_plane {
  const char* kind;  /* "codes", then "scale" or "extra" where the format has one */
  const char* dtype; /* as safetensors spell it */
  const int64_t* shape;
  int64_t dimensions, bytes;
} scruple_checkpoint_plane;

typedef struct scruple_checkpoint_array {
  const char* name;              /* "weight" first, then the slots: "exp_avg" */
  const char *format, *rounding; /* names of the registry: "bf16+8", "nearest" */
  /* out: 1 where this library has the format, which can round so and be a weight where this is one, and the planes
   * are those that it has of such a tensor. Only then may they be read as that format. */
  int64_t fits;
  const scruple_checkpoint_plane* planes; /* out: when writing they follow from the format */
  int64_t plane_count;                    /* out */
} scruple_checkpoint_array;

typedef struct scruple_checkpoint_tensor {
  const char* name;
  const int64_t* shape;
  int64_t dimensions;
  int64_t group; /* index into groups */
  int64_t step;  /* about to be taken */
  int64_t id;
  double adagc_norm; /* what AdaGC remembers; 0: nothing */
  const scruple_checkpoint_array* arrays;
  int64_t array_count;
} scruple_checkpoint_tensor;

typedef struct scruple_checkpoint_hyper {
  const char* name;
  double value;
} scruple_checkpoint_hyper;

/* Tensors that share an optimizer and its hyperparameters. */
typedef struct scruple_checkpoint_group {
  const char* optimizer;
  uint64_t seed;
  const scruple_checkpoint_hyper* hypers;
  int64_t hyper_count;
} scruple_checkpoint_group;

/* The fields of scruple_scaler, in double. */
typedef struct scruple_checkpoint_scale {
  double scale; /* 0: there was none */
  double growth, backoff;
  int64_t interval, clean;
} scruple_checkpoint_scale;

/* What the writer needs to go on, or the user wants to keep. */
typedef struct scruple_checkpoint_note {
  const char* name;
  const char* text;
  int64_t bytes; /* of the text, which may hold zeros */
} scruple_checkpoint_note;

typedef struct scruple_checkpoint_contents {
  const char* folder;  /* out: where it is; of a run, its last checkpoint */
  const char* library; /* out: the version that wrote it */
  const char* recipe;  /* the name it was made with; the arrays' own formats rule */
  int64_t step;        /* taken */
  const scruple_checkpoint_group* groups;
  int64_t group_count;
  scruple_checkpoint_scale loss_scale;
  const scruple_checkpoint_note* notes;
  int64_t note_count;
  const scruple_checkpoint_tensor* tensors;
  int64_t tensor_count;
} scruple_checkpoint_contents;

/* One that is open. A handle is for one thread at a time. */
typedef struct scruple_checkpoint scruple_checkpoint;

/* Opens the checkpoint in the folder `path`, or the last one of the run there, and checks whatever can be checked
 * without reading planes. SCRUPLE_INVALID: there is none, or a newer Scruple wrote it. */
SCRUPLE_API scruple_status scruple_checkpoint_open(const char* path, scruple_checkpoint** out);
SCRUPLE_API void scruple_checkpoint_close(scruple_checkpoint* checkpoint);
/* What is in it; lives as long as the handle. */
SCRUPLE_API const scruple_checkpoint_contents* scruple_checkpoint_manifest(
    const scruple_checkpoint* checkpoint);
/* Compares the checksums of all planes of one tensor; this reads them all. */
SCRUPLE_API scruple_status scruple_checkpoint_verify(scruple_checkpoint* checkpoint, int64_t tensor);
/* Copies `bytes` bytes of a plane (an index into `planes`), from byte `first` on, to host memory. Checksums are
 * compared where a plane is read from its first byte on, call after call, in the calls that reach the end of what
 * they are of; a part that is read alone is not checked. */
SCRUPLE_API scruple_status scruple_checkpoint_read(scruple_checkpoint* checkpoint, int64_t tensor,
                                                   int64_t array, int64_t plane, int64_t first, void* to,
                                                   int64_t bytes);

/* One that is being written. It appears under its name with scruple_checkpoint_commit, complete and on the disk, and
 * replaces one of that name in one step; until then an older one is there as it was. */
typedef struct scruple_checkpoint_writer scruple_checkpoint_writer;

/* Checks all of `contents`, which is copied, and begins. `files`: how many the planes are spread over, 1 to 256. A
 * folder of that name that holds anything but a checkpoint is refused. */
SCRUPLE_API scruple_status scruple_checkpoint_begin(const char* path,
                                                    const scruple_checkpoint_contents* contents,
                                                    int64_t files, scruple_checkpoint_writer** out);
/* The next bytes of a plane (0: codes; 1: its scales or extra bits), from host memory. Planes may come in any order, each
 * whole or in parts; scruple_format_bytes says how long they are. */
SCRUPLE_API scruple_status scruple_checkpoint_write(scruple_checkpoint_writer* writer, int64_t tensor,
                                                    int64_t array, int64_t plane, const void* from,
                                                    int64_t bytes);
/* Refuses while a plane lacks bytes. Where anything fails, what was there is as it was; abandon it then. */
SCRUPLE_API scruple_status scruple_checkpoint_commit(scruple_checkpoint_writer* writer);
/* Frees the writer, and removes what it has begun unless that is committed. */
SCRUPLE_API void scruple_checkpoint_abandon(scruple_checkpoint_writer* writer);

#ifdef __cplusplus
}
#endif
#endif
