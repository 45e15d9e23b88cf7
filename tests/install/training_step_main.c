/* Takes three steps by the training step of docs/link.md, the second of which meets an infinite gradient. */
#include <math.h>
#include <stdio.h>

#include "training_step.c"

int main(void) {
  float gradient[4] = {65536, 0, 0, 0};
  device_state state = {0};
  scruple_engine* engine;
  scruple_optimizer* sgd;
  scruple_tensor t = {0};
  float weights[4];
  int step, skipped = 0;
  state.lr = 0.5, state.scaler = scruple_scaler_dynamic();
  if (scruple_engine_create("cpu", 1, &engine) || scruple_optimizer_create("sgd", &sgd)) goto failed;
  if (scruple_optimizer_read_lr(sgd, &state.lr) || scruple_engine_set_stream(engine, NULL)) goto failed;
  t.optimizer = sgd, t.size = 4, t.step = 1;
  if (scruple_tensor_use(&t, "fp32") || scruple_tensor_alloc(engine, &t, SCRUPLE_STATE)) goto failed;
  t.arrays[SCRUPLE_GRADIENT].codes = gradient;
  for (step = 1; step <= 3; ++step) {
    gradient[1] = step == 2 ? INFINITY : 0;
    if (training_step(engine, &t, 1, &state)) goto failed;
    skipped += state.found_inf != 0;
  }
  if (scruple_decode(engine, &t, SCRUPLE_WEIGHT, weights)) goto failed;
  printf("%d steps, %d skipped, loss scale %g, weight %.3f\n", (int)state.steps, skipped, state.scaler.scale,
         weights[0]);
  scruple_tensor_free(engine, &t);
  scruple_optimizer_destroy(sgd);
  scruple_engine_destroy(engine);
  return 0;
failed:
  fprintf(stderr, "%s\n", scruple_last_error());
  return 1;
}
