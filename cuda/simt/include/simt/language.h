// SPDX-License-Identifier: Apache-2.0
//
// CUDA's function and variable qualifiers. PAGED_KV_SIMT tells sources that they are emulated.
#pragma once

#define PAGED_KV_SIMT 1

#define __global__
#define __device__
#define __host__
#define __constant__
#define __managed__
#define __grid_constant__
#define __launch_bounds__(...)
#define __forceinline__ inline __attribute__((always_inline))
#define __align__(num_bytes) __attribute__((aligned(num_bytes)))
// Not definable here: such a variable must be found and poisoned before each block. Kernels call
// static_shared<T>() and dynamic_shared<T>() of paged_kv/cuda/shared.cuh.
#define __shared__ use_static_shared_of_paged_kv_cuda_shared_cuh_instead_of__shared__
