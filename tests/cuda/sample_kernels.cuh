// SPDX-License-Identifier: Apache-2.0
//
// Small whole kernels over everything that the CUDA headers offer: compiled by nvcc
// (sample_kernels.cu) and run by the emulator (sample_kernels_test.cpp).
#pragma once

#include "paged_kv/cuda/dtype.cuh"
#include "paged_kv/cuda/ptx.cuh"
#include "paged_kv/cuda/shared.cuh"

#include <cstdint>

#include <cuda_runtime.h>

namespace paged_kv::cuda::testing {

template <class F>
__device__ __forceinline__ float warp_reduce(float value, F combine) {
#pragma unroll
  for (int offset = warpSize / 2; offset > 0; offset /= 2) {
    value = combine(value, __shfl_xor_sync(0xffffffffu, value, offset));
  }
  return value;
}

// The same for every thread of the block. Holds barriers: all threads call it.
template <class F>
__device__ float block_reduce(float value, float neutral, F combine) {
  auto& by_warp = static_shared<float[32]>();
  const int lane = static_cast<int>(threadIdx.x) % warpSize;
  const int warp = static_cast<int>(threadIdx.x) / warpSize;
  const int num_warps = static_cast<int>(blockDim.x) / warpSize;
  value = warp_reduce(value, combine);
  if (lane == 0) by_warp[warp] = value;
  __syncthreads();
  value = warp_reduce(lane < num_warps ? by_warp[lane] : neutral, combine);
  __syncthreads();  // by_warp may be used again
  return value;
}

// out[row] = softmax(in[row]); both [num_rows, row_len]. Grid: (num_rows). Block: a multiple of 32.
// Dynamic shared memory: float [row_len].
template <class T>
__global__ void __launch_bounds__(256)
    row_softmax_kernel(const T* __restrict__ in, T* __restrict__ out, int row_len) {
  constexpr float kLog2E = 1.442695041f;
  float* row = dynamic_shared<float>();
  const std::int64_t start = static_cast<std::int64_t>(blockIdx.x) * row_len;
  const int thread = static_cast<int>(threadIdx.x);
  const int num_threads = static_cast<int>(blockDim.x);

  float max_value = -INFINITY;
  for (int i = thread; i < row_len; i += num_threads) {
    row[i] = to_float(in[start + i]);
    max_value = fmaxf(max_value, row[i]);
  }
  max_value = block_reduce(max_value, -INFINITY, [](float a, float b) { return fmaxf(a, b); });

  float sum = 0.0f;
  for (int i = thread; i < row_len; i += num_threads) {
    row[i] = ptx::exp2_approx((row[i] - max_value) * kLog2E);
    sum += row[i];
  }
  sum = block_reduce(sum, 0.0f, [](float a, float b) { return a + b; });
  for (int i = thread; i < row_len; i += num_threads) {
    out[start + i] = from_float<T>(__fdividef(row[i], sum));
  }
}

// out = in / scale in fp8, 8 elements a thread; in and out are 16-byte aligned. num_vectors: of 8
// elements. Grid-stride: any grid, any block.
template <class T, Float8 CacheT>
__global__ void quantise_kernel(const T* __restrict__ in, CacheT* __restrict__ out,
                                std::int64_t num_vectors, float scale) {
  static_assert(sizeof(T) == 2);
  const std::int64_t stride = static_cast<std::int64_t>(gridDim.x) * blockDim.x;
  std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  for (; i < num_vectors; i += stride) {
    const uint4 packed = ptx::load_streaming(reinterpret_cast<const uint4*>(in) + i);
    const T* values = reinterpret_cast<const T*>(&packed);
    alignas(8) CacheT quantised[8];
#pragma unroll
    for (int j = 0; j < 8; ++j) quantised[j] = from_float<CacheT>(to_float(values[j]) / scale);
    reinterpret_cast<uint2*>(out)[i] = *reinterpret_cast<const uint2*>(quantised);
  }
}

}  // namespace paged_kv::cuda::testing
