// The CUDA engine: the formulas of formats/ and optim/ compiled for the device.
#pragma once

#include <memory>
#include <string>

#include "engine/engine.h"

namespace scruple {

// The current device in words, or why this machine has none that could be used.
EngineInfo cuda_info();

// `device`: -1 for the current one.
std::unique_ptr<scruple_engine> make_cuda_engine(int device);

}  // namespace scruple
