# One unit per instruction set: engine/unit.cpp compiled with the flags of each, in a namespace of its own.

# The same bits everywhere: no contraction that is not written. Without errno and traps, square roots vectorise.
set(SCRUPLE_NUMERIC_FLAGS -ffp-contract=off -fno-math-errno -fno-trapping-math)

function(scruple_add_unit target name)
  add_library(unit_${name} OBJECT ${PROJECT_SOURCE_DIR}/engine/unit.cpp)
  target_include_directories(unit_${name} PRIVATE ${PROJECT_SOURCE_DIR})
  target_compile_definitions(unit_${name} PRIVATE SCRUPLE_UNIT=${name})
  target_compile_options(unit_${name} PRIVATE ${SCRUPLE_NUMERIC_FLAGS} ${ARGN})
  target_sources(${target} PRIVATE $<TARGET_OBJECTS:unit_${name}>)
endfunction()

function(scruple_add_units target)
  if(CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64")
    scruple_add_unit(${target} baseline -march=x86-64)
    # Exactly what engine/dispatch.cpp asks the processor for, and no more.
    set(v3 -mavx2 -mfma -mbmi -mbmi2)
    scruple_add_unit(${target} x86_64_v3 ${v3})
    scruple_add_unit(${target} x86_64_v4 ${v3} -mavx512f -mavx512bw -mavx512cd -mavx512dq -mavx512vl
                     -mprefer-vector-width=512)
  elseif(CMAKE_SYSTEM_PROCESSOR MATCHES "aarch64|arm64")
    # NEON belongs to every aarch64, so the plain unit is the same code with vectorisation off
    # and no fused loops: a second opinion.
    scruple_add_unit(${target} baseline -fno-tree-vectorize -fno-tree-slp-vectorize -DSCRUPLE_PLAIN)
    scruple_add_unit(${target} neon)
  else()
    scruple_add_unit(${target} baseline)
  endif()
endfunction()
