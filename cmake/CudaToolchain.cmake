# SPDX-License-Identifier: Apache-2.0
# Enables CUDA. Architectures: $CUDAARCHS, else sm_80 and sm_90 with PTX of the newest.

include(CheckLanguage)
check_language(CUDA)
if(NOT CMAKE_CUDA_COMPILER)
  message(FATAL_ERROR "PAGED_KV_CUDA is on, but no CUDA compiler was found: put nvcc on PATH, set "
                      "$CUDACXX, or build with PAGED_KV_CUDA=0")
endif()
if(NOT DEFINED CMAKE_CUDA_ARCHITECTURES AND NOT DEFINED ENV{CUDAARCHS})
  set(CMAKE_CUDA_ARCHITECTURES 80-real 90)
endif()
enable_language(CUDA)
set(CMAKE_CUDA_STANDARD 20)
set(CMAKE_CUDA_STANDARD_REQUIRED ON)
message(STATUS "paged_kv: CUDA ${CMAKE_CUDA_COMPILER_VERSION}, architectures "
               "${CMAKE_CUDA_ARCHITECTURES}")
find_package(CUDAToolkit REQUIRED)

# What nvcc compiles: no spills, no warnings; device code may call the core's constexpr functions.
function(paged_kv_cuda_compile_options target)
  target_compile_options(
    ${target} PRIVATE --expt-relaxed-constexpr -Werror=all-warnings -Xptxas=-warn-spills
                      -Xcompiler=-Wall,-Wextra,-Werror)
  set_target_properties(${target} PROPERTIES CUDA_VISIBILITY_PRESET hidden)
endfunction()
