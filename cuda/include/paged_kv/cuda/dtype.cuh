// SPDX-License-Identifier: Apache-2.0
//
// The element types of kernels, and conversions from and to float: the only header that knows
// CUDA's names for them.
//
// from_float rounds to nearest even, once. fp8 saturates (infinity becomes the largest finite
// value); NaN stays NaN. to_float is exact.
#pragma once

#include <concepts>
#include <cstdint>

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <cuda_runtime.h>

namespace paged_kv::cuda {

using Half = __half;
using BFloat16 = __nv_bfloat16;
using Float8E4M3 = __nv_fp8_e4m3;
using Float8E5M2 = __nv_fp8_e5m2;

template <class T>
concept Float8 = std::same_as<T, Float8E4M3> || std::same_as<T, Float8E5M2>;
template <class T>
concept Element =
    std::same_as<T, float> || std::same_as<T, Half> || std::same_as<T, BFloat16> || Float8<T>;

template <Element T>
[[nodiscard]] __device__ __forceinline__ float to_float(T value) {
  if constexpr (std::same_as<T, Half>) {
    return __half2float(value);
  } else if constexpr (std::same_as<T, BFloat16>) {
    return __bfloat162float(value);
  } else {
    return static_cast<float>(value);
  }
}

template <Element T>
[[nodiscard]] __device__ __forceinline__ T from_float(float value) {
  if constexpr (std::same_as<T, Half>) {
    return __float2half_rn(value);
  } else if constexpr (std::same_as<T, BFloat16>) {
    return __float2bfloat16_rn(value);
  } else {
    return static_cast<T>(value);
  }
}

// Two fp8 values by their bits, the first in the low byte: one conversion where the device has it.
template <Float8 T>
[[nodiscard]] __device__ __forceinline__ float2 pair_to_floats(std::uint16_t bits) {
  constexpr auto kFormat = std::same_as<T, Float8E4M3> ? __NV_E4M3 : __NV_E5M2;
  const __half2_raw halves = __nv_cvt_fp8x2_to_halfraw2(bits, kFormat);
  return {__half2float(Half(__half_raw{halves.x})), __half2float(Half(__half_raw{halves.y}))};
}

}  // namespace paged_kv::cuda
