// One of the engine's files of kernels, SCRUPLE_KERNELS, as C++.
#include "tests/emulator/cuda.h"

#include SCRUPLE_KERNELS
