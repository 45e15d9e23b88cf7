/* A checkpoint written and read back from C99: scruple_checkpoint_* as a front end calls them.
 * usage: checkpoint_c FOLDER */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "scruple/scruple.h"

static int failures = 0;

static void check(int condition, const char* what) {
  if (condition) return;
  printf("%s: %s\n", what, scruple_last_error());
  ++failures;
}

enum { kSize = 1000, kPart = 512 };
static float values[kSize], back[kSize];

static void save(const char* path) {
  const int64_t shape[] = {10, kSize / 10};
  const scruple_checkpoint_array weight = {"weight", "fp32", "nearest", 0, NULL, 0};
  const scruple_checkpoint_tensor tensor = {"layer.weight", shape, 2, 0, 4, 7, 0.0, &weight, 1};
  const scruple_checkpoint_hyper lr = {"lr", 0.1};
  const scruple_checkpoint_group group = {"sgd", 42, &lr, 1};
  const scruple_checkpoint_note note = {"epoch", "3", 1};
  scruple_checkpoint_contents contents = {0};
  scruple_checkpoint_writer* writer = NULL;
  size_t at;

  contents.recipe = "fp32";
  contents.step = 3;
  contents.groups = &group;
  contents.group_count = 1;
  contents.notes = &note;
  contents.note_count = 1;
  contents.tensors = &tensor;
  contents.tensor_count = 1;
  check(scruple_checkpoint_begin(path, &contents, 1, &writer) == SCRUPLE_OK, "begin");
  for (at = 0; at < sizeof values; at += kPart) {
    const size_t part = sizeof values - at < kPart ? sizeof values - at : kPart;
    check(scruple_checkpoint_write(writer, 0, 0, 0, (const char*)values + at, (int64_t)part) == SCRUPLE_OK,
          "write");
  }
  check(scruple_checkpoint_commit(writer) == SCRUPLE_OK, "commit");
  scruple_checkpoint_abandon(writer);
}

static void load(const char* path) {
  scruple_checkpoint* checkpoint = NULL;
  const scruple_checkpoint_contents* found;
  check(scruple_checkpoint_open(path, &checkpoint) == SCRUPLE_OK, "open");
  found = scruple_checkpoint_manifest(checkpoint);
  if (found == NULL) return;
  check(found->step == 3 && found->tensor_count == 1 && found->note_count == 1, "what is in it");
  check(strcmp(found->tensors[0].name, "layer.weight") == 0 && found->tensors[0].shape[1] == 100,
        "the tensor");
  check(found->tensors[0].arrays[0].fits && found->tensors[0].arrays[0].planes[0].bytes == sizeof values,
        "the plane");
  check(found->groups[0].seed == 42 && found->groups[0].hypers[0].value == 0.1, "the group");
  check(scruple_checkpoint_verify(checkpoint, 0) == SCRUPLE_OK, "verify");
  check(scruple_checkpoint_read(checkpoint, 0, 0, 0, 0, back, sizeof back) == SCRUPLE_OK, "read");
  check(memcmp(values, back, sizeof back) == 0, "the values come back");
  scruple_checkpoint_close(checkpoint);
}

int main(int count, char** arguments) {
  int i;
  if (count != 2) return EXIT_FAILURE;
  for (i = 0; i < kSize; ++i) values[i] = (float)i / 7;
  save(arguments[1]);
  load(arguments[1]);
  save(arguments[1]); /* replaces it */
  load(arguments[1]);
  check(scruple_checkpoint_open("no such folder", NULL) == SCRUPLE_INVALID && scruple_last_error()[0] != 0,
        "a null handle is refused");
  scruple_checkpoint_close(NULL);
  scruple_checkpoint_abandon(NULL);
  return failures == 0 ? EXIT_SUCCESS : EXIT_FAILURE;
}
