// SPDX-License-Identifier: Apache-2.0
//
// Sums and maxima over the lanes of a warp. Every lane calls, every lane gets the result. The order
// of operations is fixed, so results are the same bits each time.
#pragma once

#include <cuda_runtime.h>

namespace paged_kv::cuda {

inline constexpr unsigned kFullWarp = 0xffffffffu;

// Over `kNumLanes` neighbours, a power of two.
template <int kNumLanes = 32>
[[nodiscard]] __device__ __forceinline__ float warp_sum(float value) {
#pragma unroll
  for (int distance = kNumLanes / 2; distance > 0; distance /= 2) {
    value += __shfl_xor_sync(kFullWarp, value, distance);
  }
  return value;
}

// Passes over NaN unless all are NaN.
[[nodiscard]] __device__ __forceinline__ float warp_max(float value) {
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) {
    value = fmaxf(value, __shfl_xor_sync(kFullWarp, value, distance));
  }
  return value;
}

}  // namespace paged_kv::cuda
