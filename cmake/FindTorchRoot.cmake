# SPDX-License-Identifier: Apache-2.0
# Sets PAGED_KV_TORCH_ROOT to the folder of the torch package and checks that it is usable.
#
# find_package(Torch) is not used: it imports torch's own CUDA configuration, and code on the stable
# ABI needs nothing but the headers and libtorch_cpu. torch itself is located, never imported.

if(NOT PAGED_KV_TORCH_ROOT)
  find_package(Python 3.10 REQUIRED COMPONENTS Interpreter)
  execute_process(
    COMMAND ${Python_EXECUTABLE} -c
            "import importlib.util as u; print(u.find_spec('torch').submodule_search_locations[0])"
    OUTPUT_VARIABLE torch_root
    OUTPUT_STRIP_TRAILING_WHITESPACE
    ERROR_QUIET
    RESULT_VARIABLE torch_status)
  if(NOT torch_status EQUAL 0)
    message(FATAL_ERROR "torch was not found for ${Python_EXECUTABLE}: install torch >= 2.10, or set "
                        "-DPAGED_KV_TORCH_ROOT=<folder of the torch package>")
  endif()
  set(PAGED_KV_TORCH_ROOT "${torch_root}" CACHE PATH "Folder of the torch package" FORCE)
endif()

if(NOT EXISTS "${PAGED_KV_TORCH_ROOT}/include/torch/csrc/stable/library.h")
  message(FATAL_ERROR "${PAGED_KV_TORCH_ROOT} has no stable-ABI headers: torch >= 2.10 is needed")
endif()
message(STATUS "paged_kv: torch headers from ${PAGED_KV_TORCH_ROOT}")

# paged_kv_stable_abi_library(target): a library of torch ops on the stable ABI of the oldest torch
# that it may meet, 2.10.
function(paged_kv_stable_abi_library target)
  target_include_directories(${target} SYSTEM PRIVATE ${PAGED_KV_TORCH_ROOT}/include)
  target_compile_definitions(${target} PRIVATE TORCH_TARGET_VERSION=0x020a000000000000)
  target_link_libraries(${target} PRIVATE ${PAGED_KV_TORCH_ROOT}/lib/libtorch_cpu.so)
  target_precompile_headers(${target} PRIVATE <torch/csrc/stable/library.h>
                            <torch/csrc/stable/tensor.h>)
endfunction()
