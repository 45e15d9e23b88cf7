// The CPU engine: one unit of leaf loops per instruction set, chosen when the engine is made.
#pragma once

#include <memory>
#include <vector>

#include "engine/engine.h"
#include "engine/unit.h"

namespace scruple {

struct CpuUnit {
  const char* name;
  const char* doc;
  const Unit* unit;
  bool (*available)();
};

// The units compiled into this library, the plainest first.
const std::vector<CpuUnit>& cpu_units();

std::unique_ptr<scruple_engine> make_cpu_engine(const CpuUnit& unit, int threads);

}  // namespace scruple
