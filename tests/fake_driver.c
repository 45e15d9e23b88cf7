/* Stands in for NVIDIA's libcuda.so.1: a driver of the version SCRUPLE_FAKE_DRIVER whose cuInit fails with the error
   SCRUPLE_FAKE_ERROR. Only what the CUDA runtime asks before that. */
#include <stdlib.h>
#include <string.h>

static int number(const char* name) {
  const char* text = getenv(name);
  return text == NULL ? 0 : atoi(text);
}

int cuInit(unsigned flags);
int cuDriverGetVersion(int* version);
int cuGetProcAddress(const char* name, void** function, int version, unsigned long long flags);
int cuGetProcAddress_v2(const char* name, void** function, int version, unsigned long long flags,
                        int* status);

int cuInit(unsigned flags) {
  (void)flags;
  return number("SCRUPLE_FAKE_ERROR");
}
int cuDriverGetVersion(int* version) {
  *version = number("SCRUPLE_FAKE_DRIVER");
  return 0;
}
int cuGetProcAddress_v2(const char* name, void** function, int version, unsigned long long flags,
                        int* status) {
  const struct {
    const char* name;
    void* function;
  } known[] = {{"cuInit", (void*)(size_t)cuInit},
               {"cuDriverGetVersion", (void*)(size_t)cuDriverGetVersion},
               {"cuGetProcAddress", (void*)(size_t)cuGetProcAddress_v2}};
  (void)version;
  (void)flags;
  *function = NULL;
  for (size_t i = 0; i < sizeof known / sizeof *known; ++i)
    if (strcmp(name, known[i].name) == 0) *function = known[i].function;
  if (status != NULL) *status = *function == NULL;
  return *function == NULL ? 500 : 0; /* CUDA_ERROR_NOT_FOUND */
}
int cuGetProcAddress(const char* name, void** function, int version, unsigned long long flags) {
  return cuGetProcAddress_v2(name, function, version, flags, NULL);
}
