// SPDX-License-Identifier: Apache-2.0
//
// The only way a kernel is started: cudaLaunchKernelEx, checked. Compiled by nvcc it runs on the
// GPU; compiled against cuda/simt it runs on the CPU.
#pragma once

#include "paged_kv/check.h"

#include <cstddef>
#include <stdexcept>
#include <utility>

#include <cuda_runtime.h>

namespace paged_kv::cuda {

// Throws std::runtime_error unless `error` is cudaSuccess; clears the thread's last error then.
inline void check_cuda(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  (void)cudaGetLastError();
  throw std::runtime_error(
      concat(what, ": ", cudaGetErrorName(error), ", ", cudaGetErrorString(error)));
}

// More than 48 KiB of shared memory must be asked for, kernel by kernel. What a kernel has besides
// its dynamic shared memory counts too and is not known here, so this leaves room for it.
inline constexpr std::size_t kMaxSharedBytesWithoutOptIn = 32 * 1024;

// Queues kernel(args...) on `stream`. An empty grid is an error: the caller returns early.
//
// Raises std::runtime_error: invalid configuration, or more shared memory than the device has.
template <class... Params, class... Args>
void launch(void (*kernel)(Params...), dim3 grid, dim3 block, std::size_t shared_bytes,
            cudaStream_t stream, Args&&... args) {
  if (shared_bytes > kMaxSharedBytesWithoutOptIn) {
    check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                    static_cast<int>(shared_bytes)),
               "shared memory of a kernel");
  }
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  check_cuda(cudaLaunchKernelEx(&config, kernel, std::forward<Args>(args)...), "kernel launch");
}

}  // namespace paged_kv::cuda
