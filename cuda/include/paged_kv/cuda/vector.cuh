// SPDX-License-Identifier: Apache-2.0
//
// Runs of elements read from global memory at full width and turned into floats.
#pragma once

#include "paged_kv/cuda/dtype.cuh"
#include "paged_kv/cuda/ptx.cuh"

#include <cstddef>
#include <cstdint>

#include <cuda_runtime.h>

namespace paged_kv::cuda {

// kSize elements, as loaded: 8 bytes or a multiple of 16.
template <Element T, int kSize>
struct Vector {
  static constexpr std::size_t kBytes = kSize * sizeof(T);
  static constexpr std::size_t kAlignment = kBytes < 16 ? kBytes : 16;
  static_assert(kBytes == 8 || kBytes % 16 == 0);
  static constexpr int kNumWords = static_cast<int>(kBytes / sizeof(std::uint32_t));

  alignas(kAlignment) std::uint32_t words[kNumWords];

  // Elements that nobody writes during the kernel and that are not read again soon. `source` is
  // aligned to kAlignment.
  [[nodiscard]] static __device__ __forceinline__ Vector load(const T* source) {
    Vector result;
    if constexpr (kBytes == 8) {
      const uint2 bits = ptx::load_streaming(reinterpret_cast<const uint2*>(source));
      result.words[0] = bits.x;
      result.words[1] = bits.y;
    } else {
#pragma unroll
      for (int i = 0; i < kNumWords; i += 4) {
        const uint4 bits = ptx::load_streaming(reinterpret_cast<const uint4*>(source) + i / 4);
        result.words[i] = bits.x;
        result.words[i + 1] = bits.y;
        result.words[i + 2] = bits.z;
        result.words[i + 3] = bits.w;
      }
    }
    return result;
  }

  // Elements from `num_valid` on become zero, whatever bits they had.
  __device__ __forceinline__ void clear_from(int num_valid) {
    constexpr int kPerWord = static_cast<int>(sizeof(std::uint32_t) / sizeof(T));
#pragma unroll
    for (int i = 0; i < kNumWords; ++i) {
      const int left = num_valid - i * kPerWord;
      if (left <= 0) {
        words[i] = 0;
      } else if (left < kPerWord) {
        words[i] &= (1u << (left * 8 * static_cast<int>(sizeof(T)))) - 1u;
      }
    }
  }

  __device__ __forceinline__ void to_floats(float (&values)[kSize]) const {
    if constexpr (Float8<T>) {
#pragma unroll
      for (int i = 0; i < kSize; i += 2) {
        const auto pair = static_cast<std::uint16_t>(words[i / 4] >> (i % 4 * 8) & 0xffffu);
        const float2 both = pair_to_floats<T>(pair);
        values[i] = both.x;
        values[i + 1] = both.y;
      }
    } else {
      const T* elements = reinterpret_cast<const T*>(words);
#pragma unroll
      for (int i = 0; i < kSize; ++i) values[i] = to_float(elements[i]);
    }
  }
};

}  // namespace paged_kv::cuda
