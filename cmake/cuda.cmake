# The CUDA engine: the kernels of each optimizer are one object of their own, so that they build side by side.
set(SCRUPLE_CUDA AUTO CACHE STRING "Build the CUDA engine: ON, OFF, or AUTO (if a toolkit is found)")
set_property(CACHE SCRUPLE_CUDA PROPERTY STRINGS AUTO ON OFF)

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
    # Ampere to Blackwell, and intermediate code for what comes later.
    if(NOT CMAKE_CUDA_ARCHITECTURES)
      set(CMAKE_CUDA_ARCHITECTURES 80-real 86-real 89-real 90-real 100 120)
    endif()
    set(CMAKE_CUDA_ARCHITECTURES ${CMAKE_CUDA_ARCHITECTURES} CACHE STRING "GPU architectures" FORCE)
    enable_language(CUDA)
    if(NOT CMAKE_CUDA20_STANDARD_COMPILE_OPTION)  # CMake 3.25 does not know that this nvcc has it
      set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION -std=c++20)
      set(CMAKE_CUDA20_EXTENSION_COMPILE_OPTION -std=c++20)
    endif()
    set(SCRUPLE_HAS_CUDA 1)
  elseif(SCRUPLE_CUDA STREQUAL "ON")
    message(FATAL_ERROR "SCRUPLE_CUDA=ON, but no CUDA toolkit (12.8 or later) that works was found: "
                        "set CUDAToolkit_ROOT to one, or use SCRUPLE_CUDA=OFF")
  endif()
endif()
message(STATUS "CUDA engine: ${SCRUPLE_HAS_CUDA}")

# No contraction that is not written, as on the CPU, and IEEE arithmetic whatever CMAKE_CUDA_FLAGS says.
set(SCRUPLE_CUDA_FLAGS -fmad=false -ftz=false -prec-div=true -prec-sqrt=true --expt-relaxed-constexpr)

function(scruple_add_cuda_object target name source)
  add_library(cuda_${name} OBJECT ${PROJECT_SOURCE_DIR}/${source})
  target_include_directories(cuda_${name} PRIVATE ${PROJECT_SOURCE_DIR})
  target_compile_definitions(cuda_${name} PRIVATE SCRUPLE_UNIT=device ${ARGN})
  target_compile_options(cuda_${name} PRIVATE ${SCRUPLE_CUDA_FLAGS})
  target_sources(${target} PRIVATE $<TARGET_OBJECTS:cuda_${name}>)
endfunction()

function(scruple_add_cuda target)
  target_compile_definitions(${target} PRIVATE SCRUPLE_HAS_CUDA=${SCRUPLE_HAS_CUDA})
  if(NOT SCRUPLE_HAS_CUDA)
    return()
  endif()
  target_sources(${target} PRIVATE engine/cuda.cpp)
  scruple_add_cuda_object(${target} any engine/cuda_any.cu)
  scruple_add_cuda_object(${target} gradient engine/cuda_gradient.cu)
  file(STRINGS optim/optim.def rules REGEX "^SCRUPLE_OPTIMIZER")
  set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS optim/optim.def)
  foreach(rule IN LISTS rules)
    string(REGEX REPLACE ".*\\(([A-Za-z]+)\\).*" "\\1" rule ${rule})
    scruple_add_cuda_object(${target} ${rule} engine/cuda_step.cu SCRUPLE_RULE=${rule})
  endforeach()
  # Static: it opens the driver when it is first asked, so the library loads where there is none.
  target_link_libraries(${target} PRIVATE CUDA::cudart_static)
endfunction()
