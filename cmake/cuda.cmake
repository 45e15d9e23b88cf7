# The CUDA engine: the kernels of each optimizer are one object of their own, so that they build side by side.
set(SCRUPLE_CUDA AUTO CACHE STRING "Build the CUDA engine: ON, OFF, or AUTO (for the GPUs that are here)")
set_property(CACHE SCRUPLE_CUDA PROPERTY STRINGS AUTO ON OFF)
set(SCRUPLE_CUDA_OPTIMIZERS "" CACHE STRING
    "Optimizers (names of optim.def) with kernels of their own; the others run on the general one. Empty: all")

# The compute capabilities of the GPUs that are here, such as 90-real; those before Ampere are not served.
function(scruple_find_gpus result)
  find_program(SCRUPLE_NVIDIA_SMI nvidia-smi)
  mark_as_advanced(SCRUPLE_NVIDIA_SMI)
  set(found "")
  if(SCRUPLE_NVIDIA_SMI)
    execute_process(COMMAND ${SCRUPLE_NVIDIA_SMI} --query-gpu=compute_cap --format=csv,noheader
                    OUTPUT_VARIABLE said ERROR_QUIET)
    string(REGEX MATCHALL "[0-9]+\\.[0-9]" capabilities "${said}")
    foreach(capability IN LISTS capabilities)
      string(REPLACE "." "" architecture ${capability})
      if(architecture GREATER_EQUAL 80)
        list(APPEND found ${architecture}-real)
      endif()
    endforeach()
    list(REMOVE_DUPLICATES found)
  endif()
  set(${result} "${found}" PARENT_SCOPE)
endfunction()

set(SCRUPLE_HAS_CUDA 0)
if(NOT SCRUPLE_CUDA STREQUAL "OFF")
  find_package(CUDAToolkit 12.8 QUIET)  # the first with Blackwell; finds nvcc where PATH does not lead, too
  if(CUDAToolkit_FOUND)
    if(NOT DEFINED ENV{CUDACXX})
      set(ENV{CUDACXX} ${CUDAToolkit_NVCC_EXECUTABLE})
    endif()
    include(CheckLanguage)
    check_language(CUDA)  # whether it works with the host's compiler
  endif()
  if(CUDAToolkit_FOUND AND CMAKE_CUDA_COMPILER)
    if(NOT CMAKE_CUDA_ARCHITECTURES)
      if(SCRUPLE_CUDA STREQUAL "ON")
        # Ampere to Blackwell. A cubin runs on later GPUs of its major number (80 on 86, 87 and 89; 100 on 103), and
        # intermediate code for 100 on what has none: 110, and what comes later.
        set(CMAKE_CUDA_ARCHITECTURES 80-real 90-real 100 120-real)
      else()
        scruple_find_gpus(CMAKE_CUDA_ARCHITECTURES)
      endif()
    endif()
    if(CMAKE_CUDA_ARCHITECTURES)
      set(CMAKE_CUDA_ARCHITECTURES ${CMAKE_CUDA_ARCHITECTURES} CACHE STRING "GPU architectures" FORCE)
      enable_language(CUDA)
      if(NOT CMAKE_CUDA20_STANDARD_COMPILE_OPTION)  # CMake 3.25 does not know that this nvcc has it
        set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION -std=c++20)
        set(CMAKE_CUDA20_EXTENSION_COMPILE_OPTION -std=c++20)
      endif()
      set(SCRUPLE_HAS_CUDA 1)
    else()
      message(NOTICE "The CUDA engine is left out: there is a CUDA toolkit, but no GPU of Ampere or later here. "
                     "SCRUPLE_CUDA=ON (make build CUDA=ON) builds it for all of them in about 20 minutes on 2 cores, "
                     "CMAKE_CUDA_ARCHITECTURES=90 (make build ARCHITECTURES=90) for one in minutes.")
    endif()
  elseif(SCRUPLE_CUDA STREQUAL "ON")
    message(FATAL_ERROR "SCRUPLE_CUDA=ON, but no CUDA toolkit (12.8 or later) that works was found: "
                        "set CUDAToolkit_ROOT to one, or use SCRUPLE_CUDA=OFF")
  endif()
endif()
message(STATUS "CUDA engine: ${SCRUPLE_HAS_CUDA}")

# No contraction that is not written, as on the CPU, and IEEE arithmetic whatever CMAKE_CUDA_FLAGS says.
set(SCRUPLE_CUDA_FLAGS -fmad=false -ftz=false -prec-div=true -prec-sqrt=true --expt-relaxed-constexpr
                       -compress-mode=size)

function(scruple_add_cuda_object target name source)
  add_library(cuda_${name} OBJECT ${PROJECT_SOURCE_DIR}/${source})
  target_include_directories(cuda_${name} PRIVATE ${PROJECT_SOURCE_DIR})
  target_compile_definitions(cuda_${name} PRIVATE SCRUPLE_UNIT=device ${ARGN})
  target_compile_options(cuda_${name} PRIVATE ${SCRUPLE_CUDA_FLAGS})
  target_sources(${target} PRIVATE $<TARGET_OBJECTS:cuda_${name}>)
endfunction()

# The optimizers of optim.def, each of which has a file of kernels.
function(scruple_rules list)
  set(file ${PROJECT_SOURCE_DIR}/optim/optim.def)
  file(STRINGS ${file} rules REGEX "^SCRUPLE_OPTIMIZER")
  set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${file})
  list(TRANSFORM rules REPLACE ".*, ([A-Za-z]+)\\).*" "\\1")
  set(${list} ${rules} PARENT_SCOPE)
endfunction()

function(scruple_add_cuda target)
  target_compile_definitions(${target} PRIVATE SCRUPLE_HAS_CUDA=${SCRUPLE_HAS_CUDA})
  if(NOT SCRUPLE_HAS_CUDA)
    return()
  endif()
  target_sources(${target} PRIVATE engine/cuda.cpp)
  scruple_add_cuda_object(${target} any engine/cuda_any.cu)
  scruple_add_cuda_object(${target} gradient engine/cuda_gradient.cu)
  scruple_rules(rules)
  foreach(name IN LISTS SCRUPLE_CUDA_OPTIMIZERS)
    if(NOT name IN_LIST rules)
      message(FATAL_ERROR "SCRUPLE_CUDA_OPTIMIZERS: optim.def has no ${name}, but: ${rules}")
    endif()
  endforeach()
  set(rest "#include \"engine/cuda_table.h\"\n\nnamespace scruple {\n")
  foreach(rule IN LISTS rules)
    if(NOT SCRUPLE_CUDA_OPTIMIZERS OR rule IN_LIST SCRUPLE_CUDA_OPTIMIZERS)
      scruple_add_cuda_object(${target} ${rule} engine/cuda_step.cu SCRUPLE_RULE=${rule})
    else()
      string(APPEND rest "std::vector<StepKernel> step_kernels_${rule}() { return {}; }\n")
    endif()
  endforeach()
  file(CONFIGURE OUTPUT ${CMAKE_CURRENT_BINARY_DIR}/cuda_rest.cpp CONTENT "${rest}}  // namespace scruple\n" @ONLY)
  target_sources(${target} PRIVATE ${CMAKE_CURRENT_BINARY_DIR}/cuda_rest.cpp)
  # Static: it opens the driver when it is first asked, so the library loads where there is none.
  target_link_libraries(${target} PRIVATE CUDA::cudart_static)
endfunction()
