/* scruple.h read by a C99 compiler, and a step taken from C: the ABI needs no C++. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "scruple/scruple.h"

static int failures = 0;

static void check(int condition, const char* what) {
  if (condition) return;
  printf("%s: %s\n", what, scruple_last_error());
  ++failures;
}

/* Descends w^2 / 2 from 3 with the given recipe; returns the largest |w| left. */
static float descend(scruple_engine* engine, const char* rule, const char* recipe, int steps) {
  enum { kSize = 1000 };
  static float values[kSize];
  scruple_optimizer* optimizer = NULL;
  scruple_tensor tensor = {0};
  scruple_step_options options = SCRUPLE_STEP_OPTIONS_INIT;
  float found_inf = 1, largest = 0;
  double norm = 0;
  int i, t;

  check(scruple_optimizer_create(rule, &optimizer) == SCRUPLE_OK, "create an optimizer");
  check(scruple_optimizer_set(optimizer, "lr", 0.1) == SCRUPLE_OK, "set lr");
  tensor.optimizer = optimizer;
  tensor.size = kSize;
  tensor.step = 1;
  check(scruple_tensor_use(&tensor, recipe) == SCRUPLE_OK, "choose a recipe");
  check(scruple_tensor_alloc(engine, &tensor, ~0u) == SCRUPLE_OK, "allocate");
  for (i = 0; i < kSize; ++i) values[i] = 3.0f;
  check(scruple_encode(engine, &tensor, SCRUPLE_WEIGHT, values) == SCRUPLE_OK, "encode");
  for (t = 1; t <= steps; ++t) {
    tensor.step = t;
    check(scruple_decode(engine, &tensor, SCRUPLE_WEIGHT, values) == SCRUPLE_OK, "decode");
    check(scruple_encode(engine, &tensor, SCRUPLE_GRADIENT, values) == SCRUPLE_OK, "encode the gradient");
    check(scruple_norm(engine, &tensor, 1, &norm, &found_inf) == SCRUPLE_OK, "norm");
    options.multiplier = scruple_clip_factor(norm, 1000.0);
    options.found_inf = &found_inf;
    check(scruple_step(engine, &tensor, 1, &options) == SCRUPLE_OK, "step");
  }
  check(scruple_decode(engine, &tensor, SCRUPLE_WEIGHT, values) == SCRUPLE_OK, "decode");
  for (i = 0; i < kSize; ++i)
    if (fabsf(values[i]) > largest) largest = fabsf(values[i]);
  scruple_tensor_free(engine, &tensor);
  scruple_optimizer_destroy(optimizer);
  return largest;
}

int main(void) {
  scruple_engine* engine = NULL;
  scruple_scaler scaler = scruple_scaler_dynamic();
  check(scruple_abi_version() == SCRUPLE_ABI_VERSION, "the library has the header's ABI version");
  check(scruple_engine_create("cpu", 1, &engine) == SCRUPLE_OK, "create an engine");
  check(descend(engine, "adamw", "scruple", 100) < 0.5f, "adamw in the scruple recipe descends");
  check(descend(engine, "sgd", "fp32", 100) < 0.1f, "sgd in fp32 descends");
  check(scruple_scaler_update(&scaler, 1.0f) == SCRUPLE_OK && scaler.scale == 32768.0f,
        "the scaler backs off");
  check(scruple_step(engine, NULL, 1, NULL) == SCRUPLE_INVALID && scruple_last_error()[0] != 0,
        "a null table is refused");
  scruple_engine_destroy(engine);
  return failures == 0 ? EXIT_SUCCESS : EXIT_FAILURE;
}
